"""A graph as data for a report, with its memory over time: bytes alive at each launch and call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import Node

from lenz.debug import report
from lenz.debug.report import ExternReport, GraphReport, KernelReport, MemoryReport
from lenz.ir.graph import Extern, Graph, outs_of
from lenz.ir.kernel import Schedule
from lenz.ir.plan import Alias, Alloc, CallStep, Free, Input, Keep, LaunchStep, Plan, Reuse
from lenz.ir.printer import show
from lenz.ir.tensor import Buffer
from lenz.records import dataclass, field
from lenz.sym import SymEnv


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


def timeline(p: Plan, s: Schedule, env: SymEnv) -> tuple[MemoryReport, ...]:
    """Return the bytes alive at each launch and call of a plan, at the sizes of the example.

    Arguments, constants and memory that libraries allocate for themselves do not count. A result of
    a call counts as its own memory unless it aliases an argument.
    """
    calls = [n for n in s.steps if isinstance(n, Extern)]
    made = {b.name: report.nbytes(b.type, env) for n in calls for b in outs_of(n)}
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
                alive.add(step.name, report.nbytes(step.type, env))
            case Keep():
                alive.add(step.name, 0)
            case Alias():
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


def graph_report(
    program: Any, g: Graph, s: Schedule, p: Plan, steps: Sequence[KernelReport | ExternReport]
) -> GraphReport:
    """Describe a graph of a `frontend.FxProgram` by what became of it; `steps` are its launches."""
    return GraphReport(
        name=program.name,
        kind=program.kind,
        kernels=tuple(x for x in steps if isinstance(x, KernelReport)),
        externs=tuple(x for x in steps if isinstance(x, ExternReport)),
        allocs=report.allocs_report(p, g.env),
        rejected=s.rejected,
        ir=show(g, origins=True),
        guards=program.guards,
        ended_by=program.ended_by,
        facts=tuple(text for name, f in program.facts.items() for text in f.told(name)),
        calls=program.calls,
        timeline=timeline(p, s, g.env),
    )


def refused_report(program: Any, why: str, calls: Sequence[tuple[Node, str]]) -> GraphReport:
    """Describe a graph that runs in eager, by its calls with the user's lines."""
    return GraphReport(
        name=program.name,
        kind=program.kind,
        externs=tuple(
            ExternReport(str(n.target), why, (n.name,), (), (n.name, line)) for n, line in calls
        ),
        skips=(why,),
        guards=program.guards,
        ended_by=program.ended_by,
        calls=program.calls,
    )
