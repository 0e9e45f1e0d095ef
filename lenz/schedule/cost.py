"""What a loop costs, in bytes and in additions: pure functions of the loop."""

from __future__ import annotations

from collections.abc import Iterable

from lenz.ir.expr import Expr, cost_of, loads_of

# Nanoseconds on one core, from findings-cpu.md section 2: exp (cost 10) takes 0.15 to 0.3 ns per
# element, a stream of tensors that fit the caches 0.05 ns per byte, from memory twice that.
NS_PER_COST = 0.025
NS_PER_BYTE = 0.05
# One key of a row that is sorted (measured: 2 ns in rows of 16, 5 in rows of 4096).
NS_PER_KEY = 3.0
# A parallel region costs 1 to 2 us, and 10 us when the workers have gone to sleep; on a busy
# machine it waits for the scheduler. Eager stays on one thread below 32768 elements: about this.
NS_PER_TASK = 25_000.0


def ns_per_element(bodies: Iterable[Expr], stores: int) -> float:
    """Estimated time of one innermost iteration of a loop with these bodies."""
    bodies = tuple(bodies)
    loads = loads_of(*bodies)
    moved = sum(e.dtype.bytes for e in loads) + 4 * stores
    return NS_PER_COST * (cost_of(*bodies) - len(loads)) + NS_PER_BYTE * moved


def grain(ns_per_iteration: float) -> int:
    """Parallel iterations that make one task worth a thread."""
    return max(1, round(NS_PER_TASK / max(ns_per_iteration, 0.01)))
