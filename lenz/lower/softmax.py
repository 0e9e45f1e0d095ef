"""Softmax and log-softmax along one dimension, and their gradients.

With m the maximum of the row and s = sum(exp(x - m)):
    softmax(x) = exp(x - m) / s        log_softmax(x) = x - m - log(s)
A row of -inf, or with a +inf, gives NaN as in eager (`_safe_softmax`: zeros for a row of -inf).
"""

from __future__ import annotations

import math

import torch

from lenz import ops
from lenz.ir.dtype import DType, compute_dtype
from lenz.ir.expr import Expr
from lenz.lower.builder import At, GraphBuilder, Index, Value
from lenz.lower.dims import Split, cut, reduce_over, sum_rows
from lenz.lower.operand import reader
from lenz.lower.registry import lowering


def exp_sum(b: GraphBuilder, x: Value, s: Split, acc: DType) -> tuple[Value, Value]:
    """The maximum m of each row and sum(exp(x - m)), both in the compute type."""
    top = reduce_over(b, "max", s, False, reader(x, acc), None, b.temp(s.rows, acc), "max")
    return top, sum_rows(b, s, lambda i: ops.exp(shifted(x, top, s, i)), acc, "sum")


def shifted(x: Value, top: Value, s: Split, i: Index) -> Expr:
    """x - m for one element."""
    return ops.cast(x.compute(i), top.dtype) - top.at(s.row(i))


@lowering("_softmax")
def softmax(b: GraphBuilder, x: Value, dim: int, half_to_float: bool) -> Value:
    """exp(x - m) / s."""
    return b.map(_shares(b, x, cut(x.shape, dim))[1])


def _shares(b: GraphBuilder, x: Value, s: Split) -> tuple[Value, At]:
    top, total = exp_sum(b, x, s, compute_dtype(b.result.dtype))
    return top, lambda i: ops.exp(shifted(x, top, s, i)) / total.at(s.row(i))


@lowering("_safe_softmax")
def safe_softmax(b: GraphBuilder, x: Value, dim: int, dtype: torch.dtype | None = None) -> Value:
    """Softmax that gives zeros for a row of -inf."""
    s = cut(x.shape, dim)
    top, share = _shares(b, x, s)
    return b.map(lambda i: ops.where(ops.eq(top.at(s.row(i)), -math.inf), 0, share(i)))


@lowering("_log_softmax")
def log_softmax(b: GraphBuilder, x: Value, dim: int, half_to_float: bool) -> Value:
    """x - m - log(s)."""
    s = cut(x.shape, dim)
    top, total = exp_sum(b, x, s, compute_dtype(b.result.dtype))
    return b.map(lambda i: shifted(x, top, s, i) - ops.log(total.at(s.row(i))))


@lowering("_softmax_backward_data")
def softmax_backward(
    b: GraphBuilder, grad: Value, y: Value, dim: int, input_dtype: torch.dtype
) -> Value:
    """dx = y * (dy - sum(dy * y))."""
    s, acc = cut(y.shape, dim), compute_dtype(y.dtype)
    dy = reader(grad, acc)

    inner = sum_rows(b, s, lambda i: dy(i) * y.compute(i), acc, "sum")
    return b.map(lambda i: y.compute(i) * (dy(i) - inner.at(s.row(i))))


@lowering("_log_softmax_backward_data")
def log_softmax_backward(
    b: GraphBuilder, grad: Value, y: Value, dim: int, input_dtype: torch.dtype
) -> Value:
    """dx = dy - exp(y) * sum(dy)."""
    s, acc = cut(y.shape, dim), compute_dtype(y.dtype)
    dy = reader(grad, acc)
    total = sum_rows(b, s, dy, acc, "sum")
    return b.map(lambda i: dy(i) - ops.exp(y.compute(i)) * total.at(s.row(i)))
