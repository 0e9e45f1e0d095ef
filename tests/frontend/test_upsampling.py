"""Upsampling stays one op for autograd on CPUs, and torch's tables are as before afterwards."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lenz.frontend.composites import KEYS
from lenz.frontend.upsampling import NAMES
from tests.cuda import Fake, fake_cuda, programs_of

WAYS: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "linear": (1, lambda x: F.interpolate(x, scale_factor=2.5, mode="linear")),
    "bilinear": (2, lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear")),
    "corners": (2, lambda x: F.interpolate(x, (9, 5), mode="bilinear", align_corners=True)),
    "trilinear": (3, lambda x: F.interpolate(x, scale_factor=1.5, mode="trilinear")),
    "nearest1d": (1, lambda x: F.interpolate(x, scale_factor=3.0)),
    "nearest2d": (2, lambda x: F.interpolate(x, scale_factor=(2.0, 1.5))),
    "nearest3d": (3, lambda x: F.interpolate(x, (5, 7, 9))),
    "exact": (2, lambda x: F.interpolate(x, scale_factor=1.7, mode="nearest-exact")),
    "recomputed": (2, lambda x: F.interpolate(x, scale_factor=1.7, recompute_scale_factor=True)),
}


def names_of(x: Tensor, fn: Callable[[Tensor], Tensor]) -> list[set[str]]:
    """The ops of each half."""
    return [{str(n.target) for n in p.nodes} for p in programs_of(fn, x)]


@pytest.mark.diagonal(2)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_the_gradient_is_one_op_and_eagers(way: str, last: bool) -> None:
    dims, fn = WAYS[way]
    x = torch.randn(2, 3, *(4, 5, 6)[:dims], dtype=torch.float64)
    if last and dims == 2:
        x = x.to(memory_format=torch.channels_last)
    x.requires_grad_()
    forward, backward = names_of(x, lambda x: fn(x.sin()))
    assert not any("upsample" in name for name in forward), "the forward half is in parts"
    assert sum("upsample" in name for name in backward) == 1
    assert not any("index_put" in name for name in backward)
    want, got = fn(x), torch.compile(fn, backend="lenz")(x)
    torch.testing.assert_close(got, want)
    dy = torch.randn_like(want)
    dx, dx2 = (torch.autograd.grad(y, x, dy)[0] for y in (want, got))
    torch.testing.assert_close(dx2, dx)
    assert dx2.stride() == dx.stride()


def test_sizes_may_be_symbolic() -> None:
    fn = torch.compile(WAYS["bilinear"][1], backend="lenz", dynamic=True)
    for n in (4, 7, 9):
        x = torch.randn(2, 3, n, n + 1, requires_grad=True)
        y = fn(x)
        y.sum().backward()
        torch.testing.assert_close(y, WAYS["bilinear"][1](x))
        assert x.grad is not None and x.grad.sum().item() == pytest.approx(y.numel(), rel=1e-4)


def test_gpus_have_scatters() -> None:
    with fake_cuda():
        x = Fake((2, 3, 4, 4), torch.float32).make().requires_grad_()
        _, backward = names_of(x, WAYS["bilinear"][1])
    assert any("index_put" in name for name in backward)


def test_torch_is_as_before() -> None:
    ops = [getattr(torch.ops.aten, name).vec for name in NAMES]
    before = [{**op.py_kernels} for op in ops]
    torch.compile(WAYS["bilinear"][1], backend="lenz")(torch.randn(1, 1, 2, 2, requires_grad=True))
    assert [{**op.py_kernels} for op in ops] == before
    assert not any(key in op._dispatch_cache for op in ops for key in KEYS)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("factor", [1.1, 1.3, 2.1])
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic"])
def test_factors_that_change_no_size_or_double_it(mode: str, factor: float, dynamic: bool) -> None:
    """Eager ignores most of them; torch's decompositions do not."""
    fn = lambda x: F.interpolate(x, scale_factor=factor, mode=mode)
    run = torch.compile(fn, backend="lenz", dynamic=dynamic)
    for sizes in ((3, 4), (5, 2)):
        for given in (torch.randn(1, 2, *sizes), torch.randn(1, 2, *sizes, requires_grad=True)):
            torch.testing.assert_close(run(given), fn(given))


