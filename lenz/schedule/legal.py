"""May a nest join a group? The answer is a value with its reason."""

from __future__ import annotations

import itertools
import math

from lenz.ir.expr import Expr, cost_of, loads_of
from lenz.ir.tensor import Axes
from lenz.machines import machine_of
from lenz.records import dataclass, replace
from lenz.schedule import nest
from lenz.schedule.nest import Domain, Nest
from lenz.schedule.result import Fold, Running, Sorted
from lenz.sym import SymEnv, power_of_two
from lenz.target import Capabilities

# Beyond this much arithmetic in a group, recomputing across loops costs more than it saves.
MAX_COST = 1200.0


@dataclass(frozen=True, slots=True)
class Reject:
    """Why not."""

    why: str


@dataclass(frozen=True, slots=True)
class Group:
    """Nests over one domain, in order. They become one kernel."""

    domain: Domain
    nests: tuple[Nest, ...]

    @property
    def name(self) -> str:
        """Name of its last value."""
        return self.nests[-1].name

    @property
    def has_reduction(self) -> bool:
        """True when one of the nests reduces."""
        return any(n.is_reduction for n in self.nests)

    @property
    def has_columns(self) -> bool:
        """True if the results of one of its reductions are contiguous in the operand."""
        return any(nest.is_columns(n) for n in self.nests if n.is_reduction)


def group_of(n: Nest) -> Group:
    """A group of one."""
    return Group(Domain(n.axes, n.raxes, n.kept), (n,))


def may_fuse(a: Group, b: Group) -> Group | Reject:
    """Fuse b after a, over whichever of their domains keeps the indices free of divisions.

    On GPUs a division per element is cheaper than a kernel. If splitting the domain's axes where
    the axes of either group end avoids the division, they are split.
    """
    device = device_of(a)
    if device != device_of(b):
        return Reject(f"{a.name} is on {device}, {b.name} on {device_of(b)}")
    if any(n.updates for g in (a, b) for n in g.nests):
        return Reject("a scatter runs by itself")
    if (a.domain.kept or b.domain.kept) and any(n.target != n.name for n in (*a.nests, *b.nests)):
        return Reject("the elements that a sort keeps are read last, after inputs are overwritten")
    can = capabilities(a)
    if any(map(may_fail, (a, b))) and any(map(overwrites, (a, b))):
        return Reject("arguments are written only after the checks have passed")
    if len(_buffers(a) | _buffers(b)) > can.buffers:
        return Reject(f"together they touch more than {can.buffers} buffers")
    if cost_of(*(n.body for g in (a, b) for n in g.nests)) > MAX_COST:
        return Reject(f"together they do more than {MAX_COST:.0f} additions per element")
    if a.has_reduction and b.has_reduction and not are_alike(a, b):
        return _crossed(a, b) or Reject(f"{b.name} reduces over other rows than {a.name}")
    why = "their loops have different extents"
    best: tuple[tuple[int, ...], Group] | None = None
    columns = a.has_columns or b.has_columns
    before = sum(nest.divisions(n, columns) for g in (a, b) for n in g.nests)
    scans = any(n.scans for g in (a, b) for n in g.nests)
    for d, orders in _domains(a, b):
        for x, y in itertools.product(_over(a, d, orders, scans), _over(b, d, orders, scans)):
            problem = _misaligned(x, y) or _late(x + y) or _split(Group(d, (*x, *y)))
            if problem is not None:
                why = problem
                continue
            count = sum(nest.divisions(n, columns) for n in (*x, *y))
            rank: tuple[int, ...] = (0, count, 0)
            if can.held:
                rank = (registers(d) > can.held, count, len(d.axes) + len(d.raxes))
            if best is None or rank < best[0]:
                best = (rank, Group(d, (*x, *y)))
    if best is None:
        return Reject(why)
    if not can.held and best[0][1] > before:
        return Reject("the joint loops would need divisions in their indices")
    return best[1]


