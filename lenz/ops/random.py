"""Counter-based random numbers: Philox 4x32-10, and uniform and normal numbers from its bits.

Philox turns a 128-bit counter and a 64-bit key into 128 random bits. It is defined in Salmon,
Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). Here the key is the
seed, the low half of the counter is the number of the element, and the high half is zero.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from lenz.ir.dtype import F32, F64, I64, U32, U64, DType
from lenz.ir.expr import Expr, const
from lenz.ir.op import Op, define
from lenz.ops import poly
from lenz.ops.arith import abs as magnitude
from lenz.ops.arith import add, mul, sqrt, sub
from lenz.ops.bits import or_, shl, shr, xor
from lenz.ops.cast import bitcast, cast
from lenz.ops.fold import apply
from lenz.ops.math import cos, log

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
Words = tuple[Expr, Expr, Expr, Expr]


def _multiply(x: Expr, factor: int) -> tuple[Expr, Expr]:
    """High and low word of the product of two u32."""
    product = mul(cast(x, U64), const(factor, U64))
    return cast(shr(product, const(32, U64)), U32), cast(product, U32)


def philox(counter: Words, key: tuple[Expr, Expr]) -> Words:
    """The four random words of a counter (lowest word first) and a key, all u32."""
    a, b, c, d = counter
    for i in range(_ROUNDS):
        k = [add(key[j], const(i * _WEYL[j], U32)) for j in (0, 1)]
        high_a, low_a = _multiply(a, _MULTIPLIERS[0])
        high_c, low_c = _multiply(c, _MULTIPLIERS[1])
        a, b, c, d = xor(xor(high_c, b), k[0]), low_c, xor(xor(high_a, d), k[1]), low_a
    return a, b, c, d


def _halves(x: Expr) -> tuple[Expr, Expr]:
    wide = bitcast(x, U64)
    return cast(wide, U32), cast(shr(wide, const(32, U64)), U32)


def _expand_bits(seed: Expr, counter: Expr, word: int) -> Expr:
    low, high = _halves(counter)
    zero = const(0, U32)
    return philox((low, high, zero, zero), _halves(seed))[word]


def philox_reference(counter: Any, key: Any) -> tuple[Any, Any, Any, Any]:
    """Philox on NumPy arrays of uint32: four counter words and two key words to four words."""
    a, b, c, d = (np.asarray(x, dtype=np.uint32) for x in counter)
    k0, k1 = (np.asarray(x, dtype=np.uint64) for x in key)
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    for i in range(_ROUNDS):
        p = a.astype(np.uint64) * np.uint64(_MULTIPLIERS[0])
        q = c.astype(np.uint64) * np.uint64(_MULTIPLIERS[1])
        bumped0 = (k0 + np.uint64(i * _WEYL[0])) & low
        bumped1 = (k1 + np.uint64(i * _WEYL[1])) & low
        words = ((q >> half) ^ b ^ bumped0, q & low, (p >> half) ^ d ^ bumped1, p & low)
        a, b, c, d = (w.astype(np.uint32) for w in words)
    return a, b, c, d


def _eager_bits(seed: torch.Tensor, counter: torch.Tensor, word: int) -> torch.Tensor:
    s, n = (np.asarray(x.numpy()).astype(np.int64).view(np.uint64) for x in (seed, counter))
    mask, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    s, n = np.broadcast_arrays(s, n)
    zero = np.zeros(n.shape, dtype=np.uint32)
    words = philox_reference((n & mask, n >> half, zero, zero), (s & mask, s >> half))
    return torch.from_numpy(np.asarray(words[word]))


def _bits_rule(args: tuple[DType, ...], attrs: tuple[Any, ...]) -> DType:
    if args != (I64, I64):
        raise TypeError(f"rand_bits needs (i64 seed, i64 counter), got {args}")
    if len(attrs) != 1 or attrs[0] not in (0, 1, 2, 3):
        raise TypeError(f"rand_bits needs the number of a word, 0 to 3, got {attrs}")
    return U32


# attrs (word,): which of the four words of the block
RAND_BITS = define(Op("rand_bits", 2, _bits_rule, _eager_bits, expand=_expand_bits, cost=100.0))


def rand_bits(seed: Expr, counter: Expr, word: int = 0) -> Expr:
    """32 random bits as u32: one of the four words of the block of (seed, counter), both i64."""
    return apply(RAND_BITS, seed, counter, attrs=(word,))


def unit_f32(bits: Expr) -> Expr:
    """The upper 24 bits of a u32 as an f32 in [0, 1)."""
    return mul(cast(shr(bits, const(8, U32)), F32), const(2.0**-24, F32))


def unit_f64(high: Expr, low: Expr) -> Expr:
    """The upper 53 bits of two u32 as an f64 in [0, 1)."""
    whole = or_(shl(cast(high, U64), const(32, U64)), cast(low, U64))
    return mul(cast(shr(whole, const(11, U64)), F64), const(2.0**-53, F64))


def uniform(seed: Expr, counter: Expr, dtype: DType = F32) -> Expr:
    """A number of [0, 1), f32 or f64, evenly distributed."""
    first = rand_bits(seed, counter, 0)
    return unit_f32(first) if dtype is F32 else unit_f64(first, rand_bits(seed, counter, 1))


def normal(seed: Expr, counter: Expr, dtype: DType = F32) -> Expr:
    """A number, f32 or f64, of the normal distribution with mean 0 and variance 1.

    sqrt(-2 log u) cos(2 pi v) for u in (0, 1] and v in [0, 1) (Box and Muller 1958).
    """
    words = [rand_bits(seed, counter, i) for i in range(4 if dtype is F64 else 2)]
    if dtype is F64:
        u, v = unit_f64(words[0], words[1]), unit_f64(words[2], words[3])
        wave = cos(mul(v, const(2.0 * math.pi, F64)))
    else:
        u, v = unit_f32(words[0]), unit_f32(words[1])
        # cos(2 pi v) = sin(2 pi (|v - 1/2| - 1/4)): no reduction of the angle is needed.
        turn = sub(magnitude(sub(v, const(0.5, F32))), const(0.25, F32))
        wave = poly.sin_reduced(mul(turn, const(2.0 * math.pi, F32)))
    step = const(2.0**-24 if dtype is F32 else 2.0**-53, dtype)
    radius = sqrt(mul(log(add(u, step)), const(-2.0, dtype)))
    return mul(radius, wave)


def below(seed: Expr, counter: Expr, count: Expr) -> Expr:
    """An i64 in [0, count), for 0 < count <= 2^32: the high word of bits * count.

    Values differ in probability by at most count / 2^64: 64 random bits are taken.
    """
    size = bitcast(count, U64)
    half = const(32, U64)
    first, second = (cast(rand_bits(seed, counter, i), U64) for i in (0, 1))
    # (first 2^32 + second) * count / 2^64 by the words of the product; neither sum overflows.
    upper = add(mul(first, size), shr(mul(second, size), half))
    return bitcast(shr(upper, half), I64)
