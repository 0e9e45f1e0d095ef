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
from lenz.schedule.accesses import score
from lenz.schedule.legal import Group
from lenz.schedule.nest import SHORT
from lenz.schedule.stages import Stages
from lenz.sym import ONE, ZERO, Int, Sym, SymEnv, step_of

TILE = 16  # edge of a transposed tile: 16 vectors of 16 f32 fill the registers of AVX-512
BLOCK = 4096  # elements of a 1-d loop per parallel iteration
FEW = 4  # elements of rows that always fill vectors together
PLACE = 25.0  # additions of f32 that take as long as finding a place across the lanes of a vector
BRIEF = 8  # most that a brief formula costs, in additions of f32; chosen, not fitted


@dataclass(frozen=True, slots=True)
class LoopForm:
    """A form, named by its kind of kernel, and the axis whose elements are the lanes of vectors."""

    kind: KernelKind
    vector: Axis | None


def choose_form(g: Group, s: Stages, env: SymEnv) -> LoopForm:
    """Pick the form with the most contiguous accesses."""
    axes, raxes = g.domain.axes, g.domain.raxes
    if raxes:
        # Rows are sorted one after the other.
        if not s.sorts and (s.in_columns or _rows_fill_vectors(g, s, env)):
            return LoopForm("outer_reduction", axes[-1])
        return LoopForm("reduction", raxes[-1])
    if not axes:
        return LoopForm("pointwise", None)
    v = _vector_axis(g, axes, offsets := s.offsets, env)
    return LoopForm("transpose" if across(axes, v, offsets, env) else "pointwise", v)


def _rows_fill_vectors(g: Group, s: Stages, env: SymEnv) -> bool:
    """True if vectors of several short rows are better than a part of a vector for each row.

    Values of rows then fill vectors too. 40,000 rows of 3 f32: logsumexp takes 0.11 ms instead of
    1.05, softmax 0.24 instead of 0.69, sums 0.035 instead of 0.07. Lanes up to 4 elements apart
    are shuffled. Longer rows are gathered, which only costly values of rows outweigh: in rows of
    8, exp of a sum takes 0.15 ms instead of 0.21, a sum 0.14 instead of 0.07. Rows of more than 16
    were not measured. A few columns are shorter vectors than a row, but nothing is gathered, and
    one kernel stores the row: softmax over the 3 of 65536 x 3 x 7 takes 2.1 ms instead of 8.0, a
    sum over the 12 of 16384 x 12 x 4 bf16 0.17 instead of 0.68.
    """
    n, axes = g.domain.length, g.domain.axes
    in_columns = axes and score(s.offsets, axes[-1].var) > score(s.offsets, g.domain.raxes[-1].var)
    if in_columns and env.hint(n) <= 4 * env.hint(axes[-1].extent):
        return True
    if not isinstance(n, Int) or n.value > TILE or not axes or env.hint(axes[-1].extent) < TILE:
        return False
    cost = cost_of(*(x.value for row in s.rows for x in row))
    cost += PLACE * sum(x.finds_place for x in g.nests)
    pays = n.value <= FEW or cost >= n.value * len(s.offsets)
    return pays and not any(x.scans for x in g.nests)


def _vector_axis(g: Group, axes: Axes, offsets: list[Sym], env: SymEnv) -> Axis:
    if env.hint(axes[-1].extent) >= SHORT or len(axes) == 1:
        return axes[-1]
    # The innermost axis is too short to fill a vector: take a long one instead, one of neighbours
    # if there is one. x * mean, stacked with its negative, for 12 x 170 x 128 x 4 f32 takes 1.2 ms
    # with the 128 as lanes, and 7.2 with the 12 x 170.
    longest = max(axes, key=lambda a: (min(env.hint(a.extent), 64), score(offsets, a.var)))
    # But gathers and scatters outweigh brief formulas: 10^6 elements in rows of 7, each times the
    # first one of its row, take 2.6 ms, in partial vectors 0.5. silu of rows of 4 takes 2.2 ms so,
    # and 2.9. Lanes up to 3 elements apart are shuffled.
    fits = isinstance(axes[-1].extent, Int) and env.hint(axes[-1].extent) >= 4
    fits = fits and score(offsets, axes[-1].var) >= score(offsets, longest.var)
    return axes[-1] if fits and cost_of(*(n.body for n in g.nests)) <= BRIEF else longest


def across(axes: Axes, v: Axis, offsets: list[Sym], env: SymEnv) -> tuple[Axis, Sym] | None:
    """The axis along which an access is contiguous that is not so along v, and the position on it.

    The position is reversed if the access runs backwards.
    """
    if env.hint(v.extent) < TILE:
        return None
    # Lanes up to 4 elements apart are shuffled. Rows of 7 with rows as results are faster without.
    short = 5 if any(step_of(s, v.var) is ONE for s in offsets) else TILE
    long = [a for a in axes if env.hint(a.extent) >= (short if isinstance(a.extent, Int) else TILE)]
    for s in offsets:
        if step_of(s, v.var) in (ONE, ZERO):
            continue
        for u in long:
            step = step_of(s, u.var)
            if u is not v and step in (ONE, -ONE):
                return u, u.var if step is ONE else u.extent - 1 - u.var
    return None
