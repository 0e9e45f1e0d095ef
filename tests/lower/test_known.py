"""Gradients of upsampling: gathers where positions are known, and their values as in eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lenz import explain
from lenz.ir.graph import Graph, Scatter
from lenz.ir.interp import interp
from lenz.lower.known import Tap, taps_of
from tests.cuda import cuda_programs
from tests.gpu_oracle import assert_triton, lowered_there

KINDS: dict[str, dict[str, Any]] = {
    "nearest": {"scale_factor": 2},
    "thrice": {"scale_factor": 3},
    "exact": {"scale_factor": 2, "mode": "nearest-exact"},
    "bilinear": {"scale_factor": 2, "mode": "bilinear"},
    "down": {"scale_factor": 0.5, "mode": "nearest"},
    "copied": {"size": (5, 12), "mode": "nearest"},
}


def scatters(g: Graph) -> int:
    return sum(isinstance(n, Scatter) for n in g.nodes)


def gradient(x: Tensor, dy: Tensor, **options: Any) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(F.interpolate(x, **options), x, dy)[0]


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "down"])
def test_upsampling_on_gpus_has_no_scatter(kind: str) -> None:
    def fn(x: Tensor) -> Tensor:
        return F.interpolate(x, **KINDS[kind])

    x = torch.randn(2, 3, 5, 6)
    p = cuda_programs(fn, x.shape, grad=True, dtype=torch.float32)[-1]
    g = lowered_there(p)
    assert scatters(g) == 0, "the positions are known, and two or three apart"
    inputs = [torch.rand([int(str(s)) for s in b.shape]) for b in g.inputs]  # type: ignore[union-attr]  # sizes are known
    assert_triton(g, given=inputs)
    if len(inputs) == 1:  # the others also take the weights that forward has computed
        want = gradient(x, inputs[0], **KINDS[kind])
        torch.testing.assert_close(interp(g, inputs).outputs[0], want)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_upsampling_on_cpus(kind: str, layout: torch.memory_format) -> None:
    x = torch.randn(2, 3, 5, 6).to(memory_format=layout)
    dy = torch.randn(F.interpolate(x, **KINDS[kind]).shape).to(memory_format=layout)
    torch._dynamo.reset()

    def fn(x: Tensor) -> Tensor:
        return F.interpolate(x, **KINDS[kind])

    a = x.detach().requires_grad_()
    (got,) = torch.autograd.grad(torch.compile(fn, backend="lenz")(a), a, dy)
    torch.testing.assert_close(got, gradient(x, dy, **KINDS[kind]))


def test_positions_that_an_index_says_are_added_in_order_of_the_loop() -> None:
    def fn(x: Tensor, v: Tensor) -> Tensor:
        k = torch.arange(6) // 2
        return x.index_put((k,), v, accumulate=True)

    x, v = torch.randn(3, 5), torch.randn(5, 6).T
    torch.testing.assert_close(torch.compile(fn, backend="lenz")(x, v), fn(x, v))
    assert "scatter" not in {k.kind for k in explain(fn)(x, v).graphs[0].kernels}


def test_a_number_is_added_at_known_positions() -> None:
    def fn(x: Tensor, v: Tensor) -> Tensor:
        return x.index_put((torch.zeros(1, dtype=torch.int64),), v, accumulate=True)

    for shape in ((3,), (3, 5)):
        x, v = torch.randn(shape), torch.tensor(0.5)
        torch.testing.assert_close(torch.compile(fn, backend="lenz")(x, v), fn(x, v))


def test_taps() -> None:
    assert taps_of([0, 0, 1, 1, 2, 2], 3) == [Tap(0, 0, 2), Tap(1, 0, 2)]
    assert taps_of([0, 0, 0, 1, 1, 2], 3) == [Tap(0, 0, 0), Tap(1, 0, 2), Tap(2, 0, 1)]
    assert taps_of([0, 2], 4) is None, "every second one"
    assert taps_of([0, -1], 4) is None, "counts from the end"
    assert taps_of([0, 4], 4) is None, "outside"
    assert taps_of([0] * 9, 1) is None, "too many terms"
