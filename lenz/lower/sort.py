"""Sorts along one dimension, and ops on sorted rows: top k, k-th value, median.

A row is sorted by unique integer keys. From the highest bits down, a key has

    order     the element as an integer in the same order; its complement if descending
    position  of the element, so that equal elements stay in order
    rest      a float's sign and upper mantissa, which `order` lacks for NaN and zero

So values and positions come from the sorted keys, without another read of the elements. NaN is the
largest number, as in eager, and -0.0 equals 0.0. A NaN keeps its sign and at least 3 bits of its
mantissa, the last of which stands for the others: NaNs made by processors come back unchanged.

If nobody reads the positions and the sort need not be stable, a key has no position. That of an f32
then has 32 bits: its own, with -0.0 below 0.0 and NaNs of both signs above all numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lenz import ops
from lenz.ir.dtype import BF16, F16, F32, FLOAT8, I16, I32, I64, DType
from lenz.ir.expr import Expr, const, index
from lenz.ir.tensor import TensorType
from lenz.lower.builder import At, Decline, GraphBuilder, Index, Value
from lenz.lower.dims import cut, reduce_over, wrapped
from lenz.lower.reduce import full_rows
from lenz.lower.registry import lowering
from lenz.machines import runs_programs
from lenz.records import dataclass, replace
from lenz.sym import ONE, ZERO, Sym, maximum, product, unflatten

# Most keys that a GPU program sorts in registers, and keys in 128 KiB of a CPU's stack.
LONGEST, LONGEST_CPU = 4096, 16384
# Eager sorts longer rows faster on an H200: 4096 x 2048 f32 in 277 us, here 778 with positions and
# 382 without (bf16: 180, 290); 8192 x 1024 f32 without positions in 295 us, here 95. So do medians
# and k-th values: 2048 x 2048 f32 119 us, here 385 (bf16: 117, 142); 4096 x 1024: 168 us, here 109.
LONGEST_SORT = 1024
# On CPUs eager keeps the top k in a heap if k is less than 1/HEAP of the row, at 1.1 ns per element
# of rows of 512 (a sort takes 2.0, of halves 1.1); else it takes 30 to 100 ns.
HEAP, HEAP_ROW = 64, 256
# Bits of sign and mantissa that distinguish NaNs made by processors.
LEAST_REST = 4
MANTISSA = {F16: 10, BF16: 7, F32: 23}
WIDE = "a sort of 64-bit elements, whose position would need a second key"


@dataclass(frozen=True, slots=True)
class Keys:
    """The bits of a row's keys: `dtype` of the elements, `type` of the keys (i32 or i64)."""

    dtype: DType
    type: DType
    falls: bool
    position: int
    rest: int

    def of(self, e: Expr, place: Sym) -> Expr:
        """The key of an element at a position of the row."""
        if self.is_own:
            order = self._mirrored(ops.bitcast(e, I32)) - self.nans
            return ~order if self.falls else order
        order, low = ops.cast(e, self.type), None
        if self.dtype.is_float:
            bits = ops.cast(ops.bitcast(e, I32 if self.dtype is F32 else I16), self.type)
            negative = bits < 0
            size = bits & self.top
            order = ops.where(negative, -size, size)
            order = ops.where(size > self.infinity, self.top, order)
            sign = ops.where(negative, const(1 << self.mantissa, self.type), 0)
            low = (sign | (bits & ((1 << self.mantissa) - 1))) >> self.lost
        if self.falls:
            order = ~order
        key = order << self.position
        key = key | index(place, self.type) if self.position else key
        return key if low is None else (key << self.rest) | low

    def element(self, key: Expr) -> Expr:
        """The element of a key."""
        if self.is_own:
            key = ~key if self.falls else key
            return ops.bitcast(self._mirrored(key + self.nans), self.dtype)
        order = key >> (self.position + self.rest)
        order = ~order if self.falls else order
        if not self.dtype.is_float:
            return ops.cast(order, self.dtype)
        low = key & ((1 << self.rest) - 1)
        if self.lost:
            low = (low << self.lost) | ((key & 1) * ((1 << self.lost) - 1))
        is_nan = ops.eq(order, self.top)
        sign = low > ((1 << self.mantissa) - 1)
        below = order < 0
        negative = ops.where(is_nan | ops.eq(order, 0), sign, below)
        quiet = self.infinity | (1 << (self.mantissa - 1) if self.lost else 0)
        nan = (low & ((1 << self.mantissa) - 1)) | quiet
        bits = ops.where(is_nan, nan, ops.where(below, -order, order))
        bits = ops.where(negative, bits | (-self.top - 1), bits)
        whole = I32 if self.dtype is F32 else I16
        return ops.bitcast(ops.cast(bits, whole), self.dtype)

    def place(self, key: Expr) -> Expr:
        """The original position of a key's element, as an i64."""
        return ops.cast((key >> self.rest) & ((1 << self.position) - 1), I64)

    def is_nan(self, key: Expr) -> Expr:
        """True for the key of a NaN."""
        return ops.eq(key >> (self.position + self.rest), self.top)

    def _mirrored(self, bits: Expr) -> Expr:
        """Reverse the order of negative floats: then bits order as integers. Its own inverse."""
        return ops.where(bits < 0, bits ^ self.top, bits)

    @property
    def is_own(self) -> bool:
        """True if a key is the bits of a float, in another order."""
        return self.dtype is F32 and self.type is I32

    @property
    def nans(self) -> int:
        """The number of negative NaNs, which lie below all numbers and are wrapped around."""
        return (1 << self.mantissa) - 1

    @property
    def top(self) -> int:
        """All bits of an element except the sign."""
        return (1 << (self.dtype.bits - 1)) - 1

    @property
    def mantissa(self) -> int:
        """Bits of a float's mantissa."""
        return MANTISSA[self.dtype]

    @property
    def infinity(self) -> int:
        """The bits of a float's infinity."""
        return self.top >> self.mantissa << self.mantissa

    @property
    def lost(self) -> int:
        """Mantissa bits of a NaN for which a key has no room."""
        return self.mantissa + 1 - self.rest


