"""prepare.py and the corpora it reads: every container, every document rule, exact ids, and no half-made data."""

from __future__ import annotations

import collections
import gzip
import io
import json
import os
import pty
import random
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from conftest import ROOT, SHARED, TINY, assert_loud, char_tokenizer, read_ids, run_program
from test_tokenizer import ODD, random_text

import corpus
import prepare
import textfile
from configurator import UserError
from corpus import Corpus
from dataset import MARKER, TokenData, read_meta
from textfile import PIECE, cut_pieces, undo_wikitext_spacing
from tokenizer import load_gpt2, load_tokenizer, read_tokenizer_json, train_tokenizer

EOT = 50256


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """Every test works in a folder of its own; SIGTERM is pytest's again afterwards."""
    monkeypatch.chdir(tmp_path)
    handler = signal.getsignal(signal.SIGTERM)
    yield tmp_path
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def prep(capsys):
    """Runs prepare.main on data/x; returns exit code and output."""

    def run(*flags: str) -> SimpleNamespace:
        capsys.readouterr()
        defaults = {"dataset": "x", "num_proc": "1", "input": "in.txt"}
        given = {flag[2:].split("=")[0] for flag in flags}
        code = prepare.main([*(f"--{k}={v}" for k, v in defaults.items() if k not in given), *flags])
        out = capsys.readouterr()
        return SimpleNamespace(returncode=code, stdout=out.out, stderr=out.err)

    return run


def write(name: str, content: str | bytes) -> str:
    Path(name).write_bytes(content.encode() if isinstance(content, str) else content)
    return name


def write_jsonl(name: str, texts) -> str:
    return write(name, "".join(json.dumps({"text": text}) + "\n" for text in texts))


def read_corpus(path: str, **settings) -> list[str]:
    """The documents of a corpus, put together from their pieces."""
    documents, held = [], ""
    for _, text, ends in Corpus("x", path, **settings):
        held += text
        if ends:
            documents.append(held)
            held = ""
    assert not held
    return documents


def prepared_documents(*splits: str, folder: str = "data/x") -> list[str]:
    """The documents in the token files, decoded."""
    meta = read_meta(Path(folder))
    tokenizer = load_tokenizer(meta["tokenizer"], Path(folder))
    documents, ids = [], []
    for split in splits:
        for token_id in read_ids(Path(folder), split):
            if token_id == meta["eot_id"]:
                documents.append(tokenizer.decode(ids))
                ids = []
            else:
                ids.append(token_id)
    assert not ids
    return documents


def file_bytes(folder: str = "data/x") -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


# --- collected cases ------------------------------------------------------------------------------------------------


def test_end_of_text_written_out_is_text(prep):
    """H01: the marker in a document is plain text; the id stands at the end alone."""
    write("in.txt", "one<|endoftext|>two")
    assert prep("--val_fraction=0").returncode == 0
    assert read_ids(Path("data/x"), "train") == [505, 27, 91, 437, 1659, 5239, 91, 29, 11545, EOT]


def wordlevel(words: int, **special) -> str:
    from tokenizers import Tokenizer, models, pre_tokenizers

    inner = Tokenizer(models.WordLevel({f"w{i}": i for i in range(words)} | special))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return inner.to_str()


def test_ids_beyond_16_bits_are_kept_whole(prep):
    """H02: 70,000 words; the width is recorded beside the ids."""
    write("wide.json", wordlevel(70_000, **{"<|endoftext|>": 70_000}))
    write("in.txt", "w69999 w1")
    assert prep("--tokenizer=wide.json", "--val_fraction=0").returncode == 0
    assert np.fromfile("data/x/train.bin", dtype="<u4").tolist() == [69_999, 1, 70_000]
    assert read_meta(Path("data/x"))["dtype"] == "uint32"
    write("narrow.json", wordlevel(65_535, **{"<|endoftext|>": 65_535}))
    write("in.txt", "w65534 w1")
    assert prep("--tokenizer=narrow.json", "--val_fraction=0", "--overwrite=true").returncode == 0
    assert np.fromfile("data/x/train.bin", dtype="<u2").tolist() == [65_534, 1, 65_535]
    assert read_meta(Path("data/x"))["dtype"] == "uint16"


def test_one_document_is_split_by_tokens(prep):
    """H04: both bins non-empty, together the document's ids and the end token."""
    text = " ".join(["word"] * 2000)
    write_jsonl("in.jsonl", [text])
    done = prep("--input=in.jsonl", "--val_fraction=0.1")
    assert done.returncode == 0 and "the last 10% of the tokens are val" in done.stdout
    train, val = read_ids(Path("data/x"), "train"), read_ids(Path("data/x"), "val")
    assert [*train, *val] == [*load_gpt2().encode(text).tolist(), EOT] and (len(train), len(val)) == (1801, 200)


def test_more_workers_than_documents(prep):
    """H05: eight workers for three documents give the same files as one."""
    write_jsonl("in.jsonl", ["a b c", "d e f", "g h i"])
    assert prep("--input=in.jsonl", "--num_proc=8").returncode == 0
    eight = file_bytes()
    assert prep("--input=in.jsonl", "--num_proc=1", "--overwrite=true").returncode == 0
    assert file_bytes() == eight and len(eight["train.bin"]) > 0 and len(eight["val.bin"]) > 0


def start_prepare(*flags: str) -> subprocess.Popen:
    """prepare.py in a process of its own, at work on its files."""
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "prepare.py"), "--dataset=x", *flags],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 30
    while not (Path("data/x/train.bin.tmp").exists() and Path("data/x/train.bin.tmp").stat().st_size > 100_000):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    return process


def gone(processes: list[psutil.Process], seconds: float) -> bool:
    return not psutil.wait_procs(processes, timeout=seconds)[1]


@pytest.mark.slow
def test_a_killed_run_is_never_taken_for_finished(prep):
    """H06: after SIGKILL no final name is there, train.py refuses, no worker lives on, and a rerun is as if undisturbed."""
    write_jsonl("in.jsonl", (f"{number} some words and more of them " * 200 for number in range(3000)))  # 21 MB
    flags = ["--input=in.jsonl", "--tokenizer=gpt2"]
    process = start_prepare(*flags, "--num_proc=2")
    workers = psutil.Process(process.pid).children(recursive=True)
    assert len(workers) >= 2
    process.kill()
    process.communicate()
    assert gone(workers, 5)
    assert sorted(os.listdir("data/x")) == [MARKER, "train.bin.tmp", "val.bin.tmp"]
    tiny = [flag for flag in TINY if not flag.startswith("--dataset")]
    assert_loud(run_program("train.py", *tiny, "--dataset=x", cwd=Path()), "data/x", "unfinished", "prepare.py")
    again = prep(*flags)
    assert again.returncode == 0 and "unfinished: making it anew" in again.stdout
    assert sorted(os.listdir("data/x")) == ["meta.json", "train.bin", "val.bin"]
    assert prep(*flags, "--data_dir=undisturbed").returncode == 0
    assert file_bytes() == file_bytes("undisturbed/x")


