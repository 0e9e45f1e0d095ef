"""Watches a running compiled graph: every launch and call, before and after, with its tensors.

A watched plan is printed with calls of `watch` around its steps, and run by Python. The text of
other plans does not change, so that watching costs nothing when it is off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from lenz.ir.kernel import Kernel, Launch, Schedule
from lenz.ir.plan import Boxed, Plan
from lenz.options import Options

Tensors: TypeAlias = Sequence[Any]  # tensors; results of calls may be other values


@dataclass(frozen=True, slots=True)
class Watched:
    """A compiled graph: its name, and the data behind its steps.

    labels     the user's names of its arguments
    functions  the kernels
    eager      makes the function that runs the graph op by op
    """

    name: str
    plan: Plan
    schedule: Schedule
    labels: Mapping[str, str]
    functions: Mapping[str, Callable[..., Any]]
    eager: Callable[[], Boxed]

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


class Several(Watch):
    """Watches that see the same graph."""

    def __init__(self, graph: Watched, watches: Sequence[Watching]) -> None:
        super().__init__(graph)
        self.all = [w(graph) for w in watches]

    def begin(self, args: Tensors) -> None:
        for w in self.all:
            w.begin(args)

    def made(self, k: int, t: torch.Tensor) -> None:
        for w in self.all:
            w.made(k, t)

    def before(self, k: int, tensors: Tensors, sizes: Sequence[int] = ()) -> None:
        for w in self.all:
            w.before(k, tensors, sizes)

    def after(self, k: int, tensors: Tensors) -> None:
        for w in reversed(self.all):
            w.after(k, tensors)

    def end(self, results: Tensors) -> None:
        for w in reversed(self.all):
            w.end(results)


def shown_to(watch: Watch, run: Boxed) -> Boxed:
    """`run`, with the start and end of each call reported to `watch`."""

    def call(args: list[Any]) -> Sequence[Any]:
        watch.begin(args)
        results = run(args)
        watch.end(results)
        return results

    return call


def watching_of(options: Options) -> Watching | None:
    """The watches that options ask for; None without any."""
    found: list[Watching] = []
    if options.profile:
        from lenz.debug.profile import of_process

        found.append(of_process(options.profile_output, options.profile_device_time).watch)
    if options.ranges == "kernels":
        from lenz.debug.ranges import Ranges

        found.append(Ranges)
    return (lambda graph: Several(graph, found)) if found else None
