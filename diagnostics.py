"""Warning signs of a run, read off its metrics: what is wrong, why it usually is, what to change.

In:  the events of metrics.jsonl (progress.py) and a few facts of the run.
Out: warnings, each kind once: kinds that the history already holds as `warning` events are left out.

Pure functions of the whole history, so that a resumed run and a look back at an old file see the same. Warnings that cry
wolf are soon ignored: noise is measured (median and MAD, which outliers hardly move), and healthy runs stay silent.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import mean, median
from typing import Any

WINDOW = 30  # logged steps that "recent" means: enough for a stable median, few enough to follow a falling loss
MOST_EPOCHS, REPEAT_SCALE = 12, 15.4  # a 12th reading is worth e^(-11/15.4) = half a new one (Muennighoff et al. 2023)
FEWEST_UNIQUE, FEWEST_TOTAL = 1, 5  # tokens a parameter, of the corpus and read: 20 are best (Hoffmann et al. 2022)
FRESH, LEARNED = 0.8, 0.9  # of ln(vocabulary): untrained models start above the first, and learn to below the second
SPIKE_JUMP, SPIKE_SHARE = 0.5, 0.1  # nats, share of the level: steps of 8 × 1,024 tokens scatter by 0.05 to 0.1
SPIKE_HISTORY, SPIKE_NOISE = 20, 10  # logged, as fewer have no sure MAD; sigma, as small batches have heavy tails
ABOVE_START_STEPS = 5  # logged: a loss that learns has no reason to be there
DIVERGED_STEPS, DIVERGED_NOISE = 10, 8  # logged, as a spike is over sooner; sigma, as the best lies 1.5 low by chance
STILL_FALL = 0.05  # of the start: learning how frequent each token is takes off 10 to 30 %
STILL_SHARE, STILL_STEPS, STILL_LOGGED = 0.2, 200, 10  # share of the run and steps beyond warm-up, losses for a median
EXPLODED_NORM, EXPLODED_RATIO = 10.0, 10  # trained models have 0.1 to 2, two or three times as much late in a decay
EXPLODED_ALWAYS, EXPLODED_STEPS = 100.0, 3  # beyond comparison; in a row, as clipping deals with a single one
VANISHED_NORM, VANISHED_RATIO = 0.01, 100  # a tenth of the least in healthy runs, which change tenfold at most
VANISHED_ALWAYS, VANISHED_STEPS = 1e-6, 5  # beyond comparison; in a row
SOLVED_LOSS = 0.5  # nats: below it the text is known by heart, and a gradient near zero is right
OVERFIT_EVALS, OVERFIT_RISE = 3, 0.02  # in a row, share of the minimum: fixed windows wobble by less than 1 %
OVERFIT_NOISE, OVERFIT_SURE = 6, 0.1  # sigma, as a plateau's least lies 2.5 low by chance; share beyond any noise
SPLIT_EPOCHS = 2  # until then what is known by heart explains no large gap
MISMATCH_GAP, MISMATCH_SHARE = 0.5, 0.15  # nats, share of the loss: splits of few documents differ by 0.1 to 0.3
LEAK_GAP, LEAK_SHARE = 0.3, 0.1  # nats, share of the loss: an easier split of one document lies 0.1 to 0.2 lower
REPEATED, REPEATED_AFTER = 0.3, 0.2  # share of 4-grams (text by people: under 5 %); of the run, as young models repeat

ADVICE = {
    "many_epochs": "Usual causes: a small corpus, or the step count of a larger one. Set a smaller --max_iters (4 epochs "
    "are nearly as good as new text), or keep it with --dropout=0.2 and --patience=5, or add text",
    "few_tokens_per_parameter": "The run is in order; the best of this size takes about 20 (Hoffmann et al. 2022). Usual "
    "cause: a model made for more text. A smaller one (--n_layer, --n_embd; config/train_gpt2_small.py in place of Medium) "
    "or trained weights (--init_from=FILE) do better; so do more text, and for a short run a larger --max_iters",
    "loss_spike": "Usual causes: a learning rate too high for now, or odd text (noise, one token over and over). A single "
    "one does no harm. If they return: --init_from=resume with a lower --learning_rate or --grad_clip=0.5",
    "divergence": "Usual causes: a learning rate too high, too short a warm-up, float16. my_own_llm.pt holds the best model "
    "so far; start anew with a third of the --learning_rate, more --warmup_iters, --grad_clip=1.0 and --dtype=bfloat16",
    "loss_not_moving": "Usual causes: a learning rate far too low or too high, a warm-up as long as the run, or tokens "
    "without order. Try --learning_rate=6e-4 --warmup_iters=100, and read some of the training text",
    "gradient_exploding": "Usual causes: a learning rate too high, too short a warm-up, damaged text. Set --grad_clip=1.0 "
    "(0 = no limit), a lower --learning_rate, more --warmup_iters, and --dtype=bfloat16 in place of float16",
    "gradient_vanishing": "Usual causes: float16 that rounds small gradients to zero, or weights grown so large that "
    "nothing answers. Start anew with --dtype=bfloat16 or float32, a lower --learning_rate and --weight_decay=0.1",
    "overfitting": "Usual cause: a corpus small for this model, learnt by heart. my_own_llm.pt holds the best model; stop by "
    "--patience=5 or a smaller --max_iters, or start anew with --dropout=0.2, fewer --n_layer or more text",
    "split_mismatch": "Usual cause: validation text of another kind (source, language, format, the end of a sorted file). "
    "Draw it at random from the training documents: prepare.py --val_fraction=0.1, into another --dataset=NAME",
    "split_leak": "Usual causes: validation text that stands, perhaps many times, in the training text too, or is short and "
    "easy. Remove duplicates and prepare anew: prepare.py --val_fraction=0.1, into another --dataset=NAME",
    "repetition": "Usual causes: boilerplate or duplicates in the corpus, a model too small or trained too little. Clean "
    "the corpus, set a larger --max_iters or --n_layer, and sample with --temperature=0.8 --top_k=40",
}


@dataclasses.dataclass(frozen=True)
class RunFacts:
    """What is known of a run before its first step."""

    parameters: int
    train_tokens: int
    tokens_per_step: int
    max_iters: int
    vocab_size: int
    warmup_iters: int


@dataclasses.dataclass(frozen=True)
class Warning:
    """A sign of one kind, the step it was seen at, and what to tell a person: numbers, causes, flags to set."""

    kind: str
    iter: int
    message: str


class Seen:
    """A history in the form that the checks read: finite numbers alone, in order."""

    def __init__(self, history: list[dict[str, Any]], facts: RunFacts) -> None:
        self.facts, self.guess = facts, math.log(facts.vocab_size)  # the loss of a guess among all ids
        self.losses, self.norms = (series(history, "train", key) for key in ("loss", "grad_norm"))
        self.evals = series(history, "eval", "train_loss", "val_loss")
        self.samples = series(history, "eval", "repetition")
        self.learned = [e for e in self.evals if e[1] < LEARNED * self.guess]
        settings = next((e.get("settings", {}) for e in history if e["event"] == "start"), {})
        first = [loss for _, loss, *_ in (*self.losses[:1], *self.evals[:1])]
        low = max(first, default=math.inf) < FRESH * self.guess
        self.fresh = not low and settings.get("init_from", "scratch") == "scratch"


def series(history: list[dict[str, Any]], event: str, *keys: str) -> list[tuple]:
    """(step, value of each key) of the events of one sort that have a finite number for each."""
    rows = [(e["iter"], *map(e.get, keys)) for e in history if e["event"] == event]
    return [row for row in rows if all(isinstance(x, (int, float)) and math.isfinite(x) for x in row)]


def find_warnings(history: list[dict[str, Any]], facts: RunFacts) -> list[Warning]:
    """The signs in a history that it holds no `warning` event of; an empty history has those of the facts alone."""
    seen = Seen(history, facts)
    known = {event.get("kind") for event in history if event["event"] == "warning"}
    found = {check.__name__: sign for check in CHECKS if (sign := next(check(seen), None))}
    if "divergence" in known | found.keys():  # which explains these
        known |= {"loss_spike", "loss_not_moving"}
    return [Warning(k, step, f"{saw}. {ADVICE[k]}") for k, (step, saw) in found.items() if k not in known]


def repeated_ngrams(ids: Sequence[int], n: int = 4) -> float:
    """Share of the n-grams of `ids` that stood there before; 0 where there is none."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def scatter(values: Sequence[float]) -> float:
    """Standard deviation of the noise on a smooth curve: the MAD of second differences, which no slope enters."""
    bends = [abs(a - 2 * b + c) for a, b, c in zip(values, values[1:], values[2:], strict=False)]
    return 1.4826 * median(bends or [0.0]) / math.sqrt(6)  # both exact for normal noise: 1 / 0.6745, and 1 + 4 + 1


