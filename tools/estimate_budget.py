"""Says what a run needs before it is started: memory, time, money, data. From any machine; no GPU is needed.

In:  the settings of train.py (config files and --key=value, all of `python train.py --help`), a card, a price.
Out: the model in numbers, memory by item, batch sizes that fit, hours, what the corpus supports, and advice.

    python -m tools.estimate_budget --gpu=4090
    python -m tools.estimate_budget config/train_gpt2_small.py --vram=12 --gradient_checkpointing=true
    python -m tools.estimate_budget --gpu=a100 --gpus=4 --price_per_hour=1.8 --json=true

Memory is arithmetic that is tested against what PyTorch really keeps; what CUDA itself takes is a reserve, not measured.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

from configurator import UserError, answer_help, format_overrides, load_config, program


@dataclasses.dataclass(frozen=True)
class EstimateConfig:
    """Settings of tools.estimate_budget, beside those of train.py."""

    gpu: str | None = None  # a card by name: 4090, rtx3060, a100, a100-80gb, h100…
    vram: float | None = None  # GiB of memory of a card, in place of the table's
    gpus: int = 1  # of them, in one run
    utilisation: float = 0.45  # share of the card's peak that training reaches; the progress line shows it as mfu
    tokens_per_second: float | None = None  # a measured speed, of all GPUs together, in place of peak and utilisation
    metrics: str | None = None  # a metrics.jsonl, or its run folder, to take the measured speed from
    price_per_hour: float | None = None  # rent of one GPU for an hour
    price_per_kwh: float | None = None  # of electricity
    data_tokens: int | None = None  # training tokens of the corpus, where no prepared data is at hand
    vocab_size: int | None = None  # ids of its vocabulary, likewise; none = GPT-2's 50,257
    json: bool = False  # the same as JSON


if __name__ == "__main__":
    answer_help(EstimateConfig, sys.argv[1:], __doc__)  # before PyTorch is imported, which takes two seconds

import json
import re

import torch

from budget import (
    GIB,
    Load,
    batch_choices,
    block_saved,
    largest_batch,
    load_of,
    memory_items,
    peak_bytes,
    saved_activations,
    step_flops,
    step_moments,
    verdict,
    vocabulary_rows,
)
from cards import CARDS, USABLE, card_of_device, card_of_person
from checkpoint import load_run
from dataset import GPT2_VOCABULARY
from memory import available_memory
from model import GPTConfig, flops_per_token, parameter_count
from origin import OPENAI_MODELS, SHAPE_KEYS, load_weights, resumed_settings
from pairs import open_data
from tools.budget_advice import OPENAI_SHAPES, advice, data_report
from tools.budget_text import report_lines
from tools.budget_time import time_report
from train import TrainConfig, usual_batch_size

KNOWN_CORPORA = {"wikitext103": 118_000_000}  # training tokens, rounded, for a first look before anything is prepared
TABLE_ROWS = 8
MOST_WINDOWS = 10**12  # in a step

Settings = dataclasses.make_dataclass("Settings", [], bases=(TrainConfig, EstimateConfig), frozen=True)


@program
def main(argv: list[str]) -> int:
    """Runs the program; returns its exit code."""
    answer_help(EstimateConfig, argv, __doc__)
    settings, origins, state, auto = read_settings(argv)
    try:
        report = build_report(settings, state, auto)
        lines = report_lines(report)
    except OverflowError as error:
        said = " ".join(f"{key}={getattr(settings, key)}" for key in origins)[:200]
        raise UserError(f"no number holds what this run takes ({error}): look for a typing error in {said}") from error
    if settings.json:
        lines = [json.dumps(report, indent=2)]
    else:
        lines = [*format_overrides(settings, origins), *lines]
    print("\n".join(lines))
    return 0


def read_settings(argv: list[str]) -> tuple[Any, dict[str, str], dict[str, Any] | None, bool]:
    """The settings, where each was overridden, the checkpoint that the run would start from, and whether batch_size is
    auto. Raises UserError.
    """
    state: dict[str, Any] | None = None

    def settings_of_run(given: dict[str, Any]) -> dict[str, Any]:
        nonlocal state
        if given.get("init_from") != "resume":
            return {}
        state, _ = load_run(Path(given.get("out_dir", TrainConfig.out_dir)))
        return resumed_settings(TrainConfig, state, given)

    settings, origins = load_config(Settings, argv, __doc__, settings_of_run)
    auto = settings.batch_size == "auto"
    if auto:
        own = {field.name for field in dataclasses.fields(EstimateConfig)}
        words = [word for word in argv if word[2:].partition("=")[0].replace("-", "_") not in own]
        settings = dataclasses.replace(settings, batch_size=usual_batch_size(words, state))
    check(settings)
    if settings.init_from not in ("scratch", "resume", *OPENAI_MODELS):
        state = load_weights(settings.init_from)
    return settings, origins, state, auto


def check(settings: Any) -> None:
    """Raises UserError for values of this tool's own settings that cannot be."""
    for key in ("vram", "gpus", "tokens_per_second", "data_tokens", "vocab_size"):
        if getattr(settings, key) is not None and getattr(settings, key) <= 0:
            raise UserError(f"{key}={getattr(settings, key)} must be above 0")
    if not re.fullmatch(r"(cuda|mps|cpu)(:\d+)?|auto", settings.device):
        raise UserError(f"device={settings.device!r} is not one of cuda, cuda:N, mps, cpu, auto")
    if settings.batch_size * settings.gradient_accumulation_steps > MOST_WINDOWS:
        raise UserError(
            f"batch_size={settings.batch_size} times gradient_accumulation_steps={settings.gradient_accumulation_steps} is "
            f"more than the {MOST_WINDOWS:.0e} windows a step that this tool divides up: lower one of them"
        )
    for key in ("price_per_hour", "price_per_kwh"):
        if (getattr(settings, key) or 0) < 0:
            raise UserError(f"{key}={getattr(settings, key)} must not be negative")
    if not 0 < settings.utilisation <= 1:
        raise UserError(f"utilisation={settings.utilisation} is not a share above 0, up to 1")
    if settings.gradient_accumulation_steps % settings.gpus:
        raise UserError(
            f"gradient_accumulation_steps={settings.gradient_accumulation_steps} is not divisible by gpus={settings.gpus}: "
            f"use a multiple of {settings.gpus}"
        )
    if settings.tokens_per_second and settings.metrics:
        raise UserError("tokens_per_second and metrics both say how fast it goes: leave one of the two away")


