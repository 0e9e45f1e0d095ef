"""Half types: to the bit as eager with `emulate_rounding`, and no further from float64 without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

HALVES = (torch.bfloat16, torch.float16)
# Neither is a half; in a half type they are 0.1001 and 3.703 (bf16), 0.09998 and 3.699 (fp16).
NUMBERS = (0.1, 3.7, -3.0)


def compiled(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(fn, backend="lenz", dynamic=False, options=options)


def every(dtype: torch.dtype) -> Tensor:
    """The values of a half type that torch's fmod is right for, whole vectors of them.

    The loop that torch runs over what is left of a vector rounds in other places.
    """
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    x = x[x.abs() <= 2.0**15]
    return x[: len(x) // 64 * 64]


def pairs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    shape, spread = (3, 20_000), torch.randint(-5, 6, (3, 20_000), generator=g)
    x, y, z = (torch.randn(shape, generator=g) * torch.exp2(spread)).to(dtype)
    return x, y, z


def with_numbers(x: Tensor) -> dict[str, Tensor]:
    """Every op of a tensor and a number whose result torch rounds without an error of its own."""
    found: dict[str, Tensor] = {}
    for s in NUMBERS:
        found |= {
            f"add {s}": x + s, f"sub {s}": x - s, f"rsub {s}": s - x, f"mul {s}": x * s,
            f"div {s}": x / s, f"floor {s}": x // s, f"remainder {s}": x % s,
            f"trunc {s}": torch.div(x, s, rounding_mode="trunc"), f"fmod {s}": torch.fmod(x, s),
            f"alpha {s}": torch.add(x, x, alpha=s), f"lt {s}": x < s, f"clamp {s}": x.clamp(min=s),
            f"0-d add {s}": x + torch.tensor(s), f"0-d mul {s}": x * torch.tensor(s),
            f"0-d first {s}": torch.tensor(s) * x, f"where {s}": torch.where(x > 0, x, s),
        }  # fmt: skip
    return found


def of_tensors(x: Tensor, y: Tensor, z: Tensor) -> dict[str, Tensor]:
    """Ops of tensors, some of which torch rounds between their steps."""
    return {
        "add": x + y, "mul": x * y, "div": x / y, "floor": x // y, "fmod": torch.fmod(x, y),
        "trunc": torch.div(x, y, rounding_mode="trunc"), "remainder": x % y,
        "alpha": torch.add(x, y, alpha=0.3), "minus": torch.sub(x, y, alpha=0.3),
        "addcmul": torch.addcmul(x, y, z), "lerp": torch.lerp(x, y, 0.3),
        "far": torch.lerp(x, y, 0.7), "between": torch.lerp(x, y, z), "sqrt": x.abs().sqrt(),
        "nextafter": torch.nextafter(x, y), "reciprocal": x.reciprocal(), "square": x.square(),
    }  # fmt: skip


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_single_ops_are_those_of_eager_to_the_bit(dtype: torch.dtype) -> None:
    for fn, args in ((with_numbers, (every(dtype),)), (of_tensors, pairs(dtype))):
        want, got = fn(*args), compiled(fn, emulate_rounding=True)(*args)
        off = {k: int((got[k] != want[k]).sum()) for k in want}
        assert not {k: n for k, n in off.items() if n}, "elements that differ"


def c6(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return ((x * y) + z) * x - y


def poly(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    for _ in range(6):
        x = (x * 0.3 + y / 3) * (z - 0.1)
    return x


def ratio(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return (x / (y.abs() + 0.7)).sqrt().nan_to_num(0.25) - torch.lerp(y, z, 0.2) // 0.3


def branches(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return torch.where(x * y > z - 0.1, x + 3.7 * z, torch.add(y, z, alpha=0.1)).clamp(-2.1, 2.3)


def through_float(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return ((x * y).float() * 0.1).to(x.dtype) + (y + z).double().to(x.dtype)


CHAINS = (c6, poly, ratio, branches, through_float)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("chain", CHAINS, ids=lambda f: f.__name__)
def test_chains_are_those_of_eager_to_the_bit(
    chain: Callable[..., Tensor], dtype: torch.dtype
) -> None:
    args = tuple(t.clamp(-4, 4) for t in pairs(dtype))
    want, got = chain(*args), compiled(chain, emulate_rounding=True)(*args)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def attention(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    q, k, v = (t.view(4, 50, 100) for t in (x, y, z))
    return (q @ k.mT / 10).softmax(-1) @ v


EXACT: dict[str, Callable[..., Tensor]] = {
    "c6": c6,
    "gelu of sums": lambda x, y, z: F.gelu(x * y + z) * torch.sigmoid(z - y),
    "tanh": lambda x, y, z: torch.tanh(z * torch.tanh(x + y) - 0.1) / 3,
    "softmax": lambda x, y, z: ((x + y).view(200, 100) * 0.7).softmax(-1),
    "log_softmax": lambda x, y, z: (x - y).view(200, 100).log_softmax(-1),
    "layer_norm": lambda x, y, z: F.layer_norm((x * z + y).view(200, 100), (100,)) + 1,
    "group_norm": lambda x, y, z: F.group_norm((x + 30).view(10, 20, 100), 4),
    "mean and deviation": lambda x, y, z: (x + y).view(2000, 10).std(-1) * z[:2000],
    "attention": attention,
    "cross_entropy": lambda x, y, z: F.cross_entropy(
        x.view(200, 100) * 2, (z.view(200, 100).argmax(-1)), reduction="none"
    ),
    "mse": lambda x, y, z: F.mse_loss(x * 0.1, y + z, reduction="none").sqrt(),
    "kl": lambda x, y, z: F.kl_div(
        x.view(200, 100).log_softmax(-1), y.view(200, 100).softmax(-1), reduction="none"
    ).sum(-1),
    "sums": lambda x, y, z: (x * y).view(200, 100).sum(-1) - z[:200],
    "running sum": lambda x, y, z: (x * y).view(200, 100).cumsum(-1),
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", EXACT)
def test_by_default_no_further_from_the_truth_than_eager(name: str, dtype: torch.dtype) -> None:
    fn = EXACT[name]
    args = tuple(t.clamp(-3, 3) for t in pairs(dtype))
    true = fn(*(t.double() for t in args))
    theirs, ours = ((f(*args).double() - true).norm() for f in (fn, compiled(fn)))
    # Where one rounding is all there is, the two differ by what a tie decides.
    assert ours <= 1.01 * theirs, f"error {float(ours):.3e}, eager's {float(theirs):.3e}"
