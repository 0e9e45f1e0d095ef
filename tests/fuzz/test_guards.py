"""No load and no store of a compiled kernel touches memory outside of its buffers.

Every buffer of every kernel ends at a page that may not be touched, and then begins after one. The
sizes leave partial vectors of many lengths; masked loads stand for what lies outside of a tensor.
"""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lenz.ir.interp import interp_schedule
from lenz.ir.kernel import Launch
from lenz.options import Options
from lenz.pipeline import context, optimise
from lenz.schedule import schedule
from tests.fuzz.check import compare
from tests.fuzz.guarded import kernel_runner
from tests.lower.harness import _lower, lowered, trace

DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
SIZES = (1, 2, 3, 7, 15, 16, 17, 31, 33, 50, 65)


def joined(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Concatenations and paddings: masked loads on both sides of a buffer."""
    return (
        torch.cat([x, y], 1), torch.cat([x, y], 0), torch.cat([x[:1], y, x], 0),
        torch.stack([x, y, x], -1), torch.stack([x, y], 0), F.pad(x, (1, 2)),
        F.pad(x, (3, 0, 2, 1)), F.pad(x, (-1, 1, 0, -1)), F.pad(y, (0, 5), value=1), x.tril(-1),
        x.triu(1),
        torch.slice_scatter(x, y[:, :1], 1, 0, 1), torch.select_scatter(x, y[0], 0, -1),
        torch.diag_embed(x[0], 1), torch.diagonal_scatter(x, y.diagonal()),
    )  # fmt: skip


def moved(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Other orders and strides: backwards, apart, transposed, from an odd place on."""
    return (
        x.roll(1, 1), x.roll((-2, 1), (0, 1)), x.roll(3), x.flip(1).clone(), x.flip(0, 1).clone(),
        x[:, 1:].clone(), x[1:].reshape(-1), x[:, ::2].clone(), x[:, 1::3] & y[:, 1::3]
        if x.dtype is torch.bool else x[:, 1::3] + y[:, 1::3], x.t().clone(), x[:, -1:].clone(),
        x.unfold(1, 1, 2).clone(), x.repeat(2, 3), x.diagonal().clone(), y[:, :1].expand_as(x) == x,
        x.t().contiguous() == y.t(), x.reshape(-1)[1:].clone(), x.repeat_interleave(2, 1),
    )  # fmt: skip


def gathered(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Computed places, at both ends of a dimension."""
    rows, columns = x.shape
    ends = torch.cat([torch.arange(2) * (rows - 1), torch.arange(2) * (rows - 1) - rows])
    sides = torch.cat([torch.arange(2) * (columns - 1), torch.arange(1) - columns])
    at = (y != 0).long() * (columns - 1)
    return (
        x[ends], x[:, sides], x.gather(1, at),
        x.index_select(1, torch.arange(columns).flip(0)), x.take(sides),
        F.embedding(ends.clamp(min=0), x), x[ends[:3], sides],
        x.scatter(1, at, y), x.index_copy(0, ends[1:2], y[:1]), x.index_fill(1, ends[:1], 0),
        x.masked_fill(y != 0, 0), x.index_put((ends[2:3],), y[:1]),
    )  # fmt: skip


def reduced(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Reductions and scans, whose last vector is a partial one."""
    found = [x.amax(1), x.amin(0), x.any(1), x.all(0), (x == y).sum(1), (x != y).sum()]
    found += [x.argmax(1)] if x.dtype is not torch.bool else []
    if not x.is_floating_point() or x.dtype is torch.float64:
        found += [x.cumsum(1), x.flip(1).cumsum(1), x.sum(0), x.cumsum(0)]
    if x.is_floating_point():
        found += [x.softmax(1), x.softmax(0), F.layer_norm(x, x.shape[1:]), x.mean(0)]
    return tuple(found)


FAMILIES = {"joined": joined, "moved": moved, "gathered": gathered, "reduced": reduced}


def tensor(rows: int, columns: int, dtype: torch.dtype, at: int) -> torch.Tensor:
    """A tensor that begins `at` elements into its memory."""
    g = torch.Generator().manual_seed(columns)
    memory = torch.randint(0, 3, (at + rows * columns,), generator=g).to(dtype)
    return memory.as_strided((rows, columns), (columns, 1), at)


def run(fn: Any, x: torch.Tensor, y: torch.Tensor, dynamic: bool) -> int:
    """Run a function's kernels between forbidden pages, beside eager; how many were there."""
    g, constants = _lower(trace(fn, (x, y), dynamic), (x, y))
    cx = context(Options(cache=False))
    s = schedule(optimise(g, cx), cx)
    given = dict(zip((c.name for c in g.constants), constants, strict=True))
    kept = [given[c.name] for c in s.graph.constants]
    got = interp_schedule(s, [x, y], kept, run_kernel=kernel_runner(s))
    compare(got.outputs, fn(x, y), f"{fn.__name__} of {tuple(x.shape)} {x.dtype}")
    return sum(isinstance(step, Launch) for step in s.steps)


@pytest.mark.one_in(7)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_outside_is_touched(dtype: torch.dtype, family: str) -> None:
    """Rows of all lengths, aligned and not, for one type."""
    launches = 0
    turn = DTYPES.index(dtype)
    for k in range(3):
        columns = SIZES[(turn + 4 * k) % len(SIZES)]
        rows = SIZES[1 + (turn + k) % 4]
        x, y = tensor(rows, columns, dtype, k), tensor(rows, columns, dtype, 0)
        launches += run(FAMILIES[family], x, y, dynamic=k == 2 and family != "gathered")
    assert launches >= 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the crash has to be another process's")
def test_a_kernel_that_reads_too_far_is_killed() -> None:
    """The pages do forbid: a kernel whose parameter is said to be one element short crashes."""
    x, y = tensor(3, 17, torch.float32, 0), tensor(3, 17, torch.float32, 0)
    cx = context(Options(cache=False))
    s = schedule(optimise(lowered(lambda a, b: a + b, (x, y)), cx), cx)
    (step,) = s.steps
    assert isinstance(step, Launch)
    k = step.kernel
    short = replace(k, params=tuple(replace(p, size=p.size - 1) for p in k.params))
    s = replace(s, steps=(replace(step, kernel=short),))
    child = os.fork()
    if not child:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        interp_schedule(s, [x, y], run_kernel=kernel_runner(s))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV
