"""How long a run takes and what it costs; a part of tools.estimate_budget.

In:  the load of a run, its settings, a card of the table or a measured speed.
Out: hours, rent and electricity as plain values for the report.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from budget import Load, run_seconds, step_flops
from cards import CARDS
from configurator import UserError
from model import flops_per_token
from origin import SHAPE_KEYS
from progress import read_metrics

USUAL_CARDS = ("RTX 3060", "RTX 3090", "RTX 4090", "A100", "H100")  # where none is named
NARROW = 512  # width below which the kernels of a GPU are too short to keep it busy


def time_report(load: Load, settings: Any, card: str | None) -> dict[str, Any]:
    """Hours of the run on the card, or on some cards where none is named, with rent and electricity."""
    total = settings.max_iters * step_flops(load)
    report: dict[str, Any] = {
        "steps": settings.max_iters,
        "flops": total,
        "utilisation": settings.utilisation,
        "runs": [],
        "notes": [],
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
        for name in [card] if card else USUAL_CARDS:
            peak = CARDS[name].tflops * 1e12 * load.processes
            seconds = run_seconds(load, settings, peak * settings.utilisation, CARDS[name].bandwidth * 1e9)
            tokens = settings.max_iters * load.tokens * load.micro_steps * load.processes
            rate = tokens / (sum(seconds.values()) - seconds["evaluation"])
            report["runs"].append(costs(settings, load, name, seconds, rate) | {"hours_at_peak": total / peak / 3600})
        report["notes"] = notes(load)
    return report


def notes(load: Load) -> list[str]:
    """Why it may take longer than peak and utilisation say."""
    found = []
    if load.shape.n_embd < NARROW:
        found.append(
            f"a width of {load.shape.n_embd} leaves a GPU idle between short kernels: it can take several times as long, "
            "and --metrics= of a short run tells"
        )
    if load.processes > 1:
        found.append("what the GPUs exchange is not counted: little within a machine, more between machines")
    return found


def measured_speed(settings: Any, load: Load) -> float | None:
    """Tokens a second, given or from a run's metrics, there scaled to this model by the operations a token takes."""
    if settings.metrics is None:
        return settings.tokens_per_second
    path = Path(settings.metrics)
    path = path / "metrics.jsonl" if path.is_dir() else path
    if not path.is_file():
        raise UserError(f"metrics={settings.metrics}: there is no {path}, name a run folder or its metrics.jsonl")
    try:
        events = read_metrics(path)
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no metrics.jsonl of a run: {error}") from error
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
