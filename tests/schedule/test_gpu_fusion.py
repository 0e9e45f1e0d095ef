"""Which kernels a program becomes on a GPU: a launch and a trip to memory more is what costs there.

Programs are traced twice: with the sizes of a benchmark, where the schedule is read, and with small
ones, where Triton's interpreter runs it against the oracle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from gpu_oracle import assert_triton, kernels_of, on_gpu, scheduled
from harness import lowered
from torch import Tensor
from torch.nn import functional as F

from lenz.ir.kernel import Schedule
from lenz.ir.printer import show

BF16 = torch.bfloat16
Shape = tuple[int, ...]


def tensors(shapes: tuple[Shape, ...], dtype: torch.dtype = BF16) -> list[Tensor]:
    return [torch.empty(s, dtype=dtype) for s in shapes]


def schedule_of(fn: Callable[..., Any], *shapes: Shape, dtype: torch.dtype = BF16) -> Schedule:
    """The schedule of a function of tensors with these shapes."""
    return scheduled(on_gpu(lowered(fn, tensors(shapes, dtype))))


def assert_kernels(s: Schedule, count: int) -> None:
    names = [k.name for k in kernels_of(s)]
    assert len(names) == count, f"{names}\n{show(s)}"


def rms_rotary(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    h = x.float()
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)
    q = (h.to(x.dtype) * w).view(*x.shape[:-1], -1, cos.shape[-1])
    a, b = q.chunk(2, -1)
    return q * cos + torch.cat([-b, a], -1) * sin


def concat_pad(a: Tensor, b: Tensor) -> Tensor:
    return F.pad(torch.cat([a, b], -1), (64, 128))


def causal_softmax(x: Tensor) -> Tensor:
    n = x.shape[-1]
    kept = torch.ones(n, n, dtype=torch.bool, device=x.device).tril()
    return x.masked_fill(~kept, float("-inf")).softmax(-1)


def positions(x: Tensor) -> Tensor:
    at = torch.arange(x.shape[1], device=x.device)
    return x + torch.where(at % 2 == 0, 1.0, -1.0) / (at + 1)


def group_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.group_norm(x, 8, w, b)


def heads(x: Tensor, w: Tensor) -> Tensor:
    """A row's statistic, and consumers that see the row as heads."""
    y = F.layer_norm(x, x.shape[-1:])
    return y.view(*x.shape[:2], -1, w.shape[-1]) * w


def flip_of_row(x: Tensor) -> Tensor:
    y = x.softmax(-1)
    return y + y.flip(-1)


@dataclass(frozen=True, slots=True)
class Case:
    """A program with the shapes of its arguments, large and small, that is one kernel."""

    fn: Callable[..., Any]
    full: tuple[Shape, ...]
    tiny: tuple[Shape, ...]


ONE_KERNEL = [
    Case(
        rms_rotary,
        ((4, 2048, 4096), (4096,), (2048, 1, 128), (2048, 1, 128)),
        ((2, 5, 48), (48,), (5, 1, 16), (5, 1, 16)),
    ),
    Case(concat_pad, ((8192, 3000), (8192, 5000)), ((5, 30), (5, 50))),
    Case(causal_softmax, ((32, 2048, 2048),), ((2, 24, 24),)),
    Case(positions, ((64, 50000),), ((3, 70),)),
    Case(group_norm, ((32, 256, 32, 32), (256,), (256,)), ((2, 24, 5, 3), (24,), (24,))),
    Case(heads, ((8, 512, 768), (64,)), ((2, 3, 24), (8,))),
    Case(flip_of_row, ((4096, 4096),), ((7, 33),)),
]


@pytest.mark.parametrize("case", ONE_KERNEL, ids=[c.fn.__name__ for c in ONE_KERNEL])
def test_one_kernel(case: Case) -> None:
    assert_kernels(schedule_of(case.fn, *case.full), 1)


@pytest.mark.parametrize("case", ONE_KERNEL, ids=[c.fn.__name__ for c in ONE_KERNEL])
def test_values(case: Case) -> None:
    assert_kernels(assert_triton(lowered(case.fn, tensors(case.tiny))), 1)
