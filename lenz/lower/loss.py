"""Elementwise losses and their gradients, followed by no reduction, mean or sum.

A mean divides by the number of elements (NaN if there are none); its gradient is the sum's divided
by the same number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lenz import ops
from lenz.ir.dtype import compute_dtype
from lenz.ir.expr import Expr, const
from lenz.lower.builder import At, Fn, GraphBuilder, Index, Value
from lenz.lower.dims import common_shape, count, cut, reduce_over
from lenz.lower.operand import parameter, reader
from lenz.lower.registry import lowering

# The values of at::Reduction.
NONE, MEAN, SUM = 0, 1, 2


def reduced(b: GraphBuilder, values: Sequence[Value], reduction: int, loss: At) -> Value:
    """The losses themselves, their mean or their sum."""
    if reduction == NONE:
        return b.map(loss)
    shape = common_shape(values)
    n = count(shape, compute_dtype(b.result.dtype))
    finish: Fn | None = (lambda a: a / n) if reduction == MEAN else None
    return reduce_over(b, "sum", cut(shape, None), False, loss, finish)


def gradient(
    b: GraphBuilder, grad: Value, values: Sequence[Value], reduction: int, slope: At
) -> Value:
    """dx = dy * slope(x), divided by the number of elements for a mean."""
    acc = compute_dtype(b.result.dtype)
    dy, n = reader(grad, acc), count(common_shape(values), acc)

    def at(i: Index) -> Expr:
        g = dy(i)
        return slope(i) * (g / n if reduction == MEAN else g)

    return b.map(at)


def _read(b: GraphBuilder, fn: Callable[..., Expr], *values: Value | None) -> At:
    """fn of the elements of some tensors, in the compute type; None is passed on."""
    acc = compute_dtype(b.result.dtype)
    readers = [None if v is None else reader(v, acc) for v in values]
    return lambda i: fn(*(None if at is None else at(i) for at in readers))


def _enter_loss(packet: str, loss: Callable[..., Expr], slope: Callable[..., Expr]) -> None:
    """Register loss(x, y, *numbers) and its gradient dy slope(x, y, *numbers)."""

    @lowering(packet)
    def forward(
        b: GraphBuilder, x: Value, y: Value, reduction: int = MEAN, *numbers: float
    ) -> Value:
        return reduced(b, (x, y), reduction, _read(b, lambda *e: loss(*e, *numbers), x, y))

    @lowering(f"{packet}_backward")
    def backward(
        b: GraphBuilder, grad: Value, x: Value, y: Value, reduction: int, *numbers: float
    ) -> Value:
        return gradient(b, grad, (x, y), reduction, _read(b, lambda *e: slope(*e, *numbers), x, y))


def smooth_l1(x: Expr, y: Expr, beta: float = 1.0) -> Expr:
    """With z = |x - y|: z^2 / (2 beta) where z < beta, else z - beta / 2."""
    z = abs(x - y)
    scale = const(beta, z.dtype)
    return ops.where(z < scale, 0.5 * ops.square(z) / scale, z - 0.5 * beta)


def smooth_l1_slope(x: Expr, y: Expr, beta: float) -> Expr:
    """-1 up to -beta, 1 from beta on, (x - y) / beta between; with beta 0, -1 at 0 as in eager."""
    z = x - y
    high = const(beta, z.dtype)
    return ops.where(z <= -beta, -1, ops.where(z >= high, 1, z / high))


def huber(x: Expr, y: Expr, delta: float = 1.0) -> Expr:
    """With z = |x - y|: z^2 / 2 where z < delta, else delta (z - delta / 2)."""
    z = abs(x - y)
    limit = const(delta, z.dtype)
    return ops.where(z < limit, 0.5 * ops.square(z), limit * (z - 0.5 * delta))


def huber_slope(x: Expr, y: Expr, delta: float) -> Expr:
    """x - y, clamped to -delta and delta."""
    z = x - y
    high = const(delta, z.dtype)
    return ops.where(z < -delta, -delta, ops.where(z > high, high, z))


_enter_loss("mse_loss", lambda x, y: ops.square(x - y), lambda x, y: 2 * (x - y))
_enter_loss("smooth_l1_loss", smooth_l1, smooth_l1_slope)
_enter_loss("huber_loss", huber, huber_slope)
# log(1 + exp(-y x)) and -y / (1 + exp(y x)).
_enter_loss(
    "soft_margin_loss", lambda x, y: softplus(-(x * y)), lambda x, y: -y / (1 + ops.exp(y * x))
)


def softplus(z: Expr) -> Expr:
    """log(1 + exp(z)) = max(z, 0) + log(1 + exp(-|z|)), which cannot overflow."""
    return ops.maximum(z, 0) + ops.log1p(ops.exp(-abs(z)))


@lowering("binary_cross_entropy")
def binary_cross_entropy(
    b: GraphBuilder, x: Value, target: Value, weight: Value | None = None, reduction: int = MEAN
) -> Value:
    """-(y log x + (1 - y) log(1 - x)), with logarithms clamped to -100.

    An x or y outside [0, 1] raises on CPUs, as in eager.
    """

    def loss(p: Expr, y: Expr, w: Expr | None) -> Expr:
        p, y = (parameter(e, x.device, 1) for e in (p, y))
        yes, no = (ops.maximum(e, -100) for e in (ops.log(p), ops.log1p(-p)))
        e = (y - 1) * no - y * yes
        return e if w is None else e * w

    return reduced(b, (x, target), reduction, _read(b, loss, x, target, weight))


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

    def slope(p: Expr, y: Expr, w: Expr | None) -> Expr:
        e = (p - y) / ops.maximum((1 - p) * p, 1e-12)
        return e if w is None else e * w

    return gradient(b, grad, (x, target), reduction, _read(b, slope, x, target, weight))


@lowering("binary_cross_entropy_with_logits")
def binary_cross_entropy_with_logits(
    b: GraphBuilder,
    x: Value,
    target: Value,
    weight: Value | None = None,
    pos_weight: Value | None = None,
    reduction: int = MEAN,
) -> Value:
    """(1 - y) x + (1 + (p - 1) y) log(1 + exp(-x)) with p the weight of positive examples."""

    def loss(logit: Expr, y: Expr, w: Expr | None, p: Expr | None) -> Expr:
        cost = softplus(-logit)
        cost = cost if p is None else (1 + (p - 1) * y) * cost
        e = (1 - y) * logit + cost
        return e if w is None else e * w

    return reduced(b, (x, target), reduction, _read(b, loss, x, target, weight, pos_weight))
