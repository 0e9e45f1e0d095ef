"""Rounding to the steps of a quantizer and back, with the mask that its gradient is cut by."""

from __future__ import annotations

from collections.abc import Callable

from lenz import ops
from lenz.ir.expr import Expr, const
from lenz.lower.builder import GraphBuilder, Index, Value
from lenz.lower.operand import number
from lenz.lower.registry import lowering
from lenz.sym import ZERO


def _fake(
    b: GraphBuilder,
    x: Value,
    scales: Value | float,
    zeros: Value | int,
    place: Callable[[Index], Index],
    bounds: tuple[int, int],
    enabled: Value | None = None,
) -> tuple[Value, Value]:
    """(clamp(round(x / scale) + zero, low, high) - zero) scale; and what the clamp left alone.

    `place` says where the scale and the zero point of an element stand, if they are tensors.
    """
    low, high = bounds

    def step(i: Index) -> tuple[Expr, Expr, Expr]:
        e = x.compute(i)
        scale, zero = (
            ops.cast(v.at(place(i)[: v.rank]), e.dtype)
            if isinstance(v, Value)
            else number(v, e.dtype)
            for v in (scales, zeros)
        )
        return ops.round(e * ops.reciprocal(scale)) + zero, scale, zero

    on = None if enabled is None else ops.truth(enabled.at((ZERO,) * enabled.rank))

    def value(i: Index) -> Expr:
        q, scale, zero = step(i)
        bottom, top = const(low, q.dtype), const(high, q.dtype)
        # Not maximum and minimum: eager makes the least integer of NaN.
        q = ops.where(q > bottom, q, bottom)
        e = (ops.where(q < top, q, top) - zero) * scale
        return e if on is None else ops.where(on, e, x.compute(i))

    def inside(i: Index) -> Expr:
        q, _, _ = step(i)
        kept = (q >= low) & (q <= high)
        return kept if on is None else kept | on ^ True

    return b.map(value), b.map(inside, b.results[1], "mask")


@lowering("fake_quantize_per_tensor_affine_cachemask")
def per_tensor(
    b: GraphBuilder, x: Value, scale: float, zero_point: int, quant_min: int, quant_max: int
) -> tuple[Value, Value]:
    """One scale for all elements."""

    return _fake(b, x, scale, zero_point, lambda i: (), (quant_min, quant_max))


@lowering("_fake_quantize_per_tensor_affine_cachemask_tensor_qparams")
def per_tensor_of_tensors(
    b: GraphBuilder,
    x: Value,
    scale: Value,
    zero_point: Value,
    fake_quant_enabled: Value,
    quant_min: int,
    quant_max: int,
) -> tuple[Value, Value]:
    """One scale for all elements, in a tensor; nothing is done where it is not enabled."""

    bounds = quant_min, quant_max
    return _fake(b, x, scale, zero_point, lambda i: (ZERO,), bounds, fake_quant_enabled)


@lowering("fake_quantize_per_channel_affine_cachemask")
def per_channel(
    b: GraphBuilder,
    x: Value,
    scale: Value,
    zero_point: Value,
    axis: int,
    quant_min: int,
    quant_max: int,
) -> tuple[Value, Value]:
    """A scale for each slice of one dimension."""

    return _fake(b, x, scale, zero_point, lambda i: (i[axis],), (quant_min, quant_max))
