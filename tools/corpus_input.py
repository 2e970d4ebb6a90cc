"""Reads the input of tools.clean_corpus, and takes the main text out of HTML.

In:  files, and a plan: a list of tasks, each a run of the input in its order, so that the result is the same for any
     number of workers.
Out: documents of plain text.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from datatrove.data import Document
from datatrove.pipeline.extractors import Trafilatura
from datatrove.pipeline.extractors.base import ExtractorSandbox
from datatrove.pipeline.readers import WarcReader
from datatrove.pipeline.readers.base import BaseReader

from configurator import UserError
from corpus import find_files
from textfile import PACKED_SUFFIXES, ROW_SUFFIXES, TEXT_SUFFIXES, FileReader, inner_suffix, read_chunks, unpacked
from tools.corpus_stages import read_tallies

HTML_SUFFIXES = (".html", ".htm", ".xhtml")
WARC_SUFFIXES = (".warc",)
LONGEST = 1 << 23  # characters of a document; a longer one is cut, to bound memory
LINE_ENDS = re.compile(r"[ \t]+$", re.MULTILINE)  # white space at the end of lines; blank lines are blank then
LINE_SPACE = re.compile(r"[ \t]+$|^[ \t]*\t[ \t]*", re.MULTILINE)  # HTML's own indentation, too
FIRST_PAGES = 20  # of which one must come through the extractor

Piece = tuple[str, int, int | None]  # path, first byte, end (None = of the file)


def input_files(patterns: str) -> list[str]:
    """The files that the setting names, in order. Raises UserError."""
    return find_files(patterns, TEXT_SUFFIXES + ROW_SUFFIXES + HTML_SUFFIXES + WARC_SUFFIXES)


def is_page(path: str) -> bool:
    """Whether a file is HTML or WARC."""
    return inner_suffix(path) in HTML_SUFFIXES + WARC_SUFFIXES


def plan_tasks(files: list[str], task_bytes: int) -> list[list[Piece]]:
    """The input as tasks of about `task_bytes` bytes, in order; large plain .jsonl files are cut between lines."""
    pieces: list[tuple[int, Piece]] = []
    for path in files:
        size = os.path.getsize(path)
        if not path.lower().endswith(".jsonl") or size < 2 * task_bytes:
            packed = path.lower().endswith(PACKED_SUFFIXES)
            pieces.append((size * (4 if packed else 1), (path, 0, None)))
            continue
        start = 0
        with open(path, "rb") as file:
            while start < size:
                file.seek(min(size, start + task_bytes) - 1)
                file.readline()
                pieces.append((file.tell() - start, (path, start, file.tell())))
                start = file.tell()
    tasks: list[list[Piece]] = [[]]
    room = task_bytes
    for size, piece in pieces:
        if tasks[-1] and room < size / 2:
            tasks.append([])
            room = task_bytes
        tasks[-1].append(piece)
        room -= size
    return tasks


class ByteRange:
    """A binary file that ends at a byte."""

    def __init__(self, file: Any, end: int | None) -> None:
        self.file, self.end = file, end

    def read(self, size: int = -1) -> bytes:
        """Up to `size` bytes."""
        left = size if self.end is None else max(0, self.end - self.file.tell())
        return self.file.read(left if size < 0 else min(size, left))

    def seek(self, place: int) -> None:
        """Goes to a byte."""
        self.file.seek(place)


class CorpusReader(BaseReader):
    """Reads the documents of a task as prepare.py would, and HTML and WARC."""

    name = "input"

    def __init__(self, tasks: list[list[Piece]], html_column: str | None, **rules: Any) -> None:
        super().__init__()
        self.tasks, self.html_column = tasks, html_column
        self.rules = rules | {"text_column": html_column or rules["text_column"]}

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """The documents of task `rank`."""
        for path, start, end in self.tasks[rank]:
            for number, (text, html) in enumerate(self.texts(path, start, end)):
                text = text if html else LINE_ENDS.sub("", text)
                for part, first in enumerate(range(0, len(text), LONGEST)):
                    name = f"{path}{f'@{start}' if start else ''}/{number}{f'#{part}' if part else ''}"
                    metadata = {"source": path} | ({"html": True} if html else {})
                    if text[first : first + LONGEST].strip():
                        yield Document(text=text[first : first + LONGEST], id=name, metadata=metadata)

    def texts(self, path: str, start: int, end: int | None) -> Iterator[tuple[str, bool]]:
        """(text, is HTML) of each document of a file or of a range of its bytes."""
        kind = inner_suffix(path)
        if kind in WARC_SUFFIXES:
            yield from ((doc.text, True) for doc in warc_reader(path).read_file(Path(path).name))
            return
        with open(path, "rb") as file:
            file.seek(start)
            if kind in HTML_SUFFIXES:
                yield decode_html(b"".join(read_chunks(path, unpacked(path, file)))), True
                return
            reader = FileReader(detokenize=False, **self.rules)
            held: list[str] = []
            try:
                for text, ends in reader.read(path, file if end is None else ByteRange(file, end)):
                    held.append(text)
                    if ends:
                        yield "".join(held), self.html_column is not None and kind in ROW_SUFFIXES
                        held = []
            except UserError as error:
                raise UserError(f"{error}" + (f" (counted from byte {start:,})" if start else "")) from error
            for what, count in reader.counts.items():
                self.stat_update(what, value=count)


def warc_reader(path: str) -> WarcReader:
    """datatrove's reader for the folder of a WARC file. Raises UserError where its packages are missing."""
    try:
        return WarcReader(str(Path(path).parent.absolute()))
    except ImportError as error:
        raise UserError(f"{path} needs other packages: pip install warcio faust-cchardet python-magic") from error


