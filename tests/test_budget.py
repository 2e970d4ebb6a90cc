"""budget.py and tools/estimate_budget.py against what PyTorch does: parameters, operations, bytes kept, peaks, states."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import re
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, TINY, assert_loud, read_events, run_program
from test_repository import commands_in
from torch.nn import functional as F

import budget
import model as model_module
import train
from budget import Load, block_shapes, memory_items, other_shapes, peak_bytes, saved_activations, step_moments
from cards import CARDS, card_of_device, card_of_person
from configurator import load_config
from device import Device, first_that_runs
from memory import available_memory
from model import GPT, GPTConfig, flops_per_token, parameter_count
from optimizer import make_optimizer
from origin import SHAPE_KEYS
from tools import estimate_budget
from tools.budget_text import report_lines

SMALL = GPTConfig(block_size=32, vocab_size=200, n_layer=2, n_head=2, n_embd=48)
MEDIUM = GPTConfig(n_layer=24, n_head=16, n_embd=1024)  # 50,304 rows, context 1,024


def plain_forward(self: GPT, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss with all logits at once, as it was before loss.py."""
    logits = self.lm_head(self.hidden(ids))[..., : self.used_vocabulary].flatten(0, 1).float()
    return F.cross_entropy(logits, targets.flatten(), ignore_index=-1)


def make_model(load: Load, monkeypatch) -> GPT:
    """The model of a load, with the plain loss where the load has it, or other rows in a chunk."""
    if load.chunk_rows is None:
        monkeypatch.setattr(GPT, "forward", plain_forward)
    elif load.chunk_rows != budget.LOSS_CHUNK_ROWS:

        def cross_entropy(hidden, weight, targets, used):
            return real(hidden, weight, targets, used, load.chunk_rows)

        real = model_module.cross_entropy
        monkeypatch.setattr(model_module, "cross_entropy", cross_entropy)
    model = GPT(load.shape).train()
    model.gradient_checkpointing = load.gradient_checkpointing
    model.used_vocabulary = load.used_vocabulary or load.shape.vocab_size
    return model


def autocast(load: Load) -> contextlib.AbstractContextManager:
    return torch.autocast("cpu", dtype=torch.bfloat16) if load.number_bytes == 2 else contextlib.nullcontext()


def kept_bytes(load: Load, monkeypatch) -> int:
    """What autograd keeps of a forward pass, each storage once, without the parameters."""
    model = make_model(load, monkeypatch)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    ids = torch.randint(0, load.shape.vocab_size - 60, (load.batch_size, load.shape.block_size))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), autocast(load):
        model(ids, ids.clone())
    return sum(storage.nbytes() for storage in kept.values())


# --- the model ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "heads", "width", "context", "rows"), [(1, 1, 8, 4, 16), (2, 4, 32, 16, 100), (3, 3, 96, 64, 128), (12, 12, 768, 1024, 50257), (24, 16, 1024, 1024, 50257), (36, 20, 1280, 512, 50304)]
)  # fmt: skip
@pytest.mark.parametrize("bias", [True, False])
def test_parameters_are_those_of_the_built_model(layers, heads, width, context, rows, bias):
    shape = GPTConfig(context, rows, layers, heads, width, bias=bias)
    with torch.device("meta"):
        model = GPT(shape)
    parameters = [parameter.shape for parameter in model.parameters()]
    assert parameter_count(shape) == sum(sizes.numel() for sizes in parameters)
    counted = sorted(block_shapes(shape) * layers + other_shapes(shape))
    assert counted == sorted(tuple(sizes) for sizes in parameters)
    assert budget.weight_bytes(Load(shape, 1)) == 4 * parameter_count(shape)


@pytest.mark.parametrize(("rows", "bias", "small", "medium"), [(50257, True, 124_439_808, 354_823_168), (50304, False, 124_373_760, 354_599_936)])  # fmt: skip
def test_the_tied_head_counts_once_and_embeddings_count(rows, bias, small, medium):
    """H75."""
    assert parameter_count(GPTConfig(vocab_size=rows, bias=bias)) == small
    assert parameter_count(dataclasses.replace(MEDIUM, vocab_size=rows, bias=bias)) == medium


@pytest.mark.parametrize("shape", [SMALL, GPTConfig(64, 300, 3, 4, 64, bias=False), GPTConfig(16, 1000, 1, 1, 128)])
def test_operations_are_those_of_the_flop_counter(shape, monkeypatch):
    from torch.utils.flop_counter import FlopCounterMode

    monkeypatch.setattr(GPT, "forward", plain_forward)
    ids = torch.randint(0, 100, (3, shape.block_size))
    with FlopCounterMode(display=False) as counter:
        GPT(shape)(ids, ids).backward()
    attention = 12 * shape.n_layer * shape.n_embd * shape.block_size  # whose kernel for the CPU it does not know
    counted = counter.get_total_flops() + attention * ids.numel()
    assert flops_per_token(shape) * ids.numel() == pytest.approx(counted, rel=0.01)


