"""What a training step keeps between its halves: what the backward pass reads, once, as it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, randn
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from lenz.frontend import FxProgram, capture
from lenz.lower import native_ops
from lenz.options import Options
from tests.cuda import Fake, cuda_programs
from tests.e2e.sides import gradients_agree

IDS = Fake((8,), torch.int64)


def kept(program: FxProgram) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    """Op, type and shape of the tensors of two dimensions or more that a forward half makes."""
    outputs = {o.node: o for o in reversed(program.outputs)}
    return [
        (str(node.target).partition(".")[2], o.value.dtype, tuple(o.value.shape))
        for node, o in reversed(outputs.items())
        if node is not None and len(o.shape) > 1 and o.alias_input is None
    ]


def kept_of(f: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    forward, _ = cuda_programs(f, *args, grad=True, **options)
    assert forward.kind == "forward"
    return kept(forward)


def linear_loss(x: Tensor, w: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy((x @ w).float(), ids)


def test_a_loss_keeps_the_logits_and_two_numbers_per_row() -> None:
    bf16, f32 = torch.bfloat16, torch.float32
    assert kept_of(linear_loss, (8, 16), (16, 50), IDS) == [
        ("mm.default", bf16, (8, 50)),
        ("amax.default", f32, (8, 1)),
        ("log.default", f32, (8, 1)),
    ]


def test_log_softmax_that_is_a_result_is_not_made_twice() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return F.log_softmax(x @ w, -1)

    assert [op for op, *_ in kept_of(f, (8, 16), (16, 50))].count("_to_copy.default") == 1


def test_softmax_before_a_product_is_kept_as_the_product_reads_it() -> None:
    def f(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        scores = x @ w / math.sqrt(16)
        return (torch.softmax(scores, -1, dtype=torch.float32).to(v.dtype) @ v).sum()

    saved = kept_of(f, (8, 16), (16, 50), (50, 4))
    wide = [x for x in saved if 50 in x[2]]
    assert [dtype for _, dtype, _ in wide] == [torch.bfloat16] * 2, saved


def test_an_activation_of_parts_keeps_its_input_alone() -> None:
    def f(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        h = x @ w
        h = 0.5 * h * (1 + torch.tanh(0.8 * (h + 0.04 * h**3)))
        return h @ v

    ops = [op for op, *_ in kept_of(f, (8, 16), (16, 50), (50, 4))]
    assert "tanh.default" not in ops and ops.count("mm.default") == 2, ops


def test_a_transpose_hides_no_activation() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).relu().transpose(0, 1).exp().sum()

    assert [op for op, *_ in kept_of(f, (8, 16), (16, 50))] == ["mm.default"]


@pytest.mark.parametrize("f", [F.softmax, F.log_softmax])
def test_softmax_in_parts_has_eagers_strides_where_the_graph_runs_in_eager(f: Any) -> None:
    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return capture(gm, inputs, FxProgram.eager, Options(cache=False), native_ops())

    x = randn(3, 2).t().requires_grad_()
    got, want = torch.compile(lambda a: f(a, -1), backend=backend)(x), f(x, -1)
    assert got.stride() == want.stride(), "those of the parts, which follow x"


@pytest.mark.one_in(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("dynamic", [False, True])
def test_gradients_of_taken_apart_softmax(dtype: torch.dtype, dynamic: bool) -> None:
    ids = torch.tensor([1, 4, -100, 0, 2, 2])

    def loss(x: Tensor, w: Tensor) -> Tensor:
        return F.cross_entropy((x @ w).tanh(), ids, weight=w[0].detach().abs())

    def mixed(x: Tensor, w: Tensor) -> Tensor:
        y = F.log_softmax(x @ w, 0)
        return (y * F.softmax(x @ w, -1).t().t()).sum() + y.exp().sum()

    def again(x: Tensor, w: Tensor) -> Tensor:
        made = checkpoint(lambda a: F.log_softmax(a @ w, -1), x, use_reentrant=False)
        assert isinstance(made, Tensor)
        return F.nll_loss(made, ids)

    for f in (loss, mixed, again):
        gradients_agree(
            f,
            lambda: [randn(s, dtype=dtype, requires_grad=True) for s in ((6, 4), (4, 5))],
            tol=3e-2 if dtype is torch.bfloat16 else 1e-4,
            dynamic=dynamic,
        )


def test_places_of_maxima_are_kept_in_few_bits() -> None:
    def f(x: Tensor) -> Tensor:
        return F.max_pool2d(x, 3, 2, 1) + x.topk(32).values[:, :, ::2]

    shape = (2, 128, 64, 64)
    found = {(op, t) for op, t, s in kept_of(f, shape) if not t.is_floating_point}
    assert found == {("_to_copy.default", torch.int16)}
    # 1 MiB of places is worth it, less is not.
    small = {(op, t) for op, t, _ in kept_of(f, (1, 1, 64, 64)) if not t.is_floating_point}
    assert all(t is torch.int64 for _, t in small)
    gradients_agree(f, lambda: [randn(*shape, requires_grad=True)])


def normed(x: Tensor, w: Tensor, b: Tensor, v: Tensor) -> Tensor:
    """Products of norms, one of them transposed."""
    y = F.layer_norm(x, x.shape[-1:], w, b)
    z = F.layer_norm(x.tanh(), x.shape[1:]).flatten(0, 1).t()
    return (y @ v) + (v.t() @ z).t().reshape(*x.shape[:2], -1)


def test_a_norm_is_not_kept_beside_what_its_gradient_reads() -> None:
    shapes = (4, 256, 256), (256,), (256,), (256, 64)
    saved = kept_of(normed, *shapes)
    wide = [op for op, _, s in saved if math.prod(s) == math.prod(shapes[0])]
    assert set(wide) <= {"tanh.default"}, saved
    # Less than 256 KiB are not worth a kernel.
    assert any(math.prod(s) == 4 * 16 * 256 for *_, s in kept_of(normed, (4, 16, 256), *shapes[1:]))
    for dtype, tol in ((torch.float32, 2e-3), (torch.float64, 1e-8)):
        gradients_agree(
            normed,
            lambda t=dtype: [randn(s, dtype=t, requires_grad=True) for s in shapes],  # type: ignore[misc]
            tol=tol,
        )


def test_a_norm_of_a_transposed_tensor_is_computed_again_in_its_own_layout() -> None:
    """Its result is contiguous, which the view of it needs; the formula's has the input's order."""
    x, w = torch.randn(8, 96, 144), torch.randn(96, 8, requires_grad=True)

    def fn(x: Tensor, w: Tensor) -> Tensor:
        h = (x * w[:, :1]).transpose(1, 2)
        return (h + F.layer_norm(h, (96,)).view(-1, 96).mm(w).sum(-1, True).view(8, 144, 1)).sum()

    (want,) = torch.autograd.grad(fn(x.double(), w.double()), w)
    (got,) = torch.autograd.grad(torch.compile(fn, backend="lenz")(x, w), w)
    torch.testing.assert_close(got, want.float(), rtol=1e-3, atol=1e-2)
