"""A held-out split against the training split: documents that stand in both, and how far the two drift apart.

In:  two streams of documents as ids; the training one is read once, a piece at a time.
Out: counts of exact and near duplicates, and distances between vocabularies and between lengths, each beside the one
     that chance alone gives.

A near duplicate shares at least 80 % of its 8-grams with one training document, estimated from the 64 of least hash
(bottom-k sketch, Broder 1997); being part of a longer one is enough, for that leaks as well. 8-grams that more than 20
held-out documents have are taken for boilerplate. Documents of fewer than 16 tokens are compared exactly alone; one
of over a million tokens in parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from dataset import TokenData
from progress import progress_bar
from tokenizer import Tokenizer
from tools.perplexity import PIECE, Piece, read_ids
from tools.text_statistics import NgramHash

GRAM, SKETCH, NEAR = 8, 64, 0.8
SHORTEST = 16  # tokens of a document that has a sketch
BOILERPLATE = 20  # held-out documents that share an 8-gram
FILTER_BITS = 24  # of the table that rules most positions out: 16 MB
OCTAVE = 8  # bins of lengths from one power of two to the next
BINS = 31 * OCTAVE


class Documents:
    """Some whole documents, one array: where each starts, how long it is, and its hashes."""

    def __init__(self, ids: np.ndarray, eot_id: int, ngrams: NgramHash) -> None:
        self.ids, self.ends = ids, np.flatnonzero(ids == eot_id)
        self.starts = np.concatenate([[0], self.ends[:-1] + 1])
        self.lengths = self.ends - self.starts
        self.sums = ngrams.prefix_sums(ids)
        whole = (self.sums[self.ends] - self.sums[self.starts]) * ngrams.inverse[self.starts]
        self.hashes = mix(whole + self.lengths.astype(np.uint64))
        self.ngrams = ngrams

    def grams(self) -> tuple[np.ndarray, np.ndarray]:
        """Hash of each 8-gram inside a document, and the number of its document."""
        if len(self.ids) < GRAM:
            return np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=np.int64)
        owner = np.repeat(np.arange(len(self.ends)), self.lengths + 1)  # the end belongs to its document
        inside = (owner[: len(owner) - GRAM + 1] == owner[GRAM - 1 :]) & (
            self.ids[GRAM - 1 :] != self.ids[self.ends[0]]
        )
        hashes = mix(self.ngrams.at(self.sums, slice(None), GRAM))
        return hashes[inside], owner[: len(inside)][inside]


def mix(hashes: np.ndarray) -> np.ndarray:
    """Spreads every bit over all 64 (the finaliser of SplitMix64, Steele et al. 2014)."""
    hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return hashes ^ (hashes >> np.uint64(31))


def whole_documents(chunks: Iterable[np.ndarray], eot_id: int) -> Iterator[np.ndarray]:
    """The same ids in arrays of whole documents, each with its end; a document of over PIECE ids is cut."""
    end, held = np.array([eot_id]), np.zeros(0, dtype=np.uint16)
    for ids in chunks:
        ids = np.concatenate([held, ids])
        ends = np.flatnonzero(ids == eot_id)
        cut = int(ends[-1]) + 1 if len(ends) else 0
        if cut:
            yield ids[:cut]
        held = ids[cut:]
        if len(held) >= PIECE:
            yield np.concatenate([held, end])
            held = held[:0]
    if len(held):
        yield np.concatenate([held, end])


def joined(pieces: Iterable[Piece], eot_id: int) -> Iterator[np.ndarray]:
    """Documents that come one by one as arrays of about PIECE ids, each document with its end."""
    held, size = [], 0
    for ids, ends in pieces:
        for first in range(0, len(ids) + 1, PIECE):
            part = ids[first : first + PIECE]
            if size + len(part) >= PIECE:
                yield np.concatenate(held).astype(np.int64) if held else np.zeros(0, dtype=np.int64)
                held, size = [], 0
            held.append(part)
            size += len(part) + 1
        if ends:
            held.append(np.array([eot_id]))
    if held:
        yield np.concatenate(held).astype(np.int64)


class Measure:
    """Token counts and lengths of a set of documents, in memory that does not grow with it."""

    def __init__(self, vocab_size: int) -> None:
        self.tokens, self.lengths = np.zeros(vocab_size, dtype=np.int64), np.zeros(BINS, dtype=np.int64)

    def add(self, docs: Documents, chosen: np.ndarray | None = None) -> None:
        """Counts some documents, those `chosen` alone when given."""
        ids = docs.ids if chosen is None else docs.ids[np.repeat(chosen, docs.lengths + 1)]
        self.tokens += np.bincount(ids, minlength=len(self.tokens))
        lengths = docs.lengths if chosen is None else docs.lengths[chosen]
        self.lengths += np.bincount(length_bin(lengths), minlength=BINS)

    @property
    def documents(self) -> int:
        """Documents counted."""
        return int(self.lengths.sum())

    def quantile(self, share: float) -> float:
        """Length that this share of the documents does not pass, to within a bin of 9 %."""
        place = int(np.searchsorted(self.lengths.cumsum(), share * self.documents))
        return round(2 ** ((place + 0.5) / OCTAVE) - 1)


def length_bin(lengths: np.ndarray) -> np.ndarray:
    """The bin of each length."""
    return (np.log2(lengths + 1.0) * OCTAVE).astype(np.int64)


def divergence(a: np.ndarray, b: np.ndarray) -> float:
    """Jensen-Shannon divergence of two lists of counts, in bits: 0 for the same shares, 1 for nothing in common."""
    p, q = a / max(1, a.sum()), b / max(1, b.sum())
    middle = (p + q) / 2

    def against(x: np.ndarray) -> float:
        some = x > 0
        return float((x[some] * np.log2(x[some] / middle[some])).sum())

    return max(0.0, (against(p) + against(q)) / 2)


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Kolmogorov-Smirnov distance of two histograms: the largest gap between their cumulative shares."""
    return float(np.abs(a.cumsum() / max(1, a.sum()) - b.cumsum() / max(1, b.sum())).max())


