"""The phases of a reduction: start before its outermost loop, take a value, finish after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lenz.ir.dtype import BOOL, F32, I32, I64, DType
from lenz.ir.kernel import For, Reduce, Scan
from lenz.machine.cpu.llvm import reductions as red
from lenz.machine.cpu.llvm.access import Place
from lenz.machine.cpu.llvm.accumulators import Accumulator, over, position_of, state_dtypes
from lenz.machine.cpu.llvm.builder import Names
from lenz.machine.cpu.llvm.scopes import Cell, Value
from lenz.machine.cpu.llvm.types import iota, memory_type, value_type

if TYPE_CHECKING:
    from lenz.machine.cpu.llvm.body import Body


def start(body: Body, s: Reduce | Scan, path: tuple[For, ...]) -> Accumulator:
    """Create a reduction's accumulators; `path` are the loops from its outermost one inwards."""
    body.define(s.name, s)
    lane = next((f for f in path if f.kind == "vector"), None)
    if body.indices.lane is not None:
        lane = None  # already in a vector loop: every lane has its own accumulators
    over_lanes = lane is not None and lane.axis.var in over(s)
    is_scan = isinstance(s, Scan)
    position = position_of(s, path)
    acc = Accumulator(
        stmt=s,
        dtypes=state_dtypes(s, position),
        position=position,
        lanes=lane is not None or body.indices.lane is not None,
        across=over_lanes,
        # A scan handles the copies one by one; a reduction has registers for each copy.
        copies=body.vector_copies(lane)
        if over_lanes and lane and not is_scan
        else body.scopes.copies,
        merge=over_lanes and not is_scan,
        axes=tuple(f.axis for f in path if f.axis.var not in over(s)),
    )
    body.accs[s.name] = acc
    if acc.axes:
        _start_arrays(body, acc)
        return acc
    width = body.scopes.width if acc.lanes else 1
    for part, dtype in enumerate(acc.dtypes):
        t = value_type(dtype, width)
        texts = _identities(acc, part, dtype, width)
        acc.cells.append([Cell(t, text) for text in texts])
    return acc


def _identities(acc: Accumulator, part: int, dtype: DType, width: int) -> list[str]:
    if part == 0:
        is_scan = isinstance(acc.stmt, Scan)
        return [red.identity_text(acc.stmt.kind, dtype, width, is_scan)] * acc.copies
    element = value_type(dtype)
    # Position of the first element that the lane sees, so that a row of elements equal to the
    # identity gives the first.
    if acc.across:
        return [iota(element, width, 1, k * width) for k in range(acc.copies)]
    return [iota(element, width, 0)] * acc.copies


