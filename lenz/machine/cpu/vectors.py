"""The loop forms of CPU kernels, written down: parallel panels and vectors (see loops.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from lenz import ops
from lenz.ir.axes import merged, taken_apart
from lenz.ir.dtype import F32, F64
from lenz.ir.expr import Expr, all_syms, interpret, load, loads_of, ref, replaced, syms_of, unmasked
from lenz.ir.kernel import For, Let, Local, Reduce, Scan, Stmt, Store, moved, position
from lenz.ir.op import LOAD, REF
from lenz.ir.tensor import Axes, Axis, axis
from lenz.machine.cpu.loops import BLOCK, TILE, across
from lenz.schedule.accesses import NEAR
from lenz.schedule.borders import spans_of
from lenz.schedule.cut import all_moved, cut, nested, trimmed
from lenz.schedule.legal import Group
from lenz.schedule.nest import SHORT, Nest
from lenz.schedule.result import Update
from lenz.schedule.stages import MAX_LOCAL, Stages, Statement, offsets_of
from lenz.sym import ONE, Int, Sym, SymEnv, Var, product, step_of, substitute

# Longest row that is scanned together with its neighbours. Rows of 8 f32 take 0.15 ns per element
# that way, and 0.73 alone; rows of 32 0.24 and 0.39; rows of 48 the same.
RUN = 32
# Elements that are summed in f32 before f64: 16 per lane. Sums of 4097 to 100003 numbers err 0.7 to
# 1.0 times as much as eager's (root mean square); with parts of 4096 1.2 to 1.4 times.
PART = 1024
COLUMN_PART = 64  # rows whose columns are summed in f32 before f64
# Lanes that add a row in f32, and numbers that one lane adds. Running sums of n numbers are off by
# sqrt(n) units in the last place, but the error of eager's cascades hardly grows with the length:
# means of 24 columns of 256 numbers about 1000 were 3 times as far off as eager's.
LANES = 64
PER_LANE = 64
# Bytes of scratch of one thread, which lie on its stack and should stay in its second cache.
SCRATCH = 1 << 18
BLOCKS = 8  # blocks of rows, which are 4 times as fast as gathers, that keep all cores busy
ROWS = 64  # rows that keep all cores busy without being split
PANEL = 256  # columns of one panel: 16 vector registers of f32
BAG = 64  # columns of a sum of gathered rows: 8 registers of AVX2. 128 are read in two halves.
SCATTER_PANEL = 64  # columns of a scatter that are a task for a thread
TASKS = 4  # a scatter into so many parts needs no tasks of columns
# still give each core a panel, and 256 bytes are a whole number of cache lines.
WIDE_PANEL = 512  # for long rows of results: fewer passes over the page tables
# Edge of the square of tiles that one iteration transposes. Whole cache lines on both sides stay in
# the first-level cache (839 -> 577 us for 1024 x 1024, 74 -> 57 ms for 4096 x 4096).
SQUARE = 4 * TILE


def row_loops(g: Group, s: Stages, env: SymEnv) -> tuple[Stmt, ...]:
    """Rows in parallel; R is the vector. If an operand runs across the rows: blocks of rows."""
    axes = g.domain.axes
    _widen(g, s, env, min(LANES, env.hint(g.domain.raxes[-1].extent)))
    if found := taken_apart(axes, s.offsets):
        whole, parts, at = found
        axes = tuple(x for a in axes for x in (parts if a is whole else (a,)))
        _move(s, at)
    # Fewer blocks would idle cores, and a sort takes longer than its loads.
    is_many = env.hint(product([a.extent for a in axes])) >= BLOCKS * TILE and not s.sorts
    for u, step in [(u, k) for u in axes for k in (ONE, -ONE)] if is_many else ():
        if env.hint(u.extent) >= TILE and (far := _across(g, s, u, step)):
            return _row_blocks(g, s, axes, u, far)
    return nested(axes, "parallel", _row(g, s))


def _move(s: Stages, at: dict[Var, Sym]) -> None:
    for part in (*s.loops, *s.rows, s.kept):
        part[:] = [moved(x, at) for x in part]


def _row(g: Group, s: Stages) -> tuple[Stmt, ...]:
    inside: list[Stmt] = []
    for k, row in enumerate(s.rows):
        inside.extend((*s.sorts.get(k, ()), *row))
        if k < len(s.loops) and s.loops[k]:
            raxes, statements = trimmed(g.domain.raxes, s.loops[k])
            inside.extend(nested(raxes[:-1], "seq", _row_loop(raxes, statements, s.wide)))
    if s.kept:
        inside.append(For(g.domain.kept[0], "vector", tuple(s.kept)))
    return tuple(inside)


def _across(g: Group, s: Stages, u: Axis, step: Sym) -> list[Expr]:
    """Operands of the loops that are contiguous along an axis of rows and strided along R.

    `step` is 1, or -1 for operands that run backwards.
    """
    n, r = g.domain.length, g.domain.raxes[-1].var
    if not isinstance(n, Int) or n.value > MAX_LOCAL:
        return []
    found = unmasked(x.value for loop in s.loops for x in loop)
    loads = [(e, e.attrs[1][0]) for e in found if e.op is LOAD and not e.args]
    across = [(e, step_of(at, r)) for e, at in loads if step_of(at, u.var) is step]
    far = [e for e, along in across if along not in (*NEAR, None)]
    return far if sum(e.dtype.bytes for e in far) * n.value * TILE <= SCRATCH else []


def _row_blocks(g: Group, s: Stages, axes: Axes, u: Axis, far: Sequence[Expr]) -> tuple[Stmt, ...]:
    """Blocks of rows in parallel. Operands that run across them are transposed to scratch first.

    The last rows come first if the operands run backwards.

    for p in P: for r in R: f(x[p + P*r])  ==>
    for pb: { tiles: x0[S*p + r] = x[p + 16*pb + P*r];  for p in 16: for r in R: f(x0[S*p + r]) }

    The gradients of a layer norm of 512 x 768 f32 whose input is transposed take 0.33 ms, with
    gathers 2.2.
    """
    raxes, n = g.domain.raxes, g.domain.length.hi or 0
    block, lane, place = cut(u, TILE)
    place = place if step_of(far[0].attrs[1][0], u.var) is ONE else u.extent - 1 - place
    blocks, part, at_r = cut(raxes[-1], TILE)
    size = n + TILE - n % TILE  # rows a power of two apart would share few sets of the cache
    at = size * lane.var + position(raxes)
    kept = {e: load(f"x{k}", (at,), e.dtype) for k, e in enumerate(far)}
    s.locals += [Local(x.attrs[0], x.dtype, size * TILE) for x in kept.values()]
    stores = [Store(x.attrs[0], at, e) for e, x in kept.items()]
    moves = all_moved(stores, {u.var: place, raxes[-1].var: at_r})
    tile = For(lane, "unroll", (For(part, "vector", moves),))
    copies = nested([*raxes[:-1], *blocks], "seq", (tile,))
    for loop in s.loops:
        loop[:] = [replace(x, value=replaced(x.value, kept)) for x in loop]
    _move(s, {u.var: place})
    outer = [a for a in axes if a is not u]
    return nested([*outer, *block], "parallel", (*copies, For(lane, "seq", _row(g, s))))


def _row_loop(raxes: Axes, statements: Sequence[Statement], wide: set[str]) -> tuple[Stmt, ...]:
    """One loop of a row. If all that it does are wide sums, parts of a long row are summed in f32.

    An f64 takes two registers, and a conversion per element. Norms of 64 groups of 8192 elements
    take 120 us, without parts 207.
    """
    *more, r = raxes
    block, lane, place = cut(r, PART)
    if more or not block or not (sums := _wide_sums(statements, wide)):
        return (For(r, "vector", tuple(statements)),)
    parts, whole = _in_parts(sums, lane.var, block[0].var)
    return nested(block, "seq", (For(lane, "vector", all_moved(parts, {r.var: place})), *whole))


def _wide_sums(statements: Sequence[Statement], wide: set[str]) -> list[Reduce]:
    """The sums in f64 that are all that a loop does; empty if it does more."""
    sums = [x for x in statements if isinstance(x, Reduce) and x.name in wide]
    return sums if len(sums) == len(statements) else []


def _in_parts(sums: Sequence[Reduce], lane: Var, block: Var) -> tuple[list[Reduce], list[Reduce]]:
    """Sums of parts in f32 over their elements, and sums of these in f64 over the parts."""
    values = [(x.name, ops.cast(x.value.args[0], F32)) for x in sums]
    parts = [Reduce(f"{name}p", "sum", value, (lane,)) for name, value in values]
    totals = [(x.name, ops.cast(ref(f"{x.name}p", F32), F64)) for x in sums]
    return parts, [Reduce(name, "sum", total, (block,)) for name, total in totals]


def runs(g: Group, s: Stages) -> tuple[Stmt, ...] | None:
    """Contiguous short rows as one row; the scan restarts inside its vectors.

    for p in P: for r in R ==> for f in P * R, scanned over f every R Rows that are scanned from
    their ends run from the last one to the first. None if a row is long, has values of its own, or
    does not follow the previous row in memory.
    """
    if not g.domain.axes or len(g.domain.raxes) != 1 or s.sorts:
        return None
    *outer, p = g.domain.axes
    (r,) = g.domain.raxes
    n = r.extent
    if not isinstance(n, Int) or not 0 < n.value <= RUN or any(s.rows) or len(s.loops) > 1:
        return None
    steps = {(step_of(x, r.var), step_of(x, p.var)) for x in s.offsets}
    if steps not in ({(ONE, n)}, {(Int(-1), n)}):
        return None
    block, lane, place = cut(axis(r.name, p.extent * n), BLOCK // n.value * n.value)
    row = place // n
    at = {p.var: row if (ONE, n) in steps else p.extent - 1 - row, r.var: lane.var % n}
    restart: Callable[[Scan], Scan] = lambda x: replace(x, over=lane.var, every=n.value)
    body = [restart(x) if isinstance(x, Scan) else x for x in s.loops[0]]
    return nested([*outer, *block], "parallel", (For(lane, "vector", all_moved(body, at)),))


def columns(g: Group, s: Stages, env: SymEnv) -> tuple[Stmt, ...]:
    """Panels of columns in parallel; R runs in sequence over vectors of P."""
    *outer, p = g.domain.axes
    _widen(g, s, env, 1)
    if is_bag(g, s):
        raxes, statements = trimmed(g.domain.raxes, s.loops[0])
        inner = nested(raxes, "seq", tuple(statements))
        return nested(outer, "parallel", (For(p, "vector", (*inner, *s.rows[1])),))
    block, lane, place = cut(p, WIDE_PANEL if env.hint(p.extent) >= 4 * WIDE_PANEL else PANEL)
    at: dict[Var, Sym] = {p.var: place}
    inside: list[Stmt] = []
    kept: dict[Expr, Expr] = {}
    for k, row in enumerate(s.rows):
        loop = s.loops[k] if k < len(s.loops) else []
        new = [e for e in _fixed_in(loop, g) if e not in kept] if lane.extent.hi else []
        for e in new:
            s.locals.append(Local(f"c{len(kept)}", e.dtype, lane.extent.hi or 0))
            kept[e] = load(s.locals[-1].name, (lane.var,), e.dtype)
        loop = [replace(x, value=replaced(x.value, kept)) for x in loop]
        first = [*row, *(Store(kept[e].attrs[0], lane.var, e) for e in new)]
        if first:
            inside.append(For(lane, "vector", all_moved(first, at)))
        if loop:
            inside += _column_loop(*trimmed(g.domain.raxes, loop), s.wide, lane, at)
    return nested([*outer, *block], "parallel", tuple(inside))


def _widen(g: Group, s: Stages, env: SymEnv, lanes: int) -> None:
    """Accumulate in f64 what would be many numbers per lane. Errors of factors all add up.

    In cache f64 takes 5 to 30% longer. A loop that does nothing else sums parts in f32 again.
    """
    many = env.hint(g.domain.length) / PER_LANE
    kinds = {"sum": many > lanes, "prod": many > 1}
    every = [x for loop in s.loops for x in loop if isinstance(x, Reduce)]
    found = [x for x in every if kinds.get(x.kind) and x.value.dtype is F32]
    wide: dict[Expr, Expr] = {ref(x.name, F32): ops.cast(ref(x.name, F64), F32) for x in found}
    s.wide |= {x.name for x in found if x.kind == "sum"}
    for loop in s.loops:
        loop[:] = [replace(x, value=ops.cast(x.value, F64)) if x in found else x for x in loop]
    for part in (*s.loops, *s.rows, s.kept):
        part[:] = [replace(x, value=replaced(x.value, wide)) for x in part]


def _column_loop(
    raxes: Axes, statements: Sequence[Statement], wide: set[str], lane: Axis, at: dict[Var, Sym]
) -> tuple[Stmt, ...]:
    """One loop over rows. If all that it does are wide sums, parts of it are summed in f32."""
    *more, r = raxes
    block, row, place = cut(r, COLUMN_PART)
    if more or not block or not (sums := _wide_sums(statements, wide)):
        return nested(raxes, "seq", (For(lane, "vector", all_moved(statements, at)),))
    parts, whole = _in_parts(sums, row.var, block[0].var)
    inner = For(lane, "vector", all_moved(parts, {**at, r.var: place}))
    return nested(block, "seq", (For(row, "seq", (inner,)), For(lane, "vector", tuple(whole))))


def _fixed_in(loop: Sequence[Statement], g: Group) -> dict[Expr, None]:
    """Arithmetic on sums of columns in a loop over rows, which is kept for all rows.

    for r: for p: x[r, p] - v0 / n ==> for p: c0[p] = v0 / n;  for r: for p: x[r, p] - c0[p]

    Batch norm of 512 x 256 f32 takes 0.03 ms so, and 0.13 with a root per element. What is read
    from memory stays in the loop, perhaps under a mask.
    """
    inner = {a.var for a in g.domain.raxes}
    own = {s.name for s in loop if isinstance(s, (Let, Scan))}
    facts: dict[Expr, tuple[bool, bool, bool]] = {}

    def visit(e: Expr, args: list[tuple[bool, bool, bool]]) -> tuple[bool, bool, bool]:
        """Whether it changes from row to row, reads a sum, and computes."""
        is_ref, moved = e.op is REF, {v for s in syms_of(e) for v in s.free_vars} & inner
        varies = e.op is LOAD or bool(e.checks or moved) or (is_ref and e.attrs[0] in own)
        mine = varies, is_ref, e.op.cost > 0
        return tuple(map(any, zip(mine, *args, strict=True)))  # type: ignore[return-value]  # three

    for x in loop:
        interpret(x.value, visit, facts)
    fixed = {e for e, fact in facts.items() if fact == (False, True, True)}
    used = [a for e in facts if e not in fixed for a in e.args] + [x.value for x in loop]
    return dict.fromkeys(e for e in used if e in fixed)


def is_bag(g: Group, s: Stages) -> bool:
    """Whether one sum of short rows of a table is all: its columns stay in registers."""
    p = g.domain.axes[-1]
    if len(s.loops) != 1 or len(s.loops[0]) != 1 or s.rows[0] or not isinstance(p.extent, Int):
        return False
    fits = len(g.domain.raxes) == 1 and (p.extent.value <= BAG or p.extent.value == 2 * BAG)
    return fits and any(e.args for e in loads_of(s.loops[0][0].value))


def elements(g: Group, s: Stages, v: Axis | None, env: SymEnv) -> tuple[Stmt, ...]:
    """Parallel blocks of one axis, which is the vector; in spans if that decides tests."""
    statements: list[Statement] = [x for row in s.rows for x in row]
    return tuple(statements) if v is None else _in_spans(g.domain.axes, v, statements, env)


def _in_spans(axes: Axes, v: Axis, span: Sequence[Statement], env: SymEnv) -> tuple[Stmt, ...]:
    """The loops of `elements`. The spans of an axis are loops of their own, one after the other.

    Only spans of the last axis lie in the same rows, unless few rows are split into blocks. What is
    read across the vectors has tiles.
    """
    if found := across(axes, v, offsets_of(span), env):
        return _tiles(axes, v, *found, span)
    at_v = axes.index(v)
    outer, later = axes[:at_v], axes[at_v + 1 :]  # `later` lies inside v in memory
    made: list[Stmt] = []
    parts: list[tuple[Axis, Sequence[Statement]]] = []
    for a in (*outer, *later, v):
        inner = later if a is v else tuple(dict.fromkeys((*axes[axes.index(a) + 1 :], v)))
        parts = [*spans_of(a, inner, span, env)]
        loops = [(tuple(p if x is a else x for x in axes), p, s) for p, s in parts]
        if a is not v or later or any(across(x, p, offsets_of(s), env) for x, p, s in loops):
            for x, p, inside in loops:
                made += _joined(x, p if a is v else v, inside, env)
            if made:
                return tuple(made)
    is_long = env.hint(product([a.extent for a in outer])) < ROWS and env.hint(v.extent) > BLOCK
    in_blocks = is_long or not parts
    # Lanes that are far apart share cache lines with those of the loops inside. 4096 x 64 x 2 x 4
    # f32 from memory take 21 ms with 4096 lanes in a row, 5 with 32, 1 with 16.
    width = TILE if later else BLOCK
    for part, inside in parts or [(v, span)]:
        block, lane, place = cut(part, width) if in_blocks else ([], part, part.var)
        body = nested(later, "seq", (For(lane, "vector", all_moved(inside, {part.var: place})),))
        made.extend(nested([*outer, *block], "parallel", body) if in_blocks else body)
    return tuple(made) if in_blocks else nested(outer, "parallel", tuple(made))


def _joined(axes: Axes, v: Axis, span: Sequence[Statement], env: SymEnv) -> tuple[Stmt, ...]:
    """The loops of a span, in which axes that are neighbours in memory are one and fill vectors."""
    whole, at = merged(axes, "p", [*offsets_of(span), *all_syms(*(s.value for s in span))])
    if len(whole) in (0, len(axes)):
        return _in_spans(axes, v, span, env)
    own = next((a for a in whole if a.var in at[v.var].free_vars), whole[-1])
    last = whole[-1] if env.hint(whole[-1].extent) >= SHORT else own
    return _in_spans(whole, last, [s for s in all_moved(span, at) if isinstance(s, Store)], env)


def _tiles(axes: Axes, v: Axis, u: Axis, at_u: Sym, span: Sequence[Statement]) -> tuple[Stmt, ...]:
    """Parallel squares of tiles that are transposed in registers: read along u, written along v."""
    at: dict[Var, Sym] = {}
    squares: list[Axis] = []
    blocks: list[Axis] = []
    lanes: list[Axis] = []
    for a, whole in ((u, at_u), (v, v.var)):
        square, part, place = cut(a, SQUARE, "s")
        block, lane, inner = cut(part, TILE)
        at[a.var] = substitute(whole, {a.var: substitute(place, {part.var: inner})})
        squares += square
        blocks += block
        lanes.append(lane)
    u_lane, v_lane = lanes
    tile = (For(u_lane, "unroll", (For(v_lane, "vector", all_moved(span, at)),)),)
    outer = [a for a in axes if a is not v and a is not u]
    return nested([*outer, *squares], "parallel", nested(blocks, "seq", tile))


def scattered(n: Nest, env: SymEnv) -> tuple[Stmt, ...]:
    """Updates run in order over R. Elements of P never collide; they run in parallel and as lanes.

    If columns of P are contiguous, R runs once for each block of them, with the block inside.
    """
    assert isinstance(n.result, Update)
    bound, mode = n.result.bound, n.result.mode
    store = Store(n.target, n.offset, n.body, bound, mode)
    p = n.axes[-1] if n.axes else None
    if p is not None and step_of(n.offset, p.var) is ONE and env.hint(p.extent) >= SHORT:
        block, lane, place = cut(p, SCATTER_PANEL)
        panel = (For(lane, "vector", all_moved([store], {p.var: place})),)
        outer = n.axes[:-1]
        if env.hint(product([a.extent for a in outer])) >= TASKS:
            return nested(outer, "parallel", nested([*n.raxes, *block], "seq", panel))
        return nested([*outer, *block], "parallel", nested(n.raxes, "seq", panel))
    body: tuple[Stmt, ...] = (store,)
    if n.raxes:
        # Vectors store their lanes in order, but each to its own place: they cannot add up.
        r = n.raxes[-1].var
        names = {v.name for v in n.offset.free_vars}
        used = [e for k, e in enumerate(bound) if f"@{k}" in names]
        moves = mode == "set" and any(r in s.free_vars for s in [n.offset, *all_syms(*used)])
        body = nested(n.raxes[:-1], "seq", (For(n.raxes[-1], "vector" if moves else "seq", body),))
    return nested(n.axes, "parallel", body)
