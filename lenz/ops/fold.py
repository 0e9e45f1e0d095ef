"""Build expressions: constants are folded and identities applied on construction.

Every rule here is exact for all values, including NaN, infinities and signed zeros (except the sign
and payload of a NaN). Rules that trade accuracy or look beyond one node are in `opt/`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from lenz.ir.dtype import BOOL, F32, F64, DType
from lenz.ir.expr import Expr, Number, const, enter_builder, expr, keep_checks
from lenz.ir.op import CONST, Attrs, Op, op_named

Rule = Callable[..., "Expr | None"]
_RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register an identity of ops: (*operands, *attributes) -> simpler Expr, or None."""

    def enter(function: Rule) -> Rule:
        for name in names:
            _RULES[name] = function
        return function

    return enter


def is_const(e: Expr) -> bool:
    """True for a constant node."""
    return e.op is CONST


def value_of(e: Expr) -> bool | int | float | None:
    """The Python value of a constant node, None for any other node."""
    if e.op is not CONST:
        return None
    value: bool | int | float = e.attrs[0]
    return value


def is_value(e: Expr, value: float) -> bool:
    """True for the constant `value`; 0.0 and -0.0 differ, and bool equals 0 or 1."""
    found = value_of(e)
    if found is None or found != value:
        return False
    return math.copysign(1.0, found) == math.copysign(1.0, value) or not e.dtype.is_float


def apply(op: Op, *args: Expr, attrs: Attrs = ()) -> Expr:
    """Make the node in simplest form: folded, with constants of commutative ops on the right.

    Raises TypeError if the op's type rule rejects the operands.
    """
    as_bool = _BOOL_FORMS.get(op.name)
    if as_bool is not None and args[0].dtype is BOOL:
        return apply(op_named(as_bool), *args)
    if op.commutes and is_const(args[0]) and not is_const(args[1]):
        args = (args[1], args[0], *args[2:])
    if op.eager is not None and args and all(map(is_const, args)):
        folded = _fold(op, args, attrs)
        if folded is not None:
            return folded
    simplify = _RULES.get(op.name)
    if simplify is not None:
        found = simplify(*args, *attrs)
        if found is not None:
            return keep_checks(found, args)  # eager also checks unused operands
    return expr(op, *args, attrs=attrs)


def unary(op: Op, doc: str) -> Callable[[Expr], Expr]:
    """The function that applies an op of one operand; `doc` becomes its docstring."""
    return entered(op, doc, lambda x: apply(op, x))


def binary(op: Op, doc: str) -> Callable[[Expr | Number, Expr | Number], Expr]:
    """The function that applies an op of two operands; `doc` becomes its docstring.

    A number becomes a constant of the other operand's type.
    """
    return entered(op, doc, lambda x, y: apply(op, *typed(x, y)))


def entered(op: Op, doc: str, build: Callable[..., Expr]) -> Callable[..., Expr]:
    """The function that builds an op, with its name and docstring; operators of Expr call it."""
    build.__name__, build.__doc__ = op.name, doc
    enter_builder(op.name, build)
    return build


def typed(*operands: Expr | Number) -> tuple[Expr, ...]:
    """The operands, with numbers as constants in the type of the first expression.

    Raises TypeError if all are numbers, which have no type.
    """
    like = next((e for e in operands if isinstance(e, Expr)), None)
    if like is None:
        raise TypeError(f"the operands {operands} are numbers: one must be an expression")
    return tuple([e if isinstance(e, Expr) else const(e, like.dtype) for e in operands])


# As in torch, sum, product, minimum and maximum of bools are logical. The four ops accept bool, so
# that the type rule shows it.
_BOOL_FORMS = {"add": "or", "mul": "and", "minimum": "and", "maximum": "or"}
_ROUNDINGS = ("floor", "ceil", "trunc", "round")


def _fold(op: Op, args: tuple[Expr, ...], attrs: Attrs) -> Expr | None:
    dtype = op.dtype(tuple([a.dtype for a in args]), attrs)
    tensors = [torch.tensor(a.attrs[0], dtype=a.dtype.torch) for a in args]
    first, is_float = tensors[0].item(), args[0].dtype.is_float
    if op.name == "bitcast" and math.isnan(first):
        return None  # a constant does not keep the payload of a NaN
    if op.name == "cast" and is_float and dtype.is_integer and not dtype.holds(first, first):
        return None  # GPUs convert it to another integer than CPUs
    assert op.eager is not None
    try:
        value = op.eager(*tensors, *attrs).item()
    except (IndexError, RuntimeError):
        if not op.guarded:
            raise
        return None  # a check that always fails if reached; a call may not reach it
    return None if op.name == "bitcast" and math.isnan(value) else const(value, dtype)


def _zero(e: Expr) -> bool:
    return is_value(e, 0) and not e.dtype.is_float


def _ones(e: Expr) -> bool:
    """All bits set: True, -1 or the largest unsigned value."""
    value = value_of(e)
    if value is None or e.dtype.is_float:
        return False
    return value == (1 if e.dtype is BOOL else const(-1, e.dtype).attrs[0])


