"""The measurements of tools.benchmark: one function a section, which makes what it needs and yields rows of the table.

In:  the settings, and a folder to put data in.
Out: rows. What a limit is, is said where it is measured: products of matrices, bytes read from memory.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from checkpoint import BackgroundSaver, save_checkpoint
from corpus import Corpus
from dataset import TokenData
from device import choose_device, pack_linears, start_ranks
from loss import LOSS_CHUNK_ROWS, cross_entropy
from model import GPT, GPTConfig, Sampler, flops_per_token, generate
from optimizer import make_optimizer
from tools.benchmark import BenchmarkConfig, Row, by_turns, seconds_of, waiter
from train import TrainConfig, Trainer

ROOT = Path(__file__).parent.parent
MEDIUM = GPTConfig(n_layer=24, n_head=16, n_embd=1024)


def random_ids(path: Path, count: int, vocabulary: int) -> None:
    """A token file of random ids."""
    np.random.default_rng(0).integers(0, vocabulary, count, dtype=np.uint16).tofile(path)


def measure_train(c: BenchmarkConfig, folder: Path) -> Iterator[Row]:
    """Whole steps: batch, forward, backward, clipped update. The limit: the same FLOPs in one product of matrices."""
    device = choose_device(c.device, c.dtype)
    start_ranks(device, "gloo")
    for vocabulary in map(int, c.vocabularies.split(",")):
        data = folder / f"random{vocabulary}"
        data.mkdir()
        random_ids(data / "train.bin", 2_000_000, min(vocabulary, 50257))
        shape = GPTConfig(c.block_size, vocabulary, c.n_layer, c.n_head, c.n_embd, 0.0, bias=False, gelu="exact")
        wait, tokens = waiter(device.kind), c.batch_size * c.block_size
        timed = {"ours": functools.partial(seconds_of, training_step(c, shape, data, device), wait, c.timer)}
        if c.peer:
            from tools.benchmark_peers import NanogptStep

            timed["nanoGPT"] = NanogptStep(c.timer, c.peer, shape, data / "train.bin", c.batch_size, device, c.compile)
        side, dtype = 8192 if device.kind == "cuda" else 2048, device.dtype
        a, b = (torch.randn(side, side, device=device.torch, dtype=dtype) for _ in range(2))
        timed["matmul"] = functools.partial(seconds_of, lambda a=a, b=b: a @ b, wait, c.timer)
        medians = by_turns(timed, c.rounds)
        limit = 2 * side**3 / medians.pop("matmul") / flops_per_token(shape)
        rates = {name: tokens / seconds for name, seconds in medians.items()}
        ours = rates.pop("ours")
        name = f"training step, vocabulary {vocabulary:,}"
        yield Row(
            name, "tokens/s", ours, rates | {f"matmul peak {limit * flops_per_token(shape) / 1e9:,.0f} GF/s": limit}
        )


def training_step(c: BenchmarkConfig, shape: GPTConfig, data: Path, device: Any) -> Callable[[], None]:
    """train.py's own step on a folder of random ids."""
    flags = {
        key: getattr(c, key) for key in ("n_layer", "n_head", "n_embd", "block_size", "batch_size", "dtype", "compile")
    }
    flags |= {"device": c.device, "bias": False, "gelu": "exact", "dropout": 0.0, "gradient_accumulation_steps": 1}
    settings = TrainConfig(data_dir=str(data.parent), dataset=data.name, warmup_iters=0, **flags)
    tokens = TokenData(data, c.block_size)
    tokens.vocab_size = min(shape.vocab_size, 50257)
    trainer = Trainer(settings, device, tokens, None)
    assert trainer.model.config == shape

    def step() -> None:
        trainer.train_step()
        trainer.step += 1

    return step


def measure_loss(c: BenchmarkConfig, _: Path) -> Iterator[Row]:
    """The loss layer alone, forward and backward: in chunks, whole, and the three products it cannot do without."""
    rows, width, vocabulary = 8 * c.block_size, c.n_embd, int(c.vocabularies.split(",")[0])
    hidden, weight = torch.randn(rows, width) / 2, torch.randn(vocabulary, width) / 20
    targets = torch.randint(0, vocabulary, (rows,))

    def run(chunk: int) -> None:
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if chunk:
            cross_entropy(h, w, targets, vocabulary, chunk).backward()
        else:
            torch.nn.functional.cross_entropy(h @ w.t(), targets).backward()

    def products() -> None:
        logits = hidden @ weight.t()
        logits @ weight, logits.t() @ hidden

    tasks = {"ours": lambda: run(LOSS_CHUNK_ROWS), "whole": lambda: run(0), "its products": products}
    medians = by_turns(
        {name: functools.partial(seconds_of, work, clock=c.timer) for name, work in tasks.items()}, c.rounds
    )
    rates = {name: rows / seconds for name, seconds in medians.items()}
    yield Row("loss layer, forward and backward", "rows/s", rates.pop("ours"), rates)


