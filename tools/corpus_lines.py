"""What documents repeat of one another in parts, for tools.clean_corpus: lines of a site, paragraphs of earlier documents.

In:  documents in tasks, each a run of the input in its order.
Out: documents without them. Counts and hashes lie on disk between the passes, so memory stays small.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.dedup import SentenceDedupFilter, SentenceDedupSignature, SentenceFindDedups
from datatrove.pipeline.filters.base_filter import BaseFilter
from datatrove.utils.typeshelper import ExtensionHelperSD

from tools.corpus_words import WORDS, comparable_words

DIGITS = re.compile(r"\d+")
LINE = np.dtype([("hash", "<u8"), ("documents", "<u4")])
PARAGRAPH = np.dtype([("hash", "<u8"), ("document", "<u4"), ("line", "<u2")])
KEYS = 1 << 22  # lines counted in memory at a time, 32 MB
MENU_LINES = 3  # lines of one or two words go where so many stand together; a heading stands alone
MOST_LINES = 1 << 16  # of a document; datatrove numbers them in 16 bits


# --- lines that a site or a corpus repeats ---------------------------------------------------------------------------


def line_key(line: str) -> int:
    """The hash of a line, numbers and case aside; 0 for one without a letter."""
    line = line.strip()
    if not line or len(line) > 300 or not any(map(str.isalpha, line)):
        return 0
    return xxhash.xxh64_intdigest(DIGITS.sub("0", line.lower()))


class LineCounts(PipelineStep):
    """Passes documents on and counts in how many of its task each line occurs."""

    name, type = "line counts", "lines"

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def run(self, data: Iterable[Document], rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Writes files of sorted (hash, documents), one for each KEYS lines."""
        keys, part = array("Q"), 0
        for doc in data:
            keys.extend(set(map(line_key, doc.text.split("\n"))))
            if len(keys) > KEYS:
                self.save(keys, f"{rank:05d}_{part:05d}")
                keys, part = array("Q"), part + 1
            yield doc
        self.save(keys, f"{rank:05d}_{part:05d}")

    def save(self, keys: array, name: str) -> None:
        """Writes one file."""
        hashes, counts = np.unique(np.array(keys, dtype=np.uint64), return_counts=True)
        lines = np.empty(len(hashes), dtype=LINE)
        lines["hash"], lines["documents"] = hashes, counts
        self.folder.mkdir(parents=True, exist_ok=True)
        lines.tofile(self.folder / f"{name}.lines")


class FrequentLines(PipelineStep):
    """Adds the counts of all tasks, one range of hashes a task, and notes the lines of `documents` and more."""

    name, type = "frequent lines", "lines"

    def __init__(self, counts: Path, folder: Path, documents: int) -> None:
        super().__init__()
        self.counts, self.folder, self.documents = counts, folder, documents

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Writes one file of hashes."""
        parts = [hash_range(np.fromfile(path, LINE), rank, world_size) for path in sorted(self.counts.glob("*.lines"))]
        lines = np.concatenate([np.empty(0, LINE), *parts])
        hashes, group = np.unique(lines["hash"], return_inverse=True)
        totals = np.bincount(group, weights=lines["documents"], minlength=len(hashes))
        self.folder.mkdir(parents=True, exist_ok=True)
        hashes[(totals >= self.documents) & (hashes > 0)].tofile(self.folder / f"{rank:05d}.frequent")


def hash_range(rows: np.ndarray, part: int, parts: int) -> np.ndarray:
    """The part of rows sorted by hash whose hashes lie in one of `parts` equal ranges."""
    width = (1 << 64) // parts
    edges = [np.uint64(part * width), np.uint64(min((part + 1) * width, (1 << 64) - 1))]
    first, last = np.searchsorted(rows["hash"], np.array(edges, dtype=np.uint64))
    return rows[first : None if part == parts - 1 else last].copy()


class RemoveLines(BaseFilter):
    """Takes the frequent lines out, and drops what consists of them."""

    name = "repeated lines"

    def __init__(self, folder: Path, exclusion_writer: Any) -> None:
        super().__init__(exclusion_writer)
        self.folder = folder
        self.hashes: set[int] | None = None

    def filter(self, doc: Document) -> bool | tuple[bool, str]:
        """Keeps what is left."""
        if self.hashes is None:
            self.hashes = {key for path in sorted(self.folder.glob("*")) for key in np.fromfile(path, "<u8").tolist()}
        lines = doc.text.split("\n")
        marked = [line_key(line) in self.hashes for line in lines] if self.hashes else []
        if any(marked):
            text = drop_runs(lines, marked, is_boilerplate)
            if not text.strip() or (2 * len(text) < len(doc.text) and len(comparable_words(text)) < 20):
                return False, "only_repeated_lines"
            doc.metadata["removed_lines"] = len(doc.text) - len(text)
            doc.text = text
        return True


def is_boilerplate(run: list[str]) -> bool:
    """Whether a run of frequent lines goes: one has three words, or it is a menu."""
    return len(run) >= MENU_LINES or any(len(comparable_words(line)) >= 3 for line in run)


def drop_runs(lines: list[str], marked: Iterable[bool], goes: Callable[[list[str]], bool]) -> str:
    """The text without the runs of marked lines that go.

    Blank lines between marked ones belong to the run; a short last line between a blank one and the text that follows
    does not, for it is the heading of that text.
    """
    kept: list[str] = []
    run: list[str] = []
    for line, mark in zip([*lines, ""], [*marked, None], strict=True):
        if mark or (mark is not None and run and not line.strip()):
            run.append(line)
            continue
        if run:
            last = max((i for i, part in enumerate(run) if part.strip()), default=0)
            heads = mark is not None and last and not run[last - 1].strip() and len(comparable_words(run[last])) < 3
            run, rest = (run[:last], run[last:]) if heads else (run, [])
            words = [part for part in run if part.strip()]
            kept += [*([] if words and goes(words) else run), *rest]
            run = []
        kept += [] if mark is None else [line]
    text = "\n".join(kept)
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n") if len(kept) < len(lines) else text


# --- paragraphs ------------------------------------------------------------------------------------------------------


class ParagraphSignature(SentenceDedupSignature):
    """datatrove's signatures of lines, of at most MOST_LINES in a document."""

    def get_hashes(self, doc: Document, doc_idx: int) -> list[tuple[int, int, int]]:
        """(hash, document, line) of every line with a word."""
        keys = (" ".join(comparable_words(line)) for line in doc.text.split("\n")[:MOST_LINES])
        return [(self.hash_fc(key), doc_idx, line) for line, key in enumerate(keys) if key]


