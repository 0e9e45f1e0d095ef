"""Which accesses of a kernel are contiguous along which axis."""

from __future__ import annotations

from lenz.ir.expr import loads_of
from lenz.ir.kernel import Store
from lenz.schedule.legal import Group
from lenz.schedule.nest import SHORT
from lenz.schedule.stages import Stages
from lenz.sym import ONE, ZERO, Int, Sym, SymEnv, Var, affine_in


def columns_win(g: Group, s: Stages, env: SymEnv) -> bool:
    """True if lanes should run along the results of a reduction, not along the reduced axis."""
    if not g.domain.axes:
        return False
    p, r = g.domain.axes[-1], g.domain.raxes[-1]
    offsets = offsets_of(s)
    row_score, column_score = score(offsets, r.var), score(offsets, p.var)
    short = isinstance(r.extent, Int) and r.extent.value <= SHORT
    if short and env.hint(p.extent) >= 64:
        column_score += len(offsets)
    return column_score > row_score and env.hint(p.extent) >= 8


def offsets_of(s: Stages) -> list[Sym]:
    """Flat offsets of all accesses in the loops, or of the rows if there are no loops."""
    found: list[Sym] = []
    for part in s.loops if any(s.loops) else s.rows:
        for statement in part:
            found.extend(e.attrs[1][0] for e in loads_of(statement.value))
            if isinstance(statement, Store):
                found.append(statement.offset)
    return list(dict.fromkeys(found))


def score(offsets: list[Sym], v: Var) -> float:
    """Contiguous accesses count for the axis, strided ones against it; invariant ones are free."""
    moves = [coefficient(s, v) for s in offsets]
    return sum(1.0 if m is ONE else 0.0 if m is ZERO else -1.0 for m in moves)


def coefficient(s: Sym, v: Var) -> Sym | None:
    """Elements that the offset moves per step of v; None if it is not affine in v."""
    parts = affine_in(s, v)
    return None if parts is None else parts[0]