# --- memory ---------------------------------------------------------------------------------------------------------

SHAPES = [SMALL, GPTConfig(96, 130, 3, 4, 64, bias=False, gelu="exact"), GPTConfig(16, 700, 1, 2, 128)]


@pytest.mark.parametrize("chunk_rows", [None, 1024, 40])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations_are_the_bytes_that_autograd_keeps(dtype, dropout, checkpointing, chunk_rows, monkeypatch):
    for shape, batch in zip(SHAPES, (3, 2, 5), strict=True):
        shape = dataclasses.replace(shape, dropout=dropout)
        load = Load(shape, batch, 1, shape.vocab_size - 60, dtype, checkpointing, kind="cpu", chunk_rows=chunk_rows)
        with monkeypatch.context() as patch:
            assert sum(saved_activations(load).values()) == pytest.approx(kept_bytes(load, patch), rel=0.005)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations_with_the_kernels_of_cuda(dtype, monkeypatch):
    """CUDA's dropout keeps a mask of bytes, its attention drops out without keeping anything."""
    attention = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "dropout", lambda x, p, training: torch.native_dropout(x, p, training)[0])
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda q, k, v, dropout_p, **rest: attention(q, k, v, **rest)
    )
    for shape, batch in zip(SHAPES, (3, 2, 5), strict=True):
        load = Load(dataclasses.replace(shape, dropout=0.2), batch, dtype=dtype, kind="cuda")
        assert sum(saved_activations(load).values()) == pytest.approx(kept_bytes(load, monkeypatch), rel=0.005)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("bias", [True, False])
def test_optimizer_state_is_the_real_one(optimizer, bias):
    shape = dataclasses.replace(SMALL, bias=bias)
    model = GPT(shape)
    updater = make_optimizer(model, optimizer, 1e-3, (0.9, 0.95), 0.1)
    ids = torch.randint(0, 100, (2, 32))
    model(ids, ids).backward()
    updater.step()
    states = [value for state in updater.state.values() for value in state.values()]
    real = sum(value.nbytes for value in states if isinstance(value, torch.Tensor))
    assert budget.optimizer_bytes(Load(shape, 2, optimizer=optimizer)) == real


