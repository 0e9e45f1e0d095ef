"""Accumulation: identities, combining two partial results, and the last step over lanes.

A state is a tuple of parts: the value, and for argmax and argmin also the position. NaN counts as
the greatest value of max and argmax and the smallest of min and argmin; of equal values the first
position wins.
"""

from __future__ import annotations

from lenz.ir.dtype import BOOL, F32, U8, DType
from lenz.ir.graph import ReduceKind, ScanKind
from lenz.machine.cpu.llvm.builder import Builder, Names
from lenz.machine.cpu.llvm.types import constant, splat, suffix, value_type, vector

Parts = tuple[Names, ...]
Kind = ReduceKind | ScanKind
_INTEGER = {"sum": "add", "prod": "mul"}
_FLOAT = {"sum": "fadd", "prod": "fmul"}


def is_arg(kind: Kind) -> bool:
    """True for the kinds that give a position."""
    return kind in ("argmax", "argmin")


def state_dtype(kind: Kind, dtype: DType) -> DType:
    """The type of the accumulator: f32 for 16-bit floats, u8 for positions of bools."""
    if dtype.is_half:
        return F32
    if dtype is BOOL and kind not in ("any", "all"):
        return U8 if is_arg(kind) else BOOL
    return dtype


def identity(kind: Kind, dtype: DType) -> str:
    """The neutral scalar constant."""
    match kind:
        case "sum":
            return constant(dtype, 0)
        case "prod":
            return constant(dtype, 1)
        case "any":
            return "false" if dtype is BOOL else constant(dtype, 0)
        case "all":
            return "true" if dtype is BOOL else constant(dtype, 1)
        case "max" | "argmax" | "logaddexp":
            return _lowest(dtype)
        case "min" | "argmin":
            return _highest(dtype)


def _lowest(dtype: DType) -> str:
    if dtype.is_float:
        return constant(dtype, float("-inf"))
    if dtype.kind == "int":
        return str(-(1 << (dtype.bits - 1)))
    return constant(dtype, 0)


def _highest(dtype: DType) -> str:
    if dtype.is_float:
        return constant(dtype, float("inf"))
    if dtype is BOOL:
        return "true"
    return str((1 << (dtype.bits - (dtype.kind == "int"))) - 1)


def combine(b: Builder, kind: Kind, dtype: DType, index: DType, x: Parts, y: Parts) -> Parts:
    """The state of both together; x is the earlier one where the order matters."""
    if is_arg(kind):
        return _combine_arg(b, kind, dtype, index, x, y)
    (p,), (q,) = x, y
    if kind in ("sum", "prod"):
        table = _FLOAT if dtype.is_float else _INTEGER
        if dtype is BOOL:
            return (b.binary("or" if kind == "sum" else "and", BOOL, p, q),)
        return (b.binary(table[kind], dtype, p, q),)
    if kind in ("any", "all"):
        return (b.binary("or" if kind == "any" else "and", dtype, p, q),)
    if dtype is BOOL:
        return (b.binary("or" if kind == "max" else "and", BOOL, p, q),)
    if not dtype.is_float:
        sign = "s" if dtype.kind == "int" else "u"
        return (b.intrinsic(f"llvm.{sign}{kind}", dtype, p, q),)
    # One maxps/minps. It gives p (the state) if either is NaN, so a NaN in the state stays; the
    # second select inserts one from q.
    better = b.compare("fcmp ogt" if kind == "max" else "fcmp olt", dtype, q, p)
    best = b.select(better, dtype, q, p)
    nan = b.compare("fcmp uno", dtype, q, q)
    return (b.select(nan, dtype, q, best),)


def _combine_arg(b: Builder, kind: Kind, dtype: DType, index: DType, x: Parts, y: Parts) -> Parts:
    (p, i), (q, j) = x, y
    greater = kind == "argmax"
    if dtype.is_float:
        # q beats p: greater, or NaN while p is not.
        beats = b.compare("fcmp ugt" if greater else "fcmp ult", dtype, q, p)
        beats = b.binary("and", BOOL, beats, b.compare("fcmp ord", dtype, p, p))
        same = b.compare("fcmp ueq", dtype, q, p)  # equal, or one of them NaN
        both = b.binary(
            "xor", BOOL, b.compare("fcmp uno", dtype, p, p), b.compare("fcmp uno", dtype, q, q)
        )
        same = b.binary("and", BOOL, same, b.binary("xor", BOOL, both, b.constant(BOOL, True)))
    else:
        sign = "s" if dtype.kind == "int" else "u"
        beats = b.compare(f"icmp {sign}{'gt' if greater else 'lt'}", dtype, q, p)
        same = b.compare("icmp eq", dtype, q, p)
    first = b.binary("and", BOOL, same, b.compare("icmp slt", index, j, i))
    take = b.binary("or", BOOL, beats, first)
    return b.select(take, dtype, q, p), b.select(take, index, j, i)


