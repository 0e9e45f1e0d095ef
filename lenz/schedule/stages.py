"""Split a group into the loops over R that each row needs.

A value that depends on a reduction over the row is available only after the loop that reduces. So
stage k holds the values that depend on reductions of earlier stages, and a row runs

    row[0];  for r: loop[0];  row[1];  for r: loop[1];  ...;  row[n]

A sort is complete before the row part that follows the loop collecting its values. Values computed
from the few elements that it keeps come last.
"""

from __future__ import annotations

from collections.abc import Sequence

from lenz import ops
from lenz.ir import expr
from lenz.ir.expr import Expr
from lenz.ir.kernel import Let, Local, Reduce, Scan, Sort, Store, position
from lenz.ir.op import LOAD, REF
from lenz.ops.rounding import settled, widen
from lenz.records import dataclass, field, replace
from lenz.schedule.accesses import columns_win
from lenz.schedule.legal import Group
from lenz.schedule.nest import Nest
from lenz.schedule.result import Fold, Running, Sorted
from lenz.sym import ZERO, Int, Sym, SymEnv, Var, power_of_two

# A value of this cost (about one exp) that two loops need is kept in a scratch row.
DEAR = 8.0
# Longest scratch row: 4096 f32 are 16 KiB, half of the smallest first-level cache.
MAX_LOCAL = 4096

Statement = Let | Reduce | Scan | Store


@dataclass(slots=True)
class Stages:
    """The statements of each loop over R, and between the loops, for one row.

    in_columns  the lanes run along the results of reductions, and not along the rows
    wide        the sums of f32 that are accumulated in f64 only to be more accurate
    """

    loops: list[list[Statement]] = field(default_factory=list)
    rows: list[list[Statement]] = field(default_factory=lambda: [[]])
    locals: list[Local] = field(default_factory=list)
    columns: list[Statement] = field(default_factory=list)  # after the rows of a part, over R
    sorts: dict[int, list[Sort]] = field(default_factory=dict)  # before row k
    kept: list[Statement] = field(default_factory=list)  # after the last row, over domain.kept
    in_columns: bool = False
    wide: set[str] = field(default_factory=set)

    @property
    def offsets(self) -> list[Sym]:
        """Flat offsets of each loop's accesses, or of the rows' if there are no loops."""
        parts = self.loops if any(self.loops) else self.rows
        return [s for part in parts for s in offsets_of(part)]

    def loop(self, k: int) -> list[Statement]:
        """Statements of loop k."""
        while len(self.loops) <= k:
            self.loops.append([])
            self.rows.append([])
        return self.loops[k]

    def row(self, k: int) -> list[Statement]:
        """Statements before loop k."""
        if k:
            self.loop(k - 1)
        return self.rows[k]


def offsets_of(part: Sequence[Statement]) -> list[Sym]:
    """Flat offsets of the loads and stores of statements, each once."""
    own = [_moves(e) for x in part for e in expr.loads_of(x.value)]
    return list(dict.fromkeys([*own, *(x.offset for x in part if isinstance(x, Store))]))


def _moves(e: Expr) -> Sym:
    """The offset of a load. A place read from memory jumps as its index moves: like a square."""
    offset: Sym = e.attrs[1][0]
    return offset + sum([v * v for v in expr.vars_of(*e.args) if not expr.is_bound_var(v)], ZERO)


