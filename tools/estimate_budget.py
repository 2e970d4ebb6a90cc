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
    run_seconds,
    saved_activations,
    step_flops,
    step_moments,
    verdict,
    vocabulary_rows,
)
from cards import CARDS, card_of_device, card_of_person
from checkpoint import load_run
from dataset import GPT2_VOCABULARY
from device import available_memory
from model import GPTConfig, flops_per_token, parameter_count
from origin import OPENAI_MODELS, SHAPE_KEYS, load_weights, resumed_settings
from pairs import open_data
from progress import read_metrics
from tools.budget_advice import advice, data_report
from tools.budget_text import print_report
from train import TrainConfig, usual_batch_size

OPENAI_SHAPES = {
    "gpt2": (12, 12, 768),
    "gpt2-medium": (24, 16, 1024),
    "gpt2-large": (36, 20, 1280),
    "gpt2-xl": (48, 25, 1600),
}
USABLE = 0.98  # of the memory as sold: the rest is the driver's and error correction's
KNOWN_CORPORA = {"wikitext103": 118_000_000}  # training tokens, rounded, for a first look before anything is prepared
TABLE_ROWS = 8

Settings = dataclasses.make_dataclass("Settings", [], bases=(TrainConfig, EstimateConfig), frozen=True)


@program
def main(argv: list[str]) -> int:
    """Runs the program; returns its exit code."""
    answer_help(EstimateConfig, argv, __doc__)
    settings, origins, state = read_settings(argv)
    report = build_report(settings, state)
    if settings.json:
        print(json.dumps(report, indent=2))
    else:
        print_report(report, format_overrides(settings, origins))
    return 0


def read_settings(argv: list[str]) -> tuple[Any, dict[str, str], dict[str, Any] | None]:
    """The settings, where each was overridden, and the checkpoint that the run would start from. Raises UserError."""
    state: dict[str, Any] | None = None

    def settings_of_run(given: dict[str, Any]) -> dict[str, Any]:
        nonlocal state
        if given.get("init_from") != "resume":
            return {}
        state, _ = load_run(Path(given.get("out_dir", TrainConfig.out_dir)))
        return resumed_settings(TrainConfig, state, given)

    settings, origins = load_config(Settings, argv, __doc__, settings_of_run)
    if settings.batch_size == "auto":
        own = {field.name for field in dataclasses.fields(EstimateConfig)}
        words = [word for word in argv if word[2:].partition("=")[0].replace("-", "_") not in own]
        settings = dataclasses.replace(settings, batch_size=usual_batch_size(words, state))
    check(settings)
    if settings.init_from not in ("scratch", "resume", *OPENAI_MODELS):
        state = load_weights(settings.init_from)
    return settings, origins, state


def check(settings: Any) -> None:
    """Raises UserError for values of this tool's own settings that cannot be."""
    for key in ("vram", "gpus", "tokens_per_second", "data_tokens", "vocab_size"):
        if getattr(settings, key) is not None and getattr(settings, key) <= 0:
            raise UserError(f"{key}={getattr(settings, key)} must be above 0")
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


def build_report(settings: Any, state: dict[str, Any] | None) -> dict[str, Any]:
    """All that the tool says, as plain values. Raises UserError."""
    corpus = read_corpus(settings)
    shape = shape_of(settings, state, corpus["vocab_size"])
    kind = settings.device.partition(":")[0]
    if kind == "auto":
        here = torch.cuda.is_available() or settings.gpu or settings.vram
        kind = "cuda" if here else "cpu"
    load = load_of(settings, shape, min(corpus["vocab_size"], shape.vocab_size), kind, settings.gpus)
    card, room = find_card(settings, kind)
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
            raise UserError(f"gpu={settings.gpu!r} is not in the table ({', '.join(CARDS)}): --vram=GB says its memory")
        memory = CARDS[card].memory * USABLE * GIB if card else None
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
        "room_bytes": room and int(room),
        "peak_bytes": peak_bytes(load),
        "verdict": verdict(peak_bytes(load), room) if room else None,
        "moment": max(moments, key=lambda name: sum(moments[name].values())),
        "items": memory_items(load),
        "activations": saved_activations(load),
        "one_block": block_saved(load),
        "batch_sizes": rows,
        "largest_batch_size": largest_batch(without, room) if room else None,
        "largest_batch_size_checkpointed": largest_batch(with_checkpoints, room) if room else None,
    }


