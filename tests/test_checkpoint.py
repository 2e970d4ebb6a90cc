"""Checkpoints: whole or not at all, checked when read, and never a program."""

from __future__ import annotations

import os
import pickle
import random
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TINY, assert_loud, run_program

import train
from checkpoint import STATE_KEYS, BackgroundSaver, build_model, copy_to_cpu, load_checkpoint, load_run, save_checkpoint
from configurator import UserError
from model import GPT, GPTConfig


def make_state(value: float = 0.3) -> dict:
    torch.manual_seed(0)
    config = GPTConfig(block_size=16, vocab_size=64, n_layer=2, n_head=2, n_embd=32)
    model = GPT(config)
    for parameter in model.parameters():
        parameter.data.normal_(0, value)
    return {"model": model.state_dict(), "model_args": vars(config), "iter_num": 3, "best_val_loss": 2.5}


@pytest.fixture
def saved(tmp_path) -> Path:
    save_checkpoint(tmp_path / "last.pt", make_state())
    return tmp_path / "last.pt"


def test_a_checkpoint_comes_back_as_it_was(saved):
    state, again = make_state(), load_checkpoint(saved)
    assert all(torch.equal(state["model"][name], tensor) for name, tensor in again["model"].items())
    assert again["iter_num"] == 3 and [path.name for path in saved.parent.iterdir()] == ["last.pt"]


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module._orig_mod."])
def test_prefixes_of_wrappers_are_taken_off(tmp_path, prefix):
    """H22: same logits as the clean file."""
    state = make_state()
    ids = torch.arange(10).unsqueeze(0)
    expected = build_model(state, tmp_path)(ids)
    state["model"] = {prefix + name: tensor for name, tensor in state["model"].items()}
    torch.save(state, tmp_path / "foreign.pt")
    loaded = load_checkpoint(tmp_path / "foreign.pt")
    assert torch.equal(build_model(loaded, tmp_path)(ids), expected)


def test_every_flipped_byte_of_the_weights_is_noticed(saved):
    """PyTorch alone loads such a file and says nothing."""
    whole = saved.read_bytes()
    with zipfile.ZipFile(saved) as archive:
        largest = max(archive.infolist(), key=lambda part: part.file_size)
    header = largest.header_offset  # of 30 bytes, then a name and padding of the lengths that it gives
    lengths = (int.from_bytes(whole[header + at : header + at + 2], "little") for at in (26, 28))
    start = header + 30 + sum(lengths)
    for place in range(start, start + largest.file_size, largest.file_size // 20):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        saved.write_bytes(damaged)
        torch.load(saved, weights_only=True)
        with pytest.raises(UserError, match="damaged"):
            load_checkpoint(saved)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.9, 0.999])
def test_a_file_cut_short_is_a_loud_error(saved, share):
    whole = saved.read_bytes()
    saved.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(UserError, match=r"last\.pt"):
        load_checkpoint(saved)


