"""Compare and convert positions in 32 bits on GPUs; 64 bits take two instructions or more.

    lt(index(j, i64), index(50257, i64))          ==>  lt(index(j, i32), index(50257, i32))
    cast(index(j, i64), f32)                      ==>  cast(index(j, i32), f32)
    eq(load(%target, [i]):i64, index(j, i64))     ==>  eq(cast(clamp(target), i32), index(j, i32))

In the last rule, all numbers outside the positions become one number that is not a position. It
applies if a row has one such number and many positions.
"""

from __future__ import annotations

from lenz import ops
from lenz.context import Context
from lenz.ir.dtype import BOOL, F32, I32, I64
from lenz.ir.expr import Expr, exact_place, index, rebuild, rewritten, vars_of
from lenz.ir.graph import Graph, map_bodies
from lenz.ops.cast import CAST
from lenz.ops.compare import EQ, NE
from lenz.opt.each import each_on_gpus
from lenz.sym import Sym

MOST = 2**31 - 1


def narrow(g: Graph, cx: Context) -> Graph:
    """Compare positions in 32 bits."""
    return each_on_gpus(g, lambda n: map_bodies(n, lambda body: rewritten(body, _short_places)))


def _short_places(e: Expr) -> Expr:
    if e.op is CAST and e.dtype is F32 and _is_place(e.args[0]):
        return rebuild(e, (_short(e.args[0]),))
    if e.dtype is not BOOL or len(e.args) != 2 or any(a.dtype is not I64 for a in e.args):
        return e
    x, y = e.args
    if _is_place(x) and _is_place(y):
        return rebuild(e, (_short(x), _short(y)))
    if e.op in (EQ, NE) and _is_place(x) != _is_place(y):
        place, number = (x, y) if _is_place(x) else (y, x)
        s: Sym = place.attrs[0]
        if s.lo is not None and s.lo >= 0 and not vars_of(number).issuperset(s.free_vars):
            held = ops.minimum(ops.maximum(number, -1), MOST)
            return rebuild(e, (ops.cast(held, I32), _short(place)))
    return e


def _is_place(e: Expr) -> bool:
    """True for an exact index that fits 32 bits and is not the largest such number."""
    s = exact_place(e)
    return s is not None and s.lo is not None and s.lo >= -MOST and s.hi is not None and s.hi < MOST


def _short(e: Expr) -> Expr:
    return index(e.attrs[0], I32)
