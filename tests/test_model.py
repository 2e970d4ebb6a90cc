"""model.py: transformers' numbers, counted parameters and operations, and generation equal to its definition."""

from __future__ import annotations

import dataclasses
import math
import types

import pytest
import torch
from conftest import TINY, fill_randomly
from torch.nn import functional as F

import train
from checkpoint import save_checkpoint
from configurator import UserError
from dataset import read_meta
from loss import cross_entropy
from model import GPT, GPTConfig, KeyValueCache, Sampler, flops_per_token, generate, parameter_count
from progress import perplexity

SMALL = GPTConfig(block_size=16, vocab_size=40, n_layer=2, n_head=2, n_embd=32)
GPT2 = GPTConfig(vocab_size=50257)
MEDIUM = GPTConfig(vocab_size=50257, n_layer=24, n_head=16, n_embd=1024)
TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # Conv1D in transformers


def random_model(seed: int = 0, **changes) -> GPT:
    """A model whose weights, norms and biases too, are all random: nothing in it is 0 or 1, and no text is dull."""
    return fill_randomly(GPT(dataclasses.replace(SMALL, **changes)), seed)


def random_ids(*shape: int, below: int = 40, seed: int = 1) -> torch.Tensor:
    """Random ids."""
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed))


def meta_model(config: GPTConfig) -> GPT:
    """A model without memory: shapes alone."""
    with torch.device("meta"):
        return GPT(config)


# --- the same numbers as transformers ------------------------------------------------------------------------------


def transformers_twin(model: GPT):
    """GPT2LMHeadModel of transformers with the same weights."""
    transformers = pytest.importorskip("transformers")
    c = model.config
    twin = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=c.vocab_size,
            n_positions=c.block_size,
            n_embd=c.n_embd,
            n_layer=c.n_layer,
            n_head=c.n_head,
            activation_function={"tanh": "gelu_new", "exact": "gelu"}[c.gelu],
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    state = {k: v.T if k.endswith(TRANSPOSED) else v for k, v in model.state_dict().items()}
    twin.load_state_dict({k: v.contiguous() for k, v in state.items()})
    return twin.eval()


@pytest.mark.parametrize("gelu", ["tanh", "exact"])
def test_logits_loss_and_gradients_are_those_of_transformers(gelu):
    model = random_model(gelu=gelu, n_layer=3, n_head=4)
    twin, ids = transformers_twin(model), random_ids(3, 17)
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    torch.testing.assert_close(model(inputs), twin(inputs).logits, rtol=1e-4, atol=1e-4)
    loss, expected = model(inputs, targets), twin(inputs, labels=inputs, shift_labels=targets).loss
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)
    loss.backward()
    expected.backward()
    gradients = {name: p.grad for name, p in twin.named_parameters()}
    assert gradients.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        theirs = gradients[name].T if name.endswith(TRANSPOSED) else gradients[name]
        torch.testing.assert_close(parameter.grad, theirs, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
        assert theirs.abs().max() > 1e-3, name


def test_the_two_gelus_differ():
    ids = random_ids(1, 16)
    tanh, exact = random_model(gelu="tanh"), random_model(gelu="exact")
    assert (tanh(ids) - exact(ids)).abs().max() > 1e-4


# --- counts --------------------------------------------------------------------------------------------------------

SHAPES = [
    (block_size, vocab_size, n_layer, n_head, n_embd, bias)
    for block_size, vocab_size, n_layer, n_head, n_embd in [
        (1, 2, 1, 1, 1),
        (16, 28, 2, 2, 32),
        (128, 2048, 4, 4, 192),
        (1024, 50257, 12, 12, 768),
        (1024, 50304, 24, 16, 1024),
        (1024, 50257, 36, 20, 1280),
        (1024, 50257, 48, 25, 1600),
    ]
    for bias in (True, False)
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_parameter_count_is_the_sum_over_the_built_model(shape):
    block_size, vocab_size, n_layer, n_head, n_embd, bias = shape
    config = GPTConfig(block_size, vocab_size, n_layer, n_head, n_embd, bias=bias)
    assert parameter_count(config) == sum(p.numel() for p in meta_model(config).parameters())


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (GPT2, 124_439_808),
        (MEDIUM, 354_823_168),
        (dataclasses.replace(GPT2, vocab_size=50304, bias=False), 124_373_760),
        (dataclasses.replace(MEDIUM, vocab_size=50304, bias=False), 354_599_936),
    ],
    ids=["124M", "350M", "124M padded, no bias", "350M padded, no bias"],
)
def test_known_models_have_the_published_number_of_parameters(config, count):
    """H75: embeddings are counted, the tied head once."""
    assert parameter_count(config) == count == sum(p.numel() for p in meta_model(config).parameters())


