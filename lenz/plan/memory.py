"""Dead memory that a later buffer of the same size may take over."""

from __future__ import annotations

from dataclasses import dataclass, field

from lenz.ir.tensor import TensorType
from lenz.sym import Sym


@dataclass(slots=True)
class Pool:
    """Names of dead buffers by device and size in bytes; the last one given is taken first.

    Last in, first out: the memory touched most recently is the most likely to be in cache.
    """

    free: dict[tuple[str, Sym], list[tuple[str, TensorType]]] = field(default_factory=dict)

    def give(self, name: str, kind: TensorType) -> None:
        """Offer memory that nothing reads any more."""
        self.free.setdefault(key(kind), []).append((name, kind))

    def take(self, kind: TensorType) -> str | None:
        """Memory of exactly this size, or None."""
        found = self.free.get(key(kind))
        return found.pop()[0] if found else None


def key(kind: TensorType) -> tuple[str, Sym]:
    """Device and bytes. Sizes are compared as Syms: equal for every value of the variables."""
    return kind.device, kind.layout.storage * kind.dtype.bytes
