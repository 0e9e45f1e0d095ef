"""Convolutions run channels last, with one conversion at each border and eager's strides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node, symbolic_trace

from lenz.frontend import FxProgram, layout
from tests.cuda import Fake, fake_cuda, programs_of

LAST = torch.channels_last


class Block(nn.Module):
    """Two convolutions, a residual sum and a linear layer behind a `view`."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1, **options)
        self.norm = nn.BatchNorm2d(16, **options)
        self.second = nn.Conv2d(16, 16, 3, padding=1, **options)
        self.last = nn.Linear(16 * 4 * 4, 5, **options)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Both the image features and the scores."""
        y = F.relu(self.norm(self.first(x)), inplace=True)
        z = F.max_pool2d(F.relu(self.second(y)) + y, 2)
        return z, self.last(z.view(z.shape[0], -1))


def captured(
    build: Callable[..., nn.Module], grad: bool, shape: Sequence[int], **options: Any
) -> list[FxProgram]:
    with fake_cuda():
        model = build(device="cuda", **options)
        x = Fake(tuple(shape), options.get("dtype", torch.float32)).make()
        with torch.set_grad_enabled(grad):
            return programs_of(model, x)


def calls(p: FxProgram, op: str) -> list[Node]:
    """The calls of an op."""
    return [n for n in p.nodes if str(n.target) == f"aten.{op}.default"]


def images(p: FxProgram, op: str) -> list[Tensor]:
    """The inputs of the calls of an op."""
    place = 1 if "backward" in op else 0
    return [n.args[place].meta["val"] for n in calls(p, op)]  # type: ignore[union-attr]


@pytest.mark.parametrize("grad", [False, True])
def test_one_conversion_at_each_border(grad: bool) -> None:
    programs = captured(Block, grad, (2, 3, 8, 8), dtype=torch.bfloat16)
    (p, *backward) = programs
    assert len(images(p, "convolution")) == 2
    assert all(x.is_contiguous(memory_format=LAST) for x in images(p, "convolution"))
    # The image, the features that are returned, those that are viewed as rows, and both weights.
    assert sum("clone" in str(n.target) for n in p.nodes) <= 5
    assert p.outputs[0].value.is_contiguous()
    for b in backward:
        found = images(b, "convolution_backward")
        assert len(found) == 2 and all(x.is_contiguous(memory_format=LAST) for x in found)


class Turned(Block):
    """Attributes between the convolutions."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The features of both, the second from twice the first."""
        y = self.first(x)
        return y, self.second(y + y.flatten(2).mT.mT.view(y.shape).real)


@pytest.mark.parametrize("grad", [False, True])
def test_an_attribute_tells_no_strides(grad: bool) -> None:
    p = captured(Turned, grad, (2, 3, 8, 8), dtype=torch.bfloat16)[0]
    found = images(p, "convolution")
    assert len(found) == 2 and all(x.is_contiguous(memory_format=LAST) for x in found)


@pytest.mark.parametrize("grad", [False, True])
def test_bias_its_gradient_and_layout_of_weights_are_kernels(grad: bool) -> None:
    def build(**options: Any) -> nn.Module:
        depthwise = nn.Conv2d(16, 16, 3, groups=16, **options)
        return nn.Sequential(nn.Conv2d(8, 16, 3, **options), nn.ReLU(), depthwise, nn.ReLU(),
                             nn.Conv2d(16, 8, 1, bias=False, **options))  # fmt: skip

    p, *others = captured(build, grad, (2, 8, 9, 9), dtype=torch.bfloat16)
    for b in others:
        assert [n.args[-1][2] for n in calls(b, "convolution_backward")] == [False] * 3  # type: ignore[index]
        sums = [n for n in b.nodes if str(n.target) == "aten.sum.dim_IntList"]
        assert [tuple(n.meta["val"].shape) for n in sums] == [(16,), (16,)]
        assert all(n.meta["val"].dtype is torch.bfloat16 for n in sums)
    found = calls(p, "convolution")
    assert len(found) == 3 and all(n.args[2] is None for n in found)
    weights = [n.args[1] for n in found]
    assert weights[0].target is torch.ops.aten.clone.default  # type: ignore[union-attr]
    assert weights[0].meta["val"].is_contiguous(memory_format=LAST)  # type: ignore[union-attr]
    assert [w.op for w in weights[1:]] == ["placeholder", "placeholder"]  # type: ignore[union-attr]
    (p, *_) = captured(build, grad, (2, 8, 9, 9))  # f32 as it lies
    assert [n.args[1].op for n in calls(p, "convolution")] == ["placeholder"] * 3  # type: ignore[union-attr]
    assert all(n.args[2] is None for n in calls(p, "convolution"))


