"""Drop nodes that nothing reads, unless they are calls with effects.

If a map has run-time checks that exist nowhere else (`x[i] * 0` reads no `x[i]`), the checks stay:

    %a = map (i: N, j: 4) { load(%x, [@0, j]; assert_in_range(load(%i, [i]), 9)) }
    ==>  %a = map (i: N) { checked(False, assert_in_range(load(%i, [i]), 9)) }

A node without elements reads nothing: its strides may be 0, and no loop form handles those.
"""

from __future__ import annotations

from collections.abc import Collection, Set
from dataclasses import replace
from typing import TypeAlias

from lenz.context import Context
from lenz.ir import graph as ir
from lenz.ir.dtype import BOOL
from lenz.ir.expr import Expr, const, keep_checks, nodes_of, vars_of
from lenz.ir.op import MASKED
from lenz.ir.tensor import Axis, Buffer, TensorType, contiguous
from lenz.sym import ZERO, Sym, SymEnv, Var

Condition: TypeAlias = tuple[tuple[Axis, ...], Expr]


def drop(g: ir.Graph, cx: Context) -> ir.Graph:
    """Keep the nodes that outputs, mutations, effects, sizes and checks need."""
    nodes: list[ir.Node] = [
        ir.Pointwise(n.out, n.axes, const(0, n.out.dtype))
        if isinstance(n, (ir.Pointwise, ir.Reduction, ir.Scan)) and ZERO in n.out.type.shape
        else n
        for n in g.nodes
    ]
    kept = _needed(g, nodes, None)
    if any(map(checks_of, nodes)):
        kept = _needed(g, nodes, {c for n in kept for c in checks_of(n)})
    return replace(g, nodes=tuple(kept))


def _needed(g: ir.Graph, nodes: list[ir.Node], done: Set[Condition] | None) -> list[ir.Node]:
    """The needed nodes; with `done`, also the remaining checks of loops whose values are unused.

    The walk is from the end: checks of one such loop may need the values of another, which stays.
    """
    live = {*ir.atom_refs(g.outputs), *(x for m in g.mutations for x in (m.input, m.value))}
    kept: list[ir.Node] = []
    given = {v for b in g.inputs for s in _sizes(b) for v in s.free_vars}
    for n in reversed(nodes):
        if not _has_effect(n, given) and not any(b.name in live for b in ir.outs_of(n)):
            if done is None or not isinstance(n, ir.LOOPS) or not checks_of(n) - done:
                continue
            n = only_checks(n, g.env)
        kept.append(n)
        live.update(ir.reads_of(n))
    return kept[::-1]


def checks_of(n: ir.Node) -> set[Condition]:
    """The ops of a loop that may fail, with the loop's axes."""
    if not isinstance(n, ir.LOOPS) or not any(e.checks for e in ir.bodies_of(n)):
        return set()
    return {(ir.loop_axes(n), e) for e in nodes_of(*ir.bodies_of(n)) if e.op.guarded}


def only_checks(n: ir.Loop, env: SymEnv) -> ir.Loop:
    """Only the checks of a map, along their axes and those that may be empty; else the loop."""
    if not isinstance(n, ir.Pointwise) or any(e.op is MASKED for e in nodes_of(n.body)):
        return n
    body = keep_checks(const(False, BOOL), (n.body,))
    axes = tuple(a for a in n.axes if a.var in vars_of(body) or not env.is_positive(a.extent))
    kind = TensorType(BOOL, n.out.type.device, contiguous([a.extent for a in axes]))
    return ir.Pointwise(replace(n.out, type=kind), axes, body)


def _has_effect(n: ir.Node, given: Collection[Var]) -> bool:
    # A call must happen if it writes, has visible effects, or yields a size.
    if not isinstance(n, ir.Extern):
        return False
    if n.mutates or n.is_seen or len(ir.outs_of(n)) < sum(o is not None for o in n.outs):
        return True
    # Sizes that the call determines at run time: an assertion may be their only reader.
    return any(v not in given for b in ir.outs_of(n) for s in _sizes(b) for v in s.free_vars)


def _sizes(b: Buffer | Sym) -> tuple[Sym, ...]:
    return (b,) if isinstance(b, Sym) else (*b.type.shape, *b.type.layout.stride)
