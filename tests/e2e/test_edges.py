"""Ops of torch at the edges of their types: NaN, infinities, signed zeros, denormals, extremes.

Every op is compiled for values of one type at which it is odd, or for all pairs of them, and
compared with eager, half types with `emulate_rounding`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.e2e.sides import agree

Fn = Callable[..., Tensor]
INF, NAN = math.inf, math.nan
FLOATS = (
    0.0, -0.0, INF, -INF, NAN, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3.0, 1e-45, -1e-45, 1e-40,
    -1e-40, 2.0**-126, 3.4e38, -3.4e38, 16777217.0, 2147483648.0, -2147483904.0, 1e19, -1e19,
    65504.0, -65505.0, 7.0, -7.0, 100.0, -100.0, 0.1, 88.8, -88.8, 104.0, -104.0, 710.0, -746.0,
    6e-5, 255.0, 256.0, -129.0, 127.5, 9.2e18,
)  # fmt: skip
WHOLE = (0, 1, 2, 3, 5, 7, 8, 15, 16, 31, 32, 33, 63, 64, -1, -2, -7)

UNARY = """abs neg sign square sqrt rsqrt reciprocal exp exp2 expm1 log log2 log10 log1p sin cos tan
    asin acos atan sinh cosh tanh asinh acosh atanh sigmoid logit floor ceil round trunc frac isnan
    isinf isfinite isposinf isneginf signbit logical_not bitwise_not lgamma deg2rad rad2deg
    nan_to_num sinc"""
ACTIVATIONS = """elu selu celu silu softplus softsign logsigmoid hardswish hardsigmoid hardshrink
    leaky_relu"""
BINARY = """add sub mul div floor_divide atan2 maximum minimum copysign eq ne lt le gt ge hypot pow
    logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor bitwise_left_shift
    bitwise_right_shift heaviside xlogy logaddexp"""
WHOLE_BINARY = ["fmod", "remainder"]  # torch's vector loop gives NaN for great quotients of floats
OF_NUMBERS = """add sub mul div floor_divide pow eq lt ge clamp_min clamp_max bitwise_left_shift
    bitwise_right_shift"""
NUMBERS: tuple[int | float, ...] = (2, -3, 7, 0.5, 0.1)
TYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
# A result, and what it may be off by relative to eager's, whose functions err too.
NEAR = {torch.float32: 2e-6, torch.float64: 1e-12, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
# Torch's clamp takes the sign of a zero from x, lenz's gives that of the bound.
OTHER = {"clamp_min", "clamp_max"}


def values(dtype: torch.dtype) -> Tensor:
    if dtype is torch.bool:
        return torch.tensor([False, True])
    if dtype.is_floating_point:
        return torch.tensor(FLOATS, dtype=torch.float64).to(dtype)
    limits = torch.iinfo(dtype)
    ends = (limits.min, limits.min + 1, limits.max, limits.max - 1)
    return torch.tensor([v for v in (*WHOLE, *ends) if limits.min <= v <= limits.max], dtype=dtype)


def pairs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """All pairs; those at which integer division of C traps are left out."""
    x, y = torch.cartesian_prod(values(dtype), values(dtype)).unbind(1)
    if not dtype.is_floating_point and dtype is not torch.bool:
        works = (y != 0) & ~((x == torch.iinfo(dtype).min) & (y == -1))
        x, y = x[works], y[works]
    return x.contiguous(), y.contiguous()


def ops_of(dtype: torch.dtype) -> dict[str, tuple[Fn, tuple[Tensor, ...]]]:
    """The ops that eager has for a type, with the operands to try them on."""
    one, two = (values(dtype),), pairs(dtype)
    found: dict[str, tuple[Fn, tuple[Tensor, ...]]] = {}
    found |= {name: (getattr(torch, name), one) for name in UNARY.split()}
    found |= {name: (getattr(F, name), one) for name in ACTIVATIONS.split()}
    found |= {name: (getattr(torch, name), two) for name in BINARY.split()}
    if not dtype.is_floating_point:
        found |= {name: (getattr(torch, name), two) for name in WHOLE_BINARY}
    for s in NUMBERS:
        for name in OF_NUMBERS.split():
            found[f"{name} {s}"] = (lambda x, name=name, s=s: getattr(torch, name)(x, s), one)
    for mode in ("floor", "trunc"):
        found[f"div {mode}"] = (partial(torch.div, rounding_mode=mode), two)
    for to in TYPES:
        found[f"to {to}"] = (lambda x, to=to: x.to(to), one)

    def works(fn: Fn, xs: tuple[Tensor, ...]) -> bool:
        try:
            fn(*xs)
        except (RuntimeError, TypeError):
            return False
        return True

    return {k: (fn, xs) for k, (fn, xs) in found.items() if works(fn, xs)}


def wrong(name: str, got: Tensor, want: Tensor) -> Tensor:
    """Where a result is not eager's."""
    if not want.dtype.is_floating_point:
        return got != want
    near, tiny = NEAR[want.dtype], torch.finfo(want.dtype).smallest_normal
    off = (got.double() - want.double()).abs()
    same = (
        (got == want) | (got.isnan() & want.isnan()) | (off <= near * (want.double().abs() + tiny))
    )
    lost = (got == 0) & (want == 0) & (got.signbit() != want.signbit())
    return ~same | (lost & (name.split()[0] not in OTHER))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_edges(dtype: torch.dtype) -> None:
    cases = ops_of(dtype)

    def every(inputs: dict[str, tuple[Tensor, ...]]) -> dict[str, Any]:
        return {name: fn(*inputs[name]) for name, (fn, _) in cases.items()}

    inputs = {name: xs for name, (_, xs) in cases.items()}
    want = every(inputs)
    options: dict[str, Any] = {"emulate_rounding": dtype.itemsize == 2 and dtype.is_floating_point}
    got = torch.compile(every, backend="lenz", dynamic=False, options=options)(inputs)
    faults = []
    for name, (_, xs) in cases.items():
        assert got[name].dtype is want[name].dtype, name
        for k in wrong(name, got[name], want[name]).nonzero().flatten().tolist()[:3]:
            at = ", ".join(str(x[k].item()) for x in xs)
            faults.append(f"{name}({at}) = {got[name][k].item()}, not {want[name][k].item()}")
    assert not faults, "\n".join(faults)


