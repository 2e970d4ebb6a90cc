"""Conversations in token files: the mask beside them, and batches of rows of like length for training.

In:  data/NAME/train.bin with train.mask, a byte a token: 1 = counts in the loss, 2 = a conversation starts here, else 0.
Out: inputs and targets, padded on the right; -1 where nothing is to be learnt.

Letters: B rows of a batch, T their length.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from chat import encode_chat
from configurator import UserError
from dataset import TokenData, read_meta
from tokenizer import Tokenizer

COUNTED, START = 1, 2  # in a mask
POOL = 4096  # conversations that are sorted by length together, to be cut into batches
ROUND = 32  # a batch's length is a multiple of this, so that few different ones occur


def encode_document(tokenizer: Tokenizer, text: str) -> tuple[np.ndarray, bytes]:
    """Ids (T,) of a conversation that ConversationReader read, and its T bytes of the mask."""
    ids, counted = encode_chat(tokenizer, json.loads(text))
    mask = counted.astype(np.uint8) * COUNTED
    mask[0] |= START
    return ids, mask.tobytes()


def open_data(folder: Path, block_size: int, seed: int = 0) -> TokenData:
    """The reader of a data folder: windows of a text, or conversations where it holds masks."""
    splits = (read_meta(folder) or {}).get("splits", {})
    kind = PairData if "mask_sha256" in splits.get("train", {}) else TokenData
    return kind(folder, block_size, seed)


def sample_prompt(data: TokenData) -> list[int]:
    """Ids that a sample during training goes on from: the end of a text, or a held-out question where there are such."""
    if not isinstance(data, PairData):
        return [data.meta["eot_id"]]
    split = "val" if "val" in data.pairs else "train"
    x, y = data.read_pairs(split, np.array([0]))
    return x[0, : int((y[0] != -1).argmax()) + 1].tolist()


class PairData(TokenData):
    """Conversations, one a row, in batches of rows that are about as long.

    A batch has batch_size × block_size ids at most: many short rows or few long ones. Rows are padded on the right, so
    causal attention sees nothing of other conversations, and every conversation starts at position 0. A conversation
    longer than the context is cut; one that has no room for a token of an answer is dropped; both are counted.
    """

    def __init__(self, folder: Path, block_size: int, seed: int = 0) -> None:
        super().__init__(folder, block_size, seed)
        self.masks: dict[str, np.ndarray] = {}
        self.pairs = {split: self._find_pairs(split) for split in self.tokens}
        self.batches_of: dict[tuple[int, int], list[np.ndarray]] = {}  # by epoch and batch_size
        self.counts_of: dict[int, list[int]] = {}  # batches in each epoch, by batch_size

    def _check_split(self, split: str) -> int:
        whole, self.block_size = self.block_size, 0  # which no conversation has to fill
        tokens = super()._check_split(split)
        self.block_size = whole
        path = self.folder / f"{split}.mask"
        if not path.is_file() or path.stat().st_size != tokens:
            raise UserError(f"{path} does not have one byte for each of the {tokens:,} tokens: prepare the data anew")
        return tokens

    def _find_pairs(self, split: str) -> np.ndarray:
        """Start, length and number of targets, (pairs, 3), of the conversations of a split that can be learnt from."""
        mask = self.masks[split] = np.fromfile(self.folder / f"{split}.mask", dtype=np.uint8)
        starts = np.flatnonzero(mask & START)
        lengths = np.diff(starts, append=len(mask))
        kept = np.minimum(lengths, self.block_size + 1)
        before = np.concatenate([[0], np.cumsum(mask & COUNTED, dtype=np.int64)])
        counted = before[starts + kept] - before[starts]
        fits = counted > 0
        dropped, cut = int((~fits).sum()), int((fits & (lengths > kept)).sum())
        if not fits.any() and split != "test":
            raise UserError(
                f"split {split} of {self.folder}: none of {len(starts):,} conversations leaves room for an answer in "
                f"block_size={self.block_size}: a model with a longer context, or shorter questions"
            )
        note = f"{split}: {fits.sum():,} conversations with {counted.sum():,} tokens to learn"
        note += f", {dropped:,} dropped as the question fills the context" if dropped else ""
        note += f", {cut:,} cut at the context's end" if cut else ""
        self.note = f"{self.note}; {note}" if self.note else note
        return np.stack([starts, kept, counted], axis=1)[fits]

    def group(self, split: str, order: np.ndarray, batch_size: int) -> list[np.ndarray]:
        """Batches of pair numbers: of each POOL in `order` those of like length, as many as the batch may have ids."""
        batches, lengths = [], self.pairs[split][:, 1]
        for first in range(0, len(order), POOL):
            pool = order[first : first + POOL]
            pool = pool[np.argsort(-lengths[pool], kind="stable")]
            while len(pool):
                rows = max(1, batch_size * self.block_size // self._padded(int(lengths[pool[0]])))
                batches.append(pool[:rows])
                pool = pool[rows:]
        return batches

    def _padded(self, length: int) -> int:
        """Inputs of a row in a batch whose longest conversation has `length` ids."""
        return min(-(-(length - 1) // ROUND) * ROUND, self.block_size)

    def _train_rows(self, batch: int, batch_size: int) -> np.ndarray:
        """The pairs of training batch number `batch`: a pure function of (seed, batch, batch_size)."""
        counts, epoch = self.counts_of.setdefault(batch_size, []), 0
        while True:
            if epoch == len(counts):
                counts.append(len(self._epoch(epoch, batch_size)))
            if batch < counts[epoch]:
                return self._epoch(epoch, batch_size)[batch]
            batch, epoch = batch - counts[epoch], epoch + 1

    def _epoch(self, epoch: int, batch_size: int) -> list[np.ndarray]:
        """The batches of one epoch in their order; the last two epochs asked for are kept."""
        key = (epoch, batch_size)
        if key not in self.batches_of:
            stream = np.random.RandomState([self.seed & 0xFFFFFFFF, epoch])
            batches = self.group("train", stream.permutation(len(self.pairs["train"])), batch_size)
            for old in list(self.batches_of)[:-1]:
                del self.batches_of[old]
            self.batches_of[key] = [batches[i] for i in stream.permutation(len(batches))]
        return self.batches_of[key]

    def loss_weight(self, batch: int, batches_a_step: int, batch_size: int) -> float:
        """What the mean loss of a batch weighs: its targets over the mean of its step's, over all micro-steps and ranks."""
        first = batch // batches_a_step * batches_a_step
        step = [self._train_rows(first + i, batch_size) for i in range(batches_a_step)]
        targets = [int(self.pairs["train"][rows, 2].sum()) for rows in step]
        return targets[batch - first] * batches_a_step / sum(targets)

    def train_batch(self, first_sample: int, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets, (B, T) int64 each; -1 where nothing is to be learnt."""
        return self.read_pairs("train", self._train_rows(first_sample // batch_size, batch_size))

    def eval_batches(
        self, split: str, batch_size: int, count: int, rank: int = 0, ranks: int = 1
    ) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
        """Up to `count` batches spread evenly over a split, as of TokenData, each with its number of targets."""
        split = split if split in self.tokens else "train"
        batches = self.group(split, np.arange(len(self.pairs[split])), batch_size)
        batches = [batches[len(batches) * i // count] for i in range(count)] if len(batches) > count else batches
        for number in range(rank, len(batches) + rank, ranks):
            rows = batches[min(number, len(batches) - 1)]
            yield *self.read_pairs(split, rows), int(self.pairs[split][rows, 2].sum()) * (number < len(batches))

    def read_pairs(self, split: str, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets, (B, T) int64 each, of the pairs with these numbers, padded with the end-of-text id."""
        ids = np.memmap(self.files[split], dtype=self.dtype, mode="r")
        chosen = self.pairs[split][rows]
        x = np.full((len(rows), self._padded(int(chosen[:, 1].max()))), self.meta["eot_id"], dtype=np.int64)
        y = np.full_like(x, -1)
        for row, (start, length, _) in enumerate(chosen):
            window, counted = (
                ids[start : start + length].astype(np.int64),
                self.masks[split][start + 1 : start + length] & COUNTED,
            )
            x[row, : length - 1] = window[:-1]
            y[row, : length - 1] = np.where(counted, window[1:], -1)
        if x.max() >= self.vocab_size:
            raise UserError(f"{self.folder}/{split}.bin holds id {x.max()}, but vocab_size is {self.vocab_size}")
        return x, y
