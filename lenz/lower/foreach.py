"""Ops on lists of tensors: one map per tensor, which fusion may run side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from lenz import ops
from lenz.ir.expr import Expr
from lenz.ir.op import op_named
from lenz.lower.arithmetic import div, power
from lenz.lower.builder import Decline, GraphBuilder, Index, Value, giving
from lenz.lower.operand import Operand, element
from lenz.lower.reduce import norm
from lenz.lower.registry import entry_for, lowering

Tensors = Sequence[Value]


def _each(b: GraphBuilder, one: Callable[[int], Value]) -> tuple[Value, ...]:
    """Call one(k) for the k-th result, as the lowering of an op with only that result."""
    return tuple(giving(b, (b.kind(k),), partial(one, k)) for k in range(len(b.results)))


def _pick(given: Any, k: int) -> Any:
    """The operand for the k-th tensor, from a list or shared by all."""
    return given[k] if isinstance(given, (list, tuple)) else given


def _enter(name: str) -> None:
    """Register the op `name` for each tensor of a list."""

    @lowering(f"_foreach_{name}")
    def lower_each(b: GraphBuilder, xs: Tensors, *others: Any, **named: Any) -> tuple[Value, ...]:
        entry = entry_for(f"aten.{name}.default")
        assert entry is not None
        lower = entry.fn
        return _each(b, lambda k: lower(b, xs[k], *(_pick(a, k) for a in others), **named))


for _name in (
    "add", "sub", "mul", "maximum", "minimum", "clamp_min", "clamp_max", "addcmul", "addcdiv",
    "lerp", "abs", "neg", "sqrt", "rsqrt", "exp", "expm1", "log", "log2", "log10", "log1p", "sin",
    "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "erf", "floor", "ceil", "trunc",
    "round", "reciprocal", "sign", "frac", "sigmoid", "zero", "clone", "copy",
):  # fmt: skip
    _enter(_name)


@lowering("_foreach_div")
def foreach_div(b: GraphBuilder, xs: Tensors, others: Any) -> tuple[Value, ...]:
    """Quotients; on GPUs eager multiplies by the reciprocal only of a number for all tensors."""

    def quotient(b: GraphBuilder, x: Value, y: Operand) -> Value:
        t = b.result.dtype
        return b.map(lambda i: element(x, i, t) / element(y, i, t, kept=True))

    fn = div if isinstance(others, (int, float)) else quotient
    return _each(b, lambda k: fn(b, xs[k], _pick(others, k)))


@lowering("_foreach_pow")
def foreach_pow(b: GraphBuilder, bases: Any, exponents: Any) -> tuple[Value, ...]:
    """Powers of floats, or of one number, as in Adam; on GPUs only squares have a short form."""
    if any(x.dtype.is_integer for x in (bases if isinstance(bases, list) else exponents)):
        raise Decline("integer powers of lists")

    def one(k: int) -> Value:
        t, pair = b.result.dtype, (_pick(bases, k), _pick(exponents, k))
        if b.result.device == "cpu":
            return power(b, *pair)

        def fn(i: Index) -> Expr:
            e, y = (element(v, i, t) for v in pair)
            return ops.square(e) if ops.is_value(y, 2.0) else ops.apply(op_named("pow"), e, y)

        return b.map(fn)

    return _each(b, one)


@lowering("_foreach_norm")
def foreach_norm(
    b: GraphBuilder, xs: Tensors, ord: int | float = 2, dtype: Any = None
) -> tuple[Value, ...]:
    """The 1-, 2- or infinity norm of each tensor."""
    if ord not in (1, 2, math.inf):
        raise Decline(f"norms of order {ord} of lists")
    return _each(b, lambda k: norm(b, xs[k], ord))
