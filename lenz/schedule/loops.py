"""The loop form of a CPU kernel: the axis of the vectors, the parallel loops, the tiles.

    rows      for P: parallel { for R: vector { .. }  .. }             R lies side by side in memory
    columns   for P blocks: parallel { for R: seq { for P in a block: vector } .. }      P does
    elements  for blocks: parallel { for one axis: vector }                              no R
    tiles     for 16 x 16 tiles: parallel { for u: unroll { for v: vector } }   reads u, writes v

The choice counts accesses that are contiguous along the vector axis (findings-cpu.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lenz.ir.expr import loads_of
from lenz.ir.kernel import Store
from lenz.ir.tensor import Axis
from lenz.schedule.legal import Group, device_of
from lenz.schedule.nest import SHORT, Axes
from lenz.schedule.stages import Stages
from lenz.sym import ONE, ZERO, Int, Sym, SymEnv, Var, affine_in

Form = Literal["rows", "columns", "elements", "tiles"]

TILE = 16  # edge of a transposed tile: 16 vectors of 16 f32 fill the registers of AVX-512
BLOCK = 4096  # elements of a 1-d loop per parallel iteration


@dataclass(frozen=True, slots=True)
class Choice:
    """A form, and the axis whose elements are the lanes of vectors."""

    form: Form
    vector: Axis | None
    across: Axis | None = None


def choose(g: Group, s: Stages, env: SymEnv) -> Choice:
    """Pick the form with the most contiguous accesses."""
    axes, raxes = g.domain.axes, g.domain.raxes
    if raxes:
        return Choice("columns", axes[-1]) if columns_win(g, s, env) else Choice("rows", raxes[-1])
    if not axes:
        return Choice("elements", None)
    offsets = offsets_of(s)
    v = _vector_axis(axes, offsets, env)
    u = _across_axis(axes, v, offsets, env)
    return Choice("elements", v) if u is None else Choice("tiles", v, u)


def columns_win(g: Group, s: Stages, env: SymEnv) -> bool:
    """True if lanes should run along the results of a reduction, not along the reduced axis.

    A CPU sorts rows one after the other.
    """
    if s.sorts and device_of(g) == "cpu":
        return False
    if not g.domain.axes:
        return False
    p, r = g.domain.axes[-1], g.domain.raxes[-1]
    offsets = offsets_of(s)
    row_score, column_score = _score(offsets, r.var), _score(offsets, p.var)
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


def _score(offsets: list[Sym], v: Var) -> float:
    """Contiguous accesses count for the axis, strided ones against it; invariant ones are free."""
    moves = [coefficient(s, v) for s in offsets]
    return sum(1.0 if m is ONE else 0.0 if m is ZERO else -1.0 for m in moves)


def coefficient(s: Sym, v: Var) -> Sym | None:
    """Elements that the offset moves per step of v; None if it is not affine in v."""
    parts = affine_in(s, v)
    return None if parts is None else parts[0]


def _vector_axis(axes: Axes, offsets: list[Sym], env: SymEnv) -> Axis:
    last = axes[-1]
    if env.hint(last.extent) >= SHORT or len(axes) == 1:
        return last
    # The innermost axis is too short to fill a vector: take the longest one instead.
    return max(axes, key=lambda a: (env.hint(a.extent), _score(offsets, a.var)))


def _across_axis(axes: Axes, v: Axis, offsets: list[Sym], env: SymEnv) -> Axis | None:
    if env.hint(v.extent) < TILE:
        return None
    for s in offsets:
        along = coefficient(s, v.var)
        if along is ONE or along is ZERO or along is None:
            continue
        for u in axes:
            if u is not v and coefficient(s, u.var) is ONE and env.hint(u.extent) >= TILE:
                return u
    return None
