"""Perplexity of a whole split or of text files, with the rules that the numbers depend on.

In:  a `Subject`, and a stream of documents: a split of a prepared data set, or files of text.
Out: a dict of plain values: loss, perplexity per token, word and byte, counts, and the rules.

A window ends every `stride` tokens and sees the `context` tokens before its end, so that each token is scored once and
the last window is as long as the others. With stride = context, document by document, these are the windows of
EleutherAI's harness (lm_eval.utils.get_rolling_token_windows), whose word perplexity is the same to the last digits.
"""

from __future__ import annotations

import codecs
import dataclasses
import math
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from configurator import UserError
from corpus import Corpus
from dataset import TokenData
from progress import perplexity, progress_bar
from textfile import undo_wikitext_spacing
from tokenizer import TiktokenTokenizer, Tokenizer
from tools.scoring import Scorer, Subject, Window

PIECE = 1 << 20  # ids read at a time

Piece = tuple[np.ndarray, bool]  # ids, whether a document ends behind them


@dataclasses.dataclass(frozen=True)
class Rules:
    """How perplexity is measured."""

    context: int  # most tokens that a window reads
    stride: int  # tokens that a window scores, but for a document's first and last one
    bounded: bool  # windows stay in their document; else the documents are one stream with end-of-text ids in it
    score_end: bool  # the id that ends a document is scored as well
    detokenize: bool  # WikiText's spacing is undone before encoding
    max_tokens: int | None  # stop after so many


@dataclasses.dataclass
class Counts:
    """What is scored, in the units to divide by."""

    documents: int = 0
    words: int = 0  # runs of characters between white space
    characters: int = 0
    bytes: int = 0  # in UTF-8
    unknown: int = 0  # tokens that stand for what the tokenizer does not know