@pytest.mark.parametrize("changes", [{}, {"n_layer": 3, "n_embd": 64, "vocab_size": 500}, {"bias": False}], ids=str)
def test_flops_per_token_are_those_that_torch_counts(changes):
    from torch.utils.flop_counter import FlopCounterMode

    model = random_model(**changes)
    c, ids = model.config, random_ids(2, 17)
    in_place = {torch.ops.aten.addmm_: lambda _, a, b, **__: 2 * a[0] * a[1] * b[1]}  # which torch does not count
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        model(ids[:, :-1], ids[:, 1:]).backward()
    attention = 12 * c.n_layer * c.n_embd * c.block_size  # a token; torch's counter does not know the CPU's kernel
    assert counter.get_total_flops() / 32 + attention == pytest.approx(flops_per_token(c), rel=0.01)


# --- the start -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [28, 2048, 50257])
def test_the_first_loss_is_the_logarithm_of_the_vocabulary(vocab_size):
    torch.manual_seed(0)
    model = GPT(dataclasses.replace(SMALL, vocab_size=vocab_size, n_embd=64))
    ids = random_ids(8, 17, below=vocab_size)
    assert model(ids[:, :-1], ids[:, 1:]).item() == pytest.approx(math.log(vocab_size), abs=0.3)


def test_weights_start_as_in_gpt2():
    torch.manual_seed(0)
    model = GPT(dataclasses.replace(SMALL, n_layer=8, n_embd=128, vocab_size=1000, block_size=256))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert parameter.eq(0).all(), name
        elif ".ln_" in name:
            assert parameter.eq(1).all(), name
        else:
            std = 0.02 / math.sqrt(2 * 8) if name.endswith("c_proj.weight") else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.03), name


def test_head_and_embedding_are_one_matrix_also_after_loading():
    model = random_model()
    loaded = GPT.from_state(model.config, model.state_dict())
    for each in (model, loaded):
        assert each.lm_head.weight is each.transformer["wte"].weight
        assert "lm_head.weight" not in dict(each.named_parameters())
    ids = random_ids(2, 16)
    assert torch.equal(model(ids), loaded(ids))


def test_a_state_with_a_missing_or_unknown_weight_does_not_load():
    state = random_model().state_dict()
    with pytest.raises(RuntimeError, match="Missing key"):
        GPT.from_state(SMALL, {k: v for k, v in state.items() if k != "transformer.h.1.mlp.c_fc.weight"})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        GPT.from_state(SMALL, state | {"transformer.h.2.mlp.c_fc.weight": torch.zeros(128, 32)})
    with pytest.raises(RuntimeError, match="one matrix for both"):  # it would be dropped without a word
        GPT.from_state(SMALL, state | {"lm_head.weight": torch.zeros(40, 32)})


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"n_embd": 100, "n_head": 16}, ("n_embd=100", "n_head=16", "n_embd=96")),
        ({"n_layer": 0}, ("'n_layer': 0",)),
        ({"dropout": 1.0}, ("dropout=1.0",)),
        ({"gelu": "relu"}, ("gelu='relu'", "tanh", "exact")),
    ],
    ids=str,
)
def test_an_impossible_shape_is_an_error_that_names_it(changes, parts):
    with pytest.raises(UserError) as raised:
        dataclasses.replace(SMALL, **changes)
    assert all(part in str(raised.value) for part in parts), raised.value


