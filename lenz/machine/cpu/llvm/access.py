"""Loads and stores. The coefficient of the vector loop's variable in the offset decides the form.

0: one scalar, broadcast to all lanes. 1: consecutive elements. -1: consecutive, reversed. 2 to 4,
for loads of whole vectors: consecutive vectors, from which the lanes are picked. Anything else:
gather or scatter. An address whose mask is false is never touched; a scalar whose mask is false
reads a local zero instead.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import cycle

from lenz.errors import InternalError
from lenz.ir.dtype import BOOL, I64, U8, DType
from lenz.ir.expr import Expr
from lenz.machine.cpu.llvm import transpose
from lenz.machine.cpu.llvm.builder import Builder
from lenz.machine.cpu.llvm.indices import Indices, index_type
from lenz.machine.cpu.llvm.instructions import Names
from lenz.machine.cpu.llvm.masks import after, store_tail
from lenz.machine.cpu.llvm.scopes import Scopes, Tail, Value
from lenz.machine.cpu.llvm.types import memory_type, shuffle, splat, suffix, value_type, vector
from lenz.records import dataclass
from lenz.sym import Int, Sym, Var, affine_in, substitute
from lenz.sym.prove import divisor

Bound = Mapping[Var, Value]


LINE = 64  # bytes
STREAMED = "!nontemporal !1"
SHORT_STEPS = (Int(2), Int(3), Int(4))


@dataclass(frozen=True, slots=True)
class Place:
    """The memory positions of one access.

    step      elements from lane to lane: 0, 1, -1 or 2 to 4; None for a gather
    pointers  addresses of lane 0 (of the last lane for step -1), one per copy; vectors for a gather
    lines     vectors are parts of cache lines, or whole ones, of a streamed buffer
    part      for steps of 2 to 4: which of `step` neighbours, all read by the loop, that start at
              the pointers; None if the elements between may not exist
    """

    step: int | None
    pointers: Value
    lines: bool = False
    part: int | None = None


class Accesses:
    """Emits the loads and stores of one function.

    Stores to `streamed` buffers bypass the caches; such a buffer starts at a cache line.
    """

    def __init__(
        self, scopes: Scopes, indices: Indices, bases: Mapping[str, str], streamed: Collection[str]
    ) -> None:
        self.scopes, self.indices, self.streamed = scopes, indices, streamed
        self.bases = dict(bases)  # buffer -> SSA name of the base pointer
        self.dummy = ""
        self.tile: Var | None = None  # the row variable of an open tile
        # The buffers and indices that each iteration of the open vector loop reads.
        self.read: set[tuple[str, tuple[Sym]]] = set()

    def place(
        self, buffer: str, dtype: DType, offset: Sym, bound: Bound, whole: bool = False
    ) -> Place:
        """The addresses of buffer[offset]; `whole`: all lanes will be loaded."""
        base = self.bases.get(buffer)
        if base is None:
            raise InternalError(f"%{buffer} is not a parameter or local", pass_name="codegen")
        indices, lane = self.indices, self.indices.lane
        if lane is None or not indices.varies(offset, bound):
            return Place(0, self._pointer(base, dtype, offset, None, bound))
        if not any(value.lanes for value in bound.values()):
            affine = affine_in(offset, lane)
            if affine is not None and isinstance(affine[0], Int) and abs(affine[0].value) == 1:
                step = affine[0].value
                if step == 1:
                    # Vector loops count from 0 in whole vectors.
                    length = 1 if lane.hi is None or self.tile is not None else lane.hi + 1
                    aligned = [n * dtype.bytes % LINE == 0 for n in (length, divisor(affine[1]))]
                    lines = buffer in self.streamed and all(aligned)
                    return Place(1, self._pointer(base, dtype, affine[1], lane, bound), lines)
                last = offset - (self.scopes.width - 1)
                return Place(-1, self._pointer(base, dtype, last, None, bound))
            if whole and affine is not None and affine[0] in SHORT_STEPS:
                step = SHORT_STEPS.index(affine[0]) + 2
                ends = [[(buffer, (offset - k + x,)) for x in (0, step - 1)] for k in range(step)]
                part = next((k for k, x in enumerate(ends) if self.read.issuperset(x)), None)
                start = self._pointer(base, dtype, offset - (part or 0), None, bound)
                return Place(step, start, part=part)
        index = index_type(offset, bound)
        value = indices.vector(offset, index, bound)
        return Place(None, self._gep(base, dtype, value, index))

    def _pointer(self, base: str, dtype: DType, rest: Sym, lane: Var | None, bound: Bound) -> Value:
        """The address of rest (+ lane). The part without the lane is computed outside its loop."""
        key = ("pointer", base, rest)
        start = None if bound else self.scopes.memo.get(key)
        if start is None:
            start = Value((base,), 0)
            if rest is not Int(0):
                start = self._gep(base, dtype, self.indices.scalar(rest, bound), I64)
            if not bound:
                self.scopes.keep(key, start)
        return start if lane is None else self._move(start, dtype, self.indices.vars[lane])

    def _move(self, start: Value, dtype: DType, by: Value) -> Value:
        if by.names == ("0",):
            return Value(start.names, max(start.level, by.level))
        key = ("moved", start.names, by.names, dtype)
        if found := self.scopes.memo.get(key):
            return found
        b, pair = self.scopes.operands((I64, I64), start, by)
        head = f"getelementptr inbounds {memory_type(dtype)}, "
        names = b.fn.lets(b.level, (f"{head}ptr {p}, i64 {n}" for p, n in zip(*pair, strict=True)))
        return self.scopes.keep(key, Value(names, b.level))

    def _gep(self, base: str, dtype: DType, index: Value, index_dtype: DType) -> Value:
        t = value_type(index_dtype, self.scopes.width if index.lanes else 1)
        head = f"getelementptr {memory_type(dtype)}, ptr {base}, {t}"
        names = self.scopes.fn.lets(index.level, (f"{head} {n}" for n in index.names))
        return Value(names, index.level, index.lanes)

    def is_transposed(self, e: Expr, bound: Bound) -> bool:
        """True for a load that an open tile reads along its rows."""
        row, lane = self.tile, self.indices.lane
        if row is None or lane is None or any(len(v.names) > 1 for v in bound.values()):
            return False
        return transpose.is_transposed(e, row, lane)

    def load_tile(self, buffer: str, dtype: DType, offset: Sym, bound: Bound) -> Value:
        """Read a tile along its rows and transpose it."""
        scopes, lane, row, base = self.scopes, self.indices.lane, self.tile, self.bases[buffer]
        assert lane is not None and row is not None
        blocks = range(0, scopes.copies, scopes.width)
        starts = [substitute(offset, {row: Int(block)}) for block in blocks]
        index = index_type(offset, bound)
        places = [self.indices.vector(s, index, bound) for s in starts]
        pointers = [self._each(self._gep(base, dtype, place, index)) for place in places]
        value = Value(transpose.load_transposed(scopes, pointers, dtype), scopes.fn.level, True)
        return self._to_bool(value) if dtype is BOOL else value

    def _each(self, pointers: Value) -> Names:
        """The pointers of a vector, one by one."""
        fn, width = self.scopes.fn, self.scopes.width
        head = f"extractelement <{width} x ptr> {pointers.names[0]}, i32 "
        return fn.lets(pointers.level, (f"{head}{k}" for k in range(width)))

    def load(self, place: Place, dtype: DType, mask: Value | None, level: int) -> Value:
        """Read one element per lane (one in all for step 0) at `level` or further in."""
        level = max(level, place.pointers.level, mask.level if mask else 0)
        copies = max(len(place.pointers.names), len(mask.names) if mask else 1)
        pointers = self.scopes.spread(place.pointers, I64, False, copies)
        if place.step == 0:
            names = self._load_scalar(pointers, dtype, mask, level)
        else:
            b = self.scopes.builder(level, True, copies)
            masks = self.scopes.spread(mask, BOOL, True, copies) if mask else None
            names = self._load_lanes(b, place, dtype, pointers, masks)
        value = Value(names, level, place.step != 0)
        return self._to_bool(value) if dtype is BOOL else value

    def _to_bool(self, value: Value) -> Value:
        return self.scopes.compared(value, "icmp ne", U8, 0)  # a byte in memory

    def _load_scalar(self, pointers: Names, dtype: DType, mask: Value | None, level: int) -> Names:
        fn, t = self.scopes.fn, memory_type(dtype)
        if mask is not None:
            b = self.scopes.builder(level, mask.lanes, 1)
            conds = [b.any((n,)) if mask.lanes else n for n in mask.names]
            rows, zeros = zip(cycle(conds), pointers, strict=False), self._zeros()
            pointers = fn.lets(level, (f"select i1 {c}, ptr {p}, ptr {zeros}" for c, p in rows))
        return fn.lets(level, (f"load {t}, ptr {p}, align {dtype.bytes}" for p in pointers))

    def _zeros(self) -> str:
        """Eight zero bytes of the function's own."""
        if not self.dummy:
            self.dummy = self.scopes.fn.alloca("i64", 1)
            self.scopes.fn.allocas.append(f"  store i64 0, ptr {self.dummy}, align 64")
        return self.dummy

    def _load_lanes(
        self, b: Builder, place: Place, dtype: DType, pointers: Names, masks: Names | None
    ) -> Names:
        t, m, step = memory_type(dtype, b.lanes), b.type(BOOL), place.step
        if masks is None and step is not None:
            if step > 1:
                return _pick(b, dtype, step, place.part, pointers)
            texts = [f"load {t}, ptr {p}, align {dtype.bytes}" for p in pointers]
        else:
            masks = masks or ("splat (i1 true)",) * b.copies
            masks = _reverse(b, m, masks) if step == -1 else masks
            kind, p = ("load", "ptr") if step else ("gather", vector("ptr", b.lanes))
            callee = self._intrinsic(kind, dtype, t, p, "i32", m, t)
            rest = f"{t} {splat(memory_type(dtype), _zero(dtype), b.lanes)})"
            rows, head = zip(pointers, masks, strict=True), f"call {t} {callee}({p}"
            texts = [f"{head} {a}, i32 {dtype.bytes}, {m} {c}, {rest}" for a, c in rows]
        names = b.fn.lets(b.level, texts)
        return _reverse(b, t, names) if step == -1 else names

    def _intrinsic(self, kind: str, dtype: DType, result: str, *args: str) -> str:
        width = self.scopes.width
        own = suffix(memory_type(dtype), width)
        address = f"v{width}p0" if kind in ("gather", "scatter") else "p0"
        return self.scopes.fn.module.declare(f"llvm.masked.{kind}.{own}.{address}", result, *args)

    def store(self, place: Place, dtype: DType, value: Value, mask: Tail | None) -> None:
        """Write one element per lane, here and now."""
        fn, level = self.scopes.fn, self.scopes.fn.level
        lanes = place.step != 0
        if value.lanes and not lanes:
            raise InternalError("lanes are stored to one address", pass_name="codegen")
        mask = mask if lanes else None
        copies = max(len(v.names) for v in (place.pointers, value, mask or value))
        b, spread = self.scopes.builder(level, lanes, copies), self.scopes.spread
        t, m, reverse = memory_type(dtype, b.lanes), b.type(BOOL), place.step == -1
        names = spread(value, dtype, lanes, copies)
        pointers = spread(place.pointers, I64, False, copies)
        if dtype is BOOL:
            names = b.cast("zext", m, t, names)
        masks = spread(mask, BOOL, True, copies) if mask else None
        if reverse:
            names = _reverse(b, t, names)
        tail = mask if place.step is not None else None
        if tail and store_tail(self.scopes, dtype, tail, reverse, names, pointers):
            return
        if masks and reverse:
            masks = _reverse(b, m, masks)
        if masks is None and place.step is not None:
            how = f"align {dtype.bytes}"
            if place.lines:
                how = f"align {min(b.lanes * dtype.bytes, LINE)}, {STREAMED}"
            for n, p in zip(names, pointers, strict=True):
                fn.put(level, f"  store {t} {n}, ptr {p}, {how}")
            return
        masks = masks or ("splat (i1 true)",) * copies
        kind, at = ("store", "ptr") if place.step else ("scatter", vector("ptr", b.lanes))
        callee = self._intrinsic(kind, dtype, "void", t, at, "i32", m)
        for n, p, c in zip(names, pointers, masks, strict=True):
            args = f"{t} {n}, {at} {p}, i32 {dtype.bytes}, {m} {c}"
            fn.put(level, f"  call void {callee}({args})")


