"""Pointwise ops against eager: types, promotion, broadcasting, special values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.lower.harness import check

aten = torch.ops.aten
Fn = Callable[..., Any]
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 3.0, -3.0, 2.5, 6.0, 30.0, -30.0]
ODD = [math.nan, math.inf, -math.inf]


def floats(dtype: torch.dtype, *shape: int, low: float = -3.0, high: float = 3.0) -> torch.Tensor:
    """Numbers spread evenly over an interval, in an order without pattern."""
    n = math.prod(shape)
    generator = torch.Generator().manual_seed(n)
    order = torch.randperm(n, generator=generator)
    return torch.linspace(low, high, max(n, 2))[:n][order].reshape(shape).to(dtype)


def special(dtype: torch.dtype) -> torch.Tensor:
    """Zeros of both signs, points where activations bend, NaN and infinities."""
    return torch.tensor(SPECIAL + ODD).to(dtype)


def ints(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Small integers, negative ones where the type has them."""
    low = 0 if dtype is torch.uint8 else -7
    generator = torch.Generator().manual_seed(5)
    return torch.randint(low, 9, shape, generator=generator).to(dtype)


UNARY_NAMES = (
    "neg abs exp exp2 expm1 sigmoid tanh sin cos tan atan erf sinh cosh asinh sign floor ceil "
    "trunc round frac square deg2rad rad2deg relu isnan isinf isfinite signbit isposinf "
    "isneginf logical_not nan_to_num sinc positive"
)
UNARY: dict[str, Fn] = {name: getattr(torch, name) for name in UNARY_NAMES.split()}
POSITIVE = {
    name: getattr(torch, name)
    for name in ["log", "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal", "acosh", "logit"]
}
ACTIVATIONS: dict[str, Fn] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu6": F.relu6,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "hardtanh": lambda x: F.hardtanh(x, -0.5, 2.5),
    "hardshrink": F.hardshrink,
    "softshrink": F.softshrink,
    "tanhshrink": F.tanhshrink,
    "elu": lambda x: F.elu(x, 1.5),
    "selu": F.selu,
    "celu": lambda x: F.celu(x, 0.7),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "softplus": lambda x: F.softplus(x, 2.0, 5.0),
    "mish": F.mish,
    "logsigmoid": F.logsigmoid,
    "softsign": F.softsign,
    "threshold": lambda x: F.threshold(x, 0.5, 20.0),
}


def check_all(table: dict[str, Fn], *inputs: Any, lacks: Sequence[str] = ()) -> None:
    """Check every function of a table that eager computes on these inputs, in one graph."""
    names = [name for name in table if name not in lacks and takes(table[name], *inputs)]
    check(lambda *xs: [table[name](*xs) for name in names], *inputs, names=names)


def takes(fn: Fn, *inputs: Any) -> bool:
    """Say whether eager computes the function on these inputs."""
    try:
        fn(*inputs)
    except (RuntimeError, TypeError):
        return False
    return True


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_functions_of_floats(dtype: torch.dtype) -> None:
    # The double reference of a trigonometric function takes the f32 argument for exact.
    check_all(UNARY, floats(dtype, 3, 5))
    check_all(UNARY, special(dtype), lacks=("sinc",))
    check_all(POSITIVE, floats(dtype, 3, 5, low=0.1, high=0.9))
    check_all(POSITIVE, special(dtype))
    check_all(ACTIVATIONS, floats(dtype, 3, 5, low=-7.0, high=7.0))
    check_all(ACTIVATIONS, special(dtype))


@pytest.mark.diagonal(2)
@pytest.mark.parametrize("dtype", (*INTS, torch.bool), ids=str)
def test_functions_of_integers(dtype: torch.dtype) -> None:
    check_all(UNARY | POSITIVE, ints(dtype, 4, 3))


