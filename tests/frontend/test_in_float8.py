"""The option `save_as`: activations of a training step are saved as 8-bit floats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph

from lenz.frontend.in_float8 import may_be_rounded

FLOAT8 = ("float8_e5m2", "float8_e4m3fn")


def step(
    f: Callable[..., Any], inputs: Sequence[Tensor], save_as: str | None, dynamic: bool = False
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Results, gradients of the inputs, and what is saved that is no input."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    given, found = {t.untyped_storage().data_ptr() for t in leaves}, dict[int, Tensor]()

    def pack(t: Tensor) -> Tensor:
        if (at := t.untyped_storage().data_ptr()) not in given:
            found[at] = t
        return t

    options: Any = {"save_as": save_as, "on_error": "raise"}
    run: Any = torch.compile(f, backend="lenz", options=options, dynamic=dynamic)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        made = run(*leaves)
    results = [made] if isinstance(made, Tensor) else [*made]
    (sum(r.float().square().sum() for r in results) / 256).backward()  # type: ignore[union-attr]
    return [r.detach() for r in results], [t.grad for t in leaves if t.grad is not None], [
        *found.values()
    ]  # fmt: skip


def error(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


def bytes_of(saved: Sequence[Tensor]) -> int:
    return sum(t.untyped_storage().nbytes() for t in saved)


def layers(x: Tensor, *weights: Tensor) -> Tensor:
    for w in weights:
        x = F.gelu(x @ w)
    return x


def weights(count: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(512, 256, dtype=dtype)] + [
        (torch.randn(256, 256) / 16).to(dtype) for _ in range(count)
    ]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("save_as", FLOAT8)
def test_half_the_bytes_are_saved(save_as: str, dtype: torch.dtype, dynamic: bool) -> None:
    inputs = weights(4, dtype)
    results, grads, saved = step(layers, inputs, save_as, dynamic)
    wanted, exact, usual = step(layers, inputs, None)
    assert torch.equal(results[0], wanted[0]), "forward does not read what is rounded"
    assert {t.dtype for t in saved} == {getattr(torch, save_as)}
    assert bytes_of(saved) <= 0.55 * bytes_of(usual)
    errors = [error(a, b) for a, b in zip(grads, exact, strict=True)]
    assert 0 < max(errors) < 0.05, errors


def test_results_and_arguments_are_not_rounded() -> None:
    def f(x: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.tanh(x @ v)
        return y, y @ w

    inputs = weights(2)
    results, grads, saved = step(f, inputs, "float8_e5m2")
    wanted, exact, usual = step(f, inputs, None)
    assert all(map(torch.equal, results, wanted)) and all(map(torch.equal, grads, exact))
    assert [t.dtype for t in saved] == [t.dtype for t in usual] == [torch.bfloat16]


def test_small_activations_and_other_types_stay() -> None:
    for inputs in (weights(3, torch.float32), [weights(1)[0][:100], *weights(1)[1:]]):
        saved = step(layers, inputs, "float8_e5m2")[2]
        assert saved and not any("float8" in str(t.dtype) for t in saved)


def test_what_attention_compares_with_its_sums_is_exact() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        q, k, v = (x @ w).view(2, 256, 4, 3, 64).permute(3, 0, 2, 1, 4).unbind()
        return F.scaled_dot_product_attention(q, k, v)

    torch.manual_seed(0)
    inputs = [torch.randn(512, 128).bfloat16(), torch.randn(128, 768).bfloat16()]
    grads, exact = (step(f, inputs, how)[1] for how in ("float8_e4m3fn", None))
    assert all(map(torch.equal, grads, exact))


@pytest.mark.parametrize("target", ["_scaled_dot_product_flash_attention_for_cpu_backward", "mm"])
def test_attention_may_read_views_of_what_is_saved(target: str) -> None:
    forward, backward, aten = Graph(), Graph(), torch.ops.aten
    saved = forward.call_function(aten.relu.default, (forward.placeholder("x"),))
    saved.meta["val"] = torch.zeros(256, 256, dtype=torch.bfloat16)
    read = backward.placeholder("relu")
    view = backward.call_function(aten.permute.default, (read, [1, 0]))
    backward.call_function(getattr(aten, target).default, (view, view))
    assert may_be_rounded(saved, read) == (target == "mm")


@pytest.mark.parametrize("save_as", FLOAT8)
def test_large_values_are_clamped(save_as: str) -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return torch.sin((x * 1e6) @ w) @ w

    grads = step(f, [torch.ones(512, 256).bfloat16(), torch.eye(256).bfloat16()], save_as)[1]
    assert all(bool(g.isfinite().all()) for g in grads)


def test_convolutions_and_dropout() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.5), nn.Conv2d(16, 8, 3)
    ).bfloat16()
    x = torch.randn(8, 3, 34, 34).bfloat16().to(memory_format=torch.channels_last)
    found = []
    for save_as in ("float8_e5m2", None):
        net.zero_grad()
        torch.manual_seed(1)
        options: Any = {"save_as": save_as, "on_error": "raise"}
        torch.compile(net, backend="lenz", options=options)(x).float().square().mean().backward()
        found.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
    errors = [error(a, b) for a, b in zip(*found, strict=True)]
    assert 0 < errors[-2] < 0.05 and max(errors[-2:]) < 0.05, errors
