"""Token files: what a writer leaves behind in every case, and which windows the reader draws."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
from conftest import ROOT, TINY, assert_loud, run_program

import dataset
from configurator import UserError
from dataset import MARKER, TokenData, TokenWriter, read_meta

META = {"vocab_size": 300, "eot_id": 299, "tokenizer": {"kind": "gpt2", "name": "gpt2"}, "settings": {}}


def write_data(folder: Path, splits: dict[str, list[int]], vocab_size: int = 300, tokenizer: str | None = None) -> dict:
    """A finished data set of the given ids; returns its meta.json."""
    with TokenWriter(folder, vocab_size) as writer:
        for split, ids in splits.items():
            writer.append(split, np.array(ids, dtype=writer.dtype).tobytes(), 1)
        return writer.commit(META | {"vocab_size": vocab_size}, tokenizer)


def test_meta_says_what_the_files_hold(tmp_path):
    meta = write_data(tmp_path / "d", {"train": [1, 2, 299], "val": [3, 299]})
    assert json.loads((tmp_path / "d/meta.json").read_text()) == meta == read_meta(tmp_path / "d")
    train = (tmp_path / "d/train.bin").read_bytes()
    assert train == b"\x01\x00\x02\x00\x2b\x01"  # little-endian uint16, no header
    assert meta["splits"]["train"] == {"tokens": 3, "documents": 1, "sha256": hashlib.sha256(train).hexdigest()}
    assert meta["dtype"] == "uint16" and meta["format_version"] == 1
    assert sorted(os.listdir(tmp_path / "d")) == ["meta.json", "train.bin", "val.bin"]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65536, "uint16"), (65537, "uint32")])
def test_ids_are_16_bits_wide_up_to_65535(tmp_path, vocab_size, dtype):
    largest = vocab_size - 1
    assert write_data(tmp_path, {"train": [largest, 0, largest]}, vocab_size)["dtype"] == dtype
    x, y = TokenData(tmp_path, 2).read_windows("train", [0])
    assert x.tolist() == [[largest, 0]] and y.tolist() == [[0, largest]]


def test_a_failure_before_commit_leaves_what_was_there(tmp_path):
    """And it can be trained on all the time."""
    write_data(tmp_path, {"train": [1, 2], "val": [3, 4]})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(RuntimeError), TokenWriter(tmp_path, 300) as writer:
        writer.append("train", b"\x09\x00", 1)
        writer.append("test", b"\x09\x00", 1)
        assert (tmp_path / MARKER).exists() and TokenData(tmp_path, 1).tokens == {"train": 2, "val": 2}
        raise RuntimeError
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_failure_leaves_no_folder_that_was_not_there(tmp_path):
    with pytest.raises(RuntimeError), TokenWriter(tmp_path / "new", 300):
        raise RuntimeError
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("renamed", range(5))
def test_a_failure_while_renaming_is_never_taken_for_finished_data(tmp_path, monkeypatch, renamed):
    write_data(tmp_path, {"train": [1, 2], "val": [3]}, tokenizer="{}")
    real, calls = os.replace, []

    def replace(source, target):
        calls.append(target)
        if len(calls) > renamed:
            raise OSError(5, "Input/output error")
        real(source, target)

    monkeypatch.setattr(dataset.os, "replace", replace)
    splits = {"train": [7, 8], "val": [9, 10], "test": [11]}
    with pytest.raises(OSError, match="Input/output"):
        write_data(tmp_path, splits, tokenizer="{ }")
    monkeypatch.undo()
    assert read_meta(tmp_path) is None
    with pytest.raises(UserError, match="unfinished"):
        TokenData(tmp_path, 1)
    write_data(tmp_path, splits, tokenizer="{ }")
    assert TokenData(tmp_path, 1).tokens == {"train": 2, "val": 2, "test": 1}


def test_leftovers_of_a_killed_run_do_not_get_into_the_next(tmp_path):
    for name in ("test.bin.tmp", "tokenizer.json.tmp"):
        (tmp_path / name).write_bytes(b"\x01\x00")
    (tmp_path / MARKER).touch()
    write_data(tmp_path, {"train": [1, 2]})
    assert sorted(os.listdir(tmp_path)) == ["meta.json", "train.bin"]


def test_splits_and_tokenizer_that_are_no_more_go(tmp_path):
    write_data(tmp_path, {"train": [1, 2], "val": [3], "test": [4]}, tokenizer="{}")
    write_data(tmp_path, {"train": [1, 2]})
    assert sorted(os.listdir(tmp_path)) == ["meta.json", "train.bin"]


def test_a_folder_has_one_writer_at_a_time(tmp_path):
    with TokenWriter(tmp_path, 300) as writer:
        writer.append("train", b"\x01\x00", 1)
        with pytest.raises(UserError, match="another prepare"):
            write_data(tmp_path, {"train": [5]})
        writer.commit(META)
    assert (tmp_path / "train.bin").read_bytes() == b"\x01\x00"


@pytest.mark.parametrize(("lines", "limit"), [(40_000, 100_000), (100, 1_000)])  # while writing, and at the last flush
def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, lines, limit):
    (tmp_path / "a.txt").write_text("all work and no play makes Jack a dull boy\n" * lines, encoding="utf-8")
    code = f"""