def many_epochs(seen: Seen) -> Iterator[tuple[int, str]]:
    """The run reads its corpus so often that going on teaches little."""
    f = seen.facts
    epochs = f.max_iters * f.tokens_per_step / f.train_tokens
    if epochs > MOST_EPOCHS:
        worth = 1 + REPEAT_SCALE * (1 - math.exp((1 - epochs) / REPEAT_SCALE))  # equation 5 of the paper
        saw = f"{f.max_iters:,} steps read the {f.train_tokens:,} training tokens {epochs:.0f} times"
        yield 0, f"{saw}, worth {worth:.0f} epochs of new text (Muennighoff et al. 2023)"


def few_tokens_per_parameter(seen: Seen) -> Iterator[tuple[int, str]]:
    """The corpus, or what the run reads of it, is small for the model; trained weights have read before."""
    f = seen.facts
    for tokens, fewest, what in (
        (f.train_tokens, FEWEST_UNIQUE, "the corpus is small for this model"),
        (f.max_iters * f.tokens_per_step, FEWEST_TOTAL, "the run is short for this model"),
    ):
        if seen.fresh and tokens < fewest * f.parameters:
            yield 0, f"{what}: {tokens:,} tokens for {f.parameters:,} parameters, {tokens / f.parameters:.2g} each"