def time_report(load: Load, settings: Any, card: str | None) -> dict[str, Any]:
    """Hours of the run on the card, or on some cards where none is named, with rent and electricity."""
    total = settings.max_iters * step_flops(load)
    report: dict[str, Any] = {
        "steps": settings.max_iters,
        "flops": total,
        "utilisation": settings.utilisation,
        "runs": [],
    }
    measured = measured_speed(settings, load)
    if measured:
        seconds = run_seconds(
            dataclasses.replace(load, gradient_checkpointing=False), settings, measured * flops_per_token(load.shape)
        )
        report["runs"].append(costs(settings, load, card, seconds, measured))
    elif load.kind != "cuda" or settings.dtype == "float32":
        report["unknown"] = "no peak is known for float32 or off CUDA: give --tokens_per_second or --metrics"
    elif settings.gpu and card is None:
        report["unknown"] = f"{settings.gpu} is not in the table: give --tokens_per_second or --metrics"
    else:
        for name in [card] if card else ["RTX 3060", "RTX 3090", "RTX 4090", "A100", "H100"]:
            peak = CARDS[name].tflops * 1e12 * load.processes
            seconds = run_seconds(load, settings, peak * settings.utilisation, CARDS[name].bandwidth * 1e9)
            tokens = settings.max_iters * load.tokens * load.micro_steps * load.processes
            rate = tokens / (sum(seconds.values()) - seconds["evaluation"])
            report["runs"].append(costs(settings, load, name, seconds, rate) | {"hours_at_peak": total / peak / 3600})
    return report


def measured_speed(settings: Any, load: Load) -> float | None:
    """Tokens a second, given or from a run's metrics, there scaled to this model by the operations a token takes."""
    if settings.metrics is None:
        return settings.tokens_per_second
    path = Path(settings.metrics)
    path = path / "metrics.jsonl" if path.is_dir() else path
    if not path.is_file():
        raise UserError(f"metrics={settings.metrics}: there is no {path}, name a run folder or its metrics.jsonl")
    events = read_metrics(path)
    rates = sorted(e["tokens_per_second"] for e in events if e.get("event") == "train" and e.get("tokens_per_second"))
    if not rates:
        raise UserError(f"{path} holds no training step with its tokens_per_second: let the run go on for a while")
    theirs = next((e["settings"] for e in events if e.get("event") in ("start", "resume") and "settings" in e), {})
    sizes = {key: theirs[key] for key in SHAPE_KEYS if key in theirs}
    return (
        rates[len(rates) // 2] * flops_per_token(dataclasses.replace(load.shape, **sizes)) / flops_per_token(load.shape)
    )


def costs(settings: Any, load: Load, card: str | None, seconds: dict[str, float], rate: float) -> dict[str, Any]:
    """A run's hours and what they cost."""
    hours = sum(seconds.values()) / 3600
    run = {"card": card, "tokens_per_second": rate, "hours": hours, "seconds": seconds}
    if settings.price_per_hour is not None:
        run["rent"] = hours * settings.price_per_hour * load.processes
    if card and load.kind == "cuda":
        run["kwh"] = hours * CARDS[card].watts * load.processes / 1000
        if settings.price_per_kwh is not None:
            run["electricity"] = run["kwh"] * settings.price_per_kwh
    return run


if __name__ == "__main__":
    sys.exit(main())