def _start_arrays(body: Body, acc: Accumulator) -> None:
    scopes, fn = body.scopes, body.scopes.fn
    width = scopes.width
    size = -(-acc.size // width) * width + width  # a partial last vector stays in bounds
    names = []
    for part, dtype in enumerate(acc.dtypes):
        base = fn.alloca(memory_type(dtype), size)
        name = f"{acc.stmt.name}.{part}"
        body.accesses.bases[name] = base
        names.append(name)
        kind = acc.stmt.kind
        is_scan = isinstance(acc.stmt, Scan)
        text = "zeroinitializer" if part else red.identity_text(kind, dtype, width, is_scan)
        if dtype is BOOL:
            text = f"splat (i8 {int(red.identity(kind, dtype) == 'true')})"
        t = memory_type(dtype, width)
        with scopes.loop("0", str(size), width, []) as counter:
            at = f"getelementptr inbounds {memory_type(dtype)}, ptr {base}, i64 {counter}"
            p = fn.let(fn.level, at)
            fn.put(fn.level, f"  store {t} {text}, ptr {p}, align {dtype.bytes}")
    acc.arrays = tuple(names)


def take(body: Body, acc: Accumulator) -> None:
    """Accumulate one value of the body."""
    scopes, kind = body.scopes, acc.stmt.kind
    copies, level = scopes.copies, scopes.fn.level
    b = scopes.builder(level, acc.lanes, copies)
    index = acc.dtypes[-1] if red.is_arg(kind) else I32
    parts: list[Names] = [operand(body, acc, copies)]
    if red.is_arg(kind):
        where = body.indices.vector(acc.position, index)
        parts.append(scopes.spread(where, index, acc.lanes, copies))
    if acc.axes:
        _take_in_arrays(body, acc, tuple(parts), index)
        return
    states = tuple([tuple([c.name for c in part[:copies]]) for part in acc.cells])
    new = red.step(b, kind, acc.dtypes[0], index, states, tuple(parts))
    if scopes.tail is not None and acc.across:
        mask = scopes.spread(scopes.tail, BOOL, acc.lanes, copies)
        new = tuple(
            [b.select(mask, d, n, o) for d, n, o in zip(acc.dtypes, new, states, strict=True)]
        )
    for part, names in zip(acc.cells, new, strict=True):
        for cell, name in zip(part, names, strict=False):
            cell.name = name


def operand(body: Body, acc: Accumulator, copies: int) -> Names:
    """The value to accumulate, in the type of the state."""
    scopes, source, dtype = body.scopes, acc.stmt.value.dtype, acc.dtypes[0]
    value = body.values.value(acc.stmt.value)
    if source is dtype:
        return scopes.spread(value, dtype, acc.lanes, copies)
    b = scopes.builder(value.level, value.lanes, len(value.names))
    opcode = "half_to_f32" if source.is_half else "zext"
    names = b.convert(opcode, dtype, source, value.names)
    return scopes.spread(Value(names, value.level, value.lanes), dtype, acc.lanes, copies)


def _take_in_arrays(body: Body, acc: Accumulator, parts: red.Parts, index: DType) -> None:
    scopes, kind, level = body.scopes, acc.stmt.kind, body.scopes.fn.level
    copies = scopes.copies
    if body.row_pass:  # the copies are rows: add them before the single access to the array
        one = scopes.builder(level, acc.lanes, 1)
        states: list[red.Parts] = [tuple([(part[k],) for part in parts]) for k in range(copies)]
        parts = red.tree(one, kind, acc.dtypes[0], index, states)
        copies = 1
    b = scopes.builder(level, acc.lanes, copies)
    places: list[Place] = []
    olds: list[Names] = []
    for name, dtype in zip(acc.arrays, acc.dtypes, strict=True):
        place = body.accesses.place(name, dtype, acc.offset, {})
        old = body.accesses.load(place, dtype, None, level)
        olds.append(scopes.spread(old, dtype, acc.lanes, copies))
        places.append(place)
    new = red.combine(b, kind, acc.dtypes[0], index, tuple(olds), parts)
    for place, dtype, names in zip(places, acc.dtypes, new, strict=True):
        body.accesses.store(place, dtype, Value(names, level, acc.lanes), None)


def finish(body: Body, acc: Accumulator) -> None:
    """Reduce the copies and the lanes to the result, and give it its name."""
    del body.accs[acc.stmt.name]
    name = acc.stmt.name
    if isinstance(acc.stmt, Scan):  # its value is not visible outside of the loop
        return
    if acc.axes:
        body.values.columns[name] = acc
        return
    scopes, kind, level = body.scopes, acc.stmt.kind, body.scopes.fn.level
    index = acc.dtypes[-1] if red.is_arg(kind) else I32
    state: red.Parts = tuple([tuple([c.name for c in part]) for part in acc.cells])
    copies = acc.copies
    if acc.merge and copies > 1:
        one = scopes.builder(level, acc.lanes, 1)
        states: list[red.Parts] = [tuple([(part[k],) for part in state]) for k in range(copies)]
        state, copies = red.tree(one, kind, acc.dtypes[0], index, states), 1
    if acc.across:
        scalar = scopes.builder(level, False, 1)
        state = red.across_lanes(scalar, kind, acc.dtypes[0], index, state, scopes.width)
    lanes = acc.lanes and not acc.across
    result = Value(state[-1], level, lanes)
    body.values.refs[name] = converted(body, acc, result)


def converted(body: Body, acc: Accumulator, value: Value) -> Value:
    """The result in the reduction's type."""
    have, want = acc.dtypes[-1], acc.stmt.value.dtype
    if red.is_arg(acc.stmt.kind):
        want = I64
    if have is want:
        return value
    b = body.scopes.builder(value.level, value.lanes, len(value.names))
    if want.is_half:
        names = b.convert("f32_to_half", want, F32, value.names)
    else:
        names = b.convert("sext" if have.bits < want.bits else "trunc", want, have, value.names)
    return Value(names, value.level, value.lanes)


def element(body: Body, acc: Accumulator) -> Value:
    """The result of a reduction with accumulators in an array, at this point of the loops."""
    part, dtype = acc.arrays[-1], acc.dtypes[-1]
    place = body.accesses.place(part, dtype, acc.offset, {})
    value = body.accesses.load(place, dtype, None, 0)
    return converted(body, acc, value)
