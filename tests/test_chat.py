"""Questions and answers: rows, masks, batches, the loss over answers, conversations with sample.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, read_events

import prepare
import sample
import train
from chat import chat_tokenizer, encode_chat, restore_tokenizer
from checkpoint import checkpoint_tokenizer, load_checkpoint
from configurator import UserError
from dataset import TokenData
from model import GPT, GPTConfig
from pairs import PairData, open_data
from tokenizer import load_gpt2, read_tokenizer_json

USER, ASSISTANT, END = 50258, 50259, 50256
ROWS = [
    {"prompt": "one", "completion": " two three"},
    {"question": "one", "answer": " two three"},
    {"instruction": "one", "input": "", "output": " two three"},
    {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": " two three"}]},
]
SHAPE = ["--device=cpu", "--dtype=float32", "--compile=false", "--gradient_accumulation_steps=2", "--warmup_iters=2"]


def make(folder: Path, rows: list, *flags: str, name: str = "pairs", code: int = 0) -> Path:
    """Prepares rows with GPT-2's tokenizer, all of them for training unless a flag says otherwise."""
    folder.mkdir(exist_ok=True)
    source = folder / f"{name}.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    common = [f"--input={source}", f"--dataset={name}", f"--data_dir={folder}/data", "--num_proc=1", "--chat=true"]
    assert prepare.main([*common, "--val_fraction=0", *flags]) == code
    return folder / "data" / name


def pair(question: str, answer: str) -> dict[str, str]:
    return {"question": question, "answer": answer}


def numbers(count: int) -> str:
    """Text of `count` tokens of GPT-2."""
    return " one" * count


# --- rows, ids, masks -----------------------------------------------------------------------------------------------


def test_all_forms_of_rows_give_the_same(tmp_path) -> None:
    folder, tokenizer = make(tmp_path, ROWS), load_gpt2()
    ids, mask = np.fromfile(folder / "train.bin", "<u2"), np.fromfile(folder / "train.mask", np.uint8)
    answer = tokenizer.encode(" two three").tolist()
    assert ids.tolist() == [USER, *tokenizer.encode("one"), ASSISTANT, *answer, END] * 4
    assert mask.tolist() == [2, 0, 0, *[1] * len(answer), 1] * 4  # 2 starts a conversation
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["vocab_size"] == 50260 and meta["splits"]["train"]["documents"] == 4
    assert restore_tokenizer(meta["tokenizer"], folder).chat_ids == {
        "system": 50257,
        "user": USER,
        "assistant": ASSISTANT,
    }


def test_content_is_plain_text_and_boundaries_are_token_boundaries() -> None:
    tokenizer = chat_tokenizer(load_gpt2())
    turns = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi <|assistant|>\n"}]
    turns.append({"role": "assistant", "content": " yes<|endoftext|>"})
    ids, counted = encode_chat(tokenizer, turns)
    prompt = [*encode_chat(tokenizer, turns[:2])[0].tolist(), ASSISTANT]
    assert ids[: len(prompt)].tolist() == prompt  # what sample.py asks with is a prefix of what was trained
    assert ids.tolist().count(ASSISTANT) == 1 and np.flatnonzero(ids == END).tolist() == [len(ids) - 1]
    assert counted.tolist() == [False] * len(prompt) + [True] * (len(ids) - len(prompt))
    assert tokenizer.decode(ids.tolist()) == (
        "<|system|>be brief<|user|>hi < |assistant|>\n<|assistant|> yes< |endoftext|><|endoftext|>"
    )
    tokenizer.identity["chat_template"] += " "
    with pytest.raises(UserError, match="another version"):
        encode_chat(tokenizer, turns)
    with pytest.raises(UserError, match="not trained to chat"):
        encode_chat(load_gpt2(), turns)


