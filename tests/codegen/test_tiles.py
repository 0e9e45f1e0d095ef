"""Tiles that are transposed in registers, whole and partial."""

from __future__ import annotations

import pytest
import torch

from lenz import ops
from lenz.ir.dtype import BF16, BOOL, F32, F64, U8, DType
from lenz.ir.expr import const, index, masked
from lenz.ir.kernel import For, Kernel, Param, Store
from lenz.ir.reader import read
from lenz.ir.tensor import axis
from lenz.machine.cpu.llvm.compile import host_target
from lenz.machine.cpu.llvm.module import emit_module
from lenz.sym import Sym, Var, ceildiv, minimum, sym
from tests.codegen.codegen_kernels import at
from tests.codegen.codegen_run import check

pytestmark = pytest.mark.usefixtures("target")


def transpose(
    m: Sym | int, n: Sym | int, dtype: DType = F32, sizes: tuple[Var, ...] = ()
) -> Kernel:
    """out[i, j] = a[j, i] (+ b[i, j]); out is m x n."""
    m, n = sym(m), sym(n)
    i, j = axis("i", ceildiv(m, 16)), axis("j", ceildiv(n, 16))
    u = axis("u", minimum(16, m - 16 * i.var))
    v = axis("v", minimum(16, n - 16 * j.var))
    row, column = 16 * i.var + u.var, 16 * j.var + v.var
    value = at("a", m * column + row, dtype)
    if dtype is F32:
        value = ops.add(value, at("b", n * row + column))
    store = Store("out", n * row + column, value)
    body = For(
        i, "parallel", (For(j, "parallel", (For(u, "unroll", (For(v, "vector", (store,)),)),)),)
    )
    params = (
        Param("a", dtype, m * n, "in"),
        Param("b", F32, m * n, "in"),
        Param("out", dtype, m * n, "out"),
    )
    return Kernel("transpose_0", "transpose", params, sizes, (body,))


@pytest.mark.parametrize("shape", ((16, 16), (32, 48), (17, 16), (16, 33), (5, 7), (50, 70)))
def test_transpose_and_add(shape: tuple[int, int]) -> None:
    count = shape[0] * shape[1]
    check(transpose(*shape), {"a": torch.randn(count), "b": torch.randn(count)})


@pytest.mark.parametrize("dtype", (U8, BOOL, BF16, F64))
def test_transpose_of_other_types(dtype: DType) -> None:
    a = torch.randint(0, 2, (32 * 20,)).to(dtype.torch)
    check(transpose(32, 20, dtype), {"a": a})


@pytest.mark.parametrize("dtype", (F32, U8, BF16, F64))
@pytest.mark.parametrize("rows", (5, 8, 11, 15))
def test_rows_shorter_than_a_vector(rows: int, dtype: DType) -> None:
    """Each vector along the rows has as many elements as there are: none beyond the operand."""
    u, v, j = axis("u", sym(rows)), axis("v", sym(16)), axis("j", sym(3))
    column = 16 * j.var + v.var
    store = Store("out", 48 * u.var + column, at("a", rows * column + u.var, dtype))
    body = For(j, "parallel", (For(u, "unroll", (For(v, "vector", (store,)),)),))
    params = Param("a", dtype, sym(48 * rows), "in"), Param("out", dtype, sym(48 * rows), "out")
    k = Kernel("transpose_0", "transpose", params, (), (body,))
    check(k, {"a": torch.randint(0, 2, (48 * rows,)).to(dtype.torch)})
    text = emit_module([k], host_target())
    assert "gather" not in text and "shufflevector" in text


def test_symbolic_transpose() -> None:
    m, n = Var("s0", 0), Var("s1", 0)
    k = transpose(m, n, sizes=(m, n))
    for shape in ((0, 4), (16, 16), (31, 40)):
        count = shape[0] * shape[1]
        sizes = {"s0": shape[0], "s1": shape[1]}
        check(k, {"a": torch.randn(count), "b": torch.randn(count)}, sizes)


def test_whole_tiles_are_read_in_rows() -> None:
    text = emit_module([transpose(32, 32)], host_target())
    assert "gather" not in text and "shufflevector" in text


def test_a_tile_that_overwrites_what_it_reads_along_and_across() -> None:
    """The square is its own source: the load along the lanes stays in the block of the tile."""
    u, v = axis("u", sym(16)), axis("v", sym(16))
    inside = ops.lt(index(u.var), index(sym(9)))
    own = masked(inside, at("y", 16 * u.var + v.var), const(1.0, F32))
    store = Store("y", 16 * u.var + v.var, ops.add(own, at("a", 16 * v.var + u.var)))
    body = For(u, "unroll", (For(v, "vector", (store,)),))
    params = (Param("a", F32, sym(256), "in"), Param("y", F32, sym(256), "inout"))
    k = Kernel("own", "transpose", params, (), (body,))
    check(k, {"a": torch.randn(256), "y": torch.randn(256)})


def rows_at_places(dtype: str, place: str, more: str = "0") -> Kernel:
    """out[u, v] = a[i[..], u], in tiles of 16 x 16 of 32 x 48."""
    k = read(
        f"""kernel @k transpose (%a: in {dtype}[500], %i: in i64[48], %out: out {dtype}[1536]) {{
          for j in 2 : parallel {{ for p in 3 : parallel {{ for u in 16 : unroll {{
            for v in 16 : vector {{
              store(%out, [48*u + 768*j + v + 16*p], load(%a, [32*@0 + u + 16*j + {more}];
                    @0: 0..9 = assert_in_bounds(load(%i, [{place}]), 10:i64)))
            }} }} }} }} }}"""
    )
    assert isinstance(k, Kernel)
    return k


@pytest.mark.parametrize("dtype", ("f32", "bf16", "bool", "f64"))
def test_rows_at_places(dtype: str) -> None:
    k = rows_at_places(dtype, "v + 16*p")
    a = torch.randint(0, 2, (500,)).to(k.params[0].dtype.torch)
    check(k, {"a": a, "i": torch.randint(0, 10, (48,))})
    if dtype == "f32":
        assert "gather" not in emit_module([k], host_target())


def test_places_that_differ_from_row_to_row_are_gathered() -> None:
    k = rows_at_places("f32", "u + 16*j", "3*v")
    check(k, {"a": torch.randn(500), "i": torch.randint(0, 10, (48,))})
