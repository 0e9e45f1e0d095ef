"""min and max, folded by bounds and by proof."""

from __future__ import annotations

from lenz.sym.expr import Max, Min, Sym, max_node, min_node, sym
from lenz.sym.prove import prove_le

PROVE_UP_TO = 6  # args: beyond, only numeric bounds are compared, so that long chains stay linear


def minimum(a: Sym | int, b: Sym | int) -> Sym:
    """min(a, b)."""
    a, b = sym(a), sym(b)
    args = dict.fromkeys(
        (a.args if type(a) is Min else (a,)) + (b.args if type(b) is Min else (b,))
    )
    highs = [x.hi for x in args if x.hi is not None]
    if highs:
        top = min(highs)
        first = next(x for x in args if x.hi == top)
        args = {x: None for x in args if x is first or x.lo is None or x.lo < top}
    if 1 < len(args) <= PROVE_UP_TO:
        for x in list(args):
            if any(y is not x and prove_le(y, x) for y in args):
                del args[x]
    return min_node(args) if len(args) > 1 else next(iter(args))


def maximum(a: Sym | int, b: Sym | int) -> Sym:
    """max(a, b)."""
    a, b = sym(a), sym(b)
    args = dict.fromkeys(
        (a.args if type(a) is Max else (a,)) + (b.args if type(b) is Max else (b,))
    )
    lows = [x.lo for x in args if x.lo is not None]
    if lows:
        top = max(lows)
        first = next(x for x in args if x.lo == top)
        args = {x: None for x in args if x is first or x.hi is None or x.hi > top}
    if 1 < len(args) <= PROVE_UP_TO:
        for x in list(args):
            if any(y is not x and prove_le(x, y) for y in args):
                del args[x]
    return max_node(args) if len(args) > 1 else next(iter(args))
