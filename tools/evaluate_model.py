"""Judges a model: perplexity with its rules, tasks, what its text repeats and copies, its held-out text, and a report.

In:  a checkpoint, a run folder or a Hugging Face GPT-2 folder; a split of prepared data, or files of text.
Out: tables on the console; with a run folder its evaluation.json, which collects the numbers, and report.html.

    python -m tools.evaluate_model --checkpoint=out/my_own_llm.pt              # the whole validation split
    python -m tools.evaluate_model --split=test --stride=256                   # more context, more work
    python -m tools.evaluate_model --input=texts/ --detokenize=true            # own text
    python -m tools.evaluate_model --tasks=hellaswag,lambada_openai,questions.jsonl,my_task.yaml
    python -m tools.evaluate_model --prompts=prompts.txt --num_samples=8       # repetition, variety, copies
    python -m tools.evaluate_model --compare out/a out/b                       # runs side by side

Words that follow a bare --compare are run folders, until the next flag; --compare=out/a,out/b says the same.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Literal

from configurator import UserError, answer_help, format_overrides, load_config, program


@dataclasses.dataclass(frozen=True)
class EvaluateConfig:
    """Settings of tools/evaluate_model.py."""

    checkpoint: str = "out/my_own_llm.pt"  # a checkpoint, a run folder, a Hugging Face GPT-2 folder, or gpt2 of the hub
    # perplexity
    perplexity: bool = True  # of all of a split, or of --input
    split: Literal["val", "test", "train"] = "val"  # of the data the model was trained on
    input: str | None = None  # text in place of a split: files, folders, globs, commas between
    document: Literal["auto", "file", "line", "paragraph", "heading"] = "auto"  # one, in .txt and .md
    text_column: str = "text"  # the field with the text, where rows are documents
    detokenize: bool = False  # undo WikiText's spacing in --input; words are still counted in the original
    context: int | None = None  # most tokens that a window reads; none = the model's block_size
    stride: int | None = None  # tokens from one window to the next; none = context, windows do not overlap
    documents: Literal["bounded", "continuous"] = "bounded"  # each by itself, or all as one stream as in training
    score_end: bool = False  # count the id that ends a document too; always so in one stream
    max_tokens: int | None = None  # stop after so many, for a quick look; none = all
    dataset: str | None = None  # the prepared data set; none = the one the model was trained on
    data_dir: str | None = None  # where the data sets lie; none = where they lay in training
    corpus: bool = True  # compare the held-out documents with the training split
    # tasks
    tasks: str | None = None  # names of lm-eval, PATH.yaml, or PATH.jsonl (question, choices, answer), commas between
    num_fewshot: int | None = None  # examples before each question; none = as the task says
    limit: int | None = None  # questions of each task at most, for a quick look
    # generation
    prompts: str | None = None  # a file with a prompt on each line, or rows with --text_column
    num_samples: int = 4  # texts for each prompt, in one batch
    max_new_tokens: int = 200  # tokens of each at most
    temperature: float = 0.8  # below 1 safer, above 1 bolder, 0 = always the most likely token
    top_k: int | None = 40  # choose among this many most likely tokens; 0 or none = no limit
    top_p: float = 1.0  # choose among the most likely tokens that together have this probability
    seed: int = 42  # of the samples
    # the report
    compare: str | None = None  # run folders to put side by side, commas between; nothing else is done then
    report: str | None = (
        None  # the file; none = report.html in the run folder, comparison.html beside the first of several
    )
    overwrite: bool = False  # replace a file of that name which is not such a report
    # the machine
    batch_size: int = 8  # windows at a time: as many as fit in memory; no number depends on it
    device: str = "auto"  # cuda, cuda:1, mps, cpu, or auto = the best there is
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # of weights; the shorter ones are faster, less exact

    def __post_init__(self) -> None:
        for key in ("context", "stride", "max_tokens", "limit", "num_samples", "max_new_tokens", "batch_size"):
            if (value := getattr(self, key)) is not None and value < 1:
                raise UserError(f"{key}={value} must be 1 or more")
        if self.context and self.stride and self.stride > self.context:
            raise UserError(
                f"stride={self.stride} is above context={self.context}: tokens between windows would be lost"
            )
        for key in ("temperature", "top_k", "num_fewshot"):
            if (getattr(self, key) or 0) < 0:
                raise UserError(f"{key}={getattr(self, key)} must not be negative")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p} must be above 0 and at most 1")
        if self.detokenize and not self.input:
            raise UserError("detokenize=true is for --input: a prepared split is as prepare.py made it")


def plain_arguments(argv: list[str]) -> list[str]:
    """The command line with `--compare A B` written as `--compare=A,B`; config files before it stay what they are."""
    words, plain = list(argv), []
    while words:
        word = words.pop(0)
        if word == "--compare":
            folders = []
            while words and not words[0].startswith("-"):
                folders.append(words.pop(0))
            if not folders:
                raise UserError("--compare names no run folder: --compare out/a out/b")
            word = "--compare=" + ",".join(folders)
        plain.append(word)
    return plain


if __name__ == "__main__":
    answer_help(EvaluateConfig, sys.argv[1:], __doc__)  # before PyTorch is imported, which takes two seconds

import datetime
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from dataset import TokenData
from device import Device, choose_device
from memory import is_out_of_memory
from model import parameter_count
from tools.corpus_comparison import compare_with_training
from tools.evaluation_report import check_target, write_comparison, write_report
from tools.evaluation_tables import print_tables
from tools.generation import Sampling, measure_generation, read_prompts
from tools.perplexity import Rules, SplitSource, TextSource, measure_perplexity
from tools.run_record import RunRecord, add_results, read_run
from tools.scoring import Scorer, Subject, open_split_data, open_subject


@program
def main(argv: list[str]) -> int:
    """Runs the program; returns its exit code."""
    config, origins = load_config(EvaluateConfig, plain_arguments(argv), __doc__)
    if config.compare:
        runs = [read_run(Path(name)) for name in config.compare.split(",") if name]
        print_tables([run.results for run in runs], [run.name for run in runs])
        print(f"comparison: {write_comparison(runs, config.report, config.overwrite)}")
        return 0
    device = choose_device(config.device, config.dtype, training=False)
    for line in [*format_overrides(config, origins), *device.notes]:
        print(line)
    try:
        subject, results = judge(config, device)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(
            f"memory on {device.name} ran out with batch_size={config.batch_size} and dtype={config.dtype}: "
            "a smaller --batch_size, --dtype=bfloat16 or --device=cpu need less"
        ) from error
    print_tables([results], [str(subject.path)])
    if subject.folder or config.report:
        run = read_run(subject.folder) if subject.folder else RunRecord(subject.path, results=results)
        for sign in run.signs():
            print(f"warning ({sign.kind}): {sign.message}")
        print(f"report: {write_report(run, config.report, config.overwrite)}")
    return 0


def judge(config: EvaluateConfig, device: Device) -> tuple[Subject, dict[str, Any]]:
    """Finds all that was asked for, before anything is computed; measures it, and keeps each part when it is there."""
    prompts = read_prompts(config.prompts, config.text_column) if config.prompts else []
    tasks = None
    if config.tasks:
        from tools.evaluation_tasks import find_tasks

        tasks = find_tasks(config.tasks)
    subject = open_subject(config.checkpoint, device)
    if config.report or subject.folder:
        check_target(Path(config.report or subject.folder / "report.html"), config.overwrite)
    print(describe_subject(subject, device))
    rules = make_rules(config, subject)
    data = open_data(config, subject)
    results: dict[str, Any] = {"about": about(subject, device, data)}
    for part in measure(config, subject, data, rules, tasks, prompts):
        note = add_results(subject.folder, {"about": results["about"], **part}) if subject.folder else None
        results |= part
        if note:
            print(note)
    return subject, results


def measure(
    config: EvaluateConfig, subject: Subject, data: TokenData | None, rules: Rules, tasks: Any, prompts: list[str]
) -> Iterator[dict[str, Any]]:
    """The parts of an evaluation, each with its entry in evaluation.json."""
    if config.perplexity:
        source = make_source(config, subject, data, rules)
        yield {"perplexity": [measure_perplexity(subject, source, rules, Scorer(subject, config.batch_size))]}
    if config.corpus and data is not None and (config.input or config.split in ("val", "test")):
        source = make_source(config, subject, data, dataclasses.replace(rules, max_tokens=None))
        yield {"corpus": [compare_with_training(source, data, subject.tokenizer, config.input or config.split)]}
    if tasks:
        from tools.evaluation_tasks import run_tasks

        yield {"tasks": run_tasks(subject, tasks, config.batch_size, config.num_fewshot, config.limit)}
    if prompts:
        c = config
        sampling = Sampling(c.num_samples, c.max_new_tokens, c.temperature, c.top_k, c.top_p, c.seed)
        generated, samples = measure_generation(subject, prompts, sampling, data)
        yield {"generation": [generated], "samples": samples}


def make_source(config: EvaluateConfig, subject: Subject, data: TokenData | None, rules: Rules) -> Any:
    """The documents to judge on: files, or a split of the data."""
    if config.input:
        return TextSource(config.input, config.text_column, config.document, rules, subject.tokenizer)
    return SplitSource(data, config.split, rules, subject.tokenizer)


def make_rules(config: EvaluateConfig, subject: Subject) -> Rules:
    """The rules of perplexity for this model. Raises UserError for a context longer than it has."""
    block_size = subject.model.config.block_size
    context = config.context or block_size
    if context > block_size:
        raise UserError(f"context={context} is longer than the model's {block_size} tokens: leave --context away")
    stride = min(config.stride or context, context)
    if config.stride and config.stride > context:
        raise UserError(f"stride={config.stride} is above the model's context of {context}: tokens would be lost")
    bounded = config.documents == "bounded"
    return Rules(context, stride, bounded, config.score_end, config.detokenize, config.max_tokens)


def open_data(config: EvaluateConfig, subject: Subject) -> TokenData | None:
    """The prepared data; where they are not needed and cannot be read, None and a line that says why."""
    needed = config.dataset is not None or (config.perplexity and not config.input)
    if not (needed or config.corpus or config.prompts):
        return None
    try:
        data = open_split_data(subject, config.data_dir, config.dataset)
    except UserError as error:
        if needed:
            raise
        print(f"without the training data, nothing is compared with it: {error}")
        return None
    if data.note:
        print(data.note)
    return data


def about(subject: Subject, device: Device, data: TokenData | None) -> dict[str, Any]:
    """What was judged, where and when."""
    shape, tokenizer = dataclasses.asdict(subject.model.config), subject.tokenizer
    found = {"tokenizer": tokenizer.identity["name"], "vocabulary": tokenizer.vocab_size}
    if data is not None:
        found |= {"folder": str(data.folder), "source": data.meta.get("source"), "id format": data.dtype.name}
        for split, counts in data.meta["splits"].items():
            found[split] = {key: counts[key] for key in ("documents", "tokens", "sha256") if key in counts}
    return {
        "checkpoint": str(subject.path),
        "step": int(subject.state.get("iter_num") or 0),
        "parameters": parameter_count(subject.model.config),
        "tokenizer": {key: value for key, value in tokenizer.identity.items() if key != "json"},
        "model": shape,
        "data": found,
        "device": device.describe(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores",
        "software": f"Python {platform.python_version()}, PyTorch {torch.__version__}",
        "time": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def describe_subject(subject: Subject, device: Device) -> str:
    """The model in a line or two."""
    name, vocab = subject.tokenizer.identity["name"], subject.tokenizer.vocab_size
    line = f"{subject.path}: {parameter_count(subject.model.config):,} parameters, step "
    line += f"{int(subject.state.get('iter_num') or 0):,}, tokenizer {name} ({vocab:,} ids), {device.describe()}"
    return "\n".join([line, *subject.notes])


if __name__ == "__main__":
    sys.exit(main())
