"""All models of the set by name, in families."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.models import (
    convnets,
    decoders,
    encoders,
    generative,
    recurrent,
    relations,
    science,
    speech,
    translators,
    vision,
)
from tests.models.architectures import architecture
from tests.models.example import Example

MODELS: dict[str, Callable[[], Example]] = {
    **encoders.MODELS,
    **decoders.MODELS,
    **translators.MODELS,
    **vision.MODELS,
    **convnets.MODELS,
    **generative.MODELS,
    **recurrent.MODELS,
    **relations.MODELS,
    **speech.MODELS,
    **science.MODELS,
}


def example(name: str, seed: int = 0) -> Example:
    """The model called `name`, its weights and inputs drawn from one seed.

    Other names are those of architectures; raises Unbuilt.
    """
    torch.manual_seed(seed)
    return MODELS[name]() if name in MODELS else architecture(name)


def kinds(made: Example) -> tuple[str, ...]:
    """In which ways a model is compared."""
    half = ("inference in bf16", "training in bf16", "training in autocast") if made.bf16 else ()
    return ("inference", *(("training",) if made.trained else ()), *half)
