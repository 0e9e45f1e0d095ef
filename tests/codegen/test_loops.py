"""Loops over vectors: extents, tails, symbolic sizes, and forms of access."""

from __future__ import annotations

import pytest
import torch

from lenz import ops
from lenz.ir.dtype import BF16, BOOL, F16, F32, F64, I8, I16, I32, I64, U8, DType
from lenz.ir.expr import Expr, const, index, masked, ref
from lenz.ir.kernel import For, Kernel, Let, Local, Param, Store, TileConfig
from lenz.ir.printer import show
from lenz.ir.reader import read
from lenz.ir.tensor import axis
from lenz.machine.cpu.llvm.compile import host_target
from lenz.machine.cpu.llvm.module import emit_module
from lenz.sym import Int, Sym, Var, ceildiv, sym
from tests.codegen.codegen_kernels import at, pointwise
from tests.codegen.codegen_run import check, run

pytestmark = pytest.mark.usefixtures("target")
EXTENTS = (0, 1, 15, 16, 17, 31, 32, 33, 1000)
DTYPES = (BOOL, U8, I8, I16, I32, I64, F16, BF16, F32, F64)


def values(n: int, dtype: DType) -> torch.Tensor:
    """Elements of every kind that the type has."""
    g = torch.Generator().manual_seed(n)
    if dtype is BOOL:
        return torch.rand(n, generator=g) < 0.5
    if dtype.is_float:
        x = torch.randn(n, generator=g)
        x[::7] = float("nan")
        x[1::11] = float("inf")
        x[2::13] = -0.0
        return x.to(dtype.torch)
    return torch.randint(0 if dtype.kind == "uint" else -100, 100, (n,), generator=g).to(
        dtype.torch
    )


@pytest.mark.parametrize("n", EXTENTS)
def test_pointwise_of_constant_extent(n: int) -> None:
    k = pointwise(ops.add, n, (F32, F32), F32)
    check(k, {"a": values(n, F32), "b": values(n, F32)})


def test_pointwise_of_symbolic_extent() -> None:
    s = Var("s0", 0)
    k = pointwise(ops.mul, s, (F32, F32), F32, block=64, sizes=(s,))
    for n in EXTENTS:
        check(k, {"a": values(n, F32), "b": values(n, F32)}, {"s0": n})


@pytest.mark.parametrize("dtype", DTYPES)
def test_copy_of_every_dtype(dtype: DType) -> None:
    k = pointwise(lambda x: x, 75, (dtype,), dtype)
    check(k, {"a": values(75, dtype)})


@pytest.mark.parametrize("unroll", (1, 2, 4))
def test_unroll(unroll: int) -> None:
    k = pointwise(ops.add, 500, (F32, F32), F32, tile=TileConfig(1, unroll, 4))
    check(k, {"a": values(500, F32), "b": values(500, F32)})


def loop(n: int, f, size: int, dtype: DType = F32, out: DType = F32, offset=None) -> Kernel:  # type: ignore[no-untyped-def]
    v = axis("v", sym(n))
    where = v.var if offset is None else offset(v.var)
    body = For(v, "vector", (Store("out", where, f(v.var)),))
    params = (Param("a", dtype, sym(size), "in"), Param("out", out, sym(n), "out"))
    return Kernel("loop_0", "pointwise", params, (), (body,))


