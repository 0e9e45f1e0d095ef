"""On a GPU: no op is farther from float64 than twice eager, and zeros have eager's signs."""

from __future__ import annotations

import pytest
import torch

from tests.e2e.accuracy import CASES, breaks, cells, ratios
from tests.e2e.test_signs import DTYPES, FAMILIES, assert_signs

LONG = ("sum", "norm 2", "logsumexp", "softmax", "cumsum", "cumprod", "logcumsumexp", "dot")


@pytest.mark.parametrize("name", CASES)
def test_no_op_is_farther_from_float64_than_twice_eager(name: str, device: str) -> None:
    lengths = (17, 4099, 1_000_000) if device != "cpu" else (17,)
    for _, form, n in cells((name,), lengths):
        for what, pair in zip(
            ("result", "gradient"),
            ratios(name, form, n, torch.float32, device, 8 if n < 10_000 else 4),
            strict=True,
        ):
            assert not breaks(*pair, torch.float32), f"{what} of {form} of {n}: {pair}"


@pytest.mark.parametrize("name", LONG)
def test_ten_million(name: str, cuda: str) -> None:
    for pair in ratios(name, "all", 10_000_000, torch.float32, cuda, 3):
        assert not breaks(*pair, torch.float32), pair


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_sign_of_zero_is_eagers(family: str, dtype: torch.dtype, device: str) -> None:
    assert_signs(family, dtype, device)