def store_pairs(scopes: Scopes, place: Place, dtype: DType, values: tuple[Value, Value]) -> None:
    """Write two neighbours per lane: the elements at step 2 and those after them."""
    fn, level = scopes.fn, scopes.fn.level
    copies = max(len(v.names) for v in (place.pointers, *values))
    b = scopes.builder(level, True, copies)
    pointers = scopes.spread(place.pointers, I64, False, copies)
    pairs = [scopes.spread(v, dtype, True, copies) for v in values]
    element, t = memory_type(dtype), memory_type(dtype, b.lanes)
    for x, y, p in zip(*pairs, pointers, strict=True):
        for half, at in enumerate((p, *after(fn, level, element, (p,), str(b.lanes)))):
            # x0 y0 x1 y1 .. of one half of the lanes
            lanes = [(half * b.lanes + i) // 2 + i % 2 * b.lanes for i in range(b.lanes)]
            both = fn.let(level, shuffle(t, x, y, lanes))
            fn.put(level, f"  store {t} {both}, ptr {at}, align {dtype.bytes}")


def _reverse(b: Builder, t: str, names: Names) -> Names:
    return b.fn.lets(b.level, (shuffle(t, n, "poison", range(b.lanes - 1, -1, -1)) for n in names))


def _pick(b: Builder, dtype: DType, step: int, part: int | None, pointers: Names) -> Names:
    """Every step-th element from an address: `step` consecutive vectors, and step - 1 shuffles.

    Neighbours, such as the halves of complex numbers, share the vectors. If there are none, the
    last vector is moved back to end with the last element, so that nothing past it is read.
    """
    n, element, t = b.lanes, memory_type(dtype), memory_type(dtype, b.lanes)
    starts = [k * n for k in range(step)]
    if part is None:
        starts[-1] = (n - 1) * (step - 1)
    places = [i * step + (part or 0) for i in range(n)]
    homes = [min(x // n, step - 1) for x in places]
    found: Names = ()
    for k, start in enumerate(starts):
        at = after(b.fn, b.level, element, pointers, str(start)) if start else pointers
        loaded = b.fn.lets(b.level, (f"load {t}, ptr {p}, align {dtype.bytes}" for p in at))
        lanes = [n + places[i] - start if homes[i] == k else i for i in range(n)]
        rows = zip(found or loaded, loaded, strict=True)
        found = b.fn.lets(b.level, [shuffle(t, x, y, lanes) for x, y in rows])
    return found


def _zero(dtype: DType) -> str:
    return "0.0" if memory_type(dtype) in ("float", "double") else "0"