@pytest.mark.slow
def test_a_killed_overwrite_leaves_the_old_data_to_train_on(prep):
    """They are whole until the new ones are; and what was asked for is not taken for done."""
    write("in.txt", "some text " * 100)
    prep()
    before = file_bytes()
    write_jsonl("in.jsonl", (f"{number} some words and more of them " * 200 for number in range(3000)))
    process = start_prepare("--input=in.jsonl", "--overwrite=true", "--num_proc=1")
    process.kill()
    process.communicate()
    assert {name: data for name, data in file_bytes().items() if name in before} == before
    assert TokenData(Path("data/x"), 8).tokens == {"train": 182, "val": 20}
    assert_loud(prep("--input=in.jsonl"), "data/x", "the input files changed", "--overwrite=true")
    assert prep("--input=in.jsonl", "--overwrite=true").returncode == 0
    assert sorted(os.listdir("data/x")) == ["meta.json", "train.bin", "val.bin"]


def test_a_row_without_text_is_named_or_skipped_and_counted(prep):
    """H07: file, line 2 and the fields found; or 2 documents and `1 row without text skipped`."""
    write("in.jsonl", '{"text":"a b"}\n{"title":"x"}\n{"text":"c d"}\n')
    assert_loud(prep("--input=in.jsonl"), "in.jsonl", "line 2", "'title'", "--skip_bad_rows=true", "--text_column=")
    assert not Path("data/x").exists()
    done = prep("--input=in.jsonl", "--skip_bad_rows=true", "--val_fraction=0")
    assert done.returncode == 0 and "1 row without `text` skipped" in done.stdout
    assert prepared_documents("train") == ["a b", "c d"]


def test_unicode_line_separators_do_not_cut_rows(prep):
    """H08: U+2028 and U+0085 inside a JSON string."""
    write("in.jsonl", '{"text":"a\u2028b"}\n{"text":"c\u0085d"}\n')
    assert prep("--input=in.jsonl", "--val_fraction=0").returncode == 0
    ids = read_ids(Path("data/x"), "train")
    assert ids[:5] == [64, 447, 101, 65, EOT] and ids[6:8] == [126, 227] and ids.count(EOT) == 2


def test_unicode_line_separators_do_not_cut_lines_either():
    texts = ["a\u2028b", "c\u0085d\x0be\x0cf\x1cg"]
    write("in.csv", "text\n" + "\n".join(texts) + "\n")
    write("in.txt", "\n".join(texts))
    assert read_corpus("in.csv") == read_corpus("in.txt", document="line") == texts