class Hostile:
    """Runs a command when unpickled by a careless reader."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return os.system, (f"touch {self.target}",)


@pytest.mark.parametrize("kind", ["zip", "pickle"])
def test_a_hostile_pickle_is_refused_and_not_run(tmp_path, kind):
    state = make_state() | {"config": Hostile(tmp_path / "owned")}
    if kind == "zip":
        torch.save(state, tmp_path / "bad.pt")
    else:
        (tmp_path / "bad.pt").write_bytes(pickle.dumps(state["config"]))
    with pytest.raises(UserError, match=r"bad\.pt.* is not run: it (names posix\.system|is another kind)"):
        load_checkpoint(tmp_path / "bad.pt")
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("content", [{"weights": 1}, [1, 2], {"model": {}}])
def test_a_file_that_is_no_checkpoint_says_so(tmp_path, content):
    torch.save(content, tmp_path / "other.pt")
    with pytest.raises(UserError, match=r"other\.pt"):
        load_checkpoint(tmp_path / "other.pt")


def test_weights_that_do_not_fit_their_shape_are_named(saved):
    state = load_checkpoint(saved)
    state["model_args"]["n_embd"] = 64
    with pytest.raises(UserError, match=r"last\.pt: its weights do not fit"):
        build_model(state, saved)


@pytest.mark.parametrize("part", ["block_size", "n_layer", "transformer.wpe.weight", "transformer.wte.weight"])
def test_a_checkpoint_that_lacks_a_part_names_it(saved, part):
    state = make_state()
    state["model_args" if part in state["model_args"] else "model"].pop(part)
    torch.save(state, saved)
    with pytest.raises(UserError, match=f"not a GPT checkpoint: .*{part}"):
        load_checkpoint(saved)


def test_the_file_before_becomes_previous(saved):
    save_checkpoint(saved, make_state() | {"iter_num": 4}, saved.with_name("previous.pt"))
    assert load_checkpoint(saved)["iter_num"] == 4
    assert load_checkpoint(saved.with_name("previous.pt"))["iter_num"] == 3


def test_a_file_size_limit_leaves_the_old_checkpoint_whole(saved):
    """As a full disk does."""
    before = saved.read_bytes()
    code = (
        "import resource, signal, sys; sys.path.insert(0, sys.argv[1])\n"
        "import torch; from pathlib import Path; from checkpoint import save_checkpoint; from configurator import program\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (50000, 50000))\n"
        "path = Path(sys.argv[2])\n"
        "main = lambda argv: save_checkpoint(path, {'model': torch.ones(50000)}, path.with_name('previous.pt'))\n"
        "sys.exit(program(main)([]))"
    )
    command = [sys.executable, "-c", code, str(ROOT), str(saved)]
    process = subprocess.run(command, text=True, capture_output=True, timeout=60)
    assert_loud(process, "cannot write", "last.pt")
    assert saved.read_bytes() == before and [path.name for path in saved.parent.iterdir()] == ["last.pt"]


def test_killed_while_saving_leaves_the_state_before(tiny):
    """H21: half the bytes, then kill -9; resume starts from the save before and ignores what is left."""
    assert train.main([*TINY, "--max_iters=4"]) == 0
    code = (
        "import os, signal, sys; sys.path.insert(0, sys.argv.pop(1))\n"
        "import torch, train; save = torch.save\n"
        "def half(state, file):\n"
        "    import io; whole = io.BytesIO(); save(state, whole)\n"
        "    file.write(whole.getvalue()[:len(whole.getvalue()) // 2]); file.flush(); os.kill(os.getpid(), signal.SIGKILL)\n"
        "torch.save = half; train.main()"
    )
    command = [sys.executable, "-c", code, str(ROOT), "--init_from=resume", "--max_iters=8"]
    assert subprocess.run(command, cwd=tiny, capture_output=True, timeout=60).returncode == -signal.SIGKILL
    assert load_checkpoint(tiny / "out" / "last.pt")["iter_num"] == 4
    assert train.main(["--init_from=resume", "--max_iters=8"]) == 0
    assert load_checkpoint(tiny / "out" / "last.pt")["iter_num"] == 8


def test_thirty_kills_at_random_moments_of_a_save_leave_a_whole_state(tmp_path):
    """A child saves without a pause and is killed; what is there loads, and never goes back by more than a save."""
    rng, step = random.Random(0), 0
    whole = make_state() | dict.fromkeys(STATE_KEYS, 0) | {"optimizer": {"moments": torch.randn(400_000)}}
    last, previous = tmp_path / "last.pt", tmp_path / "previous.pt"
    torn = 0
    for _ in range(30):
        child = os.fork()
        if child == 0:
            for number in range(step + 1, step + 10_000):
                save_checkpoint(last, whole | {"iter_num": number}, previous)
            os._exit(0)
        time.sleep(rng.uniform(0.02, 0.12))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        torn += (tmp_path / "last.pt.tmp").exists()
        if last.exists():
            state, notes = load_run(tmp_path)
            assert notes == [] and state["iter_num"] >= step
            assert all(torch.equal(state["model"][name], tensor) for name, tensor in whole["model"].items())
            assert torch.equal(state["optimizer"]["moments"], whole["optimizer"]["moments"])
            step = state["iter_num"]
    assert step > 30 and torn > 5  # the kills fell into saves


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def test_a_damaged_last_state_falls_back_to_the_one_before(tiny):
    assert train.main([*TINY, "--max_iters=8", "--checkpoint_interval=4"]) == 0
    damage(tiny / "out" / "last.pt")
    process = run_program("train.py", "--init_from=resume", "--max_iters=10", cwd=tiny)
    assert process.returncode == 0, process.stderr
    assert process.stdout.count("going on from previous.pt") == 1
    assert load_checkpoint(tiny / "out" / "last.pt")["iter_num"] == 10


def test_the_state_that_a_run_fell_back_to_stays_until_another_is_whole(tiny):
    """A kill between the two renames of the next save would else leave two damaged ones."""
    assert train.main([*TINY, "--max_iters=4", "--checkpoint_interval=2"]) == 0
    last, previous = tiny / "out" / "last.pt", tiny / "out" / "previous.pt"
    damage, good = last.read_bytes()[:1000], previous.read_bytes()
    last.write_bytes(damage)
    assert train.main(["--init_from=resume", "--max_iters=6", "--checkpoint_interval=6"]) == 0
    assert load_checkpoint(last)["iter_num"] == 6 and previous.read_bytes() == good
    assert train.main(["--init_from=resume", "--max_iters=8", "--checkpoint_interval=8"]) == 0
    assert load_checkpoint(previous)["iter_num"] == 6


def test_both_states_damaged_names_the_best_model_and_its_use(tiny):
    assert train.main([*TINY, "--max_iters=8", "--checkpoint_interval=4"]) == 0
    for name in ("last.pt", "previous.pt"):
        damage(tiny / "out" / name)
    process = run_program("train.py", "--init_from=resume", "--max_iters=10", cwd=tiny)
    assert_loud(process, "last.pt", "previous.pt", "my_own_llm.pt", "--init_from=")


def test_weights_alone_are_no_state_to_resume_from(tiny):
    assert train.main([*TINY, "--max_iters=4"]) == 0
    os.replace(tiny / "out" / "my_own_llm.pt", tiny / "out" / "last.pt")
    (tiny / "out" / "previous.pt").unlink(missing_ok=True)
    assert_loud(run_program("train.py", "--init_from=resume", "--max_iters=6", cwd=tiny), "optimizer", "--init_from=")


@pytest.mark.parametrize("seed", range(20))
def test_random_bytes_are_no_checkpoint(tmp_path, seed):
    (tmp_path / "noise.pt").write_bytes(random.Random(seed).randbytes(5000))
    with pytest.raises(UserError, match=r"noise\.pt"):
        load_checkpoint(tmp_path / "noise.pt")


def test_the_copy_for_the_writer_is_kept_and_never_mixed_up(tmp_path):
    """The second save of a file fills the memory of the first; tensors that were one and are two now get their own."""
    shared, number = torch.ones(3, 4), torch.tensor(1.0)
    first = copy_to_cpu({"a": shared, "b": shared, "n": number, "more": [torch.zeros(2)], "text": "x"})
    assert first["a"] is first["b"] and first["a"] is not shared
    second = copy_to_cpu({"a": shared + 1, "b": shared + 2, "n": number, "more": [torch.ones(3)], "text": "y"}, first)
    assert second["a"] is first["a"] and second["n"] is first["n"]
    assert second["a"].eq(2).all() and second["b"].eq(3).all() and second["more"][0].eq(1).all()
    assert second["text"] == "y"
    view = torch.arange(12.0).view(3, 4).t()  # not contiguous
    torch.testing.assert_close(copy_to_cpu({"a": view}, {"a": first["a"].t()})["a"], view)

    saver = BackgroundSaver()
    for step in range(5):
        saver.save(tmp_path / "last.pt", {"a": torch.full((100, 100), float(step))})
        saver.save(tmp_path / "best.pt", {"a": torch.full((100, 100), -float(step))})
    saver.wait()
    for name, value in (("last.pt", 4.0), ("best.pt", -4.0)):
        assert torch.load(tmp_path / name, weights_only=True)["a"].eq(value).all()
