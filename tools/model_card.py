"""The README.md and Modelfile of an export: what the model is, what it was made of, how good it is, how to run it.

In:  the subject of the export and what was measured.
Out: README.md with the head lines that model hubs read; for GGUF a Modelfile for Ollama.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from model import parameter_count
from tools.export_subject import Subject

SHOWN_SETTINGS = (
    "dataset init_from batch_size gradient_accumulation_steps max_iters learning_rate min_lr warmup_iters "
    "weight_decay beta1 beta2 grad_clip dropout dtype seed"
).split()
EIGHT_BITS = """\
Matrices of 8 bits with a scale an output, activations of 8 bits, the rest of 16, in the form of compressed-tensors for
vLLM. transformers does not load it: its GPT-2 has Conv1D layers. The perplexity above has the matrices rounded, not the
activations. Seen to run in vLLM 0.32 on a CPU; not tried on a GPU.
"""
FULL_WIDTH = """\
The weights are numbers of 16 or 32 bits; `tools.export_model --quant=int8` writes a folder of 8 bits for vLLM, and the GGUF
export has 8 and 4 bits for llama.cpp.
"""
GELU_NOTE = (
    "llama.cpp computes GPT-2 with the tanh form of GELU, and this model was trained with the exact one: its answers "
    "differ a little, see the perplexity. transformers and vLLM compute the exact one"
)


def write_card(folder: Path, target: Path, subject: Subject, kind: str, rows: list[dict[str, Any]]) -> list[str]:
    """Writes README.md, and a Modelfile beside GGUF files; returns the commands that run the export at `target`."""
    files = [f"{subject.about['name']}-{row['format']}.gguf" for row in rows] if kind == "gguf" else []
    commands = commands_for(target, subject, files)
    if kind == "gguf":
        (folder / "Modelfile").write_text(modelfile(subject, files[0]), encoding="utf-8")
    parts = [
        head_lines(kind),
        f"# {subject.about['name']}\n",
        describe_model(subject),
        describe_training(subject),
        "## Measured when it was exported\n\n" + table(rows),
        "## Run it\n\n```bash\n" + "\n".join(commands_for(Path("."), subject, files)) + "\n```\n",
    ]
    if kind == "hf":
        parts.append(EIGHT_BITS if rows[0]["format"] == "int8" else FULL_WIDTH)
    else:
        parts.append("llama.cpp of March 2025 or newer: the head is the token embedding (pull request 12456).\n")
        parts += [f"{GELU_NOTE[0].upper()}{GELU_NOTE[1:]}.\n"] * (subject.model.config.gelu == "exact")
    if subject.about["chat_template"]:
        parts.append(
            f"A conversation is put together by this template:\n\n```\n{subject.about['chat_template']}\n```\n"
        )
    (folder / "README.md").write_text("\n".join(parts), encoding="utf-8")
    return commands


def head_lines(kind: str) -> str:
    """What model hubs read."""
    library = "transformers" if kind == "hf" else "gguf"
    return f"---\nlibrary_name: {library}\npipeline_tag: text-generation\ntags:\n- gpt2\n---\n"


def describe_model(subject: Subject) -> str:
    """Shape and vocabulary."""
    shape, about = subject.model.config, subject.about
    chat = " It answers questions, in the form that its chat template gives." if about["chat_template"] else ""
    return (
        f"A GPT-2 with {parameter_count(shape):,} parameters: {shape.n_layer} layers, {shape.n_head} heads, width "
        f"{shape.n_embd}, context {shape.block_size}, {'with' if shape.bias else 'without'} biases, {shape.gelu} GELU. "
        f"Its tokenizer is {subject.tokenizer.identity['name']}, {about['vocab_size']:,} ids; id {about['eot_id']} "
        f"`{about['eot_token']}` ends a text.{chat}\n"
    )


def describe_training(subject: Subject) -> str:
    """Data, settings and results, as far as the checkpoint tells them."""
    state, settings, data = subject.state, subject.state.get("config") or {}, subject.state.get("data") or {}
    lines = ["## Training\n", f"- steps: {state.get('iter_num') or 0:,}"]
    if state.get("best_val_loss") is not None:
        lines.append(f"- best validation loss: {float(state['best_val_loss']):.4f} nats per token")
    if data:
        lines.append(f"- training tokens: {data['train_tokens']:,} (SHA-256 {data['train_sha256']})")
    shown = [f"{key}={settings[key]}" for key in SHOWN_SETTINGS if settings.get(key) is not None]
    return "\n".join([*lines, *([f"- settings: {' '.join(shown)}"] if shown else [])]) + "\n"


def table(rows: list[dict[str, Any]]) -> str:
    """A table of what was measured, one row a file."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [columns, ["---"] * len(columns), *([row.get(key, "") for key in columns] for row in rows)]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def commands_for(folder: Path, subject: Subject, files: list[str]) -> list[str]:
    """Ready commands for vLLM, or for llama.cpp and Ollama."""
    chat, name = bool(subject.about["chat_template"]), subject.about["name"]
    if not files:
        return [f"vllm serve {shlex.quote(str(folder))}"]
    path = shlex.quote(str(folder / files[0]))
    cli = f"llama-cli -m {path}" if chat else f'llama-cli -m {path} -no-cnv -n 100 -p "The "'
    ollama = f"ollama create {shlex.quote(name.lower())} -f {shlex.quote(str(folder / 'Modelfile'))}"
    return [cli, f"llama-server -m {path}", f"{ollama} && ollama run {shlex.quote(name.lower())}"]


def modelfile(subject: Subject, file: str) -> str:
    """Ollama's description of the model, with the conversation in the language of its templates."""
    end = subject.about["eot_token"]
    template = "{{ .Prompt }}"
    notes = ""
    if subject.about["chat_template"]:
        notes = f"# Ollama's templates cannot replace text: what is written like {end} or <|user|> in a question\n"
        notes += "# is read as that token here.\n"
        answered = '{{ if eq .Role "assistant" }}' + end + "{{ end }}"
        template = "{{ range .Messages }}<|{{ .Role }}|>{{ .Content }}" + answered + "{{ end }}<|assistant|>"
    return (
        f'{notes}FROM ./{file}\nTEMPLATE """{template}"""\nPARAMETER stop "{end}"\n'
        f"PARAMETER num_ctx {subject.model.config.block_size}\nPARAMETER temperature 0.8\nPARAMETER top_k 40\n"
    )
