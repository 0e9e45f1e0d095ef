"""Independent short kernels share a launch; `assert_function` compares both schedules."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lenz
from lenz.errors import UserError
from lenz.ir.graph import Extern
from lenz.ir.kernel import Launch, Schedule, grids
from lenz.machine.cuda.triton.kernel import emit
from lenz.options import Options
from lenz.pipeline import named
from lenz.schedule.beside import ARGUMENTS, share_launches
from tests.gpu_oracle import assert_function, cubins, gpu_context


def joined(fn: Callable[..., Any], *inputs: Any, most: int = 8, dynamic: bool = False) -> Schedule:
    """The schedule of a function with its short kernels joined; its results are checked."""
    cx = gpu_context()
    cx = replace(cx, options=replace(cx.options, side_by_side=most))
    return share_launches(named(assert_function(fn, *inputs, dynamic=dynamic)), cx)


def launches(s: Schedule) -> list[int]:
    """How many kernels each launch runs."""
    return [len(grids(x.kernel)) for x in s.steps if isinstance(x, Launch)]


def on_lists(*xs: Tensor) -> tuple[Tensor, ...]:
    return torch._foreach_add(torch._foreach_mul(list(xs), 2.0), 1.5)


def four(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, ...]:
    return a * 2, b.sum(1), torch.sigmoid(c), F.softmax(d, -1)


FOUR = torch.randn(30, 40), torch.randn(70, 90), torch.randn(50), torch.randn(33, 100)


def test_lists_of_tensors_take_few_launches() -> None:
    """29 tensors of 1 to 29 elements: the ends of all but a few tiles are masked."""
    s = joined(on_lists, *[torch.randn(n) for n in range(1, 30)])
    assert launches(s) == [8, 8, 8, 5]
    assert all(x.kernel.kind == "combo" for x in s.steps if isinstance(x, Launch))
    assert all(len(b.code) > 0 for b in cubins(s))


def test_the_option_says_how_many() -> None:
    assert launches(joined(four, *FOUR)) == [4]
    assert launches(joined(four, *FOUR, most=2)) == [2, 2]
    assert launches(joined(four, *FOUR, most=1)) == [1, 1, 1, 1]


def by_kind(launches: Sequence[Launch]) -> list[list[Launch]]:
    """A user's groups: reductions apart from the rest."""
    rows = [x for x in launches if x.kernel.kind == "reduction"]
    return [rows, [x for x in launches if x not in rows]]


def reversed_by(launches: Sequence[Launch], size: int) -> list[list[Launch]]:
    """A user's groups of a size, the last one first."""
    assert len(launches) > 1, "there is nothing to divide"
    found = [*launches][::-1]
    return [found[i : i + size] for i in range(0, len(found), size)]


@pytest.mark.parametrize(
    ("groups", "made"),
    [
        ((by_kind,), [2, 2]),
        (((reversed_by, {"size": 3}),), [3, 1]),
        ((by_kind, (reversed_by, {"size": 1})), [1, 1, 1, 1]),
    ],
)
def test_users_divide_kernels_among_launches(groups: Any, made: list[int]) -> None:
    cx = gpu_context()
    options = Options.from_environment({"launch_groups": groups}, {})
    s = share_launches(named(assert_function(four, *FOUR)), replace(cx, options=options))
    assert launches(s) == made


def test_groups_of_users_hold_each_launch_once() -> None:
    def divided(how: Any) -> None:
        options = Options.from_environment({"launch_groups": how}, {})
        s = named(assert_function(four, *FOUR))
        share_launches(s, replace(gpu_context(), options=options))

    with pytest.raises(UserError, match=r"launch_groups: .*twice does not give each launch once"):
        divided([some_twice])
    with pytest.raises(UserError, match=r"option launch_groups: there is no .*:nobody"):
        divided([f"{__name__}:nobody"])


def some_twice(launches: Sequence[Launch]) -> list[list[Launch]]:
    return [[*launches], [*launches]]


def test_sizes_may_be_symbolic() -> None:
    s = joined(four, *FOUR, dynamic=True)
    (step,) = [x for x in s.steps if isinstance(x, Launch)]
    assert len(grids(step.kernel)) == 4 and step.kernel.sizes


def texts(s: Schedule) -> list[str]:
    return [emit(x.kernel).text for x in s.steps if isinstance(x, Launch)]


def bodies(s: Schedule) -> list[int]:
    """How many bodies the kernel of each launch has."""
    return [len(re.findall(r"^ +part", t, re.MULTILINE)) for t in texts(s)]


@pytest.mark.slow
def test_equal_kernels_are_one_body() -> None:
    def rows(*xs: Tensor) -> list[Tensor]:
        return [F.softmax(x, -1) for x in xs]

    s = joined(rows, *[torch.randn(2, 5) for _ in range(60)])  # each kernel has four
    assert launches(s) == [8, 7] and bodies(s) == [1, 1]


