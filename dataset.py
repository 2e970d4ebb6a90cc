"""Token files: the writer and the reader of data/NAME/{train,val,test}.bin and meta.json, side by side.

A .bin is headerless little-endian ids (uint16 while the largest id fits, else uint32), documents joined, each followed
by the end-of-text id: nanoGPT's format. meta.json says the rest. It goes first and comes last when files take their names,
so data without it, beside the marker of a writer, are unfinished, and data with it are whole, whoever is at work on others.

Letters: B batch, T block_size, N tokens in a split.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from configurator import UserError
from tokenizer import character_tokenizer, read_tokenizer_json

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None

FORMAT_VERSION = 1
MARKER = "UNFINISHED"
# in the order in which they get their names
FILES = ("train.bin", "val.bin", "test.bin", "train.mask", "val.mask", "test.mask", "tokenizer.json", "meta.json")
GPT2_VOCABULARY = {"vocab_size": 50257, "eot_id": 50256, "tokenizer": {"kind": "gpt2", "name": "gpt2"}}


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a small file beside its target, flushes it to disk and renames it."""
    partial = path.with_name(path.name + ".tmp")
    write_to_disk(partial, data)
    os.replace(partial, path)


def write_to_disk(path: Path, data: bytes) -> None:
    """Writes a small file and waits until the disk has it."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def flush_and_digest(file: Any) -> str:
    """SHA-256 of an open file, which is on the disk then."""
    file.flush()
    os.fsync(file.fileno())
    file.seek(0)
    digest = hashlib.sha256()
    while chunk := file.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()


def take_lock(file: Any) -> bool:
    """Locks an open file for this process; False when another one has it."""
    with contextlib.suppress(BlockingIOError):
        return not fcntl or fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB) is None
    return False


def release_lock(file: Any) -> None:
    """Gives a lock back, for a forked child too, which a close alone would leave holding it."""
    if fcntl:
        fcntl.flock(file, fcntl.LOCK_UN)


class TokenWriter:
    """Writes the splits of one data set beside their targets; `commit` makes them appear, leaving the block drops them.

    Use as a context manager. Nothing that stood in the folder is touched before `commit`. A folder has one writer at a
    time: the marker is locked, until this process ends if it must be.
    """

    def __init__(self, folder: Path, vocab_size: int = 0) -> None:
        self.folder = Path(folder)
        self.set_vocabulary(vocab_size)
        self.tokens, self.documents = {}, {}  # numbers by split
        self.files, self.masks = {}, {}  # open files by split
        self.committing = self.committed = False

    def set_vocabulary(self, size: int) -> None:
        """Makes ids wide enough for a vocabulary; before the first append."""
        self.dtype = np.dtype("<u2" if size <= 1 << 16 else "<u4")

    def __enter__(self) -> TokenWriter:
        self.made_folder = not self.folder.exists()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.marker = open(self.folder / MARKER, "a")
        if not take_lock(self.marker):
            raise UserError(f"another prepare.py is at work in {self.folder}: wait for it, or take another name")
        if not self.marker.tell():
            self.marker.write("prepare.py is at work here, or was stopped before its end\n")
            self.marker.flush()
        self._unlink_partial()  # of a run that was killed
        return self

    def _unlink_partial(self) -> None:
        for name in FILES:
            (self.folder / f"{name}.tmp").unlink(missing_ok=True)

    def append(self, split: str, ids: bytes, documents: int, mask: bytes = b"") -> None:
        """Appends ids, already in `dtype`, that finish `documents` documents; conversations have a byte a token, too."""
        if split not in self.files:
            self.files[split] = open(self.folder / f"{split}.bin.tmp", "w+b")  # noqa: SIM115, closed by __exit__
            self.tokens[split] = self.documents[split] = 0
        if mask:
            self.masks[split] = self.masks.get(split) or open(self.folder / f"{split}.mask.tmp", "w+b")  # noqa: SIM115
            self.masks[split].write(mask)
        self.files[split].write(ids)
        self.tokens[split] += len(ids) // self.dtype.itemsize
        self.documents[split] += documents

    def split_by_tokens(self, fraction: float) -> bool:
        """Cuts the last `fraction` of the only non-empty one of train and val off as val, with two ids at least on each
        side, since a target needs one before it; False if there are no four ids."""
        whole = next((split for split in ("train", "val") if self.tokens.get(split)), None)
        if whole is None or self.tokens[whole] < 4:
            return False
        total, documents = self.tokens[whole], self.documents[whole]
        kept = total - min(total - 2, max(2, round(total * fraction)))
        if whole == "val":
            self.files["val"].close()
            os.replace(self.folder / "val.bin.tmp", self.folder / "train.bin.tmp")
            self.files["train"] = open(self.folder / "train.bin.tmp", "r+b")  # noqa: SIM115
            del self.files["val"], self.tokens["val"], self.documents["val"]
        source = self.files["train"]
        source.seek(kept * self.dtype.itemsize)
        while chunk := source.read(1 << 20):
            self.append("val", chunk, 0)
        source.truncate(kept * self.dtype.itemsize)
        self.tokens["train"], self.documents["train"], self.documents["val"] = kept, documents, 1
        return True

    def commit(self, meta: dict[str, Any], tokenizer_json: str | None = None) -> dict[str, Any]:
        """Flushes, renames and describes the files; returns the meta.json that is written last."""
        splits = {}
        for split, file in self.files.items():
            splits[split] = {"tokens": self.tokens[split], "documents": self.documents[split]}
            splits[split]["sha256"] = flush_and_digest(file)
            if split in self.masks:
                splits[split]["mask_sha256"] = flush_and_digest(self.masks[split])
        meta = {"format_version": FORMAT_VERSION, "dtype": self.dtype.name, "splits": splits} | meta
        if tokenizer_json is not None:
            write_to_disk(self.folder / "tokenizer.json.tmp", tokenizer_json.encode())
        write_to_disk(self.folder / "meta.json.tmp", (json.dumps(meta, indent=2, ensure_ascii=False) + "\n").encode())
        self.committing = True  # all is on disk; from here to the last name the folder holds old and new
        (self.folder / "meta.json").unlink(missing_ok=True)
        for name in FILES:
            if (self.folder / f"{name}.tmp").exists():
                os.replace(self.folder / f"{name}.tmp", self.folder / name)
            else:
                (self.folder / name).unlink(missing_ok=True)
        self.committed = True
        return meta

    def __exit__(self, *_: object) -> None:
        for file in (*self.files.values(), *self.masks.values()):
            with contextlib.suppress(OSError):  # where the disk is full, closing tries to write once more
                file.close()
        if self.committed or not self.committing:
            self._unlink_partial()
            (self.folder / MARKER).unlink(missing_ok=True)
        self.marker.close()
        if self.made_folder and not self.committed:
            with contextlib.suppress(OSError):  # something else was put there meanwhile
                self.folder.rmdir()


def read_meta(folder: Path) -> dict[str, Any] | None:
    """The meta.json of a finished data set, None where there is no finished one. Raises UserError for a broken file."""
    path = Path(folder) / "meta.json"
    if not path.is_file():
        return None
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        if meta["format_version"] != FORMAT_VERSION:
            raise UserError(f"{path} has format {meta['format_version']}, this version reads {FORMAT_VERSION}")
        _ = meta["splits"]["train"]["tokens"], np.dtype(meta["dtype"]), meta["eot_id"], meta["tokenizer"]["kind"]
        return meta | {"vocab_size": int(meta["vocab_size"])}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}): prepare the data anew with --overwrite=true") from error


class TokenData:
    """The reader: windows of T + 1 ids out of the splits of one folder.

    Every check of the files is made here, before a model is built. Raises UserError.
    """

    def __init__(self, folder: Path, block_size: int, seed: int = 0) -> None:
        self.folder, self.block_size, self.seed = Path(folder), block_size, seed
        self.note: str | None = None
        self.meta = self._read_or_assume_meta()
        self.dtype, self.vocab_size = np.dtype(self.meta["dtype"]), self.meta["vocab_size"]
        self.tokens, self.files = {}, {}
        for split in self.meta["splits"]:
            self.tokens[split] = self._check_split(split)
            # held open: should the data be made anew meanwhile, this run goes on with the files it began with
            self.files[split] = open(self.folder / f"{split}.bin", "rb")  # noqa: SIM115
        if "val" not in self.tokens:
            self.note = f"{folder} has no val.bin: the loss on fixed training windows stands in for the validation loss"

    def _read_or_assume_meta(self) -> dict[str, Any]:
        meta = read_meta(self.folder)
        if meta is not None:
            return meta
        if (self.folder / MARKER).exists():
            raise UserError(f"{self.folder} is unfinished, prepare.py is at work or was stopped: run prepare.py again")
        if not (self.folder / "train.bin").is_file():
            raise UserError(
                f"no prepared data in {self.folder}: make them (./prepare_data.sh), or name another --dataset="
            )
        found = [split for split in ("train", "val", "test") if (self.folder / f"{split}.bin").is_file()]
        sizes = {split: {"tokens": os.path.getsize(self.folder / f"{split}.bin") // 2} for split in found}
        vocabulary, named = GPT2_VOCABULARY, "GPT-2's vocabulary"
        if (self.folder / "meta.pkl").is_file():
            vocabulary, named = read_character_vocabulary(self.folder / "meta.pkl"), "the characters of its meta.pkl"
        self.note = f"{self.folder} has no meta.json: taken as nanoGPT's uint16 files with {named}"
        return {"dtype": "uint16", "splits": sizes} | vocabulary

    def _check_split(self, split: str) -> int:
        path, tokens = self.folder / f"{split}.bin", self.meta["splits"][split]["tokens"]
        size = os.path.getsize(path) if path.is_file() else 0
        if size != tokens * self.dtype.itemsize:
            raise UserError(
                f"{path} has {size:,} bytes, meta.json says {tokens:,} ids of {self.dtype}: prepare it anew"
            )
        if tokens < self.block_size + 1 and split != "test":
            raise UserError(
                f"split {split} of {self.folder} has {tokens:,} tokens, needs at least {self.block_size + 1:,} "
                f"for block_size={self.block_size}: use a smaller --block_size or more data"
            )
        return tokens

    @property
    def windows_per_epoch(self) -> int:
        """Training windows in one epoch, no two overlapping."""
        return max(1, (self.tokens["train"] - self.block_size) // self.block_size)

    def window_start(self, sample: int) -> int:
        """Where training sample number `sample` starts: a pure function of (seed, sample).

        An epoch lays n = (N - T) // T windows end to end from an offset of its own, drawn from the N - n T places that
        still fit, and visits them in an order of its own. Over the epochs every id is an input and a target.
        """
        epoch, index = divmod(sample, self.windows_per_epoch)
        offset, order = epoch_order(self.tokens["train"], self.block_size, self.seed, epoch)
        return offset + self.block_size * int(order[index])

    def loss_weight(self, batch: int, batches_a_step: int, batch_size: int) -> float:
        """What the mean loss of a batch weighs in that of its step: all windows have equally many targets."""
        return 1

    def train_batch(self, first_sample: int, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets, (B, T) int64 each, of the training samples from `first_sample` on."""
        return self.read_windows("train", [self.window_start(first_sample + i) for i in range(batch_size)])

    def eval_batches(
        self, split: str, batch_size: int, count: int, rank: int = 0, ranks: int = 1
    ) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
        """Up to `count` batches of fixed windows spread evenly over a split, the same for every call: those of one
        process, and the number of windows that each stands for. Every process gets equally many, since sharded weights
        are gathered by all at once; what is handed out twice for that stands for 0.
        """
        split = split if split in self.tokens else "train"
        room = self.tokens[split] - self.block_size - 1
        windows = min(batch_size * count, room // self.block_size + 1)
        starts = [room * i // max(1, windows - 1) for i in range(windows)]
        batches = [starts[first : first + batch_size] for first in range(0, windows, batch_size)]
        for number in range(rank, len(batches) + rank, ranks):
            chosen = batches[min(number, len(batches) - 1)]
            yield *self.read_windows(split, chosen), len(chosen) * (number < len(batches))

    def read_windows(self, split: str, starts: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets, (B, T) int64, at the given starts.

        The map is opened anew each time: one kept open holds every page it ever touched in resident memory
        (340 MB after 3,000 batches of a 400 MB file, 0.4 MB this way).
        """
        path = self.folder / f"{split}.bin"
        ids = np.memmap(self.files[split], dtype=self.dtype, mode="r")
        windows = np.stack([ids[s : s + self.block_size + 1] for s in starts]).astype(np.int64)  # (B, T + 1)
        if windows.max() >= self.vocab_size:
            raise UserError(f"{path} holds id {windows.max()}, but vocab_size is {self.vocab_size}: prepare it anew")
        return windows[:, :-1], windows[:, 1:]


class PlainUnpickler(pickle.Unpickler):
    """Reads plain values alone: no name in the file is looked up, so nothing of it runs."""

    def find_class(self, module: str, name: str) -> Any:
        """Refuses."""
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def read_character_vocabulary(path: Path) -> dict[str, Any]:
    """Vocabulary and tokenizer of nanoGPT's character-level data sets, whose meta.pkl lists the characters in `itos`."""
    try:
        characters = PlainUnpickler(io.BytesIO(path.read_bytes())).load()["itos"]
        text = character_tokenizer([characters[i] for i in range(len(characters))])
    except Exception as error:  # a foreign file may hold anything
        raise UserError(f"{path} is not nanoGPT's list of characters: {error}") from error
    identity = read_tokenizer_json(text, "meta.pkl").identity
    return {"vocab_size": len(characters) + 1, "eot_id": len(characters), "tokenizer": identity}


@functools.lru_cache(maxsize=4)
def epoch_order(tokens: int, block_size: int, seed: int, epoch: int) -> tuple[int, np.ndarray]:
    """Offset and order of the windows of one epoch, see `window_start`.

    RandomState, because NumPy promises never to change its streams (NEP 19): a resumed run sees the same order years on.
    """
    windows = max(1, (tokens - block_size) // block_size)
    stream = np.random.RandomState([seed & 0xFFFFFFFF, epoch])
    offset = stream.randint(tokens - windows * block_size)
    return int(offset), stream.permutation(windows).astype(np.uint32)
