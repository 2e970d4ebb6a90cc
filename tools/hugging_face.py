"""The Hugging Face folder of a GPT-2: weights, settings and tokenizer as transformers and vLLM load them, and its check.

In:  a model, its tokenizer.json as a dict, ids and names of special tokens.
Out: model.safetensors, config.json, generation_config.json, tokenizer.json, tokenizer_config.json, chat_template.jinja.

Layout: transformers' GPT2LMHeadModel. Its four linear layers of a block (Conv1D) are stored transposed; every bias is
there; the head is left out, being the token embedding. checkpoint.py reads such a folder back.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch

from checkpoint import build_model
from configurator import UserError
from model import GPT, GPTConfig
from origin import load_hugging_face
from tools.gguf_file import complete_weights

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "int8": torch.bfloat16}
EIGHT_BITS = {  # how compressed-tensors tells vLLM of matrices of 8 bits: a scale an output, activations rounded as they come
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


def write_hugging_face(folder: Path, model: GPT, spec: dict[str, Any], about: dict[str, Any], quant: str) -> None:
    """Writes the folder's files; `spec` is the tokenizer.json, `about` as for write_gguf, `quant` one of DTYPES."""
    from safetensors.torch import save_file

    dtype = DTYPES[quant]
    tensors = {}
    for name, tensor in complete_weights(model, about["vocab_size"]).items():
        kind = dtype
        if quant == "int8" and name.endswith(TRANSPOSED):
            scale = tensor.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127  # (out, 1)
            tensors[f"{name}_scale"], tensor, kind = scale, (tensor / scale).round(), torch.int8
        tensor = tensor.t() if name.endswith(TRANSPOSED) else tensor
        tensors[name] = tensor.to(kind, copy=True).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    ids = {"bos_token_id": about["eot_id"], "eos_token_id": about["eot_id"], "pad_token_id": about["eot_id"]}
    eight_bits = {"quantization_config": EIGHT_BITS} if quant == "int8" else {}
    write_json(folder / "config.json", model_settings(model, about) | ids | {"dtype": str(dtype)[6:]} | eight_bits)
    write_json(folder / "generation_config.json", ids | {"do_sample": True, "temperature": 0.8, "top_k": 40})
    write_json(folder / "tokenizer.json", spec)
    end = about["eot_token"]
    names = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # which takes tokenizer.json as it is
        "bos_token": end,
        "eos_token": end,
        "pad_token": end,
        "model_max_length": model.config.block_size,
        "clean_up_tokenization_spaces": False,
    }
    if about["chat_template"]:
        names["chat_template"] = about["chat_template"]
        (folder / "chat_template.jinja").write_text(about["chat_template"], encoding="utf-8")
    write_json(folder / "tokenizer_config.json", names)


def model_settings(model: GPT, about: dict[str, Any]) -> dict[str, Any]:
    """config.json without ids. vLLM's loader wants the three switches named and off."""
    shape = model.config
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": about["vocab_size"],
        "n_positions": shape.block_size,
        "n_ctx": shape.block_size,
        "n_embd": shape.n_embd,
        "n_layer": shape.n_layer,
        "n_head": shape.n_head,
        "n_inner": None,
        "activation_function": "gelu_new" if shape.gelu == "tanh" else "gelu",
        "layer_norm_epsilon": 1e-5,
        "embd_pdrop": shape.dropout,
        "attn_pdrop": shape.dropout,
        "resid_pdrop": shape.dropout,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "use_cache": True,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "add_cross_attention": False,
    }


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file for people to read."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def load_back(folder: Path) -> GPT:
    """The model of the folder, through the reader that --init_from=DIR uses; of 8 bits, with its matrices multiplied out."""
    from safetensors.torch import load_file

    stored = load_file(folder / "model.safetensors")
    scales = {name.removesuffix("_scale"): stored.pop(name) for name in list(stored) if name.endswith("_scale")}
    if not scales:
        return build_model(load_hugging_face(folder), folder).eval()
    state = {name: tensor.float().t() if name in scales else tensor.float() for name, tensor in stored.items()}
    state |= {name: (state[name] * scale).contiguous() for name, scale in scales.items()}
    state["lm_head.weight"] = state["transformer.wte.weight"]
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    shape = {
        "block_size": config["n_positions"],
        "gelu": {"gelu_new": "tanh"}.get(config["activation_function"], "exact"),
    }
    shape |= {key: config[key] for key in ("vocab_size", "n_layer", "n_head", "n_embd")}
    return GPT.from_state(GPTConfig(**shape), state).eval()


def check_by_transformers(
    folder: Path,
    probes: dict[str, list[int]],
    conversation: tuple[list[dict[str, str]], list[int]] | None,
    ids: torch.Tensor,
) -> torch.Tensor | None:
    """Logits (1, T, V) that transformers computes of ids (1, T); None where it is not installed, and for 8 bits.

    Raises UserError unless its tokenizer gives the same ids as ours for all probe texts and for the messages of a
    conversation with the beginning of an answer.
    """
    if importlib.util.find_spec("transformers") is None:
        print("not checked with transformers: pip install transformers", file=sys.stderr)
        return None
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # it warns of probe texts that are longer than a short context
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    readings = [(text, wanted, tokenizer(text)["input_ids"]) for text, wanted in probes.items()]
    if conversation:
        theirs = tokenizer.apply_chat_template(conversation[0], add_generation_prompt=True, return_dict=False)
        readings.append(("a conversation", conversation[1], theirs))
    for text, ours, theirs in readings:
        if ours != theirs:
            raise UserError(
                f"transformers reads {text!r} as {theirs}, not as {ours}: the model's tokenizer.json does something "
                "that does not travel"
            )
    if "quantization_config" in json.loads((folder / "config.json").read_text(encoding="utf-8")):
        return None  # its GPT-2 has Conv1D layers, which compressed-tensors leaves alone
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(ids).logits
