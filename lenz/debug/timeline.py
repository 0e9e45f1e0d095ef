"""The memory of a plan over time: bytes that are alive at each launch and call."""

from __future__ import annotations

from dataclasses import dataclass, field

from lenz.debug.report import MemoryReport, nbytes
from lenz.ir.graph import Extern, outs_of
from lenz.ir.kernel import Schedule
from lenz.ir.plan import Alloc, CallStep, Free, Input, Keep, LaunchStep, Plan, Reuse, ViewStep
from lenz.ir.tensor import Buffer
from lenz.sym import SymEnv


@dataclass(slots=True)
class Alive:
    """Memories with the names that hold them, and the bytes of all."""

    roots: dict[str, str] = field(default_factory=dict)
    names: dict[str, set[str]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    bytes: int = 0

    def add(self, name: str, size: int) -> None:
        """Add new memory, under one name."""
        self.roots[name], self.names[name], self.sizes[name] = name, {name}, size
        self.bytes += size

    def share(self, name: str, source: str) -> None:
        """Add a name for the memory of `source`; that of an unknown one is the caller's."""
        if source not in self.roots:
            self.add(source, 0)
        self.roots[name] = self.roots[source]
        self.names[self.roots[name]].add(name)

    def drop(self, name: str) -> None:
        """Take a name away, and the memory with its last name."""
        root = self.roots.pop(name)
        self.names[root].discard(name)
        if not self.names[root]:
            self.bytes -= self.sizes.pop(root)


def timeline(p: Plan, s: Schedule, env: SymEnv) -> tuple[MemoryReport, ...]:
    """Return the bytes alive at each launch and call of a plan, at the sizes of the example.

    Arguments and constants count nothing, nor does what a library allocates for itself.  A result
    of a call counts as its own memory unless it aliases an argument.
    """
    calls = [n for n in s.steps if isinstance(n, Extern)]
    made = {b.name: nbytes(b.type, env) for n in calls for b in outs_of(n)}
    aliases = [(n.outs[k], source) for n in calls for k, source in n.aliases]
    sources = {o.name: source for o, source in aliases if isinstance(o, Buffer)}
    alive = Alive()
    for given in (*p.inputs, *p.constants):
        if isinstance(given, Input):
            alive.add(given.name, 0)
    found: list[MemoryReport] = []
    for step in p.flat:
        match step:
            case Alloc():
                alive.add(step.name, nbytes(step.type, env))
            case Keep():
                alive.add(step.name, 0)
            case Reuse() | ViewStep():
                alive.share(step.name, step.source)
                if isinstance(step, Reuse):
                    alive.drop(step.source)
            case CallStep():
                for o in step.outs:
                    if isinstance(o, str) and o in sources:
                        alive.share(o, sources[o])
                    elif isinstance(o, str) and o not in alive.roots:
                        alive.add(o, made.get(o, 0))
                found.append(MemoryReport(step.op, alive.bytes))
            case LaunchStep():
                found.append(MemoryReport(step.kernel, alive.bytes))
            case Free():
                alive.drop(step.name)
    return tuple(found)
