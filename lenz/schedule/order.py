"""The order in which cells run: a topological sort that stays close to the program's order."""

from __future__ import annotations

import heapq

from lenz.schedule.fuse import Cell, Partition


def order(p: Partition) -> list[Cell]:
    """Cells sorted so that each stands behind all it needs; ties go to the earliest in the program.

    The program's order keeps lifetimes short: what was written to be used next is used next.
    """
    waiting = {c: over.bit_count() for c, over in p.above.items()}
    ready = [c for c, n in waiting.items() if n == 0]
    heapq.heapify(ready)
    done: list[Cell] = []
    users: dict[int, list[int]] = {c: [] for c in p.cells}
    for c, over in p.above.items():
        while over:
            low = over & -over
            users[low.bit_length() - 1].append(c)
            over ^= low
    while ready:
        c = heapq.heappop(ready)
        done.append(p.cells[c])
        for u in users[c]:
            waiting[u] -= 1
            if waiting[u] == 0:
                heapq.heappush(ready, u)
    return done
