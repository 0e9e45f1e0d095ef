"""A loop node laid out in memory: flat offsets, as few axes as possible.

    map (i: s0, j: 8) { exp(load(%x, [i, j])) }     ==>     (p0: 8*s0)  store %y[p0] = exp(%x[p0])

Two nests can share loops if one domain can be written over the other's axes (`remap`). Invariants:
P axes are named p0, p1, ... and R axes r0, r1, ...; no extent is the constant 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

from lenz import ops
from lenz.ir.axes import by_stride, merged, taken_apart
from lenz.ir.expr import Expr, all_syms, finished, load, loads_of, reindex, replace_loads
from lenz.ir.graph import Loop, Reduction, Scan, Scatter, Sort
from lenz.ir.kernel import digits, position
from lenz.ir.tensor import Axes, Axis, Buffer, Layout, axis
from lenz.machines import runs_programs
from lenz.records import dataclass, replace
from lenz.schedule.result import Each, Fold, Result, Running, Sorted, Update, mapped, result_exprs
from lenz.sym import ONE, ZERO, Int, Sym, Var, product, step_of, substitute
from lenz.sym.divide import divisions_of

SHORT = 8  # a shorter innermost axis is not worth vectors of its own


@dataclass(frozen=True, slots=True)
class Nest:
    """store target[offset] = the result of body, over P and inside over R."""

    out: Buffer
    target: str
    axes: Axes
    raxes: Axes
    body: Expr
    offset: Sym
    result: Result

    @property
    def name(self) -> str:
        """Name of the value it defines."""
        return self.out.name

    @property
    def is_reduction(self) -> bool:
        """True if it reduces, scans or sorts; R may be empty if all its extents are 1."""
        return isinstance(self.result, (Fold, Running, Sorted))

    @property
    def finds_place(self) -> bool:
        """True if it gives the position of a value along R."""
        return isinstance(self.result, Fold) and self.result.kind in ("argmax", "argmin")

    @property
    def across(self) -> bool:
        """True if it reduces over axes of P."""
        return isinstance(self.result, Fold) and self.result.across

    @property
    def scans(self) -> bool:
        """True if it stores running values."""
        return isinstance(self.result, Running)

    @property
    def sorts(self) -> bool:
        """True if it stores values in order."""
        return isinstance(self.result, Sorted)

    @property
    def updates(self) -> bool:
        """True if it is a scatter."""
        return isinstance(self.result, Update)

    @property
    def kept(self) -> Axes:
        """The positions of the values that a sort keeps, if it does not keep all."""
        return self.result.kept if isinstance(self.result, Sorted) else ()

    @property
    def exprs(self) -> tuple[Expr, ...]:
        """Every expression of it."""
        return (self.body, *result_exprs(self.result))

    @property
    def checks(self) -> bool:
        """True if it may fail."""
        return any(e.checks for e in self.exprs)


def nest_of(
    n: Loop, layouts: Mapping[str, Layout], roots: Mapping[str, str], target: str | None = None
) -> Nest:
    """Lay a loop node out in memory; `target` is the buffer written if not the node's own.

    `roots` names, for each view, the buffer that it aliases.
    """

    def laid(e: Expr) -> Expr:
        name, at, dtype = e.attrs
        return load(roots.get(name, name), (layouts[name].at(at),), dtype, e.args)

    flat: Callable[[Expr], Expr] = lambda body: replace_loads(body, laid)

    into, layout = target or n.out.name, n.out.type.layout
    if isinstance(n, Scatter):
        # An index that is just a variable reads a different element for each value.
        free = tuple(a for a in n.axes if a.var in n.index)
        rest = tuple(a for a in n.axes if a.var not in n.index)
        update = Update(n.mode, tuple(map(flat, n.bound)))
        value, at = flat(n.value), layout.at(n.index)
        return _merged(Nest(n.out, into, free, rest, value, at, update))
    body, offset = flat(n.body), layout.at([a.var for a in n.axes])
    if isinstance(n, Reduction):
        nest = Nest(n.out, into, n.axes, n.raxes, body, offset, Fold(n.kind, flat(n.finish)))
        nest = _merged(nest if runs_programs(n.out.type.device) else _in_digits(nest))
        return nest if nest.raxes else _of_one(nest)
    if isinstance(n, Sort):
        along, size = n.axes[n.dim], n.out.shape[n.dim]
        rows = tuple(a for a in n.axes if a is not along)
        kept = () if size is along.extent else (axis("k0", size),)
        offset = layout.at([kept[0].var if kept and a is along else a.var for a in n.axes])
        return _merged(Nest(n.out, into, rows, (along,), body, offset, Sorted(kept)))
    if isinstance(n, Scan):
        along, running = n.axes[n.dim], Running(n.kind, flat(n.finish))
        rows = tuple(a for a in n.axes if a is not along)
        nest = Nest(n.out, into, rows, (along,), body, offset, running)
        turn = {along.var: along.extent - 1 - along.var} if n.reverse else {}
        return _merged(_substituted(nest, rows, nest.raxes, turn))
    return _merged(Nest(n.out, into, n.axes, (), body, offset, Each()))


def _in_digits(n: Nest) -> Nest:
    """A reduction whose axes are split where quotients and remainders by one size take them apart.

    (p0: 768) load x[8192*(p0 // 64) + p0 % 64] ==> (p0: 12, p1: 64) load x[8192*p0 + p1]

    Heads of attention that lie side by side are read so: sums of their columns took 0.50 ms as
    gathers, and 0.07. If columns fill vectors, R stays one loop: means of windows of 8 x 8 rows of
    32 take 0.27 ms so, and 0.56 with two loops.
    """
    near = any(is_near(e.attrs[1][0], a.var) for e in loads_of(n.body) for a in n.axes[-1:])
    axes = n.axes if near else (*n.axes, *n.raxes)
    found = taken_apart(axes, [n.offset, *all_syms(*n.exprs)])
    if found is None:
        return n
    whole, parts, at = found

    def split(old: Axes) -> Axes:
        return tuple(x for a in old for x in (parts if a is whole else (a,)))

    return _in_digits(_substituted(n, split(n.axes), split(n.raxes), at))


def is_near(offset: Sym, v: Var) -> bool:
    """True if neighbours along a variable are at most 4 elements apart."""
    step = step_of(offset, v)
    return isinstance(step, Int) and 0 < abs(step.value) <= 4


def _of_one(n: Nest) -> Nest:
    """A reduction over only axes of size 1: each element gives a result."""
    assert isinstance(n.result, Fold)
    one = ops.of_one(n.result.kind, n.body)
    return replace(n, body=finished(n.result.finish, one), result=Each())


def _merged(n: Nest) -> Nest:
    lanes = _beside(n) if runs_programs(n.out.type.device) else ()
    axes, raxes = (*(a for a in by_stride(n.axes, [n.offset]) if a not in lanes), *lanes), n.raxes
    if not n.finds_place and not n.updates:
        raxes = by_stride(raxes, [e.attrs[1][0] for e in loads_of(n.body)])
    syms = list(dict.fromkeys([n.offset, *all_syms(*n.exprs)]))
    axes, at = merged(axes, "p", syms)
    # argmax gives a position over all R axes in order, which merging row-major axes preserves.
    raxes, inside = merged(raxes, "r", syms)
    return _substituted(n, axes, raxes, at | inside)


def _beside(n: Nest) -> Axes:
    """The axis of results whose neighbours lie side by side in an operand, if those of R do not."""
    near = near_axis([e.attrs[1][0] for e in loads_of(n.body)], (*n.raxes, *n.axes))
    return (near,) if n.is_reduction and near is not None and near in n.axes else ()


def near_axis(offsets: Sequence[Sym], axes: Axes) -> Axis | None:
    """The first axis whose neighbours lie side by side in some access."""
    return next((a for a in axes if any(is_near(s, a.var) for s in offsets)), None)


def _substituted(n: Nest, axes: Axes, raxes: Axes, at: dict[Var, Sym]) -> Nest:
    if all(v is s for v, s in at.items()):
        return replace(n, axes=axes, raxes=raxes)
    return replace(
        n,
        axes=axes,
        raxes=raxes,
        body=reindex(n.body, at),
        offset=substitute(n.offset, at),
        result=mapped(n.result, lambda e: reindex(e, at)),
    )


@dataclass(frozen=True, slots=True)
class Domain:
    """The loops that a group of nests shares: rows P, and R inside each row.

    `kept` are the positions of the elements that a sort keeps, if it does not keep all.
    """

    axes: Axes
    raxes: Axes
    kept: Axes = ()

    @property
    def rows(self) -> Sym:
        """Number of P elements."""
        return product(a.extent for a in self.axes)

    @property
    def length(self) -> Sym:
        """Number of elements in a row."""
        return product(a.extent for a in self.raxes)


def remaps(n: Nest, d: Domain, orders: Sequence[Axes], turned: bool = False) -> list[Nest]:
    """The nest over the axes of the domain, in every form that keeps its meaning; may be empty.

    `orders` are orders of all axes of the domain in which the elements of a value may lie. `turned`
    adds the form that runs from the last element of R to the first, as a scan with `reverse` does.
    """
    rows, length = product(a.extent for a in n.axes), product(a.extent for a in n.raxes)
    if n.is_reduction or n.raxes:
        if n.across or rows is not d.rows or length is not d.length:
            return []
        if (n.scans or n.sorts) and len(n.raxes) != len(d.raxes):
            return []
        if n.kept and [a.extent for a in n.kept] != [a.extent for a in d.kept]:
            return []
        return [_over(n, [(n.axes, d.axes), (n.raxes, d.raxes), (n.kept, d.kept)], d)]
    if d.raxes and rows is d.rows * d.length:
        found = [_over(n, [(n.axes, order)], d) for order in orders]
        if turned and len(d.raxes) == 1:
            (r,) = d.raxes
            found.append(_substituted(found[0], d.axes, d.raxes, {r.var: r.extent - 1 - r.var}))
        return found
    if d.kept and rows is d.rows * d.kept[0].extent and n.target == n.name:
        orders = [tuple(d.kept[0] if a in d.raxes else a for a in order) for order in orders]
        return [_over(n, [(n.axes, order)], Domain(d.axes, d.kept)) for order in orders]
    if rows is d.rows:
        return [_over(n, [(n.axes, d.axes)], Domain(d.axes, ()))]
    return []


def orders_of(d: Domain, nests: Sequence[Nest]) -> list[Axes]:
    """The orders of a domain's axes in which its reductions walk through memory."""
    axes = (*d.axes, *d.raxes)
    found = [axes, (*d.raxes, *d.axes)] if d.raxes else [axes]
    for n in nests:
        offsets = [e.attrs[1][0] for e in loads_of(n.body)] if n.is_reduction else []
        if n.sorts:  # the position of its values, whichever it keeps
            at: dict[Var, Sym] = {k.var: r.var for k, r in zip(n.kept, n.raxes, strict=False)}
            offsets = [substitute(n.offset, at)]
        for offset in offsets:
            sizes = [s.value for a in axes if isinstance(s := step_of(offset, a.var), Int)]
            if len(sizes) == len(axes) and all(sizes):
                order = sorted(range(len(axes)), key=lambda k: -abs(sizes[k]))
                found.append(tuple(axes[k] for k in order))
    return list(dict.fromkeys(found))


def refined(d: Domain, orders: Sequence[Axes], other: Domain) -> list[tuple[Domain, Axes]]:
    """The domain with its axes split where those of another one end, for each order that allows it.

    (p0: 1024 | r0: 32768) and (32, 256, 4096) ==> (p0: 32, p1: 32 | r0: 8, r1: 4096) Then neither
    group's indices need divisions. The order is returned in the new axes.
    """
    found: list[tuple[Domain, Axes]] = []
    for order in orders:
        cuts = _cuts(order, (*other.axes, *other.raxes))
        if cuts is None or all(len(c) == 1 for c in cuts.values()):
            continue
        new: dict[Var, Axes] = {}
        for prefix, axes in (("p", d.axes), ("r", d.raxes)):
            number = itertools.count()
            for a in axes:
                new[a.var] = tuple(axis(f"{prefix}{next(number)}", x) for x in cuts[a.var])
        flat = [tuple(x for a in axes for x in new[a.var]) for axes in (d.axes, d.raxes, order)]
        found.append((Domain(flat[0], flat[1], d.kept), flat[2]))
    return found


def _cuts(order: Axes, other: Axes) -> dict[Var, list[Sym]] | None:
    """The extents of the parts of each axis, such that all axes of `other` are products of them."""
    cuts: dict[Var, list[Sym]] = {a.var: [] for a in order}
    todo, theirs = list(order), [a.extent for a in other]
    if any(x is ZERO for x in (*theirs, *(a.extent for a in order))):
        return None
    mine: Sym = ONE
    left: Sym = ONE
    while todo or mine is not ONE:
        if mine is ONE:
            a = todo.pop()
            mine = a.extent
        if left is ONE:
            if not theirs:
                return None
            left = theirs.pop()
        step = mine if left // mine * mine is left else left
        if mine // step * step is not mine:
            return None
        cuts[a.var].insert(0, step)
        mine, left = mine // step, left // step
    return cuts if left is ONE and not theirs else None


def crossing(rows: Domain, columns: Domain) -> tuple[Domain, dict[Var, Sym], Axes] | None:
    """The domain that runs rows part by part, with sums over the columns of each part.

    (p0: N | r0: D) and (p0: C, p1: D | r0: K), where C*K = N ==> (p0: C, p1: K | r0: D) Also
    returns the values of the variables of `columns` there, and the axes of one part. These run in
    order: sums over them are complete after the last row of a part.
    """
    count = len(columns.axes)
    while count and product(a.extent for a in columns.axes[count:]) is not rows.length:
        count -= 1
    parts, along = columns.axes[:count], columns.axes[count:]
    made = tuple(axis(f"p{k}", a.extent) for k, a in enumerate((*parts, *columns.raxes)))
    if not parts or not rows.raxes or product(a.extent for a in made) is not rows.rows:
        return None
    at: dict[Var, Sym] = {a.var: b.var for a, b in zip((*parts, *columns.raxes), made, strict=True)}
    return Domain(made, rows.raxes), at | digits(along, position(rows.raxes)), made[count:]


def turned(n: Nest, columns: Domain, d: Domain, at: Mapping[Var, Sym], inside: Axes) -> Nest | None:
    """A nest over columns in the domain of `crossing`; None if it does not fit there."""
    if isinstance(n.result, Fold) and n.raxes == columns.raxes:
        parts = d.axes[: len(d.axes) - len(inside)]
        fold = replace(n, result=replace(n.result, across=True))
        return _substituted(fold, (*parts, *d.raxes), inside, dict(at))
    if not n.is_reduction and n.raxes == columns.raxes:
        return _substituted(n, d.axes, d.raxes, dict(at))
    return None


def _over(n: Nest, pairs: list[tuple[Axes, Axes]], d: Domain) -> Nest:
    at: dict[Var, Sym] = {}
    for own, other in pairs:
        if [a.extent for a in own] == [a.extent for a in other]:
            at.update({a.var: b.var for a, b in zip(own, other, strict=True)})
        elif own:
            at.update(digits(own, position(other)))
    return _substituted(n, d.axes, d.raxes if n.is_reduction or d.raxes else (), at)


def gathers_in_order(nests: Sequence[Nest]) -> str | None:
    """The value whose loads wrap around lane by lane, in a loop that no CPU runs by period.

    Such are scans, positions and sums of columns; a loop of its own has no remainder in its indices
    (machine/cpu/wraps.py). 1024 rows of 2048 f32, rolled: the sum of the rows takes 8.0 ms in one
    loop and 0.6 in two, running sums of dynamic sizes 6.2 and 1.7.
    """
    sums = [n for n in nests if n.is_reduction and not n.sorts]
    columns = any(map(is_columns, sums))
    if not columns and not any(n.scans or n.finds_place for n in sums):
        return None
    for n in nests:
        lane = () if n.is_reduction else n.axes[-1:] if columns else n.raxes[-1:]
        for e in loads_of(n.body) if n.raxes else ():
            if divisions_of(e.attrs[1][0], [a.var for a in lane]):
                return n.name
    return None


def divisions(n: Nest, columns: bool) -> int:
    """Divisions per element in the indices: the cost of a domain.

    Divisions of outer variables alone happen once per row and cost nothing next to the row.
    `columns`: the lanes will run along P and not along R.
    """
    inner = _inner(n, columns)
    return sum(len(divisions_of(s, inner)) for s in (n.offset, *all_syms(n.body)))


def _inner(n: Nest, columns: bool) -> tuple[Var, ...]:
    """Variables that may vary from lane to lane."""
    if n.raxes:
        return tuple(a.var for a in (*n.raxes, *(n.axes[-1:] if columns else ())))
    # If the last axis is so short, any axis may hold the lanes.
    short = bool(n.axes) and n.axes[-1].extent.hi is not None and n.axes[-1].extent.hi < SHORT
    return tuple(a.var for a in (n.axes if short else n.axes[-1:]))


def is_columns(n: Nest) -> bool:
    """True if the results of a reduction lie side by side in its operand."""
    if not n.axes or not n.raxes or n.across:
        return False
    p, r = n.axes[-1].var, n.raxes[-1].var
    offsets = [e.attrs[1][0] for e in loads_of(n.body)]
    # Next to a matrix, a vector that is the same for all rows, or along a row, does not count.
    matrices = [s for s in offsets if p in s.free_vars and r in s.free_vars] or offsets
    # Neighbours decide, and then what is a few elements apart.
    units = (sum(step_of(s, v) in (ONE, -ONE) for s in matrices) for v in (p, r))
    down, along = zip(units, (sum(is_near(s, v) for s in matrices) for v in (p, r)), strict=True)
    return down > along
