"""Gradients of the normalisations.

With xhat = (x - mean) * rstd and h = dy * weight, over the n elements that share statistics:
    dx = (n h - xhat * sum(h * xhat) - sum(h)) * rstd / n
    dweight = sum(dy * xhat)        dbias = sum(dy)
As in eager, nothing is divided before the subtraction: sums of a few short numbers are exact. RMS
norm has no mean: xhat = x * rstd, without sum(h).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lenz import ops
from lenz.ir.dtype import DType, compute_dtype
from lenz.ir.expr import Expr
from lenz.lower.builder import At, Decline, Fn, GraphBuilder, Index, Value
from lenz.lower.dims import Split, count, cut, reduce_over, sum_rows
from lenz.lower.norm import Groups, group_of, invstd_of, scaled
from lenz.lower.operand import Size, reader
from lenz.lower.registry import lowering


def _normalised(x: Value, mean: At | None, rstd: At, acc: DType) -> tuple[At, At]:
    """(x - mean) * rstd as a function of the element, and rstd, in the type of the gradients."""
    factor: At = lambda i: ops.cast(rstd(i), acc)

    def xhat(i: Index) -> Expr:
        e = x.compute(i)
        return (e if mean is None else e - ops.cast(mean(i), acc)) * factor(i)

    return xhat, factor


@lowering("native_layer_norm_backward")
def native_layer_norm_backward(b: GraphBuilder, *args: Any) -> tuple[Value | None, ...]:
    """dx, dweight, dbias, each if the mask asks for it."""
    grad, x, inner, mean, rstd, weight, _, mask = args
    return _rows_backward(b, grad, x, len(inner), mean, rstd, weight, mask)


@lowering("_fused_rms_norm_backward")
def fused_rms_norm_backward(b: GraphBuilder, *args: Any) -> tuple[Value | None, ...]:
    """dx, dweight, each if the mask asks for it."""
    grad, x, inner, rstd, weight, mask = args
    return _rows_backward(b, grad, x, len(inner), None, rstd, weight, (*mask, False))[:2]


def _rows_backward(
    b: GraphBuilder,
    grad: Value,
    x: Value,
    inner: int,
    mean: Value | None,
    rstd: Value,
    weight: Value | None,
    mask: Sequence[bool],
) -> tuple[Value | None, ...]:
    lead = x.rank - inner
    s = cut(x.shape, tuple(range(lead, x.rank)))
    acc = compute_dtype(x.dtype)

    dy = reader(grad, acc)
    h: At = lambda i: scaled(dy(i), weight, None, i[lead:])
    of_row: Callable[[Value], At] = lambda v: lambda i: v.at(s.pad(s.row(i)))
    xhat, factor = _normalised(x, None if mean is None else of_row(mean), of_row(rstd), acc)

    dx = dweight = dbias = None
    if mask[0]:
        n = count(s.over, acc)
        first = None if mean is None else sum_rows(b, s, h, acc, "sum_h")
        second = sum_rows(b, s, lambda i: h(i) * xhat(i), acc, "sum_hx")

        def at(i: Index) -> Expr:
            e = h(i) * n - xhat(i) * second.at(s.row(i))
            e = e if first is None else e - first.at(s.row(i))
            return e * (factor(i) / n)

        dx = b.map(at)
    outer = Split(x.shape, tuple(range(lead)))
    if mask[1]:
        product: At = lambda i: dy(i) * xhat(i)
        dweight = reduce_over(b, "sum", outer, False, product, None, b.results[1], "dweight")
    if mask[2]:
        dbias = reduce_over(b, "sum", outer, False, dy, None, b.results[2], "dbias")
    return dx, dweight, dbias


@lowering("native_group_norm_backward")
def native_group_norm_backward(
    b: GraphBuilder,
    grad: Value,
    x: Value,
    mean: Value,
    rstd: Value,
    weight: Value | None,
    N: Size,
    C: Size,
    HxW: Size,
    group: Size,
    output_mask: Sequence[bool],
) -> tuple[Value | None, ...]:
    """dx, dweight, dbias: one pass over the data computes sums per channel, the rest is small."""
    s = group_of(x.shape, C, group)
    acc = compute_dtype(x.dtype)
    spatial, dy = Split(x.shape, tuple(range(2, x.rank))), reader(grad, acc)

    mean_at, rstd_at = (s.per_channel(b, x, v) for v in (mean, rstd))
    xhat, factor = _normalised(x, mean_at, rstd_at, acc)

    sum_dy = sum_rows(b, spatial, dy, acc, "sum_dy")
    sum_dyx = sum_rows(b, spatial, lambda i: dy(i) * xhat(i), acc, "sum_dyx")
    dx = dweight = dbias = None
    if output_mask[0]:
        means = [_group_mean(b, s, v, weight) for v in (sum_dy, sum_dyx)]
        first, second = (s.per_channel(b, x, v) for v in means)

        def at(i: Index) -> Expr:
            e = scaled(dy(i), weight, None, (i[1],)) - first(i)
            return factor(i) * (e - xhat(i) * second(i))

        dx = b.map(at)
    if output_mask[1]:
        dweight = _over_batch(b, sum_dyx, 1, "dweight")
    if output_mask[2]:
        dbias = _over_batch(b, sum_dy, 2, "dbias")
    return dx, dweight, dbias


def _group_mean(b: GraphBuilder, s: Groups, v: Value, weight: Value | None) -> Value:
    """[N, C] sums, times the weight, summed over each group and divided by its elements."""
    n = count(s.over, v.dtype)

    def at(i: Index, r: Index) -> Expr:
        c = s.join(i, r)[1]
        return scaled(v.at((i[0], c)), weight, None, (c,))

    finish: Fn = lambda a: a / n
    return b.reduce("sum", s.rows, (s.width,), at, finish, b.temp(s.rows, v.dtype, v), "mean_h")


def _over_batch(b: GraphBuilder, v: Value, position: int, name: str) -> Value:
    made = b.kind(position)  # its size may equal v's only by facts
    return b.reduce("sum", made.shape, v.shape[:1], lambda i, r: v.at((*r, *i)), None, made, name)


@lowering("native_batch_norm_backward", "batch_norm_backward")
def native_batch_norm_backward(
    b: GraphBuilder,
    grad: Value,
    x: Value,
    weight: Value | None,
    running_mean: Value | None,
    running_var: Value | None,
    save_mean: Value | None,
    save_invstd: Value | None,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
    reserve: Value | None = None,
) -> tuple[Value | None, ...]:
    """dx, dweight, dbias; without training the statistics are constants.

    In the form with the library's `reserve`, the saved "variance" is 1/sqrt(var + eps).
    """
    mean, given = (save_mean, save_invstd) if train else (running_mean, running_var)
    if mean is None or given is None:
        which = "saved" if train else "running"
        raise Decline(f"batch norm backward without {which} statistics")
    acc = compute_dtype(x.dtype)
    rstd = given if train else invstd_of(b, given, eps, b.temp(given.shape, acc, x))
    s, dy = Split(x.shape, tuple(d for d in range(x.rank) if d != 1)), reader(grad, acc)

    of_channel: Callable[[Value], At] = lambda v: lambda i: v.at((i[1],))
    xhat, scale = _normalised(x, of_channel(mean), of_channel(rstd), acc)

    product: At = lambda i: dy(i) * xhat(i)
    in_dx = train and output_mask[0]
    dbias = sum_rows(b, s, dy, acc, "dbias") if output_mask[2] or in_dx else None
    dweight = sum_rows(b, s, product, acc, "dweight") if output_mask[1] or in_dx else None

    def dx(i: Index) -> Expr:
        """invstd * weight * (dy - sum(dy)/n - xhat * sum(dy * xhat)/n); in evaluation no sums."""
        e = dy(i)
        if train and dbias is not None and dweight is not None:
            c, n = s.row(i), count(s.over, acc)
            e = e - dbias.at(c) / n - xhat(i) * (dweight.at(c) / n)
        return e * scaled(scale(i), weight, None, (i[1],))

    def result(v: Value | None, position: int) -> Value | None:
        type = b.results[position]
        return v if v is None or type is None or v.dtype is type.dtype else b.map(v.at, type)

    return (
        b.map(dx) if output_mask[0] else None,
        result(dweight, 1) if output_mask[1] else None,
        result(dbias, 2) if output_mask[2] else None,
    )
