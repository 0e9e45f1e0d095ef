"""Random numbers: Philox by element number, under a seed drawn at each call.

The numbers differ from eager's, but `torch.manual_seed` determines them: the runtime draws the seed
from the default generator of the result's device ("lenz.seed": on devices other than the CPU it is
i64[2], a key and the first counter). Each op of a graph has its own seed.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

from lenz import ops
from lenz.ir.dtype import BOOL, F32, F64, I64, DType, compute_dtype
from lenz.ir.expr import Expr, const, index
from lenz.ir.graph import Named
from lenz.ir.tensor import TensorType, contiguous
from lenz.lower.builder import Decline, GraphBuilder, Index, Value
from lenz.lower.operand import Operand, element, parameter
from lenz.lower.registry import lowering
from lenz.lower.sort import first_keys, keys_for
from lenz.machines import runs_programs
from lenz.ops.random import below
from lenz.sym import ONE, ZERO, Sym, flatten, prove_le, sym

SEED = "lenz.seed"
REFUSED = "parameters that eager rejects, with its own error"
FINITE = 3.4028234663852886e38  # the largest f32
# A half type gets as many random bits as its significand has, so that all numbers stay below 1.
_BITS = {"f16": 11, "bf16": 8}
# Key, first counter, and element number.
Drawn = tuple[Expr, Expr, Expr]
Source = Callable[[Index], Drawn]


def seeded(b: GraphBuilder, type: TensorType) -> Source:
    """The seed, the first counter and the element numbers of a result; draws one seed."""
    drawn = TensorType(I64, type.device, contiguous((sym(2),)))
    where = () if type.device == "cpu" else (Named("device", type.device),)
    (seed,) = b.extern(SEED, where, outs=(drawn,), draws="key")
    assert isinstance(seed, Value)

    def source(i: Index) -> Drawn:
        key, start, number = seed.at((ZERO,)), seed.at((ONE,)), index(flatten(i, type.shape))
        if not runs_programs(type.device):  # on CPUs a shared counter takes 1.5 times as long
            return key, start + number, const(0, I64)
        return key, start, number

    return source


def unit(source: Drawn, t: DType) -> Expr:
    """A number in [0, 1) in the compute type of t, representable in t."""
    u = ops.uniform(*source, compute_dtype(t))
    if not t.is_half:
        return u
    steps = 2.0 ** _BITS[t.name]
    return ops.trunc(u * steps) * (1.0 / steps)


def check_own(b: GraphBuilder, generator: Any) -> None:
    """Decline a random op whose numbers must be eager's."""
    if generator is not None:
        raise Decline("a generator of the caller")
    if b.eager_random:
        raise Decline("the option eager_random asks for eager's numbers")


def _draw(b: GraphBuilder, generator: Any, fn: Callable[[Drawn, Index, DType], Expr]) -> Value:
    """One map of fn((seed, start, number), index, type) over the result."""
    check_own(b, generator)
    t = b.result.dtype
    source = seeded(b, b.result)
    return b.map(lambda i: fn(source(i), i, t))


@lowering("rand", "rand_like")
def rand(b: GraphBuilder, *_: Any, generator: Any = None, **__: Any) -> Value:
    """Uniform numbers in [0, 1)."""
    return _draw(b, generator, lambda s, i, t: unit(s, t))


@lowering("randn", "randn_like")
def randn(b: GraphBuilder, *_: Any, generator: Any = None, **__: Any) -> Value:
    """Normal numbers with mean 0 and variance 1."""
    return _draw(b, generator, lambda s, i, t: ops.normal(*s, compute_dtype(t)))


@lowering("randint.low", "randint.low_generator", "randint_like.low_dtype")
def randint(
    b: GraphBuilder, low: Any, high: Any, *rest: Any, generator: Any = None, **__: Any
) -> Value:
    """Integers in [low, high); the first argument of `randint_like` is ignored."""
    if isinstance(low, Value):
        low, high = high, rest[0]
    count = sym(high) - sym(low)
    if count.hi is None or count.hi > 2**32 or count.lo is None or count.lo < 1:
        raise Decline("a range of integers that may be empty or above 2^32")

    def fn(s: Drawn, i: Index, t: DType) -> Expr:
        return ops.cast(below(*s, index(count)) + index(sym(low)), compute_dtype(t))

    return _draw(b, generator, fn)


