"""`explain` and `profile`: compile a function, run it, and describe its graphs and times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule

from lenz.api import compile_graph
from lenz.debug.trace import Recorder
from lenz.frontend import FxProgram, origin
from lenz.frontend.untraced import calling
from lenz.ir.plan import Boxed
from lenz.options import Options

if TYPE_CHECKING:  # as in `api`
    from lenz.debug.profile import Profile
    from lenz.debug.report import ExternReport, GraphReport, KernelReport, Report
    from lenz.pipeline import Compiled
    from lenz.replay import Replayed


@dataclass(slots=True)
class Explainer:
    """A Watcher that describes graphs and what their calls launch."""

    graphs: list[GraphReport] = field(default_factory=list)
    launches: list[KernelReport | ExternReport] = field(default_factory=list)
    replayed: dict[int, Replayed] = field(default_factory=dict)  # by index in `graphs`

    def backend(self, options: Options) -> Callable[..., Any]:
        """A backend of torch.compile that reports to this object."""

        def watched(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            return compile_graph(gm, example_inputs, options, self)

        return watched

    def report(self, result: object = None) -> Report:
        """The report so far."""
        from lenz.debug.report import Report

        for k, plan in self.replayed.items():
            self.graphs[k] = replace(self.graphs[k], cuda_graph=plan.told)
        return Report(tuple(self.graphs), tuple(self.launches), result)

    def compiled(self, made: Compiled, recorder: Recorder) -> Boxed:
        """Describe a graph."""
        from lenz.debug.report import launches_report
        from lenz.debug.timeline import graph_report
        from lenz.replay import Replayed

        p = made.program
        if isinstance(made.call, Replayed):
            self.replayed[len(self.graphs)] = made.call
        steps = launches_report(made.schedule, {q.name: q.source for q in p.placeholders})
        told = graph_report(p, made.graph, made.schedule, made.plan, steps)
        rest: dict[str, Any] = {
            "timings": dict(recorder.times),
            "source": made.told,
            "autotune": made.tuned,
        }
        self.graphs.append(replace(told, **rest))
        return self.counted(made.call, steps)

    def refused(self, program: FxProgram, why: str, run: Boxed) -> Boxed:
        """Describe a graph that runs in eager: each op is a launch."""
        from lenz.debug.timeline import refused_report

        calls = [(n, origin(n, program.called)) for n in program.nodes]
        self.graphs.append(refused_report(program, why, calls))
        return self.counted(run, self.graphs[-1].externs)

    def counted(self, run: Boxed, steps: tuple[KernelReport | ExternReport, ...]) -> Boxed:
        """`run`, recording what each call launches."""

        def call(args: list[Any]) -> Sequence[Any]:
            self.launches.extend(steps)
            return run(args)

        return call


def _fresh(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with its own code object.

    Dynamo caches compilations at the code object, and falls back to eager after eight of them.
    Reports would use up the limit of the user's own torch.compile.
    """
    fn = getattr(fn, "_torchdynamo_orig_callable", fn)
    own: Any = fn if isinstance(fn, FunctionType) else calling(fn)
    made = FunctionType(
        own.__code__.replace(), own.__globals__, own.__name__, own.__defaults__, own.__closure__
    )
    made.__kwdefaults__ = own.__kwdefaults__
    made.__dict__.update(own.__dict__)
    return made


def explain(
    fn: Callable[..., Any],
    dynamic: bool | None = None,
    options: Mapping[str, object] | None = None,
    calls: int = 1,
) -> Callable[..., Report]:
    """Return a function that compiles `fn`, runs it on its arguments, and returns a report.

        report = lenz.explain(f)(x, y)
        len(report.launches), report.graphs[0].kernels[0].bytes_read

    `dynamic` and `options` are those of torch.compile. The report includes a backward pass if `fn`
    runs it. It describes the last of `calls` calls, and says what CUDA graphs did in all of them.
    Raises any error of `fn` and of the compiler.
    """
    chosen = Options.from_environment(options)

    def explained(*args: Any, **kwargs: Any) -> Report:
        seen = Explainer()
        run = torch.compile(_fresh(fn), backend=seen.backend(chosen), dynamic=dynamic)
        for _ in range(calls - 1):
            run(*args, **kwargs)
            seen.launches.clear()
        return seen.report(run(*args, **kwargs))

    return explained


def profile(
    fn: Callable[..., Any],
    dynamic: bool | None = None,
    options: Mapping[str, object] | None = None,
    calls: int = 10,
) -> Callable[..., Profile]:
    """Return a function that compiles `fn`, runs it, and returns the times of its kernels.

        print(lenz.profile(f)(x, y))
        lenz.profile(f)(x, y).save("trace.json")

    `dynamic` and `options` are those of torch.compile. `fn` runs once to be compiled, then `calls`
    times, which are timed step by step: by Python and without CUDA graphs, so that whole calls take
    longer than otherwise.
    """
    chosen = Options.from_environment(options)

    def profiled(*args: Any, **kwargs: Any) -> Profile:
        from lenz.debug.profile import Profile

        seen = Profile(has_gaps=not chosen.profile_device_time)
        backend = lambda gm, xs: compile_graph(gm, xs, chosen, watching=[seen.watch])
        run = torch.compile(_fresh(fn), backend=backend, dynamic=dynamic)
        run(*args, **kwargs)
        seen.clear()
        for _ in range(calls):
            run(*args, **kwargs)
        return seen

    return profiled