# --- the loss ------------------------------------------------------------------------------------------------------


def test_a_later_id_changes_no_earlier_logit():
    model, ids = random_model(), random_ids(1, 16)
    changed = ids.clone()
    changed[0, 9] = (ids[0, 9] + 1) % 40
    before, after = model(ids), model(changed)
    assert torch.equal(before[:, :9], after[:, :9]) and not torch.equal(before[:, 9:], after[:, 9:])


def test_the_loss_is_the_mean_over_the_targets_that_count():
    model, ids, targets = random_model(), random_ids(2, 16), random_ids(2, 16, seed=2)
    targets[0, :7] = -1
    logp = model(ids).log_softmax(-1)
    expected = -sum(logp[b, t, targets[b, t]] for b in range(2) for t in range(16) if targets[b, t] >= 0) / 25
    torch.testing.assert_close(model(ids, targets), expected)


@pytest.mark.parametrize("rows", [1, 7, 25, 1000])
@pytest.mark.parametrize(
    ("dtype", "grad_scale"), [(torch.float32, 1.0), (torch.bfloat16, 1.0), (torch.float16, 1024.0)], ids=str
)
def test_the_loss_in_chunks_is_the_plain_one_with_the_same_gradients(rows, dtype, grad_scale):
    """Chunks that do and do not divide the rows, targets that do not count, columns of no token, autocast, float16's
    scaled loss: sixteen bits round each product differently, by at most a few of their last places.
    """
    torch.manual_seed(0)
    hidden, weight = torch.randn(50, 16), torch.randn(40, 16)
    targets = torch.randint(0, 33, (50,))
    targets[[0, 7, 49]] = -1
    results = []
    for chunked in (True, False):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            if chunked:
                loss = cross_entropy(h, w, targets, 33, rows)
                with torch.no_grad():
                    torch.testing.assert_close(cross_entropy(h, w, targets, 33, rows), loss.detach())
            else:
                loss = torch.nn.functional.cross_entropy((h @ w.t())[:, :33].float(), targets, ignore_index=-1)
        (loss * grad_scale).backward()
        results.append((loss.detach(), h.grad, w.grad))
        assert loss.dtype == h.grad.dtype == w.grad.dtype == torch.float32
    coarse = {} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.004 * grad_scale}
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, **coarse)
    assert results[0][2][33:].eq(0).all()


def test_small_gradients_of_the_loss_survive_float16():
    """Divided by the number of rows before it is rounded, a gradient of 1e-5 / 8192 would be 0 in float16."""
    torch.manual_seed(0)
    hidden, weight = torch.zeros(8192, 8), torch.zeros(1024, 8)
    hidden[:, 0], weight[0, 0] = 1.0, 4.0  # each of the other 1,023 ids has a probability of 1e-3
    for tensor in (hidden, weight):
        tensor.requires_grad_()
    with torch.autocast("cpu", dtype=torch.float16):
        cross_entropy(hidden, weight, torch.zeros(8192, dtype=torch.long), 1024).backward()
    share = 1 / (math.exp(4) + 1023)
    torch.testing.assert_close(weight.grad[1:, 0], torch.full((1023,), share), rtol=0.01, atol=0)
    torch.testing.assert_close(
        hidden.grad[:, 0] * 8192, torch.full((8192,), -4 * (1 - share * math.exp(4))), rtol=0.01, atol=0
    )