# x + 0.0 would turn -0.0 into 0.0; x + -0.0 is x for every x.
rule("add")(lambda x, y: x if _zero(y) or (y.dtype.is_float and is_value(y, -0.0)) else None)
rule("mul")(lambda x, y: x if is_value(y, 1) else y if _zero(y) else None)
rule("neg")(lambda x: x.args[0] if x.op.name == "neg" else None)
rule(*_ROUNDINGS)(lambda x: x if x.op.name in _ROUNDINGS else None)
rule("minimum", "maximum", "fmin", "fmax")(lambda x, y: x if x is y else None)
rule("and")(lambda x, y: x if x is y or _ones(y) else y if _zero(y) else None)
rule("or")(lambda x, y: x if x is y or _zero(y) else y if _ones(y) else None)
rule("shl", "shr", "shift_left", "shift_right")(lambda x, y: x if _zero(y) else None)
rule("eq", "le", "ge")(lambda x, y: const(True, BOOL) if x is y and not x.dtype.is_float else None)
rule("lt", "gt")(lambda x, y: const(False, BOOL) if x is y else None)
rule("narrow")(lambda x, to: x.args[0] if x.op.name == "cast" and x.args[0].dtype is to else None)


@rule("sub")
def _sub(x: Expr, y: Expr) -> Expr | None:
    if _zero(y) or (y.dtype.is_float and is_value(y, 0.0)):
        return x
    return const(0, x.dtype) if x is y and x.dtype.is_integer else None


@rule("div")
def _div(x: Expr, y: Expr) -> Expr | None:
    if is_value(y, 1):
        return x
    value = value_of(y)
    if value is None or not math.isfinite(value) or value == 0:
        return None
    mantissa, exponent = math.frexp(value)
    # 1/2^k is exact and normal, so x/2^k and x*2^-k round the same real number.
    limit = {F32: 126, F64: 1022}[y.dtype]
    if abs(mantissa) == 0.5 and abs(exponent - 1) <= limit:
        return apply(op_named("mul"), x, const(1.0 / value, y.dtype))
    return None


@rule("abs")
def _abs(x: Expr) -> Expr | None:
    if x.op.name == "abs" or x.dtype.kind == "uint":
        return x
    return apply(op_named("abs"), x.args[0]) if x.op.name == "neg" else None


@rule("xor")
def _xor(x: Expr, y: Expr) -> Expr | None:
    if _zero(y):
        return x
    return const(0, x.dtype) if x is y else apply(op_named("not"), x) if _ones(y) else None


@rule("not")
def _not(x: Expr) -> Expr | None:
    if x.op.name == "not":
        return x.args[0]
    opposite = {"eq": "ne", "ne": "eq"}.get(x.op.name)
    if opposite is None and x.args and not x.args[0].dtype.is_float:
        # With NaN neither x < y nor x >= y holds, so only integer comparisons may be inverted.
        opposite = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt"}.get(x.op.name)
    return None if opposite is None else apply(op_named(opposite), *x.args)


@rule("ne")
def _ne(x: Expr, y: Expr) -> Expr | None:
    if x is y and not x.dtype.is_float:
        return const(False, BOOL)
    return x if x.dtype is BOOL and _zero(y) else None


@rule("where")
def _where(cond: Expr, x: Expr, y: Expr) -> Expr | None:
    if x is y:
        return x
    if is_const(cond):
        return x if value_of(cond) else y
    if cond.op.name == "not":
        return apply(op_named("where"), cond.args[0], y, x)
    if x.dtype is BOOL and is_const(x) and is_const(y):
        return cond if value_of(x) else apply(op_named("not"), cond)
    return None


@rule("cast")
def _cast(x: Expr, to: DType) -> Expr | None:
    if x.dtype is to:
        return x
    # On GPUs, NaN in f64 becomes another integer than NaN in a narrower float.
    is_nan_kept = not (x.dtype is F64 and to.is_integer and x.args and x.args[0].dtype.is_float)
    if x.op.name == "cast" and is_nan_kept and holds_exactly(x.dtype, x.args[0].dtype):
        return apply(op_named("cast"), x.args[0], attrs=(to,))
    return None


@rule("bitcast")
def _bitcast(x: Expr, to: DType) -> Expr | None:
    if x.dtype is to:
        return x
    if x.op.name == "bitcast":
        return apply(op_named("bitcast"), x.args[0], attrs=(to,))
    return None


# Bits of the significand, the leading one included.
_PRECISION = {"f8e5m2": 3, "f8e4m3fn": 4, "f16": 11, "bf16": 8, "f32": 24, "f64": 53}


def holds_exactly(wide: DType, narrow: DType) -> bool:
    """True when every value of `narrow` is a value of `wide`."""
    if wide is narrow:
        return True
    if wide is BOOL:
        return False
    if narrow is BOOL:
        return True
    if narrow.is_float:
        return wide.is_float and wide.bits > narrow.bits
    bits = narrow.bits - (narrow.kind == "int")
    if wide.is_float:
        return bits <= _PRECISION[wide.name]
    if wide.kind == "uint":
        return narrow.kind == "uint" and narrow.bits <= wide.bits
    return bits <= wide.bits - 1
