"""Decide which nodes share a kernel: a greedy walk in graph order; each join is checked for cycles.

A cell is a group of nests, or a single node that is not a loop (a call or a view). `above[c]` is
the set of cells that must run before c, transitively, as a bit set. Joining two cells makes a cycle
exactly if a third cell lies between them.
"""

from __future__ import annotations

from itertools import chain

from lenz.context import Context
from lenz.ir.expr import all_syms, loads_of
from lenz.ir.graph import Atom, Extern, View, atom_syms, note_memory, outs_of, reads_of, spread_over
from lenz.ir.kernel import Rejected
from lenz.ir.tensor import Buffer
from lenz.records import dataclass, field
from lenz.schedule import legal
from lenz.schedule.legal import Group, Reject, capabilities
from lenz.schedule.nest import Nest
from lenz.schedule.profit import FAR, gathers, loss
from lenz.sym import Sym, SymEnv, Var, product

Item = Nest | Extern | View
Cell = Group | Extern | View

# Most cells reading the same buffer that are tried for sharing the read, newest first.
MAX_SIBLINGS = 4
# Namespaces whose calls cannot fail on a value: lenz's own ops, and arithmetic on sizes.
OWN = ("lenz", "py")


@dataclass(slots=True)
class Partition:
    """The cells so far, with their order constraints.

    needs[c] and users[c] are the cells directly before and after c. For views and results of calls,
    memory names the buffers that they alias.
    """

    env: SymEnv
    cells: dict[int, Cell] = field(default_factory=dict)
    above: dict[int, int] = field(default_factory=dict)
    needs: dict[int, dict[int, None]] = field(default_factory=dict)
    users: dict[int, dict[int, None]] = field(default_factory=dict)
    owner: dict[str, int] = field(default_factory=dict)
    readers: dict[str, list[int]] = field(default_factory=dict)
    moved: dict[int, int] = field(default_factory=dict)
    memory: dict[str, tuple[str, ...]] = field(default_factory=dict)
    rejected: list[Rejected] = field(default_factory=list)

    def find(self, c: int) -> int:
        """The cell that now contains c."""
        while c in self.moved:
            c = self.moved[c]
        return c

    def add(self, cell: Cell, reads: tuple[str, ...], writes: tuple[str, ...]) -> int:
        """Add a new last cell, after all earlier users of buffers that it overwrites (`writes`)."""
        c = len(self.cells) + len(self.moved)
        earlier = [self.owner.get(name) for name in reads]
        for name in writes:
            earlier += [*self.readers.get(name, ()), self.owner.get(name)]
        before = dict.fromkeys(self.find(d) for d in earlier if d is not None)
        self.cells[c] = cell
        self.above[c] = 0
        self.needs[c], self.users[c] = before, {}
        for d in before:
            self.above[c] |= self.above[d] | (1 << d)
            self.users[d][c] = None
        for name in reads:
            self.readers.setdefault(name, []).append(c)
        for name in (*defines(cell), *writes):
            self.owner[name] = c
        return c

    def between(self, a: int, b: int) -> bool:
        """True when some third cell must run after a and before b."""
        return any(self.above[x] >> a & 1 for x in self.needs[b] if x != a)

    def held(self, c: int) -> int:
        """Bytes of a kernel's results that other cells read."""
        cell = self.cells[c]
        assert isinstance(cell, Group)
        outs = [n.out for n in cell.nests]
        read = [b for b in outs if any(self.find(r) != c for r in self.readers.get(b.name, ()))]
        return sum(self.env.hint(product(b.shape)) * b.dtype.bytes for b in read)

    def join(self, a: int, b: int, group: Group) -> int:
        """Join a and b; the cell with the lower number remains."""
        keep, gone = min(a, b), max(a, b)
        self.cells[keep] = group
        for links, back in ((self.needs, self.users), (self.users, self.needs)):
            for c in links[gone]:
                back[c].pop(gone, None)  # one side of the edge between the two is gone already
                if c != keep:
                    back[c][keep] = None
                    links[keep][c] = None
            links[keep].pop(gone, None)
        over = (self.above[keep] | self.above[gone]) & ~(1 << keep) & ~(1 << gone)
        del self.cells[gone], self.above[gone], self.needs[gone], self.users[gone]
        self.moved[gone] = keep
        self.above[keep] = over
        self._spread(keep, gone)
        return keep

    def write_late(self) -> None:
        """Let writes to arguments wait for all checks, except those that depend on the same cell.

        A check may come later in the graph, at its reader, than in the program. Statistics of a
        batch norm are written along with its result and need not wait for a later loss.
        """
        checks = [c for c, x in self.cells.items() if may_raise(x)]
        groups = [(c, x) for c, x in self.cells.items() if isinstance(x, Group)]
        for w in [c for c, x in groups if legal.overwrites(x) and capabilities(x).raises]:
            for c in checks:
                if c != w and not self.above[c] >> w & 1:
                    self.wait(w, c)
                    self._spread(w)

    def wait(self, w: int, c: int) -> None:
        """Let cell w run after cell c."""
        self.needs[w][c] = self.users[c][w] = None
        self.above[w] |= self.above[c] | (1 << c)

    def _spread(self, start: int, gone: int | None = None) -> None:
        """Propagate to all cells after `start` the cells that must now run before them."""
        lost = 0 if gone is None else 1 << gone
        stack = [start]
        while stack:
            c = stack.pop()
            new = self.above[c] | (1 << c)
            for u in self.users[c]:
                wider = (self.above[u] | new) & ~lost
                if wider != self.above[u]:
                    self.above[u] = wider
                    stack.append(u)

    def shared(self, a: Group, b: Group) -> str:
        """A call's result that they read and that may alias memory they write; or ""."""
        nests = (*a.nests, *b.nests)
        written = {n.target for n in nests if n.target != n.name}
        reads = (e.attrs[0] for n in nests for e in loads_of(*n.exprs)) if written else ()
        return next((r for r in reads if not written.isdisjoint(self.memory.get(r, ()))), "")

    def attempt(self, a: int, b: int, cx: Context, quiet: bool = False) -> int | None:
        """Fuse two cells if that is legal and return the joint cell; else record the reason."""
        if self.above[a] >> b & 1:
            a, b = b, a
        first, second = self.cells[a], self.cells[b]
        if not isinstance(first, Group) or not isinstance(second, Group):
            return None
        verdict: Group | Reject
        if self.between(a, b):
            verdict = Reject("another step must run between them")
        elif not cx.options.fuse_reductions and (first.has_reduction or second.has_reduction):
            verdict = Reject("option fuse_reductions is off")
        elif shared := self.shared(first, second):
            verdict = Reject(f"{shared} may lie in memory that is overwritten")
        else:
            verdict = legal.may_fuse(first, second)
            if isinstance(verdict, Group) and (why := loss(verdict, self.env)):
                verdict = Reject(why)
        if isinstance(verdict, Reject):
            if not quiet:
                self.rejected.append(Rejected(first.name, second.name, verdict.why))
            return None
        if not cx.allow("fuse", first.name, second.name):
            return None
        return self.join(a, b, verdict)


