"""Decoders of text, with and without a cache of keys and values, and mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.models.example import Example, ids, logits, next_token

WORDS, BATCH, LENGTH, PAST = 97, 2, 20, 9
SMALL: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 80, "max_position_embeddings": 64,
    "attention_dropout": 0.0, "use_cache": False, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip


def language(module: nn.Module, **kwargs: Any) -> Example:
    """A model that tells logits of the next word."""
    return Example(module, (ids(WORDS, BATCH, LENGTH),), logits, next_token, **kwargs)


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=WORDS, n_embd=48, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SMALL | {"use_cache": True}))


def with_cache(module: nn.Module, word: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
    """One more word after keys and values of each layer: its logits, and the longer cache."""
    from transformers import DynamicCache

    cache = DynamicCache(ddp_cache_data=list(zip(past[::2], past[1::2], strict=True)))
    out = module(word, past_key_values=cache, use_cache=True).logits
    return (out, *(t for layer in cache.layers for t in (layer.keys, layer.values)))


def _step(module: nn.Module, heads: int, size: int, layers: int = 2) -> Example:
    past = [torch.randn(BATCH, heads, PAST, size) for _ in range(2 * layers)]
    inputs = (ids(WORDS, BATCH, 1), *past)
    return Example(module, inputs, with_cache, lambda out, *_: out[0].sum(), trained=False)


def gpt2() -> Example:
    """GPT-2."""
    return language(_gpt2(), bf16=True)


def gpt2_step() -> Example:
    """GPT-2 on one word, behind a cache."""
    return _step(_gpt2(), 4, 12)


def llama() -> Example:
    """Llama: rotary positions, groups of heads, RMS norm, a gated perceptron."""
    return language(_llama(), bf16=True)


def llama_step() -> Example:
    """Llama on one word, behind a cache."""
    return _step(_llama(), 2, 12)


def mistral() -> Example:
    """Mistral: attention in a sliding window."""
    from transformers import MistralConfig, MistralForCausalLM

    return language(MistralForCausalLM(MistralConfig(**SMALL, sliding_window=6)))


def qwen() -> Example:
    """Qwen 3: norms of queries and keys."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return language(Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=12)))


def gemma() -> Example:
    """Gemma 2: soft caps of scores and logits, two norms around each half of a block."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        **SMALL, head_dim=12, sliding_window=6, query_pre_attn_scalar=12,
        attn_implementation="eager",
    )  # fmt: skip
    return language(Gemma2ForCausalLM(config))


def bloom() -> Example:
    """BLOOM: positions as slopes added to the scores."""
    from transformers import BloomConfig, BloomForCausalLM

    config = BloomConfig(
        vocab_size=WORDS, hidden_size=48, n_layer=2, n_head=4, use_cache=False, hidden_dropout=0.0,
        attention_dropout=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return language(BloomForCausalLM(config))


def mixtral(how: str) -> Example:
    """Mixtral: two of four experts for each word, by its router; `how` the experts are called."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        **SMALL, num_local_experts=4, num_experts_per_tok=2, experts_implementation=how
    )
    return language(MixtralForCausalLM(config))


class Experts(nn.Module):
    """A layer of experts whose weights are gathered for each word: top 2 of 4, softly weighted."""

    def __init__(self, width: int = 32, wide: int = 48, experts: int = 4) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, width)
        self.router = nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, width, wide) * 0.1)
        self.down = nn.Parameter(torch.randn(experts, wide, width) * 0.1)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.table(words)
        share, chosen = self.router(x).softmax(-1).topk(2, -1)
        share = share / share.sum(-1, keepdim=True)
        every = torch.einsum("btw,ewh->bteh", x, self.up)
        every = torch.einsum("bteh,ehw->btew", nn.functional.gelu(every), self.down)
        kept = every.gather(2, chosen.unsqueeze(-1).expand(*chosen.shape, x.shape[-1]))
        out: Tensor = self.head(self.norm(x + (kept * share.unsqueeze(-1)).sum(2)))
        return out


def experts() -> Example:
    """A mixture of experts without data-dependent sizes."""
    return Example(Experts(), (ids(WORDS, BATCH, LENGTH),), lambda m, x: m(x), next_token)


MODELS: dict[str, Callable[[], Example]] = {
    "GPT-2": gpt2,
    "GPT-2, one word with a cache": gpt2_step,
    "Llama": llama,
    "Llama, one word with a cache": llama_step,
    "Mistral": mistral,
    "Qwen 3": qwen,
    "Gemma 2": gemma,
    "BLOOM": bloom,
    "Mixtral": lambda: mixtral("batched_mm"),
    "Mixtral, expert by expert": lambda: mixtral("eager"),
    "Soft mixture of experts": experts,
}
