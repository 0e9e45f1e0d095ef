"""Accumulators of open reductions and scans: in registers, or in an array on the stack.

A reduction ends with the outermost loop it runs over. If it does not reduce over some inner loop,
each point of that loop has its own accumulator, in an array. Otherwise the accumulators are
registers that the loops carry, one per copy of the body. An accumulator is made before the loop
(`start`), takes the values of the body (`take`), and becomes the result after it (`finish`).
"""

from __future__ import annotations

from math import prod

from lenz.errors import InternalError
from lenz.ir.dtype import BOOL, F32, I64, U8, DType
from lenz.ir.kernel import For, Reduce, Scan, Stmt, position, walk
from lenz.ir.tensor import Axis
from lenz.machine.cpu.llvm.access import Place
from lenz.machine.cpu.llvm.indices import index_type
from lenz.machine.cpu.llvm.instructions import Names
from lenz.machine.cpu.llvm.reductions import Monoid, Parts
from lenz.machine.cpu.llvm.scopes import Cell, Value
from lenz.machine.cpu.llvm.trips import vector_copies
from lenz.machine.cpu.llvm.types import iota, memory_type, value_type
from lenz.machine.cpu.llvm.writer import Writer
from lenz.machine.reduces import loops_over
from lenz.records import dataclass, field
from lenz.sym import Int, Sym, flatten


@dataclass(slots=True)
class Accumulator:
    """The state of one reduction.

    monoid   the states and how they combine
    lanes    True when the registers are vectors
    across   True when the lanes are reduced over and are added up at the end
    copies   copies of the registers; with `across` they are reduced over as well
    used     the lanes that take values, counted from the first; 0: all
    axes     the axes of the array of accumulators, empty for registers
    arrays   names of the arrays, one per part
    """

    stmt: Reduce | Scan
    monoid: Monoid
    position: Sym
    lanes: bool
    across: bool
    copies: int
    axes: tuple[Axis, ...]
    used: int = 0
    cells: list[list[Cell]] = field(default_factory=list)
    arrays: tuple[str, ...] = ()

    @property
    def dtypes(self) -> tuple[DType, ...]:
        """Types of the parts of the state: the value and, for a position, its index."""
        return self.monoid.dtypes

    @property
    def offset(self) -> Sym:
        """The flat position in the arrays, over the variables of the axes."""
        return flatten([a.var for a in self.axes], [Int(_extent(a)) for a in self.axes])

    def take(self, w: Writer) -> None:
        """Accumulate one value of the body."""
        scopes, copies = w.scopes, w.scopes.copies
        b = scopes.builder(scopes.fn.level, self.lanes, copies)
        parts: Parts = (self.operand(w),)
        for index in self.dtypes[1:]:
            where = w.indices.vector(self.position, index)
            parts = (*parts, scopes.spread(where, index, self.lanes, copies))
        if self.axes:
            self._take_in_arrays(w, parts)
            return
        states = tuple([tuple([c.name for c in part[:copies]]) for part in self.cells])
        new = self.monoid.combine(b, states, parts, later=True)
        if scopes.tail is not None and self.across:
            mask = scopes.spread(scopes.tail, BOOL, self.lanes, copies)
            rows = zip(self.dtypes, new, states, strict=True)
            new = tuple([b.select(mask, d, n, o) for d, n, o in rows])
        for part, names in zip(self.cells, new, strict=True):
            for cell, name in zip(part, names, strict=False):
                cell.name = name

    def _take_in_arrays(self, w: Writer, parts: Parts) -> None:
        scopes, copies, level = w.scopes, w.scopes.copies, w.scopes.fn.level
        if w.row_pass:  # the copies are rows: add them before the single access to the array
            parts, copies = self.monoid.tree(scopes.builder(level, self.lanes, 1), parts), 1
        places: list[Place] = []
        olds: list[Names] = []
        for name, dtype in zip(self.arrays, self.dtypes, strict=True):
            place = w.accesses.place(name, dtype, self.offset, {})
            old = w.accesses.load(place, dtype, None, level)
            olds.append(scopes.spread(old, dtype, self.lanes, copies))
            places.append(place)
        new = self.monoid.combine(scopes.builder(level, self.lanes, copies), tuple(olds), parts)
        for place, dtype, names in zip(places, self.dtypes, new, strict=True):
            w.accesses.store(place, dtype, Value(names, level, self.lanes), None)

    def operand(self, w: Writer) -> Names:
        """The value to accumulate, in the type of the state."""
        scopes, source, dtype = w.scopes, self.stmt.value.dtype, self.dtypes[0]
        value = scopes.converted(w.values.value(self.stmt.value), dtype, source)
        return scopes.spread(value, dtype, self.lanes, scopes.copies)

    def finish(self, w: Writer) -> None:
        """Reduce the copies and the lanes to the result, and give it its name."""
        if isinstance(self.stmt, Scan):  # its value is not visible outside of the loop
            return
        if self.axes:
            w.values.columns[self.stmt.name] = lambda: self.element(w)
            return
        scopes, level = w.scopes, w.scopes.fn.level
        state: Parts = tuple([tuple([c.name for c in part]) for part in self.cells])
        if self.across:
            state = self.monoid.tree(scopes.builder(level, self.lanes, 1), state)
            b = scopes.builder(level, False, 1)
            state = self.monoid.across_lanes(b, state, scopes.width, self.used or scopes.width)
        result = Value(state[-1], level, self.lanes and not self.across)
        w.values.refs[self.stmt.name] = self.converted(w, result)

    def converted(self, w: Writer, value: Value) -> Value:
        """The result in the reduction's type."""
        want = I64 if len(self.dtypes) > 1 else self.stmt.value.dtype
        return w.scopes.converted(value, want, self.dtypes[-1])

    def element(self, w: Writer) -> Value:
        """The result at this point of the loops, if the accumulators are in an array."""
        place = w.accesses.place(self.arrays[-1], self.dtypes[-1], self.offset, {})
        return self.converted(w, w.accesses.load(place, self.dtypes[-1], None, 0))


