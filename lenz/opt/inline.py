"""Pointwise nodes are computed where they are read, when that is cheaper than a trip to memory.

    %a = map (i) { exp(load(%x, [i])) };  %b = map (i) { neg(load(%a, [i])) }
    ==>  %b = map (i) { neg(exp(load(%x, [i]))) }

Decided by bytes and recompute: a node with one reader that reads each element once is always
inlined; one that is cheap (a cast, a sum of two tensors) also into several readers. A node that is
dear and read twice stays: fusion then keeps its value in a register or a row of scratch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lenz.context import Context
from lenz.ir.expr import Expr, cost_of, loads_of, nodes_of, reindex, replace_loads
from lenz.ir.graph import (
    LOOPS,
    Extern,
    Graph,
    Loop,
    Node,
    Pointwise,
    Reduction,
    Scan,
    Scatter,
    View,
    atom_refs,
    bodies_of,
    loop_axes,
    map_bodies,
    reads_of,
)
from lenz.ir.tensor import Buffer
from lenz.sym import Sym, SymEnv, Var, product

# Cost (f32 additions) up to which a value is computed again rather than stored and loaded:
# a load and a store of 4 bytes each from L2 take about as long as four additions.
CHEAP = 4.0
# Bodies grow no further than this, so that registers suffice and emission stays linear.
MAX_NODES = 400


@dataclass(slots=True)
class _Uses:
    """Who reads a buffer."""

    loops: int = 0
    loads: int = 0
    other: int = 0
    elements: int = 0


def inline(g: Graph, cx: Context) -> Graph:
    """Substitute producers into readers, in one walk from first to last node."""
    if not cx.options.inline:
        return g
    uses = _uses(g)
    # A read may not move behind a call that writes what it reads.
    written = {name for n in g.nodes if isinstance(n, Extern) for name in n.mutates}
    bodies: dict[str, Pointwise] = {}
    nodes: list[Node] = []
    for n in g.nodes:
        if isinstance(n, LOOPS):
            n = _substitute(n, bodies)
        nodes.append(n)
        if (
            isinstance(n, Pointwise)
            and _inlines(n, uses[n.out.name], g.env)
            and not any(e.attrs[0] in written for e in loads_of(n.body))
            and cx.allow("inline", n.out.name)
        ):
            bodies[n.out.name] = n
    return replace(g, nodes=tuple(nodes))


def _inlines(n: Pointwise, u: _Uses, env: SymEnv) -> bool:
    if u.loops == 0:
        return False
    size = len(nodes_of(n.body))
    if size > MAX_NODES:
        return False
    own = max(env.hint(product(n.out.shape)), 1)
    loads = len(loads_of(n.body))
    cost = cost_of(n.body) - loads
    if u.other == 0 and u.loops == 1 and u.loads == 1 and u.elements <= own:
        return True
    if cost <= 1.0 and loads <= 1:
        return True
    if u.other:  # It is in memory anyway: reading it is one load.
        return False
    # Recomputed several times, or for a broadcast: only what is cheap and reads little.
    factor = u.elements / own
    return cost <= CHEAP and loads <= 2 and factor <= 4 * u.loads


def _substitute(n: Loop, bodies: dict[str, Pointwise]) -> Loop:
    budget = MAX_NODES
    origins: dict[str, None] = {}

    def replacement(e: Expr) -> Expr | None:
        nonlocal budget
        name, index, _ = e.attrs
        p = bodies.get(name)
        if p is None:
            return None
        budget -= len(nodes_of(p.body))
        if budget < 0:
            return None
        origins.update(dict.fromkeys(p.out.origin))
        at: dict[Var, Sym] = {a.var: i for a, i in zip(p.axes, index, strict=True)}
        return reindex(p.body, at, e.args)

    if not any(name in bodies for name in reads_of(n)):
        return n
    n = map_bodies(n, lambda e: replace_loads(e, replacement))
    origin = tuple(dict.fromkeys((*origins, *n.out.origin)))
    return replace(n, out=replace(n.out, origin=origin))


def _uses(g: Graph) -> dict[str, _Uses]:
    """Count readers of every buffer; `elements` is how many elements all loops together read."""
    uses: dict[str, _Uses] = {}

    def of(name: str) -> _Uses:
        return uses.setdefault(name, _Uses())

    for n in g.nodes:
        match n:
            case Pointwise() | Reduction() | Scan() | Scatter():
                if isinstance(n, Scatter):
                    of(n.base).other += 1
                elements = max(g.env.hint(product(a.extent for a in loop_axes(n))), 1)
                seen: dict[str, int] = {}
                for e in loads_of(*bodies_of(n)):
                    seen[e.attrs[0]] = seen.get(e.attrs[0], 0) + 1
                for name, count in seen.items():
                    u = of(name)
                    u.loops += 1
                    u.loads += count
                    u.elements += elements * count
                of(n.out.name)
            case View():
                of(n.source).other += 1
                of(n.out.name)
            case Extern():
                for o in n.outs:
                    if isinstance(o, Buffer):
                        of(o.name)
                for a in (*n.args, *(v for _, v in n.kwargs)):
                    for r in atom_refs(a):
                        of(r).other += 1
    for a in g.outputs:
        for r in atom_refs(a):
            of(r).other += 1
    for m in g.mutations:
        of(m.value).loops += 1
        of(m.value).loads += 1
    return uses
