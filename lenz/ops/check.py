"""Run-time checks as values: an out-of-range index raises, and reads nothing outside.

A division of integers by zero raises on CPUs, as in eager; on GPUs it gives some number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lenz.errors import FAULTS
from lenz.ir.dtype import BOOL, I64, DType
from lenz.ir.expr import Expr, const
from lenz.ir.op import Attrs, Op, OpForm, Types, on
from lenz.ops.cast import cast
from lenz.ops.emission import Values
from lenz.ops.fold import apply
from lenz.ops.rules import INTS, same

CODES = {name: code for code, name in enumerate(FAULTS, 1)}  # returned by kernels


def _guarded(
    name: str, types: Types, is_wrong: Callable[..., Any], emit: Any, cuda: OpForm, **more: Any
) -> Op:
    """The op (x, n) -> x that fails with its fault for wrong operands."""
    error, what = FAULTS[name]

    def eager(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        if bool(is_wrong(x, n).any()):
            raise error(what)
        return x

    forms = on(cpu=emit, cuda=cuda)
    return Op(name, 2, same(types), eager, forms=forms, guarded=True, **more)


def _check(name: str) -> Op:
    """The op i -> i that fails with its fault unless 0 <= i < n."""

    def emit(b: Any, _: DType, __: Types, xs: Values, ___: Attrs) -> Any:
        i, n, runs = xs
        outside = b.compare("icmp uge", I64, i, n)  # unsigned: negatives are large
        b.fail(b.binary("and", BOOL, outside, runs), CODES[name])
        return b.select(outside, I64, b.constant(I64, 0), i)

    inside = "tl.cast({0}, tl.uint64) < tl.cast({1}, tl.uint64)"  # unsigned: negatives are large
    cuda = OpForm(f"tl.where({inside}, {{0}}, 0)", check=inside)
    outside = lambda i, n: (i < 0) | (i >= n)
    return _guarded(name, (I64,), outside, emit, cuda, cost=2.0, domain=(0, 10))


def _emit_nonzero(b: Any, dtype: DType, _: Types, xs: Values, __: Attrs) -> Any:
    x, _one, runs = xs
    zero = b.compare("icmp eq", dtype, x, 0)
    b.fail(b.binary("and", BOOL, zero, runs), CODES["assert_nonzero"])
    return x


_NONZERO = OpForm("{0}", check="{0} != 0")
ASSERT_NONZERO = _guarded(
    "assert_nonzero", INTS, lambda x, _: x == 0, _emit_nonzero, _NONZERO, cost=1.0, domain=(1, 10)
)


CHECKS = {name: _check(name) for name in FAULTS if name != "assert_nonzero"}


def assert_in_range(i: Expr, n: Expr, fault: str = "assert_in_range") -> Expr:
    """`i` itself if 0 <= i < n (both i64). Otherwise the value is 0, so that nothing outside is
    read, and the call raises FAULTS's error for `fault` after the kernel.
    """
    return apply(CHECKS[fault], i, n)


def assert_not(wrong: Expr, x: Expr, fault: str) -> Expr:
    """`x`, but the call raises FAULTS's error for `fault` where the bool `wrong` is true."""
    none = assert_in_range(cast(wrong, I64), const(1, I64), fault)
    return x + cast(none, x.dtype)  # 0 in both cases


def assert_nonzero(x: Expr) -> Expr:
    """The integer `x` itself. If it is 0 the call raises RuntimeError after the kernel.

    As for all guarded ops, the second operand says that positions are at least 0.
    """
    return apply(ASSERT_NONZERO, x, const(1, x.dtype))
