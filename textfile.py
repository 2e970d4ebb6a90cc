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
from typing import Any, AnyStr

from configurator import UserError

TEXT_SUFFIXES = (".txt", ".md")
ROW_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
PACKED_SUFFIXES = (".gz", ".zst")
PIECE = 1 << 20  # bytes read at a time, characters in a piece of a document that is longer than this
WIKI_TITLE = re.compile(r"^ = (?!= ).+ = $")
# No token of GPT-2's splitting rule spans such a place. Python's \s has U+001C to U+001F, the rule's has not.
SAFE_CUT = re.compile(r"(?<=\S)(?=[^\S\x1c-\x1f]\S)")
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
        lines = iter_lines(chunks, "\n")
        if mode == "file":
            yield from cut_pieces(map(undo_wikitext_spacing, articles(lines)) if self.detokenize else chunks)
            return
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
        decoder, offset, held = codecs.getincrementaldecoder("utf-8-sig")(self._on_bad_bytes), 0, ""
        for data in chain(read_chunks(path, unpacked(path, raw)), [b""]):
            offset += len(data)
            try:
                text = held + decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                raise not_utf8(path, error, offset - len(error.object)) from error
            held = "\r" if text.endswith("\r") and data else ""  # its \n may come with the next chunk
            text = unix_lines(text[: len(text) - len(held)])
            if text:
                yield text

    def _decode_whole(self, path: str, data: bytes, offset: int = 0) -> str:
        """All of `data`, which starts at `offset`, by the same rules as `_decode`, its line ends as they are."""
        try:
            return data.decode("utf-8", self._on_bad_bytes)
        except UnicodeDecodeError as error:
            raise not_utf8(path, error, offset) from error

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
                yield (undo_wikitext_spacing(text) if self.detokenize else text), True

    def text_of(self, row: Any, where: str) -> str | None:
        """The text of one row, cleaned of what UTF-8 cannot hold; None when it is skipped."""
        text = row.get(self.text_column) if isinstance(row, dict) else row
        text = self._decode_whole(where, text) if isinstance(text, bytes) else text
        if not isinstance(text, str):
            if isinstance(row, dict) and self.text_column not in row:
                fault = f"no field {self.text_column!r}, only {', '.join(map(repr, row)) or 'nothing'}"
            else:
                fault = f"{self.text_column!r} is {json.dumps(text, default=str)[:60]}, not text"
            return self._skip(f"rows without `{self.text_column}` skipped", f"{where}: {fault}")
        try:
            text.encode()  # 30 times as fast as searching
        except UnicodeEncodeError:
            text, replaced = SURROGATE.subn("\ufffd", text)
            self.counts["lone surrogates replaced by U+FFFD"] += replaced
        return unix_lines(text.removeprefix("\ufeff"))

    def _skip(self, what: str, message: str) -> None:
        if not self.skip_bad_rows:
            raise UserError(f"{message} (--text_column= names the field, --skip_bad_rows=true skips such rows)")
        self.counts[what] += 1

    def _json_lines(self, path: str, raw: Any) -> Iterator[tuple[str, Any]]:
        offset = 0
        for number, line in enumerate(iter_lines(read_chunks(path, unpacked(path, raw)), b"\n"), start=1):
            text = self._decode_whole(path, line, offset).removeprefix("\ufeff")
            offset += len(line)
            if not text.strip():
                continue
            try:
                yield f"line {number}", json.loads(text)
            except (ValueError, RecursionError) as error:
                self._skip("rows without valid JSON skipped", f"{path}, line {number} is not JSON: {error}")

    def _json(self, path: str, raw: Any) -> Iterator[tuple[str, Any]]:
        """A .json file: one array of rows or one row, read whole; or JSON lines by another name."""
        lines = iter_lines(read_chunks(path, unpacked(path, raw)), b"\n")
        first = next(lines, b"")
        if is_json_object(first):
            raw.seek(0)
            yield from self._json_lines(path, raw)
            return
        data = b"".join(chain([first], lines))
        try:
            content = json.loads(self._decode_whole(path, data).removeprefix("\ufeff"))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path} is not JSON: {error}") from error
        for number, row in enumerate(content if isinstance(content, list) else [content], start=1):
            yield f"row {number}", row

    def _csv(self, path: str, raw: Any) -> Iterator[tuple[str, Any]]:
        csv.field_size_limit(sys.maxsize)
        reader = csv.DictReader(iter_lines(self._decode(path, raw), "\n"), strict=True)
        try:
            for row in reader:
                if None in row:  # a comma in text without quotes: its rest would be lost
                    fault = f"{path}, line {reader.line_num} has more fields than the first line names"
                    self._skip("rows with too many fields skipped", fault)
                else:
                    yield f"line {reader.line_num}", row
        except csv.Error as error:
            raise UserError(f"{path}, line {reader.line_num} is not CSV: {error}") from error

    def _parquet(self, path: str, raw: Any) -> Iterator[tuple[str, Any]]:
        import pyarrow
        import pyarrow.parquet

        try:
            if path.lower().endswith(PACKED_SUFFIXES):  # Parquet is read from its end: unpacked into memory
                raw = pyarrow.BufferReader(b"".join(read_chunks(path, unpacked(path, raw))))
            file = pyarrow.parquet.ParquetFile(raw)
            if self.text_column not in file.schema_arrow.names:
                names = ", ".join(map(repr, file.schema_arrow.names))
                raise UserError(f"{path} has no column {self.text_column!r}, only {names}: name one by --text_column=")
            number = 0
            for batch in file.iter_batches(batch_size=1024, columns=[self.text_column]):
                column = batch.column(0)
                if str(column.type).startswith(("string", "large_string", "dictionary<values=string")):
                    column = column.cast(pyarrow.large_binary())  # bytes that are not UTF-8 are for text_of
                for text in column.to_pylist():
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

    return pyarrow.CompressedInputStream(pyarrow.PythonFile(raw), "gzip" if path.lower().endswith(".gz") else "zstd")


def read_chunks(path: str, file: Any) -> Iterator[bytes]:
    """The bytes of a file, PIECE at a time. Raises UserError for a broken archive."""
    try:
        while data := file.read(PIECE):
            yield data
    except OSError as error:
        raise UserError(f"{path} cannot be read to its end: {error}") from error


def not_utf8(path: str, error: UnicodeDecodeError, offset: int) -> UserError:
    """The error for an invalid byte in bytes that start at `offset`."""
    return UserError(
        f"{path} is not UTF-8: byte 0x{error.object[error.start]:02x} at offset {offset + error.start:,}; "
        "convert it (iconv -t utf-8), or --skip_bad_rows=true puts U+FFFD there"
    )


def iter_lines(chunks: Iterable[AnyStr], newline: AnyStr) -> Iterator[AnyStr]:
    """Lines with their \\n, split at \\n alone: U+2028 and U+0085 are text inside a JSON string."""
    held: list[AnyStr] = []  # of a line that goes on, joined once: it may be a whole corpus
    for chunk in chunks:
        *lines, rest = chunk.split(newline)
        for line in lines:
            yield newline[:0].join([*held, line, newline])
            held = []
        held.append(rest)
    if any(held):
        yield newline[:0].join(held)


def is_json_object(line: bytes) -> bool:
    """Whether a line is a JSON object by itself."""
    text = line.decode("utf-8", "replace").removeprefix("\ufeff")
    try:
        return text.startswith("{") and isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


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
    (re.compile(r'(?<!\S)" ([^"\n]*?) "(?!\S)'), r'"\1"'),
    (re.compile(r" @([-,.])@ "), r"\1"),
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
