"""Kills a training at random moments until it is finished, and compares it with an unbroken one, bit for bit.

In:  seconds to go on for at least, and a seed:   python tests/soak.py 300 1
Out: how often it was killed, and exit code 0 when weights and losses are equal. Not a test of the suite: it takes minutes.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from conftest import TINY, TINY_TEXT, char_tokenizer

ROOT = Path(__file__).resolve().parent.parent
FLAGS = [*TINY, "--dropout=0.2", "--gradient_accumulation_steps=2", "--log_interval=1", "--eval_interval=40"]


def prepare(folder: Path) -> None:
    """Puts the tiny data set into the folder."""
    (folder / "tiny.txt").write_text(TINY_TEXT, encoding="utf-8")
    (folder / "chars.json").write_text(char_tokenizer("".join(sorted(set(TINY_TEXT)))), encoding="utf-8")
    flags = ["--dataset=tiny", "--input=tiny.txt", "--tokenizer=chars.json", "--num_proc=1"]
    subprocess.run([sys.executable, str(ROOT / "prepare.py"), *flags], cwd=folder, check=True, capture_output=True)


def start(folder: Path, *flags: str) -> subprocess.Popen:
    """Starts a training."""
    command = [sys.executable, str(ROOT / "train.py"), *flags]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def train_through_kills(folder: Path, steps: int, seconds: float, rng: random.Random) -> int:
    """Trains to `steps`, killed at random moments; returns how often."""
    deadline, kills = time.monotonic() + seconds, 0
    while True:
        saved = (folder / "broken" / "last.pt").exists()
        flags = (
            ["--init_from=resume", "--out_dir=broken"] if saved else [*FLAGS, "--out_dir=broken", "--overwrite=true"]
        )
        process = start(folder, *flags, f"--max_iters={steps}", "--checkpoint_interval=3")
        patience = rng.uniform(2.0, 9.0) if time.monotonic() < deadline else 600
        try:
            _, errors = process.communicate(timeout=patience)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.communicate()
            kills += 1
            continue
        if process.returncode:
            raise SystemExit(f"after {kills} kills the run could not go on: {errors}")
        return kills


def read_losses(folder: Path) -> dict[int, float]:
    """Loss of each step."""
    events = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return {event["iter"]: event["loss"] for event in events if event["event"] == "train"}


def main(seconds: float, seed: int) -> None:
    """Runs both trainings and compares them."""
    folder, steps = Path(tempfile.mkdtemp()), int(20 * seconds)
    prepare(folder)
    kills = train_through_kills(folder, steps, seconds, random.Random(seed))
    unbroken = start(folder, *FLAGS, "--out_dir=straight", f"--max_iters={steps}", "--checkpoint_interval=100000")
    if unbroken.wait():
        raise SystemExit(unbroken.stderr.read())
    straight, broken = (
        torch.load(folder / name / "last.pt", weights_only=True)["model"] for name in ("straight", "broken")
    )
    equal = all(torch.equal(tensor, broken[name]) for name, tensor in straight.items())
    same_losses = read_losses(folder / "straight") == read_losses(folder / "broken")
    print(f"{kills} kills in {steps} steps: weights {'equal' if equal else 'DIFFER'}, losses equal: {same_losses}")
    if not (equal and same_losses):
        raise SystemExit(1)


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 300, int(sys.argv[2]) if len(sys.argv) > 2 else 1)