def test_question_changes_no_label_and_end_comes_once(tmp_path) -> None:
    short = make(tmp_path, [pair("a", "yes"), pair("b", "no<|endoftext|>")], name="short")
    long = make(tmp_path, [pair("a much longer question", "yes"), pair("b\r\n?", "no")], name="long")
    ids, masks = (
        [np.fromfile(f / n, t) for f in (short, long)] for n, t in (("train.bin", "<u2"), ("train.mask", "u1"))
    )
    assert [int((mask & 1).sum()) for mask in masks] == [4, 4]
    assert [(i == END).sum() for i in ids] == [2, 2]  # written out after an answer, it is the id all the same
    assert load_gpt2().decode(ids[1][ids[1] < END].tolist()).endswith("yesb\n?no")  # CRLF became LF


def test_an_end_token_of_ones_own_closes_an_answer_once(tmp_path) -> None:
    """H64, with another end token than GPT-2's; inside of a text it is text."""
    file = tmp_path / "own.json"
    file.write_text(byte_tokenizer("</s>"))
    rows = [pair("a </s>", "yes</s>"), pair("b", "no </s> no")]
    folder = make(tmp_path, rows, f"--tokenizer={file}", "--eot_token=</s>")
    tokenizer = chat_tokenizer(read_tokenizer_json(file.read_text(), "own.json", "</s>"))
    ids = np.fromfile(folder / "train.bin", "<u2")
    assert (ids == tokenizer.eot_id).sum() == 2
    assert tokenizer.decode(ids.tolist()) == "<|user|>a < /s><|assistant|>yes</s><|user|>b<|assistant|>no < /s> no</s>"


