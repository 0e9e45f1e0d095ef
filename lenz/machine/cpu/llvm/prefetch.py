"""Requests for the rows of a table that a loop adds later: bags of embeddings.

    for j in 64 : vector { for r in 20 : seq {
        v0 = reduce sum { load(%t, [64*@0 + j]; @0 = load(%n, [20*i + r])) } over r
    } }

The processor cannot guess where such rows lie. While row r is added, the lines of the row that
%n[20*i + r + AHEAD] names are requested, which may be one of the next bag. A request of an address
outside of the table does nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from lenz.ir.dtype import I32, I64
from lenz.ir.expr import Expr, is_bound_var, loads_of
from lenz.ir.kernel import For, Reduce
from lenz.machine.cpu.llvm.access import LINE
from lenz.machine.cpu.llvm.writer import Writer
from lenz.sym import ONE, ZERO, minimum, step_of, substitute

# Rows. Bags of 20 to 100 rows of a table of 200,000 take 0.7 to 1.0 of eager's time. With sums in
# memory and no requests they take 1.9 to 6 times; 4, 8, 32 and 64 rows ahead were no faster.
AHEAD = 16


def request_rows(w: Writer, s: For) -> None:
    """Request what the gathers of a loop over rows will read AHEAD rows later."""
    fn, level, lane = w.scopes.fn, w.scopes.fn.level, w.indices.lane
    if lane is None or lane.hi is None:
        return
    for e in _gathers(w, s):
        buffer, (offset,), dtype = e.attrs
        source, (at,), index = loads_of(*e.args)[0].attrs
        later = w.accesses.place(source, index, minimum(at + AHEAD, w.sizes[source] - 1), {})
        row = w.accesses.load(later, index, None, level)
        row = w.scopes.converted(row, I64, index)
        bound = {v: row for v in offset.free_vars if is_bound_var(v)}
        start = w.accesses.place(buffer, dtype, substitute(offset, {lane: ZERO}), bound).pointers
        callee = fn.module.declare("llvm.prefetch.p0", "void", "ptr", "i32", "i32", "i32")
        for k in range(0, (lane.hi + 1) * dtype.bytes, LINE):
            line = fn.let(level, f"getelementptr i8, ptr {start.names[0]}, i64 {k}")
            fn.put(level, f"  call void {callee}(ptr {line}, i32 0, i32 3, i32 1)")


def _gathers(w: Writer, s: For) -> Iterator[Expr]:
    """Loads of rows whose numbers lie one after the other in memory."""
    r = s.axis.var
    for e in loads_of(*(x.value for x in s.body if isinstance(x, Reduce))):
        numbers = loads_of(*e.args)
        if len(e.args) != 1 or len(numbers) != 1 or numbers[0].args:
            continue
        source, (at,), index = numbers[0].attrs
        follow = step_of(at, r) is ONE and r not in e.attrs[1][0].free_vars
        # A masked load may be of a buffer without elements, or of one before the first.
        size, first = w.sizes.get(source, ZERO), -1 if at.lo is None else at.lo
        if follow and first >= 0 and size.lo and index in (I32, I64) and not w.indices.varies(at):
            yield e
