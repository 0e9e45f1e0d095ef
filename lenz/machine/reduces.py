"""The reductions and scans that end with a loop, for both code generators."""

from __future__ import annotations

from lenz.ir.kernel import For, Reduce, Scan, in_loops
from lenz.sym import Var


def loops_over(s: Reduce | Scan) -> tuple[Var, ...]:
    """The variables of the loops that a statement accumulates over."""
    return s.over if isinstance(s, Reduce) else (s.over,)


def reduces_of(loop: For) -> list[tuple[Reduce | Scan, tuple[For, ...]]]:
    """The reductions and scans that end with a loop, each with the loops from there down to it."""
    return [
        (s, path)
        for s, path in in_loops(loop.body, (loop,))
        if isinstance(s, (Reduce, Scan)) and loop.axis.var in loops_over(s)
    ]
