"""A group of nests becomes one `Kernel`: every loop, block and scratch row is written down here.

Names inside a kernel are positions (a0, a1, ... for parameters, v0 ... for values), so that equal
layers of a model give equal kernels, which are compiled once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lenz.context import Context
from lenz.ir.expr import (
    Expr,
    cost_of,
    interpret,
    load,
    loads_of,
    nodes_of,
    rebuild,
    reindex,
    syms_of,
)
from lenz.ir.kernel import (
    For,
    Kernel,
    KernelKind,
    Launch,
    Let,
    Local,
    LoopKind,
    Mode,
    Param,
    Reduce,
    Scan,
    Stmt,
    Store,
    TileConfig,
    exprs_of,
    walk,
)  # fmt: skip
from lenz.ir.op import LOAD
from lenz.ir.tensor import Axis, Buffer, axis
from lenz.schedule.cost import grain, ns_per_element
from lenz.schedule.legal import Group
from lenz.schedule.loops import BLOCK, TILE, Choice, Form, choose, coefficient
from lenz.schedule.nest import SHORT, Nest
from lenz.schedule.stages import Stages, Statement, stages
from lenz.sym import ONE, Int, Sym, SymEnv, Var, ceildiv, minimum, substitute

KINDS: Mapping[Form, KernelKind] = {
    "rows": "reduction",
    "columns": "outer_reduction",
    "elements": "pointwise",
    "tiles": "transpose",
}
PANEL = 256  # columns of one panel: 16 vector registers of f32
SCATTER_PANEL = 64  # columns of a scatter: every panel goes through all updates, so that few rows
# still give each core a panel, and 256 bytes are a whole number of cache lines.
WIDE_PANEL = 512  # for long rows of results: fewer passes over the page tables
# Edge of the square of tiles that one iteration transposes: whole cache lines on both sides stay in
# the first-level cache (839 -> 577 us for 1024 x 1024, 74 -> 57 ms for 4096 x 4096).
SQUARE = 4 * TILE
# Copies of a body that are emitted interleaved, by its arithmetic (in f32 additions). A chain of
# operations waits for results; the processor looks some 500 instructions ahead, so that it finds
# other elements to work on in short bodies by itself, and in long ones only if copies alternate.
# ns per element with 1, 2, 4, 8 copies (AVX-512, in cache): exp (10) .152 .155 .147 .144, gelu (25)
# .397 .335 .307 .343, five functions in a row (90) 2.43 1.94 1.58 1.22. Beyond that the compile
# time, which grows with the text, weighs more.
SHALLOW, DEEP, DEEPEST = 20.0, 250.0, 700.0


def build(
    g: Group, stored: frozenset[str], buffers: Mapping[str, Buffer], env: SymEnv, cx: Context
) -> Launch:
    """Write the kernel of a group; `stored` are the values that live on outside of it."""
    if g.nests[0].update is not None:
        return _finish(g, scattered(g.nests[0], env), "scatter", (), buffers, env)
    elide = not cx.options.emulate_rounding
    s = stages(g, stored, elide, named=True)
    choice = choose(g, s, env)
    match choice.form:
        case "rows":
            body = _rows(g, s)
        case "columns":
            s = stages(g, stored, elide, named=False)
            body = _columns(g, s, env)
        case "elements":
            body = _elements(g, s, choice, env)
        case "tiles":
            body = _tiles(g, s, choice)
    kind = "scan" if any(n.scan is not None for n in g.nests) else KINDS[choice.form]
    return _finish(g, body, kind, tuple(s.locals), buffers, env)


def nested(axes: Sequence[Axis], kind: LoopKind, body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    """Loops of one kind around a body, the first axis outermost."""
    for a in reversed(axes):
        body = (For(a, kind, body),)
    return body


def scattered(n: Nest, env: SymEnv) -> tuple[Stmt, ...]:
    """Updates in order over R; P, whose elements never meet, in parallel and along the lanes.

    With columns of P side by side, R runs once for each block of them, and the block inside.
    """
    assert n.update is not None
    store = Store(n.target, n.offset, n.body, n.bound, n.update)
    p = n.axes[-1] if n.axes else None
    if p is not None and coefficient(n.offset, p.var) is ONE and env.hint(p.extent) >= SHORT:
        block, lane = cut(p, SCATTER_PANEL)
        moved = _moved([store], {p.var: _joined(block, lane, SCATTER_PANEL)})
        loop = nested(n.raxes, "seq", (For(lane, "vector", moved),))
        return nested([*n.axes[:-1], *block], "parallel", loop)
    # Vectors store their lanes in order, but cannot add up two that meet.
    last: LoopKind = "vector" if n.update == "set" else "seq"
    body: tuple[Stmt, ...] = (store,)
    if n.raxes:
        body = nested(n.raxes[:-1], "seq", (For(n.raxes[-1], last, body),))
    return nested(n.axes, "parallel", body)


def _rows(g: Group, s: Stages) -> tuple[Stmt, ...]:
    inside: list[Stmt] = []
    for k, row in enumerate(s.rows):
        inside.extend(row)
        if k < len(s.loops) and s.loops[k]:
            *outer, last = g.domain.raxes
            loop = (For(last, "vector", tuple(s.loops[k])),)
            inside.extend(nested(outer, "seq", loop))
    return nested(g.domain.axes, "parallel", tuple(inside))


def _columns(g: Group, s: Stages, env: SymEnv) -> tuple[Stmt, ...]:
    *outer, p = g.domain.axes
    width = WIDE_PANEL if env.hint(p.extent) >= 4 * WIDE_PANEL else PANEL
    block, lane = cut(p, width)
    at: dict[Var, Sym] = {p.var: _joined(block, lane, width)}
    inside: list[Stmt] = []
    for k, row in enumerate(s.rows):
        if row:
            inside.append(For(lane, "vector", _moved(row, at)))
        if k < len(s.loops) and s.loops[k]:
            loop = (For(lane, "vector", _moved(s.loops[k], at)),)
            inside.extend(nested(g.domain.raxes, "seq", loop))
    return nested([*outer, *block], "parallel", tuple(inside))


def _elements(g: Group, s: Stages, choice: Choice, env: SymEnv) -> tuple[Stmt, ...]:
    statements: list[Statement] = [x for row in s.rows for x in row]
    v = choice.vector
    if v is None:
        return tuple(statements)
    outer = [a for a in g.domain.axes if a is not v]
    later = outer[g.domain.axes.index(v) :]  # axes that lie inside v in memory
    block, lane = cut(v, BLOCK)
    loop: tuple[Stmt, ...] = (
        For(lane, "vector", _moved(statements, {v.var: _joined(block, lane, BLOCK)})),
    )
    loop = nested(later, "seq", loop)
    return nested([*outer[: len(outer) - len(later)], *block], "parallel", loop)


def _tiles(g: Group, s: Stages, choice: Choice) -> tuple[Stmt, ...]:
    v, u = choice.vector, choice.across
    assert v is not None and u is not None
    statements: list[Statement] = [x for row in s.rows for x in row]
    at: dict[Var, Sym] = {}
    squares: list[Axis] = []
    blocks: list[Axis] = []
    lanes: list[Axis] = []
    for a in (u, v):
        square, part = cut(a, SQUARE, "s")
        block, lane = cut(part, TILE)
        at[a.var] = _joined(square, _joined(block, lane, TILE), SQUARE)
        squares += square
        blocks += block
        lanes.append(lane)
    u_lane, v_lane = lanes
    tile = (For(u_lane, "unroll", (For(v_lane, "vector", _moved(statements, at)),)),)
    outer = [a for a in g.domain.axes if a is not v and a is not u]
    return nested([*outer, *squares], "parallel", nested(blocks, "seq", tile))


def cut(a: Axis, width: int, suffix: str = "b") -> tuple[list[Axis], Axis]:
    """An axis as blocks and lanes; no block axis when one block holds it all.

    for i in N   ==>   for ib in ceil(N/w): for i in min(w, N - w*ib)
    """
    if isinstance(a.extent, Int) and a.extent.value <= width:
        return [], axis(a.name, a.extent)
    block = axis(f"{a.name}{suffix}", ceildiv(a.extent, Int(width)))
    whole = isinstance(a.extent, Int) and a.extent.value % width == 0
    rest = Int(width) if whole else minimum(Int(width), a.extent - block.var * width)
    return [block], axis(a.name, rest)


def _joined(block: list[Axis], lane: Axis | Sym, width: int) -> Sym:
    inner = lane.var if isinstance(lane, Axis) else lane
    return block[0].var * width + inner if block else inner


def _moved(statements: Sequence[Statement], at: Mapping[Var, Sym]) -> tuple[Stmt, ...]:
    """The statements with loop variables replaced."""
    moved: list[Stmt] = []
    for s in statements:
        value = reindex(s.value, at)
        match s:
            case Let():
                moved.append(replace(s, value=value))
            case Reduce() | Scan():
                moved.append(replace(s, value=value))
            case Store():
                bound = tuple(reindex(e, at) for e in s.bound)
                moved.append(replace(s, value=value, offset=substitute(s.offset, at), bound=bound))
    return tuple(moved)


@dataclass(slots=True)
class _Params:
    """Parameters found in the statements, in order of first appearance."""

    reads: dict[str, None]
    writes: dict[str, None]

    def mode(self, name: str) -> Mode:
        if name not in self.writes:
            return "in"
        return "inout" if name in self.reads else "out"


def _finish(
    g: Group,
    body: tuple[Stmt, ...],
    kind: KernelKind,
    scratch: tuple[Local, ...],
    buffers: Mapping[str, Buffer],
    env: SymEnv,
) -> Launch:
    local = {x.name for x in scratch}
    found = _Params({}, {})
    for e in loads_of(*exprs_of(body)):
        if e.attrs[0] not in local:
            found.reads[e.attrs[0]] = None
    for st in walk(body):
        if isinstance(st, Store) and st.buffer not in local:
            found.writes[st.buffer] = None
            if kind == "scatter":  # elements that are not written keep their value
                found.reads[st.buffer] = None
    args = tuple(dict.fromkeys([*found.reads, *found.writes]))
    names = {name: f"a{k}" for k, name in enumerate(args)}
    params = tuple(
        Param(names[a], buffers[a].dtype, buffers[a].type.layout.storage, found.mode(a))
        for a in args
    )
    body = _renamed(body, names)
    kernel = Kernel(
        name=kernel_name(g),
        kind=kind,
        params=params,
        sizes=_sizes(params, body),
        body=body,
        locals=scratch,
        tile=_tile(body, env),
        origins=tuple(dict.fromkeys(o for n in g.nests for o in n.out.origin)),
    )
    return Launch(kernel, args)


def kernel_name(g: Group) -> str:
    """fused_<last values>: what a profiler shows; the pipeline adds a number."""
    names = [n.name.split(".")[0].rstrip("_0123456789") for n in g.nests]
    picked = list(dict.fromkeys(x for x in names if x))[-3:]
    return "_".join(["fused", *picked])[:48]


def _renamed(body: tuple[Stmt, ...], names: Mapping[str, str]) -> tuple[Stmt, ...]:
    memo: dict[Expr, Expr] = {}

    def visit(e: Expr, args: list[Expr]) -> Expr:
        if e.op is LOAD:
            name, at, dtype = e.attrs
            return load(names.get(name, name), at, dtype, tuple(args))
        return rebuild(e, tuple(args))

    def statement(s: Stmt) -> Stmt:
        match s:
            case For():
                return replace(s, body=tuple(statement(x) for x in s.body))
            case Store():
                buffer = names.get(s.buffer, s.buffer)
                bound = tuple(interpret(e, visit, memo) for e in s.bound)
                value = interpret(s.value, visit, memo)
                return replace(s, buffer=buffer, value=value, bound=bound)
            case Let() | Reduce() | Scan():
                return replace(s, value=interpret(s.value, visit, memo))

    return tuple(statement(s) for s in body)


def _sizes(params: tuple[Param, ...], body: tuple[Stmt, ...]) -> tuple[Var, ...]:
    """Size variables that the kernel needs, by name: all that no loop of it binds."""
    bound: dict[Var, None] = {}
    used: dict[Var, None] = {}

    def use(s: Sym) -> None:
        used.update(dict.fromkeys(v for v in s.free_vars if not v.name.startswith("@")))

    for p in params:
        use(p.size)
    for st in walk(body):
        if isinstance(st, For):
            bound[st.axis.var] = None
            use(st.axis.extent)
        elif isinstance(st, Store):
            use(st.offset)
    for e in nodes_of(*exprs_of(body)):
        for s in syms_of(e):
            use(s)
    return tuple(sorted((v for v in used if v not in bound), key=lambda v: v.name))


def _tile(body: tuple[Stmt, ...], env: SymEnv) -> TileConfig:
    cost = cost_of(*exprs_of(body))
    reduces = any(
        isinstance(s, (Reduce, Scan)) or (isinstance(s, Store) and s.mode != "set")
        for s in walk(body)
    )
    if cost > DEEP:
        unroll = 1 if cost > DEEPEST else 2
    else:
        unroll = 4 if reduces or cost >= SHALLOW else 2
    return TileConfig(grain=_grain(body, env), unroll=unroll)


def _grain(body: tuple[Stmt, ...], env: SymEnv) -> int:
    while len(body) == 1 and isinstance(body[0], For) and body[0].kind == "parallel":
        body = body[0].body
    return grain(_time(body, env))


def _time(body: tuple[Stmt, ...], env: SymEnv) -> float:
    values = [s.value for s in body if not isinstance(s, For)]
    total = ns_per_element(values, sum(isinstance(s, Store) for s in body)) if values else 0.0
    for s in body:
        if isinstance(s, For):
            total += _extent_hint(s.axis, env) * _time(s.body, env)
    return total


def _extent_hint(a: Axis, env: SymEnv) -> int:
    if a.extent.hi is not None:
        return max(a.extent.hi, 0)
    return max(env.hint(a.extent), 0)  # a size that only the data gives counts as its lowest
