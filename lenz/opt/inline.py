"""Inline pointwise nodes into their readers if that is cheaper than a trip to memory.

    %a = map (i) { exp(load(%x, [i])) };  %b = map (i) { neg(load(%a, [i])) }
    ==>  %b = map (i) { neg(exp(load(%x, [i]))) }

Bytes and recomputation decide. A node with one reader that reads each element once is always
inlined. A cheap node (a cast, a sum of two tensors) is inlined into several readers. An expensive
node that is read twice stays: fusion keeps its value in a register or a scratch row. On GPUs
arithmetic is cheaper and an extra kernel more expensive (`_pays_on_gpu`).

Run-time checks move with the values. If no reader covers all that was checked (`x[i][:2]`), a map
with only the checks stays (`drop.only_checks`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from lenz.context import Context
from lenz.ir import expr
from lenz.ir import graph as ir
from lenz.ir.expr import Expr
from lenz.ir.op import LOAD, MASKED
from lenz.ir.tensor import Axis
from lenz.machines import capabilities_of, runs_programs
from lenz.opt.drop import drop, only_checks
from lenz.opt.each import each
from lenz.opt.unmask import spare_of, tests_of
from lenz.records import dataclass, replace
from lenz.sym import ONE, ZERO, Int, Sym, SymEnv, Var, affine_in, product, prove_le, prove_lt
from lenz.sym.divide import divisions_of, flatten

# Cost (f32 additions) up to which a value is recomputed rather than stored and loaded. A load and a
# store of 4 bytes each from L2 take about as long as four additions.
CHEAP = 4.0
# Reads per element from which a gathered vector is stored first: 320 means, 10 of each, that are
# subtracted from 2048 rows take 0.54 ms as gathers, and 0.1.
TABLE = 8
# Positions on its axis, or elements in all, from which a part of a join is a loop of its own.
ROW, PART = 32, 4096
PERIOD = 16  # times that an element is repeated from which its reader runs in periods of its own
# Limit on the size of bodies, so that registers suffice and emission stays linear.
MAX_NODES = 400
# Additions that a load takes on a GPU: address, conversion.
GPU_LOAD = 4.0
# A program lies in one piece of a row if the pieces are multiples of this (machine/cuda/whole.py).
PIECE = 128
# Values that depend only on positions (masks, tables) are never stored on a GPU up to this cost.
GPU_TABLE = 16.0


@dataclass(slots=True)
class Uses:
    """The readers of a buffer.

    other     it is in memory anyway: calls, views, updates or the caller read it
    elements  elements read by all loops together
    reads     the same, but reads that inner axes do not change count once per tile (GPUs only)
    once      some loop reads each element just once (GPUs only)
    apart     some reader, direct or indirect, does not (GPUs only)
    in_order  some reader is a scan, or finds the place of a value
    columns   some reader is a sum of columns
    """

    loops: int = 0
    loads: int = 0
    other: bool = False
    elements: int = 0
    reads: int = 0
    once: bool = False
    apart: bool = False
    in_order: bool = False
    columns: bool = False


def inline(g: ir.Graph, cx: Context) -> ir.Graph:
    """Substitute producers into readers, in one walk from the first node to the last."""
    if not cx.options.inline:
        return g
    g = drop(g, cx)  # dead nodes do not count as readers
    uses = uses_of(g)
    # A read may not move past a call that writes its buffer.
    written = {name for n in g.nodes if isinstance(n, ir.Extern) for name in n.mutates}
    bodies: dict[str, ir.Pointwise] = {}
    kept: dict[str, tuple[Sym, ...]] = {}
    covered: set[str] = set()  # producers with checks that some reader repeats in full

    def substituted(n: ir.Node) -> ir.Node:
        if isinstance(n, ir.LOOPS):
            n = _inlined(n, bodies, covered, g.env)
        if (
            isinstance(n, ir.Pointwise)
            and _inlines(n, uses[n.out.name], kept, g.env)
            and not any(e.attrs[0] in written for e in expr.loads_of(n.body))
            and cx.allow("inline", n.out.name)
        ):
            bodies[n.out.name] = n
        elif isinstance(n, ir.LOOPS):
            kept[n.out.name] = n.out.shape
        return n

    return _without(each(g, substituted), bodies, covered)


def _without(g: ir.Graph, inlined: Collection[str], covered: Collection[str]) -> ir.Graph:
    """The graph without nodes that were inlined everywhere; checks that would be lost stay."""
    read = {*ir.atom_refs(g.outputs)} | {m.value for m in g.mutations}

    def checks(n: ir.Node) -> ir.Node | Sequence[ir.Node]:
        if isinstance(n, ir.Pointwise) and n.out.name in inlined and n.out.name not in read:
            if not n.body.checks or n.out.name in covered:
                return ()
            n = only_checks(n, g.env)
        read.update(ir.reads_of(n))
        return n

    return each(g, checks, last_first=True)


def _inlines(n: ir.Pointwise, u: Uses, kept: Mapping[str, tuple[Sym, ...]], env: SymEnv) -> bool:
    if u.loops == 0 or len(expr.nodes_of(n.body)) > MAX_NODES or _is_gathered(n, u, env):
        return False
    own = max(env.hint(product(n.out.shape)), 1)
    loads = len(expr.loads_of(n.body))
    cost = expr.cost_of(n.body) - loads
    is_only = not u.other and u.loops == 1 and u.loads == 1 and u.elements <= own
    if is_only or (cost <= 1.0 and loads <= 1):
        return True
    if u.other:  # reading it is one load
        return False
    if runs_programs(n.out.type.device):
        launch = not u.once and not any(
            e.attrs[0] in kept and _takes_each_once(_dims(e, kept[e.attrs[0]]), n.axes)
            for e in expr.loads_of(n.body)
        )
        return _pays_on_gpu(n, u, own, launch)
    # Recomputed several times, or for a broadcast: only if it is cheap and reads little.
    return cost <= CHEAP and loads <= 2 and u.elements / own <= 4 * u.loads


def _is_gathered(n: ir.Pointwise, u: Uses, env: SymEnv) -> bool:
    """True if a map gathers on a CPU, and its readers would again for each row or out of order.

    A reader that is no sum of columns and needs no order runs by the periods of its index.
    """
    again = u.elements >= TABLE * env.hint(product(n.out.shape))
    if not (u.columns or u.in_order or again) or runs_programs(n.out.type.device):
        return False
    last = n.axes[-1:]
    repeats = again and any(1 < env.hint(a.extent) < PERIOD for a in last)
    for e in expr.loads_of(n.body):
        free = {v for s in e.attrs[1] for v in s.free_vars}
        # Each element several times: in its reader the position is a quotient.
        if repeats and free and free.isdisjoint(a.var for a in last):
            return True
        if any(divisions_of(s, [a.var for a in last]) for s in e.attrs[1]):
            return True
    return False


def _pays_on_gpu(n: ir.Pointwise, u: Uses, own: int, launch: bool) -> bool:
    """Compare the cost of recomputing with a store, the loads and, if needed, a kernel.

    Readers that read each element at their own position can share its kernel, so only additional
    kernels cost. Other readers need a kernel before theirs, but find repeated reads in cache.
    `launch`: neither the kernel of an operand nor that of a reader could store the value.
    """
    size, can = n.out.type.dtype.bytes, capabilities_of(n.out.type.device)
    if not expr.loads_of(n.body) and expr.cost_of(n.body) <= GPU_TABLE:
        return True
    moving = _moving(n)
    cost = math.fsum(e.op.cost for e in moving if e.op is not LOAD)
    per_byte = can.adds / can.bandwidth
    again = sum(e.dtype.bytes for e in moving if e.op is LOAD)
    if not u.apart:
        return (u.loops - 1) * (again + cost / per_byte) <= u.loops * size
    each = max(cost - GPU_LOAD, 0.0) / per_byte + (again - size) / can.cached
    return (u.reads - own) * each <= 2 * own * size + can.moved * launch


def _moving(n: ir.Pointwise) -> list[Expr]:
    """The nodes that vary along the innermost axis; a GPU computes the rest once per tile row."""
    inner = [a.var for a in n.axes if a.extent is not ONE][-1:]
    memo: dict[Expr, bool] = {}

    def moves(e: Expr, args: list[bool]) -> bool:
        return any(args) or any(v in s.free_vars for s in expr.syms_of(e) for v in inner)

    expr.interpret(n.body, moves, memo)
    return [e for e, moved in memo.items() if moved]


def _reads(e: Expr, axes: tuple[Axis, ...], env: SymEnv, lanes: int) -> int:
    """The number of times that a GPU evaluates a load in a loop."""
    outer, inner = list(axes), 1
    if not e.args:
        while outer and outer[-1].var not in {v for s in e.attrs[1] for v in s.free_vars}:
            inner *= env.hint(outer.pop().extent)
    return env.hint(product(a.extent for a in outer)) * -(-inner // lanes)


def _share(e: Expr, shape: Sequence[Sym], axes: tuple[Axis, ...]) -> float:
    """The share of a loop that evaluates a load: a piece of its rows, if programs lie in pieces."""
    parts = affine_in(e.attrs[1][-1], axes[-1].var) if shape and axes else None
    sizes = (parts[1], shape[-1], axes[-1].extent) if parts and parts[0] is ONE else ()
    units = [x.value for x in sizes if isinstance(x, Int) and x.value % PIECE == 0]
    return min(1.0, units[1] / max(units[2], 1)) if len(units) == 3 else 1.0


def _covers(e: Expr, n: ir.Loop, p: ir.Pointwise, env: SymEnv) -> bool:
    """True if a loop loads a map's result at all indices at which the map's checks differ."""
    checks = only_checks(p, env).axes
    every = _dims(e, p.out.shape)
    pairs = [d for a, d in zip(p.axes, every, strict=True) if a in checks]
    inside = {x for i, size in every for x in (i, size - 1 - i)}
    for m in expr.nodes_of(*ir.bodies_of(n)):
        masks = m.op is MASKED and any(x.attrs == e.attrs for x in expr.loads_of(m.args[1]))
        # Tests may only say that the index is inside the result.
        if masks and any(spare_of(t) not in inside for t in tests_of(m.args[0])):
            return False
    axes = ir.loop_axes(n)
    moved = [v for i, _ in pairs for v in i.free_vars]
    if not all(a.var in moved or env.is_positive(a.extent) for a in axes):
        return False  # the loop may be empty, and check nothing
    if len(set(moved)) == len(moved) and all(_all_along(i, size, axes) for i, size in pairs):
        return True
    return any(
        _takes_each_once(x, [a for a in axes if any(a.var in i.free_vars for i, _ in x)])
        for x in (pairs, every)
    )


def _dims(e: Expr, shape: tuple[Sym, ...]) -> list[tuple[Sym, Sym]]:
    """The index of a load in each dimension, and its size."""
    return list(zip(e.attrs[1], shape, strict=True))


def _all_along(i: Sym, size: Sym, axes: tuple[Axis, ...]) -> bool:
    """True if an index runs over a whole dimension with an axis, possibly shifted or reversed."""
    for a in axes:
        match affine_in(i, a.var):
            case (step, k) if step is ONE:
                return prove_le(k, ZERO) and prove_le(size - k, a.extent)
            case (step, k) if step is Int(-1):
                return prove_le(size, k + 1) and prove_lt(k, a.extent)
    return size is ONE


def _takes_each_once(dims: Sequence[tuple[Sym, Sym]], axes: Sequence[Axis]) -> bool:
    """True if the indices take every combination of values exactly once over the axes."""
    rest = flatten([i for i, _ in dims], [size for _, size in dims])
    step: Sym = ONE
    steps: dict[Sym, Sym] = {}
    for a in axes:
        parts = affine_in(rest, a.var)
        if a.extent is ONE and parts is not None:
            rest = parts[1]
            continue
        if parts is None or parts[0] in steps:
            return False
        steps[parts[0]], rest = a.extent, parts[1]
    while step in steps:
        step = step * steps.pop(step)
    return rest is ZERO and not steps and step is product(size for _, size in dims)


def _at_most_once(e: Expr, shape: tuple[Sym, ...], axes: Sequence[Axis], env: SymEnv) -> bool:
    """True if no element is read twice: each axis of the loop moves along a dimension of its own.

    A part of a join reads fewer elements than the loop has. It is a loop of its own unless it is
    short (schedule/borders.py).
    """
    inside, dims = {a.var for a in axes}, list(enumerate(e.attrs[1]))
    own = {a: d for d, i in dims for a in axes if inside.isdisjoint((i - a.var).free_vars)}
    parts = [shape[d:] for a, d in own.items() if a.extent is not shape[d]]
    long = all(env.hint(p[0]) >= ROW or env.hint(product(p)) >= PART for p in parts)
    return long and not e.args and len({*own.values()}) == sum(a.extent is not ONE for a in axes)


def value_at(p: ir.Pointwise, e: Expr) -> Expr:
    """The value of the element of a map that a load reads."""
    return expr.reindex(p.body, {a.var: i for a, i in zip(p.axes, e.attrs[1], strict=True)}, e.args)


def _inlined(n: ir.Loop, maps: dict[str, ir.Pointwise], covered: set[str], env: SymEnv) -> ir.Loop:
    budget = MAX_NODES
    origins: dict[str, None] = {}

    def replacement(e: Expr) -> Expr | None:
        nonlocal budget
        name = e.attrs[0]
        p = maps.get(name)
        if p is None:
            return None
        budget -= len(expr.nodes_of(p.body))
        if budget < 0:
            return None
        origins.update(dict.fromkeys(p.out.origin))
        if p.body.checks and name not in covered and _covers(e, n, p, env):
            covered.add(name)
        return value_at(p, e)

    if not any(name in maps for name in ir.reads_of(n)):
        return n
    new = ir.map_bodies(n, lambda e: expr.replace_loads(e, replacement))
    return replace(new, out=replace(n.out, origin=tuple(dict.fromkeys((*origins, *n.out.origin)))))


def uses_of(g: ir.Graph) -> Mapping[str, Uses]:
    """The readers of every buffer."""
    uses = defaultdict[str, Uses](Uses)
    shapes = {name: b.shape for name, b in ir.buffers_of(g).items()}
    others = [*ir.atom_refs(g.outputs)]
    for n in g.nodes:
        if isinstance(n, ir.LOOPS):
            _count(n, uses, shapes, g.env)
            others += [n.base] if isinstance(n, ir.Scatter) else []
        else:
            others += ir.reads_of(n)
    for name in others:
        uses[name].other = True
    for m in g.mutations:
        uses[m.value].loops += 1
        uses[m.value].loads += 1
    for n in reversed(g.nodes):
        if isinstance(n, ir.Pointwise) and uses[n.out.name].apart:
            for e in expr.loads_of(n.body):
                uses[e.attrs[0]].apart = True
    return uses


def _count(
    n: ir.Loop, uses: Mapping[str, Uses], shapes: Mapping[str, tuple[Sym, ...]], env: SymEnv
) -> None:
    """Add the loads of a loop to the uses of what it reads."""
    axes, can = ir.loop_axes(n), capabilities_of(n.out.type.device)
    elements = max(env.hint(product(a.extent for a in axes)), 1)
    columns = {a.var for a in n.axes} if isinstance(n, ir.Reduction) else set[Var]()
    is_place = isinstance(n, ir.Reduction) and n.kind in ("argmax", "argmin")
    seen: set[str] = set()
    for e in expr.loads_of(*ir.bodies_of(n)):
        name, share = e.attrs[0], 1.0
        u = uses[name]
        if can.units:
            share = _share(e, shapes[name], axes)
            once = name not in seen and _takes_each_once(_dims(e, shapes[name]), axes)
            u.once |= once
            u.apart |= not once
            u.reads += int(share * _reads(e, axes, env, can.lanes))
        elif _at_most_once(e, shapes[name], axes, env):
            share = min(1.0, env.hint(product(shapes[name])) / elements)
        u.columns |= any(v in columns for s in e.attrs[1][-1:] for v in s.free_vars)
        u.in_order |= is_place or isinstance(n, ir.Scan)
        u.elements += int(share * elements)
        u.loads += 1
        u.loops += name not in seen
        seen.add(name)
