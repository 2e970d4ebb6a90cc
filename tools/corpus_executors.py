"""Runs one stage of tools.clean_corpus on this machine, on a Slurm cluster or on Ray: datatrove's executors, watched.

In:  a pipeline of datatrove steps, and how many tasks it has.
Out: all tasks done, or a UserError that names the log. A task that is done is never run again: a stopped run goes on.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import multiprocess
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.executor.slurm import SlurmPipelineExecutor
from datatrove.pipeline.base import PipelineStep
from loguru import logger

from configurator import UserError
from progress import progress_bar

ROOT = Path(__file__).resolve().parent.parent
POLL_SECONDS = 1.0
RAY_ATTEMPTS = 5  # of a stage; each goes on where the one before it hung


class QuietLocal(LocalPipelineExecutor):
    """datatrove's local executor without its manager process, which outlives a run that is killed, and without its noise."""

    def run(self) -> None:
        """Runs the tasks that are not done, each on a fresh copy of the pipeline. Raises what the first fault raised."""
        self.save_executor_as_json()
        ranks = self.get_incomplete_ranks()
        if self.workers == 1:
            for rank in ranks:
                copy.deepcopy(self).run_quietly(rank)
        elif ranks:
            start = multiprocess.get_context(self.start_method)
            with start.Pool(self.workers, start_worker) as pool:
                for _ in pool.imap_unordered(self.run_quietly, ranks):
                    pass

    def run_quietly(self, rank: int) -> None:
        """Runs one task; its log goes to its file alone."""
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
            try:
                self._run_for_rank(rank, local_rank=1)
            finally:
                logger.remove()


def start_worker() -> None:
    """Readies a worker: leaves Ctrl-C to the parent, and ends when that is gone, even by kill -9: its next call would
    write the same files.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocess.parent_process()
    threading.Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()


class PlainSlurm(SlurmPipelineExecutor):
    """datatrove's Slurm executor without its extra job for statistics, with this Python and this repository."""

    def launch_merge_stats(self) -> None:
        """Nothing: the tool has its own counts."""


class Stages:
    """Runs stages one after another; `done` counts the tasks that have finished."""

    def __init__(self, logs: Path, executor: str, workers: int, **cluster: Any) -> None:
        self.logs, self.executor, self.workers, self.cluster = logs, executor, workers, cluster
        self.seconds: dict[str, float] = {}
        logger.remove()

    def run(self, name: str, pipeline: list[PipelineStep], tasks: int) -> None:
        """Runs one stage to its end. Raises UserError with the fault of the first task that failed."""
        started = time.monotonic()
        folder = self.logs / name
        runner = {"local": self._run_local, "slurm": self._run_slurm, "ray": self._run_ray}[self.executor]
        with show_progress(name, tasks, lambda: self.done(folder)):
            runner(name, folder, pipeline, tasks)
        self.seconds[name] = round(time.monotonic() - started, 2)
        if self.done(folder) < tasks:
            raise UserError(f"{name}: {tasks - self.done(folder)} of {tasks} tasks did not finish: see {folder}/logs")

    def done(self, folder: Path) -> int:
        """How many tasks of a stage have finished."""
        completions = folder / "completions"
        return sum(1 for _ in completions.iterdir()) if completions.is_dir() else 0

    def _run_local(self, name: str, folder: Path, pipeline: list[PipelineStep], tasks: int) -> None:
        executor = QuietLocal(pipeline, tasks=tasks, workers=min(self.workers, tasks), logging_dir=str(folder))
        try:
            executor.run()
        except UserError:
            raise
        except Exception as error:  # of any library below
            raise UserError(f"{name} failed: {type(error).__name__}: {error} (see {folder}/logs)") from error

    def _run_slurm(self, name: str, folder: Path, pipeline: list[PipelineStep], tasks: int) -> None:
        python = shlex.quote(sys.executable)
        launch = f'launch_pickled_pipeline() {{ {python} -m datatrove.tools.launch_pickled_pipeline "$@"; }}'
        executor = PlainSlurm(
            pipeline,
            tasks=tasks,
            workers=self.workers,
            time=self.cluster["time"],
            partition=self.cluster["partition"],
            mem_per_cpu_gb=self.cluster["memory_gb"],
            job_name=f"clean_{name}",
            qos="",
            mail_type="NONE",
            requeue=False,
            with_srun=False,  # a task is one process; and so no entry script of an environment is needed
            env_command=f"export PYTHONPATH={shlex.quote(str(ROOT))}\n{launch}",
            logging_dir=str(folder.absolute()),
        )
        try:
            executor.run()
        except (OSError, subprocess.CalledProcessError) as error:
            raise UserError(f"sbatch does not take the job ({error}): is this a node that may submit?") from error
        while executor.job_id != -1 and slurm_job_waits(str(executor.job_id)):
            time.sleep(POLL_SECONDS)
        time.sleep(POLL_SECONDS)  # a shared file system may show the last file a little late

    def _run_ray(self, name: str, folder: Path, pipeline: list[PipelineStep], tasks: int) -> None:
        """In a child process that is ended when no task finishes for a while: datatrove's executor was seen to hang."""
        if importlib.util.find_spec("ray") is None:
            raise UserError("--executor=ray needs Ray: pip install ray")
        start = multiprocessing.get_context("spawn")
        for _ in range(RAY_ATTEMPTS):
            arguments = (pipeline, tasks, self.workers, self.cluster, str(folder))
            child = start.Process(target=run_on_ray, args=arguments, daemon=True)
            child.start()
            last, seen = time.monotonic(), self.done(folder)
            while child.is_alive() and time.monotonic() - last < 60 * self.cluster["stall_minutes"]:
                child.join(POLL_SECONDS)
                if self.done(folder) > seen:
                    last, seen = time.monotonic(), self.done(folder)
            stalled = child.is_alive()
            if stalled:
                child.terminate()
                child.join()
            if self.done(folder) == tasks or not stalled:
                return
        raise UserError(f"{name} hung {RAY_ATTEMPTS} times on Ray, each for {self.cluster['stall_minutes']} minutes")


def run_on_ray(pipeline: list[PipelineStep], tasks: int, workers: int, cluster: dict[str, Any], folder: str) -> None:
    """Runs one stage on Ray, a task a job, in this process."""
    import ray
    from datatrove.executor.ray import RayPipelineExecutor

    logger.remove()
    ray.init(
        address=os.environ.get("RAY_ADDRESS"),
        include_dashboard=False,
        logging_level="ERROR",
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}},
    )
    RayPipelineExecutor(
        pipeline,
        tasks=tasks,
        workers=workers,
        tasks_per_job=1,
        mem_per_cpu_gb=cluster["memory_gb"],
        time=60 * cluster["stall_minutes"],
        logging_dir=folder,
    ).run()


def slurm_job_waits(job: str) -> bool:
    """Whether Slurm still has a job, or any task of its array, waiting or running."""
    shown = subprocess.run(["squeue", "-h", "-j", job], capture_output=True, text=True)
    return shown.returncode == 0 and bool(shown.stdout.strip())


@contextlib.contextmanager
def show_progress(label: str, tasks: int, done: Callable[[], int]) -> Iterator[None]:
    """A bar of finished tasks while the block runs."""
    over = threading.Event()
    with progress_bar(label, " tasks", tasks) as bar:

        def watch() -> None:
            while not over.wait(POLL_SECONDS):
                bar.update(done() - bar.n)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()
            bar.update(done() - bar.n)
