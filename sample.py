"""Writes text with a trained model: checkpoint → text.

In:  a checkpoint, which carries its tokenizer, and a prompt.
Out: the prompt and its continuation on standard output, as they come; what is loaded and how fast on standard error.

    python sample.py                                             # out/my_own_llm.pt, "Bill Clinton was "
    python sample.py --out_dir=out/demo --start="The module " --num_samples=3
    python sample.py --start=FILE:prompt.txt --temperature=0     # the most likely continuation
    python sample.py --interactive=true                          # prompt after prompt
    python sample.py --chat=true                                 # question after question, with a fine-tuned model
    python sample.py --chat=true --start="What does len do?"     # one answer

Sample number k depends on (seed, k) alone. Each new id is conditioned on the last block_size ids, with the same result
as without the key/value cache; that is why float32 is the default.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Literal

from configurator import UserError, answer_help, format_overrides, load_config, program


@dataclasses.dataclass(frozen=True)
class SampleConfig:
    """Settings of sample.py."""

    out_dir: str = "out"  # the run folder whose my_own_llm.pt is used
    checkpoint: str | None = None  # another checkpoint file, or another run folder
    start: str = "Bill Clinton was "  # the prompt; FILE:path reads a file, - standard input, empty starts a document
    max_new_tokens: int = 300  # tokens to write at most
    temperature: float = 0.8  # below 1 safer, above 1 bolder, 0 = always the most likely token
    top_k: int | None = 40  # choose among this many most likely tokens; 0 or none = no limit
    top_p: float = 1.0  # choose among the most likely tokens that together have this probability
    num_samples: int = 1  # texts to write, in one batch
    seed: int = 42  # another seed, another text
    stop_at_eot: bool = True  # end at the end-of-text token
    chat: bool = False  # the prompt is a question; without --start a conversation, which an empty line starts anew
    system: str = ""  # with chat=true, what precedes the conversation
    interactive: bool = False  # ask for prompt after prompt; an end of input (Ctrl-D) leaves
    device: str = "auto"  # cuda, cuda:1, mps, cpu, or auto = the best there is
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # of weights; the shorter ones are faster, not exact

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise UserError(f"temperature={self.temperature} must not be negative (0 = the most likely token)")
        if (self.top_k or 0) < 0:
            raise UserError(f"top_k={self.top_k} must not be negative (0 or none = no limit)")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p} must be above 0 and at most 1")
        if self.chat and self.num_samples > 1:
            raise UserError(f"chat=true has one answer, not num_samples={self.num_samples}: leave one of them away")
        for key in ("max_new_tokens", "num_samples"):
            if getattr(self, key) < 1:
                raise UserError(f"{key}={getattr(self, key)} must be at least 1")
        if self.system and not self.chat:
            raise UserError(f"system={self.system!r} precedes a conversation, and chat=false has none: add --chat=true")


if __name__ == "__main__":
    answer_help(SampleConfig, sys.argv[1:], __doc__)  # before PyTorch is imported, which takes two seconds

import time
from collections.abc import Iterator
from pathlib import Path

import torch

from chat import encode_chat
from checkpoint import build_model, checkpoint_tokenizer, load_checkpoint, model_file
from device import Device, choose_device, pack_linears
from memory import is_out_of_memory
from model import GPT, Sampler, generate, parameter_count
from tokenizer import Tokenizer


@program
def main(argv: list[str]) -> int:
    """Runs the program; returns its exit code."""
    config, origins = load_config(SampleConfig, argv, __doc__)
    device = choose_device(config.device, config.dtype, training=False)
    for line in [*format_overrides(config, origins), *device.notes]:
        print(line, file=sys.stderr)
    if config.interactive and "start" in origins:
        raise UserError("interactive=true asks for prompts, so start= would be ignored: leave one of them away")
    asking = config.interactive or (config.chat and "start" not in origins)
    prompt = None if asking else read_prompt(config.start)
    try:
        model, tokenizer = load_model(config, device)
        if config.chat and prompt is None:
            chat(model, tokenizer, config)
        elif config.chat:
            answer(model, tokenizer, config, [prompt])
        elif prompt is not None:
            write_samples(model, tokenizer, prompt_ids(tokenizer, prompt), prompt, config)
        else:
            converse(model, tokenizer, config)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(
            f"memory on {device.name} ran out with num_samples={config.num_samples} and dtype={config.dtype}: "
            "fewer --num_samples, --dtype=bfloat16 or --device=cpu need less"
        ) from error
    return 0


def load_model(config: SampleConfig, device: Device) -> tuple[GPT, Tokenizer]:
    """The model and the tokenizer of the checkpoint that the settings name."""
    path = model_file(config.checkpoint or Path(config.out_dir) / "my_own_llm.pt")
    state = load_checkpoint(path)
    tokenizer = checkpoint_tokenizer(state)
    model = build_model(state, path).to(device=device.torch, dtype=device.dtype).eval()
    if device.kind == "cpu" and device.dtype == torch.float32:
        pack_linears(model)
    if tokenizer.vocab_size > model.config.vocab_size:
        raise UserError(
            f"{path}: its tokenizer has {tokenizer.vocab_size:,} ids, its model only {model.config.vocab_size:,}"
        )
    loss = state.get("best_val_loss")
    print(
        f"{path}: {parameter_count(model.config):,} parameters, step {state.get('iter_num') or 0:,}, "
        f"best validation loss {'unknown' if loss is None else format(float(loss), '.4f')}, "
        f"tokenizer {tokenizer.identity['name']} ({tokenizer.vocab_size:,} ids), {device.describe()}",
        file=sys.stderr,
    )
    return model, tokenizer


def read_prompt(start: str) -> str:
    """The prompt that `start` stands for; the line end that closes a file is not part of it."""
    if start != "-" and not start.startswith("FILE:"):
        return start
    if start == "FILE:":
        raise UserError("--start=FILE: names no file: put its path behind the colon, or leave --start= empty")
    path = Path(start.removeprefix("FILE:"))
    try:
        raw = sys.stdin.buffer.read() if start == "-" else path.read_bytes()
        return raw.decode("utf-8-sig").replace("\r\n", "\n").removesuffix("\n")
    except FileNotFoundError as error:
        raise UserError(f"--start={start}: there is no file {path}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"--start={start} is not UTF-8 at byte {error.start:,}: save it as UTF-8") from error


def prompt_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Ids of a prompt; an empty one starts a document."""
    return [int(i) for i in tokenizer.encode_prompt(prompt)] or [tokenizer.eot_id]


