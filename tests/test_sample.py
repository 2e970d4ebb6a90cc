"""sample.py: prompts, settings and checkpoints of all kinds, and the text that comes out."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, char_tokenizer, fill_randomly

import sample
from checkpoint import build_model, load_checkpoint, save_checkpoint
from model import GPT, GPTConfig, Sampler, generate
from tokenizer import load_gpt2, load_tokenizer, read_tokenizer_json

LETTERS = "abcdefghijklmnopqrstuvwxyz ."
CHARS = read_tokenizer_json(char_tokenizer(LETTERS), "chars.json")
EOT = CHARS.eot_id  # 28, the last of 29 ids
SHAPE = GPTConfig(block_size=16, vocab_size=CHARS.vocab_size, n_layer=2, n_head=2, n_embd=32)


def random_model(seed: int = 0, **changes) -> GPT:
    """A model with random weights, lively enough to write more than one letter."""
    return fill_randomly(GPT(dataclasses.replace(SHAPE, **changes)).eval(), seed)


def planned_model(plan: dict[int, int], otherwise: int, **changes) -> GPT:
    """A model that is certain of plan[position] as the next id, of `otherwise` at other positions: blocks do nothing."""
    model = GPT(dataclasses.replace(SHAPE, block_size=64, **changes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".h." in name:
                parameter.zero_()
        model.transformer["wte"].weight.copy_(torch.eye(model.config.vocab_size, 32))
        model.transformer["wpe"].weight.zero_()
        for position in range(64):
            model.transformer["wpe"].weight[position, plan.get(position, otherwise)] = 100.0
        model.transformer["ln_f"].weight.fill_(100.0)
    return model


def save(path: Path, model: GPT, identity: dict | None = CHARS.identity, /, **state) -> Path:
    """Writes what train.py's model_state has; a None leaves its key out."""
    state = {
        "format_version": 1,
        "model": model.state_dict(),
        "model_args": dataclasses.asdict(model.config),
        "iter_num": 1200,
        "best_val_loss": 1.25,
        "config": {},
        "tokenizer": identity,
    } | state
    save_checkpoint(path, {key: value for key, value in state.items() if value is not None})
    return path


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A working folder, entered, whose out/my_own_llm.pt is a random model over characters."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    save(tmp_path / "out" / "my_own_llm.pt", random_model())
    return tmp_path


