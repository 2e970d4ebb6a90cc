"""What the tests share: the tiny data set and settings of the collected cases, and ways to run the programs.

Everything is made in the test's own folder; no network, no GPU. One thread a process: tiny steps wait for threads.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared" / "data"
TINY_TEXT = "the quick brown fox jumps over the lazy dog. " * 60
TINY = (
    "--dataset=tiny --device=cpu --dtype=float32 --compile=false --n_layer=2 --n_head=2 --n_embd=32 --block_size=16 "
    "--batch_size=4 --gradient_accumulation_steps=1 --dropout=0.0 --eval_iters=2 --warmup_iters=2 --lr_decay_iters=20 "
    "--learning_rate=1e-3 --min_lr=1e-4"
).split()


def run_program(script: str, *flags: str, cwd: Path, env: dict | None = None, stdin: str | None = None, timeout=300):
    """Runs a program of the toolkit in a process of its own; returns the finished process with its output."""
    return subprocess.run(
        [sys.executable, str(ROOT / script), *flags],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        input="" if stdin is None else stdin,
        text=True,
        encoding="utf-8",
        capture_output=True,
        timeout=timeout,
    )


def assert_loud(process, *parts: str) -> None:
    """Exit code 2, exactly one `error:` line that has all the parts, no traceback."""
    errors = [line for line in process.stderr.splitlines() if line.startswith("error: ")]
    assert process.returncode == 2, process.stderr + process.stdout
    assert len(errors) == 1 and "Traceback" not in process.stderr, process.stderr
    for part in parts:
        assert part in errors[0], (part, errors[0])


def char_tokenizer(characters: str, unknown: str | None = None) -> str:
    """A tokenizer.json with one id a character, `<|endoftext|>` after them."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {character: i for i, character in enumerate(characters)}
    vocabulary["<|endoftext|>"] = len(vocabulary)
    if unknown:
        vocabulary[unknown] = len(vocabulary)
        inner = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    else:
        inner = Tokenizer(models.WordLevel(vocabulary))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens(["<|endoftext|>"])
    return inner.to_str()


def fill_randomly(model, seed: int):
    """Gives a model random weights, norms and biases too, lively enough to write more than one letter; returns it."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = 0.3 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.1 * noise if name.endswith("bias") else 1 + noise if ".ln_" in name else noise)
    return model


def read_ids(folder: Path, split: str) -> list[int]:
    """All ids of a split, in the dtype that meta.json names."""
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    return np.fromfile(folder / f"{split}.bin", dtype=np.dtype(meta["dtype"]).newbyteorder("<")).tolist()


def read_events(folder: Path, kind: str) -> list[dict]:
    """The events of one kind in a run's metrics.jsonl."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


@pytest.fixture(scope="session")
def tiny_source(tmp_path_factory) -> Path:
    """A folder with data/tiny prepared: one document of 2,700 characters, 28 ids, 10 % of the tokens for validation."""
    import prepare

    folder = tmp_path_factory.mktemp("tiny")
    (folder / "tiny.txt").write_text(TINY_TEXT, encoding="utf-8")
    (folder / "chars.json").write_text(char_tokenizer("".join(sorted(set(TINY_TEXT)))), encoding="utf-8")
    flags = [f"--input={folder / 'tiny.txt'}", f"--tokenizer={folder / 'chars.json'}", f"--data_dir={folder / 'data'}"]
    assert prepare.main(["--dataset=tiny", "--num_proc=1", *flags]) == 0
    return folder


@pytest.fixture
def tiny(tiny_source, tmp_path, monkeypatch) -> Path:
    """A fresh working folder, entered, in which data/tiny is the prepared tiny data set."""
    os.symlink(tiny_source / "data", tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    return tmp_path
