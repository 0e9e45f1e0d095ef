"""The loop form of a CPU kernel: the axis of the vectors, the parallel loops, the tiles.

    reduction        for P: parallel { for R: vector { .. }  .. }      R is contiguous in memory
    outer_reduction  for P blocks: parallel { for R: seq { for P in a block: vector } .. }  P does
    pointwise        for blocks: parallel { for one axis: vector }                          no R
    transpose        for 16 x 16 tiles: parallel { for u: unroll { for v: vector } }
                     reads along u, writes along v

The choice counts accesses that are contiguous along the vector axis (findings-cpu.md).
"""

from __future__ import annotations

from lenz.ir.expr import cost_of
from lenz.ir.kernel import KernelKind
from lenz.ir.tensor import Axes, Axis
from lenz.records import dataclass
from lenz.schedule.accesses import coefficient, score
from lenz.schedule.legal import Group
from lenz.schedule.nest import SHORT
from lenz.schedule.stages import Stages
from lenz.sym import ONE, ZERO, Int, Sym, SymEnv

TILE = 16  # edge of a transposed tile: 16 vectors of 16 f32 fill the registers of AVX-512
BLOCK = 4096  # elements of a 1-d loop per parallel iteration
BRIEF = 8  # most that a brief formula costs, in additions of f32; chosen, not fitted


@dataclass(frozen=True, slots=True)
class LoopForm:
    """A form, named by its kind of kernel, and the axis whose elements are the lanes of vectors."""

    kind: KernelKind
    vector: Axis | None
    across: Axis | None = None


def choose_form(g: Group, s: Stages, env: SymEnv) -> LoopForm:
    """Pick the form with the most contiguous accesses."""
    axes, raxes = g.domain.axes, g.domain.raxes
    if raxes:
        if s.sorts or not s.in_columns:  # rows are sorted one after the other
            return LoopForm("reduction", raxes[-1])
        return LoopForm("outer_reduction", axes[-1])
    if not axes:
        return LoopForm("pointwise", None)
    v = _vector_axis(g, axes, offsets := s.offsets, env)
    u = _across_axis(axes, v, offsets, env)
    return LoopForm("pointwise", v) if u is None else LoopForm("transpose", v, u)


def _vector_axis(g: Group, axes: Axes, offsets: list[Sym], env: SymEnv) -> Axis:
    if env.hint(axes[-1].extent) >= SHORT or len(axes) == 1:
        return axes[-1]
    last, longest = axes[-1], max(axes, key=lambda a: (env.hint(a.extent), score(offsets, a.var)))
    # The innermost axis is too short to fill a vector: take the longest one instead. But gathers
    # and scatters outweigh brief formulas: 10^6 elements in rows of 7, each times the first one of
    # its row, take 2.6 ms, in partial vectors 0.5. silu of rows of 4 takes 2.2 ms so, and 2.9.
    # Lanes up to 3 elements apart are shuffled.
    fits = isinstance(last.extent, Int) and env.hint(last.extent) >= 4
    fits = fits and score(offsets, last.var) >= score(offsets, longest.var)
    return last if fits and cost_of(*(n.body for n in g.nests)) <= BRIEF else longest


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
