"""Data sets of the hub, through a stand-in on 127.0.0.1: the scripts without flags, other data sets, faults."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, SHARED, assert_loud, read_ids
from hub import Hub, card, parquet
from test_pipeline import run_script

EOT = 50256
SPLITS = {"train": (0, 30), "validation": (30, 40), "test": (40, 60)}  # articles of each part
CONFIGS = ("wikitext-103-raw-v1", "wikitext-2-raw-v1")
BODIES = [f"Number {i}:  it 's  ( fine ) , really ." for i in range(20)]
CASES = {  # flags of prepare.py; all run in one process, each with a data folder of its own name
    "own validation": ["--val_fraction=0"],
    "few and raw": ["--detokenize=false", "--max_documents=3", "--val_fraction=0.5"],
    "column": ["--dataset=me/rows", "--text_column=body"],
    "config": ["--dataset=me/many:second"],
    "left out": ["--dataset=me/odd"],
    "skipped rows": ["--dataset=me/holes", "--skip_bad_rows=true"],
    "no such column": ["--dataset=me/rows"],
    "holes": ["--dataset=me/holes"],
    "no such data set": ["--dataset=no/such"],
    "no such config": ["--dataset=me/many:third"],
    "no config named": ["--dataset=me/many"],
    "test alone": ["--dataset=me/test"],
    "no files": ["--dataset=me/empty"],
}
RUN_CASES = """
import contextlib, io, json, sys
import prepare
for name, flags in json.load(sys.stdin).items():
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = prepare.main([f"--data_dir={name}", "--num_proc=1", *flags])
    print(json.dumps([name, [code, out.getvalue(), err.getvalue()]]))
"""


def make_articles() -> list[list[str]]:
    """60 articles as rows in the form of WikiText: of its test part where that lies beside the project, else made up."""
    path = SHARED / "wikitext.test.raw"
    if path.exists():
        lines = path.read_text(encoding="utf-8").split("\n")
        rows = [line + "\n" if line.strip() else "" for line in lines]
        heads = [
            i for i, row in enumerate(rows) if re.fullmatch(r" = [^=]+ = \n", row) and not rows[i - 1] + rows[i + 1]
        ]
        assert len(heads) == 60
        return [rows[first:last] for first, last in zip(heads, [*heads[1:], None], strict=True)]
    rng = random.Random(1)
    words = [
        "the",
        "of",
        "a",
        "river",
        "@-@",
        ",",
        "and",
        "it",
        "'s",
        "(",
        "band",
        ")",
        "was",
        "1",
        "@,@",
        "234",
        "built",
        '"',
        "good",
        '"',
        "in",
        "3",
        "@.@",
        "5",
        "km",
    ]
    articles = []
    for number in range(60):
        article = [f" = Article {number} = \n", ""]
        for section in range(3):
            text = [" " + " ".join(rng.choices(words, k=40)) + " . \n" for _ in range(2)]
            article += [f" = = Section {section} = = \n", "", *text, ""]
        articles.append(article)
    return articles


def as_document(rows: list[str], raw: bool) -> str:
    """The document that an article's rows should become."""
    from textfile import undo_wikitext_spacing

    text = "".join(row or "\n" for row in rows)
    return text if raw else undo_wikitext_spacing(text)


@pytest.fixture(scope="module")
def articles() -> list[list[str]]:
    return make_articles()


