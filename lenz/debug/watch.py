"""Watches a running compiled graph: every launch and call, before and after, with its tensors.

A watched plan is printed with calls of `watch` around its steps, and run by Python. The text of
other plans does not change, so that watching costs nothing when it is off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

from lenz.debug.between import title_of
from lenz.debug.names import titled
from lenz.ir.kernel import Kernel, Launch, Schedule
from lenz.ir.plan import Boxed, Plan
from lenz.options import Options
from lenz.records import dataclass

Tensors: TypeAlias = Sequence[Any]  # tensors; results of calls may be other values


@dataclass(frozen=True, slots=True)
class Watched:
    """A compiled graph, and the data behind its steps.

    program    the `frontend.FxProgram`
    functions  the kernels
    """

    program: Any
    plan: Plan
    schedule: Schedule
    functions: Mapping[str, Callable[..., Any]]

    @property
    def name(self) -> str:
        """The graph's name."""
        return str(self.program.name)

    @property
    def labels(self) -> dict[str, str]:
        """The user's names of its arguments."""
        return {p.name: p.source for p in self.program.placeholders}

    @property
    def kernels(self) -> dict[str, Kernel]:
        """The kernels by name."""
        return {s.kernel.name: s.kernel for s in self.schedule.steps if isinstance(s, Launch)}

    @property
    def lines(self) -> dict[int, str]:
        """The user's line of each step, and the ops that it computes."""
        return dict(self.plan.comments)


class Watch:
    """Sees the calls of one graph; does nothing by default. Steps count as in `Plan.flat`."""

    def __init__(self, graph: Watched) -> None:
        self.graph, self.steps = graph, graph.plan.flat

    def begin(self, args: Tensors) -> None:
        """A call starts."""

    def made(self, k: int, t: torch.Tensor) -> None:
        """A step has allocated uninitialised memory."""

    def before(self, k: int, tensors: Tensors, sizes: Sequence[int] = ()) -> None:
        """A launch or call is next; `tensors` are its arguments, `sizes` those of a kernel."""

    def after(self, k: int, tensors: Tensors) -> None:
        """The launch or call has returned; new results follow its arguments in `tensors`."""

    def end(self, results: Tensors) -> None:
        """The call returns."""


Watching: TypeAlias = Callable[[Watched], Watch]


def _to_all(event: str, step: int = 1) -> Any:
    """The method that tells all watches of an event, the last one first with step -1."""

    def tell(self: Several, *told: Any) -> None:
        for w in self.all[::step]:
            getattr(w, event)(*told)

    return tell


class Several(Watch):
    """Watches that see the same graph."""

    def __init__(self, graph: Watched, watches: Sequence[Watching]) -> None:
        super().__init__(graph)
        self.all = [w(graph) for w in watches]

    begin, made, before = map(_to_all, ("begin", "made", "before"))
    after, end = _to_all("after", -1), _to_all("end", -1)


class Ranges(Watch):
    """A range of torch.profiler around each launch and call, with the name of the kernel or op."""

    def before(self, k: int, tensors: Tensors, sizes: Sequence[int] = ()) -> None:
        made: Any = torch.profiler.record_function  # torch gives its methods no types
        self.open = made(title_of(self.steps[k]))
        self.open.__enter__()

    def after(self, k: int, tensors: Tensors) -> None:
        self.open.__exit__(None, None, None)


def ranged(run: Boxed, name: str) -> Boxed:
    """`run`, in a range of torch.profiler with the graph's name."""
    title = titled(name)

    def call(args: list[Any]) -> Sequence[Any]:
        with torch.profiler.record_function(title):
            return run(args)

    return call


def shown_to(watch: Watch, run: Boxed) -> Boxed:
    """`run`, with the start and end of each call reported to `watch`."""

    def call(args: list[Any]) -> Sequence[Any]:
        watch.begin(args)
        results = run(args)
        watch.end(results)
        return results

    return call


def watching_of(options: Options) -> Sequence[Watching]:
    """The watches that options ask for."""
    found: list[Watching] = []
    if options.ranges == "kernels":
        found.append(Ranges)
    if options.profile:
        from lenz.debug.profile import of_process

        found.append(of_process(options.profile_output, options.profile_device_time).watch)
    if options.debug_values or options.nans:
        from lenz.debug.values import Nans, Shown

        found += [partial(Shown, options=options)] * bool(options.debug_values)
        found += [Nans] * options.nans
    if options.verify == "kernels":
        from lenz.debug.oracle import Oracle

        found.append(Oracle)
    return found