def may_raise(cell: Cell) -> bool:
    """True for kernels with checks and for calls; not for libraries, whose errors tracing finds."""
    if isinstance(cell, Extern):
        is_safe = cell.reason == "library" or cell.op.partition(".")[0] in OWN
        return not (is_safe and outs_of(cell))
    return isinstance(cell, Group) and legal.may_fail(cell)


def defines(cell: Cell) -> tuple[str, ...]:
    """Names of the buffers the cell defines."""
    if isinstance(cell, Group):
        return tuple(n.name for n in cell.nests)
    return tuple(b.name for b in outs_of(cell))


def fuse(items: list[Item], env: SymEnv, cx: Context) -> Partition:
    """Group the items of a graph, which are in a valid order."""
    p = Partition(env)
    memory = p.memory
    place: dict[str, int] = {}
    given = {v.name for v in env.ranges}  # calls determine the other sizes
    learned = frozenset(v for item in items for v in _found(item) if v.name not in given)
    checks: list[tuple[int, int]] = []  # the number of an item that may raise, and its cell
    for k, item in enumerate(items):
        if isinstance(item, Nest):
            direct = tuple(dict.fromkeys(e.attrs[0] for e in loads_of(*item.exprs)))
            reads = spread_over(direct, memory)
            writes: tuple[str, ...] = (item.target,) if item.target != item.name else ()
            own = legal.group_of(item)
            c = p.add(own, (*reads, *_sizes_of(item, learned)), writes)
            if legal.may_fail(own):
                checks.append((k, c))
            if writes and item.target not in place and capabilities(own).raises:
                # An argument: if an earlier op raises, eager has not written it.
                value = max([k if item.updates else place.get(r, k) for r in direct], default=k)
                for n, check in checks:
                    if n <= value and check != c:
                        p.wait(c, p.find(check))
            place[item.name] = k
            if cx.options.fuse and not item.updates:
                _settle(p, c, reads, cx, item.target)
        else:
            note_memory(item, memory)
            writes = _writes(item) if isinstance(item, Extern) else ()
            reads = (*spread_over(reads_of(item), memory), *_sizes_of(item, learned))
            c = p.add(item, reads, spread_over(writes, memory))
            for name in sorted(f"size {v.name}" for v in _found(item) & learned):
                p.owner.setdefault(name, c)
            place.update(dict.fromkeys(defines(item), k))
            if may_raise(item):
                checks.append((k, c))
    if cx.options.fuse and cx.options.horizontal:
        _gather(p, cx)
    p.write_late()
    return p


