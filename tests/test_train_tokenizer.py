"""tools.train_tokenizer: what it writes, its table and advice, and the way of the tokenizer through the programs."""

from __future__ import annotations

import json
import random
import shlex
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Inner

import prepare
from tokenizer import CHAT_TOKENS, END_OF_TEXT, TiktokenTokenizer, open_tokenizer, read_tokenizer_json, train_tokenizer
from tools import train_tokenizer as tool

WORDS = "Haus Baum Straße König über schön gehen sehen während Bücher der die das und nicht Fluss Übung größer läuft".split()


def german(documents: int, seed: int = 1) -> list[str]:
    """Documents of made-up German sentences."""
    rng = random.Random(seed)
    compounds = WORDS + [one + other.lower() for one in WORDS[:12] for other in WORDS[:12]]
    return [" ".join(rng.choices(compounds, k=120)).capitalize() + "." for _ in range(documents)]


@pytest.fixture
def corpus(tmp_path, monkeypatch) -> Path:
    """A folder, entered, with a German corpus in corpus.jsonl."""
    monkeypatch.chdir(tmp_path)
    rows = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in german(200))
    Path("corpus.jsonl").write_text(rows, encoding="utf-8")
    return tmp_path


def train(*flags: str) -> int:
    """Runs the tool."""
    return tool.main(["--input=corpus.jsonl", "--out=t.json", "--vocab_size=400", "--table=300,350", *flags])


def test_the_file_is_byte_level_bpe_with_the_special_tokens(corpus) -> None:
    """H71, H72, H74: all bytes, no leading space, the end token and the chat tokens, none of them found in a text."""
    assert train() == 0
    tokenizer = open_tokenizer("t.json")
    spec = json.loads(Path("t.json").read_text(encoding="utf-8"))
    assert [token["content"] for token in spec["added_tokens"]] == [END_OF_TEXT, *CHAT_TOKENS]
    assert all(token["special"] for token in spec["added_tokens"]) and not spec["pre_tokenizer"]["add_prefix_space"]
    assert isinstance(tokenizer, TiktokenTokenizer) and tokenizer.vocab_size == 400
    for text in ("low café 日本 ZZ", "\t a\r\n", "👍🏽", " Haus", "Haus", f"a{END_OF_TEXT}b <|user|> c"):
        ids = tokenizer.encode(text).tolist()
        assert tokenizer.decode(ids) == text and not set(ids) & {0, 1, 2, 3}
    assert tokenizer.encode("Haus").tolist() != tokenizer.encode(" Haus").tolist()


def test_the_same_corpus_gives_the_same_file(corpus) -> None:
    assert train() == 0
    first = Path("t.json").read_bytes()
    assert train("--overwrite=true") == 0 and Path("t.json").read_bytes() == first
    assert train() == 2 and Path("t.json").read_bytes() == first


def test_a_smaller_vocabulary_is_the_start_of_a_larger_one() -> None:
    """The table's tokenizers are those that training to their sizes would give."""
    texts = german(50)
    large = train_tokenizer(iter(texts), 420)
    for size in (260, 261, 300, 420):
        assert tool.cut_vocabulary(large, size) == train_tokenizer(iter(texts), size)


def test_the_table_measures_held_out_text(corpus, capsys) -> None:
    """Tokens per word and bytes per token by hand, GPT-2 beside them, unused entries counted."""
    assert train() == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines if line[:10].strip().replace(",", "").isdigit()]
    assert [row[0] for row in rows] == ["50,257", "300", "350", "400"]
    assert [float(row[1]) for row in rows[1:]] == sorted((float(row[1]) for row in rows[1:]), reverse=True)
    config = tool.TokenizerConfig(input="corpus.jsonl")
    training, held_out = tool.draw_texts(config)
    assert not set(training) & set(held_out) and set(training) | set(held_out) == set(german(200)) and held_out
    tokenizer = open_tokenizer("t.json")
    ids = [token for text in held_out for token in tokenizer.encode(text).tolist()]
    text = "".join(held_out)
    assert float(rows[3][1]) == pytest.approx(len(ids) / sum(len(text.split()) for text in held_out), abs=5e-4)
    assert float(rows[3][2]) == pytest.approx(len(text.encode()) / len(ids), abs=5e-4)
    used = {token for text in training + held_out for token in tokenizer.encode(text).tolist()}
    assert int(rows[3][3]) == 400 - 4 - len(used)
    assert "fewer tokens than in GPT-2's" in "\n".join(lines) and lines[-1].startswith("next: ./prepare_data.sh ")