BACKWARD: dict[str, Fn] = {
    "gelu": lambda g, x: aten.gelu_backward(g, x),
    "gelu_tanh": lambda g, x: aten.gelu_backward(g, x, approximate="tanh"),
    "silu": aten.silu_backward,
    "sigmoid": aten.sigmoid_backward,
    "tanh": aten.tanh_backward,
    "threshold": lambda g, x: aten.threshold_backward(g, x, 0.5),
    "relu": lambda g, x: aten.threshold_backward(g, x, 0),
    "hardtanh": lambda g, x: aten.hardtanh_backward(g, x, -0.5, 2.5),
    "hardsigmoid": aten.hardsigmoid_backward,
    "hardswish": aten.hardswish_backward,
    "hardshrink": lambda g, x: aten.hardshrink_backward(g, x, 0.5),
    "softshrink": lambda g, x: aten.softshrink_backward(g, x, 0.5),
    "leaky_relu": lambda g, x: aten.leaky_relu_backward(g, x, 0.2, False),
    "elu": lambda g, x: aten.elu_backward(g, 1.5, 1.1, 0.9, False, x),
    "elu_result": lambda g, x: aten.elu_backward(g, 1.5, 1.1, 0.9, True, x),
    "softplus": lambda g, x: aten.softplus_backward(g, x, 2.0, 5.0),
    "mish": aten.mish_backward,
    "log_sigmoid": lambda g, x: aten.log_sigmoid_backward(g, x, aten.log_sigmoid_forward(x)[1]),
}


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_activation_backward(dtype: torch.dtype) -> None:
    check_all(BACKWARD, floats(dtype, 3, 5), floats(dtype, 3, 5, low=-7.0, high=7.0))
    x = torch.tensor(SPECIAL).to(dtype)
    check_all(BACKWARD, torch.ones_like(x), x)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_logit_backward(dtype: torch.dtype) -> None:
    x = floats(dtype, 11, low=-0.5, high=1.5)
    check(lambda g, x: aten.logit_backward(g, x, 0.1), x, x)
    check(lambda g, x: aten.logit_backward(g, x, None), x, x)
    check(lambda g, x: aten.logit_backward(g, x, -1.0), x, x)
    check(lambda x: torch.logit(x, 0.1), x)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_glu_and_prelu(dtype: torch.dtype) -> None:
    x = floats(dtype, 4, 6)
    check(lambda x: F.glu(x, 0), x)
    check(lambda x: F.glu(x), x, dynamic=True)
    check(lambda g, x: aten.glu_backward(g, x, 1), floats(dtype, 4, 3), x)
    check(lambda g, x: aten.glu_backward(g, x, 0), floats(dtype, 2, 6), x)
    check(F.prelu, x, floats(dtype, 6))
    check(aten._prelu_kernel_backward.default, x, x, floats(dtype, 1, 6))


BINARY_NAMES = (
    "add sub rsub mul div floor_divide remainder fmod minimum maximum fmin fmax eq ne lt le "
    "gt ge logical_and logical_or logical_xor atan2 hypot copysign xlogy logaddexp logaddexp2 "
    "heaviside pow float_power true_divide nextafter ldexp bitwise_and bitwise_or bitwise_xor "
    "bitwise_left_shift bitwise_right_shift"
)
BINARY: dict[str, Fn] = {name: getattr(torch, name) for name in BINARY_NAMES.split()} | {
    "add_alpha": lambda x, y: torch.add(x, y, alpha=3),
    "sub_alpha": lambda x, y: torch.sub(x, y, alpha=2),
    "div_trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "div_floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
}
# Ops without a table entry: they stay calls of eager.
EAGER = ("nextafter",)
DIVISIONS = ("floor_divide", "remainder", "fmod", "div_trunc", "div_floor")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_binary_of_floats(dtype: torch.dtype) -> None:
    x, y = floats(dtype, 3, 5), floats(dtype, 5, low=0.3, high=4.0)
    check_all(BINARY, x, y, lacks=EAGER)
    check_all(BINARY, y, x, lacks=EAGER)
    s = special(dtype)
    check_all(BINARY, s[:, None], s, lacks=EAGER)


