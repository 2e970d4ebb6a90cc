"""The tables of an evaluation: what stands in them, for the console and for the report alike.

In:  the results of one model or of several, as evaluation.json holds them.
Out: `Table`s of text, a column for each model; `print_tables` shows them on the console.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

MISSING = "–"


@dataclasses.dataclass(frozen=True)
class Table:
    """A table: title, head, rows of cells, and lines below it."""

    title: str
    head: list[str]
    rows: list[list[str]]
    notes: list[str]
    name: str  # for links and tests


def number(value: float | None, digits: int = 2) -> str:
    """A number for people, `inf` where it is beyond a float."""
    if value is None:
        return MISSING
    return "inf" if math.isinf(value) else f"{value:,.{digits}f}"


def percent(value: float | None) -> str:
    """A share in percent, with as many digits as it needs."""
    return MISSING if value is None else f"{value:.2%}" if 0 < abs(value) < 0.1 else f"{value:.1%}"


def whole(value: float | None) -> str:
    """A count."""
    return MISSING if value is None else f"{value:,.0f}"


PERPLEXITY: list[tuple[str, str, Callable[[Any], str]]] = [
    ("perplexity per word", "word_perplexity", number),
    ("perplexity per token", "token_perplexity", number),
    ("perplexity per byte", "byte_perplexity", lambda v: number(v, 4)),
    ("bits per byte (compares across tokenizers)", "bits_per_byte", lambda v: number(v, 4)),
    ("loss, nats per token", "loss", lambda v: number(v, 4)),
    ("tokens scored", "tokens", whole),
    ("words", "words", whole),
    ("bytes", "bytes", whole),
    ("documents", "documents", whole),
    ("tokens per word", "tokens_per_word", number),
    ("tokens per second", "tokens_per_second", whole),
]
GENERATION: list[tuple[str, str, Callable[[Any], str]]] = [
    ("repeated 2-grams", "repeated_2", percent),
    ("repeated 3-grams", "repeated_3", percent),
    ("repeated 4-grams", "repeated_4", percent),
    ("repeated 4-grams, worst sample", "repeated_4_worst", percent),
    ("distinct-1", "distinct_1", percent),
    ("distinct-2", "distinct_2", percent),
    ("distinct-3", "distinct_3", percent),
    ("distinct-4", "distinct_4", percent),
    ("8-grams that stand in train.bin", "copied_8", percent),
    ("8-grams that stand in train.bin, worst sample", "copied_8_worst", percent),
    ("longest copied span, tokens", "longest_copy", whole),
    ("words that training does not know", "odd_words", percent),
    ("ended by itself", "ended_by_itself", percent),
    ("tokens in a sample", "mean_tokens", whole),
]
CORPUS: list[tuple[str, str, Callable[[Any], str]]] = [
    ("held-out documents", "documents", whole),
    ("training documents", "train_documents", whole),
    ("equal to a training document", "exact_duplicates", whole),
    ("nearly equal to one, or part of it", "near_duplicates", whole),
    ("share of the tokens in these", "duplicate_tokens", percent),
    ("vocabulary: divergence from training, bits", "vocabulary_divergence", lambda v: number(v, 4)),
    ("vocabulary: the same of as much training text, bits", "vocabulary_divergence_by_chance", lambda v: number(v, 4)),
    ("tokens that training never saw", "unseen_tokens", percent),
    ("length: distance from training (0 to 1)", "length_distance", lambda v: number(v, 3)),
    ("length: distance that chance passes once in a hundred", "length_distance_by_chance", lambda v: number(v, 3)),
]


def make_tables(results: list[dict[str, Any]], names: list[str]) -> list[Table]:
    """All tables that there is something for, a column for each model."""
    tables = [perplexity_table(results, names), task_table(results, names)]
    tables += [generation_table(results, names), corpus_table(results, names)]
    return [table for table in tables if table is not None]


def latest(result: dict[str, Any], kind: str) -> dict[str, Any] | None:
    """The newest entry of a kind."""
    return (result.get(kind) or [None])[-1]


def columns(
    entries: list[tuple[str, dict[str, Any]]], wanted: list[tuple[str, str, Callable[[Any], str]]]
) -> list[list[str]]:
    """A row for each quantity that an entry has, a cell for each entry."""
    rows = [
        (label, key, show) for label, key, show in wanted if any(entry.get(key) is not None for _, entry in entries)
    ]
    return [[label, *(show(entry.get(key)) for _, entry in entries)] for label, key, show in rows]


def perplexity_table(results: list[dict[str, Any]], names: list[str]) -> Table | None:
    """Perplexities with their rules as rows; those of several models stand side by side for the newest entry of each."""
    entries = [
        (name if len(results) > 1 else entry["source"], entry)
        for result, name in zip(results, names, strict=True)
        for entry in ((result.get("perplexity") or [])[-1:] if len(results) > 1 else result.get("perplexity") or [])
    ]
    if not entries:
        return None
    rows = columns(entries, PERPLEXITY)
    keys = list(dict.fromkeys(key for _, entry in entries for key in entry["rules"]))
    rows += [[f"rule: {key}", *(entry["rules"].get(key, MISSING) for _, entry in entries)] for key in keys]
    notes = []
    different = [key for key in keys if len({entry["rules"].get(key) for _, entry in entries}) > 1]
    if len(results) > 1 and different:
        notes.append(f"The rules differ ({', '.join(different)}): these numbers do not compare.")
    if any(math.isinf(entry.get(key) or 0) for _, entry in entries for _, key, _ in PERPLEXITY):
        notes.append("inf: beyond what a number can hold, for the loss is very high.")
    unknown = sum(entry.get("unknown") or 0 for _, entry in entries)
    if unknown:
        notes.append(f"{unknown:,} tokens stand for text that the tokenizer does not know: they make the loss too low.")
    return Table("Perplexity", ["", *(name for name, _ in entries)], rows, notes, "perplexity")


def task_table(results: list[dict[str, Any]], names: list[str]) -> Table | None:
    """Task scores with their standard errors, a row for each task and metric."""
    rows: dict[tuple[str, str], list[str]] = {}
    details: dict[tuple[str, str], list[str]] = {}
    for place, result in enumerate(results):
        for row in result.get("tasks") or []:
            key = (row["task"], row["metric"])
            error = f" ± {row['stderr']:.4f}" if row.get("stderr") is not None else ""
            rows.setdefault(key, [MISSING] * len(results))[place] = number(row["value"], 4) + error
            details.setdefault(key, [whole(row.get("questions")), whole(row.get("few_shot"))])
    if not rows:
        return None
    heads = ["task", "metric", *(names if len(names) > 1 else ["value"]), "questions", "shots"]
    cells = [[*key, *values, *details[key]] for key, values in rows.items()]
    return Table("Tasks", heads, cells, ["± is the standard error; shots are the examples before a question."], "tasks")


def generation_table(results: list[dict[str, Any]], names: list[str]) -> Table | None:
    """What samples repeat and copy, beside held-out text where there is one model alone."""
    entries = []
    for result, name in zip(results, names, strict=True):
        generation = latest(result, "generation")
        if generation:
            found = generation["table"] if len(results) == 1 else {name: generation["table"]["samples"]}
            entries += list(found.items())
    if not entries:
        return None
    rules = latest(next(r for r in results if r.get("generation")), "generation")["rules"]
    said = ", ".join(f"{key} {value}" for key, value in rules.items())
    notes = [f"Counted in tokens, prompts left out. {said}."]
    notes += [f"Longest copy of {n}: “{e['longest_copy_text']}”" for n, e in entries if e.get("longest_copy_text")]
    return Table("Generated text", ["", *(n for n, _ in entries)], columns(entries, GENERATION), notes, "generation")


def corpus_table(results: list[dict[str, Any]], names: list[str]) -> Table | None:
    """Held-out text against training text."""
    entries = [(name if len(names) > 1 else (latest(r, "corpus") or {}).get("split", name), latest(r, "corpus"))
               for r, name in zip(results, names, strict=True) if latest(r, "corpus")]  # fmt: skip
    if not entries:
        return None
    rows = columns(entries, CORPUS)
    for q, label in (("p10", "shortest tenth"), ("p50", "median"), ("p90", "longest tenth")):
        cells = []
        for _, entry in entries:
            train, own = entry["lengths"]["train"][q], entry["lengths"][entry["split"]][q]
            cells.append(f"{own:,} (training {train:,})")
        rows.append([f"document length, {label}, tokens", *cells])
    notes = [f"{e['kind']}: “{e['text']}…”" for _, entry in entries for e in entry.get("examples", [])]
    return Table("Held-out against training text", ["", *(n for n, _ in entries)], rows, notes, "corpus")


def print_tables(results: list[dict[str, Any]], names: list[str]) -> None:
    """Shows the tables on the console."""
    for table in make_tables(results, names):
        widths = [max(len(row[i]) for row in [table.head, *table.rows]) for i in range(len(table.head))]
        print(f"\n{table.title}")
        for row in [table.head, *table.rows]:
            print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        for note in table.notes:
            print("  " + " ".join(note.split()))
