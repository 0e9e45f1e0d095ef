"""Which product or quotient torch rounds differs between CPUs and GPUs; so do the lowerings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lenz.frontend.build import build
from lenz.ir.interp import interp
from tests.gpu_oracle import assert_function, lowered_there
from tests.lower.harness import evaluated, trace

N = 4096
THIRD, ONE = torch.tensor(0.3), torch.tensor(1.0)


def there(fn: Callable[..., Any], *xs: Tensor) -> Tensor:
    """What the graph that a GPU gets computes."""
    g = lowered_there(build(trace(fn, xs), [], "inference", "test"))
    out: Tensor = interp(g, list(xs), ()).outputs[0]
    return out


def numbers(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    x, y, z = torch.randn(3, N, generator=torch.Generator().manual_seed(0)).to(dtype)
    return x, y, z


def fma(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return (x.double() * y.double() + z.double()).float()


# name -> function, what a GPU gives (measured on an H200 with torch 2.11) in f32
FORMS: dict[str, tuple[Callable[..., Any], Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "div": (lambda x, y, z: x / 0.3, lambda x, y, z: x * (ONE / THIRD)),
    "div_list": (
        lambda x, y, z: torch._foreach_div([x], 0.3)[0],
        lambda x, y, z: x * (ONE / THIRD),
    ),
    "div_tensor": (lambda x, y, z: x / y, lambda x, y, z: x / y),
    "alpha": (lambda x, y, z: torch.add(x, y, alpha=0.3), lambda x, y, z: fma(THIRD, y, x)),
    "minus": (lambda x, y, z: torch.sub(x, y, alpha=0.3), lambda x, y, z: fma(-THIRD, y, x)),
    "alpha_list": (
        lambda x, y, z: torch._foreach_add([x], [y], alpha=0.3)[0],
        lambda x, y, z: fma(THIRD, y, x),
    ),
    "addcmul": (
        lambda x, y, z: torch.addcmul(x, y, z, value=0.3),
        lambda x, y, z: fma(THIRD, y * z, x),
    ),
    "addcdiv": (
        lambda x, y, z: torch.addcdiv(x, y, z, value=0.3),
        lambda x, y, z: fma(THIRD, y / z, x),
    ),
    "addcmul_list": (
        lambda x, y, z: torch._foreach_addcmul([x], [y], [z], value=0.3)[0],
        lambda x, y, z: fma(THIRD, y * z, x),
    ),
    "addcdiv_list": (
        lambda x, y, z: torch._foreach_addcdiv([x], [y], [z], value=0.3)[0],
        lambda x, y, z: fma(THIRD, y / z, x),
    ),
    "lerp": (lambda x, y, z: torch.lerp(x, y, 0.3), lambda x, y, z: fma(THIRD, y - x, x)),
    "lerp_list": (
        lambda x, y, z: torch._foreach_lerp([x], [y], 0.3)[0],
        lambda x, y, z: fma(THIRD, y - x, x),
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_sums_and_quotients(name: str) -> None:
    fn, on_gpu = FORMS[name]
    xs = numbers()
    assert torch.equal(there(fn, *xs), on_gpu(*xs)), "not what torch gives on a GPU"
    _, (here,) = evaluated(fn, *xs)
    assert torch.equal(here, fn(*xs)), "not what torch gives on a CPU"


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_numbers_beside_half_types(dtype: torch.dtype) -> None:
    """A number becomes a half first, except in products and quotients; on GPUs also in sums."""
    x = numbers(dtype)[0]
    half, f = THIRD.to(dtype).float(), x.float()
    sums: dict[str, tuple[Callable[[Tensor], Tensor], Tensor, Tensor]] = {
        "add": (lambda x: x + 0.3, f + half, f + THIRD),
        "rsub": (lambda x: 0.3 - x, half - f, THIRD - f),
        "mul": (lambda x: x * 0.3, f * THIRD, f * THIRD),
        "pow": (lambda x: x.abs() ** 0.3, f.abs() ** half, f.abs() ** half),
        "fmod": (lambda x: x.fmod(0.3), f.fmod(half), f.fmod(half)),
    }
    for name, (fn, cpu, gpu) in sums.items():
        _, (here,) = evaluated(fn, x)
        assert torch.equal(here, fn(x)) and torch.equal(here, cpu.to(dtype)), f"{name} on a CPU"
        assert torch.equal(there(fn, x), gpu.to(dtype)), f"{name} on a GPU"


def test_scalars_of_gpus_and_of_cpus() -> None:
    """A 0-d f32 tensor is rounded beside a half type on GPUs, and kept in products on CPUs."""
    x = numbers(torch.bfloat16)[0]
    for fn in (lambda x, s: x * s, lambda x, s: x / s):
        assert torch.equal(there(fn, x, THIRD), fn(x.float(), THIRD.bfloat16()).bfloat16())
        _, (here,) = evaluated(fn, x, THIRD)
        assert torch.equal(here, fn(x, THIRD)) and torch.equal(
            here, fn(x.float(), THIRD).bfloat16()
        )


def test_quotients_rounded_to_whole_numbers() -> None:
    """On a GPU torch.div(41.0, 41.0, rounding_mode="trunc") is 0; half types round before that."""

    def trunc(x: Tensor) -> Tensor:
        return torch.div(x, 41.0, rounding_mode="trunc")

    assert there(trunc, torch.tensor([41.0, 42.0])).tolist() == [0.0, 1.0]
    assert evaluated(trunc, torch.tensor([41.0, 42.0]))[1][0].tolist() == [1.0, 1.0]
    x, y, _ = numbers(torch.bfloat16)
    floor, quotient = (x.double() / y.double()).floor(), x.float() / y.float()
    assert torch.equal(there(lambda x, y: x // y, x, y), floor.bfloat16())
    fn: Callable[..., Any] = lambda x, y: torch.div(x, y, rounding_mode="trunc")
    assert torch.equal(there(fn, x, y), quotient.bfloat16().trunc())
    assert torch.equal(
        there(lambda x: x // 0.3, x), (x.double() / THIRD.double()).floor().bfloat16()
    )


def test_quantities_of_8_bits_by_rows() -> None:
    """x / (max / 448) is often a tie, which one unit in the last place of the divisor decides."""

    def quantize(x: Tensor) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / 448.0
        return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)

    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    scale = x.abs().amax(-1, keepdim=True).float() * (ONE / 448)
    want = (x.float() / scale).to(torch.float8_e4m3fn)
    assert (want.float() != quantize(x).float()).any(), "a division would do, so nothing is tested"
    assert torch.equal(there(quantize, x).float(), want.float())
    assert_function(quantize, x[:8])
