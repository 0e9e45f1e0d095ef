"""Run a vector loop once per period of an index that wraps around, so that no remainder is left.

    for p in 3*s0 : vector { store(%y, [p], load(%x, [p % s0])) }
    ==>  for pw in 3 : seq { for p in s0 : vector { store(%y, [p + pw*s0], load(%x, [p])) } }

A remainder per element makes a load a gather, and one by a symbolic size is a division as well.
"""

from __future__ import annotations

from lenz.ir.expr import all_syms, is_bound_var
from lenz.ir.kernel import For, Reduce, Stmt, Store, exprs_of, map_bodies
from lenz.ir.tensor import axis
from lenz.schedule.borders import WHOLE
from lenz.schedule.cut import all_moved, over_parts
from lenz.sym import ONE, ZERO, FloorDiv, Mod, Sym, SymEnv, Var, affine_in, maximum, minimum
from lenz.sym.expr import subterms

# Elements of the shortest period: a vector of f32 in AVX-512. Rows of 2048 that repeat 4, 8, 16, 24
# numbers take 0.23, 0.09, 0.16, 0.07 ns per element; with a remainder 0.4 to 0.5, and 2.1 by a
# symbolic size. Their sigmoids take 1.0, 0.5, 0.26, 0.34 ns; with a remainder 0.6 to 0.8.
PERIOD = 16
DEEPEST = 3  # loops over periods, each inside the other


def unwrapped(s: Stmt, env: SymEnv, deep: int = 1) -> Stmt:
    """A statement with loops over the periods around each vector loop inside that wraps around.

    With v + c = n*k + w and 0 <= w < n, a loop over k and w takes the place of one over v.
    """
    if not isinstance(s, For) or s.kind != "vector":
        return map_bodies(s, lambda inner: tuple([unwrapped(x, env) for x in inner]))
    may_move = deep <= DEEPEST and all(_may_move(x, s.axis.var) for x in s.body)
    if not may_move or (wrap := _wrap(s, env)) is None:
        return s
    v, (c, n), name = s.axis, wrap, s.axis.name + "w" * deep
    k, w = Var(f"{name}.k"), axis(f"{name}.w", n).var
    turn = axis(name, (v.extent - 1 + c) // n - c // n + 1)
    first = c // n + turn.var
    start = maximum(ZERO, c - n * first)
    lane = axis(v.name, minimum(n, v.extent + c - n * first) - start)
    over = {x: (x,) for r in s.body if isinstance(r, Reduce) for x in r.over}
    body = [over_parts(x, {**over, v.var: (turn.var, lane.var)}) for x in s.body]
    moved = all_moved(all_moved(body, {v.var: n * k + w - c}), {k: first, w: start + lane.var})
    return For(turn, "seq", (unwrapped(For(lane, "vector", moved), env, deep + 1),))


def _may_move(s: Stmt, v: Var) -> bool:
    """True if two loops over the same elements may take the place of the loop over v."""
    adds_up = isinstance(s, Reduce) and v in s.over and s.kind not in ("argmax", "argmin")
    return adds_up or (isinstance(s, Store) and s.mode == "set" and not s.bound)


def _wrap(s: For, env: SymEnv) -> tuple[Sym, Sym] | None:
    """(c, n) of an index (v + c) % n or (v + c) // n in a loop over v, if its periods are long."""
    v, most = s.axis.var, s.axis.extent.hi
    places = [x.offset for x in s.body if isinstance(x, Store)] + all_syms(*exprs_of(s.body))
    for e in subterms(*places) if most is None or most >= WHOLE else ():
        if isinstance(e, (FloorDiv, Mod)) and (parts := affine_in(e.num, v)):
            known = v not in e.den.free_vars and not any(map(is_bound_var, e.free_vars))
            if parts[0] is ONE and known and (e.den.lo or 0) > 0 and env.hint(e.den) >= PERIOD:
                return parts[1], e.den
    return None
