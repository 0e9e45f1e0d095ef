"""Reductions: along rows, over columns, over several loops, and positions with NaN and ties."""

from __future__ import annotations

import pytest
import torch

from lenz import ops
from lenz.ir.dtype import BF16, BOOL, F16, F32, F64, I8, I32, I64, U8, DType
from lenz.ir.expr import ref
from lenz.ir.graph import ReduceKind
from lenz.ir.kernel import For, Kernel, Let, Param, Reduce, Store, TileConfig
from lenz.ir.tensor import axis
from lenz.sym import Sym, Var, minimum, sym
from tests.codegen.codegen_kernels import at, row_reduction
from tests.codegen.codegen_run import check, run

pytestmark = pytest.mark.usefixtures("target")
EXTENTS = (1, 15, 16, 17, 64, 65, 130, 1000)
VALUE_KINDS: tuple[ReduceKind, ...] = ("sum", "prod", "max", "min")
ARG_KINDS: tuple[ReduceKind, ...] = ("argmax", "argmin")


def some(n: int, dtype: DType, nan: bool = False) -> torch.Tensor:
    g = torch.Generator().manual_seed(n)
    if dtype is BOOL:
        return torch.rand(n, generator=g) < 0.5
    if dtype.is_float:
        x = torch.rand(n, generator=g) + 0.5
        if nan:
            x[torch.rand(n, generator=g) < 0.01] = float("nan")
        return x.to(dtype.torch)
    return torch.randint(0, 100, (n,), generator=g).to(dtype.torch)


@pytest.mark.diagonal(2)
@pytest.mark.parametrize("kind", VALUE_KINDS)
@pytest.mark.parametrize("n", EXTENTS)
def test_rows_of_floats(kind: ReduceKind, n: int) -> None:
    k = row_reduction(kind, 5, n)
    check(k, {"a": some(5 * n, F32) * 0.7}, rtol=1e-5, atol=1e-35)


@pytest.mark.parametrize("kind", (*VALUE_KINDS, *ARG_KINDS))
def test_rows_of_a_part_of_a_vector(kind: ReduceKind) -> None:
    """The best of each row, or the only value that is no 1, is in another lane each time."""
    for n in (2, 6, 10, 12, 14):
        rows = torch.ones(n, n) + torch.eye(n) * (-1 if "min" in kind else 1)
        check(row_reduction(kind, n, n), {"a": rows.flatten()})


@pytest.mark.diagonal(2)
@pytest.mark.parametrize("kind", (*VALUE_KINDS, *ARG_KINDS))
@pytest.mark.parametrize("dtype", (U8, I8, I32, I64, F64))
def test_rows_of_other_types(kind: ReduceKind, dtype: DType) -> None:
    check(row_reduction(kind, 3, 77, dtype), {"a": some(231, dtype)}, rtol=1e-12)


@pytest.mark.diagonal(2)
@pytest.mark.parametrize("kind", ("max", "min", "argmax", "argmin"))
@pytest.mark.parametrize("dtype", (BF16, F16, BOOL))
def test_extremes_of_narrow_types(kind: ReduceKind, dtype: DType) -> None:
    for n in (16, 77):
        check(row_reduction(kind, 3, n, dtype), {"a": some(3 * n, dtype)})


@pytest.mark.parametrize("kind", ("any", "all"))
def test_any_and_all(kind: ReduceKind) -> None:
    for n in (1, 16, 50):
        a = torch.rand(6 * n) < 0.5
        a[:n], a[n : 2 * n] = False, True
        check(row_reduction(kind, 6, n, BOOL), {"a": a})


