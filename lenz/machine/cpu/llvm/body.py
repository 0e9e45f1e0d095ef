"""Statements of a kernel to text: loops, named values, stores and reductions."""

from __future__ import annotations

from lenz.ir.dtype import BOOL
from lenz.ir.expr import loads_of, unmasked
from lenz.ir.kernel import For, If, Let, Reduce, Scan, Sort, Stmt, Store, bodies_of, exprs_of, walk
from lenz.ir.op import LOAD
from lenz.machine.cpu.llvm import prefix, sorting, tiles, trips
from lenz.machine.cpu.llvm.access import store_pairs
from lenz.machine.cpu.llvm.accumulators import Accumulator, begin, names_reduced
from lenz.machine.cpu.llvm.masks import tail_mask
from lenz.machine.cpu.llvm.prefetch import request_rows
from lenz.machine.cpu.llvm.scopes import Cell, Value
from lenz.machine.cpu.llvm.writer import Writer, stored
from lenz.machine.reduces import reduces_of
from lenz.records import dataclass, field
from lenz.sym import Int


@dataclass(slots=True, eq=False)
class Body(Writer):
    """Emits the statements of one function.

    accs  the accumulators of the open reductions and scans
    """

    accs: dict[str, Accumulator] = field(default_factory=dict)

    def statements(self, body: tuple[Stmt, ...]) -> None:
        """Emit statements in order; loads of buffers that they store to stay on their level."""
        floor = self.values.floor
        # A loop may open scopes around its own, and its body one more, so the level is only known
        # here.
        self.values.floor = {**floor, **dict.fromkeys(stored(body), self.scopes.fn.level)}
        done: Stmt | None = None
        for k, s in enumerate(body):
            match s:
                case Store() if s is done or _store_pair(self, s, *body[k + 1 : k + 2]):
                    done = None if s is done else body[k + 1]
                case For():
                    self.loop(s)
                case If():
                    trips.branch(self, s)
                case Let(name, value):
                    self.define(name, s)
                    self.values.refs[name] = self.values.value(value)
                case Reduce():
                    self.accs[s.name].take(self)
                case Scan():
                    prefix.emit_scan(self, self.accs[s.name])
                case Sort():
                    sorting.emit_sort(self, s)
                case Store():
                    self.store(s)
        self.values.floor = floor

    def store(self, s: Store) -> None:
        """Emit one store."""
        value = self.values.value(s.value)
        for e in s.bound:
            self.values.value(e)
        bound = self.values.bound((s.offset,), s.bound, ())
        place = self.accesses.place(s.buffer, s.value.dtype, s.offset, bound)
        self.accesses.store(place, s.value.dtype, value, self.scopes.tail)
        self.values.forget(s.buffer)

    def parallel(self, body: tuple[Stmt, ...], scratch: tuple[str, ...]) -> None:
        """The body of one parallel iteration; only the same iteration reads what it stores."""
        self.values.floor.update(dict.fromkeys((*stored(body), *scratch), self.scopes.fn.level))
        self.statements(body)

    def loop(self, s: For) -> None:
        """Emit a loop, then the results of the reductions that end with it."""
        ended = [begin(self, r, path) for r, path in reduces_of(s) if r.name not in self.accs]
        self.accs |= {acc.stmt.name: acc for acc in ended}
        with self.writing(s.body):
            if self.indices.lane is None and s.kind == "vector":
                self.vector_loop(s)
            elif self.indices.lane is None and tiles.is_tile(s, self.scopes):
                tiles.emit_tile(self, s)
            elif s.kind == "unroll" and isinstance(s.axis.extent, Int):
                self.unrolled(s)
            else:
                self.plain_loop(s)
        for acc in ended:
            del self.accs[acc.stmt.name]
            acc.finish(self)

    def unrolled(self, s: For) -> None:
        """A loop of constant extent, unrolled."""
        for k in range(s.axis.extent.hi or 0):
            with self.scopes.block():
                self.indices.vars[s.axis.var] = Value((str(k),), self.scopes.fn.level)
                self.statements(s.body)

    def plain_loop(self, s: For) -> None:
        """A loop one iteration at a time, or `tile.rows` at a time over column accumulators."""
        if s.kind == "parallel":  # inside loops over rows: the iterations of this task
            self.counted(s, "%begin", "%end", 1, 1)
            return
        step = self.row_copies(s)
        alone = self.indices.lane is None and self.scopes.copies == 1
        if alone and step == 1 and s.kind == "seq" and not any(bodies_of(x) for x in s.body):
            trips.serial(self, s)
            return
        with trips.nonempty(self.indices, s.axis.extent, self.cells(s)) as extent:
            whole = trips.rounded(self.scopes.fn, s.axis.extent, extent, step)
            self.counted(s, "0", whole, step, step if step > 1 else self.scopes.copies)
            if whole != extent:
                self.counted(s, whole, extent, 1, 1)

    def counted(self, s: For, start: str, stop: str, step: int, copies: int) -> None:
        """for var in range(start, stop, step): the body, in `copies` copies if step is not 1."""
        cells = self.cells(s) if copies == self.scopes.copies or step > 1 else self.cells(s, 1)

        def once(counter: str) -> None:
            outer, self.scopes.copies = self.scopes.copies, copies
            names = trips.positions(self.scopes.fn, counter, copies, 1) if step > 1 else (counter,)
            self.row_pass = step > 1
            self.indices.vars[s.axis.var] = Value(names, self.scopes.fn.level)
            request_rows(self, s)
            self.statements(s.body)
            self.row_pass = False
            self.scopes.copies = outer

        trips.repeat(self.scopes, start, stop, step, cells, once)

    def cells(self, s: For, copies: int | None = None) -> list[Cell]:
        """The registers that a loop changes, for the first `copies` copies."""
        inside = names_reduced(s.body)
        accs = [acc for name, acc in self.accs.items() if name in inside]
        return [cell for acc in accs for part in acc.cells for cell in part[:copies]]

    def row_copies(self, s: For) -> int:
        """Rows per pass over column accumulators; 1 for any other loop."""
        if s.kind != "seq" or self.indices.lane is not None or self.scopes.copies > 1:
            return 1
        rows = min(self.tile.rows, s.axis.extent.hi or self.tile.rows)  # of 0 rows none are run
        loops = [x for x in s.body if isinstance(x, For)]
        inside = [y for x in loops for y in walk(x.body)]
        sums = [y for y in inside if isinstance(y, Reduce)]
        does_more = any(isinstance(x, (If, Store, Scan)) for x in (*s.body, *inside))
        if not sums or does_more or any(isinstance(y, For) for y in inside):
            return 1
        own = all(y.over == (s.axis.var,) and self.accs[y.name].axes for y in sums)
        return rows if own and all(x.kind == "vector" for x in loops) else 1

    def vector_loop(self, s: For) -> None:
        """Full vectors in copies, then the others, then the last, partial one under a mask.

        Only that one has a mask, because AVX2 stores masked vectors slowly (`masks.py`).
        """
        copies, width = trips.vector_copies(self, s), self.scopes.width
        fn, extent = self.scopes.fn, s.axis.extent
        self.indices.lane = s.axis.var
        reads = unmasked(e for x in s.body if not bodies_of(x) for e in exprs_of((x,)))
        self.accesses.read = {e.attrs[:2] for e in reads if e.op is LOAD and not e.args}
        with trips.nonempty(self.indices, extent, self.cells(s)) as text:
            most = trips.rounded(fn, extent, text, width * copies)
            self.vector_steps(s, "0", most, copies, False)
            whole = trips.rounded(fn, extent, text, width) if copies > 1 else most
            if most != whole:
                several = 1 if "%" in most + whole else (int(whole) - int(most)) // width
                self.vector_steps(s, most, whole, several, False)
            if whole != text:
                self.vector_steps(s, whole, text, 1, True)
        self.indices.lane, self.accesses.read = None, set()

    def vector_steps(self, s: For, start: str, stop: str, copies: int, masked: bool) -> None:
        """Vectors from start to stop, `copies` of them at a time."""
        scopes, width = self.scopes, self.scopes.width
        inside = scopes.copies

        def once(counter: str) -> None:
            scopes.copies = max(copies, inside)
            names = trips.positions(self.scopes.fn, counter, copies, width)
            self.indices.vars[s.axis.var] = Value(names, scopes.fn.level)
            if masked:
                scopes.tail = tail_mask(scopes, trips.left(scopes.fn, counter, stop))
            self.statements(s.body)
            scopes.tail = None
            scopes.copies = inside

        cells = self.cells(s) if copies > 1 or inside > 1 else self.cells(s, 1)
        trips.repeat(self.scopes, start, stop, width * copies, cells, once)


def _store_pair(body: Body, s: Store, after: Stmt | None = None) -> bool:
    """Emit a store and the next one together if they write alternating neighbours."""
    if not isinstance(after, Store) or after.buffer != s.buffer or body.indices.lane is None:
        return False
    if body.scopes.tail is not None:
        return False  # its lanes are scattered
    if any(e.attrs[0] == s.buffer for e in loads_of(after.value)):
        return False  # it may be the value that the first one stores
    dtype = s.value.dtype
    if after.offset is not s.offset + 1 or {s.mode, after.mode} != {"set"} or s.bound:
        return False
    place = body.accesses.place(s.buffer, dtype, s.offset, {}, True)
    if place.step != 2 or dtype is BOOL:
        return False
    values = body.values.value(s.value), body.values.value(after.value)
    store_pairs(body.scopes, place, dtype, values)
    body.values.forget(s.buffer)
    return True