def step(b: Builder, kind: Kind, dtype: DType, index: DType, x: Parts, y: Parts) -> Parts:
    """As `combine`, for a y whose positions all come after those of x."""
    if not is_arg(kind):
        return combine(b, kind, dtype, index, x, y)
    (p, i), (q, j) = x, y
    greater = kind == "argmax"
    if dtype.is_float:
        beats = b.compare("fcmp ugt" if greater else "fcmp ult", dtype, q, p)
        beats = b.binary("and", BOOL, beats, b.compare("fcmp ord", dtype, p, p))
    else:
        sign = "s" if dtype.kind == "int" else "u"
        beats = b.compare(f"icmp {sign}{'gt' if greater else 'lt'}", dtype, q, p)
    return b.select(beats, dtype, q, p), b.select(beats, index, j, i)


def tree(b: Builder, kind: Kind, dtype: DType, index: DType, states: list[Parts]) -> Parts:
    """All states combined pairwise."""
    while len(states) > 1:
        paired = [
            combine(b, kind, dtype, index, states[k], states[k + 1])
            for k in range(0, len(states) - 1, 2)
        ]
        states = paired + states[len(states) & ~1 :]
    return states[0]


def across_lanes(b: Builder, kind: Kind, dtype: DType, index: DType, x: Parts, width: int) -> Parts:
    """The scalar state of a vector state; b is a scalar builder."""
    if kind in ("sum", "prod"):
        return (_sum_lanes(b, kind, dtype, x[0][0], width),)
    if dtype is BOOL or kind in ("any", "all"):
        opcode = "or" if kind in ("any", "max", "sum") else "and"
        t = value_type(dtype)
        return ((_call(b, f"llvm.vector.reduce.{opcode}", t, x[0][0], width),),)
    vectors = Builder(b.fn, b.level, width, 1)
    # Halve: combine each lane with the one half a width further on.
    half = width // 2
    while half:
        order = ", ".join(f"i32 {(i + half) % width}" for i in range(width))
        moved = []
        for part, d in zip(x, (dtype, index), strict=False):
            t = vectors.type(d)
            text = f"shufflevector {t} {part[0]}, {t} poison, <{width} x i32> <{order}>"
            moved.append((b.fn.let(b.level, text),))
        x = combine(vectors, kind, dtype, index, x, tuple(moved))
        half //= 2
    return tuple(
        [
            (b.fn.let(b.level, f"extractelement {vectors.type(d)} {part[0]}, i32 0"),)
            for part, d in zip(x, (dtype, index), strict=False)
        ]
    )


def _sum_lanes(b: Builder, kind: str, dtype: DType, name: str, width: int) -> Names:
    t = value_type(dtype)
    if not dtype.is_float:
        if dtype is BOOL:
            return (
                _call(b, f"llvm.vector.reduce.{'or' if kind == 'sum' else 'and'}", t, name, width),
            )
        return (
            _call(b, f"llvm.vector.reduce.{'add' if kind == 'sum' else 'mul'}", t, name, width),
        )
    # reassoc lets the lanes be added as a tree; the start value is the exact identity.
    opcode, start = (
        ("fadd", constant(dtype, -0.0)) if kind == "sum" else ("fmul", constant(dtype, 1))
    )
    v = vector(t, width)
    full = f"llvm.vector.reduce.{opcode}.{suffix(t, width)}"
    callee = b.fn.module.declare(full, t, t, v)
    return (b.fn.let(b.level, f"call reassoc {t} {callee}({t} {start}, {v} {name})"),)


def _call(b: Builder, name: str, element: str, x: str, width: int) -> str:
    v = vector(element, width)
    callee = b.fn.module.declare(f"{name}.{suffix(element, width)}", element, v)
    return b.fn.let(b.level, f"call {element} {callee}({v} {x})")


def identity_text(kind: Kind, dtype: DType, lanes: int, scan: bool = False) -> str:
    """The identity in every lane: 0.0 for sums (not neutral for -0.0), -0.0 for scans."""
    text = identity(kind, dtype)
    if scan and kind == "sum" and dtype.is_float:
        text = constant(dtype, -0.0)
    return splat(value_type(dtype), text, lanes)