def begin(w: Writer, s: Reduce | Scan, path: tuple[For, ...]) -> Accumulator:
    """Create a reduction's accumulators; `path` are the loops from its outermost one inwards."""
    w.define(s.name, s)
    # Within a vector loop every lane has its own accumulators.
    lane = next((f for f in path if f.kind == "vector" and w.indices.lane is None), None)
    across = lane is not None and lane.axis.var in loops_over(s)
    axes = {f.axis.var: f.axis for f in path}
    place = position([axes[v] for v in loops_over(s)])
    # A scan handles the copies one by one; a reduction has registers for each copy.
    in_copies = lane if across and isinstance(s, Reduce) else None
    acc = Accumulator(
        stmt=s,
        monoid=Monoid(s.kind, _state_dtypes(s, place)),
        position=place,
        lanes=lane is not None or w.indices.lane is not None,
        across=across,
        copies=vector_copies(w, in_copies) if in_copies else w.scopes.copies,
        axes=tuple([a for v, a in axes.items() if v not in loops_over(s)]),
        used=min(lane.axis.extent.hi or 0, w.scopes.width) if lane else 0,
    )
    if acc.axes:
        _start_arrays(w, acc)
        return acc
    width = w.scopes.width if acc.lanes else 1
    texts = [acc.monoid.identity(width, isinstance(s, Scan))] * acc.copies
    acc.cells.append([Cell(value_type(acc.dtypes[0], width), text) for text in texts])
    for dtype in acc.dtypes[1:]:
        # Position of the first element that the lane sees, so that a row of elements equal to the
        # identity gives the first.
        step, next_copy = (1, width) if across else (0, 0)
        texts = [iota(value_type(dtype), width, step, k * next_copy) for k in range(acc.copies)]
        acc.cells.append([Cell(value_type(dtype, width), text) for text in texts])
    return acc


def _start_arrays(w: Writer, acc: Accumulator) -> None:
    scopes, fn = w.scopes, w.scopes.fn
    width = scopes.width
    # A partial last vector stays in bounds.
    size = -(-prod(map(_extent, acc.axes)) // width) * width + width
    acc.arrays = tuple([f"{acc.stmt.name}.{part}" for part in range(len(acc.dtypes))])
    for name, dtype in zip(acc.arrays, acc.dtypes, strict=True):
        base = w.accesses.bases[name] = fn.alloca(memory_type(dtype), size)
        text = acc.monoid.identity(width, isinstance(acc.stmt, Scan))
        if name != acc.arrays[0]:
            text = "zeroinitializer"
        elif dtype is BOOL:
            text = f"splat (i8 {int(acc.monoid.identity(1) == 'true')})"
        t = memory_type(dtype, width)
        with scopes.loop("0", str(size), width, []) as counter:
            at = f"getelementptr inbounds {memory_type(dtype)}, ptr {base}, i64 {counter}"
            fn.put(fn.level, f"  store {t} {text}, ptr {fn.let(fn.level, at)}, align {dtype.bytes}")


def _state_dtypes(s: Reduce | Scan, place: Sym) -> tuple[DType, ...]:
    """Types of the parts of the state: f32 for 16-bit floats, u8 where bools have positions."""
    dtype = F32 if s.value.dtype.is_half else s.value.dtype
    if s.kind in ("argmax", "argmin"):
        return U8 if dtype is BOOL else dtype, index_type(place)
    return (dtype,)


def _extent(a: Axis) -> int:
    if a.extent.hi is None:
        raise InternalError(f"accumulators over the unbounded {a.name}", pass_name="codegen")
    return max(a.extent.hi, 1)


def names_reduced(body: tuple[Stmt, ...]) -> set[str]:
    """Names of all reductions and scans in a body."""
    return {s.name for s in walk(body) if isinstance(s, (Reduce, Scan))}