lowering("randint.default", "randint.generator")(lambda b, *args, **kw: randint(b, 0, *args, **kw))
lowering("randint_like.default")(lambda b, x, *args, **kw: randint(b, 0, *args, **kw))


def _given(x: Operand, i: Index, dtype: DType, most: float | None = None) -> Expr:
    """A `parameter` of a draw; a number has been checked before."""
    e = element(x, i, dtype)
    return parameter(e, x.device, most) if isinstance(x, Value) else e


@lowering("normal")
def normal(
    b: GraphBuilder, mean: Operand, std: Operand = 1.0, *_: Any, generator: Any = None, **__: Any
) -> Value:
    """Normal numbers; mean and deviation are numbers or tensors."""
    if isinstance(std, (int, float)) and not std >= 0:
        raise Decline(REFUSED)

    def fn(s: Drawn, i: Index, t: DType) -> Expr:
        return ops.normal(*s, compute_dtype(t)) * _given(std, i, t) + element(mean, i, t)

    return _draw(b, generator, fn)


# Normal numbers in the shape of x.
lowering("normal_functional")(lambda b, x, mean=0.0, *args, **kw: normal(b, mean, *args, **kw))


def _enter_draw(
    name: str, *defaults: float, fits: Callable[..., bool], of: Callable[..., Expr]
) -> None:
    """Register draws of(numbers, type, *parameters) in the shape of x, if the parameters fit."""

    @lowering(name)
    def lower_draw(b: GraphBuilder, x: Value, *given: float, generator: Any = None) -> Value:
        told = (*given, *defaults[len(given) :])
        if not fits(*told):
            raise Decline(REFUSED)
        return _draw(b, generator, lambda s, i, t: of(s, t, *told))


def uniform(s: Drawn, t: DType, low: float, high: float) -> Expr:
    """A number in [low, high)."""
    return unit(s, t) * (high - low) + low


def exponential(s: Drawn, t: DType, lambd: float = 1.0) -> Expr:
    """-log(u) / lambd for u in (0, 1); never 0, since samplers divide by it."""
    wide = compute_dtype(t)
    # For u = 0 the result is that of the middle of the step up to the next u.
    least = const(2.0**-54 if wide is F64 else 2.0**-24, wide)
    return ops.maximum(-ops.log1p(-ops.uniform(*s, wide)), least) * (1.0 / lambd)


def cauchy(s: Drawn, t: DType, median: float, sigma: float) -> Expr:
    """median + sigma tan(pi (u - 1/2)) for u in [0, 1)."""
    return ops.fma(ops.tan((ops.uniform(*s, compute_dtype(t)) - 0.5) * math.pi), sigma, median)


def log_normal(s: Drawn, t: DType, mean: float, std: float) -> Expr:
    """The exponential of a normal number."""
    return ops.exp(ops.fma(ops.normal(*s, compute_dtype(t)), std, mean))


def geometric(s: Drawn, t: DType, p: float) -> Expr:
    """Trials with probability p up to the first success: ceil(log(1 - u) / log(1 - p))."""
    wide = compute_dtype(t) if t.is_float else F64
    trials = ops.log1p(-ops.uniform(*s, wide)) * (1 / math.log1p(-p))
    return ops.cast(ops.maximum(ops.ceil(trials), 1.0), compute_dtype(t))


_enter_draw("uniform", 0.0, 1.0, fits=operator.le, of=uniform)
_enter_draw("exponential", 1.0, fits=lambda lambd: lambd > 0, of=exponential)
_enter_draw("cauchy", 0.0, 1.0, fits=lambda _, width: width > 0, of=cauchy)
_enter_draw("log_normal", 1.0, 2.0, fits=lambda _, width: width > 0, of=log_normal)
_enter_draw("geometric", fits=lambda p: 0 < p < 1, of=geometric)


