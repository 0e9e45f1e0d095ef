"""Tensors of many dimensions on a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.e2e.sides import agree
from tests.e2e.test_ranks import PROGRAMS, alternate


@pytest.mark.parametrize("rank", (16, 18, 64))
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in ("rows", "picked")])
def test_programs(name: str, rank: int, device: str) -> None:
    if name == "sorted" and rank > 25 and device == "cuda":
        pytest.skip("eager sorts tensors of at most 25 dimensions there")
    agree(PROGRAMS[name], lambda: [torch.randn(alternate(rank), device=device)])


@pytest.mark.parametrize("sizes", ((1,) * 64, (2,) * 18), ids=("ones", "twos"))
def test_ones_and_twos(sizes: tuple[int, ...], device: str) -> None:
    agree(PROGRAMS["elements"], lambda: [torch.randn(sizes, device=device)])
