"""Writes a trained model in the form that others run: checkpoint → Hugging Face folder, or GGUF for llama.cpp.

In:  a checkpoint, which carries its tokenizer; for the perplexity also the val.bin that it was trained beside.
Out: a folder that appears whole or not at all, with a README.md that says what it is and how to run it.

    python -m tools.export_model --checkpoint=out/my_own_llm.pt --format=hf --out=out/hf
    python -m tools.export_model --checkpoint=out/my_own_llm.pt --format=gguf --quant=q8_0,q4_0 --out=out/gguf

Every export loads its files back and compares: token ids, logits, perplexity on the validation data; with transformers
and llama.cpp (xllamacpp) where these are installed (pip install -r tools/requirements.txt).
"""

from __future__ import annotations

import dataclasses
import re
import sys
from typing import Literal

from configurator import UserError, answer_help, format_overrides, load_config, program

QUANTS = {
    "hf": ("f32", "bf16", "f16", "int8"),
    "gguf": ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_k_m", "q5_k_m", "q6_k"),
}


@dataclasses.dataclass(frozen=True)
class ExportConfig:
    """Settings of tools.export_model."""

    checkpoint: str = "out/my_own_llm.pt"  # what to export
    format: Literal["hf", "gguf"] = "hf"  # hf = for transformers and vLLM, gguf = for llama.cpp and Ollama
    out: str | None = None  # the folder to write; none = hf or gguf beside the checkpoint
    quant: str | None = None  # f32 (none) bf16 f16; hf: int8; gguf: q8_0 q4_0 q4_k_m q5_k_m q6_k, commas between
    name: str | None = None  # the model's name; none = that of the checkpoint's folder
    data_dir: str = "data"  # where the data sets lie
    dataset: str | None = None  # whose val.bin gives the perplexity; none = the one that it was trained on
    eval_windows: int = 16  # windows of validation data for the perplexity; 0 = none
    overwrite: bool = False  # replace an export that is there

    def __post_init__(self) -> None:
        unknown = set(self.quants) - set(QUANTS[self.format])
        if unknown or not self.quants or (self.format == "hf" and len(self.quants) > 1):
            raise UserError(f"--quant={self.quant}: --format={self.format} takes {', '.join(QUANTS[self.format])}")
        if self.eval_windows < 0:
            raise UserError(f"eval_windows={self.eval_windows} must not be negative")
        if self.name is not None and not re.fullmatch(r"[\w.-]*\w[\w.-]*", self.name, re.ASCII):
            raise UserError(f"--name={self.name} is no file name: letters, digits, dots, dashes")
        if self.out and self.out.rstrip("/").rpartition("/")[2] in ("", ".", ".."):
            raise UserError(
                f"--out={self.out} has no name of its own: the folder is made, such as --out=out/{self.format}"
            )

    @property
    def quants(self) -> list[str]:
        """The number formats asked for."""
        return list(dict.fromkeys((self.quant or QUANTS[self.format][0]).lower().replace(" ", "").split(",")))


if __name__ == "__main__":
    answer_help(ExportConfig, sys.argv[1:], __doc__)  # before PyTorch is imported, which takes two seconds

import contextlib
import math
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from checkpoint import flush_folder, model_file
from model import GPT, Sampler, generate
from tokenizer import Tokenizer
from tools import gguf_file, hugging_face, llama_runner
from tools.export_subject import CONVERSATION, PROBES, Subject, load_subject
from tools.model_card import GELU_NOTE, write_card

OURS = re.compile(r"[\w.-]+\.(gguf|safetensors|json|jinja)|Modelfile|README\.md")  # what an export's folder may hold
GREEDY_TOKENS = 50
LLAMA_SCORED = 256  # ids of validation data whose probability is asked of llama.cpp, one request each


@program
def main(argv: list[str]) -> int:
    """Runs the program; returns its exit code."""
    config, origins = load_config(ExportConfig, argv, __doc__)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leaves through the context manager, which cleans up
    for line in format_overrides(config, origins):
        print(line)
    checkpoint = model_file(config.checkpoint)
    target = Path(config.out or checkpoint.parent / config.format)
    old = old_folder(target)
    if old.exists() and not target.exists():  # an export was killed between its two renames
        os.replace(old, target)
    refuse_foreign(target, config.overwrite)
    if config.format == "gguf":
        gguf_file.import_gguf()
    subject = load_subject(checkpoint, config.name, Path(config.data_dir), config.dataset, config.eval_windows)
    print(gguf_file.describe_sizes(subject.model, subject.about["vocab_size"], QUANTS[config.format]))
    with new_folder(target) as folder:
        rows = export_gguf(folder, subject, config) if config.format == "gguf" else [export_hf(folder, subject, config)]
        commands = write_card(folder, target, subject, config.format, rows)
    for row in rows:
        print(", ".join(f"{key} {value}" for key, value in row.items()))
    print(f"written: {target}/ ({', '.join(sorted(path.name for path in target.iterdir()))})")
    print("\n".join(["run it:", *(f"  {command}" for command in commands)]))
    return 0


