"""min and max, folded by bounds and by proof."""

from __future__ import annotations

from lenz.sym.expr import Max, Min, Sym, extreme_node, sym
from lenz.sym.prove import prove_le

PROVE_UP_TO = 6  # args: beyond, only numeric bounds are compared, so that long chains stay linear


def minimum(a: Sym | int, b: Sym | int) -> Sym:
    """min(a, b)."""
    args = _args(Min, a, b)
    highs = [x.hi for x in args if x.hi is not None]
    if highs:
        top = min(highs)
        first = next(x for x in args if x.hi == top)
        args = [x for x in args if x is first or x.lo is None or x.lo < top]
    return _proved(Min, args)


def maximum(a: Sym | int, b: Sym | int) -> Sym:
    """max(a, b)."""
    args = _args(Max, a, b)
    lows = [x.lo for x in args if x.lo is not None]
    if lows:
        top = max(lows)
        first = next(x for x in args if x.lo == top)
        args = [x for x in args if x is first or x.hi is None or x.hi > top]
    return _proved(Max, args)


def _args(kind: type[Min] | type[Max], a: Sym | int, b: Sym | int) -> list[Sym]:
    """The operands of both, each once."""
    parts = (e.args if isinstance(e, kind) else (e,) for e in (sym(a), sym(b)))
    return list(dict.fromkeys(x for part in parts for x in part))


def _proved(kind: type[Min] | type[Max], args: list[Sym]) -> Sym:
    """The extreme of args, without those that another one is proved to pass."""
    if 1 < len(args) <= PROVE_UP_TO:
        for x in tuple(args):
            others = [y for y in args if y is not x]
            if any(prove_le(y, x) if kind is Min else prove_le(x, y) for y in others):
                args = others
    return extreme_node(kind, args) if len(args) > 1 else args[0]
