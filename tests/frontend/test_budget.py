"""The option `memory_budget`: how many bytes a training step saves, and what that changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, randn

BUDGETS = [k / 10 for k in range(10, 0, -1)]


class Layer(nn.Module):
    """One layer of a transformer, with dropout of its weights."""

    def __init__(self, d: int = 32) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        weights = F.dropout((q @ k.mT / 4).softmax(-1), 0.1)
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Block(nn.Module):
    """A depthwise convolution between two of 1x1, with norms, dropout and a residual."""

    def __init__(self, c: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Conv2d(c, 2 * c, 1), nn.Conv2d(2 * c, c, 1)
        self.deep = nn.Conv2d(2 * c, 2 * c, 3, padding=1, groups=2 * c)
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in (2 * c, 2 * c, c))

    def forward(self, x: Tensor) -> Tensor:
        h = F.silu(self.norms[0](self.up(x)))
        h = F.silu(self.norms[1](self.deep(h)))
        return x + F.dropout(self.norms[2](self.down(h)), 0.1)


def transformer() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(Layer(), Layer()), randn(4, 64, 32)


def layer() -> tuple[nn.Module, Tensor]:
    return Layer(), randn(4, 64, 32)


def convolutions() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(Block(), Block()), randn(4, 16, 48, 48)


NETS = pytest.mark.parametrize("make", [transformer, convolutions])


def step(
    make: Callable[[], tuple[nn.Module, Tensor]], budget: float | None, dynamic: bool = False
) -> tuple[int, list[Tensor]]:
    """Bytes that the step saves, each memory once and without its arguments; its gradients."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    net, x = make()
    options: dict[str, Any] = {"memory_budget": budget, "verify": True}
    run = torch.compile(net, backend="lenz", dynamic=dynamic, options=options)
    saved: dict[int, int] = {}

    def seen(t: Tensor) -> Tensor:
        saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(seen, lambda t: t):
        y = run(x)
    y.square().mean().backward()
    held = {t.untyped_storage().data_ptr() for t in (*net.parameters(), *net.buffers(), x)}
    gradients = [p.grad for p in net.parameters() if p.grad is not None]
    return sum(n for place, n in saved.items() if place not in held), gradients


@pytest.mark.rest
@NETS
def test_ten_budgets_are_kept_and_change_no_gradient(
    make: Callable[[], tuple[nn.Module, Tensor]],
) -> None:
    usual, want = step(make, None)
    last = usual
    for budget in BUDGETS:
        saved, got = step(make, budget)
        assert saved <= 1.05 * budget * usual, f"{saved} of {usual} bytes for {budget}"
        assert saved <= last, f"a smaller budget saves more: {last} and {saved} for {budget}"
        torch.testing.assert_close(got, want)
        last = saved
    assert last > 0, "masks are drawn once"


@pytest.mark.one_in(2)
@NETS
def test_a_budget_in_bytes(make: Callable[[], tuple[nn.Module, Tensor]]) -> None:
    usual, want = step(make, None)
    assert step(make, 100 * usual)[0] == usual
    saved, got = step(make, usual // 3)
    assert usual // 10 < saved <= usual // 3
    torch.testing.assert_close(got, want)


def test_a_budget_of_dynamic_sizes_is_for_those_of_the_first_call() -> None:
    usual, want = step(layer, None, dynamic=True)
    saved, got = step(layer, 0.4, dynamic=True)
    assert 0.1 * usual < saved <= 0.42 * usual
    torch.testing.assert_close(got, want)


def test_dropout_of_halves_has_the_same_bits_when_it_is_computed_again() -> None:
    def run(budget: float | None) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        x, w = (randn(s, dtype=torch.bfloat16, requires_grad=True) for s in ((64, 64), (64, 64)))

        options: dict[str, Any] = {"memory_budget": budget}

        @torch.compile(backend="lenz", options=options)
        def f(x: Tensor, w: Tensor) -> Tensor:
            return F.dropout((x @ w).tanh(), 0.3) @ w

        torch.manual_seed(1)
        y = f(x, w)
        return (y, *torch.autograd.grad(y.float().square().sum(), (x, w)))

    for got, want in zip(run(0.5), run(None), strict=True):
        assert torch.equal(got, want)