def _found(item: Item) -> frozenset[Var]:
    """Variables in the sizes of a call's results, and those that it returns."""
    outs = item.outs if isinstance(item, Extern) else ()
    return frozenset(v for o in outs for s in _parts(o) for v in s.free_vars)


def _sizes_of(item: Item, learned: frozenset[Var]) -> tuple[str, ...]:
    """Buffer-like names for the sizes that an item uses and that a call determines."""
    if not learned:
        return ()
    syms: list[Sym] = []
    if isinstance(item, Nest):
        syms += [a.extent for a in (*item.axes, *item.raxes)]
        syms += [*_parts(item.out), item.offset]
        syms += all_syms(*item.exprs)
    elif isinstance(item, View):
        syms += _parts(item.out)
    else:
        syms += _parts((*item.args, *(a for _, a in item.kwargs)))
    used = dict.fromkeys(v.name for s in syms for v in s.free_vars if v in learned)
    return tuple(f"size {name}" for name in used)


def _parts(x: Buffer | Atom) -> tuple[Sym, ...]:
    """The Syms in an argument, or in a buffer's type."""
    return x.type.layout.syms if isinstance(x, Buffer) else tuple(atom_syms(x))


def _writes(n: Extern) -> tuple[str, ...]:
    """What a call writes, and its visible effects: random numbers, say, and collectives.

    Received or awaited data is valid once the call has returned.
    """
    late = [b for _, b in n.aliases] if n.holds or n.waits else []
    return (*n.mutates, *late, *[""] * n.is_seen)


def _gather(p: Partition, cx: Context) -> None:
    """Join small GPU kernels over equal loops that are near each other in the program.

    What later kernels and calls read of them is alive at once: three copies of weights of 4.5 MiB,
    each read by the next convolution, were most of a ResNet's peak.
    """
    recent: list[int] = []
    for c in [c for c in sorted(p.cells) if isinstance(p.cells[c], Group)]:
        found: int | None = None
        for other in reversed(recent):
            if found is not None or c - other > FAR:
                break
            first, second = p.cells[other], p.cells[c]
            assert isinstance(first, Group) and isinstance(second, Group)
            most = capabilities(first).moved // 8
            if c - other <= gathers(first, second, p.env) and p.held(other) + p.held(c) <= most:
                found = p.attempt(other, c, cx, quiet=True)
        if found is None:
            recent.append(c)


def _settle(p: Partition, c: int, reads: tuple[str, ...], cx: Context, target: str) -> None:
    """Try to join the newest cell with its producers, then with cells that read the same buffers.

    A cell that writes other elements of the same `target` counts as a producer.
    """
    before = [(d, x) for d in p.needs[c] if isinstance(x := p.cells[d], Group)]
    writers = {d for d, x in before if any(n.target == target for n in x.nests)}
    producers = writers | {p.owner[name] for name in reads if name in p.owner}
    recent = [reversed(p.readers[name][-1 - MAX_SIBLINGS : -1]) for name in reads]
    siblings = dict.fromkeys(chain.from_iterable(recent))
    # Newest first: the results of the last producer are still in cache.
    for other in sorted(producers, reverse=True):
        a, b = p.find(other), p.find(c)
        if a != b:
            p.attempt(a, b, cx)
    if not cx.options.horizontal:
        return
    for other in siblings:
        a, b = p.find(other), p.find(c)
        first, second = p.cells[a], p.cells[b]
        if a == b or not isinstance(first, Group) or not isinstance(second, Group):
            continue
        if legal.shares_reads(first, second):
            p.attempt(a, b, cx)
