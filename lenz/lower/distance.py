"""Distances between all pairs of rows, and their gradients, for any p."""

from __future__ import annotations

import math

from lenz import ops
from lenz.ir.dtype import compute_dtype
from lenz.ir.expr import Expr, const
from lenz.ir.graph import ReduceKind
from lenz.ir.op import op_named
from lenz.lower.arithmetic import sign_of
from lenz.lower.builder import Decline, GraphBuilder, Index, Value
from lenz.lower.operand import broadcast
from lenz.lower.registry import lowering
from lenz.sym import ZERO


def _power(e: Expr, p: float) -> Expr:
    """e to the power p, for e >= 0."""
    if p in (0.0, 1.0, 2.0, 3.0):
        square = ops.square(e)
        return (const(1.0, e.dtype), e, square, ops.mul(square, e))[int(p)]
    return ops.sqrt(e) if p == 0.5 else ops.apply(op_named("pow"), e, const(p, e.dtype))


@lowering("_cdist_forward")
def cdist(b: GraphBuilder, x: Value, y: Value, p: float, compute_mode: int | None) -> Value:
    """out[.., i, j] = |x[.., i] - y[.., j]| in the p-norm; p = 0 counts what differs."""
    t, length = compute_dtype(x.dtype), x.shape[-1]
    if length is ZERO:
        return b.map(lambda i: const(0, x.dtype))

    def term(i: Index, r: Index) -> Expr:
        e = x.compute(broadcast(x, (*i[:-1], r[0])))
        gap = ops.abs(ops.sub(e, y.compute(broadcast(y, (*i[:-2], i[-1], r[0])))))
        if p == 0:
            return ops.cast(ops.ne(gap, const(0.0, t)), t)
        return gap if p in (1, math.inf) else _power(gap, p)

    def finish(total: Expr) -> Expr:
        return total if p in (0, 1, math.inf) else _power(total, 1 / p)

    kind: ReduceKind = "max" if p == math.inf else "sum"
    return b.reduce(kind, b.result.shape, (length,), term, finish)


@lowering("_cdist_backward")
def cdist_backward(
    b: GraphBuilder, grad: Value, x: Value, y: Value, p: float, distance: Value
) -> Value | Decline:
    """dx[.., i, k] = sum over j of dy d|x - y|/dx; 0 where rows are equal (and for p = 0)."""
    count = y.shape[-2]
    if not x.shape[:-2] == y.shape[:-2] == grad.shape[:-2]:
        return Decline("batches that are broadcast")
    zero = const(0.0, compute_dtype(x.dtype))
    if p == 0 or count is ZERO or ZERO in b.result.shape:
        return b.map(lambda i: const(0, x.dtype))

    def term(i: Index, r: Index) -> Expr:
        pair = (*i[:-1], r[0])
        gap = ops.sub(x.compute(broadcast(x, i)), y.compute(broadcast(y, (*i[:-2], r[0], i[-1]))))
        dy, far, size = grad.compute(pair), distance.compute(pair), ops.abs(gap)
        if p == 1:
            return ops.mul(dy, sign_of(gap))
        if p == math.inf:
            return ops.where(ops.eq(size, far), ops.mul(dy, sign_of(gap)), zero)
        if p == 2:
            slope = ops.mul(dy, ops.div(gap, far))
        else:
            part = ops.mul(sign_of(gap), _power(size, p - 1))
            slope = ops.div(ops.mul(part, dy), _power(far, p - 1))
        still = ops.eq(far, zero)
        still = ops.or_(still, ops.eq(gap, zero)) if p < 1 else still
        return ops.where(still, zero, slope)

    return b.reduce("sum", b.result.shape, (count,), term)
