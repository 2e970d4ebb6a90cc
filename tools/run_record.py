"""What is known of a finished run: its metrics, samples and settings, its evaluations, and the warning signs in these.

In:  a run folder (metrics.jsonl, samples.txt, config.json of train.py) and evaluation.json, which is written here.
Out: a `RunRecord`; `signs` are the warning signs of a finished run, each with what was seen, causes and remedies.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from pathlib import Path
from typing import Any

from configurator import UserError
from dataset import write_atomically
from diagnostics import REPEATED, Warning, series
from progress import perplexity, read_metrics
from tools.generation import PEOPLE

FORMAT_VERSION = 1
FELL = 0.9  # of the first validation loss, or less, at the best one: the loss has fallen
ROSE = 1.05  # times the lowest perplexity: windows are fixed, so noise is under 1 %
ODD = 0.2  # share of unknown words above the one in held-out text
TIMES_PEOPLE = 3  # repeats above those of held-out text
TOKENS_PER_WORD, CHARACTERS_PER_WORD = 1.4, 15  # a script without spaces has long "words", and no such rule
ENOUGH_WORDS = 1000  # for their tokens to say something of the tokenizer
SAMPLE_HEAD = re.compile(r"^=== step ([\d,]+), validation loss (\S+) ===$", re.MULTILINE)

ADVICE = {
    "incoherent": "Usual cause: documents that stand in the corpus many times, which are learnt by heart while the rest is "
    "not. Remove exact and near duplicates, prepare anew with another --dataset=NAME, and train again; with none, a larger "
    "--max_iters or model",
    "perplexity_rose": "Usual cause: the corpus was read too often for this model. my_own_llm.pt is the model of the "
    "minimum, use that; next time --patience=5 or a smaller --max_iters, --dropout=0.2, or more text",
    "repetition": "Usual causes: a corpus of little variety (boilerplate, lists, one source), or a tokenizer that cuts its "
    "words to pieces. Add other text and remove boilerplate, train the tokenizer on the corpus (prepare.py "
    "--tokenizer=train), and sample with --temperature=0.8 --top_k=40",
    "tokens_per_word": "Usual causes: a tokenizer made for other text, or a small vocabulary; the context holds less and "
    "each word costs more. "
    "Train one on this corpus: prepare.py --tokenizer=train --vocab_size=32000, into another --dataset=NAME",
    "leak": "These documents make the loss too low. Remove duplicates before the corpus is split, and prepare it anew",
    "unknown_tokens": "Usual cause: characters that the tokenizer never saw. Use byte-level BPE: prepare.py "
    "--tokenizer=train, or GPT-2's",
}


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """A run: its folder (or the model's path, for one without), results of evaluations, history and samples."""

    folder: Path
    results: dict[str, Any]
    history: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    samples: list[tuple[int, str, str]] = dataclasses.field(default_factory=list)  # step, validation loss, text
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """What the run is called."""
        return str(self.folder)

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The events of one kind."""
        return [event for event in self.history if event["event"] == kind]

    def signs(self) -> list[Warning]:
        """The warning signs of a finished run."""
        checks = (incoherent, perplexity_rose, repetition, tokens_per_word, leak, unknown_tokens)
        step = max((event["iter"] for event in self.history), default=0)
        found = {check.__name__: check(self) for check in checks}
        return [Warning(kind, step, f"{saw}. {ADVICE[kind]}") for kind, saw in found.items() if saw]


def read_run(folder: Path) -> RunRecord:
    """The record of a run folder. Raises UserError where there is nothing to read."""
    metrics, config, samples = (folder / name for name in ("metrics.jsonl", "config.json", "samples.txt"))
    results = read_results(folder)
    if not metrics.is_file() and not results:
        raise UserError(f"{folder} is no run folder: it has neither metrics.jsonl nor evaluation.json")
    history = read_metrics(metrics) if metrics.is_file() else []
    try:
        settings = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    except ValueError as error:
        raise UserError(f"{config} is damaged: {error}") from error
    text = samples.read_text(encoding="utf-8") if samples.is_file() else ""
    return RunRecord(folder, results, history, split_samples(text), settings)


def split_samples(text: str) -> list[tuple[int, str, str]]:
    """(step, validation loss, text) of each sample in a samples.txt."""
    heads = list(SAMPLE_HEAD.finditer(text))
    ends = [head.start() for head in heads[1:]] + [len(text)]
    return [
        (int(head[1].replace(",", "")), head[2], text[head.end() : end].strip("\n"))
        for head, end in zip(heads, ends, strict=False)  # no head, one end
    ]


def read_results(folder: Path) -> dict[str, Any]:
    """What evaluation.json holds; nothing where there is none. Raises UserError for a damaged one."""
    path = folder / "evaluation.json"
    if not path.is_file():
        return {}
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        if results["format_version"] != FORMAT_VERSION:
            raise UserError(f"{path} has format {results['format_version']}, this version reads {FORMAT_VERSION}")
        _ = results["about"]["checkpoint"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}): remove it, and evaluate again") from error
    return as_numbers(results)


def add_results(folder: Path, new: dict[str, Any]) -> str | None:
    """Adds results to evaluation.json. The same measurement replaces the older one; those of other weights go to a file of
    their own, and a line that says so is returned.
    """
    old = read_results(folder)
    same = old.get("about", {}).get("step") == new["about"]["step"]
    note = None
    if old and (not same or Path(old["about"]["checkpoint"]).name != Path(new["about"]["checkpoint"]).name):
        was = old["about"]
        kept = folder / f"evaluation.{Path(was['checkpoint']).stem}-{was['step']}.json"
        os.replace(folder / "evaluation.json", kept)
        note = f"the results of {was['checkpoint']}, step {was['step']:,}, are in {kept} now"
        old = {}
    results = old | new | {"format_version": FORMAT_VERSION}
    for kind, identity in (
        ("perplexity", lambda entry: (entry["source"], json.dumps(entry["rules"]))),
        ("tasks", lambda entry: (entry["task"], entry["metric"], entry["few_shot"], entry["questions"])),
        ("corpus", lambda entry: entry["split"]),
    ):
        entries = {identity(entry): entry for entry in old.get(kind, [])}
        for entry in new.get(kind, []):
            entries.pop(identity(entry), None)
            entries[identity(entry)] = entry  # newest last
        if entries:
            results[kind] = list(entries.values())
    text = json.dumps(as_text(results), indent=1, ensure_ascii=False, allow_nan=False)
    write_atomically(folder / "evaluation.json", (text + "\n").encode())
    return note


def as_text(value: Any) -> Any:
    """A value whose infinite numbers are text, for which JSON has no word."""
    if isinstance(value, dict):
        return {key: as_text(item) for key, item in value.items()}
    if isinstance(value, list):
        return [as_text(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def as_numbers(value: Any) -> Any:
    """The reverse of `as_text`."""
    if isinstance(value, dict):
        return {key: as_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [as_numbers(item) for item in value]
    return float(value) if value in ("inf", "-inf", "nan") else value


# --- the signs: what was seen, or None ------------------------------------------------------------------------------


def generated(run: RunRecord) -> tuple[dict[str, Any], dict[str, Any]]:
    """The figures of the model's samples, and those of held-out text, where they were measured."""
    table = (run.results.get("generation") or [{}])[-1].get("table") or {}
    return table.get("samples", {}), table.get(PEOPLE, {})


def repeats(run: RunRecord) -> tuple[float, float]:
    """Share of repeated 4-grams in samples, measured or else the last of training, and the share that is too much."""
    samples, people = generated(run)
    last = [share for _, share in series(run.history, "eval", "repetition")[-1:]]
    share = samples.get("repeated_4", last[0] if last else 0.0)
    return share, max(REPEATED, TIMES_PEOPLE * people.get("repeated_4", 0.0))


def incoherent(run: RunRecord) -> str | None:
    """The loss fell, but samples are made of words that nobody knows, or go round in circles."""
    losses = [val for _, val in series(run.history, "eval", "val_loss")]
    if len(losses) < 2 or min(losses) > FELL * losses[0]:
        return None
    samples, people = generated(run)
    odd, usual = samples.get("odd_words", 0.0), people.get("odd_words", 0.0)
    fell = f"the validation loss fell from {losses[0]:.2f} to {min(losses):.2f}, but"
    if odd > usual + ODD:
        return f"{fell} {odd:.0%} of the words in samples are none of the corpus ({usual:.0%} in held-out text)"
    share, limit = repeats(run)
    copies = (run.results.get("corpus") or [{}])[-1]
    doubled = copies.get("exact_duplicates", 0) + copies.get("near_duplicates", 0)
    if share > limit and doubled:
        return (
            f"{fell} {share:.0%} of the 4-grams in samples are repeats, and {doubled:,} held-out documents are copies"
        )
    return None


def perplexity_rose(run: RunRecord) -> str | None:
    """The perplexity at the end is above its minimum."""
    evals = series(run.history, "eval", "val_loss")
    if not evals:
        return None
    (step, low), (last_step, last) = min(evals, key=lambda e: e[1]), evals[-1]
    if perplexity(last) <= ROSE * perplexity(low):
        return None
    before, after = perplexity(low), perplexity(last)
    return (
        f"the validation perplexity was {before:,.2f} at step {step:,} and {after:,.2f} at the end, step {last_step:,}"
    )


def repetition(run: RunRecord) -> str | None:
    """Samples repeat themselves far more than held-out text."""
    share, limit = repeats(run)
    people = generated(run)[1].get("repeated_4")
    beside = f", {people:.1%} of those in held-out text" if people is not None else ""
    return f"{share:.0%} of the 4-grams in samples stood there before{beside}" if share > limit else None


def tokens_per_word(run: RunRecord) -> str | None:
    """The tokenizer needs many tokens for a word of the domain's own text."""
    for entry in reversed(run.results.get("perplexity") or []):
        share = entry.get("tokens_per_word") or 0
        if entry.get("words", 0) < ENOUGH_WORDS:
            continue
        if share > TOKENS_PER_WORD and entry.get("characters_per_word", 0) <= CHARACTERS_PER_WORD:
            name = (run.results["about"].get("tokenizer") or {}).get("name")
            return f"{entry['source']} has {share:.2f} tokens per word with the tokenizer {name}, {TOKENS_PER_WORD} is much"
    return None


def leak(run: RunRecord) -> str | None:
    """Held-out documents stand in the training text."""
    for entry in reversed(run.results.get("corpus") or []):
        exact, near = entry["exact_duplicates"], entry["near_duplicates"]
        if exact or near:
            where = f"of the {entry['documents']:,} documents of {entry['split']}"
            return f"{exact:,} {where} stand in the training text, {near:,} more nearly so"
    return None


def unknown_tokens(run: RunRecord) -> str | None:
    """Text that the tokenizer does not know was scored as one and the same token."""
    for entry in reversed(run.results.get("perplexity") or []):
        if entry.get("unknown"):
            return f"{entry['unknown']:,} of {entry['tokens']:,} tokens of {entry['source']} stand for unknown text"
    return None
