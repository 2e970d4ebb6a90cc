"""The model under judgement and its log-likelihoods, which perplexity and tasks are both made of.

In:  a checkpoint, a run folder or a Hugging Face GPT-2 folder; windows of ids of which the last ones are scored.
Out: `Subject`, the model with its tokenizer; `Scorer`, the log-likelihood of every window, batched on any device.

Letters: B batch, T time (tokens), C n_embd, V vocab_size, N scored tokens of a batch.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from checkpoint import build_model, checkpoint_tokenizer, load_checkpoint
from configurator import UserError
from dataset import TokenData
from device import Device
from model import GPT, KeyValueCache
from origin import OPENAI_MODELS, load_hugging_face, load_weights
from tokenizer import END_OF_TEXT, TiktokenTokenizer, Tokenizer, load_gpt2, read_tokenizer_json

CHECKPOINTS = ("my_own_llm.pt", "last.pt", "ckpt.pt")  # of a run folder, ours and nanoGPT's
LOGITS = 1 << 25  # numbers of a part of the logits: 128 MB in float32
SORTED_BATCHES = 32  # batches whose windows are sorted by length together, so that little is padded


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model to be judged. `state` is its checkpoint without the weights, `folder` its run folder, where it has one."""

    model: GPT
    tokenizer: Tokenizer
    path: Path
    folder: Path | None
    state: dict[str, Any]
    notes: tuple[str, ...] = ()


def open_subject(name: str, device: Device) -> Subject:
    """The model that `--checkpoint` names: a checkpoint, a run folder, a Hugging Face folder, or gpt2 … gpt2-xl of the
    hub. Raises UserError.
    """
    path, folder, notes = Path(name), None, ()
    if path.is_dir() and not (path / "config.json").is_file() and not any(path.glob("*.pt")):
        raise UserError(f"checkpoint={name} is a folder with neither my_own_llm.pt nor a Hugging Face model in it")
    if path.is_dir() and not (path / "model.safetensors").is_file():
        folder = path
        path = next((path / n for n in CHECKPOINTS if (path / n).is_file()), path / CHECKPOINTS[0])
    elif path.is_file() and (path.parent / "metrics.jsonl").is_file():
        folder = path.parent
    if path.is_dir():
        state = load_hugging_face(path)
        tokenizer, notes = hugging_face_tokenizer(path, state["model_args"]["vocab_size"])
    elif name in OPENAI_MODELS and not path.exists():
        state, tokenizer = load_weights(name), load_gpt2()
    else:
        state = load_checkpoint(path)
        tokenizer = checkpoint_tokenizer(state)
    model = build_model(state, path).to(device=device.torch, dtype=device.dtype).eval()
    rows = model.config.vocab_size
    if tokenizer.vocab_size > rows:
        raise UserError(f"{path}: its tokenizer has {tokenizer.vocab_size:,} ids, its model only {rows:,}")
    rest = {key: value for key, value in state.items() if key not in ("model", "optimizer")}
    return Subject(model, tokenizer, path, folder, rest, notes)


def hugging_face_tokenizer(folder: Path, rows: int) -> tuple[Tokenizer, tuple[str, ...]]:
    """The tokenizer of a folder in transformers' layout: its tokenizer.json; GPT-2's where it is that one, or where a
    model with GPT-2's number of ids comes without a file.
    """
    path = folder / "tokenizer.json"
    gpt2 = load_gpt2()
    if not path.is_file():
        if rows < gpt2.vocab_size or rows > gpt2.vocab_size + 128:
            raise UserError(f"{folder} has no tokenizer.json, and its {rows:,} ids are not GPT-2's: put its file there")
        return gpt2, (f"{folder} has no tokenizer.json: GPT-2's vocabulary is assumed",)
    text = path.read_text(encoding="utf-8-sig")
    tokenizer = read_tokenizer_json(text, str(path), end_token(folder))
    same = isinstance(tokenizer, TiktokenTokenizer) and tokenizer.eot_id == gpt2.eot_id
    if same and tokenizer.encoding._mergeable_ranks == gpt2.encoding._mergeable_ranks:
        return gpt2, ()
    return tokenizer, ()


