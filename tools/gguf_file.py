"""GGUF files of our models, for llama.cpp: the writer and the reader of one file.

In:  a model, its tokenizer.json as a dict, ids of special tokens, and the number format.
Out: NAME-FORMAT.gguf with weights, vocabulary, merges, special tokens and chat template inside.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, architecture `gpt2`. Linear weights are stored as
PyTorch has them (GGUF names the sizes in reverse order). There is no output.weight, as the head is the token embedding:
llama.cpp reads that since pull request 12456 of March 2025.
"""

from __future__ import annotations

import ctypes
import importlib.util
import math
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from configurator import UserError
from model import GPT, GPTConfig

PLAIN_FORMATS = ("f32", "f16", "bf16", "q8_0", "q4_0")  # which the gguf package writes
LLAMA_FORMATS = ("q4_k_m", "q5_k_m", "q6_k")  # which llama.cpp's own quantizer makes of an f32 file
MODULE_NAMES = {  # ours, without a block's number: GGUF's
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}


def import_gguf() -> Any:
    """The gguf package. Raises UserError with the install command where it is missing."""
    try:
        import gguf
    except ImportError as error:
        raise UserError("--format=gguf needs the package gguf: pip install -r tools/requirements.txt") from error
    return gguf


def gguf_name(name: str) -> str:
    """`blk.0.attn_qkv.weight` for `transformer.h.0.attn.c_attn.weight`."""
    module, _, kind = name.rpartition(".")
    if module.startswith("transformer.h."):
        _, _, layer, inner = module.split(".", 3)
        return f"blk.{layer}.{MODULE_NAMES[inner]}.{kind}"
    return f"{MODULE_NAMES[module]}.{kind}"


