"""Division by a value that many elements share: one reciprocal, and products in place of divisions.

    x / y    ==>    q + (x - q y) r    where r = 1 / y and q = x r

This is one step of Newton's method; a fused multiply-add computes its residual exactly. It rounds
correctly (Markstein 1990; Cornea, Harrison and Tang 1999) if r is 1 / y to nearest and nothing,
including the residual, is denormal. If x or y is infinite, zero or NaN, the step gives NaN (or 0
for -0) and q is the quotient. To keep r normal, x and y are scaled by a power of two if y is beyond
2^100 or below 2^-100. Six cheap instructions replace a division, which takes about ten on a GPU
plus one of a slow unit.

A count, such as the size of a window at an edge, may vary: up to 2^16 no quotient is nearer than
2^-41 to the middle of two f32, and the step is as near as 2^-44 even with the unit's reciprocal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lenz import ops
from lenz.ir.dtype import F32
from lenz.ir.expr import Expr, const, exact_place, interpret, nodes_of, rebuild, syms_of
from lenz.ir.kernel import Let
from lenz.ir.op import CONST, REF
from lenz.ir.tensor import Axes
from lenz.ops.arith import DIV
from lenz.ops.cast import CAST, NARROW
from lenz.ops.fold import apply
from lenz.ops.units import RCP_UNIT
from lenz.schedule.stages import Stages, Statement
from lenz.sym import Var

_GREAT = 2.0**100
_SCALE = 2.0**64


def share_reciprocals(s: Stages, axes: Axes, raxes: Axes, rough: bool) -> None:
    """Rewrite divisions by counts, and by values that elements of a row, or all elements, share.

    With `rough`, a value that is then rounded to a half type may first be off by an ulp of f32.
    """
    for part in s.loops if raxes else s.rows:
        part[:] = _rewritten(part, frozenset(a.var for a in raxes or axes), rough)


def _rewritten(
    part: Sequence[Statement], inner: frozenset[Var], may_be_rough: bool
) -> list[Statement]:
    named = frozenset(x.name for x in part if isinstance(x, Let))
    varies: dict[Expr, bool] = {}

    def moves(e: Expr, args: list[bool]) -> bool:
        own = any(v in inner for sym in syms_of(e) for v in sym.free_vars)
        return own or any(args) or (e.op is REF and e.attrs[0] in named)

    rough = _rounded_away([x.value for x in part]) if may_be_rough else set()

    def visit(e: Expr, args: list[Expr]) -> Expr:
        new = rebuild(e, tuple(args))
        if e.op is not DIV or e.dtype is not F32 or e.args[0].op is CONST:
            return new
        over = interpret(e.args[1], moves, varies)
        if over and _is_count(e.args[1]):
            x, y = new.args
            return _stepped(x, y, apply(RCP_UNIT, y), e in rough)
        if over or not interpret(e.args[0], moves, varies):
            return new
        return _shared(new.args[0], new.args[1], e in rough)

    memo: dict[Expr, Expr] = {}
    return [replace(x, value=interpret(x.value, visit, memo)) for x in part]


def _rounded_away(values: Sequence[Expr]) -> set[Expr]:
    """Divisions whose every use rounds the result to a half type."""
    nodes = nodes_of(*values)
    others = [e.args for e in nodes if not (e.dtype.is_half and e.op in (CAST, NARROW))]
    kept = {*values}.union(*others)
    return {e for e in nodes if e.op is DIV and e not in kept}


def _shared(x: Expr, y: Expr, rough: bool) -> Expr:
    size = ops.abs(y)
    one = const(1.0, y.dtype)
    scale = ops.where(size > _GREAT, 1 / _SCALE, ops.where(size < 1 / _GREAT, _SCALE, one))
    scaled = y * scale
    return _stepped(x * scale, scaled, 1.0 / scaled, rough)


def _stepped(x: Expr, y: Expr, r: Expr, rough: bool) -> Expr:
    """x / y from the reciprocal of y."""
    q = x * r
    if rough:
        return q
    better = ops.fma(ops.fma(-q, y, x), r, q)
    return ops.where(ops.abs(better) > 0.0, better, q)


def _is_count(y: Expr) -> bool:
    """True for a whole number between 1 and 2^16 that is made of sizes and positions."""
    n = exact_place(y.args[0]) if y.op is CAST else None
    return n is not None and n.lo is not None and n.lo > 0 and n.hi is not None and n.hi <= 1 << 16
