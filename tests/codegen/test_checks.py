"""Positions read from memory: what is out of range is noticed and reads nothing outside."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lenz import ops
from lenz.ir.dtype import BF16, F32, I64, DType
from lenz.ir.expr import Expr, const, index, load, masked
from lenz.ir.kernel import For, Kernel, Param, Store
from lenz.ir.tensor import axis
from lenz.sym import Sym, Var, sym
from tests.codegen.codegen_kernels import at
from tests.codegen.codegen_run import Guarded, compiled

pytestmark = pytest.mark.usefixtures("target")
ROWS = Var("@0", 0)
N, D = Var("s0", 0), Var("s2", 0)


def embedding(d: Sym | int, rows: Sym | int, dtype: DType = F32, where: str = "rows") -> Kernel:
    """out[i, j] = table[ids[i], j] (or table[ids[d*i + j], j]) for a table of s0 rows of d."""
    d, rows = sym(d), sym(rows)
    i, j = axis("i", rows), axis("j", d)
    at_id = i.var if where == "rows" else d * i.var + j.var
    count = rows if where == "rows" else d * rows
    k = ops.assert_in_range(at("ids", at_id, I64), index(N))
    value = load("table", (d * ROWS + j.var,), dtype, (k,))
    body = For(i, "parallel", (For(j, "vector", (Store("out", d * i.var + j.var, value),)),))
    params = (
        Param("table", dtype, d * N, "in"),
        Param("ids", I64, count, "in"),
        Param("out", dtype, d * rows, "out"),
    )
    sizes = tuple(sorted({v for s in (d, rows, N) for v in s.free_vars}, key=lambda v: v.name))
    return Kernel("rows_0", "pointwise", params, sizes, (body,))


def failed(
    k: Kernel, buffers: dict[str, torch.Tensor], sizes: tuple[int, ...] = ()
) -> tuple[bool, torch.Tensor]:
    """Whether a check failed in a run between forbidden pages, and `out`."""
    functions, library = compiled([k])
    for at_end in (True, False):
        memory = {name: Guarded(t, at_end) for name, t in buffers.items()}
        found = functions[k.name](*[memory[p.name].address for p in k.params], *sizes)
    del library
    return bool(found), memory["out"].tensor()


@pytest.mark.diagonal(2)
@pytest.mark.parametrize("dtype", (F32, BF16))
@pytest.mark.parametrize("where", ("rows", "elements"))
@pytest.mark.parametrize("d", (1, 5, 16, 37))
def test_a_table_without_rows_is_not_read(d: int, where: str, dtype: DType) -> None:
    ids = torch.zeros(3 * (d if where == "elements" else 1), dtype=torch.int64)
    buffers = {
        "table": torch.empty(0, dtype=dtype.torch),
        "ids": ids,
        "out": torch.ones(3 * d, dtype=dtype.torch),
    }
    k = embedding(d, 3, dtype, where)
    assert failed(k, buffers, (0,))[0]
    table = torch.randn(4 * d).to(dtype.torch)
    ids += 2
    bad, out = failed(k, {**buffers, "table": table, "ids": ids}, (4,))
    assert not bad
    assert torch.equal(out.view(3, d), table.view(4, d)[2].expand(3, d))
    for wrong in (4, -1, 2**40, -(2**63)):
        ids[-1] = wrong
        assert failed(k, {**buffers, "table": table, "ids": ids}, (4,))[0]


def test_nothing_is_checked_where_nothing_runs() -> None:
    """Rows of no elements: the position would be computed outside of the loop over them."""
    k = embedding(D, 3)
    ids = torch.full((3,), 9)
    none = torch.empty(0)
    assert not failed(k, {"table": none, "ids": ids, "out": none}, (4, 0))[0]
    buffers = {"table": torch.randn(8), "ids": ids, "out": torch.ones(6)}
    assert failed(k, buffers, (4, 2))[0]


def branch(cond: Callable[[Sym], Expr], n: int, lanes: bool) -> Kernel:
    """out[j] = table[ids[j or 0]] where cond holds, else 7."""
    j = axis("j", sym(n))
    k = ops.assert_in_range(at("ids", j.var if lanes else 0, I64), const(4, I64))
    value = masked(cond(j.var), load("table", (ROWS,), F32, (k,)), const(7.0, F32))
    body = For(j, "vector", (Store("out", j.var, value),))
    params = (
        Param("table", F32, sym(4), "in"),
        Param("ids", I64, sym(n), "in"),
        Param("out", F32, sym(n), "out"),
    )
    return Kernel("branch_0", "pointwise", params, (), (body,))


@pytest.mark.parametrize("n", (1, 7, 16, 33, 50))
@pytest.mark.parametrize("lanes", (True, False))
def test_branches_that_are_not_taken_do_not_fail(n: int, lanes: bool) -> None:
    table, out = torch.randn(4), torch.ones(n)
    never = branch(lambda j: ops.lt(index(j), const(0, I64)), n, lanes)
    buffers = {"table": table, "ids": torch.full((n,), 99), "out": out}
    bad, made = failed(never, buffers)
    assert not bad
    assert torch.equal(made, torch.full((n,), 7.0))
    first = branch(lambda j: ops.lt(index(j), const(1, I64)), n, lanes)
    ids = torch.full((n,), 99)
    assert failed(first, {**buffers, "ids": ids})[0]
    ids[0] = 3
    bad, made = failed(first, {**buffers, "ids": ids})
    assert not bad
    assert float(made[0]) == float(table[3])
    assert torch.equal(made[1:], torch.full((n - 1,), 7.0))


def test_lanes_behind_the_end_do_not_fail() -> None:
    """A masked lane reads 0, which is no position of an empty table: it must not count."""
    j = axis("j", sym(5))
    k = ops.assert_in_range(ops.sub(at("ids", j.var, I64), const(10, I64)), const(4, I64))
    body = For(j, "vector", (Store("out", j.var, load("table", (ROWS,), F32, (k,))),))
    params = (
        Param("table", F32, sym(4), "in"),
        Param("ids", I64, sym(5), "in"),
        Param("out", F32, sym(5), "out"),
    )
    kernel = Kernel("behind_0", "pointwise", params, (), (body,))
    table = torch.randn(4)
    ids = torch.tensor([10, 11, 12, 13, 10])
    bad, out = failed(kernel, {"table": table, "ids": ids, "out": torch.ones(5)})
    assert not bad
    assert torch.equal(out, table[ids - 10])


def test_a_checked_size_is_known_where_its_check_is() -> None:
    """The size itself has a vector outside of the loops, and what the check lets through inside."""
    i, j = axis("i", D), axis("j", D)
    rest = ops.remainder(at("ids", D * i.var + j.var, I64), ops.assert_nonzero(index(D)))
    across = Store("out", i.var + D * j.var, rest)
    body = For(i, "seq", (For(j, "vector", (Store("along", D * i.var + j.var, rest), across)),))
    params = (
        Param("ids", I64, D * D, "in"),
        Param("along", I64, D * D, "out"),
        Param("out", I64, D * D, "out"),
    )
    kernel = Kernel("checked_0", "pointwise", params, (D,), (body,))
    for n in (1, 3, 40):
        ids, out = torch.randint(0, 99, (n, n)), torch.zeros(n, n, dtype=torch.int64)
        bad, made = failed(kernel, {"ids": ids, "along": out.clone(), "out": out}, (n,))
        assert not bad
        assert torch.equal(made.t(), ids % n)
