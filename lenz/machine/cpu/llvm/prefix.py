"""Scans: the running values of a statement, in vectors along its loop or in lanes across it.

Along the loop (w lanes, here 4), log2(w) steps give the prefixes inside each vector; only the last
lanes are combined one after the other:

    v = a b c d;  v += 0 a b c;  v += 0 0 v0 v1;  out = carry + v;  carry += v3

All copies of an unrolled body take these steps in parallel. If rows follow each other in the loop
(`every`), a lane takes a step only inside its row, and the carry only if its row began before the
vector. If whole rows fill a vector, both are known here.
"""

from __future__ import annotations

from lenz import ops
from lenz.ir.dtype import I32
from lenz.ir.expr import ref, replaced
from lenz.ir.kernel import Scan
from lenz.machine.cpu.llvm.accumulators import Accumulator
from lenz.machine.cpu.llvm.instructions import Names
from lenz.machine.cpu.llvm.legalise import MACHINE
from lenz.machine.cpu.llvm.scopes import Value
from lenz.machine.cpu.llvm.types import iota, shuffle, value_type, vector
from lenz.machine.cpu.llvm.writer import Writer
from lenz.machine.legalise import legal_expr


def emit_scan(w: Writer, acc: Accumulator) -> None:
    """Accumulate one value and name the running value."""
    scopes, (dtype,) = w.scopes, acc.dtypes
    value = acc.operand(w)
    level = scopes.fn.level
    if acc.axes:
        place = w.accesses.place(acc.arrays[0], dtype, acc.offset, {})
        old = w.accesses.load(place, dtype, None, level)
        new = combine(w, acc, scopes.spread(old, dtype, acc.lanes, scopes.copies), value)
        w.accesses.store(place, dtype, Value(new, level, acc.lanes), None)
    elif acc.across:
        new = _along(w, acc, value)
    else:
        (cells,) = acc.cells
        new = combine(w, acc, tuple([c.name for c in cells[: scopes.copies]]), value)
        for cell, name in zip(cells, new, strict=False):
            cell.name = name
    w.values.refs[acc.stmt.name] = acc.converted(w, Value(new, level, acc.lanes))


def _along(w: Writer, acc: Accumulator, value: Names) -> Names:
    """The running values if the lanes are neighbours in the loop."""
    scopes, (dtype,) = w.scopes, acc.dtypes
    fn, level, width = scopes.fn, scopes.fn.level, scopes.width
    start = acc.monoid.identity(width, scan=True)

    def picked(name: str, lanes: list[int]) -> str:
        return fn.let(level, shuffle(value_type(dtype, width), name, start, lanes))

    lane = w.indices.lane
    # A row shorter than a vector needs fewer steps.
    count = width if lane is None or lane.hi is None else min(width, lane.hi + 1)
    every = acc.stmt.every if isinstance(acc.stmt, Scan) else 0
    whole = bool(every) and width % every == 0
    places = _places(w, every, len(value)) if every and not whole else ()
    b = scopes.builder(level, True, len(value))
    step = 1
    while step < min(count, every or count):
        inside = [i >= step and not (whole and i % every < step) for i in range(width)]
        lanes = [i - step if inside[i] else width for i in range(width)]
        new = combine(w, acc, tuple([picked(v, lanes) for v in value]), value)
        if places and every % width:
            within = b.compare("icmp uge", I32, places, (f"splat (i32 {step})",) * len(value))
            new = b.select(within, dtype, new, value)
        value = new
        step *= 2
    if whole:
        return value
    lasts = [picked(v, [width - 1] * width) for v in value]
    ((carry,),) = acc.cells
    carries = []
    began = b.compare("icmp ugt", I32, places, (iota("i32", width),) * len(value)) if places else ()
    one = scopes.builder(level, True, 1)
    for k, last in enumerate(lasts):
        carries.append(carry.name)
        (carry.name,) = combine(w, acc, (carry.name,), (last,))
        if began:
            text = shuffle(vector("i1", width), began[k], "poison", [width - 1] * width)
            (carry.name,) = one.select((fn.let(level, text),), dtype, (carry.name,), (last,))
    new = combine(w, acc, tuple(carries), value)
    return b.select(began, dtype, new, value) if began else new


def _places(w: Writer, every: int, copies: int) -> Names:
    """The position of each lane in its row."""
    assert w.indices.lane is not None
    return w.scopes.spread(w.indices.vector(w.indices.lane % every, I32), I32, True, copies)


def combine(w: Writer, acc: Accumulator, x: Names, y: Names) -> Names:
    """The op table's combination of two values, x being the earlier."""
    (dtype,) = acc.dtypes
    fn, level = w.scopes.fn, w.scopes.fn.level
    # Distinct names, so that the memo of values cannot confuse two uses.
    number, parts = fn.label(), (ref("x", dtype), ref("y", dtype))
    own = [f"{e.attrs[0]}.{number}" for e in parts]
    w.values.refs.update(zip(own, (Value(n, level, acc.lanes) for n in (x, y)), strict=True))
    new = dict(zip(parts, (ref(name, dtype) for name in own), strict=True))
    e = replaced(legal_expr(ops.combine(acc.stmt.kind, *parts), MACHINE, {}), new)
    return w.scopes.spread(w.values.value(e), dtype, acc.lanes, len(x))
