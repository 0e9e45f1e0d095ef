"""Remove reductions that need no loop.

    %s = reduce sum (i: N | r: 3) { f(i, r) }
    ==>  %s = map (i: N) { add(add(f(i, 0), f(i, 1)), f(i, 2)) }
    %s = reduce sum (i: N | r: K) { where(and(eq(t(i), r), c(i)), v(i), 0) }
    ==>  %s = map (i: N) { where(and(and(le(0, t(i)), lt(t(i), K)), c(i)), v(i), 0) }

A node that is not a reduction can be inlined. The second rule saves the gradient of a loss a pass
over all classes. On GPUs only: on CPUs loops keep a row in cache and its sum in a register.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from lenz import ops
from lenz.context import Context
from lenz.ir import expr
from lenz.ir import graph as ir
from lenz.ir.dtype import I64
from lenz.ir.expr import Expr
from lenz.ir.op import INDEX
from lenz.ir.tensor import Axis, Layout
from lenz.machines import runs_programs
from lenz.ops.cast import CAST, NARROW
from lenz.ops.compare import EQ, WHERE
from lenz.opt.each import each
from lenz.opt.inline import uses_of, value_at
from lenz.opt.unmask import tests_of
from lenz.sym import ONE, ZERO, Int, product, step_of

# Longest row that is unrolled; the same for a contiguous row, where a kernel over rows reads whole
# cache lines; and the limit on nodes in the resulting body.
LONGEST, LONGEST_ROW, MAX_NODES = 16, 4, 200


def unloop(g: ir.Graph, cx: Context) -> ir.Graph:
    """Unroll short reductions, and solve those whose body is zero except for one element."""
    layouts = {name: b.type.layout for name, b in ir.buffers_of(g).items()}
    uses = uses_of(g)
    # A read may not move past a call that writes its buffer.
    written = {name for n in g.nodes if isinstance(n, ir.Extern) for name in n.mutates}
    loops = {n.out.name for n in g.nodes if isinstance(n, ir.LOOPS)}
    sorts = {n.out.name for n in g.nodes if isinstance(n, ir.Sort)}
    hot: dict[str, ir.Pointwise] = {}

    def straight(n: ir.Node) -> ir.Node:
        if isinstance(n, ir.Pointwise) and not written & set(ir.reads_of(n)) and _one_hot(n.body):
            hot[n.out.name] = n
        if isinstance(n, ir.Reduction) and runs_programs(n.out.type.device):
            u, body = uses[n.out.name], None
            # Readers that need the result for each element of its row share the row's kernel, and
            # so do nodes that store or sort those elements.
            rows = u.elements >= 2 * max(u.loads, 1) * max(g.env.hint(product(n.out.shape)), 1)
            stored = [r for r in ir.reads_of(n) if r in loops and uses[r].other]
            if not rows and not stored and not sorts & set(ir.reads_of(n)):
                body = written_out(n, layouts)
            body = _solved(n, hot) if body is None else body
            if body is not None and cx.allow("unloop", n.out.name):
                return ir.Pointwise(n.out, n.axes, expr.finished(n.finish, body))
        return n

    return each(g, straight)


def written_out(n: ir.Reduction, layouts: Mapping[str, Layout]) -> Expr | None:
    """The body of a short reduction, repeated for each element of the row."""
    lengths = [a.extent.value if isinstance(a.extent, Int) else LONGEST + 1 for a in n.raxes]
    if n.kind in ("argmax", "argmin") or 0 in lengths:
        return None
    count = product(lengths).hi or 0
    sparse = all(_is_sparse(e, a, layouts) for e in expr.loads_of(n.body) for a in n.raxes)
    most = LONGEST if sparse else LONGEST_ROW
    if count > most or count * len(expr.nodes_of(n.body)) > MAX_NODES:
        return None
    places = itertools.product(*[map(Int, range(length)) for length in lengths])
    rows = [dict(zip([a.var for a in n.raxes], place, strict=True)) for place in places]
    return ops.total([expr.reindex(n.body, at) for at in rows], n.kind)


def _is_sparse(e: Expr, a: Axis, layouts: Mapping[str, Layout]) -> bool:
    """False if a row of the load is contiguous along an axis that is not very short."""
    step = step_of(layouts[e.attrs[0]].at(e.attrs[1]), a.var)
    return a.extent.hi is not None and (a.extent.hi <= LONGEST_ROW or step is not ONE)


def _one_hot(e: Expr) -> list[Expr] | None:
    """The conditions of `where(c and d and .., v, 0)`, below casts; None for anything else."""
    while e.op in (CAST, NARROW):
        e = e.args[0]
    if e.op is not WHERE or e.args[2] is not expr.const(0, e.dtype):
        return None
    conditions = tests_of(e.args[0])
    return conditions if any(c.op is EQ for c in conditions) else None


def _solved(n: ir.Reduction, hot: Mapping[str, ir.Pointwise]) -> Expr | None:
    """The only element of a sum that may be nonzero."""
    long = [a for a in n.raxes if a.extent is not ONE]
    if n.kind != "sum" or len(long) != 1:
        return None

    def seen(e: Expr) -> Expr | None:
        p = hot.get(e.attrs[0])
        return None if p is None else value_at(p, e)

    (r,), first = long, {a.var: ZERO for a in n.raxes if a.extent is ONE}
    body = expr.reindex(expr.replace_loads(n.body, seen), first)
    conditions = _one_hot(body)
    if conditions is None:
        return None
    hits = [(c, t, i) for c in conditions if c.op is EQ for t, i in (c.args, c.args[::-1])
            if i.op is INDEX and i.attrs[0] is r.var and i.dtype is I64]  # fmt: skip
    if len(hits) != 1:
        return None
    hit, t, _ = hits[0]
    inside = ops.le(0, t) & (t < expr.index(r.extent, I64))
    for c in reversed(conditions):
        inside = inside if c is hit else inside & c

    def chosen(e: Expr) -> Expr:
        if e.op is WHERE:
            return ops.where(inside, e.args[1], e.args[2])
        return expr.rebuild(e, (chosen(e.args[0]),))

    new = ops.of_one("sum", chosen(body))
    return None if r.var in expr.vars_of(new) else new
