"""Writes at computed positions: scatter, index_put and the like. An out-of-range position raises.

Each copies its first argument and updates it element by element in row-major order: the last of
several writes to one place wins, and sums are added in that order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from lenz import ops
from lenz.ir.dtype import BOOL, F32, I32, I64, NATIVE, compute_dtype
from lenz.ir.expr import Expr, const, masked
from lenz.ir.graph import UpdateMode
from lenz.lower.builder import At, Decline, Fn, GraphBuilder, Index, Value, round_to
from lenz.lower.dims import common_shape, wrapped
from lenz.lower.index import Place, at_positions, checked, computed, in_scalar, is_position, placed
from lenz.lower.known import gathered
from lenz.lower.operand import Operand, broadcast, exact
from lenz.lower.registry import lowering
from lenz.machines import runs_programs
from lenz.sym import ONE, ZERO, Sym, flatten, product, unflatten

# The shape of a loop over updates, and the place and the value of each.
Writes: TypeAlias = tuple[Sequence[Sym], Callable[[Index], Place], At]
MODES: dict[str, UpdateMode] = {
    "set": "set", "add": "add", "sum": "add", "mean": "add", "multiply": "mul", "prod": "mul",
    "amax": "max", "amin": "min",
}  # fmt: skip


def update(b: GraphBuilder, mode: UpdateMode, x: Value, w: Writes, once: bool = False) -> Value:
    """x with value(i) written to, or combined with, the element at place(i) for all i.

    Sums and products of halves are rounded `once`, or on CPUs after each value, as eager's op does:
    then 256 + 1 is 256 in bf16, but no wider copy of x is made.
    """
    over, place, value = w
    if mode != "set" and x.dtype not in NATIVE:
        raise Decline(f"{mode} updates of {x.dtype}")
    if ZERO in over:
        return b.map(x.at)
    if x.dtype is BOOL:  # a sum of bools is an or
        logical: dict[UpdateMode, UpdateMode] = {"add": "max", "mul": "min"}
        mode = logical.get(mode, mode)
    on_gpu, half = runs_programs(x.device), x.dtype.is_half
    if mode == "set" or not (on_gpu or (half and once and mode in ("add", "mul"))):
        return b.scatter(mode, x, over, lambda i: (*place(i), value(i)))
    # Updates of one element come in any order, so each must be one atomic instruction.
    if on_gpu and (mode == "mul" or (x.dtype.bits < 32 and not half)):
        raise Decline(f"{mode} updates of {x.dtype} that may collide")
    if not half and not (x.dtype.is_float and mode in ("max", "min")):
        return b.scatter(mode, x, over, lambda i: (*place(i), value(i)))

    ready: Fn = lambda e: _wins(mode, ops.cast(e, F32 if half else x.dtype))
    wide = b.temp(x.shape, F32 if half else x.dtype)
    entry = lambda i: (*place(i), ready(value(i)))
    found = b.map(lambda i: ready(x.at(i)), wide)
    found = b.scatter(mode, found, over, entry, wide if half else None)
    return b.map(lambda i: ops.cast(found.at(i), x.dtype)) if half else found


def _wins(mode: UpdateMode, e: Expr) -> Expr:
    """e, with the sign of NaN that wins: GPUs update floats by comparing their bits."""
    if mode not in ("max", "min"):
        return e
    word = I32 if e.dtype is F32 else I64
    sign = -(1 << (word.bits - 1))
    bits = ops.bitcast(e, word)
    bits = bits | sign if mode == "min" else bits & ~sign
    return ops.where(ops.isnan(e), ops.bitcast(bits, e.dtype), e)


def check_places(x: Value, index: Value, dims: Sequence[int]) -> None:
    """Decline positions in dimensions of x that may be empty."""
    if not is_position(index) and ZERO not in index.shape:
        raise Decline(f"positions of type {index.dtype}")
    if ZERO not in index.shape and any(x.shape[d].lo is None or x.shape[d].lo < 1 for d in dims):  # type: ignore[operator]  # None is first
        raise Decline("writes to a tensor that may have no elements")


def _along(x: Value, dim: int, index: Value) -> Callable[[Index], Place]:
    """The target of scatter at i: i with i[dim] replaced by index[i]."""
    d = wrapped(dim, x.rank)
    check_places(x, index, (d,) if x.rank else ())
    return placed(x, d, index, lambda i: i, fault="assert_in_bounds")


def _scatter(
    b: GraphBuilder, x: Value, dim: int, index: Value, src: Operand, reduce: str = "set", *,
    include_self: bool = True,
) -> Value:  # fmt: skip
    """out[.., index[i], ..] = src[i], or combined with src[i]; src may be a number."""
    place = _along(x, dim, index)

    def value(i: Index) -> Expr:
        return src.at(i[: src.rank]) if isinstance(src, Value) else exact(src, i, x.dtype)

    made = in_scalar(x, index, value, fault="assert_in_bounds")
    return _combined(b, x, (index.shape, place, made), reduce, include_self)


lowering("scatter.src", any_dtype=True)(_scatter)
lowering("scatter.value", "scatter.reduce", "scatter.value_reduce", "scatter_reduce.two")(_scatter)
lowering("scatter_add")(lambda b, x, dim, at, src: _scatter(b, x, dim, at, src, "add"))


def _combined(b: GraphBuilder, x: Value, w: Writes, reduce: str, include_self: bool) -> Value:
    """x combined with values, or only the values where there are any (`include_self` false)."""
    over, place, _ = w
    if ZERO in over:  # an empty index may have any rank
        return b.map(x.at)
    mode = MODES[reduce]
    start = x
    if not include_self:
        none = ops.neutral(mode, x.dtype)
        start = b.scatter("set", x, over, lambda i: (*place(i), none), name=f"{x.name}_start")
    total = update(b, mode, start, w, once=True)
    if reduce != "mean":
        return total
    own, kind = const(1 if include_self else 0, I64), b.temp(x.shape, I64)
    count = b.scatter("add", own, over, lambda i: (*place(i), const(1, I64)), kind)

    def mean(i: Index) -> Expr:
        e = total.compute(i)
        by = ops.cast(ops.maximum(count.at(i), 1), e.dtype)
        return e / by if e.dtype.is_float else ops.div_floor(e, by)

    return b.map(mean)


def _put_masked(
    b: GraphBuilder, x: Value, d: int, mask: Value, values: Value, accumulate: bool
) -> Value:
    """x with values, shared by all slices, where a mask of the dimensions from d on is true.

    The values broadcast to a shape with one dimension in place of the mask's.
    """
    behind = x.rank - d - mask.rank
    if mask.shape != x.shape[d : d + mask.rank]:
        raise Decline("a mask of other sizes, perhaps, which eager rejects")
    if values.rank > behind and values.shape[values.rank - behind - 1] is not ONE:
        raise Decline("a mask as index: the place of each value depends on the whole mask")

    def fn(i: Index) -> Expr:
        end = d + mask.rank
        e = values.at(broadcast(values, (*i[:d], ZERO, *i[end:])))
        old = x.at(i)
        if accumulate:
            wide = compute_dtype(x.dtype)
            old, e = ops.cast(old, wide), ops.cast(e, wide)
            new = round_to(old | e if x.dtype is BOOL else old + e, x.dtype)
            return ops.where(mask.at(i[d:end]), new, x.at(i))
        return ops.where(mask.at(i[d:end]), e, old)

    return b.map(fn)


@lowering("index_put", "_unsafe_index_put", any_dtype=True)
def index_put(
    b: GraphBuilder,
    x: Value,
    indices: Sequence[Value | None],
    values: Value,
    accumulate: bool = False,
) -> Value:
    """x with values written or added at broadcast positions; negative ones count from the end."""
    given = {d: v for d, v in enumerate(indices) if v is not None}
    if not given:
        raise Decline("no positions")
    if len(given) == 1 and (at := min(given)) is not None and given[at].dtype is BOOL:
        return _put_masked(b, x, at, given[at], values, accumulate)
    for v in given.values():
        check_places(x, v, tuple(given))
    shared = common_shape(tuple(given.values()))
    kept = [s for d, s in enumerate(x.shape) if d not in given]
    dims = list(given)
    front = dims[0] if dims == list(range(dims[0], dims[0] + len(dims))) else 0
    over = (*kept[:front], *shared, *kept[front:])
    if accumulate and (found := gathered(b, x, given, values)) is not None:
        return found
    mode: UpdateMode = "add" if accumulate else "set"
    place = lambda i: at_positions(x, given, i)
    return update(b, mode, x, (over, place, lambda i: values.at(broadcast(values, i))))


def _slices(
    x: Value, dim: int, index: Value, value: At, wraps: bool = False, fault: str = "assert_in_range"
) -> Writes:
    """The loop over slices of x along a dimension, at a list of positions; returns place and value.

    The slice of a scalar is the scalar itself; the value checks the positions.
    """
    d, count = wrapped(dim, x.rank), index.shape[0] if index.rank else ONE
    check_places(x, index, (d,) if x.rank else ())
    place = placed(x, d, index, lambda i: (i[d],), wraps=wraps, fault=fault)
    over = (*x.shape[:d], count, *x.shape[d + 1 :])
    return over, place, in_scalar(x, index, value, wraps=wraps)


@lowering("index_add")
def index_add(
    b: GraphBuilder, x: Value, dim: int, index: Value, source: Value, *, alpha: Operand = 1
) -> Value:
    """Slices of x plus alpha times slices of source."""
    d = wrapped(dim, x.rank)
    rest = [k for k in range(x.rank) if k != d]
    if source.rank and any(k >= source.rank or source.shape[k] != x.shape[k] for k in rest):
        raise Decline("slices of other sizes, which eager rejects")

    def value(i: Index) -> Expr:
        e = source.compute(i[: source.rank])
        return e if alpha == 1 else e * exact(alpha, i, e.dtype)

    # Eager runs these as a scatter, which raises another error.
    is_scatter = alpha == 1 and index.dtype is I64 and x.rank > 1 and d in (0, x.rank - 1)
    fault = "assert_in_bounds" if is_scatter else "assert_in_range"
    return update(b, "add", x, _slices(x, dim, index, value, fault=fault), once=is_scatter)


@lowering("index_copy", any_dtype=True)
def index_copy(b: GraphBuilder, x: Value, dim: int, index: Value, source: Value) -> Value:
    """Slices of x replaced by slices of source."""
    return update(b, "set", x, _slices(x, dim, index, lambda i: source.at(i[: source.rank])))


@lowering("index_fill")
def index_fill(b: GraphBuilder, x: Value, dim: int, index: Value, value: Operand) -> Value:
    """Slices of x filled with a value; negative positions count from the end."""
    slices = _slices(x, dim, index, lambda i: exact(value, i, x.dtype), wraps=True)
    return update(b, "set", x, slices)


@lowering("index_reduce")
def index_reduce(
    b: GraphBuilder,
    x: Value,
    dim: int,
    index: Value,
    source: Value,
    reduce: str,
    *,
    include_self: bool = True,
) -> Value:
    """Slices of x combined with slices of source by prod, mean, amax or amin."""
    if reduce not in ("prod", "mean", "amax", "amin"):
        raise Decline("a reduction that eager rejects")
    slices = _slices(x, dim, index, lambda i: source.at(i[: source.rank]))
    return _combined(b, x, slices, reduce, include_self)


@lowering("put", any_dtype=True)
def put(b: GraphBuilder, x: Value, index: Value, source: Value, accumulate: bool = False) -> Value:
    """Elements written by their row-major position; negative ones count from the end."""
    check_places(x, index, range(x.rank))
    if index.dtype is not I64:
        raise Decline("positions of a type that eager rejects")
    count = product(x.shape)

    def place(i: Index) -> Place:
        return unflatten(computed(0, count), x.shape), (checked(index.at(i), count, wraps=True),)

    value: At = lambda i: source.at(unflatten(flatten(i, index.shape), source.shape))
    made = in_scalar(x, index, value, wraps=True)
    return update(b, "add" if accumulate else "set", x, (index.shape, place, made))


@lowering("masked_scatter", any_dtype=True)
def masked_scatter(b: GraphBuilder, x: Value, mask: Value, source: Value) -> Value:
    """The elements where the mask is true replaced, in row-major order, by those of source."""
    if mask.dtype is not BOOL or any(s is ZERO for s in (*source.shape, *b.result.shape)):
        raise Decline("no elements")
    shape, total = b.result.shape, product(source.shape)

    holds: At = lambda i: mask.at(broadcast(mask, i))
    # For each element in row-major order, the number of true ones up to it.
    row = b.temp((product(shape),), I64)
    number = b.scan("sum", 0, lambda i: ops.cast(holds(unflatten(i[0], shape)), I64), row)

    def fn(i: Index) -> Expr:
        at = checked(number.at((flatten(i, shape),)) - 1, total, fault="assert_in_bounds")
        where = unflatten(computed(0, total), source.shape)
        taken = source.at(where, (at,))
        return masked(holds(i), taken, x.at(broadcast(x, i)))

    return b.map(fn)
