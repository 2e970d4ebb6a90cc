"""The loss layer: cross-entropy of next-token logits that are never all in memory at once.

In:  final states (N, C), the head's matrix (V, C), targets (N,), -1 where a position does not count.
Out: the mean cross-entropy in nats over the positions that count, in float32.

The logits of GPT-2 Medium's micro-batch of 8 × 1024 take 1.5 GiB in float32, and a plain loss holds three such matrices
at its peak. Their gradient is known as soon as they are, softmax(logits) - onehot(target), so the forward pass goes
through the rows in chunks and keeps what backward will ask for: the gradients of states and matrix, no logits. The loop is
the same three matrix products as before. Here because it is the one place where mathematics is undone for memory.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LOSS_CHUNK_ROWS = 1024  # rows at a time: 0.2 GB of float32 logits at V = 50,304; fewer make products too thin for a GPU


def cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, used: int, rows: int = LOSS_CHUNK_ROWS) -> Tensor:
    """Mean cross-entropy of hidden weightᵀ (N, V), in products of autocast's number format where that is on.

    Columns from `used` on stand for no token and are left out. Without any target that counts the loss is NaN.
    """
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    if torch.is_grad_enabled():
        return ChunkedCrossEntropy.apply(hidden, weight, targets, used, rows, dtype)
    return run_chunks(hidden, weight, targets, used, rows, dtype, False)[0] / (targets != -1).sum()


def run_chunks(
    hidden: Tensor, weight: Tensor, targets: Tensor, used: int, rows: int, dtype: torch.dtype, gradients: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum of the losses over the targets that count, and its gradients by hidden (N, C) and weight (V, C) in float32.

    Of the sum, not of the mean: divided by N, float16 would lose the small ones. Logits and probabilities take one
    piece of memory again and again, in float32 the same one: fresh memory would cost a tenth of the time.
    """
    rows, columns = min(rows, len(hidden)), len(weight)
    with torch.autocast(hidden.device.type, enabled=False):
        states, matrix = hidden.to(dtype), weight.to(dtype)
        total = hidden.new_zeros((), dtype=torch.float32)
        hidden_grad = torch.empty_like(hidden, dtype=torch.float32 if gradients else None)
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if gradients else weight.new_empty(0)
        logit_memory = states.new_empty(rows, columns)
        memory = logit_memory if dtype == torch.float32 else states.new_empty((rows, columns), dtype=torch.float32)
        for first in range(0, len(states), rows):
            x, ids = states[first : first + rows], targets[first : first + rows].unsqueeze(-1)  # (n, C), (n, 1)
            counts = ids != -1
            ids = ids.clamp(min=0)
            logits = torch.mm(x, matrix.t(), out=logit_memory[: len(x)])  # (n, V)
            if used < columns:
                logits[:, used:] = -math.inf
            highest, at = logits.max(-1, keepdim=True)
            wanted = logits.gather(1, ids).float()
            softmax = torch.softmax(logits, -1, dtype=torch.float32, out=memory[: len(x)])
            # -log softmax(wanted) = log Σ exp - wanted, and log Σ exp is had from the largest, which never underflows
            total += ((highest.float() - softmax.gather(1, at).log() - wanted) * counts).sum()
            if gradients:
                gradient = softmax.scatter_add_(1, ids, torch.full_like(wanted, -1.0)).to(dtype)
                hidden_grad[first : first + rows] = (gradient @ matrix) * counts
                add_product(weight_grad, gradient.t(), x * counts)
    return total, hidden_grad, weight_grad


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, where total is float32 whatever a and b are."""
    if a.dtype == torch.float32:
        total.addmm_(a, b)
    else:
        total += a @ b


@torch.library.custom_op("gpt2::cross_entropy_chunks", mutates_args=())
def compiled_chunks(
    hidden: Tensor, weight: Tensor, targets: Tensor, used: int, rows: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """`run_chunks` as one operation for torch.compile, which would take its memory apart and lose a tenth."""
    return run_chunks(hidden, weight, targets, used, rows, dtype, True)


@compiled_chunks.register_fake
def _(hidden: Tensor, weight: Tensor, targets: Tensor, used: int, rows: int, dtype: torch.dtype) -> tuple:
    """Shapes alone."""
    return tuple(
        x.new_empty(x.shape if x is not targets else (), dtype=torch.float32) for x in (targets, hidden, weight)
    )


class ChunkedCrossEntropy(torch.autograd.Function):
    """`cross_entropy` with gradients that are computed on the way forward, one chunk of rows at a time."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        used: int,
        rows: int,
        dtype: torch.dtype,
    ) -> Tensor:
        """The mean loss; keeps the gradients of the sum."""
        if torch.compiler.is_compiling():
            total, hidden_grad, weight_grad = compiled_chunks(hidden, weight, targets, used, rows, dtype)
        else:
            total, hidden_grad, weight_grad = run_chunks(hidden, weight, targets, used, rows, dtype, True)
        count = (targets != -1).sum()
        ctx.save_for_backward(hidden_grad, weight_grad, count)
        return total / count

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The kept gradients, times that of the loss over the number of positions that count."""
        hidden_grad, weight_grad, count = ctx.saved_tensors
        scale = gradient / count
        return hidden_grad * scale, weight_grad * scale, None, None, None, None