FORMS = {
    "scalar": (lambda v: at("a", 3), 4),
    "reversed": (lambda v: at("a", 99 - v), 100),
    "strided": (lambda v: at("a", 3 * v + 1), 299),
    "halves": (lambda v: ops.sub(at("a", 2 * v + 1), at("a", 2 * v)), 200),
    "some of four": (lambda v: ops.sub(at("a", 4 * v + 3), at("a", 4 * v + 1)), 400),
    "all of three": (
        lambda v: ops.sub(at("a", 3 * v), ops.mul(at("a", 3 * v + 1), at("a", 3 * v + 2))),
        300,
    ),
    "neighbours that overlap": (lambda v: ops.sub(at("a", 2 * v + 2), at("a", 2 * v + 1)), 201),
    "divided": (lambda v: at("a", v // 7), 15),
    "modulo": (lambda v: at("a", v % 7), 7),
    "permuted": (lambda v: at("a", v % 10 * 10 + v // 10), 100),
    "floor of negative": (lambda v: at("a", (v - 50) // 3 + 17), 34),
    "mod of negative": (lambda v: at("a", (v - 50) % 9), 9),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_loads(form: str) -> None:
    f, size = FORMS[form]
    check(loop(100, f, size), {"a": values(size, F32)})


def test_a_neighbour_under_a_mask_may_not_exist() -> None:
    last = lambda v: ops.lt(index(v), index(sym(95)))
    f = lambda v: ops.add(masked(last(v), at("a", 2 * v + 1), const(1.0, F32)), at("a", 2 * v))
    check(loop(96, f, 191), {"a": values(191, F32)})


@pytest.mark.parametrize("dtype", DTYPES)
def test_reversed_and_gathered_of_every_dtype(dtype: DType) -> None:
    for f in (lambda v: at("a", 36 - v, dtype), lambda v: at("a", v // 2, dtype)):
        check(loop(37, f, 37, dtype, dtype), {"a": values(37, dtype)})


def test_bf16_of_ties_and_denormals() -> None:
    """Each upper half beside others: vectors with a denormal are rounded in another way."""
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (torch.arange(1 << 16)[:, None] << 16 | low).flatten()
    x = torch.where(bits < 1 << 31, bits, bits - (1 << 32)).to(torch.int32).view(torch.float32)
    n = len(x)
    k = loop(n, lambda v: ops.cast(at("a", v), BF16), n, F32, BF16)
    x = x[torch.randperm(n, generator=torch.Generator().manual_seed(0))]
    want = x.bfloat16()
    out = run(k, {"a": x, "out": torch.zeros_like(want)}, {})[0]["out"]
    assert torch.equal(out.isnan(), want.isnan()), "NaN became a number, or a number NaN"
    numbers = ~want.isnan()
    assert torch.equal(out.view(torch.int16)[numbers], want.view(torch.int16)[numbers])


def test_stores_reversed_and_scattered() -> None:
    check(loop(70, lambda v: at("a", v), 70, offset=lambda v: 69 - v), {"a": values(70, F32)})
    check(
        loop(70, lambda v: at("a", v), 70, offset=lambda v: v % 7 * 10 + v // 7),
        {"a": values(70, F32)},
    )


def test_index_values() -> None:
    for dtype in (I64, I32, F32, U8):
        check(loop(70, lambda v: index(3 * v + 2, dtype), 1, F32, dtype), {})


def test_gather_by_a_loaded_index() -> None:
    v = axis("v", sym(50))
    rows = at("i", v.var // 5, I64)
    k0 = Var("@0", 0, 19)
    from lenz.ir.expr import load

    value = load("a", (5 * k0 + v.var % 5,), F32, (rows,))
    params = (
        Param("a", F32, sym(100), "in"),
        Param("i", I64, sym(10), "in"),
        Param("out", F32, sym(50), "out"),
    )
    k = Kernel(
        "gather_0", "pointwise", params, (), (For(v, "vector", (Store("out", v.var, value),)),)
    )
    check(k, {"a": values(100, F32), "i": torch.randint(0, 20, (10,))})


def test_embedding_rows() -> None:
    from lenz.ir.expr import load

    i, v = axis("i", sym(9)), axis("v", sym(37))
    value = load("a", (37 * Var("@0", 0, 19) + v.var,), F32, (at("i", i.var, I64),))
    params = (
        Param("a", F32, sym(740), "in"),
        Param("i", I64, sym(9), "in"),
        Param("out", F32, sym(333), "out"),
    )
    store = Store("out", 37 * i.var + v.var, value)
    k = Kernel(
        "embedding_0", "pointwise", params, (), (For(i, "parallel", (For(v, "vector", (store,)),)),)
    )
    check(k, {"a": values(740, F32), "i": torch.randint(0, 20, (9,))})


def less(v: Var, bound: int) -> Expr:
    return ops.lt(index(v, I64), const(bound, I64))


@pytest.mark.parametrize("dtype", DTYPES)
def test_masked_loads_touch_nothing_else(dtype: DType) -> None:
    zero = const(0, dtype)
    forms = (
        lambda v: masked(less(v, 10), at("a", v, dtype), zero),
        lambda v: masked(ops.ge(index(v, I64), const(40, I64)), at("a", v - 40, dtype), zero),
        lambda v: masked(less(v, 10), at("a", 9 - v, dtype), zero),
        lambda v: masked(less(v, 5), at("a", 2 * v, dtype), zero),
        lambda v: masked(less(v, 0), at("a", 1 << 40, dtype), zero),
    )
    for f in forms:
        check(loop(50, f, 10, dtype, dtype), {"a": values(10, dtype)})


def test_masked_scalar_and_nested() -> None:
    i, v = axis("i", sym(6)), axis("v", sym(40))
    inner = masked(less(v.var, 30), at("a", 30 * (i.var - 2) + v.var), const(1.0, F32))
    row = ops.and_(ops.ge(index(i.var, I64), const(2, I64)), less(i.var, 4))
    value = masked(row, inner, const(2.0, F32))
    whole = masked(row, at("b", i.var - 2), const(3.0, F32))
    store = (Store("out", 40 * i.var + v.var, ops.add(value, whole)),)
    params = (
        Param("a", F32, sym(60), "in"),
        Param("b", F32, sym(2), "in"),
        Param("out", F32, sym(240), "out"),
    )
    k = Kernel("pad_0", "pointwise", params, (), (For(i, "parallel", (For(v, "vector", store),)),))
    check(k, {"a": values(60, F32), "b": values(2, F32)})


def test_collapsed_parallel_loops() -> None:
    i, j, v = axis("i", sym(5)), axis("j", sym(7)), axis("v", sym(20))
    offset = 140 * i.var + 20 * j.var + v.var
    value = ops.add(at("a", 20 * (7 * i.var + j.var) + v.var), index(100 * i.var + j.var, F32))
    inner = For(j, "parallel", (For(v, "vector", (Store("out", offset, value),)),))
    params = (Param("a", F32, sym(700), "in"), Param("out", F32, sym(700), "out"))
    k = Kernel("nested_0", "pointwise", params, (), (For(i, "parallel", (inner,)),))
    check(k, {"a": values(700, F32)})


def test_parallel_loops_whose_extent_varies() -> None:
    """Parts of a loop that was split at a diagonal: the inner loop runs within one task."""
    i, v = axis("i", sym(5)), axis("v", sym(20))
    before, behind = axis("j", i.var + 1), axis("k", 6 - i.var)

    def part(j: Sym, value: float) -> For:
        offset = 140 * i.var + 20 * j + v.var
        return For(v, "vector", (Store("out", offset, at("a", offset) + value),))

    loops = (
        For(i, "parallel", (For(before, "parallel", (part(before.var, 1.0),)),)),
        For(i, "parallel", (For(behind, "parallel", (part(behind.var + i.var + 1, 2.0),)),)),
    )
    params = (Param("a", F32, sym(700), "in"), Param("out", F32, sym(700), "out"))
    check(Kernel("split_0", "pointwise", params, (), loops), {"a": values(700, F32)})


def test_in_place_and_two_phases() -> None:
    v, w = axis("v", sym(50)), axis("w", sym(50))
    first = For(
        v,
        "vector",
        (
            Let("t", at("a", v.var)),
            Store("a", v.var, ops.add(ref("t", F32), const(1.0, F32))),
            Store("out", v.var, ops.mul(at("a", v.var), ref("t", F32))),
        ),
    )
    second = For(
        w, "parallel", (Store("out", w.var, ops.add(at("out", w.var), at("a", 49 - w.var))),)
    )
    params = (Param("a", F32, sym(50), "inout"), Param("out", F32, sym(50), "inout"))
    k = Kernel("phases_0", "pointwise", params, (), (first, second))
    a = torch.randn(50)
    for made in run(k, {"a": a, "out": torch.ones(50)}, {}):
        assert torch.equal(made["a"], a + 1)
        assert torch.equal(made["out"], (a + 1) * a + (a + 1).flip(0))


def test_local_scratch() -> None:
    i, v, w = axis("i", sym(4)), axis("v", sym(33)), axis("w", sym(33))
    body = (
        For(v, "vector", (Store("t", v.var, ops.exp(at("a", 33 * i.var + v.var))),)),
        For(w, "vector", (Store("out", 33 * i.var + w.var, at("t", 32 - w.var)),)),
    )
    params = (Param("a", F32, sym(132), "in"), Param("out", F32, sym(132), "out"))
    k = Kernel(
        "local_0", "pointwise", params, (), (For(i, "parallel", body),), (Local("t", F32, 33),)
    )
    check(k, {"a": torch.randn(132)}, rtol=1e-6)


def test_symbolic_division_in_lanes() -> None:
    s = Var("s0", 1, 1 << 20)
    n = 6 * s
    v = axis("v", n)
    value = ops.add(at("a", v.var % s), index(v.var // s, F32))
    params = (Param("a", F32, s, "in"), Param("out", F32, n, "out"))
    k = Kernel(
        "div_0", "pointwise", params, (s,), (For(v, "vector", (Store("out", v.var, value),)),)
    )
    for size in (1, 3, 16, 23):
        check(k, {"a": values(size, F32)}, {"s0": size})


def test_text_is_the_same_each_time() -> None:
    from lenz.machine.cpu.llvm.compile import host_target
    from lenz.machine.cpu.llvm.module import emit_module

    k = pointwise(ops.exp, 1000, (F32,), F32)
    again = pointwise(ops.exp, 1000, (F32,), F32)
    assert emit_module([k], host_target()) == emit_module([again], host_target())


def test_blocks_in_symbolic_rows() -> None:
    s = Var("s0", 0)
    i = axis("i", ceildiv(s, 4))
    body = For(i, "parallel", (Store("out", i.var, index(i.var + Int(1), F32)),))
    k = Kernel("ceil_0", "pointwise", (Param("out", F32, ceildiv(s, 4), "out"),), (s,), (body,))
    for n in (0, 1, 4, 9):
        check(k, {}, {"s0": n})


def test_division_by_a_size_of_zero_does_not_trap() -> None:
    s, t = Var("s0", 0), Var("s1", 0)
    i, v = axis("i", s), axis("v", t)
    value = ops.add(index(i.var // t, F32), ops.add(index(v.var % t, F32), index(i.var % t, F32)))
    body = For(i, "parallel", (For(v, "vector", (Store("out", t * i.var + v.var, value),)),))
    k = Kernel("zero_0", "pointwise", (Param("out", F32, s * t, "out"),), (s, t), (body,))
    for m, n in ((3, 0), (0, 3), (7, 5), (40, 33)):
        check(k, {}, {"s0": m, "s1": n})


def test_a_value_read_before_a_store_stays() -> None:
    """One element at a time: the oracle must not see through the name into memory."""
    v = axis("v", sym(20))
    body = (
        Let("t", at("a", v.var)),
        Store("a", v.var, const(5.0, F32)),
        Store("out", v.var, ops.add(ref("t", F32), at("a", v.var))),
    )
    params = (Param("a", F32, sym(20), "inout"), Param("out", F32, sym(20), "out"))
    k = Kernel("keep_0", "pointwise", params, (), (For(v, "seq", body),))
    a = torch.randn(20)
    assert torch.equal(check(k, {"a": a})["out"], a + 5)


def test_functions_of_one_scalar() -> None:
    """Vector instructions that have no scalar form are used on one lane."""
    v = axis("v", sym(20))
    body = (
        Let(
            "t", ops.add(ops.exp(at("a", 0)), ops.add(ops.tanh(at("a", 1)), ops.log1p(at("a", 2))))
        ),
        For(v, "vector", (Store("out", v.var, ops.mul(at("a", v.var), ref("t", F32))),)),
    )
    params = (Param("a", F32, sym(20), "in"), Param("out", F32, sym(20), "out"))
    check(Kernel("one_0", "pointwise", params, (), body), {"a": torch.rand(20)}, rtol=1e-6)


@pytest.mark.parametrize("extent", [sym(7), Var("s0", 0)], ids=["known", "unknown"])
def test_updates_of_one_place_see_each_other(extent: Sym) -> None:
    """A loop of unknown length has a test around it; what it updates is still read inside of it."""
    r = axis("r", extent)
    update = Store("out", sym(0), at("a", r.var), mode="add")
    params = (Param("a", F32, extent, "in"), Param("out", F32, sym(1), "inout"))
    sizes = (extent,) if isinstance(extent, Var) else ()
    k = Kernel("sum_0", "scatter", params, sizes, (For(r, "seq", (update,)),))
    got = check(k, {"a": torch.arange(1.0, 8.0)}, {"s0": 7} if sizes else {})
    assert got["out"].tolist() == [29.0]


BRANCHES = """
kernel @k reduction (%a: in f32[s0], %out: inout f32[s0]; s0: 0..) {
  for i in (s0 + 15)//16 : parallel {
    if 16*i + 15 < s0 {
      for j in 16 : vector { m = reduce max { load(%a, [16*i + j]) } over j }
      for j in 16 : vector { store(%out, [16*i + j], sub(load(%a, [16*i + j]), m)) }
    } else {
      if s0 < 40 {
        for j in s0 - 16*i : vector {
          m = reduce sum { load(%a, [16*i + j]) } over j
        }
        b = load(%out, [16*i])
        store(%out, [16*i], add(b, m))
        c = load(%out, [16*i])
        store(%out, [16*i], mul(c, c))
      }
    }
  }
}
"""


def test_a_branch_runs_one_of_its_bodies() -> None:
    """A loop that both branches have, values of one name, and what a branch has written."""
    k = read(BRANCHES)
    assert isinstance(k, Kernel) and read(show(k)) == k
    for n in (0, 1, 16, 20, 32, 35, 48, 50):
        check(k, {"a": values(n, F32), "out": torch.arange(float(n))}, {"s0": n})


UPDATES = """
kernel @k scatter (%a: in f32[s0*s1], %i: in i64[s0], %out: inout f32[5*s1]; s0: 0.., s1: 0..) {
  for p in (s1 + 63)//64 : parallel {
    for r in s0 : seq {
      for v in min(64, s1 - 64*p) : vector {
        store add(%out, [s1*@0 + 64*p + v], load(%a, [s1*r + 64*p + v]); @0: 0..4 = load(%i, [r]))
      }
    }
  }
}
"""


@pytest.mark.parametrize("threads", (1, 3))
def test_updates_of_columns_read_a_row_after_the_other(threads: int) -> None:
    k = read(UPDATES)
    assert isinstance(k, Kernel)
    text = emit_module([k], host_target())
    assert text.index("phi i64 [ 0, ") < text.index("phi i64 [ %begin, ")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows, columns in ((0, 70), (9, 0), (9, 64), (1, 65), (9, 200)):
            a, i = values(rows * columns, F32), torch.arange(rows) * 7 % 5
            given = {"a": a, "i": i, "out": torch.ones(5 * columns)}
            check(k, given, {"s0": rows, "s1": columns})
    finally:
        torch.set_num_threads(before)
