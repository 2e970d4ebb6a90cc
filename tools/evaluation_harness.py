"""Our model behind the interface of EleutherAI's harness (lm-eval), directly from the checkpoint.

In:  a `Subject`; the harness's requests: log-likelihood of a continuation, of a whole text, and text until a stop.
Out: answers whose tokens and scores equal those of the same weights in the harness's Hugging Face backend.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import numpy as np
import torch

from configurator import UserError
from model import KeyValueCache, Sampler
from progress import progress_bar
from tools.perplexity import Rules, make_windows
from tools.scoring import Scorer, Subject, Window, left_padded, repeat_cache

try:
    from lm_eval.api.model import TemplateLM
except ImportError as error:
    raise UserError(f"--tasks= needs EleutherAI's harness ({error}): pip install -r tools/requirements.txt") from error

SHARED_TOKENS = 64  # a context this long, with several answers, is read once and kept; a shorter one is cheaper anew
DEFAULT_NEW_TOKENS = 256  # where a task sets no limit, as in the harness's Hugging Face backend

Request = tuple[list[int], list[int]]  # ids of a context, and of the continuation that is scored


class HarnessModel(TemplateLM):
    """Our model as lm-eval sees it. Splitting a pair into context and continuation is left to its base class."""

    def __init__(self, subject: Subject, batch_size: int) -> None:
        super().__init__()
        self.subject, self.ids, self.batch_size = subject, subject.tokenizer, batch_size
        self.scorer, self.max_length = Scorer(subject, batch_size), subject.model.config.block_size
        self._device = self.scorer.device

    @property
    def eot_token_id(self) -> int:
        """The id that stands before a text without context, and that ends a generated one."""
        return self.ids.eot_id

    @property
    def tokenizer_name(self) -> str:
        """A name for the harness's cache of requests."""
        return str(self.ids.identity.get("sha256", "gpt2"))

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Ids of a text, special tokens read as plain text."""
        return self.ids.encode(string).tolist()

    # --- log-likelihoods -------------------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: list[Any], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Scores (_, context, continuation) triples. Requests with one long context share its keys and values."""
        pairs = [self._fitting(context, continuation) for _, context, continuation in requests]
        results: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
        order = sorted(range(len(pairs)), key=lambda i: pairs[i][0])
        shared, single = [], []
        for context, group in groupby(order, key=lambda i: pairs[i][0]):
            group = list(group)
            several = len(group) > 1 and len(context) > SHARED_TOKENS
            (shared if several else single).append(group)
        with progress_bar("log-likelihoods", unit=" requests", total=len(pairs), enabled=not disable_tqdm) as bar:
            alone = sorted((i for group in single for i in group), key=lambda i: -sum(map(len, pairs[i])))
            for i, result in zip(alone, self.scorer.score(as_window(*pairs[i]) for i in alone), strict=True):
                results[i] = result
                bar.update(1)
            for groups in self._batched_groups(sorted(shared, key=lambda g: -len(pairs[g[0]][0]))):
                chosen = [i for group in groups for i in group]
                rows = [k for k, group in enumerate(groups) for _ in group]
                scored = self._score_shared([pairs[g[0]][0] for g in groups], rows, [pairs[i][1] for i in chosen])
                for i, result in zip(chosen, scored, strict=True):
                    results[i] = result
                bar.update(len(chosen))
        return results

    def _fitting(self, context: list[int], continuation: list[int]) -> Request:
        """A request whose context is cut on the left so that all fits; a continuation beyond that is cut as well."""
        continuation = continuation[-self.max_length :]
        return context[-max(1, self.max_length + 1 - len(continuation)) :], continuation

    def _batched_groups(self, groups: list[list[int]]) -> Iterator[list[list[int]]]:
        """Groups of requests together, at most `batch_size` requests at a time; a larger group comes in parts."""
        held: list[list[int]] = []
        for group in groups:
            for first in range(0, len(group), self.batch_size):
                part = group[first : first + self.batch_size]
                if held and sum(map(len, held)) + len(part) > self.batch_size:
                    yield held
                    held = []
                held.append(part)
        if held:
            yield held

    @torch.inference_mode()
    def _score_shared(
        self, contexts: list[list[int]], rows: list[int], continuations: list[list[int]]
    ) -> list[tuple[float, bool]]:
        """Scores continuation k behind context `rows[k]`. Each context is read once, all but its last id, which each of
        its continuations reads for itself.
        """
        model, device = self.subject.model, self.scorer.device
        ids, positions, mask = left_padded([context[:-1] for context in contexts], device)
        cache = KeyValueCache(model.config, len(contexts), ids.size(1), model.lm_head.weight)
        model.hidden(ids, cache, positions, mask)
        inputs = [[contexts[k][-1], *ids[:-1]] for k, ids in zip(rows, continuations, strict=True)]
        longest, index = max(map(len, inputs)), torch.tensor(rows, device=device)
        cache = repeat_cache(cache, index, longest, model)
        new = torch.tensor([row + [0] * (longest - len(row)) for row in inputs], device=device)  # (B, T)
        place = torch.arange(longest, device=device)
        lengths = torch.tensor([len(contexts[k]) - 1 for k in rows], device=device).unsqueeze(1)  # (B, 1)
        seen = mask[index, :, -1:, :].expand(-1, -1, longest, -1)  # what the last id of a context sees: all of it
        own = (place.unsqueeze(1) >= place).expand(len(rows), 1, -1, -1)
        past = (lengths + place).clamp(max=self.max_length - 1)  # padding behind a row may lie beyond the context
        states = model.hidden(new, cache, past, torch.cat([seen, own], dim=-1))  # (B, T, C)
        scored = [row[: len(ids)] for row, ids in zip(states, inputs, strict=True)]
        return self.scorer.score_states(scored, [as_window([0], ids).targets for ids in continuations])

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, each by itself, in windows that do not overlap."""
        rules = Rules(self.max_length, self.max_length, True, False, False, None)
        sums, owners = [0.0] * len(requests), []

        def windows() -> Iterator[Window]:
            for number, request in enumerate(requests):
                for window in make_windows([(self.ids.encode(request.args[0]), True)], rules, self.eot_token_id):
                    owners.append(number)
                    yield window

        with progress_bar("texts", unit=" windows", enabled=not disable_tqdm) as bar:
            for place, (log_likelihood, _) in enumerate(self.scorer.score(windows())):
                sums[owners[place]] += log_likelihood
                bar.update(1)
        return sums

    # --- generation ------------------------------------------------------------------------------------------------

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Continues each context until one of its stop texts, an end-of-text id, or its limit of new tokens."""
        results, by_settings = [""] * len(requests), {}
        for number, request in enumerate(requests):
            by_settings.setdefault(json.dumps(request.args[1], sort_keys=True, default=str), []).append(number)
        with progress_bar("generation", unit=" texts", total=len(requests), enabled=not disable_tqdm) as bar:
            for numbers in by_settings.values():
                settings = GenerationSettings(requests[numbers[0]].args[1], self.max_length)
                contexts = {
                    n: self.tok_encode(requests[n].args[0])[-settings.room :] or [self.eot_token_id] for n in numbers
                }
                numbers = sorted(numbers, key=lambda n: -len(contexts[n]))
                for first in range(0, len(numbers), self.batch_size):
                    chosen = numbers[first : first + self.batch_size]
                    for n, text in zip(
                        chosen, self._generate([contexts[n] for n in chosen], settings, first), strict=True
                    ):
                        results[n] = text
                    bar.update(len(chosen))
        return results

    @torch.inference_mode()
    def _generate(self, contexts: list[list[int]], settings: GenerationSettings, first: int) -> list[str]:
        """New text for each context of a batch, all in one cache: contexts are padded on the left."""
        model, device = self.subject.model, self.scorer.device
        new, positions, mask = left_padded(contexts, device)
        cache = KeyValueCache(model.config, len(contexts), new.size(1) + settings.new_tokens, model.lm_head.weight)
        seen = mask[:, :, -1:, :]
        sampler = settings.sampler(len(contexts), first)
        written: list[list[int]] = [[] for _ in contexts]
        texts, going = [""] * len(contexts), set(range(len(contexts)))
        for _ in range(settings.new_tokens):
            states = model.hidden(new, cache, positions, mask)
            chosen = sampler(model.lm_head(states[:, -1])[:, : self.ids.vocab_size])  # (B,)
            for k in sorted(going):
                if int(chosen[k]) == self.eot_token_id:
                    going.discard(k)
                    continue
                written[k].append(int(chosen[k]))
                texts[k] = self.ids.decode(written[k])
                if any(stop in texts[k] for stop in settings.stops):
                    going.discard(k)
            if not going:
                break
            new, positions = chosen.to(device).unsqueeze(1), positions[:, -1:] + 1
            seen = mask = torch.cat([seen, torch.ones_like(seen[..., :1])], dim=-1)  # (B, 1, 1, so far)
        return [settings.cut(text) for text in texts]


