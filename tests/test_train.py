"""train.py: the loop, its numbers, its files and its faults, on the tiny data set."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, SHARED, TINY, TINY_TEXT, assert_loud, fill_randomly, read_events, run_program

import train
from checkpoint import load_checkpoint
from configurator import load_config
from dataset import TokenData, read_meta
from device import Device, choose_device


def fit(*flags: str) -> int:
    """Trains in this process with the tiny settings."""
    return train.main([*TINY, *flags])


def weights(folder: Path, name: str = "last.pt") -> dict[str, torch.Tensor]:
    return load_checkpoint(folder / name)["model"]


def assert_same_weights(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], tolerance: float = 0.0) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=tolerance, msg=name)


def losses(folder: Path) -> dict[int, float]:
    return {event["iter"]: event["loss"] for event in read_events(folder, "train")}


def make_trainer(*flags: str, device: Device | None = None) -> train.Trainer:
    config, _ = load_config(train.TrainConfig, [*TINY, *flags])
    data = TokenData(Path(config.data_dir) / config.dataset, config.block_size, config.seed)
    return train.Trainer(config, device or choose_device("cpu", "float32"), data, None)


# --- a run -----------------------------------------------------------------------------------------------------


def test_loss_starts_at_the_logarithm_of_the_vocabulary_and_falls(tiny):
    assert fit("--max_iters=60", "--lr_decay_iters=60", "--learning_rate=1e-2", "--eval_interval=20") == 0
    evals = read_events(tiny / "out", "eval")
    assert [event["iter"] for event in evals] == [0, 20, 40, 60]
    assert evals[0]["val_loss"] == pytest.approx(math.log(29), abs=0.3)
    assert evals[-1]["val_loss"] < 2.6 < evals[0]["val_loss"]
    assert evals[-1]["val_perplexity"] == pytest.approx(math.exp(evals[-1]["val_loss"]))


def test_a_run_leaves_the_files_and_events_of_the_design(tiny):
    assert fit("--max_iters=20", "--eval_interval=10", "--checkpoint_interval=5", "--log_interval=5") == 0
    out = tiny / "out"
    assert {path.name for path in out.iterdir()} == {
        ".lock", "my_own_llm.pt", "last.pt", "previous.pt", "config.json", "metrics.jsonl", "loss.png", "samples.txt"
    }  # fmt: skip
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((out / "config.json").read_text())["n_embd"] == 32
    kinds = [json.loads(line)["event"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert kinds[0] == "start" and kinds[-1] == "end" and kinds.count("checkpoint") == 4
    event = read_events(out, "train")[-1]
    assert event.keys() >= {"loss", "lr", "grad_norm", "tokens", "tokens_per_second", "mfu", "elapsed_seconds"}
    assert event["tokens"] == 20 * 64 and event["iter"] == 20
    best = load_checkpoint(out / "my_own_llm.pt")
    assert "optimizer" not in best and best["tokenizer"]["json"] and best["model_args"]["gelu"] == "tanh"


def test_what_a_person_sees_before_the_first_step(tiny):
    process = run_program("train.py", *TINY, "--max_iters=4", cwd=tiny)
    assert process.returncode == 0, process.stderr
    for part in (
        "settings from flags: dataset=tiny",
        "device   cpu",
        "2 layers, 2 heads, width 32, context 16, 30,080 parameters (vocabulary 29, 128 rows)",
        "data     data/tiny: train 2,431, val 270 tokens",
        "4 × 16 × 1 = 64 tokens a step",
        "4 steps = 256 tokens = 0.1 epochs",
    ):
        assert part in process.stdout, part


def test_every_checkpoint_holds_plain_values_and_tensors_alone(tiny):
    """H23."""
    assert fit("--max_iters=4", "--eval_interval=2") == 0
    for name in ("last.pt", "my_own_llm.pt"):
        state = torch.load(tiny / "out" / name, weights_only=True)
        assert type(state["best_val_loss"]) is float and type(state["iter_num"]) is int
        assert not any("_orig_mod" in key or "module." in key for key in state["model"])


def test_the_last_weights_are_saved_and_the_step_counts_updates(tiny):
    """H20: eight steps are eight updates, and their result is on disk."""
    trainer = make_trainer("--max_iters=8", "--eval_interval=100")
    for _ in range(8):
        trainer.train_step()
        trainer.step += 1
    assert fit("--max_iters=8", "--eval_interval=100") == 0
    state = load_checkpoint(tiny / "out" / "last.pt")
    assert state["iter_num"] == 8
    assert_same_weights(state["model"], dict(trainer.model.state_dict()))
    assert load_checkpoint(tiny / "out" / "my_own_llm.pt")["iter_num"] == 8


def test_the_learning_rate_is_a_closed_form_of_the_step():
    """H17."""
    flags = ["--learning_rate=6e-4", "--min_lr=6e-5", "--warmup_iters=10", "--lr_decay_iters=100"]
    config, _ = load_config(train.TrainConfig, flags)
    expected = {0: 5.4545e-5, 9: 5.4545e-4, 10: 6e-4, 55: 3.3e-4, 100: 6e-5, 500: 6e-5}
    for step, rate in expected.items():
        assert config.learning_rate_at(step) == pytest.approx(rate, rel=1e-4)
    config, _ = load_config(train.TrainConfig, ["--max_iters=1000", "--warmup_iters=10"])
    assert config.learning_rate_at(1000) == pytest.approx(6e-5)  # a tenth, at max_iters
    assert load_config(train.TrainConfig, ["--decay_lr=no"])[0].learning_rate_at(0) == 6e-4
    short, _ = load_config(train.TrainConfig, ["--max_iters=200"])
    assert short.warmup_steps == 20  # not 2,000 of 200


def test_weight_decay_touches_matrices_alone(tiny):
    """H26."""
    trainer = make_trainer("--n_layer=1")
    decayed, plain = trainer.optimizer.param_groups
    assert len(decayed["params"]) == 6 and decayed["weight_decay"] == 0.1
    assert len(plain["params"]) == 10 and plain["weight_decay"] == 0.0
    assert len({id(p) for group in (decayed, plain) for p in group["params"]}) == len(list(trainer.model.parameters()))


def test_muon_takes_the_blocks_matrices_and_turns_each_step_into_an_orthogonal_one(tiny):
    """All directions of a matrix move equally far, by AdamW's usual step: 0.2 RMS times the learning rate, for wide
    and high ones alike. A step that is not finite is left out whole.
    """
    trainer = make_trainer("--optimizer=muon", "--n_layer=1", "--weight_decay=0", "--decay_lr=false")
    muon, decayed, plain = (group["params"] for group in trainer.optimizer.param_groups)
    names = {id(p): name for name, p in trainer.model.named_parameters()}
    assert [names[id(p)].split(".h.0.")[1] for p in muon] == [
        f"{name}.weight" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    ]
    assert len(decayed) == 2 and len(plain) == 10
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train_step()
    old = dict(zip(map(id, trainer.model.parameters()), before, strict=True))
    for matrix in muon:
        change = (old[id(matrix)] - matrix.detach()) / trainer.config.learning_rate
        speeds = torch.linalg.svdvals(change) / (0.2 * math.sqrt(max(matrix.shape)))
        assert 0.6 < speeds.median() < 1.3 and speeds.max() < 1.4, names[id(matrix)]
    after = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.model.lm_head.weight.register_hook(lambda gradient: gradient * math.nan)
    trainer.train_step()
    assert all(torch.equal(a, p) for a, p in zip(after, trainer.model.parameters(), strict=True))
    assert int(trainer.skipped_steps) == 1


def test_muon_is_for_whole_matrices_and_whole_runs(tiny):
    assert_loud(run_program("train.py", "--optimizer=muon", "--shard=true", cwd=tiny), "optimizer=muon", "shard=true")
    assert fit("--max_iters=1") == 0
    process = run_program("train.py", "--init_from=resume", "--optimizer=muon", "--max_iters=2", cwd=tiny)
    assert_loud(process, "optimizer=muon", "adamw")


def test_a_step_never_waits_for_the_device(tiny):
    """On a GPU each number that Python asks for stops the queue; a step of four micro-steps asks for none."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counter(TorchDispatchMode):
        asked = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            waits = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero")
            self.asked += str(function).removeprefix("aten.").split(".")[0] in waits
            return function(*args, **(kwargs or {}))

    trainer = make_trainer("--gradient_accumulation_steps=4", "--dropout=0.1")
    trainer.train_step()
    with Counter() as counter:
        loss, _, _ = trainer.train_step()
        assert counter.asked == 0
        loss.item()
        assert counter.asked == 1