def measured_peak(load: Load, monkeypatch) -> int:
    """The peak of two steps on fake tensors, by PyTorch's MemTracker."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    with monkeypatch.context() as patch, FakeTensorMode():
        model = make_model(load, patch)
        updater = make_optimizer(model, load.optimizer, 1e-3, (0.9, 0.95), 0.1)
        tracker = MemTracker()
        tracker.track_external(model, updater)
        with tracker:
            for _ in range(2):
                for _ in range(load.micro_steps):
                    tracker.reset_mod_stats()
                    ids = torch.randint(0, 100, (load.batch_size, load.shape.block_size))
                    with autocast(load):
                        loss = model(ids, ids)
                    loss.backward()
                    del loss
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                updater.step()
                updater.zero_grad(set_to_none=True)
        return max(sums["Total"] for sums in tracker.get_tracker_snapshot("peak").values())


def estimated_peak(load: Load) -> int:
    """The tensors alone, without context and reserve."""
    return max(sum(items.values()) for items in step_moments(load).values())


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"gradient_checkpointing": True},
        {"chunk_rows": None},
        {"chunk_rows": None, "gradient_checkpointing": True},
        {"micro_steps": 2},
        {"micro_steps": 2, "gradient_checkpointing": True, "batch_size": 1},
        {"batch_size": 1},
        {"batch_size": 1, "chunk_rows": None},
        {"dtype": "float32"},
        {"dtype": "float32", "gradient_checkpointing": True},
        {"batch_size": 24, "gradient_checkpointing": True},
        {"used_vocabulary": 50257},
    ],
    ids=str,
)
def test_peaks_are_those_of_a_run_on_fake_tensors(change, monkeypatch):
    load = dataclasses.replace(Load(dataclasses.replace(MEDIUM, n_layer=2), 8, kind="cpu"), **change)
    assert estimated_peak(load) == pytest.approx(measured_peak(load, monkeypatch), rel=0.01)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": True, "batch_size": 1},
        {"batch_size": 1, "optimizer": "muon"},
        {"dtype": "float32", "micro_steps": 3},
        {"shape": GPTConfig(512, 256, 3, 8, 512, dropout=0.1)},
    ],
    ids=str,
)
def test_peaks_of_a_model_that_is_mostly_blocks(change, monkeypatch):
    load = dataclasses.replace(Load(GPTConfig(512, 256, 3, 8, 512), 8, kind="cpu"), **change)
    assert estimated_peak(load) == pytest.approx(measured_peak(load, monkeypatch), rel=0.04)


@pytest.mark.long
@pytest.mark.parametrize(
    ("checkpointing", "chunk_rows", "gib"), [(False, None, 16.0), (True, None, 9.5), (False, 1024, 12.2), (True, 1024, 6.2)]
)  # fmt: skip
def test_peaks_of_gpt2_medium(checkpointing, chunk_rows, gib, monkeypatch):
    load = Load(MEDIUM, 8, gradient_checkpointing=checkpointing, chunk_rows=chunk_rows, kind="cpu")
    assert estimated_peak(load) / 2**30 == pytest.approx(gib, abs=0.06)
    assert estimated_peak(load) == pytest.approx(measured_peak(load, monkeypatch), rel=0.01)


def test_the_settings_that_change_memory_and_no_others_change_the_estimate():
    changes = {
        "n_layer": "23", "n_head": "8", "n_embd": "960", "block_size": "512", "dropout": "0", "bias": "false",
        "batch_size": "4", "gradient_accumulation_steps": "1", "optimizer": "muon", "dtype": "float32",
        "gradient_checkpointing": "true", "device": "cpu",
    }  # fmt: skip
    others = {
        "out_dir": "x", "data_dir": "x", "init_from": "scratch", "overwrite": "true", "gelu": "exact", "learning_rate": "1",
        "max_iters": "7", "weight_decay": "1", "beta1": "0", "beta2": "0", "grad_clip": "0", "decay_lr": "false",
        "warmup_iters": "1", "lr_decay_iters": "1", "min_lr": "1e-9", "eval_interval": "1", "eval_iters": "1",
        "eval_only": "true", "log_interval": "1", "checkpoint_interval": "1", "always_save_checkpoint": "true",
        "patience": "1", "wandb_log": "true", "wandb_project": "x", "wandb_run_name": "x", "compile": "false",
        "backend": "gloo", "seed": "1",
    }  # fmt: skip
    # the vocabulary of a data set is given here, and sharding is seen below
    assert {field.name for field in dataclasses.fields(train.TrainConfig)} - {"dataset", "shard"} == {*changes, *others}

    def needed(*words: str, processes: int = 1) -> int:
        settings, _ = load_config(train.TrainConfig, list(words))
        shape = GPTConfig(**{key: getattr(settings, key) for key in SHAPE_KEYS}, dropout=settings.dropout)
        return peak_bytes(budget.load_of(settings, shape, 50257, settings.device, processes))

    usual = needed()
    found = {key: needed(f"--{key}={value}") for key, value in changes.items()}
    assert len({usual, *found.values()}) == len(changes) + 1, found
    assert {needed(f"--{key}={value}") for key, value in others.items()} == {usual}
    two, shared = needed(processes=2), needed("--shard=true", processes=2)
    assert shared < usual < two and needed("--shard=true") == usual
    assert needed("--shard=true", processes=8) < shared


def test_the_parts_of_a_sharded_model_are_counted_to_the_row():
    shape = GPTConfig(block_size=7, vocab_size=129, n_layer=1, n_head=1, n_embd=5)
    load = Load(shape, 1, processes=4, shard=True)
    rows = [sizes[0] for sizes in block_shapes(shape) + other_shapes(shape)]
    widths = [sizes[1] if len(sizes) == 2 else 1 for sizes in block_shapes(shape) + other_shapes(shape)]
    part = sum(len(torch.arange(count).chunk(4)[0]) * width for count, width in zip(rows, widths, strict=True))
    assert budget.weight_bytes(load) == 4 * part


def test_batch_sizes_keep_the_global_batch_and_fit():
    load = Load(MEDIUM, 8, 16)
    room = 24 * 2**30
    size = budget.largest_batch(load, room)
    other = load.with_batch(size)
    assert other.batch_size * other.micro_steps == 128
    assert peak_bytes(other) <= budget.TIGHT * room < peak_bytes(load.with_batch(2 * size))
    assert budget.largest_batch(load, 4 * 2**30) is None and budget.sizes_that_fit(load, 2**30) == [1]
    assert budget.sizes_that_fit(load, None)[0] == 8
    odd = Load(MEDIUM, 5, 9)
    assert budget.batch_choices(45) == [45, 15, 9, 5, 3, 1] and odd.with_batch(15).micro_steps == 3
    assert budget.batch_choices(36) == [36, 18, 12, 9, 6, 4, 3, 2, 1] and budget.batch_choices(1) == [1]
    assert len(budget.batch_choices(10**12)) == 169, "at once"


def test_items_add_up_to_the_peak():
    for checkpointing, dtype, processes in itertools.product((False, True), ("float32", "bfloat16"), (1, 2)):
        load = Load(MEDIUM, 8, 16, 50257, dtype, checkpointing, processes=processes)
        items = memory_items(load)
        assert sum(items.values()) == peak_bytes(load) and min(items.values()) > 0
        assert items["context"] == (budget.CONTEXT["cuda"] + budget.COMMUNICATION * (processes > 1)) // 1


# --- cards and time -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "card"),
    [
        *[("4090", "RTX 4090"), ("rtx-4090", "RTX 4090"), ("NVIDIA GeForce RTX 4070 Ti", "RTX 4070 Ti"), ("4070ti", "RTX 4070 Ti")],
        *[("4070", "RTX 4070"), ("a100", "A100"), ("a100-80gb", "A100 80GB"), ("h100", "H100"), ("L4", "L4"), ("l40s", "L40S")],
        *[("H100 pcie", "H100 PCIe"), ("tesla t4", "T4"), ("A4000", None), ("GTX 1080", None), ("", None), ("3060-12gb", "RTX 3060")],
        *[("h100-80gb", "H100"), ("a100-40gb", "A100"), ("A100 SXM4 80GB", "A100 80GB"), ("80gb", "A100 80GB"), ("4060ti 16gb", None)],
        *[("rtx", None), ("40", None), ("6000", None), ("rtx 6000 ada", "RTX 6000 Ada"), ("a6000", "RTX A6000"), ("3080ti", "RTX 3080 Ti")],
    ],
)  # fmt: skip
def test_a_card_is_found_by_what_people_call_it(said, card):
    assert card_of_person(said) == card


def test_a_card_is_found_by_its_own_name():
    assert card_of_device("NVIDIA A100-SXM4-80GB") == "A100 80GB" and card_of_device("NVIDIA A100-PCIE-40GB") == "A100"
    assert card_of_device("NVIDIA GeForce RTX 4090 Laptop GPU") is None and card_of_device("NVIDIA RTX A4000") is None
    assert card_of_device("NVIDIA GeForce RTX 4070 Ti SUPER") == "RTX 4070 Ti SUPER"
    assert card_of_device("NVIDIA GeForce RTX 3070 Ti") is None, "no RTX 3070 stands in for it"


def test_memory_of_a_card_is_what_a_program_can_have():
    """GiB that PyTorch tells of them: GDDR6 with error correction lacks a sixteenth of what is sold."""
    for card, told in {"RTX 4090": 23.5, "A100": 39.4, "L4": 22.0, "T4": 14.6, "L40S": 44.4, "V100": 15.8}.items():
        assert CARDS[card].usable == pytest.approx(told, rel=0.012), card


def report(*flags: str) -> dict:
    settings, _, state, auto = estimate_budget.read_settings(list(flags))
    return estimate_budget.build_report(settings, state, auto)


def test_the_default_run_is_told_truly(tmp_path, monkeypatch):
    """1.6e19 operations: 27 h on an RTX 4090 at its whole peak, 62 on a 3090; 55 readings of WikiText-103."""
    monkeypatch.chdir(tmp_path)
    told = report("--gpu=4090")
    assert told["time"]["flops"] == pytest.approx(1.6e19, rel=0.02)
    run = told["time"]["runs"][0]
    assert run["hours_at_peak"] == pytest.approx(27, abs=0.5) and 48 < run["hours"] < 72
    assert report("--gpu=3090")["time"]["runs"][0]["hours_at_peak"] == pytest.approx(62, abs=1)
    assert told["data"]["epochs"] == pytest.approx(55.5, abs=0.1) and "no prepared data" in told["data"]["missing"]
    assert "--max_iters=3600" in told["advice"][0]["flags"]
    assert told["data"]["feeds_parameters"] == pytest.approx(23.6e6, rel=0.01)


def test_time_counts_what_is_computed_again_evaluations_and_the_optimizer():
    plain, checked = report("--gpu=a100"), report("--gpu=a100", "--gradient_checkpointing=true")
    seconds = [told["time"]["runs"][0]["seconds"] for told in (plain, checked)]
    assert "computing again" not in seconds[0]
    share = seconds[1]["computing again"] / seconds[1]["training"]
    assert 0.25 < share < 1 / 3  # a third of the blocks', the head is not computed again
    # 501 evaluations of 2 × 50 forward passes, for 50,000 steps of 16 passes three times as long
    assert seconds[0]["evaluation"] / seconds[0]["training"] == pytest.approx(501 * 100 / (50_000 * 16 * 3))
    rare = report("--gpu=a100", "--eval_interval=1000")["time"]["runs"][0]["seconds"]
    assert rare["evaluation"] < seconds[0]["evaluation"] / 9
    assert seconds[0]["optimizer"] == pytest.approx(50_000 * 28 * plain["model"]["parameters"] / 1555e9)


def test_money_follows_hours_and_gpus():
    one = report("--gpu=a100", "--price_per_hour=2", "--price_per_kwh=0.3")["time"]["runs"][0]
    four = report("--gpu=a100", "--gpus=4", "--price_per_hour=2")["time"]["runs"][0]
    assert one["rent"] == pytest.approx(2 * one["hours"]) and one["electricity"] == pytest.approx(
        one["hours"] * 0.4 * 0.3
    )
    assert four["hours"] < one["hours"] / 3.5 and four["rent"] == pytest.approx(8 * four["hours"])


def test_a_measured_speed_counts_and_scales_with_the_model(tiny):
    assert train.main([*TINY, "--max_iters=40", "--eval_interval=40", "--log_interval=5"]) == 0
    rates = sorted(event["tokens_per_second"] for event in read_events(tiny / "out", "train"))
    flags = [*TINY, "--max_iters=1000", "--eval_interval=1000"]
    run = report(*flags, "--metrics=out")["time"]["runs"][0]
    assert run["tokens_per_second"] == pytest.approx(rates[len(rates) // 2])
    assert run["seconds"]["training"] == pytest.approx(1000 * 64 / run["tokens_per_second"])
    deeper = report(*flags, "--metrics=out/metrics.jsonl", "--n_layer=20")["time"]["runs"][0]
    assert deeper["tokens_per_second"] < run["tokens_per_second"] / 3
    given = report(*flags, "--tokens_per_second=64")["time"]["runs"][0]
    assert given["seconds"]["training"] == pytest.approx(1000)


RICH = ["--gpu=h100", "--data_tokens=100e9"]
XL = ["--n_layer=48", "--n_head=25", "--n_embd=1600"]
PILOT = str(ROOT / "config/train_50m_domain.py")

# --- data and advice ------------------------------------------------------------------------------------------------


def test_the_prepared_data_is_read(tiny):
    data = report(*TINY, "--max_iters=100")["data"]
    assert data["tokens"] == 2431 and data["source"] == "data/tiny" and data["bin_bytes"] == 4862
    assert data["epochs"] == pytest.approx(6400 / 2431)
    assert report(*TINY)["model"]["shape"]["vocab_size"] == 128


def test_an_unknown_corpus_leaves_out_what_hangs_on_it_and_data_tokens_fills_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = report("--dataset=mine", "--gpu=4090")
    assert told["data"]["tokens"] is None and "epochs" not in told["data"] and told["memory"]["verdict"] == "fits"
    rich = report("--dataset=mine", "--gpu=4090", "--data_tokens=10e9")
    assert rich["data"]["epochs"] < 1 and "missing" not in rich["data"]
    assert not any("epochs" in item["text"] for item in rich["advice"])
    assert [item["flags"] for item in told["advice"]] == ["--data_tokens=COUNT"], "nothing known is nothing praised"


def test_disk_is_what_the_files_take(tiny):
    assert train.main([*TINY, "--max_iters=4", "--eval_interval=2", "--n_embd=128"]) == 0
    told = report(*TINY, "--n_embd=128")["data"]["checkpoint_bytes"]
    for name in ("my_own_llm.pt", "last.pt"):
        assert (tiny / "out" / name).stat().st_size == pytest.approx(told[name], rel=0.05)


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        (["--vram=12"], ["--batch_size=2", "--gradient_checkpointing=true", "--data_tokens="]),
        (["--vram=8.5"], ["--gradient_checkpointing=true", "--data_tokens="]),
        (["--vram=7.5"], ["--optimizer=muon", "--data_tokens="]),
        (["--vram=3"], ["--n_layer=", "--data_tokens="]),
        ([*RICH, "--dtype=float32"], ["--dtype=bfloat16"]),
        ([*RICH, "--max_iters=1000", "--n_head=4"], ["--max_iters=54100", "--n_head=16"]),
        ([*RICH, "--n_embd=960", "--n_head=10", "--n_layer=8"], []),
        ([*RICH, "--n_head=4"], ["--n_head=16"]),
        ([*RICH, "--n_embd=1000", "--n_head=20"], ["--n_head=16 --n_embd=1024"]),  # of 1,000 no head is a multiple of 8
        ([*RICH, "--gradient_checkpointing=true"], ["--gradient_checkpointing=false"]),
        ([*RICH, "--compile=false"], ["--compile=true"]),
        ([*RICH, "--batch_size=2", "--gradient_accumulation_steps=64"], ["--batch_size=64"]),
        ([*RICH, "--gradient_accumulation_steps=1", "--max_iters=800000"], ["--eval_interval=250"]),
        (RICH, []),
        # 5 MB of text; no advice to read more where that would take weeks; a model too small for what it reads
        ([PILOT, "--vocab_size=32000", "--data_tokens=1.1e6", "--gpu=3060"], ["finetune_domain.py --init_from=gpt2", "--max_iters=134"]),
        ([*XL, "--gpu=3060", "--data_tokens=30e9"], ["--n_layer=24", ""]),
        (["--n_layer=4", "--n_head=4", "--n_embd=128", *RICH], ["--n_layer=8 --n_head=8 --n_embd=512 --max_iters=8033"]),
        # weights that are given keep their shape, and their new corpus need not feed them
        (["--init_from=gpt2-xl", "--gpu=3060", "--data_tokens=30e9"], ["--init_from=gpt2-medium", ""]),
        (["--init_from=gpt2", "--gpu=4090", "--data_tokens=50e6", "--max_iters=1000"], []),
    ],
    ids=str,
)  # fmt: skip
def test_advice_names_the_most_important_first(flags, wanted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = report("--dropout=0", "--dataset=mine", *flags)["advice"]
    assert len(given) == len(wanted), given
    for part, item in zip(wanted, given, strict=True):
        assert part in item["flags"], given


def test_what_is_shared_out_over_the_gpus_that_advice_names_fits(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = report(*XL, "--vram=12", "--dataset=mine")["advice"][0]["text"]
    count, flags = re.search(r"(\d+) such GPUs .*\((.*)\)", text).groups()
    flags = [*XL, "--vram=12", *flags.split()]
    assert report(*flags, f"--gpus={count}")["memory"]["verdict"] == "fits"
    assert report(*flags, f"--gpus={int(count) // 2}")["memory"]["verdict"] != "fits"


def test_advice_that_is_followed_makes_it_fit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for memory in (16, 12, 10, 8, 7.5, 6, 4, 3):
        flags = [f"--vram={memory}", "--dataset=mine"]
        for item in report(*flags)["advice"][:-1]:  # the last is that the corpus is not known
            assert report(*flags, *item["flags"].split())["memory"]["verdict"] == "fits", (memory, item)


# --- the program ----------------------------------------------------------------------------------------------------


def test_the_tool_prints_and_as_json_says_the_same(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert estimate_budget.main(["--gpu=3060", str(ROOT / "config/train_gpt2_medium.py"), "--price_per_hour=0.2"]) == 0
    text = capsys.readouterr().out
    for part in ("MODEL", "MEMORY", "does not fit", "largest batch_size that fits", "TIME", "rent", "DATA", "ADVICE"):
        assert part in text, part
    flags = ["--gpu=3060", "--gpus=2", "--price_per_kwh=0.3", str(ROOT / "config/train_gpt2_medium.py")]
    assert estimate_budget.main(flags) == 0
    text = capsys.readouterr().out
    assert estimate_budget.main([*flags, "--json=true"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told.keys() == {"model", "memory", "time", "data", "advice"}
    assert sum(told["memory"]["items"].values()) == told["memory"]["peak_bytes"]
    assert text.endswith("\n".join(report_lines(told)) + "\n"), "the text is made of the JSON alone"


def test_auto_is_estimated_as_the_batch_that_it_takes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = report("--gpu=a100-80gb", "--batch_size=auto")
    assert told["memory"]["largest"]["plain"] == {"batch_size": 64, "gradient_accumulation_steps": 2}
    row = next(row for row in told["memory"]["batch_sizes"] if row["batch_size"] == 64)
    assert told["memory"]["batch_size"] == 64 and told["memory"]["peak_bytes"] == row["plain"]["bytes"]
    assert told["model"]["tokens_per_step"] == report()["model"]["tokens_per_step"]
    assert report("--vram=1", "--batch_size=auto")["memory"]["batch_size"] == 1


def test_what_makes_an_estimate_too_short_is_told():
    assert "idle between short kernels" in report("--gpu=4090", "--n_embd=256")["time"]["notes"][0]
    assert (
        "exchange" in report("--gpu=4090", "--gpus=2")["time"]["notes"][0] and not report("--gpu=4090")["time"]["notes"]
    )


def test_without_a_card_some_cards_and_no_verdict_are_told(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    told = report()
    assert told["memory"]["verdict"] is None and len(told["time"]["runs"]) == 5
    assert estimate_budget.main([]) == 0 and "RTX 4090" in capsys.readouterr().out


def test_every_setting_is_read_and_every_written_command_is_understood(tmp_path, monkeypatch):
    source = (ROOT / "tools/estimate_budget.py").read_text(encoding="utf-8")
    code = source.split("def main", 1)[1]
    for field in dataclasses.fields(estimate_budget.EstimateConfig):
        assert f"settings.{field.name}" in code or f'"{field.name}"' in code, field.name
    monkeypatch.chdir(ROOT)
    texts = source + (ROOT / "README.md").read_text(encoding="utf-8")
    commands = [words for program, words in commands_in(texts) if program == "tools.estimate_budget"]
    assert len(commands) == 6
    for words in commands:
        assert report(*words)["memory"]["verdict"]


def test_help_comes_before_pytorch_is_imported():
    command = [sys.executable, "-X", "importtime", "-m", "tools.estimate_budget", "--help"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert process.returncode == 0 and process.stdout.startswith(
        "usage: python -m tools.estimate_budget [CONFIG.py ...]"
    )
    assert "--price_per_kwh" in process.stdout and "| tyro" in process.stderr and "| torch" not in process.stderr


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--gpu=voodoo"], ["voodoo", "RTX 4090", "--vram=GB"]),
        (["--gpu=rtx"], ["rtx", "not one card of the table"]),
        (["--device=gpu"], ["device='gpu'", "cuda:N"]),
        (["--metrics=binary"], ["binary is no metrics.jsonl"]),
        (["--max_iters=1e308", "--gpu=4090"], ["no number holds", "max_iters="]),
        (["--tokens_per_second=1e-300"], ["no number holds", "tokens_per_second=1e-300"]),
        (["--tokens_per_second=1e-300", "--json=true"], ["no number holds", "tokens_per_second=1e-300"]),
        (["--batch_size=1e9", "--gradient_accumulation_steps=1e9"], ["batch_size=1000000000", "1e+12 windows"]),
        (["--vram=0"], ["vram=0", "above 0"]),
        (["--gpus=3"], ["gradient_accumulation_steps=16", "gpus=3"]),
        (["--utilisation=45"], ["utilisation=45", "up to 1"]),
        (["--metrics=nowhere"], ["nowhere"]),
        (["--metrics=a", "--tokens_per_second=3"], ["tokens_per_second", "metrics"]),
        (["--prise_per_hour=1"], ["price_per_hour"]),
        (["--batch_sice=1"], ["batch_size"]),
        (["--n_embd=1000"], ["n_embd=1000", "n_head=16"]),
        (["--price_per_kwh=-1"], ["price_per_kwh=-1"]),
    ],
)
def test_faults_are_one_line(flags, parts, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    assert estimate_budget.main(flags) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1 and errors[0].startswith("error: ")
    assert all(part in errors[0] for part in parts), errors


# --- train.py -------------------------------------------------------------------------------------------------------


def settings_used(folder) -> tuple[int, int]:
    told = json.loads((folder / "config.json").read_text())
    return told["batch_size"], told["gradient_accumulation_steps"]


def test_training_begins_with_the_short_form(tiny, monkeypatch, capsys):
    monkeypatch.setattr(Device, "peak_flops", 1e12)
    assert train.main([*TINY, "--max_iters=2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (memory,) = [line for line in lines if line.startswith("memory   about ")]
    assert "GiB free" in memory and not any(line.startswith("warning  ") for line in lines)
    assert any(line.startswith("time     about ") and "45% of the card's 1 TFLOP/s" in line for line in lines)


def test_a_run_that_may_not_fit_is_warned_of(tiny, monkeypatch, capsys):
    load = Load(GPTConfig(16, 128, 2, 2, 32), 4, used_vocabulary=29, dtype="float32", kind="cpu")
    monkeypatch.setattr(Device, "room_bytes", budget.tensor_bytes(load) - 1)
    assert train.main([*TINY, "--max_iters=2"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning  ")]
    assert "--batch_size=1 --gradient_accumulation_steps=4" in line and "--batch_size=auto" in line


def test_auto_takes_the_largest_batch_that_fits_and_keeps_the_global_one(tiny, monkeypatch, capsys):
    flags = [*TINY, "--batch_size=auto", "--gradient_accumulation_steps=6", "--max_iters=4", "--eval_interval=4"]
    assert train.main(flags) == 0
    assert settings_used(tiny / "out") == (48, 1)  # 8 × 6 windows, and room for all of them
    out = capsys.readouterr().out
    assert "48 × 16 × 1 = 768 tokens a step" in out and "batch_size=auto: 48" in out
    load = Load(GPTConfig(16, 128, 2, 2, 32), 8, 6, 29, "float32", kind="cpu")
    monkeypatch.setattr(Device, "room_bytes", int(budget.tensor_bytes(load.with_batch(12)) / budget.TIGHT) + 1)
    assert train.main([*flags, "--out_dir=less"]) == 0
    assert settings_used(tiny / "less") == (12, 4)
    a, b = (train.load_run(tiny / name)[0]["model"] for name in ("out", "less"))
    assert all(torch.allclose(a[name], b[name], atol=1e-5) for name in a)


def test_auto_counts_from_the_config_file_below_it(tiny):
    (tiny / "c.py").write_text("batch_size = 10\ngradient_accumulation_steps = 3\n")
    flags = [flag for flag in TINY if "batch_size" not in flag and "accumulation" not in flag]
    assert train.main([*flags, "c.py", "--batch-size=auto", "--max_iters=2"]) == 0
    assert settings_used(tiny / "out") == (30, 1)
    (tiny / "d.py").write_text("batch_size = 'auto'\n")
    assert train.main([*flags, "d.py", "--max_iters=2", "--out_dir=d"]) == 0
    assert settings_used(tiny / "d") == (128, 1)  # the defaults, 8 × 16


def test_auto_tries_and_halves_where_memory_runs_out(tiny, monkeypatch, capsys):
    tried = []
    real = GPT.forward

    def forward(self, ids, targets=None):
        if targets is not None and self.training:
            tried.append(len(ids))
            if len(ids) > 8:
                raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, ids, targets)

    monkeypatch.setattr(GPT, "forward", forward)
    flags = [*TINY, "--gradient_accumulation_steps=4", "--max_iters=3", "--eval_interval=3"]
    assert train.main([*flags, "--batch_size=auto"]) == 0
    assert tried[:5] == [32, 16, 8, 8, 8] and settings_used(tiny / "out") == (8, 4)
    stored = train.load_run(tiny / "out")[0]["config"]
    assert (stored["batch_size"], stored["gradient_accumulation_steps"]) == (8, 4)
    tried.clear()
    assert train.main(["--init_from=resume", "--max_iters=5", "--device=cpu"]) == 0
    assert set(tried) == {8}  # used again, nothing is tried
    monkeypatch.setattr(GPT, "forward", real)
    assert train.main(["--init_from=resume", "--max_iters=6", "--batch_size=auto"]) == 0
    assert settings_used(tiny / "out") == (32, 1)


def test_a_model_that_does_not_run_at_all_is_one_error(tiny, monkeypatch, capsys):
    def forward(self, ids, targets=None):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(GPT, "forward", forward)
    assert train.main([*TINY, "--batch_size=auto", "--gradient_accumulation_steps=2"]) == 2
    error = capsys.readouterr().err
    assert "batch_size=1 " in error and "gradient_checkpointing=true" in error


def test_choosing_changes_nothing_of_a_run(tiny):
    flags = [*TINY, "--max_iters=6", "--eval_interval=3", "--dropout=0.1"]
    assert train.main([*flags, "--out_dir=a", "--batch_size=auto", "--gradient_accumulation_steps=1"]) == 0
    assert train.main([*flags, "--out_dir=b", "--batch_size=8"]) == 0
    a, b = (train.load_run(tiny / name)[0]["model"] for name in "ab")
    assert settings_used(tiny / "a") == settings_used(tiny / "b") and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.slow
def test_processes_agree_on_the_batch(tiny):
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(ROOT / "train.py"), *TINY]
    flags = ["--batch_size=auto", "--gradient_accumulation_steps=4", "--max_iters=2", "--eval_interval=2"]
    process = subprocess.run([sys.executable, *words, *flags], cwd=tiny, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    assert settings_used(tiny / "out") == (16, 2)


def test_the_error_of_the_command_line_names_auto(tiny):
    assert_loud(
        run_program("train.py", *TINY, "--batch_size=many", cwd=tiny), "batch_size", "'many'", "a whole number or auto"
    )


# --- memory of the machine ------------------------------------------------------------------------------------------


def test_available_memory_heeds_the_container(tmp_path):
    assert available_memory(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:       1000 kB\nMemAvailable:    800 kB\n")
    assert available_memory(tmp_path) == 800 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.stat").write_text("anon 5\ninactive_file 100\n")
    (group / "memory.current").write_text("300\n")
    (group / "memory.max").write_text("max\n")
    assert available_memory(tmp_path) == 800 * 1024
    (group / "memory.max").write_text("1000\n")
    assert available_memory(tmp_path) == 800


def test_the_first_choice_that_runs_is_taken_and_other_faults_pass():
    def attempt(choice: int) -> None:
        if choice > 3:
            raise MemoryError

    device = Device("cpu", "test")
    assert first_that_runs(device, [5, 4, 3, 2], attempt) == 3 and first_that_runs(device, [9, 8], attempt) is None
    with pytest.raises(RuntimeError, match="shape"):
        first_that_runs(device, [1], lambda choice: (_ for _ in ()).throw(RuntimeError("shape")))


def test_the_tables_of_the_readme_come_from_the_tool(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [line.split(" | ") for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines()]
    seen = 0
    for name, *cells in rows:
        config = [str(ROOT / name.strip("| `"))] if "config/train_gpt2" in name else []
        if len(cells) == 4 and "GiB" in cells[0]:
            table = {row["batch_size"]: row for row in report("--gpu=4090", *config)["memory"]["batch_sizes"]}
            wanted = [table[size][key]["bytes"] for size in (8, 4) for key in ("plain", "checkpointed")]
            assert [float(cell.split()[0]) for cell in cells] == [round(size / 2**30, 1) for size in wanted], name
            seen += 1
        elif len(cells) == 4 and "e+" in cells[0]:
            times = [report(f"--gpu={card}", *config)["time"] for card in ("3090", "4090", "a100")]
            assert cells[0] == f"{times[0]['flops']:.1e}", name
            hours = [time["runs"][0]["hours"] for time in times]
            assert [int(cell.split()[0]) for cell in cells[1:]] == [round(count) for count in hours], name
            seen += 1
    assert seen == 5
