"""Corpora: a hub data set, own files or the built-in demo corpus as one stream of documents.

In:  the settings of prepare.py that say where text comes from and what a document is.
Out: `Corpus`, an iterable of (split, text, ends_document).

Here because no other noun owns raw text: `dataset` owns token files, `tokenizer` ids, `textfile` one file.
"""

from __future__ import annotations

import ast
import glob
import hashlib
import os
import re
import string
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from configurator import UserError
from textfile import ROW_SUFFIXES, TEXT_SUFFIXES, FileReader, articles, inner_suffix, undo_wikitext_spacing, unix_lines

WIKITEXT = ("Salesforce/wikitext", "wikitext-103-raw-v1")
SURE = 20_000  # bytes of each side, from which on their letters can be compared
UNLIKE = 0.1  # more of them different: another language or source
WHITE_SPACE = string.whitespace.encode()
SPLIT_NAMES = {"train": "train", "validation": "val", "valid": "val", "val": "val", "dev": "val", "test": "test"}


class Corpus:
    """A stream of (split, text, ends_document), at most `max_documents` of each split.

    `size` and `position` measure progress, in bytes of input, rows or documents. `fingerprint` changes when the input
    does. `counts` and `notes` say what was noticed on the way.
    """

    def __init__(
        self,
        dataset: str,
        input: str | None = None,
        *,
        text_column: str = "text",
        document: str = "auto",
        detokenize: bool = False,
        skip_bad_rows: bool = False,
        max_documents: int | None = None,
    ) -> None:
        self.reader = FileReader(text_column, document, detokenize, skip_bad_rows)
        self.max_documents = max_documents
        self.size, self.position, self.unit, self.fingerprint = 0, 0, "B", ""
        if input is not None:
            self.files = find_files(input)
            self.size = sum(os.path.getsize(path) for path in self.files)
            stats = [(path, os.path.getsize(path), os.stat(path).st_mtime_ns) for path in self.files]
            self.fingerprint = hashlib.sha256(repr(stats).encode()).hexdigest()[:16]
            self.source = f"{len(self.files):,} file{'s' * (len(self.files) != 1)} of {input}"
            self.splits = self._file_splits
        elif dataset == "demo":
            self.source, self.unit = f"documentation of Python {sys.version.split()[0]}", " documents"
            self.fingerprint = sys.version
            self.splits = self._demo_splits
        else:
            self.hub_name, self.hub_config = WIKITEXT if dataset == "wikitext103" else split_hub_name(dataset)
            self.source, self.unit = self.hub_name + (f":{self.hub_config}" if self.hub_config else ""), " rows"
            self.splits = self._hub_splits

    @property
    def counts(self) -> Counter[str]:
        """What was dropped or mended, by what it was."""
        return self.reader.counts

    @property
    def notes(self) -> list[str]:
        """Lines that the user should see."""
        return self.reader.notes

    def __iter__(self) -> Iterator[tuple[str, str, bool]]:
        """Documents in input order. Those without a visible character are dropped and counted."""
        self.counts.clear()
        self.position = 0
        for split, pieces in self.splits():
            documents, inside = 0, False
            for text, ends in pieces:
                if not inside and not text.strip():
                    self.counts["empty documents dropped"] += ends
                    continue
                inside = not ends
                yield split, text, ends
                documents += ends
                if documents == self.max_documents:
                    break

    def _file_splits(self) -> Iterator[tuple[str, Iterable[tuple[str, bool]]]]:
        yield "train", self._file_pieces()

    def _file_pieces(self) -> Iterator[tuple[str, bool]]:
        done = 0
        for path in self.files:
            with open(path, "rb") as raw:
                for text, ends in self.reader.read(path, raw):
                    if not raw.closed:  # by the unpacker, at its end
                        self.position = done + raw.tell()
                    yield text, ends
            done += os.path.getsize(path)

    def _hub_splits(self) -> Iterator[tuple[str, Iterable[tuple[str, bool]]]]:
        splits = load_hub(self.hub_name, self.hub_config)
        names = sorted((name for name in splits if name in SPLIT_NAMES), key=list(SPLIT_NAMES).index)
        if not {SPLIT_NAMES[name] for name in names} - {"test"}:
            known = ", ".join(name for name in SPLIT_NAMES if name != "test")
            raise UserError(f"{self.source} has the splits {', '.join(splits)}, to train on none of {known}")
        note = f"splits left out: {', '.join(sorted(set(splits) - set(names)))}"
        if len(names) < len(splits) and note not in self.notes:
            self.notes.append(note)
        self.size = sum(len(splits[name]) for name in names)
        for name in names:
            texts = self._hub_rows(splits[name], f"{self.source}, split {name}")
            if self.hub_name == WIKITEXT[0]:  # its rows are lines
                texts = articles(text if text.endswith("\n") else text + "\n" for text in texts)
            undo = undo_wikitext_spacing if self.reader.detokenize else str
            yield SPLIT_NAMES[name], ((undo(text), True) for text in texts)

    def _hub_rows(self, rows: Any, where: str) -> Iterator[str]:
        column = self.reader.text_column
        if column not in rows.column_names:
            columns = ", ".join(map(repr, rows.column_names))
            raise UserError(f"{where} has no column {column!r}, only {columns}: name one by --text_column=")
        number = 0
        for batch in rows.select_columns([column]).iter(batch_size=1000):
            for text in batch[column]:
                number, self.position = number + 1, self.position + 1
                text = self.reader.text_of({column: text}, f"{where}, row {number}")
                if text is not None:
                    yield text

    def _demo_splits(self) -> Iterator[tuple[str, Iterable[tuple[str, bool]]]]:
        yield "train", self._demo_pieces()

    def _demo_pieces(self) -> Iterator[tuple[str, bool]]:
        from pydoc_data.topics import topics

        modules, seen = stdlib_modules(), {""}
        self.size = len(topics) + len(modules)
        for text in chain(topics.values(), (document_module(name, path) for name, path in modules)):
            self.position += 1
            if text not in seen:
                seen.add(text)
                yield unix_lines(text), True


