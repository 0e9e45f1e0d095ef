"""Sums whose last operand is a product: alpha, addcmul, addcdiv, lerp.

Torch's loops add the product of floats exactly: its CPU code calls a fused multiply-add, and its
GPU code is compiled to one. The products before it differ between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lenz import ops
from lenz.ir.expr import Expr
from lenz.lower.builder import GraphBuilder, Index, Value
from lenz.lower.operand import Number, Operand, element, elementwise, keeps
from lenz.lower.registry import lowering
from lenz.sym import Sym


def product_added(xyz: Sequence[Expr], factor: Expr, device: str) -> Expr:
    """x + factor * y * z with torch's roundings: the last sum adds an exact product."""
    x, y, z = xyz
    if not x.dtype.is_float:
        return x + factor * y * z
    if ops.is_value(factor, 1):
        return ops.fma(y, z, x)
    return ops.fma(factor * y, z, x) if device == "cpu" else ops.fma(factor, y * z, x)


def quotient_added(xyz: Sequence[Expr], factor: Expr, device: str) -> Expr:
    """x + factor * y / z with torch's roundings."""
    x, y, z = xyz
    if ops.is_value(factor, 1) or device == "cpu":
        return x + y * factor / z
    return ops.fma(factor, y / z, x)


def _plus(b: GraphBuilder, x: Operand, y: Operand, alpha: Number, sign: int) -> Value:
    """x + sign * alpha * y, with one rounding for floats, as in torch's loops."""
    t, device = b.result.dtype, b.result.device
    of = ops.add if sign > 0 else ops.sub
    kept = [keeps("add", device, k) for k in range(2)]

    def fn(i: Index) -> Expr:
        e, f = element(x, i, t, kept=kept[0]), element(y, i, t, kept=kept[1])
        if not isinstance(alpha, Sym) and alpha == 1:
            return of(e, f)
        if not e.dtype.is_float:
            return of(e, f * element(alpha, (), t, kept=kept[1]))
        return ops.fma(f, element(alpha * sign, (), t, kept=kept[1]), e)  # 0.0 for an int 0

    return b.map(fn)


lowering("add")(lambda b, x, y, alpha=1: _plus(b, x, y, alpha, 1))  # bool: logical or
lowering("sub", "subtract")(lambda b, x, y, alpha=1: _plus(b, x, y, alpha, -1))
lowering("rsub")(lambda b, x, y, alpha=1: _plus(b, y, x, alpha, -1))


def _enter_added(name: str, added: Callable[[Sequence[Expr], Expr, str], Expr]) -> None:
    """Register x + value * y * z, or x + value * y / z."""

    @lowering(name)
    def combined(b: GraphBuilder, x: Value, y: Value, z: Value, value: Number = 1) -> Value:
        t, device = b.result.dtype, b.result.device
        factor = element(value, (), t, kept=True)
        return b.map(lambda i: added([element(v, i, t) for v in (x, y, z)], factor, device))


_enter_added("addcmul", product_added)
_enter_added("addcdiv", quotient_added)


# Torch decomposes in-place addcmul into this op.
elementwise("prims.fma", tensors=3)(
    lambda x, y, z: ops.fma(x, y, z) if z.dtype.is_float else x * y + z
)


@lowering("lerp")
def lerp(b: GraphBuilder, x: Value, end: Value, weight: Operand) -> Value:
    """x + weight * (end - x), from the nearer of both; one product is added exactly."""
    t = b.result.dtype

    def fn(i: Index) -> Expr:
        low, high, w = element(x, i, t), element(end, i, t), element(weight, i, t, kept=True)
        span = high - low
        return ops.where(abs(w) < 0.5, ops.fma(w, span, low), ops.fma(span, w - 1.0, high))

    return b.map(fn)
