"""Triton kernels of what models are made of: normalisation, softmax, losses, attention, gates.

Each is lowered as it is for training or inference on the CPU, put on a GPU, and run in Triton's
interpreter: rows that one tile holds, rows that are a loop of tiny tiles, and symbolic sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lenz.machine.cuda.shape import Shape
from tests.gpu_oracle import TINY, assert_function, cubins, kinds_of

pytest.importorskip("triton")

HALF = torch.bfloat16


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers that are the same in every run."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def attention(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    scores = (q[:, :, None] * k[:, None]).sum(-1) * 0.5
    masked = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))
    return masked.softmax(-1)


def rotary(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return x * angle.cos() + torch.cat((-b, a), -1) * angle.sin()


def residual_norm_gelu(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> Any:
    total = x + r
    return F.gelu(F.layer_norm(total, (x.shape[-1],), w, w)), total


def rms_norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    scale = (x.float() * x.float()).mean(-1, keepdim=True).add(1e-6).rsqrt()
    return (x.float() * scale).to(x.dtype) * w


def clipped(x: torch.Tensor, y: torch.Tensor) -> Any:
    norm = (x.square().sum() + y.square().sum()).sqrt()
    scale = (1.0 / (norm + 1e-6)).clamp(max=1.0)
    return x * scale, y * scale, norm


def layer_norm_gradients(dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> Any:
    mean, rstd = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, correction=0).add(1e-5).rsqrt()
    return torch.ops.aten.native_layer_norm_backward(
        dy, x, [x.shape[-1]], mean, rstd, w, w, [True, True, True]
    )


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "softmax": (lambda x: x.softmax(-1), (tensor(6, 37),)),
    "softmax of halves": (lambda x: x.softmax(-1), (tensor(6, 37, dtype=HALF),)),
    "softmax over columns": (lambda x: x.softmax(0), (tensor(11, 20),)),
    "softmax over the middle": (lambda x: x.softmax(1), (tensor(2, 11, 6),)),
    "log_softmax": (lambda x: x.log_softmax(-1), (tensor(6, 64, dtype=HALF),)),
    "softmax of its gradient": (
        lambda g, x: torch.ops.aten._softmax_backward_data(g, x.softmax(-1), -1, torch.float32),
        (tensor(6, 37), tensor(6, 37)),
    ),
    "layer norm": (
        lambda x, w: F.layer_norm(x, (37,), w, w), (tensor(6, 37, dtype=HALF), tensor(37).to(HALF))
    ),
    "layer norm of two axes": (lambda x: F.layer_norm(x, (3, 5)), (tensor(4, 3, 5),)),
    "layer norm backward": (layer_norm_gradients, (tensor(9, 16), tensor(9, 16) + 1, tensor(16))),
    "residual, norm, gelu": (residual_norm_gelu, (tensor(5, 40), tensor(5, 40) * 2, tensor(40))),
    "rms norm": (rms_norm, (tensor(6, 40, dtype=HALF), tensor(40).to(HALF))),
    "group norm": (
        lambda x, w: F.group_norm(x, 2, w, w), (tensor(2, 8, 5, 3, dtype=HALF), tensor(8).to(HALF))
    ),
    "instance norm": (lambda x: F.instance_norm(x), (tensor(2, 3, 5, 4),)),
    "cross entropy": (
        lambda x, y: F.cross_entropy(x, y), (tensor(6, 37), torch.tensor([0, 36, 5, -100, 7, 7]))
    ),
    "sum of losses": (
        lambda x, y: F.nll_loss(x.log_softmax(1), y, x[0], reduction="sum", ignore_index=3),
        (tensor(6, 9), torch.arange(6)),
    ),
    "losses": (
        lambda x, y: (F.mse_loss(x, y), F.smooth_l1_loss(x, y),
                      F.binary_cross_entropy_with_logits(x, y.sigmoid())),
        (tensor(6, 9), tensor(6, 9) * 2),
    ),
    "attention scores": (attention, (tensor(2, 5, 3), tensor(2, 5, 3) + 1)),
    "rotary embedding": (rotary, (tensor(3, 4, 8, dtype=HALF), tensor(4, 8))),
    "swiglu": (lambda x, y: F.silu(x) * y, (tensor(7, 33, dtype=HALF), tensor(7, 33, dtype=HALF))),
    "gelu": (lambda x: (F.gelu(x), F.gelu(x, approximate="tanh")), (tensor(7, 33),)),
    "gradients are clipped": (clipped, (tensor(50), tensor(7, 9))),
    "dropout of a residual": (lambda x, r: F.dropout(x, 0.5, True) + r, (tensor(9, 9), tensor(9))),
    "positions": (lambda x, w: x + F.embedding(torch.arange(5), w), (tensor(5, 6), tensor(9, 6))),
    "argmax of a softmax": (lambda x: x.softmax(-1).argmax(-1), (tensor(6, 37),)),
    "variance and mean": (lambda x: torch.var_mean(x, 1), (tensor(6, 37) + 100,)),
    "standard scores of columns": (lambda x: (x - x.mean(0)) / x.std(0), (tensor(13, 20),)),
    "pooled and normalised": (
        lambda x: F.normalize(x.mean(1), dim=-1), (tensor(3, 9, 16, dtype=HALF),)
    ),
}  # fmt: skip
ONE_KERNEL = (
    "softmax", "softmax over columns", "log_softmax", "layer norm", "rms norm", "swiglu", "gelu",
    "rotary embedding", "dropout of a residual", "variance and mean",
)  # fmt: skip


@pytest.mark.diagonal(4)
@pytest.mark.parametrize("tiles", (None, TINY), ids=("usual", "tiny"))
@pytest.mark.parametrize("name", CASES)
def test_parts_of_models(name: str, tiles: Shape | None, all_kernels: bool) -> None:
    fn, inputs = CASES[name]
    s = assert_function(fn, *inputs, tiles=tiles, split=tiles is None)
    assert not all_kernels or tiles or all(b.code for b in cubins(s))
    if name in ONE_KERNEL and not tiles:
        assert len(kinds_of(s)) == 1, "it reads its input more than once"


@pytest.mark.parametrize("name", ["softmax", "residual, norm, gelu", "cross entropy", "swiglu"])
def test_symbolic_sizes(name: str) -> None:
    fn, inputs = CASES[name]
    for tiles in (None, TINY):
        assert_function(fn, *inputs, dynamic=True, tiles=tiles, split=False)


def test_rows_of_no_elements_and_of_one() -> None:
    for shape in ((0, 5), (3, 1), (1, 1)):
        assert_function(lambda x: (x.softmax(-1), F.layer_norm(x, x.shape[-1:])), tensor(*shape))