def keys_for(
    dtype: DType, size: Sym, falls: bool, device: str, longest: int | None = None,
    named: bool = True,
) -> Keys:  # fmt: skip
    """The keys of rows of a type and length; declines rows and types that eager sorts.

    `longest` replaces the limit for ops that do not sort. Positions are kept only if `named`.
    """
    if dtype.bytes > 4 or dtype in FLOAT8:
        raise Decline(WIDE if dtype.bytes > 4 else f"a sort of {dtype}")
    most = longest or (LONGEST if runs_programs(device) else LONGEST_CPU)
    if size.hi is None or size.hi > most:
        raise Decline(f"a sort of rows of more than {most} elements, or of unknown length")
    position = max(size.hi - 1, 1).bit_length() if named else 0
    own = dtype.bits + (dtype.kind in ("uint", "bool")) + position
    if not dtype.is_float:
        return Keys(dtype, I32 if own <= 32 else I64, falls, position, 0)
    if dtype is F32 and not named:
        return Keys(dtype, I32, falls, 0, 0)
    type = I64 if own + LEAST_REST > 32 else I32
    return Keys(dtype, type, falls, position, min(MANTISSA[dtype] + 1, type.bits - own))


Pair = tuple[Value, Value]
Find = Callable[[int, Keys], Value]


