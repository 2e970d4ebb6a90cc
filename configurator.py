"""Settings: fills one frozen dataclass from config files and --key=value flags.

In:  a dataclass (one field a line, the trailing comment is its help text) and the command line.
Out: an instance, and where each overridden value came from. Later wins: defaults < config files, left to right < flags.

A config file is plain Python assignments:        batch_size = 4
A flag repeats the same name:                     python train.py config/train_demo.py --batch_size=4
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import errno
import functools
import io
import math
import os
import re
import select
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
    """Wraps a program's main: UserError becomes one `error:` line and exit code 2, Ctrl-C 130, a closed pipe 141."""

    @functools.wraps(main)
    def run(argv: list[str] | None = None) -> int:
        speak_utf8()
        if argv is None:
            argv = [os.fsencode(word).decode("utf-8", "replace") for word in sys.argv[1:]]
        try:
            code = main(list(argv)) or 0
            sys.stdout.flush()
            return code
        except UserError as error:
            message = str(error)
        except UnicodeEncodeError as error:  # a path with ü, say, where the locale is ASCII
            message = f"this locale cannot name {error.object!r}: LC_ALL=C.UTF-8 in front of the command can"
        except OSError as error:
            reader_left = isinstance(error, BrokenPipeError) and output_is_closed()
            drop_unwritable_output()
            if reader_left:
                return 141  # 128 + SIGPIPE, what a shell reports for any program
            if error.filename is None and error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
                raise
            message = f"{error.strerror}: {error.filename or 'while writing'}"
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)
            return 130
        print("error: " + " ".join(message.splitlines()), file=sys.stderr)
        return 2

    return run


def speak_utf8() -> None:
    """Makes the three standard streams UTF-8, whatever the locale says."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="replace")


def output_is_closed() -> bool:
    """Whether the reader of standard output, such as head, has left."""
    with contextlib.suppress(AttributeError, OSError):  # no poll on Windows, no file behind a captured stream
        watch = select.poll()
        watch.register(sys.stdout.fileno(), 0)  # errors are always told
        return bool(watch.poll(0))
    return False


def drop_unwritable_output() -> None:
    """Sends what Python still holds for a closed or full standard output nowhere, or it would complain at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def load_config(
    config_class: type,
    argv: list[str],
    description: str = "",
    stored: Callable[[dict[str, typing.Any]], dict[str, typing.Any]] = lambda given: {},
) -> tuple[typing.Any, dict[str, str]]:
    """Reads config files and flags into `config_class`; `stored` may turn what was given into better defaults.

    Returns the instance and {setting: where it was overridden}. Raises UserError naming the file or flag at fault.
    """
    answer_help(config_class, argv, description)
    values: dict[str, typing.Any] = {}
    origins: dict[str, str] = {}
    flags = [split_flag(config_class, word) for word in argv if word.startswith("--")]
    for path in (word for word in argv if not word.startswith("--")):
        for key, value in read_config_file(config_class, path).items():
            values[key], origins[key] = value, path
    for key, text in flags:
        values[key], origins[key] = read_value(config_class, key, text, f"flag --{key}"), "flag"
    return config_class(**(stored(values) | values)), origins


def split_flag(config_class: type, word: str) -> tuple[str, str]:
    """Setting and text of `--key=value`, split at the first `=`."""
    key, equals, text = word[2:].partition("=")
    key = key.replace("-", "_")
    check_known(config_class, key, "flag --" + key)
    if not equals:
        raise UserError(f"flag --{key} has no value: write --{key}=VALUE")
    return key, text


def read_config_file(config_class: type, path: str) -> dict[str, typing.Any]:
    """Runs a config file in an empty namespace and returns its settings, type-checked."""
    if os.path.isdir(path):
        raise UserError(f"config file {path!r} is a folder: name a .py file in it")
    if not os.path.isfile(path):
        raise UserError(f"config file {path!r} not found (config files end in .py, flags look like --key=value)")
    namespace: dict[str, typing.Any] = {}
    try:
        exec(compile(Path(path).read_bytes(), path, "exec"), namespace)
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
        line = error.lineno if isinstance(error, SyntaxError) and error.filename == path else lines[-1] if lines else 1
        raise UserError(f"config file {path}, line {line}: {type(error).__name__}: {error}") from error
    known = type_hints(config_class)  # a Path, say, for a known setting is told, not passed over
    settings = {k: v for k, v in namespace.items() if k in known or (not k.startswith("_") and isinstance(v, PLAIN))}
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
    choices = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    for choice in sorted(choices, key=lambda choice: choice is not types.NoneType):  # `none` fits text, too
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
        number = Decimal(text or (repr(float(value)) if isinstance(value, float) else value))  # NumPy's float64 is one
        if number.is_finite() and math.isfinite(float(number)) and (kind is float or number == int(number)):
            return kind(number)
    raise ValueError(value)


def describe_type(kind: typing.Any) -> str:
    """A type in a user's words."""
    if typing.get_origin(kind) is typing.Literal:
        words = ", ".join(map(str, typing.get_args(kind)))
        return "one of " * (len(typing.get_args(kind)) > 1) + words
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", types.NoneType: "none"}
    return names[kind]


def format_overrides(config: typing.Any, origins: dict[str, str]) -> list[str]:
    """One line for each source of overridden settings, in the order given; text with white space in quotes."""
    by_source: dict[str, list[str]] = {}
    for key, source in origins.items():
        value = getattr(config, key)
        shown = repr(value) if isinstance(value, str) and value.split() != [value] else value
        by_source.setdefault("flags" if source == "flag" else source, []).append(f"{key}={shown}")
    return [f"settings from {source}: " + " ".join(pairs) for source, pairs in by_source.items()]


def answer_help(config_class: type, argv: list[str], description: str) -> None:
    """On -h or --help prints every setting with its type, default and trailing comment (read by tyro), and leaves."""
    if not {"-h", "--help"} & set(argv):
        return
    import tyro

    speak_utf8()
    path = Path(sys.argv[0])
    script = f"-m tools.{path.stem}" if path.parent.name == "tools" else path.name
    usage = (
        f"usage: python {script} [CONFIG.py ...] [--key=value ...]\n\n" + re.sub(r"[ \t]+\n", "\n", description).strip()
    )
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        tyro.cli(config_class, args=["--help"], use_underscores=True, config=(tyro.conf.FlagConversionOff,))
    options = re.split(r"^\W*options\W*$", shown.getvalue(), maxsplit=1, flags=re.MULTILINE)[-1]
    print(usage + "\n\nsettings:\n" + re.sub(r" +$", "", options, flags=re.MULTILINE).strip("\n"))
    raise SystemExit(0)
