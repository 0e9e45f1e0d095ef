"""Memory for reuse: of a dead buffer, or of one that dies in the same launch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

from lenz.ir.alive import bytes_alive
from lenz.ir.expr import loads_of
from lenz.ir.kernel import For, Kernel, Store, branches, in_loops, overwrites_safely
from lenz.ir.plan import Step
from lenz.ir.syntax import exprs_in
from lenz.ir.tensor import Buffer, TensorType
from lenz.records import dataclass, field
from lenz.sym import Min, Sym, affine_in, prove_le, prove_lt

_Loops: TypeAlias = tuple[For, ...]

LONGEST = 1000  # steps for which dead memory is held: the search stays linear in the steps


@dataclass(slots=True)
class FreeList:
    """Dead buffers, and the positions of their Frees, by device and bytes: last in, first out.

    The memory touched most recently is the most likely to be in cache. `holds` has the position of
    each step that reuses one -> the position of its Free, and the name of the new buffer.
    """

    free: dict[tuple[str, Sym], list[tuple[str, int]]] = field(default_factory=dict)
    holds: dict[int, tuple[int, str]] = field(default_factory=dict)

    def give(self, dead: Buffer, at: int) -> None:
        """Add the memory that the step `at` frees."""
        self.free.setdefault(size_key(dead.type), []).append((dead.name, at))

    def take(self, new: Buffer, at: int) -> str | None:
        """The name of memory of exactly this size for the step `at`, or None."""
        if not (found := self.free.get(size_key(new.type))):
            return None
        name, freed = found.pop()
        self.holds[at] = freed, new.name
        return name


def size_key(kind: TensorType) -> tuple[str, Sym]:
    """Device and bytes. Sizes are compared as Syms: equal for every value of the variables."""
    return kind.device, kind.nbytes


def free_holds(
    steps: Sequence[Step | None],
    holds: Mapping[int, tuple[int, str]],
    sizes: Mapping[str, int],
    sources: Mapping[str, str],
    dying: Collection[str],
) -> set[int]:
    """Return the positions of reuses of dead memory that leave the peak as low as without any.

    steps  with the Frees of memory that is reused
    holds  as in a FreeList
    The others are as in `ir.alive.bytes_alive`.

    A hold of n bytes is free if the bytes alive between both steps, and those held already, are at
    least n below the peak. Ten chains of one size keep two buffers; a large one that is needed
    again at the end of a network is not held while the small ones in its middle are alive.
    """
    levels = bytes_alive(steps, sizes, sources, dying)
    peak, found = max(levels, default=0), set[int]()
    for taken, (freed, name) in holds.items():
        size, between = sizes[name], levels[max(freed, taken - LONGEST) : taken]
        if taken - freed <= LONGEST and max(between) + size <= peak:
            levels[freed:taken] = [n + size for n in between]
            found.add(taken)
    return found


def may_overwrite(k: Kernel, read: str, written: str) -> bool:
    """True if parameter `written` may share the memory of parameter `read`.

    There must be one store to `written`, no load of `read` may come after it, and every load must
    be of an element that the same iteration of the shared loops overwrites: of the same offset, or,
    in an earlier loop, of the row that the store's own loop writes. Then each element is read
    before it is overwritten.
    Kernels with transposed tiles read whole squares ahead, so they never overwrite.
    """
    if taken := branches(k):
        return all(may_overwrite(b, read, written) for b in taken)
    if k.kind == "transpose" or (k.tile.warps and not overwrites_safely(k, read, written)):
        return False
    order = list(in_loops(k.body))
    stores = [n for n, (s, _) in enumerate(order) if isinstance(s, Store) and s.buffer == written]
    if len(stores) != 1:
        return False
    store, loops = order[stores[0]]
    assert isinstance(store, Store)
    # A loop whose variable is not in the offset would overwrite an element and read it again.
    if store.bound or any(f.axis.var not in store.offset.free_vars for f in loops):
        return False
    for n, (s, around) in enumerate(order):
        for e in loads_of(*exprs_in(s)):
            at, is_read = e.attrs[1][0], e.attrs[0] == read
            is_safe = n <= stores[0] and (at is store.offset or _in_row(at, around, store, loops))
            if e.attrs[0] == written or (is_read and not is_safe):
                return False
    return True


def _in_row(at: Sym, around: _Loops, store: Store, loops: _Loops) -> bool:
    """True if `at`, inside the loops `around`, is in the row that `store` in `loops[-1]` writes.

    The row must be contiguous. All loops around its own are around the load too, which is in a loop
    beside it. There is at least one: a value outside of all loops is computed again in each phase
    of the kernel.
    """
    own = len(loops) - 1
    if not 0 < own < len(around) or around[:own] != loops[:own] or loops[own] in around:
        return False
    row = loops[own].axis
    start = store.offset - row.var
    is_contiguous = row.var not in start.free_vars
    ahead = at - start
    return is_contiguous and prove_le(0, ahead) and _is_below(ahead, around[own:], row.extent)


def _is_below(e: Sym, loops: _Loops, end: Sym) -> bool:
    """True if e < end for all values of the loops' variables.

    Each variable, innermost first, is replaced by its last value. Of an extent that is a minimum,
    every member is an upper bound, and one that proves it is enough.
    """
    if not loops:
        return prove_lt(e, end)
    parts = affine_in(e, loops[-1].axis.var)
    if parts is None or not prove_le(0, parts[0]):
        return False
    extent = loops[-1].axis.extent
    ends = extent.args if isinstance(extent, Min) else (extent,)
    return any(_is_below(parts[0] * (x - 1) + parts[1], loops[:-1], end) for x in ends)
