"""Settings: fills one frozen dataclass from config files and --key=value flags.

In:  a dataclass (one field a line, the trailing comment is its help text) and the command line.
Out: an instance, and where each overridden value came from. Later wins: defaults < config files, left to right < flags.

A config file is plain Python assignments:        batch_size = 4
A flag repeats the same name:                     python train.py config/train_demo.py --batch_size=4
"""

from __future__ import annotations

import dataclasses
import difflib
import errno
import functools
import math
import os
import re
import sys
import traceback
import types
import typing
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from pathlib import Path

PLAIN = (bool, int, float, str, types.NoneType, list, tuple, dict)  # what counts as a setting in a config file
BOOL_WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


class UserError(Exception):
    """A fault of the input or the machine, told in one line: what, which value, where, what to try."""


def program(main: Callable[[list[str]], int | None]) -> Callable[..., int]:
    """Wraps a program's main: UserError becomes one `error:` line and exit code 2, Ctrl-C becomes 130."""

    @functools.wraps(main)
    def run(argv: list[str] | None = None) -> int:
        for stream in (sys.stdin, sys.stdout, sys.stderr):  # UTF-8 whatever the locale says
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(encoding="utf-8", errors="replace")
        if argv is None:
            argv = [os.fsencode(word).decode("utf-8", "replace") for word in sys.argv[1:]]
        try:
            return main(list(argv)) or 0
        except UserError as error:
            message = str(error)
        except OSError as error:
            if error.filename is None and error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
                raise
            message = f"{error.strerror}: {error.filename or 'while writing'}"
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)
            return 130
        print("error: " + " ".join(message.splitlines()), file=sys.stderr)
        return 2

    return run


def load_config(config_class: type, argv: list[str], description: str = "") -> tuple[typing.Any, dict[str, str]]:
    """Reads config files and flags into `config_class`.

    Returns the instance and {setting: where it was overridden}. Raises UserError naming the file or flag at fault.
    """
    answer_help(config_class, argv, description)
    values: dict[str, typing.Any] = {}
    origins: dict[str, str] = {}
    for path in (word for word in argv if not word.startswith("--")):
        for key, value in read_config_file(config_class, path).items():
            values[key], origins[key] = value, path
    for word in (word for word in argv if word.startswith("--")):
        key, equals, text = word[2:].partition("=")
        key = key.replace("-", "_")
        check_known(config_class, key, "flag --" + key)
        if not equals:
            raise UserError(f"flag --{key} has no value: write --{key}=VALUE")
        values[key], origins[key] = read_value(config_class, key, text, f"flag --{key}"), "flag"
    return config_class(**values), origins


def read_config_file(config_class: type, path: str) -> dict[str, typing.Any]:
    """Runs a config file in an empty namespace and returns its settings, type-checked."""
    if not os.path.isfile(path):
        raise UserError(f"config file {path!r} not found (config files end in .py, flags look like --key=value)")
    namespace: dict[str, typing.Any] = {}
    try:
        exec(compile(Path(path).read_text(encoding="utf-8"), path, "exec"), namespace)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        line = error.lineno if isinstance(error, SyntaxError) else last.lineno
        raise UserError(f"config file {path}, line {line}: {type(error).__name__}: {error}") from error
    settings = {k: v for k, v in namespace.items() if not k.startswith("_") and isinstance(v, PLAIN)}
    for key in settings:
        check_known(config_class, key, f"setting {key!r} in {path}")
    return {key: read_value(config_class, key, value, f"{key} in {path}") for key, value in settings.items()}


def check_known(config_class: type, key: str, what: str) -> None:
    """Raises UserError with the nearest known name unless `key` is a setting of the program."""
    known = [field.name for field in dataclasses.fields(config_class)]
    if key not in known:
        nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
        hint = f"did you mean {nearest[0]}?" if nearest else "--help lists all settings"
        raise UserError(f"unknown {what}: {hint}")


def read_value(config_class: type, key: str, value: typing.Any, where: str) -> typing.Any:
    """Reads one value by its field's type; text is read leniently (`1e3` fits an int, `yes` a bool, `none` an optional)."""
    hint = type_hints(config_class)[key]
    choices = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for choice in choices:
        try:
            return read_as(choice, value)
        except (ValueError, InvalidOperation, OverflowError):
            pass
    wanted = " or ".join(describe_type(choice) for choice in choices)
    raise UserError(f"{where} is {value!r}, which is not {wanted}")


@functools.cache
def type_hints(config_class: type) -> dict[str, typing.Any]:
    """The resolved types of a dataclass's fields."""
    return typing.get_type_hints(config_class)


def read_as(kind: typing.Any, value: typing.Any) -> typing.Any:
    """Reads `value`, text from a flag or a Python value from a config file, as one type; ValueError if it is not one."""
    text = value.strip().lower() if isinstance(value, str) else None
    if kind is types.NoneType and (value is None or text == "none"):
        return None
    if typing.get_origin(kind) is typing.Literal and value in typing.get_args(kind):
        return value
    if kind is str and isinstance(value, str):
        return value
    if kind is bool and (text or str(value).lower()) in BOOL_WORDS and not isinstance(value, float):
        return BOOL_WORDS[text or str(value).lower()]
    if kind in (int, float) and not isinstance(value, bool) and (text or isinstance(value, (int, float))):
        number = Decimal(text or repr(value))
        if number.is_finite() and math.isfinite(float(number)) and (kind is float or number == int(number)):
            return kind(number)
    raise ValueError(value)


def describe_type(kind: typing.Any) -> str:
    """A type in a user's words."""
    if typing.get_origin(kind) is typing.Literal:
        return "one of " + ", ".join(map(str, typing.get_args(kind)))
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", types.NoneType: "none"}
    return names[kind]


def format_overrides(config: typing.Any, origins: dict[str, str]) -> list[str]:
    """One line for each source of overridden settings, in the order given."""
    by_source: dict[str, list[str]] = {}
    for key, source in origins.items():
        by_source.setdefault("flags" if source == "flag" else source, []).append(f"{key}={getattr(config, key)}")
    return [f"settings from {source}: " + " ".join(pairs) for source, pairs in by_source.items()]


def answer_help(config_class: type, argv: list[str], description: str) -> None:
    """On -h or --help prints every setting with its type, default and trailing comment (read by tyro), and leaves."""
    if not {"-h", "--help"} & set(argv):
        return
    import tyro

    script = Path(sys.argv[0]).name
    usage = (
        f"usage: python {script} [CONFIG.py ...] [--key=value ...]\n\n" + re.sub(r"\s+\n", "\n", description).strip()
    )
    parser = tyro.extras.get_parser(config_class, use_underscores=True, config=(tyro.conf.FlagConversionOff,))
    text = parser.format_help()
    print(usage + "\n\n" + text[text.find("╭") if "╭" in text else text.find("options") :].rstrip())
    raise SystemExit(0)