def measure_memory(c: BenchmarkConfig, _: Path) -> Iterator[Row]:
    """Peak of a training step of GPT-2 Medium, batch 8 × 1024, bf16 autocast, counted on tensors without data."""

    def ours(checkpointing: bool) -> torch.nn.Module:
        model = GPT(MEDIUM)
        model.gradient_checkpointing = checkpointing
        return model

    others = {}
    if c.peer:
        from tools.benchmark_peers import nanogpt_model

        with contextlib.redirect_stdout(io.StringIO()):
            others["nanoGPT"] = fake_peak_gib(lambda: nanogpt_model(c.peer, MEDIUM))
    yield Row("memory of a step, GPT-2 Medium, 8 × 1024", "GiB", fake_peak_gib(lambda: ours(False)), others)
    yield Row("the same with gradient checkpointing", "GiB", fake_peak_gib(lambda: ours(True)), others)


def fake_peak_gib(make_model: Callable[[], torch.nn.Module]) -> float:
    """Most memory that two steps hold at once, by PyTorch's own tracker."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    with FakeTensorMode():
        model = make_model().train()
        optimizer = make_optimizer(model, "adamw", 6e-4, (0.9, 0.95), 0.1)
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            for step in range(2):
                if step:
                    tracker.reset_mod_stats()
                ids = torch.randint(0, 50000, (8, MEDIUM.block_size))
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    out = model(ids, ids)
                (out[1] if isinstance(out, tuple) else out).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        return max(counts["Total"] for counts in tracker.get_tracker_snapshot("peak").values()) / 2**30


def measure_generate(c: BenchmarkConfig, _: Path) -> Iterator[Row]:
    """GPT-2 small with random weights after a prompt of 16. The limit: reading the weights once for each token."""
    device, shape, count = choose_device(c.device, "float32"), GPTConfig(), c.new_tokens
    wait, prompt = waiter(device.kind), torch.randint(0, 50000, (16,))
    model = GPT(shape).to(device.torch).eval()
    weights = sum(p.numel() for p in model.parameters()) * 4
    if device.kind == "cpu":
        pack_linears(model)

    def write(samples: int) -> None:
        for _ in generate(model, prompt, count, Sampler(0.8, 40, 1.0, 1, samples), 50257):
            pass

    tasks: dict[str, Callable[[], object]] = {"ours": lambda: write(1), "eight": lambda: write(8)}
    batch = prompt[None].to(device.torch)
    with contextlib.suppress(ImportError):
        from tools.benchmark_peers import transformers_generate

        theirs = transformers_generate(shape, device)
        tasks["transformers"] = lambda: theirs(batch, count)
    if c.peer:
        from tools.benchmark_peers import nanogpt_model

        with contextlib.redirect_stdout(io.StringIO()):
            peer = nanogpt_model(c.peer, shape).to(device.torch).eval()
        tasks["nanoGPT"] = lambda: peer.generate(batch, count, temperature=0.8, top_k=40)
    memory = torch.empty(50_000_000, device=device.torch)
    timed = {name: functools.partial(seconds_of, work, wait, c.timer) for name, work in tasks.items()}
    timed["read"] = functools.partial(seconds_of, memory.sum, wait, c.timer)
    medians = by_turns(timed, max(2, c.rounds // 2))
    rate = 4 * len(memory) / medians.pop("read")
    eight = 8 * count / medians.pop("eight")
    rates = {name: count / seconds for name, seconds in medians.items()}
    ours = rates.pop("ours")
    yield Row("generation, one sample", "tokens/s", ours, rates | {f"reading at {rate / 1e9:.0f} GB/s": rate / weights})
    yield Row("generation, eight samples at once", "tokens/s", eight, {"one sample": ours})


def measure_prepare(c: BenchmarkConfig, folder: Path) -> Iterator[Row]:
    """prepare.py as a program, start-up and all, with two workers. The limit: tiktoken on both cores without a parent."""
    rows = folder / "rows.jsonl"
    write_rows(rows, c.megabytes)
    size = rows.stat().st_size / 1e6
    mark = iter(range(1000))

    def run(*words: str) -> float:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
        return seconds_of(
            lambda: subprocess.run([sys.executable, *words], cwd=folder, env=environment, check=True, **QUIET)
        )

    flags = ("--tokenizer=gpt2", "--num_proc=2", f"--input={rows}", "--val_fraction=0.01")
    peers = str(Path(__file__).with_name("benchmark_peers.py"))
    timed = {
        "ours": lambda: run(str(ROOT / "prepare.py"), f"--dataset=bench{next(mark)}", *flags),
        "tiktoken alone, one process": lambda: run(peers, "tiktoken", str(rows)),
        "datasets.map, two processes": lambda: run(peers, "datasets", str(rows), str(fresh(folder, next(mark))), "2"),
    }
    rates = {name: size / seconds for name, seconds in by_turns(timed, max(2, c.rounds // 2)).items()}
    yield Row("prepare, two workers", "MB/s", rates.pop("ours"), rates, f"{size:.0f} MB of JSONL")


QUIET = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "stdin": subprocess.DEVNULL}


def fresh(folder: Path, number: int) -> Path:
    """A new folder, so that nothing of a round before it is found in a cache."""
    path = folder / f"fresh{number}"
    path.mkdir()
    return path


def write_rows(path: Path, megabytes: int) -> None:
    """The demo's documents again and again as JSONL, their lines in another order each time."""
    rng, documents, size = random.Random(0), [text for _, text, _ in Corpus("demo")], 0
    with open(path, "w", encoding="utf-8") as out:
        while size < megabytes * 1e6:
            lines = rng.choice(documents).splitlines()
            rng.shuffle(lines)
            size += out.write(json.dumps({"text": "\n".join(lines)}, ensure_ascii=False) + "\n")


