"""Tokenizers: known ids, exact round trips, and the same ids by every way that leads to them."""

from __future__ import annotations

import itertools
import json
import random
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
from conftest import SHARED, char_tokenizer
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, normalizers, pre_tokenizers

import tokenizer as module
from configurator import UserError
from tokenizer import (
    END_OF_TEXT,
    ODD_TEXT,
    FileTokenizer,
    TiktokenTokenizer,
    load_gpt2,
    load_tokenizer,
    open_tokenizer,
    read_tokenizer_json,
    train_tokenizer,
)

ODD = (
    ODD_TEXT,
    "",
    " ",
    "\n\n\n",
    "a  b   c\t\td \u00a0 e\u3000f\u2003g",
    "it's we'll they've I'd 'twas ''s 'S o'clock",
    "naïve ﬁ ½ ² ٣ 一二三 한국어 עברית e\u0301 \u200d👩‍👩‍👧‍👦 🇩🇪 \U0010ffff \x00 \x1c \x7f \x85",
    "1234567890 3.14 1,000,000 x²+y² _a_ ~~ -- --- ... ?!",
    "<|endoftext|> <|endoftext|><|im_start|>",
    "\u2028\u2029\u0085\ufeff\ufffd",
)


def random_text(rng: random.Random, length: int) -> str:
    """White space, letters, apostrophes, digits and odd Unicode in random order."""
    alphabet = [
        *"  \n\n\t\r\x0b\x1c\x1f\u0085\u00a0\u2009\u3000",
        *"abeslvtmdr'’S09½.,!-_",
        *"éß日本한👍🏽\u0301\u200d\x00",
    ]
    return "".join(rng.choices(alphabet, k=length))


@pytest.fixture(scope="module")
def trained_json() -> str:
    words = [
        "the",
        "low",
        "lower",
        "lowest",
        "slowly",
        "it's",
        "'tis",
        "1984",
        "naïve",
        "日本",
        "...",
        "\n\n",
        "",
        "indeed",
    ]
    rng = random.Random(3)
    return train_tokenizer((" ".join(rng.choices(words, k=40)) for _ in range(200)), 420)


# --- GPT-2 --------------------------------------------------------------------------------------------------------


def test_gpt2_gives_its_published_ids():
    gpt2 = open_tokenizer("gpt2")
    assert gpt2.encode("Hello world").tolist() == [15496, 995] and gpt2.encode("Hello world").dtype == np.uint32
    assert (gpt2.vocab_size, gpt2.eot_id, gpt2.decode([50256])) == (50257, 50256, END_OF_TEXT)
    assert gpt2.encode("one<|endoftext|>two").tolist() == [505, 27, 91, 437, 1659, 5239, 91, 29, 11545]


@pytest.mark.parametrize("text", ODD)
def test_gpt2_round_trips_everything(text):
    gpt2 = load_gpt2()
    assert gpt2.decode(gpt2.encode(text).tolist()) == text


def test_gpt2_through_both_libraries_is_the_same():
    """The files as a tokenizer.json: `tokenizers`, and our fast path, give tiktoken's ids."""
    gpt2 = load_gpt2()
    characters = module.byte_characters()
    ranks = gpt2.encoding._mergeable_ranks
    vocabulary = {"".join(characters[b] for b in token): rank for token, rank in ranks.items()}
    merges = [tuple(find_merge(token, ranks, characters)) for token in sorted(ranks, key=ranks.get) if len(token) > 1]
    inner = byte_level(models.BPE(vocab=vocabulary, merges=merges))
    inner.add_special_tokens([END_OF_TEXT])
    file = read_tokenizer_json(inner.to_str(), "gpt2.json")
    assert isinstance(file, TiktokenTokenizer) and (file.vocab_size, file.eot_id) == (50257, 50256)
    for text in ODD:
        expected = gpt2.encode(text).tolist()
        assert file.encode(text).tolist() == expected
        inner.encode_special_tokens = True
        assert inner.encode(text).ids == expected


