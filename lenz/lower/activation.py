"""Activations and their derivatives: one map each, in the compute type of the result.

The formulas, and the side each comparison falls on, are those of torch.nn.functional.
"""

from __future__ import annotations

import math

from lenz import ops
from lenz.ir.expr import Expr, Number, const, index
from lenz.lower.builder import GraphBuilder, Index, Value
from lenz.lower.dims import wrapped
from lenz.lower.operand import element, elementwise
from lenz.lower.registry import lowering
from lenz.sym import ZERO


@elementwise("relu6")
def relu6(x: Expr) -> Expr:
    """min(max(x, 0), 6), NaN kept."""
    return ops.minimum(ops.maximum(x, 0), 6)


@elementwise("gelu")
def gelu(x: Expr, approximate: str = "none") -> Expr:
    """x times the normal distribution function, or its tanh approximation."""
    half = x * 0.5
    if approximate == "tanh":
        return half * (ops.tanh(_gelu_inner(x)) + 1.0)
    return half * (ops.erf(x * math.sqrt(0.5)) + 1.0)


def _gelu_inner(x: Expr) -> Expr:
    return (x + ops.square(x) * x * 0.044715) * math.sqrt(2.0 / math.pi)


@elementwise("gelu_backward", tensors=2)
def gelu_backward(g: Expr, x: Expr, approximate: str = "none") -> Expr:
    """g * (cdf(x) + x * pdf(x)), or the derivative of the tanh form."""
    if approximate == "tanh":
        t = ops.tanh(_gelu_inner(x))
        inner = (ops.square(x) * (3.0 * 0.044715) + 1.0) * math.sqrt(2.0 / math.pi)
        steep = x * 0.5 * ((1.0 - ops.square(t)) * inner)
        return g * ((t + 1.0) * 0.5 + steep)
    cdf = (ops.erf(x * math.sqrt(0.5)) + 1.0) * 0.5
    pdf = ops.exp(ops.square(x) * -0.5) * (1.0 / math.sqrt(2.0 * math.pi))
    return g * (cdf + x * pdf)


@elementwise("silu_backward", tensors=2)
def silu_backward(g: Expr, x: Expr) -> Expr:
    """g * s * (1 + x * (1 - s)), s = sigmoid(x)."""
    s = ops.sigmoid(x)
    return g * s * (x * (1.0 - s) + 1.0)


@elementwise("logit_backward", tensors=2)
def logit_backward(g: Expr, x: Expr, eps: float | None = None) -> Expr:
    """g / (x * (1 - x)), 0 (or NaN without eps, or with a negative one) outside the domain."""
    low = max(eps or 0.0, 0.0)
    outside = (x < low) | (x > 1.0 - low)
    return ops.where(outside, math.nan if eps is None or eps < 0.0 else 0.0, g / (x * (1.0 - x)))


@elementwise("hardswish_backward", tensors=2)
def hardswish_backward(g: Expr, x: Expr) -> Expr:
    """g * (x / 3 + 1/2) in the bend, 0 below it, g above it."""
    bend = g * (x / 3.0 + 0.5)
    return ops.where(x <= -3.0, 0.0, ops.where(x >= 3.0, g, bend))


@elementwise("elu")
def elu(x: Expr, alpha: Number = 1, scale: Number = 1, input_scale: Number = 1) -> Expr:
    """scale * x above 0, scale * alpha * (exp(input_scale * x) - 1) below."""
    low = ops.expm1(x * input_scale) * (float(alpha) * float(scale))
    return ops.where(x < 0.0, low, x * scale)


@elementwise("softplus")
def softplus(x: Expr, beta: Number = 1, threshold: Number = 20) -> Expr:
    """log(1 + exp(beta * x)) / beta, x itself beyond the threshold."""
    z = x * beta
    soft = ops.log1p(ops.exp(z)) / beta
    return ops.where(z > threshold, x, soft)


def _mish_parts(x: Expr) -> tuple[Expr, Expr]:
    """e = exp(x), and n = (1 + e)^2 - 1: tanh(log(1 + e)) is n / (n + 2), which is 1 beyond 25."""
    e = ops.exp(ops.minimum(x, 25.0))
    return e, e * (e + 2.0)


@elementwise("mish_backward", tensors=2)
def mish_backward(g: Expr, x: Expr) -> Expr:
    """g * (t + x * sigmoid(x) * (1 - t^2)), t = tanh(softplus(x)), in terms of e = exp(x)."""
    e, n = _mish_parts(x)
    return g * (n / (n + 2.0) + x * (e * (e + 1.0) * 4.0 / ops.square(n + 2.0)))


