"""What tools.benchmark measures against: nanoGPT's model in a loop like its train.py, tiktoken, datasets, transformers.

In:  a checkout of nanoGPT (its model.py is loaded as it is), shapes, files.
Out: functions that do one piece of work. Apart from tools.benchmark_cases because none of it is the toolkit's.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from configurator import UserError
from model import GPTConfig
from tools.benchmark import seconds_of, waiter


def nanogpt(peer: str) -> Any:
    """The module model.py of a nanoGPT checkout."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", Path(peer) / "model.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["nanogpt_model"] = module
    spec.loader.exec_module(module)
    return module


def nanogpt_model(peer: str, shape: GPTConfig) -> torch.nn.Module:
    """nanoGPT's model of that shape; it says on the console how many parameters it has, which is not wanted here."""
    module = nanogpt(peer)
    keys = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "dropout", "bias")
    return module.GPT(module.GPTConfig(**{key: getattr(shape, key) for key in keys}))


class NanogptStep:
    """Steps of nanoGPT in a process of their own, which has none of what the toolkit sets for itself; a call makes one
    and returns its seconds by the clock `timer`. Raises UserError where the checkout fails, whose own words stand above.
    """

    def __init__(self, timer: Callable[[], float], peer: str, *arguments: Any) -> None:
        start, self.peer = multiprocessing.get_context("spawn"), peer
        self.pipe, end = start.Pipe()
        start.Process(target=serve_steps, args=(end, timer, peer, *arguments), daemon=True).start()
        end.close()

    def __call__(self) -> float:
        try:
            self.pipe.send("step")
            return self.pipe.recv()
        except (EOFError, OSError) as error:
            raise UserError(f"peer={self.peer} could not make a training step") from error


def serve_steps(pipe: Any, timer: Callable[[], float], *arguments: Any) -> None:
    """The other side of NanogptStep, until the pipe closes."""
    with contextlib.redirect_stdout(io.StringIO()):
        step = nanogpt_step(*arguments)
    wait = waiter(arguments[-2].kind)
    with contextlib.suppress(EOFError):
        while pipe.recv():
            pipe.send(seconds_of(step, wait, timer))


def nanogpt_step(peer: str, shape: GPTConfig, ids: Path, batch_size: int, device: Any, compiled: bool) -> Callable:
    """One step as nanoGPT's train.py makes it: random windows of the file, loss, clipped AdamW by its own choice."""
    torch.manual_seed(1337)
    model = nanogpt_model(peer, shape).to(device.torch)
    optimizer = model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), device.kind)
    forward = torch.compile(model) if compiled else model

    def step() -> None:
        data = np.memmap(ids, dtype=np.uint16, mode="r")
        starts = torch.randint(len(data) - shape.block_size, (batch_size,))
        windows = [torch.from_numpy(data[i : i + shape.block_size + 1].astype(np.int64)) for i in starts.tolist()]
        batch = torch.stack(windows)
        if device.kind == "cuda":
            batch = batch.pin_memory().to(device.torch, non_blocking=True)
        with device.autocast():
            _, loss = forward(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def transformers_generate(shape: GPTConfig, device: Any) -> Callable[[Tensor, int], object]:
    """GPT-2 in transformers, random weights, its `generate` with its key/value cache."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=shape.n_layer, n_head=shape.n_head, n_embd=shape.n_embd, vocab_size=shape.vocab_size)
    model = GPT2LMHeadModel(config).to(device.torch).eval()

    def write(prompt: Tensor, tokens: int) -> object:
        settings = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": True, "top_k": 40}
        return model.generate(prompt, attention_mask=torch.ones_like(prompt), pad_token_id=0, **settings)

    return write


def tiktoken_alone(rows: Path) -> None:
    """Every text of a JSONL file through tiktoken's `encode_ordinary` in this process; nothing is kept."""
    from tokenizer import load_gpt2

    encode = load_gpt2().encoding.encode_ordinary
    with open(rows, encoding="utf-8") as lines:
        for line in lines:
            encode(json.loads(line)["text"])


def encode_row(row: dict[str, Any]) -> dict[str, Any]:
    """One row for `datasets.map`: ids and their number."""
    from tokenizer import load_gpt2

    tokenizer = load_gpt2()
    ids = [*tokenizer.encoding.encode_ordinary(row["text"]), tokenizer.eot_id]
    return {"ids": ids, "len": len(ids)}


def datasets_map(rows: Path, folder: Path, workers: int) -> None:
    """nanoGPT's way: `datasets.map` over all rows into its cache, then the ids out of that into one file."""
    import datasets

    datasets.disable_progress_bars()
    multiprocessing.set_start_method("fork", force=True)
    data = datasets.load_dataset("json", data_files=str(rows), split="train", cache_dir=str(folder / "cache"))
    done = data.map(encode_row, remove_columns=["text"], num_proc=workers)
    total, place, shards = sum(done["len"]), 0, 64
    out = np.memmap(folder / "peer.bin", dtype=np.uint16, mode="w+", shape=(total,))
    for number in range(shards):
        shard = done.shard(num_shards=shards, index=number, contiguous=True).with_format("numpy")
        if len(shard):
            ids = np.concatenate(shard["ids"])
            out[place : place + len(ids)] = ids
            place += len(ids)
    out.flush()


if __name__ == "__main__":  # a process of its own for each measurement: NAME ROWS FOLDER WORKERS
    if sys.argv[1] == "tiktoken":
        tiktoken_alone(Path(sys.argv[2]))
    else:
        datasets_map(Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
