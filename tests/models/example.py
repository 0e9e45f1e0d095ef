"""What a model of the set is: a module, its inputs, its result and its loss; dropout is off."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Example:
    """`forward(module, *inputs)` gives a tensor, or a tuple of them, and `loss` a number.

    loss(result, *inputs) is compiled together with the forward pass for training.
    bf16     the model is compared in bfloat16 too
    trained  it has a training step
    dynamo   settings of torch._dynamo.config
    """

    module: nn.Module
    inputs: tuple[Tensor, ...]
    forward: Callable[..., Any]
    loss: Callable[..., Tensor]
    bf16: bool = False
    trained: bool = True
    dynamo: Mapping[str, Any] = field(default_factory=dict)


def plain(module: nn.Module, *inputs: Tensor) -> Any:
    """What the module itself returns."""
    return module(*inputs)


def logits(module: nn.Module, *inputs: Tensor) -> Tensor:
    """The logits of a model of transformers."""
    found: Tensor = module(*inputs).logits
    return found


def hidden(module: nn.Module, *inputs: Tensor) -> Tensor:
    """The last hidden state of a model of transformers."""
    found: Tensor = module(*inputs).last_hidden_state
    return found


def next_token(out: Tensor, ids: Tensor, *_: Tensor) -> Tensor:
    """Cross entropy of logits [batch, length, words] against the ids that follow."""
    return F.cross_entropy(out[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def classes(out: Tensor, *_: Tensor) -> Tensor:
    """Cross entropy of logits [batch, classes], where example k is of class k."""
    target = torch.arange(out.shape[0], device=out.device) % out.shape[1]
    return F.cross_entropy(out.float(), target)


def waves(out: Tensor, *_: Tensor) -> Tensor:
    """Mean squared distance of one result from a sine over its elements."""
    places = torch.arange(out.numel(), device=out.device, dtype=torch.float32)
    return F.mse_loss(out.float(), torch.sin(places).view(out.shape))


def ids(words: int, *shape: int) -> Tensor:
    """Random token ids."""
    return torch.randint(0, words, shape)