class Seen:
    """Remembers texts, case and ASCII white space aside, in a fixed amount of memory (Bloom 1970).

    It knows every text it was given; of others it takes one in a hundred for known at ten million texts, fewer before.
    """

    BITS = 1 << 27

    def __init__(self) -> None:
        self.table = bytearray(self.BITS // 8)

    @staticmethod
    def key(text: str) -> list[int]:
        """The places of a text in the table."""
        letters = text.lower().encode("utf-8", "replace").translate(None, WHITE_SPACE)
        digest = hashlib.blake2b(letters, digest_size=20).digest()
        return [int.from_bytes(digest[i : i + 5], "little") % Seen.BITS for i in range(0, 20, 5)]

    def __contains__(self, key: list[int]) -> bool:
        return all(self.table[place >> 3] >> (place & 7) & 1 for place in key)

    def add(self, key: list[int]) -> None:
        """Remembers the text of a key."""
        for place in key:
            self.table[place >> 3] |= 1 << (place & 7)


def count_letters(
    pieces: Iterable[tuple[str, str, bool]], letters: dict[str, np.ndarray]
) -> Iterator[tuple[str, str, bool]]:
    """Passes pieces on and counts the bytes at the start of each, (256,) for each split."""
    for split, text, ends in pieces:
        letters[split] += np.bincount(np.frombuffer(text[:4096].encode(), dtype=np.uint8), minlength=256)
        yield split, text, ends


def compare_letters(one: np.ndarray, other: np.ndarray) -> float:
    """The share of bytes in which two texts differ, 0 to 1; 0 where there are too few to say.

    Half the sum of the differences of their frequencies. Of one corpus, a sample of six documents differed from the rest
    by up to 0.07, manuals from sayings in the same language by 0.11, German from Spanish by 0.19, from English by 0.23.
    """
    if min(one.sum(), other.sum()) < SURE:
        return 0.0
    return float(np.abs(one / one.sum() - other / other.sum()).sum() / 2)


def find_files(patterns: str, suffixes: tuple[str, ...] = TEXT_SUFFIXES + ROW_SUFFIXES) -> list[str]:
    """Files named by a path, a folder (those with the suffixes), a glob, or several, with commas between; each sorted."""
    found: list[str] = []
    for pattern in [patterns] if os.path.exists(patterns) else patterns.split(","):
        if os.path.isdir(pattern):
            inside = [str(path) for path in sorted(Path(pattern).rglob("*")) if path.is_file()]
            matches = [path for path in inside if inner_suffix(path) in suffixes]
        else:
            matches = [pattern] if os.path.isfile(pattern) else sorted(glob.glob(pattern, recursive=True))
            matches = [path for path in matches if os.path.isfile(path)]
        if not matches:
            kinds = " ".join(suffixes)
            raise UserError(f"--input={pattern} names no file (in a folder: {kinds}, also with .gz or .zst)")
        found += [path for path in matches if path not in found]
    return found


def split_hub_name(dataset: str) -> tuple[str, str | None]:
    """`owner/name[:config]` in its parts. Raises UserError for anything else."""
    name, _, config = dataset.partition(":")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise UserError(
            f"--dataset={dataset} is not wikitext103, demo or a hub data set owner/name[:config]; "
            "own files are prepared under this name with --input=FILES"
        )
    return name, config or None


def load_hub(name: str, config: str | None) -> Any:
    """The splits of a hub data set, without a connection those of an earlier download. Raises UserError."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    unreachable = None
    try:  # once: the library itself tries for 24 s to 80 s before it says that there is no network
        get_session().head(constants.ENDPOINT, timeout=10)
    except Exception as error:  # of httpx, of the operating system, or because HF_HUB_OFFLINE=1 is set
        unreachable, constants.HF_HUB_OFFLINE = error, True
    import datasets

    datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE
    if not sys.stderr.isatty():  # nobody watches a bar
        datasets.disable_progress_bars()
    asked = f"{name}:{config}" if config else name
    try:
        return datasets.load_dataset(name, config)
    except Exception as error:  # the library raises its own, fsspec's, httpx's and the operating system's
        if unreachable:
            raise UserError(
                f"cannot reach {constants.ENDPOINT} for {asked}: {reason_of(unreachable)}; "
                "without a network: --dataset=demo, or --input=FILES for own text"
            ) from error
        reason = reason_of(error)
        hint = f" (--dataset={name}:CONFIG names one)" if "onfig" in reason else ""
        raise UserError(f"cannot load {asked} from {constants.ENDPOINT}: {reason}{hint}") from error


def reason_of(error: BaseException) -> str:
    """What went wrong, in a line: a server's fault where there was one, for the libraries guess at other causes."""
    blamed, cause = error, error
    while cause := cause.__cause__ or cause.__context__:
        status = getattr(getattr(cause, "response", None), "status_code", 0)
        if status in (408, 429) or status >= 500:
            blamed = cause
    reason = " ".join(str(blamed).split()).partition(" For more information check")[0]
    return reason[:300] or type(blamed).__name__


def stdlib_modules() -> list[tuple[str, str]]:
    """(name, path) of the standard library's Python modules, without tests and private ones, sorted."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"test", "tests", "idlelib", "site-packages", "dist-packages", "lib2to3", "turtledemo", "pydoc_data"}
    found = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if parts[0] in sys.stdlib_module_names and not left_out & set(parts) and not parts[0].startswith("_"):
            found.append((".".join(part for part in parts if part != "__init__"), str(path)))
    return found


def document_module(name: str, path: str) -> str:
    """A module's docstring, then those of its classes and functions under their signatures. Runs nothing of it."""
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (SyntaxError, ValueError):
        return ""
    parts = [f"{name}\n{'=' * len(name)}\n"] if ast.get_docstring(tree) else []
    parts += [ast.get_docstring(tree) or ""]
    for node in ast.walk(tree):
        text = ast.get_docstring(node) if isinstance(node, (ast.ClassDef, ast.FunctionDef)) else None
        if text:
            kind = "class " if isinstance(node, ast.ClassDef) else ""
            signature = "" if kind else f"({ast.unparse(node.args)})"
            parts.append(f"{kind}{name}.{node.name}{signature}\n" + re.sub("^(?=.)", "    ", text, flags=re.M))
    return "\n\n".join(part for part in parts if part)
