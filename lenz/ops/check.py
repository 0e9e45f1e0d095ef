"""Run-time checks as values: an index that is not in range raises, and reads nothing outside."""

from __future__ import annotations

from typing import Any

import torch

from lenz.ir.dtype import BOOL, I64, DType
from lenz.ir.expr import Expr
from lenz.ir.op import Op, define
from lenz.ops.fold import apply


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