# --- numbers that agree ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("stops", "optimizer"), [([8], "adamw"), ([3, 7, 9], "adamw"), ([8], "muon")], ids=str)
def test_a_resumed_run_repeats_an_unbroken_one_bit_for_bit(tiny, monkeypatch, dtype, stops, optimizer):
    """H15, with dropout, accumulation, evaluations on the way, and the scaler of float16."""
    monkeypatch.setattr(train, "choose_device", lambda *_, **__: Device("cpu", "test", dtype))
    flags = ("--dropout=0.2", "--gradient_accumulation_steps=2", "--eval_interval=4", "--log_interval=1", "--n_embd=16")
    flags += (f"--optimizer={optimizer}",)
    assert fit("--max_iters=12", "--out_dir=straight", *flags) == 0
    assert fit(f"--max_iters={stops[0]}", "--out_dir=broken", *flags) == 0
    for stop in [*stops[1:], 12]:
        assert train.main(["--init_from=resume", "--out_dir=broken", f"--max_iters={stop}"]) == 0
    assert losses(tiny / "straight") == losses(tiny / "broken")
    straight, broken = (load_checkpoint(tiny / name / "last.pt") for name in ("straight", "broken"))
    assert_same_weights(straight["model"], broken["model"])
    for a, b in zip(straight["optimizer"]["state"].values(), broken["optimizer"]["state"].values(), strict=True):
        assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
    kinds = {key for moments in straight["optimizer"]["state"].values() for key in moments}
    assert ("momentum_buffer" in kinds) == (optimizer == "muon") and "exp_avg" in kinds
    assert straight["scaler"] == broken["scaler"] and straight["tokens"] == broken["tokens"]
    assert straight["best_val_loss"] >= broken["best_val_loss"]  # which was evaluated at each stop, too
    rates = [[e["lr"] for e in read_events(tiny / name, "train")] for name in ("straight", "broken")]
    assert rates[0] == rates[1]
    elapsed = [e["elapsed_seconds"] for e in read_events(tiny / "broken", "train")]
    assert elapsed == sorted(elapsed)


def test_evaluating_changes_neither_training_nor_its_own_result(tiny):
    """H16."""
    flags = ("--max_iters=8", "--dropout=0.1", "--log_interval=1")
    assert fit("--eval_interval=4", "--out_dir=a", *flags) == 0
    assert fit("--eval_interval=1", "--out_dir=b", *flags) == 0
    assert losses(tiny / "a") == losses(tiny / "b")
    often = {event["iter"]: event["val_loss"] for event in read_events(tiny / "b", "eval")}
    assert all(often[event["iter"]] == event["val_loss"] for event in read_events(tiny / "a", "eval"))


def test_accumulation_equals_a_large_batch(tiny):
    """H33."""
    assert fit("--max_iters=3", "--batch_size=8", "--out_dir=a") == 0
    assert fit("--max_iters=3", "--batch_size=2", "--gradient_accumulation_steps=4", "--out_dir=b") == 0
    assert_same_weights(weights(tiny / "a"), weights(tiny / "b"), tolerance=1e-5)
    assert losses(tiny / "a")[1] == pytest.approx(losses(tiny / "b")[1], abs=1e-5)


def test_logged_loss_is_the_mean_over_micro_steps(tiny):
    trainer = make_trainer("--gradient_accumulation_steps=4")
    singles = []
    for micro_step in range(4):
        x, y = (torch.from_numpy(array) for array in trainer.data.train_batch(micro_step * 4, 4))
        singles.append(trainer.model(x, y).item())
    assert trainer.train_step()[0].item() == pytest.approx(sum(singles) / 4, abs=1e-6)
    assert len(set(singles)) == 4


def test_gradient_checkpointing_gives_the_same_losses(tiny):
    flags = ("--max_iters=6", "--dropout=0.3", "--log_interval=1")
    assert fit("--out_dir=a", *flags) == 0
    assert fit("--out_dir=b", "--gradient_checkpointing=true", *flags) == 0
    a, b = losses(tiny / "a"), losses(tiny / "b")
    assert all(a[step] == pytest.approx(b[step], abs=1e-6) for step in a)


def test_gradient_checkpointing_saves_memory(tiny):
    """Bytes that autograd keeps for the backward pass, storages once."""

    def kept(*flags: str) -> int:
        trainer = make_trainer("--n_layer=4", *flags)
        storages = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        x, y = (torch.from_numpy(array) for array in trainer.data.train_batch(0, 4))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            trainer.model(x, y)
        return sum(storages.values())

    assert kept("--gradient_checkpointing=true") < 0.6 * kept()


@pytest.mark.slow
def test_compile_gives_the_same_losses(tiny):
    if train.compile_obstacle(choose_device("cpu", "float32")):
        pytest.skip("no compiler")
    assert fit("--max_iters=3", "--n_layer=1", "--log_interval=1", "--out_dir=a") == 0
    assert fit("--max_iters=3", "--n_layer=1", "--log_interval=1", "--out_dir=b", "--compile=true") == 0
    a, b = losses(tiny / "a"), losses(tiny / "b")
    assert all(a[step] == pytest.approx(b[step], abs=1e-4) for step in a)


# --- resuming --------------------------------------------------------------------------------------------------


