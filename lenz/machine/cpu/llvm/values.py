"""Expressions to values: one visit per distinct node, on the outermost possible level."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lenz.ir.dtype import BOOL, I64, DType
from lenz.ir.expr import Expr, nodes_of
from lenz.ir.op import CONST, INDEX, LOAD, MASKED, REF
from lenz.machine.cpu.llvm.access import Accesses
from lenz.machine.cpu.llvm.indices import Indices, index_type
from lenz.machine.cpu.llvm.legalise import MACHINE
from lenz.machine.cpu.llvm.scopes import Scopes, Value
from lenz.machine.cpu.llvm.types import constant
from lenz.machine.reads import Mask, Walk


class Values(Walk[Value]):
    """The values of expressions in the current function.

    columns  reductions with one accumulator per point of a loop: how to read the current point
    floor    per written buffer, the level above which its loads may not be moved
    """

    def __init__(
        self, scopes: Scopes, indices: Indices, accesses: Accesses, written: frozenset[str]
    ) -> None:
        super().__init__(scopes.memo, scopes.keep, written)
        self.scopes = scopes
        self.indices = indices
        self.accesses = accesses
        self.columns: dict[str, Callable[[], Value]] = {}
        self.floor: dict[str, int] = {}

    def visit(self, e: Expr, mask: Mask) -> Value:
        """The value of a node: a scalar, or a vector if lanes differ."""
        if e.op is CONST:
            return Value((constant(e.dtype, e.attrs[0]),), 0)
        if e.op is REF:
            column = self.columns.get(e.attrs[0])
            return self.named(e.attrs[0]) if column is None else column()
        if e.op is INDEX:
            return self._index(e, mask)
        if e.op is LOAD:
            return self._load(e, mask)
        parts, dtypes = self.operands(e, mask), tuple([a.dtype for a in e.args])
        if e.op.guarded:
            runs = self._mask(mask, None) or Value(("true",), self.scopes.guard)
            return self._apply(e, [*parts, runs], (*dtypes, BOOL))
        return self._apply(e, parts, dtypes)

    def _apply(self, e: Expr, parts: list[Value], dtypes: tuple[DType, ...]) -> Value:
        b, xs = self.scopes.operands(dtypes, *parts)
        lanes = any(p.lanes for p in parts)
        if e.op is MASKED:
            return Value(b.select(xs[0], e.dtype, xs[1], xs[2]), b.level, lanes)
        emit: Any = e.op.form(MACHINE).emit
        return Value(emit(b, e.dtype, dtypes, tuple(xs), e.attrs), b.level, lanes)

    def _index(self, e: Expr, mask: Mask) -> Value:
        s, dtype = e.attrs[0], e.dtype
        bound = self.bound((s,), e.args, mask)
        if not self.indices.varies(s, bound):
            value, source = self.indices.scalar(s, bound), I64
        else:
            source = index_type(s, bound) if dtype.is_float or dtype.bits <= 32 else I64
            value = self.indices.vector(s, source, bound)
        return self.scopes.converted(value, dtype, source)

    def _load(self, e: Expr, mask: Mask) -> Value:
        buffer, (offset,), dtype = e.attrs
        bound = self.bound((offset,), e.args, mask)
        sizes = _unsure_sizes(e.args) if e.args else ()
        if not mask and not sizes and self.accesses.is_transposed(e, bound):
            return self.accesses.load_tile(buffer, dtype, offset, bound)
        whole = not mask and not sizes and self.scopes.tail is None
        place = self.accesses.place(buffer, dtype, offset, bound, whole)
        levels = [self.operand(arg, mask).level for arg in e.args]
        level = max([self.scopes.guard, self.floor.get(buffer, 0), *levels])
        runs = self._mask(mask, place.step)
        for size in sizes:  # if it is 0, even position 0 is out of bounds
            some = self.scopes.compared(self.value(size, mask), "icmp sgt", I64, 0)
            runs = some if runs is None else self._both(runs, some)
        return self.accesses.load(place, dtype, runs, level)

    def _mask(self, mask: Mask, step: int | None) -> Value | None:
        """The lanes in which all conditions hold, minus the tail for accesses of many elements."""
        tail = self.scopes.tail
        if not mask:
            return None if step == 0 else tail
        # A mask made for full vectors may be alive in the scope around the partial one.
        key = ("mask", mask, step == 0, tail.names if tail else ())
        if found := self.scopes.memo.get(key):
            return found
        total: Value | None = None
        for k, cond in enumerate(mask):
            value = self.operand(cond, mask[:k])
            total = value if total is None else self._both(total, value)
        if total is None:
            return tail
        # One address for all lanes: tail lanes alone must not enable it.
        if tail is not None and (step != 0 or total.lanes):
            total = self._both(total, tail)
        for cond in mask:
            self.expires(key, cond)
        return self.scopes.keep(key, total)

    def _both(self, x: Value, y: Value) -> Value:
        b, pair = self.scopes.operands((BOOL, BOOL), x, y)
        return Value(b.binary("and", BOOL, *pair), b.level, x.lanes or y.lanes)


def _unsure_sizes(positions: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """The last operands, possibly 0, of guarded ops in computed positions.

    A guarded op always returns a position below its last operand, so that operand must be at least
    1.
    """
    guarded = [e for e in nodes_of(*positions) if e.op.guarded]
    return tuple([e.args[-1] for e in guarded if not _is_at_least_1(e.args[-1])])


def _is_at_least_1(size: Expr) -> bool:
    least = size.attrs[0] if size.op is CONST else size.attrs[0].lo if size.op is INDEX else None
    return least is not None and bool(least >= 1)