class RepeatedParagraphs(SentenceFindDedups):
    """The lines that an earlier document has; a refrain within one document is its own."""

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Finds them in one range of hashes and writes (document, line) for each task."""
        paths = self.data_folder.list_files(
            subdirectory=f"{rank:04d}", glob_pattern=ExtensionHelperSD.stage_1_signature
        )
        parts, tasks = [np.empty(0, PARAGRAPH)], [np.empty(0, np.int64)]
        for path in paths:
            with self.data_folder.open(path, "rb") as file:
                parts.append(np.frombuffer(file.read(), PARAGRAPH))
            tasks.append(np.full(len(parts[-1]), int(Path(path).name.partition(".")[0])))
        rows, task = np.concatenate(parts), np.concatenate(tasks)
        order = np.lexsort((rows["line"], rows["document"], task, rows["hash"]))
        rows, task = rows[order], task[order]
        _, first, group = np.unique(rows["hash"], return_index=True, return_inverse=True)
        first = first[group]
        again = (task[first] != task) | (rows["document"][first] != rows["document"])
        for number in np.unique(task[again]):
            found = rows[again & (task == number)][["document", "line"]]
            with self.output_folder.open(
                f"{rank:04d}/{number:05d}{ExtensionHelperSD.stage_2_duplicates}", "wb"
            ) as file:
                file.write(found.astype([("doc", "<u4"), ("sent", "<u2")]).tobytes())


class RemoveParagraphs(SentenceDedupFilter):
    """Takes repeated lines out, those of `min_words_to_remove_span` words in a row, and drops what is then too short."""

    def run(self, data: Iterable[Document], rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Filters the documents of a task, which come as they were signed."""
        pattern = f"*/{rank:05d}{ExtensionHelperSD.stage_2_duplicates}"
        lines: dict[int, set[int]] = {}
        for path in self.data_folder.list_files(glob_pattern=pattern):
            with self.data_folder.open(path, "rb") as file:
                for doc, line in np.frombuffer(file.read(), [("doc", "<u4"), ("sent", "<u2")]).tolist():
                    lines.setdefault(doc, set()).add(line)
        with self.exclusion_writer as writer:
            for number, doc in enumerate(data):
                if number in lines:
                    size, parts = len(doc.text), doc.text.split("\n")
                    marked = [line in lines[number] for line in range(len(parts))]
                    doc.text = drop_runs(parts, marked, self.is_long)
                    if len(doc.text) < size and len(WORDS.word_tokenize(doc.text)) < max(1, self.config.min_doc_words):
                        doc.text = "\n".join(parts)
                        doc.metadata["filter_reason"] = "only_repeated_paragraphs"
                        writer.write(doc, rank)
                        continue
                    if len(doc.text) < size:
                        doc.metadata["removed_paragraphs"] = size - len(doc.text)
                yield doc

    def is_long(self, run: list[str]) -> bool:
        """Whether a run of repeated lines has words enough to go."""
        return sum(len(comparable_words(line)) for line in run) >= self.config.min_words_to_remove_span
