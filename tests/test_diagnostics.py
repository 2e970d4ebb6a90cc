"""diagnostics.py: each sign on a run that has it, silence on healthy ones, and two real runs.

A synthetic run is replayed as training lives it: after each event the signs are looked for, and those found join the
history, so that a healthy run must be silent at every moment and a sign can come once only.
"""

from __future__ import annotations

import ast
import dataclasses
import math
import random
import re
import sys
from collections.abc import Callable

import pytest
from conftest import ROOT, char_tokenizer

import diagnostics
import prepare
import sample
import train
from checkpoint import load_checkpoint
from diagnostics import RunFacts, find_warnings, repeated_ngrams
from progress import read_metrics

SEEDS = range(20)
LOG_INTERVAL = 30
# 3,000 steps of 32,768 tokens, one epoch, 9.8 tokens a parameter: nothing to say before the first step
FACTS = RunFacts(10_000_000, 98_304_000, 32_768, 3000, 50257, 300)
EIGHT_EPOCHS = dataclasses.replace(FACTS, train_tokens=FACTS.train_tokens // 8)
START = math.log(50257) + 0.1


def learning(start: float = START, end: float = 3.3, pace: float = 250.0) -> Callable[[int], float]:
    """A loss that falls steeply, then slowly."""
    return lambda step: end + (start - end) / (1 + step / pace)


def settling(step: int) -> float:
    """A gradient norm: large at first, then 0.3, a little more while the learning rate decays."""
    return 0.3 + 4 * math.exp(-step / 60) + 0.3 * (step / 3000) ** 4


def make_history(
    seed: int,
    loss: Callable[[int], float] | None = None,
    val: Callable[[int], float] | None = None,
    norm: Callable[[int], float] = settling,
    noise: float = 0.07,
    eval_noise: float = 0.004,
    facts: RunFacts = FACTS,
    repeats: Callable[[int], float] | None = None,
    eval_interval: int = 150,
    **settings,
) -> list[dict]:
    """The events of a run, in the order and with the fields of train.py; `loss` and `val` are without noise."""
    draw, loss = random.Random(seed), loss or learning()
    val = val or (lambda step: loss(step) + 0.03)
    events = [{"event": "start", "iter": 0, "settings": {"init_from": "scratch"} | settings}]
    for step in range(facts.max_iters + 1):
        if step and (step == 1 or step % LOG_INTERVAL == 0):
            jitter = draw.gauss(0, noise)
            event = {"event": "train", "iter": step, "loss": max(0.01, loss(step) + jitter), "lr": 6e-4}
            event["grad_norm"] = norm(step) * math.exp(draw.gauss(0, 0.2))
            events.append(event | {"tokens": step * facts.tokens_per_step, "tokens_per_second": 1e5, "mfu": None})
        if step % eval_interval == 0:
            event = {"event": "eval", "iter": step, "train_loss": loss(step) + draw.gauss(0, eval_noise)}
            event["val_loss"] = val(step) + draw.gauss(0, eval_noise)
            events.append(event | ({"repetition": repeats(step)} if repeats else {}))
    return [*events, {"event": "end", "iter": facts.max_iters, "reason": "finished"}]


def replay(events: list[dict], facts: RunFacts = FACTS) -> list[diagnostics.Warning]:
    """All signs of a run, looked for after each event."""
    history, signs = [], []
    for event in events:
        history.append(event)
        new = find_warnings(history, facts)
        signs += new
        history += [{"event": "warning", "iter": s.iter, "kind": s.kind, "message": s.message} for s in new]
    return signs


# --- runs that are ill -----------------------------------------------------------------------------------------


def memorise(step: int) -> float:
    """A training loss that goes on falling after step 1,200."""
    return learning()(step) - max(0, step - 1200) / 1500


def forget(step: int) -> float:
    """A validation loss that turns at step 1,200."""
    return learning()(step) + max(0, step - 1200) / 800


def spike(step: int) -> float:
    return learning()(step) + 2.5 * (1000 <= step < 1060)


def diverge(step: int) -> float:
    return learning()(step) + min(4.0, max(0, step - 1500) / 250)


def climb(step: int) -> float:
    return START + min(3.0, step / 100)


def foreign(step: int) -> float:
    return learning(end=5.0)(step)


def leaked(step: int) -> float:
    return learning()(step) - min(1.0, step / 600)


ILL = {
    "overfitting": [{"loss": memorise, "val": forget, "facts": EIGHT_EPOCHS}],
    "loss_spike": [{"loss": spike}, {"loss": spike, "noise": 0.1}],
    "divergence": [
        {"loss": diverge},
        {"loss": climb},
        {"loss": lambda step: START + 2.0 if 30 < step < 200 else learning()(step)},
    ],
    "loss_not_moving": [{"loss": lambda step: START - 0.1}, {"loss": learning(end=10.6)}],
    "gradient_exploding": [
        {"norm": lambda step: settling(step) * (1 if step < 1000 else 200)},
        {"norm": lambda step: settling(step) * 1.15 ** max(0, step / LOG_INTERVAL - 35)},
        {"norm": lambda step: 400.0},
    ],
    "gradient_vanishing": [
        {"norm": lambda step: settling(step) * (1 if step < 1000 else 1e-4)},
        {"norm": lambda step: settling(step) * 0.85 ** max(0, step / LOG_INTERVAL - 35)},
        {"norm": lambda step: 1e-8},
    ],
    "split_mismatch": [{"val": foreign}, {"val": lambda step: learning()(step) + min(1.5, step / 200)}],
    "split_leak": [{"val": leaked}],
    "repetition": [{"repeats": lambda step: 0.5}, {"repeats": lambda step: 0.1 + 0.6 * (step > 2000)}],
    "many_epochs": [{"facts": dataclasses.replace(FACTS, train_tokens=FACTS.train_tokens // 13)}],
    "few_tokens_per_parameter": [
        {"facts": dataclasses.replace(FACTS, parameters=100_000_000)},
        {"facts": dataclasses.replace(FACTS, parameters=25_000_000)},
    ],
}
CASES = [(kind, case) for kind, cases in ILL.items() for case in cases]
# a corpus of a 13th, and still one token a parameter
ILL["many_epochs"][0]["facts"] = dataclasses.replace(ILL["many_epochs"][0]["facts"], parameters=7_000_000)


@pytest.mark.parametrize(("kind", "case"), CASES, ids=[kind for kind, _ in CASES])
def test_each_sign_comes_alone_once_and_tells_what_to_do(kind, case):
    known = {program: {f.name for f in dataclasses.fields(config)} for program, config in CONFIGS.items()}
    for seed in SEEDS[:6]:
        facts = case.get("facts", FACTS)
        signs = replay(make_history(seed, **case), facts)
        assert [sign.kind for sign in signs] == [kind], seed
        message = signs[0].message
        assert re.search(r"\d", message.split("Usual cause")[0]) and "Usual cause" in message
        flags = set(re.findall(r"--(\w+)", message))
        assert flags & known["train"] and flags <= set.union(*known.values()), flags
        assert "\n" not in message and len(message) < 600
        for path in re.findall(r"config/\w+\.py", message):
            assert (ROOT / path).exists(), path


CONFIGS = {"train": train.TrainConfig, "prepare": prepare.PrepareConfig, "sample": sample.SampleConfig}


def test_every_kind_is_tested():
    assert set(ILL) == {check.__name__ for check in diagnostics.CHECKS} == set(diagnostics.ADVICE)


def test_signs_are_seen_soon_after_they_begin():
    """Not at the end of the run, when they are of no use."""
    limits = {"overfitting": 2000, "loss_spike": 1020, "divergence": 2100, "loss_not_moving": 900}
    limits |= {"gradient_exploding": 1080, "gradient_vanishing": 1140, "split_mismatch": 600, "split_leak": 750}
    limits |= {"repetition": 750, "many_epochs": 0, "few_tokens_per_parameter": 0}
    for kind, cases in ILL.items():
        case = cases[0]
        assert replay(make_history(0, **case), case.get("facts", FACTS))[0].iter <= limits[kind], kind


def test_the_facts_speak_before_the_first_step():
    defaults = dataclasses.replace(FACTS, parameters=355_000_000, tokens_per_step=131_072, max_iters=50_000)
    kinds = [sign.kind for sign in find_warnings([], defaults)]
    assert kinds == ["many_epochs", "few_tokens_per_parameter"]
    start = {"event": "start", "iter": 0, "settings": {"init_from": "gpt2.pt"}}
    assert [sign.kind for sign in find_warnings([start], defaults)] == ["many_epochs"]  # has read elsewhere
    assert find_warnings([], FACTS) == []


def test_what_was_reported_stays_so_after_a_resume():
    events = make_history(3, loss=memorise, val=forget)
    (sign,) = replay(events, EIGHT_EPOCHS)
    at = next(i for i, event in enumerate(events) if event["event"] == "eval" and event["iter"] == sign.iter)
    told = {"event": "warning", "iter": sign.iter, "kind": sign.kind, "message": sign.message}
    again = {"event": "resume", "iter": sign.iter, "settings": {"init_from": "resume"}}
    assert find_warnings(events[: at + 1], EIGHT_EPOCHS) == [sign]
    for later in range(at + 1, len(events)):
        assert find_warnings([*events[: at + 1], told, again, *events[at + 1 : later]], EIGHT_EPOCHS) == []


def test_a_divergence_explains_the_spike_it_began_with():
    """Looked at as a whole, the worst is told; lived through, the spike comes first."""
    events = make_history(0, loss=lambda step: learning()(step) + 3 * (step > 1500))
    assert [sign.kind for sign in find_warnings(events, FACTS)] == ["divergence"]
    assert [sign.kind for sign in replay(events)] == ["loss_spike", "divergence"]


# --- runs that are well ----------------------------------------------------------------------------------------


def warm_up(step: int) -> float:
    """Hardly moves in the first 300 steps."""
    return START - 0.2 * min(1, step / 300) if step <= 300 else learning(START - 0.2)(step - 300)


def cosine(step: int) -> float:
    return 3.0 + (START - 3.0) * (0.15 * 0.5 * (1 + math.cos(math.pi * step / 3000)) + 0.85 / (1 + step / 80))


SMALL = RunFacts(200_000, 1_000_000, 1024, 3000, 65, 100)  # like tiny-shakespeare by characters: 3 epochs
WELL = {
    "fast": {"loss": learning(pace=15, end=2.8)},
    "slow": {"loss": learning(pace=1500)},
    "plateau": {"loss": lambda step: max(3.4, learning()(step)), "eval_noise": 0.01, "eval_interval": 40},
    "all noise": {"loss": learning(pace=60), "noise": 0.4, "norm": lambda step: 3 * settling(step)},
    "warm-up": {"loss": warm_up},
    "cosine": {"loss": cosine},
    "norm falls and rises": {"norm": lambda step: 8 * math.exp(-step / 100) + 0.15 + 0.6 * (step / 3000) ** 3},
    "single large norms": {"norm": lambda step: 40.0 if step % 240 == 0 else settling(step)},
    "validation wobbles": {"loss": learning(pace=40), "eval_noise": 0.02},
    "validation turns a little": {
        "facts": EIGHT_EPOCHS,
        "loss": memorise,
        "val": lambda step: learning()(step) + max(0, step - 2000) / 20000,
    },
    "validation is harder": {"val": lambda step: learning()(step) + min(0.25, step / 1000)},
    "validation is easier": {"val": lambda step: learning()(step) - min(0.2, step / 1000)},
    "gap in late epochs": {
        "facts": EIGHT_EPOCHS,
        "loss": lambda step: learning()(step) - step / 2500,
        "val": learning(),
    },
    "characters": {
        "facts": SMALL,
        "loss": learning(4.2, 1.4, 120),
        "val": lambda step: learning(4.2, 1.4, 120)(step) + 0.1 * step / 3000,
        "noise": 0.12,
        "eval_noise": 0.01,
        "norm": lambda step: 0.6 + 3 * math.exp(-step / 40),
    },
    "known by heart": {
        "loss": learning(end=0.0, pace=10),
        "noise": 0.02,
        "norm": lambda step: 3 * math.exp(-step / 100) + 1e-5,
    },
    "fine-tuning": {
        "facts": dataclasses.replace(FACTS, parameters=124_000_000),
        "loss": learning(3.2, 3.0, 400),
        "norm": lambda step: 0.5,
        "init_from": "gpt2.pt",
    },
    "fine-tuning on the same": {"loss": lambda step: 3.2 - 0.02 * step / 3000, "init_from": "gpt2.pt"},
    "young models repeat": {"repeats": lambda step: 0.8 if step < 500 else 0.08},
    "one poor sample": {"repeats": lambda step: 0.6 if step == 1500 else 0.15},
}


@pytest.mark.parametrize("name", WELL)
def test_a_healthy_run_is_silent(name):
    case = WELL[name]
    for seed in SEEDS:
        assert replay(make_history(seed, **case), case.get("facts", FACTS)) == [], seed


def test_a_healthy_resumed_run_is_silent():
    """With its old history, with the evaluation at the cut repeated, and without the old history."""
    for seed in SEEDS:
        events = make_history(seed)
        cut = next(i for i, e in enumerate(events) if e["event"] == "eval" and e["iter"] == 1500)
        resume = {"event": "resume", "iter": 1500, "settings": {"init_from": "resume"}}
        assert replay([*events[: cut + 1], resume, *events[cut:]]) == []
        assert replay([resume, *events[cut:]]) == []


def test_short_histories_are_silent():
    for seed in SEEDS:
        events = make_history(seed)
        evals = [e for e in events if e["event"] == "eval"]
        trains = [e for e in events if e["event"] == "train"]
        for part in ([], events[:1], events[:2], events[:3], events[:4], evals[:1], evals[:3], trains[:1], trains[:3]):
            assert find_warnings(part, FACTS) == []


def test_heavy_tailed_batches_are_silent():
    """Student's t with 8 degrees of freedom: now and then a batch with a strange document."""
    for seed in SEEDS:
        draw, events = random.Random(seed), make_history(seed, noise=0.0)
        for event in events:
            if event["event"] == "train":
                event["loss"] += 0.2 * draw.gauss(0, 1) / math.sqrt(draw.gammavariate(4, 2) / 8)
        assert replay(events) == []


def test_numbers_that_are_missing_or_not_finite_are_passed_over():
    for value in (math.nan, math.inf, None, "inf"):
        events = make_history(0)
        for event in events[5::7]:
            event |= {key: value for key in ("loss", "grad_norm", "train_loss", "val_loss") if key in event}
        assert replay(events) == []
    events = [e | ({"loss": math.nan} if e["event"] == "train" else {}) for e in make_history(0)]
    assert replay(events) == []
    assert find_warnings([{"event": "eval", "iter": 5}, {"event": "train", "iter": 5}], FACTS) == []


# --- the rest --------------------------------------------------------------------------------------------------


def test_repeated_ngrams():
    assert repeated_ngrams(range(300)) == 0.0
    assert repeated_ngrams([7] * 104) == pytest.approx(100 / 101)
    assert repeated_ngrams([1, 2, 3, 4] * 2) == pytest.approx(1 / 5)  # 1234 2341 3412 4123 1234
    assert repeated_ngrams([1, 2, 1, 2], n=2) == pytest.approx(1 / 3)
    for ids in ([], [1], [1, 2, 3]):
        assert repeated_ngrams(ids) == 0.0


def test_it_stands_on_the_standard_library_and_keeps_its_budget():
    text = (ROOT / "diagnostics.py").read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            assert all(name.split(".")[0] in sys.stdlib_module_names for name in names), names
        if isinstance(node, ast.FunctionDef):
            assert ast.get_docstring(node) or node.name == "__init__", node.name
            assert node.end_lineno - node.lineno < 40, node.name
    assert text.count("\n") <= 250


def write_words(path, words: int, different: int) -> None:
    """Lines of eight words drawn evenly from so many different ones: nothing to learn but the words themselves."""
    draw = random.Random(0)
    vocabulary = ["".join(draw.choices("abcdefghijklmnopqrst", k=draw.randint(2, 5))) for _ in range(different)]
    lines = (" ".join(draw.choices(vocabulary, k=8)) for _ in range(words // 8))
    path.write_text("\n".join(lines), encoding="utf-8")


def train_on_words(folder, words: int, different: int, *flags: str) -> list[str]:
    """Prepares random words, trains on them, and returns the kinds of the signs that the metrics give."""
    write_words(folder / "words.txt", words, different)
    characters = "abcdefghijklmnopqrst \n"
    (folder / "chars.json").write_text(char_tokenizer(characters), encoding="utf-8")
    source = ["--dataset=words", "--input=words.txt", "--tokenizer=chars.json", "--document=line", "--num_proc=1"]
    assert prepare.main(source) == 0
    settings = "--dataset=words --device=cpu --dtype=float32 --compile=false --n_layer=2 --n_head=2 --block_size=32"
    settings += " --gradient_accumulation_steps=1 --dropout=0.0 --eval_interval=20 --eval_iters=4 --warmup_iters=20"
    assert train.main([*settings.split(), *flags]) == 0
    state = load_checkpoint(folder / "out" / "last.pt")
    config = train.TrainConfig(**state["config"])
    weights = sum(t.numel() for name, t in state["model"].items() if "lm_head" not in name)
    data = state["data"]
    facts = (data["train_tokens"], config.tokens_per_step, config.max_iters, data["vocab_size"], config.warmup_steps)
    history = [event for event in read_metrics(folder / "out" / "metrics.jsonl") if event["event"] != "warning"]
    return [sign.kind for sign in replay(history, RunFacts(weights, *facts))]


@pytest.mark.slow
def test_a_real_run_on_a_tiny_corpus_overfits(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kinds = train_on_words(
        tmp_path, 160, 160, "--n_embd=64", "--max_iters=160", "--learning_rate=1e-2", "--batch_size=8"
    )
    assert kinds == ["many_epochs", "few_tokens_per_parameter", "overfitting"]


@pytest.mark.slow
def test_a_real_run_on_enough_text_is_silent(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kinds = train_on_words(
        tmp_path, 20000, 60, "--n_embd=32", "--n_layer=1", "--max_iters=200", "--learning_rate=3e-3", "--batch_size=16"
    )
    assert kinds == []
