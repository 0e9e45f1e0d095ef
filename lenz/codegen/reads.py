"""Which buffers an expression reads: what decides for how long its value may be remembered."""

from __future__ import annotations

from collections.abc import Hashable

from lenz.ir.expr import Expr
from lenz.ir.op import LOAD, MASKED

Mask = tuple[Expr, ...]
Item = tuple[Expr, Mask]


class Reads:
    """The buffers that expressions read, each expression looked at once."""

    __slots__ = ("_found",)

    def __init__(self) -> None:
        self._found: dict[Expr, tuple[str, ...]] = {}

    def of(self, e: Expr) -> tuple[str, ...]:
        """Names of the buffers; ask for operands first, so that this never goes deep."""
        found = self._found.get(e)
        if found is None:
            names: dict[str, None] = {e.attrs[0]: None} if e.op is LOAD else {}
            if e.op.guarded:  # its effect depends on the masks as a load does
                names[""] = None
            for a in e.args:
                names.update(dict.fromkeys(self.of(a)))
            found = self._found[e] = tuple(names)
        return found

    def key(self, item: Item) -> Hashable:
        """What a value is remembered by: the conditions around it matter to loads alone."""
        e, mask = item
        return item if mask and self.of(e) else (e, ())


def parts_of(item: Item) -> list[Item]:
    """Operands, with the conditions under which they are computed."""
    e, mask = item
    if e.op is MASKED:
        cond, value, other = e.args
        return [(cond, mask), (value, (*mask, cond)), (other, mask)]
    return [(a, mask) for a in e.args]