@pytest.fixture(scope="module")
def hub(articles):
    """The hub, with WikiText and some data sets of other shapes."""
    wikitext = {"README.md": card({c: {split: f"{c}/{split}-*" for split in SPLITS} for c in CONFIGS})}
    for config in CONFIGS:
        for split, (first, last) in SPLITS.items():
            rows = [row for article in articles[first:last] for row in article]
            rows.insert(0, "")
            content = parquet(text=rows if config == CONFIGS[0] else ["the other configuration"])
            wikitext[f"{config}/{split}-00000-of-00001.parquet"] = content
    jsonl = "".join(json.dumps({"text": f"second {i}"}) + "\n" for i in range(10)).encode()
    repositories = {
        "Salesforce/wikitext": wikitext,
        "me/rows": {"data/train-00000.parquet": parquet(title=["x"] * 20, body=BODIES)},
        "me/many": {
            "README.md": card({"first": {"train": "first.jsonl"}, "second": {"train": "second.jsonl"}}),
            "first.jsonl": b'{"text": "first"}\n',
            "second.jsonl": jsonl,
        },
        "me/odd": {f"data/{split}-0.parquet": parquet(text=["a text"] * 9) for split in ("train", "extra")},
        "me/holes": {"data/train-0.parquet": parquet(text=["one", None, *map(str, range(2, 20))])},
        "me/test": {"data/test-0.parquet": parquet(text=["a text"] * 9)},
        "me/empty": {"README.md": b"nothing yet"},
    }
    repositories["me/odd"]["README.md"] = card({"default": {"train": "data/train-*", "extra": "data/extra-*"}})
    with Hub(repositories) as hub:
        yield hub


def prepare(hub: Hub, folder: Path, *flags: str, home: Path | None = None, **env: str) -> subprocess.CompletedProcess:
    """Runs ./prepare_data.sh against the hub, with its downloads in `home`."""
    environment = hub.environment(home or folder / "home") | env
    return run_script("prepare_data.sh", *flags, cwd=folder, env=environment)


