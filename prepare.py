"""Makes token files of text: corpus → data/NAME/{train,val,test}.bin + meta.json.

In:  a hub data set (default WikiText-103), own files (--input=), or the built-in demo corpus, and a tokenizer.
Out: token files for train.py, and meta.json with all that it needs to know about them.

    python prepare.py                                                   # WikiText-103, GPT-2's tokenizer
    python prepare.py --dataset=demo --tokenizer=train --vocab_size=2048
    python prepare.py --dataset=mine --input='texts/**/*.txt.gz'
    python prepare.py --dataset=answers --chat=true --input=pairs.jsonl --tokenizer=data/mine/tokenizer.json

Documents flow through worker processes straight into the files: memory stays flat however large the corpus, and the
result is the same for any number of workers.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import random
import re
import shlex
import signal
import sys
import threading
import time
from array import array
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Literal

import numpy as np

from chat import ConversationReader, chat_tokenizer, restore_tokenizer
from configurator import UserError, format_overrides, load_config, program
from corpus import UNLIKE, Corpus, Seen, compare_letters, count_letters
from dataset import FILES, MARKER, TokenWriter, read_meta
from pairs import encode_document
from progress import progress_bar
from tokenizer import END_OF_TEXT, Tokenizer, open_tokenizer, read_tokenizer_json, train_tokenizer

BATCH_CHARACTERS = 1 << 18  # text handed to a worker at a time
TRAINING_SAMPLE = 100_000_000  # characters that a tokenizer is trained on at most
UNLIKE_TEXT = "percent of the letters differ between training and validation: another language or source in one of them"
NOT_COMPARED = ("num_proc", "overwrite", "data_dir")  # settings that do not change the result

Piece = tuple[str, str, bool]  # split, text, whether a document ends here


@dataclasses.dataclass(frozen=True)
class PrepareConfig:
    """Settings of prepare.py."""

    dataset: str = "wikitext103"  # wikitext103, demo, a hub data set owner/name[:config], or with --input any name
    input: str | None = None  # own files, folders, globs, commas between: .txt .md .jsonl .json .csv .parquet .gz .zst
    document: Literal["auto", "file", "line", "paragraph", "heading"] = "auto"  # one, in .txt and .md
    chat: bool = False  # rows are prompt/completion, question/answer, instruction/input/output or messages
    text_column: str = "text"  # the field with the text, where rows are documents
    detokenize: bool | None = None  # undo WikiText's spacing ( @-@ , = = X = =); none = for WikiText from the hub alone
    skip_bad_rows: bool = False  # skip and count rows without text, put U+FFFD for invalid bytes, instead of stopping
    max_documents: int | None = None  # stop after this many documents (of each split a data set has), for a quick try
    tokenizer: str = "gpt2"  # gpt2, the path of a tokenizer.json, or train = byte-level BPE on this corpus
    vocab_size: int = 32000  # entries to train, with --tokenizer=train
    eot_token: str = END_OF_TEXT  # the token that ends a document, where a tokenizer.json has another
    val_fraction: float = 0.1  # share of documents held out; 0 = only the data set's own validation split
    seed: int = 1337  # draws the held-out documents
    num_proc: int = os.cpu_count() or 1  # worker processes
    data_dir: str = "data"  # where the data sets lie
    overwrite: bool = False  # make anew what is already there

    def __post_init__(self) -> None:
        if not 0 <= self.val_fraction < 1:
            raise UserError(f"val_fraction={self.val_fraction} is not a share from 0 up to, not including, 1")
        for name, count in (("num_proc", self.num_proc), ("max_documents", self.max_documents)):
            if count is not None and count < 1:
                raise UserError(f"{name}={count} is too small: it starts at 1")
        if self.tokenizer == "train" and not 260 <= self.vocab_size <= 1 << 22:
            raise UserError(
                f"vocab_size={self.vocab_size} is too small or large: 256 bytes, 4 special tokens, and merges"
            )
        if self.chat and (self.input is None or self.tokenizer == "train" or self.detokenize):
            raise UserError(
                f"chat=true takes --input= files with rows and the base model's tokenizer, not input={self.input} with "
                f"tokenizer={self.tokenizer} and detokenize={self.detokenize}: the tokenizer.json beside its data"
            )
        if self.detokenize is None:
            object.__setattr__(self, "detokenize", self.input is None and "wikitext" in self.dataset.lower())

    @property
    def folder(self) -> Path:
        """Where the token files go: data/NAME, for a hub data set its name without the owner."""
        name = self.dataset if self.input is not None else self.dataset.split("/")[-1].replace(":", "-")
        if name in ("", ".", "..") or "/" in name:
            raise UserError(f"--dataset={self.dataset} does not name a folder in {self.data_dir}")
        return Path(self.data_dir) / name

    @property
    def next_command(self) -> str:
        """What trains on the data, as a shell reads it."""
        how = ["config/finetune_chat.py"] if self.chat else []
        words = ["./start_train.sh", *how, f"--dataset={self.folder.name}"]
        return shlex.join(words if self.data_dir == "data" else [*words, f"--data_dir={self.data_dir}"])


@program
def main(argv: list[str]) -> int:
    """Runs the program; returns its exit code."""
    config, origins = load_config(PrepareConfig, argv, __doc__)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leaves through the context managers, which clean up
    for line in format_overrides(config, origins):
        print(line)
    corpus = Corpus(
        config.dataset,
        config.input,
        text_column=config.text_column,
        document=config.document,
        detokenize=config.detokenize,
        skip_bad_rows=config.skip_bad_rows,
        max_documents=config.max_documents,
    )
    if config.chat:
        corpus.reader = ConversationReader(config.skip_bad_rows, config.eot_token)
    settings = settings_of(config, corpus)
    if keep_existing(config, settings):
        return 0
    started = time.monotonic()
    print(f"corpus: {corpus.source}")
    with TokenWriter(config.folder) as writer:  # first of all, so that a place that takes no files is told at once
        tokenizer = make_tokenizer(config, corpus)
        writer.set_vocabulary(tokenizer.vocab_size)
        totals = write_tokens(config, corpus, tokenizer, writer)
        meta = {
            "vocab_size": tokenizer.vocab_size,
            "eot_id": tokenizer.eot_id,
            "tokenizer": {key: value for key, value in tokenizer.identity.items() if key != "json"},
            "source": corpus.source,
            "counts": dict(totals),
            "settings": settings,
        }
        meta = writer.commit(meta, tokenizer.identity.get("json"))
    print_summary(config, meta, corpus, time.monotonic() - started)
    return 0


def settings_of(config: PrepareConfig, corpus: Corpus) -> dict[str, Any]:
    """What decides the token files: equal settings, equal files."""
    settings = {k: v for k, v in dataclasses.asdict(config).items() if k not in NOT_COMPARED}
    settings["input_fingerprint"] = corpus.fingerprint
    if config.tokenizer not in ("gpt2", "train"):
        settings["tokenizer_sha256"] = open_tokenizer(config.tokenizer, config.eot_token).identity["sha256"]
    if config.tokenizer != "train":
        del settings["vocab_size"]
    if not config.chat:
        del settings["chat"]
    return settings


def keep_existing(config: PrepareConfig, settings: dict[str, Any]) -> bool:
    """Whether the data there is to be kept: asks at a terminal; elsewhere other settings raise UserError."""
    meta, folder = read_meta(config.folder), config.folder
    if meta is None and (folder / MARKER).exists():
        print(f"{folder} is unfinished: making it anew")
        return False
    if config.overwrite or (meta is None and not any((folder / name).exists() for name in FILES)):
        return False
    old = meta.get("settings", {}) if meta else {}
    changed = [k for k in {**old, **settings} if old.get(k) != settings.get(k)]
    difference = ", ".join(f"{k} was {old.get(k)!r}, now {settings.get(k)!r}" for k in changed)
    difference = difference.replace("input_fingerprint was", "the input files changed: fingerprint was")
    what = f"{folder} is already prepared" + (f" with other settings ({difference})" if meta and changed else "")
    what = what if meta else f"{folder} holds a data set's file names without a meta.json, from another program"
    if sys.stdin.isatty():
        print(f"{what}. Make it anew? [y/N] ", end="", flush=True)
        return sys.stdin.readline().strip().lower() not in ("y", "yes")  # Ctrl-D is no
    if changed:
        raise UserError(f"{what}: --overwrite=true makes it anew, another --dataset= name keeps both")
    print(f"{what} (--overwrite=true makes it anew). Next: {config.next_command}")
    return True


def make_tokenizer(config: PrepareConfig, corpus: Corpus) -> Tokenizer:
    """The tokenizer asked for; `train` makes one from the training documents."""
    if config.tokenizer != "train":
        tokenizer = open_tokenizer(config.tokenizer, config.eot_token)
        return chat_tokenizer(tokenizer) if config.chat else tokenizer
    print(f"training a tokenizer of {config.vocab_size:,} entries")
    pieces = assign_splits(corpus, config)
    sample = thin_out(text for split, text, _ in with_bar(pieces, corpus, "reading") if split == "train")
    if not sample:
        raise UserError(f"{corpus.source} holds no text to train a tokenizer on")
    tokenizer = read_tokenizer_json(train_tokenizer(iter(sample), config.vocab_size), "tokenizer.json")
    if tokenizer.vocab_size < config.vocab_size:
        print(f"vocabulary: {tokenizer.vocab_size:,} of {config.vocab_size:,} entries, this corpus yields no more")
    return tokenizer


def thin_out(texts: Iterable[str], characters: int | None = None) -> list[str]:
    """An even sample of at most TRAINING_SAMPLE characters: every n-th text, n doubling as they come."""
    most = characters or TRAINING_SAMPLE
    kept: list[str] = []
    size, stride = 0, 1
    for number, text in enumerate(texts):
        if number % stride:
            continue
        kept.append(text)
        size += len(text)
        if size > most and len(kept) > 1:
            kept, stride = kept[::2], stride * 2
            size = sum(map(len, kept))
    return kept


def assign_splits(corpus: Corpus, config: PrepareConfig) -> Iterator[Piece]:
    """The documents with their split: a data set's own test split stays, the others are pooled and drawn from.

    One document in every 1 / val_fraction is held out, at a random place, so that the share is exact and no part of
    the corpus is passed over. What is equal, case and white space aside (of the first megabyte), lies on one side: a
    copy of a held-out document is held out, and counts as a draw; a draw that is known from training passes on to the
    next document. With val_fraction=0 a data set's own validation split is kept.
    """
    rng = random.Random(config.seed)
    number, held_out, place, target = -1, 0, -1, "train"
    seen = {"train": Seen(), "val": Seen()}
    inside = False  # a document
    for split, text, ends in corpus:
        if not inside and split != "test" and config.val_fraction:
            number += 1
            if number > place:
                place = max(number, int((held_out + rng.random()) / config.val_fraction))
                held_out += 1
            key = Seen.key(text)
            if key in seen["val"]:
                target, held_out = "val", held_out + (number != place)
            elif number == place and key in seen["train"]:
                target, place = "train", place + 1
            else:
                target = "val" if number == place else "train"
            seen[target].add(key)
        elif not inside:
            target = split
        inside = not ends
        yield target, text, ends


def with_bar(pieces: Iterable[Piece], corpus: Corpus, label: str) -> Iterator[Piece]:
    """Passes pieces on, with a bar of the corpus read so far."""
    with progress_bar(label, unit=corpus.unit) as bar:
        for piece in pieces:
            bar.total = corpus.size
            bar.update(corpus.position - bar.n)
            yield piece


def write_tokens(config: PrepareConfig, corpus: Corpus, tokenizer: Tokenizer, writer: TokenWriter) -> Counter[str]:
    """Encodes all documents into the writer's files; returns what was counted."""
    totals: Counter[str] = Counter()
    hashes = {split: array("q") for split in ("train", "val", "test")}  # of whole documents, to find copies across
    letters = {split: np.zeros(256, dtype=np.int64) for split in hashes}
    pieces = count_letters(hash_documents(assign_splits(corpus, config), hashes), letters)
    pieces = with_bar(pieces, corpus, "encoding")
    pieces = pieces if tokenizer.piecewise else join_pieces(pieces)
    for encoded, counts in encode_all(make_batches(pieces), tokenizer, writer.dtype.str, config.num_proc):
        totals.update(counts)
        for split, ids, documents, mask in encoded:
            writer.append(split, ids, documents, mask)
    if not writer.tokens:
        raise UserError(f"{corpus.source} holds no text: nothing to write")
    totals.update(corpus.counts)
    missing = [split for split in ("train", "val") if not writer.tokens.get(split)]
    if missing and config.chat and (config.val_fraction or missing == ["train"]):
        raise UserError(f"{corpus.source} has too few conversations for a validation part of {config.val_fraction:.0%}")
    if missing and (config.val_fraction or missing == ["train"]):
        if not writer.split_by_tokens(config.val_fraction):
            raise UserError(f"{corpus.source} is too short to split: training and validation need two tokens each")
        print(f"too few documents for a split by document: the last {config.val_fraction:.0%} of the tokens are val")
    copies = np.isin(np.array(hashes["train"], dtype=np.int64), np.array(hashes["val"], dtype=np.int64)).sum()
    if copies:
        totals["training documents equal to a validation document"] = int(copies)
    if (difference := compare_letters(letters["train"], letters["val"])) > UNLIKE:
        totals[UNLIKE_TEXT] = round(100 * difference)
    return totals