def test_rows_beyond_the_vocabulary_change_no_loss_and_get_no_gradient():
    padded = random_model(vocab_size=64)
    padded.used_vocabulary = 50
    state = {
        k: v[:50] if k in ("transformer.wte.weight", "lm_head.weight") else v for k, v in padded.state_dict().items()
    }
    exact = GPT.from_state(dataclasses.replace(SMALL, vocab_size=50), {k: v.clone() for k, v in state.items()})
    ids = random_ids(2, 17, below=50)
    losses = [model(ids[:, :-1], ids[:, 1:]) for model in (padded, exact)]
    torch.testing.assert_close(losses[0], losses[1])
    for loss in losses:
        loss.backward()
    gradient = padded.lm_head.weight.grad
    assert gradient[50:].eq(0).all()
    torch.testing.assert_close(gradient[:50], exact.lm_head.weight.grad)


def test_gradient_checkpointing_changes_neither_loss_nor_gradient_with_dropout_on():
    ids, results = random_ids(4, 17), []
    for checkpointing in (False, True):
        model = random_model(dropout=0.2)
        model.gradient_checkpointing = checkpointing
        torch.manual_seed(5)
        loss = model.train()(ids[:, :-1], ids[:, 1:])
        loss.backward()
        results.append((loss.detach(), {name: p.grad for name, p in model.named_parameters()}))
    assert torch.equal(results[0][0], results[1][0])
    for name, gradient in results[0][1].items():
        torch.testing.assert_close(gradient, results[1][1][name], rtol=1e-6, atol=1e-6, msg=name)


def test_dropout_draws_in_training_and_rests_in_evaluation():
    model, ids = random_model(dropout=0.2), random_ids(2, 17)
    torch.manual_seed(0)
    noisy = [model.train()(ids[:, :-1], ids[:, 1:]).item() for _ in range(2)]
    assert noisy[0] != noisy[1]
    assert model.eval()(ids[:, :-1], ids[:, 1:]) == random_model().eval()(ids[:, :-1], ids[:, 1:])


@pytest.mark.parametrize("checkpointing", [False, True])
def test_forward_and_loss_compile_to_one_graph(checkpointing):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    model, ids = random_model(), random_ids(2, 17)
    model.used_vocabulary, model.gradient_checkpointing = 39, checkpointing
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)  # a break would raise
    ids = ids.clamp(max=38)
    loss = compiled(ids[:, :-1], ids[:, 1:])
    loss.backward()
    compiled(ids[:, 1:], ids[:, :-1])
    assert counter.frame_count == 1
    torch.testing.assert_close(loss, model(ids[:, :-1], ids[:, 1:]))


def test_perplexity_of_a_huge_loss_is_inf_and_the_loss_is_still_told(tiny, capsys):
    """H76: a mean loss of 800 overflows no exponential; the evaluation reports both and ends with 0."""
    assert perplexity(800.0) == math.inf and perplexity(2.0) == pytest.approx(math.e**2)
    meta = read_meta(tiny / "data" / "tiny")
    text = (tiny / "data" / "tiny" / "tokenizer.json").read_text(encoding="utf-8")
    tokenizer = meta["tokenizer"] | {"json": text}
    config = dataclasses.replace(SMALL, vocab_size=meta["vocab_size"])
    model = GPT(config)
    with torch.no_grad():  # the final state is e₀ whatever came in, and the end-of-text id alone answers to it, by 800
        model.transformer["ln_f"].weight.zero_()
        model.transformer["ln_f"].bias.zero_()[0] = 1.0
        model.transformer["wte"].weight.zero_()[meta["eot_id"], 0] = 800.0
    state = {"model": model.state_dict(), "model_args": dataclasses.asdict(config), "tokenizer": tokenizer}
    save_checkpoint(tiny / "huge.pt", state | {"iter_num": 1, "best_val_loss": 800.0, "config": {}})
    assert train.main([*TINY, "--max_iters=1", f"--init_from={tiny / 'huge.pt'}", "--eval_only=true"]) == 0
    told = capsys.readouterr().out
    assert "train loss 800.0000, val loss 793.7500, val perplexity inf" in told, told  # 1 of 128 targets is that id