import resource, sys
sys.path.insert(0, {str(ROOT)!r})
import prepare
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
sys.exit(prepare.main(["--dataset=full", "--input=a.txt", "--num_proc=1"]))
"""
    process = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert_loud(process, "File too large")
    assert not (tmp_path / "data/full").exists()


@pytest.mark.parametrize(("fraction", "kept"), [(0.1, 8), (0.3, 7), (0.5, 5), (0.001, 8), (0.999, 2)])
@pytest.mark.parametrize("split", ["train", "val"])
def test_split_by_tokens_cuts_off_the_end_and_leaves_neither_empty(tmp_path, split, fraction, kept):
    with TokenWriter(tmp_path, 300) as writer:
        writer.append(split, np.arange(10, dtype="<u2").tobytes(), 1)
        assert writer.split_by_tokens(fraction)
        meta = writer.commit(META)
    ids = [np.fromfile(tmp_path / f"{name}.bin", "<u2").tolist() for name in ("train", "val")]
    assert ids == [list(range(kept)), list(range(kept, 10))]
    assert [meta["splits"][name]["tokens"] for name in ("train", "val")] == [kept, 10 - kept]


def test_three_ids_cannot_be_split(tmp_path):
    """Four can: each side has a target then."""
    with TokenWriter(tmp_path, 300) as writer:
        assert not writer.split_by_tokens(0.1)
        writer.append("train", b"\x01\x00" * 3, 1)
        assert not writer.split_by_tokens(0.1)
        writer.append("train", b"\x01\x00", 1)
        assert writer.split_by_tokens(0.1) and writer.tokens == {"train": 2, "val": 2}


def test_validation_split_shorter_than_block_size_is_refused(tiny):
    """H03: before a model is built, with the split, its tokens and what is needed."""
    with pytest.raises(UserError, match=r"split val .* has 270 tokens, needs at least 401"):
        TokenData(Path("data/tiny"), 400)
    assert_loud(run_program("train.py", *TINY, "--block_size=400", cwd=tiny), "val", "270 tokens", "401")
    assert not (tiny / "out").exists()
    assert TokenData(Path("data/tiny"), 269).tokens["val"] == 270


def test_every_window_is_full_and_every_token_reachable(tmp_path):
    """H14: starts 0 to 83 of 100 ids with block_size 16, targets 1 to 99."""
    write_data(tmp_path, {"train": list(range(100))})
    data = TokenData(tmp_path, 16, seed=1)
    x, y = data.train_batch(0, 5000)
    assert x.shape == y.shape == (5000, 16) and x.dtype == np.int64
    assert (np.diff(x, axis=1) == 1).all() and (y == x + 1).all()  # ids are positions here
    assert set(x[:, 0].tolist()) == set(range(84))
    assert set(y.ravel().tolist()) == set(range(1, 100)) and set(x.ravel().tolist()) == set(range(99))


@pytest.mark.parametrize("tokens", [17, 18, 32, 33, 34, 100])
def test_windows_of_one_epoch_do_not_overlap(tmp_path, tokens):
    write_data(tmp_path, {"train": list(range(tokens))})
    data = TokenData(tmp_path, 16)
    n = data.windows_per_epoch
    epochs = [sorted(data.window_start(e * n + i) for i in range(n)) for e in range(3)]
    for starts in epochs:
        assert all(b - a >= 16 for a, b in itertools.pairwise(starts))
        assert starts[0] >= 0 and starts[-1] + 17 <= tokens
    if tokens == 100:
        order = [data.window_start(i) for i in range(3 * n)]
        assert order != sorted(order) and len(set(map(tuple, epochs))) > 1


def test_a_batch_depends_on_seed_and_sample_number_alone(tmp_path):
    write_data(tmp_path, {"train": [i % 300 for i in range(1000)]})
    data, again, other = TokenData(tmp_path, 8, 5), TokenData(tmp_path, 8, 5), TokenData(tmp_path, 8, 6)
    whole = data.train_batch(40, 6)[0]
    assert (
        np.concatenate([again.train_batch(43, 3)[0], again.train_batch(40, 3)[0]])[[3, 4, 5, 0, 1, 2]] == whole
    ).all()
    assert (other.train_batch(40, 6)[0] != whole).any()


def test_evaluation_windows_are_the_same_each_time_and_span_the_split(tmp_path):
    write_data(tmp_path, {"train": [0] * 50, "val": list(range(100))})
    data = TokenData(tmp_path, 8)
    first = np.concatenate([x for x, _, _ in data.eval_batches("val", 4, 3)])
    data.train_batch(0, 4)
    assert (first == np.concatenate([x for x, _, _ in data.eval_batches("val", 4, 3)])).all()
    assert len(first) == 12 and first[0, 0] == 0 and first[-1, -1] == 98
    every = np.concatenate([x for x, _, _ in data.eval_batches("val", 4, 100)])
    assert len(np.unique(every[:, 0])) == len(every) == 12  # (99 - 8) // 8 + 1, none twice


def test_without_validation_the_training_windows_stand_in(tmp_path):
    write_data(tmp_path, {"train": list(range(20))})
    data = TokenData(tmp_path, 4)
    assert "no val.bin" in data.note
    assert next(iter(data.eval_batches("val", 2, 1)))[0].tolist() == [[0, 1, 2, 3], [15, 16, 17, 18]]


def test_an_id_outside_the_vocabulary_names_file_and_id(tmp_path):
    """H29 for the reader: file, id 100, vocab_size 65."""
    write_data(tmp_path, {"train": [1, 2, 100, 3, 4]}, vocab_size=65)
    with pytest.raises(UserError, match=r"train\.bin holds id 100, but vocab_size is 65"):
        TokenData(tmp_path, 4).train_batch(0, 1)


def test_foreign_bins_without_meta_are_taken_as_nanogpt(tmp_path):
    np.arange(100, dtype="<u2").tofile(tmp_path / "train.bin")
    np.arange(50, dtype="<u2").tofile(tmp_path / "val.bin")
    data = TokenData(tmp_path, 8)
    assert data.vocab_size == 50257 and data.tokens == {"train": 100, "val": 50} and "nanoGPT" in data.note


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda d: ((d / MARKER).touch(), (d / "meta.json").unlink()), "unfinished"),
        (lambda d: (d / "meta.json").write_text("{"), "damaged"),
        (lambda d: (d / "meta.json").write_text("[]"), "damaged"),
        (lambda d: (d / "meta.json").write_bytes(b"\xff"), "damaged"),
        (lambda d: (d / "meta.json").write_text('{"format_version": 1}'), "damaged"),
        (lambda d: (d / "meta.json").write_text('{"format_version": 99}'), "format 99"),
        (lambda d: write_data(d, {"val": list(range(20))}), "damaged"),
        (lambda d: (d / "val.bin").unlink(), "val.bin has 0 bytes"),
        (lambda d: (d / "train.bin").write_bytes(b"123"), "train.bin has 3 bytes"),
        (lambda d: [path.unlink() for path in d.iterdir()], "no prepared data"),
    ],
)
def test_damaged_data_is_refused(tmp_path, spoil, message):
    write_data(tmp_path, {"train": list(range(20)), "val": list(range(20))})
    spoil(tmp_path)
    with pytest.raises(UserError, match=message):
        TokenData(tmp_path, 4)


def test_reading_does_not_gather_pages_in_memory(tmp_path):
    """H28 for the reader: 3,000 batches of 4 x 256 out of a sparse 400 MiB file grow memory by less than 50 MB."""
    write_data(tmp_path, {"train": [0]})
    meta = json.loads((tmp_path / "meta.json").read_text())
    meta["splits"]["train"]["tokens"] = 200 << 20
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    os.truncate(tmp_path / "train.bin", 400 << 20)
    data = TokenData(tmp_path, 256)
    data.train_batch(0, 4)
    before = psutil.Process().memory_info().rss
    for step in range(3000):
        data.train_batch(4 * step, 4)
    assert psutil.Process().memory_info().rss - before < 50e6


def test_a_run_goes_on_with_the_files_it_began_with(tmp_path):
    """Data made anew under a training would otherwise change, or end, what it reads."""
    folder = tmp_path / "x"

    def write(ids: np.ndarray) -> None:
        with TokenWriter(folder, 500) as writer:
            writer.append("train", ids.astype("<u2").tobytes(), 1)
            writer.commit({"vocab_size": 500, "eot_id": 0, "tokenizer": {"kind": "gpt2", "name": "gpt2"}})

    write(np.arange(200))
    data = TokenData(folder, 16)
    before = data.train_batch(0, 4)
    write(np.full(40, 499))
    assert all((old == new).all() for old, new in zip(before, data.train_batch(0, 4), strict=True))
