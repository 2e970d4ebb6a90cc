"""GPT-2: the decoder-only transformer of Radford et al. 2019, its parameter and FLOP counts, and generation.

In:  `GPTConfig`, ids (B, T) with T <= block_size.
Out: logits (B, T, V), or the mean cross-entropy in nats when targets are given; `generate` yields new ids.

Parameter names and shapes are GPT-2's. Two choices of GPT-2 matter when weights travel: the GELU is the tanh form
(nanoGPT trains with the exact one, hence the `gelu` argument), and the head shares the token embedding's matrix.

Letters: B batch, T time (tokens), C n_embd, H n_head, D = C / H head size, V vocab_size.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from configurator import UserError
from loss import cross_entropy


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """Shape of a model; the `model_args` of a checkpoint."""

    block_size: int = 1024  # longest context, in tokens
    vocab_size: int = 50304  # rows of the embedding: GPT-2's 50,257 up to a multiple of 128, which GPUs multiply faster
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True  # in the linear layers and layer norms, as GPT-2 has them
    gelu: str = "tanh"  # tanh = GPT-2's approximation (Hendrycks & Gimpel 2016), exact = with the error function

    def __post_init__(self) -> None:
        if min(self.block_size, self.vocab_size, self.n_layer, self.n_head, self.n_embd) < 1:
            raise UserError(f"a model needs sizes from 1 up: {dataclasses.asdict(self)}")
        if self.n_embd % self.n_head:
            nearest = max(self.n_head, round(self.n_embd / self.n_head) * self.n_head)
            raise UserError(
                f"n_embd={self.n_embd} is not a multiple of n_head={self.n_head}: n_embd={nearest} would be one"
            )
        if not 0 <= self.dropout < 1:
            raise UserError(f"dropout={self.dropout} is not a share from 0 up to, not including, 1")
        if self.gelu not in ("tanh", "exact"):
            raise UserError(f"gelu={self.gelu!r} is neither tanh nor exact")


class KeyValueCache:
    """Keys and values of the positions seen so far, for all layers, in memory taken once."""

    def __init__(self, config: GPTConfig, batch: int, capacity: int, like: Tensor) -> None:
        shape = (config.n_layer, 2, batch, config.n_head, capacity, config.n_embd // config.n_head)
        self.store = torch.empty(shape, dtype=like.dtype, device=like.device)  # (L, 2, B, H, capacity, D)
        self.length = 0

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Appends the new keys and values (B, H, T, D) of one layer; returns all of it so far."""
        end = self.length + k.size(2)
        self.store[layer, 0, :, :, self.length : end] = k
        self.store[layer, 1, :, :, self.length : end] = v
        return self.store[layer, 0, :, :, :end], self.store[layer, 1, :, :, :end]


class Attention(nn.Module):
    """Causal multi-head self-attention (Vaswani et al. 2017, section 3.2)."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.n_head, self.dropout = layer, config.n_head, config.dropout
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor, cache: KeyValueCache | None = None, mask: Tensor | None = None) -> Tensor:
        B, T, C = x.shape
        heads = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each (B, H, T, D)
        if cache is not None:
            assert T == 1 or cache.length == 0 or mask is not None, "several new tokens behind others need a mask"
            k, v = cache.extend(self.layer, k, v)
        # softmax(q kᵀ / √D) v without ever storing the (T, T) weights where the device has a fused kernel; a single
        # new token may see everything before it, so it needs no mask
        dropout = self.dropout if self.training else 0.0
        causal = T > 1 and mask is None
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal)  # (B, H, T, D)
        y = self.c_proj(y.transpose(1, 2).reshape(B, T, C))
        return F.dropout(y, self.dropout, self.training)


class MLP(nn.Module):
    """The position-wise half of a block: up to 4 C, GELU, back to C."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.dropout, self.approximate = config.dropout, "tanh" if config.gelu == "tanh" else "none"
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.c_fc(x), approximate=self.approximate)  # (B, T, 4 C)
        return F.dropout(self.c_proj(x), self.dropout, self.training)


