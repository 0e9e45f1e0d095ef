"""Square tiles that are transposed in registers.

    for u in 16 : unroll { for v in 16 : vector { store(%y, [... + v], load(%x, [ld*v + u])) } }

A load that is contiguous in u and strided in v is read as one vector along u per value of v, and
shuffles transpose the tile. Everything else is computed along v, for all u at once. If an extent
may be smaller than the tile, a test selects between this and the plain loops.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lenz.ir.expr import loads_of
from lenz.ir.kernel import For, If, Reduce, exprs_of, walk
from lenz.machine.cpu.llvm.scopes import Scopes, Value
from lenz.machine.cpu.llvm.transpose import is_transposed
from lenz.sym import Int

if TYPE_CHECKING:
    from lenz.machine.cpu.llvm.body import Body

# Vectors of the largest tile, limited by registers.
MOST = 16


def is_tile(s: For, scopes: Scopes) -> bool:
    """True for loops of the form above with a load to transpose."""
    if s.kind != "unroll" or len(s.body) != 1 or scopes.copies > 1:
        return False
    inner = s.body[0]
    if not isinstance(inner, For) or inner.kind != "vector":
        return False
    rows, columns = s.axis.extent.hi, inner.axis.extent.hi
    if rows is None or columns is None or not 0 < rows <= MOST or not 0 < columns <= MOST:
        return False
    if rows % scopes.width or columns % scopes.width:
        return False
    if any(isinstance(x, (For, If, Reduce)) for x in walk(inner.body)):
        return False
    if s.axis.var in inner.axis.extent.free_vars:
        return False
    loads = loads_of(*exprs_of(inner.body))
    return any(is_transposed(e.attrs[1][0], s.axis.var, inner.axis.var) for e in loads)


def emit(body: Body, s: For) -> None:
    """Emit the tile, and plain loops for smaller extents."""
    inner = s.body[0]
    assert isinstance(inner, For)
    full = _is_full(body, (s, inner))
    if full == "true":
        _tile(body, s, inner)
        return
    fn = body.scopes.fn
    with body.scopes.when(full, []):
        _tile(body, s, inner)
    other = fn.let(fn.level, f"xor i1 {full}, true")
    with body.scopes.when(other, [], cold=True):
        body.plain_loop(s)


def _is_full(body: Body, loops: tuple[For, For]) -> str:
    fn, full = body.scopes.fn, "true"
    for f in loops:
        extent = f.axis.extent
        if isinstance(extent, Int):
            continue
        text = body.indices.scalar(extent).names[0]
        cond = fn.let(fn.level, f"icmp eq i64 {text}, {extent.hi}")
        full = cond if full == "true" else fn.let(fn.level, f"and i1 {full}, {cond}")
    return full


def _tile(body: Body, s: For, inner: For) -> None:
    scopes, indices, width = body.scopes, body.indices, body.scopes.width
    rows, columns = s.axis.extent.hi or 0, inner.axis.extent.hi or 0
    for start in range(0, columns, width):
        with scopes.block():
            level = scopes.fn.level
            scopes.copies = rows
            indices.lane = inner.axis.var
            indices.vars[s.axis.var] = Value(tuple([str(k) for k in range(rows)]), level)
            indices.vars[inner.axis.var] = Value((str(start),), level)
            body.accesses.tile = s.axis.var
            with body.writing(inner.body):
                body.statements(inner.body)
            body.accesses.tile = None
            indices.lane = None
            scopes.copies = 1
