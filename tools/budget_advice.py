"""What a corpus supports, and what to change about a run; the second half of tools.estimate_budget.

In:  the load of a run, its settings, what is known of the corpus.
Out: plain values for the report, and advice as (text, flags), the most important first.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from budget import Load, batch_choices, in_gib, largest_batch, peak_bytes, verdict
from model import GPTConfig, parameter_count

EPOCHS = 4  # readings that are nearly as good as new text (Muennighoff et al. 2023)
MOST_EPOCHS = 8  # with dropout; the tenth reading teaches half as much as the first
TOKENS_PER_PARAMETER = (20, 100)  # best for a given amount of work (Hoffmann et al. 2022); for a small model to keep
TEXT_BYTES_PER_TOKEN = 4.6  # English in GPT-2's vocabulary: WikiText-103 has 540 MB in 118 million tokens
LADDER = [  # n_layer, n_head, n_embd; from the demo's size to GPT-2 XL
    *[
        (4, 4, 128),
        (4, 4, 192),
        (4, 4, 256),
        (5, 5, 320),
        (6, 6, 384),
        (8, 8, 512),
        (10, 10, 640),
        (12, 12, 768),
        (18, 14, 896),
        (24, 16, 1024),
    ],
    *[(36, 20, 1280), (48, 25, 1600)],
]
LONG_HOURS = 7 * 24


def data_report(load: Load, settings: Any, corpus: dict[str, Any]) -> dict[str, Any]:
    """The run in epochs and tokens a parameter, what this model wants, and what this corpus can feed."""
    shape, parameters, tokens = load.shape, parameter_count(load.shape), corpus["tokens"]
    per_step = load.tokens * load.micro_steps * load.processes
    run_tokens = settings.max_iters * per_step
    low, high = (share * parameters for share in TOKENS_PER_PARAMETER)
    width = 2 if corpus["vocab_size"] <= 1 << 16 else 4
    report = corpus | {
        "run_tokens": run_tokens,
        "run_tokens_per_parameter": run_tokens / parameters,
        "wanted_tokens": [low, high],
        "wanted_unique_tokens": low / EPOCHS,
        "wanted_text_bytes": [low * TEXT_BYTES_PER_TOKEN, high * TEXT_BYTES_PER_TOKEN],
        "wanted_bin_bytes": [low * width, high * width],
        "checkpoint_bytes": {
            "my_own_llm.pt": 4 * parameters,
            "last.pt": 12 * parameters,
            "previous.pt": 12 * parameters,
        },
    }
    if not tokens:
        return report
    fed = EPOCHS * tokens / TOKENS_PER_PARAMETER[0]
    steps = max(1, round(min(EPOCHS * tokens, low) / per_step))
    steps = round(steps, -2) if steps > 1000 else steps
    return report | {
        "epochs": run_tokens / tokens,
        "tokens_per_parameter": tokens / parameters,
        "bin_bytes": tokens * width,
        "feeds_parameters": fed,
        "feeds_shape": dict(zip(("n_layer", "n_head", "n_embd"), fitting_shape(shape, fed), strict=True)),
        "sensible_steps": steps,
        "sensible_epochs": steps * per_step / tokens,
    }


def fitting_shape(shape: GPTConfig, parameters: float) -> tuple[int, int, int]:
    """The largest model of the ladder with no more than so many parameters, the smallest where none is that small."""
    best = LADDER[0]
    for n_layer, n_head, n_embd in LADDER:
        sized = dataclasses.replace(shape, n_layer=n_layer, n_head=n_head, n_embd=n_embd)
        best = (n_layer, n_head, n_embd) if parameter_count(sized) <= parameters else best
    return best


def advice(load: Load, settings: Any, room: float | None, report: dict[str, Any]) -> list[dict[str, str]]:
    """What to change, the most important first, each with the flags to set; where nothing is, so."""
    found = memory_advice(load, room) + data_advice(load, settings, report) + speed_advice(load, settings, room, report)
    return [{"text": text, "flags": flags} for text, flags in found]


def batch_flags(load: Load, size: int) -> str:
    """The flags for a micro-batch of that size in the same global batch."""
    accumulation = load.batch_size * load.micro_steps // size * load.processes
    return f"--batch_size={size} --gradient_accumulation_steps={accumulation}"


def memory_advice(load: Load, room: float | None) -> list[tuple[str, str]]:
    """Ways to make the run fit, the mildest first."""
    if not room or verdict(peak_bytes(load), room) == "fits":
        return []
    said = f"{in_gib(peak_bytes(load))} GiB of {in_gib(room)}: {verdict(peak_bytes(load), room)}"
    checkpointed = dataclasses.replace(load, gradient_checkpointing=True)
    found = []
    if size := largest_batch(load, room):
        found.append((f"{said}; the same step in smaller parts fits", batch_flags(load, size)))
    if not load.gradient_checkpointing and (size := largest_batch(checkpointed, room)):
        flags = f"{batch_flags(load, size)} --gradient_checkpointing=true"
        found.append((f"{said}; a third more work in the blocks makes room", flags))
    smaller = dataclasses.replace(checkpointed, optimizer="muon")
    if not found and not load.shard and (size := largest_batch(smaller, room)):
        flags = f"{batch_flags(load, size)} --gradient_checkpointing=true --optimizer=muon"
        found.append((f"{said}; Muon keeps one average a weight, not two", flags))
    if not found:
        text = f"{said}, at no batch size; a smaller model fits, or --shard=true on several GPUs"
        found.append((text, smaller_model(checkpointed, room)))
    return found


def smaller_model(load: Load, room: float) -> str:
    """The flags for the largest model of the ladder that fits, with the batch that fits; nothing where none does."""
    for n_layer, n_head, n_embd in reversed(LADDER):
        shape = dataclasses.replace(load.shape, n_layer=n_layer, n_head=n_head, n_embd=n_embd)
        sized = dataclasses.replace(load, shape=shape)
        if size := largest_batch(sized, room):
            flags = f"--n_layer={n_layer} --n_head={n_head} --n_embd={n_embd} --gradient_checkpointing=true"
            return f"{flags} {batch_flags(sized, size)}"
    return ""


def data_advice(load: Load, settings: Any, report: dict[str, Any]) -> list[tuple[str, str]]:
    """Epochs and tokens a parameter, where the corpus is known."""
    data, found = report["data"], []
    if "epochs" not in data:
        return found
    steps = data["sensible_steps"]
    if data["epochs"] > 1.5 * MOST_EPOCHS:
        more = min(settings.max_iters, steps * MOST_EPOCHS // EPOCHS)
        text = (
            f"{data['epochs']:.0f} epochs of {data['tokens']:,} tokens: {EPOCHS} teach nearly all that they can; up to "
        )
        text += f"{more:,} steps with --dropout=0.2 --patience=5"
        found.append((text, f"--max_iters={steps} --warmup_iters={min(settings.warmup_iters, steps // 10)}"))
    if data["feeds_parameters"] < report["model"]["parameters"] / 2:
        shape = data["feeds_shape"]
        text = f"{data['tokens_per_parameter']:.2g} tokens a parameter in the corpus: {EPOCHS} readings of it feed a model "
        text += f"of {data['feeds_parameters'] / 1e6:.0f} M; or more text, or trained weights by --init_from=gpt2"
        smaller = shape["n_embd"] < load.shape.n_embd
        found.append((text, " ".join(f"--{key}={value}" for key, value in shape.items()) if smaller else ""))
    elif data["run_tokens_per_parameter"] < TOKENS_PER_PARAMETER[0] / 2 and data["epochs"] < EPOCHS / 2:
        text = f"{data['run_tokens_per_parameter']:.1f} tokens a parameter are read, and the corpus has more"
        found.append((text, f"--max_iters={steps}"))
    return found


def speed_advice(load: Load, settings: Any, room: float | None, report: dict[str, Any]) -> list[tuple[str, str]]:
    """Time that is given away."""
    found, shape, cuda = [], load.shape, load.kind == "cuda"
    if cuda and settings.dtype == "float32":
        text = "float32 is half as fast or less, and takes nearly twice the memory for activations"
        found.append((text, "--dtype=bfloat16"))
    hours = [
        run["hours"] for run in report["time"]["runs"] if report["memory"]["card"] or len(report["time"]["runs"]) == 1
    ]
    if hours and hours[0] > LONG_HOURS:
        found.append((f"{hours[0] / 24:.0f} days: a shorter run, a smaller model or a faster card", ""))
    head = shape.n_embd // shape.n_head
    if head % 8 or head > 128:
        heads = max(1, round(shape.n_embd / 64))
        text = f"heads of {head}: the fast attention wants a multiple of 8 up to 128, and 64 is usual"
        found.append(
            (text, f"--n_head={heads}" if shape.n_embd % heads == 0 else f"--n_embd={64 * heads} --n_head={heads}")
        )
    if room and verdict(peak_bytes(load), room) == "fits":
        plain = dataclasses.replace(load, gradient_checkpointing=False)
        size = largest_batch(plain, room)
        if load.gradient_checkpointing and size and size >= load.batch_size:
            found.append(("it fits without computing the blocks twice", "--gradient_checkpointing=false"))
        best = next(size for size in batch_choices(load.batch_size * load.micro_steps) if size <= 64)
        size = min(best, largest_batch(load, room) or 0)
        if cuda and load.batch_size < 8 and size >= 2 * load.batch_size:
            found.append(("there is room for larger micro-batches, which are a little faster", batch_flags(load, size)))
    if cuda and not settings.compile:
        found.append(("torch.compile takes a minute and makes steps a quarter to a half faster", "--compile=true"))
    return found
