"""Operands of pointwise ops: their common type, and their elements at an index of the result.

Type promotion is torch's: tensors with dimensions decide within a category (bool, integer, float),
then 0-d tensors, then Python scalars; only a higher category raises the type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch

from lenz import ops
from lenz.errors import Unsupported
from lenz.ir.dtype import BOOL, C64, I64, DType, compute_dtype, dtype_of
from lenz.ir.expr import Expr, const, index
from lenz.lower.builder import At, GraphBuilder, Index, Value
from lenz.lower.registry import F, lowering
from lenz.sym import ONE, ZERO, Sym

Size: TypeAlias = Sym | int
Sizes: TypeAlias = Sequence[Size]
Number: TypeAlias = Sym | bool | int | float
Operand: TypeAlias = Value | Number


def broadcast(x: Value, i: Index) -> Index:
    """The index of `x` for index `i` of a result that it broadcasts to."""
    tail = i[len(i) - x.rank :]
    return tuple(ZERO if n is ONE else d for n, d in zip(x.shape, tail, strict=True))


def reader(x: Value, dtype: DType) -> At:
    """The elements of a broadcast operand, in a compute type."""
    return lambda i: ops.cast(x.at(broadcast(x, i)), dtype)


def number(x: Sym | bool | int | float, dtype: DType) -> Expr:
    """A Python scalar or size as a value of the type."""
    return ops.cast(index(x, I64), dtype) if isinstance(x, Sym) else const(x, dtype)


def element(x: Operand, i: Index, dtype: DType, *, kept: bool = False) -> Expr:
    """One operand of an op whose operands are promoted to `dtype`, in dtype's compute type.

    Integers and other floats are rounded to a half type first, as in torch. With `kept`, numbers
    and 0-d CPU tensors are not, as in a few ops of torch: products, quotients, sums on GPUs.
    """
    to = compute_dtype(dtype)
    if not isinstance(x, Value):
        e = number(x, to)
        return e if kept else ops.cast(ops.cast(e, dtype), to)
    e = x.at(broadcast(x, i))
    stays = kept and x.rank == 0 and (x.is_number or x.device == "cpu")
    if dtype.is_half and e.dtype is not dtype and not stays:
        e = ops.cast(e, dtype)
    return ops.cast(e, to)


def keeps(name: str, device: str, k: int) -> bool:
    """True if operand k of a binary op stays f32 with half types when it is a scalar."""
    if device == "cpu":
        return k == 1 and name in ("mul", "div")
    return name in ("add", "sub", "mul") or (name == "div" and k == 1)


def divisor(e: Expr, device: str) -> Expr:
    """A divisor: an integer 0 raises on CPUs, as in eager, and gives any result on GPUs."""
    checked = device == "cpu" and e.dtype.is_integer and not ops.is_const(e)
    return ops.assert_nonzero(e) if checked else e


def parameter(e: Expr, device: str, most: float | None = None) -> Expr:
    """A parameter that must be between 0 and `most`: on CPUs it raises otherwise, as in eager."""
    wrong = ops.logical_not(e >= 0)
    if most is not None:
        wrong = wrong | (e > most)
    return ops.assert_not(wrong, e, "assert_parameter") if device == "cpu" else e


def stepped(e: Expr, dtype: DType) -> Expr:
    """`e` rounded where torch rounds within an op on half types; fusion may remove the rounding."""
    return ops.cast(ops.narrow(e, dtype), e.dtype) if dtype.is_half else e


def exact(x: Operand, i: Index, dtype: DType) -> Expr:
    """One operand in `dtype` itself, also half types: for ops that only move values."""
    return ops.cast(x.at(broadcast(x, i)), dtype) if isinstance(x, Value) else number(x, dtype)


def elementwise(*names: str, tensors: int = 1) -> Callable[[F], F]:
    """Register out = fn(*elements of the first `tensors` operands, *numbers)."""

    def enter(fn: F) -> F:
        def lower_elements(b: GraphBuilder, *args: Any, **numbers: Any) -> Value:
            xs, rest, t = args[:tensors], args[tensors:], b.result.dtype
            return b.map(lambda i: fn(*(element(x, i, t) for x in xs), *rest, **numbers))

        lower_elements.__module__ = fn.__module__
        lowering(*names)(lower_elements)
        return fn

    return enter


def scalar_dtype(x: Any) -> torch.dtype:
    """The type of a Python scalar in promotion; raises Unsupported for anything else."""
    match x:
        case bool():
            return torch.bool
        case int() | Sym():
            return torch.int64
        case float():
            return torch.get_default_dtype()
        case complex():
            return torch.complex64
        case _:
            raise Unsupported(f"a {type(x).__name__} as an operand")


def promote(operands: Iterable[Operand]) -> DType:
    """The common type of the operands by torch's promotion."""
    ranks: list[torch.dtype | None] = [None, None, None]
    for x in operands:
        level = 2 if not isinstance(x, Value) else (0 if x.rank > 0 else 1)
        own = x.dtype.torch if isinstance(x, Value) else scalar_dtype(x)
        seen = ranks[level]
        ranks[level] = own if seen is None else torch.promote_types(seen, own)
    found = _stronger(ranks[0], _stronger(ranks[1], ranks[2]))
    dtype = None if found is None else dtype_of(found)
    if dtype is None:
        raise Unsupported(f"no common type of {ranks}")
    return dtype


def _stronger(high: torch.dtype | None, low: torch.dtype | None) -> torch.dtype | None:
    """Combine the type of the stronger operands with that of the weaker ones."""
    if high is None or low is None or high.is_complex:
        return low if high is None else high
    if low.is_complex or (low.is_floating_point and not high.is_floating_point):
        # A complex type with the precision of a float, or the float itself.
        return torch.promote_types(high, C64.torch) if low.is_complex else low
    return high if high.is_floating_point else low if high is BOOL.torch else high