@pytest.mark.parametrize("dtype", (*INTS, torch.bool), ids=str)
def test_binary_of_integers(dtype: torch.dtype) -> None:
    x, y = ints(dtype, 4, 3), ints(dtype, 3)
    # A division by zero is an error in eager, a negative power too; bool powers stay in eager.
    lacks = ("pow",) if dtype is torch.bool else ()
    check_all(BINARY, x, torch.where(y <= 0, torch.ones_like(y), y % 4 + 1), lacks=lacks)
    check_all(BINARY, x, y, lacks=(*DIVISIONS, "pow"))


def test_binary_promotion() -> None:
    """Operands of two types, 0-d tensors and Python scalars."""
    f, h, n = floats(torch.float32, 3, low=0.5), floats(torch.bfloat16, 3), ints(torch.int64, 3)
    n = torch.where(n == 0, torch.ones_like(n), n)
    wide = torch.tensor(1.7, dtype=torch.float64)
    pairs: list[tuple[torch.Tensor, Any]] = [
        (f, h), (h, n), (n, f), (h, wide), (n, wide), (n, torch.tensor(2, dtype=torch.int32)),
        (n > 0, n), (n.to(torch.uint8), n.to(torch.int8)), (f, torch.tensor(True)),
    ]  # fmt: skip
    for x, y in pairs:
        check_all(BINARY, x, y, lacks=(*EAGER, "pow") if x.dtype is torch.bool else EAGER)
    for x in (f, h, n):
        for scalar in (2, 0.7, True, 3):
            by_scalar = {k: lambda x, f=f, s=scalar: f(x, s) for k, f in BINARY.items()}
            check_all(by_scalar, x, lacks=EAGER)


def test_comparison_rounds_the_scalar_as_eager_does() -> None:
    x = torch.tensor([0.1, 0.2]).bfloat16()
    check(lambda x: x == 0.1, x, exact=True)
    check(lambda x, y: x == y, x, torch.tensor(0.1), exact=True)
    few = torch.tensor(1e-50, dtype=torch.float64)  # 0 as bf16
    check(lambda x, y: (x.logical_and(y), x.logical_xor(y)), x, few, exact=True)


def test_rounding_to_more_decimals_than_a_double_has() -> None:
    """10 ** 309 raised OverflowError; eager's is infinite, which makes NaN of all numbers."""
    for decimals in (308, 309, -309, 2**31 - 1, -(2**31)):
        x = torch.tensor([0.0, 1.5, -1e30, math.inf, math.nan])
        for y in (x, x.double()):
            check(lambda x, d=decimals: x.round(decimals=d), y)


@pytest.mark.diagonal(2)
@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 4, 0.5, -0.5, -1, -2, 1.5, -3, 7])
@pytest.mark.parametrize("dtype", (*FLOATS, torch.int64, torch.int8), ids=str)
def test_pow_by_scalar(exponent: float, dtype: torch.dtype) -> None:
    if dtype.is_floating_point:
        check(lambda x: x**exponent, floats(dtype, 3, 4, low=0.2))
        check(lambda x: x**exponent, special(dtype))
        check(lambda x: 2.0**x, floats(dtype, 4))
    elif exponent >= 0:
        check(lambda x: x**exponent, ints(dtype, 5))


@pytest.mark.one_in(4)
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("exponents", [torch.int64, torch.int32, torch.int8, torch.uint8])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_ldexp_by_integers(dtype: torch.dtype, exponents: torch.dtype) -> None:
    """Exact, also where a power of two alone overflows, and where the result is denormal."""
    f = torch.finfo(dtype)
    top = int(math.log2(f.max))
    scales = 2.0 ** torch.randint(-top, top, (500,))
    some = torch.tensor([0.0, -0.0, math.inf, math.nan, f.tiny, f.max])
    x = torch.cat([torch.randn(500, dtype=torch.float64) * scales, some]).to(dtype)
    k = torch.randint(-3 * top, 3 * top, x.shape).to(exponents)
    run = torch.compile(torch.ldexp, backend="lenz")
    for a, b in ((x, k), (x[:9, None], k[:5]), (x, k[0]), (x[:, None], k[:, None].t())):
        want = torch.ldexp(a, b)
        torch.testing.assert_close(run(a, b), want, rtol=0, atol=0, equal_nan=True)