class HeldOut:
    """The held-out documents: hashes of whole ones, sketches, and the first words of each to show."""

    def __init__(self, chunks: Iterable[np.ndarray], eot_id: int, ngrams: NgramHash, vocab_size: int) -> None:
        self.measure = Measure(vocab_size)
        hashes, keys, heads, lengths = [], [], [], []
        for ids in chunks:
            docs = Documents(ids, eot_id, ngrams)
            self.measure.add(docs)
            grams, owners = docs.grams()
            bounds = np.searchsorted(owners, np.arange(len(docs.ends) + 1))
            for k, length in enumerate(docs.lengths):
                keys.append(np.unique(grams[bounds[k] : bounds[k + 1]])[:SKETCH])
                heads.append(docs.ids[docs.starts[k] : docs.starts[k] + min(length, 24)].tolist())
            hashes.append(docs.hashes)
            lengths.append(docs.lengths)
        self.hashes = np.concatenate(hashes) if hashes else np.zeros(0, dtype=np.uint64)
        self.lengths = np.concatenate(lengths) if lengths else np.zeros(0, dtype=np.int64)
        self.heads = heads
        self.exact, self.best = np.zeros(len(self.hashes), dtype=bool), np.zeros(len(self.hashes))
        self._index(keys)

    def _index(self, keys: list[np.ndarray]) -> None:
        """Sorts the sketches' hashes with their owners, copies of a document once, boilerplate left out."""
        _, first = np.unique(self.hashes, return_index=True)
        some = [keys[k] for k in first]
        key = np.concatenate(some) if some else np.zeros(0, dtype=np.uint64)
        owner = np.repeat(first, [len(k) for k in some])
        _, inverse, counts = np.unique(key, return_inverse=True, return_counts=True)
        rare = counts[inverse] <= BOILERPLATE
        order = np.argsort(key[rare], kind="stable")
        self.key, self.owner = key[rare][order], owner[rare][order]
        self.size = np.bincount(self.owner, minlength=len(self.hashes))
        self.filter = np.zeros(1 << FILTER_BITS, dtype=bool)
        self.filter[self.key & np.uint64((1 << FILTER_BITS) - 1)] = True

    def compare(self, docs: Documents) -> None:
        """Notes what the given training documents have in common with these."""
        self.exact |= np.isin(self.hashes, docs.hashes) & (self.lengths > 0)
        if not len(self.key):
            return
        grams, document = docs.grams()
        hits = self.filter[grams & np.uint64((1 << FILTER_BITS) - 1)]
        grams, document = grams[hits], document[hits]
        left, right = np.searchsorted(self.key, grams), np.searchsorted(self.key, grams, side="right")
        times = right - left
        entry = np.repeat(left, times) + np.arange(times.sum()) - np.repeat(times.cumsum() - times, times)
        seen = np.unique(np.repeat(document, times) * len(self.key) + entry)  # an 8-gram counts once a document
        document, entry = seen // len(self.key), seen % len(self.key)
        pairs, counts = np.unique(document * len(self.hashes) + self.owner[entry], return_counts=True)
        owner = pairs % len(self.hashes)
        np.maximum.at(self.best, owner, counts / self.size[owner])

    def spread(self) -> np.ndarray:
        """Whether each document is a near duplicate; a copy inside the split shares the answer of the first."""
        _, first, inverse = np.unique(self.hashes, return_index=True, return_inverse=True)
        enough = self.size >= SHORTEST - GRAM + 1
        return ((self.best >= NEAR) & enough)[first][inverse] if len(first) else self.exact