def loss_spike(seen: Seen) -> Iterator[tuple[int, str]]:
    """A logged loss far above the median before it, measured by its noise."""
    losses = [loss for _, loss in seen.losses]
    for i in range(SPIKE_HISTORY, len(losses)):
        if losses[i] - min(losses[i - 3 : i]) > SPIKE_JUMP:  # spares nearly every step the medians
            before = losses[max(0, i - WINDOW) : i]
            level = median(before[-10:])  # short, so that it follows a falling loss
            if losses[i] > level + max(SPIKE_JUMP, SPIKE_SHARE * level, SPIKE_NOISE * scatter(before)):
                yield seen.losses[i][0], f"the training loss jumped to {losses[i]:.3f} from a median of {level:.3f}"


def divergence(seen: Seen) -> Iterator[tuple[int, str]]:
    """The newest losses are all far above the best level before them, or above the start."""
    losses = [loss for _, loss in seen.losses]
    best = min((median(losses[i : i + 5]) for i in range(0, len(losses) - DIVERGED_STEPS - 4, 5)), default=math.inf)
    for count, level in ((DIVERGED_STEPS, best), (ABOVE_START_STEPS, losses[0] if losses else math.inf)):
        before, last = losses[:-count], losses[-count:]
        rise = max(SPIKE_JUMP, SPIKE_SHARE * level, DIVERGED_NOISE * scatter(before[-WINDOW:]))
        if before and min(last) > level + rise:
            saw = f"the training loss stays above {min(last):.3f} for {count} logged steps"
            yield seen.losses[-1][0], f"{saw}, after a level of {level:.3f}"


def loss_not_moving(seen: Seen) -> Iterator[tuple[int, str]]:
    """The loss is hardly below the start after a share of the run; trained weights start low and may stay there."""
    f, logged = seen.facts, [loss for step, loss in seen.losses if step > seen.facts.warmup_iters]
    if len(logged) >= STILL_LOGGED:
        (_, start), (step, _), now = seen.losses[0], seen.losses[-1], median(logged[-STILL_LOGGED:])
        late = step >= f.warmup_iters + max(STILL_STEPS, STILL_SHARE * f.max_iters)
        if late and start > FRESH * seen.guess and now > (1 - STILL_FALL) * start:
            saw = f"the training loss is {now:.3f} after {step:,} steps, it was {start:.3f} at the start"
            yield step, f"{saw} (a guess among {f.vocab_size:,} ids has {seen.guess:.3f})"


