"""Measures the toolkit against its limits and, with --peer, against nanoGPT, in alternation in one run.

In:  what to measure, the model's shape, a checkout of nanoGPT. Data and checkpoints are made in a temporary folder.
Out: a table: median, the peers' medians and the ratios to them, and the limit that the machine sets.

    python -m tools.benchmark                                        # all of it, about half an hour on two cores
    python -m tools.benchmark --what=train,loss --peer=../nanoGPT
    python -m tools.benchmark --what=train,generate --device=cuda --dtype=bfloat16 --n_layer=24 --n_head=16 \
        --n_embd=1024 --block_size=1024 --peer=../nanoGPT

    OMP_NUM_THREADS=1 python -m tools.benchmark --what=train,loss,generate --clock=cpu      # on a machine in use

Rates count, so more is better, but for what is given in seconds or GiB. What is compared runs by turns, in rotated order:
load on the machine falls on all alike, and ratios hold where single figures do not.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from configurator import UserError, answer_help, load_config, program

SECTIONS = ("train", "loss", "memory", "generate", "prepare", "start", "loader", "checkpoint")


@dataclasses.dataclass(frozen=True)
class BenchmarkConfig:
    """Settings of the benchmark."""

    what: str = "all"  # all, or some of train,loss,memory,generate,prepare,start,loader,checkpoint
    peer: str | None = None  # a checkout of nanoGPT to measure against
    rounds: int = 5  # measurements of each, of which the median counts
    clock: Literal["wall", "cpu"] = "wall"  # cpu = this process's processor seconds, for a CPU that others use as well
    device: str = "cpu"  # cpu, cuda
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # of matrix products in training
    compile: bool = True  # torch.compile, for both
    # the model of the training step; nanoGPT's bias and GELU are used for both
    n_layer: int = 6  # blocks
    n_head: int = 6  # attention heads in a block
    n_embd: int = 384  # width
    block_size: int = 256  # context, in tokens
    batch_size: int = 8  # windows in a step
    vocabularies: str = "50304,4096"  # rows of the embedding, each measured
    # the other sections
    new_tokens: int = 256  # to generate with GPT-2 small
    megabytes: int = 60  # of text to prepare
    loader_megabytes: int = 2000  # of token file to read windows from

    def __post_init__(self) -> None:
        unknown = [name for name in self.what.split(",") if name not in ("all", *SECTIONS)]
        if unknown:
            raise UserError(f"what={self.what}: {unknown[0]!r} is none of all, {', '.join(SECTIONS)}")
        if not all(part.strip().isdigit() for part in self.vocabularies.split(",")):
            raise UserError(f"vocabularies={self.vocabularies!r} is not a list of whole numbers such as 50304,4096")
        for key in ("rounds", "batch_size", "block_size", "new_tokens", "megabytes", "loader_megabytes"):
            if getattr(self, key) < 1:
                raise UserError(f"{key}={getattr(self, key)} must be 1 or more")

    @property
    def timer(self) -> Callable[[], float]:
        """The clock for work that this process does itself."""
        return time.process_time if self.clock == "cpu" else time.perf_counter

    @property
    def sections(self) -> list[str]:
        """What to measure, in the table's order."""
        return [name for name in SECTIONS if self.what == "all" or name in self.what.split(",")]


@dataclasses.dataclass
class Row:
    """One line of the table. `others` are peers and limits, by name, in the unit of `ours`."""

    name: str
    unit: str
    ours: float
    others: dict[str, float]
    note: str = ""

    def __str__(self) -> str:
        """What it is, the figure, and for each other one its figure and ours over it."""
        against = "; ".join(f"{name} {shown(value)}: {self.ours / value:.2f} ×" for name, value in self.others.items())
        return f"{self.name:<44} {shown(self.ours):>9} {self.unit:<9} {against}{self.note and f'  ({self.note})'}"


def shown(value: float) -> str:
    """A number with three digits that count."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def by_turns(tasks: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Medians of what each task returns; each runs once for nothing, then all by turns, each round by another first."""
    for task in tasks.values():
        task()
    names, figures = list(tasks), {name: [] for name in tasks}
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            figures[name].append(tasks[name]())
    return {name: statistics.median(values) for name, values in figures.items()}


def seconds_of(
    work: Callable[[], object], wait: Callable[[], None] = lambda: None, clock: Callable[[], float] = time.perf_counter
) -> float:
    """How long a piece of work takes, until `wait` says that the device has done it."""
    wait()
    started = clock()
    work()
    wait()
    return clock() - started


def waiter(kind: str) -> Callable[[], None]:
    """What returns once the device has done all it was given."""
    import torch

    return torch.cuda.synchronize if kind == "cuda" else lambda: None


@program
def main(argv: list[str]) -> int:
    """Measures what is asked for and prints the table as it comes."""
    config, _ = load_config(BenchmarkConfig, argv, __doc__)
    if config.peer and not (Path(config.peer) / "model.py").is_file():
        raise UserError(f"peer={config.peer} is no checkout of nanoGPT: it has no model.py")
    import torch

    from tools import benchmark_cases

    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {config.rounds} rounds, device {config.device}"
    )
    with tempfile.TemporaryDirectory() as folder:
        for section in config.sections:
            for row in getattr(benchmark_cases, f"measure_{section}")(config, Path(folder)):
                print(row, flush=True)
    return 0


if __name__ == "__main__":
    answer_help(BenchmarkConfig, sys.argv[1:], __doc__)
    sys.exit(main())
