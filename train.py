"""Trains a GPT-2: tokens → checkpoint.

In:  data/NAME/ from prepare.py (or a nanoGPT data folder), settings from config files and flags.
Out: out/my_own_llm.pt (the best model), out/last.pt (to go on from), metrics.jsonl, loss.png, samples.txt, config.json.

    python train.py                                          # GPT-2 Medium on WikiText-103, one CUDA GPU
    python train.py config/train_demo.py                     # two minutes on a CPU
    python train.py --init_from=resume --out_dir=out         # go on where the run stopped
    torchrun --standalone --nproc_per_node=4 train.py        # four GPUs

A step is: `gradient_accumulation_steps` micro-batches forward and backward, one clipped AdamW update. Which windows a
step reads and what its dropout draws depend on (seed, step, micro-step, rank) alone, so a resumed run repeats exactly.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Literal

from configurator import UserError, answer_help, format_overrides, load_config, program


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Settings of train.py, with nanoGPT's names."""

    # where things are
    out_dir: str = "out"  # the run folder
    data_dir: str = "data"  # where the data sets lie
    dataset: str = "wikitext103"  # the folder in data_dir to train on
    init_from: str = "scratch"  # scratch, resume, or weights: a checkpoint, a Hugging Face folder, gpt2, gpt2-xl…
    overwrite: bool = False  # start anew in a run folder that holds a run
    # the model
    n_layer: int = 24  # blocks
    n_head: int = 16  # attention heads in a block
    n_embd: int = 1024  # width
    block_size: int = 1024  # context, in tokens
    dropout: float = 0.1  # 0.1 where the corpus is read many times, 0 for one pass
    bias: bool = True  # in the linear layers and norms, as GPT-2 has them
    gelu: Literal["tanh", "exact"] = "tanh"  # tanh = GPT-2's, exact = nanoGPT's
    # the batch: batch_size × block_size × gradient_accumulation_steps tokens a step
    batch_size: int | Literal["auto"] = 8  # windows in a micro-batch; auto = as many as fit, same global batch
    gradient_accumulation_steps: int = 16  # micro-batches in a step, over all processes
    # the optimizer
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon = for the blocks' matrices, AdamW for the rest
    learning_rate: float = 6e-4  # the highest of the schedule; larger models want less
    max_iters: int = 50000  # steps
    weight_decay: float = 0.1  # on matrices and embeddings, never on biases and norms
    beta1: float = 0.9  # decay of the mean of gradients
    beta2: float = 0.95  # decay of the mean of their squares
    grad_clip: float = 1.0  # largest norm of the whole gradient; 0 = no limit
    decay_lr: bool = True  # warm up, then follow a cosine; false = learning_rate throughout
    warmup_iters: int = 2000  # steps of linear warm-up
    lr_decay_iters: int | None = None  # steps until min_lr; none = max_iters
    min_lr: float | None = None  # learning rate at the end; none = a tenth of learning_rate
    # evaluation, logs, checkpoints; intervals in steps
    eval_interval: int = 100  # between evaluations
    eval_iters: int = 50  # micro-batches of fixed windows in an evaluation, of each split
    eval_only: bool = False  # evaluate once, write nothing
    log_interval: int = 10  # between logged training losses
    checkpoint_interval: int = 500  # between full states in last.pt
    always_save_checkpoint: bool = False  # a full state at every evaluation too
    patience: int = 0  # stop after this many evaluations without a better validation loss; 0 = never
    wandb_log: bool = False  # send metrics to Weights & Biases
    wandb_project: str = "my-own-llm"  # its project
    wandb_run_name: str | None = None  # its name for the run; none = chosen there
    # the machine
    device: str = "cuda"  # cuda, cuda:1, mps, cpu, or auto = the best there is
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"  # of matrix products; weights stay float32
    compile: bool = True  # torch.compile: a minute to start, then faster
    gradient_checkpointing: bool = False  # a third more work for much less memory, same losses
    shard: bool = False  # share weights, gradients and optimizer state out over the GPUs (FSDP2)
    backend: str = "nccl"  # how several GPUs talk
    seed: int = 1337  # initial weights, order of windows, dropout

    def __post_init__(self) -> None:
        positive = "batch_size gradient_accumulation_steps max_iters eval_interval eval_iters log_interval"
        for key in [*positive.split(), "checkpoint_interval", "block_size", "n_layer", "n_head", "n_embd"]:
            if getattr(self, key) != "auto" and getattr(self, key) < 1:
                raise UserError(f"{key}={getattr(self, key)} must be 1 or more")
        for key in (
            "learning_rate",
            "weight_decay",
            "grad_clip",
            "warmup_iters",
            "min_lr",
            "patience",
            "lr_decay_iters",
        ):
            if (getattr(self, key) or 0) < 0:
                raise UserError(f"{key}={getattr(self, key)} must not be negative")
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1 and 0 <= self.dropout < 1):
            raise UserError(f"beta1={self.beta1}, beta2={self.beta2} and dropout={self.dropout} go from 0 to below 1")
        if not 0 <= self.seed < 1 << 32:
            raise UserError(f"seed={self.seed} is not from 0 to {(1 << 32) - 1:,}: each of these is a run of its own")
        if self.n_embd % self.n_head:
            raise UserError(f"n_embd={self.n_embd} is not a multiple of n_head={self.n_head}: change one of them")
        if self.min_lr is not None and self.min_lr > self.learning_rate:
            raise UserError(f"min_lr={self.min_lr} is above learning_rate={self.learning_rate}: lower --min_lr")
        if self.optimizer == "muon" and self.shard:
            raise UserError("optimizer=muon wants whole matrices, shard=true cuts them: leave one of the two away")

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one update learns from, over all processes."""
        return self.batch_size * self.block_size * self.gradient_accumulation_steps

    @property
    def decay_steps(self) -> int:
        """Steps until min_lr."""
        return self.lr_decay_iters or self.max_iters

    @property
    def warmup_steps(self) -> int:
        """warmup_iters, or a tenth of a run that would be nothing but warm-up."""
        return self.warmup_iters if self.warmup_iters < self.decay_steps else self.decay_steps // 10

    def learning_rate_at(self, step: int) -> float:
        """Learning rate of update number `step`, counted from 0."""
        if not self.decay_lr:
            return self.learning_rate
        lowest = self.learning_rate / 10 if self.min_lr is None else self.min_lr
        return cosine_schedule(step, self.learning_rate, lowest, self.warmup_steps, self.decay_steps)


if __name__ == "__main__":
    answer_help(TrainConfig, sys.argv[1:], __doc__)  # before PyTorch is imported, which takes two seconds

import contextlib
import errno
import json
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from budget import Load, load_of, opening_lines, optimizer_bytes, sizes_that_fit, tensor_bytes, vocabulary_rows
from chat import restore_tokenizer
from checkpoint import (
    FORMAT_VERSION,
    BackgroundSaver,
    build_model,
    load_run,
    lock_run_folder,
)
from dataset import TokenData, write_atomically
from device import (
    Device,
    StopSignals,
    choose_device,
    compile_obstacle,
    first_that_runs,
    give_way,
    is_lost_process,
    least_over_ranks,
    seed_streams,
    start_ranks,
    stop_ranks,
    sum_over_ranks,
)
from diagnostics import RunFacts, find_warnings, repeated_ngrams
from memory import is_out_of_memory
from model import GPT, GPTConfig, Sampler, flops_per_token, generate, parameter_count
from optimizer import cosine_schedule, make_optimizer
from origin import check_same_data, check_tokenizer, data_identity, load_weights, resumed_settings, shape_of_checkpoint
from pairs import open_data, sample_prompt
from progress import RunLog, evaluation_line, format_duration, import_wandb, perplexity
from sharding import beside, compile_blocks, for_generation, gather, here, shard, spread, whole

BAD_STEPS = 5  # steps in a row with a loss or gradient that is not finite, until the run gives up
BAD_STEPS_FLOAT16 = 25  # its scaler starts at 2 ** 16 and halves at each overflow
HOPELESS = 1.5  # of the free memory of a CPU; what is swapped out gives no more than that
SAMPLE_TOKENS = 100  # written at every evaluation
RUN_FILES = ("last.pt", "previous.pt", "my_own_llm.pt", "metrics.jsonl", "loss.png", "config.json", "samples.txt")


@program
def main(argv: list[str]) -> int:
    """Runs the program; returns its exit code."""
    try:
        return run(argv)
    except UserError:
        give_way()
        raise
    except RuntimeError as error:
        if not is_lost_process(error):
            raise
        give_way(always=True)
        raise UserError(
            "another process of this run ended, see its own message: --init_from=resume goes on from the last checkpoint"
        ) from error


def run(argv: list[str]) -> int:
    """Sets up, trains or evaluates, and leaves nothing behind."""
    config, device, data, state, lines, auto = set_up(argv)
    folder, resuming = Path(config.out_dir), config.init_from == "resume"
    if resuming and not config.eval_only and state["iter_num"] >= config.max_iters:
        if device.is_main:
            print(f"{folder} is finished at step {state['iter_num']:,}: a larger --max_iters= goes on")
        return 0
    with contextlib.ExitStack() as stack:
        if device.is_main and not config.eval_only:
            stack.enter_context(lock_run_folder(folder))
            if not resuming:
                clear_run_folder(folder, config.overwrite)
        start_ranks(device, config.backend)
        try:
            trainer = Trainer(config, device, data, state, auto)
            del state  # its optimizer state would fill main memory until the end
            if auto:
                trainer.choose_batch_size()
            if device.is_main:
                print("\n".join([*lines, *trainer.describe()]), flush=True)
            code = trainer.evaluate_only() if config.eval_only else trainer.run()
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                raise UserError(out_of_memory_advice(config, device)) from error
            raise
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
                raise
            saved = ": free some space, then --init_from=resume goes on" * (folder / "last.pt").exists()
            raise UserError(f"{error.strerror} while writing to {folder}, its checkpoints are whole{saved}") from error
        stop_ranks()  # not after an error: the others would meet a closed connection before they are ended
        return code


def set_up(argv: list[str]) -> tuple[TrainConfig, Device, TokenData, dict[str, Any] | None, list[str], bool]:
    """Settings, device, data, checkpoint to start from, what was overridden, whether batch_size is auto. Writes nothing."""
    state, notes = None, []

    def settings_of_run(given: dict[str, Any]) -> dict[str, Any]:
        nonlocal state, notes
        if given.get("init_from") != "resume":
            return {}
        state, notes = load_run(Path(given.get("out_dir", TrainConfig.out_dir)))
        return resumed_settings(TrainConfig, state, given)

    config, origins = load_config(TrainConfig, argv, __doc__, settings_of_run)
    if config.wandb_log:
        import_wandb()
    lines, auto = format_overrides(config, origins) + notes, config.batch_size == "auto"
    if auto:
        config = dataclasses.replace(config, batch_size=usual_batch_size(argv, state))
    if config.init_from == "resume":
        changed = {key: state["config"].get(key) for key in origins if key not in ("init_from", "overwrite", "out_dir")}
        told = [(key, old, getattr(config, key)) for key, old in changed.items()]
        lines += [f"changed on resume: {key} was {old}, now {new}" for key, old, new in told if old != new]
    elif config.init_from != "scratch":
        state = load_weights(config.init_from)
        config = shape_of_checkpoint(config, origins, state)
        lines.append(f"starting from the weights of {config.init_from}")
    device = choose_device(config.device, config.dtype, dtype_asked="dtype" in origins or config.init_from == "resume")
    config = dataclasses.replace(config, dtype=device.dtype_name)  # what is really used, for the checkpoint too
    if config.gradient_accumulation_steps % device.world_size:
        raise UserError(
            f"gradient_accumulation_steps={config.gradient_accumulation_steps} is not divisible by the "
            f"{device.world_size} processes: use a multiple of {device.world_size}"
        )
    data = open_data(Path(config.data_dir) / config.dataset, config.block_size, config.seed)
    if config.init_from == "resume":
        check_same_data(state, data, Path(config.out_dir))
    elif state is not None:
        check_tokenizer(state, config.init_from, data)
    return config, device, data, state, lines, auto


def usual_batch_size(argv: list[str], state: dict[str, Any] | None) -> int:
    """The batch size without batch_size=auto on the command line, which together with the accumulation says what is
    learnt from in a step: a config file's, that of the run that goes on, or the default.
    """
    stored = {"batch_size": state["config"]["batch_size"]} if state else {}
    words = [word for word in argv if word.replace("-", "_").partition("=")[0] != "__batch_size"]
    usual = load_config(TrainConfig, words, "", lambda given: stored)[0].batch_size
    return TrainConfig.batch_size if usual == "auto" else usual


def clear_run_folder(folder: Path, overwrite: bool) -> None:
    """Makes the folder ready for a new run; never drops an old one unasked."""
    existing = [name for name in RUN_FILES[:3] if (folder / name).exists()]
    if existing and not overwrite:
        what = f"{folder} already holds a run ({', '.join(existing)})"
        if not sys.stdin.isatty():
            raise UserError(f"{what}: --init_from=resume goes on with it, --overwrite=true starts anew, or --out_dir=")
        if input(f"{what}. Drop it and start anew? [y/N] ").strip().lower() not in ("y", "yes"):
            raise UserError(f"{folder} is left as it is: --init_from=resume goes on with it")
    for name in RUN_FILES:
        (folder / name).unlink(missing_ok=True)


def out_of_memory_advice(config: TrainConfig, device: Device) -> str:
    """What was tried and what to change."""
    memory = f" of {device.memory_bytes / 2**30:.1f} GiB" if device.memory_bytes else ""
    return f"memory{memory} on {device.name} ran out with {what_takes_memory(config)}. {ways_to_save_memory(config)}"


def what_takes_memory(config: TrainConfig) -> str:
    """The settings that it hangs on."""
    return " ".join(f"{key}={getattr(config, key)}" for key in ("batch_size", "block_size", "n_layer", "n_embd"))


def ways_to_save_memory(config: TrainConfig, parts: int = 2) -> str:
    """What to change, the mildest first: the micro-batch in so many parts."""
    steps, parts = [], min(parts, config.batch_size)
    if parts > 1:
        smaller, more = config.batch_size // parts, config.gradient_accumulation_steps * parts
        steps.append(f"--batch_size={smaller} --gradient_accumulation_steps={more} (the same batch in smaller parts)")
    if not config.gradient_checkpointing:
        steps.append("--gradient_checkpointing=true (a third slower)")
    steps.append("a smaller model (config/train_gpt2_small.py, or fewer --n_layer)")
    return "In this order: " + "; then ".join(steps)


class Trainer:
    """One run: model, optimizer, data and counters, and the steps over them."""

    def __init__(
        self, config: TrainConfig, device: Device, data: TokenData, state: dict[str, Any] | None, auto: bool = False
    ) -> None:
        self.config, self.device, self.data, self.auto = config, device, data, auto
        self.folder, self.tokenizer = Path(config.out_dir), restore_tokenizer(data.meta["tokenizer"], data.folder)
        self.step, self.tokens, self.elapsed_seconds, self.best_val_loss = 0, 0, 0.0, math.inf
        self.wandb_id: str | None = None
        self.evaluation_due = True  # before the first step, and again when a signal cut one short
        self.notes = [note for note in (*device.notes, data.note) if note]
        self.signals, self.saver = StopSignals(device), BackgroundSaver()
        resuming = config.init_from == "resume"
        self.sharded = config.shard and device.world_size > 1
        if config.shard and not self.sharded:
            self.notes.append("shard=true does nothing with one process; the variable GPUS says how many")
        seed_streams(config.seed)
        self.model = self.make_model(state)
        betas = (config.beta1, config.beta2)
        self.optimizer = make_optimizer(self.model, config.optimizer, config.learning_rate, betas, config.weight_decay)
        self.evaluations_since_best, self.last_is_damaged = 0, False
        self.facts = RunFacts(
            parameter_count(self.model.config),
            data.tokens["train"],
            config.tokens_per_step,
            config.max_iters,
            data.vocab_size,
            config.warmup_steps if config.decay_lr else 0,
        )
        self.bad_steps = torch.zeros((), device=device.torch)  # in a row, with a loss or gradient that is not finite
        self.skipped_steps = torch.zeros((), device=device.torch)  # such steps in all, none of them applied
        self.scaler = torch.amp.GradScaler(device.kind, enabled=device.dtype == torch.float16)
        if resuming:
            self.restore(state)
        self.parallel = self.wrap()

    def wrap(self) -> torch.nn.Module:
        """Compiles the model where asked for and possible; returns what the training steps call."""
        if self.config.compile:
            obstacle = compile_obstacle(self.device)
            if obstacle:
                self.notes.append(f"compile=false: {obstacle}")
            elif self.sharded:
                compile_blocks(self.model)
            else:
                self.model.compile()
        if self.device.world_size == 1 or self.sharded:
            return self.model
        ids = [self.device.index] if self.device.kind == "cuda" else None
        return DistributedDataParallel(self.model, device_ids=ids)

    def make_model(self, state: dict[str, Any] | None) -> GPT:
        """A fresh model, or the one of a checkpoint, on the device."""
        c = self.config
        if state is None:
            rows = vocabulary_rows(self.data.vocab_size)
            shape = GPTConfig(c.block_size, rows, c.n_layer, c.n_head, c.n_embd, c.dropout, c.bias, c.gelu)
            self.refuse_what_cannot_fit(shape)
            model = GPT(shape)
        else:
            state["model_args"]["dropout"] = c.dropout
            source = self.folder / "last.pt" if c.init_from == "resume" else Path(c.init_from)
            model = build_model(state, source)
            self.refuse_what_cannot_fit(model.config)
            if model.config.vocab_size < self.data.vocab_size:
                raise UserError(
                    f"{source} has {model.config.vocab_size:,} rows of vocabulary, too few for the "
                    f"{self.data.vocab_size:,} ids of {self.data.folder}: prepare the data with the model's tokenizer "
                    "(to chat, a vocabulary must leave three rows free)"
                )
        model.gradient_checkpointing, model.used_vocabulary = c.gradient_checkpointing, self.data.vocab_size
        if self.sharded:
            shard(model, self.device.kind, self.device.world_size)
        return model.to(self.device.torch).train()

    def refuse_what_cannot_fit(self, shape: GPTConfig) -> None:
        """Raises UserError for a run that a CPU has no memory for, which the system would kill without a word."""
        c, d, room = self.config, self.device, self.device.room_bytes
        load, parts = load_of(c, shape, self.data.vocab_size, d.kind, d.world_size), 1
        needed = tensor_bytes(load.with_batch(1) if self.auto else load)
        if d.kind == "cpu" and room and needed > HOPELESS * room and not c.eval_only:
            while parts < c.batch_size and tensor_bytes(load.with_batch(max(1, c.batch_size // parts))) > room:
                parts *= 2
            raise UserError(
                f"{what_takes_memory(c)} would take about {needed / 2**30:,.1f} GiB, and {room / 2**30:.1f} are free. "
                f"{ways_to_save_memory(c, parts)}"
            )

    def restore(self, state: dict[str, Any]) -> None:
        """Takes the optimizer, the scaler and the counters over; settings given now win over the optimizer's own."""
        fresh = [dict(group) for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(spread(state["optimizer"], self.optimizer))
        for group, settings in zip(self.optimizer.param_groups, fresh, strict=True):
            group.update({key: settings[key] for key in ("betas", "weight_decay", "lr") if key in settings})
        self.scaler.load_state_dict(state["scaler"])
        self.step, self.best_val_loss = state["iter_num"], state["best_val_loss"]
        self.last_is_damaged = "read_from" in state
        self.tokens, self.elapsed_seconds = state["tokens"], state["elapsed_seconds"]
        self.wandb_id, self.evaluations_since_best = state["wandb_id"], state["evaluations_since_best"]
        self.evaluation_due = state["evaluation_due"]

    def describe(self) -> list[str]:
        """What a person should know before the first step."""
        c, shape = self.config, self.model.config
        train, total = self.data.tokens["train"], c.max_iters * c.tokens_per_step
        splits = ", ".join(f"{split} {tokens:,}" for split, tokens in self.data.tokens.items())
        processes = f", {self.device.world_size} processes" if self.device.world_size > 1 else ""
        processes += ", each with a part of the model" * self.sharded
        if c.decay_lr and c.warmup_steps != c.warmup_iters:
            text = f"warmup_iters={c.warmup_iters} would fill all {c.decay_steps} steps: {c.warmup_steps} are used"
            self.notes.append(text)
        if c.decay_lr and c.decay_steps < c.max_iters:
            text = (
                f"lr_decay_iters={c.decay_steps} is less than max_iters={c.max_iters}: the steps after it run at min_lr"
            )
            self.notes.append(text)
        return [
            f"device   {self.device.describe()}{processes}",
            f"model    {shape.n_layer} layers, {shape.n_head} heads, width {shape.n_embd}, context {shape.block_size}, "
            f"{parameter_count(shape):,} parameters (vocabulary {self.data.vocab_size:,}, {shape.vocab_size:,} rows)",
            f"data     {self.data.folder}: {splits} tokens",
            f"batch    {c.batch_size} × {c.block_size} × {c.gradient_accumulation_steps} = {c.tokens_per_step:,} "
            "tokens a step",
            f"run      {c.max_iters:,} steps = {total:,} tokens = {total / train:.1f} epochs, in {self.folder}/",
            *([] if c.eval_only else opening_lines(self.load, c, self.step, self.device)),
            *(f"note     {note}" for note in self.notes),
        ]

    @property
    def load(self) -> Load:
        """What the memory of a step depends on."""
        d = self.device
        return load_of(self.config, self.model.config, self.data.vocab_size, d.kind, d.world_size)

    def choose_batch_size(self) -> None:
        """Takes the largest micro-batch of the same global batch that fits: by the estimate, then by trying."""
        c, device = self.config, self.device
        windows = c.batch_size * c.gradient_accumulation_steps
        choices = sizes_that_fit(self.load, least_over_ranks(device.room_bytes, device))
        # processes that share out a model would wait for the one that ran out of memory
        chosen = choices[0] if self.sharded else first_that_runs(device, choices, self.try_batch)
        best = dataclasses.replace(c, batch_size=chosen or 1, gradient_accumulation_steps=windows // (chosen or 1))
        if chosen is None:
            raise UserError(out_of_memory_advice(best, device))
        self.config = best
        self.notes.append(f"batch_size=auto: {chosen}")

    def try_batch(self, size: int) -> None:
        """Forward and backward twice, as accumulation does, beside as much memory as the optimizer will take."""
        missing = 0 if self.optimizer.state else optimizer_bytes(self.load)
        ballast = torch.empty(missing, dtype=torch.uint8, device=self.device.torch)
        try:
            x = torch.zeros(size, self.config.block_size, dtype=torch.int64, device=self.device.torch)
            for _ in range(2):
                with self.device.autocast():
                    loss = self.model(x, x)
                loss.backward()
        except (RuntimeError, MemoryError):
            torch.compiler.reset()  # or the next size would be compiled for sizes of any kind, which is slower
            raise
        finally:
            self.optimizer.zero_grad(set_to_none=True)
        del ballast

    def evaluate_only(self) -> int:
        """Evaluates once, prints, writes nothing."""
        with self.signals:
            result = self.evaluate()
        if self.device.is_main and result:
            print(f"step {self.step:,}: {evaluation_line(*result)}")
        return 0

    # --- the loop ----------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Trains from the current step to max_iters; returns the exit code, 128 + signal when it was stopped."""
        c, resuming = self.config, self.config.init_from == "resume"
        self.log = RunLog(self.folder, self.device.is_main, self.step if resuming else None)
        if c.wandb_log:
            settings = dataclasses.asdict(c)
            self.wandb_id = self.log.start_wandb(c.wandb_project, c.wandb_run_name, settings, self.wandb_id)
        if self.device.is_main:
            text = json.dumps(dataclasses.asdict(c), indent=2)
            write_atomically(self.folder / "config.json", (text + "\n").encode())
        self.log.event("resume" if resuming else "start", self.step, settings=dataclasses.asdict(c))
        self.saved = resuming
        self.warn()
        self.log.start_bar(c.max_iters, self.step)
        self.started, self.mark = time.monotonic() - self.elapsed_seconds, (time.monotonic(), self.tokens)
        exit_code = 1
        try:
            with self.signals:
                if self.evaluation_due:
                    self.evaluate_and_save()
                while not (self.step >= c.max_iters or self.signals.received or self.out_of_patience):
                    self.advance()
                if not self.saved:
                    self.save_state()
                self.saver.wait()
            exit_code = 128 + self.signals.received if self.signals.received else 0
            self.finish()
        except RuntimeError as error:
            if not (is_lost_process(error) and self.signals.noted):
                raise
            exit_code = 128 + self.signals.noted  # it reached another process before that could wait for it
        finally:
            self.log.close(exit_code)
        return exit_code

    def advance(self) -> None:
        """One step, and what is due after it: a log line, an evaluation, a checkpoint."""
        c = self.config
        loss, norm, lr = self.train_step()
        self.step += 1
        self.tokens += c.tokens_per_step
        self.saved = False
        self.signals.agree()
        due = [self.step % interval == 0 for interval in (c.log_interval, c.eval_interval, c.checkpoint_interval)]
        if any(due):
            self.give_up_when_not_finite(loss, norm)
        if due[0] or self.step == 1:
            self.log_step(loss, norm, lr)
        self.log.bar.update(1)
        if due[1] or self.step == c.max_iters:
            self.evaluate_and_save()
        if due[2]:
            self.save_state()

    @property
    def out_of_patience(self) -> bool:
        """Whether the validation loss has not improved for as many evaluations as the settings allow."""
        return 0 < self.config.patience <= self.evaluations_since_best

    def train_step(self) -> tuple[torch.Tensor, torch.Tensor, float]:
        """One update. Returns mean loss and gradient norm, still on the device, and the learning rate.

        Nothing here waits for the device, so on a GPU the next batch is read while this one is computed.
        """
        c, ranks = self.config, self.device.world_size
        lr = c.learning_rate_at(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        seed_streams(c.seed, self.step, self.device.rank)  # dropout repeats whenever this step does
        micro_steps = c.gradient_accumulation_steps // ranks
        mean_loss = torch.zeros((), device=self.device.torch)
        for micro_step in range(micro_steps):
            batch = (self.step * micro_steps + micro_step) * ranks + self.device.rank  # its number in the global order
            x, y = self.device.send(*self.data.train_batch(batch * c.batch_size, c.batch_size))  # (B, T) each
            weight = self.data.loss_weight(batch, micro_steps * ranks, c.batch_size)  # 1, but for questions and answers
            # gradients cross ranks once a step; sharded ones at once, since nobody has room for whole ones
            exchange = micro_step == micro_steps - 1 or ranks == 1 or self.sharded
            with contextlib.nullcontext() if exchange else self.parallel.no_sync():
                with self.device.autocast():
                    loss = self.parallel(x, y) / (micro_steps / weight)
                self.scaler.scale(loss).backward()
            mean_loss += loss.detach()
        self.scaler.unscale_(self.optimizer)
        norm = whole(torch.nn.utils.clip_grad_norm_(self.model.parameters(), c.grad_clip or math.inf))
        mean_loss = sum_over_ranks(mean_loss) / ranks
        finite = norm.isfinite() & mean_loss.isfinite()
        if not self.scaler.is_enabled():
            bad = beside((~finite).float(), self.model.lm_head.weight)
            self.optimizer.found_inf = bad  # a fused optimizer leaves its step out where this is 1
        self.scaler.step(self.optimizer)  # float16 looks for overflow itself
        self.scaler.update()
        self.bad_steps = torch.where(finite, 0.0, self.bad_steps + 1)
        self.skipped_steps += ~finite
        self.optimizer.zero_grad(set_to_none=True)
        return mean_loss, norm, lr

    @torch.no_grad()
    def evaluate(self) -> tuple[float, float] | None:
        """Mean loss on fixed windows of train and val, shared out over the ranks; None when a signal cuts it short.

        Draws from no random stream.
        """
        c, means = self.config, []
        self.model.eval()
        for split in ("train", "val"):
            sums = torch.zeros(2, device=self.device.torch, dtype=torch.float32)
            ranks = (self.device.rank, self.device.world_size)
            for *batch, windows in self.data.eval_batches(split, c.batch_size, c.eval_iters, *ranks):
                if self.signals.agree():
                    self.model.train()
                    return None
                x, y = self.device.send(*batch)
                with self.device.autocast():
                    loss = self.model(x, y)
                sums += torch.stack([loss * windows, torch.full_like(loss, windows)])
            total, count = sum_over_ranks(sums).tolist()
            means.append(total / count)
        self.model.train()
        return means[0], means[1]

    # --- what is told and kept ---------------------------------------------------------------------------------

    def give_up_when_not_finite(self, loss: torch.Tensor, norm: torch.Tensor) -> None:
        """Ends a run that has left out several steps in a row; the device is waited for."""
        bad_steps = int(self.bad_steps)
        if bad_steps >= (BAD_STEPS_FLOAT16 if self.scaler.is_enabled() else BAD_STEPS):
            raise self.diverged(f"loss {loss.item()} and gradient norm {norm.item()}, {bad_steps} steps in a row")

    def log_step(self, loss: torch.Tensor, norm: torch.Tensor, lr: float) -> None:
        """Writes one training event; this is where the device is waited for."""
        mean = loss.item()
        now, (then, tokens_then) = time.monotonic(), self.mark
        rate = (self.tokens - tokens_then) / max(now - then, 1e-9)
        self.mark, self.elapsed_seconds = (now, self.tokens), now - self.started
        peak = self.device.peak_flops
        mfu = rate * flops_per_token(self.model.config) / (peak * self.device.world_size) if peak else None
        fields = {"loss": mean, "lr": lr, "grad_norm": norm.item(), "tokens": self.tokens, "tokens_per_second": rate}
        fields |= {"mfu": mfu, "elapsed_seconds": self.elapsed_seconds, "skipped_steps": int(self.skipped_steps)}
        self.log.event("train", self.step, **fields)
        left = (self.config.max_iters - self.step) * self.config.tokens_per_step / rate
        shown = f"loss {mean:.4f} lr {lr:.2e} {rate:,.0f} tokens/s" + (f" mfu {mfu:.1%}" if mfu else "")
        self.log.show(f"step {self.step:,}/{self.config.max_iters:,}: ", shown, f", {format_duration(left)} left")

    def evaluate_and_save(self) -> None:
        """Evaluates; saves the model when it is the best so far, and the full state where that is asked for."""
        paused = time.monotonic()
        result = self.evaluate()
        self.evaluation_due = result is None
        if result is None:
            return
        train, val = result
        if math.isnan(val):
            raise self.diverged(f"validation loss {val}")
        losses = {"train_loss": train, "val_loss": val, "val_perplexity": perplexity(val)}
        self.log.event("eval", self.step, **losses, repetition=self.write_sample(val))
        better = val < self.best_val_loss and self.step > 0
        self.evaluations_since_best = 0 if better or self.step == 0 else self.evaluations_since_best + 1
        self.log.say(f"step {self.step:,}: {evaluation_line(train, val)}{', the best so far' * better}")
        if better:
            self.best_val_loss = val
            self.save("my_own_llm.pt", self.model_state())
        if self.config.always_save_checkpoint and self.step > 0:
            self.save_state()
        self.warn()
        self.log.plot()
        self.skip_pause(paused)

    def write_sample(self, val_loss: float) -> float | None:
        """Adds what the model writes, or answers, to samples.txt; returns its share of repeated 4-grams."""
        if not (self.device.is_main or self.sharded):
            return None
        eot, count, prompt = self.data.meta["eot_id"], self.data.vocab_size, sample_prompt(self.data)
        sampler = Sampler(temperature=0.8, top_k=40, top_p=1.0, seed=self.config.seed, samples=1)
        self.model.eval()
        ids: list[int] = []
        with for_generation(self.model):
            for chosen in generate(self.model, torch.tensor(prompt), SAMPLE_TOKENS, sampler, count):
                if int(chosen) == eot:
                    break
                ids.append(int(chosen))
        self.model.train()
        text = self.tokenizer.decode([*(prompt if prompt != [eot] else []), *ids])
        text = f"=== step {self.step:,}, validation loss {val_loss:.4f} ===\n{text}\n\n"
        with open(self.folder / "samples.txt" if self.device.is_main else os.devnull, "a", encoding="utf-8") as file:
            file.write(text)
        return repeated_ngrams(ids)

    def warn(self) -> None:
        """Tells each warning sign once."""
        if self.device.is_main:
            for warning in find_warnings(self.log.history, self.facts):
                self.log.event("warning", self.step, kind=warning.kind, message=warning.message)
                self.log.say(f"warning ({warning.kind}): {warning.message}")

    def save_state(self) -> None:
        """Writes last.pt, all that a resumed run needs; the one before it becomes previous.pt."""
        paused = time.monotonic()
        self.elapsed_seconds = paused - self.started
        counters = {"tokens": self.tokens, "elapsed_seconds": self.elapsed_seconds, "wandb_id": self.wandb_id}
        counters |= {"evaluations_since_best": self.evaluations_since_best, "evaluation_due": self.evaluation_due}
        learned = {"optimizer": self.optimizer.state_dict(), "scaler": self.scaler.state_dict()}
        self.save("last.pt", self.model_state() | learned | counters, None if self.last_is_damaged else "previous.pt")
        self.saved, self.last_is_damaged = True, False
        self.log.event("checkpoint", self.step, path="last.pt")
        self.skip_pause(paused)

    def save(self, name: str, state: dict[str, Any], previous: str | None = None) -> None:
        """Hands a state over to the first process's writer. Every process has to call it."""
        state = gather(state, self.device.is_main)
        if self.device.is_main:
            self.saver.save(self.folder / name, state, self.folder / previous if previous else None)

    def skip_pause(self, since: float) -> None:
        """Takes the time since then out of the tokens a second."""
        self.mark = (self.mark[0] + time.monotonic() - since, self.mark[1])

    def diverged(self, what: str) -> UserError:
        """The error of a run that cannot go on."""
        saved = next((name for name in ("last.pt", "my_own_llm.pt") if (self.folder / name).exists()), None)
        good = f"{self.folder}/{saved} is the last good one" if saved else "nothing was saved yet"
        hint = "try a lower --learning_rate or --grad_clip, more --warmup_iters, or --dtype=bfloat16 or float32"
        return UserError(f"{what} at step {self.step:,}: no such step was applied or saved, {good}; {hint}")

    def model_state(self) -> dict[str, Any]:
        """The weights and all that sample.py, an export or a fine-tuning needs beside them: plain values alone."""
        finite = torch.stack([here(p).isfinite().all() for p in self.model.parameters()]).all()
        if sum_over_ranks((~finite).int()):
            raise self.diverged("weights that are not finite")
        return {
            "format_version": FORMAT_VERSION,
            "model": self.model.state_dict(),
            "model_args": dataclasses.asdict(self.model.config),
            "iter_num": self.step,
            "best_val_loss": self.best_val_loss,
            "config": dataclasses.asdict(self.config),
            "tokenizer": dict(self.tokenizer.identity),
            "data": data_identity(self.data),
        }

    def finish(self) -> None:
        """Says how the run ended."""
        signal_number = self.signals.received
        reason = signal.Signals(signal_number).name if signal_number else "finished"
        self.log.event("end", self.step, reason=reason)
        went = format_duration(self.elapsed_seconds)
        memory = self.device.peak_memory_bytes
        peak = f", peak memory {memory / 2**30:.2f} GiB" if memory else ""
        if self.out_of_patience and not signal_number:
            self.log.say(f"no better validation loss in {self.evaluations_since_best} evaluations: stopped early")
        if signal_number:
            self.log.say(f"stopped and saved at step {self.step:,}: --init_from=resume goes on ({self.folder}/last.pt)")
        else:
            best = f"best validation loss {self.best_val_loss:.4f}"
            self.log.say(f"finished {self.step:,} steps in {went}{peak}: {best}, in {self.folder}/my_own_llm.pt")
            chat = " --chat=true" if self.tokenizer.chat_ids else ""
            self.log.say(f"next: ./generate_text.sh --out_dir={self.folder}{chat}")


if __name__ == "__main__":
    code = main()
    if "WORLD_SIZE" in os.environ:  # gloo's threads abort now and then when the interpreter takes itself apart
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)
