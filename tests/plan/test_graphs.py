"""What a CUDA graph replays of a plan, checked without a GPU."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lenz.frontend import FxProgram
from lenz.ir.graph import Ref
from lenz.ir.plan import Alloc, CallStep, Input, Keep, LaunchStep, Plan, Region
from lenz.ir.printer import show
from lenz.ir.reader import ReadError, read
from lenz.ir.verify import verify
from lenz.loading import op_of
from lenz.lower import lower
from lenz.machine.cpu.llvm.compile import compile_module
from lenz.pipeline import caller_facts, named, optimise
from lenz.plan import regions
from lenz.plan.build import build
from lenz.plan.graphs import GRAPH, Graphed, Replay, Uncaptured, graphed
from lenz.plan.native import native
from lenz.plan.native_frame import TorchLayout
from lenz.plan.native_link import callees
from lenz.plan.python import source
from lenz.schedule import schedule
from lenz.sym import Var, sym
from tests.cuda import Fake, cuda_programs
from tests.gpu_oracle import gpu_context as context

LAYOUT = TorchLayout(
    16, 8, 0, {"cpu": 0, "cuda": 1}, 0, 0, 0,
    lambda op: getattr(op_of(op), "_schema", None), lambda name: False,
)  # fmt: skip


def plan_of(p: FxProgram) -> Plan:
    cx = context()
    given = caller_facts(p, replace(cx.options, cuda_graphs="on"))
    return build(named(schedule(optimise(lower(p, cx), cx), cx)), cx, given)


def split(p: FxProgram) -> Graphed:
    return graphed(plan_of(p))


def only(p: FxProgram) -> Replay:
    """The one graph of a program."""
    g = split(p)
    (region,) = g.replays
    assert not g.outside
    return region


def step(x: Tensor, w: Tensor) -> Tensor:
    h = F.dropout(F.gelu(x @ w).softmax(-1), 0.5)
    return F.scaled_dot_product_attention(h, h, h).transpose(1, 2)[:, 1:]


def programs(fn: Callable[..., Any] = step, **how: Any) -> list[FxProgram]:
    return cuda_programs(fn, (2, 4, 64, 32), (32, 32), grad=True, **how)


@pytest.mark.parametrize("dynamic", (False, True))
def test_both_halves_of_a_training_step(dynamic: bool) -> None:
    """One launch replaces all of it; keys of random numbers are drawn before it."""
    for p in programs(dynamic=dynamic):
        g, region = split(p), only(p)
        launches = [s for s in g.plan.steps if isinstance(s, LaunchStep)]
        assert [s.kernel for s in launches] == [f"{GRAPH}0"] and launches[0].graph
        drawn = [s for s in g.plan.steps if isinstance(s, CallStep)]
        assert {s.op for s in drawn} <= {"lenz.seed", "lenz.seeds"}
        assert g.plan.outputs == plan_of(p).outputs
        if p.kind == "forward":
            assert drawn and len(region.kept) >= 3 and len(region.writes) == 1
            assert {s.name for s in g.plan.steps if isinstance(s, Keep)} == set(region.kept)
        else:
            assert not region.kept and len(region.writes) == 2 and region.pinned


def test_keys_are_drawn_together() -> None:
    def several(x: Tensor) -> Tensor:
        for _ in range(3):
            x = F.dropout(x @ x, 0.5)
        return x.sum(0)

    for grad in (False, True):
        forward = cuda_programs(several, (64, 64), grad=grad)[0]
        calls = [s for s in split(forward).plan.steps if isinstance(s, CallStep)]
        assert [(s.op, s.args[0]) for s in calls] == [("lenz.seeds", 3)]


def test_libraries_alone_are_captured() -> None:
    """Nothing that lenz allocates, and no kernel of it: the arguments tell which GPU it is."""

    def twice(q: Tensor) -> Tensor:
        once = F.scaled_dot_product_attention(q, q, q)
        return F.scaled_dot_product_attention(once, q, q)

    (p,) = cuda_programs(twice, (2, 4, 64, 32))
    assert len([s for s in plan_of(p).flat if isinstance(s, CallStep)]) == 2 and only(p).writes


def test_what_libraries_use_is_copied_or_pinned() -> None:
    forward, backward = map(only, programs())
    assert {"primals_1"} <= forward.copied, "a product takes it, and it is no parameter"
    assert not {*forward.copied, *backward.copied} & {*forward.pinned, *backward.pinned}
    (result,) = forward.writes
    assert result in forward.copied, "attention makes it"
    (g,) = [only(p) for p in cuda_programs(lambda x, w: (x.sin() @ w).sum(-1), (8, 8), (8, 8))]
    (result,) = g.writes
    assert result not in g.copied, "a kernel of lenz makes it"
    assert g.copied == {n for n in g.reads if n != g.reads[0]}, "the kernel takes x"


def test_regions_are_part_of_the_plan() -> None:
    """They print and read, and readers without graphs run their steps as those of the plan."""
    (made,) = cuda_programs(cut, (32, 32), (32, 32))
    p = plan_of(made)
    kinds = [(x.kind, x.why, x.device) for x in p.steps if isinstance(x, Region)]
    why = "aten.poisson.default draws random numbers"
    assert kinds == [("graph", "", "cuda:0"), ("outside", why, ""), ("graph", "", "cuda:0")]
    assert not any(isinstance(x, LaunchStep | CallStep) for x in p.steps)
    verify(p)
    text = show(p)
    assert read(text) == p and f'because "{why}" {{' in text
    assert source(p, comments=True) == source(replace(p, steps=p.flat), comments=True)
    for k, told in p.comments:
        assert isinstance(p.flat[k], LaunchStep | CallStep), told
    off = build(named(schedule(optimise(lower(made, context()), context()), context())), context())
    assert {*off.steps} >= {s for s in p.flat if isinstance(s, LaunchStep)}
    assert not any(isinstance(x, Region) for x in off.steps)


def test_a_region_has_no_region_inside() -> None:
    inner = "region graph { region graph { check } }"
    with pytest.raises(ReadError, match="a step"):
        read(f"plan @p() {{ {inner} }}")


def test_keys_are_drawn_before_the_region() -> None:
    forward, _ = map(plan_of, programs())
    kinds = [type(x).__name__ for x in forward.steps]
    assert kinds[-1] == "Region" and "CallStep" in kinds[:-1]
    before, inside = forward.steps[:-1], forward.flat[len(forward.steps) - 1 :]
    assert "key" in [x.draws for x in before if isinstance(x, CallStep)]
    assert "key" not in [x.draws for x in inside if isinstance(x, CallStep)]


@pytest.mark.parametrize("kernel", ["flash", "cudnn", "efficient"])
def test_numbers_drawn_by_attention(kernel: Any) -> None:
    """A graph draws them if their seed is in GPU memory; the key of a kernel is drawn before."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        h = F.dropout((x @ w).exp(), 0.5)
        return F.scaled_dot_product_attention(h, h, h, dropout_p=0.1).exp() @ w

    forward, backward = map(split, programs(fn, attention=kernel))
    calls = [s for s in forward.plan.steps if isinstance(s, CallStep | LaunchStep)]
    names = [s.op if isinstance(s, CallStep) else s.kernel for s in calls]
    if kernel == "efficient":
        assert "efficient_attention.default draws" in forward.outside[0] and backward.outside
        assert "lenz.renew" not in names
        return
    assert names == ["lenz.seed", "lenz.renew", f"{GRAPH}0"]
    assert [r.draws for g in (forward, backward) for r in g.replays] == [True, False]
    assert not forward.outside and not backward.outside
    assert ("op", "lenz.renew") in native(forward.plan, LAYOUT).objects


