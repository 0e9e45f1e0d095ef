"""The walk over expressions that both code generators share, and the lifetime of values.

The memo key of a node that reads memory includes its masks. A node that reads a buffer which the
kernel writes is forgotten at each write.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from lenz.errors import InternalError
from lenz.ir.expr import Expr, is_bound_var
from lenz.ir.op import LOAD, MASKED
from lenz.sym import Sym, Var

Mask = tuple[Expr, ...]
Item = tuple[Expr, Mask]
V = TypeVar("V")


class Walk(Generic[V]):
    """One visit per distinct node; a subclass says what a visit writes.

    memo     values by expression and masks, which `keep` enters for as long as they are defined
    written  buffers that the kernel stores to
    refs     values of statements by name
    """

    def __init__(
        self, memo: dict[Hashable, V], keep: Callable[[Hashable, V], V], written: frozenset[str]
    ) -> None:
        self._memo = memo
        self._keep = keep
        self._reads: dict[Expr, tuple[str, ...]] = {}
        self._stale: dict[str, list[Hashable]] = {}
        self.written = written
        self.refs: dict[str, V] = {}

    @abstractmethod
    def visit(self, e: Expr, mask: Mask) -> V:
        """The value of a node whose operands have values."""

    def value(self, e: Expr, mask: Mask = ()) -> V:
        """The value of an expression."""
        stack: list[Item] = [(e, mask)]
        while stack:
            item = stack[-1]
            if self._find(item) is not None:
                stack.pop()
                continue
            todo = [part for part in _parts_of(item) if self._find(part) is None]
            if todo:
                stack.extend(reversed(todo))
                continue
            stack.pop()
            # Only loads depend on the conditions around a node.
            key = item if item[1] and self._reads_of(item[0]) else (item[0], ())
            self._keep(key, self.visit(*item))
            self.expires(key, item[0])
        return self.operand(e, mask)

    def operand(self, e: Expr, mask: Mask) -> V:
        """The value of a node that has been visited."""
        found = self._find((e, mask))
        if found is None:
            raise InternalError(f"{e.op.name} has no value", pass_name="codegen")
        return found

    def named(self, name: str) -> V:
        """The value of a statement."""
        if name not in self.refs:
            raise InternalError(f"{name} is not in scope", pass_name="codegen")
        return self.refs[name]

    def operands(self, e: Expr, mask: Mask) -> list[V]:
        """The values of all operands of a node."""
        return [self.operand(*part) for part in _parts_of((e, mask))]

    def bound(self, syms: tuple[Sym, ...], args: tuple[Expr, ...], mask: Mask) -> dict[Var, V]:
        """The values of the variables @k of an index, whose operands are `args`."""
        found = [v for s in syms for v in s.free_vars if is_bound_var(v)]
        return {v: self.place(args[int(v.name[1:])], mask) for v in found}

    def place(self, e: Expr, mask: Mask) -> V:
        """The value of an operand as an index."""
        return self.operand(e, mask)

    def expires(self, key: Hashable, e: Expr) -> None:
        """This key's value depends on `e`: it is stale once a buffer that `e` reads is written."""
        for buffer in self._reads_of(e):
            if buffer in self.written:
                self._stale.setdefault(buffer, []).append(key)

    def forget(self, buffer: str) -> None:
        """Drop every value that was read from a buffer, because the buffer changes here."""
        for key in self._stale.pop(buffer, ()):
            self._memo.pop(key, None)

    def _find(self, item: Item) -> V | None:
        found = self._memo.get((item[0], ()))
        return self._memo.get(item) if found is None and item[1] else found

    def _reads_of(self, e: Expr) -> tuple[str, ...]:
        """Names of the buffers. Operands are asked first, so the recursion stays shallow."""
        found = self._reads.get(e)
        if found is None:
            names: dict[str, None] = {e.attrs[0]: None} if e.op is LOAD else {}
            if e.op.guarded:  # its effect depends on the masks, like a load
                names[""] = None
            for a in e.args:
                names.update(dict.fromkeys(self._reads_of(a)))
            found = self._reads[e] = tuple(names)
        return found


def _parts_of(item: Item) -> list[Item]:
    """Operands, with the conditions under which they are computed."""
    e, mask = item
    if e.op is MASKED:
        cond, value, other = e.args
        return [(cond, mask), (value, (*mask, cond)), (other, mask)]
    return [(a, mask) for a in e.args]