@pytest.mark.diagonal(2)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_images_of_bytes_are_eagers(mode: str, last: bool) -> None:
    """ATen computes these with weights of 16 bits."""
    fn = lambda x: F.interpolate(x, scale_factor=1.7, mode=mode)
    run = torch.compile(fn, backend="lenz", dynamic=True)
    for n in (7, 9):
        x = torch.randint(0, 256, (2, 3, n, n + 1), dtype=torch.uint8)
        x = x.to(memory_format=torch.channels_last) if last else x
        assert torch.equal(run(x), fn(x)) and run(x).stride() == fn(x).stride()


@pytest.mark.diagonal(2)
@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_factors_that_change_no_size_on_gpus(mode: str) -> None:
    """Images that keep both sizes are copied."""
    fn = lambda x: F.interpolate(x, scale_factor=1.1, mode=mode)

    def texts(*sizes: int) -> str:
        with fake_cuda():
            [p] = programs_of(fn, Fake((1, 2, *sizes), torch.float32).make())
        return str([n.args for n in p.nodes if "mul" in str(n.target)])

    assert "0.909" in texts(3, 12), "one size changes"
    assert "0.909" not in texts(3, 4)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "linear"])
def test_an_empty_batch(mode: str) -> None:
    """torch's fake kernel refuses it."""
    x = torch.randn(0, 2, 4, requires_grad=True)
    y = torch.compile(lambda x: F.interpolate(x, scale_factor=2.0, mode=mode), backend="lenz")(x)
    assert y.shape == (0, 2, 8)
    y.sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_few_channels_stay_last_on_gpus(mode: str) -> None:
    """torch's decompositions drop the layout below 4 or 16 channels; eager keeps it."""
    with fake_cuda():
        x = Fake((1, 2, 3, 4), torch.float32).make().to(memory_format=torch.channels_last)
        [p] = programs_of(lambda x: F.interpolate(x, scale_factor=2.0, mode=mode), x)
    [y] = p.outputs
    assert str(y.stride) == "(96, 1, 16, 2)"


@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize(
    "x",
    [torch.ones(1, 2, 3, dtype=torch.int32), torch.ones(1, 0, 3), torch.ones(1, 2, 1)],
    ids=["integers", "no channels", "no pixels"],
)
def test_what_eager_refuses(x: Tensor, mode: str) -> None:
    fn = lambda x: F.interpolate(x, scale_factor=0.6, mode=mode)
    for run in (fn, torch.compile(fn, backend="lenz")):
        with pytest.raises(RuntimeError):
            run(x)


def test_a_large_pixel_leaves_small_ones_their_digits() -> None:
    """Near a weight of 1, `a + (b - a) * w` has an error of the size of `a`."""
    fn = lambda x: F.interpolate(x, scale_factor=33.0, mode="linear")
    x = torch.tensor([[[1e6, 1.0, 1.0]]])
    got = torch.compile(fn, backend="lenz")(x).double()
    want, eager = fn(x.double()), fn(x).double()
    assert (got - want).abs().max() <= 2 * (eager - want).abs().max()


def test_rows_in_another_order_become_contiguous() -> None:
    fn = lambda x: F.interpolate(x, scale_factor=2)
    x = torch.randn(3, 3, 3).transpose(0, 1)
    assert torch.compile(fn, backend="lenz")(x).stride() == fn(x).stride() == (18, 6, 1)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("shape", "factor"),
    [
        ((1, 2, 3), 1.1),
        ((1, 2, 3), 2.1),
        ((1, 2, 65, 66), 1.007),
        ((1, 2, 32, 33), 2.01),
        ((1, 5, 65, 66), 1.007),
        ((1, 2, 3, 3, 5), 2.1),
        ((1, 4, 3, 3, 5), 2.1),
    ],
)
def test_two_kernels_for_the_nearest_pixel(
    shape: tuple[int, ...], factor: float, dynamic: bool
) -> None:
    """Eager's kernel for channels last ignores factors that the other one uses."""
    fn = lambda x: F.interpolate(x, scale_factor=factor)
    run = torch.compile(fn, backend="lenz", dynamic=dynamic)
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(len(shape))
    x = torch.randn(shape)
    for given in (x, x if last is None else x.to(memory_format=last)):
        assert torch.equal(run(given), fn(given))
