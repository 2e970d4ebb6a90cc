"""configurator.py: the grammar of settings, in flags and in config files, its errors, --help, and exit codes."""

from __future__ import annotations

import ast
import dataclasses
import io
import os
import re
import subprocess
import sys
import tokenize
from typing import Literal

import pytest
from conftest import ROOT, run_program

import configurator
from configurator import UserError, format_overrides, load_config, program
from sample import SampleConfig
from train import TrainConfig


@dataclasses.dataclass(frozen=True)
class Example:
    """One field of each kind."""

    whole: int = 3  # a whole number
    number: float = 0.5  # a number
    switch: bool = False  # on or off
    text: str = "plain"  # text
    some_key: str = "a"  # two words
    maybe_whole: int | None = None  # a whole number, or not
    maybe_number: float | None = None  # a number, or not
    maybe_text: str | None = "there"  # text, or not
    choice: Literal["tanh", "exact"] = "tanh"  # one of two


def load(*argv: str, config_class: type = Example):
    """The settings alone."""
    return load_config(config_class, list(argv))[0]


def error_of(*argv: str, config_class: type = Example) -> str:
    """What the error says."""
    with pytest.raises(UserError) as raised:
        load(*argv, config_class=config_class)
    return str(raised.value)


@pytest.fixture
def config_file(tmp_path, monkeypatch):
    """Writes a config file into the working folder; returns its name."""
    monkeypatch.chdir(tmp_path)

    def write(text: str | bytes, name: str = "mine.py") -> str:
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return name

    return write


# --- values --------------------------------------------------------------------------------------------------------

FLAG_VALUES = [
    *[("whole", text, 5) for text in ("5", " 5 ", "+5", "5.0", "5e0", "0.5e1")],
    *[
        ("whole", text, value)
        for text, value in (("1e3", 1000), ("-2", -2), ("1e15", 10**15), ("9" * 25, int("9" * 25)))
    ],
    *[("number", text, value) for text, value in (("1", 1.0), ("0", 0.0), ("-0.1", -0.1), ("6e-4", 6e-4), (".5", 0.5))],
    *[("switch", text, True) for text in ("true", "True", "TRUE", "yes", "YES", "1")],
    *[("switch", text, False) for text in ("false", "False", "no", "No", "0")],
    *[
        ("text", text, text)
        for text in ("007", "1e3", "a=b", "", "true", "none", "None", "--leading", "-1", " a ", "=")
    ],
    *[("text", text, text) for text in ("日本語 👍", "two\nlines", "'quoted'", "--help")],
    *[(key, text, None) for key in ("maybe_whole", "maybe_number", "maybe_text") for text in ("none", "None", "NONE")],
    ("maybe_whole", "1e3", 1000),
    ("maybe_number", "1", 1.0),
    ("maybe_text", "007", "007"),
    ("maybe_text", "", ""),
    ("choice", "exact", "exact"),
]


@pytest.mark.parametrize(("key", "text", "value"), FLAG_VALUES, ids=repr)
def test_a_flag_is_read_by_its_fields_type(key, text, value):
    read = getattr(load(f"--{key}={text}"), key)
    assert read == value and type(read) is type(value)


@pytest.mark.parametrize(("key", "text", "value"), FLAG_VALUES, ids=repr)
def test_text_in_a_config_file_is_read_as_in_a_flag(config_file, key, text, value):
    read = getattr(load(config_file(f"{key} = {text!r}\n")), key)
    assert read == value and type(read) is type(value)