# Formulas of one line. `y` is the result of the op whose gradient it is. Comparisons with NaN are
# false: so two gradients give 0 for it, as ATen's vectors do.
elementwise("relu")(lambda x: ops.maximum(x, 0))
elementwise("silu")(lambda x: x * ops.sigmoid(x))
elementwise("mish")(lambda x: x * ((n := _mish_parts(x)[1]) / (n + 2.0)))
elementwise("hardsigmoid")(lambda x: relu6(x + 3.0) / 6.0)
elementwise("hardswish")(lambda x: x * relu6(x + 3.0) / 6.0)
elementwise("hardtanh")(
    lambda x, min_val=-1, max_val=1: ops.minimum(ops.maximum(x, min_val), max_val)
)
elementwise("celu")(lambda x, alpha=1: elu(x, alpha, 1, 1 / float(alpha)))
elementwise("leaky_relu")(lambda x, negative_slope=0.01: ops.where(x > 0.0, x, x * negative_slope))
elementwise("_prelu_kernel", tensors=2)(lambda x, weight: ops.where(x > 0.0, x, weight * x))
elementwise("sigmoid_backward", tensors=2)(lambda g, y: g * (1.0 - y) * y)
elementwise("tanh_backward", tensors=2)(lambda g, y: g * (1.0 - ops.square(y)))
elementwise("threshold_backward", tensors=2)(
    lambda g, x, threshold: ops.where(x <= threshold, 0, g)
)
elementwise("hardtanh_backward", tensors=2)(
    lambda g, x, min_val, max_val: ops.where((x > min_val) & (x < max_val), g, 0)
)
elementwise("hardshrink_backward", "softshrink_backward", tensors=2)(
    lambda g, x, lambd: ops.where((x < -lambd) | (x > lambd), g, 0.0)
)
elementwise("leaky_relu_backward", tensors=2)(
    lambda g, x, negative_slope, is_result: ops.where(x > 0.0, g, g * negative_slope)
)


@lowering("log_sigmoid_forward")
def log_sigmoid(b: GraphBuilder, x: Value) -> tuple[Value, Value]:
    """min(x, 0) - log1p(exp(-|x|)), and exp(-|x|) for the derivative."""
    out, buffer = b.kind(0), b.kind(1)

    def fn(i: Index) -> Expr:
        e = element(x, i, out.dtype)
        return ops.minimum(e, 0.0) - ops.log1p(ops.exp(-abs(e)))

    def rest(i: Index) -> Expr:
        if len(i) != x.rank:  # an empty tensor, on devices that save nothing
            return const(0.0, buffer.dtype)
        return ops.exp(-abs(element(x, i, buffer.dtype)))

    return b.map(fn, out), b.map(rest, buffer)


@elementwise("log_sigmoid_backward", tensors=2)
def log_sigmoid_backward(g: Expr, x: Expr, buffer: Value) -> Expr:
    """g * sigmoid(-x), with exp(-|x|) recomputed."""
    z = ops.exp(-abs(x))
    return g * (ops.where(x < 0.0, 1.0, z) / (z + 1.0))


@lowering("glu")
def glu(b: GraphBuilder, x: Value, dim: int = -1) -> Value:
    """The first half along `dim` times the sigmoid of the second."""
    t = b.result.dtype
    d = wrapped(dim, x.rank)
    half = b.result.shape[d]

    def fn(i: Index) -> Expr:
        gate = (*i[:d], i[d] + half, *i[d + 1 :])
        return element(x, i, t) * ops.sigmoid(element(x, gate, t))

    return b.map(fn)


@lowering("glu_backward")
def glu_backward(b: GraphBuilder, g: Value, x: Value, dim: int) -> Value:
    """The gradients of both halves in one map."""
    t = b.result.dtype
    d = wrapped(dim, x.rank)
    half = g.shape[d]
    if half is ZERO:
        return b.map(lambda i: const(0.0, t))

    def fn(i: Index) -> Expr:
        first = (*i[:d], i[d] % half, *i[d + 1 :])
        gate = (*i[:d], i[d] % half + half, *i[d + 1 :])
        e = element(g, first, t)
        s = ops.sigmoid(element(x, gate, t))
        slope = element(x, first, t) * s * (1.0 - s)
        return ops.where(index(i[d]) < index(half), e * s, e * slope)

    return b.map(fn)
