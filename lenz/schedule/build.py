"""Turn a group of nests into one `Kernel`: every loop, block and scratch row is written here.

Names inside a kernel are positions (a0, a1, ... for parameters, v0 ... for values), so that equal
layers of a model give equal kernels, which are compiled once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from lenz.context import Context
from lenz.ir.dtype import I64
from lenz.ir.expr import Expr, cost_of, interpret, load, loads_of, nodes_of, rebuild, syms_of
from lenz.ir.kernel import (
    For,
    Kernel,
    KernelKind,
    Launch,
    Local,
    Mode,
    Param,
    Reduce,
    Scan,
    Sort,
    Stmt,
    Store,
    TileConfig,
    exprs_of,
    map_leaves,
    syms_in,
    walk,
    with_buffers,
)  # fmt: skip
from lenz.ir.op import LOAD
from lenz.ir.syntax import map_values
from lenz.ir.tensor import Axis, Buffer
from lenz.schedule import vectors
from lenz.schedule.blocks import Shape, Space, scattered, tiled
from lenz.schedule.cost import NS_PER_KEY, grain, ns_per_element
from lenz.schedule.cut import bounded
from lenz.schedule.legal import Group, device_of
from lenz.schedule.loops import Form, choose
from lenz.schedule.reciprocal import share_reciprocals
from lenz.schedule.stages import stages
from lenz.sym import Sym, SymEnv, Var, substitute

KINDS: Mapping[Form, KernelKind] = {
    "rows": "reduction",
    "columns": "outer_reduction",
    "elements": "pointwise",
    "tiles": "transpose",
}
# How many copies of a body are emitted interleaved, by its arithmetic (in f32 additions). A chain
# of operations waits for results. The processor looks some 500 instructions ahead: in short bodies
# it finds other elements to work on by itself, in long ones only if copies alternate. ns per
# element with 1, 2, 4, 8 copies (AVX-512, in cache): exp (10) .152 .155 .147 .144, gelu (25) .397
# .335 .307 .343, five functions in a row (90) 2.43 1.94 1.58 1.22. Beyond that compile time matters
# more; it grows with the text.
SHALLOW, DEEP, DEEPEST = 20.0, 250.0, 700.0


def build_once(
    g: Group,
    stored: frozenset[str],
    buffers: Mapping[str, Buffer],
    unaligned: frozenset[str],
    env: SymEnv,
    cx: Context,
    space: Space | None,
    made: dict[object, Launch],
) -> Launch:
    """`build`, memoised in `made`: groups that differ only in names share one result.

    A training step of ResNet-50 launches 316 kernels, 96 of them distinct.
    """
    names: dict[str, str] = {}

    def number(name: str) -> str:
        return names.setdefault(name, f"b{len(names)}")

    numbered = _renaming(number)
    nests = tuple(
        replace(
            n,
            out=Buffer(number(n.name), n.out.type),
            target=number(n.target),
            body=numbered(n.body),
            finish=None if n.finish is None else numbered(n.finish),
            bound=tuple(map(numbered, n.bound)),
        )
        for n in g.nests
    )
    own = {new: buffers[old] for old, new in names.items() if old in buffers}
    lives, strange = (frozenset(names[x] for x in names if x in s) for s in (stored, unaligned))
    key = g.domain, nests, lives, strange, tuple((name, b.type) for name, b in own.items())
    if key not in made:
        made[key] = build(replace(g, nests=nests), lives, own, strange, env, cx, space)
    same = made[key]
    old = {new: name for name, new in names.items()}
    args = tuple(old.get(a) or f"{g.name}.work" for a in same.args)
    name, origins = kernel_name(g), tuple(dict.fromkeys(o for n in g.nests for o in n.out.origin))
    kernel, *candidates = (replace(k, name=name) for k in (same.kernel, *same.candidates))
    return Launch(kernel, args, tuple(candidates), origins)


def build(
    g: Group,
    stored: frozenset[str],
    buffers: Mapping[str, Buffer],
    unaligned: frozenset[str],
    env: SymEnv,
    cx: Context,
    space: Space | None,
) -> Launch:
    """Write the kernel of a group; `stored` are the values that are used outside of it.

    `unaligned` are buffers without a known alignment, such as views returned by library calls.
    """
    if g.nests[0].update is not None and device_of(g) == "cpu":
        body = vectors.scattered(g.nests[0], env)
        return _finish(g, body, "scatter", _tile(body, env), (), buffers, None)
    elide = not cx.options.emulate_rounding
    if g.nests[0].update is not None and device_of(g) != "cpu":
        form = scattered(g.nests[0], env, Shape())
        made = _finish(g, form.body, form.kind, form.tile, (), buffers, unaligned)
        return replace(made, kernel=_bounded(made.kernel, env))
    if device_of(g) != "cpu":
        s = stages(g, stored, elide, named=True, scratch=False)
        share_reciprocals(s, g.domain.axes, g.domain.raxes, elide)

        def shaped(shape: Shape) -> Launch:
            form = tiled(g, s, env, shape)
            scratch = tuple(s.locals)
            made = _finish(
                g, form.body, form.kind, form.tile, scratch, buffers, unaligned, form.work
            )
            return replace(made, kernel=_bounded(made.kernel, env))

        usual = shaped(Shape())
        if space is None:
            return usual
        shapes = space(usual.kernel.kind, env.hint(g.domain.rows), env.hint(g.domain.length))
        return replace(usual, candidates=(usual.kernel, *(shaped(x).kernel for x in shapes)))
    s = stages(g, stored, elide, named=True)
    choice = choose(g, s, env)
    match choice.form:
        case "rows":
            scans = any(n.scan is not None for n in g.nests)
            body = (vectors.runs(g, s) if scans else None) or vectors.rows(g, s)
        case "columns":
            s = stages(g, stored, elide, named=False)
            body = vectors.columns(g, s, env)
        case "elements":
            body = vectors.elements(g, s, choice, env)
        case "tiles":
            body = vectors.tiles(g, s, choice)
    tile = _tile(body, env)
    kind = "scan" if any(n.scan is not None for n in g.nests) else KINDS[choice.form]
    kind = "sort" if s.sorts else kind
    return _finish(g, body, kind, tile, tuple(s.locals), buffers, None)


def _bounded(k: Kernel, env: SymEnv) -> Kernel:
    """The kernel with the upper bounds on sizes that its plan checks, where they are lower.

    Lanes may rely on a lower bound that follows from the program's own checks.
    """
    most = dict(env.most)
    looser = [v for v in k.sizes if v.name in most and (v.hi is None or v.hi > most[v.name])]
    ends = {v: Var(v.name, v.lo, most[v.name]) for v in looser}
    if not ends:
        return k
    params = tuple(replace(p, size=substitute(p.size, ends)) for p in k.params)
    sizes = tuple(ends.get(v, v) for v in k.sizes)
    return replace(k, params=params, sizes=sizes, body=bounded(k.body, ends))


@dataclass(slots=True)
class _Params:
    """Parameters found in the statements, in order of first appearance."""

    reads: dict[str, None]
    writes: dict[str, None]

    def mode(self, name: str) -> Mode:
        return "in" if name not in self.writes else "inout" if name in self.reads else "out"


def _finish(
    g: Group,
    body: tuple[Stmt, ...],
    kind: KernelKind,
    tile: TileConfig,
    scratch: tuple[Local, ...],
    buffers: Mapping[str, Buffer],
    unaligned: frozenset[str] | None,
    work: Sym | None = None,
) -> Launch:
    local = {x.name for x in scratch}
    found = _Params({}, {})
    for e in loads_of(*exprs_of(body)):
        if e.attrs[0] not in local:
            found.reads[e.attrs[0]] = None
    for st in walk(body):
        if isinstance(st, Store) and st.buffer not in local:
            found.writes[st.buffer] = None
            if kind == "scatter":  # elements that the kernel does not write keep their value
                found.reads[st.buffer] = None
    args = tuple(dict.fromkeys([*found.reads, *found.writes]))
    names = {name: f"a{k}" for k, name in enumerate(args)}
    params = tuple(
        Param(
            names[a],
            buffers[a].dtype,
            buffers[a].type.layout.storage,
            found.mode(a),
            unaligned is not None and a not in unaligned,
        )
        for a in args
    )
    if work is not None:
        names[""] = f"a{len(args)}"
        params += (Param(names[""], I64, work, "work", True),)
        args += (f"{g.name}.work",)
    body = _renamed(body, names)
    kernel = Kernel(
        name=g.name,
        kind=kind,
        params=params,
        sizes=_sizes(params, body),
        body=body,
        locals=scratch,
        tile=tile,
    )
    return Launch(kernel, args)


def kernel_name(g: Group) -> str:
    """fused_<last values>: what a profiler shows; the pipeline adds a number."""
    names = [n.name.split(".")[0].rstrip("_0123456789") for n in g.nests]
    picked = list(dict.fromkeys(x for x in names if x))[-3:]
    return "_".join(["fused", *picked])[:48]


def _renaming(name_of: Callable[[str], str]) -> Callable[[Expr], Expr]:
    """A function that renames the buffers that an expression reads."""
    memo: dict[Expr, Expr] = {}

    def visit(e: Expr, args: list[Expr]) -> Expr:
        if e.op is LOAD:
            name, at, dtype = e.attrs
            return load(name_of(name), at, dtype, tuple(args))
        return rebuild(e, tuple(args))

    return lambda e: interpret(e, visit, memo)


def _renamed(body: tuple[Stmt, ...], names: Mapping[str, str]) -> tuple[Stmt, ...]:
    renamed = _renaming(lambda name: names.get(name, name))

    return map_leaves(body, lambda s: with_buffers(map_values(s, renamed), names))


def _sizes(params: tuple[Param, ...], body: tuple[Stmt, ...]) -> tuple[Var, ...]:
    """The size variables of the kernel, by name: all variables that no loop binds."""
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
        for s in syms_in(st):
            use(s)
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
    values = [s.value for s in body if not isinstance(s, (For, Sort))]
    total = ns_per_element(values, sum(isinstance(s, Store) for s in body)) if values else 0.0
    for s in body:
        if isinstance(s, Sort):
            total += NS_PER_KEY * env.hint(s.size)
        if isinstance(s, For):
            total += _extent_hint(s.axis, env) * _time(s.body, env)
    return total


def _extent_hint(a: Axis, env: SymEnv) -> int:
    if a.extent.hi is not None:
        return max(a.extent.hi, 0)
    return max(env.hint(a.extent), 0)  # a data-dependent size counts as its lower bound
