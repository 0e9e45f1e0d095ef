"""Remainders of floats are exact: their bits are those of C's fmod."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

BITS = {torch.float32: torch.int32, torch.float64: torch.int64}
EDGES = [0.0, -0.0, 1.0, -3.0, 1e-40, 1e30, float("inf"), -float("inf"), float("nan")]


def operands(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Any bits, numbers just below and above a multiple of the divisor, and edges by edges."""
    whole = torch.iinfo(BITS[dtype])
    any_bits = torch.randint(whole.min, whole.max, (2, 4096), dtype=BITS[dtype]).view(dtype)
    y = torch.randn(4096, dtype=dtype)
    x = y * torch.randint(1, 1 << 22, (4096,))
    near = torch.nextafter(x, torch.where(torch.arange(4096) % 2 == 0, 0.0, 2 * x))
    edges = torch.tensor(EDGES, dtype=dtype)
    rows = [any_bits[0], near, edges.repeat(len(EDGES))]
    return torch.cat(rows), torch.cat([any_bits[1], y, edges.repeat_interleave(len(EDGES))])


@pytest.mark.parametrize("dtype", BITS)
def test_fmod_has_the_bits_of_c(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, y = operands(dtype)
    got = torch.compile(torch.fmod, backend="lenz")(x, y)
    with np.errstate(invalid="ignore"):
        want = torch.from_numpy(np.fmod(x.numpy(), y.numpy()))
    same = got.view(BITS[dtype]) == want.view(BITS[dtype])
    assert (same | (got.isnan() & want.isnan())).all()