def build_report(settings: Any, state: dict[str, Any] | None, auto: bool = False) -> dict[str, Any]:
    """All that the tool says, as plain values; with `auto` of the largest micro-batch that fits. Raises UserError."""
    corpus = read_corpus(settings)
    shape = shape_of(settings, state, corpus["vocab_size"])
    kind = settings.device.partition(":")[0]
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() or settings.vram else "cpu"
    kind = "cuda" if settings.gpu else kind
    load = load_of(settings, shape, min(corpus["vocab_size"], shape.vocab_size), kind, settings.gpus)
    card, room = find_card(settings, kind)
    if auto and room:
        load = load.with_batch(largest_batch(load, room) or 1)
    report = {
        "model": model_report(load),
        "memory": memory_report(load, card, room),
        "time": time_report(load, settings, card),
        "data": data_report(load, settings, corpus),
    }
    return report | {"advice": advice(load, settings, room, report)}


def shape_of(settings: Any, state: dict[str, Any] | None, ids: int) -> GPTConfig:
    """The shape that train.py would build: by the settings, or that of the weights it starts from."""
    shape = {key: getattr(settings, key) for key in SHAPE_KEYS} | {"vocab_size": vocabulary_rows(ids)}
    if settings.init_from in OPENAI_SHAPES:
        sizes = zip(("n_layer", "n_head", "n_embd"), OPENAI_SHAPES[settings.init_from], strict=True)
        shape |= dict(sizes) | {"vocab_size": GPT2_VOCABULARY["vocab_size"], "bias": True, "gelu": "tanh"}
    elif state is not None:
        shape |= state["model_args"]
        shape["block_size"] = min(shape["block_size"], settings.block_size)
    return GPTConfig(**shape | {"dropout": settings.dropout})


