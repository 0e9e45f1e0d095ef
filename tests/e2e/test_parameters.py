"""Parameters that torch's database of ops does not have: ATen treats some of them differently.

`F.interpolate(x, scale_factor=1.1)` of 3 pixels copies them on CPUs; the decomposition does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, TypeAlias

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, randn

from tests.e2e.sides import agree

Case: TypeAlias = tuple[str, Callable[..., Any], Callable[[], Sequence[Tensor]]]
CPU = torch.device("cpu")
LAST = torch.channels_last
INF, NAN = float("inf"), float("nan")
SPECIAL = -INF, -1e30, -1.0, -0.0, 0.0, 0.5, 1.0, 3.5, 1e30, INF, NAN
MODES = "nearest", "nearest-exact", "bilinear", "bicubic"
BINARY = (
    torch.xlogy, torch.heaviside, torch.hypot, torch.copysign, torch.nextafter, torch.fmax,
    torch.logaddexp, torch.atan2, torch.remainder, torch.fmod,
)  # fmt: skip
HOW = "none", "mean", "sum"


def special() -> tuple[Tensor, Tensor]:
    x = torch.tensor(SPECIAL)
    return x, x.flip(0)


def interpolated() -> Iterator[Case]:
    images = lambda top, dtype: ((torch.rand(1, 2, 3, 5) * top).to(dtype),)
    last = lambda: (torch.rand(1, 2, 3, 5).to(memory_format=LAST),)
    infinite = lambda: (torch.tensor([INF, INF, 1.0, -INF, NAN]).tile(1, 2, 3, 1),)
    for mode, factor in product(MODES, (0.6, 1.1, 1.3, 2.0, 2.1)):
        fn = partial(F.interpolate, scale_factor=factor, mode=mode)
        for top, dtype in ((1, torch.float32), (255, torch.uint8)):
            yield f"{mode} by {factor}, {dtype}", fn, partial(images, top, dtype)
        yield f"{mode} by {factor}, channels last", fn, last
        yield f"{mode} by {factor}, infinite pixels", fn, infinite


def pooled() -> Iterator[Case]:
    image = lambda: (randn(1, 2, 7, 8),)
    for k, s, p, ceil in product((2, 3), (1, 2, 3), (0, 1), (False, True)):
        how: dict[str, Any] = {"kernel_size": k, "stride": s, "padding": p, "ceil_mode": ceil}
        yield f"maximum {k} {s} {p} {ceil}", partial(F.max_pool2d, **how), image
        for more in ({"count_include_pad": False}, {"divisor_override": 5}):
            yield f"mean {k} {s} {p} {ceil}, {more}", partial(F.avg_pool2d, **how, **more), image


def normed() -> Iterator[Case]:
    rows = lambda: (torch.tensor([[0.0, 0, 0], [1, 0, -2], [INF, 1, 2]]),)
    for p in (0, 0.5, 1, 2, 3, -1, INF, -INF):
        yield f"norm {p}", partial(torch.linalg.vector_norm, ord=p, dim=-1), rows
        if p >= 0:
            yield f"cdist {p}", partial(torch.cdist, p=p), lambda: (randn(4, 3), randn(5, 3))


def computed() -> Iterator[Case]:
    for e in (0, 1, 2, -1, 0.5, 1 / 3, INF, -INF, NAN):
        yield f"to the power {e}", lambda x, e=e: (x**e, e**x), lambda: special()[:1]
    for low, high in ((0, 1), (1, 0), (NAN, 1), (INF, -INF)):
        yield f"clamp {low} {high}", partial(torch.clamp, min=low, max=high), lambda: special()[:1]
    for d in (-2, -1, 1, 3):
        yield f"round {d}", partial(torch.round, decimals=d), lambda: special()[:1]
    for op in BINARY:
        yield op.__name__, op, special
    holes = lambda k: [torch.full((3, 3), NAN) if i == k else randn(3, 3) for i in range(3)]
    yield "addmm without the sum", partial(torch.addmm, beta=0), lambda: holes(0)
    yield "addmm without the product", partial(torch.addmm, alpha=0), lambda: holes(1)


def lost() -> Iterator[Case]:
    places = torch.tensor([0, 1, 2, 1])
    for how, ignored in product(HOW, (-100, 1)):
        told: dict[str, Any] = {"reduction": how, "ignore_index": ignored, "label_smoothing": 0.2}
        for name, target in (("", places), (", all one", torch.ones_like(places))):
            fn = partial(F.cross_entropy, target=target, **told)
            yield f"cross entropy {how} {ignored}{name}", fn, lambda: (randn(4, 3),)
    for how, beta in product(HOW, (0.0, 0.5)):
        fn = partial(F.smooth_l1_loss, reduction=how, beta=beta)
        yield f"smooth l1 {how} {beta}", fn, lambda: (randn(4, 3), randn(4, 3))


def cases(device: torch.device = CPU) -> list[Case]:
    with device:
        return [c for group in (interpolated, pooled, normed, computed, lost) for c in group()]


@pytest.mark.one_in(10)
@pytest.mark.parametrize(("fn", "make"), [pytest.param(*c[1:], id=c[0]) for c in cases()])
def test_parameters_are_treated_as_in_eager(
    fn: Callable[..., Any], make: Callable[[], Sequence[Tensor]]
) -> None:
    agree(lambda *args: fn(*args), make)
