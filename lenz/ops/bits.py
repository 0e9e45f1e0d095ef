"""Operations on the bits of integers; on bool they are logical."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from lenz.ir.dtype import BOOL, DType
from lenz.ir.expr import Expr, const
from lenz.ir.op import Attrs, Op, Types, on
from lenz.ops import reference
from lenz.ops.compare import ne, where
from lenz.ops.emission import Builder, Values, by_kind
from lenz.ops.fold import apply, binary, unary
from lenz.ops.rules import BITS, INTS, same


def _emit_not(b: Builder, dtype: DType, _: Types, xs: Values, __: Attrs) -> Any:
    return b.binary("xor", dtype, xs[0], dtype is BOOL or -1)


def _logical(name: str, sign: str) -> Op:
    emit = by_kind(dict.fromkeys(("int", "uint", "bool"), name))
    forms, aten = on(cpu=emit, cuda=f"{{0}} {sign} {{1}}"), (f"bitwise_{name}", f"__{name}__")
    eager = getattr(torch, aten[0])
    return Op(name, 2, same(BITS), eager, forms=forms, aten=aten, commutes=True)


AND = _logical("and", "&")
OR = _logical("or", "|")
XOR = _logical("xor", "^")
NOT = Op(
    "not",
    1,
    same(BITS),
    reference.with_numpy(torch.bitwise_not, np.invert),
    forms=on(cpu=_emit_not, cuda="~{0}"),
    aten=("bitwise_not",),
)


def _shift(name: str, way: str, **more: Any) -> Op:
    """A shift of integers to the left or right."""
    shift = getattr(np, f"{way}_shift")

    def guarded(x: Any, count: Any) -> Any:
        ok = count < 8 * x.dtype.itemsize
        return np.where(ok, shift(x, np.where(ok, count, 0).astype(x.dtype)), 0).astype(x.dtype)

    eager = reference.with_numpy(getattr(torch, f"bitwise_{way}_shift"), guarded)
    return Op(name, 2, same(INTS), eager, **more)


# The plain shifts need 0 <= count < bits (LLVM gives poison otherwise); shift_left and shift_right
# below handle other counts as torch does.
SHL = _shift("shl", "left", forms=on(cpu=by_kind({"int": "shl", "uint": "shl"}), cuda="{0} << {1}"))
SHR = _shift(
    "shr", "right", forms=on(cpu=by_kind({"int": "ashr", "uint": "lshr"}), cuda="{0} >> {1}")
)


def _in_range(count: Expr) -> Expr:
    # As an unsigned integer of the same width, a negative count is large.
    small = count < count.dtype.bits
    return small if count.dtype.kind == "uint" else small & ~(count < 0)


def _expand_shift_left(x: Expr, count: Expr) -> Expr:
    ok = _in_range(count)
    return where(ok, apply(SHL, x, where(ok, count, 0)), 0)


def _expand_shift_right(x: Expr, count: Expr) -> Expr:
    last = const(x.dtype.bits - 1, x.dtype)
    ok = _in_range(count)
    if x.dtype.kind == "int":
        return apply(SHR, x, where(ok, count, last))
    return where(ok, apply(SHR, x, where(ok, count, 0)), 0)


def _any_shift(way: str, expand: Callable[[Expr, Expr], Expr]) -> Op:
    """A shift by any count."""
    aten = (f"bitwise_{way}_shift", f"__{way[0]}shift__")
    return _shift(f"shift_{way}", way, expand=expand, aten=aten, cost=4.0)


SHIFT_LEFT = _any_shift("left", _expand_shift_left)
SHIFT_RIGHT = _any_shift("right", _expand_shift_right)


and_ = binary(AND, "Bitwise and of integers, logical and of bool.")
or_ = binary(OR, "Bitwise or of integers, logical or of bool.")
xor = binary(XOR, "Exclusive or: bitwise of integers, logical of bool.")
not_ = unary(NOT, "All bits of an integer inverted, or the negation of a bool.")
shl = binary(SHL, "x << count; needs 0 <= count < bits.")
shr = binary(SHR, "x >> count, arithmetic for signed types; needs 0 <= count < bits.")


def truth(x: Expr) -> Expr:
    """x != 0 as bool; NaN is true."""
    return x if x.dtype is BOOL else ne(x, 0)


def logical_not(x: Expr) -> Expr:
    """x == 0; false for NaN."""
    return apply(NOT, truth(x))