def measure_start(c: BenchmarkConfig, folder: Path) -> Iterator[Row]:
    """Seconds to the first token of a model of the demo's size, and to the help of each program."""
    from tokenizer import read_tokenizer_json, train_tokenizer

    text = train_tokenizer((text for _, text, _ in list(Corpus("demo"))[:200]), 2048)
    tokenizer = read_tokenizer_json(text, "tokenizer.json")
    model = GPT(GPTConfig(128, 2048, 4, 4, 192))
    state = {"model": model.state_dict(), "model_args": vars(model.config), "tokenizer": tokenizer.identity}
    save_checkpoint(folder / "my_own_llm.pt", state | {"iter_num": 1, "best_val_loss": 1.0, "config": {}})
    first = ["sample.py", f"--checkpoint={folder / 'my_own_llm.pt'}", "--max_new_tokens=1", "--device=cpu"]
    tasks = {
        "first token": first,
        **{f"{name} --help": [name, "--help"] for name in ("prepare.py", "train.py", "sample.py")},
    }

    def run(words: list[str]) -> float:
        return seconds_of(lambda: subprocess.run([sys.executable, *words], cwd=ROOT, check=True, **QUIET))

    medians = by_turns({name: functools.partial(run, words) for name, words in tasks.items()}, c.rounds)
    for name, seconds in medians.items():
        yield Row(f"start: {name}", "s", seconds, {"goal": 4.0 if name == "first token" else 0.5})


def measure_loader(c: BenchmarkConfig, folder: Path) -> Iterator[Row]:
    """Seconds for a batch of the training step's size out of a large file, from disk and from memory."""
    data = folder / "large"
    data.mkdir()
    random_ids(data / "train.bin", c.loader_megabytes * 500_000, 50257)
    tokens = TokenData(data, c.block_size)
    for state in ("cold", "warm"):
        if state == "cold" and hasattr(os, "posix_fadvise"):
            os.sync()
            os.posix_fadvise(tokens.files["train"].fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        started = time.perf_counter()
        for number in range(50):
            tokens.train_batch(number * c.batch_size, c.batch_size)
        yield Row(f"loader, {c.loader_megabytes:,} MB file, {state}", "s", (time.perf_counter() - started) / 50, {})


def measure_checkpoint(c: BenchmarkConfig, folder: Path) -> Iterator[Row]:
    """GPT-2 Medium's full state: how long training waits, and until the file is on the disk, against torch.save."""
    model = GPT(MEDIUM)
    optimizer = make_optimizer(model, "adamw", 1e-4, (0.9, 0.95), 0.1)
    for p in model.parameters():
        moments = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        optimizer.state[p] = {"step": torch.tensor(1.0), **moments}
    saver, totals = BackgroundSaver(), []

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": 1}

    def pause() -> float:
        seconds = seconds_of(lambda: saver.save(folder / "ours.pt", state()))
        totals.append(seconds + seconds_of(saver.wait))
        return seconds

    def plain() -> None:
        with open(folder / "plain.pt", "wb") as file:
            torch.save(state(), file)

    medians = by_turns({"ours": pause, "torch.save": functools.partial(seconds_of, plain)}, max(2, c.rounds // 2))
    yield Row("pause for a checkpoint, GPT-2 Medium", "s", medians.pop("ours"), medians)
    yield Row("the same until it is on the disk", "s", statistics.median(totals[1:]), medians)