def test_parameters_at_their_edges() -> None:
    """A celu of infinite scale, and powers that are 0 in single precision alone."""
    x = torch.tensor([0.0, -0.0, 1.0, -1.0, -2.5, math.inf, -math.inf, math.nan])
    for fn in (
        lambda x: F.celu(x, math.inf), lambda x: F.celu(x, 0.3), lambda x: F.celu(x, math.nan),
        lambda x: x**1e-50, lambda x: x**-1e-46,
    ):  # fmt: skip
        torch._dynamo.reset()
        got = torch.compile(fn, backend="lenz")(x)
        torch.testing.assert_close(got, fn(x), equal_nan=True)


def test_integer_powers() -> None:
    x = torch.tensor([1, -1, 2, -3, 0])
    check(torch.pow, x[:, None], torch.tensor([0, 1, 2, 3, 40]))
    check(torch.pow, x[:4, None], torch.tensor([-1, -2, -3]))
    check(torch.pow, x[:3, None].to(torch.uint8), torch.tensor([0, 3, 9]).to(torch.uint8))
    check(lambda n: 3**n, torch.tensor([0, 1, 5]))


@pytest.mark.parametrize("dtype", (*FLOATS, torch.int64, torch.int8), ids=str)
def test_clamp(dtype: torch.dtype) -> None:
    x = special(dtype) if dtype.is_floating_point else ints(dtype, 6)
    check(lambda x: x.clamp(-1, 2), x)
    check(lambda x: x.clamp(min=1), x)
    check(lambda x: x.clamp(max=1), x)
    check(lambda x: x.clamp(3, 1), x)
    check(lambda x: x.clamp_min(0.5), x)
    check(lambda x: x.clamp_max(2), x)
    check(lambda x: x.clamp(x.flip(0), x + 1), x)
    check(lambda x: x.clamp_min(torch.tensor(1)), x)


@pytest.mark.diagonal(2)
@pytest.mark.parametrize("dtype", (*FLOATS, torch.int64), ids=str)
def test_addcmul_addcdiv_lerp(dtype: torch.dtype) -> None:
    x = floats(dtype, 2, 3) if dtype.is_floating_point else ints(dtype, 2, 3)
    y = x.flip(0) + 5
    check(lambda x, y: torch.addcmul(x, y, y[0], value=2), x, y)
    run = torch.compile(lambda x, y: x.clone().addcmul_(y, y[0], value=2), backend="lenz")
    torch.testing.assert_close(
        run(x, y), x.clone().addcmul_(y, y[0], value=2)
    )  # Dynamo makes it prims.fma
    if dtype.is_floating_point:
        check(lambda x, y: torch.addcdiv(x, x, y, value=0.5), x, y)
        check(lambda x, y: torch.lerp(x, y, 0.3), x, y)
        check(lambda x, y: torch.lerp(x, y, x), x, y)
        check(lambda x, y: torch.lerp(x, y, 0.9), x, y)


NATIVE = (*FLOATS, *INTS, torch.bool, torch.uint16, torch.uint32, torch.uint64)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("to", NATIVE, ids=str)
@pytest.mark.parametrize("frm", NATIVE, ids=str)
def test_conversions(frm: torch.dtype, to: torch.dtype) -> None:
    x = torch.tensor([0, 1, 2, 100, 127]).to(frm)
    check(lambda x: x.to(to), x, exact=True, native=frm is not to)
    check(lambda x: torch.ops.prims.convert_element_type(x, to), x, exact=True)


