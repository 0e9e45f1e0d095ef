"""A graph as data for a report, with its memory over time: bytes alive at each launch and call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import Node

from lenz.debug import report
from lenz.debug.report import ExternReport, GraphReport, KernelReport, MemoryReport
from lenz.ir.alive import aliased, bytes_alive
from lenz.ir.graph import Extern, Graph, outs_of
from lenz.ir.kernel import Schedule
from lenz.ir.plan import Alloc, CallStep, LaunchStep, Plan
from lenz.ir.printer import show
from lenz.sym import SymEnv


def timeline(p: Plan, s: Schedule, env: SymEnv) -> tuple[MemoryReport, ...]:
    """Return the bytes alive at each launch and call of a plan, at the sizes of the example.

    Arguments, constants and memory that libraries allocate for themselves do not count. A result of
    a call counts as its own memory unless it aliases an argument.
    """
    made = [b for n in s.steps if isinstance(n, Extern) for b in outs_of(n)]
    sizes = {b.name: env.hint(b.type.nbytes) for b in made}
    sizes |= {x.name: env.hint(x.type.nbytes) for x in p.flat if isinstance(x, Alloc)}
    return tuple(
        MemoryReport(x.op if isinstance(x, CallStep) else x.kernel, level)
        for x, level in zip(p.flat, bytes_alive(p.flat, sizes, aliased(s), {}), strict=True)
        if isinstance(x, CallStep | LaunchStep)
    )


def graph_report(
    program: Any, g: Graph, s: Schedule, p: Plan, steps: Sequence[KernelReport | ExternReport]
) -> GraphReport:
    """Describe a graph of a `frontend.FxProgram` by what became of it; `steps` are its launches."""
    return _about(
        program,
        kernels=tuple(x for x in steps if isinstance(x, KernelReport)),
        externs=tuple(x for x in steps if isinstance(x, ExternReport)),
        allocs=report.allocs_report(p, g.env),
        rejected=s.rejected,
        ir=show(g, origins=True),
        facts=tuple(text for name, f in program.facts.items() for text in f.told(name)),
        timeline=timeline(p, s, g.env),
    )


def refused_report(program: Any, why: str, calls: Sequence[tuple[Node, str]]) -> GraphReport:
    """Describe a graph that runs in eager, by its calls with the user's lines."""
    named = [(str(n.target), n.name, line) for n, line in calls]
    externs = tuple(ExternReport(op, why, (n,), (), (n, line)) for op, n, line in named)
    return _about(program, externs=externs, skips=(why,))


def _about(program: Any, **more: Any) -> GraphReport:
    """A report with what a program itself tells."""
    own = ("name", "kind", "guards", "ended_by", "calls")
    return GraphReport(**{name: getattr(program, name) for name in own}, **more)
