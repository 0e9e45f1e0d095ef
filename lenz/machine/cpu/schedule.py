"""The form of a CPU kernel: its loops, and the work per thread. The cost of a join."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lenz.context import Context
from lenz.ir import kernel
from lenz.ir.expr import Expr, cost_of, loads_of, vars_of
from lenz.ir.kernel import For, If, Reduce, Scan, Sort, Stmt, Store, TileConfig, exprs_of, walk
from lenz.machine.cpu import vectors
from lenz.machine.cpu.loops import choose_form
from lenz.machine.cpu.wraps import unwrapped
from lenz.machines import Form, Space
from lenz.schedule.legal import Group
from lenz.schedule.stages import stages
from lenz.sym import ONE, SymEnv, step_of

# The number of interleaved copies of a body, by its arithmetic (in f32 additions). A chain of
# operations waits for results. The processor looks some 500 instructions ahead: in short bodies it
# finds other elements to work on by itself, in long ones only if copies alternate. ns per element
# with 1, 2, 4, 8 copies (AVX-512, in cache): exp (10) .152 .155 .147 .144, gelu (25) .397 .335 .307
# .343, five functions in a row (90) 2.43 1.94 1.58 1.22. Beyond that compile time matters more; it
# grows with the text.
SHALLOW, DEEP, DEEPEST = 20.0, 250.0, 700.0
# Nanoseconds on one core, from findings-cpu.md section 2. exp (cost 10) takes 0.15 to 0.3 ns per
# element. Streaming takes 0.05 ns per byte from cache and twice that from memory.
NS_PER_COST = 0.025
NS_PER_BYTE = 0.05
# Sorting one key of a row (measured: 2 ns in rows of 16, 5 in rows of 4096).
NS_PER_KEY = 3.0
# A parallel region costs 1 to 2 us, or 10 us if the workers are asleep; on a busy machine it also
# waits for the scheduler. Eager stays on one thread below 32768 elements, about the same limit.
NS_PER_TASK = 25_000.0
# Elements from which a loop is worth several cores (about 20 us of work on one core).
LARGE = 1 << 16
# Minimum of parallel iterations for a kernel of that size.
ENOUGH = 8


def forms(
    g: Group, stored: frozenset[str], env: SymEnv, cx: Context, space: Space | None
) -> list[Form]:
    """The form of a group's kernel; no other is timed."""
    if g.nests[0].updates:
        body = vectors.scattered(g.nests[0], env)
        return [Form("scatter", body, _tile(body, env))]
    elide = not cx.options.emulate_rounding
    s = stages(g, stored, env, elide, named=True)
    choice = choose_form(g, s, env)
    scans = any(n.scans for n in g.nests)
    match choice.kind:
        case "reduction":
            body = (vectors.runs(g, s) if scans else None) or vectors.row_loops(g, s, env)
        case "outer_reduction":
            s = stages(g, stored, env, elide, named=False)
            body = vectors.columns(g, s, env)
        case _:
            body = vectors.elements(g, s, choice.vector, env)
    kind = "sort" if s.sorts else "scan" if scans else choice.kind
    tile = _tile(body, env)
    if choice.kind == "outer_reduction":
        # All columns of a bag are copies: AVX2 has vectors of 8.
        unroll = vectors.BAG // 8 if vectors.is_bag(g, s) else tile.unroll
        tile = replace(tile, rows=_rows(g, env), unroll=unroll)
    else:  # the position of a column is that of its sums
        body = tuple([unwrapped(x, env) for x in body])
    return [Form(kind, body, tile, tuple(s.locals))]


def _rows(g: Group, env: SymEnv) -> int:
    """Rows that are added before the sums of their columns are read and written.

    The processor prefetches memory in order: sums of 67,000 rows of 96 f32 take 2.8 ms with 4 rows
    at once, 5.0 with 16. Each longer row is a stream of its own: for 512 bf16, 7.3 and 4.8 ms.
    """
    p = g.domain.axes[-1]
    loads = [e for n in g.nests for e in loads_of(*n.exprs)]
    row = env.hint(p.extent) * max([e.dtype.bytes for e in loads if p.var in vars_of(e)], default=4)
    return 4 if row < 512 else 8 if row < 1024 else 16


def _tile(body: tuple[Stmt, ...], env: SymEnv) -> TileConfig:
    cost = cost_of(*exprs_of(body))
    reduces = any(
        isinstance(s, (Reduce, Scan)) or (isinstance(s, Store) and s.mode != "set")
        for s in walk(body)
    )
    unroll = 1 if cost > DEEPEST else 4 if cost <= DEEP and (reduces or cost >= SHALLOW) else 2
    _, inner = kernel.around(body, "parallel")  # so many iterations are worth a thread
    grain = max(1, round(NS_PER_TASK / max(_time(inner, env), 0.01)))
    return TileConfig(grain=grain, unroll=unroll)


def _time(body: tuple[Stmt, ...], env: SymEnv) -> float:
    values = [s.value for s in body if not isinstance(s, (For, If, Sort))]
    total = _ns_per_element(values, sum(isinstance(s, Store) for s in body)) if values else 0.0
    for s in body:
        if isinstance(s, Sort):
            total += NS_PER_KEY * env.hint(s.size)
        if isinstance(s, If):
            total += max(_time(s.then, env), _time(s.orelse, env))
        if isinstance(s, For):
            n = s.axis.extent  # a data-dependent size counts as its lower bound
            total += max(env.hint(n) if n.hi is None else n.hi, 0) * _time(s.body, env)
    return total


def _ns_per_element(bodies: Sequence[Expr], stores: int) -> float:
    """Estimated time of one innermost iteration of a loop with these bodies."""
    loads = loads_of(*bodies)
    moved = sum(e.dtype.bytes for e in loads) + 4 * stores
    return NS_PER_COST * (cost_of(*bodies) - len(loads)) + NS_PER_BYTE * moved


def loss(g: Group, env: SymEnv) -> str | None:
    """Why a group whose elements read its own reductions is worse than its parts, or None."""
    rows = env.hint(g.domain.rows)
    if rows * env.hint(g.domain.length) < LARGE:
        return None
    last = [n for n in g.nests if not n.is_reduction and n.raxes][-1]
    lanes = g.domain.raxes if g.has_columns else g.domain.axes
    if lanes and step_of(last.offset, lanes[-1].var) is ONE:
        # Each store is far from the last. Softmax of a transposed 1024 x 1024 f32, columns that are
        # stored by rows: 4.7 ms, in two loops 1.0; rows that are stored by columns: 11.0 and 1.9.
        return f"{last.name} is stored across the lanes of its reduction"
    tasks = -(-rows // vectors.PANEL) if g.has_columns else rows
    is_enough = tasks >= (4 if rows >= 4 * vectors.PANEL else ENOUGH)
    return None if is_enough else f"{last.name} would run in {tasks} parallel parts only"
