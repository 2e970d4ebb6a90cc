"""What a corpus supports, and what to change about a run; the second half of tools.estimate_budget.

In:  the load of a run, its settings, what is known of the corpus.
Out: plain values for the report, and advice as (text, flags), the most important first.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from budget import Load, batch_choices, in_gib, largest_batch, optimizer_bytes, peak_bytes, verdict
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
OPENAI_SHAPES = {
    "gpt2": (12, 12, 768),
    "gpt2-medium": (24, 16, 1024),
    "gpt2-large": (36, 20, 1280),
    "gpt2-xl": (48, 25, 1600),
}
LONG_HOURS = 7 * 24
HOPELESS = 50  # times what the corpus feeds: from scratch such a model learns to spell
MUCH_EVALUATION = 0.15  # of the time
RECOMPUTING = "computing the blocks twice, a third more work, makes room"


def data_report(load: Load, settings: Any, corpus: dict[str, Any]) -> dict[str, Any]:
    """The run in epochs and tokens a parameter, what this model wants, and what this corpus can feed."""
    shape, parameters, tokens = load.shape, parameter_count(load.shape), corpus["tokens"]
    per_step = load.tokens * load.micro_steps * load.processes
    run_tokens = settings.max_iters * per_step
    low, high = (share * parameters for share in TOKENS_PER_PARAMETER)
    full = 4 * parameters + optimizer_bytes(dataclasses.replace(load, processes=1))
    width = 2 if corpus["vocab_size"] <= 1 << 16 else 4
    report = corpus | {
        "run_tokens": run_tokens,
        "run_tokens_per_parameter": run_tokens / parameters,
        "wanted_tokens": [low, high],
        "wanted_unique_tokens": low / EPOCHS,
        "wanted_text_bytes": [low * TEXT_BYTES_PER_TOKEN, high * TEXT_BYTES_PER_TOKEN],
        "wanted_bin_bytes": [low * width, high * width],
        "from_scratch": settings.init_from in ("scratch", "resume"),
        "checkpoint_bytes": {"my_own_llm.pt": 4 * parameters, "last.pt": full, "previous.pt": full},
    }
    if not tokens:
        return report
    fed = EPOCHS * tokens / TOKENS_PER_PARAMETER[0]
    steps = max(1, round(min(EPOCHS * tokens, low) / per_step))
    steps = round(steps, -2) if steps > 1000 else steps
    sizes = fitting_sizes(shape, fed)
    return report | {
        "epochs": run_tokens / tokens,
        "tokens_per_parameter": tokens / parameters,
        "bin_bytes": tokens * width,
        "feeds_parameters": fed,
        "feeds_shape": sizes,
        "feeds_shape_parameters": parameter_count(dataclasses.replace(shape, **sizes)),
        "sensible_steps": steps,
        "sensible_epochs": steps * per_step / tokens,
    }


def fitting_sizes(shape: GPTConfig, parameters: float) -> dict[str, int]:
    """The sizes of the largest model of the ladder with no more than so many parameters, of the smallest where none is
    that small.
    """
    fits = [sizes for sizes in LADDER if parameter_count(dataclasses.replace(shape, **named(sizes))) <= parameters]
    return named(max(fits, default=LADDER[0]))


def named(sizes: tuple[int, int, int]) -> dict[str, int]:
    """Sizes of the ladder by the names of their settings."""
    return dict(zip(("n_layer", "n_head", "n_embd"), sizes, strict=True))


def as_flags(settings: dict[str, Any]) -> str:
    """Settings as flags."""
    return " ".join(f"--{key}={value}" for key, value in settings.items())


def advice(load: Load, settings: Any, room: float | None, report: dict[str, Any]) -> list[dict[str, str]]:
    """What to change, the most important first, each with the flags to set; where nothing is, so."""
    found = (
        memory_advice(load, settings, room)
        + data_advice(load, settings, report)
        + speed_advice(load, settings, room, report)
    )
    return [{"text": text, "flags": flags} for text, flags in found]


def batch_flags(load: Load, size: int) -> str:
    """The flags for a micro-batch of that size in the same global batch."""
    accumulation = load.batch_size * load.micro_steps // size * load.processes
    return f"--batch_size={size} --gradient_accumulation_steps={accumulation}"


def memory_advice(load: Load, settings: Any, room: float | None) -> list[tuple[str, str]]:
    """Ways to make the run fit, the mildest first."""
    if not room or verdict(peak_bytes(load), room) == "fits":
        return []
    said = f"{in_gib(peak_bytes(load))} GiB of {in_gib(room)}: {verdict(peak_bytes(load), room)}"
    checkpointed = dataclasses.replace(load, gradient_checkpointing=True)
    found = []
    if size := largest_batch(load, room):
        found.append((f"{said}; the same step in smaller parts fits", batch_flags(load, size)))
    if not load.gradient_checkpointing and (size := largest_batch(checkpointed, room)):
        text = f"or {RECOMPUTING}" if found else f"{said}; {RECOMPUTING}"
        found.append((text, f"{batch_flags(load, size)} --gradient_checkpointing=true"))
    smaller = dataclasses.replace(checkpointed, optimizer="muon")
    changeable = settings.init_from != "resume" and not load.shard
    if not found and changeable and (size := largest_batch(smaller, room)):
        flags = f"{batch_flags(load, size)} --gradient_checkpointing=true --optimizer=muon"
        found.append((f"{said}; Muon keeps one average a weight, not two", flags))
    return found or [does_not_fit(checkpointed, settings, room, said)]


def does_not_fit(load: Load, settings: Any, room: float, said: str) -> tuple[str, str]:
    """What is left where no batch size fits: several GPUs that share the model out, or a smaller model."""
    windows, text = load.batch_size * load.micro_steps * load.processes, f"{said}, at no batch size"
    for count in (2, 4, 8, 16):
        each = dataclasses.replace(load, processes=count, shard=True, batch_size=1, micro_steps=windows // count)
        if count > load.processes and windows % count == 0 and verdict(peak_bytes(each), room) == "fits":
            text += (
                f". {count} such GPUs can hold it in parts (--shard=true --gradient_checkpointing=true --batch_size=1 "
            )
            text += f"--gradient_accumulation_steps={windows})"
            break
    flags = smaller_model(load, settings, room)
    return text + ("; a smaller model fits" if flags else ""), flags


def smaller_model(load: Load, settings: Any, room: float) -> str:
    """The flags for the largest model that fits, with the batch that fits; nothing where none does, or where the weights
    to start from are given.
    """
    choices = {as_flags(named(sizes)): sizes for sizes in LADDER} if settings.init_from == "scratch" else {}
    if settings.init_from in OPENAI_SHAPES:
        choices = {f"--init_from={name}": sizes for name, sizes in OPENAI_SHAPES.items()}
    for flags, sizes in reversed(choices.items()):
        sized = dataclasses.replace(load, shape=dataclasses.replace(load.shape, **named(sizes)))
        if size := largest_batch(sized, room):
            return f"{flags} --gradient_checkpointing=true {batch_flags(sized, size)}"
    return ""


def data_advice(load: Load, settings: Any, report: dict[str, Any]) -> list[tuple[str, str]]:
    """What the corpus says: read too often, too small or too large for the model."""
    data, found = report["data"], []
    if "epochs" not in data:
        return [("how many tokens the corpus has is not known, so nothing is said of it", "--data_tokens=COUNT")]
    steps, corpus = data["sensible_steps"], f"{data['tokens']:,} tokens"
    if data["epochs"] > 1.5 * MOST_EPOCHS:
        more = min(settings.max_iters, steps * MOST_EPOCHS // EPOCHS)
        text = (
            f"{data['epochs']:,.1f} epochs of {corpus}: {EPOCHS} teach nearly all that they can; up to {more:,} steps "
        )
        text += "with --dropout=0.2 --patience=5"
        found.append((text, f"--max_iters={steps} --warmup_iters={min(settings.warmup_iters, steps // 10)}"))
    parameters = report["model"]["parameters"]
    if settings.init_from != "scratch":
        return found
    if data["feeds_parameters"] < parameters / 2:
        feeds = f"{EPOCHS} readings of it feed a model of {in_words(data['feeds_parameters'])}"
        share = f"{data['tokens_per_parameter']:.2g} tokens a parameter"
        if data["feeds_parameters"] < parameters / HOPELESS:
            text = f"{corpus} are {share}, far too few to start from nothing: {feeds}. Start from trained weights (the text "
            text += "prepared with --tokenizer=gpt2), or get more text"
            return [(text, f"config/finetune_domain.py --init_from=gpt2 --dataset={settings.dataset}"), *found]
        smaller = data["feeds_shape"]["n_embd"] < load.shape.n_embd
        text = f"{share} in the corpus: {feeds}; or more text, or trained weights by --init_from=gpt2"
        found.append((text, as_flags(data["feeds_shape"]) if smaller else ""))
    return found + size_advice(load, settings, report)


def size_advice(load: Load, settings: Any, report: dict[str, Any]) -> list[tuple[str, str]]:
    """Too few tokens read for the model, or so many that a larger one would learn more from the same work."""
    data, read = report["data"], report["data"]["run_tokens_per_parameter"]
    per_step, steps = report["model"]["tokens_per_step"], data["sensible_steps"]
    longer = [run["hours"] * steps / settings.max_iters for run in report["time"]["runs"]]
    if read < TOKENS_PER_PARAMETER[0] / 2 and data["epochs"] < EPOCHS / 2 and min(longer, default=0) <= LONG_HOURS:
        return [(f"{read:.1f} tokens a parameter are read, and the corpus has more", f"--max_iters={steps}")]
    best = min((report["time"]["flops"] / 6 / TOKENS_PER_PARAMETER[0]) ** 0.5, data["feeds_parameters"])
    sizes = fitting_sizes(load.shape, best)
    parameters = parameter_count(dataclasses.replace(load.shape, **sizes))
    fresh = data["epochs"] <= MOST_EPOCHS
    if fresh and read > 2 * TOKENS_PER_PARAMETER[1] and parameters > 2 * report["model"]["parameters"]:
        steps = report["time"]["flops"] / 6 / parameters / per_step
        text = (
            f"{read:,.0f} tokens a parameter are read: of the same work, a model of {in_words(parameters)} learns more"
        )
        return [(text, f"{as_flags(sizes)} --max_iters={max(1, round(steps))}")]
    return []


def in_words(count: float) -> str:
    """A count in thousands or millions."""
    return f"{count / 1e6:,.0f} M" if count >= 1e6 else f"{count / 1e3:,.0f} thousand"


def speed_advice(load: Load, settings: Any, room: float | None, report: dict[str, Any]) -> list[tuple[str, str]]:
    """Time that is given away."""
    found, shape, cuda = [], load.shape, load.kind == "cuda"
    if cuda and settings.dtype == "float32":
        text = "float32 is half as fast or less, and takes nearly twice the memory for activations"
        found.append((text, "--dtype=bfloat16"))
    runs = report["time"]["runs"]
    if runs and min(run["hours"] for run in runs) > LONG_HOURS:
        days = min(run["hours"] for run in runs) / 24
        found.append((f"{days:,.0f} days: a shorter run, a smaller model or a faster card", ""))
    if runs and (share := runs[0]["seconds"]["evaluation"] / sum(runs[0]["seconds"].values())) > MUCH_EVALUATION:
        interval = math.ceil(settings.eval_interval * share / (1 - share) / MUCH_EVALUATION / 50) * 50
        text = f"{share:.0%} of the time goes into evaluations"
        found.append((text, f"--eval_interval={min(interval, settings.max_iters)}"))
    head = shape.n_embd // shape.n_head
    if (head % 8 or head > 128) and settings.init_from == "scratch":
        heads = max(1, round(shape.n_embd / 64))
        text = f"heads of {head}: the fast attention wants a multiple of 8 up to 128, and 64 is usual"
        width = shape.n_embd if shape.n_embd % (8 * heads) == 0 else 64 * heads
        found.append((text, f"--n_head={heads}" + f" --n_embd={width}" * (width != shape.n_embd)))
    if room and verdict(peak_bytes(load), room) == "fits":
        found += batch_advice(load, room)
    if cuda and not settings.compile:
        found.append(("torch.compile takes a minute and makes steps a quarter to a half faster", "--compile=true"))
    return found


def batch_advice(load: Load, room: float) -> list[tuple[str, str]]:
    """Room that is not used."""
    found = []
    size = largest_batch(dataclasses.replace(load, gradient_checkpointing=False), room)
    if load.gradient_checkpointing and size and size >= load.batch_size:
        found.append(("it fits without computing the blocks twice", "--gradient_checkpointing=false"))
    best = next(size for size in batch_choices(load.batch_size * load.micro_steps) if size <= 64)
    size = min(best, largest_batch(load, room) or 0)
    if load.kind == "cuda" and load.batch_size < 8 and size >= 2 * load.batch_size:
        found.append(("there is room for larger micro-batches, which are a little faster", batch_flags(load, size)))
    return found
