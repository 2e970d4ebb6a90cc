"""What a run needs, before its first step: memory by item, time, tokens.

In:  the shape of a model, the settings of a run, the memory and speed of a card.
Out: bytes, seconds, tokens: arithmetic alone, for train.py's opening lines and its `batch_size=auto`, and for
     tools/estimate_budget.py. Here because the model does not know how it is trained, and the device not what for.

Letters: N = B T tokens of a micro-batch, C n_embd, H n_head, V rows of the vocabulary, s bytes of a number in products.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from loss import LOSS_CHUNK_ROWS
from model import GPTConfig, flops_per_token, parameter_count
from progress import format_duration

GIB = 2**30
CONTEXT = {"cuda": 0.6 * GIB}  # CUDA's context with PyTorch's kernels, 0.3 to 0.6 GiB by card, and cuBLAS's workspaces
COMMUNICATION = 0.4 * GIB  # NCCL's buffers, with more than one GPU
FRAGMENTATION = 0.05  # of the tensors: blocks are rounded up, and gaps too small for the next tensor stay empty
TIGHT = 0.92  # of the memory: beyond it another program's window or a longer sample can end the run
UTILISATION = 0.45  # share of the peak that training reaches; 0.3 to 0.6 by card, width and software


def vocabulary_rows(ids: int) -> int:
    """Rows that the embedding gets for a number of ids: up to a multiple of 128, which GPUs multiply faster."""
    return -(-ids // 128) * 128


# --- memory ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Load:
    """All that the memory of a training step on one GPU depends on.

    torch.compile is not among it: its partitioner keeps the same bytes to 2 % (measured without dropout).
    """

    shape: GPTConfig
    batch_size: int  # windows in a micro-batch
    micro_steps: int = 1  # micro-batches in a step, on this GPU; from the second on, gradients are there throughout
    used_vocabulary: int | None = None  # ids, fewer than rows; None = as many
    dtype: str = "bfloat16"
    gradient_checkpointing: bool = False
    optimizer: str = "adamw"
    processes: int = 1
    shard: bool = False  # weights, gradients and optimizer state in `processes` parts (FSDP2)
    kind: str = "cuda"
    chunk_rows: int | None = LOSS_CHUNK_ROWS  # None = a loss that has all logits at once

    @property
    def number_bytes(self) -> int:
        """Bytes of a number in products; below 4, autocast makes copies of weights and inputs."""
        return 4 if self.dtype == "float32" else 2

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.batch_size * self.shape.block_size

    @property
    def parts(self) -> int:
        """In how many parts the weights are."""
        return self.processes if self.shard else 1

    @property
    def fused_attention(self) -> bool:
        """Whether a kernel without the (T, T) weights is at hand; the one for the CPU knows no dropout."""
        return self.kind == "cuda" or (self.kind == "cpu" and self.shape.dropout == 0)

    def with_batch(self, batch_size: int) -> Load:
        """The same global batch in micro-batches of another size."""
        windows = self.batch_size * self.micro_steps
        return dataclasses.replace(self, batch_size=batch_size, micro_steps=windows // batch_size)


def load_of(settings: Any, shape: GPTConfig, used_vocabulary: int, kind: str, processes: int) -> Load:
    """The load of a run, from the settings of train.py with whole numbers for the batch."""
    return Load(
        shape,
        settings.batch_size,
        settings.gradient_accumulation_steps // processes,
        used_vocabulary,
        settings.dtype,
        settings.gradient_checkpointing,
        settings.optimizer,
        processes,
        settings.shard and processes > 1,
        kind,
    )


def block_shapes(shape: GPTConfig) -> list[tuple[int, ...]]:
    """Shapes of the parameters of one block."""
    C = shape.n_embd
    matrices = [(3 * C, C), (C, C), (4 * C, C), (C, 4 * C)]
    biases = [(rows,) for rows, _ in matrices] if shape.bias else []
    return matrices + biases + [(C,)] * (2 + 2 * shape.bias)


def other_shapes(shape: GPTConfig) -> list[tuple[int, ...]]:
    """Shapes of the parameters outside the blocks, the tied head once."""
    C = shape.n_embd
    return [(shape.vocab_size, C), (shape.block_size, C)] + [(C,)] * (1 + shape.bias)


def numbers(shapes: list[tuple[int, ...]], parts: int = 1) -> int:
    """Numbers in tensors of these shapes, each cut into parts along its first side; the first part is the largest."""
    return sum(-(-first // parts) * math.prod(rest) for first, *rest in shapes)


def weight_bytes(load: Load) -> int:
    """Bytes of the float32 weights that a GPU keeps, and of their gradients."""
    shape = load.shape
    return 4 * (shape.n_layer * numbers(block_shapes(shape), load.parts) + numbers(other_shapes(shape), load.parts))


def optimizer_bytes(load: Load) -> int:
    """Bytes of the optimizer's state: two averages and a step count for each tensor of AdamW's, one for Muon's."""
    blocks, others = block_shapes(load.shape), other_shapes(load.shape)
    muons = [sizes for sizes in blocks if len(sizes) == 2 and load.optimizer == "muon"]
    rest = [sizes for sizes in blocks if sizes not in muons]
    layers = load.shape.n_layer
    averages = layers * (numbers(muons, load.parts) + 2 * numbers(rest, load.parts)) + 2 * numbers(others, load.parts)
    return 4 * averages + 4 * (layers * len(rest) + len(others))


