"""Checkpoints: writer and reader of out/{my_own_llm,last,previous}.pt.

In:  a dict of tensors and plain Python values, keys as in nanoGPT (model, optimizer, model_args, iter_num,
     best_val_loss, config) and our own (tokenizer, data, scaler, rng, ...).
Out: a file that appears whole or not at all, loads with weights_only=True, and is checked byte for byte when read.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from configurator import UserError
from model import GPT, GPTConfig
from tokenizer import Tokenizer, load_tokenizer

FORMAT_VERSION = 1
PREFIXES = ("_orig_mod.", "module.")  # left by torch.compile and DistributedDataParallel, in any nesting


def save_checkpoint(path: Path, state: dict[str, Any], previous: Path | None = None) -> None:
    """Writes beside the target, flushes to disk, renames. The file that was there becomes `previous`, when given.

    At no moment is there less than one whole file; a second name (a hard link) is made before the first is replaced.
    """
    partial = path.with_name(path.name + ".tmp")
    try:
        with open(partial, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        if previous is not None and path.exists():
            link = previous.with_name(previous.name + ".tmp")
            link.unlink(missing_ok=True)
            try:
                os.link(path, link)
                os.replace(link, previous)
            except OSError:  # a file system without hard links
                os.replace(path, previous)
        os.replace(partial, path)
        flush_folder(path.parent)
    except (OSError, RuntimeError) as error:  # torch.save wraps a full disk in a RuntimeError
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {error}. The checkpoint before it is whole; free some space") from error


def flush_folder(folder: Path) -> None:
    """Makes a rename survive a power cut, where the system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Reads a checkpoint, ours or nanoGPT's, onto the CPU. Raises UserError for a missing, damaged or foreign file.

    PyTorch does not look at the checksums of the zip it reads, so a flipped byte would pass; they are checked here.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(
            f"no checkpoint at {path}: train one first (./start_train.sh), or name another by --checkpoint="
        )
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()
            if damaged:
                raise UserError(f"{path} is damaged: the checksum of its part {damaged} is wrong")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = first_line(error)
        raise UserError(f"{path} is not a checkpoint of tensors and plain values, and is not run: {reason}") from error
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} cannot be read, cut short or damaged: {first_line(error)}") from error
    if not isinstance(state, dict) or "model" not in state or "model_args" not in state:
        raise UserError(f"{path} is not a GPT checkpoint: it lacks `model` or `model_args`")
    version = state.get("format_version", FORMAT_VERSION)
    if version != FORMAT_VERSION:
        raise UserError(f"{path} has format {version}, this version reads {FORMAT_VERSION}")
    state["model"] = {strip_prefixes(name): tensor for name, tensor in state["model"].items()}
    return state


def first_line(error: Exception) -> str:
    """What an exception says, in one line."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def load_run(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """The state to go on from: last.pt, or previous.pt where that is damaged, with one line that says so."""
    last, previous = folder / "last.pt", folder / "previous.pt"
    if not last.is_file() and not previous.is_file():
        raise UserError(f"no run to resume in {folder}: it has no last.pt (--out_dir= names another folder)")
    try:
        return check_run(load_checkpoint(last), last), []
    except UserError as error:
        try:
            return check_run(load_checkpoint(previous), previous), [f"going on from previous.pt: {error}"]
        except UserError as second:
            best = folder / "my_own_llm.pt"
            left = f"; {best} can still write text, and start a new run by --init_from={best}" if best.is_file() else ""
            raise UserError(f"{error}; {second}{left}") from error


def check_run(state: dict[str, Any], path: Path) -> dict[str, Any]:
    """Passes on a state that a run can go on from. Raises UserError for weights alone."""
    missing = [key for key in ("optimizer", "scaler", "tokens", "config") if key not in state]
    if missing:
        raise UserError(
            f"{path} is no full state to resume from, it lacks {', '.join(missing)}: use --init_from={path}"
        )
    return state


def lock_run_folder(folder: Path) -> Any:
    """Takes the run folder for this process; returns what holds it. Raises UserError when another training has it."""
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    lock = open(folder / ".lock", "w", encoding="utf-8")  # noqa: SIM115, open as long as the run
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise UserError(f"another training is at work in {folder}: wait for it, or use another --out_dir=") from error
    return lock


def strip_prefixes(name: str) -> str:
    """A parameter's name without what wrappers put in front."""
    while name.startswith(PREFIXES):
        name = name.split(".", 1)[1]
    return name


def build_model(state: dict[str, Any], path: Path) -> GPT:
    """The model of a checkpoint. One without `gelu` is nanoGPT's, which trains with the exact form."""
    arguments = {"gelu": "exact"} | state["model_args"]
    try:
        return GPT.from_state(GPTConfig(**arguments), state["model"])
    except (TypeError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{path}: its weights do not fit its model_args: {reason}") from error


def checkpoint_tokenizer(state: dict[str, Any]) -> Tokenizer:
    """The tokenizer that a checkpoint's data was made with; GPT-2's for a file that names none (nanoGPT's)."""
    return load_tokenizer(state.get("tokenizer") or {"kind": "gpt2"})
