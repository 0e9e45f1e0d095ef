"""Triton kernels of the user's own: what they write is stated, and copied where it has to be."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.interpreter import InterpretedFunction

from lenz.frontend import FxProgram
from lenz.ir.graph import Extern, Graph, Pointwise
from lenz.ir.interp import interp, interp_schedule
from lenz.ir.kernel import Launch
from lenz.ir.plan import CallStep, Free, LaunchStep, Plan
from lenz.ir.tensor import Buffer
from lenz.ir.verify import verify
from lenz.lower import lower
from lenz.pipeline import named
from lenz.plan.build import build
from lenz.plan.python import source
from lenz.runtime.executor import resolve
from lenz.runtime.user_kernel import user_kernel
from tests import user_kernels as programs
from tests.cuda import CX, Fake, cuda_program, cuda_programs
from tests.gpu_oracle import gpu_context, scheduled
from tests.oracle import roundtrip
from tests.user_kernels import PROGRAMS, Program

CALL = "lenz.user_kernel"


@pytest.fixture(autouse=True)
def tracing() -> Iterator[None]:
    with programs.triton_there():
        yield


def captured(p: Program, dynamic: bool = False) -> FxProgram:
    return cuda_program(p.fn, *[Fake((300,), torch.float32)] * p.count, dynamic=dynamic)


def lowered(p: FxProgram) -> Graph:
    return roundtrip(lower(p, CX))


def calls(g: Graph) -> list[Extern]:
    return [n for n in g.nodes if isinstance(n, Extern) and n.op == CALL]


def program(fn: Any) -> Program:
    return next(p for p in PROGRAMS if p.fn is fn)


def plan_of(fn: Any) -> Plan:
    s = named(scheduled(lowered(captured(program(fn)))))
    plan = build(s, gpu_context())
    verify(plan)
    return plan


def on_cpu(n: Extern, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call: kernels by Triton's interpreter, autotuners by their first choice; NaN for empty."""
    if n.op != CALL:
        return resolve(n.op)(*args, **{**kwargs, "device": "cpu"}).fill_(float("nan"))
    (kernel, constants), grids, *rest = args
    for config in getattr(kernel, "configs", [])[:1]:
        constants, kernel = {**constants, **config.kwargs}, kernel.fn
    return user_kernel((InterpretedFunction(kernel.fn), constants), grids[:1], *rest)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dynamic", (False, True), ids=("static", "dynamic"))
@pytest.mark.parametrize("p", PROGRAMS, ids=str)
def test_programs(p: Program, dynamic: bool) -> None:
    fx = captured(p, dynamic)
    g = lowered(fx)
    assert calls(g) and {n.reason for n in g.nodes if isinstance(n, Extern)} == {"library"}
    copied = [n for n in g.nodes if isinstance(n, Pointwise) and n.out.name.endswith("_copy")]
    assert len(copied) == p.copies
    s = scheduled(g)
    assert sum(isinstance(step, Launch) for step in s.steps) <= p.kernels
    torch.manual_seed(0)
    tensors = [torch.randn(300) for _ in range(p.count)]
    rest = iter(tensors)
    args = [next(rest) if isinstance(b, Buffer) else 300 for b in g.inputs]
    for r in (
        interp(g, args, call=on_cpu, objects=fx.modules),
        interp_schedule(s, args, call=on_cpu, objects=fx.modules),
    ):
        after = [t for t in r.inputs if isinstance(t, torch.Tensor)]
        wanted = p.wanted(*tensors)
        # AOTAutograd gives a mutated argument that is returned by itself.
        results = wanted[: -len(after)][-len(r.outputs) :]
        torch.testing.assert_close((*r.outputs, *after), (*results, *wanted[-len(after) :]))


def test_an_argument_is_written_in_place_by_one_kernel_after_the_other() -> None:
    g = lowered(captured(program(programs.in_place)))
    assert [n.mutates for n in calls(g)] == [("arg0_1",), ("scale_kernel_0",)] and not g.mutations
    steps = plan_of(programs.in_place).steps
    kinds = [type(s) for s in steps if isinstance(s, (CallStep, LaunchStep))]
    assert kinds == [CallStep, CallStep, LaunchStep], "the only loop is the sum"


def test_memory_asked_for_empty_is_not_filled_and_freed_in_time() -> None:
    plan = plan_of(programs.surrounded)
    (made, call) = [s for s in plan.steps if isinstance(s, CallStep)]
    assert (made.op, call.op) == ("aten.empty_strided.default", CALL)
    freed = [s.name for s in plan.steps if isinstance(s, Free)]
    assert {str(made.outs[0]), str(call.outs[0])} <= set(freed)
    lines = source(plan).splitlines()
    (line,) = [x.strip() for x in lines if "lenz_user_kernel(" in x]
    assert line.startswith("add_kernel_0, = lenz_user_kernel(obj_add_kernel_0, [[3, 1, 1]], ['x', ")
    assert "obj_add_kernel_0 = None  # object" in lines


def test_a_tensor_that_is_needed_afterwards_is_copied() -> None:
    g = lowered(captured(program(programs.argument_kept)))
    assert [n.mutates for n in calls(g)] == [("arg0_1_copy",)]
    steps = plan_of(programs.argument_kept).steps
    kinds = [type(s) for s in steps if isinstance(s, (CallStep, LaunchStep))]
    assert kinds == [LaunchStep, CallStep, LaunchStep]


def test_results_of_calls_that_write_our_own_memory_are_aligned() -> None:
    steps = scheduled(lowered(captured(program(programs.surrounded)))).steps
    last = [s for s in steps if isinstance(s, Launch)][-1]
    assert last.args[0] == "add_kernel_0" and last.kernel.params[0].aligned


@pytest.mark.slow
def test_kernels_in_both_halves_of_a_training_step() -> None:
    fn = lambda x, y: programs.Sum.apply(x.sin(), y * 2).cos()
    forward, backward = cuda_programs(fn, (300,), (300,), dtype=torch.float32, grad=True)
    assert (forward.kind, backward.kind) == ("forward", "backward")
    (made,) = calls(lowered(forward))
    assert made.mutates == ("empty_like",)
    names = [n.mutates[0] for n in calls(lowered(backward))]
    assert len(names) == 2 and names[1] == "add_kernel_0", "scaled where the sum was made"


def test_kernels_are_bound_when_the_graph_is_made() -> None:
    fx = captured(program(programs.surrounded))
    torch._dynamo.reset()  # empties torch's table of kernels
    kernel, constants = fx.modules["add_kernel_0"]
    assert kernel is programs.add_kernel and constants["BLOCK"] == 128
    assert len(calls(lowered(fx))) == 1


def test_a_launch_passes_positions_then_keywords_and_picks_the_grid() -> None:
    seen: list[Any] = []

    class Kernel:
        arg_names = ("x", "n", "BLOCK")
        configs = tuple(SimpleNamespace(kwargs={"BLOCK": size}) for size in (64, 128))

        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **kwargs: seen.append((grid, args, kwargs))

    x = torch.ones(3)
    names, values = ["n", "x"], [3, x]
    (got,) = user_kernel(
        (Kernel(), {"num_warps": 2}), [[5, 1, 1], [3, 1, 1]], names, values, [1], []
    )
    ((grid, args, kwargs),) = seen
    assert got is x and args == (x, 3) and kwargs == {"num_warps": 2}
    assert grid({"BLOCK": 128}) == (3, 1, 1) and grid({"BLOCK": 64}) == (5, 1, 1)
    with pytest.raises(ValueError, match="no configuration"):
        grid({"BLOCK": 1})