@pytest.mark.parametrize(
    ("key", "source", "value"),
    [
        ("whole", "7", 7),
        ("whole", "1e3", 1000),
        ("whole", "2 * 3", 6),
        ("number", "1", 1.0),
        ("number", "1 / 4", 0.25),
        ("number", "__import__('numpy').float64(0.1)", 0.1),
        ("switch", "True", True),
        ("switch", "0", False),
        ("text", "'007'", "007"),
        ("maybe_whole", "None", None),
        ("maybe_whole", "40", 40),
        ("maybe_text", "None", None),
        ("choice", "'exact'", "exact"),
    ],
)
def test_a_python_value_in_a_config_file_is_read_by_its_fields_type(config_file, key, source, value):
    read = getattr(load(config_file(f"{key} = {source}\n")), key)
    assert read == value and type(read) is type(value)


WRONG = [
    *[
        ("whole", source)
        for source in ("4.5", "True", "None", "'none'", "'4.5'", "'nan'", "'inf'", "''", "'true'", "'x'")
    ],
    *[("whole", source) for source in ("float('nan')", "float('inf')", "1j", "'1e999999999'", "10 ** 400")],
    *[("number", source) for source in ("float('nan')", "-float('inf')", "True", "None", "'nan'", "'-inf'", "'1e999'")],
    *[("number", source) for source in ("'0x10'", "'1 2'", "[0.1]", "(0.1,)", "__import__('decimal').Decimal(1)")],
    *[("switch", source) for source in ("2", "1.0", "None", "''", "'on'", "'none'", "[True]")],
    *[
        ("text", source)
        for source in ("5", "True", "None", "['a']", "b'a'", "__import__('pathlib').Path('a')", "print")
    ],
    *[("maybe_whole", source) for source in ("4.5", "'x'", "True", "''", "[1]", "{}")],
    *[("choice", source) for source in ("'relu'", "'Tanh'", "None", "1", "['tanh']", "''")],
]


@pytest.mark.parametrize(("key", "source"), WRONG, ids=repr)
def test_a_value_of_another_type_in_a_config_file_is_an_error_that_names_file_key_and_type(config_file, key, source):
    said = error_of(config_file(f"{key} = {source}\n"))
    wanted = {
        "whole": "a whole number",
        "number": "a number",
        "switch": "true or false",
        "text": "text",
        "maybe_whole": "a whole number or none",
        "choice": "one of tanh, exact",
    }
    assert said.startswith(f"{key} in mine.py is ") and said.endswith(f"which is not {wanted[key]}"), said


@pytest.mark.parametrize(("key", "source"), [(key, s) for key, s in WRONG if s.startswith("'")], ids=repr)
def test_a_value_of_another_type_in_a_flag_is_an_error_that_names_flag_and_value(key, source):
    text = ast.literal_eval(source)
    said = error_of(f"--{key}={text}")
    assert said.startswith(f"flag --{key} is {text!r}, which is not "), said


def test_learning_rates_of_h48():
    """H48: whole numbers are accepted for floats; a negative weight decay is a loud error."""
    flags = ("--learning_rate=1", "--dropout=0", "--min_lr=0")
    config = load(*flags, config_class=TrainConfig)
    assert (config.learning_rate, config.dropout, config.min_lr) == (1.0, 0.0, 0.0)
    assert all(type(getattr(config, key)) is float for key in ("learning_rate", "dropout", "min_lr"))
    assert load("--learning_rate=6e-4", config_class=TrainConfig).learning_rate == 6e-4
    assert "weight_decay=-0.1 must not be negative" in error_of("--weight_decay=-0.1", config_class=TrainConfig)


def test_a_value_may_hold_equals_signs():
    """H49: the prompt is exactly `1 + 1=`."""
    assert load("--start=1 + 1=", config_class=SampleConfig).start == "1 + 1="


def test_a_setting_whose_default_is_none_takes_numbers_and_one_with_a_type_takes_no_none():
    """H50: a number is accepted with the declared type; None where declared optional, a loud error elsewhere."""
    config = load("--lr_decay_iters=2e3", "--min_lr=0", config_class=TrainConfig)
    assert (config.lr_decay_iters, config.min_lr) == (2000, 0.0)
    assert type(config.lr_decay_iters) is int and type(config.min_lr) is float
    assert load("--top_k=None", config_class=SampleConfig).top_k is None
    assert load("--checkpoint=None", config_class=SampleConfig).checkpoint is None
    assert "flag --seed is 'None', which is not a whole number" in error_of("--seed=None", config_class=SampleConfig)