def block_saved(load: Load) -> dict[str, int]:
    """Bytes that autograd keeps of one block for its backward pass, by part, without the copies of weights.

    A norm keeps its float32 input and two numbers a token; a product its input; GELU its input. The fused attention keeps
    q, k, v, its output and a number for each head and token; the plain one float32 copies of q, k, v and three (T, T)
    matrices a head: weights, dropout's mask, their product. Dropout keeps a mask, of bytes on CUDA and of numbers elsewhere.
    """
    shape, N, C, s = load.shape, load.tokens, load.shape.n_embd, load.number_bytes
    if load.fused_attention:
        attention = (3 * s + s) * N * C + 4 * N * shape.n_head
    else:
        attention = (3 * 4 + s) * N * C + (3 if shape.dropout else 1) * 4 * N * shape.n_head * shape.block_size
    mask = (1 if load.kind == "cuda" else s) * N * C if shape.dropout else 0
    return {
        "norms": 2 * (4 * C + 8) * N,
        "attention": s * N * C + attention,
        "feed-forward": (s + 4 * s + 4 * s) * N * C,
        "dropout masks": 2 * mask,
    }


def saved_activations(load: Load) -> dict[str, int]:
    """Bytes that autograd keeps between the forward and the backward pass of a micro-batch, by part of the model."""
    shape, N, C, s = load.shape, load.tokens, load.shape.n_embd, load.number_bytes
    if load.gradient_checkpointing:
        items = {"inputs of blocks": shape.n_layer * 4 * N * C}
    else:
        items = {part: shape.n_layer * size for part, size in block_saved(load).items()}
        items["weights in autocast's format"] = shape.n_layer * 12 * C * C * 2 if s < 4 else 0
    mask = (1 if load.kind == "cuda" else 4) * N * C if shape.dropout else 0
    items["embeddings and final norm"] = 8 * (N + shape.block_size) + mask + (4 * C + 8) * N
    if load.chunk_rows is None:
        head = (s * N * C + (2 * shape.vocab_size * C if s < 4 else 0)) + 8 * N
        items["logits"] = 4 * N * (load.used_vocabulary or shape.vocab_size) + head
    else:
        items["gradients of the loss"] = 4 * (N + shape.vocab_size) * C + 8
    return items