def _of_rows(
    b: GraphBuilder, x: Value, dim: int, falls: bool, find: Find, named: bool = True
) -> Pair:
    """Elements and positions of the keys that `find` returns for the rows along a dimension.

    Unless `named`, equal elements may change order, and the positions are not valid.
    """
    values, places = b.results
    d = wrapped(dim, x.rank)
    if x.rank == 0 or x.shape[d] is ONE:
        only: At = lambda i: x.at(i if len(i) == x.rank else (*i[:d], ZERO, *i[d:]))
        return b.map(only, values), b.map(lambda i: const(0, I64), places)
    named = named or b.read is None or 1 in b.read
    keys = keys_for(x.dtype, x.shape[d], falls, x.device, named=named)
    found = find(d, keys)
    element = b.map(lambda i: keys.element(found.at(i)), values)
    return element, b.map(lambda i: keys.place(found.at(i)), places)


def _ordered(
    b: GraphBuilder, x: Value, d: int, keys: Keys, type: TensorType | None = None,
    most: int = LONGEST_SORT,
) -> Value:  # fmt: skip
    """The sorted keys of a tensor along dimension d: as many as the type has, or all.

    Declines rows of more than `most` elements on GPUs.
    """
    if runs_programs(x.device) and (x.shape[d].hi or 0) > most:
        raise Decline(f"a sort of rows of more than {most} elements")
    made = b.temp(x.shape, keys.type) if type is None else replace(type, dtype=keys.type)
    return b.sort(d, x.shape[d], lambda i: keys.of(x.at(i), i[d]), made)


def first_keys(
    b: GraphBuilder, shape: Sequence[Sym], d: int, k: int | Sym, key: At, type: DType
) -> Value:
    """The first k sorted keys along dimension d of a shape; k is the result's size."""
    if not isinstance(k, int) or k == 0:
        raise Decline("a data-dependent number of elements, or none")
    if k == 1:
        s = cut(tuple(shape), d)
        return reduce_over(b, "min", s, True, key, None, b.temp(s.padded, type))
    return b.sort(d, shape[d], key, replace(b.result, dtype=type))


@lowering("sort.default", "sort.stable")
def sort(
    b: GraphBuilder, x: Value, dim: int = -1, descending: bool = False, stable: bool | None = None
) -> Pair:
    """The sorted elements and their positions; stable."""
    ordered = lambda d, keys: _ordered(b, x, d, keys, b.result)
    return _of_rows(b, x, dim, descending, ordered, named=bool(stable))


@lowering("topk")
def topk(
    b: GraphBuilder, x: Value, k: int | Sym, dim: int = -1, largest: bool = True,
    sorted: bool = True,
) -> Pair:  # fmt: skip
    """The k largest (smallest) elements, sorted, and their positions; of equals, the first ones."""

    def first(d: int, keys: Keys) -> Value:
        most = x.shape[d].hi or 0
        is_few = isinstance(k, int) and k > 1 and k * HEAP <= most
        # 64 of 2048 x 4096 f32 on an H200: 319 us here, 190 in eager; of 4096 x 2048: 247 and 229.
        is_long = isinstance(k, int) and k > 16 and most > 2 * LONGEST_SORT
        if is_long if runs_programs(b.result.device) else (most > HEAP_ROW and is_few):
            raise Decline(f"{k} of up to {most} elements, which eager finds without a sort")
        return first_keys(b, x.shape, d, k, lambda i: keys.of(x.at(i), i[d]), keys.type)

    return _of_rows(b, x, dim, largest, first, named=False)


def _at(b: GraphBuilder, sorted: Value, d: int, keepdim: bool, place: At) -> Value:
    """The key at a position (an i64, from the index in the padded shape) of each sorted row."""
    s = cut(sorted.shape, d)

    def here(i: Index) -> Expr:
        hit = ops.eq(index(i[d], I64), place(s.pad(s.row(i))))
        return ops.where(hit, sorted.at(i), -(1 << (sorted.dtype.bits - 1)))

    made = b.temp(s.padded if keepdim else s.rows, sorted.dtype)
    return reduce_over(b, "max", s, keepdim, here, None, made)


