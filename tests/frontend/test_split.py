"""What a training step keeps between its halves: what the backward pass reads, once, as it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, randn
from torch._functorch import partitioners
from torch.fx import GraphModule
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from lenz.frontend import FxProgram
from lenz.frontend.capture import capture
from lenz.lower import native_ops
from lenz.options import Options
from tests.cuda import Fake, cuda_programs
from tests.e2e.sides import gradients_agree

aten = torch.ops.aten
IDS = Fake((8,), torch.int64)
MUST_SAVE, PREFER_RECOMPUTE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE


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


@pytest.mark.one_in(6)
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


@pytest.mark.parametrize("pool", [(3, 2, 1), ((2, 3), (3, 1), (1, 0), (2, 1)), (7, 3), (20, 4)])
def test_places_of_maxima_are_kept_in_few_bits(pool: tuple[Any, ...]) -> None:
    def f(x: Tensor) -> Tensor:
        return F.max_pool2d(x, *pool).square().mean((2, 3)) + x.topk(32).values.mean((2, 3))

    shape, in_window = (4, 256, 64, 64), pool[0] != 20
    found = {t for _, t, _ in kept_of(f, shape) if not t.is_floating_point}
    assert found == {torch.int16, torch.uint8 if in_window else torch.int16}
    # 1 MiB of places is worth it, less is not.
    small = {(op, t) for op, t, _ in kept_of(f, (1, 1, 64, 64)) if not t.is_floating_point}
    assert all(t is torch.int64 for _, t in small)
    gradients_agree(f, lambda: [randn(*shape, requires_grad=True)])


def test_places_in_windows_of_tensors_in_channels_last_order() -> None:
    def make() -> list[Tensor]:
        x = randn(2, 128, 64, 64).to(memory_format=torch.channels_last)
        return [x.requires_grad_()]

    gradients_agree(lambda x: F.max_pool2d(x, 3, 2, 1, 1, True).square(), make)


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


def batch(x: Tensor, *args: Tensor) -> Tensor:
    return F.batch_norm(x, args[2], args[3], args[0], args[1], training=True)


def batch_in_use(x: Tensor, *args: Tensor) -> Tensor:
    return F.batch_norm(x, args[2], args[3].abs(), args[0], args[1], training=False)


def batch_alone(x: Tensor, *args: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, training=True)


def groups(x: Tensor, *args: Tensor) -> Tensor:
    return F.group_norm(x, 4, args[0], args[1])


NORM_ARGS = [Fake((64,), torch.float32, grad=g) for g in (True, True, False, False)]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("norm", [batch, batch_in_use, batch_alone, groups])
@pytest.mark.parametrize("act", [F.silu, F.gelu, F.hardswish, F.leaky_relu, F.mish])
def test_convolutions_are_kept_and_not_their_norms(
    norm: Callable[..., Tensor], act: Callable[..., Tensor]
) -> None:
    def f(x: Tensor, w: Tensor, deep: Tensor, *args: Tensor) -> Tensor:
        h = act(norm(F.conv2d(x, w), *args[:4]))
        return act(norm(F.conv2d(h, deep, groups=64), *args[4:])).mean((2, 3))

    # On GPUs group norms have statistics in half types, of which nothing exact can be made.
    for dtype in (torch.float32, torch.bfloat16)[: 1 if norm is groups else 2]:
        shapes = (8, 64, 64, 64), (64, 64, 1, 1), (64, 1, 3, 3)
        saved = kept_of(f, *shapes, *NORM_ARGS, *NORM_ARGS, dtype=dtype)
        large = [op for op, t, s in saved if len(s) == 4 and s[1] == 64 and t is dtype]
        # The second convolution has to read what the first one's activation gave; cuDNN's layout
        # of the input is a copy.
        rest = [op for op in large if op not in ("convolution.default", "clone.default")]
        assert len(large) == 3 + (dtype is torch.bfloat16) and len(rest) == 1, saved


@pytest.mark.one_in(3)
@pytest.mark.parametrize("norm", [batch, batch_in_use, batch_alone, groups])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_through_norms_in_parts(norm: Callable[..., Tensor], dtype: torch.dtype) -> None:
    def f(x: Tensor, w: Tensor, *args: Tensor) -> Tensor:
        h = norm(F.conv2d(x, w), *args)
        return F.conv2d(F.silu(h) * torch.tanh(h), w).square()

    def gradients(run: Callable[..., Tensor], exact: bool) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        stats = torch.float32 if dtype is torch.bfloat16 else dtype
        x, w = randn(4, 64, 20, 20).to(dtype), (randn(64, 64, 1, 1) / 8).to(dtype)
        weight, bias, mean, var = (randn(64).to(stats) for _ in range(4))
        args = [t.double() if exact else t for t in (x, w, weight, bias, mean, var)]
        leaves = [t.requires_grad_() for t in args[:4]]
        return torch.autograd.grad(run(*args).sum(), leaves, allow_unused=True)

    want, eager = gradients(f, True), gradients(f, False)
    got = gradients(torch.compile(f, backend="lenz", options={"verify": True}), False)
    assert [g is None for g in got] == [w is None for w in want]
    for g, e, w in zip(got, eager, want, strict=True):
        if w is not None:
            off, usual = ((t.double() - w).norm() / w.norm() for t in (g, e))
            assert off <= 1.1 * usual + 16 * torch.finfo(torch.promote_types(dtype, e.dtype)).eps


@pytest.mark.parametrize("act", [F.relu6, F.leaky_relu, lambda x: F.threshold(x, 0.7, 0.0)])
def test_a_bend_keeps_a_mask(act: Callable[[Tensor], Tensor]) -> None:
    def f(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return (act(x @ w + 1) @ v).sum()

    saved = kept_of(f, (8, 16), (16, 50), (50, 4))
    assert sorted(str(t) for _, t, s in saved if {8, 50} == {*s}) == [
        "torch.bfloat16",  # the product reads it
        "torch.bool",
    ]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["threshold", "hardtanh", "leaky_relu"])
def test_gradients_at_a_bend(name: str, dtype: torch.dtype) -> None:
    """Of numbers at the bend too, which half types round; some gradients are NaN.

    That of NaN is left out: ATen's vectors and scalars differ.
    """
    at = torch.tensor([0.7, -0.7, 0.3, 0.0, -0.0, math.inf, -math.inf])
    x = torch.cat([at, at.nextafter(at + 1), at.nextafter(at - 1), randn(100)]).to(dtype)
    acts: dict[str, Callable[[Tensor], Tensor]] = {
        "threshold": lambda x: F.threshold(x * 1, 0.7, 0.0),
        "hardtanh": lambda x: F.hardtanh(x * 1, -0.7, 0.3),
        "leaky_relu": lambda x: F.leaky_relu(x * 1, 0.3),
    }
    g = torch.where(torch.arange(x.numel()) % 7 == 0, math.nan, randn(x.numel())).to(dtype)
    found = []
    for run in (acts[name], torch.compile(acts[name], backend="lenz")):
        leaf = x.clone().requires_grad_()
        run(leaf).backward(g)
        found.append(leaf.grad)
    torch.testing.assert_close(found[1], found[0], equal_nan=True)


def test_an_activation_before_its_gate_is_computed_again() -> None:
    """The norm's input is kept, and the product that the last convolution reads."""

    def f(x: Tensor, w: Tensor, norm: Tensor, gate: Tensor, v: Tensor) -> Tensor:
        y = F.conv2d(x, w)
        y = F.hardswish(F.batch_norm(y, None, None, norm, norm, training=True))
        return F.conv2d(y * F.conv2d(y.mean((2, 3), keepdim=True), gate).sigmoid(), v).sum()

    saved = kept_of(f, (8, 16, 32, 32), (64, 16, 1, 1), (64,), (64, 64, 1, 1), (8, 64, 1, 1))
    assert [s for *_, s in saved].count((8, 64, 32, 32)) == 2, saved


