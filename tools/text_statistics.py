"""What can be counted in generated text: repetition, variety, and what was copied from the training text.

In:  lists of ids, and the token file that the model learnt from.
Out: shares from 0 to 1, and the longest span that was copied.

The training file is read once, a piece at a time, so memory stays flat however large it is. An n-gram is found by a
64-bit hash: of a billion positions compared with a hundred thousand n-grams, one in 10^5 scans sees a false match.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from dataset import TokenData
from diagnostics import repeated_ngrams
from progress import progress_bar
from tokenizer import Tokenizer
from tools.perplexity import PIECE, read_ids

KNOWN, KNOWN_PIECE = 4_000_000, 250_000  # training tokens whose words are known ones; so many decoded at a time
COPIED = 8  # ids in a row that count as copied
FILTER_BITS = 22  # of the table that rules most positions out: 4 MB
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd, so that it has an inverse modulo 2^64


def repetition(samples: Sequence[Sequence[int]]) -> dict[str, float]:
    """Share of the n-grams of a sample that stood in it before, n from 2 to 4, the mean over samples; the worst for 4."""
    result = {}
    for n in (2, 3, 4):
        shares = [repeated_ngrams(ids, n) for ids in samples if len(ids) >= n]
        result[f"repeated_{n}"] = float(np.mean(shares)) if shares else 0.0
    shares = [repeated_ngrams(ids, 4) for ids in samples]
    return result | {"repeated_4_worst": max(shares, default=0.0)}


def distinct(samples: Sequence[Sequence[int]]) -> dict[str, float]:
    """Distinct n-grams over all n-grams of all samples together, n from 1 to 4 (Li et al. 2016, section 5.1)."""
    result = {}
    for n in (1, 2, 3, 4):
        grams = [tuple(ids[i : i + n]) for ids in samples for i in range(len(ids) - n + 1)]
        result[f"distinct_{n}"] = len(set(grams)) / len(grams) if grams else 0.0
    return result


def words_of(text: str) -> list[str]:
    """The words of a text in small letters, without numbers and signs."""
    return re.findall(r"[^\W\d_]+", text.lower())


def odd_words(texts: Sequence[str], known: set[str]) -> float:
    """Share of the words that are not among the known ones."""
    words = [word for text in texts for word in words_of(text)]
    return sum(word not in known for word in words) / len(words) if words else 0.0


def known_words(data: TokenData, tokenizer: Tokenizer) -> set[str]:
    """The words at the start of the training split."""
    found: set[str] = set()
    for number, ids in enumerate(read_ids(data, "train", KNOWN_PIECE)):
        found.update(words_of(tokenizer.decode(ids.tolist())))
        if (number + 1) * KNOWN_PIECE >= KNOWN:
            break
    return found


class NgramHash:
    """Hashes of all n-grams of an array, for any n, from one pass of prefix sums modulo 2^64.

    An id stands for a random number r; the hash of places i to i + n - 1 is the sum of r[i + k] m^k.
    """

    def __init__(self, vocab_size: int, longest: int) -> None:
        self.random = np.random.RandomState(20190214).randint(0, 1 << 63, vocab_size, dtype=np.int64).astype(np.uint64)
        self.powers, self.inverse = powers(MULTIPLIER, longest), powers(inverse_of(MULTIPLIER), longest)

    def prefix_sums(self, ids: np.ndarray) -> np.ndarray:
        """The sums (T + 1,) that `at` reads hashes off."""
        sums = np.zeros(len(ids) + 1, dtype=np.uint64)
        np.cumsum(self.random[ids] * self.powers[: len(ids)], out=sums[1:])
        return sums

    def at(self, sums: np.ndarray, starts: np.ndarray | slice, n: int) -> np.ndarray:
        """Hashes of the n-grams at `starts`, all of which must end inside."""
        if isinstance(starts, slice):
            return (sums[n:] - sums[: len(sums) - n]) * self.inverse[: len(sums) - n]
        return (sums[starts + n] - sums[starts]) * self.inverse[starts]


def powers(base: np.uint64, count: int) -> np.ndarray:
    """base^0 … base^(count - 1) modulo 2^64."""
    factors = np.full(count, base, dtype=np.uint64)
    factors[0] = 1
    return np.cumprod(factors, dtype=np.uint64)


def inverse_of(odd: np.uint64) -> np.uint64:
    """The number that gives 1 modulo 2^64 when multiplied with an odd one."""
    return np.uint64(pow(int(odd), -1, 1 << 64))


class CopyFinder:
    """Finds what of some samples stands in a training text: the share of their 8-grams, and the longest span."""

    def __init__(self, samples: Sequence[Sequence[int]], vocab_size: int) -> None:
        self.samples = [np.array(ids, dtype=np.int64) for ids in samples]
        self.most = max(map(len, self.samples), default=0)
        self.hash = NgramHash(vocab_size, PIECE + self.most + 2)
        self.sums = [self.hash.prefix_sums(ids) for ids in self.samples]
        grams = self._grams(COPIED)
        self.wanted, self.place = np.unique(grams, return_inverse=True)
        self.found = np.zeros(len(self.wanted), dtype=bool)
        self.filter = np.zeros(1 << FILTER_BITS, dtype=bool)
        self.filter[self.wanted >> np.uint64(64 - FILTER_BITS)] = True
        self.longest, self.copied = 0, np.zeros(0, dtype=np.int64)
        self.longer = np.sort(grams)  # hashes of the spans that would be longer than the longest so far
        self.tail = np.zeros(0, dtype=np.uint16)  # of the piece before, a sample long

    def _grams(self, n: int) -> np.ndarray:
        """Hashes of all n-grams of the samples."""
        parts = [self.hash.at(sums, slice(None), n) for sums in self.sums if len(sums) > n]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.uint64)

    def read(self, ids: np.ndarray) -> None:
        """Takes the next piece of the training text. Samples hold no end-of-text id, so no match crosses documents."""
        ids = np.concatenate([self.tail, ids]) if len(self.tail) else ids
        self.tail = ids[max(0, len(ids) - self.most) :].copy()
        if len(ids) < COPIED or not len(self.wanted):
            return
        sums = self.hash.prefix_sums(ids)
        hashes = self.hash.at(sums, slice(None), COPIED)
        hits = np.flatnonzero(self.filter[hashes >> np.uint64(64 - FILTER_BITS)])
        hits, known = self._known(hits, hashes[hits], self.wanted)
        self.found[known] = True
        while len(hits):  # each round the longest span grows by one, so there are few in all
            n = max(COPIED, self.longest + 1)
            hits = hits[hits + n <= len(ids)]
            hits, _ = self._known(hits, self.hash.at(sums, hits, n), self.longer)
            if len(hits):
                self.longest, self.copied = n, ids[hits[0] : hits[0] + n].astype(np.int64)
                self.longer = np.unique(self._grams(n + 1))

    def _known(self, hits: np.ndarray, hashes: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The hits whose hash is among the wanted, which are sorted, and the place of each there."""
        if not len(wanted):
            return hits[:0], hits[:0]
        place = np.searchsorted(wanted, hashes).clip(max=len(wanted) - 1)
        same = wanted[place] == hashes
        return hits[same], place[same]

    def shares(self) -> list[float | None]:
        """Share of each sample's 8-grams that were found; None for a sample without any."""
        counts = [max(0, len(ids) - COPIED + 1) for ids in self.samples]
        parts = np.split(self.found[self.place], np.cumsum(counts)[:-1]) if counts else []
        return [float(part.mean()) if len(part) else None for part in parts]


def find_copies(groups: dict[str, Sequence[Sequence[int]]], data: TokenData) -> dict[str, dict[str, Any]]:
    """Memorisation of each group of samples, out of one pass over the training split: share of 8-grams that stand there,
    the most copied sample's share, and the longest copied span with its ids.
    """
    finders = {name: CopyFinder(samples, data.vocab_size) for name, samples in groups.items()}
    with progress_bar("reading train.bin for copies", unit=" tokens", total=data.tokens["train"]) as bar:
        for ids in read_ids(data, "train"):
            for finder in finders.values():
                finder.read(ids)
            bar.update(len(ids))
    results = {}
    for name, finder in finders.items():
        shares = [share for share in finder.shares() if share is not None]
        grams = finder.found[finder.place]
        results[name] = {
            "copied_8": float(grams.mean()) if len(grams) else 0.0,
            "copied_8_worst": max(shares, default=0.0),
            "longest_copy": finder.longest,
            "longest_copy_ids": finder.copied.tolist(),
        }
    return results
