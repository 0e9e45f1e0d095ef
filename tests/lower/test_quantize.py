"""Fake quantization against eager: values, masks, ends, NaN, scales by tensor and by channel."""

from __future__ import annotations

import math

import pytest
import torch

from tests.lower.harness import check

aten = torch.ops.aten
X = torch.cat([torch.linspace(-9, 9, 61), torch.tensor([math.nan, math.inf, -math.inf])])
X = X.reshape(4, 16)
RANGE = (-8, 7)


@pytest.mark.parametrize("zero", (0, 3, -8))
def test_per_tensor(zero: int) -> None:
    for scale in (0.25, 0.1, 3.0):
        check(
            lambda x, s=scale: aten.fake_quantize_per_tensor_affine_cachemask(x, s, zero, *RANGE), X
        )
    check(lambda x: torch.fake_quantize_per_tensor_affine(x, 0.5, zero, *RANGE), X[:3])


@pytest.mark.parametrize("enabled", (0, 1))
def test_per_tensor_of_tensors(enabled: int) -> None:
    op = aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams
    given = (torch.tensor([0.3]), torch.tensor([2], dtype=torch.int32), torch.tensor([enabled]))
    check(lambda x, s, z, e: op(x, s, z, e, *RANGE), X, *given)


@pytest.mark.parametrize("axis", (0, 1))
def test_per_channel(axis: int) -> None:
    n = X.shape[axis]
    scale, zero = torch.linspace(0.1, 2, n), torch.arange(n, dtype=torch.int32) % 5 - 2
    op = aten.fake_quantize_per_channel_affine_cachemask
    # Infinity is beyond the integers that eager's CPU kernel goes through: it wraps there.
    check(lambda x, s, z: op(x, s, z, axis, *RANGE), X.nan_to_num(posinf=99.0), scale, zero)
