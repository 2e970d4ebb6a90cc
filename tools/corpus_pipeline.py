"""The order of tools.clean_corpus: which steps of datatrove and of our own run on what, stage after stage.

In:  the settings, a folder for the files between the stages, and the tasks that the input was cut into.
Out: WORK/results/corpus and WORK/results/dropped, and the counts of every stage in WORK/tallies.

    read      input → plain text, and in how many documents each line stands
    filter    repeated lines, language, quality; signatures of what passes
    unique    the first of equal and similar documents; signatures of their paragraphs
    write     repeated paragraphs out, the rest is the corpus
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from datatrove.data import Document
from datatrove.pipeline.dedup import ExactFindDedups, MinhashDedupBuckets, SentDedupConfig
from datatrove.pipeline.dedup.exact_dedup import ExactDedupConfig
from datatrove.pipeline.dedup.minhash import MinhashConfig

from configurator import UserError
from tools.corpus_dedup import Duplicates, ExactSignature, FirstSurvives, MinhashSignature, choose_bands
from tools.corpus_executors import Stages
from tools.corpus_filters import Languages, Lines, Quality, Repetition, Sentences, check_languages
from tools.corpus_input import CorpusReader, Extract, is_page, lost_pages
from tools.corpus_lines import (
    FrequentLines,
    LineCounts,
    ParagraphSignature,
    RemoveLines,
    RemoveParagraphs,
    RepeatedParagraphs,
)
from tools.corpus_stages import DropWriter, PartWriter, Shard, Tally, corpus_writer, shard_names, shard_writer
from tools.corpus_words import WORDS

if TYPE_CHECKING:
    from tools.clean_corpus import CleanConfig

TOP_NGRAMS = ((2, 0.20), (3, 0.18), (4, 0.16))  # Gopher, arXiv 2112.11446, table A1: share of the most frequent
REPEATED_NGRAMS = ((5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.10))  # share of all that repeat
MOST_TASKS = 65_000  # datatrove ranks equal documents by a number of 16 bits
BUFFER = 1000  # signatures read at a time


def document_text(doc: Document) -> str:
    """What makes documents equal."""
    return doc.text


def drop_writer(work: Path, stage: str) -> DropWriter:
    """Where a step puts what it drops."""
    return DropWriter(work / "results" / "dropped", work / "tallies", stage)


def run_stages(config: CleanConfig, work: Path, tasks: list[Any], task_bytes: int) -> dict[str, float]:
    """All stages; returns the seconds of each."""
    if config.languages or config.language_threshold:
        check_languages(config.wanted_languages)
    cluster = {"partition": config.slurm_partition, "time": config.slurm_time, "memory_gb": config.memory_gb}
    cluster["stall_minutes"] = config.stall_minutes
    stages = Stages(work / "logs", config.executor, config.workers, **cluster)
    read_stage(config, work, tasks, task_bytes, stages)
    shards = shard_names(work / "text")
    count = max(1, len(shards))
    if count > MOST_TASKS:
        raise UserError(f"{count:,} tasks are more than {MOST_TASKS:,}: a larger --task_mb=")
    if config.repeated_lines:
        step = FrequentLines(work / "lines", work / "frequent", config.repeated_lines)
        stages.run("lines", [step], count)
    filter_stage(config, work, shards, stages)
    duplicate_stages(config, work, count, stages)
    paragraph_stages(config, work, count, stages)
    return stages.seconds


def read_stage(config: CleanConfig, work: Path, tasks: list[Any], task_bytes: int, stages: Stages) -> None:
    """Input to plain text in shards; in how many documents each line stands."""
    tallies = work / "tallies"
    rules = {"text_column": config.text_column, "document": config.document, "skip_bad_rows": config.skip_bad_rows}
    writer = drop_writer(work, "extraction")
    extract = Extract(config.extractor == "resiliparse", config.extract_timeout, writer)
    if config.html_column or any(is_page(piece[0]) for task in tasks for piece in task):
        extract.probe()
    reader = CorpusReader(tasks, config.html_column, **rules)
    steps = [reader, Tally(tallies, "input"), extract, Tally(tallies, "text")]
    steps += [LineCounts(work / "lines")] if config.repeated_lines else []
    stages.run("read", [*steps, PartWriter(work / "text", task_bytes)], len(tasks))
    lost, pages = lost_pages(tallies)
    if lost > config.max_lost * pages:
        raise UserError(
            f"{lost:,} of {pages:,} pages were lost to errors and time-outs, more than max_lost={config.max_lost}: see "
            f"{work}/results/dropped/extraction; a longer --extract_timeout=, or a larger --max_lost="
        )


def filter_stage(config: CleanConfig, work: Path, shards: list[str], stages: Stages) -> None:
    """Boilerplate lines, language, quality; and the signatures of what passes."""
    tallies, tasks = work / "tallies", max(1, len(shards))
    steps: list[Any] = [Shard(work / "text", shards)]
    if config.repeated_lines:
        steps.append(RemoveLines(work / "frequent", drop_writer(work, "repeated_lines")))
    if config.languages or config.language_threshold:
        writer = drop_writer(work, "language")
        steps.append(Languages(config.wanted_languages, config.language_threshold, writer))
    steps += quality_filters(config, work) if config.quality else []
    steps += [Tally(tallies, "filtered"), shard_writer(work / "filtered")]
    if config.dedup != "none":
        steps.append(ExactSignature(str(work / "exact"), ExactDedupConfig(document_text), finders(tasks)))
    if config.dedup == "minhash":
        steps.append(MinhashSignature(str(work / "signatures"), minhash_config(config), WORDS))
    stages.run("filter", steps, tasks)


def quality_filters(config: CleanConfig, work: Path) -> list[Any]:
    """The rules on single documents, cheap ones first."""
    quality = {
        "min_doc_words": config.min_words,
        "max_doc_words": config.max_words,
        "min_avg_word_length": config.min_mean_word,
        "max_avg_word_length": config.max_mean_word,
        "max_symbol_word_ratio": config.max_symbols,
        "max_bullet_lines_ratio": config.max_bullet_lines,
        "max_ellipsis_lines_ratio": config.max_ellipsis_lines,
        "max_non_alpha_words_ratio": config.min_letter_words,
        "min_stop_words": config.min_stop_words,
    }
    lines = {
        "line_punct_thr": config.min_ended_lines,
        "short_line_thr": config.max_short_lines,
        "char_duplicates_ratio": config.max_repeated_characters,
        "new_line_ratio": config.max_lines_per_word,
    }
    repetition = {
        "dup_line_frac": config.max_repeated_line_share,
        "dup_line_char_frac": config.max_repeated_line_characters,
        "dup_para_frac": config.max_repeated_paragraph_share,
        "dup_para_char_frac": config.max_repeated_paragraph_characters,
        "top_n_grams": scale(TOP_NGRAMS, config.ngram_scale),
        "dup_n_grams": scale(REPEATED_NGRAMS, config.ngram_scale),
    }
    sentences = (config.min_letters, config.min_mean_sentence, config.max_mean_sentence)
    return [
        Quality(drop_writer(work, "gopher_quality"), **quality),
        Sentences(drop_writer(work, "letters_and_sentences"), *sentences),
        Lines(drop_writer(work, "fineweb_lines"), **lines),
        Repetition(drop_writer(work, "gopher_repetition"), **repetition),
    ]


def scale(limits: tuple[tuple[int, float], ...], factor: float) -> tuple[tuple[int, float], ...]:
    """Limits times a factor; none at 0."""
    return tuple((n, share * factor) for n, share in limits) if factor else ()


def minhash_config(config: CleanConfig) -> Any:
    """datatrove's settings of MinHash."""
    bands, rows = choose_bands(config.dedup_similarity)
    return MinhashConfig(n_grams=config.shingle_words, num_buckets=bands, hashes_per_bucket=rows)


