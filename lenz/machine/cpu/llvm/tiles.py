"""Square tiles that are transposed in registers.

    for u in 16 : unroll { for v in 16 : vector { store(%y, [... + v], load(%x, [ld*v + u])) } }

A load that is contiguous in u and strided in v is read as one vector along u per value of v, and
shuffles transpose the tile. Everything else is computed along v, for all u at once. If an extent
may be smaller than the tile, a test selects between this and the plain loops.
"""

from __future__ import annotations

from lenz.ir.expr import loads_of
from lenz.ir.kernel import For, If, Reduce, exprs_of, walk
from lenz.machine.cpu.llvm.scopes import Scopes, Value
from lenz.machine.cpu.llvm.transpose import is_transposed
from lenz.machine.cpu.llvm.writer import Writer
from lenz.sym import Int

# Vectors of the largest tile, limited by registers.
MOST = 16


def is_tile(s: For, scopes: Scopes) -> bool:
    """True for loops of the form above with a load to transpose."""
    if s.kind != "unroll" or len(s.body) != 1 or scopes.copies > 1:
        return False
    inner = s.body[0]
    if not isinstance(inner, For) or inner.kind != "vector":
        return False
    rows, lanes = s.axis.extent.hi or 0, inner.axis.extent.hi or 0
    fits = 0 < rows <= MOST and 0 < lanes <= MOST and lanes % scopes.width == 0
    if not fits or s.axis.var in inner.axis.extent.free_vars:
        return False
    u, v, flat = s.axis.var, inner.axis.var, [*walk(inner.body)]
    read = any(is_transposed(e, u, v) for e in loads_of(*exprs_of(inner.body)))
    return read and not any(isinstance(x, (For, If, Reduce)) for x in flat)


def emit_tile(w: Writer, s: For) -> None:
    """Emit the tile, and plain loops for smaller extents."""
    inner = s.body[0]
    assert isinstance(inner, For)
    full = _is_full(w, (s, inner))
    if full == "true":
        _tile(w, s, inner)
        return
    fn = w.scopes.fn
    with w.scopes.when(full, []):
        _tile(w, s, inner)
    with w.scopes.when(fn.let(fn.level, f"xor i1 {full}, true"), [], cold=True):
        w.plain_loop(s)


def _is_full(w: Writer, loops: tuple[For, For]) -> str:
    fn, full = w.scopes.fn, "true"
    for extent in [f.axis.extent for f in loops if not isinstance(f.axis.extent, Int)]:
        cond = fn.let(fn.level, f"icmp eq i64 {w.indices.scalar(extent).names[0]}, {extent.hi}")
        full = cond if full == "true" else fn.let(fn.level, f"and i1 {full}, {cond}")
    return full


def _tile(w: Writer, s: For, inner: For) -> None:
    scopes, indices, width = w.scopes, w.indices, w.scopes.width
    rows, columns = s.axis.extent.hi or 0, inner.axis.extent.hi or 0
    for start in range(0, columns, width):
        with scopes.block():
            level = scopes.fn.level
            scopes.copies = rows
            indices.lane = inner.axis.var
            indices.vars[s.axis.var] = Value(tuple([str(k) for k in range(rows)]), level)
            indices.vars[inner.axis.var] = Value((str(start),), level)
            w.accesses.tile = s.axis.var
            with w.writing(inner.body):
                w.statements(inner.body)
            w.accesses.tile = None
            indices.lane = None
            scopes.copies = 1
