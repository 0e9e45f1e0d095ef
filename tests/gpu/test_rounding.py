"""Half types on the GPU with `emulate_rounding`: to the bit as eager; so is f32 arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.e2e.test_rounding import CHAINS, HALVES, compiled, every, of_tensors, pairs, with_numbers

TYPES = (*HALVES, torch.float32)


def different(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, int]:
    """How many elements differ, by name; two NaN are equal."""
    found = {k: (got[k] != want[k]) & ~(got[k].isnan() & want[k].isnan()) for k in want}
    return {k: int(bad.sum()) for k, bad in found.items() if bad.any()}


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_single_ops(dtype: torch.dtype, device: str) -> None:
    x = every(dtype if dtype in HALVES else torch.float16).to(device, dtype)
    off = different(compiled(with_numbers, emulate_rounding=True)(x), with_numbers(x))
    if dtype in HALVES:
        # Torch rounds x // number to the half type before it sets right by one what it had.
        off = {k: n for k, n in off.items() if not k.startswith("floor")}
    assert not off, "elements that differ"
    xs = tuple(t.to(device) for t in pairs(dtype))
    off = different(compiled(of_tensors, emulate_rounding=True)(*xs), of_tensors(*xs))
    if device == "cpu":
        off.pop("sqrt", None)  # torch's own is off by 0.75 ulp there
    assert not off, "elements that differ"


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("chain", CHAINS, ids=lambda f: f.__name__)
def test_chains(chain: Callable[..., Tensor], dtype: torch.dtype, device: str) -> None:
    xs = tuple(t.clamp(-4, 4).to(device) for t in pairs(dtype))
    want, got = chain(*xs), compiled(chain, emulate_rounding=True)(*xs)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_lists(device: str) -> None:
    x, y = (torch.randn(9999, device=device) for _ in range(2))

    def fn(x: Tensor, y: Tensor) -> dict[str, Any]:
        return {
            "div": torch._foreach_div([x], 0.3)[0], "div list": torch._foreach_div([x], [0.3])[0],
            "addcmul": torch._foreach_addcmul([x], [y], [y], value=0.3)[0],
            "addcdiv": torch._foreach_addcdiv([x], [y], [y + 1], value=0.3)[0],
            "lerp": torch._foreach_lerp([x], [y], 0.3)[0],
            "add": torch._foreach_add([x], [y], alpha=0.3)[0],
        }  # fmt: skip

    assert not different(compiled(fn)(x, y), fn(x, y))


def test_quantities_of_8_bits_by_rows(device: str) -> None:
    def quantize(x: Tensor) -> dict[str, Tensor]:
        scale = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / 448.0
        y = (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        return {"numbers": y.view(torch.uint8), "scale": scale}

    x = torch.randn(4096, 4096, device=device).bfloat16()
    assert not different(compiled(quantize)(x), quantize(x))