def converse(model: GPT, tokenizer: Tokenizer, config: SampleConfig) -> None:
    """Writes samples for prompt after prompt; a prompt at fault is told, and the next one asked for."""
    for prompt in ask_prompts():
        try:
            write_samples(model, tokenizer, prompt_ids(tokenizer, prompt), prompt, config)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
        except KeyboardInterrupt:
            print(" (stopped; Ctrl-D leaves)", file=sys.stderr)


def chat(model: GPT, tokenizer: Tokenizer, config: SampleConfig) -> None:
    """Answers question after question, each after the conversation before it; an empty line starts another."""
    encode_chat(tokenizer, [])  # raises for a model that was not trained to chat, before anything is asked
    texts: list[str] = []
    for question in ask_prompts():
        try:
            texts = answer(model, tokenizer, config, [*texts, question]) if question.strip() else []
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
        except KeyboardInterrupt:
            print(" (stopped; Ctrl-D leaves)", file=sys.stderr)


def answer(model: GPT, tokenizer: Tokenizer, config: SampleConfig, texts: list[str]) -> list[str]:
    """Writes the answer to a conversation of questions and answers in turn; returns it with the answer.

    The oldest ones are left away where they leave no quarter of the context free. Raises UserError where a question
    fills it alone.
    """
    beginning, room = [{"role": "system", "content": config.system}] * bool(config.system), model.config.block_size
    while True:
        turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
        ids = [*encode_chat(tokenizer, beginning + turns)[0].tolist(), tokenizer.chat_ids["assistant"]]
        if len(ids) <= room - room // 4 or len(texts) == 1:
            break
        texts = texts[2:]
    if len(ids) >= room:
        raise UserError(f"the question has {len(ids):,} tokens, and the model's context is {room:,}: ask a shorter one")
    return [*texts, *write_samples(model, tokenizer, ids, "", config)]


def ask_prompts() -> Iterator[str]:
    """Prompts from the terminal until its end."""
    while True:
        try:
            yield input("prompt> " if sys.stdin.isatty() else "")
        except (EOFError, KeyboardInterrupt):
            return


def write_samples(model: GPT, tokenizer: Tokenizer, ids: list[int], prompt: str, config: SampleConfig) -> list[str]:
    """Generates all samples after `ids` in a batch and prints them behind `prompt`, a single one as it comes."""
    sampler = Sampler(config.temperature, config.top_k, config.top_p, config.seed, config.num_samples)
    steps = generate(model, torch.tensor(ids), config.max_new_tokens, sampler, tokenizer.vocab_size)
    streams = [tokenizer.stream() for _ in range(config.num_samples)]
    texts, open_samples, tokens = [""] * config.num_samples, set(range(config.num_samples)), 0
    single, started = config.num_samples == 1, time.monotonic()
    if single:
        print(prompt, end="", flush=True)
    for chosen in steps:
        for k in sorted(open_samples):
            token_id = int(chosen[k])
            if token_id == tokenizer.eot_id and (config.stop_at_eot or config.chat):
                open_samples.discard(k)
                continue
            tokens += 1
            text = streams[k].put(token_id)
            texts[k] += text
            if single:
                print(text, end="", flush=True)
        if not open_samples:
            break
    seconds = time.monotonic() - started
    for k, stream in enumerate(streams):
        rest = stream.flush()
        texts[k] += rest
        print(rest if single else f"--- sample {k + 1} of {config.num_samples} ---\n{prompt}{texts[k]}")
    print(f"{tokens:,} tokens in {seconds:.1f} s, {tokens / max(seconds, 1e-9):,.1f} tokens/s", file=sys.stderr)
    return texts


if __name__ == "__main__":
    sys.exit(main())