class GenerationSettings:
    """What a task asks of generated text, in the harness's words."""

    def __init__(self, asked: dict[str, Any], max_length: int) -> None:
        from lm_eval.models.utils import normalize_gen_kwargs

        settings = normalize_gen_kwargs(asked, DEFAULT_NEW_TOKENS)
        until = settings.get("until") or []
        self.stops = [stop for stop in ([until] if isinstance(until, str) else until) if stop]
        self.new_tokens, self.settings = min(settings["max_gen_toks"], max_length - 1), settings
        self.room = max_length - self.new_tokens  # tokens left for a context

    def sampler(self, rows: int, first: int) -> Sampler:
        """Draws ids: greedy, unless the task asks for samples."""
        s = self.settings
        temperature = float(s.get("temperature") or 0.0) if s.get("do_sample") else 0.0
        return Sampler(temperature, s.get("top_k"), float(s.get("top_p") or 1.0), 1234, rows, first)

    def cut(self, text: str) -> str:
        """A text up to the first stop text."""
        return text[: min((text.find(stop) for stop in self.stops if stop in text), default=len(text))]


def as_window(context: list[int], continuation: list[int]) -> Window:
    """The window that scores a continuation behind its context."""
    ids = np.array(context + continuation)
    return Window(ids[:-1], ids[len(context) :])
