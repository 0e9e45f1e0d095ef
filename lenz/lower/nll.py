"""Negative log-likelihood: a class index per position, with weights and an ignored index.

A target outside [0, C) other than the ignored index raises IndexError, as in eager.
"""

from __future__ import annotations

from lenz import ops
from lenz.ir.dtype import I64, compute_dtype
from lenz.ir.expr import Expr, const, index
from lenz.lower.builder import GraphBuilder, Index, Value
from lenz.lower.dims import cut, reduce_over, sum_rows
from lenz.lower.index import computed
from lenz.lower.loss import MEAN, NONE
from lenz.lower.registry import lowering


@lowering("nll_loss_forward", "nll_loss2d_forward")
def nll_loss_forward(
    b: GraphBuilder,
    x: Value,
    target: Value,
    weight: Value | None,
    reduction: int,
    ignore_index: int,
) -> tuple[Value, Value]:
    """-w[t] x[n, t], 0 where t is ignored; summed, or also divided by the sum of the weights.

    The second result is the sum of weights. Without reduction eager leaves it at 0, except for a
    single 0-d target.
    """
    acc = compute_dtype(x.dtype)
    classes = x.shape[1 if x.rank > 1 else 0]
    chosen = computed(0, classes)

    def kept(i: Index) -> Expr:
        return ops.ne(ops.cast(target.at(i), I64), ignore_index)

    def bound(i: Index) -> tuple[Expr, ...]:
        t = ops.where(kept(i), ops.cast(target.at(i), I64), 0)
        return (ops.assert_in_range(t, index(classes, I64)),)

    def weight_at(i: Index) -> Expr:
        if weight is None:
            return const(1, acc)
        return ops.cast(weight.compute((chosen,), bound(i)), acc)

    def loss(i: Index) -> Expr:
        # x is [N, C, ...] for targets [N, ...], or [C] for one target.
        e = -x.compute((*i[:1], chosen, *i[1:]) if x.rank > 1 else (chosen,), bound(i))
        return ops.where(kept(i), weight_at(i) * e, 0)

    weight_type = b.kind(1)
    if reduction == NONE and x.rank > 1:
        return b.map(loss), b.map(lambda i: const(0, weight_type.dtype), weight_type, "weight")
    s = cut(target.shape, None)
    total = sum_rows(b, s, lambda i: ops.where(kept(i), weight_at(i), 0), acc, "weight")
    if reduction == MEAN:
        loss_sum = sum_rows(b, s, loss, acc, "loss_sum")
        out = b.map(lambda i: loss_sum.at(()) / total.at(()))
    else:
        out = reduce_over(b, "sum", s, False, loss)
    return out, total if weight_type.dtype is acc else b.map(total.at, weight_type, "weight")


@lowering("nll_loss_backward", "nll_loss2d_backward")
def nll_loss_backward(
    b: GraphBuilder,
    grad: Value,
    x: Value,
    target: Value,
    weight: Value | None,
    reduction: int,
    ignore_index: int,
    total_weight: Value,
) -> Value:
    """-w[c] dy if c is the target and not ignored, else 0; divided by the sum for a mean."""
    acc = compute_dtype(x.dtype)
    position = 1 if x.rank > 1 else 0

    def at(i: Index) -> Expr:
        c = i[position]
        place = i[:position] + i[position + 1 :]
        t = ops.cast(target.at(place), I64)
        g = -ops.cast(grad.compute(place if reduction == NONE else ()), acc)
        if reduction == MEAN:
            g = g / ops.cast(total_weight.compute(()), acc)
        if weight is not None:
            g = g * ops.cast(weight.compute((c,)), acc)
        g = ops.where(ops.ne(t, ignore_index), g, 0)  # once for all classes
        return ops.where(ops.eq(t, index(c, I64)), g, 0)

    return b.map(at)
