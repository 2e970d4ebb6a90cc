"""Text files: the documents in one .txt, .md, .jsonl, .json, .csv or .parquet file, also packed as .gz or .zst.

In:  a path and what a document is.
Out: (text, ends_document) after another; a document of many megabytes comes in several pieces, so that memory stays
     flat. All text is UTF-8 whatever the locale; byte-order marks go, line ends become \\n, in every container.

What cannot be read is one UserError naming file and place, or is skipped and counted with skip_bad_rows.
"""

from __future__ import annotations

import codecs
import csv
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

from configurator import UserError

TEXT_SUFFIXES = (".txt", ".md")
ROW_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
PACKED_SUFFIXES = (".gz", ".zst")
PIECE = 1 << 20  # bytes read at a time, characters in a piece of a document that is longer than this
WIKI_TITLE = re.compile(r"^ = (?!= ).+ = $")
SAFE_CUT = re.compile(r"(?<=\S)(?=\s\S)")  # no token of GPT-2's splitting rule spans such a place
SURROGATE = re.compile("[\ud800-\udfff]")


class FileReader:
    """Reads documents by one set of rules; `counts` and `notes` say what was noticed on the way."""

    def __init__(self, text_column: str, document: str, detokenize: bool, skip_bad_rows: bool) -> None:
        self.text_column, self.document, self.detokenize = text_column, document, detokenize
        self.skip_bad_rows = skip_bad_rows
        self.counts: Counter[str] = Counter()
        self.notes: list[str] = []

    def read(self, path: str, raw: Any) -> Iterator[tuple[str, bool]]:
        """The documents of the file at `path`, open as `raw`."""
        return self._read_rows(path, raw) if inner_suffix(path) in ROW_SUFFIXES else self._read_text(path, raw)

    def _read_text(self, path: str, raw: Any) -> Iterator[tuple[str, bool]]:
        chunks = self._decode(path, raw)
        first = next(chunks, "")
        mode = self.document
        if mode == "auto":
            mode = "heading" if self._looks_like_wikitext(path, first) else "file"
        chunks = chain([first], chunks)
        if mode == "file":
            yield from cut_pieces(chunks)
            return
        lines = iter_lines(chunks)
        group = {"line": iter, "paragraph": paragraphs, "heading": articles}[mode]
        for text in group(lines):
            text = text.rstrip("\n") if mode == "line" else text
            yield (undo_wikitext_spacing(text) if self.detokenize else text), True

    def _looks_like_wikitext(self, path: str, start: str) -> bool:
        lines = start.split("\n")
        if inner_suffix(path) == ".md" or not any(WIKI_TITLE.match(line) for line in lines[:100]):
            return False
        hint = "" if self.detokenize else "; --detokenize=true undoes its spacing"
        note = f"WikiText's headings found: one document per ' = Title = '{hint}"
        if note not in self.notes:
            self.notes.append(note)
        return True

    def _decode(self, path: str, raw: Any) -> Iterator[str]:
        """Chunks of text with \\n line ends; an invalid byte is an error with its offset, or U+FFFD and a count."""
        decoder, offset, held = codecs.getincrementaldecoder("utf-8")(self._on_bad_bytes), 0, ""
        file = unpacked(path, raw)
        while True:
            data = read_some(path, file)
            pending = len(decoder.getstate()[0])
            try:
                text = held + decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                where = offset - pending + error.start
                raise UserError(
                    f"{path} is not UTF-8: byte 0x{error.object[error.start]:02x} at offset {where:,}; "
                    "convert it (iconv -t utf-8), or --skip_bad_rows=true puts U+FFFD there"
                ) from error
            text = text.removeprefix("\ufeff") if not offset else text
            offset += len(data)
            held = "\r" if text.endswith("\r") and data else ""  # its \n may come with the next chunk
            text = unix_lines(text[: len(text) - len(held)])
            if text:
                yield text
            if not data:
                return

    @property
    def _on_bad_bytes(self) -> str:
        if not self.skip_bad_rows:
            return "strict"

        def replace_and_count(error: UnicodeError) -> tuple[str, int]:
            self.counts["invalid bytes replaced"] += error.end - error.start
            return "\ufffd", error.end

        codecs.register_error("replace_and_count", replace_and_count)
        return "replace_and_count"

    def _read_rows(self, path: str, raw: Any) -> Iterator[tuple[str, bool]]:
        kind = inner_suffix(path)
        readers = {".jsonl": self._json_lines, ".json": self._json, ".csv": self._csv, ".parquet": self._parquet}
        for place, row in readers[kind](path, raw):
            text = self.text_of(row, f"{path}, {place}")
            if text is not None:
                yield text, True

    def text_of(self, row: Any, where: str) -> str | None:
        """The text of one row, cleaned of what UTF-8 cannot hold; None when it is skipped."""
        text = row.get(self.text_column) if isinstance(row, dict) else row
        if not isinstance(text, str):
            if isinstance(row, dict) and self.text_column not in row:
                fault = f"no field {self.text_column!r}, only {', '.join(map(repr, row)) or 'nothing'}"
            else:
                fault = f"{self.text_column!r} is {json.dumps(text, default=str)[:60]}, not text"
            return self._skip(f"rows without `{self.text_column}` skipped", f"{where}: {fault}")
        if not text.isascii():
            text, replaced = SURROGATE.subn("\ufffd", text.removeprefix("\ufeff"))
            if replaced:
                self.counts["lone surrogates replaced by U+FFFD"] += replaced
        return unix_lines(text)

    def _skip(self, what: str, message: str) -> None:
        if not self.skip_bad_rows:
            raise UserError(f"{message} (--text_column= names the field, --skip_bad_rows=true skips such rows)")
        self.counts[what] += 1

    def _json_lines(self, path: str, raw: Any) -> Iterator[tuple[str, Any]]:
        for number, line in enumerate(byte_lines(path, unpacked(path, raw)), start=1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line.strip():
                continue
            try:
                yield f"line {number}", json.loads(line.decode("utf-8"))
            except (ValueError, RecursionError) as error:
                self._skip("rows that are not JSON skipped", f"{path}, line {number} is not JSON in UTF-8: {error}")

    def _json(self, path: str, raw: Any) -> Iterator[tuple[str, Any]]:
        """A .json file: one array of rows or one row, read whole; or JSON lines by another name."""
        file = unpacked(path, raw)
        data = b"".join(iter(lambda: read_some(path, file), b"")).removeprefix(codecs.BOM_UTF8)
        try:
            content = json.loads(data.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            first = data.lstrip().split(b"\n", 1)[0]
            if not first.startswith(b"{") or not first.rstrip().endswith(b"}"):
                raise UserError(f"{path} is not JSON in UTF-8: {error}") from error
            raw.seek(0)
            yield from self._json_lines(path, raw)
            return
        for number, row in enumerate(content if isinstance(content, list) else [content], start=1):
            yield f"row {number}", row

    def _csv(self, path: str, raw: Any) -> Iterator[tuple[str, Any]]:
        csv.field_size_limit(sys.maxsize)
        reader = csv.DictReader(iter_lines(self._decode(path, raw)), strict=True)
        try:
            for row in reader:
                yield f"line {reader.line_num}", row
        except csv.Error as error:
            raise UserError(f"{path}, line {reader.line_num} is not CSV: {error}") from error

    def _parquet(self, path: str, raw: Any) -> Iterator[tuple[str, Any]]:
        import pyarrow
        import pyarrow.parquet

        try:
            file = pyarrow.parquet.ParquetFile(unpacked(path, raw) if path.endswith(PACKED_SUFFIXES) else raw)
            if self.text_column not in file.schema_arrow.names:
                names = ", ".join(map(repr, file.schema_arrow.names))
                raise UserError(f"{path} has no column {self.text_column!r}, only {names}: name one by --text_column=")
            number = 0
            for batch in file.iter_batches(batch_size=1024, columns=[self.text_column]):
                for text in batch.column(0).to_pylist():
                    number += 1
                    yield f"row {number}", {self.text_column: text}
        except (pyarrow.ArrowException, OSError) as error:
            raise UserError(f"{path} is not a readable Parquet file: {error}") from error


def inner_suffix(path: str) -> str:
    """The suffix that says what a file holds, without .gz or .zst."""
    path = path.lower()
    return os.path.splitext(path.removesuffix(".gz").removesuffix(".zst"))[1]


def unpacked(path: str, raw: Any) -> Any:
    """A binary reader of what a file holds, decompressed on the way. Several packed members in a row are one file."""
    if not path.lower().endswith(PACKED_SUFFIXES):
        return raw
    import pyarrow

    kind = "gzip" if path.lower().endswith(".gz") else "zstd"
    return pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), kind)


