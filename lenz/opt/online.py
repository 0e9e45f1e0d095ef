"""The maximum m of a long row and sum(exp(x - m)) from a single read of it, on GPUs.

    %m = reduce max (i: N | r: L) { x(i, r) }
    %s = reduce sum (i: N | r: L) { exp(sub(x(i, r), load(%m, [i]))) }
    ==>  %m.piece = reduce max (i: N, c: C | k: K) { x(i, c*K + k) }
         %s.piece = reduce sum (i: N, c: C | k: K) { exp(x(i, c*K + k) - m.piece[i, c]) }
         %m = reduce max (i: N | c: C) { load(%m.piece, [i, c]) }
         %s = reduce sum (i: N | c: C) { s.piece[i, c] * exp(m.piece[i, c] - m[i]) }

A program holds K elements, so the first two are one kernel that reads x once; the last two are
small. This is Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), with
parts in place of elements. A part that is all -inf does not count unless the whole row is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from lenz import ops
from lenz.context import Context
from lenz.ir.dtype import I64
from lenz.ir.expr import Expr, const, index, load, loads_of, masked, ref, reindex
from lenz.ir.graph import Extern, Graph, Node, Reduction, buffers_of, loop_axes, reads_of
from lenz.ir.op import LOAD
from lenz.ir.tensor import Axis, Layout, axis
from lenz.machines import machine_of
from lenz.ops.arith import SUB
from lenz.ops.math import EXP
from lenz.opt.each import each
from lenz.opt.split_reduce import partial_result
from lenz.sym import ONE, ZERO, Int, Sym, Var, affine_in, step_of

PART = 2048  # elements of a part
UNIT = 16  # bytes loaded at once, if aligned to as many


def online(g: Graph, cx: Context) -> Graph:
    """Rewrite each such pair whose rows are too long for a GPU program."""
    layouts = {name: b.type.layout for name, b in buffers_of(g).items()}
    # A read may not move past a call that writes its buffer, in either direction.
    written = {name for n in g.nodes if isinstance(n, Extern) for name in n.mutates}
    tops: dict[str, Reduction] = {}
    sums: dict[str, Reduction] = {}
    for n in g.nodes:
        if not isinstance(n, Reduction) or written & set(reads_of(n)):
            continue
        if _is_long_top(n, layouts):
            tops[n.out.name] = n
        elif (top := _top_of(n, tops)) and top not in sums and cx.allow("online", n.out.name):
            sums[top] = n
    made: dict[str, Reduction] = {}

    def split(n: Node) -> Node | Sequence[Node]:
        name = n.out.name if isinstance(n, Reduction) else ""
        if (total := sums.get(name)) is None:
            return made.get(name, n)
        *rest, made[total.out.name] = _parted(tops[name], total, layouts)
        return rest

    return each(g, split)


def _is_long_top(n: Reduction, layouts: Mapping[str, Layout]) -> bool:
    """True for the maxima of rows that are contiguous in memory and too long."""
    r = [a for a in n.raxes if a.extent is not ONE]
    held = machine_of(n.out.type.device).capabilities.held
    if n.kind != "max" or not held or len(r) != 1 or n.finish is not ref("acc", n.body.dtype):
        return False
    steps = [step_of(layouts[e.attrs[0]].at(e.attrs[1]), r[0].var) for e in loads_of(n.body)]
    length = r[0].extent
    return isinstance(length, Int) and length.value > held and ONE in steps


def _top_of(n: Reduction, tops: Mapping[str, Reduction]) -> str | None:
    """The name of m if the reduction is the sum of exp(x - m) over the rows of m."""
    if n.kind != "sum" or n.body.op is not EXP or n.body.args[0].op is not SUB:
        return None
    x, m = n.body.args[0].args
    top = tops.get(m.attrs[0]) if m.op is LOAD else None
    if top is None or [a.extent for a in loop_axes(top)] != [a.extent for a in loop_axes(n)]:
        return None
    pairs = zip(loop_axes(top), loop_axes(n), strict=True)
    at: dict[Var, Sym] = {a.var: ZERO if b.extent is ONE else b.var for a, b in pairs}
    same = reindex(top.body, at) is reindex(x, {a.var: ZERO for a in n.raxes if a.extent is ONE})
    row = all(i is at[a.var] or i is b.var
              for i, a, b in zip(m.attrs[1], top.axes, n.axes, strict=True))  # fmt: skip
    return m.attrs[0] if same and row else None


def _before(top: Reduction, r: Axis, layouts: Mapping[str, Layout]) -> Sym:
    """The offset of a row from the preceding multiple of 16 bytes, in elements."""
    for e in loads_of(top.body):
        step, first = affine_in(layouts[e.attrs[0]].at(e.attrs[1]), r.var) or (ZERO, ZERO)
        if step is ONE:
            return first % (UNIT // e.dtype.bytes)
    return ZERO


def _parted(top: Reduction, total: Reduction, layouts: dict[str, Layout]) -> tuple[Reduction, ...]:
    """The two reductions over parts, and the two over whole rows."""
    (r,) = [a for a in top.raxes if a.extent is not ONE]
    length = r.extent.hi or 0
    before = _before(top, r, layouts)
    c, k = axis("c", Int(-(-(length + (before.hi or 0)) // PART))), axis("k", Int(PART))
    place = c.var * PART + k.var - before
    low = const(-math.inf, top.body.dtype)
    x = reindex(top.body, {a.var: place if a is r else ZERO for a in top.raxes})
    inside = index(place, I64) < index(r.extent, I64)
    if before is not ZERO:
        inside = (index(before, I64) <= index(place + before, I64)) & inside
    if length % PART or before is not ZERO:
        x = masked(inside, x, low)

    def of(name: str, axes: tuple[Axis, ...]) -> Expr:
        return load(name, [a.var for a in axes], low.dtype)

    first, m = partial_result(top, "piece", (c, *top.axes), (k,), "max", x)
    e = ops.where(ops.eq(m, low), 0, ops.exp(x - m))
    second, _ = partial_result(total, "piece", (c, *top.axes), (k,), "sum", e)
    drop = of(first.out.name, (c, *total.axes)) - of(top.out.name, total.axes)
    again = of(second.out.name, (c, *total.axes)) * ops.exp(drop)
    return first, second, replace(top, raxes=(c,), body=m), replace(total, raxes=(c,), body=again)
