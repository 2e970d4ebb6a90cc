"""What a model writes: samples for a file of prompts, and how much they repeat, vary, copy and end by themselves.

In:  a `Subject`, prompts, and the settings of sampling; the training split, where it is there.
Out: the samples, and numbers beside those of as much held-out text written by people, so that one can tell much from
     little.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from configurator import UserError
from corpus import Corpus
from dataset import TokenData
from model import Sampler, generate
from progress import progress_bar
from tools.perplexity import read_documents
from tools.scoring import Subject
from tools.text_statistics import distinct, find_copies, known_words, odd_words, repetition

PEOPLE = "held-out text"  # what the numbers of a model stand beside


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How samples are drawn; sample k of a prompt is the one that sample.py writes with the same settings."""

    num_samples: int
    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float
    seed: int


def read_prompts(path: str, text_column: str) -> list[str]:
    """The prompts of a file: a line each in .txt and .md, a row each in .jsonl, .json, .csv. Raises UserError."""
    if not Path(path).is_file():
        raise UserError(f"--prompts={path}: there is no such file (a prompt on each line)")
    corpus = Corpus(
        "prompts",
        path,
        text_column=text_column,
        document="line",
        detokenize=False,
        skip_bad_rows=False,
        max_documents=None,
    )
    prompts = [text for _, text, _ in corpus]
    if not prompts:
        raise UserError(f"--prompts={path} holds no prompt: put one on each line")
    return prompts


def measure_generation(
    subject: Subject, prompts: list[str], sampling: Sampling, data: TokenData | None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Writes the samples and returns what was counted in them, and the samples themselves."""
    started = time.monotonic()
    samples = []
    with progress_bar(
        "writing", unit=" tokens", total=len(prompts) * sampling.num_samples * sampling.max_new_tokens
    ) as bar:
        for prompt in prompts:
            samples += write_samples(subject, prompt, sampling, bar)
    seconds = time.monotonic() - started
    ids = [sample.pop("ids") for sample in samples]
    table = count_all(subject, ids, data)
    table["samples"]["ended_by_itself"] = float(np.mean([sample["ended"] for sample in samples]))
    tokens = sum(map(len, ids))
    units = f"tokens of {subject.tokenizer.identity['name']}"
    rules = dataclasses.asdict(sampling) | {"prompts": len(prompts), "units": units}
    result = {
        "table": table,
        "rules": rules,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
    }
    return result, samples


def count_all(subject: Subject, ids: list[list[int]], data: TokenData | None) -> dict[str, dict[str, Any]]:
    """The figures of the samples, and with data those of held-out text."""
    groups, copies, known = {"samples": ids}, {}, set()
    if data is not None:
        split = next((name for name in ("val", "test") if name in data.tokens), None)
        groups |= {PEOPLE: as_long_as(ids, data, split)} if split else {}
        copies, known = find_copies(groups, data), known_words(data, subject.tokenizer)
    table: dict[str, dict[str, Any]] = {}
    for name, group in groups.items():
        table[name] = (
            repetition(group) | distinct(group) | {"mean_tokens": float(np.mean([len(s) for s in group] or [0]))}
        )
        if data is not None:
            table[name]["odd_words"] = odd_words([subject.tokenizer.decode(list(row)) for row in group], known)
            copied = copies[name].pop("longest_copy_ids")
            table[name] |= copies[name] | {"longest_copy_text": subject.tokenizer.decode(copied)}
    return table


def write_samples(subject: Subject, prompt: str, sampling: Sampling, bar: Any) -> list[dict[str, Any]]:
    """The samples of one prompt, in a batch: their text and ids without prompt and end, and whether they ended."""
    s, tokenizer = sampling, subject.tokenizer
    start = [int(i) for i in tokenizer.encode_prompt(prompt)] or [tokenizer.eot_id]
    sampler = Sampler(s.temperature, s.top_k, s.top_p, s.seed, s.num_samples)
    ids: list[list[int]] = [[] for _ in range(s.num_samples)]
    going = set(range(s.num_samples))
    for chosen in generate(subject.model, torch.tensor(start), s.max_new_tokens, sampler, tokenizer.vocab_size):
        for k in sorted(going):
            if int(chosen[k]) == tokenizer.eot_id:
                going.discard(k)
            else:
                ids[k].append(int(chosen[k]))
        bar.update(s.num_samples)
        if not going:
            break
    return [
        {"prompt": prompt, "text": tokenizer.decode(row), "ids": row, "ended": k not in going}
        for k, row in enumerate(ids)
    ]


def as_long_as(samples: list[list[int]], data: TokenData, split: str) -> list[list[int]]:
    """Starts of held-out documents, one for each sample and as long as it, as far as there are such."""
    wanted = sorted((len(ids) for ids in samples if ids), reverse=True)
    found: list[list[int]] = []
    begins = True
    for ids, ends in read_documents(data, split):
        if len(found) == len(wanted):
            break
        if begins and len(ids) >= min(wanted[len(found)], 50):
            found.append(ids[: wanted[len(found)]].tolist())
        begins = ends
    return found
