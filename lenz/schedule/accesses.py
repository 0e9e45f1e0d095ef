"""Which accesses of a kernel are contiguous along which axis."""

from __future__ import annotations

from collections.abc import Sequence

from lenz.schedule.nest import SHORT, Domain
from lenz.sym import ONE, Int, Sym, SymEnv, Var, step_of

NEAR = tuple([Int(k) for k in range(-4, 5)])


def columns_win(d: Domain, offsets: Sequence[Sym], env: SymEnv) -> bool:
    """True if lanes should run along the results of a reduction, not along the reduced axis."""
    if not d.axes or not d.raxes:
        return False
    p, r = d.axes[-1], d.raxes[-1]
    row_score, column_score = score(offsets, r.var), score(offsets, p.var)
    if isinstance(r.extent, Int) and r.extent.value <= SHORT and env.hint(p.extent) >= 64:
        column_score += len(offsets)
    return column_score > row_score and env.hint(p.extent) >= 8


def score(offsets: Sequence[Sym], v: Var) -> float:
    """Contiguous accesses, in either direction, count for the axis; strided ones against it.

    Steps of up to 4 elements, as from one complex number to the next, read the same cache lines.
    """
    moves = [step_of(s, v) for s in offsets]
    return sum(1.0 if m in (ONE, -ONE) else 0.0 if m in NEAR else -1.0 for m in moves)