def find_merge(token: bytes, ranks: dict[bytes, int], characters: dict[int, str]) -> list[str]:
    """The two parts of a token that byte-pair merging below its rank arrives at."""
    parts = [bytes([b]) for b in token]
    while len(parts) > 2:
        pairs = [ranks.get(a + b, 1 << 30) for a, b in itertools.pairwise(parts)]
        i = pairs.index(min(pairs))
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return ["".join(characters[b] for b in part) for part in parts]


def byte_level(model: models.Model) -> Inner:
    inner = Inner(model)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return inner


def test_missing_or_altered_gpt2_files_are_named(monkeypatch):
    monkeypatch.setattr(module, "GPT2_SHA256", "0" * 64)
    with pytest.raises(UserError, match=r"encoder\.json at .* is not GPT-2's: pip install"):
        load_gpt2.__wrapped__()
    monkeypatch.setattr(Path, "rglob", lambda *_: iter(()))
    with pytest.raises(UserError, match=r"encoder\.json is missing: pip install"):
        load_gpt2.__wrapped__()


def test_one_giant_word_takes_no_giant_time():
    """H10: 100,000 random letters in under 20 s, and back."""
    rng = random.Random(0)
    text = "before " + "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(100_000)) + " after"
    started = time.monotonic()
    ids = load_gpt2().encode(text).tolist()
    assert time.monotonic() - started < 20 and load_gpt2().decode(ids) == text


@pytest.mark.parametrize("text", ["a" + " " * 1_500_000 + "b  c", "x" + " \n" * 700_000 + "y", " " * 1_500_000 + "z"])
def test_a_giant_run_of_white_space_is_no_stack_overflow(text):
    gpt2 = load_gpt2()
    assert gpt2.decode(gpt2.encode(text).tolist()) == text


@pytest.mark.parametrize("run", [" ", "\n", " \n", "\t\u3000"])
@pytest.mark.parametrize("around", [("a", "b"), ("a", "'s"), ("", "b"), ("a", ""), ("a\x1c", "b"), ("a", "\x1cb")])
def test_a_run_of_white_space_cut_off_gives_the_same_ids(monkeypatch, run, around):
    """The way around the overflow, at a size where the direct way still works."""
    gpt2 = load_gpt2()
    text = f"{around[0]}{run * 40}{around[1]} and {run * 30}end"
    expected = gpt2.encode(text).tolist()
    short = module.re.compile(module.LONG_SPACE.pattern.replace("100000", "20"))
    assert [i for part in short.split(text) for i in gpt2.encode(part).tolist()] == expected
    assert len(short.split(text)) > 1


# --- trained here -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["low café 日本 ZZ", "\t", "a\r\nb\r", "👍🏽 👩‍👩‍👧", "", *ODD])
def test_bytes_that_the_corpus_did_not_contain_survive(text):
    """H71: all 256 bytes are in the vocabulary, so decode(encode(s)) == s."""
    trained = read_tokenizer_json(train_tokenizer(iter(["low lower lowest"]), 300), "t")
    assert trained.decode(trained.encode(text).tolist()) == text
    assert set(module.byte_characters().values()) <= json.loads(trained.identity["json"])["model"]["vocab"].keys()


def test_a_leading_space_neither_appears_nor_vanishes():
    """H72: `low` and ` low` round trip exactly and have different ids."""
    trained = read_tokenizer_json(train_tokenizer(iter(["low lower lowest"]), 300), "t")
    ids = [trained.encode(text).tolist() for text in ("low", " low")]
    assert ids[0] != ids[1] and [trained.decode(i) for i in ids] == ["low", " low"]


def test_a_vocabulary_that_cannot_be_reached_has_its_real_size():
    """H73: 1,000 entries asked for, fewer found; the tokenizer says how many."""
    text = train_tokenizer(iter(["low lower lowest"]), 1000)
    trained = read_tokenizer_json(text, "t")
    assert trained.vocab_size == Inner.from_str(text).get_vocab_size() < 300