@pytest.mark.diagonal(2)
@pytest.mark.parametrize("kind", (*ARG_KINDS, "max", "min"))
@pytest.mark.parametrize("n", EXTENTS)
def test_nan_ties_and_infinities(kind: ReduceKind, n: int) -> None:
    inf = float("inf")
    rows = torch.stack(
        [
            torch.randint(0, 3, (n,)).float(),  # ties
            torch.full((n,), -inf),
            torch.full((n,), inf),
            torch.full((n,), float("nan")),
            some(n, F32, nan=True),
            torch.arange(n).float(),
            -torch.arange(n).float(),
        ]
    )
    made = check(row_reduction(kind, 7, n), {"a": rows.flatten()})["out"]
    eager = getattr(torch, "a" + kind if kind in ("max", "min") else kind)(rows, -1)
    torch.testing.assert_close(made, eager, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("unroll", (1, 2, 4))
def test_symbolic_rows(unroll: int) -> None:
    m, n = Var("s0", 0), Var("s1", 0)
    for kind in ("sum", "argmax"):
        k = row_reduction(kind, m, n, unroll=unroll, sizes=(m, n))
        for size in (1, 16, 63, 64, 129):
            check(k, {"a": some(3 * size, F32)}, {"s0": 3, "s1": size}, rtol=1e-5)
    empty = row_reduction("sum", m, n, sizes=(m, n))
    check(empty, {"a": some(0, F32)}, {"s0": 3, "s1": 0})
    check(empty, {"a": some(0, F32)}, {"s0": 0, "s1": 5})


def test_softmax_in_one_kernel() -> None:
    n = 100
    i = axis("i", sym(4))
    r = [axis(f"r{q}", sym(n)) for q in range(3)]

    def x(v: Var):  # type: ignore[no-untyped-def]
        return at("a", n * i.var + v)

    def shifted(v: Var):  # type: ignore[no-untyped-def]
        return ops.exp(ops.sub(x(v), ref("m", F32)))

    body = (
        For(r[0], "vector", (Reduce("m", "max", x(r[0].var), (r[0].var,)),)),
        For(r[1], "vector", (Reduce("d", "sum", shifted(r[1].var), (r[1].var,)),)),
        Let("e", ops.div(ref("d", F32), ref("d", F32))),
        For(r[2], "vector", (
            Store("out", n * i.var + r[2].var,
                  ops.mul(ref("e", F32), ops.div(shifted(r[2].var), ref("d", F32)))),
        )),
    )  # fmt: skip
    params = (Param("a", F32, sym(4 * n), "in"), Param("out", F32, sym(4 * n), "out"))
    k = Kernel(
        "softmax_0", "reduction", params, (), (For(i, "parallel", body),), tile=TileConfig(1, 4, 4)
    )
    a = torch.randn(4, n) * 5
    made = check(k, {"a": a.flatten()}, rtol=1e-5)["out"]
    torch.testing.assert_close(made.reshape(4, n), torch.softmax(a, -1))


def test_over_two_loops() -> None:
    for kind in ("sum", "max", "argmax", "argmin"):
        i, r, v = axis("i", sym(3)), axis("r", sym(7)), axis("v", sym(37))
        value = at("a", 37 * (7 * i.var + r.var) + v.var)
        nest = For(r, "seq", (For(v, "vector", (Reduce("s", kind, value, (r.var, v.var)),)),))
        out = I64 if kind.startswith("arg") else F32
        body = (nest, Store("out", i.var, ref("s", out)))
        params = (Param("a", F32, sym(777), "in"), Param("out", out, sym(3), "out"))
        k = Kernel(
            "two_0", "reduction", params, (), (For(i, "parallel", body),), tile=TileConfig(1, 2, 4)
        )
        check(k, {"a": some(777, F32)}, rtol=1e-5)
        a = torch.full((777,), float("-inf"))
        a[259:] = torch.randint(0, 2, (518,)).float()
        check(k, {"a": a})


def panel(
    kind: ReduceKind, m: Sym | int, n: Sym | int, width: int, rows: int, dtype: DType = F32,
    sizes: tuple[Var, ...] = (),
) -> Kernel:  # fmt: skip
    """out[j] = reduce a[r, j] over r, in panels of columns."""
    m, n = sym(m), sym(n)
    from lenz.sym import ceildiv

    p = axis("p", ceildiv(n, width))
    r = axis("r", m)
    v = axis("v", minimum(width, n - width * p.var))
    column = width * p.var + v.var
    value = at("a", n * r.var + column, dtype)
    out = I64 if kind.startswith("arg") else dtype
    body = (
        For(r, "seq", (For(v, "vector", (Reduce("s", kind, value, (r.var,)),)),)),
        For(v, "vector", (Store("out", column, ref("s", out)),)),
    )
    params = (Param("a", dtype, m * n, "in"), Param("out", out, n, "out"))
    return Kernel("panel_0", "outer_reduction", params, sizes, (For(p, "parallel", body),),
                  tile=TileConfig(1, 2, rows))  # fmt: skip


@pytest.mark.diagonal(2)
@pytest.mark.parametrize("kind", ("sum", "max", "argmax", "argmin"))
@pytest.mark.parametrize("shape", ((1, 5), (9, 64), (17, 100), (4, 33)))
def test_column_panels(kind: ReduceKind, shape: tuple[int, int]) -> None:
    for rows in (1, 4):
        k = panel(kind, *shape, 32, rows)
        check(k, {"a": some(shape[0] * shape[1], F32, nan=kind != "sum")}, rtol=1e-5)


def test_column_panels_of_other_types() -> None:
    check(panel("any", 9, 40, 32, 4, BOOL), {"a": some(360, BOOL)})
    check(panel("sum", 9, 40, 32, 4, I64), {"a": some(360, I64)})
    check(panel("max", 9, 40, 32, 4, BF16), {"a": some(360, BF16)})


def test_symbolic_column_panels() -> None:
    m, n = Var("s0", 0), Var("s1", 0)
    k = panel("sum", m, n, 32, 4, sizes=(m, n))
    for a, b in ((0, 5), (3, 31), (4, 32), (13, 65), (5, 0)):
        check(k, {"a": some(a * b, F32)}, {"s0": a, "s1": b}, rtol=1e-5)


def test_columns_in_registers() -> None:
    for n in (16, 100):
        v, r = axis("v", sym(n)), axis("r", sym(9))
        reduce = For(r, "seq", (Reduce("s", "sum", at("a", n * r.var + v.var), (r.var,)),))
        body = For(v, "vector", (reduce, Store("out", v.var, ref("s", F32))))
        params = (Param("a", F32, sym(9 * n), "in"), Param("out", F32, sym(n), "out"))
        k = Kernel("columns_0", "outer_reduction", params, (), (body,))
        check(k, {"a": some(9 * n, F32)}, rtol=1e-5)


def test_two_reductions_in_one_loop() -> None:
    n = 200
    i, r = axis("i", sym(3)), axis("r", sym(n))
    x = at("a", n * i.var + r.var)
    body = (
        For(r, "vector", (
            Let("sq", ops.mul(x, x)),
            Reduce("s", "sum", x, (r.var,)),
            Reduce("q", "sum", ref("sq", F32), (r.var,)),
        )),
        Store("out", i.var, ops.sub(ref("q", F32), ref("s", F32))),
    )  # fmt: skip
    params = (Param("a", F32, sym(3 * n), "in"), Param("out", F32, sym(3), "out"))
    k = Kernel("both_0", "reduction", params, (), (For(i, "parallel", body),))
    a = torch.rand(3 * n)
    for made in run(k, {"a": a, "out": torch.ones(3)}, {}):
        rows = a.reshape(3, n)
        torch.testing.assert_close(made["out"], (rows * rows).sum(-1) - rows.sum(-1))


def test_scalar_loops() -> None:
    i, r = axis("i", sym(6)), axis("r", sym(5))
    for kind in ("sum", "argmax", "max"):
        out = I64 if kind == "argmax" else F32
        nest = For(r, "seq", (Reduce("s", kind, at("a", 5 * i.var + r.var), (r.var,)),))
        body = For(i, "parallel", (nest, Store("out", i.var, ref("s", out))))
        params = (Param("a", F32, sym(30), "in"), Param("out", out, sym(6), "out"))
        check(Kernel("scalar_0", "reduction", params, (), (body,)), {"a": some(30, F32)}, rtol=1e-6)
