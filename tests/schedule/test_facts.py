"""What sizes are taken to be by the first call's, and calls that break it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lenz.api import _run_of as run_of
from lenz.frontend import FxProgram, assuming, kept
from lenz.frontend.capture import capture
from lenz.frontend.program import Fact
from lenz.ir.kernel import Launch
from lenz.ir.printer import show
from lenz.ir.reader import read
from lenz.ir.verify import verify
from lenz.lower import lower, native_ops
from lenz.machine.cuda.triton.kernel import emit
from lenz.opt import PASSES
from lenz.options import Options
from lenz.pipeline import named
from lenz.plan.build import build
from lenz.recall import context
from lenz.schedule import schedule
from tests.cuda import Fake, cuda_program, fake_cuda, programs_of
from tests.gpu_oracle import assert_kernels, gpu_context, kernels_of, scheduled


def softmax(x: Tensor) -> Tensor:
    return F.softmax(x, -1)


def rows_and_columns(rows: int, columns: int) -> FxProgram:
    with fake_cuda():
        x = Fake((rows, columns)).make()
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(x, 1)
        (p,) = programs_of(softmax, x)
    return p


def planned(p: FxProgram) -> tuple[Any, Any]:
    """The plan and the only kernel of a program for a GPU."""
    cx = gpu_context()
    g = lower(p, gpu_context())
    for run in PASSES.values():
        g = run(g, cx)
    s = named(schedule(g, cx))
    (step,) = [x for x in s.steps if isinstance(x, Launch)]
    return build(s, cx), step.kernel


def test_facts_are_those_of_the_first_call() -> None:
    facts = list(rows_and_columns(1024, 500).facts.values())
    assert sorted(f.multiple for f in facts) == [4, 8]
    assert all(f.most is not None and f.most >= 512 for f in facts)
    short = rows_and_columns(1022, 60).facts.values()
    assert sorted(f.multiple for f in short) == [1, 2], "a batch of 60 may be one of 61 next"
    assert not cuda_program(softmax, (1024, 500)).facts, "static sizes need none"
    p = rows_and_columns(1 << 16, 1 << 15)
    assert not p.env.most, "2**31 elements: no index of 32 bits"


def test_a_kernel_for_such_sizes_has_short_indices_and_aligned_rows() -> None:
    p = rows_and_columns(1024, 4096)
    plan, kernel = planned(p)
    text = emit(kernel, 90)
    assert "i32" in text.signature and "i64" not in text.signature
    assert "by8" in text.text and "tl.int64" not in text.text
    assert read(show(plan)) == plan and read(show(kernel)) == kernel
    general, wide = planned(assuming(p, {}))
    assert "i64" in emit(wide, 90).signature
    assert plan.most and not general.most


def test_a_size_that_checks_hold_low_stays_low() -> None:
    """A size of 4 or 5, and by the facts at most 512: all of its elements are lanes once."""

    def turned_parts(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.flip(0) + 0, torch.split(y, 2, 1)[0] + 1

    with fake_cuda():
        x, y = Fake((5, 5, 5)).make(), Fake((1, 5)).make()
        (p,) = programs_of(turned_parts, x, y, dynamic=True)
    cx = gpu_context()
    g = lower(p, gpu_context())
    for run in PASSES.values():
        g = run(g, cx)
    s = schedule(g, cx)
    ends = {v.name: v.hi for v in g.env.ranges}
    assert 5 in ends.values() and all(end > 5 for _, end in g.env.most)
    assert kernels_of(s) and all(v.hi == ends[v.name] for k in kernels_of(s) for v in k.sizes)
    verify(s)


Capture = Callable[[Any, Sequence[Any]], Any]


def compiled(fn: Callable[..., Any], facts: Fact, told: list[FxProgram]) -> Callable[..., Any]:
    """fn on a CPU, where lenz itself takes nothing to be so, with this fact of every size."""
    options = Options(cache=False)

    def compile_fx(p: FxProgram) -> Any:
        told.append(p)
        given = assuming(p, {b.symbol: facts for b in p.symbols.bindings})
        return run_of(given, context(options))

    def backend(gm: Any, inputs: Sequence[Any]) -> Any:
        return capture(gm, inputs, compile_fx, options, native_ops())

    return torch.compile(fn, backend=backend, dynamic=True)


@pytest.mark.parametrize("broken", [17, 128, 129])
def test_a_call_that_breaks_a_fact_has_a_graph_without_it(broken: int) -> None:
    told: list[FxProgram] = []
    fn = compiled(lambda x, y: (x + 1) * y[: x.shape[0]], Fact(8, 64), told)
    for n in (16, 64, broken, 8, broken, 3 * broken):
        x, y = torch.randn(n, 3), torch.randn(n + 8, 1)
        torch.testing.assert_close(fn(x, y), (x + 1) * y[:n])
    assert len(told) == 1, "no guard was added"


def test_what_holds_is_kept() -> None:
    p = rows_and_columns(1024, 4096)
    (rows, _), (columns, _) = p.facts.items()
    most = p.facts[rows].most
    assert most is not None
    x = torch.empty(1, 1).expand(1027, 8 * most)
    sizes = {rows: 1027, columns: 8 * most}
    args = [sizes[b.symbol] for b in p.symbols.bindings] + [x]
    left = kept(p, args)
    assert left == {
        rows: replace(p.facts[rows], multiple=1),
        columns: Fact(
            8, p.facts[columns].most if 8 * most <= (p.facts[columns].most or 0) else None
        ),
    }


@pytest.mark.slow
def test_kernels_with_ends_of_sizes_do_what_their_graph_does() -> None:
    """A scan by parts has a workspace whose size depends on those of the call."""

    def fn(x: Tensor) -> Tensor:
        return x.cumsum(-1) - x.sum(0)

    with fake_cuda():
        x = Fake((3, 24), torch.int64).make()
        torch._dynamo.mark_dynamic(x, 1)
        (p,) = programs_of(fn, x)
    g = lower(p, gpu_context())
    s = scheduled(g)
    assert any(k.kind == "split_scan" for k in kernels_of(s))
    for n in (24, 3000):
        assert_kernels(s, g, given=(n, torch.randint(-9, 9, (3, n))))