@pytest.mark.parametrize("name", ["in.txt", "in.jsonl", "in.csv"])
def test_the_locale_does_not_matter(name):
    """H09: the same files, [66, 1878, 2634, ...], under an ASCII locale and under UTF-8; the tokenizer file, too."""
    write("in.txt", "café")
    write("in.jsonl", '{"text":"café"}\n')
    write("in.csv", "text\ncafé\n")
    write("chars.json", char_tokenizer("caféx"))
    ascii_locale = {"PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "LC_ALL": "C"}
    found = []
    for env in (ascii_locale, {"PYTHONUTF8": "1", "LC_ALL": "C.UTF-8"}):
        for tokenizer in ("gpt2", "chars.json") if name == "in.txt" else ("gpt2",):
            flags = [f"--input={name}", f"--tokenizer={tokenizer}", "--dataset=x", "--num_proc=1", "--overwrite=true"]
            done = run_program("prepare.py", *flags, "--val_fraction=0", cwd=Path(), env=env)
            assert done.returncode == 0, done.stderr
            found.append(file_bytes())
            if tokenizer == "gpt2":
                assert read_ids(Path("data/x"), "train") == [66, 1878, 2634, EOT]
    assert found[: len(found) // 2] == found[len(found) // 2 :]


def test_one_giant_word_between_documents(prep):
    """H10: 100,000 random letters, in under 20 s, and back."""
    rng = random.Random(0)
    giant = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(100_000))
    write_jsonl("in.jsonl", ["one", giant, "two"])
    started = time.monotonic()
    assert prep("--input=in.jsonl", "--val_fraction=0").returncode == 0
    assert time.monotonic() - started < 20
    assert prepared_documents("train") == ["one", giant, "two"]
    assert len(load_gpt2().encode(giant)) == 59_736


def test_a_lone_surrogate_becomes_a_replacement_character(prep):
    """H11: under both kinds of tokenizer, counted, and other rows untouched."""
    write("in.jsonl", '{"text":"ok \\ud83d end"}\n{"text":"fine \\ud83d\\ude00"}\n')
    done = prep("--input=in.jsonl", "--val_fraction=0")
    assert done.returncode == 0 and "1 lone surrogate replaced" in done.stdout
    assert read_ids(Path("data/x"), "train")[:4] == [482, 20543, 886, EOT]
    assert prepared_documents("train")[1] == "fine 😀"
    write("chars.json", char_tokenizer("ok endfi😀\ufffd"))
    done = prep("--input=in.jsonl", "--val_fraction=0", "--tokenizer=chars.json", "--overwrite=true")
    assert done.returncode == 0 and "1 lone surrogate replaced" in done.stdout
    assert prepared_documents("train") == ["ok \ufffd end", "fine 😀"]


def test_empty_documents_are_dropped_and_counted(prep):
    """H12: never a bare end token."""
    write_jsonl("in.jsonl", ["hello world", "", "Hello world"])
    done = prep("--input=in.jsonl", "--val_fraction=0")
    assert done.returncode == 0 and "1 empty document dropped" in done.stdout
    assert read_ids(Path("data/x"), "train") == [31373, 995, EOT, 15496, 995, EOT]
    write_jsonl("in.jsonl", ["hello world", "", " \n\t", "Hello world"])
    done = prep("--input=in.jsonl", "--overwrite=true", "--val_fraction=0.5")
    assert "2 empty documents dropped" in done.stdout
    both = read_ids(Path("data/x"), "train"), read_ids(Path("data/x"), "val")
    assert sorted(both) == [[15496, 995, EOT], [31373, 995, EOT]]


def test_another_tokenizer_makes_other_files(prep):
    """H13: an error that names the difference; then all ids below 300, metadata with the tokenizer and its hash."""
    write("in.txt", "low lower lowest " * 50)
    text = train_tokenizer(iter(["low lower lowest"]), 300)
    write("small.json", text)
    assert prep().returncode == 0 and max(read_ids(Path("data/x"), "train")) > 300
    assert_loud(prep("--tokenizer=small.json"), "tokenizer was 'gpt2', now 'small.json'", "--overwrite=true")
    assert read_meta(Path("data/x"))["tokenizer"]["kind"] == "gpt2"
    assert prep("--tokenizer=small.json", "--overwrite=true").returncode == 0
    meta, trained = read_meta(Path("data/x")), read_tokenizer_json(text, "small.json")
    assert max(*read_ids(Path("data/x"), "train"), *read_ids(Path("data/x"), "val")) < 300
    assert meta["tokenizer"]["name"] == "small.json" and meta["tokenizer"]["sha256"] == trained.identity["sha256"]
    assert meta["vocab_size"] == trained.vocab_size and meta["eot_id"] == trained.eot_id
    assert Path("data/x/tokenizer.json").read_text(encoding="utf-8") == text
    write("small.json", train_tokenizer(iter(["other words here"]), 300))  # same name, other content
    assert_loud(prep("--tokenizer=small.json"), "tokenizer_sha256 was", "--overwrite=true")


def test_equal_documents_lie_on_one_side(prep):
    """H70: 50 of 100 documents identical: never on both sides, apart from case and white space too; the share is kept."""
    for seed in range(6):
        texts = [f"document number {i}" for i in range(950)] + ["always the same", "Always  the\nsame"] * 25
        texts += [f"DOCUMENT NUMBER {i}" for i in range(0, 950, 10)]
        random.Random(seed).shuffle(texts)
        write_jsonl("in.jsonl", texts)
        done = prep("--input=in.jsonl", f"--seed={seed}", "--overwrite=true")
        train, val = ({" ".join(t.lower().split()) for t in prepared_documents(split)} for split in ("train", "val"))
        assert not train & val and len(train | val) == 951
        assert 100 <= len(prepared_documents("val")) <= 160 and "equal to a validation" not in done.stdout


def test_the_same_documents_are_held_out_every_time(tmp_path):
    """The draw does not depend on Python's salted hashes."""
    write_jsonl("in.jsonl", [f"document {i % 70}" for i in range(200)])
    flags = ["--dataset=x", "--input=in.jsonl", "--overwrite=true", "--num_proc=1"]
    found = []
    for seed in ("1", "2"):
        assert run_program("prepare.py", *flags, cwd=Path.cwd(), env={"PYTHONHASHSEED": seed}).returncode == 0
        found.append(prepared_documents("val"))
    assert found[0] == found[1] and len(found[0]) >= 20


def test_sides_of_different_languages_are_told(prep):
    """A warning with the share of letters that differ; none for two samples of one corpus."""
    rng = random.Random(2)
    german, english = ("über schön der die das Straße König nicht zwölf", "the quick with that which would know why")
    rows = [" ".join(rng.choices(english.split(), k=2000)) for _ in range(60)]
    write_jsonl("in.jsonl", rows)
    assert "of the letters differ" not in prep("--input=in.jsonl").stdout
    held = prepared_documents("val")
    assert len(held) == 6
    write_jsonl("in.jsonl", [" ".join(rng.choices(german.split(), k=2000)) if row in held else row for row in rows])
    done = prep("--input=in.jsonl", "--overwrite=true")
    assert "percent of the letters differ between training and validation" in done.stdout


def test_copies_of_documents_in_several_pieces_lie_on_one_side(prep):
    for name in ("a.txt", "b.txt", "c.txt"):
        write(name, ("word " if name < "c" else "other ") * 500_000)
    assert "equal to" not in prep("--input=a.txt,b.txt,c.txt", "--val_fraction=0.5").stdout
    assert len(prepared_documents("train")) + len(prepared_documents("val")) == 3


@pytest.mark.parametrize("text", ["low café 日本 ZZ\t\r\n👍🏽", "low", " low"])
def test_a_tokenizer_trained_on_the_way_writes_every_text(prep, text):
    """H71, H72: prepared with a tokenizer of three words, other text still round trips."""
    write("in.txt", "low lower lowest")
    assert prep("--tokenizer=train", "--vocab_size=300").returncode == 0
    tokenizer = load_tokenizer(read_meta(Path("data/x"))["tokenizer"], Path("data/x"))
    assert tokenizer.decode(tokenizer.encode(text).tolist()) == text
    assert tokenizer.encode("low").tolist() != tokenizer.encode(" low").tolist()


def test_a_vocabulary_that_cannot_be_reached_is_reported_and_used(prep):
    """H73: `N of 1,000`, and the real size in meta.json."""
    write("in.txt", "low lower lowest")
    done = prep("--tokenizer=train", "--vocab_size=1000")
    meta = read_meta(Path("data/x"))
    assert f"{meta['vocab_size']} of 1,000 entries" in done.stdout and 257 < meta["vocab_size"] < 300


def test_a_foreign_tokenizer_without_end_token_is_refused(prep):
    """H74: the error names the option to choose one, which then works."""
    write("words.json", wordlevel(3, **{"</s>": 3}))
    write("in.txt", "w0 w2")
    assert_loud(prep("--tokenizer=words.json"), "words.json", "--eot_token=")
    assert not Path("data/x").exists()
    assert prep("--tokenizer=words.json", "--eot_token=</s>", "--val_fraction=0").returncode == 0
    assert read_ids(Path("data/x"), "train") == [0, 2, 3]
    assert read_meta(Path("data/x"))["tokenizer"]["eot_token"] == "</s>"


# --- containers -----------------------------------------------------------------------------------------------------

TEXTS = ["naïve one\ntwo\n", 'quote " comma , 日本\n\nend']
PACK = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress, ".GZ": gzip.compress}


def csv_of(texts) -> str:
    return "id,text\r\n" + "".join(f'{i},"{t.replace(chr(34), chr(34) * 2)}"\r\n' for i, t in enumerate(texts))


def parquet_of(column) -> bytes:
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"id": range(len(column)), "text": column}), buffer)
    return buffer.getvalue()


CONTAINERS = {
    "rows.jsonl": "".join(json.dumps({"id": 1, "text": t}, ensure_ascii=False) + "\n" for t in TEXTS).encode(),
    "crlf.jsonl": "\r\n\r\n".join(json.dumps({"text": t.replace("\n", "\r\n")}) for t in TEXTS).encode(),
    "strings.jsonl": "".join(json.dumps(t) + "\n" for t in TEXTS).encode(),
    "array.json": json.dumps([{"text": t} for t in TEXTS], indent=1).encode(),
    "lines.json": "".join(json.dumps({"text": t}) + "\n" for t in TEXTS).encode(),
    "rows.csv": csv_of(TEXTS).encode(),
    "rows.parquet": parquet_of(TEXTS),
    "words.parquet": parquet_of(pyarrow.array(TEXTS).dictionary_encode()),
    "large.parquet": parquet_of(pyarrow.array(TEXTS, pyarrow.large_string())),
    "bytes.parquet": parquet_of([t.encode() for t in TEXTS]),
}


