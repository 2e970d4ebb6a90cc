"""Cleans a corpus and says what was dropped and why: boilerplate, other languages, bad text, duplicates.

In:  what prepare.py reads (.txt .md .jsonl .json .csv .parquet, also .gz .zst), HTML files or columns, WARC.
Out: OUT/corpus/*.jsonl.zst for prepare.py, OUT/dropped/ with the reasons, OUT/report.json and OUT/report.html.

    python -m tools.clean_corpus --input=pages/ --out=clean --languages=de
    python -m tools.clean_corpus --input='crawl/*.warc.gz' --out=clean --executor=slurm --slurm_partition=cpu

datatrove (https://github.com/huggingface/datatrove) does the work. The input is cut into tasks by its size alone, so the
result is the same byte for byte for any number of workers; a run that was stopped goes on after its last finished task.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any, Literal

from configurator import UserError, format_overrides, load_config, program
from dataset import take_lock, write_atomically

# settings that do not change the result
NOT_COMPARED = "executor workers slurm_partition slurm_time memory_gb stall_minutes overwrite keep_work".split()
INSTALL = "pip install -r tools/requirements.txt"


@dataclasses.dataclass(frozen=True)
class CleanConfig:
    """Settings of tools.clean_corpus."""

    input: str = ""  # files, folders, globs, commas between: what prepare.py takes, .html .htm .xhtml .warc
    out: str = ""  # the folder of the results
    document: Literal["auto", "file", "line", "paragraph", "heading"] = "auto"  # one, in .txt and .md
    text_column: str = "text"  # the field with the text, where rows are documents
    html_column: str | None = None  # the field with HTML, instead
    skip_bad_rows: bool = False  # skip and count rows without text, put U+FFFD for invalid bytes, instead of stopping
    # boilerplate
    extractor: Literal["trafilatura", "resiliparse"] = "trafilatura"  # from HTML; resiliparse is 10 times as fast
    extract_timeout: float = 30.0  # seconds for a page
    max_lost: float = 0.05  # the run fails when a larger share of the pages is lost to errors and time-outs
    repeated_lines: int = 20  # take out lines that stand in so many documents; 0 = none
    # language
    languages: str | None = None  # wanted ones, as en,de; none = any
    language_threshold: float = 0.65  # least score of lid.176, as in FineWeb; 0 without languages = no language filter
    # quality
    quality: bool = True  # false = none of the rules from here to duplicates
    min_words: int = 50  # Gopher, arXiv 2112.11446, table A1, as the next seven; two characters are a Chinese word here
    max_words: int = 1000000  # Gopher has 100,000, but a book is a document, too
    min_mean_word: float = 3  # characters; not where a script has no spaces
    max_mean_word: float = 14  # Gopher has 10, for English; German compounds are longer
    max_symbols: float = 0.1  # signs # and ... for each word
    max_bullet_lines: float = 0.9  # share of lines that begin with a bullet
    max_ellipsis_lines: float = 0.3  # share of lines that end with an ellipsis
    min_letter_words: float = 0.8  # share of words with a letter
    min_stop_words: int = 2  # different ones, where the language has a list
    min_letters: float = 0.6  # share of letters in the visible characters; ROOTS, arXiv 2303.03915, section 3.2
    min_mean_sentence: float = 3  # words; own: menus and tables
    max_mean_sentence: float = 200  # words; own: word lists
    max_repeated_line_share: float = 0.3  # Gopher, table A1, as the next five: lines that stood above already
    max_repeated_line_characters: float = 0.2  # the same in characters
    max_repeated_paragraph_share: float = 0.3  # paragraphs that stood above already
    max_repeated_paragraph_characters: float = 0.2  # the same in characters
    ngram_scale: float = (
        1.0  # times Gopher's limits on repeated runs of 2 to 10 words; larger keeps more, 0 = no limits
    )
    min_ended_lines: float = 0.03  # share of lines with a full stop or the like; FineWeb (arXiv 2406.17557, 3.6): 0.12
    max_short_lines: float = 0.75  # share of lines of 30 characters or less; FineWeb: 0.67, for web pages
    max_repeated_characters: float = 0.1  # share of characters in repeated lines; FineWeb
    max_lines_per_word: float = 0.3  # lines for each word; FineWeb
    # duplicates
    dedup: Literal["minhash", "exact", "none"] = (
        "minhash"  # of documents; minhash includes exact; none = of paragraphs, too
    )
    dedup_similarity: float = 0.72  # of shingles, which MinHash catches with 64 in 100; chooses its bands and rows
    shingle_words: int = 5  # words in a shingle; shorter documents are compared exactly alone
    paragraph_words: int = 8  # take out paragraphs of so many words that an earlier document has; 0 = none
    # the run
    executor: Literal["local", "slurm", "ray"] = "local"  # where the tasks run
    workers: int = os.cpu_count() or 1  # tasks at a time
    task_mb: int = 32  # megabytes of input a task at most, and a 64th of the input where that is less
    memory_gb: int = 2  # for a task, on a cluster
    slurm_partition: str = ""  # of the cluster
    slurm_time: str = "10:00:00"  # limit for a task
    stall_minutes: int = 60  # on Ray: a stage without progress for so long is started anew
    keep_work: bool = False  # leave the files between the stages in OUT/work
    overwrite: bool = False  # make anew what is already there

    def __post_init__(self) -> None:
        if not 0.1 <= self.dedup_similarity <= 0.99:
            raise UserError(f"dedup_similarity={self.dedup_similarity} is no similarity from 0.1 to 0.99")
        for name in ("workers", "task_mb", "memory_gb", "stall_minutes", "shingle_words"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)} is too small: it starts at 1")
        if self.executor == "slurm" and not self.slurm_partition:
            raise UserError("--executor=slurm needs --slurm_partition=NAME (sinfo lists them)")
        if self.languages is not None and not all(self.wanted_languages):
            raise UserError(f"languages={self.languages!r} is no list like en,de")

    @property
    def wanted_languages(self) -> list[str] | None:
        """The languages to keep, None for any."""
        return None if self.languages is None else [name.strip().lower() for name in self.languages.split(",")]


@program
def main(argv: list[str]) -> int:
    """Runs the program; returns its exit code."""
    config, origins = load_config(CleanConfig, argv, __doc__)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    for line in format_overrides(config, origins):
        print(line)
    if not config.input or not config.out:
        raise UserError("name what to clean and where to: --input=FILES --out=FOLDER")
    try:
        from tools.corpus_input import input_files, plan_tasks
        from tools.corpus_pipeline import run_stages
        from tools.corpus_report import write_report
    except ImportError as error:
        raise UserError(f"{error.name} is missing: {INSTALL}") from error
    out = Path(config.out)
    files = input_files(config.input)
    task_bytes = task_size(config, files)
    tasks = plan_tasks(files, task_bytes)
    settings = {k: v for k, v in dataclasses.asdict(config).items() if k not in NOT_COMPARED}
    settings["fingerprint"] = fingerprint(tasks)
    refuse_second_run(out)
    if already_done(config, out, settings):
        return 0
    with open(out / "work" / "lock", "a") as lock:
        take_lock(lock)
        print(f"{len(tasks):,} tasks on {config.workers} workers ({config.executor})")
        try:
            seconds = run_stages(config, out / "work", tasks, task_bytes)
        except ImportError as error:  # datatrove asks for the packages of a step when it is made
            raise UserError(f"{error}: {INSTALL}") from error
        write_report(out / "work", out / "work" / "results", settings, seconds)
        publish(config, out)
    for line in json.loads((out / "report.json").read_text(encoding="utf-8"))["summary"]:
        print(line)
    return 0


def refuse_second_run(out: Path) -> None:
    """Raises UserError while another run is at work in the folder: before --overwrite takes its files away."""
    if (out / "work" / "lock").exists():
        with open(out / "work" / "lock", "a") as lock:
            if not take_lock(lock):
                raise UserError(f"another run is at work in {out}: wait for it, or take another --out=")


def task_size(config: CleanConfig, files: list[str]) -> int:
    """Bytes of input a task: a 64th of all, but a megabyte at least and task_mb at most."""
    return min(config.task_mb << 20, max(1 << 20, sum(map(os.path.getsize, files)) // 64))


def fingerprint(tasks: list[Any]) -> str:
    """Changes when the input does."""
    stats = [(piece, os.path.getsize(piece[0]), os.stat(piece[0]).st_mtime_ns) for task in tasks for piece in task]
    return hashlib.sha256(repr(stats).encode()).hexdigest()[:16]


def already_done(config: CleanConfig, out: Path, settings: dict[str, Any]) -> bool:
    """Whether the results are there; readies the folder for a new or a stopped run. Raises UserError for another's."""
    stored, report = out / "work" / "settings.json", out / "report.json"
    ours = report.exists() or stored.exists()
    if not ours and any((out / name).exists() for name in ("corpus", "dropped", "work")):
        raise UserError(f"{out} holds folders of another program: take another --out=")
    made, begun = read_json(report).get("settings"), read_json(stored)
    if made == settings and not config.overwrite:
        print(f"{out} is already clean (--overwrite=true makes it anew)")
        return True
    if report.exists() and not config.overwrite:
        raise UserError(
            f"{out} holds a corpus cleaned with other settings or input: --overwrite=true, or another --out="
        )
    if begun == settings != made:
        print(f"going on with the stopped run in {out}")
        return False
    if begun and not config.overwrite:
        changed = [f"{k} was {begun.get(k)!r}, now {settings[k]!r}" for k in settings if begun.get(k) != settings[k]]
        raise UserError(f"{out} holds a stopped run with other settings ({'; '.join(changed)}): --overwrite=true")
    shutil.rmtree(out / "work", ignore_errors=True)
    for name in ("corpus", "dropped"):  # though nothing may be kept, or nothing dropped
        (out / "work" / "results" / name).mkdir(parents=True)
    write_atomically(stored, json.dumps(settings).encode())
    return False


def read_json(path: Path) -> dict[str, Any]:
    """A file with a JSON object; an empty one where there is none, or another program's."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def publish(config: CleanConfig, out: Path) -> None:
    """Moves the results to their names, the report last, and takes the files between the stages away.

    What was moved before a run was stopped here is no longer among the results, and stays.
    """
    (out / "report.json").unlink(missing_ok=True)
    for name in ("corpus", "dropped", "report.html", "report.json"):
        source, target = out / "work" / "results" / name, out / name
        if source.exists() and target.is_dir():
            shutil.rmtree(target)
        if source.exists():
            os.replace(source, target)
    if not config.keep_work:
        shutil.rmtree(out / "work")


if __name__ == "__main__":
    sys.exit(main())
