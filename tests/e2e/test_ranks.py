"""Tensors of many dimensions: any rank that torch takes, up to 64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.e2e.sides import agree, gradients_agree

Tensor = torch.Tensor


def alternate(rank: int, twos: int = 11) -> tuple[int, ...]:
    """Sizes 2 and 1, the twos spread over all the dimensions, the last one a 3."""
    step = max(1, rank // twos)
    return (*(2 if d % step == 0 and d // step < twos else 1 for d in range(rank - 1)), 3)


def turned(x: Tensor) -> Tensor:
    """The dimensions in the opposite order."""
    return x.permute(*reversed(range(x.dim())))


PROGRAMS: dict[str, Callable[[Tensor], Any]] = {
    "elements": lambda x: (x * 2 + 1).relu() - x.sum(-1, keepdim=True),
    "turned": lambda x: turned(x).exp() * 2 + turned(turned(x) + 1).contiguous().sum(),
    "rows": lambda x: (x.softmax(-1), x.amax(0), turned(x).cumsum(0)),
    "every other": lambda x: x.sum(tuple(range(0, x.dim(), 2))) + 1,
    "views": lambda x: (x.reshape(-1, 3)[1:] * 2, (x + 1).flatten(3), x[0].unsqueeze(2) - 1),
    "moved": lambda x: (torch.cat([x, -x], 0), x.roll(1, -1), x.flip(0, -1) + 1),
    "picked": lambda x: (x.index_select(-1, torch.tensor([2, 0])), x[..., [1, 1]] * 2, x[[1]] + 1),
    "scattered": lambda x: torch.zeros_like(x).scatter_add(0, x.gt(0).long(), x) + 1,
    "gathered": lambda x: x.gather(0, x.gt(0).long()) * 2,
    "sorted": lambda x: x.sort(-1)[0] + 1,
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", PROGRAMS)
def test_more_dimensions_than_letters(name: str) -> None:
    agree(PROGRAMS[name], lambda: [torch.randn(alternate(16))])


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "rows"])
def test_the_most_dimensions(name: str) -> None:
    # "rows" has a cumulative sum, whose own rule for fake tensors adds a dimension.
    agree(PROGRAMS[name], lambda: [torch.randn(alternate(64))])


@pytest.mark.parametrize("rank", (14, 15, 17))
def test_ranks_about_the_number_of_letters(rank: int) -> None:
    agree(PROGRAMS["turned"], lambda: [torch.randn(alternate(rank))])


@pytest.mark.parametrize("name", ("elements", "turned", "every other"))
def test_unknown_sizes(name: str) -> None:
    agree(PROGRAMS[name], lambda: [torch.randn(alternate(17))], dynamic=True)


@pytest.mark.parametrize("sizes", ((1,) * 64, (2,) * 18), ids=("ones", "twos"))
def test_ones_and_twos(sizes: tuple[int, ...]) -> None:
    agree(PROGRAMS["elements"], lambda: [torch.randn(sizes)])


def test_gradients() -> None:
    gradients_agree(
        lambda x: turned(x).softmax(0) * x.sum(0).exp().mean(),
        lambda: [torch.randn(alternate(17), requires_grad=True)],
    )