# --- names and order -----------------------------------------------------------------------------------------------


def test_later_wins_files_left_to_right_then_flags_wherever_they_stand(config_file):
    a = config_file("whole = 10\nnumber = 10\ntext = 'a'\n", "a.py")
    b = config_file("whole = 20\nnumber = 20\n", "b.py")
    config = load("--whole=30", a, b)
    assert (config.whole, config.number, config.text, config.maybe_whole) == (30, 20.0, "a", None)
    assert load(b, a).number == 10.0
    assert load("--whole=1", "--whole=2").whole == 2


def test_overrides_are_told_with_their_source(config_file):
    a, b = config_file("whole = 10\ntext = 'a b'\n", "a.py"), config_file("number = 1\nwhole = 11\n", "b.py")
    config, origins = load_config(Example, [a, b, "--some-key=x=y", "--maybe_text="])
    assert origins == {"whole": "b.py", "text": "a.py", "number": "b.py", "some_key": "flag", "maybe_text": "flag"}
    assert format_overrides(config, origins) == [
        "settings from b.py: whole=11 number=1.0",
        "settings from a.py: text='a b'",
        "settings from flags: some_key=x=y maybe_text=''",
    ]


def test_a_prompt_of_several_lines_is_told_in_one():
    assert format_overrides(*load_config(Example, ["--text=a\nb"])) == ["settings from flags: text='a\\nb'"]


def test_a_dash_in_a_key_is_an_underscore():
    assert load("--some-key=a-b").some_key == "a-b" and load("--some_key=a-b").some_key == "a-b"


def test_a_typo_in_a_config_file_is_an_error_with_file_and_nearest_key(config_file, tmp_path, capsys):
    """H47: loud error naming file, key and nearest known key."""
    import train

    config_file("learing_rate = 9e9\n")
    assert train.main(["mine.py"]) == 2
    told = capsys.readouterr()
    assert told.err == "error: unknown setting 'learing_rate' in mine.py: did you mean learning_rate?\n"
    assert told.out == "" and [path.name for path in tmp_path.iterdir()] == ["mine.py"]


@pytest.mark.parametrize(
    ("flag", "hint"),
    [("--learing_rate=1", "did you mean learning_rate?"), ("--wandb-logs=1", "did you mean wandb_log?")],
)
def test_a_typo_in_a_flag_is_an_error_with_the_nearest_key(flag, hint):
    said = error_of(flag, config_class=TrainConfig)
    assert "unknown flag --" in said and said.endswith(hint), said


@pytest.mark.parametrize("flag", ["--qqqqqq=1", "--=5", "--"])
def test_a_flag_that_resembles_nothing_is_an_error_that_names_help(flag):
    assert error_of(flag).endswith("--help lists all settings")


@pytest.mark.parametrize("source", ["qqq = 1", "wholes = [1]", "a, b = 1, None", "from math import pi"])
def test_an_unknown_plain_value_in_a_config_file_is_an_error(config_file, source):
    assert "unknown setting " in error_of(config_file(source)) and "in mine.py" in error_of("mine.py")


def test_a_flag_without_a_value_is_an_error_that_shows_how():
    assert error_of("--whole") == error_of("--whole", "5") == "flag --whole has no value: write --whole=VALUE"


@pytest.mark.parametrize("word", ["config/none.py", "whole=5", "-w=5", "", "."])
def test_a_word_that_is_neither_file_nor_flag_is_an_error(word, config_file):
    what = "is a folder: name a .py file in it" if word == "." else "not found (config files end in .py, flags look "
    assert error_of(word) == f"config file {word!r} {what}" + ("" if word == "." else "like --key=value)")


