"""Repetition between documents, for tools.clean_corpus: equal and similar documents.

In:  documents in tasks, each a run of the input in its order.
Out: what to drop, so that of all that is alike the first in input order stays, whatever the number of workers.

datatrove finds duplicates by sorted hashes on disk, and keeps of each group the one that its sorting or its merging
happened to favour. The steps here use its files and order them by place in the input.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from datatrove.data import Document
from datatrove.pipeline.dedup import (
    ExactDedupSignature,
    MinhashDedupCluster,
    MinhashDedupSignature,
)
from datatrove.pipeline.filters.base_filter import BaseFilter
from datatrove.utils.typeshelper import ExtensionHelperSD

from tools.corpus_words import comparable_words, ngram_codes

NODE = np.dtype([("document", "<u4"), ("cluster", "<u4"), ("size", "<u4")])
MERSENNE = np.uint64((1 << 61) - 1)  # datatrove's modulus
HASHES = 176  # of a MinHash signature at most


def choose_bands(similarity: float) -> tuple[int, int]:
    """Bands and rows of MinHash's banding that catch a pair of this Jaccard similarity with 64 in 100.

    A pair of similarity s is caught with probability 1 - (1 - s^rows)^bands (Leskovec et al., Mining of Massive Datasets,
    3.4.2). Of the shapes with HASHES hashes or fewer the one with most rows is taken, its curve is the steepest: 14 x 8
    at 0.72, as FineWeb used (arXiv 2406.17557, 3.5).
    """
    for rows in range(16, 1, -1):
        bands = int(np.ceil(np.log(1 - 0.64) / np.log(1 - similarity**rows)))
        if bands * rows <= HASHES:
            return bands, rows
    return HASHES // 2, 2


def caught(similarity: float, bands: int, rows: int) -> float:
    """The probability that a pair of this similarity is found."""
    return 1 - (1 - similarity**rows) ** bands


class ExactSignature(ExactDedupSignature):
    """datatrove's signature of whole documents; passes them on, and ranks earlier tasks first."""

    def run(self, data: Iterable[Document], rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Writes the signatures of a task."""
        signatures: list[tuple[int, int, int]] = []
        for number, doc in enumerate(data):
            signatures += [(self.hash_fc(self.config.content_getter(doc)), 65535 - rank, number)]
            yield doc
        self.save_hashes(rank, signatures)


class MinhashSignature(MinhashDedupSignature):
    """datatrove's MinHash signatures from shingles that are hashed word by word, twice as fast."""

    def get_shingles(self, text: str) -> np.ndarray:
        """The distinct n-grams of words, (N, 1) uint64; none for a document of fewer words."""
        words = comparable_words(text)
        hashes = np.fromiter(map(xxhash.xxh64_intdigest, words), np.uint64, len(words))
        return np.unique(ngram_codes(hashes, self.config.n_grams)).reshape(-1, 1)

    def get_signature(self, shingles: np.ndarray) -> list[list[int]]:
        """datatrove's minima of (a x + b) mod 2^61 - 1, some shingles at a time.

        The remainder is taken by folding, which leaves 2^61 - 1 where it should be 0: one case in 2^61.
        """
        a, b = self.parameters
        least = np.full(self.num_hashes, np.iinfo(np.uint64).max, dtype=np.uint64)
        for first in range(0, len(shingles), 256):
            x = shingles[first : first + 256] * a + b  # (256, hashes), modulo 2^64
            high = x >> np.uint64(61)
            x &= MERSENNE
            x += high
            np.minimum(least, x.min(axis=0), out=least)
        return [band.tolist() for band in np.split(least, self.config.num_buckets)]


class FirstSurvives(MinhashDedupCluster):
    """datatrove's clusters of similar documents, of which the first in input order stays."""

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Writes for each task what to remove, and the cluster of every document in one."""
        parent: dict[int, int] = {}

        def root(node: int) -> int:
            while parent.setdefault(node, node) != node:
                parent[node] = node = parent[parent[node]]
            return node

        for path in self.input_folder.list_files(glob_pattern="*.dups"):
            with self.input_folder.open(path, "rb") as file:
                pairs = np.frombuffer(file.read(), dtype="<u4").reshape(-1, 2, 2).astype(np.int64)
            for one, other in (pairs[:, :, 0] << 32 | pairs[:, :, 1]).tolist():
                first, second = sorted((root(one), root(other)))
                parent[second] = first
        sizes = Counter(map(root, parent))
        numbers = {first: number for number, first in enumerate(sorted(sizes), start=1)}
        tasks: dict[int, list[int]] = {}
        for node in sorted(parent):
            tasks.setdefault(node >> 32, []).append(node)
        for task, nodes in tasks.items():
            rows = [(node & 0xFFFFFFFF, numbers[root(node)], sizes[root(node)]) for node in nodes]
            removed = [node & 0xFFFFFFFF for node in nodes if node not in numbers]
            with self.output_folder.open(f"{task:06d}.clusters", "wb") as file:
                file.write(np.array(rows, dtype=NODE).tobytes())
            with self.output_folder.open(f"{task:06d}.remove", "wb") as file:
                file.write(np.array(removed, dtype="<u4").tobytes())
        with self.output_folder.open("clusters.json", "w") as file:
            json.dump(dict(sorted(Counter(sizes.values()).items())), file)


class Duplicates(BaseFilter):
    """Drops what the equal and the similar have too many of, and notes the cluster of what stays."""

    name = "duplicates"

    def __init__(self, exact: Path, similar: Path | None, exclusion_writer: Any) -> None:
        super().__init__(exclusion_writer)
        self.exact, self.similar = exact, similar

    def run(self, data: Iterable[Document], rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Filters the documents of a task, which come as they were signed."""
        files = self.exact.glob(f"*/{rank:05d}{ExtensionHelperSD.stage_2_duplicates}")
        self.equal = {int(n) for path in files for n in np.fromfile(path, "<u4")}
        self.alike: set[int] = set()
        self.clusters: dict[int, tuple[int, int]] = {}
        if self.similar and (self.similar / f"{rank:06d}.clusters").exists():
            self.alike = set(np.fromfile(self.similar / f"{rank:06d}.remove", "<u4").tolist())
            nodes = np.fromfile(self.similar / f"{rank:06d}.clusters", NODE).tolist()
            self.clusters = {document: (cluster, size) for document, cluster, size in nodes}
        self.number = -1
        yield from super().run(data, rank, world_size)

    def filter(self, doc: Document) -> bool | tuple[bool, str]:
        """Keeps the first of each group."""
        self.number += 1
        if self.number in self.clusters:
            doc.metadata["cluster"], doc.metadata["cluster_size"] = self.clusters[self.number]
        if self.number in self.equal:
            return False, "exact_duplicate"
        return (False, "near_duplicate") if self.number in self.alike else True
