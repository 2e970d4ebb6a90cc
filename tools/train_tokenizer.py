"""Trains a tokenizer for a corpus and says what it buys: byte-level BPE with GPT-2's splitting rule.

In:  text files as prepare.py reads them, best the cleaned corpus of tools.clean_corpus.
Out: a tokenizer.json for prepare.py's --tokenizer=, and a table over vocabulary sizes, measured on held-out text.

    python -m tools.train_tokenizer --input=clean/corpus --out=clean/tokenizer.json --vocab_size=32000

All 256 bytes are in the vocabulary, so nothing is unknown. It trains on an even sample of the corpus; same input, same
file. The table costs no further training: a smaller vocabulary is the start of a larger one.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from configurator import UserError, format_overrides, load_config, program
from corpus import Corpus
from dataset import write_atomically
from prepare import count_words, thin_out
from progress import progress_bar
from tokenizer import CHAT_TOKENS, TiktokenTokenizer, load_gpt2, read_tokenizer_json, train_tokenizer

UNIT = 1 << 17  # characters of a longer document that are drawn together
MANY_TOKENS = 1.4  # for a word; an English text in GPT-2's tokens has 1.3
READING = ("document", "text_column", "skip_bad_rows")  # settings that prepare.py must be given, too
LONG_WORDS = 20  # bytes for a word, above which a script has no spaces and words say nothing


@dataclasses.dataclass(frozen=True)
class TokenizerConfig:
    """Settings of tools.train_tokenizer."""

    input: str = ""  # files, folders, globs, commas between: .txt .md .jsonl .json .csv .parquet .gz .zst
    out: str = "tokenizer.json"  # the file to write
    vocab_size: int = 32000  # entries: 256 bytes, 4 special tokens, and merges
    table: str = "8000,16000,32000,50000"  # vocabulary sizes to compare; none = only the one asked for
    document: Literal["auto", "file", "line", "paragraph", "heading"] = "auto"  # one, in .txt and .md
    text_column: str = "text"  # the field with the text, where rows are documents
    skip_bad_rows: bool = False  # skip and count rows without text, put U+FFFD for invalid bytes, instead of stopping
    sample_mb: int = 100  # million characters to train on at most, spread evenly over the corpus
    held_out: float = 0.02  # share of the documents that it is judged on
    held_out_mb: int = 5  # million characters of them at most
    seed: int = 1337  # draws the held-out documents
    overwrite: bool = False  # replace an existing file

    def __post_init__(self) -> None:
        if not 260 <= self.vocab_size <= 1 << 22:
            raise UserError(
                f"vocab_size={self.vocab_size} is too small or large: 256 bytes, 4 special tokens, and merges"
            )
        for name in ("sample_mb", "held_out_mb"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)} is too small: it starts at 1")
        if not 0 < self.held_out < 1:
            raise UserError(f"held_out={self.held_out} is no share between 0 and 1")
        if not all(size.strip().isdigit() and int(size) >= 260 for size in self.listed):
            raise UserError(f"table={self.table!r} is no list of sizes from 260 on, such as 8000,16000")

    @property
    def listed(self) -> list[str]:
        """The entries of the table."""
        return [] if self.table.strip().lower() in ("", "none") else self.table.split(",")


@program
def main(argv: list[str]) -> int:
    """Runs the program; returns its exit code."""
    config, origins = load_config(TokenizerConfig, argv, __doc__)
    for line in format_overrides(config, origins):
        print(line)
    if not config.input:
        raise UserError("name the corpus: --input=FILES")
    out = Path(config.out)
    if out.is_dir():
        raise UserError(f"--out={config.out} is a folder: name a file, such as {out / 'tokenizer.json'}")
    if out.exists() and not config.overwrite:
        raise UserError(f"{out} exists: --overwrite=true replaces it, or name another --out=")
    out.parent.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=out.parent).close()  # a place that takes no file is told before the training
    training, held_out = draw_texts(config)
    sizes = sorted({config.vocab_size, *map(int, config.listed)})
    characters = sum(map(len, training))
    print(f"training on {characters / 1e6:,.1f} million characters, judging on {sum(map(len, held_out)) / 1e6:,.1f}")
    largest = train_tokenizer(iter(training), sizes[-1], show_progress=sys.stderr.isatty())
    chosen = read_tokenizer_json(cut_vocabulary(largest, config.vocab_size), out.name)
    write_atomically(out, chosen.identity["json"].encode())
    if chosen.vocab_size < config.vocab_size:
        print(f"vocabulary: {chosen.vocab_size:,} of {config.vocab_size:,} entries, this corpus yields no more")
    rows = [measure("GPT-2's", load_gpt2(), held_out, training)]
    for size in sizes:
        tokenizer = read_tokenizer_json(cut_vocabulary(largest, size), f"{size}")
        if tokenizer.vocab_size == size:
            rows.append(measure("this one" if size == config.vocab_size else "", tokenizer, held_out, training))
    if chosen.vocab_size < config.vocab_size:
        rows.append(measure("this one", chosen, held_out, training))
    for line in [*table_lines(rows), *advice(rows)]:
        print(line)
    flags = ["--dataset=NAME", f"--input={config.input}", f"--tokenizer={out}", "--val_fraction=0.05"]
    flags += [f"--{name}={getattr(config, name)}" for name in READING if name in origins]
    print(f"next: ./prepare_data.sh {shlex.join(flags)}")
    return 0


def draw_texts(config: TokenizerConfig) -> tuple[list[str], list[str]]:
    """Even samples of the corpus: texts to train on, and held-out ones. Raises UserError where there is no text."""
    corpus = Corpus(
        "own",
        config.input,
        text_column=config.text_column,
        document=config.document,
        skip_bad_rows=config.skip_bad_rows,
    )
    rng = random.Random(config.seed)
    held_out: list[str] = []

    def training() -> Iterator[str]:
        for text in units(corpus):
            if rng.random() < config.held_out:
                held_out.append(text)
                if sum(map(len, held_out[-1000:])) > 2_000_000 * config.held_out_mb:
                    held_out[:] = thin_out(held_out, 1_000_000 * config.held_out_mb)
            else:
                yield text

    texts = thin_out(training(), 1_000_000 * config.sample_mb)
    if len(texts) > 1 and not held_out:  # a short corpus: its last text
        held_out.append(texts.pop())
    if not texts:
        raise UserError(f"{corpus.source} holds no text to train a tokenizer on")
    for what, count in corpus.counts.items():
        print(f"{count:,} {what}")
    return texts, thin_out(held_out, 1_000_000 * config.held_out_mb) or texts


def units(corpus: Corpus) -> Iterator[str]:
    """The documents of a corpus; longer ones in parts of UNIT characters that end with a line."""
    with progress_bar("reading", unit=corpus.unit) as bar:
        for _, text, _ in corpus:
            bar.total = corpus.size
            bar.update(corpus.position - bar.n)
            start = 0
            while len(text) - start > UNIT:
                end = text.rfind("\n", start, start + UNIT) + 1 or start + UNIT
                yield text[start:end]
                start = end
            yield text[start:]


def cut_vocabulary(text: str, size: int) -> str:
    """A tokenizer.json with the first `size` entries of another, as if it had been trained to that size."""
    spec = json.loads(text)
    model = spec["model"]
    special = {token["content"] for token in spec["added_tokens"]}
    model["vocab"] = {token: i for token, i in model["vocab"].items() if i < size}
    model["merges"] = model["merges"][: max(0, size - 256 - len(special))]
    from tokenizers import Tokenizer

    return Tokenizer.from_str(json.dumps(spec)).to_str()


def measure(name: str, tokenizer: Any, held_out: list[str], training: list[str]) -> dict[str, Any]:
    """What a tokenizer makes of the held-out texts, and how many of its entries neither they nor the sample use."""
    import numpy as np

    used = np.zeros(tokenizer.vocab_size, dtype=bool)
    tokens = words = size = 0
    for text in held_out:
        ids = tokenizer.encode(text)
        used[ids] = True
        utf8 = text.encode()
        tokens, words, size = tokens + len(ids), words + count_words(utf8), size + len(utf8)
    if name:
        for first in range(0, len(training), 256):
            for ids in encode_many(tokenizer, training[first : first + 256]):
                used[ids] = True
    plain = tokenizer.vocab_size - 1 - len(CHAT_TOKENS) * (name != "GPT-2's")
    return {
        "name": name,
        "vocab_size": tokenizer.vocab_size,
        "tokens_per_word": tokens / max(1, words),
        "bytes_per_token": size / max(1, tokens),
        "bytes_per_word": size / max(1, words),
        "unused": plain - int(used.sum()) if name else None,
    }


def encode_many(tokenizer: Any, texts: list[str]) -> list[Any]:
    """The ids of texts, through tiktoken on all cores where the tokenizer runs in it."""
    if isinstance(tokenizer, TiktokenTokenizer):
        return tokenizer.encoding.encode_ordinary_batch(texts, num_threads=os.cpu_count() or 1)
    return [tokenizer.encode(text) for text in texts]


def table_lines(rows: list[dict[str, Any]]) -> list[str]:
    """The table for people."""
    lines = [f"{'vocabulary':>10} {'tokens/word':>12} {'bytes/token':>12} {'unused':>8}"]
    for row in rows:
        unused = "" if row["unused"] is None else f"{row['unused']:,}"
        lines.append(
            f"{row['vocab_size']:>10,} {row['tokens_per_word']:>12.3f} {row['bytes_per_token']:>12.3f} {unused:>8}  {row['name']}"
        )
    return lines


def advice(rows: list[dict[str, Any]]) -> list[str]:
    """What the numbers say."""
    gpt2, own = rows[0], next(row for row in rows if row["name"] == "this one")
    share = gpt2["bytes_per_token"] / own["bytes_per_token"] - 1
    lines = [f"a text of this corpus has {abs(share):.0%} {'fewer' if share < 0 else 'more'} tokens than in GPT-2's"]
    if own["bytes_per_word"] > LONG_WORDS:
        lines.append("words say nothing here, the script has few spaces: compare bytes per token")
    elif own["tokens_per_word"] > MANY_TOKENS:
        lines.append(
            f"{own['tokens_per_word']:.2f} tokens per word are more than {MANY_TOKENS}: a larger --vocab_size=, or a corpus "
            "that is larger or more like the text it will write"
        )
    if own["unused"] > max(256, 0.1 * own["vocab_size"]):  # a byte may well not occur
        lines.append(f"{own['unused']:,} entries are not used even in the sample: a smaller --vocab_size= loses little")
    return lines


if __name__ == "__main__":
    sys.exit(main())
