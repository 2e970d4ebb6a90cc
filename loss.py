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
from torch.nn import functional as F

LOSS_CHUNK_ROWS = 1024  # rows at a time: 0.2 GB of float32 logits at V = 50,304; fewer make products too thin for a GPU


def cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, used: int, rows: int = LOSS_CHUNK_ROWS) -> Tensor:
    """Mean cross-entropy of hidden weightᵀ (N, V), in products of autocast's number format where that is on.

    Columns from `used` on stand for no token and are left out. Without any target that counts the loss is NaN.
    """
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    with torch.autocast(kind, enabled=False):
        if torch.is_grad_enabled():
            return ChunkedCrossEntropy.apply(hidden, weight, targets, used, rows, dtype)
        total, matrix = hidden.new_zeros((), dtype=torch.float32), weight.to(dtype)
        for states, ids in zip(hidden.split(rows), targets.split(rows), strict=True):
            total += chunk_loss(log_probabilities(states.to(dtype), matrix, used), ids)
        return total / (targets != -1).sum()


def log_probabilities(states: Tensor, matrix: Tensor, used: int) -> Tensor:
    """log softmax(states matrixᵀ) (n, V) in float32; -inf in the columns that stand for no token."""
    logits = (states @ matrix.t()).float()
    if used < logits.size(-1):
        logits[:, used:] = -math.inf
    return F.log_softmax(logits, dim=-1)


def chunk_loss(log_probability: Tensor, ids: Tensor) -> Tensor:
    """Sum of the cross-entropies (n, V) at the targets (n,) that count."""
    return F.nll_loss(log_probability, ids, ignore_index=-1, reduction="sum")


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
        """The mean loss; keeps d(sum of losses)/d(hidden) (N, C) and d(sum of losses)/d(weight) (V, C) in float32.

        Of the sum, not of the mean: divided by N, float16 would lose the small ones.
        """
        total, matrix = hidden.new_zeros((), dtype=torch.float32), weight.to(dtype)
        hidden_grads, weight_grad = [], torch.zeros_like(weight, dtype=torch.float32)
        for states, ids in zip(hidden.to(dtype).split(rows), targets.split(rows), strict=True):
            log_probability = log_probabilities(states, matrix, used)
            total += chunk_loss(log_probability, ids)
            counts = (ids != -1).unsqueeze(-1)  # (n, 1)
            gradient = log_probability.exp_()  # (n, V), in place: softmax(logits)
            gradient.scatter_add_(1, ids.clamp(min=0).unsqueeze(-1), -counts.float()).mul_(counts)
            gradient = gradient.to(dtype)
            hidden_grads.append((gradient @ matrix).float())
            if dtype == torch.float32:
                weight_grad.addmm_(gradient.t(), states)
            else:
                weight_grad += gradient.t() @ states
        count = (targets != -1).sum()
        ctx.save_for_backward(torch.cat(hidden_grads), weight_grad, count)
        return total / count

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The kept gradients, times that of the loss over the number of positions that count."""
        hidden_grad, weight_grad, count = ctx.saved_tensors
        scale = gradient / count
        return hidden_grad * scale, weight_grad * scale, None, None, None, None
