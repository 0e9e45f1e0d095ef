"""The interpreters against torch, and the faults that they must find."""
# ruff: noqa: E501 - a graph that fits in one line is read more easily so

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lenz.errors import InternalError, UserError
from lenz.ir.graph import Graph
from lenz.ir.interp import interp, interp_kernel
from lenz.ir.kernel import For, Kernel, Launch, Schedule
from lenz.ir.reader import read
from tests.ir import ir_graphs as make
from tests.oracle import assert_same, assert_schedule, random_inputs

NAN, INF = float("nan"), float("inf")


def run(text: str, *inputs: Any, **more: Any) -> Any:
    """Outputs of a graph in text; a single one by itself."""
    g = read(text)
    assert isinstance(g, Graph)
    outputs = interp(g, inputs, **more).outputs
    return outputs[0] if len(outputs) == 1 else outputs


def test_softmax() -> None:
    x = make.tensor(5, 7)
    (y,) = interp(make.softmax(), [x]).outputs
    torch.testing.assert_close(y, x.softmax(1))


def test_gather_and_index() -> None:
    w, idx = make.tensor(10, 3), torch.tensor([0, -1, 9, -10], dtype=torch.int32)
    (y,) = interp(make.gather(), [w, idx, 3]).outputs
    rows = idx.long() % 10
    torch.testing.assert_close(y, w[rows] + rows[:, None] + torch.arange(3))


def test_masked_load_stays_inside() -> None:
    x = make.tensor(4)
    (y,) = interp(make.padded(), [x]).outputs
    assert torch.equal(y, torch.nn.functional.pad(x, (1, 1)))
    assert torch.signbit(y[0])


def test_a_load_out_of_bounds_names_load_and_index() -> None:
    text = "graph @g() on cpu { in %x : f32[2, 3] out %y = f32[4] : map (i: 4) { load(%x, [i//2, i]) } }"
    with pytest.raises(InternalError, match=r"%x is read at \[1, 3\], its shape is \[2, 3\]") as e:
        run(text, make.tensor(2, 3))
    assert e.value.rule == "in-bounds"
    assert e.value.line == "load(%x, [i // 2, i]):f32"
    assert e.value.where.startswith("%y = f32[4]")


def test_a_shared_load_is_needed_where_one_user_is_not_masked() -> None:
    shared = "t0 = load(%x, [i]); t1 = lt(index(i, i64), 2:i64)"
    g = "graph @g() on cpu {{ in %x : f32[2] out %y = f32[3] : map (i: 3) {{ {}; {} }} }}"
    y = run(g.format(shared, "masked(t1, neg(t0), 7.0:f32)"), torch.tensor([1.0, 2.0]))
    assert y.tolist() == [-1.0, -2.0, 7.0]
    with pytest.raises(InternalError, match=r"read at \[2\]"):
        run(g.format(shared, "masked(t1, neg(t0), t0)"), torch.tensor([1.0, 2.0]))
    with pytest.raises(InternalError, match=r"read at \[2\]"):
        run(g.format(shared, "add(masked(t1, neg(t0), 7.0:f32), t0)"), torch.tensor([1.0, 2.0]))


def test_masks_inside_masks() -> None:
    text = """graph @g() on cpu {
      in %x : f32[2]
      out %y = f32[5] : map (i: 5) {
        masked(lt(index(i, i64), 4:i64),
               masked(ge(index(i, i64), 2:i64), load(%x, [i - 2]), 5.0:f32), 6.0:f32) }
    }"""
    assert run(text, torch.tensor([1.0, 2.0])).tolist() == [5.0, 5.0, 1.0, 2.0, 6.0]


def test_a_check_fails_only_where_it_is_needed() -> None:
    text = """graph @g() on cpu {
      in %idx : i64[3]
      in %x : f32[4]
      out %y = f32[3] : map (i: 3) {
        masked(lt(index(i, i64), 2:i64),
               load(%x, [@0]; @0: 0..3 = assert_in_range(load(%idx, [i]), 4:i64)), 7.0:f32) }
    }"""
    x = torch.arange(4.0)
    assert run(text, torch.tensor([3, 1, 99]), x).tolist() == [3.0, 1.0, 7.0]
    with pytest.raises(IndexError, match=r"out of range.*point \(1,\)"):
        run(text, torch.tensor([3, 4, 99]), x)