def test_a_gated_sum_keeps_no_product() -> None:
    """The gradients of the gate and of what it multiplies read both factors."""

    def f(x: Tensor, w: Tensor, gate: Tensor, gain: Tensor, v: Tensor) -> Tensor:
        y = F.conv2d(x, w)
        y = y * F.conv2d(y.mean((2, 3), keepdim=True), gate).sigmoid()
        return F.conv2d(F.gelu(2 * y * gain + x), v).sum()

    sizes = (8, 64, 32, 32), (64, 64, 1, 1), (64, 64, 1, 1), (), (8, 64, 1, 1)
    saved = [op for op, _, s in kept_of(f, *sizes) if s == sizes[0] and op != "clone.default"]
    assert sorted(saved) == ["convolution.default", "gelu.default"], saved


def test_a_bend_keeps_a_mask_if_its_gradient_is_a_part() -> None:
    """The gradient of a part of a join has longer strides than the part."""

    def f(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return F.conv2d(torch.cat([F.relu(F.conv2d(x, w) + x), x], 1), v).sum()

    saved = kept_of(f, (8, 16, 32, 32), (16, 16, 1, 1), (8, 32, 1, 1))
    assert ("le.Scalar", torch.bool, (8, 16, 32, 32)) in saved, saved


def test_masks_are_kept_in_bytes_and_inputs_of_means_not_at_all() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        h = F.relu(F.conv2d(x, w))
        y = F.adaptive_avg_pool2d(h * (torch.rand_like(h) > 0.1) / 0.9, (16, 16)).relu()
        return F.avg_pool2d(F.dropout(y, 0.5), 2)

    saved = kept_of(f, (8, 64, 64, 64), (64, 64, 1, 1))[1:]  # without the result
    assert {t for op, t, s in saved if op != "clone.default"} == {torch.bool}, saved


def test_under_autocast_wide_values_are_computed_again() -> None:
    """Norms run in f32: their arguments are kept in bf16 or not at all, their results in neither.

    The products keep their arguments; only the norm's are recomputed.
    """

    def f(x: Tensor, w: Tensor, norm: Tensor, v: Tensor) -> Tensor:
        y = F.gelu(x @ w)
        return F.layer_norm(y.float(), (512,), norm, norm).bfloat16() @ v

    norm = Fake((512,), torch.float32, grad=True)
    saved = kept_of(f, (1024, 64), (64, 512), norm, (512, 64))[1:]  # without the result
    assert [(op, t) for op, t, (_, n) in saved if n == 512] == [("mm.default", torch.bfloat16)]


def test_under_autocast_a_norm_of_channels_is_computed_again() -> None:
    """Its result is permuted before a convolution reads it in bf16."""

    def f(x: Tensor, w: Tensor, norm: Tensor, v: Tensor) -> Tensor:
        y = F.conv2d(x, w).permute(0, 2, 3, 1)
        y = F.layer_norm(y.float(), (128,), norm, norm).permute(0, 3, 1, 2)
        return F.conv2d(y.bfloat16(), v)

    norm = Fake((128,), torch.float32, grad=True)
    saved = kept_of(f, (8, 16, 32, 32), (128, 16, 1, 1), norm, (8, 128, 1, 1))[1:]
    assert [op for op, _, s in saved if math.prod(s) == 1 << 20] == ["convolution.default"]


def test_a_wide_value_is_kept_where_it_must_be_in_memory() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return (x * 2).float() @ w

    saved = kept_of(f, (64, 32), Fake((32, 16), torch.float32, grad=True))[1:]
    assert (torch.float32, 64 * 32) in [(t, math.prod(s)) for _, t, s in saved]


def test_a_batch_norm_of_a_sum_is_computed_again() -> None:
    """A convolution with a bias is an op that fuses with the norm behind it."""

    def f(x: Tensor, w: Tensor, b: Tensor, norm: Tensor, v: Tensor) -> Tensor:
        y = F.conv2d(x, w) + b
        y = F.gelu(F.batch_norm(y, None, None, norm, norm, training=True))
        return F.conv2d(y, v)

    norm = Fake((64,), torch.float32, grad=True)
    sizes = (8, 16, 32, 32), (64, 16, 1, 1), (64, 1, 1), norm, (8, 64, 1, 1)
    for dtype in (torch.bfloat16, torch.float32):
        saved = kept_of(f, *sizes, dtype=dtype)[1:]
        big = [op for op, _, s in saved if s == (8, 64, 32, 32)]
        assert sorted(big) == ["add.Tensor", "gelu.default"], saved


def test_a_bend_keeps_no_mask_behind_a_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm's gradient reads what the mask is made of. torch 2.11 does not tag leaky relus."""
    monkeypatch.setattr(partitioners, "pointwise_ops", list)

    def f(x: Tensor, w: Tensor, norm: Tensor, v: Tensor) -> Tensor:
        y = F.batch_norm(F.conv2d(x, w), None, None, norm, norm, training=True)
        return F.conv2d(F.leaky_relu(y, inplace=True) + x[:, :1], v)

    sizes = (8, 16, 32, 32), (64, 16, 1, 1), Fake((64,), torch.float32, grad=True), (8, 64, 1, 1)
    assert torch.bool not in {t for _, t, _ in kept_of(f, *sizes)}


def test_rows_of_a_table_are_looked_up_again() -> None:
    def f(ids: Tensor, table: Tensor, norm: Tensor, w: Tensor) -> Tensor:
        x = F.embedding(ids, table)
        return x + (F.layer_norm(x, (512,), norm).bfloat16() @ w).sin() @ w

    f32 = [Fake(shape, torch.float32, grad=True) for shape in ((50, 512), (512,))]
    sizes = Fake((1024,), torch.int64), *f32, (512, 512)
    assert "embedding.default" not in {op for op, *_ in kept_of(f, *sizes)}


@pytest.mark.parametrize("op", [aten.embedding.default, aten._to_copy.default, aten.mm.default])
def test_what_a_policy_saves_is_kept(op: torch._ops.OpOverload) -> None:
    def policy(_: Any, called: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return MUST_SAVE if called is op else PREFER_RECOMPUTE

    def block(ids: Tensor, table: Tensor, norm: Tensor, w: Tensor) -> Tensor:
        x = F.embedding(ids, table)
        return (F.layer_norm(x.float(), (512,), norm).bfloat16() @ w).sin()

    def f(*args: Tensor) -> Any:
        contexts = partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(block, *args, use_reentrant=False, context_fn=contexts)

    norm = Fake((512,), torch.float32, grad=True)
    saved = kept_of(f, Fake((1024,), torch.int64), (50, 512), norm, (512, 512))[1:]
    names = [name for name, *_ in saved if name != "t.default"]  # of the product's weight
    count = 2 if op is aten._to_copy.default else 1
    assert names == [str(op).removeprefix("aten.")] * count


def test_a_copy_of_what_is_kept_is_not_kept() -> None:
    """The gradients of attention read its result, that of the product a transpose of it."""

    def f(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
        heads = F.scaled_dot_product_attention(q, k, v)
        return (heads.transpose(1, 2).reshape(4, 128, 256) @ w).sum()

    saved = kept_of(f, *[(4, 4, 128, 64)] * 3, (256, 256), dtype=torch.bfloat16)
    assert sum(math.prod(s) == 4 * 128 * 256 for _, _, s in saved) == 1, saved


@pytest.mark.parametrize("pooled", [False, True])
def test_a_copy_of_what_a_norm_makes_again_is_not_kept(pooled: bool) -> None:
    """A convolution reads half of the channels, which is copied to be dense: a CSP stage.

    What max pooling makes is kept: it costs more than a read.
    """

    def f(x: Tensor, w: Tensor, norm: Tensor, v: Tensor) -> Tensor:
        y = F.conv2d(x, w)
        y = F.batch_norm(y, None, None, norm, norm, training=True)
        y = F.max_pool2d(F.leaky_relu(y), 3, 1, 1) if pooled else F.leaky_relu(y)
        return F.conv2d(y.chunk(2, 1)[0], v)

    norm = Fake((64,), torch.float32, grad=True)
    saved = kept_of(f, (8, 16, 32, 32), (64, 16, 1, 1), norm, (16, 32, 1, 1))[1:]
    copies = [s for op, _, s in saved if s == (8, 32, 32, 32)]
    assert len(copies) == pooled, saved


@pytest.mark.parametrize("outside", [False, True])
def test_a_checkpoint_beside_the_same_calls(outside: bool) -> None:
    """Merged calls would belong to two checkpoints: torch then can neither save nor recompute."""

    def f(x: Tensor) -> Tensor:
        with torch.no_grad():
            y = norm(x) if outside else checkpoint(norm, x, use_reentrant=False)
        return checkpoint(norm, x, use_reentrant=False) * y

    norm = torch.nn.LayerNorm(8)
    options = {"on_error": "raise"}
    gradients_agree(f, lambda: (randn(4, 8, requires_grad=True),), options=options)