def export_hf(folder: Path, subject: Subject, config: ExportConfig) -> dict[str, Any]:
    """Writes and checks a Hugging Face folder; returns what was measured."""
    quant = config.quants[0]
    hugging_face.write_hugging_face(folder, subject.model, subject.spec, subject.about, quant)
    loaded, ours = hugging_face.load_back(folder), subject.logits(subject.model)
    difference = (subject.logits(loaded) - ours).abs().max().item()
    conversation = (CONVERSATION, subject.conversation_ids()) if subject.about["chat_template"] else None
    theirs = hugging_face.check_by_transformers(folder, subject.probes, conversation, subject.probe_ids())
    if theirs is not None:
        difference = max(difference, (theirs - ours).abs().max().item())
    refuse_overflow(difference, quant)
    limit = 1e-4 * max(1.0, ours.abs().max().item())
    if quant == "f32" and difference > limit:
        raise UserError(f"the logits of the export differ by {difference:.1e}: please report this checkpoint")
    return measured(subject, quant, folder / "model.safetensors", loaded, difference) | {
        "checked with": "its own reader" + (" and transformers" if theirs is not None else ""),
        "probe texts": f"{len(subject.probes)} of {len(PROBES)}",
    }


def export_gguf(folder: Path, subject: Subject, config: ExportConfig) -> list[dict[str, Any]]:
    """Writes and checks GGUF files; returns what was measured of each."""
    if subject.model.config.gelu == "exact":
        print(f"note: {GELU_NOTE}")
    if any(quant in gguf_file.LLAMA_FORMATS for quant in config.quants):
        gguf_file.require_llama_quantizer()
    rows, full = [], folder / "f32.gguf.tmp"
    for quant in config.quants:
        path = folder / f"{subject.about['name']}-{quant}.gguf"
        if quant in gguf_file.LLAMA_FORMATS:
            if not full.exists():
                gguf_file.write_gguf(full, subject.model, subject.spec, subject.about, "f32")
            gguf_file.quantize_by_llama(full, path, quant)
        else:
            gguf_file.write_gguf(path, subject.model, subject.spec, subject.about, quant)
        loaded, formats = gguf_file.read_gguf(path)
        difference = (subject.logits(loaded) - subject.logits(subject.model)).abs().max().item()
        refuse_overflow(difference, quant)
        row = measured(subject, quant, path, loaded, difference)
        row |= {"tensors": gguf_file.describe_formats(formats)}
        if fallen := gguf_file.fallen_back(formats, quant):
            kept = ", ".join(f"{name} ({kind})" for name, kind in fallen.items())
            print(f"warning: {quant} does not fit the width of {len(fallen)} tensors, kept in another format: {kept}")
        rows.append(row | check_in_llama(path, subject, quant))
    full.unlink(missing_ok=True)
    return rows


def refuse_overflow(difference: float, quant: str) -> None:
    """Raises UserError where a format made weights or logits infinite."""
    if not math.isfinite(difference):
        raise UserError(f"this model has numbers beyond the range of {quant}: take another --quant=, f32 or bf16")


def measured(subject: Subject, quant: str, path: Path, loaded: GPT, difference: float) -> dict[str, Any]:
    """What both formats report: size, difference of logits, perplexity beside the original's."""
    row: dict[str, Any] = {
        "format": quant,
        "MB": f"{path.stat().st_size / 1e6:,.1f}",
        "logits differ": f"{difference:.1e}",
    }
    if subject.windows:
        row["perplexity"] = f"{subject.perplexity(loaded):.3f} (original {subject.own_perplexity:.3f})"
    return row