def test_floor_division_and_remainder_round_down() -> None:
    text = """graph @g() on cpu {
      out %q = i64[9] : map (i: 9) { index((i - 4)//3, i64) }
      out %r = i64[9] : map (i: 9) { index((i - 4) % 3, i64) }
      out %m = i64[9] : map (i: 9) { index(min(i, 3) + max(i, 5), i64) }
    }"""
    q, r, m = run(text)
    numbers = [i - 4 for i in range(9)]
    assert q.tolist() == [n // 3 for n in numbers]
    assert r.tolist() == [n % 3 for n in numbers]
    assert m.tolist() == [min(i, 3) + max(i, 5) for i in range(9)]


def test_reductions() -> None:
    x = make.tensor(3, 4)
    a, b, c, d, e, f, g = interp(make.reductions(), [x]).outputs
    torch.testing.assert_close(a, x.mean(1).half())
    torch.testing.assert_close(b, x.prod())
    assert torch.equal(c, x.argmax())
    assert torch.equal(d, x.argmin(1))
    assert torch.equal(e, (x > 0).any(1))
    assert torch.equal(f, (x > 0).all(1))
    assert torch.equal(g, x.amin(1))


REDUCE = "graph @g() on cpu {{ in %x : {0}[{2}] out %y = {1}[] : reduce {3} ( | r: {2}) {{ load(%x, [r]) }} }}"


@pytest.mark.parametrize(
    ("kind", "values", "want"),
    [
        ("argmax", [1.0, 3.0, 3.0], 1),
        ("argmax", [1.0, NAN, 3.0, NAN], 1),
        ("argmin", [2.0, NAN, 1.0], 1),
        ("argmin", [2.0, 1.0, 1.0], 1),
        ("argmax", [-INF, -INF], 0),
    ],
)
def test_position_of_the_extreme(kind: str, values: list[float], want: int) -> None:
    text = REDUCE.format("f32", "i64", len(values), kind)
    assert run(text, torch.tensor(values)).item() == want
    k = read(
        f"kernel @k reduction (%x: in f32[{len(values)}], %y: out i64[1]) {{"
        f" for r in {len(values)} : seq {{ a = reduce {kind} {{ load(%x, [r]) }} over r }}"
        " store(%y, [0], a) }"
    )
    assert isinstance(k, Kernel)
    for kernel in (k, as_scalar(k)):
        y = torch.zeros(1, dtype=torch.int64)
        interp_kernel(kernel, {"x": torch.tensor(values), "y": y}, {})
        assert y.item() == want


def as_scalar(k: Kernel) -> Kernel:
    """The same kernel with an inner loop of one turn, so that no loop of it runs on vectors."""
    one = read("kernel @o pointwise () { for one in 1 : seq { } }")
    assert isinstance(one, Kernel)
    shell = one.body[0]
    assert isinstance(shell, For)

    def walk(body: Any) -> Any:
        inner = tuple(replace(s, body=walk(s.body)) if isinstance(s, For) else s for s in body)
        if any(isinstance(s, For) for s in body):
            return inner
        # An empty loop makes the loop around it one with loops inside.
        return (*inner, shell)

    return replace(
        k, body=tuple(replace(s, body=walk(s.body)) if isinstance(s, For) else s for s in k.body)
    )


@pytest.mark.parametrize(
    ("kind", "dtype", "want"),
    [
        ("sum", "f32", 0.0),
        ("prod", "i32", 1),
        ("max", "f32", -INF),
        ("min", "i64", 2**63 - 1),
        ("any", "bool", False),
        ("all", "bool", True),
    ],
)
def test_reduction_of_nothing_is_the_identity(kind: str, dtype: str, want: float) -> None:
    torch_dtype = {"f32": torch.float32, "i32": torch.int32, "i64": torch.int64, "bool": torch.bool}
    y = run(REDUCE.format(dtype, dtype, 0, kind), torch.zeros(0, dtype=torch_dtype[dtype]))
    assert y.item() == want


def test_sums_stay_in_the_type_of_the_body() -> None:
    y = run(REDUCE.format("i8", "i8", 2, "sum"), torch.tensor([100, 100], dtype=torch.int8))
    assert y.item() == -56
    big = torch.tensor([2**64 - 1, 1, 7], dtype=torch.uint64)
    assert run(REDUCE.format("u64", "u64", 3, "sum"), big).item() == 7
    assert run(REDUCE.format("u64", "u64", 3, "max"), big).item() == 2**64 - 1


def test_outputs_have_the_strides_of_their_layout() -> None:
    text = "graph @g() on cpu { out %y = f32[2, 3 : 1, 2] : map (i: 2, j: 3) { cast(index(3*i + j, i64), f32) } }"
    y = run(text)
    assert y.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert y.stride() == (1, 2)


def test_views_share_memory_and_must_agree_with_their_index() -> None:
    text = """graph @g() on cpu {
      in %x : f32[4, 6]
      out %v = f32[2, 3 : 12, 2 @ 7] : view (i: 2, j: 3) %x[2*i + 1, 2*j + 1]
    }"""
    x = make.tensor(4, 6)
    assert torch.equal(run(text, x), x[1::2, 1::2])
    with pytest.raises(InternalError, match="layout of %v") as e:
        run(text.replace("@ 7", "@ 6"), x)
    assert e.value.rule == "view-layout"


def test_inputs_may_have_any_strides_and_stay_unchanged() -> None:
    text = """graph @g() on cpu {
      in %x : f32[3, 2 : 1, 3]
      %y = f32[3, 2] : map (i: 3, j: 2) { neg(load(%x, [i, j])) }
      mutate %x <- %y
      return (%x, %y)
    }"""
    g = read(text)
    assert isinstance(g, Graph)
    x = make.tensor(4, 2, 3)[2].t()
    before = x.clone()
    result = interp(g, [x])
    assert torch.equal(x, before)
    assert torch.equal(result.outputs[0], -before), "an output that is an input is what it is then"
    assert torch.equal(result.inputs[0], -before)
    assert result.inputs[0].stride() == x.stride()


def test_strides_of_no_element_tell_no_size() -> None:
    text = """graph @g(s0: 2..) on cpu {
      in %x : f32[3, 0 : s0, 1]
      in s0 : size
      %y = f32[3, 0] : map (i: 3, j: 0) { neg(load(%x, [i, j])) }
      return (%y)
    }"""
    empty = torch.empty_strided((3, 0), (1, 1))
    assert run(text, empty, 5).shape == (3, 0)


def test_calls() -> None:
    text = """graph @g(s0: 1.., u0: 0..) on cpu {
      in %x : f32[s0, 4]
      const %w : f32[4, 2]
      %m = f32[s0, 2] : call aten.mm.default(%x, %w)
      (%a = f32[s0], %b = i64[s0]) : call aten.max.dim(%x, 1)
      (%c = f32[s0, 1], none, %e = f32[s0, 1]) : call "obj:three"(%x)
      u0 : call py.operator.add(3, 4)
      %z = f32[u0] : call aten.full.default(([u0],), 1.5, dtype=dtype(f32))
      return (%m, %b, %e, [u0], %z)
    }"""

    def three(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(part.contiguous() for part in x.split([1, 2, 1], 1))

    x, w = make.tensor(3, 4), make.tensor(4, 2, seed=1)
    m, b, e, u, z = run(text, x, constants=[w], objects={"three": three})
    torch.testing.assert_close(m, x @ w)
    assert torch.equal(b, x.argmax(1))
    assert torch.equal(e, x[:, 3:])
    assert u == 7 and z.tolist() == [1.5] * 7
    with pytest.raises(InternalError, match="shape"):
        run(
            text.replace("%m = f32[s0, 2]", "%m = f32[s0, 3]"),
            x,
            constants=[w],
            objects={"three": three},
        )


def test_wrong_inputs_are_the_users_fault() -> None:
    g = make.gather()
    w, idx = make.tensor(10, 3), torch.zeros(2, dtype=torch.int32)
    for inputs, what in [
        ([w, idx, 4], "s0"),
        ([w.double(), idx, 3], "%w is torch.float64"),
        ([w, idx[:1], 3], "s1 = 1 is outside 2..64"),
        ([w.t(), idx, 3], "%w has shape"),
        ([w, 3, 3], "cannot be int"),
        ([make.tensor(3, 10).t(), idx, 3], "strides"),
    ]:
        with pytest.raises(UserError, match=what):
            interp(g, inputs)  # type: ignore[arg-type]


def test_wrong_eager_type_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from lenz.ir import op as table
    from lenz.ir.dtype import F32
    from lenz.ir.expr import const, expr
    from lenz.ir.interp_expr import evaluate_exprs
    from lenz.ir.op import Op

    monkeypatch.setattr(table, "_OPS", dict(table._OPS))  # other tests read it
    odd = Op("odd", 1, lambda args, _: args[0], eager=lambda x: x.double())
    with pytest.raises(InternalError) as e:
        evaluate_exprs((expr(odd, const(1, F32)),), {}, lambda _: torch.zeros(()), lambda *_: None)  # type: ignore[arg-type,return-value]
    assert e.value.rule == "eager-dtype"


# Kernels


@pytest.mark.parametrize("scalar", [False, True])
def test_row_kernel(scalar: bool) -> None:
    k = as_scalar(make.row_softmax()) if scalar else make.row_softmax()
    x = make.tensor(5, 7)
    y = torch.full((35,), NAN)
    interp_kernel(k, {"x": x.reshape(-1), "y": y}, {"s0": 5})
    torch.testing.assert_close(y.reshape(5, 7), x.softmax(1))


@pytest.mark.parametrize("scalar", [False, True])
def test_column_kernel_keeps_an_accumulator_per_lane(scalar: bool) -> None:
    k = as_scalar(make.columns()) if scalar else make.columns()
    x = make.tensor(6, 8)
    x[2, 3] = x[4, 3] = NAN
    x[1, 5] = x[3, 5] = 50.0
    y, z = torch.full((8,), NAN), torch.zeros(8, dtype=torch.int64)
    interp_kernel(k, {"x": x.reshape(-1), "y": y, "z": z}, {"s0": 6})
    torch.testing.assert_close(y, x.sum(0), equal_nan=True)
    assert torch.equal(z, x.argmax(0))


def test_scatter_in_order_with_repeats() -> None:
    idx = torch.tensor([1, 1, 0, 1], dtype=torch.int32)
    y = torch.zeros(3)
    interp_kernel(make.scatter(), {"idx": idx, "y": y}, {"s0": 4, "s1": 3})
    assert y.tolist() == [1.0, 3.0, 0.0]


def test_scans_and_scatters() -> None:
    x, idx, base = make.tensor(4, 5), torch.tensor([2, 0, 2, 2]), make.tensor(3, 5, seed=1)
    c, y, z = interp(make.bins(), [x, idx, base]).outputs
    torch.testing.assert_close(c, x.cumsum(1))
    m = x.cumsum(1).flip(0).cummax(0).values.flip(0).half().float()
    torch.testing.assert_close(y, base.index_add(0, idx, m))
    assert torch.equal(z[2], x[3]), "the last write wins"
    assert torch.equal(z[1], base[1]), "what nothing is written to is the base"


def test_a_scatter_outside_is_an_error() -> None:
    with pytest.raises(IndexError):
        interp(make.bins(), [make.tensor(1, 5), torch.tensor([3]), make.tensor(3, 5)])


@pytest.mark.parametrize("scalar", [False, True])
def test_running_kernel(scalar: bool) -> None:
    k = as_scalar(make.running()) if scalar else make.running()
    x, y = make.tensor(4, 7), torch.zeros(28)
    interp_kernel(k, {"x": x.reshape(-1), "y": y}, {"s0": 4})
    torch.testing.assert_close(y.reshape(4, 7), 2 * x.cumsum(1) + x.cummax(0).values)


def test_sorts() -> None:
    x, w = torch.randint(-9, 9, (3, 5)), torch.randint(-9, 9, (4, 5))
    rows, columns = interp(make.ordered(), [x, w]).outputs
    assert torch.equal(rows, x.sort(1)[0]) and torch.equal(columns, w.sort(0)[0][:3])
    y = torch.zeros(9, dtype=torch.int64)
    interp_kernel(make.sorted_rows(), {"x": x.reshape(-1), "y": y}, {"s0": 3})
    assert torch.equal(y.reshape(3, 3), x.sort(1)[0][:, :3])


KERNEL = "kernel @k pointwise (%x: in f32[s0], %y: out f32[s0]; s0: 1..) {{ {} }}"


@pytest.mark.parametrize(
    ("rule", "what", "body"),
    [
        ("in-bounds", "read at 4", "for i in s0 : vector { store(%y, [i], load(%x, [i + 1])) }"),
        ("in-bounds", "not one at -1", "for i in s0 : vector { store(%y, [i - 1], 1.0:f32) }"),
        ("in-bounds", "nothing has written", "for i in s0 : seq { store(%y, [i], load(%y, [i])) }"),
        (
            "in-bounds",
            "nothing has written",
            "local %t: f32[4] for i in s0 : parallel {"
            " for j in 1 : seq { store(%t, [i], 1.0:f32) }"
            " for j in 1 : seq { store(%y, [i], load(%t, [0])) } }",
        ),
        (
            "in-bounds",
            "another parallel iteration",
            "for i in s0 : parallel { for j in 1 : seq { store(%y, [i], 1.0:f32) }"
            " a = load(%y, [i//2]) }",
        ),
        ("parallel-write", "two parallel", "for i in s0 : parallel { store(%y, [i//2], 1.0:f32) }"),
        (
            "parallel-write",
            "two parallel",
            "for i in s0 : parallel { for j in s0 : parallel { store(%y, [i], 1.0:f32) } }",
        ),
        (
            "sort-local",
            "before it is full",
            "local %t: i32[4] for i in s0 : seq { store(%t, [0], 1:i32) sort(%t, 2) }",
        ),
        (
            "in-bounds",
            "nothing has written",
            "local %t: i32[2] for i in 2 : seq { store(%t, [i], 1:i32) } sort(%t, 2, keep 1)"
            " store(%y, [0], cast(load(%t, [1]), f32))",
        ),
        ("store-mode", "only read", "for i in s0 : seq { store(%x, [i], 1.0:f32) }"),
    ],
)
def test_faults_of_kernels(rule: str, what: str, body: str) -> None:
    k = read(KERNEL.format(body))
    assert isinstance(k, Kernel)
    with pytest.raises(InternalError, match=what) as e:
        interp_kernel(k, {"x": torch.ones(4), "y": torch.zeros(4)}, {"s0": 4})
    assert e.value.rule == rule


def test_phases_may_read_what_earlier_ones_wrote() -> None:
    k = read(
        KERNEL.format(
            "for i in s0 : parallel { store(%y, [i], load(%x, [i])) }"
            " for i in s0 : parallel { a = load(%y, [s0 - 1 - i]); b = mul(a, a) }"
        )
    )
    assert isinstance(k, Kernel)
    y = torch.zeros(4)
    interp_kernel(k, {"x": torch.arange(4.0), "y": y}, {"s0": 4})
    assert y.tolist() == [0, 1, 2, 3]


def test_a_loop_that_feeds_itself_runs_in_order() -> None:
    """y[i + 1] = y[i] + x[i]: vectors would read what is not written yet."""
    k = read(
        "kernel @k pointwise (%x: in f32[4], %y: inout f32[5]) {"
        " for i in 4 : seq { store(%y, [i + 1], add(load(%y, [i]), load(%x, [i]))) } }"
    )
    assert isinstance(k, Kernel)
    y = torch.zeros(5)
    interp_kernel(k, {"x": torch.ones(4), "y": y}, {})
    assert y.tolist() == [0, 1, 2, 3, 4]


def test_wrong_buffers_are_the_users_fault() -> None:
    k = make.row_softmax()
    good = {"x": torch.zeros(7), "y": torch.zeros(7)}
    with pytest.raises(UserError, match="size s0"):
        interp_kernel(k, good, {})
    for bad in (torch.zeros(6), torch.zeros(7, dtype=torch.float64), torch.zeros(7, 1)):
        with pytest.raises(UserError, match="%y must be"):
            interp_kernel(k, {**good, "y": bad}, {"s0": 1})


# Schedules, and the helpers that other rooms use


def test_schedule() -> None:
    g = make.softmax()
    assert_schedule(Schedule(g, (Launch(make.row_softmax(), ("x", "y")),)))
    with pytest.raises(InternalError, match="no step defines the output"):
        assert_schedule(Schedule(g, ()))


def test_assert_same_finds_a_difference() -> None:
    g = make.padded()
    assert_same(g, g)
    other = read(
        "graph @pad(s0: 1..) on cpu { in %x : f32[s0]"
        " out %y = f32[s0 + 2] : map (i: s0 + 2) { 0.0:f32 } }"
    )
    assert isinstance(other, Graph)
    with pytest.raises(AssertionError, match="changed the result"):
        assert_same(g, other, what="nothing")


def test_random_inputs_obey_ranges_and_indices() -> None:
    for seed in range(20):
        w, idx, s0 = random_inputs(make.gather(), seed)
        assert isinstance(w, torch.Tensor) and isinstance(idx, torch.Tensor)
        assert w.shape == (10, s0) and 2 <= idx.numel() <= 64
        assert int(idx.min()) >= 0 and int(idx.max()) <= 9
