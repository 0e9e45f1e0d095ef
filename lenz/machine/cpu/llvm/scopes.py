"""Values during emission: where they are defined, and the memo that shares them.

A `Value` knows the level of its scope. A computation on outer values only goes to an outer scope
(loop-invariant code motion). Equal expressions are computed once (common subexpressions); the memo
forgets a value when its scope closes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager

from lenz.ir.dtype import DType
from lenz.machine.cpu.llvm.builder import Builder
from lenz.machine.cpu.llvm.function import Function, Module, OpenBody
from lenz.machine.cpu.llvm.instructions import Names
from lenz.machine.cpu.llvm.types import iota, splat, value_type, vector
from lenz.ops.cast import convert
from lenz.records import dataclass


@dataclass(slots=True, eq=False)
class Value:
    """One value: a name for all copies or one per copy; `lanes` is True for vectors."""

    names: Names
    level: int
    lanes: bool = False


@dataclass(slots=True, eq=False)
class Tail(Value):
    """The mask of the last, partial vector; `count` is the number of its lanes, an i64."""

    count: str = ""


@dataclass(slots=True, eq=False)
class Cell:
    """A value that a loop changes: its LLVM type and its current name."""

    type: str
    name: str


class Scopes:
    """A function while it is written: open scopes, the memo of values, the vector width.

    copies  copies of the body that are being emitted interleaved
    guard   level above which a load may not be moved: the body may run zero times
    tail    the lanes of the last, partial vector, or None
    """

    def __init__(self, module: Module) -> None:
        self.fn = Function(module)
        self.width = module.target.lanes
        self.copies = 1
        self.guard = 0
        self.tail: Tail | None = None
        self.memo: dict[Hashable, Value] = {}

    def keep(self, key: Hashable, value: Value) -> Value:
        """Remember a value until the scope that defines it closes."""
        self.memo[key] = value
        self.fn.scopes[value.level].keys.append(key)
        return value

    def once(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value of a key, which is made unless it is remembered."""
        return self.memo.get(key) or self.keep(key, make())

    def builder(self, level: int, lanes: bool, copies: int) -> Builder:
        """A builder that appends to the scope at `level`."""
        return Builder(self.fn, level, self.width if lanes else 1, copies)

    def spread(self, value: Value, dtype: DType, lanes: bool, copies: int) -> Names:
        """The names of a value as an operand for this many copies, as a vector if needed."""
        names = value.names
        if lanes and not value.lanes:
            names = self._splat(value, value_type(dtype))
        return names * copies if len(names) < copies else names

    def operands(self, dtypes: Sequence[DType], *values: Value) -> tuple[Builder, list[Names]]:
        """A builder where all of the values are known, and their names as its operands."""
        level = max([v.level for v in values], default=0)
        lanes = any(v.lanes for v in values)
        copies = max([len(v.names) for v in values], default=1)
        return self.builder(level, lanes, copies), [
            self.spread(v, d, lanes, copies) for v, d in zip(values, dtypes, strict=True)
        ]

    def converted(self, value: Value, to: DType, source: DType) -> Value:
        """A value in another type."""
        b = self.builder(value.level, value.lanes, len(value.names))
        return Value(convert(b, to, source, value.names), value.level, value.lanes)

    def compared(self, value: Value, pred: str, dtype: DType, number: float) -> Value:
        """The bool of a comparison with a number."""
        b = self.builder(value.level, value.lanes, len(value.names))
        return Value(b.compare(pred, dtype, value.names, number), value.level, value.lanes)

    def _splat(self, value: Value, element: str) -> Names:
        if value.names[0][0] != "%":
            return tuple([splat(element, n, self.width) for n in value.names])
        # The result of a check has its operand's name, but is only valid further inside.
        key = ("splat", value.names, value.level, element)
        found = self.memo.get(key)
        if found is None:
            t = vector(element, self.width)
            names = []
            for n in value.names:
                one = self.fn.let(value.level, f"insertelement {t} poison, {element} {n}, i32 0")
                text = f"shufflevector {t} {one}, {t} poison, <{self.width} x i32> zeroinitializer"
                names.append(self.fn.let(value.level, text))
            found = self.keep(key, Value(tuple(names), value.level, True))
        return found.names

    def push(self, label: str) -> None:
        """Open a scope."""
        self.fn.scopes.append(OpenBody(label))

    def pop(self) -> list[str]:
        """Close the innermost scope, forget its values, and return its text."""
        scope = self.fn.scopes.pop()
        for key in scope.keys:
            self.memo.pop(key, None)
        return scope.lines

    @contextmanager
    def block(self) -> Iterator[None]:
        """A body that runs once; its values are forgotten afterwards."""
        # A separate basic block: code hoisted out of the body may end the one around it.
        name = f"body.{self.fn.label()}"
        self.push(name)
        yield
        label = self.fn.scopes[-1].label
        lines = self.pop()
        self.fn.scopes[-1].lines += [f"  br label %{name}", f"{name}:", *lines]
        self.fn.scopes[-1].label = label

    @contextmanager
    def when(self, cond: str, cells: list[Cell], cold: bool = False) -> Iterator[None]:
        """A body that runs if cond holds; otherwise cells keep their values."""
        fn, outer = self.fn, self.fn.level
        number = fn.label()
        before = [c.name for c in cells]
        guard, self.guard = self.guard, outer + 1
        self.push(f"do.{number}")
        yield
        self.guard = guard
        last = fn.scopes[-1].label
        lines = self.pop()
        skip = fn.scopes[outer].label
        weights = ", !prof !0" if cold else ""
        fn.put(outer, f"  br i1 {cond}, label %do.{number}, label %end.{number}{weights}")
        fn.put(outer, f"do.{number}:")
        fn.scopes[outer].lines += lines
        fn.put(outer, f"  br label %end.{number}")
        fn.block(outer, f"end.{number}")
        for cell, old in zip(cells, before, strict=True):
            text = f"phi {cell.type} [ {old}, %{skip} ], [ {cell.name}, %{last} ]"
            cell.name = fn.let(outer, text)

    @contextmanager
    def loop(self, start: str, stop: str, step: int, cells: list[Cell]) -> Iterator[str]:
        """A loop that runs at least once; returns the name of its counter."""
        fn, outer = self.fn, self.fn.level
        number = fn.label()
        before = [c.name for c in cells]
        counter = fn.fresh()
        phis = [fn.fresh() for _ in cells]
        for cell, phi in zip(cells, phis, strict=True):
            cell.name = phi
        self.push(f"loop.{number}")
        yield counter
        fn.put(outer + 1, f"  {counter}.n = add nuw nsw i64 {counter}, {step}")
        fn.put(outer + 1, f"  {counter}.c = icmp slt i64 {counter}.n, {stop}")
        last = fn.scopes[-1].label
        fn.put(outer + 1, f"  br i1 {counter}.c, label %loop.{number}, label %end.{number}")
        lines = self.pop()
        # A separate block before the loop: code hoisted out of the loop may have ended others.
        head = fn.scopes[outer].lines
        pre, top = f"pre.{number}", f"loop.{number}"
        head += [f"  br label %{pre}", f"{pre}:", f"  br label %{top}", f"{top}:"]
        head.append(f"  {counter} = phi i64 [ {start}, %{pre} ], [ {counter}.n, %{last} ]")
        for cell, old, phi in zip(cells, before, phis, strict=True):
            head.append(f"  {phi} = phi {cell.type} [ {old}, %{pre} ], [ {cell.name}, %{last} ]")
        head += lines
        fn.block(outer, f"end.{number}")

    def lane_numbers(self, element: str, step: int = 1) -> str:
        """The constant vector 0, step, 2*step, ..."""
        return iota(element, self.width, step)