def test_a_trained_tokenizer_has_the_end_token():
    """H74: always, and it stands for itself alone."""
    trained = read_tokenizer_json(train_tokenizer(iter(["a b"]), 257), "t")
    assert trained.decode([trained.eot_id]) == END_OF_TEXT
    assert trained.eot_id not in trained.encode(f"a{END_OF_TEXT}b").tolist()


def test_training_is_deterministic():
    texts = [random_text(random.Random(i), 500) for i in range(20)]
    assert train_tokenizer(iter(texts), 600) == train_tokenizer(iter(texts), 600)


def test_the_fast_path_equals_the_tokenizers_library(trained_json):
    fast = read_tokenizer_json(trained_json, "t")
    assert isinstance(fast, TiktokenTokenizer) and fast.vocab_size > 290
    inner = Inner.from_str(trained_json)
    inner.encode_special_tokens = True
    rng = random.Random(1)
    words = ["the", "slowly", "lowest", "indeed", "it's", "naïve", "日本"]
    texts = [*ODD, *(random_text(rng, 300) for _ in range(50)), *(" ".join(rng.choices(words, k=50)) for _ in range(5))]
    for text in texts:
        assert fast.encode(text).tolist() == inner.encode(text, add_special_tokens=False).ids, text
    if SHARED.is_dir():
        text = (SHARED / "wikitext.test.raw").read_text(encoding="utf-8")[:200_000]
        assert fast.encode(text).tolist() == inner.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.__setitem__("normalizer", json.loads('{"type": "Lowercase"}')),
        lambda s: s["pre_tokenizer"].__setitem__("add_prefix_space", True),
        lambda s: s["pre_tokenizer"].__setitem__("use_regex", False),
        lambda s: s.__setitem__("pre_tokenizer", None),
        lambda s: s["added_tokens"].append(s["added_tokens"][0] | {"id": 420, "content": "THE", "special": False}),
        lambda s: s["model"]["merges"].reverse(),
        lambda s: s["model"]["merges"].pop(),
    ],
)
def test_what_tiktoken_does_otherwise_stays_with_the_tokenizers_library(trained_json, change):
    spec = json.loads(trained_json)
    change(spec)
    other = read_tokenizer_json(json.dumps(spec), "t")
    assert isinstance(other, FileTokenizer)
    inner = Inner.from_str(json.dumps(spec))
    inner.encode_special_tokens = True
    text = "slow lower THE naïve 日本  it's" if spec["pre_tokenizer"] else "slowlower"
    assert other.encode(text).tolist() == inner.encode(text, add_special_tokens=False).ids


# --- foreign files ------------------------------------------------------------------------------------------------


def test_a_character_that_would_vanish_is_an_error_naming_it():
    without = read_tokenizer_json(char_tokenizer("abc "), "chars.json")
    assert without.encode("a cab").tolist() == [0, 3, 2, 0, 1]
    with pytest.raises(UserError, match=r"chars\.json cannot encode 'é'"):
        without.encode("cabé")


def test_an_unknown_token_stands_in_for_corpora_but_not_for_prompts():
    known = read_tokenizer_json(char_tokenizer("abc ", unknown="[UNK]"), "chars.json")
    assert known.encode("aéb").tolist() == [0, known.unknown_id, 1]
    with pytest.raises(UserError, match="cannot encode 'é'"):
        known.encode_prompt("aéb")
    assert known.encode_prompt("ab").tolist() == [0, 1]


def test_the_unknown_token_of_a_unigram_model_is_known_by_its_id():
    inner = Inner(models.Unigram([("<unk>", 0.0), ("a", -1.0), ("b", -1.5), (END_OF_TEXT, -9.0)], unk_id=0))
    inner.add_special_tokens([END_OF_TEXT])
    unigram = read_tokenizer_json(inner.to_str(), "unigram.json")
    assert unigram.encode("aéb").tolist() == [1, 0, 2] and unigram.unknown_id == 0
    with pytest.raises(UserError, match="cannot encode 'é'"):
        unigram.encode_prompt("aéb")


