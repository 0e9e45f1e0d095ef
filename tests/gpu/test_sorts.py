"""Sorts of rows on a card: eager's values, bits and places, in one kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import lenz

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
SHAPES = ((10000, 16), (300, 257), (64, 1024), (1, 1000))
DTYPES = (torch.float32, torch.bfloat16, torch.int32, torch.uint8)


def some(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Many equal elements, zeros of both signs, and a NaN."""
    if not dtype.is_floating_point:
        return torch.randint(0, 100, shape, device=device).to(dtype)
    x = (torch.randn(shape, device=device) * 8).round().to(dtype)
    x.view(-1)[5::97] = -0.0
    x.view(-1)[7], x.view(-1)[11] = float("nan"), float("-inf")
    return x


def compiled(fn: Callable[[Tensor], Any], x: Tensor) -> tuple[Any, list[str]]:
    torch._dynamo.reset()
    got = torch.compile(fn, backend="lenz", fullgraph=True)(x)
    (graph,) = lenz.explain(fn)(x).graphs
    assert not graph.externs
    return got, [k.kind for k in graph.kernels]


@pytest.mark.parametrize("dim", (-1, 0), ids=("rows", "columns"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_stable_sorts(device: str, dtype: torch.dtype, dim: int) -> None:
    for shape in SHAPES:
        x = some(shape if dim else shape[::-1], dtype, device)
        for falls in (False, True):

            def f(x: Tensor, falls: bool = falls) -> Any:
                return torch.sort(x, dim=dim, descending=falls, stable=True)

            (values, places), kinds = compiled(f, x)
            want = f(x)
            assert kinds == ["sort"]
            assert torch.equal(places, want[1])
            bits = BITS[x.element_size()]
            assert torch.equal(values.view(bits), want[0].view(bits))


@pytest.mark.parametrize("k", (1, 2, 8, 100))
def test_the_greatest_elements(device: str, k: int) -> None:
    x = some((500, 300), torch.float32, device)
    for largest in (True, False):
        (values, places), _ = compiled(
            lambda x, largest=largest: torch.topk(x, k, largest=largest), x
        )
        want = torch.topk(x, k, largest=largest)[0]
        assert torch.equal(values.nan_to_num(99), want.nan_to_num(99))
        assert torch.equal(x.gather(1, places).nan_to_num(99), values.nan_to_num(99))


def test_medians(device: str) -> None:
    x = some((500, 301), torch.float32, device)
    for fn in (torch.median, torch.nanmedian):
        (values, places), kinds = compiled(lambda x, fn=fn: fn(x, 1), x)
        assert kinds == ["sort"]
        assert torch.equal(values.nan_to_num(99), fn(x, 1)[0].nan_to_num(99))
        there = x.gather(1, places[:, None])[:, 0]
        assert torch.equal(there.nan_to_num(99), values.nan_to_num(99))
