"""Reads at computed positions: gather, index, embedding. An out-of-range position raises."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from lenz import ops
from lenz.ir.dtype import I32, I64
from lenz.ir.expr import Expr, const, index
from lenz.ir.tensor import axis
from lenz.lower.builder import At, Decline, GraphBuilder, Index, Move, Value
from lenz.lower.dims import wrapped
from lenz.lower.operand import broadcast
from lenz.lower.registry import lowering
from lenz.sym import ONE, ZERO, Sym, Var, product, unflatten

Place: TypeAlias = tuple[Index, tuple[Expr, ...]]


def computed(k: int, size: Sym) -> Var:
    """The variable of a load's k-th computed position, in a dimension of this size."""
    return axis(f"@{k}", size).var


def checked(e: Expr, size: Sym, *, wraps: bool = False, fault: str = "assert_in_range") -> Expr:
    """A position from a tensor, as i64 in [0, size); a negative one may count from the end.

    Out of range it raises eager's error (`errors.FAULTS`).
    """
    e = ops.cast(e, I64)
    n = index(size)
    if wraps:
        e = ops.where(e < 0, e + n, e)
    return ops.assert_in_range(e, n, fault)


def in_scalar(x: Value, index: Value, value: At, **how: Any) -> At:
    """`value`, which also checks the positions if x is a scalar: that has no place to check.

    `how` is as for `checked`.
    """

    def of_scalar(i: Index) -> Expr:
        at = checked(index.at(i[: index.rank] or (ZERO,) * index.rank), ONE, **how)
        return ops.where(ops.eq(at, 0), value(i), 0)

    return value if x.rank else of_scalar


def placed(x: Value, d: int, index: Value, at: Move, **how: Any) -> Callable[[Index], Place]:
    """Element i of `x`, but in dimension d at the position in element at(i) of `index`.

    An index without dimensions has one position. A scalar has no place to check: see `in_scalar`.
    `how` is as for `checked`.
    """

    def place(i: Index) -> Place:
        if not x.rank:
            return (), ()
        e = checked(index.at(at(i) if index.rank else ()), x.shape[d], **how)
        where = i or (ZERO,) * x.rank
        return (*where[:d], computed(0, x.shape[d]), *where[d + 1 :]), (e,)

    return place


def is_position(x: Value) -> bool:
    """True for a tensor whose elements may be positions; bytes are masks of an older kind."""
    return x.dtype in (I32, I64)


def _check_reads(x: Value, *positions: Value) -> None:
    """Decline masks as positions, and reads of an empty tensor, which eager reports."""
    for v in positions:
        if not is_position(v):
            raise Decline(f"positions of type {v.dtype}")
    if any(s is ZERO for s in x.shape):
        raise Decline("a read of a tensor without elements")


def _check_slices(b: GraphBuilder, x: Value, d: int, positions: Value) -> None:
    """Decline also slices that may be empty, where eager's kernel raises another error."""
    _check_reads(x, positions)
    if not all(k == d or b.env.is_positive(s) for k, s in enumerate(x.shape)):
        raise Decline("slices that may be empty")


@lowering("index.Tensor", "_unsafe_index.Tensor", any_dtype=True)
def index_(b: GraphBuilder, x: Value, indices: Sequence[Value | None]) -> Value:
    """x at broadcast positions; their dimensions replace adjacent ones, or else come first."""
    given = {d: v for d, v in enumerate(indices) if v is not None}
    if not all(is_position(v) for v in given.values()):
        raise Decline("a mask as index: the size of the result depends on its values")
    if not given:
        return b.view(x, lambda i: i)
    _check_reads(x)
    return b.map(lambda i: x.at(*at_positions(x, given, i)))


def at_positions(x: Value, given: Mapping[int, Value], i: Index) -> Place:
    """The place in x of element i of x[given], with positions by dimension, and its operands."""
    dims = list(given)
    rank = max(v.rank for v in given.values())
    first = dims[0] if dims == list(range(dims[0], dims[0] + len(dims))) else 0
    shared = i[first : first + rank]
    rest = iter((*i[:first], *i[first + rank :]))
    where: list[Sym] = []
    bound: list[Expr] = []
    for d in range(x.rank):
        if d in given:
            v = given[d]
            where.append(computed(len(bound), x.shape[d]))
            bound.append(checked(v.at(broadcast(v, shared)), x.shape[d], wraps=True))
        else:
            where.append(next(rest))
    return tuple(where), tuple(bound)


@lowering("gather", any_dtype=True)
def gather(b: GraphBuilder, x: Value, dim: int, index: Value, sparse_grad: bool = False) -> Value:
    """out[i] = x[i with i[dim] replaced by index[i]]."""
    if ZERO in index.shape:
        return b.map(lambda i: const(0, x.dtype))
    _check_reads(x, index)
    place = placed(x, wrapped(dim, x.rank), index, lambda i: i, fault="assert_in_bounds")
    return b.map(in_scalar(x, index, lambda i: x.at(*place(i)), fault="assert_in_bounds"))


@lowering("index_select", any_dtype=True)
def index_select(b: GraphBuilder, x: Value, dim: int, index: Value) -> Value:
    """Slices of x along one dimension, by their positions."""
    d = wrapped(dim, x.rank)
    _check_slices(b, x, d, index)
    # Eager has a special kernel for the second dimension, which raises another error.
    fault = "assert_in_bounds" if d == 1 else "assert_in_range"
    place = placed(x, d, index, lambda i: (i[d],), fault=fault)
    return b.map(in_scalar(x, index, lambda i: x.at(*place(i)), fault=fault))


@lowering("embedding", any_dtype=True)
def embedding(b: GraphBuilder, weight: Value, indices: Value, *_: Any, **__: Any) -> Value:
    """Rows of a table, by their positions."""
    _check_slices(b, weight, 0, indices)
    rows = weight.shape[0]

    def fn(i: Index) -> Expr:
        e = checked(indices.at(i[: indices.rank]), rows)
        return weight.at((computed(0, rows), *i[indices.rank :]), (e,))

    return b.map(fn)


@lowering("take", any_dtype=True)
def take(b: GraphBuilder, x: Value, index: Value) -> Value:
    """Elements by their row-major position; negative ones count from the end."""
    if ZERO in index.shape and is_position(index):
        return b.map(lambda i: const(0, x.dtype))
    _check_reads(x, index)
    count = product(x.shape)
    where = unflatten(computed(0, count), x.shape)
    return b.map(lambda i: x.at(where, (checked(index.at(i), count, wraps=True),)))
