"""Ops on lists of tensors: one map per tensor, which fusion may run side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from lenz import ops
from lenz.ir.dtype import DType, compute_dtype
from lenz.ir.expr import Expr, const
from lenz.ir.op import op_named
from lenz.ir.tensor import TensorType
from lenz.lower.activation import sigmoid_of
from lenz.lower.arithmetic import frac, over
from lenz.lower.builder import Decline, GraphBuilder, Index, Value
from lenz.lower.dims import split
from lenz.lower.multiply_add import lerp_of, product_added, quotient_added
from lenz.lower.operand import Operand, element, exact, keeps
from lenz.lower.reduce import norm_over
from lenz.lower.registry import lowering
from lenz.sym import ONE, sym

Tensors = Sequence[Value]
# The second operand of an op on lists: a list of tensors or of numbers, or one of them for all.
Others: TypeAlias = "Tensors | Sequence[bool | int | float] | Operand"


def _pick(others: Others, k: int) -> Operand:
    """What stands beside the k-th tensor."""
    return others[k] if isinstance(others, (list, tuple)) else others  # type: ignore[return-value]  # a list is of operands


def _each(b: GraphBuilder, fn: Callable[[int, Index, DType], Expr]) -> tuple[Value, ...]:
    """One map of fn(number of the tensor, index, type) for each result."""

    def one(k: int, type: TensorType) -> Value:
        return b.map(lambda i: fn(k, i, type.dtype), type)

    return tuple(one(k, b.kind(k)) for k in range(len(b.results)))


def _binary(name: str, of: Callable[[Expr, Expr], Expr]) -> None:
    """Overloads List, Scalar, ScalarList and Tensor of one op; alpha scales the second operand."""

    def lower_binary(b: GraphBuilder, xs: Tensors, others: Others, *, alpha: Any = 1) -> Any:
        device = xs[0].device
        kept = keeps(name.removeprefix("_foreach_"), device, 1)

        def fn(k: int, i: Index, t: DType) -> Expr:
            x, y = element(xs[k], i, t), element(_pick(others, k), i, t, kept=kept)
            if of is ops.div:
                return over(x, y, others if isinstance(others, (int, float)) else xs[k], device)
            if alpha == 1:
                return of(x, y)
            factor = element(alpha if of is ops.add else -alpha, (), t, kept=kept)
            if x.dtype.is_float:
                return ops.fma(y, factor, x)
            return x + y * factor

        return _each(b, fn)

    lowering(name)(lower_binary)


for _name in ("add", "sub", "mul", "div", "maximum", "minimum"):
    _binary(f"_foreach_{_name}", getattr(ops, _name))
_binary("_foreach_clamp_min", ops.maximum)
_binary("_foreach_clamp_max", ops.minimum)


@lowering("_foreach_pow.Scalar", "_foreach_pow.List", "_foreach_pow.ScalarList")
def foreach_pow(b: GraphBuilder, xs: Tensors, exponents: Others) -> tuple[Value, ...]:
    """Powers of floats; squares are products."""
    if any(x.dtype.is_integer for x in xs):
        raise Decline("integer powers of lists")
    table = op_named("pow")

    def fn(k: int, i: Index, t: DType) -> Expr:
        e, y = element(xs[k], i, t), element(_pick(exponents, k), i, t)
        return ops.square(e) if ops.is_value(y, 2.0) else ops.apply(table, e, y)

    return _each(b, fn)


@lowering("_foreach_pow.ScalarAndTensor")
def foreach_power_of(b: GraphBuilder, base: Operand, xs: Tensors) -> tuple[Value, ...]:
    """One number to the power of each tensor of floats: the decay of Adam after its steps."""
    if any(x.dtype.is_integer for x in xs):
        raise Decline("integer powers of lists")
    table = op_named("pow")
    return _each(b, lambda k, i, t: ops.apply(table, element(base, i, t), element(xs[k], i, t)))


_UNARY = (
    "abs", "neg", "sqrt", "rsqrt", "exp", "expm1", "log", "log2", "log10", "log1p", "sin", "cos",
    "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "erf", "floor", "ceil", "trunc",
    "round", "reciprocal", "sign",
)  # fmt: skip


def _unary(name: str, of: Callable[[Expr], Expr]) -> None:
    def lower_unary(b: GraphBuilder, xs: Tensors) -> tuple[Value, ...]:
        return _each(b, lambda k, i, t: of(element(xs[k], i, t)))

    lowering(f"_foreach_{name}")(lower_unary)


for _name in _UNARY:
    _unary(_name, getattr(ops, _name))
_unary("frac", frac)
_unary("sigmoid", sigmoid_of)


lowering("_foreach_zero")(lambda b, xs: _each(b, lambda k, i, t: const(0, t)))
lowering("_foreach_clone")(lambda b, xs, **_: _each(b, lambda k, i, t: xs[k].at(i)))
lowering("_foreach_copy")(
    lambda b, xs, src, non_blocking=False: _each(b, lambda k, i, t: exact(src[k], i, t))
)


def _factor(scalars: Any, k: int, t: DType) -> Expr:
    """The k-th factor: of one number, of a list of numbers, or of a 1-d tensor."""
    if isinstance(scalars, Value):
        at = () if scalars.rank == 0 else (sym(0 if scalars.shape[0] is ONE else k),)
        return ops.cast(scalars.at(at), compute_dtype(t))
    value = scalars[k] if isinstance(scalars, (list, tuple)) else scalars
    return const(value, compute_dtype(t))


def _fused(name: str, of: Callable[..., Expr]) -> None:
    """of((x, y, z), factor, device), for numbers or a tensor of factors."""

    def lower_fused(
        b: GraphBuilder, xs: Tensors, ys: Tensors, zs: Tensors, value: Any = 1, **kw: Any
    ) -> tuple[Value, ...]:
        factors = kw.get("scalars", value)

        def fn(k: int, i: Index, t: DType) -> Expr:
            xyz = [element(v[k], i, t) for v in (xs, ys, zs)]
            return of(xyz, _factor(factors, k, t), xs[k].device)

        return _each(b, fn)

    lowering(name)(lower_fused)


_fused("_foreach_addcmul", product_added)
_fused("_foreach_addcdiv", quotient_added)


@lowering("_foreach_lerp")
def foreach_lerp(b: GraphBuilder, xs: Tensors, ends: Tensors, weights: Others) -> tuple[Value, ...]:
    """The points between each pair of tensors."""

    def fn(k: int, i: Index, t: DType) -> Expr:
        weight = element(_pick(weights, k), i, t, kept=True)
        return lerp_of(element(xs[k], i, t), element(ends[k], i, t), weight)

    return _each(b, fn)


@lowering("_foreach_norm")
def foreach_norm(
    b: GraphBuilder, xs: Tensors, ord: int | float = 2, dtype: Any = None
) -> tuple[Value, ...]:
    """The 1-, 2- or greatest-element norm of each tensor."""
    if ord not in (1, 2, math.inf):
        raise Decline(f"norms of order {ord} of lists")

    def one(x: Value, type: TensorType) -> Value:
        at = lambda i: element(x, i, type.dtype)
        return norm_over(b, ord, split(x.shape, None), False, at, type)

    return tuple(one(x, b.kind(k)) for k, x in enumerate(xs))