@pytest.fixture(scope="module")
def prepared(hub, tmp_path_factory) -> Path:
    """A folder in which ./prepare_data.sh ran without any flag; its output lies beside."""
    folder = tmp_path_factory.mktemp("hub")
    finished = prepare(hub, folder)
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr == ""  # no progress bars where nobody watches
    (folder / "stdout").write_text(finished.stdout, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def cases(hub, tmp_path_factory) -> tuple[Path, dict[str, subprocess.CompletedProcess]]:
    """The cases' folder, and how each of them ended."""
    folder = tmp_path_factory.mktemp("cases")
    environment = {**os.environ, **hub.environment(folder / "home"), "PYTHONPATH": str(ROOT)}
    command, given = [sys.executable, "-c", RUN_CASES], json.dumps(CASES)
    finished = subprocess.run(
        command, cwd=folder, env=environment, input=given, capture_output=True, text=True, timeout=300
    )
    assert finished.returncode == 0, finished.stderr
    ended = dict(map(json.loads, finished.stdout.splitlines()))
    return folder, {name: subprocess.CompletedProcess(name, *how) for name, how in ended.items()}


def documents(folder: Path, split: str) -> list[str]:
    """The documents of a split, decoded; the last id must end one."""
    from tokenizer import open_tokenizer

    tokenizer, found, ids = open_tokenizer("gpt2"), [], read_ids(folder, split)
    assert ids[-1] == EOT
    while ids:
        end = ids.index(EOT)
        found.append(tokenizer.decode(ids[:end]))
        ids = ids[end + 1 :]
    return found


# --- WikiText-103, without any flag ---------------------------------------------------------------------------------


def test_default_writes_wikitext103(prepared) -> None:
    data = prepared / "data" / "wikitext103"
    assert {p.name for p in data.iterdir()} == {"train.bin", "val.bin", "test.bin", "meta.json"}
    meta = json.loads((data / "meta.json").read_text(encoding="utf-8"))
    assert {split: about["documents"] for split, about in meta["splits"].items()} == {"train": 36, "val": 4, "test": 20}
    assert (meta["dtype"], meta["vocab_size"], meta["eot_id"]) == ("uint16", 50257, EOT)
    assert meta["source"] == "Salesforce/wikitext:wikitext-103-raw-v1"
    assert (prepared / "stdout").read_text(encoding="utf-8").endswith("next: ./start_train.sh --dataset=wikitext103\n")


def test_articles_are_rebuilt_and_their_spacing_undone(prepared, articles) -> None:
    data = prepared / "data" / "wikitext103"
    expected = [as_document(article, raw=False) for article in articles]
    assert documents(data, "test") == expected[40:]
    train, val = documents(data, "train"), documents(data, "val")
    assert sorted(train + val) == sorted(expected[:40])
    assert [text for text in expected[:40] if text in set(train)] == train  # in order
    for text in train:
        assert re.match(r"= [^=\n]+ =\n", text)
        assert not re.search(r" @[-,.]@ | , | \. |^ = ", text, re.MULTILINE)


def test_validation_is_drawn_from_train_and_validation_together(prepared, articles) -> None:
    val = documents(prepared / "data" / "wikitext103", "val")
    own = {as_document(article, raw=False) for article in articles[30:40]}
    assert len(val) == 4 and not own.issuperset(val)


def test_other_configurations_are_not_downloaded(hub, prepared) -> None:
    asked = {path for method, path in hub.requests if path.endswith(".parquet") and "wikitext/" in path}
    assert asked and all("/wikitext-103-raw-v1/" in path for path in asked)


def test_small_model_trains_on_it_and_writes(prepared) -> None:
    small = "--n_layer=2 --n_head=2 --n_embd=32 --block_size=64 --compile=false --device=cpu --dtype=float32"
    few = "--batch_size=4 --gradient_accumulation_steps=1 --max_iters=4 --eval_iters=2 --warmup_iters=1"
    trained = run_script("start_train.sh", *small.split(), *few.split(), cwd=prepared)
    assert trained.returncode == 0, trained.stderr
    written = run_script("generate_text.sh", "--device=cpu", cwd=prepared)
    assert written.returncode == 0, written.stderr
    assert written.stdout.startswith("Bill Clinton was ") and len(written.stdout) > 300


# --- settings, and other data sets ----------------------------------------------------------------------------------


def test_own_validation_part_is_kept(cases, articles) -> None:
    folder, ended = cases
    assert ended["own validation"].returncode == 0, ended["own validation"].stderr
    for split, part in (("train", "train"), ("val", "validation"), ("test", "test")):
        first, last = SPLITS[part]
        expected = [as_document(article, raw=False) for article in articles[first:last]]
        assert documents(folder / "own validation" / "wikitext103", split) == expected


def test_raw_text_and_few_documents(cases, articles) -> None:
    folder, ended = cases
    assert ended["few and raw"].returncode == 0, ended["few and raw"].stderr
    data = folder / "few and raw" / "wikitext103"
    assert documents(data, "test") == [as_document(article, raw=True) for article in articles[40:43]]
    both = sorted(documents(data, "train") + documents(data, "val"))
    assert both == sorted(as_document(article, raw=True) for article in articles[:3] + articles[30:33])


def test_other_data_set_by_its_column(cases) -> None:
    folder, ended = cases
    data = folder / "column" / "rows"
    assert ended["column"].returncode == 0, ended["column"].stderr
    both = documents(data, "train") + documents(data, "val")
    assert sorted(both) == sorted(BODIES)  # a row is a document, untouched
    assert len(documents(data, "val")) == 2 and not (data / "test.bin").exists()


def test_other_data_set_with_its_configuration(cases) -> None:
    folder, ended = cases
    assert ended["config"].returncode == 0, ended["config"].stderr
    data = folder / "config" / "many-second"
    assert sorted(documents(data, "train") + documents(data, "val")) == [f"second {i}" for i in range(10)]


def test_splits_of_other_names_are_left_out_aloud(cases) -> None:
    _, ended = cases
    assert ended["left out"].returncode == 0, ended["left out"].stderr
    assert "splits left out: extra\n" in ended["left out"].stdout


def test_rows_without_text_are_skipped_when_asked(cases) -> None:
    folder, ended = cases
    assert ended["skipped rows"].returncode == 0, ended["skipped rows"].stderr
    data = folder / "skipped rows" / "holes"
    assert sorted(documents(data, "train") + documents(data, "val")) == sorted(["one", *map(str, range(2, 20))])
    assert "1 row without `text` skipped" in ended["skipped rows"].stdout


@pytest.mark.parametrize(
    ("case", "parts"),
    {
        "no such column": ("me/rows", "no column 'text'", "'title', 'body'", "--text_column="),
        "holes": ("me/holes, split train, row 2", "null", "--skip_bad_rows=true"),
        "no such data set": ("cannot load no/such from http://127.0.0.1", "doesn't exist"),
        "no such config": ("me/many:third", "'first', 'second'"),
        "no config named": ("me/many", "'first', 'second'", "--dataset=me/many:CONFIG"),
        "test alone": ("me/test has the splits test, to train on none of train, validation"),
        "no files": ("cannot load me/empty",),
    }.items(),
)
def test_data_sets_at_fault(cases, case, parts) -> None:
    folder, ended = cases
    assert_loud(ended[case], *([parts] if isinstance(parts, str) else parts))
    assert not list((folder / case).rglob("*"))


# --- without a network, and with a broken one -----------------------------------------------------------------------


def assert_nothing_left(folder: Path) -> None:
    """Fails if a prepared file, or a part of one, lies in the data folder."""
    assert not list((folder / "data").rglob("*"))


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://hub.invalid"])
def test_no_network_is_said_soon(hub, tmp_path, url) -> None:
    started = time.monotonic()
    finished = prepare(hub, tmp_path, HF_ENDPOINT=url)
    assert time.monotonic() - started < 15  # 2.4 s usually; the library itself tries for 25 s
    assert_loud(finished, f"cannot reach {url}", "Salesforce/wikitext", "--dataset=demo", "--input=")
    assert finished.stderr.count("\n") == 1
    assert_nothing_left(tmp_path)


def test_offline_without_a_download_says_why(hub, tmp_path) -> None:
    finished = prepare(hub, tmp_path, HF_HUB_OFFLINE="1")
    assert_loud(finished, "cannot reach", "HF_HUB_OFFLINE", "--dataset=demo")
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("without", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}])
def test_earlier_download_is_enough(hub, prepared, tmp_path, without) -> None:
    asked = len(hub.requests)
    finished = prepare(hub, tmp_path, home=prepared / "home", **without)
    assert finished.returncode == 0, finished.stderr
    assert len(hub.requests) == asked
    for name in ("train.bin", "val.bin", "test.bin"):
        made, expected = (folder / "data" / "wikitext103" / name for folder in (tmp_path, prepared))
        assert made.read_bytes() == expected.read_bytes()


@pytest.fixture
def broken(hub):
    """The hub's faults, mended after the test."""
    yield hub.broken
    hub.broken.clear()


def test_hub_out_of_order(hub, broken, tmp_path) -> None:
    broken[r"/train-.*parquet$"] = 500
    finished = prepare(hub, tmp_path)
    assert_loud(finished, f"cannot load Salesforce/wikitext:wikitext-103-raw-v1 from {hub.url}", "500", "train-00000")
    assert_nothing_left(tmp_path)


def test_file_cut_in_the_middle(hub, broken, tmp_path, prepared) -> None:
    broken[r"/validation-.*parquet$"] = "cut"
    finished = prepare(hub, tmp_path)
    assert_loud(
        finished, f"cannot load Salesforce/wikitext:wikitext-103-raw-v1 from {hub.url}", "without sending complete"
    )
    assert_nothing_left(tmp_path)
    broken.clear()
    assert prepare(hub, tmp_path).returncode == 0  # what was downloaded before is whole
    made, expected = (folder / "data" / "wikitext103" / "train.bin" for folder in (tmp_path, prepared))
    assert made.read_bytes() == expected.read_bytes()