@dataclass(slots=True)
class _Staging:
    group: Group
    stored: frozenset[str]
    elide: bool
    named: bool
    out: Stages = field(default_factory=Stages)
    values: dict[str, Expr] = field(default_factory=dict)
    ready: dict[str, int] = field(default_factory=dict)
    stage_memo: dict[Expr, int] = field(default_factory=dict)

    def run(self) -> Stages:
        for n in self.group.nests:
            if n.target == n.name:
                body = self.inlined(n.body)
                k = self.stage(body)
                match n.result:
                    case Running() if n.raxes:
                        self.scan(n, n.result, body, k)
                    case Sorted():
                        self.sort(n, body, k)
                    case Fold() | Running():
                        self.reduction(n, n.result, body, k)
                    case _ if self.in_loop(n):
                        self.element(n, body, k)
                    case _ if n.raxes:
                        self.few(n, body)
                    case _:
                        self.row_value(n, body, k)
        self.write_back([n for n in self.group.nests if n.target != n.name])
        return self.out

    def in_loop(self, n: Nest) -> bool:
        """True if the nest has a value per element of R, not one per row."""
        return n.raxes == self.group.domain.raxes and bool(n.raxes)

    def write_back(self, nests: list[Nest]) -> None:
        """Overwrite inputs in one place, after the last loop that reads one of them.

        A body that is inlined again in a later loop reads the inputs again. So all writes are
        together: those of elements in one loop, those of rows after it.
        """
        in_loop = [n for n in nests if self.in_loop(n)]
        between = [n for n in nests if not self.in_loop(n)]
        for part, place in ((in_loop, self.out.loop), (between, self.out.row)):
            if not part:
                continue
            values = [(n, self.inlined(n.body)) for n in part]
            k = max(self.stage(body) for _, body in values)
            k = max(k, self.last_read([n.target for n in nests], part is between))
            place(k).extend(Store(n.target, n.offset, body) for n, body in values)

    def reduction(self, n: Nest, how: Fold | Running, body: Expr, k: int) -> None:
        result = body
        if isinstance(how, Fold):
            acc, over = f"v{len(self.ready)}", tuple(a.var for a in n.raxes)
            self.out.loop(k).append(Reduce(acc, how.kind, body, over))
            self.ready[acc] = k = k + 1
            result = expr.ref(acc, ops.reduce_dtype(how.kind, body.dtype))
            if how.across:
                value = expr.finished(how.finish, result)
                self.out.columns.append(Store(n.target, n.offset, value))
                return
        self.row_value(n, self.inlined(expr.finished(how.finish, result)), k)

    def scan(self, n: Nest, how: Running, body: Expr, k: int) -> None:
        name = f"v{len(self.ready)}"
        self.out.loop(k).append(Scan(name, how.kind, body, n.raxes[0].var))
        self.ready[name] = k
        self.element(n, self.inlined(expr.finished(how.finish, expr.ref(name, body.dtype))), k)

    def sort(self, n: Nest, body: Expr, k: int) -> None:
        (r,), keep = n.raxes, (n.kept or n.raxes)[0]
        name = f"l{len(self.out.locals)}"
        self.out.locals.append(Local(name, body.dtype, power_of_two(r.extent.hi or 1)))
        self.out.loop(k).append(Store(name, r.var, body))
        self.out.row(k + 1)
        self.out.sorts.setdefault(k + 1, []).append(Sort(name, r.extent, keep.extent))
        self.ready[name] = k + 1
        value = expr.load(name, (keep.var,), body.dtype)
        if n.kept:
            self.few(n, value)
        else:
            self.element(n, value, k + 1)

    def few(self, n: Nest, body: Expr) -> None:
        self.values[n.name] = body = self.settled(n, body)
        if n.name in self.stored:
            self.out.kept.append(Store(n.target, n.offset, body))

    def element(self, n: Nest, body: Expr, k: int) -> None:
        self.values[n.name] = body = self.settled(n, body)
        if n.name in self.stored:
            self.out.loop(k).append(Store(n.target, n.offset, body))

    def row_value(self, n: Nest, body: Expr, k: int) -> None:
        self.values[n.name] = value = self.keep(self.settled(n, body), k)
        if n.name in self.stored:
            self.out.row(k).append(Store(n.target, n.offset, value))

    def settled(self, n: Nest, e: Expr) -> Expr:
        """The value of a nest; if another kernel reads it, it is rounded for this one too.

        A mean of unrounded numbers does not cancel with the rounded ones: after a norm in two
        kernels, a constant row in bf16 was 0.3.
        """
        return settled(e) if n.name in self.stored else e

    def keep(self, e: Expr, k: int) -> Expr:
        """Name a value of the row, so that later loops read it instead of recomputing it."""
        if not self.named or not self.group.domain.raxes or expr.cost_of(e) <= 1.0:
            return e
        name = f"v{len(self.ready)}"
        self.out.row(k).append(Let(name, e))
        self.ready[name] = k
        return expr.ref(name, e.dtype)

    def inlined(self, e: Expr) -> Expr:
        new = expr.replace_loads(e, lambda at: self.values.get(at.attrs[0]))
        return widen(new) if self.elide else new

    def stage(self, e: Expr) -> int:
        def visit(x: Expr, below: list[int]) -> int:
            own = self.ready.get(x.attrs[0], 0) if x.op in (REF, LOAD) else 0
            return max((own, *below))

        return expr.interpret(e, visit, self.stage_memo)

    def last_read(self, buffers: list[str], between_loops: bool) -> int:
        """The first stage in which the buffers may be overwritten, because none is read later.

        Row k runs before loop k, so a store `between_loops` comes after the last loop that reads.
        """

        def reads(part: list[Statement]) -> bool:
            return any(e.attrs[0] in buffers for s in part for e in expr.loads_of(s.value))

        loops = [k + between_loops for k, loop in enumerate(self.out.loops) if reads(loop)]
        return max([0, *loops, *(k for k, row in enumerate(self.out.rows) if reads(row))])