def test_characters_dropped_without_an_unknown_token_are_an_error():
    inner = Inner(models.BPE(vocab={"a": 0, "b": 1, END_OF_TEXT: 2}, merges=[]))
    inner.add_special_tokens([END_OF_TEXT])
    bpe = read_tokenizer_json(inner.to_str(), "bpe.json")
    for text in ("aéb", "aé", "éa", "aébé\n"):
        with pytest.raises(UserError, match="cannot encode 'é': "):
            bpe.encode(text)
    assert bpe.encode("a b\n").tolist() == [0, 1]  # white space alone may go


def test_ids_beyond_16_bits_come_out_whole():
    inner = Inner(models.WordLevel({f"w{i}": i for i in range(70_000)} | {END_OF_TEXT: 70_000}))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    wide = read_tokenizer_json(inner.to_str(), "wide.json")
    assert (wide.encode("w69999 w1").tolist(), wide.vocab_size) == ([69_999, 1], 70_001)


def test_the_vocabulary_reaches_to_the_largest_id_even_with_gaps():
    inner = Inner(models.WordLevel({"a": 0, "b": 500, END_OF_TEXT: 7}))
    assert read_tokenizer_json(inner.to_str(), "gaps.json").vocab_size == 501


def test_truncation_and_padding_of_the_file_do_not_apply():
    inner = Inner.from_str(char_tokenizer("ab"))
    inner.enable_truncation(2)
    inner.enable_padding(length=8)
    assert len(read_tokenizer_json(inner.to_str(), "t").encode("abab")) == 4


def test_a_normalizer_is_respected():
    inner = Inner.from_str(char_tokenizer("ab"))
    inner.normalizer = normalizers.Lowercase()
    assert read_tokenizer_json(inner.to_str(), "t").encode("AB").tolist() == [0, 1]


def test_the_end_token_may_have_another_name():
    inner = Inner(models.WordLevel({"a": 0, "</s>": 1}))
    with pytest.raises(UserError, match=r"has no token '<\|endoftext\|>' .* --eot_token="):
        read_tokenizer_json(inner.to_str(), "t")
    assert read_tokenizer_json(inner.to_str(), "t", "</s>").eot_id == 1


@pytest.mark.parametrize("content", [b"{}", b"not json", b"", b"\xff\xfe", b'{"model": 1}'])
def test_a_broken_file_is_an_error_naming_it(tmp_path, content):
    (tmp_path / "broken.json").write_bytes(content)
    with pytest.raises(UserError, match=r"broken\.json is not a tokenizer\.json"):
        open_tokenizer(str(tmp_path / "broken.json"))


def test_a_name_that_is_no_file_is_an_error():
    with pytest.raises(UserError, match="'gpt3' is neither gpt2, train, nor the path"):
        open_tokenizer("gpt3")


# --- identity and streams -----------------------------------------------------------------------------------------


