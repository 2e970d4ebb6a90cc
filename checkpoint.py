"""Checkpoints: writer and reader of out/{my_own_llm,last,previous}.pt.

In:  a dict of tensors and plain Python values, keys as in nanoGPT (model, optimizer, model_args, iter_num,
     best_val_loss, config) and our own (tokenizer, data, scaler, rng, ...).
Out: a file that appears whole or not at all, loads with weights_only=True, and is checked byte for byte when read.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import zipfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from chat import restore_tokenizer
from configurator import UserError
from dataset import read_character_vocabulary, release_lock, take_lock
from model import GPT, GPTConfig
from tokenizer import Tokenizer

FORMAT_VERSION = 1
STATE_KEYS = ("optimizer", "scaler", "config", "data", "iter_num", "best_val_loss")  # what a run goes on from
STATE_KEYS += ("tokens", "elapsed_seconds", "wandb_id", "evaluations_since_best", "evaluation_due")
MASKS = (".attn.bias", ".attn.masked_bias")  # the causal mask that older files hold, not a parameter
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
        raise UserError(f"cannot write {path}: {error}. What was saved before is whole; free some space") from error


class BackgroundSaver:
    """Writes checkpoints in a thread: the caller waits while the tensors are copied, not while they reach the disk.

    Saves happen in the order asked for, and at most one of each file waits. A failed one raises at the next call, or at
    `wait`. The copy of each file is kept for the next one: memory that was used before is five times as fast to fill.
    """

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(1)
        self.latest: dict[Path, tuple[Future[None], dict[str, Any]]] = {}  # the last save of each file, and its copy

    def save(self, path: Path, state: dict[str, Any], previous: Path | None = None) -> None:
        """As save_checkpoint."""
        for file, (future, _) in self.latest.items():
            if file == path or future.done():
                future.result()
        copy = copy_to_cpu(state, self.latest[path][1] if path in self.latest else None)
        self.latest[path] = (self.pool.submit(save_checkpoint, path, copy, previous), copy)

    def wait(self) -> None:
        """Waits for the disk; raises what went wrong."""
        for future, _ in self.latest.values():
            future.result()


def copy_to_cpu(value: Any, memory: Any = None) -> Any:
    """A copy that later steps do not change, tensors in main memory; tensors that share memory go on sharing it.

    Takes the memory of an earlier copy where that has a tensor of the same shape and dtype in the same place.
    """
    copies: dict[int, torch.Tensor] = {}
    taken: set[int] = set()

    def copy(value: Any, memory: Any) -> Any:
        if isinstance(value, torch.Tensor):
            known = copies.get(value.data_ptr())
            if known is None or known.shape != value.shape:
                fits = isinstance(memory, torch.Tensor) and (memory.shape, memory.dtype) == (value.shape, value.dtype)
                target = memory if fits and id(memory) not in taken else torch.empty(value.shape, dtype=value.dtype)
                taken.add(id(target))
                copies[value.data_ptr()] = known = target.copy_(value.detach())
            return known
        if isinstance(value, dict):
            memory = memory if isinstance(memory, dict) else {}
            return {key: copy(item, memory.get(key)) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            memory = memory if isinstance(memory, list) and len(memory) == len(value) else [None] * len(value)
            return [copy(item, kept) for item, kept in zip(value, memory, strict=True)]
        return value

    return copy(value, memory)


def flush_folder(folder: Path) -> None:
    """Makes a rename survive a power cut, where the system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def model_file(name: str | Path) -> Path:
    """The checkpoint that a setting names: a file, or the best model of a run folder."""
    best = Path(name) / "my_own_llm.pt"
    return best if best.is_file() else Path(name)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Reads a checkpoint, ours or nanoGPT's, onto the CPU. Raises UserError for a missing, damaged or foreign file.

    PyTorch does not look at the checksums of the zip it reads, so a flipped byte would pass; they are checked here.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"no checkpoint at {path}: train one first (./start_train.sh), or name the file of another")
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()
            if damaged:
                raise UserError(f"{path} is damaged: the checksum of its part {damaged} is wrong")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        reason = f"it names {named[1]}" if named else "it is another kind of file"
        raise UserError(f"{path} is not a checkpoint of tensors and plain values, and is not run: {reason}") from error
    except UserError:
        raise
    except Exception as error:  # bytes that are no checkpoint raise anything
        raise UserError(f"{path} cannot be read, cut short or damaged: {first_line(error)}") from error
    check_contents(state, path)
    weights = {strip_prefixes(name): tensor for name, tensor in state["model"].items()}
    weights = {name: tensor for name, tensor in weights.items() if not name.endswith(MASKS)}
    if "transformer.wte.weight" in weights:  # the head is the same matrix, and some files leave it out
        weights.setdefault("lm_head.weight", weights["transformer.wte.weight"])
    if lacking := {"transformer.wte.weight", "transformer.wpe.weight"} - weights.keys():
        raise UserError(f"{path} is not a GPT checkpoint: it lacks the weights {', '.join(sorted(lacking))}")
    state = state | {"model": weights}
    settings = state.get("config")
    if isinstance(settings, dict) and isinstance(settings.get("dataset"), str):
        adopt_characters(state, Path("data") / settings["dataset"])  # where nanoGPT looks
    return state