# --- sampling ------------------------------------------------------------------------------------------------------

LOGITS = [1.0, 3.0, -2.0, 2.5, 0.0, 2.4, -1.0, 0.5, 1.5, -3.0, 2.0, 0.1]


def distribution(temperature: float, top_k: int | None, top_p: float) -> list[float]:
    """The probabilities that the three settings leave, by their definitions."""
    ranked = sorted(range(len(LOGITS)), key=lambda i: -LOGITS[i])
    kept = ranked[: top_k or None]
    weights = {i: math.exp(LOGITS[i] / temperature) for i in kept}
    total = sum(weights.values())
    nucleus, reached = [], 0.0
    for i in kept:
        if reached < top_p:
            nucleus.append(i)
        reached += weights[i] / total
    total = sum(weights[i] for i in nucleus)
    return [weights[i] / total if i in nucleus else 0.0 for i in range(len(LOGITS))]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, None, 1.0), (0.7, 0, 1.0), (1.5, 4, 1.0), (1.0, 2, 1.0), (1.0, None, 0.5), (2.0, 6, 0.8), (1.0, 99, 0.01)],
)
def test_draws_follow_the_probabilities_that_the_settings_define(temperature, top_k, top_p):
    draws = 20_000
    sampler = Sampler(temperature, top_k, top_p, seed=3, samples=draws)
    counts = torch.bincount(sampler(torch.tensor([LOGITS]).expand(draws, -1)), minlength=len(LOGITS)).tolist()
    expected = [draws * p for p in distribution(temperature, top_k, top_p)]
    assert [c for c, e in zip(counts, expected, strict=True) if e == 0 and c] == []
    freedom = max(1, sum(e > 0 for e in expected) - 1)
    chi_square = sum((c - e) ** 2 / e for c, e in zip(counts, expected, strict=True) if e)
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom), (counts, expected)


def test_consecutive_draws_of_one_stream_are_independent():
    sampler = Sampler(1.0, None, 1.0, seed=0, samples=1)
    ids = [sampler(torch.zeros(1, 2)).item() for _ in range(4_000)]
    pairs = torch.bincount(torch.tensor([2 * a + b for a, b in zip(ids[::2], ids[1::2], strict=True)]), minlength=4)
    assert all(count == pytest.approx(500, abs=90) for count in pairs.tolist()), pairs


def test_top_k_keeps_exactly_k_where_logits_are_equal():
    sampler = Sampler(1.0, 3, 1.0, seed=0, samples=500)
    assert len(set(sampler(torch.zeros(500, 10)).tolist())) == 3


def test_temperature_0_and_temperatures_next_to_it_take_the_most_likely():
    logits = torch.tensor([LOGITS]) * 1e4
    for temperature in (0, 0.0, 5e-324, 1e-30, 1e-3):
        for top_k in (None, 0, 1, 5):
            assert Sampler(temperature, top_k, 1.0, seed=9, samples=1)(logits).item() == 1, temperature


def test_a_draw_of_exactly_0_takes_no_id_of_probability_0():
    sampler = Sampler(1.0, None, 1.0, seed=0, samples=1)
    sampler.streams = [types.SimpleNamespace(random=lambda: 0.0)]
    assert sampler(torch.tensor([[-1e9, 1.0, 0.0]])).item() == 1


def test_a_huge_temperature_makes_all_equal():
    counts = torch.bincount(
        Sampler(1e30, None, 1.0, 0, 12_000)(torch.tensor([LOGITS]).expand(12_000, -1)), minlength=12
    )
    assert counts.min() > 850 and counts.max() < 1150, counts


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_an_error_not_a_text(broken):
    for temperature in (0.0, 1.0):
        with pytest.raises(UserError, match="NaN or inf"):
            Sampler(temperature, None, 1.0, seed=0, samples=1)(torch.tensor([[0.0, broken, 1.0]]))