def _domains(a: Group, b: Group) -> list[tuple[Domain, list[Axes]]]:
    """Domains for both groups, each with its possible orders of walking through memory."""
    if a.has_reduction or b.has_reduction:
        pairs = [(a.domain, b.domain) if a.has_reduction else (b.domain, a.domain)]
        if any(n.across for n in b.nests):
            pairs = [(b.domain, a.domain)]
    else:
        pairs = [(a.domain, b.domain), (b.domain, a.domain)]
    held, nests = capabilities(a).held, (*a.nests, *b.nests)
    found: list[tuple[Domain, list[Axes]]] = []
    for d, other in pairs:
        d = replace(d, kept=d.kept or other.kept)
        orders = nest.orders_of(d, [n for n in nests if (held or n.sorts) and n.raxes == d.raxes])
        found.append((d, orders))
        if held:
            new = nest.refined(d, orders[:1] if other.raxes else orders, other)
            arg = any(n.finds_place for n in nests)
            found += [(x, [order]) for x, order in new if not arg or registers(x) <= held]
    return found


def _crossed(a: Group, b: Group) -> Group | None:
    """Rows, and sums over columns of parts of them, as one pass over their common input."""
    for rows, columns in ((a, b), (b, a)):
        found = nest.crossing(rows.domain, columns.domain)
        if found is None or registers(rows.domain) > capabilities(rows).summed:
            continue
        d, at, inside = found
        if any(n.is_reduction and (nest.is_columns(n) or n.scans or n.sorts) for n in rows.nests):
            continue
        nests = [nest.turned(n, columns.domain, d, at, inside) for n in columns.nests]
        sums = tuple(n for n in nests if n is not None)
        if len(sums) < len(nests) or any(n.scans or n.sorts for n in sums):
            continue
        for way in _over(rows, d, [(*d.axes, *d.raxes)]):
            x, y = (way, sums) if rows is a else (sums, way)
            if _misaligned(x, y) or _misaligned(sums, sums) or _late(x + y):
                continue
            first = {e for n in x for e in loads_of(n.body) if _moves(e, d)}
            second = {e for n in y for e in loads_of(n.body) if _moves(e, d)}
            if first & second or {n.name for n in x} & {e.attrs[0] for e in second}:
                return Group(d, (*x, *y))
    return None


def _moves(e: Expr, d: Domain) -> bool:
    """True if a load varies both along a row and from row to row."""
    used = e.attrs[1][0].free_vars
    return any(a.var in used for a in d.axes) and any(a.var in used for a in d.raxes)


def registers(d: Domain, env: SymEnv | None = None) -> int:
    """Size of the tile that holds a row in registers; a huge number if no tile can.

    With `env`, an unbounded length counts as that of the first call.
    """
    ends = [env.hint(a.extent) if a.extent.hi is None and env else a.extent.hi for a in d.raxes]
    if len(ends) > 2 or None in ends:
        return 1 << 62
    return math.prod(power_of_two(n or 0) for n in ends)


def in_parts(g: Group) -> bool:
    """True if a scanned row is too long for one GPU program, so that several share it."""
    return any(n.scans and n.raxes for n in g.nests) and 0 < scanned(g) < registers(g.domain)


def scanned(g: Group) -> int:
    """Elements of a row that one GPU program scans.

    An eighth where each step is a logarithm: two such scans of 16384 elements, or one of 512 in 64
    columns, take Triton 23 s to compile, two of 4096 elements 4 s.
    """
    kinds = [n.result.kind for n in g.nests if isinstance(n.result, Running)]
    return capabilities(g).held >> 3 * ("logaddexp" in kinds)


def device_of(g: Group) -> str:
    """Device of the group's values."""
    return g.nests[0].out.type.device


def capabilities(g: Group) -> Capabilities:
    """The numbers of the machine that runs the group."""
    return machine_of(device_of(g)).capabilities


def may_fail(g: Group) -> bool:
    """True if a check in the group may raise after its kernel has run, as checks on CPUs do."""
    return capabilities(g).raises and any(n.checks for n in g.nests)


def overwrites(g: Group) -> bool:
    """True if the group writes a value back to an argument."""
    return any(n.target != n.name and not n.updates for n in g.nests)