# --- config files --------------------------------------------------------------------------------------------------


def test_a_config_file_may_import_define_and_keep_private_names(config_file):
    source = """
import math
from pathlib import Path

_tokens = 1_000_000  # arithmetic
_batch = 8 * 16

def double(n):
    return 2 * n

class Unused:
    pass

whole = math.ceil(_tokens / _batch)
number = float(double(2))
text = str(Path("a") / "b")
for _i in range(3):
    whole += _i
"""
    config = load(config_file(source))
    assert (config.whole, config.number, config.text) == (7813 + 3, 4.0, "a/b")


def test_functions_of_a_config_file_see_its_names(config_file):
    assert load(config_file("whole = 4\ndef half():\n    return whole // 2\nmaybe_whole = half()\n")).maybe_whole == 2


@pytest.mark.parametrize(
    ("source", "line", "what"),
    [
        ("whole = 1\nnumber = = 2\n", 2, "SyntaxError"),
        ("whole = 1\n\n  number = 2\n", 3, "IndentationError"),
        ("whole = 1\nnumber = 1 / 0\n", 2, "ZeroDivisionError"),
        ("whole = 1\n\nnumber = other\n", 3, "NameError"),
        ("import no_such_module\n", 1, "ModuleNotFoundError"),
        ("def fail():\n    raise ValueError('no')\n\nfail()\n", 2, "ValueError"),
        ("import json\n\nwhole = json.loads('{')\n", 3, "JSONDecodeError"),
        ("whole = eval('1 +')\n", 1, "SyntaxError"),
        ("whole = 1\nraise SystemExit(0)\n", 2, "SystemExit"),
        (b"whole = 1\ntext = '\xe4'\n", 2, "SyntaxError"),
    ],
    ids=repr,
)
def test_a_fault_in_a_config_file_is_an_error_with_its_file_and_line(config_file, source, line, what):
    assert error_of(config_file(source)).startswith(f"config file mine.py, line {line}: {what}: ")


def test_a_config_file_may_start_with_a_byte_order_mark_and_end_lines_as_windows_does(config_file):
    config = load(config_file("\ufeffwhole = 5\r\ntext = 'ü'\r\n"))
    assert (config.whole, config.text) == (5, "ü")


NANOGPT = """
# a config file as people have it from nanoGPT
import time

out_dir = 'out-mine'
eval_interval = 250
log_interval = 10
eval_iters = 20
eval_only = False
always_save_checkpoint = False
init_from = 'scratch'
wandb_log = False
wandb_project = 'mine'
wandb_run_name = 'mini-gpt-' + str(time.time())
dataset = 'shakespeare_char'
gradient_accumulation_steps = 5 * 8
batch_size = 12
block_size = 256
n_layer = 6
n_head = 6
n_embd = 384
dropout = 0
bias = False
learning_rate = 1e-3
max_iters = 5000
weight_decay = 1e-1
beta1 = 0.9
beta2 = 0.99
grad_clip = 1.0
decay_lr = True
warmup_iters = 100
lr_decay_iters = 5000
min_lr = 1e-4
backend = 'nccl'
device = 'cuda'
dtype = 'bfloat16' if time else 'float16'
compile = True
"""


def test_a_config_file_of_nanogpt_loads_unchanged(config_file):
    config = load(config_file(NANOGPT), config_class=TrainConfig)
    assert (config.gradient_accumulation_steps, config.bias, config.dropout, config.min_lr) == (40, False, 0.0, 1e-4)
    assert config.wandb_run_name.startswith("mini-gpt-") and config.compile is True
    keys = re.findall(r"^(\w+) =", NANOGPT, re.M)
    assert len(keys) == 33 and set(keys) <= {field.name for field in dataclasses.fields(TrainConfig)}


