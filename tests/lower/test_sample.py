"""Samples of images at the points of a grid: gradients that are asked for one by one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.lower.harness import check

aten = torch.ops.aten


@pytest.mark.parametrize("mode", (0, 1, 2))
def test_the_gradient_of_the_grid_alone(mode: int) -> None:
    """As in a spatial transformer, whose images want none."""
    x, grid = torch.randn(2, 3, 5, 6), torch.rand(2, 4, 4, 2) * 2 - 1

    def fn(g: torch.Tensor, x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        found = aten.grid_sampler_2d_backward(g, x, grid, mode, 0, False, [False, True])
        return found[1]  # type: ignore[no-any-return]  # torch's ops are untyped

    check(fn, torch.randn(2, 3, 4, 4), x, grid, tolerance=(1e-4, 1e-4))


@pytest.mark.parametrize("padding", ("zeros", "border", "reflection"))
@pytest.mark.parametrize("mode", ("bilinear", "nearest"))
def test_points_that_are_no_number_or_infinite(mode: str, padding: str) -> None:
    """They are outside; with padding of a kind that has no outside, at the last element."""
    x, grid = torch.randn(1, 2, 3, 4, 5), torch.randn(1, 3, 3, 3, 3) / 2
    for k, bad in enumerate((float("nan"), float("inf"), -float("inf"))):
        grid[0, k, :, k, k] = bad
    for align in (False, True):
        how = {"mode": mode, "padding_mode": padding, "align_corners": align}
        check(lambda x, g, h=how: F.grid_sample(x, g, **h), x, grid)  # type: ignore[misc]
