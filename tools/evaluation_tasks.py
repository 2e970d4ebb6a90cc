"""Tasks: what EleutherAI's harness (lm-eval) asks of our model, from its own collection or from local files.

In:  a `Subject`, and tasks: names of the harness, a YAML file of its kind, or a JSONL file of multiple-choice questions.
Out: a row of numbers for each task and metric.

A JSONL row is {"question": text, "choices": [text, ...], "answer": place from 0, a letter, or the choice itself}.
"""

from __future__ import annotations

import difflib
import json
import logging
import math
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from configurator import UserError
from tools.evaluation_harness import HarnessModel
from tools.scoring import Subject

QUESTION = "Question: {{question}}\nAnswer:"


def find_tasks(names: str) -> tuple[list[Any], Any]:
    """The tasks named, commas between, as the harness takes them, and its collection. Raises UserError for what cannot be
    found or read, before anything is computed.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    asked = [name.strip() for name in names.split(",") if name.strip()]
    if not asked:
        raise UserError(f"--tasks={names} names no task")
    wanted = [multiple_choice(Path(name)) if name.endswith(".jsonl") else check_path(name) for name in asked]
    return wanted, task_manager([task for task in wanted if isinstance(task, str)])


def run_tasks(
    subject: Subject, tasks: tuple[list[Any], Any], batch_size: int, num_fewshot: int | None, limit: int | None
) -> list[dict[str, Any]]:
    """Runs the tasks that `find_tasks` found and returns a row for each task and metric. Raises UserError."""
    import datasets
    from lm_eval import evaluator, simple_evaluate

    datasets.disable_progress_bars()
    evaluator.get_git_commit_hash = lambda: None  # of the current folder: git complains where that is no repository
    wanted, manager = tasks
    try:
        found = simple_evaluate(
            HarnessModel(subject, batch_size),
            tasks=wanted,
            num_fewshot=num_fewshot,
            limit=limit,
            task_manager=manager,
            log_samples=False,
            bootstrap_iters=1000,
        )
    except Exception as error:  # of a task's data or template, from half a dozen libraries
        ours = any(
            frame.filename.endswith("evaluation_harness.py") for frame in traceback.extract_tb(error.__traceback__)
        )
        if ours or isinstance(error, UserError):
            raise
        names = ",".join(task if isinstance(task, str) else task["task"] for task in wanted)
        reason = " ".join(str(error).split())[:300]
        hint = "names of lm-eval fetch their data from the hub; a YAML or JSONL file with local data needs no network"
        raise UserError(f"--tasks={names}: {type(error).__name__}: {reason} ({hint})") from error
    return rows_of(found)


def task_manager(names: list[str]) -> Any:
    """The harness's collection, read when a name asks for it (its 14,000 files take seconds). Raises UserError."""
    from lm_eval.tasks import TaskManager

    named = [name for name in names if Path(name).suffix not in (".yaml", ".yml")]
    manager = TaskManager(include_defaults=bool(named))
    for name in named:
        if name not in manager.all_tasks:
            near = ", ".join(difflib.get_close_matches(name, manager.all_tasks, n=3))
            raise UserError(f"--tasks: lm-eval has no task {name!r}" + (f", but {near}" if near else ""))
    return manager


def check_path(name: str) -> str:
    """The name of a task; a file must be there."""
    if name.endswith((".yaml", ".yml")) and not Path(name).is_file():
        raise UserError(f"--tasks={name}: there is no such file")
    return name


def rows_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each number in the harness's results: task, metric, value, standard error, few-shot examples, size."""
    rows = []
    for task, numbers in found["results"].items():
        for key, value in numbers.items():
            metric, _, filtered = key.partition(",")
            if not isinstance(value, (int, float)) or metric.endswith("_stderr") or not filtered:
                continue
            error = numbers.get(f"{metric}_stderr,{filtered}")
            error = float(error) if isinstance(error, (int, float)) and math.isfinite(error) else None
            size = (found.get("n-samples") or {}).get(task, {})
            row = {"task": task, "metric": metric + ("" if filtered == "none" else f" ({filtered})")}
            row |= {"value": float(value), "stderr": error, "few_shot": (found.get("n-shot") or {}).get(task)}
            rows.append(row | {"questions": size.get("effective")})
    return rows


def multiple_choice(path: Path) -> dict[str, Any]:
    """A task of the harness from a JSONL file of questions. Raises UserError naming the line at fault."""
    import datasets

    if not path.is_file():
        raise UserError(f"--tasks={path}: there is no such file")
    rows = [read_question(path, number, line) for number, line in numbered_lines(path)]
    if not rows:
        raise UserError(f"{path} holds no question")
    return {
        "task": path.stem,
        "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(rows)},
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": QUESTION,
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "metric_list": [
            {"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")
        ],
    }


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a file that hold something, with their numbers."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 at byte {error.start:,}: save it as UTF-8") from error
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, line


def read_question(path: Path, number: int, line: str) -> dict[str, Any]:
    """One question, its answer as a place from 0."""
    where = f"{path}, line {number}"
    try:
        row = json.loads(line)
        question, choices, answer = row["question"], row["choices"], row["answer"]
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{where} is not {{question, choices, answer}}: {type(error).__name__} {error}") from error
    if not isinstance(question, str) or not isinstance(choices, list) or len(choices) < 2:
        raise UserError(f"{where}: question must be text, and choices a list of two or more")
    if not all(isinstance(choice, str) and choice for choice in choices):
        raise UserError(f"{where}: each of the choices must be text, {choices!r} are not")
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[: len(choices)]
    if isinstance(answer, str):
        place = choices.index(answer) if answer in choices else letters.find(answer.strip().upper() or "?")
    else:
        place = answer if isinstance(answer, int) and not isinstance(answer, bool) else -1
    if not 0 <= place < len(choices):
        raise UserError(f"{where}: the answer {answer!r} is neither a place from 0 to {len(choices) - 1}, nor a choice")
    return {"question": question, "choices": choices, "answer": place}
