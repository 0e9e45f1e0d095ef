"""Ops on lists of tensors against eager."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.lower.harness import check

A, B, C = torch.rand(2, 3) + 0.5, torch.rand(4) + 0.5, torch.rand(()) + 0.5
Fn = Callable[..., Any]

BINARY_NAMES = "add sub mul div maximum minimum clamp_min clamp_max pow"
UNARY_NAMES = (
    "abs neg sqrt rsqrt exp expm1 log log2 log10 log1p sin cos tan sinh cosh tanh erf floor "
    "ceil trunc round reciprocal sign frac sigmoid"
)
OPS: dict[str, Fn] = {
    **{
        f"{name}_{form}": (
            lambda name, other: lambda x, y: getattr(torch, name)(list(x), other(y))
        )(f"_foreach_{name}", other)
        for name in BINARY_NAMES.split()
        for form, other in {
            "list": lambda y: list(y),
            "scalar": lambda y: 2,
            "scalars": lambda y: [2, 0.5, 3],
        }.items()
    },
    "add_alpha": lambda x, y: torch._foreach_add(list(x), list(y), alpha=3),
    "sub_alpha": lambda x, y: torch._foreach_sub(list(x), list(y), alpha=0.5),
    "mul_tensor": lambda x, y: torch._foreach_mul(list(x), y[2]),
    "add_tensor": lambda x, y: torch._foreach_add(list(x), y[2], alpha=2),
    "div_tensor": lambda x, y: torch._foreach_div(list(x), y[2]),
    "addcmul": lambda x, y: torch._foreach_addcmul(list(x), list(y), list(x), 0.5),
    "addcdiv": lambda x, y: torch._foreach_addcdiv(list(x), list(y), list(x), value=-0.1),
    "addcdiv_list": lambda x, y: torch._foreach_addcdiv(list(x), list(y), list(x), [1, 2, 0.5]),
    "lerp": lambda x, y: torch._foreach_lerp(list(x), list(y), 0.3),
    "lerp_list": lambda x, y: torch._foreach_lerp(list(x), list(y), list(x)),
    "lerp_scalars": lambda x, y: torch._foreach_lerp(list(x), list(y), [0.1, 0.7, 0.5]),
    "norm": lambda x, y: torch._foreach_norm(list(x)),
    "norm_1": lambda x, y: torch._foreach_norm(list(x), 1),
    "norm_inf": lambda x, y: torch._foreach_norm(list(x), float("inf")),
    **{
        name: (lambda f: lambda x, y: f(list(x)))(getattr(torch, f"_foreach_{name}"))
        for name in UNARY_NAMES.split()
    },
}


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16), ids=str)
def test_every_op(dtype: torch.dtype) -> None:
    def fn(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> list[Any]:
        return [of((a, b, c), (a + 1, b * 2, c + 0.25)) for of in OPS.values()]

    names = [f"{name}[{k}]" for name in OPS for k in range(3)]
    check(fn, A.to(dtype), B.to(dtype), C.to(dtype), names=names)


def test_adam_step_in_place() -> None:
    def step(p: torch.Tensor, q: torch.Tensor, m: torch.Tensor, n: torch.Tensor) -> None:
        params, moments, grads = [p, q], [m, n], [p * 2, q - 1]
        torch._foreach_lerp_(moments, grads, 0.1)
        torch._foreach_mul_(moments, 0.9)
        denominator = torch._foreach_sqrt(torch._foreach_mul(grads, grads))
        torch._foreach_add_(denominator, 1e-8)
        torch._foreach_addcdiv_(params, moments, denominator, value=-0.01)

    check(step, A.clone(), B.clone(), A * 0, B * 0)


def test_copy_converts() -> None:
    def fn(a: torch.Tensor, b: torch.Tensor) -> None:
        torch._foreach_copy_([a, b], [a + 0.5, b.double() * 2])

    check(fn, A.bfloat16(), B)


def test_a_number_to_the_powers_of_lists() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        steps = [
            torch.tensor(3.0, dtype=dtype),
            torch.randn(4, 2).to(dtype),
            torch.ones(1).to(dtype),
        ]
        check(lambda *xs: torch._foreach_pow(0.999, xs), *steps)
        check(lambda *xs: torch._foreach_pow(2, xs), *steps)


def test_roots_of_negative_numbers_are_those_of_pow() -> None:
    x = torch.tensor([-math.inf, -0.0, 4.0])
    for dtype in (torch.float32, torch.float16):
        check(lambda x: [torch._foreach_pow([x], y) for y in (0.5, -0.5, 2, 3)], x.to(dtype))