class Block(nn.Module):
    """One layer, pre-norm: x + attention(norm(x)), then x + mlp(norm(x)) (GPT-2, section 2.3)."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = Attention(config, layer)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cache: KeyValueCache | None = None, mask: Tensor | None = None) -> Tensor:
        x = x + self.attn(self.ln_1(x), cache, mask)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """Embeddings, blocks, final norm, and a head tied to the token embedding."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.gradient_checkpointing = False  # keep a block's input alone, compute the rest again in backward
        self.used_vocabulary = config.vocab_size  # rows that stand for ids; the loss does not see those after them
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "wpe": nn.Embedding(config.block_size, config.n_embd),
                "h": nn.ModuleList(Block(config, layer) for layer in range(config.n_layer)),
                "ln_f": nn.LayerNorm(config.n_embd, bias=config.bias),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight  # Press & Wolf 2017; 38.6 M parameters fewer at 124 M
        self.initialise()

    @torch.no_grad()
    def initialise(self) -> None:
        """GPT-2's start: weights N(0, 0.02²), biases 0, norms 1; the two projections that each block adds to the
        residual stream are scaled by 1 / √(2 n_layer), so that the stream's variance does not grow with depth.
        """
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                depth = 2 * self.config.n_layer if name.endswith("c_proj.weight") else 1
                nn.init.normal_(parameter, mean=0.0, std=0.02 / math.sqrt(depth))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    @classmethod
    def from_state(cls, config: GPTConfig, state: dict[str, Tensor]) -> GPT:
        """A model with the given weights, which are taken over, not copied; no time is spent on initialising.

        Raises RuntimeError where names or shapes do not fit, or where the head is not the token embedding.
        """
        with torch.device("meta"):
            model = cls(config)
        model.load_state_dict(state, assign=True)
        head, embedding = model.lm_head.weight, model.transformer["wte"].weight
        if head.data_ptr() != embedding.data_ptr() and not torch.equal(head, embedding):
            raise RuntimeError("lm_head.weight is not transformer.wte.weight, and GPT-2 has one matrix for both")
        model.lm_head.weight = embedding
        return model

    def hidden(
        self,
        ids: Tensor,
        cache: KeyValueCache | None = None,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Final states (B, T, C) of ids (B, T), which follow what the cache holds. Rows of several lengths, padded on
        the left, come with their `positions` (B, T) and a `mask` (B, 1, T, all so far) of what each may see.
        """
        start = cache.length if cache is not None else 0
        if positions is None:
            assert start + ids.size(1) <= self.config.block_size, "the context is full"
            positions = torch.arange(start, start + ids.size(1), device=ids.device)  # (T,)
        x = self.transformer["wte"](ids) + self.transformer["wpe"](positions)  # (B, T, C)
        x = F.dropout(x, self.config.dropout, self.training)
        for block in self.transformer["h"]:
            if self.gradient_checkpointing and self.training:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x, cache, mask)
        if cache is not None:
            cache.length += ids.size(1)
        return self.transformer["ln_f"](x)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits (B, T, V); with targets (B, T) the mean cross-entropy over those that are not -1, in float32."""
        x = self.hidden(ids)  # (B, T, C)
        if targets is None:
            return self.lm_head(x)
        return cross_entropy(x.flatten(0, 1), self.lm_head.weight, targets.flatten(), self.used_vocabulary)


def parameter_count(config: GPTConfig) -> int:
    """Trainable numbers, the tied head once: 124,439,808 for GPT-2 small at V = 50,257."""
    C, b = config.n_embd, int(config.bias)
    block = 12 * C * C + b * (3 * C + C + 4 * C + C) + 2 * (1 + b) * C  # attention 4 C², mlp 8 C², biases, two norms
    return (config.vocab_size + config.block_size) * C + config.n_layer * block + (1 + b) * C


def flops_per_token(config: GPTConfig) -> int:
    """Floating-point operations to train on one token (PaLM, appendix B): forward 2 and backward 4 for each weight
    that is multiplied, and 12 L C T for the two products of attention, whose causal half is not taken off.
    """
    multiplied = config.n_layer * 12 * config.n_embd**2 + config.vocab_size * config.n_embd
    return 6 * multiplied + 12 * config.n_layer * config.n_embd * config.block_size


class Sampler:
    """Chooses the next ids. Row k draws from a stream of its own, which depends on (seed, first + k) alone."""

    def __init__(
        self, temperature: float, top_k: int | None, top_p: float, seed: int, samples: int, first: int = 0
    ) -> None:
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        # a string is hashed to 512 bits; PyTorch's generator would look at the last 32 bits of a number alone
        self.streams = [random.Random(f"{seed} {first + k}") for k in range(samples)]

    def __call__(self, logits: Tensor) -> Tensor:
        """Ids (B,) drawn from logits (B, V); temperature 0 is the most likely one. Raises UserError for NaN and inf."""
        logits = logits.cpu().double()
        if not logits.isfinite().all():
            raise UserError(
                "the model answers with NaN or inf: its weights are damaged, or dtype=float16 is too narrow"
            )
        if self.temperature == 0:
            return logits.argmax(-1)
        logits = (logits - logits.amax(-1, keepdim=True)) / self.temperature  # at most 0: no temperature overflows
        if self.top_k:  # 0 and None: no limit
            best = logits.topk(min(self.top_k, logits.size(-1)))  # exactly this many, also where some are equal
            logits = torch.full_like(logits, -math.inf).scatter(-1, best.indices, best.values)
        probabilities = logits.softmax(-1)
        if self.top_p < 1:
            probabilities = self.nucleus(probabilities)
        cumulative = probabilities.cumsum(-1)  # (B, V)
        draws = torch.tensor([[stream.random()] for stream in self.streams], dtype=torch.float64)  # (B, 1)
        ids = torch.searchsorted(cumulative, draws * cumulative[:, -1:], right=True)  # the first beyond the draw
        return ids.squeeze(-1).clamp(max=logits.size(-1) - 1)

    def nucleus(self, probabilities: Tensor) -> Tensor:
        """Keeps the fewest most likely ids that together reach top_p (Holtzman et al. 2020, section 3.1)."""
        ordered, ids = probabilities.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered
        return torch.zeros_like(probabilities).scatter(-1, ids, ordered.masked_fill(before >= self.top_p, 0.0))


@torch.inference_mode()
def generate(
    model: GPT, prompt: Tensor, max_new_tokens: int, sampler: Sampler, vocab_size: int, use_cache: bool = True
) -> Iterator[Tensor]:
    """Yields the ids (B,) of one new token after another, for B samples of one prompt (T,).

    Each is conditioned on the last block_size ids before it. While these fit, keys and values are kept; beyond, every
    position shifts with each token, so the window is computed anew. Rows of the vocabulary from `vocab_size` on, which
    no token uses, are never produced.
    """
    like, batch = model.transformer["wpe"].weight, len(sampler.streams)
    block_size = model.config.block_size
    ids = prompt.to(like.device).expand(batch, -1)  # (B, T)
    capacity = min(block_size, ids.size(1) + max_new_tokens)
    cache = KeyValueCache(model.config, batch, capacity, like) if use_cache else None
    fresh = ids  # what the cache has not seen
    for _ in range(max_new_tokens):
        if cache is not None and ids.size(1) <= block_size:
            states = model.hidden(fresh, cache)
        else:
            cache, states = None, model.hidden(ids[:, -block_size:])
        chosen = sampler(model.lm_head(states[:, -1])[:, :vocab_size])  # (B,)
        fresh = chosen.to(like.device).unsqueeze(1)
        ids = torch.cat([ids, fresh], dim=1)
        yield chosen
