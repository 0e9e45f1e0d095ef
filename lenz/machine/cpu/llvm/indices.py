"""Index arithmetic: Syms as 64-bit scalars, or as vectors with one lane per iteration.

Sums are added outermost level first, so that the part that an inner loop does not change stays
outside of it. Constants come last, for the processor's address modes. Division rounds down, and is
unsigned if the bounds of the Sym prove its operands non-negative.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from functools import partial, reduce

from lenz.errors import InternalError
from lenz.ir.dtype import I32, I64, DType
from lenz.ir.expr import is_bound_var
from lenz.machine.cpu.llvm.builder import Builder
from lenz.machine.cpu.llvm.instructions import Names
from lenz.machine.cpu.llvm.scopes import Scopes, Value
from lenz.machine.cpu.llvm.types import vector
from lenz.sym import Add, FloorDiv, Int, Max, Min, Mod, Mul, Sym, Var, affine_in
from lenz.sym.expr import subterms
from lenz.sym.prove import is_within

Bound = Mapping[Var, Value]
_NONE: Bound = {}
_I32_END = 2**31


class Indices:
    """The variables in scope, and the values of Syms over them."""

    def __init__(self, scopes: Scopes) -> None:
        self.scopes = scopes
        self.vars: dict[Var, Value] = {}
        # The variable of the open vector loop. Its entry in `vars` is the position of lane 0.
        self.lane: Var | None = None

    def lookup(self, v: Var, bound: Bound) -> Value:
        """The value of a variable; raises InternalError if it is not in scope."""
        found = bound.get(v) or self.vars.get(v)
        if found is None:
            raise InternalError(f"{v.name} is not in scope", pass_name="codegen")
        return found

    def varies(self, s: Sym, bound: Bound = _NONE) -> bool:
        """True if s differs between lanes of the open vector loop."""
        return any(v is self.lane or (v in bound and bound[v].lanes) for v in s.free_vars)

    def scalar(self, s: Sym, bound: Bound = _NONE) -> Value:
        """s as an i64; if s varies between lanes, the value in lane 0."""
        if type(s) is Int:
            return Value((str(s.value),), 0)
        if isinstance(s, Var):
            return self.lookup(s, bound)
        make = partial(self._arithmetic, s, bound, I64, False)
        return make() if bound else self.scopes.once(("sym", s), make)

    def vector(self, s: Sym, dtype: DType, bound: Bound = _NONE) -> Value:
        """s as a vector of i32 or i64, one lane per iteration of the vector loop."""
        if not self.varies(s, bound):
            return self.narrow(self.scalar(s, bound), dtype)
        make = partial(self._vector, s, dtype, bound)
        return make() if bound else self.scopes.once(("lanes", s, dtype), make)

    def narrow(self, value: Value, dtype: DType) -> Value:
        """An i64 value as the type."""
        if dtype is I64 or value.names[0][0] != "%":
            return value
        make = partial(self.scopes.converted, value, I32, I64)
        return self.scopes.once(("narrow", value.names), make)

    def _vector(self, s: Sym, dtype: DType, bound: Bound) -> Value:
        if isinstance(s, Var) and s in bound:
            return self.narrow(bound[s], dtype)
        if self.lane is not None and not any(v in bound and bound[v].lanes for v in s.free_vars):
            affine = affine_in(s, self.lane)
            if affine is not None and not self.varies(affine[0]):
                return self._line(s, affine[0], dtype, bound)
        return self._arithmetic(s, bound, dtype, True)

    def _line(self, s: Sym, coefficient: Sym, dtype: DType, bound: Bound) -> Value:
        """start + coefficient * (0, 1, 2, ...)."""
        scopes, element = self.scopes, "i32" if dtype is I32 else "i64"
        if isinstance(coefficient, Int):
            steps = Value((scopes.lane_numbers(element, coefficient.value),), 0, True)
        else:
            by = self.narrow(self.scalar(coefficient, bound), dtype)
            steps = self.combine("mul", by, Value((scopes.lane_numbers(element),), 0, True), dtype)
        return self.combine("add", self.narrow(self.scalar(s, bound), dtype), steps, dtype)

    def combine(self, opcode: str, x: Value, y: Value, dtype: DType) -> Value:
        """One integer instruction on two index values; constants are folded.

        Constants must be recognised here, because a mask of known lanes needs another form of store
        (masks.py).
        """
        if (known := _folded(opcode, x, y)) is not None:
            return Value((known,), max(x.level, y.level))
        b, pair = self.scopes.operands((dtype, dtype), x, y)
        if opcode in ("smin", "smax"):
            names = b.intrinsic(f"llvm.{opcode}", dtype, *pair)
        else:
            names = b.binary(opcode, dtype, *pair)
        return Value(names, b.level, x.lanes or y.lanes)

    def _all(self, opcode: str, values: Iterable[Value], dtype: DType) -> Value:
        """The values combined, from those known earliest."""
        ordered = sorted(values, key=lambda x: (x.lanes, x.level))
        return reduce(lambda x, y: self.combine(opcode, x, y, dtype), ordered)

    def _arithmetic(self, s: Sym, bound: Bound, dtype: DType, lanes: bool) -> Value:
        def part(e: Sym) -> Value:
            return self.vector(e, dtype, bound) if lanes else self.scalar(e, bound)

        match s:
            case Add():
                return self._sum(s, bound, dtype, lanes)
            case Mul():
                return self._all("mul", map(part, s.factors), dtype)
            case FloorDiv() | Mod():
                return self._quotient(s, part(s.num), part(s.den), dtype)
            case Min() | Max():
                return self._all("smin" if isinstance(s, Min) else "smax", map(part, s.args), dtype)
            case _:
                raise InternalError(f"no index arithmetic for {s}", pass_name="codegen")

    def _sum(self, s: Add, bound: Bound, dtype: DType, lanes: bool) -> Value:
        terms: list[Value] = []
        for term, coefficient in s.terms:
            value = self.vector(term, dtype, bound) if lanes else self.scalar(term, bound)
            if coefficient != 1:
                value = self.combine("mul", value, Value((str(coefficient),), 0), dtype)
            terms.append(value)
        total = self._all("add", terms, dtype)
        if s.const:
            total = self.combine("add", total, Value((str(s.const),), 0), dtype)
        return total

    def _quotient(self, s: FloorDiv | Mod, num: Value, den: Value, dtype: DType) -> Value:
        is_div = isinstance(s, FloorDiv)
        natural = _at_least(s.num, 0) and _at_least(s.den, 0)
        if isinstance(s.den, Int) and s.den.value > 0 and s.den.value & (s.den.value - 1) == 0:
            # Shift and mask also round down for negative numbers.
            by = s.den.value.bit_length() - 1 if is_div else s.den.value - 1
            return self.combine("ashr" if is_div else "and", num, Value((str(by),), 0), dtype)
        lanes = num.lanes or den.lanes
        if (known := _folded("div" if is_div else "mod", num, den)) is not None:
            return Value((known,), max(num.level, den.level))
        b, (x, y) = self.scopes.operands((dtype, dtype), num, den)
        by_constant = isinstance(s.den, Int)
        loaded = any(is_bound_var(v) for v in s.den.free_vars)
        if not by_constant and (loaded or not _at_least(s.den, 1)):
            # Code hoisted out of a loop that runs zero times may see a size of 0, and inactive
            # lanes load 0: x86 would trap.
            y = b.select(b.compare("icmp eq", dtype, y, 0), dtype, b.constant(dtype, 1), y)
        if lanes and not by_constant and is_within(s.num, 1 << 53):
            names = _vector_by_double(b, is_div, dtype, x, y)
        elif natural:
            names = b.each(f"{'udiv' if is_div else 'urem'} {b.type(dtype)}", x, y)
        else:
            names = _floor(b, is_div, dtype, x, y)
        return Value(names, b.level, lanes)


_FOLDS: Mapping[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "mul": operator.mul,
    "ashr": operator.rshift,
    "and": operator.and_,
    "smin": min,
    "smax": max,
    "div": operator.floordiv,
    "mod": operator.mod,
}


def _folded(opcode: str, x: Value, y: Value) -> str | None:
    """The text of a scalar whose operands are both constants."""
    if x.lanes or y.lanes or len(x.names) > 1 or len(y.names) > 1:
        return None
    a, b = x.names[0], y.names[0]
    if a[0] == "%" or b[0] == "%" or (opcode in ("div", "mod") and b == "0"):
        return None
    return str(_FOLDS[opcode](int(a), int(b)))


def _at_least(s: Sym, bound: int) -> bool:
    return s.lo is not None and s.lo >= bound


def _floor(b: Builder, is_div: bool, dtype: DType, x: Names, y: Names) -> Names:
    t = b.type(dtype)
    remainder = b.each(f"srem {t}", x, y)
    inexact = b.compare("icmp ne", dtype, remainder, 0)
    opposite = b.compare("icmp slt", dtype, b.each(f"xor {t}", remainder, y), 0)
    fix = b.each(f"and {vector('i1', b.lanes)}", inexact, opposite)
    if is_div:
        quotient = b.each(f"sdiv {t}", x, y)
        return b.select(fix, dtype, b.binary("sub", dtype, quotient, 1), quotient)
    return b.select(fix, dtype, b.each(f"add {t}", remainder, y), remainder)


def _vector_by_double(b: Builder, is_div: bool, dtype: DType, x: Names, y: Names) -> Names:
    # Exact for |x| <= 2^53: a non-integer quotient is at least 1/y away from the next integer, and
    # the rounding error is at most x/y * 2^-53. Vector units divide only floating-point numbers.
    t, d = b.type(dtype), vector("double", b.lanes)
    callee = b.fn.module.declare(f"llvm.floor.v{b.lanes}f64", d, d)
    q = b.each(f"fdiv {d}", b.cast("sitofp", t, d, x), b.cast("sitofp", t, d, y))
    q = tuple([b.fn.let(b.level, f"call {d} {callee}({d} {n})") for n in q])
    whole = b.cast("fptosi", d, t, q)
    return whole if is_div else b.each(f"sub {t}", x, b.each(f"mul {t}", whole, y))


def index_type(s: Sym, bound: Bound = _NONE) -> DType:
    """i32 if every part of s provably fits, else i64. Gathers with i32 offsets are faster."""
    computed = any(v in bound for v in s.free_vars)
    return I64 if computed or not all(is_within(e, _I32_END) for e in subterms(s)) else I32
