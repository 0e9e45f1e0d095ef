"""Architectures of transformers, made small: `make architectures`.

A model is built from its own default configuration, with fewer and narrower layers, and called with
the first inputs that it accepts. Types of configuration that give no model this way are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.models.example import Example, ids

# Numbers of a configuration, by a pattern of their names, and the most that they may be.
LIMITS = (
    (r"(.*_)?vocab_size|num_embeddings", 600),
    (r"((num|n|encoder|decoder|.*)_)?(hidden_)?(layers?|blocks)|n_layer", 2),
    (
        r"hidden_size|d_model|n_embd|d?_?embed(_dim)?|dim|embedding_size|hidden_dim|width|model_dim",
        64,
    ),
    (r"projection_dim|word_embed_proj_dim|(en|de)coder_hidden_size|hidden_channels", 64),
    (r".*(intermediate_size|d_ff|ffn_dim|n_inner|feedforward_dim|ffn_hidden_size|mlp_dim)", 96),
    (r".*(attention_heads|n_heads?|num_heads|heads)", 4),
    (r".*(key_value_heads|kv_heads)", 2),
    (r"head_dim|d_kv|attention_head_size|kv_channels", 16),
    (r"num_experts|num_local_experts|n_routed_experts|moe_num_experts", 4),
    (r".*(experts_per_tok|top_?k)", 2),
)
# What draws by NumPy, or by torch in another order: lenz draws its own numbers.
DRAWS = (
    r".*drop.*|mask_(time|feature)_prob|.*jitter.*|.*noise.*",
    r"pos_embed_(rescale|shift|jitter)",
)
MOST = 20_000_000  # parameters of a model that is still small
MOST_SIDE = 512  # pixels of an image
WORDS, LENGTH = 90, 24  # ids from 5 on: those below are often special


class Unbuilt(Exception):
    """There is no small model of this type, or no inputs that it accepts in eager."""


def names() -> list[str]:
    """The types of configuration that transformers knows."""
    from transformers.models.auto import configuration_auto

    return sorted(configuration_auto.CONFIG_MAPPING_NAMES)  # type: ignore[attr-defined]


def architecture(name: str) -> Example:
    """A small model of this type, with random weights and inputs. Raises Unbuilt."""
    module = _built(name)
    for given in _inputs(module.config):
        extra = {"use_cache": False} if hasattr(module.config, "use_cache") else {}
        forward = partial(_called, names=(*given,), extra=extra)
        try:
            with torch.no_grad():
                results = forward(module, *given.values())
        except Exception:  # noqa: BLE001  # not its inputs
            continue
        if results:
            return Example(module, (*given.values(),), forward, _loss)
    raise Unbuilt(f"{name} accepts none of the inputs that are tried")


def _built(name: str) -> Any:
    from transformers import AutoConfig, AutoModel, logging

    logging.set_verbosity_error()
    last: Exception | None = None
    for is_small in (True, False):  # some have sizes that depend on one another
        try:
            config = AutoConfig.for_model(name)
            if is_small:
                _shrink(config)
            config._experts_implementation = "batched_mm"  # the usual one has no float64
            with torch.device("meta"):
                size = sum(p.numel() for p in AutoModel.from_config(config).parameters())
            if size > MOST:
                raise Unbuilt(f"{name} has {size:,} parameters")
            module = AutoModel.from_config(config).float().eval()
        except Exception as e:  # noqa: BLE001  # any: it is one of hundreds
            last = e
            continue
        with torch.no_grad():
            for p in module.parameters():
                if not p.any():  # zeros hide errors, and routers of zeros choose experts by chance
                    p.normal_(std=0.02)
        return module
    raise Unbuilt(f"{name}: {last}")


def _shrink(config: Any, depth: int = 0) -> None:
    """Make the numbers of a configuration small, and those of configurations inside of it."""
    for key, value in [*vars(config).items()]:
        if hasattr(value, "model_type") and depth < 3:
            _shrink(value, depth + 1)
        elif re.fullmatch(DRAWS[0], key) and isinstance(value, float):
            setattr(config, key, 0.0)
        elif re.fullmatch(DRAWS[1], key):
            setattr(config, key, None)
        elif isinstance(value, int) and not isinstance(value, bool):
            most = next((n for pattern, n in LIMITS if re.fullmatch(pattern, key)), value)
            setattr(config, key, min(value, most))
    if isinstance(kinds := getattr(config, "layer_types", None), list):
        config.layer_types = [kinds[0], kinds[-1]]


def _inputs(config: Any) -> Iterator[dict[str, Tensor]]:
    """Inputs of texts, images, sounds and videos, by their names."""
    parts = (config, getattr(config, "vision_config", None))
    size = next((s for c in parts if (s := getattr(c, "image_size", None))), 64)
    side = size if isinstance(size, int) else size[0]
    side = side if side <= MOST_SIDE else 64
    channels, bins = getattr(config, "num_channels", 3), getattr(config, "num_mel_bins", 80)
    text = ids(WORDS, 2, LENGTH) + 5
    image, sound = torch.randn(2, channels or 3, side, side), torch.randn(2, bins, 3000)
    yield {"input_ids": text}
    yield {"input_ids": text, "attention_mask": torch.ones_like(text)}
    yield {"input_ids": text, "decoder_input_ids": text}
    yield {"pixel_values": image}
    yield {"pixel_values": torch.randn(1, 3, 64, 64)}
    yield {"input_ids": text, "pixel_values": image}
    yield {"input_values": torch.randn(2, 4000)}
    yield {"input_features": sound, "decoder_input_ids": text}
    yield {"input_features": torch.randn(2, 80, bins)}
    yield {"pixel_values": torch.randn(2, 8, 3, side, side)}


def _called(
    module: nn.Module, *given: Tensor, names: tuple[str, ...], extra: dict[str, Any]
) -> tuple[Tensor, ...]:
    """All floating-point results."""
    leaves = pytree.tree_leaves(module(**dict(zip(names, given, strict=True)), **extra))
    return tuple(t for t in leaves if isinstance(t, Tensor) and t.is_floating_point())


def _loss(results: tuple[Tensor, ...], *_: Tensor) -> Tensor:
    """A sum with weights that differ: a mean of squares has no gradient behind a layer norm."""
    found = []
    for t in results:
        if t.requires_grad:
            weight = torch.arange(t.numel(), device=t.device).mul(37).remainder(61).sub(30) / 32
            found.append((t.flatten().float() * weight).mean())  # exact weights in every type
    return torch.stack(found).sum()