class TextSource:
    """Documents out of files, encoded. Words and bytes are counted in the text as it stands in the files."""

    def __init__(self, files: str, text_column: str, document: str, rules: Rules, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.counts = tokenizer, Counts()
        self.detokenize, self.max_tokens = rules.detokenize, rules.max_tokens
        self.corpus = Corpus(
            "input",
            files,
            text_column=text_column,
            document=document,
            detokenize=False,  # here, so that words are counted in the original
            skip_bad_rows=False,
            max_documents=None,
        )
        self.name, self.tokens = self.corpus.source, None
        self.counted = (
            "in the text before its spacing is undone, as published figures" if rules.detokenize else "in the text"
        )

    def __iter__(self) -> Iterator[Piece]:
        """Pieces of documents, without end-of-text ids. A tokenizer that must see a document whole gets it so. With
        `max_tokens` the piece that reaches it is the last.
        """
        whole, held, tokens = self.detokenize or not self.tokenizer.piecewise, [], 0
        counter = TextCounter(self.counts)
        for _, text, ends in self.corpus:
            counter.add(text, ends)
            held.append(text)
            if whole and not ends:
                continue
            text = "".join(held)
            held = []
            ids = self.tokenizer.encode(undo_wikitext_spacing(text) if self.detokenize else text)
            self.counts.unknown += count_unknown(self.tokenizer, ids)
            self.counts.documents += ends
            yield ids, ends
            tokens += len(ids)
            if tokens >= (self.max_tokens or math.inf):
                return


class SplitSource:
    """The documents of a split of a prepared data set. Words and bytes are counted in the text that its ids decode to."""

    def __init__(self, data: TokenData, split: str, rules: Rules, tokenizer: Tokenizer) -> None:
        if split not in data.tokens:
            known = ", ".join(data.tokens)
            raise UserError(f"{data.folder} has no {split}.bin, only {known}: --split= names one, or --input=FILES")
        self.data, self.split, self.tokenizer, self.counts = data, split, tokenizer, Counts()
        self.name, self.tokens = str(data.folder / f"{split}.bin"), data.tokens[split]
        self.max_tokens = rules.max_tokens
        undone = (data.meta.get("settings") or {}).get("detokenize")
        self.counted = "in the text that the ids decode to" + (", WikiText's spacing undone" if undone else "")

    def __iter__(self) -> Iterator[Piece]:
        """Pieces of documents, without end-of-text ids."""
        counter, left, ends = TextCounter(self.counts), self.max_tokens or math.inf, True
        for ids, ends in read_documents(self.data, self.split):
            ids, ends = (ids, ends) if len(ids) < left else (ids[: int(left)], False)
            left -= len(ids)
            counter.add_ids(self.tokenizer, ids, ends)
            self.counts.unknown += count_unknown(self.tokenizer, ids)
            self.counts.documents += ends
            yield ids, ends
            if not left:
                break
        self.counts.documents += not ends


def read_ids(data: TokenData, split: str, piece: int = PIECE) -> Iterator[np.ndarray]:
    """All ids of a split, `piece` at a time, each from a map of its own: one kept open keeps the pages it touched.

    Raises UserError for an id beyond the vocabulary.
    """
    width = data.dtype.itemsize
    for first in range(0, data.tokens[split], piece):
        count = min(piece, data.tokens[split] - first)
        ids = np.array(np.memmap(data.files[split], data.dtype, "r", offset=first * width, shape=(count,)))
        if ids.max() >= data.vocab_size:
            path = data.folder / f"{split}.bin"
            raise UserError(f"{path} holds id {ids.max()}, but vocab_size is {data.vocab_size}: prepare it anew")
        yield ids


def read_documents(data: TokenData, split: str) -> Iterator[Piece]:
    """The documents of a split in pieces, without their end-of-text ids; the last document may lack one."""
    for ids in read_ids(data, split):
        start = 0
        for end in np.flatnonzero(ids == data.meta["eot_id"]):
            yield ids[start:end], True
            start = end + 1
        if start < len(ids):
            yield ids[start:], False


def count_unknown(tokenizer: Tokenizer, ids: np.ndarray) -> int:
    """How many ids stand for text that the tokenizer does not know."""
    unknown = getattr(tokenizer, "unknown_id", None)
    return 0 if unknown is None else int((ids == unknown).sum())


class TextCounter:
    """Counts the words and bytes of documents that come in pieces."""

    def __init__(self, counts: Counts) -> None:
        self.counts, self.in_word = counts, False
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, text: str, ends: bool) -> None:
        """Counts one more piece; a word that goes on from the piece before is one."""
        if text:
            words = len(text.split())
            self.counts.words += words - (self.in_word and not text[0].isspace())
            self.counts.characters += len(text)
            self.counts.bytes += len(text.encode("utf-8", "replace"))
            self.in_word = not text[-1].isspace()
        if ends:
            self.in_word = False

    def add_ids(self, tokenizer: Tokenizer, ids: np.ndarray, ends: bool) -> None:
        """Counts one more piece of ids; a character may be cut by its end."""
        if isinstance(tokenizer, TiktokenTokenizer):
            text = self.decoder.decode(tokenizer.encoding.decode_bytes(ids.tolist()), final=ends)
        else:
            text = tokenizer.decode(ids.tolist())
        self.add(text, ends)


def make_windows(pieces: Iterable[Piece], rules: Rules, eot_id: int) -> Iterator[Window]:
    """The windows of a stream of documents. Each document, or the whole stream, starts behind an end-of-text id."""
    end = np.array([eot_id])
    tokens, scored, started = end, 0, False  # `scored` is the place of the last token that is done with
    for ids, ends in pieces:
        closes = ends and rules.bounded
        tokens = np.concatenate(
            [tokens, ids, end] if ends and (rules.score_end or not rules.bounded) else [tokens, ids]
        )
        while left := len(tokens) - 1 - scored:
            size = rules.stride if started else rules.context
            if left < size and not closes:
                break
            last = scored + min(size, left)
            yield Window(tokens[max(0, last - rules.context) : last], tokens[scored + 1 : last + 1])
            scored, started = last, True
        if closes:
            tokens, scored, started = end, 0, False
        else:
            cut = max(0, scored + 1 - rules.context)
            tokens, scored = tokens[cut:], scored - cut
    if left := len(tokens) - 1 - scored:
        last = scored + left
        yield Window(tokens[max(0, last - rules.context) : last], tokens[scored + 1 :])


