"""Sees graphs while they are compiled, and describes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lenz.api import compile_graph
from lenz.debug import report
from lenz.debug.report import ExternReport, GraphReport, KernelReport
from lenz.debug.trace import Recorder
from lenz.debug.watch import Watching
from lenz.frontend import FxProgram
from lenz.ir.plan import Boxed
from lenz.options import Options
from lenz.page.guards import conditions, symbols
from lenz.page.report import Report
from lenz.page.sections import eager_data, graph_data
from lenz.pipeline import Compiled
from lenz.records import dataclass, field, replace
from lenz.replay import Replayed
from lenz.sym import SymEnv


@dataclass(slots=True)
class Explainer:
    """A Watcher that describes graphs and what their calls launch."""

    graphs: list[GraphReport] = field(default_factory=list)
    launches: list[KernelReport | ExternReport] = field(default_factory=list)
    details: list[dict[str, Any]] = field(default_factory=list)
    replayed: dict[int, Replayed] = field(default_factory=dict)  # by index in `graphs`

    def backend(self, options: Options, watching: Sequence[Watching] = ()) -> Callable[..., Any]:
        """A backend of torch.compile that reports to this object."""
        return lambda gm, xs: compile_graph(gm, xs, options, self, watching=watching)

    def report(self, result: object = None, **more: Any) -> Report:
        """The report so far; `more` are other fields of it."""
        for k, plan in self.replayed.items():
            self.graphs[k] = replace(self.graphs[k], cuda_graph=plan.told)
        return Report(tuple(self.graphs), tuple(self.launches), result, tuple(self.details), **more)

    def compiled(self, made: Compiled, recorder: Recorder) -> Boxed:
        """Describe a graph."""
        p = made.program
        if isinstance(made.call, Replayed):
            self.replayed[len(self.graphs)] = made.call
        steps = report.launches_report(made.schedule, {q.name: q.source for q in p.placeholders})
        told = report.graph_report(p, made.graph, made.schedule, made.plan, steps)
        told = replace(told, timings=dict(recorder.times), source=made.told, autotune=made.tuned)
        self.note(told, graph_data(made.schedule, made.plan, made.code.text, steps), p)
        return self.counted(made.call, steps)

    def refused(self, program: FxProgram, why: str, run: Boxed) -> Boxed:
        """Describe a graph that runs in eager: each op is a launch."""
        told = report.refused_report(program, why)
        self.note(told, eager_data(told), program)
        return self.counted(run, told.externs)

    def untraced(self, name: str, kind: str, why: str) -> None:
        """Note a graph that runs in eager, of which no op is known."""
        told = GraphReport(name, kind, skips=(why,))
        self.note(told, eager_data(told))

    def note(self, told: GraphReport, data: dict[str, Any], p: FxProgram | None = None) -> None:
        """Keep the report of a graph and its data, with torch's."""
        env, shapes = (SymEnv(), None) if p is None else (p.env, p.symbols.shape_env)
        more = {"symbols": symbols(env, shapes), "conditions": conditions(shapes)}
        self.graphs.append(told)
        self.details.append({**data, **more})

    def counted(self, run: Boxed, steps: tuple[KernelReport | ExternReport, ...]) -> Boxed:
        """`run`, recording what each call launches."""

        def call(args: list[Any]) -> Sequence[Any]:
            self.launches.extend(steps)
            return run(args)

        return call
