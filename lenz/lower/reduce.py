"""Reductions: sums, products with vectors, extrema, positions, truth, variances and norms.

Halves are accumulated in f32 and rounded once, integers in i64 (sum, prod).  As in eager, a `dtype`
argument converts every element before it is accumulated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lenz import ops
from lenz.ir.dtype import BOOL, F64, U8, DType, compute_dtype
from lenz.ir.expr import Expr, const
from lenz.ir.graph import ReduceKind
from lenz.ir.tensor import TensorType
from lenz.lower.builder import Decline, Fn, GraphBuilder, Index, Value
from lenz.lower.dims import Split, count, cut, reduce_over
from lenz.lower.moments import Sets, chunks_of, moments
from lenz.lower.operand import broadcast, number, reader
from lenz.lower.registry import lowering
from lenz.sym import ONE, ZERO, Sym

Dim = int | Sequence[int] | None
Scalar = int | float


def converted(x: Value, i: Index, to: DType) -> Expr:
    """An element converted to a result type as in eager, in its compute type."""
    return ops.cast(ops.cast(x.at(i), to), compute_dtype(to))


def non_zero(x: Value, i: Index) -> Expr:
    """Whether an element is nonzero: NaN is true."""
    e = x.compute(i)
    return e if x.dtype is BOOL else ops.ne(e, 0)


def accumulate(
    b: GraphBuilder, kind: ReduceKind, x: Value, dim: Dim, keepdim: bool, finish: Fn | None = None
) -> Value:
    """Sum or product in the result type; with a bool result, any or all."""
    s, to = cut(x.shape, dim), b.result.dtype
    if to is BOOL:
        truth: ReduceKind = "any" if kind == "sum" else "all"
        return reduce_over(b, truth, s, keepdim, lambda i: non_zero(x, i))
    return reduce_over(b, kind, s, keepdim, lambda i: converted(x, i, to), finish)


# Bool and integers give i64 unless `dtype` is given.
lowering("sum")(lambda b, x, dim=None, keep=False, **_: accumulate(b, "sum", x, dim, keep))
lowering("prod")(lambda b, x, dim=None, keep=False, **_: accumulate(b, "prod", x, dim, keep))


@lowering("mean")
def mean(b: GraphBuilder, x: Value, dim: Dim = None, keepdim: bool = False, **_: Any) -> Value:
    """Mean: the sum divided by the number of elements; NaN if there are none."""
    n = count(cut(x.shape, dim).over, compute_dtype(b.result.dtype))
    return accumulate(b, "sum", x, dim, keepdim, lambda acc: acc / n)


# Dot products of the rows of x (or the vector x) with the vector y.
lowering("dot", "vdot", "mv")(lambda b, x, y: _rows_times(b, x, y, b.result))


def _rows_times(b: GraphBuilder, x: Value, y: Value, type: TensorType) -> Value:
    to = b.result.dtype
    term = lambda i, r: converted(x, (*i, *r), to) * converted(y, r, to)
    return b.reduce("sum", type.shape, y.shape, term, type=type)


@lowering("addmv")
def addmv(b: GraphBuilder, x: Value, matrix: Value, y: Value, **scales: Any) -> Value:
    """beta x + alpha matrix y; with beta = 0, NaN in x is ignored."""
    sums = _rows_times(b, matrix, y, b.temp(b.result.shape, compute_dtype(b.result.dtype)))
    return scaled_sum(b, x, sums, **scales)


def scaled_sum(
    b: GraphBuilder, x: Value, sums: Value, *, beta: Sym | Scalar = 1, alpha: Sym | Scalar = 1
) -> Value:
    """beta x + alpha sums; with beta = 0, NaN in x is ignored."""
    if isinstance(alpha, Sym) or isinstance(beta, Sym) or alpha == 0:
        raise Decline("a scale of 0, for which most of eager's kernels ignore NaN")

    def fn(i: Index) -> Expr:
        e = number(alpha, sums.dtype) * sums.at(i)
        if beta == 0:
            return e
        return number(beta, e.dtype) * converted(x, broadcast(x, i), b.result.dtype) + e

    return b.map(fn)


def full_rows(x: Value, dim: Dim) -> Split:
    """The rows of an extremum or a median; declines rows that may be empty."""
    s = cut(x.shape, dim)
    if any(n.lo is None or n.lo < 1 for n in s.over):
        raise Decline("what eager gives, or raises, for no elements")
    return s


def _enter_extremum(kind: ReduceKind, place: ReduceKind) -> None:
    """Register the maximum or minimum, of rows or of all, and its position.

    With several dimensions, one, or none; `place` is a position along one or in the flattened
    tensor. NaN is the extremum, the first of equals has its place.
    """
    truth: ReduceKind = "any" if kind == "max" else "all"

    def best(b: GraphBuilder, x: Value, s: Split, keep: bool, to: TensorType | None) -> Value:
        return reduce_over(b, truth if x.dtype is BOOL else kind, s, keep, x.compute, type=to)

    def first(b: GraphBuilder, x: Value, s: Split, keep: bool, to: TensorType | None) -> Value:
        at = (lambda i: ops.cast(x.at(i), U8)) if x.dtype is BOOL else x.compute
        return reduce_over(b, place, s, keep, at, type=to)

    lowering(f"a{kind}", f"{kind}.default")(
        lambda b, x, dim=(), keepdim=False: best(b, x, full_rows(x, dim), keepdim, None)
    )

    @lowering(f"{kind}.dim")
    def along(b: GraphBuilder, x: Value, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
        s = full_rows(x, dim)
        return best(b, x, s, keepdim, b.results[0]), first(b, x, s, keepdim, b.results[1])

    lowering(place)(
        lambda b, x, dim=None, keepdim=False: first(b, x, full_rows(x, dim), keepdim, None)
    )


_enter_extremum("max", "argmax")
_enter_extremum("min", "argmin")


def _enter_truth(kind: ReduceKind) -> None:
    """Register whether any, or all, elements of each row are nonzero (bool; u8 for u8)."""

    @lowering(kind)
    def over(b: GraphBuilder, x: Value, dim: Dim = None, keepdim: bool = False) -> Value:
        if isinstance(dim, (list, tuple)) and not dim:  # unlike elsewhere, it reduces none
            return b.map(lambda i: ops.cast(non_zero(x, i), b.result.dtype))
        return reduce_over(b, kind, cut(x.shape, dim), keepdim, lambda i: non_zero(x, i))


_enter_truth("any")
_enter_truth("all")


def spread(
    b: GraphBuilder, x: Value, dim: Dim, lost: Scalar, keepdim: bool, root: bool, with_mean: bool
) -> Value | tuple[Value, Value]:
    """Variance (or its root) of each row, and the mean if asked for; NaN for no elements.

    Two passes: sum((x - mean)^2) / max(n - lost, 0), where a NaN counts as 0, which stays accurate
    if the mean is large relative to the deviation; on CPUs in f64, as in eager. On GPUs long rows
    are read once.
    """
    s, acc = cut(x.shape, dim), F64 if x.device == "cpu" else compute_dtype(x.dtype)
    at = reader(x, acc)
    n = count(s.over, acc)
    second = b.results[1] if with_mean else None
    shape = s.padded if keepdim else s.rows
    mean_type = b.temp(shape, acc) if second is None else replace(second, dtype=acc)

    def finish(a: Expr) -> Expr:
        v = a / ops.where((n > lost) & ops.ne(n, 0), n - lost, 0)
        return ops.sqrt(v) if root else v

    sets = Sets(x, shape, s.over, lambda i, r: s.join(s.row(i) if keepdim else i, r))
    if chunks_of(b, sets) is not None:
        centre, result = moments(b, sets, (mean_type, b.result), finish, "spread")
    else:
        centre = reduce_over(b, "sum", s, keepdim, at, lambda a: a / n, mean_type, "mean")

        def deviation(i: Index) -> Expr:
            return ops.square(at(i) - centre.at(s.pad(s.row(i)) if keepdim else s.row(i)))

        result = reduce_over(b, "sum", s, keepdim, deviation, finish)
    if second is None:
        return result
    return result, centre if centre.dtype is second.dtype else b.map(centre.at, second, "mean")


def _enter_spread(packet: str, root: bool, with_mean: bool) -> None:
    """Register the three overloads of var, std, var_mean or std_mean."""

    @lowering(f"{packet}.dim", f"{packet}.correction")
    def along(
        b: GraphBuilder,
        x: Value,
        dim: Dim = None,
        unbiased: bool = True,
        keepdim: bool = False,
        correction: Scalar | None = None,
    ) -> Value | tuple[Value, Value]:
        lost = int(unbiased) if correction is None else correction
        return spread(b, x, dim, lost, keepdim, root, with_mean)

    lowering(f"{packet}.default")(lambda b, x, unbiased=True: along(b, x, None, unbiased))


for _name in ("var", "std", "var_mean", "std_mean"):
    _enter_spread(_name, root=_name.startswith("std"), with_mean=_name.endswith("mean"))


@lowering("linalg_vector_norm")
@lowering("norm.Scalar", "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim", "norm.ScalarOpt_dim_dtype")
def norm(
    b: GraphBuilder,
    x: Value,
    ord: Scalar | None = 2,
    dim: Dim = None,
    keepdim: bool = False,
    **given: Any,
) -> Value:
    """The vector norm over some dimensions, or all, of elements in the result's type.

    (sum |x|^p)^(1/p); for inf and -inf the extrema of |x|, for 0 the count of x != 0.
    """
    p, to = given.get("p", ord), b.result.dtype
    p = 2 if p is None else p
    s = cut(x.shape, dim)
    if not isinstance(p, Sym) and p != 0 and all(n is ONE for n in s.over):
        p = 1  # of one element, whose power may overflow
    if p == math.inf and ZERO in s.over:
        # The norm of an empty row is 0, unlike max over |x|.
        return b.map(lambda i: const(0, to))

    def term(i: Index) -> Expr:
        e = converted(x, i, to)
        if p == 0:
            return ops.cast(ops.ne(e, 0), e.dtype)
        if p == 2:
            return ops.square(e)
        return abs(e) if p in (1, math.inf, -math.inf) else ops.pow(abs(e), const(p, e.dtype))

    def root(a: Expr) -> Expr:
        if p in (0, 1, math.inf, -math.inf):
            return a
        return ops.sqrt(a) if p == 2 else ops.pow(a, const(1.0 / p, a.dtype))

    kinds: dict[Scalar, ReduceKind] = {math.inf: "max", -math.inf: "min"}
    return reduce_over(b, kinds.get(p, "sum"), s, keepdim, term, root)