@pytest.fixture
def write(folder, capsys):
    """Runs sample.py in this process; returns exit code, standard output and standard error."""

    def run(*flags: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = sample.main(["--device=cpu", "--max_new_tokens=40", "--stop_at_eot=false", *flags])
        return code, *capsys.readouterr()

    return run


def text_of(write, *flags: str) -> str:
    """The text, of a run that must succeed."""
    code, out, err = write(*flags)
    assert code == 0, err
    return out


def error_of(write, *flags: str) -> str:
    """The error, of a run that must fail with one line and print no text."""
    code, out, err = write(*flags)
    told = ("settings from ", "out/my_own_llm.pt: ")
    lines = [line for line in err.splitlines() if not line.startswith(told)]
    assert (code, out, len(lines)) == (2, "", 1) and lines[0].startswith("error: "), (code, out, err)
    return lines[0]


def expected(prompt: str, new: int = 40, model: GPT | None = None, tokenizer=CHARS, **settings) -> str:
    """Prompt and continuation by the definition: each id from the whole model's answer to the last block_size ids."""
    model = model or random_model()
    settings = {"temperature": 0.8, "top_k": 40, "top_p": 1.0, "seed": 42, "samples": 1} | settings
    sampler, ids = Sampler(**settings), [int(i) for i in tokenizer.encode(prompt)] or [tokenizer.eot_id]
    start = len(ids)
    for _ in range(new):
        with torch.no_grad():
            logits = model(torch.tensor([ids[-model.config.block_size :]]))[:, -1, : tokenizer.vocab_size]
        ids.append(sampler(logits).item())
    return prompt + tokenizer.decode(ids[start:]) + "\n"


# --- settings ------------------------------------------------------------------------------------------------------


def test_temperature_0_is_greedy_whatever_the_seed(write):
    """H37: greedy; same text for every seed; int accepted."""
    greedy = expected("hello", temperature=0.0, top_k=None)
    for flags in (("--temperature=0.0", "--seed=1"), ("--temperature=0.0", "--seed=2"), ("--temperature=0",)):
        assert text_of(write, "--start=hello", *flags) == greedy
    assert text_of(write, "--start=hello", "--temperature=5e-324") == greedy


def test_top_k_0_and_none_are_no_limit_and_a_negative_one_an_error(write):
    """H38: 0 and None mean no limit, negative is a loud error; temperature 0 with top_k 0 is plain greedy."""
    unlimited = expected("hello", top_k=None)
    assert text_of(write, "--start=hello", "--top_k=0") == unlimited
    assert text_of(write, "--start=hello", "--top_k=None") == unlimited
    assert text_of(write, "--start=hello", "--top_k=1") == expected("hello", temperature=0.0, top_k=None)
    assert text_of(write, "--temperature=0", "--top_k=0", "--start=hello") == expected("hello", temperature=0, top_k=0)
    for temperature in ("0.8", "0"):
        assert "top_k=-1 must not be negative" in error_of(write, "--top_k=-1", f"--temperature={temperature}")


def test_top_k_beyond_the_vocabulary_is_no_limit(write):
    """H39: same output as without top_k for the same seed."""
    assert text_of(write, "--start=hello", "--top_k=100000") == text_of(write, "--start=hello", "--top_k=none")


def test_a_prompt_longer_than_the_context_goes_on_from_its_end(write):
    """H40: prompt echoed whole, exactly 40 new tokens, each from the last 16 ids."""
    prompt = "the quick brown fox jumps over the lazy dog. and again"
    assert len(prompt) == 54
    _, out, err = write(f"--start={prompt}")
    assert out == expected(prompt) and "40 tokens in " in err
    assert out[54:] == text_of(write, f"--start={prompt[-16:]}")[16:]


def test_an_empty_prompt_starts_at_the_end_of_text_id(write, folder):
    """H41: generation starts from the end-of-text id, exit code 0."""
    (folder / "empty.txt").write_bytes(b"")
    assert text_of(write, "--start=") == text_of(write, "--start=FILE:empty.txt") == expected("")


def test_characters_that_the_model_never_saw_are_an_error_that_lists_them(write):
    """H42: loud error listing `Z` and `?`."""
    said = error_of(write, "--start=Z?")
    assert "'Z'" in said and "'?'" in said and "chars.json" in said


def test_characters_that_would_become_the_unknown_token_are_an_error_too(write, folder):
    tokenizer = read_tokenizer_json(char_tokenizer(LETTERS, unknown="[UNK]"), "unknown.json")
    save(folder / "out" / "my_own_llm.pt", random_model(vocab_size=tokenizer.vocab_size), tokenizer.identity)
    said = error_of(write, "--start=aZ?b")
    assert "'Z'" in said and "'?'" in said and "'a'" not in said


def test_rows_of_the_model_that_no_token_uses_are_never_sampled(write, folder):
    """H43: model rows 64, fewer ids; logits of padding rows are cut off before temperature and top_k."""
    model = random_model(vocab_size=64)
    with torch.no_grad():  # a direction that every final state has, and that the rows without a token answer to
        model.transformer["ln_f"].bias[0] = 30.0
        model.transformer["wte"].weight[CHARS.vocab_size :, 0] = 5.0
    assert model(torch.tensor([[1, 2, 3]])).argmax(-1).min() >= CHARS.vocab_size
    save(folder / "out" / "my_own_llm.pt", model)
    for flags, settings in (((), {}), (("--top_k=5",), {"top_k": 5}), (("--temperature=0",), {"temperature": 0})):
        out = text_of(write, "--start=abc", "--max_new_tokens=200", *flags)
        assert out == expected("abc", 200, model, **settings)
        assert set(out.replace("<|endoftext|>", "")) <= set(LETTERS + "\n")


def test_a_model_with_fewer_rows_than_ids_is_an_error(write, folder):
    save(folder / "out" / "my_own_llm.pt", random_model(vocab_size=20))
    said = error_of(write)
    assert "its tokenizer has 29 ids, its model only 20" in said and "my_own_llm.pt" in said


@pytest.mark.parametrize(("ids", "text"), [([41840, 235], "👍"), ([33768, 98, 17312, 105, 45739, 252], "日本語")])
def test_characters_of_several_tokens_come_out_whole(write, folder, monkeypatch, ids, text):
    """H44: incomplete bytes are held back until the character is complete."""
    written = patch_generation(folder, monkeypatch, ids)
    assert text_of_stream(written) == f"x{text}\n" and all("\ufffd" not in piece for piece in written)
    assert [piece for piece in written if piece and piece in text] == list(text), written


def test_a_character_that_stays_unfinished_is_one_replacement_character(folder, monkeypatch):
    assert text_of_stream(patch_generation(folder, monkeypatch, [41840])) == "x\ufffd\n"


def patch_generation(folder: Path, monkeypatch, ids: list[int]) -> list[str]:
    """Runs sample.py with a GPT-2 vocabulary and the given ids as what the model generates; returns all writes."""
    save(folder / "gpt2.pt", random_model(vocab_size=50304, n_embd=4), load_gpt2().identity)
    written: list[str] = []

    class Recorder(io.StringIO):
        def write(self, text: str) -> int:
            written.append(text)
            return len(text)

    monkeypatch.setattr(sample, "generate", lambda *_, **__: iter(torch.tensor(ids).unsqueeze(1)))
    monkeypatch.setattr(sys, "stdout", Recorder())
    assert sample.main(["--device=cpu", "--checkpoint=gpt2.pt", "--start=x"]) == 0
    return written


def text_of_stream(written: list[str]) -> str:
    """All pieces together."""
    return "".join(written)


def test_generation_stops_at_the_end_of_text(write, folder):
    """H45: stops at the end-of-text id, which is not printed; a flag turns this off."""
    first = len("hello") - 1  # the position that answers with the first new id
    plan = {first + n: 0 for n in range(5)} | {first + n: 1 for n in range(6, 60)}
    save(folder / "out" / "my_own_llm.pt", planned_model(plan, otherwise=EOT))
    _, out, err = write("--start=hello", "--max_new_tokens=50", "--stop_at_eot=true")
    assert out == "helloaaaaa\n" and "\n5 tokens in " in err
    _, out, err = write("--start=hello", "--max_new_tokens=50")
    assert out == f"helloaaaaa<|endoftext|>{'b' * 44}\n" and "\n50 tokens in " in err


def test_samples_of_a_batch_stop_each_at_its_own_end(write, folder):
    save(folder / "out" / "my_own_llm.pt", random_model(3))
    flags = ("--start=abc", "--temperature=1.5", "--top_k=0", "--num_samples=5", "--max_new_tokens=60")
    whole = samples_of(text_of(write, *flags))
    assert samples_of(text_of(write, *flags, "--stop_at_eot=true")) == [t.split("<|endoftext|>")[0] for t in whole]
    assert len({"<|endoftext|>" in text for text in whole} | {len(t.split("<|endoftext|>")[0]) for t in whole}) > 3


def samples_of(out: str) -> list[str]:
    """The texts of several samples, without their headings."""
    count = out.count("--- sample ")
    for k in range(count):
        heading = f"--- sample {k + 1} of {count} ---\n"
        assert heading in out
        out = out.replace(heading, "\0")
    return [text.removesuffix("\n") for text in out.split("\0")[1:]]


def test_a_sample_depends_on_seed_and_its_number_alone(write):
    """H46: same seed, same bytes; other seed, other text; sample k depends on seed and k only."""
    flags = ("--start=hello", "--temperature=1.0", "--top_k=none")
    ones = [text_of(write, *flags, f"--seed={seed}") for seed in (1, 1, 2, -1, 2**32 + 1, 2**70)]
    assert ones[0] == ones[1] and len(set(ones)) == 5
    three = samples_of(text_of(write, *flags, "--seed=1", "--num_samples=3"))
    two = samples_of(text_of(write, *flags, "--seed=1", "--num_samples=2"))
    assert three[0] + "\n" == ones[0] and three[:2] == two and len(set(three)) == 3
    sampler = {"temperature": 1.0, "top_k": None, "seed": 1}
    assert [text + "\n" for text in three] == [expected("hello", **sampler, first=k) for k in range(3)]


def test_top_p_cuts_the_tail(write):
    assert text_of(write, "--start=hello", "--top_p=1e-9") == expected("hello", temperature=0.0)
    assert text_of(write, "--start=hello", "--top_p=0.6", "--top_k=0") == expected("hello", top_p=0.6, top_k=None)


def test_an_error_names_the_setting_at_fault_alone(write):
    for flags, said in {
        ("--max_new_tokens=0",): "max_new_tokens=0 must be at least 1",
        ("--num_samples=-2",): "num_samples=-2 must be at least 1",
        ("--system=be brief",): "system='be brief' precedes a conversation, and chat=false has none: add --chat=true",
        ("--interactive=true", "--start=x"): "interactive=true asks for prompts, so start= would be ignored",
    }.items():
        assert error_of(write, *flags).removeprefix("error: ").startswith(said)


def test_overrides_and_their_source_go_to_stderr(write, folder):
    (folder / "mine.py").write_text("start = 'a b'\ntop_k = 3\n", encoding="utf-8")
    _, out, err = write("mine.py", "--seed=7")
    assert out == expected("a b", top_k=3, seed=7)
    assert err.splitlines()[:2] == [
        "settings from mine.py: start='a b' top_k=3",
        "settings from flags: device=cpu max_new_tokens=40 stop_at_eot=False seed=7",
    ]


# --- prompts -------------------------------------------------------------------------------------------------------


def feed(monkeypatch, raw: bytes) -> None:
    """Makes `raw` the standard input."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8"))


PROMPTS = [b"hello", b"hello\n", b"\xef\xbb\xbfhello", b"\xef\xbb\xbfhello\r\n"]


@pytest.mark.parametrize("raw", PROMPTS, ids=repr)
def test_a_prompt_may_come_from_a_file_or_standard_input(write, folder, monkeypatch, raw):
    (folder / "prompt.txt").write_bytes(raw)
    assert text_of(write, "--start=FILE:prompt.txt") == expected("hello")
    feed(monkeypatch, raw)
    assert text_of(write, "--start=-") == expected("hello")


def test_a_prompt_keeps_its_lines_and_spaces(folder, capsys):
    save(folder / "gpt2.pt", random_model(vocab_size=50304, block_size=32), load_gpt2().identity)
    (folder / "prompt.txt").write_bytes("\n 日本語 👍\r\n\r\nnaïve \n\n".encode())
    assert sample.main(["--device=cpu", "--checkpoint=gpt2.pt", "--start=FILE:prompt.txt", "--max_new_tokens=1"]) == 0
    assert capsys.readouterr().out.startswith("\n 日本語 👍\n\nnaïve \n")


def test_a_missing_prompt_file_is_an_error(write):
    assert "no file nowhere.txt" in error_of(write, "--start=FILE:nowhere.txt")
    assert "Is a directory" in error_of(write, "--start=FILE:out")
    assert "--start=FILE: names no file" in error_of(write, "--start=FILE:")


def test_a_prompt_that_is_not_utf8_is_an_error_with_the_byte(write, folder, monkeypatch):
    (folder / "latin.txt").write_bytes(b"caf\xe9 ol\xe9")
    assert "FILE:latin.txt is not UTF-8 at byte 3" in error_of(write, "--start=FILE:latin.txt")
    feed(monkeypatch, b"caf\xe9")
    assert "--start=- is not UTF-8 at byte 3" in error_of(write, "--start=-")


def test_interactive_answers_prompt_after_prompt_and_outlives_a_bad_one(write, monkeypatch):
    feed(monkeypatch, b"hello\nZ\n\nabc\n")
    code, out, err = write("--interactive=true")
    assert (code, out) == (0, expected("hello") + expected("") + expected("abc"))
    assert err.count("error: ") == 1 and "cannot encode 'Z'" in err and "Traceback" not in err


def test_interactive_ctrl_c_stops_one_text_and_asks_on(write, monkeypatch):
    feed(monkeypatch, b"hello\nabc\n")
    generate, calls = sample.generate, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return generate(*arguments)

    monkeypatch.setattr(sample, "generate", interrupted)
    code, out, err = write("--interactive=true")
    assert code == 0 and out.endswith(expected("abc")) and "(stopped; Ctrl-D leaves)" in err


# --- checkpoints ---------------------------------------------------------------------------------------------------


def test_the_checkpoint_is_told_with_parameters_step_loss_and_tokenizer(write):
    _, _, err = write("--start=a")
    count = sum(p.numel() for p in random_model().parameters())
    told = (
        f"my_own_llm.pt: {count:,} parameters, step 1,200, best validation loss 1.2500, tokenizer chars.json (29 ids)"
    )
    assert told in err, err


@pytest.mark.parametrize(
    ("loss", "told"),
    [(None, "unknown"), (float("inf"), "inf"), (float("nan"), "nan"), (torch.tensor(2.5), "2.5000"), (3, "3.0000")],
    ids=str,
)
def test_any_loss_in_a_checkpoint_is_told(write, folder, loss, told):
    save(folder / "out" / "my_own_llm.pt", random_model(), best_val_loss=loss, iter_num=None)
    code, _, err = write("--start=a")
    assert code == 0 and f"step 0, best validation loss {told}, " in err


def test_another_checkpoint_and_another_run_folder_can_be_named(write, folder):
    (folder / "runs").mkdir()
    optimizer = {"state": {}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    save(folder / "runs" / "last.pt", random_model(1), optimizer=optimizer, scaler={}, tokens=5, elapsed_seconds=1.5)
    save(folder / "runs" / "my_own_llm.pt", random_model(2))
    assert text_of(write, "--start=a", "--checkpoint=runs/last.pt") == expected("a", model=random_model(1))
    for flag in ("--out_dir=runs", "--checkpoint=runs"):
        assert text_of(write, "--start=a", flag) == expected("a", model=random_model(2))


def test_a_missing_checkpoint_is_an_error_with_the_next_step(write):
    said = error_of(write, "--out_dir=nowhere")
    assert "nowhere/my_own_llm.pt" in said and "start_train.sh" in said and "name the file of another" in said


class Foreign:
    """Something that only a pickle can hold."""


@pytest.mark.parametrize(
    "content",
    [b"", b"hello", b"PK\x03\x04", b"\x80\x02", {"a": 1}, [1], {"model": {}}, {"model": Foreign(), "model_args": {}}],
    ids=["empty", "text", "zip", "pickle", "other dict", "list", "no model_args", "pickled class"],
)
def test_a_file_that_is_no_checkpoint_is_an_error_that_names_it(write, folder, content):
    if isinstance(content, bytes):
        (folder / "other.pt").write_bytes(content)
    else:
        torch.save(content, folder / "other.pt")
    assert "other.pt" in error_of(write, "--checkpoint=other.pt")


@pytest.mark.parametrize("share", [0.05, 0.5, 0.99])
def test_a_truncated_checkpoint_is_an_error(write, folder, share):
    path = folder / "out" / "my_own_llm.pt"
    raw = path.read_bytes()
    path.write_bytes(raw[: int(len(raw) * share)])
    assert "my_own_llm.pt" in error_of(write)


def test_a_checkpoint_with_a_flipped_bit_is_an_error(write, folder):
    path = folder / "out" / "my_own_llm.pt"
    weights = random_model().transformer["wte"].weight.detach().numpy().tobytes()
    raw = bytearray(path.read_bytes())
    raw[raw.index(weights) + 1000] ^= 4
    path.write_bytes(raw)
    assert "damaged" in error_of(write)


def test_weights_that_do_not_fit_their_shape_are_an_error(write, folder):
    arguments = dataclasses.asdict(dataclasses.replace(SHAPE, n_layer=3))
    save(folder / "out" / "my_own_llm.pt", random_model(), model_args=arguments)
    assert "do not fit its model_args" in error_of(write)


def test_weights_that_are_no_numbers_are_an_error(write, folder):
    model = random_model()
    with torch.no_grad():
        model.transformer["ln_f"].weight[0] = float("nan")
    save(folder / "out" / "my_own_llm.pt", model)
    code, _, err = write("--start=a")
    assert code == 2 and "error: the model answers with NaN or inf" in err


def test_a_checkpoint_of_nanogpt_writes_text_with_gpt2s_tokenizer_and_the_exact_gelu(write, folder):
    model = random_model(vocab_size=50304, n_embd=16, bias=False, gelu="exact")
    arguments = {k: v for k, v in dataclasses.asdict(model.config).items() if k != "gelu"}
    theirs = {
        "model": {f"_orig_mod.{name}": tensor for name, tensor in model.state_dict().items()},
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 6e-4, "params": [0]}]},
        "model_args": arguments,
        "iter_num": 3,
        "best_val_loss": torch.tensor(3.25),
        "config": {"dataset": "openwebtext", "bias": False},
    }
    torch.save(theirs, folder / "ckpt.pt")
    flags = ("--checkpoint=ckpt.pt", "--start=Once upon a time", "--top_k=200")
    _, out, err = write(*flags)
    gpt2 = load_gpt2()
    assert out == expected("Once upon a time", model=model, tokenizer=gpt2, top_k=200)
    assert "best validation loss 3.2500, tokenizer gpt2 (50,257 ids)" in err
    tanh = random_model(vocab_size=50304, n_embd=16, bias=False, gelu="tanh")
    ids = torch.tensor([gpt2.encode("Once upon a time").tolist()])
    assert (tanh(ids) - model(ids)).abs().max() > 1e-4  # the two can be told apart


@pytest.mark.skipif("NANOGPT" not in os.environ, reason="NANOGPT=FOLDER names a checkout of nanoGPT")
@pytest.mark.parametrize("bias", [False, True])
def test_greedy_text_of_a_checkpoint_is_nanogpts_own(folder, bias):
    """Its classes make the file and write 60 ids, across the end of the context of 16; ours must be the same."""
    spec = importlib.util.spec_from_file_location("nanogpt", Path(os.environ["NANOGPT"]) / "model.py")
    nanogpt = sys.modules["nanogpt"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(nanogpt)
    shape = {
        "block_size": 16,
        "vocab_size": 50304,
        "n_layer": 3,
        "n_head": 2,
        "n_embd": 32,
        "bias": bias,
        "dropout": 0.1,
    }
    theirs = nanogpt.GPT(nanogpt.GPTConfig(**shape)).eval()
    fill_randomly(theirs, 3)
    torch.save({"model": theirs.state_dict(), "model_args": shape, "iter_num": 1, "config": {}}, folder / "ckpt.pt")
    ours = build_model(load_checkpoint(folder / "ckpt.pt"), folder / "ckpt.pt").eval()
    prompt = torch.tensor([[5, 2000, 50000]])
    expected = theirs.generate(prompt, 60, top_k=1)[0, 3:].tolist()
    sampler = Sampler(temperature=0.0, top_k=None, top_p=1.0, seed=1, samples=1)
    assert [int(i) for i in generate(ours, prompt[0], 60, sampler, 50304)] == expected


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module."])
def test_prefixes_that_wrappers_leave_in_the_keys_change_nothing(write, folder, prefix):
    """H22: the same text as the clean file."""
    model = random_model()
    save(folder / "prefixed.pt", model, model={prefix + name: t for name, t in model.state_dict().items()})
    assert text_of(write, "--start=a", "--checkpoint=prefixed.pt") == text_of(write, "--start=a")


def test_a_checkpoint_loads_safely_and_carries_its_tokenizer(folder):
    """H23: weights_only=True reads it; the tokenizer in it needs no other file."""
    state = torch.load(folder / "out" / "my_own_llm.pt", weights_only=True)
    tokenizer = load_tokenizer(load_checkpoint(folder / "out" / "my_own_llm.pt")["tokenizer"])
    assert tokenizer.decode(list(tokenizer.encode("abc. "))) == "abc. " and state["iter_num"] == 1200


def test_bfloat16_writes_text(write):
    assert len(text_of(write, "--start=abc", "--dtype=bfloat16").replace("<|endoftext|>", "#")) == 3 + 40 + 1


def test_float16_on_the_cpu_is_an_error(write):
    assert "dtype=float16" in error_of(write, "--dtype=float16")


def test_running_out_of_memory_is_an_error_with_what_to_try(write, monkeypatch):
    def exhausted(*_):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    monkeypatch.setattr(sample, "generate", exhausted)
    code, _, err = write("--start=a", "--num_samples=9")
    assert code == 2 and "ran out with num_samples=9" in err and "fewer --num_samples" in err


# --- as a process --------------------------------------------------------------------------------------------------


def start(folder: Path, *flags: str, shell: str = '"$@"') -> subprocess.Popen:
    """Starts sample.py in a process of its own, through bash."""
    program = [sys.executable, str(ROOT / "sample.py"), "--device=cpu", "--stop_at_eot=false", *flags]
    command = ["bash", "-c", shell, "bash", *program]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(os.environ))


def test_ctrl_c_while_writing_ends_with_130_and_no_traceback(folder):
    process = start(folder, "--start=hello", "--max_new_tokens=1000000", shell='exec "$@"')
    assert process.stdout.read(20).startswith(b"hello")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and err.endswith(b"stopped\n") and b"Traceback" not in err


def test_a_reader_that_leaves_ends_the_text_quietly(folder):
    shell = '"$@" | head -c 10; echo "code ${PIPESTATUS[0]}" >&2'
    out, err = start(folder, "--start=hello", "--max_new_tokens=1000000", shell=shell).communicate(timeout=60)
    assert len(out) == 10 and err.endswith(b"code 141\n") and b"Traceback" not in err and b"Error" not in err


def test_the_same_command_writes_the_same_bytes_in_another_process(folder, write):
    out, err = start(folder, "--start=hello", "--max_new_tokens=40").communicate(timeout=60)
    assert out.decode() == text_of(write, "--start=hello"), err
