"""Elementary functions of f32 on GPUs, by special function units for 2^x and 1/x.

The GPU's expansions in `math.py`; `poly.py` has the forms for machines without such units.
A unit's relative error is about 2^-23 (PTX ISA, ex2.approx and rcp.approx); arguments are reduced
so that the error of a function stays close to it. With exact units the forms are within 1.6 units
in the last place, sigmoid within 2.4; the bounds in `math.py` add the errors of both.
"""

from __future__ import annotations

import math

import torch

from lenz.ir.dtype import F32, I32
from lenz.ir.expr import Expr
from lenz.ir.op import Op, on
from lenz.ops import coefficients as c
from lenz.ops import poly
from lenz.ops.arith import abs, copysign, fma, maximum, minimum, mul, reciprocal
from lenz.ops.cast import bitcast
from lenz.ops.compare import where
from lenz.ops.fold import apply
from lenz.ops.poly import polynomial
from lenz.ops.rules import same

_LOG2_E = 1.0 / math.log(2.0)
# log2(e) = high + low, the high part in f32.
_LOG2_E_PARTS = (1.4426950216293335, _LOG2_E - 1.4426950216293335)
# Added to an f32 below 2^22: its nearest integer plus 127, the bias of exponents, in the low bits.
_BIASED = 1.5 * 2.0**23 + 127.0

# 2^x; 0 where the result is below 2^-126.
EXP2_UNIT = Op(
    "exp2_unit",
    1,
    same((F32,)),
    torch.exp2,
    expand=poly.exp2,
    forms=on(cuda="tl.exp2({0})"),
    cost=4.0,
    domain=(-125.9, 127.9),
    ulp=2.5,
)
# 1/x; 0 where the result is below 2^-126. Triton's own division never becomes this instruction.
RCP_UNIT = Op(
    "rcp_unit",
    1,
    same((F32,)),
    torch.reciprocal,
    expand=reciprocal,
    forms=on(
        cuda="tl.inline_asm_elementwise('rcp.approx.ftz.f32 $0, $1;', '=f,f', [{0}], tl.float32, "
        "is_pure=True, pack=1)"
    ),
    cost=4.0,
    domain=(1.0, 2.0**126),
    ulp=1.5,
)


def exp2(x: Expr) -> Expr:
    """2^x; the unit flushes denormals, so these are computed as the square of 2^(x/2)."""
    tiny = x < -126.0
    found = apply(EXP2_UNIT, where(tiny, x * 0.5, x))
    return where(tiny, found * found, found)


def _exp_factors(x: Expr, shift: int = 0) -> tuple[Expr, Expr]:
    """2^r and 2^(k + shift), k the integer nearest to x log2(e), clamped to valid exponents.

    If k is clamped, r is large, and the product overflows or becomes denormal as it should.
    """
    biased = _BIASED + shift
    n = fma(x, _LOG2_E_PARTS[0], biased)
    n = maximum(minimum(n, biased + 127.0), biased - 126.0 - shift)
    k = n - biased
    r = fma(x, _LOG2_E_PARTS[0], -k)
    r = fma(x, _LOG2_E_PARTS[1], r)
    return apply(EXP2_UNIT, r), bitcast(bitcast(n, I32) << 23, F32)


def exp(x: Expr) -> Expr:
    """e^x = 2^r 2^k."""
    return mul(*_exp_factors(x))


def sigmoid(x: Expr) -> Expr:
    """1 / (1 + e^-x); of a quarter of the divisor, whose reciprocal is never subnormal."""
    return apply(RCP_UNIT, fma(*_exp_factors(-x, -2), 0.25)) * 0.25


def tanh(x: Expr) -> Expr:
    """The hyperbolic tangent: a polynomial near zero, 1 - 2 / (e^2x + 1) beyond."""
    near = poly.odd_polynomial(c.TANH, x)
    power = apply(EXP2_UNIT, abs(x) * (2.0 * _LOG2_E))
    far = fma(apply(RCP_UNIT, power + 1.0), -2.0, 1.0)
    return copysign(where(abs(x) < 0.65, near, far), x)


def _erfc(y: Expr) -> Expr:
    """1 - erf(y) to 4e-8 absolute, for y >= 0."""
    return apply(EXP2_UNIT, y * polynomial(c.ERFC_LOG2, y))


def erf(x: Expr) -> Expr:
    """The error function."""
    s = x * x
    near = fma(polynomial(c.ERF, s), x, x)
    far = copysign(1.0 - _erfc(abs(x)), x)
    return where(abs(x) < 0.925, near, far)


def one_plus_erf(x: Expr) -> Expr:
    """1 + erf(x) to 1e-7 absolute."""
    tail = _erfc(abs(x))
    return where(x < 0.0, tail, 2.0 - tail)
