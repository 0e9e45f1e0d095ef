"""Bags of table rows: their sum, mean or maximum; gradients are updates.

A bag holds the indices from its offset up to the next one. If the offsets are a range made in this
graph (torch does that for 2-d indices), all bags have the same size and are reductions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from lenz import ops
from lenz.ir.dtype import F32, I64, compute_dtype
from lenz.ir.expr import Expr, const, exact_place, index, masked
from lenz.ir.graph import Pointwise
from lenz.lower.builder import At, Decline, GraphBuilder, Index, Term, Update, Value, maker
from lenz.lower.index import checked, computed, is_position
from lenz.lower.registry import lowering
from lenz.lower.scatter import check_places, update
from lenz.machines import runs_programs
from lenz.sym import ZERO, Sym, affine_in, flatten, product

SUM, MEAN, MAX = 0, 1, 2
# On GPUs a table with at most this square of its rows, times its columns, is summed row by row.
# Updates of one row wait for each other: 2^18 lookups in 32 rows of 8 take 1340 us on an H100.
SMALL = 1 << 14


def _bag_size(b: GraphBuilder, offsets: Value, count: Sym, bags: Sym) -> Sym | None:
    """The common size of all bags, if the offsets are a range and bags cover `count` indices."""
    n = maker(b, offsets.name)
    if not isinstance(n, Pointwise) or len(n.axes) != 1 or (place := exact_place(n.body)) is None:
        return None
    parts = affine_in(place, n.axes[0].var)
    if parts is None or parts[1] is not ZERO or parts[0] * bags is not count:
        return None
    return parts[0]


def bags_of(b: GraphBuilder, offsets: Value, count: Sym) -> Value:
    """The bag number of each index: the number of offsets at or before it, less one."""
    # An offset past the last index (an empty bag) goes to a position without an index.
    row = b.temp((count + 1,), I64)

    def mark(i: Index) -> Update:
        at = checked(offsets.at(i), count + 1, fault="assert_in_bounds")
        return (computed(0, count + 1),), (at,), const(1, I64)

    numbers = b.scan("sum", 0, b.scatter("add", const(0, I64), offsets.shape, mark, row).at, row)
    return b.map(lambda i: numbers.at(i) - 1, b.temp((count,), I64))


@lowering("_embedding_bag", "_embedding_bag_forward_only")
def embedding_bag(
    b: GraphBuilder,
    weight: Value,
    indices: Value,
    offsets: Value,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Value | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Value, ...]:
    """For bags of equal size: reduced rows, the bag of each index, bag sizes, and argmaxima."""
    bags, count, rows = b.result.shape[0], indices.shape[0], weight.shape[0]
    if not is_position(indices) or include_last_offset or any(s is ZERO for s in weight.shape):
        raise Decline("an embedding bag of other indices")
    size = _bag_size(b, offsets, count, bags)
    if size is None or size is ZERO or (mode == MAX and padding_idx >= 0):
        raise Decline("bags of several sizes, which eager sums faster")

    def counts(bag: Sym, k: Sym) -> Expr:
        return ops.ne(ops.cast(indices.at((bag * size + k,)), I64), padding_idx)

    def term(i: Index, r: Index) -> Expr:
        at = (i[0] * size + r[0],)
        looked_up = checked(indices.at(at), rows, fault="assert_in_bounds")
        e = weight.compute((computed(0, rows), i[1]), (looked_up,))
        if per_sample_weights is not None:
            e = e * per_sample_weights.compute(at)
        if mode == MAX:  # eager compares with ">", so that only a first NaN stays
            e = ops.where(ops.isnan(e) & (index(r[0]) > 0), -math.inf, e)
        return e if padding_idx < 0 else ops.where(counts(i[0], r[0]), e, 0)

    row = b.temp((bags,), I64)
    sizes = b.map(lambda i: index(size), row)
    if padding_idx >= 0:
        count_of = lambda i, r: ops.cast(counts(i[0], r[0]), I64)
        sizes = b.reduce("sum", row.shape, (size,), count_of, None, row)
    out = _bags(b, mode, size, term, sizes if padding_idx >= 0 else None)
    best = None
    if mode == MAX:
        where = b.temp((bags, b.result.shape[1]), I64)
        first = b.reduce("argmax", where.shape, (size,), term, None, where, "first")

        def best(i: Index) -> Expr:
            # Of at least one element, some element is the largest.
            at = first.at(i) if size.lo else ops.assert_in_range(first.at(i), index(size))
            return ops.cast(indices.at((i[0] * size + computed(0, size),), (at,)), I64)

    return (out, *_side_results(b, size, sizes, best))


def _bags(b: GraphBuilder, mode: int, size: Sym, term: Term, counts: Value | None) -> Value:
    """The reduced bags; `counts` is the number of rows that count in each bag, if not all do."""
    shape = b.result.shape
    if mode != MEAN:
        return b.reduce("max" if mode == MAX else "sum", shape, (size,), term)
    if counts is None:
        return b.reduce("sum", shape, (size,), term, lambda a: a / index(size, a.dtype))
    wide = compute_dtype(b.result.dtype)
    total, own = b.reduce("sum", shape, (size,), term, type=b.temp(shape, wide)), counts

    return b.map(lambda i: total.at(i) / ops.cast(ops.maximum(own.at(i[:1]), 1), wide))


def _side_results(b: GraphBuilder, size: Sym, sizes: Value, best: At | None) -> tuple[Value, ...]:
    """Operands of the gradient, in eager's shapes: each index's bag, bag sizes, argmaxima."""
    bag, counts, maxima = (b.kind(k) for k in (1, 2, 3))
    at_size = lambda i: sizes.at(i) if counts.shape == sizes.shape else const(0, I64)
    if best is None or maxima.rank != 2:
        best = lambda i: const(0, I64)
    return (
        b.map(lambda i: index(i[0] // size), bag, "bag"),
        b.map(at_size, counts, "bag_size"),
        b.map(best, maxima, "maxima"),
    )


@lowering("embedding_dense_backward")
def embedding_dense_backward(
    b: GraphBuilder,
    grad: Value,
    indices: Value,
    num_weights: Sym | int,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> Value:
    """The gradient of a table: each lookup adds its gradient to its row."""
    table = b.map(lambda i: const(0, b.result.dtype), b.result)
    if scale_grad_by_freq or not isinstance(padding_idx, int):
        raise Decline("scaled by the number of lookups of a row")
    check_places(table, indices, (0,))
    rows = table.shape[0]

    place = lambda i: ((computed(0, rows), i[-1]), (checked(indices.at(i[:-1]), rows),))

    def value(i: Index) -> Expr:
        is_padding = ops.eq(ops.cast(indices.at(i[:-1]), I64), padding_idx)
        return grad.at(i) if padding_idx < 0 else ops.where(is_padding, 0, grad.at(i))

    most, atomic = product(indices.shape).hi, runs_programs(table.device) and ZERO not in grad.shape
    if atomic and (size := (rows * rows * grad.shape[-1]).hi) is not None and size <= SMALL:

        def term(i: Index, r: Index) -> Expr:
            is_own = ops.eq(ops.cast(indices.at(r), I64), index(i[0]))
            return ops.where(is_own, ops.cast(value((*r, i[1])), compute_dtype(table.dtype)), 0)

        return b.reduce("sum", table.shape, indices.shape, term)
    if atomic and table.dtype.is_half and most is not None and most < (rows.lo or 0):
        return _few_rows(b, indices, rows, grad.shape, value)
    return update(b, "add", table, (grad.shape, place, value))


def _few_rows(b: GraphBuilder, indices: Value, rows: Sym, over: Sequence[Sym], value: At) -> Value:
    """The gradient of a table with fewer lookups than rows and sums of a wider type.

    The first lookup of a row owns it, so that there is one sum per lookup, not per row of the
    table. 2^14 lookups in 50257 rows of 768 bf16 move 160 MB instead of 460 MB. Rows without a
    lookup have the owner past the last one.
    """
    lookups = product(indices.shape)
    row: Callable[[Index], tuple[Expr]] = lambda i: (checked(indices.at(i), rows),)
    number = lambda i: ((computed(0, rows),), row(i), index(flatten(i, indices.shape)))
    own = b.scatter("min", index(lookups), indices.shape, number, b.temp((rows,), I64))

    def place(i: Index) -> Update:
        at = own.at((computed(0, rows),), row(i[:-1]))
        return (computed(0, lookups + 1), i[-1]), (at,), ops.cast(value(i), F32)

    total = b.scatter("add", const(0, F32), over, place, b.temp((lookups + 1, over[-1]), F32))

    def found(i: Index) -> Expr:
        at = own.at(i[:1])
        e = ops.cast(total.at((computed(0, lookups + 1), i[1]), (at,)), b.result.dtype)
        return masked(at < index(lookups), e, const(0, e.dtype))

    return b.map(found)