def test_inputs_say_what_of_them_stays_and_what_is_written() -> None:
    """A gradient that is given moves; what the forward half has kept does not."""

    def written(x: Tensor, w: Tensor) -> Tensor:
        return x.mul_(2) @ w

    forward, backward = map(plan_of, programs())
    assert not any(i.pinned for i in forward.inputs if isinstance(i, Input))
    stays = {i.name: i.pinned for i in backward.inputs if isinstance(i, Input)}
    assert set(stays.values()) == {True, False}
    moving = [name for name, is_pinned in stays.items() if not is_pinned]
    assert all(name.startswith(("primals_", "tangents_")) for name in moving)
    assert forward.saved and not backward.saved and len(forward.results) == len(forward.outputs)
    for p in (forward, backward):
        assert not any(i.written for i in p.inputs if isinstance(i, Input))
        assert read(show(p)) == p
    (made,) = cuda_programs(written, (8, 8), (8, 8))
    assert [i.written for i in plan_of(made).inputs if isinstance(i, Input)] == [True, False]


def test_the_plan_around_a_graph_is_text_and_native_code() -> None:
    """It reads as it prints, and LLVM takes its code."""
    moving = cuda_programs(lambda x, w: (x @ w).softmax(-1) @ w, (8, 8), (8, 8), dynamic=True)
    drawing = programs(lambda x, w: F.scaled_dot_product_attention(x @ w, x, x, None, 0.1) @ w)
    for p in [*programs(), *moving, *drawing]:
        g = split(p)
        assert read(show(g.plan)) == g.plan
        text = native(g.plan, LAYOUT).text
        assert "@ready" in text and "@replay" in text
        assert compile_module("\n".join([*callees(text, True).values(), text]))


