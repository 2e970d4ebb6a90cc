"""Checkpoints: writer and reader of out/{my_own_llm,last,previous}.pt.

In:  a dict of tensors and plain Python values, keys as in nanoGPT (model, optimizer, model_args, iter_num,
     best_val_loss, config) and our own (tokenizer, data, scaler, rng, ...).
Out: a file that appears whole or not at all, loads with weights_only=True, and is checked byte for byte when read.
"""

from __future__ import annotations

import contextlib
import json
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
from dataset import release_lock, take_lock
from model import GPT, GPTConfig
from tokenizer import Tokenizer

FORMAT_VERSION = 1
OPENAI_MODELS = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
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
        raise UserError(f"cannot write {path}: {error}. The checkpoint before it is whole; free some space") from error


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
    return state | {"model": weights}


def check_contents(state: Any, path: Path) -> None:
    """Raises UserError unless a file holds what a GPT checkpoint holds, in the right types."""
    if not isinstance(state, dict) or not all(isinstance(state.get(key), dict) for key in ("model", "model_args")):
        raise UserError(f"{path} is not a GPT checkpoint: it lacks `model` or `model_args`")
    version = state.get("format_version", FORMAT_VERSION)
    if version != FORMAT_VERSION:
        raise UserError(f"{path} has format {version}, this version reads {FORMAT_VERSION}")
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


@contextlib.contextmanager
def lock_run_folder(folder: Path) -> Iterator[None]:
    """Keeps the run folder for this process. Raises UserError when another training has it."""
    with open(folder / ".lock", "w", encoding="utf-8") as lock:
        if not take_lock(lock):
            raise UserError(f"another training is at work in {folder}: wait for it, or use another --out_dir=")
        try:
            yield
        finally:
            release_lock(lock)


def load_weights(source: str) -> dict[str, Any]:
    """`model` and `model_args` from what init_from names: a checkpoint file, a Hugging Face GPT-2 folder, or one of
    OpenAI's models (gpt2, gpt2-medium, gpt2-large, gpt2-xl), fetched from the hub. Raises UserError.
    """
    if source in OPENAI_MODELS:
        from huggingface_hub import constants, snapshot_download

        try:
            folder = snapshot_download(
                f"openai-community/{source}", allow_patterns=["config.json", "model.safetensors"]
            )
        except Exception as error:
            raise UserError(f"cannot load {source} from {constants.ENDPOINT}: {first_line(error)}") from error
        return load_hugging_face(Path(folder))
    return load_hugging_face(Path(source)) if Path(source).is_dir() else load_checkpoint(Path(source))


def load_hugging_face(folder: Path) -> dict[str, Any]:
    """A GPT-2 in transformers' layout, whose four linear layers of a block are stored transposed (Conv1D)."""
    from safetensors.torch import load_file

    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        weights = load_file(folder / "model.safetensors")
    except Exception as error:  # safetensors raises its own kind
        raise UserError(f"{folder} is no folder with a GPT-2's config.json and model.safetensors: {error}") from error
    gelu = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu": "exact"}.get(config.get("activation_function"))
    plain = {
        "model_type": "gpt2",
        "layer_norm_epsilon": 1e-5,
        "scale_attn_by_inverse_layer_idx": False,
        "n_inner": None,
    }
    odd = {key: config[key] for key, value in plain.items() if config.get(key, value) != value}
    if config.get("n_inner") == 4 * config.get("n_embd", 0):
        odd.pop("n_inner", None)
    if odd or gelu is None:
        odd = odd or {"activation_function": config.get("activation_function")}
        raise UserError(f"{folder}/config.json has {odd}, which this GPT-2 does not do")
    state = {}
    for name, tensor in weights.items():
        name = name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"
        if not name.endswith(MASKS):
            transposed = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
            state[name] = tensor.float().t().contiguous() if transposed else tensor.float()
    state["lm_head.weight"] = state["transformer.wte.weight"]
    rows, width = state["lm_head.weight"].shape
    positions = state["transformer.wpe.weight"].shape[0]
    heads = {"n_layer": config["n_layer"], "n_head": config["n_head"], "n_embd": width, "bias": True, "gelu": gelu}
    return {"model": state, "model_args": {"block_size": positions, "vocab_size": rows} | heads}


def crop_context(state: dict[str, Any], block_size: int) -> None:
    """Gives a checkpoint's model a shorter context, by leaving its last positions away."""
    positions = state["model"]["transformer.wpe.weight"]
    state["model"]["transformer.wpe.weight"] = positions[:block_size].clone()
    state["model_args"]["block_size"] = block_size


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
