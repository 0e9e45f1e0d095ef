"""The order in which cells run: a topological sort that stays close to the program's order."""

from __future__ import annotations

import heapq
from collections.abc import Set
from graphlib import TopologicalSorter

from lenz.ir.expr import loads_of
from lenz.ir.graph import View
from lenz.ir.tensor import Buffer
from lenz.machines import runs_programs
from lenz.schedule.fuse import Cell, Partition
from lenz.schedule.legal import Group, device_of, may_fail
from lenz.sym import SymEnv

# Bytes of results of one kernel that may come first, or wait for a launch with others.
RETURNED = 4 << 20
FIRST, USUAL, LAST = -1, 0, 1


def order(p: Partition, buffers: dict[str, Buffer], returned: Set[str]) -> list[Cell]:
    """Cells sorted so that each comes after all it needs; ties go to the earliest in the program.

    The program's order keeps lifetimes short: a value is usually used right after it is computed.
    `returned` are the results of the graph.
    """
    turns = {c: _turn(p, c, buffers, returned) for c in p.cells}
    sorter, ready, done = TopologicalSorter(p.needs), list[tuple[int, int]](), list[Cell]()
    sorter.prepare()
    while sorter.is_active():
        for c in sorter.get_ready():
            heapq.heappush(ready, (turns[c], c))
        _, c = heapq.heappop(ready)
        done.append(p.cells[c])
        sorter.done(c)
    return done


def _turn(p: Partition, c: int, buffers: dict[str, Buffer], returned: Set[str]) -> int:
    """FIRST, USUAL or LAST: kernels come before others, in the program's order, or after them.

    Under autocast, a training step converts each weight to a half type and returns it for the
    backward pass. Small ones come first: next to each other they share a launch. Gradients of
    weights stay half types until they are returned: what is larger than its operands comes last.
    """
    cell = p.cells[c]
    is_last = isinstance(cell, Group) and _is_last(p, c)
    if not isinstance(cell, Group) or may_fail(cell) or (p.needs[c] and not is_last):
        return USUAL
    own = {n.name for n in cell.nests}
    reads = {e.attrs[0] for n in cell.nests for e in loads_of(*n.exprs)}
    if any(n.target != n.name for n in cell.nests) or not own - reads <= returned:
        return USUAL
    old, new = (_bytes(names, buffers, p.env) for names in (reads - own, own - reads))
    if is_last:
        return LAST if old < new else USUAL
    is_small = own <= returned and 0 < new < old and new <= RETURNED
    return FIRST if is_small and runs_programs(device_of(cell)) else USUAL


def _is_last(p: Partition, c: int) -> bool:
    """Whether no other cell needs this one, but for views of its results."""
    stack = [c]
    while stack:
        users = p.users[stack.pop()]
        if not all(isinstance(p.cells[u], View) for u in users):
            return False
        stack += users
    return True


def _bytes(names: Set[str], buffers: dict[str, Buffer], env: SymEnv) -> int:
    return sum(env.hint(buffers[x].type.nbytes) for x in names if x in buffers)