def test_the_gradient_of_nothing_summed_over_columns() -> None:
    x, nothing = torch.randn(17, 1, 4, 1, requires_grad=True), torch.randn(0)
    run = torch.compile(torch.sub, backend="lenz", options={"on_error": "raise"})
    run(x, nothing, alpha=3).sum().backward()
    assert x.grad is not None and not x.grad.any()


@pytest.mark.parametrize("dtype", (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8))
def test_powers_of_integers_wrap(dtype: torch.dtype) -> None:
    """Odd and even numbers to exponents of all bits; below 0 only 1 and -1 have integers."""
    ends = torch.iinfo(dtype)
    few = torch.arange(max(ends.min, -9), 10, dtype=dtype)
    x = torch.tensor([ends.min, ends.max, ends.max // 3, ends.max - 1, *few])
    bits = [1 << k for k in range(ends.bits - 1)]
    y = torch.tensor([*bits, *(b - 1 for b in bits), ends.max, ends.max // 5, *few])
    agree(torch.pow, lambda: (x.to(dtype)[:, None], y.to(dtype)), tol=0.0)


def test_positions_that_wrap_in_their_type() -> None:
    """Beyond 127 they count from the end of the tensor; nothing before it is read or written."""

    def fn(x: Tensor, whole: Tensor) -> Tensor:
        i = torch.arange(300, dtype=torch.int8).long()
        y = x[i]
        x.index_put_((i,), x[i] + 1)
        return y

    agree(fn, lambda: ((whole := torch.arange(1000.0))[400:700], whole))


def test_comparisons_of_positions_beyond_their_type() -> None:
    """Integers wrap, and beyond 2^24 two neighbours are the same f32."""

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        short = torch.arange(300, dtype=torch.int8)
        near = torch.arange(2**24, 2**24 + 100, dtype=torch.float32)
        few = torch.arange(5, dtype=torch.uint8)[4:]
        y.masked_fill_(torch.arange(300, dtype=torch.uint8)[:, None] == few, 9.0)
        return (
            torch.where(short[:, None] < short[None, :], x, 0.0),
            torch.where(near[:, None] == near[None, :], x[:100, :100], 0.0),
        )

    agree(fn, lambda: (torch.ones(300, 300), torch.ones(300, 8)))