def decode_html(data: bytes) -> str:
    """The text of an HTML file: UTF-8, or the character set it names, or Windows-1252."""
    named = re.search(rb"charset=[\"']?([\w-]+)", data[:4096])
    for charset in ("utf-8-sig", named[1].decode() if named else "cp1252"):
        try:
            return data.decode(charset)
        except (UnicodeDecodeError, LookupError):
            continue
    return data.decode("cp1252", "replace")


class Extract(Trafilatura):
    """Main text out of HTML, in a process of its own; what is lost is written down, and a broken extractor told."""

    def __init__(self, fast: bool, timeout: float, exclusion_writer: Any) -> None:
        super().__init__(favour_precision=False, timeout=timeout, deduplicate=False, favor_recall=True)
        self.fast, self.exclusion_writer = fast, exclusion_writer

    def extract(self, text: str) -> str:
        """The main text of a page."""
        if self.fast:
            from resiliparse.extract.html2text import extract_plain_text

            return extract_plain_text(text, main_content=True, alt_texts=False)
        return super().extract(text) or ""

    def extract_or_error(self, text: str) -> str | Exception:
        """The main text, or what went wrong: the sandbox raises it, where a dead process would cost it five seconds."""
        try:
            return self.extract(text)
        except Exception as error:  # of a library
            return RuntimeError(f"{type(error).__name__}: {error}")

    def run(self, data: Iterable[Document], rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Passes plain text on and replaces HTML by its text. Raises UserError when no page comes through."""
        pages = failed = 0
        with ExtractorSandbox(timeout=self.timeout) as sandbox, self.exclusion_writer as writer:
            for doc in data:
                if not doc.metadata.pop("html", False):
                    yield doc
                    continue
                reason, page, pages = "extraction_no_text", doc.text, pages + 1
                try:
                    doc.text = LINE_SPACE.sub("", sandbox.process_document(page, self.extract_or_error) or "").strip()
                except TimeoutError:
                    doc.text, reason = "", "extraction_timeout"
                except EOFError:  # its process died, out of memory perhaps
                    doc.text, reason = "", "extraction_died"
                except RuntimeError as error:
                    doc.text, reason = "", f"extraction_error_{str(error).partition(':')[0]}"
                if doc.text:
                    yield doc
                    continue
                failed += reason != "extraction_no_text"
                if pages == failed == FIRST_PAGES:
                    raise UserError(
                        f"the extractor failed on the first {pages} pages of a task ({reason}): it is broken"
                    )
                doc.text = page
                doc.metadata["filter_reason"] = reason
                writer.write(doc, rank)

    def probe(self) -> None:
        """Raises UserError when a plain page does not come through: a package is missing or broken."""
        sentence = "The main text of this page is a paragraph of some length, which no extractor should miss. "
        page = f"<html><body><nav>Home</nav><article><p>{sentence * 5}</p></article></body></html>"
        try:
            text = self.extract(page)
        except Exception as error:  # ImportError and whatever a broken package raises
            raise UserError(f"the extractor does not run ({error}): pip install -r tools/requirements.txt") from error
        if sentence.strip() not in text:
            raise UserError("the extractor finds no text in a plain page: pip install -r tools/requirements.txt")


def lost_pages(tallies: Path) -> tuple[int, int]:
    """Pages of HTML lost to errors and time-outs, and pages in all."""
    rules: Counter[str] = Counter()
    for tally in read_tallies(tallies, "dropped_extraction"):
        rules.update({rule: counts["documents"] for rule, counts in tally["rules"].items()})
    lost = sum(count for rule, count in rules.items() if rule != "extraction_no_text")
    return lost, sum(tally["totals"]["pages"] for tally in read_tallies(tallies, "input"))