@pytest.mark.parametrize("packed", PACK)
@pytest.mark.parametrize("name", CONTAINERS)
def test_rows_of_every_container(name, packed):
    write(name + packed, PACK[packed](CONTAINERS[name]))
    assert read_corpus(name + packed) == TEXTS


@pytest.mark.parametrize("packed", PACK)
@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.log", "noending"])
def test_text_files_of_every_kind(name, packed):
    write(name + packed, PACK[packed]("naïve\r\none\rtwo\r\n".encode()))
    assert read_corpus(name + packed) == ["naïve\none\ntwo\n"]


def test_one_object_in_a_json_file_is_one_document():
    write("one.json", '{\n "text": "a",\n "more": {"text": "b"}\n}\n')
    assert read_corpus("one.json") == ["a"]


@pytest.mark.parametrize("packed", PACK)
@pytest.mark.parametrize("name", [name for name in CONTAINERS if not name.endswith("parquet")] + ["plain.txt"])
def test_byte_order_marks_go(name, packed):
    content = CONTAINERS.get(name, TEXTS[0].encode())
    write(name + packed, PACK[packed](b"\xef\xbb\xbf" + content))
    assert read_corpus(name + packed) == (TEXTS if name in CONTAINERS else TEXTS[:1])


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_several_packed_members_are_one_file(pack, suffix):
    name = f"m{suffix}" + (".gz" if pack is gzip.compress else ".zst")
    content = TEXTS[0].encode() if suffix == ".txt" else json.dumps({"text": TEXTS[0]}).encode()
    write(name, b"".join(pack(content[i : i + 5]) for i in range(0, len(content), 5)))
    assert read_corpus(name) == TEXTS[:1]


@pytest.mark.parametrize("cut", [1, 4, 1000])
@pytest.mark.parametrize("name", ["a.txt.gz", "a.txt.zst", "a.jsonl.gz", "a.parquet.gz", "a.parquet", "a.json.gz"])
def test_a_file_cut_short_is_refused(prep, name, cut):
    text = random.Random(0).randbytes(3_000_000).hex()
    rows = {".txt": text, ".jsonl": json.dumps({"text": text}), ".json": json.dumps([{"text": text}])}
    content = parquet_of([text]) if "parquet" in name else rows["." + name.split(".")[1]].encode()
    write(name, PACK[name[name.index(".", 2) :] if name.count(".") > 1 else ""](content)[:-cut])
    assert_loud(prep(f"--input={name}", "--skip_bad_rows=true"), name, "read")
    assert not Path("data/x").exists()


def test_damage_inside_an_archive_is_refused(prep):
    packed = bytearray(gzip.compress(b"some text\n" * 1000))
    packed[-6] ^= 1  # the checksum
    write("a.txt.gz", bytes(packed))
    assert_loud(prep("--input=a.txt.gz"), "a.txt.gz")
    write("b.txt.gz", b"not packed at all")
    assert_loud(prep("--input=b.txt.gz"), "b.txt.gz")


@pytest.mark.parametrize("content", ["[1, 2", "nonsense", '{"text": "a"', '{"text": "a"}\n{"text"', "[" * 100_000])
def test_broken_json_is_refused(prep, content):
    write("a.json", content)
    assert_loud(prep("--input=a.json"), "a.json", "not JSON")


@pytest.mark.parametrize(
    "row", ["{", "null", "3", '{"text": null}', '{"text": 5}', '{"text": ["a"]}', "[]", "[" * 99_999]
)
def test_rows_that_hold_no_text_are_refused_or_skipped(prep, row):
    write("in.jsonl", f'{{"text": "a"}}\n\n{row}\n{{"text": "b"}}\n')
    assert_loud(prep("--input=in.jsonl"), "in.jsonl, line 3", "--skip_bad_rows=true")
    assert prep("--input=in.jsonl", "--skip_bad_rows=true", "--val_fraction=0").returncode == 0
    assert prepared_documents("train") == ["a", "b"]


def test_broken_csv_is_refused(prep):
    write("quote.csv", 'text\n"never closed\nmore\n')
    assert_loud(prep("--input=quote.csv"), "quote.csv, line ", "not CSV")
    write("comma.csv", "id,text\n1,hello, world\n2,fine\n")  # ", world" would be lost
    assert_loud(prep("--input=comma.csv"), "comma.csv, line 2", "more fields", "--skip_bad_rows=true")
    assert read_corpus("comma.csv", skip_bad_rows=True) == ["fine"]
    write("short.csv", "id,text\n1\n2,fine\n")
    assert_loud(prep("--input=short.csv"), "short.csv, line 2", "null, not text")


@pytest.mark.parametrize("name", ["rows.csv", "rows.parquet", "rows.jsonl", "array.json"])
def test_a_missing_column_names_those_there(prep, name):
    write(name, CONTAINERS[name])
    assert_loud(prep(f"--input={name}", "--text_column=body"), name, "'body'", "'text'", "--text_column=")


@pytest.mark.parametrize("name", ["rows.csv", "rows.parquet", "rows.jsonl", "array.json"])
def test_text_column_names_the_field(name):
    renamed = {"rows.parquet": parquet_of(TEXTS)}.get(name, CONTAINERS[name].replace(b"text", b"body"))
    if name == "rows.parquet":
        buffer = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.table({"text": ["wrong"] * 2, "body": TEXTS}), buffer)
        renamed = buffer.getvalue()
    write(name, renamed)
    assert read_corpus(name, text_column="body") == TEXTS


def test_inputs_are_files_folders_globs_and_lists(prep):
    Path("d/sub").mkdir(parents=True)
    for name in ("d/b.txt", "d/sub/a.txt.gz", "d/c.md", "e.txt", "f,g.txt", "h[1].txt"):
        write(name, gzip.compress(name.encode()) if name.endswith("gz") else name)
    write("d/picture.png", b"\xff\xd8")
    in_folder = ["d/b.txt", "d/c.md", "d/sub/a.txt.gz"]
    assert read_corpus("d") == in_folder
    assert read_corpus("d/**/*.gz") == ["d/sub/a.txt.gz"]
    assert read_corpus("e.txt,d,e.txt") == ["e.txt", *in_folder]
    assert read_corpus("f,g.txt") == ["f,g.txt"] and read_corpus("h[1].txt") == ["h[1].txt"]
    for nothing in ("absent.txt", "d/*.csv", "e.txt,absent", ""):
        assert_loud(prep(f"--input={nothing}"), "--input=", "names no file")


# --- invalid bytes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0, 5, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + 77])
def test_invalid_utf8_is_named_by_its_offset_or_replaced(prep, offset):
    content = bytearray(b"ab c\n" * 500_000)
    content[offset] = 0xFF
    write("in.txt", bytes(content))
    assert_loud(prep(), "in.txt", "0xff", f"offset {offset:,};", "--skip_bad_rows=true")
    assert not Path("data/x").exists()
    done = prep("--skip_bad_rows=true", "--val_fraction=0")
    assert "1 invalid byte replaced" in done.stdout
    assert prepared_documents("train") == [content.decode("utf-8", "replace")]