def end_token(folder: Path) -> str:
    """The text of the end-of-text token that a Hugging Face folder names."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).is_file():
            token = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token")
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                return token
    return END_OF_TEXT


def open_split_data(subject: Subject, data_dir: str | None, dataset: str | None) -> TokenData:
    """The prepared data set to judge on: the one named, or the one that the model was trained on. Raises UserError."""
    trained = subject.state.get("config") or {}
    dataset = dataset or trained.get("dataset")
    if dataset is None:
        raise UserError(
            f"{subject.path} does not say what it was trained on: name a prepared data set by --dataset=NAME, text by "
            "--input=FILES, or leave perplexity out by --perplexity=false"
        )
    data = TokenData(Path(data_dir or trained.get("data_dir") or "data") / dataset, block_size=1)
    theirs, ours = data.meta["tokenizer"], subject.tokenizer.identity
    if (theirs["kind"], theirs.get("sha256")) != (ours["kind"], ours.get("sha256")):
        raise UserError(
            f"{data.folder} was prepared with the tokenizer {theirs['name']}, {subject.path} has {ours['name']}, "
            "another one: name the model's own data by --dataset=, or text by --input="
        )
    return data


@dataclasses.dataclass(frozen=True)
class Window:
    """Ids that the model reads (T,), and those it is scored on (n,), the ones that follow its last n inputs."""

    inputs: np.ndarray
    targets: np.ndarray


class Scorer:
    """Log-likelihoods of windows under a model. The result of a window does not depend on what it is batched with."""

    def __init__(self, subject: Subject, batch_size: int) -> None:
        self.model, self.batch_size = subject.model, batch_size
        self.device = self.model.lm_head.weight.device
        self.vocab_size = subject.tokenizer.vocab_size  # rows behind it are padding, and no id

    def score(self, windows: Iterable[Window]) -> Iterator[tuple[float, bool]]:
        """(sum of the targets' log-probabilities in nats, whether each was the likeliest), in the order given."""
        windows = iter(windows)
        while some := list(islice(windows, self.batch_size * SORTED_BATCHES)):
            order = sorted(range(len(some)), key=lambda i: -len(some[i].inputs))
            results: list[tuple[float, bool]] = [(0.0, True)] * len(some)
            for first in range(0, len(order), self.batch_size):
                chosen = order[first : first + self.batch_size]
                for i, result in zip(chosen, self._score_batch([some[i] for i in chosen]), strict=True):
                    results[i] = result
            yield from results

    @torch.inference_mode()
    def _score_batch(self, windows: list[Window]) -> list[tuple[float, bool]]:
        longest = max(len(window.inputs) for window in windows)
        ids = np.zeros((len(windows), longest), dtype=np.int64)  # padded behind, where causal attention does not look
        for row, window in zip(ids, windows, strict=True):
            row[: len(window.inputs)] = window.inputs
        states = self.model.hidden(torch.from_numpy(ids).to(self.device))  # (B, T, C)
        spans = [(len(window.inputs) - len(window.targets), len(window.inputs)) for window in windows]
        return self.score_states(
            [s[a:b] for s, (a, b) in zip(states, spans, strict=True)], [w.targets for w in windows]
        )

    def score_states(self, states: list[torch.Tensor], targets: list[np.ndarray]) -> list[tuple[float, bool]]:
        """As `score`, from the final states (n, C) that predict each window's targets (n,)."""
        owner = torch.from_numpy(np.repeat(np.arange(len(targets)), [len(t) for t in targets]))
        wanted = torch.from_numpy(np.concatenate(targets).astype(np.int64)).to(self.device)  # (N,)
        chosen, best = self._log_probabilities(torch.cat(states), wanted)
        sums = torch.zeros(len(targets), dtype=torch.float64).index_add_(0, owner, chosen)
        missed = torch.zeros(len(targets)).index_add_(0, owner, (~best).float())
        return [(float(s), not m) for s, m in zip(sums, missed, strict=True)]

    def _log_probabilities(self, states: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability of each wanted id (N,) in float64, and whether it was the likeliest; on the CPU."""
        chosen, best = [], []
        rows = max(1, LOGITS // self.vocab_size)
        for part, ids in zip(states.split(rows), wanted.split(rows), strict=True):
            logits = F.linear(part, self.model.lm_head.weight[: self.vocab_size]).float()  # (rows, V)
            own = logits.gather(1, ids.unsqueeze(1)).squeeze(1)
            chosen.append((own - logits.logsumexp(1)).cpu().double())
            best.append((logits.argmax(1) == ids).cpu())
        return torch.cat(chosen), torch.cat(best)


def repeat_cache(cache: KeyValueCache, rows: torch.Tensor, room: int, model: GPT) -> KeyValueCache:
    """A cache whose row i holds what row `rows[i]` of `cache` holds, with room for `room` more positions."""
    wider = KeyValueCache(model.config, len(rows), cache.length + room, model.lm_head.weight)
    wider.store[..., : cache.length, :] = cache.store[:, :, rows, :, : cache.length]
    wider.length = cache.length
    return wider


def left_padded(rows: list[list[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids (B, T), positions (B, T) and attention mask (B, 1, T, T) of rows of several lengths that end together.

    Padding sees itself alone, since a softmax over nothing would be NaN.
    """
    longest = max(map(len, rows))
    pad = torch.tensor([longest - len(row) for row in rows]).unsqueeze(1)  # (B, 1)
    ids = torch.tensor([[0] * (longest - len(row)) + list(row) for row in rows])
    place = torch.arange(longest)
    real = place >= pad  # (B, T)
    causal = place.unsqueeze(1) >= place  # (T, T)
    mask = (causal & real.unsqueeze(1)) | torch.eye(longest, dtype=torch.bool)
    return ids.to(device), (place - pad).clamp(min=0).to(device), mask.unsqueeze(1).to(device)
