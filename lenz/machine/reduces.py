"""The reductions and scans that end with a loop, for both code generators."""

from __future__ import annotations

from lenz.ir.kernel import For, Reduce, Scan, Stmt, bodies_of
from lenz.sym import Var


def loops_over(s: Reduce | Scan) -> tuple[Var, ...]:
    """The variables of the loops that a statement accumulates over."""
    return s.over if isinstance(s, Reduce) else (s.over,)


def reduces_of(loop: For) -> list[tuple[Reduce | Scan, tuple[For, ...]]]:
    """The reductions and scans that end with a loop, each with the loops from there down to it."""
    found: list[tuple[Reduce | Scan, tuple[For, ...]]] = []

    def visit(body: tuple[Stmt, ...], path: tuple[For, ...]) -> None:
        for s in body:
            for inner in bodies_of(s):
                visit(inner, (*path, s) if isinstance(s, For) else path)
            if isinstance(s, (Reduce, Scan)) and loop.axis.var in loops_over(s):
                found.append((s, path))

    visit(loop.body, (loop,))
    return found
