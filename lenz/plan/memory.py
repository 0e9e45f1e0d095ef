"""Memory for reuse: of a dead buffer, or of one that dies in the same launch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from lenz.ir.expr import loads_of
from lenz.ir.kernel import For, Kernel, Stmt, Store, bodies_of, branches, overwrites_safely
from lenz.ir.syntax import exprs_in
from lenz.ir.tensor import TensorType
from lenz.sym import Sym, Var


@dataclass(slots=True)
class FreeList:
    """Names of dead buffers by device and size in bytes: last in, first out.

    The memory touched most recently is the most likely to be in cache.
    """

    free: dict[tuple[str, Sym], list[tuple[str, TensorType]]] = field(default_factory=dict)

    def give(self, name: str, kind: TensorType) -> None:
        """Add dead memory."""
        self.free.setdefault(size_key(kind), []).append((name, kind))

    def take(self, kind: TensorType) -> str | None:
        """Memory of exactly this size, or None."""
        found = self.free.get(size_key(kind))
        return found.pop()[0] if found else None


def size_key(kind: TensorType) -> tuple[str, Sym]:
    """Device and bytes. Sizes are compared as Syms: equal for every value of the variables."""
    return kind.device, kind.layout.storage * kind.dtype.bytes


def may_overwrite(k: Kernel, read: str, written: str) -> bool:
    """True if parameter `written` may share the memory of parameter `read`.

    There must be one store to `written`, every load of `read` must be of the element that it
    overwrites, and no load may come after it. Then each element is read before it is overwritten.
    Kernels with transposed tiles read whole squares ahead, so they never overwrite.
    """
    if taken := branches(k):
        return all(may_overwrite(b, read, written) for b in taken)
    if k.kind == "transpose" or (k.tile.warps and not overwrites_safely(k, read, written)):
        return False
    order = list(_leaves(k.body, ()))
    stores = [n for n, (s, _) in enumerate(order) if isinstance(s, Store) and s.buffer == written]
    if len(stores) != 1:
        return False
    store, loops = order[stores[0]]
    assert isinstance(store, Store)
    # A loop whose variable is not in the offset would overwrite an element and read it again.
    if store.bound or any(v not in store.offset.free_vars for v in loops):
        return False
    for n, (s, _) in enumerate(order):
        for e in loads_of(*exprs_in(s)):
            if e.attrs[0] == written:
                return False
            if e.attrs[0] == read and (e.attrs[1][0] is not store.offset or n > stores[0]):
                return False
    return True


def _leaves(
    body: tuple[Stmt, ...], loops: tuple[Var, ...]
) -> Iterator[tuple[Stmt, tuple[Var, ...]]]:
    """All statements except loops, in order, with the variables of their enclosing loops."""
    for s in body:
        if not isinstance(s, For):
            yield s, loops
        for inner in bodies_of(s):
            yield from _leaves(inner, (*loops, s.axis.var) if isinstance(s, For) else loops)
