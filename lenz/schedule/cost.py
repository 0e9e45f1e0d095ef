"""The cost of a loop, in bytes and in additions: pure functions of the loop."""

from __future__ import annotations

from collections.abc import Iterable

from lenz.ir.expr import Expr, cost_of, loads_of

# Nanoseconds on one core, from findings-cpu.md section 2. exp (cost 10) takes 0.15 to 0.3 ns per
# element. Streaming takes 0.05 ns per byte from cache and twice that from memory.
NS_PER_COST = 0.025
NS_PER_BYTE = 0.05
# Sorting one key of a row (measured: 2 ns in rows of 16, 5 in rows of 4096).
NS_PER_KEY = 3.0
# A parallel region costs 1 to 2 us, or 10 us if the workers are asleep; on a busy machine it also
# waits for the scheduler. Eager stays on one thread below 32768 elements, about the same limit.
NS_PER_TASK = 25_000.0


def ns_per_element(bodies: Iterable[Expr], stores: int) -> float:
    """Estimated time of one innermost iteration of a loop with these bodies."""
    bodies = tuple(bodies)
    loads = loads_of(*bodies)
    moved = sum(e.dtype.bytes for e in loads) + 4 * stores
    return NS_PER_COST * (cost_of(*bodies) - len(loads)) + NS_PER_BYTE * moved


def grain(ns_per_iteration: float) -> int:
    """How many parallel iterations make a task worth a thread."""
    return max(1, round(NS_PER_TASK / max(ns_per_iteration, 0.01)))
