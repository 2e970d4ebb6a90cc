"""The optimizer: which tensors decay, and the learning rate of each step.

In:  a model and its settings.
Out: AdamW (Loshchilov & Hutter 2019) in two groups, and the schedule as a closed form of the step, which no state has to
     be kept for. Here because neither the model nor the loop owns them.
"""

from __future__ import annotations

import math

import torch
from torch import nn


def make_optimizer(
    model: nn.Module, learning_rate: float, betas: tuple[float, float], weight_decay: float
) -> torch.optim.AdamW:
    """AdamW with decay on tensors of two dimensions and up alone: biases and norms have no direction to shrink.

    Each parameter stands in one group once, the tied matrix too. Fused: one kernel, which leaves a step out where its
    `found_inf` is 1, without the host having to look.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=True)


def cosine_schedule(step: int, highest: float, lowest: float, warmup: int, end: int) -> float:
    """Learning rate of update number `step`, counted from 0: linear warm-up, then a cosine down to `lowest` at `end`.

    The warm-up starts above 0, so that no step is lost. SGDR (Loshchilov & Hutter 2017), equation 5, without restarts.
    """
    if step < warmup:
        return highest * (step + 1) / (warmup + 1)
    done = min(1.0, (step - warmup) / max(1, end - warmup))  # 0 at the end of the warm-up, 1 at `end`
    return lowest + (highest - lowest) * 0.5 * (1 + math.cos(math.pi * done))
