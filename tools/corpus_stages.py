"""What lies between the stages of tools.clean_corpus: shards of documents, dropped documents, counts.

In:  documents.
Out: shards of JSON lines, and for each task and stage a small file of counts.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter

BYTES_PER_TOKEN = 4  # of UTF-8, about, with a tokenizer of the corpus's own
EXAMPLES = 3  # of each rule's victims, a task


class PartWriter(PipelineStep):
    """Writes what one task read as shards of a bounded size: a single packed file may hold a whole corpus."""

    name, type = "text", "writer"

    def __init__(self, folder: Path, part_bytes: int) -> None:
        super().__init__()
        self.folder, self.part_bytes = folder, part_bytes

    def run(self, data: Iterable[Document], rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Writes RANK_PART.jsonl.zst, parts in order."""
        part, size = 0, self.part_bytes
        writer: JsonlWriter | None = None
        for doc in data:
            if size >= self.part_bytes:
                if writer:
                    writer.close()
                writer = JsonlWriter(str(self.folder), f"${{rank}}_{part:05d}.jsonl", compression="zstd")
                part, size = part + 1, 0
            writer.write(doc, rank)
            size += len(doc.text.encode())
            yield doc
        if writer:
            writer.close()


def shard_names(folder: Path) -> list[str]:
    """The shards in a folder, in the order of the input."""
    return sorted(path.name for path in folder.glob("*.jsonl.zst"))


class Shard(JsonlReader):
    """Reads what an earlier stage wrote, one shard a task; where no names are given, the one named after the task."""

    def __init__(self, folder: Path, names: list[str] | None = None) -> None:
        super().__init__(str(folder), add_file_path=False)
        self.names = names

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """The documents of task `rank`, none where it has no shard."""
        name = f"{rank:05d}.jsonl.zst" if self.names is None else "".join(self.names[rank : rank + 1])
        if name and self.data_folder.exists(name):
            yield from self.read_file(name)


def shard_writer(folder: Path) -> JsonlWriter:
    """Writes documents for a later stage."""
    return JsonlWriter(str(folder), "${rank}.jsonl", compression="zstd")


def corpus_writer(folder: Path) -> JsonlWriter:
    """Writes the cleaned corpus: one row a document, its metadata as columns."""
    return JsonlWriter(str(folder), "${rank}.jsonl", compression="zstd", expand_metadata=True)


class DropWriter(JsonlWriter):
    """Writes dropped documents with their reasons, and counts them."""

    def __init__(self, folder: Path, tallies: Path, stage: str) -> None:
        super().__init__(str(folder / stage), "${rank}.jsonl", compression="zstd", expand_metadata=True)
        self.tallies, self.stage, self.rank = tallies, stage, -1
        self.rules: dict[str, Counter[str]] = {}
        self.examples: dict[str, list[str]] = {}
        self.languages: Counter[str] = Counter()

    def write(self, document: Document, rank: int = 0, **kwargs: Any) -> None:
        """Writes one document."""
        self.rank, rule = rank, document.metadata["filter_reason"]
        self.rules.setdefault(rule, Counter()).update(measure(document.text))
        self.languages[document.metadata.get("language", "")] += len(document.text)
        if len(self.examples.setdefault(rule, [])) < EXAMPLES:
            self.examples[rule].append(" ".join(document.text[:600].split())[:240])
        super().write(document, rank, **kwargs)

    def close(self) -> None:
        """Closes the file and writes the counts."""
        super().close()
        if self.rules:
            content = {"rules": self.rules, "examples": self.examples, "languages": self.languages}
            save_tally(self.tallies, self.rank, f"dropped_{self.stage}", content)
        self.rules, self.examples, self.languages = {}, {}, Counter()  # the same writer may serve another task


class Tally(PipelineStep):
    """Passes documents on and counts them: number, characters, bytes, languages, lengths, what was cut out of them."""

    name, type = "counts", "counts"

    def __init__(self, folder: Path, stage: str) -> None:
        super().__init__()
        self.folder, self.stage = folder, stage

    def run(self, data: Iterable[Document], rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Writes the counts of a task."""
        totals, languages, lengths, cut = Counter(), Counter(), Counter(), Counter()
        for doc in data:
            sizes = measure(doc.text)
            totals.update(sizes, pages=doc.metadata.get("html", 0))
            languages[doc.metadata.get("language", "")] += sizes["characters"]
            lengths[len(doc.text).bit_length()] += 1
            for what in ("removed_lines", "removed_paragraphs"):
                cut[what] += doc.metadata.get(what, 0)
            yield doc
        save_tally(
            self.folder,
            rank,
            self.stage,
            {"totals": totals, "languages": languages, "lengths": lengths, "cut": cut},
        )


def measure(text: str) -> dict[str, int]:
    """Documents, characters and bytes of one document."""
    return {"documents": 1, "characters": len(text), "bytes": len(text.encode())}


def save_tally(folder: Path, rank: int, name: str, content: dict[str, Any]) -> None:
    """Writes the counts of one task and stage."""
    path = folder / name / f"{rank:05d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def read_tallies(folder: Path, name: str) -> Iterator[dict[str, Any]]:
    """The counts of all tasks of one stage, in their order."""
    for path in sorted((folder / name).glob("*.json")):
        yield json.loads(path.read_text(encoding="utf-8"))
