"""Gradients: forward and backward traced together, as AOTAutograd traces them, against eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.lower.harness import TOLERANCE, check
from tests.lower.single import outputs_of, single

aten = torch.ops.aten
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def with_gradients(fn: Callable[..., Any]) -> Callable[..., Any]:
    """(dy, *inputs) -> (y, *gradients of the inputs)."""

    def joint(dy: torch.Tensor, *inputs: torch.Tensor) -> tuple[Any, ...]:
        y, pull = torch.func.vjp(fn, *inputs)
        return (y, *pull(dy))

    return joint


def check_gradients(
    fn: Callable[..., torch.Tensor],
    *inputs: torch.Tensor,
    dynamic: bool = False,
    tolerance: tuple[float, float] | None = None,
) -> None:
    """Compare y and all gradients, for a random cotangent."""
    y = fn(*inputs)
    dy = torch.randn(y.shape).to(y.dtype)
    check(with_gradients(fn), dy, *inputs, dynamic=dynamic, tolerance=tolerance)


def loose(dtype: torch.dtype) -> tuple[float, float]:
    """Gradients pass through several roundings to the inputs' type."""
    rtol, atol = TOLERANCE[dtype]
    return 4 * rtol, 20 * atol


def params(dtype: torch.dtype, n: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight and a bias."""
    return torch.randn(n).to(dtype), torch.randn(n).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layer_norm(dtype: torch.dtype) -> None:
    """With and without parameters, one and two dimensions."""
    w, c = params(dtype)
    near = loose(dtype)
    x = torch.randn(4, 6).to(dtype)
    layer_norm = functional.layer_norm
    check_gradients(lambda x, w, c: layer_norm(x, (6,), w, c), x, w, c, tolerance=near)
    check_gradients(lambda x: layer_norm(x, (6,)), x, tolerance=near)
    x = torch.randn(3, 2, 6).to(dtype)
    check_gradients(lambda x: layer_norm(x, (2, 6)), x, tolerance=near)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_group_norm(dtype: torch.dtype) -> None:
    """With and without parameters."""
    w, c = params(dtype)
    near = loose(dtype)
    x = torch.randn(2, 6, 4, 3).to(dtype)
    check_gradients(lambda x, w, c: functional.group_norm(x, 2, w, c), x, w, c, tolerance=near)
    check_gradients(lambda x: functional.group_norm(x, 3), x, tolerance=near)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("train", [True, False])
def test_batch_norm(train: bool, dtype: torch.dtype) -> None:
    """By the statistics of the batch, and by running ones."""
    w, c = params(dtype)
    m, v = (None, None) if train else (torch.randn(6).to(dtype), torch.rand(6).to(dtype) + 0.5)
    near = loose(dtype)

    def fn(x: Any, w: Any = None, c: Any = None) -> Any:
        return functional.batch_norm(x, m, v, w, c, training=train)

    def fixed(x: Any, m: Any, v: Any, w: Any) -> Any:
        return functional.batch_norm(x, m, v, w, training=False)

    for shape in ((5, 6), (3, 6, 2, 2)):
        x = torch.randn(shape).to(dtype)
        if train:
            check_gradients(fn, x, w, c, tolerance=near)
            check_gradients(fn, x, tolerance=near)
            continue
        dy = torch.randn(shape).to(dtype)

        def joint(dy: Any, x: Any, m: Any, v: Any, w: Any) -> Any:
            return with_gradients(lambda x, w: fixed(x, m, v, w))(dy, x, w)

        check(joint, dy, x, m, v, w, tolerance=near)


MASKS = [(True, False, False), (False, True, False), (False, False, True), (True, True, True)]


@pytest.mark.diagonal(2)
@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask: tuple[bool, bool, bool]) -> None:
    """Only what the mask asks for is computed, and it does not depend on the rest."""
    x, dy, w = torch.randn(4, 6), torch.randn(4, 6), torch.randn(6)
    mean, rstd = x.mean(1, keepdim=True), x.var(1, keepdim=True).rsqrt()
    layer = aten.native_layer_norm_backward.default
    batch = aten.native_batch_norm_backward.default
    group = aten.native_group_norm_backward.default
    cases: list[tuple[Any, tuple[Any, ...]]] = [
        (layer, (dy, x, (6,), mean, rstd, w, w, list(mask))),
        (batch, (dy, x, w, None, None, x.mean(0), x.var(0).rsqrt(), True, 1e-5, list(mask))),
        (batch, (dy, x, w, x.mean(0), x.var(0), None, None, False, 1e-5, list(mask))),
        (group, (dy, x, mean, rstd, w, 4, 6, 1, 1, list(mask))),
    ]
    for op, args in cases:
        got = outputs_of(op, *args)
        for want, g, r in zip(mask, got, op(*args), strict=True):
            assert (g is not None) == want
            if want:
                torch.testing.assert_close(g, r, rtol=1e-4, atol=1e-5)


def test_rms_norm_backward() -> None:
    """The fused gradient against autograd of the formula."""
    x, dy = torch.randn(4, 6, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    w = torch.randn(6, dtype=torch.float64)

    def formula(x: Any, w: Any) -> Any:
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * w

    _, *wanted = with_gradients(formula)(dy, x, w)
    rstd = (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    op = aten._fused_rms_norm_backward.default
    got = outputs_of(op, dy, x, (6,), rstd, w, [True, True])
    torch.testing.assert_close(list(got), wanted)
    assert outputs_of(op, dy, x, (6,), rstd, w, [True, False])[1] is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_softmax(dtype: torch.dtype) -> None:
    """softmax, log_softmax, logsumexp."""
    x = torch.randn(3, 5).to(dtype)
    near = loose(dtype)
    for dim in (0, 1):
        check_gradients(lambda x: x.softmax(dim), x, tolerance=near)
        check_gradients(lambda x: x.log_softmax(dim), x, tolerance=near)
        check_gradients(lambda x: x.logsumexp(dim), x, tolerance=near)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
def test_cross_entropy(dtype: torch.dtype) -> None:
    """Reductions, weights, ignored targets."""
    x, w = torch.randn(5, 4).to(dtype), torch.rand(4).to(dtype)
    t = torch.tensor([0, 3, -100, 1, 2])

    def joint(dy: Any, x: Any, t: Any, w: Any, reduction: str) -> Any:
        def fn(x: Any) -> Any:
            return functional.cross_entropy(x, t, w, reduction=reduction)

        return with_gradients(fn)(dy, x)

    for reduction in ("none", "mean", "sum"):
        dy = torch.randn((5,) if reduction == "none" else ()).to(dtype)
        check(lambda dy, x, t, w: joint(dy, x, t, w, reduction), dy, x, t, w)
        check(lambda dy, x, t: joint(dy, x, t, None, reduction), dy, x, t)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
def test_losses(dtype: torch.dtype) -> None:
    """Losses of two tensors, gradients for both where eager has them."""
    x, y = torch.randn(3, 4).to(dtype), torch.randn(3, 4).to(dtype)
    for reduction in ("none", "mean", "sum"):
        for loss in (functional.mse_loss, functional.smooth_l1_loss, functional.huber_loss):
            check_gradients(lambda x, y: loss(x, y, reduction=reduction), x, y)
        check_gradients(lambda x, y: functional.l1_loss(x, y, reduction=reduction), x, y)
        check_gradients(
            lambda x, y: functional.binary_cross_entropy(x, y, reduction=reduction),
            x.sigmoid(),
            y.sigmoid(),
            tolerance=loose(dtype),
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gelu_and_moments(dtype: torch.dtype) -> None:
    """gelu, var, std, norms, extrema."""
    x = torch.randn(3, 5).to(dtype)
    near = loose(dtype)
    check_gradients(functional.gelu, x, tolerance=near)
    check_gradients(lambda x: functional.gelu(x, approximate="tanh"), x, tolerance=near)
    check_gradients(lambda x: x.var(1), x, tolerance=near)
    check_gradients(lambda x: x.var(), x, tolerance=near)
    check_gradients(lambda x: x.std(0, correction=0), x, tolerance=near)
    check_gradients(lambda x: x.mean(0), x, tolerance=near)
    check_gradients(lambda x: torch.linalg.vector_norm(x, dim=1), x, tolerance=near)
    check_gradients(lambda x: torch.linalg.vector_norm(x, 3, dim=0), x, tolerance=near)
    check_gradients(lambda x: x.amax(1), x, tolerance=near)


def test_symbolic_sizes() -> None:
    """Sizes that vary, forward and backward in one graph."""
    x = torch.randn(4, 6)
    check_gradients(lambda x: functional.layer_norm(x, (x.shape[1],)), x, dynamic=True)
    check_gradients(lambda x: functional.group_norm(x[..., None], 2), x, dynamic=True)
    check_gradients(lambda x: functional.batch_norm(x, None, None, training=True), x, dynamic=True)
    check_gradients(lambda x: x.softmax(1), x, dynamic=True)
    check_gradients(lambda x: x.log_softmax(0), x, dynamic=True)


def test_number_of_loops() -> None:
    """Two sums per row and one map give dx; one outer sum each gives dweight and dbias."""
    x, stat, w = torch.randn(4, 6), torch.randn(4, 1), torch.randn(6)
    args = (x, x, (6,), stat, stat, w, w, [True, True, True])
    assert len(single(aten.native_layer_norm_backward.default, *args).nodes) == 5


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
@pytest.mark.parametrize("dim", (0, 2))
def test_weight_norm(dim: int, dtype: torch.dtype) -> None:
    v = torch.randn(5, 4, 3, dtype=dtype)
    g = torch.randn([n if d == dim else 1 for d, n in enumerate(v.shape)], dtype=dtype)
    check_gradients(lambda v, g: aten._weight_norm_interface(v, g, dim)[0], v, g)
    check_gradients(lambda v, g: aten._weight_norm_interface(v, g, dim)[0], v, g, dynamic=True)