def gradient_exploding(seen: Seen) -> Iterator[tuple[int, str]]:
    """Norms in a row far above the history before them, or beyond any use."""
    norms = [norm for _, norm in seen.norms]
    for i in range(STILL_LOGGED, len(norms)):
        last = norms[i + 1 - EXPLODED_STEPS : i + 1]
        if min(last) > EXPLODED_NORM:
            usual = median(norms[max(0, i + 1 - EXPLODED_STEPS - WINDOW) : i + 1 - EXPLODED_STEPS])
            if min(last) > min(EXPLODED_ALWAYS, EXPLODED_RATIO * usual):
                saw = f"the gradient norm is above {min(last):.3g} for {EXPLODED_STEPS} logged steps"
                yield seen.norms[i][0], f"{saw}, its median before was {usual:.2g}"


def gradient_vanishing(seen: Seen) -> Iterator[tuple[int, str]]:
    """The newest norms are all nearly nothing, while there is something left to learn."""
    norms = [norm for _, norm in seen.norms]
    before, last = norms[:-VANISHED_STEPS], norms[-VANISHED_STEPS:]
    if len(before) >= VANISHED_STEPS and seen.losses and seen.losses[-1][1] > SOLVED_LOSS:
        usual = median(before)
        if max(last) < max(VANISHED_ALWAYS, min(VANISHED_NORM, usual / VANISHED_RATIO)):
            saw = f"the gradient norm is below {max(last):.1e} for {VANISHED_STEPS} logged steps, its median before was"
            yield seen.norms[-1][0], f"{saw} {usual:.1e}; the loss is still {seen.losses[-1][1]:.3f}"


def overfitting(seen: Seen) -> Iterator[tuple[int, str]]:
    """Validation is above its minimum by more than noise, evaluation after evaluation, while training goes on falling."""
    steps, train, val = zip(*seen.evals, strict=True) if seen.evals else ((), (), ())
    if len(val) >= OVERFIT_EVALS + 2:
        best = val.index(min(val))
        rise = max(OVERFIT_RISE * val[best], min(OVERFIT_SURE * val[best], OVERFIT_NOISE * scatter(val[-WINDOW:])))
        last = slice(max(best + 1, len(val) - OVERFIT_EVALS), None)
        risen = min(val[last], default=0.0) > val[best] + rise
        if len(val[last]) == OVERFIT_EVALS and risen and mean(train[last]) < train[best]:
            saw = f"the validation loss rose from {val[best]:.3f} at step {steps[best]:,} to {val[-1]:.3f}"
            yield steps[-1], f"{saw}, the training loss fell from {train[best]:.3f} to {train[-1]:.3f}"


def split_mismatch(seen: Seen) -> Iterator[tuple[int, str]]:
    """Validation is far above training before anything can be known by heart, twice in a row."""
    epoch = seen.facts.train_tokens / seen.facts.tokens_per_step  # in steps
    for rows in pairwise(e for e in seen.learned if e[0] <= SPLIT_EPOCHS * epoch):
        if all(val - train > max(MISMATCH_GAP, MISMATCH_SHARE * train) for _, train, val in rows):
            step, train, val = rows[-1]
            saw = f"the validation loss is {val:.3f}, the training loss {train:.3f} after {step / epoch:.1f} epochs"
            yield step, f"{saw}, too early for overfitting"


def split_leak(seen: Seen) -> Iterator[tuple[int, str]]:
    """Validation is clearly below training, both evaluated without dropout, three times in a row."""
    for rows in zip(seen.learned, seen.learned[1:], seen.learned[2:], strict=False):
        if all(train - val > max(LEAK_GAP, LEAK_SHARE * train) for _, train, val in rows):
            step, train, val = rows[-1]
            yield step, f"the validation loss {val:.3f} is below the training loss {train:.3f}, both without dropout"


def repetition(seen: Seen) -> Iterator[tuple[int, str]]:
    """Samples go round in circles, twice in a row, past the start of training."""
    start = max(seen.facts.warmup_iters, REPEATED_AFTER * seen.facts.max_iters)
    for (_, earlier), (step, share) in pairwise(sample for sample in seen.samples if sample[0] >= start):
        if min(earlier, share) > REPEATED:
            yield step, f"{share:.0%} of the 4-grams of the sample text are repeats, {earlier:.0%} in the one before"


CHECKS = (many_epochs, few_tokens_per_parameter, divergence, loss_spike, loss_not_moving, gradient_exploding)
CHECKS += (gradient_vanishing, overfitting, split_mismatch, split_leak, repetition)
