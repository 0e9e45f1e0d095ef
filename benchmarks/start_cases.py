"""What `benchmarks.start` starts: functions, and models of plain torch and of the libraries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Calls = tuple[tuple[Any, ...], ...]


@dataclass(frozen=True, slots=True)
class Case:
    """A function and its calls: the first start lasts until all have a result, or gradients.

    `is_plain` is False where torch's `aot_compile` cannot save the guards of the model's library.
    `dynamic` is what torch.compile gets.
    """

    fn: Callable[..., Tensor]
    calls: Calls
    training: bool = False
    is_plain: bool = True
    dynamic: bool | None = None


class Layer(nn.Module):
    """Attention and a perceptron, each with a residual and a norm after it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, tokens, width] -> the same shape."""
        b, t, d = x.shape
        parts = self.mix(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*parts.unbind()).transpose(1, 2).reshape(b, t, d)
        x = self.norm1(x + self.out(seen))
        made: Tensor = self.norm2(x + self.down(F.gelu(self.up(x))))
        return made


class Encoder(nn.Module):
    """Token and position embeddings, then layers."""

    def __init__(self, layers: int = 12, width: int = 256) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(8192, width), nn.Embedding(512, width)
        self.layers = nn.Sequential(*(Layer(width) for _ in range(layers)))

    def forward(self, ids: Tensor) -> Tensor:
        """ids: [batch, tokens] -> [batch, tokens, width]."""
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        made: Tensor = self.layers(x)
        return made


def norm_gelu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """layer_norm and gelu over the last axis; one kernel."""
    return F.gelu(F.layer_norm(x, (x.shape[-1],), w, b))


def run(model: nn.Module, *inputs: Tensor) -> Tensor:
    """The model's result."""
    made: Tensor = model(*inputs)
    return made


def loss(model: nn.Module, *inputs: Tensor) -> Tensor:
    """A loss of the model's result."""
    made: Tensor = model(*inputs)
    return made.float().log_softmax(-1).square().mean()


def kernel() -> Case:
    return Case(norm_gelu, ((torch.randn(64, 256), torch.randn(256), torch.randn(256)),))


def encoder(training: bool) -> Callable[[], Case]:
    """A 12-layer encoder on 2 x 64 tokens; 16 x 512 and BERT-base's width on a GPU."""

    def make() -> Case:
        is_small = torch.get_default_device().type == "cpu"
        model = Encoder(width=256 if is_small else 768).train(training)
        ids = torch.randint(0, 8192, (2, 64) if is_small else (16, 512))
        return Case(loss if training else run, ((model, ids),), training)

    return make


def library(name: str) -> Callable[[], Case]:
    """A training step of a model of `benchmarks.models`."""

    def make() -> Case:
        from benchmarks.models import MODELS

        e = MODELS[name]()
        forward = e.forward

        def step(model: nn.Module, *inputs: Tensor) -> Tensor:
            return forward(model, *inputs).float().log_softmax(-1).square().mean()

        return Case(step, ((e.model.train(), *e.inputs),), training=True, is_plain=False)

    return make


def lengths() -> Case:
    """MiniLM with its real weights on sentences of four lengths, as the demo calls it."""
    from benchmarks.models import minilm

    made = [minilm(8, n) for n in (16, 32, 64, 128)]
    model = made[0].model.eval()
    calls = tuple((model, *e.inputs) for e in made)
    return Case(made[0].forward, calls, is_plain=False, dynamic=True)


def on_gpu(name: str) -> Callable[[], Case]:
    """A model of `benchmarks.gpu_models`."""

    def make() -> Case:
        from benchmarks.gpu_models import example

        e = example(name, torch.get_default_device().type == "cpu")
        calls = ((e.model.train(e.training), *e.inputs),)
        return Case(e.forward, calls, e.training, is_plain=False)

    return make


CASES: dict[str, dict[str, Callable[[], Case]]] = {
    "cpu": {
        "one kernel": kernel,
        "12-layer encoder": encoder(False),
        "12-layer encoder, training": encoder(True),
        "GPT-like, training": library("GPT-like"),
        "ResNet-like, training": library("ResNet-like"),
        "MiniLM, four lengths": lengths,
    },
    "cuda": {
        "one kernel": kernel,
        "12-layer encoder": encoder(False),
        "12-layer encoder, training": encoder(True),
        "BERT-base forward": on_gpu("BERT-base forward 16x512"),
        "ResNet-50 training": on_gpu("ResNet-50 training 64"),
        "GPT-2 training": on_gpu("GPT-2 124M training 4x1024"),
        "ViT-B training": on_gpu("ViT-B training 64"),
        "Swin-T training": on_gpu("Swin-T training 64"),
        "T5-small training": on_gpu("T5-small training 8x512"),
    },
}