def adopt_characters(state: dict[str, Any], folder: Path) -> None:
    """Gives nanoGPT's model of characters, whose file does not name them, those of its data folder, and a row for the end
    of a text: the mean of the others, whose logit is their mean. So it is never the most likely, and at most one in n.
    """
    rows = state["model"].get("lm_head.weight")
    if state.get("tokenizer") is not None or rows is None or not (folder / "meta.pkl").is_file():
        return
    vocabulary = read_character_vocabulary(folder / "meta.pkl")
    if vocabulary["eot_id"] == len(rows):
        longer = torch.cat([rows, rows.mean(0, keepdim=True)])
        state["model"] |= {"lm_head.weight": longer, "transformer.wte.weight": longer}
        state["model_args"]["vocab_size"] = len(longer)
        state["tokenizer"] = vocabulary["tokenizer"]


def check_contents(state: Any, path: Path) -> None:
    """Raises UserError unless a file holds what a GPT checkpoint holds, in the right types."""
    if not isinstance(state, dict) or not all(isinstance(state.get(key), dict) for key in ("model", "model_args")):
        raise UserError(f"{path} is not a GPT checkpoint: it lacks `model` or `model_args`")
    version = state.get("format_version", FORMAT_VERSION)
    if version != FORMAT_VERSION:
        raise UserError(f"{path} has format {version}, this version reads {FORMAT_VERSION}")
    sizes = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")
    if odd := [key for key in sizes if type(state["model_args"].get(key)) is not int]:
        raise UserError(f"{path} is not a GPT checkpoint: model_args has no whole number for {', '.join(odd)}")
    if not all(isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in state["model"].items()):
        raise UserError(f"{path} is not a GPT checkpoint: `model` holds something else than named tensors")
    tokenizer = state.get("tokenizer")
    whole = isinstance(tokenizer, dict) and (tokenizer.get("kind") == "gpt2" or isinstance(tokenizer.get("json"), str))
    if tokenizer is not None and not whole:
        raise UserError(
            f"{path} is not one of our checkpoints: its `tokenizer` is neither GPT-2's nor a tokenizer.json"
        )
    for key in ("iter_num", "best_val_loss"):
        number = state.get(key, 0)
        if not isinstance(number, (int, float)) and not (isinstance(number, torch.Tensor) and number.numel() == 1):
            raise UserError(f"{path} is not a GPT checkpoint: {key} is {number!r}, not a number")


def first_line(error: Exception) -> str:
    """What an exception says, in one line."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def load_run(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """The state to go on from: last.pt, or previous.pt where that is damaged, with one line that says so.

    The state of previous.pt has that name as `read_from`: last.pt must not take its place then.
    """
    last, previous, foreign = folder / "last.pt", folder / "previous.pt", folder / "ckpt.pt"
    if not last.is_file() and not previous.is_file():
        hint = (
            f"--init_from={foreign} starts from nanoGPT's weights" if foreign.is_file() else "--out_dir= names another"
        )
        raise UserError(f"no run to resume in {folder}: it has no last.pt ({hint})")
    try:
        if not last.is_file():
            raise UserError(f"there is no {last}")
        return check_run(load_checkpoint(last), last), []
    except UserError as error:
        try:
            state = check_run(load_checkpoint(previous), previous)
            return state | {"read_from": previous.name}, [f"going on from previous.pt: {error}"]
        except UserError as second:
            best = folder / "my_own_llm.pt"
            left = f"; {best} can still write text, and start a new run by --init_from={best}" if best.is_file() else ""
            raise UserError(f"{error}; {second}{left}") from error


def check_run(state: dict[str, Any], path: Path) -> dict[str, Any]:
    """Passes on a state that a run can go on from. Raises UserError for weights alone."""
    missing = [key for key in STATE_KEYS if key not in state]
    if missing:
        raise UserError(
            f"{path} is no full state to resume from, it lacks {', '.join(missing)}: use --init_from={path}"
        )
    return state


@contextlib.contextmanager
def lock_run_folder(folder: Path) -> Iterator[None]:
    """Makes the run folder and keeps it for this process. Raises UserError when another training has it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise UserError(f"out_dir={folder} is, or lies in, something that is no folder: name another") from error
    with open(folder / ".lock", "w", encoding="utf-8") as lock:
        if not take_lock(lock):
            raise UserError(f"another training is at work in {folder}: wait for it, or use another --out_dir=")
        try:
            yield
        finally:
            release_lock(lock)


def strip_prefixes(name: str) -> str:
    """A parameter's name without what wrappers put in front."""
    while name.startswith(PREFIXES):
        name = name.split(".", 1)[1]
    return name


def build_model(state: dict[str, Any], path: Path) -> GPT:
    """The model of a checkpoint. One without `gelu` is nanoGPT's, which trains with the exact form."""
    arguments = foreign_defaults(state) | state["model_args"]
    try:
        return GPT.from_state(GPTConfig(**arguments), state["model"])
    except (TypeError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{path}: its weights do not fit its model_args: {reason}") from error


def foreign_defaults(state: dict[str, Any]) -> dict[str, Any]:
    """What nanoGPT's files leave unsaid: it trains with the exact GELU."""
    return {"gelu": "exact", "bias": "transformer.ln_f.bias" in state["model"]}


def checkpoint_tokenizer(state: dict[str, Any]) -> Tokenizer:
    """The tokenizer that a checkpoint's data was made with; GPT-2's for a file that names none (nanoGPT's)."""
    return restore_tokenizer(state.get("tokenizer") or {"kind": "gpt2"})