def hash_documents(pieces: Iterable[Piece], hashes: dict[str, array]) -> Iterator[Piece]:
    """Passes pieces on and notes a 64-bit hash of every whole document."""
    running = 0
    for split, text, ends in pieces:
        running = hash((running, text)) if running or not ends else hash(text)
        if ends:
            hashes[split].append(running)
            running = 0
        yield split, text, ends


def join_pieces(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Whole documents, for a tokenizer that may not be given a document in pieces."""
    held: list[str] = []
    for split, text, ends in pieces:
        held.append(text)
        if ends:
            yield split, "".join(held), True
            held = []


def make_batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Groups pieces to BATCH_CHARACTERS and more."""
    batch, size = [], 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece[1]) + 50
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def encode_all(batches: Iterable[list[Piece]], tokenizer: Tokenizer, dtype: str, workers: int) -> Iterator[Any]:
    """Encodes batches in worker processes, a bounded number on the way, and yields the results in order."""
    if workers == 1:
        for batch in batches:
            yield encode_batch(batch, tokenizer, dtype)
        return
    start = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, start, start_worker, (tokenizer.identity, dtype)) as pool:
        waiting: deque[Any] = deque()
        try:
            for batch in batches:
                waiting.append(pool.submit(encode_in_worker, batch))
                if len(waiting) > 3 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise UserError("a worker process died, out of memory perhaps: try a smaller --num_proc") from error
        finally:
            pool.shutdown(cancel_futures=True)