def test_memory_of_results_is_not_that_of_the_graph() -> None:
    """A result in memory that other buffers had before it is new memory for all of them."""
    (p,) = cuda_programs(lambda x, w: (x @ w).softmax(-1).cumsum(0) @ w, (32, 32), (32, 32))
    new = [s.name for s in split(p).plan.steps if isinstance(s, Alloc)]
    assert new == [*only(p).writes] and len(new) == 1


def test_a_call_says_that_it_writes() -> None:
    """A function without a schema may write its arguments."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return torch.view_as_real(torch.complex(x, x) @ torch.complex(w, x)).sum()

    (p,) = cuda_programs(fn, (8, 8), (8, 8))
    calls = {s.op: s.writes for s in plan_of(p).flat if isinstance(s, CallStep)}
    assert calls.pop("lenz.view_as_real") and "aten.mm.default" in calls
    assert not any(calls.values())


def cut(x: Tensor, w: Tensor) -> Tensor:
    """An op that draws torch's own random numbers between products and kernels."""
    y = (x @ w).exp()
    z = torch.poisson((y @ w).abs()).sin() @ w
    return (z + y).softmax(-1) @ w


def test_numbers_that_a_call_decides_are_in_no_graph() -> None:
    """Neither the op that gives one, nor what takes it: a graph would have that of its capture."""
    n, x = Var("u0"), Ref("x")
    gives = CallStep("aten._local_scalar_dense.default", (x,), (), (n,), True)
    takes = CallStep("aten.full.default", ((sym(2), n), 0.5), (), ("y",), True)
    launch = LaunchStep("k", ("x",), (n * 2,), sym(1), "cuda:0")
    for s in (gives, takes, launch):
        assert regions._refusal(s, regions.CaptureFacts())
    for s in (takes, launch):
        assert not regions._refusal(s, regions.CaptureFacts(known={n}))
    sized = replace(gives, op="aten.bincount.default", outs=("y",))
    assert regions._refusal(sized, regions.CaptureFacts(sized={"y"}))
    assert not regions._refusal(sized, regions.CaptureFacts())