@pytest.mark.parametrize("character", ["é", "日", "👍"])
def test_a_character_split_over_two_reads_stays_whole(character):
    size = len(character.encode())
    for before in range(1, size):
        text = "a" * (PIECE - before) + character + " end"
        write("in.txt", text)
        assert read_corpus("in.txt") == [text]
        cut = text.encode()[: PIECE + size - before - 1] + b" end"
        write("cut.txt", cut)
        with pytest.raises(UserError, match=f"0x{character.encode()[0]:02x} at offset {PIECE - before:,};"):
            read_corpus("cut.txt")


def test_a_line_end_split_over_two_reads_is_one():
    write("in.txt", "a" * (PIECE - 1) + "\r\nb\r")
    assert read_corpus("in.txt") == ["a" * (PIECE - 1) + "\nb\n"]


def test_a_character_cut_off_at_the_end_is_invalid(prep):
    write("in.txt", "abcé".encode()[:-1])
    assert_loud(prep(), "0xc3 at offset 3;")


@pytest.mark.parametrize("packed", ["", ".gz"])
@pytest.mark.parametrize(
    ("name", "content", "offset"),
    [
        ("a.jsonl", b'{"text":"ok"}\n{"text":"b\xffd"}\n', 24),
        ("a.json", b'[{"text":"ok"},\n{"text":"b\xffd"}]', 26),
        ("lines.json", b'{"text":"ok"}\n{"text":"b\xffd"}\n', 24),
        ("a.csv", b"text\nok\nb\xffd\n", 9),
        ("b.csv", b"\xef\xbb\xbftext\nok\nb\xffd\n", 12),
    ],
)
def test_invalid_utf8_in_rows_follows_the_same_rule(name, content, offset, packed):
    write(name + packed, PACK[packed](content))
    with pytest.raises(UserError, match=f"0xff at offset {offset};"):
        read_corpus(name + packed)
    rows = Corpus("x", name + packed, skip_bad_rows=True)
    assert [text for _, text, _ in rows] == ["ok", "b\ufffdd"] and rows.counts["invalid bytes replaced"] == 1


def test_invalid_utf8_in_parquet_names_the_row():
    offsets = pyarrow.py_buffer(np.array([0, 2, 5], "<i4").tobytes())
    write(
        "a.parquet",
        parquet_of(pyarrow.Array.from_buffers(pyarrow.string(), 2, [None, offsets, pyarrow.py_buffer(b"okb\xffd")])),
    )
    with pytest.raises(UserError, match=r"a\.parquet, row 2 is not UTF-8: byte 0xff at offset 1;"):
        read_corpus("a.parquet")
    assert read_corpus("a.parquet", skip_bad_rows=True) == ["ok", "b\ufffdd"]


# --- documents ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("document", "documents"),
    [
        ("file", ["# One\n\na\nb\n\n\n# Two\n```\n# no\n```\nc"]),
        ("auto", ["# One\n\na\nb\n\n\n# Two\n```\n# no\n```\nc"]),
        ("line", ["# One", "a", "b", "# Two", "```", "# no", "```", "c"]),
        ("paragraph", ["# One", "a\nb", "# Two\n```\n# no\n```\nc"]),
        ("heading", ["# One\n\na\nb\n\n\n", "# Two\n```\n# no\n```\nc"]),
    ],
)
def test_what_a_document_is(document, documents):
    for name in ("a.txt", "a.md"):
        write(name, documents[0] if document in ("file", "auto") else "# One\n\na\nb\n\n\n# Two\n```\n# no\n```\nc")
        assert read_corpus(name, document=document) == documents


WIKI = (
    " \n = First = \n \n Text = 3 . \n = 1 rad / s = \n more \n \n = = Plot = = \n \n it \n \n = Second = \n \n End \n"
)


def test_wikitext_headings_split_articles_and_false_ones_do_not(prep):
    write("in.txt", WIKI)
    done = prep("--val_fraction=0")
    documents = prepared_documents("train")
    assert len(documents) == 2 and "".join(documents) == WIKI[2:]
    assert documents[1].startswith(" = Second = ") and "= 1 rad / s =" in documents[0]
    assert "--detokenize=true undoes its spacing" in done.stdout
    assert read_corpus("in.txt", document="file") == [WIKI]


def test_lines_longer_than_a_read_stay_whole():
    lines = ["a " * (PIECE + 3), "b", "c" * (2 * PIECE)]
    write("in.txt", "\n".join(lines))
    assert read_corpus("in.txt", document="line") == lines
    write_jsonl("in.jsonl", lines)
    assert read_corpus("in.jsonl") == lines


@pytest.mark.parametrize(
    ("spaced", "written"),
    [
        ("state @-@ of @-@ the", "state-of-the"),
        ("1 @,@ 234 @.@ 5", "1,234.5"),
        ('the " big " one and " small "', 'the "big" one and "small"'),
        ("it 's they 're I 've he 'd I 'm we 'll don 't", "it's they're I've he'd I'm we'll don't"),
        ("the boys ' house", "the boys' house"),
        ("a ( b ) [ c ] { d }", "a (b) [c] {d}"),
        ("one , two . three ; four : five ! six ?", "one, two. three; four: five! six?"),
        ('he said , " stop . "', 'he said, "stop."'),
        ("$ 5 £ 6 € 7 # 8", "$5 £6 €7 #8"),
        ("50 % of", "50% of"),
        ("1990 – 91 and 3 − 2", "1990–91 and 3−2"),
        (" = Title = ", "= Title ="),
        (" = = Plot = = ", "== Plot =="),
        (" = = = Deep = = = ", "=== Deep ==="),
        (" a \n b ", "a\nb"),
        ("a\n \n \n \nb", "a\n\nb"),
        ("plain text, as people write (it's here) .5 a - b", "plain text, as people write (it's here) .5 a - b"),
    ],
)
def test_undoing_wikitext_spacing(spaced, written):
    assert undo_wikitext_spacing(spaced) == written + "\n"
    assert undo_wikitext_spacing(written) == written + "\n"


@pytest.mark.parametrize("document", ["auto", "file", "line", "paragraph", "heading"])
def test_detokenize_works_for_every_kind_of_document(document):
    write("in.txt", " = A = \n\n x @-@ y , z \n")
    text = "".join(read_corpus("in.txt", document=document, detokenize=True))
    assert "x-y, z" in text and "= A =" in text and " @" not in text
    write_jsonl("in.jsonl", ["x @-@ y , z"])
    assert read_corpus("in.jsonl", document=document, detokenize=True) == ["x-y, z\n"]