def test_every_seed_has_a_stream_of_its_own():
    seeds = [0, 1, -1, 2**32, 2**32 + 1, 2**80, 1_000_003]
    draws = {tuple(Sampler(1.0, None, 1.0, seed, samples=6)(torch.zeros(6, 10**5)).tolist()) for seed in seeds}
    assert len(draws) == len(seeds) and all(len(set(each)) == 6 for each in draws)


# --- generation ----------------------------------------------------------------------------------------------------


def generated(model: GPT, prompt: torch.Tensor, new: int, sampler: Sampler, vocab_size: int = 40, **options) -> list:
    """The new ids, one list a sample."""
    return torch.stack(list(generate(model, prompt, new, sampler, vocab_size, **options))).T.tolist()


def continued_one_by_one(model: GPT, prompt: list[int], new: int, sampler: Sampler, vocab_size: int = 40) -> list[int]:
    """The definition: each id is drawn from what the whole model says of the last block_size ids."""
    ids = list(prompt)
    for _ in range(new):
        window = torch.tensor([ids[-model.config.block_size :]])
        with torch.no_grad():
            logits = model(window)[:, -1, :vocab_size]
        ids.append(sampler(logits).item())
    return ids[len(prompt) :]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("length", [1, 5, 15, 16, 17, 40])
def test_generation_with_and_without_cache_is_the_one_by_one_definition(length, temperature):
    model, prompt = random_model(seed=length).eval(), random_ids(length, seed=length)
    expected = continued_one_by_one(model, prompt.tolist(), 40, Sampler(temperature, 20, 0.95, 7, 1))
    for use_cache in (True, False):
        sampler = Sampler(temperature, 20, 0.95, seed=7, samples=1)
        assert generated(model, prompt, 40, sampler, use_cache=use_cache) == [expected]
    assert len(set(expected)) > 2


def test_a_batch_of_samples_is_the_samples_one_by_one():
    model, prompt = random_model().eval(), random_ids(6)
    batch = generated(model, prompt, 40, Sampler(1.0, None, 1.0, seed=1, samples=4))
    singles = [generated(model, prompt, 40, Sampler(1.0, None, 1.0, 1, 1, first=k))[0] for k in range(4)]
    assert batch == singles and len({tuple(each) for each in batch}) == 4


def test_ids_beyond_the_vocabulary_are_never_produced():
    model, ids = random_model(vocab_size=64).eval(), random_ids(4, below=50)
    with torch.no_grad():  # a direction that every final state has, and that the rows 50 to 63 answer to
        model.transformer["ln_f"].bias[0] = 30.0
        model.transformer["wte"].weight[50:, 0] = 5.0
    assert model(ids.unsqueeze(0)).argmax(-1).min() >= 50
    for sampler in (Sampler(0.0, None, 1.0, 0, 1), Sampler(1.0, 5, 1.0, 0, 1), Sampler(1.0, None, 1.0, 0, 1)):
        assert max(generated(model, ids, 100, sampler, vocab_size=50)[0]) < 50


def test_the_last_logits_are_the_same_with_a_full_cache():
    model, ids = random_model().eval(), random_ids(1, 16)
    cache = KeyValueCache(model.config, 1, 16, model.lm_head.weight)
    with torch.no_grad():
        states = [model.hidden(ids[:, :3], cache), *(model.hidden(ids[:, t : t + 1], cache) for t in range(3, 16))]
        torch.testing.assert_close(model.lm_head(torch.cat(states, dim=1)), model(ids), rtol=1e-4, atol=1e-5)
    assert cache.length == 16


def test_a_model_in_bfloat16_generates():
    model = random_model().eval().to(torch.bfloat16)
    ids = generated(model, random_ids(3), 20, Sampler(0.8, 40, 1.0, 0, 2))
    assert len(ids) == 2 and len(ids[0]) == 20
    assert F.softmax(model(random_ids(1, 3))[0, -1].float(), -1).sum().item() == pytest.approx(1, abs=1e-3)