def finders(tasks: int) -> int:
    """Tasks among which the search for equal hashes is divided."""
    return min(tasks, 1000)


def duplicate_stages(config: CleanConfig, work: Path, tasks: int, stages: Stages) -> None:
    """Of equal and of similar documents the first stays."""
    steps: list[Any] = [Shard(work / "filtered")]
    similar = None
    if config.dedup != "none":
        find = ExactFindDedups(
            str(work / "exact"), str(work / "equal"), ExactDedupConfig(document_text), lines_to_buffer=BUFFER
        )
        stages.run("equal", [find], finders(tasks))
    if config.dedup == "minhash":
        minhash, pairs, similar = minhash_config(config), str(work / "pairs"), work / "similar"
        bands = MinhashDedupBuckets(str(work / "signatures"), pairs, config=minhash, lines_to_buffer=BUFFER)
        stages.run("similar", [bands], minhash.num_buckets)
        stages.run("clusters", [FirstSurvives(pairs, str(similar), minhash)], 1)
    if config.dedup != "none":
        writer = drop_writer(work, "duplicates")
        steps.append(Duplicates(work / "equal", similar, writer))
    steps += [Tally(work / "tallies", "unique"), shard_writer(work / "unique")]
    if config.paragraph_words and config.dedup != "none":
        steps.append(ParagraphSignature(str(work / "paragraphs"), finders(tasks), paragraph_config(config), WORDS))
    stages.run("unique", steps, tasks)


def paragraph_config(config: CleanConfig) -> Any:
    """datatrove's settings for repeated lines."""
    words = config.min_words if config.quality else 1
    return SentDedupConfig(1, False, min_doc_words=words, min_words_to_remove_span=config.paragraph_words)


def paragraph_stages(config: CleanConfig, work: Path, tasks: int, stages: Stages) -> None:
    """Repeated paragraphs go; the rest is the corpus."""
    steps: list[Any] = [Shard(work / "unique")]
    if config.paragraph_words and config.dedup != "none":
        settings = paragraph_config(config)
        find = RepeatedParagraphs(str(work / "paragraphs"), str(work / "repeated"), config=settings)
        stages.run("paragraphs", [find], finders(tasks))
        writer = drop_writer(work, "paragraphs")
        steps.append(RemoveParagraphs(str(work / "repeated"), settings, writer, WORDS))
    steps += [Tally(work / "tallies", "kept"), corpus_writer(work / "results" / "corpus")]
    stages.run("write", steps, tasks)
