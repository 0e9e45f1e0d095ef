"""The sign of a zero is eager's: 1 / result shows it, and atan2, copysign and sqrt after it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

Fn = Callable[[Tensor], Tensor]
SHAPES = ((1, 1), (1, 2), (2, 3), (3, 4), (1, 17), (3, 17))
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def ones(x: Tensor) -> Tensor:
    return torch.ones(x.shape[1], dtype=x.dtype, device=x.device)


def first(x: Tensor) -> Tensor:
    return torch.zeros(x.shape[0], dtype=torch.long, device=x.device)


FAMILIES: dict[str, tuple[Fn, ...]] = {
    "sums": (
        lambda x: x.sum(1),
        lambda x: x.sum(0),
        lambda x: x.sum(),
        lambda x: x[0, 0].sum(),
        lambda x: x.sum(1, dtype=torch.float64),
        lambda x: x.mean(1),
        lambda x: x.mean(),
        lambda x: x.nansum(1),
        lambda x: x.trace(),
        lambda x: x[0].dot(ones(x)),
        lambda x: x.mv(ones(x)),
        lambda x: x.expand(3, *x.shape).sum(0),
        lambda x: torch.trapezoid(x, dim=1),
    ),
    "products and extrema": (
        lambda x: x.prod(1),
        lambda x: x.prod(0),
        lambda x: x.amax(1),
        lambda x: x.amin(1),
        lambda x: x.max(1)[0],
        lambda x: x.logsumexp(1),
    ),
    "scans": (
        lambda x: x.cumsum(1),
        lambda x: x.cumsum(0),
        lambda x: x[0].cumsum(0),
        lambda x: x[0, 0].cumsum(0),
        lambda x: x.flip(1).cumsum(1).flip(1),
        lambda x: x.cumprod(1),
        lambda x: x.cumprod(0),
        lambda x: x.logcumsumexp(1),
        lambda x: x[0].logcumsumexp(0),
        lambda x: x.cummax(1)[0],
        lambda x: x.cummin(1)[0],
    ),
    "norms": (
        lambda x: x.norm(1, 1),
        lambda x: x.norm(2, 1),
        lambda x: x.norm(3, 1),
        lambda x: x.norm(float("inf"), 1),
        lambda x: F.normalize(x, dim=1),
        lambda x: F.layer_norm(x, (x.shape[1],)),
        lambda x: F.layer_norm(x, (x.shape[1],), ones(x)),
        lambda x: F.layer_norm(x, (x.shape[1],), ones(x), ones(x) * -0.0),
        lambda x: F.rms_norm(x, (x.shape[1],)),
        lambda x: F.group_norm(x[:, :, None].expand(-1, -1, 2), 1),
        lambda x: F.batch_norm(x, ones(x) * 0, ones(x)),
        lambda x: F.batch_norm(torch.cat([x, x]), None, None, ones(x), training=True),
        lambda x: x.softmax(1),
        lambda x: x.log_softmax(1),
        lambda x: x.var(1, correction=0),
    ),
    "losses and pools": (
        lambda x: F.mse_loss(x, x),
        lambda x: F.l1_loss(x, x),
        lambda x: F.cross_entropy(x, first(x)),
        lambda x: F.nll_loss(x, first(x), reduction="sum"),
        lambda x: F.avg_pool1d(x[None], 1),
        lambda x: F.adaptive_avg_pool1d(x[None], 1),
    ),
    "arithmetic": (
        lambda x: x - x,
        lambda x: x + 0,
        lambda x: x - 0.0,
        lambda x: 0 - x,
        lambda x: -x,
        lambda x: x * 0,
        lambda x: x / -1,
        lambda x: torch.sub(x, x, alpha=0),
        lambda x: torch.addcmul(x, x, x),
        lambda x: (x - 0.5).ceil(),
    ),
}


def zeros(dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    return [torch.full(s, z, dtype=dtype, device=device) for s in SHAPES for z in (-0.0, 0.0)]


def assert_signs(family: str, dtype: torch.dtype, device: str = "cpu") -> None:
    xs = zeros(dtype, device)

    def all_of(*xs: Tensor) -> list[Tensor]:
        return [f(x) for f in FAMILIES[family] for x in xs]

    torch._dynamo.reset()
    got = torch.compile(all_of, backend="lenz", dynamic=False, fullgraph=True)(*xs)
    for k, (y, want) in enumerate(zip(got, all_of(*xs), strict=True)):
        known = ~want.isnan()
        which, x = divmod(k, len(xs))
        name = f"{family} {which} of {xs[x].tolist()}"
        assert torch.equal(torch.signbit(y)[known], torch.signbit(want)[known]), name


@pytest.mark.one_in(6)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_sign_of_zero_is_eagers(family: str, dtype: torch.dtype) -> None:
    assert_signs(family, dtype)