def start_worker(identity: dict[str, Any], dtype: str) -> None:
    """Readies a worker: leaves Ctrl-C to the parent, and ends when the parent is gone, even by kill -9."""
    global worker_tools
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()
    worker_tools = restore_tokenizer(identity), dtype


def encode_in_worker(batch: list[Piece]) -> Any:
    """Encodes one batch with the worker's own tokenizer."""
    return encode_batch(batch, *worker_tools)


def encode_batch(
    batch: list[Piece], tokenizer: Tokenizer, dtype: str
) -> tuple[list[tuple[str, bytes, int, bytes]], Counter[str]]:
    """Ids of a batch: (split, bytes in `dtype`, documents ended, mask) for each run of one split, and what was counted."""
    runs: list[tuple[str, list[np.ndarray], list[bool], list[bytes]]] = []
    counts: Counter[str] = Counter()
    eot = np.array([tokenizer.eot_id], dtype=dtype)
    unknown = getattr(tokenizer, "unknown_id", None)
    for split, text, ends in batch:
        utf8, mask = text.encode(), b""
        if tokenizer.chat_ids:
            ids, mask = encode_document(tokenizer, text)
        else:
            ids = tokenizer.encode(text)
        counts["tokens"] += len(ids)
        counts["words"] += count_words(utf8)
        counts["bytes"] += len(utf8)
        if unknown is not None:
            counts["unknown tokens"] += int((ids == unknown).sum())
        if not runs or runs[-1][0] != split:
            runs.append((split, [], [], []))
        runs[-1][1].extend([ids.astype(dtype), eot] if ends and not mask else [ids.astype(dtype)])
        runs[-1][2].append(ends)
        runs[-1][3].append(mask)
    return [(split, np.concatenate(ids).tobytes(), sum(e), b"".join(m)) for split, ids, e, m in runs], counts