def check_in_llama(path: Path, subject: Subject, quant: str) -> dict[str, Any]:
    """Runs a file in llama.cpp, where that is installed. Raises UserError where it reads text as other ids."""
    if not llama_runner.has_llama():
        print("not run in llama.cpp: pip install xllamacpp", file=sys.stderr)
        return {}
    model, context = subject.model, subject.model.config.block_size
    prompt = next(iter(subject.probes.values()), [])[: context // 2] or [subject.about["eot_id"]]
    new_tokens = min(GREEDY_TOKENS, context - len(prompt))
    scored, counted = scored_windows(subject)
    chat = [CONVERSATION] if subject.about["chat_template"] else []
    questions = llama_runner.Questions(list(subject.probes), prompt, new_tokens, scored, chat)
    answers = llama_runner.ask_llama(path, context, questions)
    readings = [*zip(subject.probes, subject.probes.values(), answers.texts, strict=True)]
    readings += [("a conversation", subject.conversation_ids(), ids) for ids in answers.conversations]
    for text, ours, theirs in readings:
        if ours != theirs:
            raise UserError(f"llama.cpp reads {text!r} as {theirs}, not as {ours}")
    written = greedy(model, prompt, new_tokens, subject.tokenizer)
    pairs = enumerate(zip(written, answers.continuation, strict=False))
    same = next((n for n, (our_id, their_id) in pairs if our_id != their_id), len(written))
    row: dict[str, Any] = {
        "in llama.cpp": f"{len(readings)} texts alike",
        "greedy tokens alike": f"{same} of {len(written)}",
    }
    scores = [
        [score if counts else None for score, counts in zip(*pair, strict=True)]
        for pair in zip(answers.scores, counted, strict=True)
    ]
    told = [score for window in scores for score in window if score is not None]
    if told:
        theirs, ours = -math.fsum(told) / len(told), loss_on(model, scored, scores)
        row["its perplexity"] = f"{math.exp(theirs):.3f} (original {math.exp(ours):.3f}) on {len(told)} ids"
    return row


def scored_windows(subject: Subject) -> tuple[list[list[int]], list[list[bool]]]:
    """The first LLAMA_SCORED ids of the validation windows, in as few windows as these make, and which of all but the
    first id of each count: of a conversation the answers.
    """
    kept: list[list[int]] = []
    counted: list[list[bool]] = []
    left = LLAMA_SCORED
    for x, y in subject.windows:
        for row, targets in zip(x, y, strict=True):
            used = int((targets != -1).nonzero().max()) + 1  # behind it a conversation is padded
            window = row[: min(used, left + 1)].tolist()
            if len(window) > 1:
                kept.append(window)
                counted.append((targets[: len(window) - 1] != -1).tolist())
                left -= len(window) - 1
    return kept, counted


def loss_on(model: GPT, windows: list[list[int]], scores: list[list[float | None]]) -> float:
    """Mean loss over the ids of windows that have a score, each predicted from those before it in its window."""
    total, count = 0.0, 0
    with torch.inference_mode():
        for window, scored in zip(windows, scores, strict=True):
            targets = [-1 if score is None else i for i, score in zip(window[1:], scored, strict=True)]
            number = sum(target != -1 for target in targets)
            if number:
                total += model(torch.tensor([window[:-1]]), torch.tensor([targets])).item() * number
            count += number
    return total / count


def greedy(model: GPT, prompt: list[int], count: int, tokenizer: Tokenizer) -> list[int]:
    """The most likely continuation, as sample.py writes it: its end token, should it come, closes the list."""
    sampler = Sampler(temperature=0, top_k=None, top_p=1.0, seed=0, samples=1)
    ids: list[int] = []
    for chosen in generate(model, torch.tensor(prompt), count, sampler, tokenizer.vocab_size):
        ids.append(int(chosen))
        if ids[-1] == tokenizer.eot_id:
            break
    return ids


def refuse_foreign(target: Path, overwrite: bool) -> None:
    """Raises UserError for a target that is there, unless it is an export that may be replaced."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    foreign = [path.name for path in target.iterdir() if not OURS.fullmatch(path.name)] if target.is_dir() else ["it"]
    if foreign:
        raise UserError(f"{target} is no export ({', '.join(foreign[:3])}), and is left as it is: name another --out=")
    if not overwrite:
        raise UserError(f"{target} is there already: --overwrite=true replaces it, --out= names another folder")


def old_folder(target: Path) -> Path:
    """Where an export stands that is about to be replaced."""
    return target.with_name(f".{target.name}.old")


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder beside the target, which takes its place when the block ends well, and vanishes when it does not."""
    partial, old = target.with_name(f".{target.name}.unfinished"), old_folder(target)
    shutil.rmtree(partial, ignore_errors=True)  # of an export that was killed
    partial.mkdir(parents=True)
    try:
        yield partial
        for path in partial.iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.replace(target, old)
        os.replace(partial, target)
        flush_folder(target.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
