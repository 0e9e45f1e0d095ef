"""Divisions by shared values: bit by bit what a division gives, but for denormal results."""

from __future__ import annotations

import math

import pytest
import torch

from lenz.ir.dtype import F32
from lenz.ir.expr import ref
from lenz.ir.interp_expr import evaluate_exprs
from lenz.machine.cuda.reciprocal import _shared, _stepped
from tests.gpu_oracle import assert_function, texts_of

SPECIAL = (0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 3.4e38, 1.2e-38, 1e-45, 3.0, 0.1)


def quotient(x: torch.Tensor, y: torch.Tensor, rough: bool = False) -> torch.Tensor:
    values = {"x": x, "y": y}
    e = _shared(ref("x", F32), ref("y", F32), rough)
    (found,) = evaluate_exprs((e,), {}, values.__getitem__, lambda e, at: (x, None))
    return found


def pairs() -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    bits = torch.randint(-(1 << 31), 1 << 31, (2, 400_000), generator=g)
    x, y = bits.to(torch.int32).view(torch.float32)
    near = torch.rand(2, 100_000, generator=g) + 0.5
    s = torch.tensor(SPECIAL)
    a, b = torch.cartesian_prod(s, s).unbind(1)
    return torch.cat([x, near[0], a]), torch.cat([y, near[1], b])


def test_a_shared_reciprocal_divides_to_the_bit() -> None:
    x, y = pairs()
    want, got = x / y, quotient(x, y)
    least = 2.0**-126
    # The residual is 2^-24 of x, and exact where that is normal, so for |x| >= 2^-102.
    normal = (want.abs() >= least) & (x.abs() >= 2.0**-102) & (y.abs() >= least)
    # The theorem leaves out divisors whose significand is all ones.
    normal &= (y.view(torch.int32) & 0x7FFFFF) != 0x7FFFFF
    assert int(normal.sum()) > 100_000
    assert torch.equal(got[normal], want[normal])
    special = want.isinf() | want.isnan()
    torch.testing.assert_close(got[special], want[special], rtol=0, atol=0, equal_nan=True)


def test_small_results_are_off_by_a_denormal_at_most() -> None:
    x, y = pairs()
    want, got = x / y, quotient(x, y)
    finite = want.isfinite()
    off = (got[finite].double() - want[finite].double()).abs()
    assert bool((off <= want[finite].double().abs() * 2.0**-22 + 2.0**-148).all())


def test_a_quotient_that_is_rounded_to_a_half_is_one_product() -> None:
    x, y = pairs()
    want, got = x / y, quotient(x, y, rough=True)
    finite = want.isfinite() & (want.abs() >= 2.0**-126)
    error = (got[finite].double() / want[finite].double() - 1).abs()
    assert float(error.max()) < 2.0**-22


def test_a_count_is_divided_by_to_the_bit_with_a_rough_reciprocal() -> None:
    """The unit's reciprocal is within 2 units in the last place."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(400_000, generator=g) * torch.logspace(-20, 20, 400_000, 2)
    y = torch.randint(1, (1 << 16) + 1, (400_000,), generator=g).float()
    y[:4000] = torch.arange(1, 4001)
    for off in (-2, -1, 0, 1, 2):
        r = ((1 / y).view(torch.int32) + off).view(torch.float32)
        values = {"x": x, "y": y, "r": r}
        e = _stepped(ref("x", F32), ref("y", F32), ref("r", F32), False)
        (found,) = evaluate_exprs((e,), {}, values.__getitem__, lambda e, at: (r, None))
        assert torch.equal(found, x / y)


def test_the_quotient_of_a_zero_keeps_its_sign() -> None:
    x = torch.tensor([-0.0, 0.0, -0.0, 0.0])
    y = torch.tensor([1e-12, 3.0, -7.0, -1e30])
    assert torch.equal(torch.signbit(quotient(x, y)), torch.signbit(x / y))


@pytest.mark.parametrize("last", [False, True])
def test_a_kernel_divides_by_counts_without_a_division(last: bool) -> None:
    """The gradient of means over windows that leave out padding."""
    x = torch.randn(2, 16, 6, 5)
    x = x.to(memory_format=torch.channels_last) if last else x
    args = ([3, 3], [1, 1], [1, 1], False, False, None)
    s = assert_function(lambda x: torch.ops.aten.avg_pool2d_backward(x, x, *args), x)
    (text,) = texts_of(s)
    assert text.count("rcp.approx") == 9 and "div_rn" not in text
