"""Small models on the GPU: results, gradients and steps of an optimizer beside eager."""

from __future__ import annotations

import copy
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor, nn, randn

from benchmarks import gpu_models
from benchmarks.gpu_measure import Watch, distance, side
from benchmarks.gpu_report import MODEL_ERROR, ROUNDING
from tests.e2e.test_training import Images, Tagger


def steps(model: nn.Module, args: tuple[Tensor, ...], backend: str | None) -> list[Any]:
    """Losses of four steps, then all parameters and buffers."""
    model = copy.deepcopy(model)
    torch._dynamo.reset()
    run = torch.compile(model, backend=backend) if backend else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = run(*args)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *model.state_dict().values()]


def tagged(device: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Embedding, attention and cross entropy; one target is ignored."""
    ids, target = torch.randint(0, 11, (2, 9)), torch.randint(0, 7, (2, 9))
    target[0, 3] = -100
    return Tagger().to(device), (ids.to(device), target.to(device))


def images(device: str, layout: torch.memory_format) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Convolutions with batch norm and pooling."""
    pictures = randn(4, 3, 16, 16).to(device).to(memory_format=layout)
    return Images().to(device).to(memory_format=layout), (pictures, torch.arange(4, device=device))  # type: ignore[call-overload]


@pytest.mark.parametrize("kind", ("tagged", "images", "channels last"))
def test_four_steps_in_float32(kind: str, device: str) -> None:
    torch.manual_seed(0)
    layout = torch.channels_last if kind == "channels last" else torch.contiguous_format
    model, args = tagged(device) if kind == "tagged" else images(device, layout)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        got, want = steps(model, args, "lenz"), steps(model, args, None)
    # AdamW divides by the root of a gradient's square: what rounds to another sign near 0 moves a
    # parameter by up to 0.01 a step.
    torch.testing.assert_close(got[:4], want[:4], rtol=2e-3, atol=2e-3)
    assert distance(got[4:], want[4:]) < 2e-2


def errors(name: str, device: str, seed: int) -> list[tuple[float, float]]:
    """Errors of the result and the gradients of a small bf16 model: of eager, then of lenz."""
    with torch.device(device):
        example = gpu_models.example(name, tiny=True, seed=seed)
    wanted, wanted_grads = gpu_models.Runner(example.reference(), lambda fn: fn).result()
    found, watch = [], Watch()
    for who in ("eager", "lenz"):
        runner = gpu_models.Runner(example, lambda fn: side(fn, who, watch, fullgraph=False))
        got, grads = runner.result()
        found.append((distance(got, wanted), distance(grads, wanted_grads)))
        runner.step()
    assert not watch.refused and watch.kernels > 0
    return found


@pytest.mark.parametrize("name", tuple(gpu_models.MODELS))
def test_a_bf16_model_is_as_close_to_float32_as_eager_is(name: str, device: str) -> None:
    pytest.importorskip("transformers")
    seeds = 1
    if any(
        net in name
        for net in ("Swin", "MobileNet", "EfficientNet", "ResNet-50 forward", "ConvNeXt")
    ):
        pytest.importorskip("timm")
        seeds = 4  # many batch norms in a row: one seed's errors are chance, 0.002 to 0.04
    found = [errors(name, device, seed) for seed in range(seeds)]
    for kind in (0, 1):  # the result, the gradients
        theirs, ours = [fmean(e[who][kind] for e in found) for who in (0, 1)]
        assert ours <= MODEL_ERROR * theirs + ROUNDING, found


def test_autocast_gives_what_eager_gives(device: str) -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8))
    model = model.to(device)

    def loss(x: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            return model(x).float().square().mean()

    x = randn(16, 32, device=device)
    grads = []
    for run in (loss, torch.compile(loss, backend="lenz")):
        model.zero_grad()
        run(x).backward()
        grads.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(grads[1], grads[0], rtol=5e-2, atol=1e-2)


def test_a_compiled_optimizer_updates_parameters_on_the_device(device: str) -> None:
    def run(backend: str | None) -> list[Tensor]:
        torch.manual_seed(0)
        params = [randn(n, n + 1).to(device).requires_grad_() for n in (3, 8, 1)]
        for p in params:
            p.grad = torch.ones_like(p) * p.detach()
        optimizer = torch.optim.AdamW(params, lr=0.1)
        step = torch.compile(optimizer.step, backend=backend) if backend else optimizer.step
        for _ in range(3):
            step()
        return [p.detach() for p in params]

    torch.testing.assert_close(run("lenz"), run(None), rtol=1e-5, atol=1e-5)
