"""Elementary functions: one entry per op, and a function that builds it.

In f32 most are expanded into simpler ops (`poly.py`); in f64 Sleef or the C math library is called.
Other types never get here: the lowering computes halves in f32 and converts integers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from lenz.ir.dtype import F32, F64
from lenz.ir.expr import Expr
from lenz.ir.op import Op, OpForm, Types, on
from lenz.ops import poly, units
from lenz.ops.arith import abs, copysign
from lenz.ops.compare import where
from lenz.ops.emission import library
from lenz.ops.fold import binary, unary
from lenz.ops.rules import float_op, same

_LARGEST = 3.4e38
_HALF_E = 1.3591409142295225


def _entry(name: str, also: str = "", arity: int = 1, **facts: Any) -> Op:
    """A function that torch has under its name, perhaps also under another; it takes integers."""
    aten = (name, also)[: 1 + bool(also)]
    return float_op(name, arity, aten=aten, promotion="int_to_float", **facts)


def _function(
    name: str,
    *,
    cost: float,
    domain: tuple[Any, ...],
    ulp: float,
    arity: int = 1,
    also: str = "",
    gpu: Callable[..., Expr] | None = None,
    on_gpu: Types | None = (F64,),
    ulp_gpu: float | None = None,
    expand: Callable[..., Expr] | None = None,
) -> Op:
    """A function with the same name in torch, `poly.py`, the C library and CUDA's libdevice.

    With `expand`, CPUs compute all types by it, and neither by `poly.py` nor by the C library.
    """
    forms = library(name, arity, (F64,))
    if expand:
        del forms["cpu"]
    forms["cuda"] = replace(forms["cuda"], types=on_gpu, expand=gpu, ulp=ulp_gpu)
    expand = expand or getattr(poly, name)
    return _entry(name, also, arity, expand=expand, forms=forms, cost=cost, domain=domain, ulp=ulp)


EXP = _function("exp", cost=10, domain=(-103.0, 88.7), ulp=1.5, gpu=units.exp, ulp_gpu=2.2)
EXP2 = _function(
    "exp2", cost=9, domain=(-149, 127.9), ulp=1.5, gpu=units.exp2, ulp_gpu=2.5, also="special_exp2"
)
EXPM1 = _function("expm1", cost=13, domain=(-20.0, 88.7), ulp=2.2, also="special_expm1")
LOG = _function("log", cost=16, domain=(1e-40, _LARGEST), ulp=1.5)
LOG2 = _function("log2", cost=18, domain=(1e-40, _LARGEST), ulp=2.2)
LOG10 = _function("log10", cost=18, domain=(1e-40, _LARGEST), ulp=2.2)
LOG1P = _function(
    "log1p", cost=24, domain=(-0.99999, 1e30), ulp=2.2, also="special_log1p", on_gpu=None
)
TANH = _function("tanh", cost=22, domain=(-10.0, 10.0), ulp=2.2, gpu=units.tanh, ulp_gpu=3.0)
ERF = _function("erf", cost=26, domain=(-5.0, 5.0), ulp=2.2, also="special_erf", gpu=units.erf)
ONE_PLUS_ERF = Op(
    "one_plus_erf",
    1,
    same((F32,)),
    lambda x: (torch.erf(x.double()) + 1.0).float(),
    expand=poly.one_plus_erf,
    forms=on(cuda=OpForm(expand=units.one_plus_erf, ulp=3.0)),
    cost=20,
    domain=(-1.0, 10.0),
    ulp=2.2,
    absolute=1.2e-7,
)
ERFC = _function(
    "erfc", cost=32, domain=(-5.0, 10.0), ulp=1.2, also="special_erfc", on_gpu=None, ulp_gpu=6.0
)
SIN = _function("sin", cost=12, domain=(-1e5, 1e5), ulp=2.2, on_gpu=None)
COS = _function("cos", cost=12, domain=(-1e5, 1e5), ulp=2.2, on_gpu=None)
# libdevice's errors are those of its manual.
TAN = _function("tan", cost=18, domain=(-1e5, 1e5), ulp=3.5, on_gpu=None, ulp_gpu=4.0)
ASIN = _function("asin", cost=17, domain=(-1.0, 1.0), ulp=2.5, also="arcsin")
ACOS = _function("acos", cost=18, domain=(-1.0, 1.0), ulp=2.5, also="arccos")
ATAN = _function("atan", cost=19, domain=(-100.0, 100.0), ulp=2.5, also="arctan")
ATAN2 = _function("atan2", cost=24, domain=(-10.0, 10.0), ulp=3.0, arity=2, also="arctan2")


def _expand_sinh(x: Expr) -> Expr:
    size = abs(x)
    # Where e^x overflows and the result may not, it is e^(x - 1) e/2.
    great = size > (88.0 if x.dtype is F32 else 709.0)
    t = expm1(where(great, size - 1.0, size))
    return copysign(where(great, t * _HALF_E, (t + t / (t + 1.0)) * 0.5), x)


def _expand_cosh(x: Expr) -> Expr:
    if x.dtype is F32:
        return poly.cosh(x)
    great = abs(x) > 709.0  # as above
    t = exp(where(great, abs(x) - 1.0, abs(x)))
    return where(great, t * _HALF_E, t * 0.5) + 0.5 / t


SINH = _function("sinh", cost=22, domain=(-89.0, 89.0), ulp=3.0, on_gpu=None, expand=_expand_sinh)
COSH = _function("cosh", cost=16, domain=(-89.0, 89.0), ulp=2.5, expand=_expand_cosh)
ASINH = _function("asinh", cost=60, domain=(-1e6, 1e6), ulp=3.5, also="arcsinh", on_gpu=None)
ACOSH = _function(
    "acosh", cost=60, domain=(1.0, 1e6), ulp=3.5, also="arccosh", on_gpu=None, ulp_gpu=4.0
)
ATANH = _function(
    "atanh", cost=32, domain=(-0.99999, 0.99999), ulp=3.5, also="arctanh", on_gpu=None
)


def _expand_sigmoid(x: Expr) -> Expr:
    return 1.0 / (1.0 + exp(-x))


def _expand_sigmoid_gpu(x: Expr) -> Expr:
    return units.sigmoid(x) if x.dtype is F32 else _expand_sigmoid(x)


SIGMOID = _entry(
    "sigmoid",
    "special_expit",
    expand=_expand_sigmoid,
    forms=on(cuda=OpForm(expand=_expand_sigmoid_gpu, ulp=4.0)),
    cost=17.0,
    domain=(-80.0, 80.0),
    ulp=2.5,
)
ERFINV = _entry(
    "erfinv",
    "special_erfinv",
    types=(F32,),
    expand=poly.erfinv,
    forms=on(cuda=OpForm("libdevice.erfinv({0})", ulp=4.0)),
    cost=48.0,
    domain=(-0.9999, 0.9999),
    ulp=1.0,
)
LGAMMA = _entry(
    "lgamma", "special_gammaln", forms=library("lgamma", 1), cost=150, domain=(0.01, 100.0), ulp=8
)
NEXTAFTER = float_op("nextafter", 2, forms=library("nextafter", 2), aten=("nextafter",), cost=30.0)


exp = unary(EXP, "e^x.")
exp2 = unary(EXP2, "2^x.")
expm1 = unary(EXPM1, "e^x - 1, exact near zero.")
log = unary(LOG, "The natural logarithm; -inf at zero, NaN below.")
log1p = unary(LOG1P, "log(1 + x), exact near zero.")
sigmoid = unary(SIGMOID, "1 / (1 + e^-x); 0 where e^-x overflows.")
tanh = unary(TANH, "The hyperbolic tangent.")
erf = unary(ERF, "The error function.")
one_plus_erf = unary(
    ONE_PLUS_ERF, "1 + erf(x) of an f32, to 1e-7 absolute, for the normal distribution."
)
erfinv = unary(ERFINV, "The inverse of erf, for f32; infinite at 1 and -1, NaN beyond.")
sin = unary(SIN, "The sine of an angle in radians.")
cos = unary(COS, "The cosine of an angle in radians.")
tan = unary(TAN, "The tangent of an angle in radians.")
atan2 = binary(ATAN2, "The angle of the point (x, y), in radians.")
sinh = unary(SINH, "The hyperbolic sine.")
cosh = unary(COSH, "The hyperbolic cosine.")
