"""Words, for tools.clean_corpus: found by one regular expression in every script, without any model or download.

In:  text.
Out: its words, as the quality rules count them and as duplicates are compared.

The rules' limits go with these words: other words, other decisions.
"""

from __future__ import annotations

import re
import unicodedata

import numpy as np
import regex
from datatrove.utils.word_tokenizers import WordTokenizer

UNSPACED = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"  # scripts without spaces between words
UNSPACED_BLOCKS = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
HAS_UNSPACED = re.compile(f"[{UNSPACED_BLOCKS}]")
SPACED_WORD = regex.compile(r"[\p{L}\p{M}\p{N}]+(?:['’][\p{L}\p{M}\p{N}]+)*")
PAIR = rf"[{UNSPACED}]\p{{M}}*(?:[{UNSPACED}]\p{{M}}*)?"
ANY_WORD = regex.compile(rf"{PAIR}|(?:(?![{UNSPACED}])[\p{{L}}\p{{M}}\p{{N}}])+(?:['’]\p{{L}}+)*")
SENTENCE_END = regex.compile(r"[.!?…؟।]+[\"'”»)\]]*(?=\s|$)|[。！？]+")
MIX = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, odd: spreads small numbers over 64 bits (Knuth, 6.4)


class RegexWords(WordTokenizer):
    """Words as runs of letters, marks and digits; where a script has no spaces, pairs of characters. No download."""

    def __init__(self) -> None:
        super().__init__("any")

    def word_tokenize(self, text: str) -> list[str]:
        """The words of `text`, without punctuation."""
        return (ANY_WORD if HAS_UNSPACED.search(text) else SPACED_WORD).findall(text)

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        """Start and end of each sentence."""
        ends = [match.end() for match in SENTENCE_END.finditer(text)]
        ends += [len(text)] if not ends or ends[-1] < len(text) else []
        return list(zip([0, *ends[:-1]], ends, strict=True))

    def sent_tokenize(self, text: str) -> list[str]:
        """The sentences of `text`."""
        return [text[a:b].strip() for a, b in self.span_tokenize(text) if text[a:b].strip()]

    def __eq__(self, other: object) -> bool:  # so that the filters share datatrove's cache of split documents
        return isinstance(other, RegexWords)

    def __hash__(self) -> int:
        return 1


WORDS = RegexWords()


def is_unspaced(text: str) -> bool:
    """Whether more than three in ten letters belong to scripts without spaces between words."""
    found = len(HAS_UNSPACED.findall(text)) if HAS_UNSPACED.search(text) else 0
    return found > 0 and found > 0.3 * sum(map(str.isalpha, text))


def comparable_words(text: str) -> list[str]:
    """The words of `text` as duplicates are compared: lower case, accents off, every number 0 (datatrove's rules)."""
    text = text.lower()
    if not text.isascii():
        text = regex.sub(r"\p{Mn}+", "", unicodedata.normalize("NFD", text))
        if HAS_UNSPACED.search(text):  # one character at a time, or an insertion would shift all pairs after it
            text = regex.sub(rf"([{UNSPACED}])", r" \1 ", text)
    return re.findall(r"[^\W_]+", re.sub(r"\d+(?:[.,]\d+)?", "0", text))


def ngram_codes(ids: np.ndarray, n: int) -> np.ndarray:
    """A 64-bit code of every run of n ids, (N,) uint64 -> (N - n + 1,) uint64."""
    codes = np.zeros(max(0, len(ids) - n + 1), dtype=np.uint64)
    for i in range(n):
        codes = codes * MIX + ids[i : i + len(codes)]
    return (codes ^ (codes >> np.uint64(29))) * MIX
