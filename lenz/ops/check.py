"""Run-time checks as values: an index that is not in range raises, and reads nothing outside.

A division of integers by zero raises on CPUs, as in eager; on GPUs it gives some number.
"""

from __future__ import annotations

from typing import Any

import torch

from lenz.ir.dtype import BOOL, I64, DType
from lenz.ir.expr import Expr, const
from lenz.ir.op import Op, define
from lenz.ops.fold import apply
from lenz.ops.rules import INTS


def _dtype(args: tuple[DType, ...], _: tuple[Any, ...]) -> DType:
    if any(a is not I64 for a in args):
        raise TypeError(f"assert_in_range takes two i64, got {args}")
    return I64


def _eager(i: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    if bool(((i < 0) | (i >= n)).any()):
        raise IndexError("index out of range in self")
    return i


def _emit(
    b: Any, _: DType, __: tuple[DType, ...], xs: tuple[Any, ...], ___: tuple[Any, ...]
) -> Any:
    i, n, runs = xs
    outside = b.compare("icmp uge", I64, i, n)  # unsigned: negatives are large
    b.fail(b.binary("and", BOOL, outside, runs))
    return b.select(outside, I64, b.constant(I64, 0), i)


def _nonzero_dtype(args: tuple[DType, ...], _: tuple[Any, ...]) -> DType:
    if len(args) != 2 or args[0] is not args[1] or args[0] not in INTS:
        raise TypeError(f"assert_nonzero takes two integers of one type, got {args}")
    return args[0]


def _eager_nonzero(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    if bool((x == 0).any()):
        raise RuntimeError("ZeroDivisionError")
    return x


def _emit_nonzero(
    b: Any, dtype: DType, _: tuple[DType, ...], xs: tuple[Any, ...], __: tuple[Any, ...]
) -> Any:
    x, _one, runs = xs
    b.fail(b.binary("and", BOOL, b.compare("icmp eq", dtype, x, b.constant(dtype, 0)), runs), 2)
    return x


ASSERT_NONZERO = define(
    Op(
        "assert_nonzero",
        2,
        _nonzero_dtype,
        eager=_eager_nonzero,
        llvm=_emit_nonzero,
        triton="{0}",
        check_triton="{0} != 0",
        cost=1.0,
        domain=(1, 10),
        guarded=True,
    )
)
ASSERT_IN_RANGE = define(
    Op(
        "assert_in_range",
        2,
        _dtype,
        eager=_eager,
        llvm=_emit,
        # Unsigned, negatives are large.
        triton="tl.where(tl.cast({0}, tl.uint64) < tl.cast({1}, tl.uint64), {0}, 0)",
        check_triton="tl.cast({0}, tl.uint64) < tl.cast({1}, tl.uint64)",
        cost=2.0,
        domain=(0, 10),
        guarded=True,
    )
)


def assert_in_range(i: Expr, n: Expr) -> Expr:
    """`i` itself where 0 <= i < n (both i64). Elsewhere the call raises IndexError when the kernel
    has run, and the value is 0, so that nothing outside is read."""
    return apply(ASSERT_IN_RANGE, i, n)


def assert_nonzero(x: Expr) -> Expr:
    """The integer `x` itself. Where it is 0 the call raises RuntimeError when the kernel has run.

    The second operand of the op says, as for all guarded ops, that positions may be at least 0.
    """
    return apply(ASSERT_NONZERO, x, const(1, x.dtype))
