"""What a call gives is held to what was promised, and to where kernels take it to start."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

from lenz.ir.plan import Lay
from lenz.pipeline import named
from lenz.plan.build import build
from lenz.runtime import executor
from tests.frontend.test_identity import programs
from tests.gpu_oracle import gpu_context, lowered_there, scheduled


@torch.library.custom_op("lenz_tests::shifted", mutates_args=())
def shifted(x: Tensor) -> Tensor:
    """One element further than an aligned address."""
    return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


@shifted.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_a_result_at_an_odd_address_is_copied() -> None:
    t = shifted(torch.arange(6.0).view(2, 3))
    told = (2, 3), (3, 1), torch.float32, -1, "lenz_tests.shifted.default"
    assert executor.lay(t, *told) is t
    kept = executor.lay(t, *told, True)
    assert kept.data_ptr() % 16 == 0 and torch.equal(kept, t)
    assert executor.lay(kept, *told, True) is kept


def test_a_kernel_for_a_gpu_reads_what_is_aligned() -> None:
    """A misaligned address, which ends a CUDA context, where a custom op gives a part of memory."""
    (p,) = programs(lambda x: shifted(x.sin()).exp(), torch.randn(8, 64))
    s = named(scheduled(lowered_there(p)))
    plan = build(s, gpu_context())
    (lay,) = [x for x in plan.steps if isinstance(x, Lay)]
    assert lay.aligned and lay.op == "lenz_tests.shifted.default"


@torch.library.custom_op("lenz_tests::negative", mutates_args=())
def negative(x: Tensor) -> Tensor:
    """The negated values, by the bit that says so: memory holds the others."""
    return torch._neg_view(x.clone())


@negative.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("lenz_tests::nothing", mutates_args=())
def nothing(x: Tensor) -> Tensor:
    """Zeros without memory."""
    return torch._efficientzerotensor(x.shape)


@nothing.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize("native", [True, False])
def test_kernels_read_no_memory_that_does_not_hold_the_elements(native: bool) -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        return negative(x) * 2, nothing(x) + 1

    x = torch.arange(6.0).view(2, 3)
    run = torch.compile(f, backend="lenz", options={"native": native, "cache": False})
    torch.testing.assert_close(run(x), (-2 * x, torch.ones(2, 3)))


def test_what_has_other_sizes_or_no_strides_does_not_fit() -> None:
    x = torch.arange(6.0).view(2, 3)
    assert executor.is_laid_out(x, (2, 3), (3, 1)) and executor.is_laid_out(x[:1], (1, 3), (7, 1))
    assert not executor.is_laid_out(x.t(), (3, 2), (2, 1)) and not executor.is_laid_out(
        x, (3, 3), (3, 1)
    )
    assert not executor.is_laid_out(x, (1 << 64, 3), (3, 1)) and not executor.is_laid_out(
        None, (2, 3), (3, 1)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls these beta
        sparse = [x.to_sparse(), x.to_sparse_csr(), x.to_mkldnn()]
    for t in sparse:
        assert not executor.is_laid_out(t, (2, 3), (3, 1))


@pytest.mark.parametrize("native", [True, False])
def test_hooks_may_give_sparse_tensors(native: bool) -> None:
    """Those in compressed rows have no strides to compare."""
    w = torch.randn(3, 4, requires_grad=True)
    run = torch.compile(torch.mm, backend="lenz", options={"native": native, "cache": False})
    with (
        warnings.catch_warnings(),
        torch.autograd.graph.saved_tensors_hooks(lambda t: t, torch.Tensor.to_sparse_csr),
    ):
        warnings.simplefilter("ignore")
        x = torch.randn(2, 3)
        (got,) = torch.autograd.grad(run(x, w).sum(), w)
    torch.testing.assert_close(got, x.sum(0)[:, None].expand(3, 4))