def test_detokenize_is_for_wikitext_from_the_hub_alone_unless_said():
    settings = [prepare.PrepareConfig(**given).detokenize for given in ({}, {"dataset": "demo"}, {"input": "a.txt"})]
    assert settings == [True, False, False]
    assert prepare.PrepareConfig(input="a.txt", detokenize=True).detokenize


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the shared WikiText file")
def test_wikitext_file_makes_its_60_articles(prep):
    path = SHARED / "wikitext.test.raw"
    assert prep(f"--input={path}", "--dataset=wiki").returncode == 0
    found = prepared_documents("train", "val", folder="data/wiki")
    documents = read_corpus(str(path))
    assert len(documents) == 60 and "".join(documents) == path.read_text(encoding="utf-8").removeprefix("\n")
    assert collections.Counter(found) == collections.Counter(documents)
    meta = read_meta(Path("data/wiki"))
    assert [meta["splits"][split]["documents"] for split in ("train", "val")] == [54, 6]


# --- documents in pieces --------------------------------------------------------------------------------------------


def encode_pieces(text: str, tokenizer, chunk: int) -> list[int]:
    chunks = [text[i : i + chunk] for i in range(0, len(text), chunk)]
    pieces = list(cut_pieces(chunks))
    assert "".join(piece for piece, _ in pieces) == text and [ends for _, ends in pieces][-1]
    return [i for piece, _ in pieces for i in tokenizer.encode(piece).tolist()], len(pieces)


def test_a_document_of_many_megabytes_has_the_ids_of_the_whole(prep):
    rng = random.Random(7)
    words = [
        "the",
        "it's",
        "a",
        "1984",
        "naïve",
        "日本語",
        "\n\n",
        "'tis",
        "...",
        "(x)",
        "\t",
        "",
        "\u3000",
        "over-long",
    ]
    text = " ".join(rng.choices(words, k=1_200_000))
    assert len(text.encode()) > 5 * PIECE
    write("in.txt", text)
    assert prep("--val_fraction=0").returncode == 0
    assert read_ids(Path("data/x"), "train") == [*load_gpt2().encode(text).tolist(), EOT]
    assert len(list(Corpus("x", "in.txt"))) > 2


def test_no_token_spans_a_cut(monkeypatch):
    """Random text of white space, apostrophes, digits and odd Unicode, cut every 40 characters or so."""
    monkeypatch.setattr(textfile, "PIECE", 40)
    words = [random_text(random.Random(i), 400) for i in range(5)]
    trained = read_tokenizer_json(train_tokenizer(iter([*words, "it's we'll a  b the low"]), 700), "t")
    cuts = 0
    for seed in range(300):
        rng = random.Random(seed)
        text = random_text(rng, 400) if seed % 3 else " ".join(rng.choices(ODD, k=6)) + random_text(rng, 30)
        for tokenizer in (load_gpt2(), trained):
            ids, pieces = encode_pieces(text, tokenizer, rng.randrange(1, 60))
            assert ids == tokenizer.encode(text).tolist(), repr(text)
            cuts += pieces - 1
    assert cuts > 1000


