"""The machine: device, number format, seeds, ranks, memory, peak speed. All code that depends on hardware is here.

In:  the settings `device`, `dtype` and `backend`, and the variables that torchrun sets.
Out: `Device`, which says what will be used and what was chosen instead of what was asked for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib.util
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch

from cards import CARDS, card_of_device
from configurator import UserError
from memory import available_memory, is_out_of_memory, keep_freed_memory

GIVE_WAY_SECONDS = 5  # until a launcher has seen a process end
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclasses.dataclass(frozen=True)
class Device:
    """Where a program runs. `kind` is cuda, mps or cpu; `dtype` is the one of autocast, float32 without it."""

    kind: str
    name: str
    dtype: torch.dtype = torch.float32
    index: int | None = None
    rank: int = 0
    world_size: int = 1
    notes: tuple[str, ...] = ()

    @property
    def torch(self) -> torch.device:
        """The device as PyTorch names it."""
        return torch.device(self.kind, self.index) if self.index is not None else torch.device(self.kind)

    @property
    def is_main(self) -> bool:
        """Whether this process prints and saves: the one place where that is decided."""
        return self.rank == 0

    @property
    def dtype_name(self) -> str:
        """`float32`, `bfloat16` or `float16`: what is really used."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def memory_bytes(self) -> int | None:
        """Memory of the GPU, None elsewhere."""
        return torch.cuda.get_device_properties(self.torch).total_memory if self.kind == "cuda" else None

    @property
    def peak_memory_bytes(self) -> int | None:
        """Most memory that tensors held so far, None where it is not counted."""
        return torch.cuda.max_memory_allocated(self.torch) if self.kind == "cuda" else None

    @property
    def room_bytes(self) -> int | None:
        """Memory that a run can have here: on a GPU what is free and what its tensors hold already, on a CPU its part of
        what the system can give; None where unknown.
        """
        if self.kind == "cuda":
            return torch.cuda.mem_get_info(self.torch)[0] + torch.cuda.memory_reserved(self.torch)
        if self.kind == "mps":
            return torch.mps.recommended_max_memory()
        available = available_memory()
        return available and available // int(os.environ.get("LOCAL_WORLD_SIZE", 1))

    @property
    def peak_flops(self) -> float | None:
        """FLOP/s of the card at its best in `dtype`, None where unknown."""
        card = card_of_device(self.name)
        return CARDS[card].tflops * 1e12 if card and self.kind == "cuda" and self.dtype != torch.float32 else None

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Runs matrix products in `dtype`, keeping weights and sums in float32."""
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.kind, dtype=self.dtype)

    def send(self, *arrays: Any) -> list[torch.Tensor]:
        """NumPy arrays as tensors on the device; from pinned memory, so that the copy overlaps with work on a GPU."""
        tensors = [torch.from_numpy(array) for array in arrays]
        if self.kind == "cuda":
            return [tensor.contiguous().pin_memory().to(self.torch, non_blocking=True) for tensor in tensors]
        return [tensor.to(self.torch) for tensor in tensors]

    def describe(self) -> str:
        """Name, memory and number format, for people."""
        memory = f", {self.memory_bytes / 2**30:.1f} GiB" if self.memory_bytes else ""
        return f"{self.kind}: {self.name}{memory}, {self.dtype_name}"


def choose_device(name: str, dtype: str, *, dtype_asked: bool = True, training: bool = True) -> Device:
    """The device that a setting names (cuda, cuda:1, mps, cpu, auto) with a number format it can do.

    Raises UserError where there is no such device, or for float16 away from CUDA. bfloat16 becomes float16 on a GPU
    without it, and float32 on a CPU without it unless `dtype_asked`; `notes` says so.
    """
    kind, _, index = name.partition(":")
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if kind not in ("cuda", "mps", "cpu") or (index and not index.isdigit()):
        raise UserError(f"device={name!r} is not one of cuda, cuda:N, mps, cpu, auto")
    if kind == "cuda" and not torch.cuda.is_available():
        instead = "./start_train.sh config/train_demo.py is a model for the CPU, " if training else ""
        raise UserError(
            f"device={name}, but PyTorch finds no CUDA GPU: {instead}--device=cpu or --device=auto runs here"
        )
    if kind == "mps" and not torch.backends.mps.is_available():
        raise UserError(f"device={name}, but this is no Mac with Metal: --device=auto takes what there is")
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    number = int(index) if index else int(os.environ.get("LOCAL_RANK", 0)) if kind == "cuda" else None
    if kind == "cuda" and number >= torch.cuda.device_count():
        raise UserError(f"device={name}: there is no GPU number {number}, only {torch.cuda.device_count()} in all")
    labels = {"mps": "Apple GPU", "cpu": f"{torch.get_num_threads()} threads"}
    label = torch.cuda.get_device_name(number) if kind == "cuda" else labels[kind]
    chosen, notes = DTYPES[dtype], ()
    if chosen == torch.float16 and kind != "cuda":
        raise UserError(f"dtype=float16 needs a CUDA GPU, this runs on {kind}: --dtype=bfloat16 or --dtype=float32")
    if chosen == torch.bfloat16 and kind == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        chosen, notes = torch.float16, (f"{label} has no bfloat16: float16 with a gradient scaler is used",)
    if (
        chosen == torch.bfloat16
        and kind == "cpu"
        and not dtype_asked
        and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    ):
        chosen, notes = torch.float32, ("this CPU has no bfloat16 units: float32 is used (--dtype=bfloat16 insists)",)
    return Device(kind, label, chosen, number, rank, world_size, notes)


def seed_streams(*numbers: int) -> None:
    """Seeds the streams that initialisation and dropout draw from, on every device, by a mix of the given numbers."""
    mixed = 0
    for number in numbers:
        mixed = (mixed * 6364136223846793005 + number + 1442695040888963407) % (1 << 63)  # Knuth's MMIX step
    torch.manual_seed(mixed)


def start_ranks(device: Device, backend: str) -> None:
    """Readies the device for training and joins the processes that torchrun started. Off CUDA they talk by gloo."""
    if device.kind == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32 for the products that autocast leaves in float32
        torch.cuda.set_device(device.torch)
    if device.kind == "cpu":
        keep_freed_memory()
    if device.world_size > 1:
        torch.distributed.init_process_group(backend if device.kind == "cuda" else "gloo")


def stop_ranks() -> None:
    """Leaves the group of processes."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def give_way(always: bool = False) -> None:
    """Waits while the first process, or the first of this machine, tells a fault of all; the launcher ends the others."""
    later = bool(int(os.environ.get("RANK", 0))) + 2 * bool(int(os.environ.get("LOCAL_RANK", 0)))
    time.sleep(GIVE_WAY_SECONDS * (later or always))


