"""Programs on the device from outside, in a process of its own: torch can have one such device.

python -m tests.outside.check, where the entry points are found that `test_outside.py` writes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo.testing
from torch import Tensor, nn
from torch.fx import GraphModule

import lenz
from lenz import keys, pipeline
from lenz.frontend import FxProgram
from tests.gpu.test_repros import adam, adam_args
from tests.outside.device import NAME, setup


def here(args: Sequence[Tensor]) -> list[Tensor]:
    return [t.to(NAME) for t in args]


def same(got: Any, want: Any) -> None:
    leaves = torch.utils._pytree.tree_leaves(got)
    assert all(t.device.type == NAME for t in leaves), leaves
    theirs = torch.utils._pytree.tree_leaves(want)
    assert [t.stride() for t in leaves] == [t.stride() for t in theirs]
    close = torch.testing.assert_close
    close([t.cpu() for t in leaves], theirs, rtol=1e-5, atol=1e-5, equal_nan=True)


def a1_adam_is_one_kernel_that_writes_its_arguments() -> None:
    theirs = adam_args(1003, "cpu")
    ours = here(theirs)
    places = [t.data_ptr() for t in ours]
    adam(*theirs)
    report = lenz.explain(adam)(*ours)
    assert report.result is None and [t.data_ptr() for t in ours] == places
    same(ours, theirs)
    (kernel,) = report.graphs[0].kernels
    assert len(kernel.stores) == 4
    assert not report.graphs[0].allocs and not report.graphs[0].externs


def c7_sorts_are_kernels() -> None:
    def f(x: Tensor) -> Any:
        down = torch.sort(x, dim=0, descending=True, stable=True)
        return (*torch.sort(x, dim=-1, stable=True), *down)

    x = torch.randint(0, 9, (6, 40)).float()
    x[0, 3], x[1, 5] = float("nan"), float("inf")
    report = lenz.explain(f)(*here([x]))
    same(report.result, f(x))
    assert not report.graphs[0].externs
    assert len(report.graphs[0].kernels) == 2, "values and indices of a sort are one kernel"


def d8_shapes_and_strides_that_change() -> None:
    f = lambda x, y: (x.t() + y).sum(0) * x.shape[0]
    counter = torch._dynamo.testing.CompileCounterWithBackend("lenz")
    run = torch.compile(f, backend=counter, fullgraph=True, dynamic=True)
    for n in (8, 9, 33):
        x, y = torch.randn(n, n), torch.randn(n, n)
        same(run(*here([x, y])), f(x, y))
    assert counter.frame_count == 1


def calls_and_training() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))
    x = torch.randn(4, 6)
    wanted = torch.autograd.grad(model(x).square().sum(), [*model.parameters()])
    model.to(NAME)
    loss = torch.compile(model, backend="lenz")(x.to(NAME)).square().sum()
    same(torch.autograd.grad(loss, [*model.parameters()]), wanted)


def a_graph_is_found_again() -> None:
    made: list[str] = []
    before = pipeline.compile_program

    def compiled(program: FxProgram, *rest: Any) -> Any:
        made.append(program.kind)
        return before(program, *rest)

    x = torch.randn(5, 7)
    f = lambda x: (x.exp() + 1).sum(-1)
    with (
        patch.object(pipeline, "compile_program", compiled),
        patch.object(keys, "sources", lambda again=False: "one version"),
    ):
        for _ in range(2):
            torch._dynamo.reset()
            same(torch.compile(f, backend="lenz")(x.to(NAME)), f(x))
    assert made == ["inference"]


def a_graph_in_fx() -> None:
    graphs: list[GraphModule] = []

    class Seen(lenz.FxBackend):
        def compile_graph(self, gm: GraphModule) -> Callable[..., Sequence[Any]]:
            graphs.append(gm)
            return gm

    x = torch.randn(5, 7)
    f = lambda x: x.softmax(-1).t()[1:]
    same(torch.compile(f, backend=Seen())(x.to(NAME)), f(x))
    (gm,) = graphs
    assert "torch.ops.lenz.launch" in gm.code


def a_failed_check_of_a_kernel_raises() -> None:
    run = torch.compile(lambda x, i: x[i], backend="lenz")
    x, i = here([torch.randn(4), torch.tensor([1, 3])])
    same(run(x, i), x.cpu()[i.cpu()])
    try:
        run(x, torch.tensor([1, 9]).to(NAME))
    except IndexError:
        return
    raise AssertionError("an index out of range was taken")


CHECKS: tuple[Callable[[], None], ...] = (
    a1_adam_is_one_kernel_that_writes_its_arguments,
    c7_sorts_are_kernels,
    d8_shapes_and_strides_that_change,
    calls_and_training,
    a_graph_is_found_again,
    a_graph_in_fx,
    a_failed_check_of_a_kernel_raises,
)

if __name__ == "__main__":
    setup()
    warnings.filterwarnings("error", "lenz runs")  # a graph in eager would show nothing
    for check in CHECKS:
        torch._dynamo.reset()
        torch.manual_seed(0)
        check()
        print(check.__name__)
