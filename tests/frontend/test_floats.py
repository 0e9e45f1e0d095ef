"""Floats of a program with dynamic shapes: which are constants, and how often it is traced."""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch._dynamo.convert_frame
import torch.nn.functional as F
from torch import Tensor, nn, randn

from lenz.frontend.capture import capture

Traces = tuple[list[int], list[int]]


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> Traces:
    """An item for each time that Dynamo traces a frame, and that AOTAutograd traces a graph."""
    frames, graphs = list[int](), list[int]()

    def counting(found: list[int], module: Any, name: str) -> None:
        original = getattr(module, name)

        def counted(*args: Any, **how: Any) -> Any:
            found.append(1)
            return original(*args, **how)

        monkeypatch.setattr(module, name, counted)

    counting(frames, torch._dynamo.convert_frame, "trace_frame")
    # The function hides the module of its name.
    counting(graphs, sys.modules[capture.__module__], "aot_module_simplified")
    return frames, graphs


class Scaled(nn.Module):
    """A layer with floats of all kinds: an epsilon, a bound, a slope and a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(8), nn.Linear(8, 8)
        self.low, self.slope, self.factor = -0.5, 0.2, 1.5

    def forward(self, x: Tensor) -> Tensor:
        y = self.mix(self.norm(x)).clamp(min=self.low)
        return F.leaky_relu(y, self.slope) * self.factor + y


def compiled(f: Callable[..., Any]) -> Any:
    return torch.compile(f, backend="lenz", dynamic=True, options={"cache": False})


def gradients(f: Callable[..., Any], model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    y = f(x)
    y.square().sum().backward()
    return [y, *(p.grad for p in model.parameters() if p.grad is not None)]


def test_floats_of_modules_are_no_arguments(traces: Traces) -> None:
    model, x = Scaled(), randn(5, 8)
    torch.testing.assert_close(compiled(model)(x), model(x))
    # Otherwise AOTAutograd traces the graph, and again without its floats.
    assert tuple(map(len, traces)) == (1, 1)


def test_floats_that_autograd_needs_are_dropped_from_the_graph(traces: Traces) -> None:
    model, x, numbers = Scaled(), randn(5, 8), (-0.5, 0.3)
    f = lambda x, low, slope: F.leaky_relu(model(x).clamp(min=low), slope)
    torch.testing.assert_close(compiled(f)(x, *numbers), f(x, *numbers))
    # Dynamo would begin again only to drop the bound and the slope.
    assert tuple(map(len, traces)) == (1, 2)


def test_a_float_of_a_module_that_changes_becomes_an_argument(traces: Traces) -> None:
    model, x = Scaled(), randn(5, 8)
    run = compiled(model)
    for factor in (1.5, 0.5, 0.25, 2.0):
        model.factor = factor
        torch.testing.assert_close(run(x), model(x))
    assert len(traces[0]) == 2


@pytest.mark.parametrize("name", ("low", "slope", "factor", "norm.eps"))
def test_a_float_that_changes_counts(name: str) -> None:
    model, x = Scaled(), randn(5, 8)
    run = compiled(model)
    run(x)
    *path, last = name.split(".")
    setattr(model.get_submodule(".".join(path)), last, 0.75)
    torch.testing.assert_close(gradients(run, model, x), gradients(model, model, x))
    torch.testing.assert_close(run(randn(3, 8).fill_(0.1)), model(randn(3, 8).fill_(0.1)))


def test_floats_among_the_arguments() -> None:
    def f(x: Tensor, low: float, high: float, by: float) -> tuple[Tensor, float]:
        return (x * by).clamp(low, high).add_(x, alpha=by), by * 2

    run = compiled(f)
    for k in range(6):
        x, numbers = randn(3 + k, 4), (-0.1 * k, 0.5 + k, 1.0 + 0.25 * (k % 3))
        torch.testing.assert_close(run(x, *numbers), f(x, *numbers))


def test_written_arguments_are_traced_as_they_are_given() -> None:
    """The first trace writes into its fake arguments, and may change their shapes."""

    def f(x: Tensor, slope: float) -> Tensor:
        x.mul_(2)
        return F.leaky_relu(x.t(), slope)

    ours, theirs = (randn(3, 4) for _ in range(2))
    theirs.copy_(ours)
    torch.testing.assert_close(compiled(f)(ours, 0.3), f(theirs, 0.3))
    assert (ours.shape, ours.stride()) == (theirs.shape, theirs.stride())
    torch.testing.assert_close(ours, theirs)


def test_a_copy_of_the_graph_makes_dynamo_begin_again(traces: Traces) -> None:
    from lenz.api import backend

    def copying(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        return backend(deepcopy(gm), inputs, options={"cache": False, "on_error": "raise"})

    model, x = Scaled(), randn(5, 8)
    run = torch.compile(model, backend=copying, dynamic=True)
    torch.testing.assert_close(gradients(run, model, x), gradients(model, model, x))
    assert len(traces[0]) > 1
