"""The bytes alive after each step of a plan."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from lenz.ir.graph import Extern
from lenz.ir.kernel import Schedule
from lenz.ir.plan import Alias, Alloc, CallStep, Free, Keep, Reuse, Step
from lenz.ir.tensor import Buffer
from lenz.records import dataclass, field


@dataclass(slots=True)
class Alive:
    """Live memory with the names that hold it, and the bytes in all."""

    roots: dict[str, str] = field(default_factory=dict)
    names: dict[str, set[str]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    bytes: int = 0

    def add(self, name: str, size: int) -> None:
        """Add new memory under a name."""
        self.roots[name], self.names[name], self.sizes[name] = name, {name}, size
        self.bytes += size

    def share(self, name: str, source: str) -> None:
        """Add a name for the memory of `source`; an unknown source is the caller's memory."""
        if source not in self.roots:
            self.add(source, 0)
        self.roots[name] = self.roots[source]
        self.names[self.roots[name]].add(name)

    def drop(self, name: str) -> None:
        """Drop a name, and the memory with its last name."""
        root = self.roots.pop(name)
        self.names[root].discard(name)
        if not self.names[root]:
            self.bytes -= self.sizes.pop(root)


def aliased(s: Schedule) -> dict[str, str]:
    """Each result of a call that shares the memory of an argument -> that argument."""
    calls = [n for n in s.steps if isinstance(n, Extern)]
    pairs = [(n.outs[k], source) for n in calls for k, source in n.aliases]
    return {o.name: source for o, source in pairs if isinstance(o, Buffer)}


def bytes_alive(
    steps: Sequence[Step | None],
    sizes: Mapping[str, int],
    sources: Mapping[str, str],
    dying: Collection[str],
) -> list[int]:
    """Return the bytes alive after each step.

    sizes    bytes of new buffers and of the dying arguments
    sources  results of calls that share the memory of an argument: see `aliased`
    dying    arguments whose memory goes with their last use; others do not count
    """
    alive, found = Alive(), list[int]()
    for name in dying:
        alive.add(name, sizes[name])
    for s in steps:
        match s:
            case Alloc(over=over) if alive.sizes.get(alive.roots.get(over, "")):
                alive.share(s.name, over)
            case Alloc():
                alive.add(s.name, sizes[s.name])
            case Keep():
                alive.add(s.name, 0)
            case Reuse() if s.source not in alive.roots:  # a Free is among the steps
                alive.add(s.name, sizes[s.name])
            case Alias():
                alive.share(s.name, s.source)
                if isinstance(s, Reuse):
                    alive.drop(s.source)
            case CallStep():
                for o in s.outs:
                    if isinstance(o, str) and o in sources:
                        alive.share(o, sources[o])
                    elif isinstance(o, str) and o not in alive.roots:
                        alive.add(o, sizes.get(o, 0))
            case Free() if s.name in alive.roots:
                alive.drop(s.name)
        found.append(alive.bytes)
    return found
