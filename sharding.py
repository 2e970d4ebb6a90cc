"""Weights, gradients and optimizer state shared out over several GPUs: PyTorch's FSDP2 (`fully_shard`).

In:  a whole model on the CPU, the same in every process.
Out: the same model with a part of each tensor in each process; whole tensors again for a checkpoint.

A block's weights are gathered while it computes and dropped afterwards, so a GPU holds its share and one block. Checkpoints
are the single files of an ordinary run: any number of processes, sharded or not, goes on from them. Here because neither
the model (which does not know) nor the device owns tensors that are in several places.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from model import GPT

# FSDP's modules take a second to import: only runs that shard do so


def shard(model: GPT, kind: str, processes: int) -> None:
    """Leaves 1 / processes of every parameter here, on this process's device of that kind (cuda, cpu)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(kind, (processes,))
    for block in model.transformer["h"]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)  # embeddings, final norm and the tied head, which stay whole until backward


def compile_blocks(model: GPT) -> None:
    """torch.compile for each block: the gathering between them is not traced."""
    for block in model.transformer["h"]:
        block.forward = torch.compile(block.forward)


@contextlib.contextmanager
def for_generation(model: GPT) -> Iterator[None]:
    """Lets `generate` run on a sharded model, in all processes alike; plain models are left as they are.

    Generation enters below the model's own call, which would gather embeddings and head.
    """
    if not is_sharded(model.lm_head.weight):
        yield
        return
    model.unshard()
    with torch.compiler.set_stance("force_eager"):  # or each length of the cache would be compiled anew
        yield
    model.reshard()


def is_sharded(value: Any) -> bool:
    """Whether a value is a tensor of which each process has a part, a DTensor."""
    return isinstance(value, Tensor) and hasattr(value, "full_tensor")


def here(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds, all of it when it is not sharded."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, which every process has to ask for when it is sharded."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def gather(value: Any, keep: bool) -> Any:
    """Whole tensors in place of sharded ones in nested dicts and lists, in main memory; None for them unless `keep`.

    Every process has to call it. One tensor at a time is whole on the device.
    """
    if is_sharded(value):
        tensor = whole(value.detach())
        return tensor.cpu() if keep else None
    if isinstance(value, dict):
        return {key: gather(item, keep) for key, item in value.items()}
    return [gather(item, keep) for item in value] if isinstance(value, (list, tuple)) else value


def spread(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's whole state dict with each tensor sharded as its parameter is; the inverse of `gather`."""
    if not is_sharded(optimizer.param_groups[0]["params"][0]):
        return state
    from torch.distributed.tensor import distribute_tensor

    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def part(value: Any, parameter: Tensor) -> Any:
        if getattr(value, "shape", None) != parameter.shape:
            return value  # a step count
        tensor = value.to(parameter.device)
        return distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)

    moments = {
        number: {key: part(value, parameters[number]) for key, value in entry.items()}
        for number, entry in state["state"].items()
    }
    return state | {"state": moments}


def beside(flag: Tensor, parameter: Tensor) -> Tensor:
    """A number, equal in all processes, as an operation on sharded tensors wants it."""
    if not is_sharded(parameter):
        return flag
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(flag, parameter.device_mesh, [Replicate()])