def compare_with_training(pieces: Iterable[Piece], data: TokenData, tokenizer: Tokenizer, name: str) -> dict[str, Any]:
    """Compares the documents of `pieces` with the training split of `data`."""
    eot, vocab_size = data.meta["eot_id"], data.vocab_size
    ngrams = NgramHash(vocab_size, 2 * PIECE + 2)
    held = HeldOut(whole_documents(joined(pieces, eot), eot), eot, ngrams, vocab_size)
    train, sample = Measure(vocab_size), Measure(vocab_size)
    share = min(0.5, int(held.measure.tokens.sum()) / data.tokens["train"])  # as much training text, for comparison
    threshold = np.uint64(share * float(1 << 63)) << np.uint64(1)
    with progress_bar("comparing with train.bin", unit=" tokens", total=data.tokens["train"]) as bar:
        for ids in whole_documents(read_ids(data, "train"), eot):
            docs = Documents(ids, eot, ngrams)
            held.compare(docs)
            train.add(docs)
            sample.add(docs, mix(docs.hashes) < threshold)
            bar.update(len(ids))
    return describe(held, train, sample, tokenizer, name)


def describe(held: HeldOut, train: Measure, sample: Measure, tokenizer: Tokenizer, name: str) -> dict[str, Any]:
    """The numbers of a comparison, as plain values."""
    near = held.spread() & ~held.exact
    both = held.exact | near
    tokens = int(held.lengths.sum())
    shown = [(k, "exact" if held.exact[k] else "near") for k in np.flatnonzero(both)[:5]]
    unseen = int(held.measure.tokens[train.tokens == 0].sum())
    inverse = (held.measure.documents + train.documents) / max(1, held.measure.documents * train.documents)
    chance = min(1.0, float(1.63 * np.sqrt(inverse)))  # passed once in a hundred (Kolmogorov 1933)
    lengths = {
        key: {"mean": round(float(m.tokens.sum()) / max(1, m.documents), 1)}
        | {f"p{q}": m.quantile(q / 100) for q in (10, 50, 90)}
        for key, m in (("train", train), (name, held.measure))
    }
    return {
        "split": name,
        "documents": held.measure.documents,
        "train_documents": train.documents,
        "exact_duplicates": int(held.exact.sum()),
        "near_duplicates": int(near.sum()),
        "duplicate_tokens": float(held.lengths[both].sum() / max(1, tokens)),
        "examples": [{"kind": kind, "text": tokenizer.decode(held.heads[k])} for k, kind in shown],
        "vocabulary_divergence": divergence(held.measure.tokens, train.tokens),
        "vocabulary_divergence_by_chance": divergence(sample.tokens, train.tokens) if sample.documents else None,
        "unseen_tokens": unseen / max(1, tokens),
        "lengths": lengths,
        "length_distance": distance(held.measure.lengths, train.lengths),
        "length_distance_by_chance": chance,
    }