@lowering("rrelu_with_noise_functional")
def rrelu(
    b: GraphBuilder,
    x: Value,
    noise: Value,
    lower: float = 0.125,
    upper: float = 1 / 3,
    training: bool = False,
    generator: Any = None,
) -> tuple[Value, Value]:
    """x times a factor drawn from [lower, upper) where x is not positive; and all factors."""
    out, drawn = b.kind(0), b.kind(1)
    if not training:

        def leaky(i: Index) -> Expr:
            e = x.compute(i)
            return ops.where(e > 0, e, e * ((lower + upper) / 2))

        return b.map(leaky, out), b.map(noise.at, drawn)
    check_own(b, generator)
    source = seeded(b, drawn)

    def factor(i: Index) -> Expr:
        e = x.compute(i)
        u = ops.fma(unit(source(i), x.dtype), upper - lower, lower)
        return ops.where(e <= 0, u, 1.0)

    factors = b.map(factor, drawn, "factors")
    return b.map(lambda i: x.compute(i) * factors.compute(i), out), factors


@lowering("bernoulli.default")
def bernoulli(b: GraphBuilder, p: Operand, generator: Any = None) -> Value:
    """1 with probability p, else 0."""
    if isinstance(p, (int, float)) and not 0 <= p <= 1:
        raise Decline(REFUSED)

    def fn(s: Drawn, i: Index, t: DType) -> Expr:
        wide = compute_dtype(p.dtype) if isinstance(p, Value) else F32
        return ops.cast(ops.uniform(*s, wide) < _given(p, i, wide, 1), compute_dtype(t))

    return _draw(b, generator, fn)


lowering("bernoulli.p", "bernoulli.Tensor")(lambda b, x, p=0.5, **kw: bernoulli(b, p, **kw))


@lowering("multinomial")
def multinomial(
    b: GraphBuilder, p: Value, count: int | Sym, replacement: bool = False, *, generator: Any = None
) -> Value:
    """Positions in a row drawn with probabilities p: those with the largest p / e, e exponential.

    Drawn without replacement (Efraimidis and Spirakis, 2006).
    """
    check_own(b, generator)
    if replacement and count != 1:
        raise Decline("draws with replacement, which eager finds in running sums")
    d, t = p.rank - 1, compute_dtype(p.dtype)
    keys = keys_for(t, p.shape[d], True, p.device, 1 << 24 if count == 1 else None)
    if not prove_le(count, p.shape[d]):
        raise Decline("more draws than there are positions, perhaps")
    source = seeded(b, b.temp(p.shape, I64))

    def key(i: Index) -> Expr:
        chance = parameter(p.compute(i), p.device, FINITE)
        return keys.of(chance / exponential(source(i), t), i[d])

    found = first_keys(b, p.shape, d, count, key, keys.type)

    def place(i: Index) -> Expr:
        e = found.at(i)
        if p.device != "cpu":
            return keys.place(e)
        none = ops.eq(keys.element(e), 0) & ops.eq(index(i[d]), 0)
        return ops.assert_not(none, keys.place(e), "assert_parameter")

    return b.map(place)


@lowering("native_dropout")
def native_dropout(b: GraphBuilder, x: Value, p: float, train: bool | None) -> tuple[Value, Value]:
    """x / (1 - p) where a uniform number is below 1 - p, else 0; and the mask."""
    out, mask = b.kind(0), b.kind(1)
    if train is False:
        return b.map(x.at, out), b.map(lambda i: const(True, BOOL), mask)
    if not 0 <= p <= 1:
        raise Decline(REFUSED)
    check_own(b, None)
    source = seeded(b, mask)
    keep = 1.0 - p
    kept = b.map(lambda i: ops.uniform(*source(i), F32) < keep, mask, "mask")

    def fn(i: Index) -> Expr:
        e = x.compute(i)
        factor = const(1.0 / keep if keep else 0.0, e.dtype)
        # A product, so that dropped NaN and infinities become NaN, as in eager.
        return e * ops.where(kept.at(i), factor, 0.0)

    return b.map(fn, out), kept