def test_an_identity_makes_the_same_tokenizer_again(tmp_path, trained_json):
    for text in (trained_json, char_tokenizer("abc d'loweé", unknown="?")):
        (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
        first = open_tokenizer(str(tmp_path / "tokenizer.json"))
        stored = {key: value for key, value in first.identity.items() if key != "json"}
        for again in (load_tokenizer(first.identity), load_tokenizer(stored, tmp_path)):
            assert type(again) is type(first) and again.encode("low é").tolist() == first.encode("low é").tolist()
    with pytest.raises(UserError, match="is not the one that made the token files"):
        load_tokenizer(stored | {"sha256": "0" * 64}, tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"tokenizer\.json is missing"):
        load_tokenizer(stored, tmp_path)


@pytest.mark.parametrize("kind", ["gpt2", "trained", "chars"])
def test_a_stream_gives_the_text_piece_by_piece(kind, trained_json):
    text = "low 日本 👍🏽 café " if kind != "chars" else "abc é日"
    texts = {"gpt2": None, "trained": trained_json, "chars": char_tokenizer("abc é日")}
    tokenizer = read_tokenizer_json(texts[kind], "t") if texts[kind] else load_gpt2()
    stream = tokenizer.stream()
    pieces = [stream.put(token_id) for token_id in tokenizer.encode(text).tolist()]
    assert "".join(pieces) + stream.flush() == text and "\ufffd" not in "".join(pieces)


def test_an_unfinished_character_is_held_back_and_marked_at_the_end():
    gpt2 = load_gpt2()
    stream = gpt2.stream()
    ids = gpt2.encode("日").tolist()
    assert [stream.put(i) for i in ids[:-1]] == [""] * (len(ids) - 1)
    assert stream.flush() == "\ufffd"


# --- the optional fast encoder --------------------------------------------------------------------------------------


def texts_to_encode() -> list[str]:
    rng = random.Random(7)
    ranges = [(32, 127), (9, 14), (160, 880), (0x3040, 0x30FF), (0x4E00, 0x4F00), (0x1F300, 0x1F600), (0x300, 0x36F)]
    odd = ["".join(chr(rng.randint(*rng.choice(ranges))) for _ in range(rng.randint(1, 80))) for _ in range(2000)]
    runs = [part * count + "x" for part in " a\n-=ég" for count in (100, 399, 400, 500, 1024, 30_000)]
    return [ODD_TEXT, "", " ", " " * 300_000 + "x", "ab" * 50_000, "don't\n'll 've\r\n", *runs, *odd]


def test_riptoken_is_used_where_it_is_installed_and_gives_the_same_ids(trained_json):
    pytest.importorskip("riptoken")
    for tokenizer in (load_gpt2.__wrapped__(), read_tokenizer_json(trained_json, "tokenizer.json")):
        assert tokenizer.fast is not None
        for text in texts_to_encode():
            fast = tokenizer.encode(text)
            assert fast.dtype == np.uint32
            assert fast.tolist() == tokenizer.encoding.encode_ordinary(text), text[:80]


def test_a_run_of_399_bytes_is_seen_wherever_it_stands():
    words = "ab cd " * 100
    assert not any(module.has_long_run(text) for text in ("", "a", words, "x" * 199, f"{words}{'x' * 199}"))
    for place in range(300):
        for run in (" " * 399, "x" * 399, "\n" * 400):
            assert module.has_long_run(words[:place] + run) and module.has_long_run(words[:place] + run + words)


@pytest.mark.parametrize("fault", ["other ids", "refuses", "absent"])
def test_another_encoder_that_does_not_agree_is_not_used(monkeypatch, fault):
    def encode(text: str) -> list[int]:
        if fault == "refuses":
            raise OSError("no")
        return [*load_gpt2().encoding.encode_ordinary(text), 1]

    class CoreBPE:
        def __init__(self, *_: object) -> None:
            self.encode_ordinary = encode

    package = types.ModuleType("riptoken")
    if fault != "absent":
        package.CoreBPE = CoreBPE
    monkeypatch.setitem(sys.modules, "riptoken", package)
    tokenizer = load_gpt2.__wrapped__()
    assert tokenizer.fast is None and tokenizer.encode("Hello world").tolist() == [15496, 995]


def test_an_encoder_that_agrees_is_used(monkeypatch):
    calls = []

    class CoreBPE:
        def __init__(self, ranks: dict, special: dict, pattern: str) -> None:
            assert len(ranks) == 50256 and special == {} and "\\p{L}" in pattern

        def encode_ordinary(self, text: str) -> list[int]:
            calls.append(text)
            return load_gpt2().encoding.encode_ordinary(text)

    package = types.ModuleType("riptoken")
    package.CoreBPE = CoreBPE
    monkeypatch.setitem(sys.modules, "riptoken", package)
    assert load_gpt2.__wrapped__().encode("Hello world").tolist() == [15496, 995] and calls[-1] == "Hello world"