def measure_perplexity(subject: Subject, source: Any, rules: Rules, scorer: Scorer) -> dict[str, Any]:
    """Scores all of `source` and returns the numbers with their rules. Raises UserError where there is nothing to score,
    or where the model answers with NaN.
    """
    total, tokens, started = 0.0, 0, time.monotonic()
    sizes: list[int] = []  # of the windows on their way

    def noted(windows: Iterable[Window]) -> Iterator[Window]:
        for window in windows:
            sizes.append(len(window.targets))
            yield window

    windows = make_windows(source, rules, subject.tokenizer.eot_id)
    with progress_bar("perplexity", unit=" tokens", total=min_of(source.tokens, rules.max_tokens)) as bar:
        for log_likelihood, _ in scorer.score(noted(windows)):
            total -= log_likelihood
            size = sizes.pop(0)
            tokens += size
            bar.update(size)
    if not tokens:
        raise UserError(f"{source.name} holds no text to measure perplexity on")
    if not math.isfinite(total):
        raise UserError(
            f"{subject.path} gives the loss {total / tokens}: its weights are damaged, or --dtype is too narrow"
        )
    seconds = time.monotonic() - started
    result = {"source": source.name, "tokens": tokens, **dataclasses.asdict(source.counts), "loss": total / tokens}
    result |= ratios(total, tokens, source.counts, rules)
    described = describe_rules(rules, source, tokens) | {
        "numbers": str(subject.model.lm_head.weight.dtype).removeprefix("torch.")
    }
    return result | {"rules": described, "seconds": seconds, "tokens_per_second": tokens / seconds}


def ratios(total: float, tokens: int, counts: Counts, rules: Rules) -> dict[str, float]:
    """What a loss of `total` nats comes to per token, word and byte."""
    found = {"token_perplexity": perplexity(total / tokens)}
    if counts.words:
        ends = counts.documents if rules.score_end or not rules.bounded else 0
        found["word_perplexity"] = perplexity(total / counts.words)
        found["tokens_per_word"] = (tokens - ends) / counts.words
        found["characters_per_word"] = counts.characters / counts.words
    if counts.bytes:
        found["byte_perplexity"] = perplexity(total / counts.bytes)
        found["bits_per_byte"] = total / counts.bytes / math.log(2)
    return found


def min_of(*numbers: int | None) -> int | None:
    """The least of those that are given."""
    return min((n for n in numbers if n is not None), default=None)


def describe_rules(rules: Rules, source: Any, tokens: int) -> dict[str, str]:
    """The rules in words, which stand beside the numbers wherever these are told."""
    part = tokens >= (rules.max_tokens or math.inf)  # of files the last piece is whole, so it may be more
    between = f"the first {tokens:,} tokens of {source.name}" if part else source.name
    first = "first of a document" if rules.bounded else "first of all"
    stride = "windows do not overlap" if rules.stride == rules.context else f"a window every {rules.stride:,} tokens"
    end = "scored" if rules.score_end or not rules.bounded else "not scored"
    return {
        "text": between if isinstance(source, SplitSource) or part else f"all of {between}",
        "detokenised": "WikiText's spacing undone" if rules.detokenize else "as it stands",
        "context": f"{rules.context:,} tokens; an end-of-text id is read before the {first}",
        "stride": f"{rules.stride:,}: {stride}, each token is scored once",
        "documents": "each by itself" if rules.bounded else "one stream",
        "end of a document": end,
        "words": f"runs between white space, {source.counted}",
    }
