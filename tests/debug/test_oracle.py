"""`verify="kernels"`: faults that are planted are named, and right programs pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import lenz.pipeline
from lenz.debug.between import between
from lenz.debug.oracle import CALLS, Oracle, copies
from lenz.debug.watch import Watched
from lenz.errors import InternalError
from lenz.ir.dtype import I64
from lenz.ir.expr import Expr, rebuild
from lenz.ir.interp_kernel import interp_kernel
from lenz.ir.kernel import For, Kernel, Launch, Param, Schedule, map_bodies
from lenz.ir.op import MASKED
from lenz.ir.plan import Alloc, Input, LaunchStep, Plan
from lenz.ir.syntax import map_values
from lenz.ir.tensor import TensorType, contiguous
from lenz.sym import Int


def run(f: Callable[..., Any], *args: Tensor, **options: Any) -> Any:
    torch.compiler.reset()
    options = {"verify": "kernels", "cache": False, **options}
    return torch.compile(f, backend="lenz", options=options)(*args)


def compile_as(monkeypatch: pytest.MonkeyPatch, change: Callable[[Kernel], Kernel]) -> None:
    """Compile other kernels than the schedule has."""
    real: Any = vars(lenz.pipeline)["assemble"]

    def planted(kernels: Mapping[str, tuple[Kernel, str]], cx: Any) -> Any:
        return real({n: (change(k), d) for n, (k, d) in kernels.items()}, cx)

    monkeypatch.setattr(lenz.pipeline, "assemble", planted)


def plan_as(monkeypatch: pytest.MonkeyPatch, change: Callable[[Plan], Plan]) -> None:
    """Run the launches of a graph in another way than they were planned."""
    real: Any = vars(lenz.pipeline)["build_plan"]
    monkeypatch.setattr(lenz.pipeline, "build_plan", lambda *args: change(real(*args)))


X = torch.randn(37, 29)


def test_right_programs_pass_and_change_nothing() -> None:
    def f(x: Tensor, w: Tensor, i: Tensor) -> Any:
        x.mul_(2)
        picked = torch.zeros(37, 29).scatter_add(0, i, x)
        return torch.softmax(x @ w, -1), functional.pad(x, (1, 2)).exp(), picked, x.argmax(1), x.T

    w, i = torch.randn(29, 29), torch.randint(0, 37, (37, 29))
    x, y = X.clone(), X.clone()
    torch.testing.assert_close(run(f, x, w, i), f(y, w, i))
    assert torch.equal(x, y)


def test_training_with_random_numbers_passes() -> None:
    net = torch.nn.Sequential(
        torch.nn.Linear(29, 16), torch.nn.LayerNorm(16), torch.nn.Dropout(0.5)
    )
    state = torch.random.get_rng_state()
    run(lambda x: functional.gelu(net(x)), X).sum().backward()
    assert net[0].weight.grad is not None
    assert not torch.equal(state, torch.random.get_rng_state()), "dropout draws once, as always"


def test_a_result_that_is_all_rounding_passes() -> None:
    """The gradient is zero in exact numbers: each way to round makes another one."""
    layer = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64))
    x = torch.randn(32, 64, requires_grad=True)
    run(layer, x).sum().backward()
    assert x.grad is not None and float(x.grad.abs().max()) < 1e-5


def test_a_wrong_tail_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def shorter(s: Any) -> Any:
        if isinstance(s, For) and s.axis.extent == Int(37 * 29):
            s = replace(s, axis=replace(s.axis, extent=Int(37 * 29 - 1)))
        return map_bodies(s, lambda body: tuple(map(shorter, body)))

    compile_as(monkeypatch, lambda k: replace(k, body=tuple(map(shorter, k.body))))
    with pytest.raises(InternalError, match=r"kernel fused_\w+ of graph0.* element 1072 is"):
        run(lambda x: (x.sin() + 1).relu().exp(), X)


def test_an_index_out_of_range_under_a_lost_mask_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def bare(e: Expr) -> Expr:
        args = tuple(map(bare, e.args))
        return args[1] if e.op is MASKED else rebuild(e, args)

    seen: list[str] = []

    def unmasked(k: Kernel) -> Kernel:
        def change(s: Any) -> Any:
            s = map_values(s, bare)
            return map_bodies(s, lambda body: tuple(map(change, body)))

        made = replace(k, body=tuple(map(change, k.body)))
        seen.extend([k.name] * (made != k))
        return made

    compile_as(monkeypatch, unmasked)
    with pytest.raises(InternalError, match=r"kernel \w+ of graph0.* than the interpreter"):
        run(lambda x: functional.avg_pool1d(x, 5, 1, 2), torch.randn(1, 1, 29))
    assert seen, "the kernel has a mask that was lost"


def test_a_write_outside_of_the_result_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def longer(s: Any) -> Any:
        if isinstance(s, For) and s.axis.extent == Int(37 * 29):
            s = replace(s, axis=replace(s.axis, extent=Int(37 * 29 + 3)))
        return map_bodies(s, lambda body: tuple(map(longer, body)))

    compile_as(monkeypatch, lambda k: replace(k, body=tuple(map(longer, k.body))))
    with pytest.raises(InternalError, match=r"kernel fused_\w+ .* writes outside of its memory"):
        run(lambda x: (x.sin() + 1).relu().exp(), X)


def test_a_workspace_that_is_not_zeroed_is_named() -> None:
    k = Kernel("scan_0", "split_scan", (Param("a0", I64, Int(4), "work"),), (), ())
    kind = TensorType(I64, "cpu", contiguous((Int(4),)))
    steps = (Alloc("w", kind), LaunchStep("scan_0", ("w",), ()))
    program: Any = SimpleNamespace(
        name="graph0.inference", nodes=[SimpleNamespace(target=print)], placeholders=()
    )
    g: Any = None
    plan = Plan("graph0.inference", (), (), steps, (), ("scan_0",))
    calls: list[Any] = []
    functions = {"scan_0": lambda *pointers: calls.append(pointers)}
    watched = Watched(program, plan, Schedule(g, (Launch(k, ("w",)),)), functions)
    # Memory that the plan zeroes is not shown as new.
    zeroed = replace(steps[0], zero=True)
    assert "watch.made(0, w)" in between(0, steps[0], ["w = 1"], str)
    assert between(0, zeroed, ["w = 1", "w.zero_()"], str) == ["w = 1", "w.zero_()"]
    oracle, w = Oracle(watched), torch.zeros(4, dtype=torch.int64)
    oracle.begin([])
    oracle.before(1, (w,))
    assert len(calls) == 1
    oracle.made(0, w)
    with pytest.raises(InternalError, match=r"kernel scan_0 of graph0.* is not zero at the launch"):
        oracle.before(1, (w,))


def test_arguments_that_share_memory_are_copied_together() -> None:
    x = torch.arange(12.0)
    a, b, n, text = copies([x, x[2:].view(2, 5).t(), torch._neg_view(x), "text"])
    assert torch.equal(a, x) and torch.equal(b, x[2:].view(2, 5).t()) and text == "text"
    assert torch.equal(n, -x)
    a.zero_()
    assert not b.any() and x.any(), "of each other and not of the original"


def test_only_the_first_calls_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def counted(k: Kernel, *rest: Any) -> None:
        seen.append(k.name)
        real(k, *rest)

    real = interp_kernel
    monkeypatch.setattr("lenz.debug.oracle.interp_kernel", counted)
    torch.compiler.reset()
    compiled = torch.compile(torch.sin, backend="lenz", options={"verify": "kernels"})
    for _ in range(CALLS + 2):
        compiled(X)
    assert len(seen) == CALLS


def written(p: Plan) -> str:
    (name,) = [i.name for i in p.inputs if isinstance(i, Input) and i.written]
    return name


def test_a_lost_mutation_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def elsewhere(p: Plan) -> Plan:
        name, steps = written(p), list[Any]()
        (kind,) = [i.type for i in p.inputs if isinstance(i, Input) and i.name == name]
        for s in p.steps:
            if isinstance(s, LaunchStep) and s.args[-1] == name:
                steps.append(Alloc("lost", kind))
                s = replace(s, args=(*s.args[:-1], "lost"))
            steps.append(s)
        assert len(steps) == len(p.steps) + 1
        return replace(p, steps=tuple(steps))

    def f(x: Tensor) -> Tensor:
        y = x.sum()
        x.mul_(2)
        return y

    plan_as(monkeypatch, elsewhere)
    with pytest.raises(InternalError, match=r"x of graph0.* is not eager's.*a lost write"):
        run(f, X.clone(), fuse=False)


def test_a_read_of_a_view_after_the_write_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def swapped(p: Plan) -> Plan:
        name, steps = written(p), list(p.steps)
        launches = [k for k, s in enumerate(steps) if isinstance(s, LaunchStep)]
        (last,) = [k for k in launches if name == steps[k].args[-1]]  # type: ignore[union-attr]
        steps.insert(last, steps.pop(launches[0]))
        assert last != launches[0]
        return replace(p, steps=tuple(steps))

    def f(x: Tensor) -> Tensor:
        y = x[1:].sum()  # of the old values
        x.mul_(2)
        return y

    plan_as(monkeypatch, swapped)
    with pytest.raises(InternalError, match=r"result 0 of graph0.* a lost write or the order"):
        run(f, X.clone(), fuse=False)
