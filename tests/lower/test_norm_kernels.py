"""Kernels of the gradients of norms on a GPU: how often they read their large inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lenz.frontend import FxProgram
from lenz.ir.expr import loads_of
from lenz.ir.graph import Graph
from lenz.ir.kernel import For, Kernel, exprs_of, walk
from lenz.ir.printer import show
from lenz.lower import lower
from lenz.sym import Int
from tests.cuda import CX, Fake, fake_cuda, programs_of
from tests.gpu_oracle import assert_triton, kernels_of, scheduled

F32 = torch.float32


def backward(fn: Callable[..., Tensor], x: Fake, *args: Fake, last: bool = False) -> Graph:
    """The graph of the gradients of fn(x, *args)."""
    with fake_cuda():
        made = x.make().detach()
        if last:
            made = made.to(memory_format=torch.channels_last)
        found = programs_of(fn, made.requires_grad_(), *[a.make() for a in args])
    p: FxProgram = found[1]
    return lower(p, CX)


def large(k: Kernel, elements: int) -> int:
    """Parameters of so many elements that a kernel reads."""
    read = {e.attrs[0] for e in loads_of(*exprs_of(k.body))}
    return sum(p.size is Int(elements) and p.name in read for p in k.params)


def batch_norm(x: Tensor, w: Tensor, c: Tensor) -> Tensor:
    return functional.batch_norm(x, None, None, w, c, training=True)


def group_norm(x: Tensor, w: Tensor, c: Tensor) -> Tensor:
    return functional.group_norm(x, 32, w, c)


def layer_norm(x: Tensor, w: Tensor, c: Tensor) -> Tensor:
    return functional.layer_norm(x, w.shape, w, c)


# The function, the shape of x, whether channels are last, and per kernel the large inputs it reads:
# the sums, what puts them together, and dx; for rows dx comes with their sums.
CASES: dict[str, tuple[Any, tuple[int, ...], bool, list[int]]] = {
    "batch": (batch_norm, (64, 256, 56, 56), False, [2, 2]),
    "batch, few channels": (batch_norm, (64, 64, 112, 112), False, [2, 0, 2]),
    "batch, channels last": (batch_norm, (64, 256, 56, 56), True, [2, 0, 2]),
    "group": (group_norm, (32, 256, 64, 64), False, [2, 0, 2, 0]),
    "layer": (layer_norm, (8192, 4096), False, [2, 0]),
    "layer, short rows": (layer_norm, (16384, 768), False, [2, 0]),
}


@pytest.mark.diagonal(2)
@pytest.mark.parametrize("name", CASES)
def test_large_inputs_are_read_twice(name: str) -> None:
    """sum(dy) and sum(dy * xhat) share one pass, in both parts where they are cut in two."""
    fn, shape, last, want = CASES[name]
    x = Fake(shape)
    width = shape[-1] if len(shape) == 2 else shape[1]
    kind = x.dtype if fn is group_norm else F32
    g = backward(fn, x, *[Fake((width,), kind, grad=True)] * 2, last=last)
    s = scheduled(g)
    elements = torch.Size(shape).numel()
    assert [large(k, elements) for k in kernels_of(s)] == want, show(s)
    for k in kernels_of(s):
        assert len([p for p in k.params if p.mode == "out"]) <= 3
        cut = [y for y in walk(k.body) if isinstance(y, For) and y.kind == "grid"]
        programs = torch.Size([y.axis.extent.hi or 0 for y in cut]).numel()
        assert not large(k, elements) or programs >= 256, f"{programs} programs:\n{show(s)}"


def test_indices_of_cut_sums_have_no_divisions() -> None:
    g = backward(
        batch_norm, Fake((64, 256, 56, 56)), *[Fake((256,), F32, grad=True)] * 2, last=True
    )
    first = kernels_of(scheduled(g))[0]
    assert "//" not in show(first) and "%" not in show(first).replace("%a", ""), show(first)


@pytest.mark.parametrize("name", ["batch", "group", "layer"])
def test_gradients_by_triton(name: str) -> None:
    """The same kernels of small inputs give what the graph gives."""
    small = {"batch": (6, 32, 5, 7), "group": (3, 64, 3, 5), "layer": (70, 40)}
    fn, shape = CASES[name][0], small[name]
    width = shape[-1] if len(shape) == 2 else shape[1]
    for last in (False, True)[: len(shape) // 2]:
        assert_triton(
            backward(fn, Fake(shape, F32), *[Fake((width,), F32, grad=True)] * 2, last=last)
        )