def test_a_tokenizer_that_sees_beyond_spaces_gets_whole_documents(prep, monkeypatch):
    """Metaspace marks the start of each text it is given: pieces would have marks of their own."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    inner = Tokenizer(models.BPE({c: i for i, c in enumerate("ab▁\n")} | {"<|endoftext|>": 4}, []))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.Metaspace(prepend_scheme="first")]
    )
    write("meta.json", inner.to_str())
    monkeypatch.setattr(textfile, "PIECE", 1000)
    text = "ab\n" * 8000 + "b"
    write("in.txt", text)
    assert prep("--tokenizer=meta.json", "--val_fraction=0").returncode == 0
    assert read_ids(Path("data/x"), "train") == [*inner.encode(text).ids, 4]


# --- splits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fraction", "held_out"), [(0.1, 100), (0.5, 500), (0.9, 900), (0.37, 370)])
@pytest.mark.parametrize("seed", [1337, 2])
def test_the_share_held_out_is_exact_and_spread_over_the_corpus(prep, fraction, held_out, seed):
    texts = [f"document {i}" for i in range(1000)]
    write_jsonl("in.jsonl", texts)
    assert prep("--input=in.jsonl", f"--val_fraction={fraction}", f"--seed={seed}").returncode == 0
    train, val = prepared_documents("train"), prepared_documents("val")
    assert len(val) == held_out and sorted([*train, *val]) == sorted(texts)
    places = [int(text.split()[1]) for text in val]
    assert places == sorted(places)
    assert all(abs(sum(a <= place < a + 100 for place in places) - held_out / 10) <= 1 for a in range(0, 1000, 100))


def test_another_seed_draws_other_documents_and_the_same_seed_the_same(prep):
    write_jsonl("in.jsonl", [f"document {i}" for i in range(200)])
    drawn = []
    for seed in (1, 1, 2):
        prep("--input=in.jsonl", f"--seed={seed}", "--overwrite=true")
        drawn.append(prepared_documents("val"))
    assert drawn[0] == drawn[1] != drawn[2]


def test_without_a_share_nothing_is_held_out(prep):
    write_jsonl("in.jsonl", ["a b", "c d"])
    assert prep("--input=in.jsonl", "--val_fraction=0").returncode == 0
    assert prepared_documents("train") == ["a b", "c d"] and not Path("data/x/val.bin").exists()


@pytest.mark.parametrize("name", ["in.jsonl", "in.txt"])
def test_max_documents_stops_early(prep, name):
    texts = [f"document {i}" for i in range(50)]
    write_jsonl("in.jsonl", texts)
    write("in.txt", "\n".join(texts))
    flags = [f"--input={name}", "--document=line", "--val_fraction=0", "--max_documents=7"]
    assert prep(*flags).returncode == 0 and prepared_documents("train") == texts[:7]


def test_a_hub_data_set_keeps_its_test_split_and_pools_the_others(prep, monkeypatch):
    import datasets

    rows = {
        name: [f"{name} {i}" for i in range(size)] for name, size in (("train", 90), ("validation", 10), ("test", 5))
    }
    hub = datasets.DatasetDict({name: datasets.Dataset.from_dict({"body": texts}) for name, texts in rows.items()})
    monkeypatch.setattr(corpus, "load_hub", lambda name, config: hub)
    flags = ["--dataset=owner/set:one", "--text_column=body"]
    assert prepare.main([*flags, "--num_proc=1"]) == 0
    found = {split: prepared_documents(split, folder="data/set-one") for split in ("train", "val", "test")}
    assert found["test"] == rows["test"] and len(found["val"]) == 10
    assert sorted(found["train"] + found["val"]) == sorted(rows["train"] + rows["validation"])
    assert prepare.main([*flags, "--num_proc=1", "--val_fraction=0", "--overwrite=true"]) == 0
    kept = {split: prepared_documents(split, folder="data/set-one") for split in ("train", "val", "test")}
    assert kept == {"train": rows["train"], "val": rows["validation"], "test": rows["test"]}


def test_wikitext_from_the_hub_comes_in_lines_and_leaves_in_articles(prep, monkeypatch):
    import datasets

    lines = [
        "",
        " = First = \n",
        "",
        " Some @-@ text . \n",
        "",
        " = = Part = = \n",
        "",
        " = Second = \n",
        "",
        " End . \n",
    ]
    hub = datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": lines})})
    monkeypatch.setattr(corpus, "load_hub", lambda name, config: hub)
    assert prepare.main(["--num_proc=1", "--val_fraction=0"]) == 0
    documents = prepared_documents("train", folder="data/wikitext103")
    assert documents == ["= First =\n\nSome-text.\n\n== Part ==\n", "= Second =\n\nEnd.\n"]


def test_without_a_network_the_error_names_the_ways_out(prep):
    done = run_program("prepare.py", "--num_proc=1", cwd=Path(), env={"HF_HUB_OFFLINE": "1", "HF_HOME": os.getcwd()})
    assert_loud(done, "wikitext", "--dataset=demo", "--input=FILES")
    assert not Path("data/wikitext103").exists()


# --- workers --------------------------------------------------------------------------------------------------------


def test_any_number_of_workers_makes_the_same_files(prep):
    rng = random.Random(5)
    write_jsonl("in.jsonl", (random_text(rng, rng.randrange(20_000)) for _ in range(80)))
    assert prep("--input=in.jsonl").returncode == 0
    one = file_bytes()
    for workers in (2, 3):
        assert prep("--input=in.jsonl", f"--num_proc={workers}", f"--data_dir=w{workers}").returncode == 0
        assert file_bytes(f"w{workers}/x") == one


def test_a_worker_that_dies_is_one_line_and_leaves_nothing():
    write_jsonl("in.jsonl", ["some words and more of them " * 200] * 4000)
    process = start_prepare("--input=in.jsonl", "--num_proc=2")
    workers = [p for p in psutil.Process(process.pid).children() if "resource_tracker" not in " ".join(p.cmdline())]
    workers[0].kill()
    _, stderr = process.communicate(timeout=30)
    assert_loud(
        SimpleNamespace(returncode=process.returncode, stderr=stderr, stdout=""), "a worker process died", "--num_proc"
    )
    assert gone(workers, 5) and not Path("data/x").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stopped_run_leaves_nothing(number, code):
    write_jsonl("in.jsonl", ["some words and more of them " * 200] * 4000)
    process = start_prepare("--input=in.jsonl", "--num_proc=2")
    workers = psutil.Process(process.pid).children()
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # a terminal's Ctrl-C goes to the workers, too
    else:
        process.send_signal(number)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == code and "Traceback" not in stderr
    assert gone(workers, 5) and not Path("data/x").exists()


def peak_memory(*flags: str) -> int:
    """Largest resident memory of prepare.py and its workers together, in bytes, sampled."""
    command = [sys.executable, str(ROOT / "prepare.py"), "--num_proc=2", "--overwrite=true", *flags]
    process = psutil.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        total = 0
        for member in [process, *process.children()]:
            try:
                total += member.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        peak = max(peak, total)
        time.sleep(0.02)
    assert process.returncode == 0
    return peak


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["jsonl", "txt"])
def test_memory_does_not_grow_with_the_corpus(suffix):
    rng = random.Random(0)
    block = [" ".join(rng.choices(["some", "words", "of", "a", "corpus", "1984", "it's"], k=900)) for _ in range(200)]
    for megabytes in (15, 60):
        with open(f"{megabytes}.{suffix}", "w", encoding="utf-8") as file:
            for number in range(megabytes * 1_000_000 // 4150):
                text = f"{number} {block[number % 200]}"
                file.write(json.dumps({"text": text}) + "\n" if suffix == "jsonl" else text + "\n")
        assert os.path.getsize(f"{megabytes}.{suffix}") > 0.9e6 * megabytes
    small, large = (peak_memory("--dataset=m", f"--input={megabytes}.{suffix}") for megabytes in (15, 60))
    print(f"{suffix}: {small / 1e6:.0f} MB for 15 MB, {large / 1e6:.0f} MB for 60 MB")
    assert large < 1.15 * small and large < 1.5e9


# --- data that is there already -------------------------------------------------------------------------------------


def test_the_same_settings_again_are_already_done(prep):
    write("in.txt", "some text " * 100)
    prep()
    before = file_bytes(), os.stat("data/x/train.bin").st_mtime_ns
    again = prep("--num_proc=2")
    assert again.returncode == 0 and "already prepared" in again.stdout and "--overwrite=true" in again.stdout
    assert (file_bytes(), os.stat("data/x/train.bin").st_mtime_ns) == before


@pytest.mark.parametrize(
    ("flag", "difference"),
    [
        ("--val_fraction=0.5", "val_fraction was 0.1, now 0.5"),
        ("--seed=7", "seed was 1337, now 7"),
        ("--document=line", "document was 'auto', now 'line'"),
        ("--max_documents=1", "max_documents was None, now 1"),
        ("--tokenizer=train", "tokenizer was 'gpt2', now 'train'"),
        ("--detokenize=true", "detokenize was False, now True"),
        ("--dataset=x", "already prepared"),
    ],
)
def test_other_settings_are_an_error_naming_the_difference(prep, flag, difference):
    write("in.txt", "some text \n" * 100)
    prep()
    before = file_bytes()
    again = prep(flag)
    if flag != "--dataset=x":
        assert_loud(again, "data/x", difference, "--overwrite=true", "--dataset=")
        assert file_bytes() == before
        assert prep(flag, "--overwrite=true", "--vocab_size=300").returncode == 0
        assert file_bytes() != before


def test_an_input_file_changed_since_is_noticed(prep):
    write("in.txt", "some text " * 100)
    prep()
    write("in.txt", "some TEXT " * 100)
    assert_loud(prep(), "the input files changed", "--overwrite=true")


@pytest.mark.parametrize("fault", [b"\xff", b""])
def test_a_failing_overwrite_leaves_the_old_data(prep, fault):
    write("in.txt", "some text " * 100)
    prep()
    before = file_bytes()
    write("in.txt", fault)
    assert_loud(prep("--overwrite=true"), "UTF-8" if fault else "holds no text")
    assert file_bytes() == before


@pytest.mark.parametrize("name", ["train.bin", "val.bin", "tokenizer.json"])
def test_foreign_files_are_not_overwritten_unasked(prep, name):
    Path("data/x").mkdir(parents=True)
    write(f"data/x/{name}", b"\x01\x00")
    write("in.txt", "some text " * 100)
    assert_loud(prep(), "without a meta.json", "--overwrite=true")
    assert file_bytes() == {name: b"\x01\x00"}


@pytest.mark.parametrize(
    ("answer", "made"), [("y\n", True), ("yes\n", True), ("n\n", False), ("\n", False), ("\x04", False)]
)
def test_at_a_terminal_it_asks(prep, answer, made):
    write("in.txt", "some text " * 100)
    prep()
    before = os.stat("data/x/train.bin").st_mtime_ns
    leader, follower = pty.openpty()
    command = [sys.executable, str(ROOT / "prepare.py"), "--dataset=x", "--input=in.txt", "--num_proc=1", "--seed=8"]
    process = subprocess.Popen(command, stdin=follower, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    os.write(leader, answer.encode())
    out, err = process.communicate(timeout=60)
    os.close(leader)
    os.close(follower)
    assert process.returncode == 0 and "seed was 1337, now 8" in out and "[y/N]" in out, err
    assert (os.stat("data/x/train.bin").st_mtime_ns != before) == made


# --- what it writes and says ----------------------------------------------------------------------------------------


def test_meta_describes_the_run(prep):
    import hashlib

    write_jsonl("in.jsonl", [f"two words {i}" for i in range(20)])
    done = prep("--input=in.jsonl")
    meta = read_meta(Path("data/x"))
    assert (meta["dtype"], meta["vocab_size"], meta["eot_id"]) == ("uint16", 50257, EOT)
    assert meta["tokenizer"] == {"kind": "gpt2", "name": "gpt2", "eot_token": "<|endoftext|>"}
    for split, documents in (("train", 18), ("val", 2)):
        content = Path(f"data/x/{split}.bin").read_bytes()
        about = meta["splits"][split]
        assert about["sha256"] == hashlib.sha256(content).hexdigest() and about["documents"] == documents
        assert about["tokens"] == len(content) // 2
    assert meta["settings"]["val_fraction"] == 0.1 and meta["settings"]["input"] == "in.jsonl"
    assert meta["counts"]["words"] == 60 and meta["counts"]["bytes"] == sum(len(f"two words {i}") for i in range(20))
    assert meta["counts"]["tokens"] == sum(about["tokens"] - about["documents"] for about in meta["splits"].values())
    assert "next: ./start_train.sh --dataset=x" in done.stdout


@pytest.mark.parametrize("text", ["", "a", " a", "a b\tc\n\nd ", "  ", "日本 语\r\nx"])
def test_words_are_counted_as_wc_does(text):
    assert prepare.count_words(text.encode()) == len(text.encode().split())


def test_unknown_words_are_counted(prep):
    write("chars.json", char_tokenizer("abc ", unknown="[UNK]"))
    write("in.txt", "abé cd ab")
    done = prep("--tokenizer=chars.json")
    assert done.returncode == 0 and "2 unknown tokens" in done.stdout
    write("in.txt", "abé")
    write("strict.json", char_tokenizer("abc "))
    assert_loud(prep("--tokenizer=strict.json", "--overwrite=true"), "strict.json", "'é'")


@pytest.mark.parametrize("content", [b"", b" \n \n", b"\xef\xbb\xbf"])
def test_a_corpus_without_text_is_refused(prep, content):
    write("in.txt", content)
    assert_loud(prep(), "in.txt", "holds no text")
    assert_loud(prep("--tokenizer=train", "--vocab_size=300"), "in.txt", "no text")
    assert not Path("data/x").exists()


def test_the_demo_corpus_is_the_same_each_time_and_large_enough(prep):
    once = list(Corpus("demo"))
    assert once[:300] == list(Corpus("demo", max_documents=300)) and sum(len(text) for _, text, _ in once) > 1_500_000
    assert all(text.strip() and ends for _, text, ends in once)
    assert len({text for _, text, _ in once}) == len(once)


@pytest.mark.slow
def test_the_demo_corpus_trains_the_same_tokenizer_each_time():
    flags = ["--dataset=demo", "--tokenizer=train", "--vocab_size=512", "--num_proc=1", "--max_documents=100"]
    assert prepare.main(flags) == 0 and prepare.main([*flags, "--data_dir=again"]) == 0
    assert file_bytes("data/demo") == file_bytes("again/demo")
    assert read_meta(Path("data/demo"))["vocab_size"] == 512


def test_a_long_corpus_gives_an_even_sample_to_train_on(monkeypatch):
    monkeypatch.setattr(prepare, "TRAINING_SAMPLE", 1000)
    kept = [int(text) for text in prepare.thin_out(f"{i:010}" for i in range(1000))]
    assert 50 <= len(kept) <= 100 and kept == list(range(0, 1000, kept[1]))


@pytest.mark.parametrize(
    ("flag", "part"),
    [
        ("--val_fraction=1", "val_fraction=1"),
        ("--val_fraction=-0.1", "val_fraction=-0.1"),
        ("--num_proc=0", "num_proc=0 is"),
        ("--max_documents=0", "max_documents=0 is"),
        ("--dataset=../x", "--dataset=../x"),
        ("--document=page", "document"),
        ("--tokenizer=absent.json", "absent.json"),
    ],
)
def test_settings_out_of_range_are_refused(prep, flag, part):
    write("in.txt", "text")
    assert_loud(prep(flag), part)
    assert not Path("data").exists()


def test_a_place_that_takes_no_files_is_told_before_a_tokenizer_is_trained(prep, monkeypatch):
    monkeypatch.setattr(prepare, "train_tokenizer", None)
    write("in.txt", "text " * 100)
    write("data", b"a file")
    assert_loud(prep("--tokenizer=train", "--vocab_size=300"), "data")


def test_the_next_command_names_the_place_and_can_be_pasted(prep):
    write("in.txt", "text " * 100)
    for _ in range(2):
        done = prep("--data_dir=my data", "--dataset=it's")
        command = done.stdout.rstrip("\n").rpartition(": ")[2]
        assert shlex.split(command) == ["./start_train.sh", "--dataset=it's", "--data_dir=my data"], done.stdout


@pytest.mark.parametrize("flags", [(), ("--val_fraction=0",), ("--document=line",)])
def test_a_corpus_of_one_token_is_refused(prep, flags):
    """A target needs a token before it, in training and in validation."""
    Path("c.json").write_text(char_tokenizer("a"), encoding="utf-8")
    write("in.txt", "a")
    done = prep("--tokenizer=c.json", *flags)
    if "--val_fraction=0" in flags:
        assert done.returncode == 0 and read_ids(Path("data/x"), "train") == [0, 1]
    else:
        assert_loud(done, "in.txt is too short", "two tokens each")
        assert not Path("data/x").exists()


def test_a_name_that_is_no_data_set_says_what_can_be_named():
    done = run_program("prepare.py", "--dataset=noslash", cwd=Path())
    assert_loud(done, "--dataset=noslash", "owner/name", "--input=FILES")
    assert not Path("data").exists()
