"""Losses of elements, and their gradients: the loss of each element, then none, mean or sum.

A mean divides by the number of elements (NaN when there are none); its gradient is that of the sum
divided by the same number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lenz import ops
from lenz.ir.dtype import DType, compute_dtype
from lenz.ir.expr import Expr, const
from lenz.lower.builder import At, Decline, GraphBuilder, Index, Value
from lenz.lower.dims import common_shape, count, reduce_over, split
from lenz.lower.operand import parameter, reader
from lenz.lower.registry import lowering

# at::Reduction, as the ops get it.
NONE, MEAN, SUM = 0, 1, 2


def reduced(b: GraphBuilder, values: Sequence[Value], reduction: int, loss: At) -> Value:
    """The losses themselves, their mean or their sum."""
    if reduction == NONE:
        return b.map(loss)
    shape = common_shape(values)
    n = count(shape, compute_dtype(b.result.dtype))
    finish: Callable[[Expr], Expr] | None = (lambda a: ops.div(a, n)) if reduction == MEAN else None
    return reduce_over(b, "sum", split(shape, None), False, loss, finish)


def gradient(
    b: GraphBuilder, grad: Value, values: Sequence[Value], reduction: int, slope: At
) -> Value:
    """dx = dy * slope(x), divided by the number of elements for a mean."""
    acc = compute_dtype(b.result.dtype)
    dy, n = reader(grad, acc), count(common_shape(values), acc)

    def at(i: Index) -> Expr:
        g = dy(i)
        return ops.mul(slope(i), ops.div(g, n) if reduction == MEAN else g)

    return b.map(at)


def _enter_loss(packet: str, loss: Callable[..., Expr], slope: Callable[..., Expr]) -> None:
    """Register loss(x, y, *numbers) and its gradient dy slope(x, y, *numbers)."""

    def of(b: GraphBuilder, fn: Callable[..., Expr], x: Value, y: Value, *numbers: float) -> At:
        left, right = (reader(v, compute_dtype(b.result.dtype)) for v in (x, y))
        return lambda i: fn(left(i), right(i), *numbers)

    @lowering(packet)
    def forward(
        b: GraphBuilder, x: Value, y: Value, reduction: int = MEAN, *numbers: float
    ) -> Value | Decline:
        return reduced(b, (x, y), reduction, of(b, loss, x, y, *numbers))

    @lowering(f"{packet}_backward")
    def backward(
        b: GraphBuilder, grad: Value, x: Value, y: Value, reduction: int, *numbers: float
    ) -> Value:
        return gradient(b, grad, (x, y), reduction, of(b, slope, x, y, *numbers))


def smooth_l1(x: Expr, y: Expr, beta: float = 1.0) -> Expr:
    """With z = |x - y|: z^2 / (2 beta) where z < beta, else z - beta / 2."""
    z = ops.abs(ops.sub(x, y))
    scale, half = const(beta, z.dtype), const(0.5, z.dtype)
    near = ops.div(ops.mul(half, ops.square(z)), scale)
    return ops.where(ops.lt(z, scale), near, ops.sub(z, const(0.5 * beta, z.dtype)))


def smooth_l1_slope(x: Expr, y: Expr, beta: float) -> Expr:
    """-1 up to -beta, 1 from beta on, (x - y) / beta between; with beta 0, -1 at 0 as in eager."""
    z = ops.sub(x, y)
    low, high = const(-beta, z.dtype), const(beta, z.dtype)
    outer = ops.where(ops.ge(z, high), const(1, z.dtype), ops.div(z, high))
    return ops.where(ops.le(z, low), const(-1, z.dtype), outer)


def huber(x: Expr, y: Expr, delta: float = 1.0) -> Expr:
    """With z = |x - y|: z^2 / 2 where z <= delta, else delta (z - delta / 2)."""
    z = ops.abs(ops.sub(x, y))
    limit = const(delta, z.dtype)
    far = ops.mul(limit, ops.sub(z, const(0.5 * delta, z.dtype)))
    near = ops.mul(const(0.5, z.dtype), ops.square(z))
    return ops.where(ops.le(z, limit), near, far)


def huber_slope(x: Expr, y: Expr, delta: float) -> Expr:
    """x - y, held within -delta and delta."""
    z = ops.sub(x, y)
    low, high = const(-delta, z.dtype), const(delta, z.dtype)
    return ops.where(ops.lt(z, low), low, ops.where(ops.gt(z, high), high, z))


def soft_margin(x: Expr, y: Expr) -> Expr:
    """log(1 + exp(-y x)) = max(z, 0) + log(1 + exp(-|z|)) with z = -y x, which cannot overflow."""
    return softplus(ops.neg(ops.mul(x, y)))


def soft_margin_slope(x: Expr, y: Expr) -> Expr:
    """-y / (1 + exp(y x))."""
    return ops.div(ops.neg(y), ops.add(const(1, y.dtype), ops.exp(ops.mul(y, x))))


def twice(x: Expr, y: Expr) -> Expr:
    """2 (x - y)."""
    return ops.mul(const(2, x.dtype), ops.sub(x, y))


_enter_loss("mse_loss", lambda x, y: ops.square(ops.sub(x, y)), twice)
_enter_loss("smooth_l1_loss", smooth_l1, smooth_l1_slope)
_enter_loss("huber_loss", huber, huber_slope)
_enter_loss("soft_margin_loss", soft_margin, soft_margin_slope)


def softplus(z: Expr) -> Expr:
    """log(1 + exp(z)) without overflow."""
    tail = ops.log1p(ops.exp(ops.neg(ops.abs(z))))
    return ops.add(ops.maximum(z, const(0, z.dtype)), tail)


def weighted(weight: Value | None, acc: DType, e: Expr, i: Index) -> Expr:
    """An element of a loss times its weight, where there are weights."""
    return e if weight is None else ops.mul(e, reader(weight, acc)(i))


@lowering("binary_cross_entropy")
def binary_cross_entropy(
    b: GraphBuilder, x: Value, target: Value, weight: Value | None = None, reduction: int = MEAN
) -> Value | Decline:
    """-(y log x + (1 - y) log(1 - x)), the logarithms no less than -100.

    An x or y outside of [0, 1] raises on CPUs, as in eager.
    """
    acc = compute_dtype(b.result.dtype)
    left, right = reader(x, acc), reader(target, acc)
    floor, one = const(-100, acc), const(1, acc)

    def loss(i: Index) -> Expr:
        p, y = (parameter(side(i), x.device, 1) for side in (left, right))
        yes = ops.maximum(ops.log(p), floor)
        no = ops.maximum(ops.log1p(ops.neg(p)), floor)
        e = ops.sub(ops.mul(ops.sub(y, one), no), ops.mul(y, yes))
        return weighted(weight, acc, e, i)

    return reduced(b, (x, target), reduction, loss)


@lowering("binary_cross_entropy_backward")
def binary_cross_entropy_backward(
    b: GraphBuilder,
    grad: Value,
    x: Value,
    target: Value,
    weight: Value | None = None,
    reduction: int = MEAN,
) -> Value:
    """(x - y) / max(x (1 - x), 1e-12), times the weight."""
    acc = compute_dtype(b.result.dtype)
    left, right = reader(x, acc), reader(target, acc)

    def slope(i: Index) -> Expr:
        p = left(i)
        spread = ops.mul(ops.sub(const(1, acc), p), p)
        e = ops.div(ops.sub(p, right(i)), ops.maximum(spread, const(1e-12, acc)))
        return weighted(weight, acc, e, i)

    return gradient(b, grad, (x, target), reduction, slope)


@lowering("binary_cross_entropy_with_logits")
def binary_cross_entropy_with_logits(
    b: GraphBuilder,
    x: Value,
    target: Value,
    weight: Value | None = None,
    pos_weight: Value | None = None,
    reduction: int = MEAN,
) -> Value | Decline:
    """(1 - y) x + (1 + (p - 1) y) log(1 + exp(-x)) with p the weight of positive examples."""
    acc = compute_dtype(b.result.dtype)
    left, right = reader(x, acc), reader(target, acc)
    one = const(1, acc)

    def loss(i: Index) -> Expr:
        logit, y = left(i), right(i)
        cost = softplus(ops.neg(logit))
        if pos_weight is not None:
            extra = ops.mul(ops.sub(reader(pos_weight, acc)(i), one), y)
            cost = ops.mul(ops.add(one, extra), cost)
        return weighted(weight, acc, ops.add(ops.mul(ops.sub(one, y), logit), cost), i)

    return reduced(b, (x, target), reduction, loss)