def test_tensors_on_the_cpu_are_in_no_graph() -> None:
    """An op that reads one would keep its values, and a copy would read memory of the CPU."""
    square, places = Fake((32, 32)), Fake((4,), torch.int64, "cpu")
    (p,) = cuda_programs(lambda x, w, i: ((x @ w)[i].exp() @ w).sin(), square, square, places)
    g = split(p)
    assert "aten.index.Tensor takes a tensor on the CPU" in g.outside[0]
    assert not any("aten.index.Tensor" in names(r.steps) for r in g.replays)


def test_a_graph_takes_the_seeds_of_attention_on_the_gpu_alone() -> None:
    """The efficient kernel gives them on the CPU unless it is captured."""
    _, backward = programs(
        lambda x, w: F.scaled_dot_product_attention(x @ w, x, x).exp() @ w, attention="efficient"
    )
    plan, g = plan_of(backward), split(backward)
    loose = {i.name for i in plan.inputs if isinstance(i, Input) and i.anywhere}
    assert loose & {*g.pinned} and not g.outside
    assert not any(i.anywhere for i in g.plan.inputs if isinstance(i, Input))


def names(steps: Any) -> list[str]:
    """The ops that steps call."""
    return [s.op for s in steps if isinstance(s, CallStep)]


def test_a_plan_is_cut_where_a_step_is_outside() -> None:
    """What a graph makes for others stays in its memory, and what others make is an argument."""
    (p,) = cuda_programs(cut, (32, 32), (32, 32))
    g = split(p)
    first, second = g.replays
    (why,) = g.outside
    line = inspect.getsourcelines(cut)[1] + 3
    assert why == f"aten.poisson.default draws random numbers ({__file__}:{line})"
    steps = [s for s in g.plan.steps if isinstance(s, LaunchStep | CallStep)]
    assert [isinstance(s, LaunchStep) for s in steps] == [True, False, True]
    (drawn,) = [s for s in steps if isinstance(s, CallStep)]
    assert {a.name for a in drawn.args if isinstance(a, Ref)} <= set(first.kept)
    assert len({*first.writes, *second.writes}) == 1, "one result"
    assert set(drawn.outs) <= set(second.reads)
    assert read(show(g.plan)) == g.plan


def refused(fn: Callable[..., Any], *shapes: tuple[int, ...]) -> str:
    with pytest.raises(Uncaptured) as e:
        for p in cuda_programs(fn, *shapes):
            split(p)
    return str(e.value)


def test_why_a_plan_has_no_graph() -> None:
    square = (8, 8)
    assert "one kernel alone" in refused(lambda x: x.sin() + 1, square)
    assert "draws random numbers" in refused(lambda x: torch.poisson(x) + 1, square)
    assert "CPU" in refused(lambda x: (x @ x).cpu() + 1, square)


def test_a_plan_with_graphs_is_left_on_every_way_out() -> None:
    """A flag says that a call is under way: it is set once and cleared before each return."""
    (p,) = cuda_programs(cut, (32, 32), (32, 32))
    blocks = native(split(p).plan, LAYOUT).text.split("\n")
    entered = next(k for k, line in enumerate(blocks) if "@enter" in line)
    ends = [k for k, line in enumerate(blocks) if line.strip().startswith("ret ")]
    assert len(ends) == 4
    for k in ends:
        slow = any("%slow_result" in line for line in blocks[k - 2 : k])
        left = any("@leave" in line for line in blocks[max(k - 3, entered) : k])
        assert left != slow, blocks[k - 4 : k + 1]


def test_saved_parts_that_start_anywhere_leave_other_arguments_aligned() -> None:
    """The part behind a column of a half type starts behind 2 bytes. Others are read as usual."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        column, rest = (x @ w).split((1, 31), 1)
        return (column * rest).sin() * x[:, 1:]

    _, backward = map(plan_of, cuda_programs(f, (64, 32), (32, 32), grad=True))
    assert backward.aligned == ("primals_1", "getitem", "tangents_1")  # not getitem_1, `rest`
