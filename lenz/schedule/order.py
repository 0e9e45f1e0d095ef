"""The order in which cells run: a topological sort that stays close to the program's order."""

from __future__ import annotations

import heapq

from lenz.schedule.fuse import Cell, Partition


def order(p: Partition) -> list[Cell]:
    """Cells sorted so that each comes after all it needs; ties go to the earliest in the program.

    The program's order keeps lifetimes short: a value is usually used right after it is computed.
    """
    waiting = {c: len(before) for c, before in p.needs.items()}
    ready = [c for c, n in waiting.items() if n == 0]
    heapq.heapify(ready)
    done: list[Cell] = []
    while ready:
        c = heapq.heappop(ready)
        done.append(p.cells[c])
        for u in p.users[c]:
            waiting[u] -= 1
            if waiting[u] == 0:
                heapq.heappush(ready, u)
    return done