@pytest.fixture
def unfused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Independent loops are not fused."""
    cx = gpu_context()
    apart = replace(cx, options=replace(cx.options, horizontal=False))
    monkeypatch.setattr("tests.gpu_oracle.gpu_context", lambda *_: apart)


@pytest.mark.usefixtures("unfused")
@pytest.mark.parametrize("dynamic", (False, True))
def test_bodies_of_kernels_that_share_an_argument(dynamic: bool) -> None:
    def scaled(s: Tensor, *xs: Tensor) -> list[Tensor]:
        return [F.softmax(x * s, -1) for x in xs]

    s = joined(scaled, torch.randn(1), *[torch.randn(2, 5) for _ in range(24)], dynamic=dynamic)
    assert launches(s) == [8, 8, 8] and bodies(s) == [1, 1, 1]


@pytest.mark.usefixtures("unfused")
def test_a_body_has_pointers_of_one_type() -> None:
    """The text of a copy does not say what it copies."""

    def turned(*xs: Tensor) -> list[Tensor]:
        return [x.flip(0) for x in xs]

    kinds = torch.float32, torch.int32, torch.float64
    s = joined(turned, *[torch.arange(7).to(k) for k in kinds for _ in range(2)])
    assert launches(s) == [6] and bodies(s) == [3]
    assert [t.count("def part") for t in texts(s)] == [1]


@pytest.mark.slow
def test_a_body_runs_for_eight_kernels() -> None:
    """More pointers to choose from cost registers."""

    def rows(*xs: Tensor) -> list[Tensor]:
        return [F.softmax(x, -1) for x in xs]

    s = joined(rows, *[torch.randn(2, 5) for _ in range(100)], most=32)
    assert launches(s) == [25] and bodies(s) == [4]


@pytest.mark.slow
def test_kernels_of_other_sizes_have_one_body() -> None:
    """The body is told where its lanes end, in units of what divides all of them."""
    s = joined(on_lists, *[torch.randn(1000 + 16 * n) for n in range(10)], most=32)
    assert launches(s) == [10] and bodies(s) == [2]
    assert "< 8 * end0" in texts(s)[0]
    odd = joined(on_lists, *[torch.randn(1001 + 16 * n) for n in range(10)], most=32)
    assert bodies(odd) == [2] and "< 1 * end0" in texts(odd)[0]


@pytest.mark.slow
def test_a_launch_has_few_bodies_and_few_arguments() -> None:
    def added(*xs: Tensor) -> list[Tensor]:
        return [sum(xs[k : k + 30], xs[k].sin()) for k in range(0, len(xs), 30)]

    def scaled(*xs: Tensor) -> list[Tensor]:
        return [x.exp() * (n + 2) for n, x in enumerate(xs)]

    assert launches(joined(scaled, *[torch.randn(70 + n) for n in range(12)], most=32)) == [8, 4]
    s = joined(added, *[torch.randn(2, 3) for _ in range(600)], most=32)
    assert all(len(x.args) <= ARGUMENTS for x in s.steps if isinstance(x, Launch))
    assert sum(launches(s)) > len(launches(s)) > 1


def test_what_needs_another_kernel_comes_after_it() -> None:
    def chain(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        s = x.sum(0)  # of columns: no kernel over rows can hold it
        return s, F.softmax(x / s, -1), F.softmax(y, -1)

    s = joined(chain, torch.randn(300, 40), torch.randn(9, 50))
    assert launches(s) == [2, 1]


@pytest.mark.slow
@pytest.mark.usefixtures("unfused")
def test_kernels_that_need_others_wait_for_each_other() -> None:
    """Two kernels in a row, and twelve, which is more than the levels."""

    def updates(*xs: Tensor) -> list[Tensor]:
        return [F.softmax(x * x.sum(0), -1) for x in xs]

    def long(*xs: Tensor) -> list[Tensor]:
        for _ in range(6):
            xs = tuple([F.softmax(x * x.sum(0), -1) for x in xs])
        return list(xs)

    inputs = [torch.randn(40, 12) for _ in range(3)]
    assert launches(joined(updates, *inputs)) == [3, 3]
    assert launches(joined(long, *inputs)) == [3] * 12


@pytest.mark.usefixtures("unfused")
def test_what_waits_holds_little_memory_or_writes_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def counted(*xs: Tensor) -> None:
        for x, count in zip(xs[::2], xs[1::2], strict=True):
            x.mul_(count)
            count.add_(1)

    def updates(*xs: Tensor) -> list[Tensor]:
        return [F.softmax(x * x.sum(0), -1) for x in xs]

    monkeypatch.setattr("lenz.schedule.beside.NEWEST", 1000)
    arguments = [torch.randn(40, 12), torch.tensor(3.0)] * 3
    assert launches(joined(counted, *[x.clone() for x in arguments])) == [3, 3]
    rows = [torch.randn(40, 4) for _ in range(3)]  # the products are new: 640 bytes, as many read
    assert launches(joined(updates, *rows)) == [1, 2, 2, 1]
    monkeypatch.setattr("lenz.schedule.beside.NEWEST", 4000)
    assert launches(joined(updates, *rows)) == [3, 3]


def test_an_argument_changes_after_it_was_read_and_before_a_call_that_may_raise() -> None:
    def change(x: Tensor, y: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
        before = x.sum()
        x.add_(1)
        y.mul_(2)
        return before, torch.linalg.inv(m)

    x, y, m = torch.randn(700), torch.randn(30), torch.eye(3)
    s = named(assert_function(change, x, y, m))
    steps = share_launches(s, gpu_context()).steps
    kinds = [type(step).__name__ for step in steps]
    assert "Launch" not in kinds[kinds.index("Extern") :], kinds
    reads = next(k for k, step in enumerate(steps) if _uses(step, "in"))
    writes = next(k for k, step in enumerate(steps) if _uses(step, "inout"))
    assert reads < writes


def test_an_op_of_somebody_else_may_write_what_it_reads() -> None:
    def both(m: Tensor) -> tuple[Tensor, Tensor]:
        return torch.linalg.inv(m), m * 2

    s = named(assert_function(both, torch.eye(3)))
    kernel, call = sorted(s.steps, key=lambda step: not isinstance(step, Launch))[:2]
    assert isinstance(kernel, Launch) and isinstance(call, Extern)
    for op, first in ((call.op, call), ("mine.inverse.default", kernel)):
        steps = kernel, replace(call, op=op)
        kept = share_launches(replace(s, steps=steps), gpu_context()).steps
        assert (kept[0] == kernel) == (first is kernel), op


@pytest.mark.parametrize("sources", [(), ("x", "y"), ("y", "x")])
def test_a_result_may_share_the_memory_of_any_argument(sources: tuple[str, ...]) -> None:
    def changed(x: Tensor, y: Tensor, m: Tensor) -> Tensor:
        found = torch.mm(m, m)
        x.mul_(2)
        return found + y

    s = named(assert_function(changed, torch.randn(7), torch.randn(3), torch.eye(3)))
    names = {name[0]: a.name for name, a in zip("xym", s.graph.inputs, strict=True)}
    aliases = tuple((0, names[a]) for a in sources)
    steps = [replace(x, aliases=aliases) if isinstance(x, Extern) else x for x in s.steps]
    kept = share_launches(replace(s, steps=tuple(steps)), gpu_context())
    assert launches(kept) == ([1, 1] if sources else [2])


def _uses(step: object, mode: str) -> bool:
    """Whether a launch has the 700 elements of x as a parameter of this mode."""
    params = step.kernel.params if isinstance(step, Launch) else ()
    return any(p.mode == mode and str(p.size) == "700" for p in params)


@pytest.mark.slow
def test_large_kernels_are_launched_alone() -> None:
    """New memory of one that waits is alive for longer, and a launch costs it nothing."""

    def two(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x + 1, y * 2

    assert launches(joined(two, torch.randn(1 << 9, 513), torch.randn(1 << 9, 514))) == [1, 1]
    assert launches(joined(two, torch.randn(1 << 9, 511), torch.randn(1 << 9, 512))) == [2]


def test_large_updates_share_a_launch_if_they_hold_no_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def step(a: Tensor, da: Tensor, b: Tensor, db: Tensor) -> None:
        a.sub_(da)
        b.sub_(db)

    def step_and_gradient(a: Tensor, da: Tensor, b: Tensor, db: Tensor) -> None:
        step(a, torch.mm(da, da.t())[:, :12], b, torch.mm(db, db.t())[:, :12])

    monkeypatch.setattr("lenz.schedule.beside.LARGEST", 1000)
    large = [torch.randn(n, 12) for n in (40, 40, 50, 50)]
    assert launches(joined(step, *[x.clone() for x in large])) == [2]
    assert launches(joined(step_and_gradient, *[x.clone() for x in large])) == [1, 1]
    monkeypatch.setattr("lenz.schedule.beside.UPDATE", 1000)
    assert launches(joined(step, *[x.clone() for x in large])) == [1, 1]


@pytest.mark.parametrize("most", [1, 8])
def test_a_cpu_has_no_grids(most: int) -> None:
    report = lenz.explain(four, options={"side_by_side": most})(*FOUR)
    torch.testing.assert_close(report.result, four(*FOUR))
    assert {k.kind for g in report.graphs for k in g.kernels} == {"pointwise", "reduction"}
