"""Axes over memory: their order, which of them are one, and where one of them falls apart."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from lenz.ir.expr import loads_of
from lenz.ir.graph import Scatter, bodies_of
from lenz.ir.kernel import digits
from lenz.ir.tensor import Axes, Axis, axis
from lenz.sym import ONE, ZERO, FloorDiv, Int, Mod, Sym, Var, affine_in, product, substitute
from lenz.sym.divide import divisions_of


def by_stride(axes: Axes, syms: Sequence[Sym]) -> Axes:
    """The axes with the longest stride first; loop order is free. Unknown strides count as long."""

    def stride(a: Axis) -> float:
        for s in syms:
            if (parts := affine_in(s, a.var)) is None:
                return -1
            if parts[0] is not ZERO:
                return abs(parts[0].value) if isinstance(parts[0], Int) else inf
        return 0

    strides = {a: stride(a) for a in axes}
    if any(s < 0 or (s == 0 and a.extent is not ONE) for a, s in strides.items()):
        return axes
    return tuple(sorted(axes, key=lambda a: -strides[a]))


def merged(axes: Axes, prefix: str, syms: Sequence[Sym]) -> tuple[Axes, dict[Var, Sym]]:
    """Merge neighbours that every index steps through without a gap; drop extents of 1.

    Beside an extent of 0, drop all others. Also returns the values of the old variables.
    """
    at: dict[Var, Sym] = {}
    groups: list[list[Axis]] = []
    empty = next((a for a in axes if a.extent is ZERO), None)
    for a in axes:
        if a.extent is ONE or empty not in (None, a):
            at[a.var] = ZERO
        elif groups and all(_joins(s, groups[-1][-1], a) for s in syms):
            groups[-1].append(a)
        else:
            groups.append([a])
    made = [axis(f"{prefix}{k}", product(a.extent for a in g)) for k, g in enumerate(groups)]
    for group, new in zip(groups, made, strict=True):
        at.update(digits(group, new.var))
    return tuple(made), at


def _joins(s: Sym, outer: Axis, inner: Axis) -> bool:
    first, second = affine_in(s, outer.var), affine_in(s, inner.var)
    return first is not None and second is not None and first[0] is second[0] * inner.extent


def taken_apart(axes: Axes, syms: Sequence[Sym]) -> tuple[Axis, Axes, dict[Var, Sym]] | None:
    """An axis that quotients and remainders by one size take apart: the axis, its parts, its value.

    (p: 768) in 8192*(p // 64) + p % 64 ==> p, (ph: 12, pl: 64), p = 64*ph + pl
    """
    for a in axes:
        found = _divisions_in(syms, [a.var])
        for size in dict.fromkeys(d.den for d in found if d.num is a.var):
            if size is a.extent or a.extent // size * size is not a.extent:
                continue
            high, low = axis(f"{a.name}h", a.extent // size), axis(f"{a.name}l", size)
            at: dict[Var, Sym] = {a.var: high.var * size + low.var}
            new = [substitute(s, at) for s in syms]
            if len(_divisions_in(new, [high.var, low.var])) < len(found):
                return a, (high, low), at
    return None


def _divisions_in(syms: Sequence[Sym], variables: Sequence[Var]) -> list[FloorDiv | Mod]:
    return list(dict.fromkeys(d for s in dict.fromkeys(syms) for d in divisions_of(s, variables)))


def old_reads(n: Scatter) -> set[str]:
    """The buffers that a scatter reads, without its base if each point reads what it alone writes.

    Such a scatter may write in place.
    """
    ones = {a.var: ZERO for a in n.axes if a.extent is ONE}
    place = tuple(substitute(s, ones) for s in n.index)
    moving = {a.var for a in n.axes} - ones.keys()
    steps = [(v, s - v) for s in place for v in s.free_vars if v in moving]
    # Each axis steps through an index of its own, which has no other axis.
    is_one_to_one = len(steps) == len(moving) == len({v for v, _ in steps})
    is_one_to_one &= all(moving.isdisjoint(rest.free_vars) for _, rest in steps)
    is_own = n.mode == "set" and not n.bound and is_one_to_one
    return {
        e.attrs[0]
        for e in loads_of(*bodies_of(n))
        if not (is_own and e.attrs[0] == n.base)
        or tuple(substitute(s, ones) for s in e.attrs[1]) != place
    }
