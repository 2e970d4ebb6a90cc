"""What an export starts from: a checkpoint's model, its tokenizer.json, and what both formats are checked against.

In:  a checkpoint file, and the data folder whose val.bin gives the perplexity.
Out: `Subject`, with logits at random ids, ids of probe texts, and perplexity on the validation data.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import re
from pathlib import Path
from typing import Any

import torch

from chat import PROBE, encode_chat
from checkpoint import build_model, checkpoint_tokenizer, load_checkpoint
from configurator import UserError
from model import GPT
from pairs import open_data
from tokenizer import Tokenizer, byte_characters

PROBES = [
    "Hello world",
    " The quick brown fox",
    "two  spaces,   three",
    "a\n\nb\n",
    "\ttab\r\nline",
    "I'm you're we've they'll",
    "naïve café Ünïcödé",
    "日本語のテキスト",
    "Привет, мир",
    "👍🏽 emoji 🇩🇪",
    "123456 7.5e-3",
    "def f(x): return x ** 2",
    "<div class='a'>&amp;</div>",
    "!!! ... ---",
    "   leading and trailing   ",
    "ALL CAPS",
    "e\u0301 \u00a0 \u2028",
    "x" * 40,
    "'quoted' \"double\" ‘curly’",
    "The module ",
]
CONVERSATION = [
    {"role": "system", "content": "<|user|> "},
    *PROBE,
    {"role": "assistant", "content": "<|endoftext|>"},
    PROBE[0],
]


@dataclasses.dataclass
class Subject:
    """What is exported: the model, its tokenizer, and what both formats say about them."""

    model: GPT
    tokenizer: Tokenizer
    spec: dict[str, Any]  # tokenizer.json
    about: dict[str, Any]  # name, vocab_size, eot_id, eot_token, chat_template
    state: dict[str, Any]  # the checkpoint
    windows: list[tuple[torch.Tensor, torch.Tensor]]  # validation data
    probes: dict[str, list[int]]

    def conversation_ids(self) -> list[int] | None:
        """Of CONVERSATION and the beginning of an answer; None for a model that does not chat."""
        if not self.about["chat_template"]:
            return None
        return [*encode_chat(self.tokenizer, CONVERSATION)[0].tolist(), self.tokenizer.chat_ids["assistant"]]

    @functools.cached_property
    def own_perplexity(self) -> float | None:
        """The original's on the validation windows."""
        return self.perplexity(self.model)

    def perplexity(self, model: GPT) -> float | None:
        """Of a model on the validation windows."""
        if not self.windows:
            return None
        with torch.inference_mode():
            counts = [int((y != -1).sum()) for _, y in self.windows]
            total = math.fsum(model(x, y).item() * n for (x, y), n in zip(self.windows, counts, strict=True))
        return math.exp(min(total / sum(counts), 700))

    def probe_ids(self) -> torch.Tensor:
        """Random ids (1, T) to compare logits at."""
        length = min(self.model.config.block_size, 64)
        return torch.randint(self.about["vocab_size"], (1, length), generator=torch.Generator().manual_seed(1))

    def logits(self, model: GPT) -> torch.Tensor:
        """Logits (1, T, V) of a model at `probe_ids`, unused rows left away."""
        with torch.inference_mode():
            return model(self.probe_ids())[..., : self.about["vocab_size"]]


def load_subject(path: Path, name: str | None, data_dir: Path, dataset: str | None, windows: int) -> Subject:
    """All of a checkpoint. Raises UserError where its tokenizer has more ids than its model rows."""
    state = load_checkpoint(path)
    tokenizer, model = checkpoint_tokenizer(state), build_model(state, path).float().eval()
    if tokenizer.vocab_size > model.config.vocab_size:
        raise UserError(
            f"{path}: its tokenizer has {tokenizer.vocab_size:,} ids, its model only {model.config.vocab_size:,}"
        )
    model.used_vocabulary = tokenizer.vocab_size
    about = {
        "name": name or re.sub(r"[^\w.-]+", "-", path.resolve().parent.name, flags=re.ASCII).strip("-.") or "model",
        "vocab_size": tokenizer.vocab_size,
        "eot_id": tokenizer.eot_id,
        "eot_token": tokenizer.identity["eot_token"],
        "chat_template": tokenizer.identity.get("chat_template"),
    }
    probes = {}
    for text in PROBES:
        with contextlib.suppress(UserError):  # a tokenizer of characters does not know all of these
            probes[text] = [int(i) for i in tokenizer.encode_prompt(text)]
    state.pop("optimizer", None)
    dataset_used = dataset or (state.get("config") or {}).get("dataset")
    try:
        held_out = validation_windows(data_dir / (dataset_used or ""), model.config.block_size, tokenizer, windows)
    except UserError as error:
        if dataset:
            raise
        print(f"no perplexity: {error}")
        held_out = []
    return Subject(model, tokenizer, tokenizer_spec(tokenizer), about, state, held_out, probes)


def validation_windows(
    folder: Path, block_size: int, tokenizer: Tokenizer, count: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and targets, (B, T) each, of a data set's validation part. Raises UserError where it is not the model's."""
    if not (folder / "train.bin").is_file():
        raise UserError(f"no data set in {folder} (--data_dir= and --dataset= name it)")
    data = open_data(folder, block_size)
    theirs, ours = data.meta["tokenizer"], tokenizer.identity
    if [theirs.get(key) for key in ("kind", "sha256")] != [ours.get(key) for key in ("kind", "sha256")]:
        raise UserError(f"{folder} was made with another tokenizer")
    return [(torch.from_numpy(x.copy()), torch.from_numpy(y.copy())) for x, y, _ in data.eval_batches("val", 1, count)]


def tokenizer_spec(tokenizer: Tokenizer) -> dict[str, Any]:
    """The tokenizer.json of any tokenizer, with its chat tokens, and nothing that adds ids to a text or cuts it."""
    identity = tokenizer.identity
    spec = gpt2_spec(tokenizer) if identity["kind"] == "gpt2" else json.loads(identity["json"])
    roles = {f"<|{role}|>": i for role, i in (tokenizer.chat_ids or {}).items()}
    needed = {identity["eot_token"]: tokenizer.eot_id} | roles  # the others' ways to find a special token in a template
    kept = [token for token in spec["added_tokens"] if token["content"] not in roles]
    for content, i in needed.items():
        if content not in {token["content"] for token in kept}:
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            kept.append({"id": i, "content": content, **flags, "special": True})
    spec["added_tokens"] = sorted(kept, key=lambda token: token["id"])
    return spec | {"post_processor": None, "padding": None, "truncation": None}


def gpt2_spec(tokenizer: Tokenizer) -> dict[str, Any]:
    """GPT-2's tokenizer.json, from the ranks that tiktoken has: the last merge of a token is of its two largest parts."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers

    ranks: dict[bytes, int] = tokenizer.encoding._mergeable_ranks
    shown = byte_characters()
    spelled = {token: "".join(shown[byte] for byte in token) for token in ranks}
    merges = []
    for token in sorted((token for token in ranks if len(token) > 1), key=ranks.get):
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            pairs = [ranks.get(parts[i] + parts[i + 1], math.inf) for i in range(len(parts) - 1)]
            i = pairs.index(min(pairs))
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        merges.append((spelled[parts[0]], spelled[parts[1]]))
    inner = Inner(models.BPE({spelled[token]: i for token, i in ranks.items()}, merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([tokenizer.identity["eot_token"]])
    return json.loads(inner.to_str())
