"""Scans on GPUs, where one program holds a whole row: longer rows are scanned in parts.

    totals[.., c]    = fold of x over part c                         one read of x
    ahead[.., c]     = fold of totals over the parts up to c         small
    done[.., c, r]   = scan of x over part c, whose first element has taken ahead[.., c - 1] in

x is read twice and the result written once, and the order of the folding is fixed: the same bits on
every run, with no memory that programs wait for each other at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lenz import ops
from lenz.ir.dtype import I64
from lenz.ir.expr import Expr, const, index, masked
from lenz.ir.graph import ScanKind
from lenz.ir.tensor import TensorType
from lenz.lower.builder import Decline, GraphBuilder, Index, Value
from lenz.sym import ONE, Int, Sym, ceildiv, product

LONGEST = 32768  # elements of a row that stays in registers (schedule/blocks.py)
PART = 8192
WHY = "a row of unknown length, which a program of a GPU may not hold"


def scanned(
    b: GraphBuilder,
    kind: ScanKind,
    d: int,
    fn: Callable[[Index], Expr],
    type: TensorType | None = None,
    name: str | None = None,
) -> Value | Decline:
    """`b.scan`, or the same in parts; declines what a GPU cannot do."""
    kept = b.result if type is None else type
    size = kept.shape[d]
    if kept.device == "cpu" or (isinstance(size, Int) and size.value <= LONGEST):
        return b.scan(kind, d, fn, type, name)
    if not isinstance(size, Int) or size.value > LONGEST * PART or kind == "logaddexp":
        return Decline(WHY)
    return _in_parts(b, kind, d, fn, kept, size, name)


def _in_parts(
    b: GraphBuilder,
    kind: ScanKind,
    d: int,
    fn: Callable[[Index], Expr],
    kept: TensorType,
    size: Sym,
    name: str | None,
) -> Value:
    assert kind != "logaddexp"
    count = ceildiv(size, Int(PART))
    whole = count * PART is size

    def at(i: Index) -> Expr:
        """The element of row (.., c, r, ..)."""
        place = i[d] * PART + i[d + 1]
        e = fn((*i[:d], place, *i[d + 2 :]))
        if whole:
            return e
        inside = ops.lt(index(place, I64), index(size, I64))
        return masked(inside, e, ops.neutral(kind, e.dtype))

    heads = (*kept.shape[:d], count, *kept.shape[d + 1 :])
    wide = fn(tuple(Int(0) for _ in kept.shape)).dtype
    small = b.temp(heads, wide)
    title = name or "scan"
    totals = b.reduce(
        kind, heads, (Int(PART),), lambda i, r: at((*i[: d + 1], r[0], *i[d + 1 :])), None, small,
        f"{title}_totals",
    )  # fmt: skip
    ahead = b.scan(kind, d, totals.at, small, f"{title}_ahead")

    def joined(i: Index) -> Expr:
        e = at(i)
        first = ops.and_(
            ops.eq(index(i[d + 1], I64), const(0, I64)), ops.gt(index(i[d], I64), const(0, I64))
        )
        before = ahead.at((*i[:d], i[d] - 1, *i[d + 2 :]))
        return masked(first, ops.combine(kind, before, e), e)

    parts = (*kept.shape[:d], count, Int(PART), *kept.shape[d + 1 :])
    done = b.scan(kind, d + 1, joined, b.temp(parts, kept.dtype), f"{title}_parts")
    if whole or product([*kept.shape[:d], *kept.shape[d + 1 :]]) is ONE:
        return b.view(done, lambda i: _split(i, d), kept)
    # A view would leave with the strides of whole parts.
    return b.map(lambda i: done.at(_split(i, d)), kept)


def _split(i: Sequence[Sym], d: int) -> Index:
    return (*i[:d], i[d] // PART, i[d] % PART, *i[d + 1 :])
