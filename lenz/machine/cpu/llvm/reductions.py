"""The states of a reduction: their identity, and how two of them become one.

A state is a tuple of parts: the value, and for argmax and argmin also the position. NaN counts as
the greatest value of max and argmax and the smallest of min and argmin; of equal values the first
position wins.
"""

from __future__ import annotations

from lenz import ops
from lenz.ir.dtype import BOOL, DType
from lenz.ir.graph import ReduceKind, ScanKind
from lenz.machine.cpu.llvm.builder import Builder
from lenz.machine.cpu.llvm.instructions import Names
from lenz.machine.cpu.llvm.types import constant, shuffle, splat, suffix, value_type, vector
from lenz.records import dataclass

Parts = tuple[Names, ...]
# The kinds that are one instruction: on floats, on integers and on bools.
_OPCODES = {
    "sum": ("fadd", "add", "or"),
    "prod": ("fmul", "mul", "and"),
    "any": ("", "or", "or"),
    "all": ("", "and", "and"),
    "max": ("", "", "or"),
    "min": ("", "", "and"),
}


@dataclass(frozen=True, slots=True)
class Monoid:
    """The states of a kind of reduction; `dtypes` are the types of their parts."""

    kind: ReduceKind | ScanKind
    dtypes: tuple[DType, ...]

    @property
    def opcode(self) -> str:
        """The instruction that combines two states; "" if it takes several."""
        dtype = self.dtypes[0]
        return _OPCODES.get(self.kind, ("",) * 3)[0 if dtype.is_float else 1 + (dtype is BOOL)]

    def identity(self, lanes: int, scan: bool = False) -> str:
        """The value of no elements in every lane: 0.0 for sums, but -0.0 for running ones."""
        dtype = self.dtypes[0]
        is_sum = scan and self.kind == "sum" and dtype.is_float
        value = -0.0 if is_sum else ops.neutral(self.kind, dtype).attrs[0]
        return splat(value_type(dtype), constant(dtype, value), lanes)

    def combine(self, b: Builder, x: Parts, y: Parts, later: bool = False) -> Parts:
        """The state of both. For positions x is the earlier one; `later`: all of y are behind x."""
        kind, dtype, opcode = self.kind, self.dtypes[0], self.opcode
        if len(self.dtypes) > 1:
            return self._combine_arg(b, x, y, later)
        (p,), (q,) = x, y
        if opcode:
            return (b.binary(opcode, dtype, p, q),)
        if not dtype.is_float:
            return (b.intrinsic(f"llvm.{_sign(dtype)}{kind}", dtype, p, q),)
        # One maxps/minps. It gives p (the state) if either is NaN, so a NaN in the state stays; the
        # second select inserts one from q.
        better = b.compare("fcmp ogt" if kind == "max" else "fcmp olt", dtype, q, p)
        best = b.select(better, dtype, q, p)
        return (b.select(b.compare("fcmp uno", dtype, q, q), dtype, q, best),)

    def _combine_arg(self, b: Builder, x: Parts, y: Parts, later: bool) -> Parts:
        (p, i), (q, j) = x, y
        (dtype, index), order = self.dtypes, "gt" if self.kind == "argmax" else "lt"
        if dtype.is_float:
            # q beats p: greater, or NaN while p is not.
            beats = b.compare(f"fcmp u{order}", dtype, q, p)
            beats = b.binary("and", BOOL, beats, b.compare("fcmp ord", dtype, p, p))
        else:
            beats = b.compare(f"icmp {_sign(dtype)}{order}", dtype, q, p)
        if not later:
            first = self._equal(b, p, q)
            first = b.binary("and", BOOL, first, b.compare("icmp slt", index, j, i))
            beats = b.binary("or", BOOL, beats, first)
        return b.select(beats, dtype, q, p), b.select(beats, index, j, i)

    def _equal(self, b: Builder, p: Names, q: Names) -> Names:
        dtype = self.dtypes[0]
        if not dtype.is_float:
            return b.compare("icmp eq", dtype, q, p)
        same = b.compare("fcmp ueq", dtype, q, p)  # equal, or one of them NaN
        one = b.binary("xor", BOOL, *[b.compare("fcmp uno", dtype, x, x) for x in (p, q)])
        return b.binary("and", BOOL, same, b.binary("xor", BOOL, one, True))

    def tree(self, b: Builder, state: Parts) -> Parts:
        """One state of all copies, combined pairwise; b has one copy."""
        states: list[Parts] = [tuple([(n,) for n in names]) for names in zip(*state, strict=True)]
        while len(states) > 1:
            pairs = zip(states[::2], states[1::2], strict=False)
            states = [self.combine(b, x, y) for x, y in pairs] + states[len(states) & ~1 :]
        return states[0]

    def across_lanes(self, b: Builder, x: Parts, width: int, used: int) -> Parts:
        """The scalar state of a vector state whose first `used` lanes count; b is a scalar builder.

        LLVM would fill the others by expanding an even number of lanes: sums over rows of 10 f32
        take 7.0 ns so, and 1.8 if lanes are added to others where a power of two ends.
        """
        few, done = used & -used, 1 << used.bit_length() - 1
        if 1 < few < used:
            size, first = done, self._lanes(b, x, width, 0, done)
            while size > few:
                size //= 2
                vectors = Builder(b.fn, b.level, size, 1)
                low, high = (self._lanes(b, first, 2 * size, k, size) for k in (0, size))
                first = self.combine(vectors, low, high)
                if used & size:
                    first = self.combine(vectors, first, self._lanes(b, x, width, done, size))
                    done += size
            return self.across_lanes(b, first, few, few)
        if self.opcode:
            return ((self._reduced(b, x[0][0], width),),)
        vectors = Builder(b.fn, b.level, width, 1)
        types = [vectors.type(d) for d in self.dtypes]
        # Halve: combine each lane with the one half a width further on.
        half = width // 2
        while half:
            lanes = [(i + half) % width for i in range(width)]
            moved = _each(b, x, [shuffle(t, "{}", "poison", lanes) for t in types])
            x = self.combine(vectors, x, moved)
            half //= 2
        return _each(b, x, [f"extractelement {t} {{}}, i32 0" for t in types])

    def _lanes(self, b: Builder, x: Parts, width: int, first: int, count: int) -> Parts:
        types = [vector(value_type(d), width) for d in self.dtypes]
        return _each(b, x, [shuffle(t, "{}", "poison", range(first, first + count)) for t in types])

    def _reduced(self, b: Builder, name: str, width: int) -> str:
        dtype, opcode = self.dtypes[0], self.opcode
        t = value_type(dtype)
        v, full = vector(t, width), f"llvm.vector.reduce.{opcode}.{suffix(t, width)}"
        if not dtype.is_float:
            return b.fn.let(b.level, f"call {t} {b.fn.module.declare(full, t, v)}({v} {name})")
        # reassoc lets the lanes be added as a tree; the start value is the exact identity.
        start, callee = self.identity(1, scan=True), b.fn.module.declare(full, t, t, v)
        return b.fn.let(b.level, f"call reassoc {t} {callee}({t} {start}, {v} {name})")


def _each(b: Builder, x: Parts, templates: list[str]) -> Parts:
    """An instruction on each part of a state of one copy."""
    return tuple([(b.fn.let(b.level, t.format(*p)),) for t, p in zip(templates, x, strict=True)])


def _sign(dtype: DType) -> str:
    return "s" if dtype.kind == "int" else "u"