def byte_tokenizer(*specials: str, scheme: str | None = None) -> str:
    """A tokenizer.json of bytes; with a scheme, one of characters where a word's first stands for the space before."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    inner = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted([*pre_tokenizers.ByteLevel.alphabet(), "▁"]))}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    if scheme:
        inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(prepend_scheme=scheme), decoders.Metaspace()
    inner.add_special_tokens(list(specials))
    return inner.to_str()


def test_tokenizers_that_cannot_chat_are_told_before_an_id_is_written(tmp_path, capsys) -> None:
    gap = json.loads(byte_tokenizer("<|endoftext|>"))
    gap["model"]["vocab"]["zz"] = 262
    for text, part in {
        byte_tokenizer("<|endoftext|>", scheme="first"): "other ids inside of a conversation",
        byte_tokenizer("<|endoftext|>", "§"): "cannot hold as text: '§'",
        json.dumps(gap): "gaps in its ids",
    }.items():
        (tmp_path / "odd.json").write_text(text)
        make(tmp_path, [pair("a", "b")], f"--tokenizer={tmp_path}/odd.json", code=2)
        error = capsys.readouterr().err
        assert error.startswith("error: odd.json ") and part in error, error
    assert not list(tmp_path.rglob("*.bin"))
    (tmp_path / "even.json").write_text(byte_tokenizer("<|endoftext|>", scheme="always"))
    make(tmp_path, [pair("a", "b")], f"--tokenizer={tmp_path}/even.json")


@pytest.mark.parametrize(
    ("row", "parts"),
    [
        ({"text": "x"}, ["line 2", "question/answer", "'text'"]),
        ({"messages": [{"role": "robot", "content": "x"}]}, ["line 2", "robot", "system, user, assistant"]),
        ({"question": "x", "answer": 7}, ["line 2", "with text"]),
        ({"messages": [{"role": "user", "content": "x"}]}, ["line 2", "no answer"]),
        ({"messages": "x"}, ["line 2", "not a list"]),
    ],
)
def test_odd_rows(tmp_path, capsys, row, parts) -> None:
    make(tmp_path, [pair("a", "b"), row], code=2)
    error = capsys.readouterr().err
    assert all(part in error for part in parts) and not (tmp_path / "data/pairs/train.bin").exists()
    folder = make(tmp_path, [pair("a", "b"), row], "--skip_bad_rows=true")
    assert "1 row without a conversation skipped" in capsys.readouterr().out
    assert json.loads((folder / "meta.json").read_text())["splits"]["train"]["documents"] == 1


def test_settings_that_do_not_go_together(tmp_path, capsys) -> None:
    make(tmp_path, [pair("a", "b")], "--tokenizer=train", code=2)
    assert "tokenizer.json" in capsys.readouterr().err
    make(tmp_path, [pair("a", "b")], "--val_fraction=0.5", code=2)
    assert "too few conversations" in capsys.readouterr().err
    (tmp_path / "plain.txt").write_text("text")
    assert prepare.main([f"--input={tmp_path}/plain.txt", "--chat=true", f"--data_dir={tmp_path}", "--num_proc=1"]) == 2
    assert "rows in .jsonl" in capsys.readouterr().err


# --- batches --------------------------------------------------------------------------------------------------------


def test_labels_of_a_padded_batch(tmp_path) -> None:
    data = open_data(make(tmp_path, [pair(numbers(3), numbers(2)), pair("x", numbers(8))]), 16)
    assert isinstance(data, PairData)
    x, y = data.train_batch(0, 4)
    order = np.argsort((y != -1).sum(1))
    one = load_gpt2().encode(" one")[0]
    assert y[order[0]].tolist() == [-1] * 4 + [one, one, END] + [-1] * 9  # the end is learnt, the padding is not
    assert x[order[0]].tolist() == [USER, one, one, one, ASSISTANT, one, one] + [END] * 9
    assert y[order[1]].tolist() == [-1] * 2 + [one] * 8 + [END] + [-1] * 5


def test_long_questions_are_dropped_and_long_answers_cut(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    folder = make(tmp_path, [pair(numbers(40), "x"), pair("a", "b"), pair("c", numbers(40))])
    data = open_data(folder, 16)
    assert "2 conversations" in data.note and "1 dropped" in data.note and "1 cut" in data.note
    x, y = data.train_batch(0, 4)
    model = GPT(GPTConfig(16, 50304, 1, 2, 8))
    assert x.shape == (2, 16) and model(torch.from_numpy(x), torch.from_numpy(y)).isfinite()
    make(tmp_path, [pair(numbers(40), "x")], name="only")
    assert "next: ./start_train.sh config/finetune_chat.py --dataset=only" in capsys.readouterr().out
    small = ["--n_layer=1", "--n_head=1", "--n_embd=8", "--block_size=16", "--dataset=only"]
    assert train.main([*SHAPE, *small]) == 2
    error = capsys.readouterr().err
    assert "none of 1 conversations leaves room for an answer" in error and not (tmp_path / "out").exists()


def test_every_conversation_once_an_epoch(tmp_path) -> None:
    lengths = np.random.RandomState(0).randint(1, 60, 200)
    data = open_data(make(tmp_path, [pair(str(i), numbers(n)) for i, n in enumerate(lengths)]), 64, seed=3)
    seen, order, batch = [], [], 0
    while len(seen) < 200:
        rows = data._train_rows(batch, 4)
        x, _ = data.train_batch(batch * 4, 4)
        assert len(x) == len(rows) and x.size <= 4 * 64
        seen, order, batch = [*seen, *rows.tolist()], [*order, len(rows)], batch + 1
    assert sorted(seen) == list(range(200)) and max(order) > 6 and batch < 50  # short ones together
    padding = 1 - lengths.sum() / sum(data.train_batch(i * 4, 4)[0].size for i in range(batch))
    assert (
        padding < 0.4
    )  # of rows of 1 to 60 tokens rounded up to 32; a row for each in full would waste more than half
    again = PairData(data.folder, 64, seed=3)
    assert np.array_equal(again.train_batch(batch * 4 * 3, 4)[0], data.train_batch(batch * 4 * 3, 4)[0])  # no state
    assert not np.array_equal(data._train_rows(0, 4), data._train_rows(batch, 4))  # another order the next time


def test_conversations_do_not_see_each_other(tmp_path) -> None:
    data = open_data(make(tmp_path, [pair("a b", numbers(9)), pair("c", numbers(4)), pair("d", numbers(2))]), 32)
    x, y = map(torch.from_numpy, data.train_batch(0, 8))
    torch.manual_seed(0)
    model = GPT(GPTConfig(32, 50304, 2, 2, 16)).eval()
    together = model(x)
    for row, start_to_end in zip(range(len(x)), (y != -1).nonzero().split((y != -1).sum(1).tolist()), strict=True):
        last = int(start_to_end[-1, 1]) + 1
        assert torch.allclose(together[row, :last], model(x[row : row + 1, :last])[0], atol=1e-5)


def test_gradient_is_that_of_all_counted_tokens(tmp_path) -> None:
    """H62: 11 and 101 trained tokens in one batch, and in two micro-batches."""
    data = open_data(make(tmp_path, [pair("a", numbers(10)), pair("b", numbers(100))]), 128)
    torch.manual_seed(0)
    model = GPT(GPTConfig(128, 50304, 1, 2, 16))
    x, y = map(torch.from_numpy, data.train_batch(0, 8))
    assert sorted((y != -1).sum(1).tolist()) == [11, 101] and data.loss_weight(0, 1, 8) == 1
    model(x, y).backward()
    whole = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    for batch in range(2):
        x, y = map(torch.from_numpy, data.train_batch(batch, 1))
        assert len(x) == 1
        (model(x, y) / (2 / data.loss_weight(batch, 2, 1))).backward()
    assert all(torch.allclose(whole[name], p.grad, atol=1e-6) for name, p in model.named_parameters())
    assert sum(data.loss_weight(batch, 2, 1) for batch in range(2)) == pytest.approx(2)


def test_ordinary_data_weighs_exactly_one(tiny) -> None:
    data = open_data(Path("data/tiny"), 16)
    assert type(data) is TokenData and data.loss_weight(5, 3, 4) == 1
    loss = torch.tensor(1.2345678)
    assert all(torch.equal(loss / (n / data.loss_weight(0, n, 4)), loss / n) for n in range(1, 100))


# --- the runs -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chat_run(tmp_path_factory) -> Path:
    """A folder with a tiny base model on a tokenizer of its own, fine-tuned on eight pairs until it knows them."""
    folder = tmp_path_factory.mktemp("chat")
    patch = pytest.MonkeyPatch()
    patch.chdir(folder)
    words = "red green blue white black brown pink grey".split()
    rows = [pair(f"What colour has number {i}?", f"Number {i} is {word}.") for i, word in enumerate(words)]
    Path("text.txt").write_text("".join(f"{r['question']} {r['answer']}\n" for r in rows) * 30)
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    base = ["--input=text.txt", "--dataset=base", "--num_proc=1", "--tokenizer=train", "--vocab_size=300"]
    assert prepare.main(base) == 0
    shape = ["--n_layer=2", "--n_head=2", "--n_embd=64", "--block_size=64", "--dropout=0", "--batch_size=8"]
    short = ["--eval_iters=2", "--learning_rate=3e-3"]
    assert train.main([*SHAPE, *shape, *short, "--dataset=base", "--out_dir=out/base", "--max_iters=60"]) == 0
    pairs = ["--input=pairs.jsonl", "--dataset=pairs", "--num_proc=1", "--chat=true"]
    assert prepare.main([*pairs, "--tokenizer=data/base/tokenizer.json", "--val_fraction=0"]) == 0
    config = str(Path(train.__file__).parent / "config/finetune_chat.py")
    flags = ["--dataset=pairs", "--init_from=out/base/my_own_llm.pt", "--out_dir=out/chat", "--max_iters=120"]
    assert train.main([config, *SHAPE, *short, *flags, "--dropout=0", "--log_interval=1", "--batch_size=4"]) == 0
    patch.undo()
    return folder


@pytest.mark.slow
def test_loss_is_the_sum_over_counted_tokens_by_their_number(chat_run) -> None:
    state = load_checkpoint(chat_run / "out/base/my_own_llm.pt")
    model = GPT.from_state(GPTConfig(**state["model_args"]), state["model"]).eval()
    data = open_data(chat_run / "data/pairs", 64, train.TrainConfig.seed)
    model.used_vocabulary = data.vocab_size
    total = count = 0
    for batch in range(2):
        x, y = map(torch.from_numpy, data.train_batch(batch * 4, 4))
        number = int((y != -1).sum())
        total, count = total + model(x, y).item() * number, count + number
    assert read_events(chat_run / "out/chat", "train")[0]["loss"] == pytest.approx(total / count, rel=1e-5)
    samples = (chat_run / "out/chat/samples.txt").read_text()
    assert (
        samples.count("<|user|>What colour has number ") == samples.count("<|assistant|>") == samples.count("=== step")
    )
    losses = [event["val_loss"] for event in read_events(chat_run / "out/chat", "eval")]
    assert losses[-1] < 0.3 < 2 < losses[0]


@pytest.mark.slow
def test_two_processes_learn_what_one_learns(chat_run, monkeypatch) -> None:
    """H62 across ranks, over gloo: answers of one to some sixty tokens, so that every rank has another number of them."""
    monkeypatch.chdir(chat_run)
    rows = [pair(f"{i}", "red " * (1 + i * 7 % 15)) for i in range(24)]
    make(chat_run, rows * 2, f"--tokenizer={chat_run}/data/base/tokenizer.json", "--val_fraction=0.5", name="uneven")
    flags = [*SHAPE, "--dataset=uneven", "--init_from=out/base/my_own_llm.pt", "--batch_size=1", "--max_iters=3"]
    flags += [
        "--eval_iters=4",
        "--log_interval=1",
        "--dropout=0",
        "--learning_rate=1e-3",
        "--gradient_accumulation_steps=4",
    ]
    assert train.main([*flags, "--out_dir=out/one"]) == 0
    launch = [
        sys.executable,
        str(ROOT / "tools/launch.py"),
        "--standalone",
        "--nproc_per_node=2",
        str(ROOT / "train.py"),
    ]
    done = subprocess.run([*launch, *flags, "--out_dir=out/two", "--backend=gloo"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    data = open_data(chat_run / "data/uneven", 64, train.TrainConfig.seed)
    first = [data.loss_weight(batch, 4, 1) for batch in range(4)]
    assert max(first) > 2 * min(first) and sum(first) == pytest.approx(4)
    for kind, key in (("train", "loss"), ("train", "grad_norm"), ("eval", "val_loss")):
        one, two = ([event[key] for event in read_events(Path(f"out/{name}"), kind)] for name in ("one", "two"))
        assert one == pytest.approx(two, rel=1e-4)


@pytest.mark.slow
def test_held_out_pairs_stop_a_run_that_learns_by_heart(chat_run, monkeypatch, capsys) -> None:
    monkeypatch.chdir(chat_run)
    tokenizer = f"--tokenizer={chat_run}/data/base/tokenizer.json"
    make(
        chat_run,
        [pair(f"number {i}?", f"{i * 37 % 100} {i}") for i in range(12)],
        tokenizer,
        "--val_fraction=0.3",
        name="held",
    )
    config = str(ROOT / "config/finetune_chat.py")
    flags = ["--dataset=held", "--init_from=out/base/my_own_llm.pt", "--out_dir=out/held", "--max_iters=400"]
    flags += ["--eval_interval=10", "--learning_rate=1e-2", "--batch_size=4", "--dropout=0"]
    assert train.main([config, *SHAPE, *flags]) == 0
    assert "no better validation loss in 3 evaluations: stopped early" in capsys.readouterr().out
    losses = {event["iter"]: event["val_loss"] for event in read_events(Path("out/held"), "eval")}
    best = load_checkpoint(Path("out/held/my_own_llm.pt"))["iter_num"]
    assert losses[best] == min(losses.values()) and max(losses) == best + 30 < 400


@pytest.mark.slow
def test_model_answers_and_keeps_the_conversation(chat_run, monkeypatch, capsys) -> None:
    monkeypatch.chdir(chat_run)
    common = ["--out_dir=out/chat", "--device=cpu", "--chat=true", "--temperature=0"]
    assert sample.main([*common, "--start=What colour has number 3?"]) == 0
    assert capsys.readouterr().out == "Number 3 is white.\n"
    asked, write = [], sample.write_samples
    monkeypatch.setattr(sample, "write_samples", lambda *a: (asked.append(a[2]), write(*a))[1])
    lines = iter(["What colour has number 1?", "What colour has number 6?", "", "What colour has number 0?"])
    monkeypatch.setattr(sample, "ask_prompts", lambda: lines)
    assert sample.main(common) == 0
    assert capsys.readouterr().out.splitlines()[0] == "Number 1 is green."
    tokenizer = checkpoint_tokenizer(load_checkpoint(Path("out/chat/my_own_llm.pt")))
    assert tokenizer.decode(asked[1]).startswith(
        "<|user|>What colour has number 1?<|assistant|>Number 1 is green.<|endo"
    )
    assert tokenizer.decode(asked[2]) == "<|user|>What colour has number 0?<|assistant|>"  # an empty line starts anew
    assert asked[0] == [
        *encode_chat(tokenizer, [{"role": "user", "content": "What colour has number 1?"}])[0],
        tokenizer.chat_ids["assistant"],
    ]
    texts = ["What colour has number 1?", "Number 1 is green."] * 6 + ["What colour has number 2?"]
    model = sample.load_model(sample.SampleConfig(out_dir="out/chat"), sample.choose_device("cpu", "float32"))[0]
    kept = sample.answer(model, tokenizer, sample.SampleConfig(chat=True, temperature=0), texts)
    assert len(kept) < len(texts) and kept[-2] == texts[-1]  # the oldest turns do not fit any more
    with pytest.raises(UserError, match="ask a shorter one"):
        sample.answer(model, tokenizer, sample.SampleConfig(chat=True), ["why " * 100])
    assert sample.main(["--out_dir=out/base", "--device=cpu", "--chat=true", "--start=x"]) == 2
    assert "config/finetune_chat.py" in capsys.readouterr().err


@pytest.mark.slow
def test_resumed_fine_tuning_repeats(chat_run, monkeypatch) -> None:
    monkeypatch.chdir(chat_run)
    flags = [*SHAPE, "--dataset=pairs", "--init_from=out/base/my_own_llm.pt", "--eval_iters=1", "--batch_size=1"]
    flags += ["--lr_decay_iters=6", "--log_interval=1"]
    assert train.main([*flags, "--out_dir=out/whole", "--max_iters=6"]) == 0
    assert train.main([*flags, "--out_dir=out/parts", "--max_iters=3"]) == 0
    assert train.main(["--init_from=resume", "--out_dir=out/parts", "--max_iters=6"]) == 0
    whole, parts = (load_checkpoint(Path(f"out/{name}/last.pt"))["model"] for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


@pytest.mark.slow
def test_exports_of_the_chat_model(chat_run, monkeypatch, capsys) -> None:
    pytest.importorskip("xllamacpp")
    from tools import export_model
    from tools.llama_runner import Questions, ask_llama

    monkeypatch.chdir(chat_run)
    flags = ["--checkpoint=out/chat/my_own_llm.pt", "--format=gguf", "--quant=f32,q8_0,q4_0"]
    assert export_model.main(flags) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("format ")]
    assert [row.split(",")[0] for row in rows] == ["format f32", "format q8_0", "format q4_0"]
    assert all("perplexity" in row and "its perplexity" in row and "21 texts alike" in row for row in rows)
    modelfile = Path("out/chat/gguf/Modelfile").read_text()
    assert modelfile.startswith("# Ollama's templates cannot") and "<|{{ .Role }}|>{{ .Content }}" in modelfile
    question = [{"role": "user", "content": "What colour has number 3?"}]
    asked = Questions([], [1], 1, [], [question])
    (prompt,) = ask_llama(Path("out/chat/gguf/chat-q4_0.gguf"), 64, asked).conversations
    tokenizer = checkpoint_tokenizer(load_checkpoint(Path("out/chat/my_own_llm.pt")))
    assert prompt == [*encode_chat(tokenizer, question)[0].tolist(), tokenizer.chat_ids["assistant"]]
    for quant in ("f32", "q4_0"):
        answered = ask_llama(Path(f"out/chat/gguf/chat-{quant}.gguf"), 64, Questions([], prompt, 30, [], []))
        assert answered.text == "Number 3 is white." and answered.continuation[-1] == tokenizer.eot_id


def test_questions_on_the_python_documentation(capsys) -> None:
    from tests import make_questions

    make_questions.main()
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) > 3000 and all(set(row) == {"question", "answer"} for row in rows)
    found = {row["question"]: row["answer"] for row in rows}
    assert found["Which module has the function dedent?"] == "The function dedent is in the module textwrap."
    assert found["What does textwrap.dedent do?"].startswith("Remove any common leading whitespace")
