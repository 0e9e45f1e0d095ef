"""Kernels for GPUs of tensors of many dimensions, whose tiles have few."""

from __future__ import annotations

import pytest
import torch

from tests.e2e.test_ranks import PROGRAMS, alternate
from tests.gpu_oracle import assert_function, cubins


@pytest.mark.one_in(2)
@pytest.mark.parametrize("rank", (17, 60))  # the oracle takes a dimension more for a reduction
@pytest.mark.parametrize("name", ("elements", "turned", "every other", "gathered"))
def test_programs(name: str, rank: int) -> None:
    cubins(assert_function(PROGRAMS[name], torch.randn(alternate(rank, 8))))
