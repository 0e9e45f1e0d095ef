"""Loop surgery: split an axis into blocks and lanes, put loops around statements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce

from lenz import ops
from lenz.ir import kernel
from lenz.ir.expr import Expr
from lenz.ir.kernel import For, LoopKind, Reduce, Stmt
from lenz.ir.op import MASKED
from lenz.ir.tensor import Axes, Axis, axis, lane_axis
from lenz.ops.cast import CAST
from lenz.ops.compare import LT, sides_of
from lenz.schedule.stages import Statement
from lenz.sym import ZERO, Int, Sym, Var, ceildiv, maximum, minimum, prove_le, prove_lt, substitute


def nested(axes: Sequence[Axis], kind: LoopKind, body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    """Loops of one kind around a body, the first axis outermost."""
    for a in reversed(axes):
        body = (For(lane_axis(a) if kind == "lane" else a, kind, body),)
    return body


def cut(a: Axis, width: int, suffix: str = "b") -> tuple[list[Axis], Axis, Sym]:
    """Split an axis into blocks and lanes; there is no block axis if one block holds it all.

    for i in N   ==>   for ib in ceil(N/w): for i in min(w, N - w*ib)

    The position on the axis comes last: w*ib + i.
    """
    if isinstance(a.extent, Int) and a.extent.value <= width:
        lane = axis(a.name, a.extent)
        return [], lane, lane.var
    block = axis(f"{a.name}{suffix}", ceildiv(a.extent, Int(width)))
    whole = isinstance(a.extent, Int) and a.extent.value % width == 0
    rest = Int(width) if whole else minimum(Int(width), a.extent - block.var * width)
    lane = axis(a.name, rest)
    return [block], lane, block.var * width + lane.var


def trimmed(raxes: Axes, statements: Sequence[Statement]) -> tuple[Axes, Sequence[Statement]]:
    """Loops of reductions up to where all of their masks end, without the masks.

    for r in K { reduce sum { masked(K*c + r < N, x, 0) } }
    ==>  for r in max(0, min(K, N - K*c)) { reduce sum { x } }
    """
    r, *rest = raxes
    end, *others = [_end(x, r.var) for x in statements]
    if end is None or any(other is not end for other in others):
        return raxes, statements
    extent = maximum(ZERO, minimum(r.extent, end))
    finds = any(isinstance(x, Reduce) and x.kind in ("argmax", "argmin") for x in statements)
    if finds and not extent.lo:
        return raxes, statements  # no element has a place in an empty loop
    return (Axis(r.var, extent), *rest), [replace(x, value=_unmasked(x.value)) for x in statements]


def _end(x: Statement, r: Var) -> Sym | None:
    """The first r that a reduction's mask leaves out, with all later ones; None if it has none."""
    value = x.value.args[0] if x.value.op is CAST else x.value
    sides = sides_of(value.args[0], LT) if value.op is MASKED else None
    if not isinstance(x, Reduce) or sides is None:
        return None
    (at, count), other = sides, value.args[2]
    end = count - (at - r)
    return end if r not in end.free_vars and other is ops.neutral(x.kind, other.dtype) else None


def _unmasked(value: Expr) -> Expr:
    if value.op is CAST:
        return ops.cast(_unmasked(value.args[0]), value.dtype)
    return value.args[1]


def cut_all(
    axes: Sequence[Axis],
    widths: dict[Axis, int],
    at: dict[Var, Sym],
    most: Mapping[Axis, int] | None = None,
) -> tuple[list[Axis], list[Axis]]:
    """Blocks and lanes of the axes; `at` receives the position on each split axis.

    An axis with no more elements than `most` allows is not split.
    """
    blocks: list[Axis] = []
    lanes: list[Axis] = []
    for a in axes:
        width = widths.get(a, 1)
        if width == 1:
            blocks.append(a)
        elif a.extent.hi is not None and a.extent.hi <= width:
            lanes.append(a)
        else:
            block, lane, at[a.var] = cut(a, width)
            if most is not None:
                block, lane = [], axis(a.name, minimum(Int(most[a]), a.extent))
                at[a.var] = lane.var
            blocks += block
            lanes.append(lane)
    return blocks, lanes


def undecided(tests: Sequence[tuple[Sym, Sym]]) -> tuple[Sym, Sym] | None:
    """One test a < b that holds if all of some do; None if it is known whether they do."""
    if any(prove_le(b, a) for a, b in tests):
        return None
    left = [(a, b) for a, b in tests if not prove_lt(a, b)]
    if len(left) < 2:
        return left[0] if left else None
    return reduce(maximum, [a - b for a, b in left]), ZERO


def over_parts(x: Stmt, over: dict[Var, tuple[Var, ...]]) -> Stmt:
    """A reduction over the blocks and the lanes of its former axes."""
    if not isinstance(x, Reduce):
        return x
    return replace(x, over=tuple(v for old in x.over for v in over[old]))


def bounded(body: tuple[Stmt, ...], ends: Mapping[Var, Var]) -> tuple[Stmt, ...]:
    """The statements of a kernel with other ranges for its sizes, and so for its loops."""
    made: list[Stmt] = []
    for s in body:
        if isinstance(s, For):
            a = axis(s.axis.name, substitute(s.axis.extent, ends))
            made += nested((a,), s.kind, bounded(s.body, {**ends, s.axis.var: a.var}))
        else:
            new = kernel.moved(s, ends, over=True)
            made.append(kernel.map_bodies(new, lambda inner: bounded(inner, ends)))
    return tuple(made)


def all_moved(statements: Sequence[Stmt], at: Mapping[Var, Sym]) -> tuple[Stmt, ...]:
    """The statements with loop variables replaced."""
    return tuple([kernel.moved(s, at) for s in statements])