def read_corpus(settings: Any) -> dict[str, Any]:
    """Training tokens, vocabulary and bytes a token of the corpus, and where that is known from."""
    folder = Path(settings.data_dir) / settings.dataset
    ids = settings.vocab_size or GPT2_VOCABULARY["vocab_size"]
    corpus = {"tokens": settings.data_tokens, "vocab_size": ids, "source": "data_tokens"}
    try:
        data = open_data(folder, settings.block_size, settings.seed)
        corpus["vocab_size"] = settings.vocab_size or data.vocab_size
        corpus |= {"tokens": data.tokens["train"], "source": str(folder)} if settings.data_tokens is None else {}
    except UserError as error:
        if settings.data_tokens is None:
            known = KNOWN_CORPORA.get(settings.dataset)
            corpus |= {"tokens": known, "source": "about, by its name" if known else "unknown", "missing": str(error)}
    return corpus


def find_card(settings: Any, kind: str) -> tuple[str | None, float | None]:
    """The card's name in the table, None for one that is not there or not asked for, and the bytes of memory to go by."""
    card, memory = None, None
    if settings.gpu:
        card = card_of_person(settings.gpu)
        if card is None and settings.vram is None:
            raise UserError(
                f"gpu={settings.gpu!r} is not one card of the table ({', '.join(CARDS)}): --vram=GB instead"
            )
        memory = CARDS[card].usable * GIB if card else None
    elif kind == "cuda" and torch.cuda.is_available() and not settings.vram:
        properties = torch.cuda.get_device_properties(0)
        card, memory = card_of_device(properties.name), properties.total_memory
    elif kind == "cpu":
        memory = available_memory()
    return card, settings.vram * USABLE * GIB if settings.vram else memory


def model_report(load: Load) -> dict[str, Any]:
    """Parameters, operations, and what is odd about the shape."""
    shape, total = load.shape, parameter_count(load.shape)
    embedding = (shape.vocab_size + shape.block_size) * shape.n_embd
    per_token = flops_per_token(shape)
    return {
        "shape": dataclasses.asdict(shape),
        "parameters": total,
        "parameters_embedding": embedding,
        "parameters_per_layer": (total - embedding - (1 + shape.bias) * shape.n_embd) // shape.n_layer,
        "head_size": shape.n_embd // shape.n_head,
        "feed_forward_width": 4 * shape.n_embd,
        "flops_per_token": per_token,
        "flops_per_step": step_flops(load),
        "tokens_per_step": load.tokens * load.micro_steps * load.processes,
    }


def memory_report(load: Load, card: str | None, room: float | None) -> dict[str, Any]:
    """Bytes by item at the peak, the verdict, and other batch sizes."""
    with_checkpoints = dataclasses.replace(load, gradient_checkpointing=True)
    without = dataclasses.replace(load, gradient_checkpointing=False)
    moments = step_moments(load)
    rows, sizes = [], batch_choices(load.batch_size * load.micro_steps)[::-1]
    for size in sorted({*sizes[: TABLE_ROWS - 1], load.batch_size}):
        row = {"batch_size": size, "gradient_accumulation_steps": sizes[-1] // size * load.processes}
        for key, other in (("plain", without), ("checkpointed", with_checkpoints)):
            needed = peak_bytes(other.with_batch(size))
            row[key] = {"bytes": needed, "verdict": verdict(needed, room) if room else None}
        rows.append(row)
    return {
        "card": card,
        "gpus": load.processes,
        "batch_size": load.batch_size,
        "room_bytes": room and int(room),
        "peak_bytes": peak_bytes(load),
        "verdict": verdict(peak_bytes(load), room) if room else None,
        "moment": max(moments, key=lambda name: sum(moments[name].values())),
        "items": memory_items(load),
        "activations": saved_activations(load),
        "one_block": block_saved(load),
        "batch_sizes": rows,
        "largest": {
            key: (size := largest_batch(other, room))
            and {"batch_size": size, "gradient_accumulation_steps": sizes[-1] // size * load.processes}
            for key, other in (("plain", without), ("checkpointed", with_checkpoints))
            if room
        },
    }


if __name__ == "__main__":
    sys.exit(main())