def test_settings_given_on_resume_win_and_are_told(tiny):
    """H18."""
    assert fit("--max_iters=4") == 0
    process = run_program(
        "train.py", "--init_from=resume", "--learning_rate=2e-4", "--decay_lr=False", "--max_iters=6",
        "--weight_decay=0.3", "--beta2=0.9", "--log_interval=1", cwd=tiny,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    assert "learning_rate was 0.001, now 0.0002" in process.stdout and "weight_decay was 0.1, now 0.3" in process.stdout
    assert [event["lr"] for event in read_events(tiny / "out", "train") if event["iter"] > 4] == [2e-4, 2e-4]
    groups = torch.load(tiny / "out" / "last.pt", weights_only=True)["optimizer"]["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0] and groups[0]["betas"][1] == 0.9


def test_a_longer_run_on_resume_stretches_the_schedule(tiny):
    """H19."""
    assert fit("--max_iters=10", "--lr_decay_iters=10") == 0
    flags = ["--init_from=resume", "--max_iters=20", "--lr_decay_iters=20", "--log_interval=1"]
    assert train.main(flags) == 0
    rates = {event["iter"]: event["lr"] for event in read_events(tiny / "out", "train")}
    assert rates[11] == pytest.approx(6.2814e-4, rel=1e-4)


def test_more_steps_without_a_longer_decay_is_told(tiny):
    """H19: the extension would run at min_lr."""
    assert fit("--max_iters=10", "--lr_decay_iters=10") == 0
    process = run_program("train.py", "--init_from=resume", "--max_iters=14", cwd=tiny)
    assert process.returncode == 0 and "lr_decay_iters=10 is less than max_iters=14" in process.stdout


@pytest.mark.parametrize("flag", ["--block_size=64", "--n_layer=3", "--bias=false", "--n_embd=64", "--gelu=exact"])
def test_another_shape_on_resume_is_refused(tiny, flag):
    """H30."""
    assert fit("--max_iters=2") == 0
    before = (tiny / "out" / "last.pt").read_bytes()
    process = run_program("train.py", "--init_from=resume", flag, "--max_iters=4", cwd=tiny)
    key, value = flag[2:].split("=")
    assert_loud(process, key, value.capitalize() if value == "false" else value, "--out_dir")
    assert (tiny / "out" / "last.pt").read_bytes() == before


def test_other_data_on_resume_is_refused(tiny):
    import prepare

    assert fit("--max_iters=2") == 0
    (tiny / "other.txt").write_text("the lazy dog. " * 400)
    flags = [f"--tokenizer={tiny / 'data/tiny/tokenizer.json'}", "--num_proc=1", f"--data_dir={tiny / 'more'}"]
    assert prepare.main(["--dataset=other", f"--input={tiny / 'other.txt'}", *flags]) == 0
    flags = ["--init_from=resume", "--data_dir=more", "--dataset=other", "--max_iters=4"]
    then, now = (read_meta(Path(name))["splits"]["train"]["tokens"] for name in ("data/tiny", "more/other"))
    told = f"the number of training tokens was {then}, is {now}"
    process = run_program("train.py", *flags, cwd=tiny)
    assert_loud(process, "was trained on", "more/other", told, "--init_from=out/last.pt")
    assert "tokenizer was" not in process.stderr and len(process.stderr) < 400


def test_resuming_a_finished_run_says_so_and_touches_nothing(tiny):
    assert fit("--max_iters=4") == 0
    before = {path.name: path.read_bytes() for path in (tiny / "out").iterdir()}
    process = run_program("train.py", "--init_from=resume", cwd=tiny)
    assert process.returncode == 0 and "finished at step 4" in process.stdout
    assert {path.name: path.read_bytes() for path in (tiny / "out").iterdir()} == before


def test_resuming_nothing_is_a_loud_error(tiny):
    assert_loud(run_program("train.py", *TINY, "--init_from=resume", "--out_dir=nix", cwd=tiny), "nix", "last.pt")
    assert not (tiny / "nix").exists()


def test_a_moved_run_goes_on_in_its_new_folder(tiny):
    assert fit("--max_iters=2", "--out_dir=old") == 0
    os.rename(tiny / "old", tiny / "new")
    assert train.main(["--init_from=resume", "--out_dir=new", "--max_iters=4"]) == 0
    assert load_checkpoint(tiny / "new" / "last.pt")["iter_num"] == 4 and not (tiny / "old").exists()


def test_metrics_hold_each_step_once_after_a_kill(tiny):
    """Steps after the last checkpoint come again; their first account is dropped."""
    assert fit("--max_iters=4", "--log_interval=1") == 0
    with open(tiny / "out" / "metrics.jsonl", "a") as file:
        file.write('{"event": "train", "iter": 5, "loss": 9.0, "lr": 0.1}\n5\n{}\n{"event": "tra')
    assert train.main(["--init_from=resume", "--max_iters=6", "--log_interval=1"]) == 0
    assert [event["iter"] for event in read_events(tiny / "out", "train")] == [1, 2, 3, 4, 5, 6]
    assert losses(tiny / "out")[5] < 5


# --- what is kept and refused ------------------------------------------------------------------------------------


def test_the_best_model_stays_when_later_ones_are_worse(tiny, monkeypatch):
    """H25."""
    values = iter([9.9, 3.0, 2.0, 2.5, 2.2])
    monkeypatch.setattr(train.Trainer, "evaluate", lambda self: (1.0, next(values)))
    assert fit("--max_iters=8", "--eval_interval=2", "--always_save_checkpoint=true") == 0
    best, last = (load_checkpoint(tiny / "out" / name) for name in ("my_own_llm.pt", "last.pt"))
    assert best["best_val_loss"] == 2.0 and best["iter_num"] == 4
    assert last["best_val_loss"] == 2.0 and last["iter_num"] == 8
    values = iter([2.1])
    assert train.main(["--init_from=resume", "--max_iters=10"]) == 0
    assert load_checkpoint(tiny / "out" / "my_own_llm.pt")["iter_num"] == 4


def test_patience_stops_after_evaluations_without_improvement(tiny, monkeypatch):
    values = iter([9.9, 3.0, 2.0, 2.5, 2.2, 1.0])
    monkeypatch.setattr(train.Trainer, "evaluate", lambda self: (1.0, next(values)))
    assert fit("--max_iters=20", "--eval_interval=2", "--patience=2") == 0
    assert load_checkpoint(tiny / "out" / "last.pt")["iter_num"] == 8


def test_an_existing_run_is_never_overwritten_unasked(tiny):
    assert fit("--max_iters=2") == 0
    before = (tiny / "out" / "last.pt").read_bytes()
    process = run_program("train.py", *TINY, "--max_iters=4", cwd=tiny)
    assert_loud(process, "out already holds a run", "--init_from=resume", "--overwrite=true")
    assert (tiny / "out" / "last.pt").read_bytes() == before
    assert fit("--max_iters=4", "--overwrite=true") == 0
    assert load_checkpoint(tiny / "out" / "last.pt")["iter_num"] == 4 and not (tiny / "out" / "previous.pt").exists()


def test_a_second_training_on_one_run_folder_is_refused(tiny):
    import checkpoint

    (tiny / "out").mkdir()
    with checkpoint.lock_run_folder(tiny / "out"):
        assert_loud(run_program("train.py", *TINY, "--max_iters=2", cwd=tiny), "another training", "--out_dir")
    assert fit("--max_iters=2") == 0


def test_eval_only_writes_nothing(tiny):
    assert fit("--max_iters=4") == 0
    before = {path.name: path.read_bytes() for path in (tiny / "out").iterdir()}
    process = run_program("train.py", "--init_from=resume", "--eval_only=true", cwd=tiny)
    assert process.returncode == 0 and "val perplexity" in process.stdout
    assert {path.name: path.read_bytes() for path in (tiny / "out").iterdir()} == before
    assert run_program("train.py", *TINY, "--eval_only=true", "--out_dir=none", cwd=tiny).returncode == 0
    assert not (tiny / "none").exists()


def test_weights_of_another_checkpoint_start_a_new_run(tiny):
    assert fit("--max_iters=4", "--out_dir=base") == 0
    flags = ["--init_from=base/my_own_llm.pt", "--max_iters=2", "--out_dir=next", "--learning_rate=1e-9", "--min_lr=0"]
    assert fit(*flags) == 0
    assert_same_weights(weights(tiny / "base", "my_own_llm.pt"), weights(tiny / "next"), tolerance=1e-6)
    assert load_checkpoint(tiny / "next" / "last.pt")["iter_num"] == 2


def make_hugging_face_folder(folder: Path, activation: str = "gelu_new", positions: int = 32) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = {"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": positions, "vocab_size": 64}
    model = GPT2LMHeadModel(GPT2Config(activation_function=activation, **shape))
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3)
    model.save_pretrained(folder)


@pytest.mark.parametrize(("activation", "gelu"), [("gelu_new", "tanh"), ("gelu", "exact")])
def test_a_hugging_face_folder_gives_the_same_logits(tmp_path, activation, gelu):
    from transformers import GPT2LMHeadModel

    from checkpoint import build_model
    from origin import load_weights

    make_hugging_face_folder(tmp_path, activation)
    model = build_model(load_weights(str(tmp_path)), tmp_path)
    ids = torch.randint(0, 64, (2, 32), generator=torch.Generator().manual_seed(0))
    expected = GPT2LMHeadModel.from_pretrained(tmp_path).eval()(ids).logits
    assert model.config.gelu == gelu
    torch.testing.assert_close(model(ids), expected, rtol=0, atol=1e-5)


def test_a_hugging_face_folder_starts_a_run_whose_checkpoint_says_its_shape(tiny):
    make_hugging_face_folder(tiny / "hf")
    keep = [flag for flag in TINY if not flag.startswith(("--n_", "--block"))]
    assert train.main([*keep, "--init_from=hf", "--block_size=16", "--max_iters=2"]) == 0
    state = load_checkpoint(tiny / "out" / "last.pt")
    assert state["model_args"]["n_embd"] == 16 and state["config"]["n_embd"] == 16
    assert state["model"]["transformer.wpe.weight"].shape == (16, 16)
    assert train.main(["--init_from=resume", "--max_iters=3"]) == 0
    process = run_program("train.py", *TINY, "--init_from=hf", "--out_dir=b", cwd=tiny)
    assert_loud(process, "n_layer=2", "n_layer=1", "leave --n_layer away")
    (tiny / "three.py").write_text("n_layer = 3")
    process = run_program("train.py", "three.py", *keep, "--init_from=hf", "--out_dir=b", cwd=tiny)
    assert_loud(process, "n_layer=3", "leave n_layer in three.py away", "--n_layer=1")


def test_a_folder_of_another_architecture_is_refused(tiny):
    make_hugging_face_folder(tiny / "hf", "relu")
    assert_loud(run_program("train.py", *TINY, "--init_from=hf", cwd=tiny), "hf/config.json", "relu")
    assert_loud(run_program("train.py", *TINY, "--init_from=data", cwd=tiny), "data", "config.json")


def test_what_is_no_origin_of_a_run_is_named_with_those_that_are(tiny, capsys):
    for name in ("foo", "gpt2-xxl", ""):
        assert fit(f"--init_from={name}") == 2
        told = capsys.readouterr().err
        assert f"init_from={name!r}" in told and "gpt2-medium" in told and "checkpoint=" not in told


def test_a_run_folder_starts_a_run_with_its_best_model(tiny):
    assert fit("--max_iters=2", "--out_dir=base") == 0
    assert fit("--max_iters=1", "--init_from=base", "--learning_rate=1e-9", "--min_lr=0", "--out_dir=next") == 0
    assert_same_weights(weights(tiny / "base", "my_own_llm.pt"), weights(tiny / "next"), tolerance=1e-6)


def test_a_hugging_face_folder_with_another_tokenizer_is_refused(tiny, capsys):
    """Its tokenizer.json is written anew by whoever exports, so what counts is the ids that it gives."""
    make_hugging_face_folder(tiny / "hf")
    spec = json.loads((tiny / "data/tiny/tokenizer.json").read_text())
    (tiny / "hf/tokenizer.json").write_text(json.dumps(spec | {"padding": None}, indent=2))
    flags = [flag for flag in TINY if not flag.startswith("--n_")]
    assert train.main([*flags, "--init_from=hf", "--max_iters=1"]) == 0
    vocabulary = spec["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (tiny / "hf/tokenizer.json").write_text(json.dumps(spec))
    assert train.main([*flags, "--init_from=hf", "--max_iters=1", "--out_dir=b"]) == 2
    told = capsys.readouterr().err
    assert "hf/tokenizer.json (SHA-256" in told and "data/tiny was prepared with chars.json (SHA-256" in told


def test_weights_of_another_tokenizer_are_refused(tiny):
    assert fit("--max_iters=1", "--out_dir=base") == 0
    path = tiny / "base" / "my_own_llm.pt"
    state = torch.load(path, weights_only=True)
    state["tokenizer"] = {"kind": "gpt2", "name": "gpt2"}
    torch.save(state, path)
    process = run_program("train.py", *TINY, "--init_from=base/my_own_llm.pt", "--out_dir=next", cwd=tiny)
    assert_loud(process, "gpt2", "chars.json")


def test_a_checkpoint_of_nanogpt_starts_a_run_with_its_gelu(tiny):
    """Prefixed keys, no `gelu`, no biases, a tensor for the loss: such files exist."""
    assert fit("--max_iters=1", "--out_dir=base", "--bias=false") == 0
    state = torch.load(tiny / "base" / "my_own_llm.pt", weights_only=True)
    arguments = {key: value for key, value in state["model_args"].items() if key != "gelu"}
    prefixed = {f"_orig_mod.{name}": tensor for name, tensor in state["model"].items()}
    foreign = {"model": prefixed, "model_args": arguments, "iter_num": 1, "best_val_loss": torch.tensor(3.0)}
    torch.save(foreign, tiny / "ckpt.pt")
    keep = [flag for flag in TINY if not flag.startswith("--n_")]
    assert train.main([*keep, "--init_from=ckpt.pt", "--max_iters=1"]) == 0
    assert load_checkpoint(tiny / "out" / "last.pt")["model_args"]["gelu"] == "exact"


def test_no_gpu_is_an_error_that_names_the_ways_out(tiny):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert_loud(run_program("train.py", "--dataset=tiny", cwd=tiny), "config/train_demo.py", "--device=cpu")
    assert not (tiny / "out").exists()


def test_float16_without_cuda_is_an_error(tiny):
    """H27."""
    process = run_program("train.py", *TINY, "--dtype=float16", "--max_iters=2", cwd=tiny)
    assert_loud(process, "float16", "cpu", "--dtype=float32")


def test_the_effective_number_format_is_recorded(tiny):
    flags = [flag for flag in TINY if "dtype" not in flag]
    assert train.main([*flags, "--max_iters=1"]) == 0
    said = load_checkpoint(tiny / "out" / "last.pt")["config"]["dtype"]
    assert said == ("bfloat16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "float32")


def test_validation_shorter_than_the_context_is_an_error(tiny):
    """H03."""
    process = run_program("train.py", *TINY, "--block_size=400", cwd=tiny)
    assert_loud(process, "split val", "270", "401")
    assert not (tiny / "out").exists()


def test_missing_data_names_the_command_that_makes_it(tiny):
    assert_loud(run_program("train.py", *TINY, "--dataset=nix", cwd=tiny), "data/nix", "./prepare_data.sh")


def test_ids_outside_the_vocabulary_are_named(tmp_path):
    """H29."""
    folder = tmp_path / "data" / "tiny"
    folder.mkdir(parents=True)
    ids = np.full(400, 7, dtype="<u2")
    ids[200] = 100
    for split in ("train", "val"):
        ids.tofile(folder / f"{split}.bin")
    splits = {split: {"tokens": 400, "documents": 1} for split in ("train", "val")}
    meta = {"format_version": 1, "dtype": "uint16", "splits": splits, "vocab_size": 65, "eot_id": 0}
    (folder / "meta.json").write_text(json.dumps(meta | {"tokenizer": {"kind": "gpt2", "name": "gpt2"}}))
    process = run_program("train.py", *TINY, "--max_iters=30", cwd=tmp_path)
    assert_loud(process, "train.bin", "id 100", "vocab_size is 65")


def test_a_data_folder_of_nanogpt_trains_with_gpt2s_vocabulary(tmp_path):
    folder = tmp_path / "data" / "tiny"
    folder.mkdir(parents=True)
    for split in ("train", "val"):
        np.random.default_rng(0).integers(0, 50257, 500).astype("<u2").tofile(folder / f"{split}.bin")
    process = run_program("train.py", *TINY, "--max_iters=2", cwd=tmp_path)
    assert process.returncode == 0 and "GPT-2's vocabulary" in process.stdout
    assert load_checkpoint(tmp_path / "out" / "my_own_llm.pt")["model_args"]["vocab_size"] == 50304


def make_character_folder(folder: Path) -> list[str]:
    """A data folder of nanoGPT with the characters of the tiny text in its meta.pkl; returns them."""
    import pickle

    folder.mkdir(parents=True)
    characters = sorted(set(TINY_TEXT))
    for split in ("train", "val"):
        np.array([characters.index(c) for c in TINY_TEXT], dtype="<u2").tofile(folder / f"{split}.bin")
    names = {"itos": dict(enumerate(characters)), "stoi": {c: i for i, c in enumerate(characters)}}
    (folder / "meta.pkl").write_bytes(pickle.dumps(names | {"vocab_size": len(characters)}))
    return characters


def test_a_character_model_of_nanogpt_writes_and_goes_on_with_its_own_data(tmp_path, monkeypatch, capsys):
    """Its rows are the characters alone. The one that is added for an end of text is never the most likely, and takes
    less than its share of the probability. Data of another kind is refused, whose ids would mean something else.
    """
    import sample
    from checkpoint import build_model
    from model import GPT, GPTConfig

    monkeypatch.chdir(tmp_path)
    rows = len(make_character_folder(tmp_path / "data" / "tiny"))
    shape = {
        "n_layer": 2,
        "n_head": 2,
        "n_embd": 32,
        "block_size": 16,
        "bias": False,
        "vocab_size": rows,
        "dropout": 0.0,
    }
    torch.manual_seed(0)
    whole = fill_randomly(GPT(GPTConfig(**shape, gelu="exact")), 1)
    foreign = {"model": whole.state_dict(), "model_args": shape, "iter_num": 1, "best_val_loss": torch.tensor(3.0)}
    torch.save(foreign | {"config": {"dataset": "tiny"}}, "ckpt.pt")
    ids = torch.arange(16)[None]
    longer = build_model(load_checkpoint(Path("ckpt.pt")), Path("ckpt.pt")).eval()(ids).detach()
    torch.testing.assert_close(longer[..., :rows], whole.eval()(ids).detach())
    assert longer.shape[-1] == rows + 1 and (longer.softmax(-1)[..., rows] < 1 / rows).all()
    assert (longer.argmax(-1) < rows).all()
    assert sample.main(["--checkpoint=ckpt.pt", "--start=the ", "--max_new_tokens=30", "--device=cpu"]) == 0
    assert capsys.readouterr().out.startswith("the ")
    flags = [flag for flag in TINY if not flag.startswith("--n_")]
    assert train.main([*flags, "--init_from=ckpt.pt", "--max_iters=1"]) == 0
    assert load_checkpoint(tmp_path / "out" / "last.pt")["tokenizer"]["name"] == "meta.pkl"
    torch.save(foreign, "elsewhere.pt")  # without the name of its data, whose characters are as many
    assert train.main([*flags, "--init_from=elsewhere.pt", "--max_iters=1", "--out_dir=b"]) == 0
    padded = GPT(GPTConfig(**shape | {"vocab_size": 50304}, gelu="exact"))
    torch.save(foreign | {"model": padded.state_dict(), "model_args": shape | {"vocab_size": 50304}}, "gpt2.pt")
    assert train.main([*flags, "--init_from=gpt2.pt", "--max_iters=1", "--out_dir=c"]) == 2
    assert (
        "gpt2.pt was trained with the tokenizer gpt2, data/tiny was prepared with meta.pkl" in capsys.readouterr().err
    )


def test_a_character_level_folder_of_nanogpt_trains_and_writes(tmp_path, monkeypatch, capsys):
    import pickle

    import sample

    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "data" / "tiny"
    make_character_folder(folder)
    assert fit("--max_iters=40", "--learning_rate=1e-2") == 0
    assert "the characters of its meta.pkl" in capsys.readouterr().out
    assert sample.main(["--start=the ", "--max_new_tokens=20", "--device=cpu"]) == 0
    assert set(capsys.readouterr().out) <= set(TINY_TEXT) | {"\n"}
    (folder / "meta.pkl").write_bytes(pickle.dumps(os.system))
    process = run_program("train.py", *TINY, "--max_iters=1", "--out_dir=b", cwd=tmp_path)
    assert_loud(process, "meta.pkl", "system")


def test_data_without_a_validation_split_trains(tmp_path, monkeypatch):
    import prepare

    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("the quick brown fox. " * 300)
    flags = ["--dataset=tiny", "--input=a.txt", "--val_fraction=0", "--num_proc=1", "--tokenizer=train"]
    assert prepare.main([*flags, "--vocab_size=280"]) == 0
    assert not Path("data/tiny/val.bin").exists()
    process = run_program("train.py", *TINY, "--max_iters=2", cwd=tmp_path)
    assert process.returncode == 0 and "no val.bin" in process.stdout
    assert Path("out/my_own_llm.pt").exists()


# --- when things go wrong ----------------------------------------------------------------------------------------


def test_out_of_memory_is_one_message_in_order_and_the_run_stays_valid(tiny, monkeypatch, capsys):
    assert fit("--max_iters=4") == 0
    before = (tiny / "out" / "last.pt").read_bytes()

    def full(self):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.53 GiB")

    monkeypatch.setattr(train.Trainer, "train_step", full)
    assert train.main(["--init_from=resume", "--max_iters=8"]) == 2
    line = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("error:"))
    order = [
        "batch_size=4",
        "--batch_size=2 --gradient_accumulation_steps=2",
        "--gradient_checkpointing=true",
        "a smaller model",
    ]
    assert [line.index(part) for part in order] == sorted(line.index(part) for part in order)
    assert (tiny / "out" / "last.pt").read_bytes() == before


def test_a_weight_that_is_not_finite_stops_the_run_and_is_never_saved(tiny):
    """H24."""
    assert fit("--max_iters=2") == 0
    path = tiny / "out" / "last.pt"
    state = torch.load(path, weights_only=True)
    state["model"]["transformer.h.0.mlp.c_fc.weight"][0, 0] = math.nan
    torch.save(state, path)
    before = path.read_bytes()
    process = run_program("train.py", "--init_from=resume", "--eval_interval=2", "--max_iters=6", cwd=tiny)
    assert_loud(process, "nan", "step 4", "last.pt", "--learning_rate")
    assert path.read_bytes() == before
    assert all(torch.isfinite(tensor).all() for tensor in weights(tiny / "out", "my_own_llm.pt").values())


@pytest.mark.parametrize("due", ["--checkpoint_interval=6", "--eval_interval=6", "--log_interval=6"])
def test_steps_that_are_not_finite_end_the_run_at_whatever_is_due_first(tiny, monkeypatch, capsys, due):
    """Not at the next log line alone, which may be far."""
    rest = [f"--{key}_interval=1000" for key in ("checkpoint", "eval", "log") if key not in due]
    monkeypatch.setattr(train.torch.nn.utils, "clip_grad_norm_", lambda *_: torch.tensor(math.inf))
    assert fit("--max_iters=100", due, *rest) == 2
    assert "6 steps in a row at step 6" in capsys.readouterr().err
    assert not (tiny / "out" / "last.pt").exists()


def test_a_step_that_no_memory_of_a_cpu_could_hold_is_refused(tiny, capsys):
    """The system would kill the process without a word. With batch_size=auto a smaller one is found instead."""
    assert fit("--batch_size=100000000", "--max_iters=1") == 2
    told = capsys.readouterr().err
    assert "batch_size=100000000" in told and "GiB" in told and "free" in told
    smaller = int(re.search(r"--batch_size=(\d+) --gradient_accumulation_steps=\d+ ", told)[1])
    assert 1 < smaller < 1e8 / 16
    assert fit("--n_layer=400", "--n_embd=16384", "--batch_size=1", "--max_iters=1") == 2
    assert "In this order: --gradient_checkpointing=true" in capsys.readouterr().err
    assert not list((tiny / "out").glob("*.pt"))


def test_a_step_with_a_gradient_that_is_not_finite_is_left_out(tiny):
    trainer = make_trainer("--dropout=0")
    trainer.train_step()
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    steps = [float(state["step"]) for state in trainer.optimizer.state.values()]
    hook = trainer.model.lm_head.weight.register_hook(lambda gradient: gradient * math.inf)
    trainer.train_step()
    hook.remove()
    assert_same_weights(before, dict(trainer.model.state_dict()))
    assert [float(state["step"]) for state in trainer.optimizer.state.values()] == steps
    assert int(trainer.skipped_steps) == 1 and int(trainer.bad_steps) == 1
    trainer.train_step()
    assert int(trainer.bad_steps) == 0
    assert not torch.equal(before["lm_head.weight"], trainer.model.lm_head.weight)


def test_float16_scales_the_loss_and_leaves_overflowing_steps_out(tiny):
    """The scaler of a CUDA run, on the CPU: choose_device refuses this to users."""
    trainer = make_trainer("--n_embd=16", device=Device("cpu", "test", torch.float16))
    assert trainer.scaler.is_enabled() and trainer.scaler.get_scale() == 2.0**16
    first = trainer.train_step()[0].item()
    for _ in range(5):
        trainer.step += 1
        last = trainer.train_step()[0].item()
    assert last < first
    before, scale = trainer.model.lm_head.weight.clone(), trainer.scaler.get_scale()
    hook = trainer.model.lm_head.weight.register_hook(lambda gradient: gradient * math.inf)
    trainer.train_step()
    hook.remove()
    assert torch.equal(before, trainer.model.lm_head.weight) and trainer.scaler.get_scale() == scale / 2


def test_bfloat16_autocast_trains(tiny):
    assert fit("--n_embd=16", "--dtype=bfloat16", "--max_iters=4", "--log_interval=1") == 0
    assert losses(tiny / "out")[4] < losses(tiny / "out")[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_the_run_goes_on_from_there(tiny, number):
    """H31."""
    command = [sys.executable, str(ROOT / "train.py"), *TINY, "--max_iters=100000", "--eval_interval=100000"]
    process = subprocess.Popen(command, cwd=tiny, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    for line in process.stdout:
        if line.startswith("step 50/"):
            break
    process.send_signal(number)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 128 + number and "Traceback" not in output
    assert "stopped and saved at step" in output
    state = torch.load(tiny / "out" / "last.pt", weights_only=True)
    updates = {float(entry["step"]) for entry in state["optimizer"]["state"].values()}
    assert updates == {float(state["iter_num"])} and state["iter_num"] >= 50
    assert train.main(["--init_from=resume", f"--max_iters={state['iter_num'] + 2}"]) == 0


def test_a_signal_during_an_evaluation_saves_too_and_the_evaluation_is_made_up_for(tiny):
    flags = ["--max_iters=6", "--eval_interval=3", "--log_interval=1", "--eval_iters=4"]
    assert fit(*flags, "--out_dir=straight") == 0
    slow = (
        "import sys, time; sys.path.insert(0, sys.argv.pop(1)); import train\n"
        "batches = train.TokenData.eval_batches\n"
        "def crawl(self, *args):\n"
        "    for number, batch in enumerate(batches(self, *args)):\n"
        "        if number: print('evaluating', flush=True); time.sleep(0.3)\n"
        "        yield batch\n"
        "train.TokenData.eval_batches = crawl; sys.exit(train.main())"
    )
    command = [sys.executable, "-c", slow, str(ROOT), *TINY, *flags, "--out_dir=broken"]
    process = subprocess.Popen(command, cwd=tiny, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    seen = ""
    for line in process.stdout:
        seen += line
        if "step 3/6" in seen and line.startswith("evaluating"):
            break
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 143
    assert load_checkpoint(tiny / "broken" / "last.pt")["iter_num"] == 3
    assert train.main(["--init_from=resume", "--out_dir=broken"]) == 0
    evals = [
        [(event["iter"], event["val_loss"]) for event in read_events(tiny / name, "eval")]
        for name in ("straight", "broken")
    ]
    assert evals[0] == evals[1]
    assert_same_weights(weights(tiny / "straight"), weights(tiny / "broken"))


def test_a_background_write_that_fails_stops_the_run_with_its_reason(tiny, monkeypatch, capsys):
    import checkpoint

    assert fit("--max_iters=2") == 0
    before = (tiny / "out" / "last.pt").read_bytes()

    def full(state, file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.torch, "save", full)
    assert train.main(["--init_from=resume", "--max_iters=400", "--checkpoint_interval=2"]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert (tiny / "out" / "last.pt").read_bytes() == before
    assert not list((tiny / "out").glob("*.tmp"))


def test_a_disk_that_is_full_for_logs_is_one_line_too(tiny, monkeypatch, capsys):
    assert fit("--max_iters=2") == 0
    before = (tiny / "out" / "last.pt").read_bytes()

    def full(self, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(train.Trainer, "write_sample", full)
    assert train.main(["--init_from=resume", "--max_iters=4"]) == 2
    told = capsys.readouterr().err
    assert "No space left on device while writing to out, its checkpoints are whole: free some space" in told
    assert (tiny / "out" / "last.pt").read_bytes() == before


def test_a_second_signal_stops_at_once(tiny, monkeypatch):
    slow = (
        "import sys, time; sys.path.insert(0, sys.argv.pop(1)); import train; step = train.Trainer.train_step\n"
        "def crawl(self):\n    print('crawling', flush=True); time.sleep(60); return step(self)\n"
        "train.Trainer.train_step = crawl; sys.exit(train.main())"
    )
    command = [sys.executable, "-c", slow, str(ROOT), *TINY, "--max_iters=10"]
    process = subprocess.Popen(command, cwd=tiny, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    for line in process.stdout:
        if "crawling" in line:
            break
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=10) == 130


# --- Weights & Biases --------------------------------------------------------------------------------------------


def test_wandb_is_imported_only_when_asked_for(tiny):
    """H32."""
    stub = tiny / "stub"
    stub.mkdir()
    (stub / "wandb.py").write_text("raise ImportError('blocked')")
    env = {"PYTHONPATH": str(stub)}
    assert run_program("train.py", *TINY, "--max_iters=1", cwd=tiny, env=env).returncode == 0
    process = run_program("train.py", *TINY, "--max_iters=1", "--wandb_log=True", "--out_dir=b", cwd=tiny, env=env)
    assert_loud(process, "wandb", "pip install wandb")
    assert not (tiny / "b").exists()


def test_wandb_gets_the_numbers_and_a_resumed_run_its_old_id(tiny, monkeypatch):
    calls, logged = [], []

    class Run:
        id = "run-1"

        def log(self, numbers, step):
            logged.append((step, numbers))

        def finish(self, exit_code):
            calls.append(("finish", exit_code))

    class Wandb:
        @staticmethod
        def init(**settings):
            calls.append(("init", settings["id"]))
            return Run()

    import progress

    monkeypatch.setattr(train, "import_wandb", lambda: Wandb)
    monkeypatch.setattr(progress, "import_wandb", lambda: Wandb)
    assert fit("--max_iters=2", "--log_interval=1", "--wandb_log=true") == 0
    assert train.main(["--init_from=resume", "--max_iters=3"]) == 0
    assert calls == [("init", None), ("finish", 0), ("init", "run-1"), ("finish", 0)]
    assert any("train/loss" in numbers for _, numbers in logged) and any("eval/val_loss" in n for _, n in logged)


@pytest.mark.slow
def test_wandb_without_a_key_is_one_line_before_training(tiny):
    env = {"WANDB_MODE": "online", "WANDB_API_KEY": "", "HOME": str(tiny), "WANDB_BASE_URL": "http://127.0.0.1:9"}
    process = run_program("train.py", *TINY, "--max_iters=2", "--wandb_log=true", cwd=tiny, env=env)
    assert_loud(process, "wandb_log=true", "WANDB_MODE=offline")
    assert "step 0" not in process.stdout and not list((tiny / "out").glob("*.pt"))


@pytest.mark.slow
def test_wandb_works_offline(tiny):
    process = run_program("train.py", *TINY, "--max_iters=2", "--wandb_log=true", cwd=tiny)
    assert process.returncode == 0, process.stderr
    assert list((tiny / "out" / "wandb").glob("offline-run-*"))


# --- several processes ---------------------------------------------------------------------------------------------


LAUNCH = [sys.executable, str(ROOT / "tools" / "launch.py"), "--standalone"]


def several(processes: int, *flags: str, cwd: Path, tiny_flags: bool = True) -> subprocess.CompletedProcess:
    """Runs train.py in several processes, which talk by gloo, as start_train.sh does with GPUS."""
    return subprocess.run(
        [*LAUNCH, f"--nproc_per_node={processes}", str(ROOT / "train.py"), *(TINY if tiny_flags else []), *flags],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        text=True,
        capture_output=True,
        timeout=120,
    )


@pytest.mark.slow
def test_two_processes_equal_one_with_the_same_global_batch(tiny):
    """H34, H35, H36: gloo on the CPU, one copy of each line, the ranks share the work of one step out."""
    flags = ("--gradient_accumulation_steps=4", "--max_iters=4", "--log_interval=1", "--eval_interval=2")
    process = several(2, "--out_dir=two", "--backend=gloo", *flags, cwd=tiny)
    assert process.returncode == 0, process.stderr
    assert process.stdout.count("step 4: train loss") == 1 and "4 × 16 × 4 = 256 tokens a step" in process.stdout
    assert fit("--out_dir=one", *flags) == 0
    one, two = losses(tiny / "one"), losses(tiny / "two")
    assert one.keys() == two.keys() and all(one[s] == pytest.approx(two[s], abs=1e-5) for s in one)
    assert_same_weights(weights(tiny / "one"), weights(tiny / "two"), tolerance=1e-5)
    # what two wrote, four and then one go on with
    process = several(4, "--init_from=resume", "--out_dir=two", "--max_iters=6", cwd=tiny, tiny_flags=False)
    assert process.returncode == 0, process.stderr
    assert train.main(["--init_from=resume", "--out_dir=two", "--max_iters=8"]) == 0
    assert train.main(["--init_from=resume", "--out_dir=one", "--max_iters=8"]) == 0
    assert_same_weights(weights(tiny / "one"), weights(tiny / "two"), tolerance=1e-5)


@pytest.mark.slow
def test_shared_out_weights_learn_as_whole_ones_and_save_the_same_file(tiny):
    """FSDP2 over gloo: losses and gradient norms of one process, its checkpoint, and each goes on from the other's."""
    flags = ("--gradient_accumulation_steps=4", "--max_iters=4", "--log_interval=1", "--eval_interval=2", "--dropout=0")
    flags += ("--eval_iters=3",)  # which two processes cannot share evenly
    process = several(2, "--shard=true", "--out_dir=two", *flags, cwd=tiny)
    assert process.returncode == 0, process.stderr
    assert "2 processes, each with a part of the model" in process.stdout
    assert fit("--out_dir=one", *flags) == 0
    for kind, keys in (("train", ("loss", "grad_norm", "lr", "tokens")), ("eval", ("train_loss", "val_loss"))):
        one, two = read_events(tiny / "one", kind), read_events(tiny / "two", kind)
        assert len(one) == len(two) > 1
        for key in keys:
            assert [event[key] for event in two] == pytest.approx([event[key] for event in one], abs=1e-5), key
    assert (tiny / "two" / "samples.txt").read_text() == (tiny / "one" / "samples.txt").read_text()
    assert_same_weights(weights(tiny / "one"), weights(tiny / "two"), tolerance=1e-5)
    whole, parts = (load_checkpoint(tiny / name / "last.pt") for name in ("one", "two"))
    assert whole.keys() == parts.keys()
    for number, moments in whole["optimizer"]["state"].items():
        for key, value in moments.items():
            torch.testing.assert_close(parts["optimizer"]["state"][number][key], value, rtol=1e-3, atol=1e-5)
    # what two wrote, one goes on with whole; what one wrote, two go on with in parts
    assert train.main(["--init_from=resume", "--out_dir=two", "--shard=false", "--max_iters=8"]) == 0
    go_on = ("--init_from=resume", "--out_dir=one", "--shard=true", "--max_iters=8")
    process = several(2, *go_on, cwd=tiny, tiny_flags=False)
    assert process.returncode == 0, process.stderr
    assert_same_weights(weights(tiny / "one"), weights(tiny / "two"), tolerance=1e-5)


@pytest.mark.slow
def test_shared_out_weights_with_a_step_that_is_not_finite_leave_it_out_everywhere(tiny):
    """A NaN in the share of one process: no process takes the step; with checkpointing of activations on, too."""
    script = tiny / "poisoned.py"
    script.write_text(
        "import os, sys; sys.path.insert(0, sys.argv.pop(1)); import torch, train\n"
        "clip, calls = torch.nn.utils.clip_grad_norm_, []\n"
        "def poison(parameters, *rest):\n"
        "    parameters = list(parameters); calls.append(1)\n"
        "    if len(calls) == 3 and os.environ['RANK'] == '1': parameters[3].grad.to_local()[0] = float('nan')\n"
        "    return clip(parameters, *rest)\n"
        "torch.nn.utils.clip_grad_norm_ = poison\n"
        "code = train.main(sys.argv[1:]); sys.stdout.flush(); os._exit(code)"
    )
    flags = (*TINY, "--shard=true", "--gradient_accumulation_steps=2", "--max_iters=4", "--log_interval=1")
    process = subprocess.run(
        [*LAUNCH, "--nproc_per_node=2", str(script), str(ROOT), *flags, "--gradient_checkpointing=true"],
        cwd=tiny,
        text=True,
        capture_output=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr
    assert [event["skipped_steps"] for event in read_events(tiny / "out", "train")] == [0, 0, 1, 1]
    assert all(tensor.isfinite().all() for tensor in weights(tiny / "out").values())


@pytest.mark.slow
@pytest.mark.parametrize(("number", "when"), [(signal.SIGINT, "step 30/"), (signal.SIGTERM, "step 0: train loss")])
def test_a_signal_stops_all_processes_at_one_step(tiny, number, when):
    """Ctrl-C reaches the launcher and its processes, a SIGTERM the launcher alone; both save and leave nobody behind."""
    flags = [*TINY, "--gradient_accumulation_steps=2", "--max_iters=100000", "--eval_interval=100000"]
    process = subprocess.Popen(
        [*LAUNCH, "--nproc_per_node=2", str(ROOT / "train.py"), *flags],
        cwd=tiny,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    for line in process.stdout:
        if line.startswith(when):
            break
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    output, _ = process.communicate(timeout=40)
    assert process.returncode == 128 + number and "Traceback" not in output, output
    assert output.count("stopped and saved at step") == 1, output
    assert load_checkpoint(tiny / "out" / "last.pt")["iter_num"] >= (30 if number == signal.SIGINT else 0)
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


@pytest.mark.slow
def test_a_users_fault_in_several_processes_is_one_error(tiny):
    """Told by the first of them, with its exit code, and nothing about it from the launcher."""
    process = several(2, "--gradient_accumulation_steps=3", cwd=tiny)
    assert process.returncode == 2 and process.stdout == ""
    assert process.stderr.startswith("error: gradient_accumulation_steps=3 is not divisible by the 2 processes")
    assert process.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_process_that_is_killed_ends_the_others_and_is_told(tiny):
    script = tiny / "killed.py"
    script.write_text(
        "import os, sys; sys.path.insert(0, sys.argv.pop(1)); import train\n"
        "step = train.Trainer.train_step\n"
        "def die(self):\n"
        "    if self.step == 3 and self.device.rank == 1: os.kill(os.getpid(), 9)\n"
        "    return step(self)\n"
        "train.Trainer.train_step = die; sys.exit(train.main(sys.argv[1:]))"
    )
    process = subprocess.run(
        [*LAUNCH, "--nproc_per_node=2", str(script), str(ROOT), *TINY, "--gradient_accumulation_steps=2"],
        cwd=tiny,
        text=True,
        capture_output=True,
        timeout=120,
    )
    assert process.returncode == 137 and process.stderr.startswith("error: process 1 was killed by signal 9")
    assert process.stderr.count("\n") == 1, process.stderr  # nothing of the connection that the other one lost


@pytest.mark.slow
def test_a_fault_that_one_process_alone_meets_is_told_by_it(tiny):
    """The first one finds a closed connection, which is no news."""
    script = tiny / "fault.py"
    script.write_text(
        "import os, sys; sys.path.insert(0, sys.argv.pop(1)); import device, train\n"
        "device.GIVE_WAY_SECONDS = 1; step = train.Trainer.train_step\n"
        "def fail(self):\n"
        "    if self.step == 3 and self.device.rank == 1: raise train.UserError('id 100 is strange')\n"
        "    return step(self)\n"
        "train.Trainer.train_step = fail; code = train.main(sys.argv[1:]); sys.stdout.flush(); os._exit(code)"
    )
    process = subprocess.run(
        [*LAUNCH, "--nproc_per_node=2", str(script), str(ROOT), *TINY, "--gradient_accumulation_steps=2"],
        cwd=tiny,
        text=True,
        capture_output=True,
        timeout=120,
    )
    assert process.returncode == 2 and process.stderr == "error: id 100 is strange\n"


@pytest.mark.slow
def test_two_machines_train_as_one_and_stop_together(tiny):
    """The README's command, twice on this machine; a signal to one of them stops both at one step, saved once."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"--rdzv_endpoint=127.0.0.1:{free.getsockname()[1]}"
    flags = [*TINY, "--gradient_accumulation_steps=2", "--max_iters=100000", "--eval_interval=100000"]
    command = [*LAUNCH[:2], "--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d", endpoint, str(ROOT / "train.py")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": tiny}
    machines = [subprocess.Popen([*command, *flags], start_new_session=True, **pipes) for _ in range(2)]
    deadline = time.monotonic() + 90
    while not (tiny / "out/metrics.jsonl").exists() or len(read_events(tiny / "out", "train")) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    machines[1].send_signal(signal.SIGTERM)
    said = "".join(machine.communicate(timeout=40)[0] for machine in machines)
    assert [machine.returncode for machine in machines] == [143, 143] and "Traceback" not in said, said
    assert said.count("stopped and saved at step") == 1 and said.count("device   cpu") == 1, said
    assert load_checkpoint(tiny / "out" / "last.pt")["iter_num"] >= 10
    for machine in machines:
        with pytest.raises(ProcessLookupError):
            os.killpg(machine.pid, 0)


# --- real text -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(not (SHARED / "wikitext.test.raw").exists(), reason="needs the WikiText rows")
def test_two_layers_learn_from_wikitext(tmp_path, monkeypatch):
    """With 512 ids, so that it is quick: from ln 512 = 6.2 to well below the 5.6 of knowing how frequent each token is."""
    import prepare

    monkeypatch.chdir(tmp_path)
    flags = [f"--input={SHARED / 'wikitext.test.raw'}", "--num_proc=1", "--tokenizer=train", "--vocab_size=512"]
    assert prepare.main(["--dataset=wiki", *flags]) == 0
    flags = "--n_layer=2 --n_head=2 --n_embd=64 --block_size=256 --batch_size=4 --gradient_accumulation_steps=1"
    flags += " --max_iters=200 --eval_interval=200 --eval_iters=5 --compile=false --device=cpu --learning_rate=6e-3"
    assert train.main(["--dataset=wiki", *flags.split()]) == 0
    evals = read_events(tmp_path / "out", "eval")
    assert evals[0]["val_loss"] == pytest.approx(math.log(512), abs=0.3)
    assert evals[-1]["val_loss"] < 5.2


def test_a_run_folder_or_seed_that_cannot_be_is_named(tiny, capsys):
    (tiny / "file").write_text("")
    for flag, told in (
        ("--out_dir=file", "out_dir=file "),
        ("--out_dir=file/x", "out_dir=file/x "),
        ("--seed=-1", "seed=-1"),
    ):
        assert fit(flag) == 2
        assert told in capsys.readouterr().err


def test_settings_that_contradict_each_other_name_both(tiny):
    assert_loud(run_program("train.py", "--n_embd=100", "--n_head=3", cwd=tiny), "n_embd=100", "n_head=3")
    assert_loud(run_program("train.py", "--min_lr=1", cwd=tiny), "min_lr=1", "learning_rate=0.0006")
    assert dataclasses.is_dataclass(train.TrainConfig)
