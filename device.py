"""The machine: device, number format, seeds, ranks, memory, peak speed. All code that depends on hardware is here.

In:  the settings `device`, `dtype` and `backend`, and the variables that torchrun sets.
Out: `Device`, which says what will be used and what was chosen instead of what was asked for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import re
import shutil
import signal
import sys
import time
from types import FrameType
from typing import Any

import torch

from configurator import UserError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Dense bf16/fp16 tensor-core peak with float32 accumulation, TFLOP/s, from NVIDIA's data sheets and the GeForce
# architecture white papers (Turing, Ampere GA102, Ada, Blackwell). Longest matching name wins.
PEAK_TFLOPS = {
    "B200": 2250.0,
    "H200": 989.4,
    "H100": 989.4,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "GH200": 989.4,
    "A100": 312.0,
    "A40": 149.7,
    "A30": 165.0,
    "A10": 125.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "V100": 125.0,
    "T4": 65.0,
    "RTX 6000 Ada": 364.2,
    "RTX A6000": 154.8,
    "RTX A5000": 111.1,
    "RTX 5090": 209.5,
    "RTX 5080": 112.6,
    "RTX 5070 Ti": 87.9,
    "RTX 5070": 61.7,
    "RTX 4090": 165.2,
    "RTX 4080": 97.5,
    "RTX 4070 Ti": 80.2,
    "RTX 4070": 58.3,
    "RTX 4060 Ti": 44.1,
    "RTX 4060": 30.2,
    "RTX 3090": 71.0,
    "RTX 3080": 59.5,
    "RTX 3070": 40.6,
    "RTX 3060": 25.6,
    "RTX 2080 Ti": 53.8,
}


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
    def peak_flops(self) -> float | None:
        """FLOP/s of the card at its best in `dtype`, None where unknown."""
        matches = [name for name in PEAK_TFLOPS if re.search(rf"\b{name}\b", self.name)]  # no A40 in an A4000
        if self.kind != "cuda" or self.dtype == torch.float32 or not matches or "Laptop" in self.name:
            return None
        return PEAK_TFLOPS[max(matches, key=len)] * 1e12

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
    if device.world_size > 1:
        torch.distributed.init_process_group(backend if device.kind == "cuda" else "gloo")


def stop_ranks() -> None:
    """Leaves the group of processes."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Sum of a tensor over all processes, the tensor itself for one alone."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(values)
    return values


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


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on any device."""
    said = str(error).lower()
    known = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    return known or "out of memory" in said or "can't allocate memory" in said