def stages(
    g: Group, stored: frozenset[str], env: SymEnv, elide: bool, named: bool, scratch: bool = True
) -> Stages:
    """Split a group into stages. `stored`: values that others need; the rest stays in the kernel.

    `elide` removes half-precision roundings between the nests. `named` keeps values of a row in
    `Let` statements (impossible if rows are the lanes of a vector). `scratch` keeps expensive
    elements of the row in the iteration's memory (useless if a row stays in registers).
    """
    made = _Staging(g, stored, elide, named).run()
    _read_before_writing(made)
    if named and scratch:
        _keep_dear_values(g, made)
    # A loop reads again what an earlier one has read, unless the row stays in registers.
    offsets = made.offsets if scratch else [*dict.fromkeys(made.offsets)]
    made.in_columns = columns_win(g.domain, offsets, env)
    return made


def _read_before_writing(s: Stages) -> None:
    """In a loop that overwrites its own inputs, name all values first and store them at the end."""
    count = 0
    for part in (*s.loops, *s.rows):
        reads = {e.attrs[0] for x in part for e in expr.loads_of(x.value)}
        if not any(isinstance(x, Store) and x.buffer in reads for x in part):
            continue
        ahead: list[Statement] = []
        stores: list[Statement] = []
        for x in part:
            if not isinstance(x, Store):
                ahead.append(x)
                continue
            name, count = f"w{count}", count + 1
            ahead.append(Let(name, x.value))
            stores.append(Store(x.buffer, x.offset, expr.ref(name, x.value.dtype), x.bound))
        part[:] = [*ahead, *stores]


def _keep_dear_values(g: Group, s: Stages) -> None:
    """Store expensive values that several loops need in scratch, once per row."""
    length = g.domain.length
    if len(s.loops) < 2 or not isinstance(length, Int) or length.value > MAX_LOCAL:
        return
    where: dict[Expr, list[int]] = {}
    for k, loop in enumerate(s.loops):
        for e in expr.nodes_of(*(x.value for x in loop)):
            where.setdefault(e, []).append(k)
    at = (position(g.domain.raxes),)
    inner = {a.var for a in g.domain.raxes}
    dear = {e: None for e, loops in where.items() if len(loops) > 1 and _is_dear(e, inner)}
    # Only the outermost: the operands of a kept value are not recomputed anyway.
    covered = {x for e in dear for x in expr.nodes_of(*e.args)}
    for e in dear:
        if e in covered:
            continue
        local = Local(f"l{len(s.locals)}", e.dtype, length.value)
        s.locals.append(local)
        first, *later = where[e]
        s.loops[first].insert(0, Store(local.name, at[0], e))
        again = expr.load(local.name, at, e.dtype)
        for k in later:
            s.loops[k] = [replace(x, value=expr.replaced(x.value, {e: again})) for x in s.loops[k]]


def _is_dear(e: Expr, inner: set[Var]) -> bool:
    # It must vary along the row; otherwise it is hoisted out of the loop anyway.
    varies = any(v in inner for x in expr.nodes_of(e) for s in expr.syms_of(x) for v in s.free_vars)
    return varies and expr.cost_of(e) - len(expr.loads_of(e)) >= DEAR
