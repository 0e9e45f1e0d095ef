"""Which tensors a plan makes: as few as calls, views and results need."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

import lenz
from lenz.ir.dtype import F32, I32
from lenz.ir.graph import Ref
from lenz.ir.plan import Alloc, CallStep, LaunchStep, Plan, Reuse, ViewStep
from lenz.ir.tensor import Layout, TensorType, contiguous
from lenz.plan.forms import formed, forms_of
from lenz.plan.python import source
from lenz.sym import Int, Sym, Var, maximum


def kind(*shape: int, dtype: object = F32) -> TensorType:
    return TensorType(dtype, "cpu", contiguous(tuple(map(Int, shape))))  # type: ignore[arg-type]


FLAT, ROWS, BITS = kind(1, 64), kind(8, 8), kind(64, dtype=I32)
LATE = TensorType(F32, "cpu", Layout((Int(4),), (Int(1),), Int(60)))


def plan(*steps: object, out: str = "out") -> Plan:
    return Plan("p", (), (), steps, (Ref(out),), ("k",))  # type: ignore[arg-type]


def call(*names: str) -> CallStep:
    return CallStep("aten.relu_.default", tuple(map(Ref, names)), (), (None,), True)


def test_a_buffer_has_the_form_of_the_first_view_of_all_of_it() -> None:
    late, rows = ViewStep("late", "a", LATE), ViewStep("rows", "a", ROWS)
    assert forms_of(plan(Alloc("a", FLAT), late, rows, call("rows", "late")))["a"] is ROWS
    assert forms_of(plan(Alloc("a", FLAT), late, call("late")))["a"] is FLAT


def test_a_buffer_that_is_called_or_returned_has_its_own_form() -> None:
    rows = ViewStep("rows", "a", ROWS)
    assert forms_of(plan(Alloc("a", FLAT), rows, call("rows", "a")))["a"] is FLAT
    assert forms_of(plan(Alloc("a", FLAT), rows, call("rows"), out="a"))["a"] is FLAT


def test_a_buffer_has_no_form_that_may_be_empty_or_is_known_later() -> None:
    for low in (0, 1):
        u = Var("u0", low)
        many = TensorType(F32, "cpu", Layout((u, Int(64)), (Int(0), Int(1))))
        some = TensorType(F32, "cpu", Layout((u, u), (Int(0), Int(1))))
        for base, view in ((FLAT, many), (TensorType(F32, "cpu", contiguous((u,))), some)):
            found = forms_of(plan(Alloc("a", base), ViewStep("view", "a", view), call("view")))["a"]
            assert found is (view if low and base is not FLAT else base), (low, view)


def test_a_buffer_for_kernels_keeps_the_tensor_that_it_reuses() -> None:
    sizes: tuple[Sym, ...] = ()
    launch = LaunchStep("k", ("b",), sizes)
    found = forms_of(plan(Alloc("a", FLAT), call("a"), Reuse("b", "a", BITS), launch))
    assert found["b"] is FLAT
    found = forms_of(plan(Alloc("a", FLAT), call("a"), Reuse("b", "a", BITS), launch, call("b")))
    assert found["b"] is BITS


def takers(*steps: object, out: str = "out") -> dict[str, str]:
    found = formed(plan(*steps, out=out)).steps
    return {s.name: s.taker for s in found if isinstance(s, Reuse | ViewStep)}


def test_who_takes_a_view() -> None:
    """Autograd knows what leaves the plan, what an op writes, and all that these are views of."""
    a, rows, late = Alloc("a", FLAT), ViewStep("rows", "a", ROWS), ViewStep("late", "rows", LATE)
    launch, read = LaunchStep("k", ("late",), ()), call("late")
    writes = replace(read, writes=True)
    assert takers(a, rows, late, launch) == {"rows": "calls", "late": "kernels"}
    assert takers(a, rows, late, read) == {"rows": "calls", "late": "calls"}
    assert takers(a, rows, late, writes) == {"rows": "autograd", "late": "autograd"}
    assert takers(a, rows, late, read, out="late") == {"rows": "autograd", "late": "autograd"}
    assert takers(a, rows, late, read, out="rows") == {"rows": "autograd", "late": "calls"}


def test_a_result_that_alone_has_its_memory_needs_no_base() -> None:
    """Autograd would learn nothing from a view that Python makes in 2 us."""
    a, rows, late = Alloc("a", FLAT), ViewStep("rows", "a", ROWS), ViewStep("late", "rows", LATE)
    read = CallStep("aten.relu.default", (Ref("rows"),), (), ("b",), True)
    assert takers(a, rows, late, read, out="late") == {"rows": "calls", "late": "calls"}
    assert takers(a, Reuse("b", "a", ROWS), out="b") == {"b": "calls"}
    assert takers(rows, out="rows") == {"rows": "autograd"}, "the argument has the memory too"
    custom = replace(read, op="mine.maybe_returns_its_argument.default")
    assert takers(a, rows, custom, out="rows") == {"rows": "autograd"}
    both = replace(plan(a, rows, late), outputs=(Ref("rows"), Ref("late")))
    assert {s.taker for s in formed(both).steps if isinstance(s, ViewStep)} == {"autograd"}


def test_a_buffer_of_the_name_of_a_builtin_has_another_name() -> None:
    """The greatest elements of rows were a local `max`, by which the plan wrote sizes."""
    size = maximum(Var("s0", 0) - 3, Int(0))
    some = TensorType(F32, "cpu", Layout((size,), (Int(1),), Int(0)))
    p = plan(Alloc("max", FLAT), Alloc("a", some), call("max", "a"), out="a")
    text = source(p)
    assert "max(0, s0 - 3)" in text or "max(s0 - 3, 0)" in text
    assert "max =" not in text and "max_1 =" in text


def two_layers(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return torch.relu(x @ w.t()) @ v.t()


def test_a_plan_makes_no_tensor_that_nothing_needs() -> None:
    x, w, v = torch.randn(2, 3, 8), torch.randn(8, 8), torch.randn(8, 8)
    report = lenz.explain(two_layers)(x, w, v)
    torch.testing.assert_close(report.result, two_layers(x, w, v))
    source = report.graphs[0].source
    # Both weights transposed, the argument as a matrix, and the result: relu's is a matrix.
    assert source.count("as_strided(") + source.count("rt.view(") == 4
    assert "rt.reuse(" not in source