def is_lost_process(error: BaseException) -> bool:
    """Whether an exception says that another process of the run is gone."""
    told = str(error)
    known = isinstance(error, torch.distributed.DistError) if torch.distributed.is_available() else False
    return known or "by peer" in told or "gloo/transport" in told


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Sum of a tensor over all processes, the tensor itself for one alone."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(values)
    return values


def first_that_runs(device: Device, choices: Iterable[int], attempt: Callable[[int], None]) -> int | None:
    """The first choice whose attempt runs out of memory in no process; None where all do."""
    for choice in choices:
        failed = torch.zeros((), device=device.torch)
        try:
            attempt(choice)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            failed += 1
        gc.collect()  # what the failed attempt held hangs on its traceback
        if device.kind == "cuda":
            torch.cuda.empty_cache()
        if not sum_over_ranks(failed).item():
            return choice
    return None


def least_over_ranks(number: int | None, device: Device) -> int | None:
    """The least of a number over all processes."""
    if number is None or device.world_size == 1:
        return number
    least = torch.tensor([number], device=device.torch)
    torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN)
    return int(least.item())


class StopSignals:
    """Notes SIGINT and SIGTERM while it is entered, so that the work under way can be finished and saved.

    A second signal stops at once. With several processes `agree` makes all of them see it at the same place.
    """

    def __init__(self, device: Device) -> None:
        self.device, self.received, self.noted, self.pending = device, 0, 0, None
        self.before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        self.before = {number: signal.signal(number, self.note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def note(self, number: int, _: FrameType | None) -> None:
        """The handler. A launcher passes a signal on to processes that had it already: the same one within a second
        counts once.
        """
        if self.noted and not (self.device.world_size > 1 and time.monotonic() - self.noted_at < 1):
            os._exit(128 + number)
        self.noted, self.noted_at = number, time.monotonic()
        if self.device.world_size == 1:
            self.received = number

    def agree(self) -> int:
        """The signal that this or, some calls later, any process got; 0 for none. Every process must call it equally
        often. The exchange of one call is read at the next, so that none waits.
        """
        if self.device.world_size > 1 and not self.received:
            if self.pending is not None:
                self.pending[1].wait()
                self.received = int(self.pending[0].item())
            flag = torch.tensor([self.noted], device=self.device.torch)
            self.pending = (flag, torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, async_op=True))
        return self.received

    def __exit__(self, kind: type | None, *_: object) -> None:
        if self.pending is not None and kind is None:
            self.pending[1].wait()  # a process that leaves with an exchange under way breaks it for the others
        self.pending = None
        for number, handler in self.before.items():
            signal.signal(number, handler)


class PackedLinear(torch.nn.Module):
    """A linear layer with its weight in oneDNN's blocked layout, for inference in float32 on a CPU.

    Reads the weight as fast as memory gives it for one row (1.2 to 1.7 times nn.Linear's speed) and nearly as fast for
    eight (2 to 3 times), where nn.Linear falls to a tenth of the processor's rate.
    """

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), 8)  # laid out for 8 rows
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(…, in) → (…, out)."""
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


def pack_linears(module: torch.nn.Module) -> bool:
    """Replaces every linear layer of a float32 model on the CPU by a packed one, giving its memory free; returns
    whether that was done: not where this PyTorch lacks the two functions of its compiler that it needs.
    """
    probe, x = torch.nn.Linear(5, 3), torch.randn(2, 4, 5)
    try:
        with torch.no_grad():
            works = torch.allclose(PackedLinear(probe)(x), probe(x), atol=1e-5)
    except (AttributeError, RuntimeError):
        works = False
    for parent in [*module.modules()] if works else []:
        for name, child in parent.named_children():
            if isinstance(child, torch.nn.Linear):
                setattr(parent, name, PackedLinear(child))
    return works


def compile_obstacle(device: Device) -> str | None:
    """What keeps torch.compile from working here, None where nothing is known to."""
    if sys.platform == "win32":
        return "torch.compile wants Linux or a Mac"
    if device.kind == "cuda" and importlib.util.find_spec("triton") is None:
        return "the triton package is missing"
    if device.kind == "cpu" and not any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++", "g++"))):
        return "there is no C++ compiler"
    return None