def read_some(path: str, file: Any) -> bytes:
    """The next bytes of a file, empty at its end. Raises UserError for a broken archive."""
    try:
        return file.read(PIECE)
    except (OSError, EOFError) as error:
        raise UserError(f"{path} cannot be read to its end: {error}") from error


def byte_lines(path: str, file: Any) -> Iterator[bytes]:
    """Lines split at \\n alone: U+2028 and U+0085 are text inside a JSON string."""
    rest = b""
    while data := read_some(path, file):
        *lines, rest = (rest + data).split(b"\n")
        yield from lines
    if rest:
        yield rest


def iter_lines(chunks: Iterable[str]) -> Iterator[str]:
    """Lines with their \\n, split at \\n alone."""
    rest = ""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split("\n")
        yield from (line + "\n" for line in lines)
    if rest:
        yield rest


def unix_lines(text: str) -> str:
    """\\r\\n and lone \\r as \\n."""
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def cut_pieces(chunks: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """One document as pieces of about PIECE characters, cut where no token can span."""
    held = ""
    for chunk in chunks:
        held += chunk
        if len(held) > PIECE:
            place = next((m.start() for m in SAFE_CUT.finditer(held, len(held) - 4096)), None)
            if place is not None:
                yield held[:place], False
                held = held[place:]
    yield held, True


def paragraphs(lines: Iterable[str]) -> Iterator[str]:
    """Blocks between blank lines."""
    block: list[str] = []
    for line in lines:
        if line.strip():
            block.append(line)
        elif block:
            yield "".join(block).rstrip("\n")
            block = []
    if block:
        yield "".join(block).rstrip("\n")


def articles(lines: Iterable[str]) -> Iterator[str]:
    """Text from one top heading to the next: ` = Title = ` between blank lines (WikiText), or Markdown's `# Title`."""
    article: list[str] = []
    previous, in_code, lines = "", False, iter(lines)
    ahead = next(lines, None)
    while ahead is not None:
        line, ahead = ahead, next(lines, None)
        in_code ^= line.lstrip().startswith("```")
        alone = not previous.strip() and not (ahead or "").strip()
        if (alone and WIKI_TITLE.match(line.rstrip("\n"))) or (line.startswith("# ") and not in_code):
            if "".join(article).strip():
                yield "".join(article)
            article = []
        article.append(line)
        previous = line
    yield "".join(article)


WIKITEXT_RULES: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(r" @([-,.])@ "), r"\1"),
    (re.compile(r'" ([^"\n]*?) "'), r'"\1"'),
    (re.compile(r"(?<=\w) '(s|t|re|ve|m|d|ll)\b"), r"'\1"),
    (re.compile(r"(?<=s) ' (?=[a-z\"])"), "' "),
    (re.compile(r"([(\[{]) "), r"\1"),
    (re.compile(r" ([)\]}])"), r"\1"),
    (re.compile(r" ([,.;:!?])(?=[ \n\"')\]]|$)"), r"\1"),
    (re.compile(r"([$£€¥₱#]) (?=\d)"), r"\1"),
    (re.compile(r"(?<=\d) %"), "%"),
    (re.compile(r"(?<=\d) ([–−⁄]) (?=\d)"), r"\1"),
    (re.compile(r"^ ?((?:= )+)(.+?)((?: =)+) ?$", re.MULTILINE), lambda m: heading(m)),
    (re.compile(r"^ +| +$", re.MULTILINE), ""),
    (re.compile(r"\n{3,}"), "\n\n"),
]


def heading(match: re.Match[str]) -> str:
    """` = = Plot = = ` as `== Plot ==`."""
    return f"{match[1].replace(' ', '')} {match[2]} {match[3].replace(' ', '')}"


def undo_wikitext_spacing(text: str) -> str:
    """Writes an article of WikiText as people write: the spaces its tokenizer put around signs go."""
    for pattern, replacement in WIKITEXT_RULES:
        text = pattern.sub(replacement, text)
    return text.strip() + "\n"
