"""Reductions over rows that a map writes with padding include the padding, on GPUs.

    %m = reduce max (i: N | r: 13) { x(i, r) }
    %y = map (i: N, j: 16) { masked(j < 13, exp(x(i, j) - load(%m, [i])), 0) }
    ==>  %m = reduce max (i: N | r: 16) { masked(r < 13, x(i, r), -inf) };   %y as it was

Loops of different lengths share no kernel: softmax before a ragged product would be three.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lenz import ops
from lenz.context import Context
from lenz.ir.dtype import I64
from lenz.ir.expr import Expr, index, masked, reindex
from lenz.ir.graph import Graph, Node, Pointwise, Reduction, reads_of
from lenz.ir.op import MASKED
from lenz.ir.tensor import axis
from lenz.machines import machine_of
from lenz.ops.compare import LT, sides_of
from lenz.opt.each import each
from lenz.opt.unmask import tests_of
from lenz.sym import Int, Sym, product


def pad_rows(g: Graph, cx: Context) -> Graph:
    """Lengthen the reductions that a padded map reads, directly or through each other."""
    loops = {n.out.name: n for n in g.nodes if isinstance(n, (Pointwise, Reduction))}
    wide: dict[str, Sym] = {}
    for n in loops.values():
        if isinstance(n, Pointwise) and (length := _row(n)) is not None:
            for name in _before(n, loops):
                r = loops[name]
                if isinstance(r, Reduction) and [a.extent for a in r.raxes] == [length]:
                    wide[name] = n.axes[-1].extent

    def padded(n: Node) -> Node:
        if isinstance(n, Reduction) and n.out.name in wide and cx.allow("pad_rows", n.out.name):
            return _lengthened(n, wide[n.out.name])
        return n

    return each(g, padded)


def _row(n: Pointwise) -> Sym | None:
    """The length of a row without its padding; None for a map without padding, and for long rows.

    A row that is too long for a program is read again for the map anyway.
    """
    held = machine_of(n.out.type.device).capabilities.held
    if n.body.op is not MASKED or not n.axes or not held:
        return None
    for e in tests_of(n.body.args[0]):
        place, size = sides_of(e, LT) or (None, None)
        if place is n.axes[-1].var and isinstance(size, Int) and size.value <= held:
            return size
    return None


def _before(n: Pointwise, loops: dict[str, Pointwise | Reduction]) -> Iterator[str]:
    """The operands of a map with one element per row, and their operands."""
    rows = product(n.out.shape[:-1])
    seen: dict[str, None] = {}
    todo = list(reads_of(n))
    while todo:
        name = todo.pop()
        if name in loops and name not in seen and product(loops[name].out.shape) is rows:
            seen[name] = None
            todo.extend(reads_of(loops[name]))
            yield name


def _lengthened(n: Reduction, length: Sym) -> Reduction:
    if n.kind in ("argmax", "argmin"):
        return n
    (old,) = n.raxes
    new = axis(old.name, length)
    inside = index(new.var, I64) < index(old.extent, I64)
    body: Expr = reindex(n.body, {old.var: new.var})
    return replace(n, raxes=(new,), body=masked(inside, body, ops.neutral(n.kind, body.dtype)))