def test_advice_names_what_is_wrong(corpus, capsys) -> None:
    assert train("--vocab_size=270", "--table=none") == 0
    assert "tokens per word are more than 1.4" in capsys.readouterr().out
    assert train("--vocab_size=900", "--overwrite=true") == 0
    out = capsys.readouterr().out
    assert "tokens per word are more" not in out and "of 900 entries, this corpus yields no more" in out
    assert f"{open_tokenizer('t.json').vocab_size:,}" in out


def test_text_without_spaces_is_not_judged_by_words(corpus, capsys) -> None:
    Path("corpus.jsonl").write_text(
        json.dumps({"text": "这条河从北方的山谷流出穿过一片宽阔的平原" * 200}) + "\n", encoding="utf-8"
    )
    assert train() == 0
    out = capsys.readouterr().out
    assert "compare bytes per token" in out and "tokens per word are more" not in out


def test_a_large_corpus_gives_an_even_sample(corpus, monkeypatch) -> None:
    """Bounded whatever the size, from all over the corpus, long documents in parts that end with a line."""
    texts = [f"{number:06}\n" * 30 for number in range(600)]
    Path("corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    monkeypatch.setattr(tool, "UNIT", 100)
    monkeypatch.setattr(tool, "thin_out", lambda texts, characters: prepare.thin_out(texts, characters // 50))
    training, held_out = tool.draw_texts(tool.TokenizerConfig(input="corpus.jsonl", sample_mb=1, held_out_mb=1))
    assert sum(map(len, training)) <= 20_000 and 0 < sum(map(len, held_out)) <= 20_000
    assert all(len(text) <= 100 and text.endswith("\n") for text in training)
    numbers = [int(text[:6]) for text in training]
    assert numbers[0] < 60 and numbers[-1] > 540 and numbers == sorted(numbers)


def test_one_file_is_enough(corpus) -> None:
    Path("corpus.txt").write_text("\n".join(german(40)), encoding="utf-8")
    assert tool.main(["--input=corpus.txt", "--out=one.json", "--vocab_size=300", "--table=none"]) == 0
    assert open_tokenizer("one.json").vocab_size == 300


@pytest.mark.parametrize(
    ("flag", "part"),
    [
        ("--vocab_size=259", "vocab_size=259"),
        ("--sample_mb=0", "sample_mb=0 is"),
        ("--held_out_mb=0", "held_out_mb=0 is"),
        ("--out=.", "is a folder"),
        ("--out=corpus.jsonl/t.json", "corpus.jsonl"),
        ("--table=8000,x", "table="),
        ("--held_out=0", "held_out=0"),
        ("--document=page", "heading"),
        ("--input=nothing/", "nothing"),
        ("--text_column=body", "no field 'body'"),
    ],
)
def test_wrong_settings_are_told(corpus, capsys, flag: str, part: str) -> None:
    assert train(flag) == 2
    output, errors = capsys.readouterr()
    assert "training on" not in output
    assert errors.startswith("error: ") and part in errors and errors.count("\n") == 1 and not Path("t.json").exists()


def test_an_empty_corpus_is_told(corpus, capsys) -> None:
    Path("corpus.jsonl").write_text('{"text": ""}\n', encoding="utf-8")
    assert train() == 2 and "no text" in capsys.readouterr().err


def test_odd_unicode_has_the_same_ids_in_both_engines(corpus) -> None:
    """tiktoken was measured faster; it may be used because no text tells the two apart."""
    assert train("--vocab_size=500") == 0
    text = Path("t.json").read_text(encoding="utf-8")
    fast, inner = read_tokenizer_json(text, "t"), Inner.from_str(text)
    inner.encode_special_tokens = True
    rng = random.Random(5)
    pools = [range(0x20, 0x7F), range(0xA0, 0x250), range(0x300, 0x370), range(0x2000, 0x2070), range(0x4E00, 0x4E80)]
    pools += [
        range(0x1F300, 0x1F650),
        range(0x1C, 0x20),
        [9, 10, 13, 0x85, 0xA0, 0x2028, 0x3000],
        [ord("'"), *map(ord, "stld ")],
    ]
    for _ in range(3000):
        odd = "".join(chr(rng.choice(rng.choice(pools))) for _ in range(rng.randint(1, 24)))
        assert fast.encode(odd).tolist() == inner.encode(odd, add_special_tokens=False).ids, repr(odd)


def test_the_next_command_reads_the_corpus_the_same_way(corpus, capsys) -> None:
    rows = "".join(json.dumps({"body": text}) + "\n" for text in german(20))
    Path("my rows.jsonl").write_text(rows, encoding="utf-8")
    assert train("--input=my rows.jsonl", "--text_column=body") == 0
    command = capsys.readouterr().out.rstrip("\n").rpartition("next: ")[2].replace("NAME", "x")
    assert prepare.main([*shlex.split(command)[1:], "--num_proc=1"]) == 0


def test_prepare_takes_it_on(corpus) -> None:
    """The end of a document is the only end token; the vocabulary is the real one."""
    assert train() == 0
    Path("docs.jsonl").write_text(
        "".join(json.dumps({"text": f"{t}{END_OF_TEXT}"}) + "\n" for t in german(20)), encoding="utf-8"
    )
    assert prepare.main(["--dataset=g", "--input=docs.jsonl", "--tokenizer=t.json", "--num_proc=1"]) == 0
    meta = json.loads(Path("data/g/meta.json").read_text(encoding="utf-8"))
    from conftest import read_ids

    ids = read_ids(Path("data/g"), "train") + read_ids(Path("data/g"), "val")
    assert meta["vocab_size"] == 400 and ids.count(meta["eot_id"]) == 20


@pytest.mark.long
def test_the_documented_sequence_writes_spanish(tmp_path, monkeypatch, capsys) -> None:
    """clean_corpus → train_tokenizer → prepare → train → sample, on Debian's Spanish sayings, small, on the CPU."""
    pytest.importorskip("datatrove", reason="pip install -r tools/requirements.txt")
    pytest.importorskip("fasttext")
    from test_clean import FORTUNES, fortunes

    if not FORTUNES.is_dir():
        pytest.skip("as root: tests/debian.sh (apt-get install fortunes-es)")
    import sample
    import train
    from tools import clean_corpus
    from tools.corpus_filters import find_language_model

    monkeypatch.chdir(tmp_path)
    Path("raw").mkdir()
    for number, text in enumerate(fortunes()):
        Path(f"raw/{number:03}.txt").write_text(text, encoding="utf-8")
    assert clean_corpus.main(["--input=raw/", "--out=clean", "--languages=es", "--workers=1"]) == 0
    flags = ["--input=clean/corpus", "--out=clean/tokenizer.json", "--vocab_size=2000", "--table=none"]
    assert tool.main(flags) == 0
    flags = ["--dataset=sayings", "--input=clean/corpus", "--tokenizer=clean/tokenizer.json", "--val_fraction=0.05"]
    assert prepare.main([*flags, "--num_proc=1"]) == 0
    shape = "--n_layer=2 --n_head=4 --n_embd=128 --block_size=64 --batch_size=16 --gradient_accumulation_steps=1 --dropout=0"
    steps = (
        "--max_iters=500 --lr_decay_iters=500 --warmup_iters=20 --eval_interval=500 --eval_iters=4 --log_interval=100"
    )
    place = "--dataset=sayings --out_dir=out --device=cpu --dtype=float32 --compile=false --learning_rate=4e-3 --min_lr=4e-4"
    assert train.main([*place.split(), *shape.split(), *steps.split()]) == 0
    capsys.readouterr()
    flags = "--out_dir=out --max_new_tokens=300 --device=cpu --num_samples=2 --temperature=0.6 --top_k=40"
    assert sample.main(["--start=El ", *flags.split()]) == 0
    written = " ".join(capsys.readouterr().out.split())
    print(written)
    from fasttext.FastText import _FastText

    labels, scores = _FastText(str(find_language_model())).predict(written, k=1)
    assert labels[0] == "__label__es" and scores[0] > 0.8, written
