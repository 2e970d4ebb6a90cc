"""tools.benchmark: what is compared runs by turns, a row tells ratios, each section measures what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from configurator import UserError
from tools import benchmark, benchmark_cases
from tools.benchmark import BenchmarkConfig, Row, by_turns

PEER = """
import torch
from torch.nn import functional as F

class GPTConfig:
    def __init__(self, **shape):
        self.__dict__.update(shape)

class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = torch.nn.Embedding(config.vocab_size, config.n_embd)

    def configure_optimizers(self, decay, rate, betas, kind):
        return torch.optim.AdamW(self.parameters(), lr=rate, betas=betas, weight_decay=decay)

    def forward(self, ids, targets):
        logits = self.wte(ids) @ self.wte.weight.t()
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())
"""


@pytest.fixture
def peer(tmp_path) -> Path:
    folder = tmp_path / "peer"
    folder.mkdir()
    (folder / "model.py").write_text(PEER)
    return folder


def small(**changes) -> BenchmarkConfig:
    shape = {"n_layer": 1, "n_head": 2, "n_embd": 32, "block_size": 16, "batch_size": 2, "vocabularies": "128"}
    return BenchmarkConfig(**{"rounds": 2, "compile": False, "loader_megabytes": 1, **shape, **changes})


def test_what_is_compared_runs_by_turns_and_medians_count():
    calls, figures = [], {"a": iter([9, 1, 2, 30]), "b": iter([9, 4, 5, 6])}

    def task(name: str):
        return lambda: calls.append(name) or next(figures[name])

    assert by_turns({"a": task("a"), "b": task("b")}, 3) == {"a": 2, "b": 5}
    assert "".join(calls) == "ab" + "ab" + "ba" + "ab"  # once for nothing, then each round by another first


def test_a_row_tells_each_figure_and_ours_over_it():
    text = str(Row("training step", "tokens/s", 1234.5, {"nanoGPT": 1000.0, "limit": 2469.0}, "note"))
    assert "1,234 tokens/s" in text and "nanoGPT 1,000: 1.23 ×; limit 2,469: 0.50 ×  (note)" in text


def test_a_training_step_is_measured_against_the_peer_and_the_products_of_matrices(tmp_path, peer):
    (row,) = benchmark_cases.measure_train(small(peer=str(peer)), tmp_path)
    assert row.ours > 0 and [name.split()[0] for name in row.others] == ["nanoGPT", "matmul"]
    assert row.ours < list(row.others.values())[1]  # nothing beats its limit


def test_a_peer_that_fails_is_named(tmp_path, peer):
    (peer / "model.py").write_text(PEER.replace("return logits,", "raise ValueError('odd')"))
    with pytest.raises(UserError, match=f"peer={peer} could not make a training step"):
        list(benchmark_cases.measure_train(small(peer=str(peer)), tmp_path))


def test_the_step_that_is_measured_learns(tmp_path):
    """It is train.py's own: the weights move, and by another batch each time."""
    data = tmp_path / "random128"
    data.mkdir()
    benchmark_cases.random_ids(data / "train.bin", 2000, 128)
    shape = benchmark_cases.GPTConfig(16, 128, 1, 2, 32, 0.0, bias=False, gelu="exact")
    step = benchmark_cases.training_step(small(), shape, data, benchmark_cases.choose_device("cpu", "float32"))
    trainer = step.__closure__[0].cell_contents
    before = trainer.model.lm_head.weight.detach().clone()
    step()
    step()
    assert trainer.step == 2 and not torch.equal(before, trainer.model.lm_head.weight)


def test_loss_loader_and_checkpoint_sections_measure(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark_cases, "MEDIUM", benchmark_cases.GPTConfig(16, 128, 1, 2, 32))
    (loss,) = benchmark_cases.measure_loss(small(), tmp_path)
    assert loss.others.keys() == {"whole", "its products"} and loss.ours > 0
    cold, warm = benchmark_cases.measure_loader(small(), tmp_path)
    assert "cold" in cold.name and "warm" in warm.name and 0 < warm.ours < 1
    pause, total = benchmark_cases.measure_checkpoint(small(), tmp_path)
    assert pause.unit == "s" and pause.others.keys() == total.others.keys() == {"torch.save"}
    assert total.ours > pause.ours


def test_memory_of_a_step_is_counted_and_falls_with_checkpointing(tmp_path, monkeypatch):
    """Without running it: tensors without data; the loss in chunks and a block's inner tensors are what differs."""
    shape = benchmark_cases.GPTConfig(64, 50304, 4, 2, 64)
    monkeypatch.setattr(benchmark_cases, "MEDIUM", shape)
    plain, checkpointed = benchmark_cases.measure_memory(small(), tmp_path)
    assert 0 < checkpointed.ours < plain.ours < 1.0  # 512 × 50,304 logits and copies of them would take 0.3 more


def test_rows_to_prepare_are_documents_of_about_the_size_asked_for(tmp_path):
    benchmark_cases.write_rows(tmp_path / "rows.jsonl", 1)
    rows = [json.loads(line)["text"] for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert sum(map(len, rows)) > 900_000 and len(set(rows)) > len(rows) * 0.9


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        ("--what=trian", ["what=trian", "'trian'"]),
        ("--peer=nowhere", ["peer=nowhere", "model.py"]),
        ("--rounds=0", ["rounds=0"]),
        ("--vocabularies=a", ["vocabularies='a'"]),
    ],
)
def test_settings_at_fault_are_one_line(capsys, flag, told):
    assert benchmark.main([flag]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and all(part in error for part in told)


def test_all_sections_have_a_measurement():
    assert all(hasattr(benchmark_cases, f"measure_{name}") for name in benchmark.SECTIONS)