def _buffers(g: Group) -> set[str]:
    return {e.attrs[0] for n in g.nests for e in loads_of(*n.exprs)} | {n.target for n in g.nests}


def _over(g: Group, d: Domain, orders: list[Axes], turned: bool = False) -> list[tuple[Nest, ...]]:
    """The group's nests over the domain, all written in the same one of the possible ways."""
    own, other = [[[a.extent for a in p] for p in (x.axes, x.raxes, x.kept)] for x in (g.domain, d)]
    if own[:2] == other[:2] and own[2] in ([], other[2]):
        return [tuple(g.nests)]
    ways = [nest.remaps(n, d, orders, turned) for n in g.nests]
    if not all(ways):
        return []
    # A value that a row has once has a single form, which fits every form of the elements.
    return [tuple(w[min(k, len(w) - 1)] for w in ways) for k in range(max(map(len, ways)))]


def _misaligned(a: tuple[Nest, ...], b: tuple[Nest, ...]) -> str | None:
    """Why b does not read exactly the elements that a has just computed; None if it does."""
    values = {n.name: n for n in a}
    written = {n.target: n for n in a if n.target != n.name}
    for n in b:
        for e in loads_of(*n.exprs):
            producer = values.get(e.attrs[0])
            if producer is None and e.attrs[0] in written:
                return f"{n.name} reads {e.attrs[0]} after it was overwritten"
            if producer is not None and producer.across:
                return f"{n.name} reads {e.attrs[0]} before it is complete"
            if producer is not None and e.attrs[1][0] is not producer.offset:
                return f"{n.name} reads other elements of {e.attrs[0]} than the loop computes"
        if n.target != n.name:
            for name, e in [(x.name, e) for x in (*a, *b) for e in loads_of(*x.exprs)]:
                if e.attrs[0] == n.target and e.attrs[1][0] is not n.offset:
                    return f"{name} reads other elements of {n.target} than are overwritten"
    return None


def _late(nests: tuple[Nest, ...]) -> str | None:
    """Why a running value is used after its own loop, where it is gone; None if it is not.

    A row runs one loop after the other: values that depend on a reduction are in the next loop.
    """
    loop: dict[str, int] = {}
    running: dict[str, bool] = {}  # values of elements that depend on a scan
    for n in nests:
        parts = [e.attrs[0] for e in loads_of(n.body) if e.attrs[0] in loop]
        k = max((loop[p] for p in parts), default=0)
        for p in parts:
            if running[p] and loop[p] != k:
                return f"{n.name} uses {p} after the loop that scans it"
        is_reduction = isinstance(n.result, (Fold, Sorted))
        loop[n.name] = k + 1 if is_reduction and n.raxes else k
        running[n.name] = not is_reduction and (n.scans or any(running[p] for p in parts))
    for n in nests:  # writes to an input wait for the last loop
        if n.target != n.name and running[n.name] and loop[n.name] != max(loop.values()):
            return f"{n.name} writes {n.target} after the loop that scans its values"
    return None


def _split(g: Group) -> str | None:
    """Why a group with a scan in parts is illegal: no program sees a whole row."""
    if not in_parts(g):
        return None
    n = next((n for n in g.nests if isinstance(n.result, Fold) or n.raxes != g.domain.raxes), None)
    return None if n is None else f"{n.name} is one value for rows that are scanned in parts"


def shares_reads(a: Group, b: Group) -> int:
    """Bytes per element that both read, from the same position if they run over the same loops."""
    if device_of(a) == device_of(b) and _crossed(a, b) is not None:
        return 1
    first = {e for n in a.nests for e in loads_of(n.body)}
    ways = [b.nests]
    if a.has_reduction == b.has_reduction and b.domain != a.domain and are_alike(a, b):
        ways += _over(b, a.domain, [(*a.domain.axes, *a.domain.raxes)])
    read = [{e for n in way for e in loads_of(n.body)} for way in ways]
    return max(sum(e.dtype.bytes for e in first & second) for second in read)


def are_alike(a: Group, b: Group) -> bool:
    """True if both have the same number of rows, and rows of the same length."""
    return a.domain.rows is b.domain.rows and a.domain.length is b.domain.length