def step_moments(load: Load) -> dict[str, dict[str, int]]:
    """What there is in memory, by item, at each of the moments where it can be at its most."""
    shape, N, C, V, s = load.shape, load.tokens, load.shape.n_embd, load.shape.vocab_size, load.number_bytes
    gradients = weight_bytes(load)
    fixed = {"weights": weight_bytes(load), "optimizer state": optimizer_bytes(load)} | gathered(load)
    early = gradients if load.micro_steps > 1 else 0
    saved = saved_activations(load)
    kept = {part: size for part, size in saved.items() if part not in ("logits", "gradients of the loss")}
    copies = 2 * 12 * C * C  # of one block's matrices in autocast's format
    cached = s < 4 and load.chunk_rows is not None  # autocast's copies live until the forward pass ends, a plain loss
    cache = {"weights in autocast's format": shape.n_layer * copies} if cached else {}  # has its peak after it
    table = 4 * V * C  # a gradient of the token embedding, which gets two: the head's comes first, and waits
    block: dict[str, int] = {}
    if load.gradient_checkpointing:  # a block as it is computed again; its first norm's input is the one that was kept
        block = add(block_saved(load), {"norms": -4 * N * C, "weights in autocast's format": copies if s < 4 else 0})
    # gradients of the feed-forward half, the widest; the one that comes in has taken the place of the final norm's input
    work = (4 * s + (s if s < 4 else 0)) * N * C + (4 + s) * 4 * C * C
    square = 4 * C * C if load.optimizer == "muon" else 0  # the largest matrix of Muon's: update, and products in bf16
    moments = {
        "loss": kept | cache | loss_work(load) | {"gradients": early},
        "backward of the loss": add(kept, {"gradients of the loss": 2 * (table + 4 * N * C), "gradients": early}),
        "backward through the last block": add(kept, block, {"gradients": early + table, "working buffers": work}),
        "end of backward": {"gradients": gradients + (table if early else 0), "working buffers": table + 4 * N * C},
        "optimizer": {"gradients": gradients, "working buffers": 14 * square},
    }
    return {name: add(fixed, items) for name, items in moments.items()}


def loss_work(load: Load) -> dict[str, int]:
    """What the loss holds at its peak.

    Plain: log-probabilities, kept, and two gradients of their size. In chunks: the final states, their gradients and the
    head's; for one chunk logits, probabilities (in float32 in the same place) and their gradient, with that of the chunk
    before or a product as large as the head.
    """
    N, C, V, s = load.tokens, load.shape.n_embd, load.shape.vocab_size, load.number_bytes
    if load.chunk_rows is None:
        logits = 4 * N * (load.used_vocabulary or V)
        return {"logits": saved_activations(load)["logits"], "working buffers": 2 * logits}
    rows = min(load.chunk_rows, N)
    chunk = 4 * rows * V if s == 4 else 8 * rows * V + 2 * V * (max(rows, C) if rows < N else C)
    cast = s * (N + V) * C if s < 4 else 0
    return {
        "logits": chunk,
        "gradients of the loss": 4 * (N + V) * C,
        "working buffers": 4 * N * C + cast,
    }


def gathered(load: Load) -> dict[str, int]:
    """What several GPUs cost each of them: DDP's copy of the gradients, or whole tensors of a sharded model."""
    if load.processes == 1:
        return {}
    if not load.shard:
        return {"exchange of gradients": weight_bytes(load)}
    blocks, others = numbers(block_shapes(load.shape)), numbers(other_shapes(load.shape))
    return {"gathered weights": 4 * (others + 2 * blocks), "exchange of gradients": 4 * (others + blocks)}


def add(*parts: dict[str, int]) -> dict[str, int]:
    """Sums by item."""
    keys = dict.fromkeys(key for part in parts for key in part)
    return {key: sum(part.get(key, 0) for part in parts) for key in keys}


def memory_items(load: Load) -> dict[str, int]:
    """Bytes by item at the moment of a step when they are most, with what the device itself takes; zeros left out."""
    items = max(step_moments(load).values(), key=lambda moment: sum(moment.values()))
    context = CONTEXT.get(load.kind, 0) + (COMMUNICATION if load.kind == "cuda" and load.processes > 1 else 0)
    own = {"context": int(context), "fragmentation reserve": int(FRAGMENTATION * sum(items.values()))}
    return {key: size for key, size in (items | own).items() if size}


def peak_bytes(load: Load) -> int:
    """The most memory that a step takes."""
    return sum(memory_items(load).values())


def tensor_bytes(load: Load) -> int:
    """The most memory that a step takes, without what the device took when the program began to use it."""
    return peak_bytes(load) - memory_items(load).get("context", 0)


def verdict(needed: float, room: float) -> str:
    """`fits`, `tight` or `does not fit`."""
    return "fits" if needed <= TIGHT * room else "tight" if needed <= room else "does not fit"


