"""Runs a GGUF file in llama.cpp, through the ready-built package xllamacpp, to compare it with the model it came from.

In:  the file, texts to tokenize, ids to continue greedily, ids to score.
Out: the answers of llama.cpp, computed in a process of its own, as a file that it dislikes can end its process.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib import request

from configurator import UserError

ROOT = Path(__file__).resolve().parent.parent
CHILD = "import tools.llama_runner as t; t.answer_standard_input()"


@dataclasses.dataclass(frozen=True)
class Questions:
    """What to ask llama.cpp about a file."""

    texts: list[str]  # to tokenize as plain text
    prompt: list[int]  # ids to continue, always by the most likely token
    new_tokens: int
    scored: list[list[int]]  # windows of ids, each one predicted from those before it in its window
    conversations: list[list[dict[str, str]]]  # to put in the template and tokenize


@dataclasses.dataclass(frozen=True)
class Answers:
    """What llama.cpp says."""

    texts: list[list[int]]
    continuation: list[int]
    text: str  # of the continuation
    scores: list[list[float | None]]  # log-probability of each id of a window but its first, see `log_probability`
    conversations: list[list[int]]


def has_llama() -> bool:
    """Whether xllamacpp is installed."""
    return importlib.util.find_spec("xllamacpp") is not None


def ask_llama(path: Path, context: int, questions: Questions) -> Answers:
    """Runs one file on the CPU in a fresh process. Raises UserError where llama.cpp does not take it."""
    asked = json.dumps([str(path.resolve()), context, dataclasses.asdict(questions)])
    child = subprocess.run(
        [sys.executable, "-c", CHILD], cwd=ROOT, input=asked, text=True, encoding="utf-8", capture_output=True
    )
    if child.returncode:
        said = [line for line in child.stderr.splitlines() if line.strip()]
        raise UserError(f"llama.cpp does not run {path.name}: {' / '.join(said[-3:]) or f'exit {child.returncode}'}")
    return Answers(**json.loads(child.stdout.splitlines()[-1]))


def answer_standard_input() -> None:
    """Reads what `ask_llama` asks and prints the answers: the child process."""
    path, context, asked = json.load(sys.stdin)
    print("\n" + json.dumps(dataclasses.asdict(answer(path, context, Questions(**asked)))))


def answer(path: str, context: int, questions: Questions) -> Answers:
    """The answers to all questions, in this process."""
    server = Server(path, context)
    written = server.post(
        "/completion",
        prompt=questions.prompt,
        n_predict=questions.new_tokens,
        temperature=0,
        return_tokens=True,
        ignore_eos=False,
    )
    scores = [
        [server.log_probability(window[:end], window[end]) for end in range(1, len(window))]
        for window in questions.scored
    ]
    return Answers(
        texts=[server.tokenize(text, special=False) for text in questions.texts],
        continuation=written["tokens"],
        text=written["content"],
        scores=scores,
        conversations=[server.conversation(messages) for messages in questions.conversations],
    )


class Server:
    """llama.cpp's own server in this process, on a free port of 127.0.0.1; float32 throughout, no GPU."""

    def __init__(self, path: str, context: int) -> None:
        import xllamacpp

        params, full = xllamacpp.CommonParams(), xllamacpp.ggml_type.GGML_TYPE_F32
        params.model.path, params.n_ctx, params.n_parallel, params.n_gpu_layers = path, context, 1, 0
        params.cpuparams.n_threads = int(os.environ.get("OMP_NUM_THREADS", 0)) or os.cpu_count()
        params.cache_type_k = params.cache_type_v = full  # 16 bits, the default, would blur the comparison
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.warmup, params.verbosity = False, 0
        self.server = xllamacpp.Server(params)

    def post(self, route: str, **body: Any) -> dict[str, Any]:
        """Its answer to one request."""
        data, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
        with request.urlopen(request.Request(self.server.listening_address + route, data, kind)) as response:
            return json.loads(response.read())

    def tokenize(self, text: str, special: bool) -> list[int]:
        """Ids of a text; `special` reads the names of special tokens as these."""
        return self.post("/tokenize", content=text, add_special=False, parse_special=special)["tokens"]

    def log_probability(self, ids: list[int], target: int) -> float | None:
        """Natural logarithm of the probability that `target` comes after `ids`; None where the server does not tell it,
        as it holds back a token that begins a character of several bytes.

        The target is forced by a bias: the server reports the chosen token's probability from before all biases, and
        keeps what it has computed of a prompt that goes on.
        """
        forced = {"n_predict": 1, "n_probs": 1, "temperature": 0, "logit_bias": [[target, 1e6]], "cache_prompt": True}
        told = self.post("/completion", prompt=ids, **forced).get("completion_probabilities")
        if not told:
            return None
        chosen = told[0]
        if chosen["id"] != target:
            raise RuntimeError(f"asked for the probability of {target}, it answers for {chosen['id']}")
        return chosen["logprob"]

    def conversation(self, messages: list[dict[str, str]]) -> list[int]:
        """Ids of messages in the file's own template, with the beginning of an answer."""
        return self.tokenize(self.post("/apply-template", messages=messages)["prompt"], special=True)
