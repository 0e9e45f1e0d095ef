"""Further ops for expansions: scaling by powers of two, and rare calls of libm."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lenz.ir.dtype import BOOL, F32, F64, I32, DType
from lenz.ir.expr import Expr
from lenz.ir.op import Attrs, Op, Types, on
from lenz.ops.cast import bitcast
from lenz.ops.emission import SCALEF, Builder, Values
from lenz.ops.fold import apply, binary
from lenz.ops.rules import scale_rule

# The sum of this and a float of at most 2^22 has the nearest integer in its low bits.
_MAGIC, _MAGIC_BITS = 1.5 * 2.0**23, 0x4B400000


def _eager_scale(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    with np.errstate(over="ignore", under="ignore"):
        return torch.from_numpy(np.asarray(np.ldexp(x.numpy(), _whole(k).numpy())))


def _whole(k: torch.Tensor) -> torch.Tensor:
    return k.nan_to_num().clamp(-400.0, 400.0).int() if k.dtype.is_floating_point else k


def _expand_scale(x: Expr, k: Expr) -> Expr:
    """Two factors of half the exponent: only the last product rounds, so denormals round once."""
    if k.dtype is F32:
        k = bitcast(k + _MAGIC, I32) - _MAGIC_BITS
    as_int = k.dtype
    bias, place = (127, 23) if as_int is I32 else (1023, 52)

    def power(e: Expr) -> Expr:
        return bitcast((e + bias) << place, x.dtype)

    first = k >> 1
    return x * power(first) * power(k - first)


def _emit_scale(b: Builder, dtype: DType, args: Types, xs: Values, _: Attrs) -> Any:
    """One vscalefps with AVX512; ldexp would be a call per lane, 20 times slower."""
    x, k = xs
    as_int = args[1]
    if b.has("avx512f") and b.has("avx512dq"):
        if as_int is F32:
            return b.intrinsic(SCALEF, dtype, x, k)
        if as_int is not I32:
            k = b.convert("trunc", I32, as_int, k)
        return b.intrinsic("llvm.ldexp", dtype, x, k)
    if as_int is F32:
        shifted = b.binary("fadd", F32, k, _MAGIC)
        bits, as_int = b.convert("bitcast", I32, F32, shifted), I32
        k = b.binary("sub", I32, bits, _MAGIC_BITS)
    bias, place = (127, 23) if as_int is I32 else (1023, 52)

    def power(e: Any) -> Any:
        biased = b.binary("add", as_int, e, bias)
        bits = b.binary("shl", as_int, biased, place)
        return b.convert("bitcast", dtype, as_int, bits)

    first = b.binary("ashr", as_int, k, 1)
    half = b.binary("fmul", dtype, x, power(first))
    return b.binary("fmul", dtype, half, power(b.binary("sub", as_int, k, first)))


# x * 2^k; k is an integer, or an f32 with an integer value (or NaN if x is). Needs |k| <= 252 (2044
# for f64), and x * 2^(k/2) must be normal or exact; the expansions of exp and log ensure that.
SCALE = Op(
    "scale", 2, scale_rule, _eager_scale, expand=_expand_scale, forms=on(cpu=_emit_scale), cost=4.0
)

_LIBM = {"sin": torch.sin, "cos": torch.cos, "tan": torch.tan}


def _or_libm_rule(args: Types, attrs: Attrs) -> DType:
    if args[0] is not BOOL or args[1] not in (F32, F64) or args[1] is not args[2]:
        raise TypeError(f"or_libm needs (bool, T, T) with T f32 or f64, got {args}")
    if len(attrs) != 1 or attrs[0] not in _LIBM:
        raise TypeError(f"or_libm knows {sorted(_LIBM)}, got {attrs}")
    return args[1]


# or_libm(cond, x, fast): the C function of x where cond is true (rare), else `fast`.
OR_LIBM = Op(
    "or_libm",
    3,
    _or_libm_rule,
    lambda rare, x, fast, name: torch.where(rare, _LIBM[name](x.double()).to(x.dtype), fast),
    forms=on(
        cpu=lambda b, t, _, xs, attrs: b.rare(xs[0], t, xs[2], lambda: b.libm(attrs[0], t, xs[1])),
        cuda=lambda _, __, xs, attrs: f"tl.where({xs[0]}, libdevice.{attrs[0]}({xs[1]}), {xs[2]})",
    ),
)


scale = binary(SCALE, "x * 2^k for a moderate integer k, which may be an f32; see SCALE.")


def or_libm(name: str, cond: Expr, x: Expr, fast: Expr) -> Expr:
    """The C function `name` of x where cond is true (should be rare), else `fast`."""
    return apply(OR_LIBM, cond, x, fast, attrs=(name,))
