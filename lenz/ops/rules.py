"""Type rules of ops: operand types and attributes -> the result type, or TypeError.

Scalar arithmetic is strict: operands have the same type, and f16 and bf16 are not arithmetic types
(the lowering computes in f32 and rounds with `narrow`). Promotion happens in the lowering.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lenz.ir.dtype import BOOL, F32, F64, I8, I16, I32, I64, MOVED, U8, U16, U32, U64, DType
from lenz.ir.op import Attrs, DTypeRule, Op, Types, all_ops
from lenz.ops.reference import with_numpy

BEFORE = len(all_ops())  # structural ops, and a user's that precede lenz's own
FLOATS: Types = (F32, F64)
SIGNED: Types = (I8, I16, I32, I64)
UNSIGNED: Types = (U8, U16, U32, U64)
INTS: Types = UNSIGNED + SIGNED
NUMBERS: Types = INTS + FLOATS
BITS: Types = (BOOL, *INTS)
COMPARABLE: Types = (BOOL, *NUMBERS)

_BY_BITS = {d.bits: d for d in SIGNED}


def _one_type(args: Types, allowed: Types) -> DType:
    for d in args:
        if d is not args[0]:
            raise TypeError(f"operands must have one type, got {args}")
    if args[0] not in allowed:
        raise TypeError(f"operands of type {args[0]} are not allowed, only {allowed}")
    return args[0]


def same(allowed: Types) -> DTypeRule:
    """The result has the common type of the operands, which must be allowed."""
    return lambda args, _: _one_type(args, allowed)


def float_op(name: str, arity: int = 1, types: Types = FLOATS, **facts: Any) -> Op:
    """An op of floats of one type, which torch has under its name."""
    return Op(name, arity, same(types), getattr(torch, name), **facts)


def number_op(name: str, arity: int, rule: DTypeRule, numpy_name: str, **facts: Any) -> Op:
    """An op that torch has under its name, and NumPy for the types that torch lacks."""
    eager = with_numpy(getattr(torch, name), getattr(np, numpy_name))
    return Op(name, arity, rule, eager, **facts)


def to_bool(allowed: Types) -> DTypeRule:
    """The operands have the same allowed type, the result is bool."""

    def rule(args: Types, _: Attrs) -> DType:
        _one_type(args, allowed)
        return BOOL

    return rule


def where_rule(args: Types, _: Attrs) -> DType:
    """(bool, T, T) -> T for any T that loops move."""
    if args[0] is not BOOL:
        raise TypeError(f"the condition must be bool, got {args[0]}")
    return _one_type(args[1:], MOVED)


def _target(attrs: Attrs) -> DType:
    if len(attrs) != 1 or not isinstance(attrs[0], DType) or attrs[0] not in MOVED:
        raise TypeError(f"needs one dtype that loops move as attribute, got {attrs}")
    return attrs[0]


def cast_rule(args: Types, attrs: Attrs) -> DType:
    """From any type that loops move to the one in the attribute."""
    _one_type(args, MOVED)
    return _target(attrs)


def narrow_rule(args: Types, attrs: Attrs) -> DType:
    """From f32 to the half type in the attribute."""
    to = _target(attrs)
    if args[0] is not F32 or not to.is_half:
        raise TypeError(f"narrow goes from f32 to f16 or bf16, got {args[0]} to {to}")
    return to


def bitcast_rule(args: Types, attrs: Attrs) -> DType:
    """From any type that loops move, except bool, to one of the same width."""
    to = _target(attrs)
    if args[0] not in MOVED or BOOL in (args[0], to) or args[0].bits != to.bits:
        raise TypeError(f"bitcast needs two types of one width and no bool, got {args[0]} to {to}")
    return to


def scale_rule(args: Types, _: Attrs) -> DType:
    """(f32, i32) -> f32, (f32, f32) -> f32 and (f64, i64) -> f64."""
    if args not in ((F32, I32), (F32, F32), (F64, I64)):
        raise TypeError(f"needs (f32, i32), (f32, f32) or (f64, i64), got {args}")
    return args[0]


def int_of_width(bits: int) -> DType:
    """The signed integer type of this width; raises KeyError if there is none."""
    return _BY_BITS[bits]