@pytest.mark.parametrize("turned", [False, True])
def test_gradients_have_eagers_strides(turned: bool) -> None:
    def f(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        return F.conv2d(F.conv2d(x.sin(), v).relu(), w, padding=1).relu()

    with fake_cuda():
        shapes = [(2, 8, 9, 9), (16, 8, 1, 1), (16, 16, 3, 3)]
        args = [Fake(s, torch.bfloat16).make() for s in shapes]
        if turned:
            args[0] = args[0].mT.contiguous().mT
        args = [a.requires_grad_() for a in args]
        y = f(*args)
        with torch.autograd.set_multithreading_enabled(False):
            want = torch.autograd.grad(y, args, torch.empty_like(y))
        forward, backward = programs_of(f, *args)
    assert all(x.is_contiguous(memory_format=LAST) for x in images(forward, "convolution"))
    assert all(
        x.is_contiguous(memory_format=LAST) for x in images(backward, "convolution_backward")
    )
    assert [o.value.stride() for o in backward.outputs] == [g.stride() for g in want]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_of_both_passes_are_channels_last(dtype: torch.dtype) -> None:
    """Both read one conversion to a half type; a copy of half types is made anew, not kept."""

    def f(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        x, v, w = (t.to(torch.bfloat16) for t in (x, v, w))
        return F.conv2d(F.conv2d(x, v).relu(), w).relu()

    with fake_cuda():
        x, v, w = (Fake(s, dtype).make() for s in [(2, 8, 9, 9), (8, 8, 3, 3), (8, 8, 3, 3)])
        forward, backward = programs_of(f, x, v.requires_grad_(), w.requires_grad_())
    used: list[Any] = [n.args[1] for n in calls(forward, "convolution")]
    kept: list[Any] = [n.args[2] for n in calls(backward, "convolution_backward")]
    assert all(n.meta["val"].is_contiguous(memory_format=LAST) for n in (*used, kept[0]))
    if dtype is torch.float32:
        assert kept[0].op == "placeholder" and kept[0].name == used[1].name
    else:
        assert kept[0].target is torch.ops.aten.clone.default
        assert kept[0].args[0].op == "placeholder"
    # The first convolution's image needs no gradient: no elements of its weights are read.
    assert kept[1].op == "placeholder"


def test_autocast_converts_the_operands_of_a_convolution() -> None:
    """The call has no conversion, and one of them has the half type already."""
    with FakeTensorMode():
        gm = symbolic_trace(lambda x, w, b: F.conv2d(x, w, b))
        values = [
            torch.empty(2, 8, 9, 9, dtype=torch.bfloat16, requires_grad=True),
            torch.empty(16, 8, 3, 3, requires_grad=True),
            torch.empty(16, requires_grad=True),
        ]
        *given, call, _ = gm.graph.nodes
        made = torch.empty(2, 16, 7, 7, dtype=torch.bfloat16)
        for n, value in zip((*given, call), (*values, made), strict=True):
            n.meta["example_value"] = value
        orders = layout.gradient_orders(call)
        assert orders == {0: (0, 1, 2, 3), 1: (0, 1, 2, 3), 2: (0,)}


@pytest.mark.parametrize(
    "build",
    [
        lambda **o: Block(**{**o, "dtype": torch.float32}),
        lambda **o: nn.Conv2d(16, 16, 3, groups=16, **o),
        lambda **o: nn.Conv2d(16, 3, 3, **o),
    ],
)
def test_what_does_not_pay_stays(build: Callable[..., nn.Module]) -> None:
    is_block = isinstance(build(device="cpu"), Block)
    shape, dtype = ((2, 3, 8, 8), torch.float32) if is_block else ((2, 16, 8, 8), torch.bfloat16)
    (p,) = captured(build, False, shape, dtype=dtype)
    assert all(x.is_contiguous() for x in images(p, "convolution"))


def moved(monkeypatch: pytest.MonkeyPatch, f: Callable[..., Any], *args: Tensor) -> bool:
    """Whether convolutions of the CPU were moved, if they paid; with results as eager's."""
    monkeypatch.setattr(layout, "pays", lambda n: True)
    found: list[GraphModule] = []

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> GraphModule:
        layout.channels_last(gm)
        gm.graph.lint()
        found.append(gm)
        return gm

    with torch.no_grad():
        got = torch.compile(f, backend=backend, fullgraph=True)(*(a.clone() for a in args))
        want = f(*(a.clone() for a in args))
    torch.testing.assert_close(got, want)
    leaves = zip(*(torch.utils._pytree.tree_leaves(x) for x in (got, want)), strict=True)
    assert all(g.stride() == w.stride() for g, w in leaves)
    (gm,) = found
    return "channels_last" in gm.code


X, W = torch.randn(2, 3, 8, 8), torch.randn(16, 3, 3, 3)


@pytest.mark.parametrize(
    "after",
    [
        lambda y: y,
        lambda y: y.view(2, -1),
        lambda y: (y.permute(0, 2, 3, 1), y.amax()),
        lambda y: y.flatten(2).transpose(1, 2),
        lambda y: y.relu_().view(2, 16, -1) + 1,
        lambda y: (y * 2, y.mean((2, 3), keepdim=True)),
    ],
)
def test_results_have_eagers_strides(
    monkeypatch: pytest.MonkeyPatch, after: Callable[[Tensor], Any]
) -> None:
    assert moved(monkeypatch, lambda x, w: after(F.conv2d(x, w)), X, W)


@torch.library.custom_op("lenz_tests::offsets", mutates_args=())
def offsets(x: Tensor) -> Tensor:
    """For each element its place in memory."""
    return torch.arange(x.numel()).as_strided(x.shape, x.stride()).contiguous()


@offsets.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=torch.int64)


def strided(x: Tensor, w: Tensor) -> Tensor:
    p = torch.ops.aten.constant_pad_nd.default(F.conv2d(x, w), [2, 2, 2, 2], 0.0)
    return torch.as_strided(p, [2, 16, 2, 5, 3], [1600, 100, 30, 1, 10]).clone()


@pytest.mark.parametrize(
    "f",
    [
        strided,
        lambda x, w: strided(x, w) * F.conv2d(x, w).relu().as_strided((3,), (5,), 7).sum(),
        lambda x, w: offsets(F.conv2d(x, w) * 2),
        lambda x, w: (offsets(F.conv2d(x, w).transpose(1, 2)), F.conv2d(x, w).sum(1)),
        lambda x, w: F.conv2d(x[..., :3, :3], w),  # to one element, which has any strides
    ],
)
def test_what_looks_at_strides_sees_eagers(
    monkeypatch: pytest.MonkeyPatch, f: Callable[..., Any]
) -> None:
    assert moved(monkeypatch, f, X, W)


def written_view(x: Tensor, w: Tensor) -> Tensor:
    y = F.conv2d(x, w)
    y.view(2, -1).zero_()
    return y


@pytest.mark.parametrize(
    "f",
    [
        written_view,
        lambda x, w: F.conv2d(x, w)[:, 1:],
        lambda x, w: (y := F.conv2d(x, w), y.view(2, -1)),
        lambda x, w: F.conv2d(x, w).add_(1).as_strided((3,), (5,), 7).clone(),
        lambda x, w: F.conv2d(x, w)[1:].as_strided((3,), (5,)).clone(),
    ],
)
def test_graphs_whose_results_could_differ_stay(
    monkeypatch: pytest.MonkeyPatch, f: Callable[..., Any]
) -> None:
    assert not moved(monkeypatch, f, X, W)
