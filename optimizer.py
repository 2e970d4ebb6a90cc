"""The optimizer: which tensors get which update, and the learning rate of each step.

In:  a model and its settings.
Out: AdamW (Loshchilov & Hutter 2019), or Muon (Jordan 2024) for the blocks' matrices with AdamW for the rest; the schedule
     as a closed form of the step, which no state has to be kept for. Here because neither the model nor the loop owns them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn


def make_optimizer(
    model: nn.Module, kind: str, learning_rate: float, betas: tuple[float, float], weight_decay: float
) -> torch.optim.Optimizer:
    """AdamW with decay on tensors of two dimensions and up alone: biases and norms have no direction to shrink.

    With kind "muon" the matrices of the blocks are Muon's, embeddings and the tied head stay AdamW's. Each parameter
    stands in one group once, the tied matrix too. AdamW is fused: one kernel, which leaves a step out where its
    `found_inf` is 1, without the host having to look.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    hidden = [p for name, p in named if kind == "muon" and ".h." in name and p.dim() == 2]
    taken = set(map(id, hidden))
    rest = [p for _, p in named if id(p) not in taken]
    groups = [
        {"params": [p for p in rest if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=True)
    return MuonAndAdamW(hidden, adamw, learning_rate, weight_decay) if kind == "muon" else adamw


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon for some matrices, AdamW for the other parameters, as one optimizer with one state.

    Muon steps along the nearest orthogonal matrix to the momentum, so that every direction of a matrix learns at one
    speed. Its step is scaled by 0.2 √(larger side), which makes its size AdamW's (Liu et al. 2025, "Muon is scalable
    for LLM training", equation 4): learning rate and decay carry over.
    """

    def __init__(
        self, matrices: list[Tensor], adamw: torch.optim.AdamW, learning_rate: float, weight_decay: float
    ) -> None:
        muon = torch.optim.Muon(matrices, lr=learning_rate, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        self.parts = (muon, adamw)
        self.found_inf: Tensor | None = None
        super().__init__([*muon.param_groups, *adamw.param_groups], {})

    def step(self, closure: Any = None) -> None:
        """One update, none where `found_inf` is 1: Muon cannot leave a step out by itself, so the host looks."""
        assert closure is None
        if self.found_inf is not None and self.found_inf.item():
            return
        muon, adamw = self.parts
        for part, groups in ((muon, self.param_groups[:1]), (adamw, self.param_groups[1:])):
            part.param_groups, part.state = groups, self.state  # new objects once a state was loaded
            part.step()


def cosine_schedule(step: int, highest: float, lowest: float, warmup: int, end: int) -> float:
    """Learning rate of update number `step`, counted from 0: linear warm-up, then a cosine down to `lowest` at `end`.

    The warm-up starts above 0, so that no step is lost. SGDR (Loshchilov & Hutter 2017), equation 5, without restarts.
    """
    if step < warmup:
        return highest * (step + 1) / (warmup + 1)
    done = min(1.0, (step - warmup) / max(1, end - warmup))  # 0 at the end of the warm-up, 1 at `end`
    return lowest + (highest - lowest) * 0.5 * (1 + math.cos(math.pi * done))
