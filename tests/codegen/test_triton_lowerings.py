"""Families of lowerings as Triton kernels, in Triton's interpreter against the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lenz.frontend.build import build
from lenz.ir.graph import Extern
from lenz.ir.interp import interp
from lenz.lower import native_ops
from lenz.machine.cuda.shape import Shape
from tests.gpu_oracle import TINY, assert_function, lowered_there, texts_of
from tests.lower.harness import trace

aten = torch.ops.aten
G = torch.Generator().manual_seed(0)
X, S = torch.randn(12, 20, generator=G), torch.randn(12, 20, generator=G)
J = torch.randint(0, 12, (9,), generator=G)
CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "masks as indices": (
        lambda x, s: (x.index_put((x > 1,), s[0, 0]), x.index_put((x[:, 0] > 0,), s[0])),
        (X, S),
    ),
    "masked_scatter_backward": (
        lambda x, s: aten.masked_scatter_backward(x, s > 0, [10, 20]),
        (X, S),
    ),
    "checks of what nobody reads": (lambda x, j: (x.long()[j] * 0, x[j][:1] * 2), (X, J)),
    "adaptive pools": (
        lambda x: (aten._adaptive_avg_pool2d(x, (4, 3)), *aten.adaptive_max_pool2d(x, (5, 3))),
        (X[None],),
    ),
    "adaptive gradients": (
        lambda x, s, j: (
            aten._adaptive_avg_pool2d_backward(s[:5, :7][None], x[None]),
            aten.adaptive_max_pool2d_backward(s[:3, :3][None], x[None], j.view(1, 3, 3)),
        ),
        (X, S, J),
    ),
    "unpool": (
        lambda x, j: aten.max_unpool2d(x[None, :3, :3].clone(), j.view(1, 3, 3), [4, 3]),
        (X, torch.randperm(12, generator=G)[:9]),
    ),
    "spread windows": (
        lambda x, s: (
            *aten.fractional_max_pool2d(x[None], [2, 3], [3, 3], s[0].view(1, 12, 2)),
            aten.fractional_max_pool2d_backward(
                x[:3, :3, :4][None],
                x[:3][None],
                [2, 2],
                [3, 4],
                (s[:3, :12] * 20).long().view(1, 3, 3, 4),
            ),
            torch.nonzero_static(x > 1, size=20),
        ),
        (X.view(12, 4, 5), torch.rand(12, 24, generator=G)),
    ),
    "embedding bags": (
        lambda x, j: tuple(
            torch.nn.functional.embedding_bag(j.view(3, 3), x, mode=m) for m in ("mean", "max")
        ),
        (X, J),
    ),
    "gradient of bags": (
        lambda s, j: aten._embedding_bag_backward(
            s[:9], j, j, j % 3, j, j, 12, False, 1, False, None
        ),
        (S, J),
    ),
    "searches": (
        lambda x, s: (
            torch.searchsorted(s.cumsum(1), x),
            torch.bucketize(x, torch.arange(-3.0, 3.0)),
        ),
        (X, S.abs()),
    ),
    "borders": (
        lambda x, s: (
            aten.reflection_pad2d_backward(s[None], x[None, :8, :14], [2, 4, 1, 3]),
            aten.replication_pad2d_backward(s[None], x[None, :8, :14], [2, 4, 1, 3]),
        ),
        (X, S),
    ),
    "unfold and fold": (
        lambda x, s: (
            torch.nn.functional.unfold(x[None, None], 3, padding=1, stride=2),
            aten.col2im(s[None, :12], [5, 7], [2, 3], [1, 1], [0, 0], [1, 1]),
        ),
        (X, S),
    ),
    "distances": (
        lambda x, s: (
            aten._cdist_forward(x, s, 3.0, 2),
            aten._cdist_backward(s[:, :12], x, s, 1.0, x[:, :12].abs()),
            aten._pdist_forward(x, 2.0),
            aten._pdist_backward(s.view(240)[:66], x, 2.0, aten._pdist_forward(s, 2.0)),
        ),
        (X, S),
    ),
    "samples of a grid": (
        lambda x, g: (
            torch.nn.functional.grid_sample(x[None, None], g.sigmoid().view(1, 12, 10, 2)),
        ),
        (X, S),
    ),
    "fake quantization": (
        lambda x, s: (
            *aten.fake_quantize_per_tensor_affine_cachemask(x, 0.1, 3, -8, 7),
            *aten.fake_quantize_per_channel_affine_cachemask(
                x, s[0].abs() + 0.1, s[1].int(), 1, -8, 7
            ),
        ),
        (X, S),
    ),
    "special functions": (
        lambda x: (
            torch.digamma(x),
            torch.special.spherical_bessel_j0(x),
            torch.polygamma(2, x),
            torch.special.i1e(x),
            torch.special.erfcx(x),
            torch.special.bessel_y1(x.abs()),
            torch.special.ndtri(x.abs() / 4),
            torch.special.chebyshev_polynomial_u(x, 5),
            torch.special.zeta(x.abs() + 1.1, x),
        ),
        (X,),
    ),
    "mode": (lambda x: (*torch.mode(x.int()), *torch.mode(x.int(), 0, True)), (X,)),
    "frexp": (torch.frexp, (X * 1e-37,)),
}

IMAGE = torch.randn(2, 3, 5, 6, generator=G)
POINTS = torch.rand(2, 4, 3, 2, generator=G) * 2.4 - 1.2
VOLUME = torch.randn(1, 2, 3, 4, 5, generator=G)
PLACES = torch.rand(1, 2, 3, 2, 3, generator=G) * 2.4 - 1.2
SAMPLINGS = [(m, p, a) for m in (0, 1, 2) for p in (0, 1, 2) for a in (False, True)]


def as_eager(fn: Callable[..., Any], *inputs: Tensor) -> None:
    """Assert that what a function is lowered to for GPUs gives what eager gives."""
    g = lowered_there(build(trace(fn, inputs), [], "inference", "test", native=native_ops()))
    assert not [n.op for n in g.nodes if isinstance(n, Extern)]
    found = tree_leaves(interp(g, list(inputs)).outputs)
    for got, want in zip(found, tree_leaves(fn(*inputs)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.diagonal(2)
@pytest.mark.parametrize(("mode", "padding", "align"), SAMPLINGS)
def test_samples_at_the_points_of_a_grid(mode: int, padding: int, align: bool) -> None:
    """Images, and volumes but for bicubic sampling."""
    how = (mode, padding, align)
    for rank, x, grid in ((2, IMAGE, POINTS), (3, VOLUME, PLACES)):
        if rank == 3 and mode == 2:
            continue
        forward = getattr(aten, f"grid_sampler_{rank}d")
        as_eager(lambda x, g: forward(x, g, *how), x, grid)


@pytest.mark.diagonal(2)
@pytest.mark.parametrize("tiles", (None, TINY), ids=("usual", "tiny"))
@pytest.mark.parametrize("name", CASES)
def test_a_lowering_is_kernels_and_right(name: str, tiles: Shape | None) -> None:
    fn, args = CASES[name]
    s = assert_function(fn, *args, tiles=tiles)
    assert texts_of(s)
    assert not [x.op for x in s.steps if isinstance(x, Extern)]


def test_complex_numbers_are_pairs_in_one_kernel() -> None:
    """Loads and stores of neighbours, in tiles that end inside of the tensor."""
    z, w = (torch.complex(X, S), torch.complex(S, X))
    for tiles in (None, TINY):
        s = assert_function(
            lambda z, w: (
                (z * w.conj() + 1j) / w,
                (z * 1.5).abs(),
                torch.view_as_real(z.exp()).sum(),
            ),
            *(z, w),
            **({"tiles": tiles} if tiles else {}),
        )
        eager = {x.op for x in s.steps if isinstance(x, Extern)}
        assert eager <= {"lenz.view_as_real", "lenz.view_as_complex"}
        assert len(texts_of(s)) <= 3, "the parts of a number are not stored by one kernel"