# --- settings that do not go together ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config_class", "flags", "parts"),
    [
        (TrainConfig, ["--n_embd=100", "--n_head=16"], ["n_embd=100", "n_head=16"]),
        (TrainConfig, ["--learning_rate=1e-4", "--min_lr=1e-3"], ["min_lr=0.001", "learning_rate=0.0001", "--min_lr"]),
        (TrainConfig, ["--beta1=1"], ["beta1=1.0", "beta2=0.95"]),
        (TrainConfig, ["--batch_size=0"], ["batch_size=0", "1 or more"]),
        (SampleConfig, ["--max_new_tokens=0"], ["max_new_tokens=0"]),
        (SampleConfig, ["--num_samples=-1"], ["num_samples=-1"]),
        (SampleConfig, ["--temperature=-1"], ["temperature=-1.0", "0 = the most likely"]),
        (SampleConfig, ["--top_k=-1"], ["top_k=-1", "0 or none = no limit"]),
        (SampleConfig, ["--top_p=0"], ["top_p=0.0", "above 0 and at most 1"]),
        (SampleConfig, ["--top_p=1.5"], ["top_p=1.5"]),
    ],
    ids=str,
)
def test_settings_that_cannot_be_are_an_error_with_keys_and_values(config_class, flags, parts):
    said = error_of(*flags, config_class=config_class)
    assert all(part in said for part in parts), said


def test_the_learning_rate_is_warm_from_the_first_step_on():
    """H17: no step has a learning rate of 0."""
    flags = ("--learning_rate=6e-4", "--min_lr=6e-5", "--warmup_iters=10", "--lr_decay_iters=100")
    config = load(*flags, config_class=TrainConfig)
    rates = {step: config.learning_rate_at(step) for step in (0, 9, 10, 55, 100, 500)}
    expected = {0: 5.4545e-5, 9: 5.4545e-4, 10: 6e-4, 55: 3.3e-4, 100: 6e-5, 500: 6e-5}
    assert rates == pytest.approx(expected, rel=1e-4)


# --- the program around it -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("raised", [UserError("a\nb\r\nc"), FileNotFoundError(2, "No such file", "x.bin")], ids=repr)
def test_a_users_fault_is_one_line_on_stderr_and_exit_code_2(raised, capsys):
    @program
    def main(argv):
        raise raised

    assert main([]) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.count("\n") == 1 and told.err.startswith("error: ")


def test_a_fault_of_ours_keeps_its_traceback():
    @program
    def main(argv):
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError):
        main([])


def test_ctrl_c_is_exit_code_130(capsys):
    @program
    def main(argv):
        raise KeyboardInterrupt

    assert main([]) == 130 and capsys.readouterr().err == "stopped\n"


ECHO = """
import sys
from test_config_echo import Example
from configurator import load_config, program

@program
def main(argv):
    config, _ = load_config(Example, argv)
    print(config.text * config.whole)

sys.exit(main())
"""


@pytest.fixture
def echo(tmp_path):
    """Starts a tiny program of one setting that prints it; returns the finished shell command."""
    fields = 'text: str = "x"  # printed\n    whole: int = 1  # times'
    source = f"import dataclasses\n@dataclasses.dataclass(frozen=True)\nclass Example:\n    {fields}\n"
    (tmp_path / "test_config_echo.py").write_text(source, encoding="utf-8")
    (tmp_path / "echo.py").write_text(ECHO, encoding="utf-8")

    def run(command: str, *arguments: str, **env: str) -> subprocess.CompletedProcess:
        command = command.replace("ECHO", f"'{sys.executable}' '{tmp_path / 'echo.py'}'")
        return subprocess.run(
            ["bash", "-c", command, "bash", *arguments],
            cwd=tmp_path,
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), **env},
            capture_output=True,
            timeout=60,
        )

    return run


