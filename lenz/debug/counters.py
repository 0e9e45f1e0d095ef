"""Counters of compilations, among torch's: `torch._dynamo.utils.counters["lenz"]`."""

from __future__ import annotations

from collections.abc import Mapping

from lenz.ir.graph import LOOPS, Extern
from lenz.ir.kernel import Launch, Schedule

GROUP = "lenz"
COUNTED = (
    "graphs", "kernels", "externs", "fusions", "recompiles", "cache_hits", "cache_misses", "eager",
)  # fmt: skip


def count(**more: int) -> None:
    """Add to counters."""
    from torch._dynamo.utils import counters as of_torch

    for name, n in more.items():
        of_torch[GROUP][name] += n


def count_schedule(s: Schedule) -> None:
    """Count the kernels and calls of a newly compiled graph."""
    launches = [step for step in s.steps if isinstance(step, Launch)]
    loops = sum(isinstance(n, LOOPS) for n in s.graph.nodes)
    count(
        kernels=len({(step.kernel.name, step.device) for step in launches}),
        externs=sum(isinstance(step, Extern) for step in s.steps),
        fusions=max(0, loops - len(launches)),  # a loop with borders is several launches
    )


def counters() -> dict[str, int]:
    """Return the counters of this process.

    graphs        graphs that were compiled or loaded; a training step has two
    kernels       different kernels of the graphs compiled now
    externs       library and eager calls in them
    fusions       loops that share a kernel with an earlier loop
    recompiles    further graphs of code that already has one, for other sizes say
    cache_hits, cache_misses  graphs found or not found in the disk cache
    eager         graphs that run in eager

    The same numbers are in `torch._dynamo.utils.counters["lenz"]`. Clearing those, or
    `torch.compiler.reset()`, sets them to 0.
    """
    from torch._dynamo.utils import counters as of_torch

    mine: Mapping[str, int] = of_torch.get(GROUP, {})
    return {name: mine.get(name, 0) for name in COUNTED}


def clear_counters() -> None:
    """Set all of them to 0."""
    from torch._dynamo.utils import counters as of_torch

    of_torch.pop(GROUP, None)
