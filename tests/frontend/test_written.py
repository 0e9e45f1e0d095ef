"""Loops that fill or read a tensor part by part: joins, and no copy of the whole for each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, randn
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from lenz.frontend.normalise import normalise
from tests.e2e.sides import agree, gradients_agree

STEPS = 6


def filled(x: Tensor, w: Tensor) -> Tensor:
    """Each step reads the row before."""
    out = torch.zeros_like(x)
    out[:, 0] = x[:, 0]
    for t in range(1, STEPS):
        out[:, t] = torch.tanh(out[:, t - 1] * w + x[:, t])
    return out


def stacked(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Steps in the other order, two rows left as they were, and the last state a result too."""
    out, h = x.new_ones(4, STEPS + 2, 8), x[:, -1]
    for t in reversed(range(STEPS)):
        h = (h @ w.outer(w)).sin() + x[:, t]
        out[:, t] = h
    return out, h


def in_slices(x: Tensor, w: Tensor) -> Tensor:
    """Slices, of another type than the whole; one is written twice."""
    out = x.new_empty(4, 4 * STEPS, dtype=torch.float32).fill_(2)
    for t in range(STEPS):
        out[:, 4 * t : 4 * t + 3] = x[:, t, :3] * w[0]
    out[:, 1:3] += 1
    return out.sum(0)


def of_views(x: Tensor, w: Tensor) -> Tensor:
    """Reads through views, and of what the writes do not reach."""
    out = x.new_zeros(STEPS, 4, 8)
    for t in range(STEPS):
        before = out[t - 1].t() if t else x[:, 0].t()
        out[t] = before.t().reshape(4, 8) * w + out[STEPS - 1] + x[:, t]
    return out.flatten(1)


CASES = (filled, stacked, in_slices, of_views)


@pytest.mark.parametrize("dynamic", (False, True))
@pytest.mark.parametrize("f", CASES, ids=lambda f: f.__name__)
def test_values(f: Callable[..., Any], dynamic: bool) -> None:
    agree(f, lambda: (randn(4, STEPS, 8).double(), randn(8).double()), dynamic=dynamic)


@pytest.mark.parametrize("f", (stacked, in_slices), ids=lambda f: f.__name__)
def test_gradients(f: Callable[..., Any]) -> None:
    def one(x: Tensor, w: Tensor) -> Tensor:
        found = f(x, w)
        return found[0] * 2 if isinstance(found, tuple) else found

    def make() -> tuple[Tensor, Tensor]:
        x, w = randn(4, STEPS, 8).double(), randn(8).double()
        return x.requires_grad_(), w.requires_grad_()

    gradients_agree(one, make)


def ops_of(f: Callable[..., Any], *args: Any) -> list[str]:
    """The ops of a normalised graph that copy or join."""
    gm = make_fx(functionalize(f), tracing_mode="fake")(*args)
    normalise(gm)
    gm.graph.lint()
    names = [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]
    return [name.split(".")[1] for name in names if "scatter" in name or "cat" in name]


def test_a_filled_tensor_is_one_join() -> None:
    args = randn(4, STEPS, 8), randn(8)
    assert ops_of(filled, *args) == ["cat"]
    assert ops_of(stacked, *args) == ["cat"]


def test_a_gradient_of_parts_is_one_join() -> None:
    def loss(x: Tensor) -> Tensor:
        return sum(x[:, t].sin().sum() * t for t in range(STEPS)) + (x * 2).sum()  # type: ignore[no-any-return]

    x = randn(4, STEPS, 8)
    gm = make_fx(torch.func.grad(loss), tracing_mode="fake")(x)
    normalise(gm)
    names = [str(n.target) for n in gm.graph.nodes]
    assert "aten.cat.default" in names and "aten.select_backward.default" not in names
    torch.testing.assert_close(gm(x), torch.func.grad(loss)(x))


def two_writes(x: Tensor) -> Tensor:
    y = x * 2
    y[0], y[1] = x[1], x[0]
    return y


def over_each_other(x: Tensor) -> Tensor:
    y = x * 2
    for t in range(STEPS):
        y[t : t + 2] = x[t + 1] * t
    return y


def all_read(x: Tensor) -> tuple[Tensor, list[Tensor]]:
    y, seen = x * 2, []
    for t in range(STEPS):
        y[t] = x[t] + 1
        seen.append(y.sum())
    return y, seen


def an_argument(x: Tensor) -> None:
    for t in range(STEPS):
        x[t] = x[t] + 1


@pytest.mark.parametrize("f", (two_writes, over_each_other, all_read, an_argument))
def test_what_stays(f: Callable[..., Any]) -> None:
    assert "cat" not in ops_of(f, randn(STEPS + 3, 8))
    agree(f, lambda: (randn(STEPS + 3, 8),))


def test_a_part_is_read_with_the_type_of_the_whole() -> None:
    def f(x: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        one, more = torch.select_scatter(x, s, 0, 1), torch.slice_scatter(x, s[None], 0, 1, 2)
        return one[1] / 1, one[1] > 100, more[1:2] / 1

    agree(f, lambda: (torch.zeros(3, 3, dtype=torch.uint8), torch.tensor([300, 256, -1])))
