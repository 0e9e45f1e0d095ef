"""Samples of images at the points of a grid."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.lower.harness import check


@pytest.mark.diagonal(2)
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