@lowering("kthvalue")
def kthvalue(b: GraphBuilder, x: Value, k: int | Sym, dim: int = -1, keepdim: bool = False) -> Pair:
    """The k-th smallest element of each row, counted from 1, and its position."""

    def find(d: int, keys: Keys) -> Value:
        if not isinstance(k, int):
            raise Decline("a data-dependent k")
        return _at(b, _ordered(b, x, d, keys), d, keepdim, lambda _: const(k - 1, I64))

    return _of_rows(b, x, dim, False, find)


def _middle(
    b: GraphBuilder, sorted: Value, d: int, keepdim: bool, keys: Keys, skip_nan: bool
) -> Value:
    """The key of the median: the lower of two; the first NaN, or a number with `skip_nan`."""
    size = sorted.shape[d]
    if not keys.dtype.is_float:
        return _at(b, sorted, d, keepdim, lambda _: index((size - 1) // 2, I64))
    s = cut(sorted.shape, d)
    is_nan: At = lambda i: ops.cast(keys.is_nan(sorted.at(i)), I64)
    nans = reduce_over(b, "sum", s, True, is_nan, None, b.temp(s.padded, I64))

    def place(i: Index) -> Expr:
        count, n = nans.at(i), index(size, I64)
        if skip_nan:
            return ops.maximum((n - count - 1) >> 1, 0)
        return ops.where(count > 0, n - count, index((size - 1) // 2, I64))

    return _at(b, sorted, d, keepdim, place)


def _enter_median(name: str, skip_nan: bool) -> None:
    """Register the lower median of each row, or of all, and its position.

    With `skip_nan` NaN is ignored, else the first NaN wins.
    """

    @lowering(f"{name}.dim")
    def along(b: GraphBuilder, x: Value, dim: int, keepdim: bool = False) -> Pair:
        full_rows(x, dim)
        find = lambda d, keys: _middle(b, _ordered(b, x, d, keys), d, keepdim, keys, skip_nan)
        return _of_rows(b, x, dim, False, find)

    @lowering(f"{name}.default")
    def full(b: GraphBuilder, x: Value) -> Value:
        size = product(full_rows(x, None).over)
        if size is ONE:
            return b.map(lambda i: x.at((ZERO,) * x.rank))
        keys = keys_for(x.dtype, size, False, x.device)
        key: At = lambda i: keys.of(x.at(unflatten(i[0], x.shape)), i[0])
        sorted = b.sort(0, size, key, b.temp((size,), keys.type))
        found = _middle(b, sorted, 0, False, keys, skip_nan)
        return b.map(lambda i: keys.element(found.at(i)))


@lowering("mode")
def mode(b: GraphBuilder, x: Value, dim: int = -1, keepdim: bool = False) -> Pair:
    """The most frequent integer of each row (the lowest of several), and its last position."""
    if x.dtype.is_float:
        raise Decline("a row of floats may have NaN, whose order is eager's")
    full_rows(x, dim)

    def find(d: int, keys: Keys) -> Value:
        row = _ordered(b, x, d, keys, most=LONGEST)
        s, size = cut(x.shape, d), index(x.shape[d] - 1, I64)

        def start(i: Index) -> Expr:
            place, low = index(i[d], I64), keys.position + keys.rest
            both = i[d], maximum(i[d] - 1, ZERO)
            one, before = (row.at((*i[:d], j, *i[d + 1 :])) >> low for j in both)
            return ops.where(ops.ne(one, before), place, 0)

        starts = b.scan("max", d, start, b.temp(x.shape, I64))

        def rank(i: Index) -> Expr:
            """The length of the run up to here, followed by the distance from the end."""
            place = index(i[d], I64)
            return ((place - starts.at(i)) << keys.position) | (size - place)

        best = reduce_over(b, "max", s, True, rank, None, b.temp(s.padded, I64))
        mask = const((1 << keys.position) - 1, I64)
        return _at(b, row, d, keepdim, lambda i: size - (best.at(i) & mask))

    return _of_rows(b, x, dim, False, find)


_enter_median("median", skip_nan=False)
_enter_median("nanmedian", skip_nan=True)