@pytest.mark.parametrize("dtype", NATIVE, ids=str)
def test_moving_elements(dtype: torch.dtype) -> None:
    x = torch.tensor([[0, 1, 2], [3, 0, 5]]).to(dtype)
    mask = torch.tensor([[True, False, True], [False, True, False]])
    check(lambda x: x.t().clone(), x, exact=True)
    check(lambda x: x.t().contiguous(), x, exact=True)
    check(lambda x: x.clone(memory_format=torch.contiguous_format), x.t(), exact=True)
    if dtype not in (torch.uint16, torch.uint32, torch.uint64):  # eager lacks them (where: to 2.11)
        check(lambda x, m: torch.where(m, x, x[:1]), x, mask, exact=True)
        check(lambda x, m: torch.where(m[0], x, 1), x, mask, exact=True)
        check(lambda x, m: x.masked_fill(m, 1), x, mask, exact=True)
        check(lambda x, m: x.masked_fill(m[:, :1], x[0, 1]), x, mask, exact=True)
    check(lambda x: torch.ops.aten.fill(x, 1), x, exact=True)
    check(lambda x: torch.ops.aten.fill(x, x[0, 2]), x, exact=True)
    check(lambda x, y: torch.ops.aten.copy(x, y), x, torch.ones(3), exact=True)


def test_where_promotes() -> None:
    c = torch.tensor([True, False])
    check(lambda c, x: torch.where(c, x, 2.5), c, torch.tensor([1, 2]))
    check(lambda c, x: torch.where(c, 1, x), c, torch.tensor([1.0, 2.0]).half())
    check(lambda c, x, y: torch.where(c, x, y), c, torch.tensor([1, 2]), torch.tensor(0.5))
    check(lambda c: torch.where(c, 1.0, 2.0), c)


@pytest.mark.parametrize("dynamic", (False, True))
def test_mutation_of_inputs(dynamic: bool) -> None:
    x, y = floats(torch.float32, 3, 3), floats(torch.float32, 3)
    check(lambda x, y: x.add_(y).mul_(2), x, y, dynamic=dynamic)
    check(lambda x: x.copy_(x.t().clone()), x, dynamic=dynamic)
    check(lambda x, y: (x.copy_(y), y + 1)[1], x, y.double(), dynamic=dynamic)

    def swap(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        old = x.clone()
        x.copy_(y)
        y.copy_(old)
        return x + y

    check(swap, x, x.t() + 1, dynamic=dynamic)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 0, 3), (1, 3, 1)])
def test_shapes(shape: tuple[int, ...]) -> None:
    x = floats(torch.float32, *shape)
    check(lambda x: torch.sigmoid(x) + x, x)
    check(lambda x, y: x * y, x, torch.ones(1))
    check(lambda x, y: x - y, x, torch.tensor(2.0))


def test_broadcast_with_dynamic_sizes() -> None:
    x, y = floats(torch.float32, 4, 1, 3), floats(torch.float32, 5, 1)
    check(lambda x, y: x * y + x.shape[0], x, y, dynamic=True)
    check(lambda x, y: x / x.shape[2], x.transpose(0, 2), y, dynamic=True)


def test_fused_multiply_add() -> None:
    x, y, z = torch.randn(3, 4), torch.randn(4), torch.randn(3, 1)
    check(lambda x, y, z: torch.ops.prims.fma(x, y.expand(3, 4), z.expand(3, 4)), x, y, z)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_fractions_and_angles(dtype: torch.dtype) -> None:
    """frexp bit by bit, of denormal numbers too; angles of real numbers."""
    tiny = torch.finfo(dtype).tiny
    x = torch.cat([special(dtype), torch.tensor([tiny, -tiny / 2, tiny / 8, 3.0e4]).to(dtype)])
    check(torch.frexp, torch.cat([x, floats(dtype, 40)]), exact=True)
    check(torch.angle, x, exact=True)
    check(torch.angle, ints(torch.int64, 9))


def test_copies_and_products() -> None:
    x = floats(torch.float32, 4, 6)
    check(
        lambda x: (
            aten.view_copy(x.mT, [24]),
            aten.view_copy(x, [24]),
            aten.permute_copy(x, [1, 0]),
        ),
        x,
        exact=True,
    )
    check(lambda x: (aten.narrow_copy(x, 0, 1, 2), *aten.unbind_copy(x, 1)), x, exact=True)
    check(lambda x: torch.addr(x, x[:, 0], x[1], beta=0.5, alpha=2), x)
    check(lambda x: x.sum() + torch.tril_indices(4, 5, 1).sum() + torch.triu_indices(3, 4, -1), x)