def batch_choices(windows: int) -> list[int]:
    """Micro-batches that a step of so many windows on one GPU can be cut into, the largest first."""
    small = [size for size in range(1, math.isqrt(windows) + 1) if windows % size == 0]
    return sorted({*small, *(windows // size for size in small)}, reverse=True)


def sizes_that_fit(load: Load, room: float | None) -> list[int]:
    """Micro-batches of the same step that fit well in a device's free memory, the largest first; where none does, one
    window; where the memory is not known, those up to the given one.
    """
    sizes = batch_choices(load.batch_size * load.micro_steps)
    if room is None:
        return [size for size in sizes if size <= load.batch_size]
    return [size for size in sizes if verdict(tensor_bytes(load.with_batch(size)), room) == "fits"] or [1]


def largest_batch(load: Load, memory: float) -> int | None:
    """The largest micro-batch of the same step that fits well on a card of so many bytes; None where none does."""
    sizes = batch_choices(load.batch_size * load.micro_steps)
    return next((size for size in sizes if verdict(peak_bytes(load.with_batch(size)), memory) == "fits"), None)


# --- time -----------------------------------------------------------------------------------------------------------


def step_flops(load: Load) -> int:
    """Floating-point operations of a step on all GPUs that learn, without what checkpointing does again."""
    return flops_per_token(load.shape) * load.tokens * load.micro_steps * load.processes


def run_seconds(load: Load, settings: Any, flops_per_second: float, bandwidth: float | None = None) -> dict[str, float]:
    """Seconds of a whole run at a rate of all GPUs together, by what they are spent on.

    Checkpointing computes the blocks' forward pass again, an evaluation takes forward passes over two splits, and the
    optimizer reads weight, gradient and two averages and writes three of them: 28 bytes a parameter, at `bandwidth` B/s.
    """
    shape, steps = load.shape, settings.max_iters
    forward = 2 * 12 * shape.n_layer * shape.n_embd**2 + 4 * shape.n_layer * shape.n_embd * shape.block_size
    evaluated = 2 * settings.eval_iters * load.tokens * (steps // settings.eval_interval + 1)
    seconds = {"training": steps * step_flops(load) / flops_per_second}
    seconds["evaluation"] = evaluated * flops_per_token(shape) / 3 / flops_per_second
    if load.gradient_checkpointing:
        seconds["computing again"] = forward / flops_per_token(shape) * seconds["training"]
    if bandwidth:
        seconds["optimizer"] = steps * 28 * parameter_count(shape) / load.parts / bandwidth
    return seconds


def opening_lines(load: Load, settings: Any, step: int, device: Any) -> list[str]:
    """The short form that train.py prints: memory against what is free, the time that is left, a warning where needed."""
    needed, items, room = tensor_bytes(load), memory_items(load), device.room_bytes
    most = sorted((key for key in items if key != "context"), key=items.__getitem__, reverse=True)[:3]
    parts = ", ".join(f"{key} {in_gib(items[key])}" for key in most)
    free = f" of {in_gib(room)} GiB free" if room else ""
    lines = [f"memory   about {in_gib(needed)} GiB{free} ({parts}, ...)"]
    if device.peak_flops:
        rate = UTILISATION * device.peak_flops * load.processes
        left = sum(run_seconds(load, settings, rate).values()) * (1 - step / settings.max_iters)
        share = f"{UTILISATION:.0%} of the card's {device.peak_flops / 1e12:.0f} TFLOP/s"
        lines.append(f"time     about {format_duration(left)} at {share} (python -m tools.estimate_budget has more)")
    if room and verdict(needed, room) == "does not fit":
        size = sizes_that_fit(load, room)[0]
        smaller = f"--batch_size={size} --gradient_accumulation_steps="
        smaller += f"{load.batch_size * load.micro_steps * load.processes // size}"
        lines.append(f"warning  {in_gib(needed)} GiB may not fit in the {in_gib(room)} GiB that are free: {smaller} or")
        lines[-1] += " --batch_size=auto" + " or --gradient_checkpointing=true" * (not load.gradient_checkpointing)
    return lines


def in_gib(size: float) -> str:
    """Bytes as GiB, for people."""
    return f"{size / GIB:.1f}" if size >= 0.1 * GIB else f"{size / GIB:.3f}"