def complete_weights(model: GPT, rows: int) -> dict[str, torch.Tensor]:
    """The weights by our names, float32: `rows` of the embedding, no head, zeros for biases that the model goes without.

    Both formats want every bias of GPT-2.
    """
    weights = {name: tensor.float() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    weights["transformer.wte.weight"] = weights["transformer.wte.weight"][:rows]
    for name in [name for name in weights if name.endswith(".weight") and not name.startswith("transformer.w")]:
        weights.setdefault(name.removesuffix("weight") + "bias", torch.zeros(len(weights[name])))
    return weights


def tensor_format(name: str, shape: tuple[int, ...], wanted: str) -> str:
    """The number format of one tensor: vectors and positions stay f32; q8_0 and q4_0 want a width that 32 divides.

    The token embedding, which is the head as well, keeps 8 bits in a file of 4: as llama.cpp does with heads.
    """
    if len(shape) == 1 or name.startswith("position_embd"):
        return "f32"
    if wanted in ("q8_0", "q4_0") and shape[-1] % 32:
        return "f16"
    return "q8_0" if wanted == "q4_0" and name.startswith("token_embd") else wanted


def write_gguf(path: Path, model: GPT, spec: dict[str, Any], about: dict[str, Any], wanted: str) -> None:
    """Writes one file in one of PLAIN_FORMATS.

    `spec` is the tokenizer.json; `about` has name, vocab_size, eot_id, eot_token, chat_template or None.
    """
    gguf = import_gguf()
    shape = model.config
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_name(about["name"])
    writer.add_context_length(shape.block_size)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(shape.n_layer)
    writer.add_feed_forward_length(4 * shape.n_embd)
    writer.add_head_count(shape.n_head)
    writer.add_layer_norm_eps(1e-5)
    writer.add_vocab_size(about["vocab_size"])
    kind = {"f32": "ALL_F32"}.get(wanted, f"MOSTLY_{wanted.upper()}")
    writer.add_file_type(gguf.LlamaFileType[kind])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_vocabulary(writer, spec, about)
    for name, tensor in complete_weights(model, about["vocab_size"]).items():
        name, values = gguf_name(name), tensor.numpy()
        chosen = tensor_format(name, values.shape, wanted)
        number_type = gguf.GGMLQuantizationType[chosen.upper()]
        with np.errstate(over="ignore", invalid="ignore"):  # what does not fit is found when the file is read back
            stored = gguf.quants.quantize(values, number_type)
        writer.add_tensor(name, stored, raw_dtype=number_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_vocabulary(writer: Any, spec: dict[str, Any], about: dict[str, Any]) -> None:
    """Adds byte-level BPE: tokens with their types in the order of ids, merges, special tokens, chat template.

    Ids that no token has become `[unused5]` of type UNUSED. Raises UserError for another kind of tokenizer.
    """
    gguf, model, split = import_gguf(), spec["model"], spec.get("pre_tokenizer") or {}
    plain = split.get("type") == "ByteLevel" and split.get("use_regex", True) and not split.get("add_prefix_space")
    odd = [key for key in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix") if model.get(key)]
    if model["type"] != "BPE" or not plain or odd or spec.get("normalizer"):
        raise UserError(
            f"llama.cpp reads byte-level BPE split by GPT-2's rule, and this tokenizer is {model['type']} with other "
            "rules: --format=hf takes any tokenizer, prepare.py --tokenizer=gpt2 or train makes one that llama.cpp reads"
        )
    count, types = about["vocab_size"], gguf.TokenType
    tokens, kinds = [f"[unused{i}]" for i in range(count)], [types.UNUSED] * count
    for token, i in model["vocab"].items():
        tokens[i], kinds[i] = token, types.NORMAL
    for token in spec["added_tokens"]:
        tokens[token["id"]] = token["content"]
        kinds[token["id"]] = types.CONTROL if token["special"] else types.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(about["eot_id"])
    writer.add_eos_token_id(about["eot_id"])
    writer.add_pad_token_id(about["eot_id"])
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
    if about["chat_template"]:
        writer.add_chat_template(about["chat_template"])


def read_gguf(path: Path) -> tuple[GPT, dict[str, str]]:
    """The model of a file, its numbers widened to float32, and the format of each tensor by GGUF's name."""
    gguf = import_gguf()
    reader = gguf.GGUFReader(path)
    field = {key: reader.fields[f"gpt2.{key}"].contents() for key in ("block_count", "attention.head_count")}
    stored = {tensor.name: tensor for tensor in reader.tensors}
    shape = {"n_layer": field["block_count"], "n_head": field["attention.head_count"]}
    rows = stored["token_embd.weight"].shape[1]
    positions = stored["position_embd.weight"].shape
    shape |= {"vocab_size": int(rows), "n_embd": int(positions[0]), "block_size": int(positions[1])}
    with torch.device("meta"):
        names = list(GPT(GPTConfig(**shape)).state_dict())
    state = {}
    for name in names:
        if name != "lm_head.weight":
            tensor = stored[gguf_name(name)]
            with np.errstate(over="ignore", invalid="ignore"):
                state[name] = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
    state["lm_head.weight"] = state["transformer.wte.weight"]
    formats = {name: tensor.tensor_type.name.lower() for name, tensor in stored.items()}
    return GPT.from_state(GPTConfig(**shape), state).eval(), formats


def is_quantized(name: str) -> bool:
    """Whether a tensor, by GGUF's name, is a matrix that the formats are about."""
    return name.endswith(".weight") and "norm" not in name and not name.startswith("position_embd")


def fallen_back(formats: dict[str, str], wanted: str) -> dict[str, str]:
    """The matrices that are stored in another format than `wanted` means, as their width does not allow it."""
    meant = {"q4_0": {"q4_0", "q8_0"}, "q4_k_m": {"q4_k", "q6_k"}, "q5_k_m": {"q5_k", "q6_k"}}.get(wanted, {wanted})
    return {name: kind for name, kind in formats.items() if is_quantized(name) and kind not in meant}


def describe_formats(formats: dict[str, str]) -> str:
    """How many tensors are in which format: `26 f32 9 q8_0`."""
    counts = Counter(formats.values())
    return " ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))


def planned_bytes(model: GPT, rows: int, wanted: str) -> int:
    """Bytes of the weights in one of PLAIN_FORMATS: 32 weights of q8_0 and q4_0 share a scale of 16 bits."""
    bits = {"f32": 32, "f16": 16, "bf16": 16, "q8_0": 8.5, "q4_0": 4.5}
    shapes = {gguf_name(name): tuple(tensor.shape) for name, tensor in complete_weights(model, rows).items()}
    return sum(int(math.prod(s) * bits[tensor_format(name, s, wanted)] / 8) for name, s in shapes.items())


def describe_sizes(model: GPT, rows: int, formats: tuple[str, ...]) -> str:
    """One line with the size of the weights in each of the formats that are known beforehand."""
    sizes = {wanted: planned_bytes(model, rows, wanted) / 1e6 for wanted in PLAIN_FORMATS if wanted in formats}
    return "weights in MB: " + ", ".join(f"{wanted} {size:,.1f}" for wanted, size in sizes.items())


def require_llama_quantizer() -> None:
    """Raises UserError unless the program llama-quantize or the package llama-cpp-python is here."""
    if shutil.which("llama-quantize") is None and importlib.util.find_spec("llama_cpp") is None:
        raise UserError(
            f"{', '.join(LLAMA_FORMATS)} are made by llama.cpp's own quantizer: put llama-quantize in the PATH, or "
            "pip install llama-cpp-python (which builds for 6 to 16 minutes). q8_0 and q4_0 need neither"
        )


def quantize_by_llama(source: Path, target: Path, wanted: str) -> None:
    """Makes a file in one of LLAMA_FORMATS of one in f32. Raises UserError."""
    require_llama_quantizer()
    if program := shutil.which("llama-quantize"):
        done = subprocess.run([program, source, target, wanted], capture_output=True, text=True, errors="replace")
        failure = (done.stdout + done.stderr).strip().splitlines()[-1:] if done.returncode else None
    else:
        import llama_cpp

        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{wanted.upper()}")
        code = llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params))
        failure = [f"code {code}"] if code else None
    if failure is not None or not target.is_file():
        raise UserError(f"llama.cpp could not make {wanted}: {' '.join(failure or ['it wrote no file'])}")
