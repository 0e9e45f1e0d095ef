"""Counter-based random numbers: Philox 2x32-10, with uniform and normal numbers from its bits.

Philox turns a two-word counter and a one-word key into two random 32-bit words. It is defined in
Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); with ten
rounds it passes BigCrush with three to spare. Here the key is the lower half of the seed, and the
counter is the number of the element with the upper half of the seed mixed into its upper word. One
multiplication per round gives two words; the four-word form needs two per round. If an element
needs one word, neighbours may share a counter (`shared_bits`): a GPU computes it once for both.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from lenz.ir.dtype import F32, F64, I64, U32, U64, DType
from lenz.ir.expr import Expr, const, index
from lenz.ir.op import INDEX, Attrs, Op, Types, on
from lenz.ops import poly
from lenz.ops.arith import ADD, mul, sqrt
from lenz.ops.arith import abs as magnitude
from lenz.ops.cast import CAST, bitcast, cast
from lenz.ops.compare import eq, where
from lenz.ops.emission import MUL_HIGH_NAME, MUL_LOW_NAME, intrinsic
from lenz.ops.fold import apply, binary
from lenz.ops.math import cos, log
from lenz.ops.rules import same

ROUNDS = 10
MULTIPLIER = 0xD256D193
WEYL = 0x9E3779B9
# Set in the counter's upper word for the third and fourth word of an element.
_SECOND_BLOCK = 0x80000000
Pair = tuple[Expr, Expr]


def _product(x: torch.Tensor, y: torch.Tensor) -> Any:
    return np.multiply(x.numpy(), y.numpy(), dtype=np.uint64)


def _words(x: Any) -> torch.Tensor:
    return torch.from_numpy(np.asarray(x).astype(np.uint32))


# The upper and the lower word of the product of two u32. On CPUs both come from the same products
# of even and odd lanes (vpmuludq). GPUs have one instruction for both, which the compiler uses for
# a 64-bit product, but not for two 32-bit ones.
_WIDE = "(tl.cast({0}, tl.uint64) * tl.cast({1}, tl.uint64))"
MUL_HIGH = Op(
    "mul_high",
    2,
    same((U32,)),
    lambda x, y: _words(_product(x, y) >> np.uint64(32)),
    expand=lambda x, y: cast((cast(x, U64) * cast(y, U64)) >> 32, U32),
    forms=on(cpu=intrinsic(MUL_HIGH_NAME), cuda=f"tl.cast({_WIDE} >> 32, tl.uint32)"),
    commutes=True,
    cost=2.0,
)
MUL_LOW = Op(
    "mul_low",
    2,
    same((U32,)),
    lambda x, y: _words(_product(x, y)),
    expand=mul,
    forms=on(cpu=intrinsic(MUL_LOW_NAME), cuda=f"tl.cast({_WIDE}, tl.uint32)"),
    commutes=True,
    cost=1.0,
)


mul_high = binary(MUL_HIGH, "The upper word of the 64-bit product of two u32.")
mul_low = binary(
    MUL_LOW, "The lower word of the product of two u32: like `mul`, but cheaper beside `mul_high`."
)


def philox(counter: Pair, key: Expr) -> Pair:
    """The two random words of a counter (lower word first) and a key, all u32."""
    a, b = counter
    factor = const(MULTIPLIER, U32)
    for i in range(ROUNDS):
        bumped = key + i * WEYL % 2**32
        a, b = mul_high(a, factor) ^ (b ^ bumped), mul_low(a, factor)
    return a, b


def _halves(x: Expr) -> Pair:
    """The lower and the upper word of an i64."""
    if x.op is ADD and any(_short(a) is not None for a in x.args):
        # A start plus an element number, with a carry, so that lanes stay 32 bits wide.
        start, number = x.args if _short(x.args[1]) is not None else (x.args[1], x.args[0])
        n = _short(number)
        assert n is not None
        low, high = _halves(start)
        total = low + n
        return total, high + cast(total < n, U32)
    wide = bitcast(x, U64)
    return cast(wide, U32), cast(wide >> 32, U32)


def _short(x: Expr) -> Expr | None:
    """An i64 as a u32, if it is index arithmetic that fits in 31 bits, or was a u32."""
    if x.op is CAST and x.args[0].dtype is U32:
        return x.args[0]
    if x.op is not INDEX or x.args:
        return None
    s = x.attrs[0]
    fits = s.lo is not None and s.lo >= 0 and s.hi is not None and s.hi < 2**31
    return index(s, U32) if fits else None


def _expand_bits(seed: Expr, counter: Expr, word: int) -> Expr:
    low, high = _halves(counter)
    key, mixed = _halves(seed)
    block = const(_SECOND_BLOCK if word >= 2 else 0, U32)
    return philox((low, high ^ (mixed ^ block)), key)[word % 2]


def philox_reference(counter: Any, key: Any) -> tuple[Any, Any]:
    """Philox on NumPy arrays of uint32: two counter words and the key to two words."""
    a, b = (np.asarray(x, dtype=np.uint32) for x in counter)
    k = np.asarray(key, dtype=np.uint64)
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    for i in range(ROUNDS):
        p = a.astype(np.uint64) * np.uint64(MULTIPLIER)
        bumped = (k + np.uint64(i * WEYL)) & low
        words = ((p >> half) ^ b ^ bumped, p & low)
        a, b = (w.astype(np.uint32) for w in words)
    return a, b


def _eager_bits(seed: torch.Tensor, counter: torch.Tensor, word: int) -> torch.Tensor:
    s, n = (np.asarray(x.numpy()).astype(np.int64).view(np.uint64) for x in (seed, counter))
    mask, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    s, n = np.broadcast_arrays(s, n)
    upper = (n >> half) ^ (s >> half) ^ np.uint64(_SECOND_BLOCK if word >= 2 else 0)
    return torch.from_numpy(np.asarray(philox_reference((n & mask, upper), s & mask)[word % 2]))


def _bits_rule(args: Types, attrs: Attrs) -> DType:
    if args != (I64, I64):
        raise TypeError(f"rand_bits needs (i64 seed, i64 counter), got {args}")
    if len(attrs) != 1 or attrs[0] not in (0, 1, 2, 3):
        raise TypeError(f"rand_bits needs the number of a word, 0 to 3, got {attrs}")
    return U32


# attrs (word,): which of the four words of an element
RAND_BITS = Op("rand_bits", 2, _bits_rule, _eager_bits, expand=_expand_bits, cost=60.0)


def rand_bits(seed: Expr, counter: Expr, word: int = 0) -> Expr:
    """32 random bits as u32: one of the four words of element `counter` under `seed`, both i64."""
    return apply(RAND_BITS, seed, counter, attrs=(word,))


def _eager_shared(seed: torch.Tensor, start: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    words = [_eager_bits(seed, start + (number >> 1), w).numpy() for w in (0, 1)]
    return torch.from_numpy(np.where(number.numpy() & 1, words[1], words[0]))


def _expand_shared(seed: Expr, start: Expr, number: Expr) -> Expr:
    if number.op is INDEX:
        s = number.attrs[0]
        half, odd = index(s // 2, I64, number.args), index(s % 2, I64, number.args)
    else:
        half, odd = number >> 1, number & 1
    counter = start + half
    words = [_expand_bits(seed, counter, w) for w in (0, 1)]
    return where(eq(odd, 0), words[0], words[1])


def _shared_rule(args: Types, attrs: Attrs) -> DType:
    if args != (I64, I64, I64) or attrs:
        raise TypeError(f"shared_bits needs (i64 seed, i64 start, i64 number), got {args}, {attrs}")
    return U32


# Word (number mod 2) of the counter start + number / 2.
SHARED_BITS = Op("shared_bits", 3, _shared_rule, _eager_shared, expand=_expand_shared, cost=60.0)


def shared_bits(seed: Expr, start: Expr, number: Expr) -> Expr:
    """32 random bits as u32 of element `number` >= 0; two neighbours share a counter."""
    return apply(SHARED_BITS, seed, start, number)


def unit_f32(bits: Expr) -> Expr:
    """The upper 24 bits of a u32 as an f32 in [0, 1)."""
    return cast(bits >> 8, F32) * 2.0**-24


def unit_f64(high: Expr, low: Expr) -> Expr:
    """The upper 53 bits of two u32 as an f64 in [0, 1)."""
    whole = (cast(high, U64) << 32) | cast(low, U64)
    return cast(whole >> 11, F64) * 2.0**-53


def uniform(seed: Expr, start: Expr, number: Expr, dtype: DType = F32) -> Expr:
    """A uniform number in [0, 1), f32 or f64, for element `number` counted from `start`."""
    if dtype is F32:
        return unit_f32(shared_bits(seed, start, number))
    counter = start + number
    return unit_f64(rand_bits(seed, counter, 0), rand_bits(seed, counter, 1))


def normal(seed: Expr, start: Expr, number: Expr, dtype: DType = F32) -> Expr:
    """A normal number, f32 or f64, with mean 0 and variance 1.

    sqrt(-2 log u) cos(2 pi v) for u in (0, 1] and v in [0, 1), in f32 with the sine for odd numbers
    (Box and Muller 1958): if a thread holds two neighbours, the compiler shares their counter and
    root.
    """
    if dtype is F64:
        words = [rand_bits(seed, start + number, i) for i in range(4)]
        u, v = unit_f64(words[0], words[1]), unit_f64(words[2], words[3])
        return _radius(u, 2.0**-53) * cos(v * (2.0 * math.pi))
    n = _short(number)
    counter = start + (number if n is None else cast(n >> 1, I64))
    u, v = (unit_f32(rand_bits(seed, counter, i)) for i in (0, 1))
    if n is not None:
        # sin(2 pi v) = cos(2 pi (v - 1/4)); all of these are multiples of 2^-24, and exact.
        quarter, zero, one = (const(x, F32) for x in (0.25, 0.0, 1.0))
        before = v - quarter + where(v < quarter, one, zero)
        v = where(eq(n & 1, 0), v, before)
    # cos(2 pi v) = sin(2 pi (|v - 1/2| - 1/4)): no reduction of the angle is needed.
    turn = magnitude(v - 0.5) - 0.25
    return _radius(u, 2.0**-24) * poly.sin_reduced(turn * (2.0 * math.pi))


def _radius(u: Expr, step: float) -> Expr:
    return sqrt(log(u + step) * -2.0)


def below(seed: Expr, start: Expr, number: Expr, count: Expr) -> Expr:
    """An i64 in [0, count), for 0 < count <= 2^32: the high word of bits * count.

    Probabilities differ by at most count / 2^64, since 64 random bits are used.
    """
    size = bitcast(count, U64)
    counter = start + number
    first, second = (cast(rand_bits(seed, counter, i), U64) for i in (0, 1))
    # (first 2^32 + second) * count / 2^64 by the words of the product; neither sum overflows.
    upper = first * size + ((second * size) >> 32)
    return bitcast(upper >> 32, I64)
