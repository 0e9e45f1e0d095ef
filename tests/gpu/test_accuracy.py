"""On a GPU: no op is farther from float64 than twice eager, and zeros have eager's signs."""

from __future__ import annotations

import pytest
import torch

from tests.e2e.accuracy import CASES, breaks, cells, error, ratios
from tests.e2e.test_signs import DTYPES, FAMILIES, assert_signs

# torch before 2.13 traces the gradient of cumprod element by element: 400 of them take 10 s.
UNROLLS = torch.__version__ < "2.13"
LONG = ("sum", "norm 2", "logsumexp", "softmax", "cumsum", "cumprod", "logcumsumexp", "dot")


@pytest.mark.parametrize("name", CASES)
def test_no_op_is_farther_from_float64_than_twice_eager(name: str, device: str) -> None:
    is_short = device == "cpu" or (UNROLLS and name == "cumprod")
    lengths = (17,) if is_short else (17, 4099, 1_000_000)
    for _, form, n in cells((name,), lengths):
        for what, pair in zip(
            ("result", "gradient"),
            ratios(name, form, n, torch.float32, device, 8 if n < 10_000 else 4),
            strict=True,
        ):
            assert not breaks(*pair, torch.float32), f"{what} of {form} of {n}: {pair}"


def test_long_products(cuda: str) -> None:
    """Without the gradient, whatever torch makes of that."""
    for n in (4099, 10_000_000):
        torch._dynamo.reset()
        x = 1 + 1e-4 * torch.randn(n, generator=torch.Generator().manual_seed(n)).to(cuda)
        want = x.double().cumprod(0)
        got = torch.compile(lambda x: x.cumprod(0), backend="lenz")(x)
        pair = error(got, want), error(x.cumprod(0), want)
        assert not breaks(*pair, torch.float32), (n, pair)


@pytest.mark.parametrize("name", LONG)
def test_ten_million(name: str, cuda: str) -> None:
    if UNROLLS and name == "cumprod":
        pytest.skip("this torch traces each element of the gradient")
    for pair in ratios(name, "all", 10_000_000, torch.float32, cuda, 3):
        assert not breaks(*pair, torch.float32), pair


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_sign_of_zero_is_eagers(family: str, dtype: torch.dtype, device: str) -> None:
    assert_signs(family, dtype, device)
