"""The elements of each parameter that a kernel launch touches, counted from its accesses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from math import prod

from lenz.ir.expr import Expr, is_bound_var, loads_of, nodes_of, syms_of
from lenz.ir.kernel import For, If, Kernel, Stmt, Store, exprs_of, map_bodies, walk
from lenz.records import dataclass, replace
from lenz.sym import Int, Sym, SymEnv, Var, affine_in, show, substitute


@dataclass(frozen=True, slots=True)
class Loops:
    """The loops of a kernel at the example sizes.

    `extent` is the extent in the first iteration of the enclosing loops. `share` is the fraction of
    (outer extent) * extent that really runs, for the inner loop of a split one, whose last block is
    short.
    """

    extent: Mapping[Var, int]
    share: Mapping[Var, Fraction]


def touched(k: Kernel, env: SymEnv) -> tuple[dict[str, int], dict[str, int]]:
    """Count the bytes that a launch reads and writes, at the example sizes of `env`.

    By parameter, without those that have no access.

    An access counts the distinct values of its offset over the loops. Equal accesses of one
    parameter count once, however their loops are split; different ones add up, to at most the
    parameter's size. A conditional access counts as if it always happened. Of a branch the first
    body counts: the second touches the same elements. A workspace counts as written completely.
    """
    k = replace(k, body=first_bodies(k.body))
    loops = _loops(k, env)
    sizes = {p.name: env.hint(p.size) for p in k.params}
    loads = [(e.attrs[0], e.attrs[1][0], e.args) for e in loads_of(*exprs_of(k.body)) if e.attrs[1]]
    writes = [s for s in walk(k.body) if isinstance(s, Store)]
    stores = [(s.buffer, s.offset, s.bound) for s in writes]
    loads += [(s.buffer, s.offset, s.bound) for s in writes if s.mode != "set"]
    works = {p.name: sizes[p.name] for p in k.params if p.mode == "work"}
    read, written = _sum(loads, sizes, loops, env), _sum(stores, sizes, loops, env) | works
    width = {p.name: p.dtype.bytes for p in k.params}
    return {p: n * width[p] for p, n in read.items()}, {p: n * width[p] for p, n in written.items()}


def bytes_moved(k: Kernel, env: SymEnv) -> int:
    """The bytes that a launch reads or writes, at the example sizes."""
    return sum(n for counts in touched(k, env) for n in counts.values())


def _sum(
    accesses: Iterable[tuple[str, Sym, tuple[Expr, ...]]],
    sizes: Mapping[str, int],
    loops: Loops,
    env: SymEnv,
) -> dict[str, int]:
    found: dict[str, dict[object, int]] = {}
    for name, offset, bound in accesses:
        if name in sizes:
            key, count = _distinct(offset, bound, loops, env)
            found.setdefault(name, {})[key] = count
    return {name: min(sizes[name], sum(found[name].values())) for name in sizes if name in found}


def first_bodies(body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    """The statements with the first body of each branch in its place."""
    made = list[Stmt]()
    for s in body:
        made += first_bodies(s.then) if isinstance(s, If) else (map_bodies(s, first_bodies),)
    return tuple(made)


def _loops(k: Kernel, env: SymEnv) -> Loops:
    extent: dict[Var, int] = {}
    share: dict[Var, Fraction] = {}
    for s in walk(k.body):
        if not isinstance(s, For):
            continue
        outer = [v for v in s.axis.extent.free_vars if v in extent]
        first = extent[s.axis.var] = _extent_at(s.axis.extent, outer, 0, env)
        if len(outer) == 1 and first > 0 and (blocks := extent[outer[0]]) > 0:
            last = _extent_at(s.axis.extent, outer, blocks - 1, env)
            # All blocks except the last are full.
            share[s.axis.var] = Fraction((blocks - 1) * first + last, blocks * first)
    return Loops(extent, share)


def _extent_at(extent: Sym, outer: Sequence[Var], iteration: int, env: SymEnv) -> int:
    return env.hint(substitute(extent, {v: Int(iteration) for v in outer}))


def _distinct(
    offset: Sym, bound: tuple[Expr, ...], loops: Loops, env: SymEnv
) -> tuple[object, int]:
    """The identity of an access, and the number of elements that it touches."""
    extent = loops.extent
    rest, dims = offset, []
    for v in offset.free_vars:
        parts = affine_in(rest, v) if v in extent else None
        if parts is None or any(w in extent or is_bound_var(w) for w in parts[0].free_vars):
            continue
        stride, rest = env.hint(parts[0]), parts[1]
        dims.append((abs(stride), extent[v]))
    used = dict.fromkeys(offset.free_vars)
    for e in nodes_of(*bound):
        used.update({v: None for s in syms_of(e) for v in s.free_vars})
    over = [v for v in used if v in extent]
    share = prod((loops.share.get(v, Fraction(1)) for v in over), start=Fraction(1))
    if not bound and not any(v in extent for v in rest.free_vars):
        merged = _merged(dims)
        span = 1 + sum(stride * (n - 1) for stride, n in merged)
        count = int(prod(n for _, n in merged) * share)
        return ("affine", env.hint(rest), tuple(merged)), min(count, span)
    names = (show(offset), tuple(id(b) for b in bound))
    return names, int(prod(extent[v] for v in over) * share)


def _merged(dims: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """(stride, extent), smallest stride first; loops that continue each other are joined."""
    made: list[tuple[int, int]] = []
    for stride, n in sorted(d for d in dims if d[0] and d[1] != 1):
        if made and made[-1][0] * made[-1][1] == stride:
            made[-1] = (made[-1][0], made[-1][1] * n)
        else:
            made.append((stride, n))
    return made