def count_words(utf8: bytes) -> int:
    """Runs of bytes between ASCII white space, as `wc -w` counts; split() would take a sixth of a worker's time."""
    space = np.frombuffer(b" " + utf8, dtype=np.uint8) <= 32
    return int(np.count_nonzero(space[:-1] & ~space[1:]))


def print_summary(config: PrepareConfig, meta: dict[str, Any], corpus: Corpus, seconds: float) -> None:
    """Tells what was written and where."""
    counts = dict(meta["counts"])
    tokens, words, size = counts.pop("tokens"), counts.pop("words"), counts.pop("bytes")
    for note in corpus.notes:
        print(note)
    for split, about in meta["splits"].items():
        path = config.folder / f"{split}.bin"
        print(
            f"{split:5} {about['documents']:>10,} documents {about['tokens']:>14,} tokens "
            f"{path.stat().st_size / 1e6:>10,.1f} MB  {path}"
        )
    for what, count in counts.items():
        if count:
            hint = " (copies leak: the validation loss will look too good)" if "equal" in what else ""
            what = re.sub(r"s\b", "", what, count=1) if count == 1 else what
            print(f"{count:,} {what}{hint}")
    print(
        f"vocabulary {meta['vocab_size']:,} ({meta['tokenizer']['name']}), {tokens / max(words, 1):.2f} tokens per word, "
        f"{size / max(tokens, 1):.2f} bytes per token"
    )
    print(
        f"{size / 1e6:,.1f} MB of text in {seconds:.1f} s, {size / 1e6 / seconds:.1f} MB/s: {config.folder}/meta.json"
    )
    print(f"next: {config.next_command}")


if __name__ == "__main__":
    sys.exit(main())
