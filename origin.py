"""Where a run comes from: the weights that it starts with, and whether settings, data and tokenizer go with them.

In:  what --init_from names: a checkpoint, ours or nanoGPT's, a run folder, a Hugging Face GPT-2 folder, gpt2 … gpt2-xl;
     or the state of a run that goes on.
Out: a state as checkpoint.py reads it, and settings of its shape; UserError where something does not go with it.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from chat import restore_tokenizer
from checkpoint import MASKS, adopt_characters, first_line, foreign_defaults, load_checkpoint, model_file
from configurator import UserError
from dataset import TokenData
from tokenizer import END_OF_TEXT, ODD_TEXT, Tokenizer, load_gpt2, read_tokenizer_json

SHAPE_KEYS = ("block_size", "n_layer", "n_head", "n_embd", "bias", "gelu")  # cannot change when a run goes on
OPENAI_MODELS = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
GPT2_ROWS = range(50257, 50257 + 128)  # of a vocabulary that is GPT-2's, padded or not


def load_weights(source: str) -> dict[str, Any]:
    """`model` and `model_args` from what init_from names: a checkpoint file, a run folder (its best model), a Hugging Face
    GPT-2 folder, or one of OpenAI's models (gpt2, gpt2-medium, gpt2-large, gpt2-xl), fetched from the hub. Raises UserError.
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
    path = model_file(source)
    if not source or not path.exists():
        raise UserError(
            f"init_from={source!r} is neither a file or folder nor scratch, resume or one of {', '.join(OPENAI_MODELS)}"
        )
    return load_hugging_face(path) if path.is_dir() else load_checkpoint(path)


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
    found = {"model": state, "model_args": {"block_size": positions, "vocab_size": rows} | heads}
    if (folder / "tokenizer.json").is_file():
        found["tokenizer_json"] = (folder / "tokenizer.json").read_text(encoding="utf-8-sig")
    return found


def crop_context(state: dict[str, Any], block_size: int) -> None:
    """Gives a checkpoint's model a shorter context, by leaving its last positions away."""
    positions = state["model"]["transformer.wpe.weight"]
    state["model"]["transformer.wpe.weight"] = positions[:block_size].clone()
    state["model_args"]["block_size"] = block_size


def shape_of_checkpoint(config: Any, origins: dict[str, str], state: dict[str, Any]) -> Any:
    """The settings with the shape of the weights to start from. Raises UserError where a flag asks for another.

    A shorter context than theirs is cut to.
    """
    shape = foreign_defaults(state) | state["model_args"]
    if "block_size" in origins and config.block_size < shape["block_size"]:
        crop_context(state, config.block_size)
        shape["block_size"] = config.block_size
    for key in SHAPE_KEYS:
        if key in origins and getattr(config, key) != shape[key]:
            where = f"--{key}" if origins[key] == "flag" else f"{key} in {origins[key]}"
            raise UserError(
                f"{key}={getattr(config, key)}, but {config.init_from} has {key}={shape[key]}: leave {where} away, or say "
                f"--{key}={shape[key]}"
            )
    return dataclasses.replace(config, **{key: shape[key] for key in SHAPE_KEYS})


def check_tokenizer(state: dict[str, Any], source: str, data: TokenData) -> None:
    """Raises UserError where the data was made with another tokenizer than the weights, as far as these tell.

    Our checkpoints name theirs; that of a Hugging Face folder is written anew, so its ids are compared. Of a file of
    nanoGPT the number of rows tells GPT-2's; a model of characters takes those of the data folder, if they are as many.
    """
    ours, text = data.meta["tokenizer"], state.get("tokenizer_json")
    adopt_characters(state, data.folder)
    theirs = state.get("tokenizer")
    if theirs is None and text is None and state["model_args"].get("vocab_size") in GPT2_ROWS:
        theirs = load_gpt2().identity
    if text is not None:
        theirs = read_tokenizer_json(text, f"{source}/tokenizer.json", ours.get("eot_token", END_OF_TEXT)).identity
        same = same_ids(restore_tokenizer(theirs), restore_tokenizer(ours, data.folder))
    else:
        same = theirs is None or theirs.get("sha256") == ours.get("sha256")
    if not same:
        raise UserError(
            f"{source} was trained with the tokenizer {naming(theirs)}, {data.folder} was prepared with {naming(ours)}, "
            "another one: prepare the data with the model's (its tokenizer.json lies beside its data)"
        )


def naming(identity: dict[str, Any]) -> str:
    """A tokenizer's name, and the first digits of its file's SHA-256: files of one name are not one file."""
    return identity["name"] + (f" (SHA-256 {identity['sha256'][:8]}…)" if "sha256" in identity else "")


def same_ids(one: Tokenizer, other: Tokenizer) -> bool:
    """Whether two tokenizers give a probe of many scripts and each of its characters the same ids, or none."""

    def ids(tokenizer: Tokenizer, text: str) -> list[int] | None:
        try:
            return tokenizer.encode(text).tolist()
        except UserError:  # a character that it lacks
            return None

    return all(ids(one, text) == ids(other, text) for text in (ODD_TEXT, *map(chr, range(32, 127))))


def data_identity(data: TokenData) -> dict[str, Any]:
    """What makes two data sets the same to a run."""
    train, tokenizer = data.meta["splits"]["train"], data.meta["tokenizer"]
    return {
        "train_tokens": train["tokens"],
        "train_sha256": train.get("sha256"),
        "vocab_size": data.vocab_size,
        "tokenizer": tokenizer.get("sha256", tokenizer["kind"]),
    }


def check_same_data(state: dict[str, Any], data: TokenData, folder: Path) -> None:
    """Raises UserError where a run would go on with other data than it began with."""
    then, now = state["data"], data_identity(data)
    known = {"train_tokens": "the number of training tokens", "vocab_size": "the vocabulary"}
    known |= {"train_sha256": "the SHA-256 of train.bin", "tokenizer": "the tokenizer"}
    changed = [
        f"{known[key]} was {str(then.get(key))[:12]}, is {str(now[key])[:12]}"
        for key in now
        if then.get(key) != now[key]
    ]
    if changed:
        raise UserError(
            f"{data.folder} is not what {folder}/last.pt was trained on: {'; '.join(changed)}: prepare the same data "
            f"again, or start another run from these weights by --init_from={folder}/last.pt --out_dir=ANOTHER"
        )


def resumed_settings(kind: type, state: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The settings, of a dataclass, of a run that goes on, below those given now. Raises UserError where these ask for another shape."""
    known = {field.name for field in dataclasses.fields(kind)} - {"out_dir", "init_from", "overwrite"}
    stored = {key: value for key, value in state["config"].items() if key in known}
    for key in (*SHAPE_KEYS, "optimizer"):
        if key in given and given[key] != stored.get(key, given[key]):
            raise UserError(
                f"{key}={given[key]} differs from the {stored[key]} of the run in last.pt, and a run cannot change it: "
                f"leave --{key} away, or start another run with --out_dir="
            )
    return stored
