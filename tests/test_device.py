"""device.py: what is chosen, what is said about it, and what the hardware's figures give."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, fill_randomly

import device
from configurator import UserError
from device import Device, PackedLinear, choose_device, pack_linears, seed_streams
from memory import is_out_of_memory, keep_freed_memory


@pytest.fixture
def gpu(monkeypatch):
    """A pretended CUDA GPU; returns a function that sets its name and whether it has bfloat16."""

    def pretend(name: str, bfloat16: bool = True) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: name)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bfloat16)

    return pretend


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA GeForce RTX 4070 Ti", 80.2e12),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A10G", None),
    ],
)
def test_peak_speed_is_that_of_the_card_and_no_other(name, peak):
    assert Device("cuda", name, torch.bfloat16).peak_flops == peak
    assert Device("cuda", name, torch.float32).peak_flops is None
    assert Device("cpu", name, torch.bfloat16).peak_flops is None


def test_a_gpu_without_bfloat16_gets_float16_and_one_line(gpu):
    gpu("Tesla T4", bfloat16=False)
    chosen = choose_device("cuda", "bfloat16")
    assert chosen.dtype == torch.float16 and len(chosen.notes) == 1
    assert "Tesla T4 has no bfloat16" in chosen.notes[0]
    assert choose_device("cuda", "float32").notes == ()


def test_auto_takes_the_best_there_is(gpu, monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto", "float32").kind == "cpu"
    gpu("NVIDIA H200")
    chosen = choose_device("auto", "bfloat16")
    assert (chosen.kind, chosen.index, chosen.dtype) == ("cuda", 0, torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "part"), [("gpu", "not one of"), ("cuda:x", "not one of"), ("cuda:3", "no GPU number 3")]
)
def test_a_device_that_is_not_there_is_named(gpu, name, part):
    gpu("NVIDIA H200")
    with pytest.raises(UserError, match=part):
        choose_device(name, "bfloat16")


def test_bfloat16_on_a_cpu_without_it_is_used_only_when_asked_for(monkeypatch):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    quiet = choose_device("cpu", "bfloat16", dtype_asked=False)
    assert quiet.dtype == torch.float32 and "float32 is used" in quiet.notes[0]
    assert choose_device("cpu", "bfloat16").dtype == torch.bfloat16


def test_streams_depend_on_every_number():
    draws = set()
    for numbers in [(1, 2, 3), (1, 2, 4), (1, 3, 3), (2, 2, 3), (3, 2, 1)]:
        seed_streams(*numbers)
        first = torch.rand(4)
        seed_streams(*numbers)
        assert torch.equal(first, torch.rand(4))
        draws.add(tuple(first.tolist()))
    assert len(draws) == 5


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("MPS backend out of memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
)
def test_out_of_memory_is_known_on_every_device(error):
    assert is_out_of_memory(error) and not is_out_of_memory(RuntimeError("shape mismatch"))


def test_compile_is_left_out_where_it_cannot_work(monkeypatch):
    monkeypatch.setattr(device.shutil, "which", lambda name: None)
    assert "compiler" in device.compile_obstacle(Device("cpu", "test"))
    monkeypatch.setattr(device.sys, "platform", "win32")
    assert device.compile_obstacle(Device("cpu", "test"))


def test_packed_linear_layers_compute_the_same_and_replace_all(monkeypatch):
    """For a prompt, one row and several, with and without biases; where PyTorch lacks the functions, nothing changes."""
    from model import GPT, GPTConfig

    torch.manual_seed(0)
    for bias in (True, False):
        model = fill_randomly(GPT(GPTConfig(16, 128, 2, 2, 32, bias=bias)).eval(), 1)
        ids = torch.randint(0, 128, (3, 16))
        with torch.no_grad():
            expected = model(ids)
            assert pack_linears(model)
            torch.testing.assert_close(model(ids), expected, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(model(ids[:1, :1]), expected[:1, :1], rtol=1e-4, atol=1e-4)
        assert not any(isinstance(module, torch.nn.Linear) for module in model.modules())
        assert sum(isinstance(module, PackedLinear) for module in model.modules()) == 4 * 2 + 1
    monkeypatch.setattr(PackedLinear, "forward", lambda self, x: torch.ops.mkldnn.no_such_function(x))
    model = GPT(GPTConfig(16, 128, 2, 2, 32))
    assert not pack_linears(model) and isinstance(model.lm_head, torch.nn.Linear)


KEEPING = """
import resource, sys, torch
from memory import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
faults = []
for _ in range(10):  # the first ones find room for aligned pieces
    torch.ones(20_000_000) + 1  # 160 MB, 40,000 pages
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(faults[-1] - faults[-2])
"""


@pytest.mark.skipif(sys.platform != "linux" or platform.libc_ver()[0] != "glibc", reason="wants glibc")
def test_freed_memory_is_kept_for_the_next_step():
    run = [sys.executable, "-c", KEEPING]
    kept, given_back = (
        int(subprocess.run([*run, how], cwd=ROOT, capture_output=True, check=True).stdout) for how in ("keep", "give")
    )
    assert kept < 1000 < given_back


def test_a_system_without_glibc_is_left_as_it_is(monkeypatch):
    def absent(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr("memory.ctypes.CDLL", absent)
    assert not keep_freed_memory()