def test_text_is_utf8_where_the_locale_is_not(echo, tmp_path):
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    (tmp_path / "ü.py").write_text("text = '日本語 👍'\n", encoding="utf-8")
    (tmp_path / "u.py").write_text("text = '日本語 👍'\n", encoding="utf-8")
    for argument in ("--text=日本語 👍", "u.py"):
        process = echo('ECHO "$1"', argument, **plain)
        assert (process.returncode, process.stdout.decode()) == (0, "日本語 👍\n"), process.stderr.decode()
    process = echo('ECHO "$1"', "--tüxt=1", **plain)
    assert (process.returncode, process.stderr.decode()) == (2, "error: unknown flag --tüxt: did you mean text?\n")
    process = run_program("sample.py", "--help", cwd=tmp_path, env=plain)
    assert process.returncode == 0 and "checkpoint → text" in process.stdout, process.stderr


def test_an_argument_that_is_not_utf8_becomes_replacement_characters(echo):
    process = echo("ECHO --text=$'a\\xffb'")
    assert process.stdout.decode() == "a\ufffdb\n"


def test_a_reader_that_leaves_ends_the_program_quietly(echo):
    for many in (10, 10_000_000):
        process = echo(f"ECHO --text=abcdefgh --whole={many} | head -c 10; echo ${{PIPESTATUS[0]}} >&2")
        assert process.stdout == b"abcdefghab"
        assert process.stderr in ((b"0\n", b"141\n") if many == 10 else (b"141\n",)), process.stderr


def test_a_full_disk_under_the_output_is_one_line(echo):
    process = echo("ECHO --text=abcdefgh --whole=100000 > /dev/full")
    assert process.returncode == 2
    assert process.stderr == b"error: No space left on device: while writing\n"


# --- --help --------------------------------------------------------------------------------------------------------


def comments_of(script: str, class_name: str) -> dict[str, str]:
    """The comment beside each field of a settings class, read from the source."""
    source = (ROOT / script).read_text(encoding="utf-8")
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    body = next(n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == class_name).body
    fields = [node for node in body if isinstance(node, ast.AnnAssign)]
    lines = {field.target.id: range(field.lineno, field.end_lineno + 1) for field in fields}
    return {key: next(comments[line] for line in span if line in comments) for key, span in lines.items()}


def squeezed(text: str) -> str:
    """Text without white space and frame, which are where lines were broken."""
    return re.sub(r"[\s│]", "", text)


@pytest.mark.parametrize(
    ("script", "class_name"),
    [
        ("prepare.py", "PrepareConfig"),
        ("train.py", "TrainConfig"),
        ("sample.py", "SampleConfig"),
    ],
)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_names_every_setting_with_its_comment_without_torch(tmp_path, script, class_name, flag):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')\n", encoding="utf-8")
    best = 99.0
    for _ in range(3 if flag == "--help" else 1):
        before = os.times()
        process = run_program(script, flag, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)})
        after = os.times()
        best = min(best, sum(after[2:4]) - sum(before[2:4]))  # processor time: other work on the machine does not count
    assert (process.returncode, process.stderr) == (0, "")
    assert process.stdout.startswith(f"usage: python {script} [CONFIG.py ...] [--key=value ...]\n\n")
    assert "\n\nIn:  " in process.stdout and "\n    python " in process.stdout  # the module's text with its lines
    told = squeezed(process.stdout)
    missing = [key for key, text in comments_of(script, class_name).items() if squeezed(f"{text} (default") not in told]
    assert missing == [] and all(f"--{key}" in process.stdout for key in comments_of(script, class_name))
    assert best < 1.5  # 0.2 to 0.4 s on a quiet machine


def test_help_wins_over_every_other_word(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py"])
    with pytest.raises(SystemExit) as left:
        load("--no_such_key=1", "--help", "none.py")
    assert left.value.code == 0 and "a whole number, or not" in capsys.readouterr().out


def test_importing_the_configurator_imports_nothing_heavy():
    code = "import sys, configurator; print(sorted({'torch', 'tyro', 'numpy', 'tiktoken'} & set(sys.modules)))"
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert process.stdout == "[]\n" and configurator.__doc__
