"""min and max, folded by bounds and by proof."""

from __future__ import annotations

from lenz.sym.expr import Max, Min, Sym, extreme_node, sym
from lenz.sym.prove import prove_le

PROVE_UP_TO = 6  # args: beyond, only numeric bounds are compared, so that long chains stay linear


def minimum(a: Sym | int, b: Sym | int) -> Sym:
    """min(a, b)."""
    return _extreme(Min, a, b)


def maximum(a: Sym | int, b: Sym | int) -> Sym:
    """max(a, b)."""
    return _extreme(Max, a, b)


def _extreme(kind: type[Min] | type[Max], a: Sym | int, b: Sym | int) -> Sym:
    """The operands of both, each once, without those dominated by another one's bounds."""
    parts = (e.args if isinstance(e, kind) else (e,) for e in (sym(a), sym(b)))
    args = list(dict.fromkeys(x for part in parts for x in part))
    ends = [x.hi if kind is Min else x.lo for x in args]
    known = [e for e in ends if e is not None]
    if known:
        end = min(known) if kind is Min else max(known)
        first = args[ends.index(end)]
        starts = [(x, x.lo if kind is Min else x.hi) for x in args]
        within = end.__gt__ if kind is Min else end.__lt__
        args = [x for x, start in starts if x is first or start is None or within(start)]
    return _proved(kind, args)


def _proved(kind: type[Min] | type[Max], args: list[Sym]) -> Sym:
    """The extreme of args, without those provably dominated by another one."""
    if 1 < len(args) <= PROVE_UP_TO:
        for x in tuple(args):
            others = [y for y in args if y is not x]
            if any(prove_le(y, x) if kind is Min else prove_le(x, y) for y in others):
                args = others
    return extreme_node(kind, args) if len(args) > 1 else args[0]
