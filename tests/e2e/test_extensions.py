"""What surrounds plain ops: control flow, checkpoints, hooks, transforms, kinds of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, randn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as map_over
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)
from torch.utils.checkpoint import checkpoint

import lenz
from tests.e2e.sides import agree, gradients_agree

pytestmark = pytest.mark.filterwarnings("ignore:.*in eager.*")
layer = nn.Linear(5, 5)


def wide(*shape: int, grad: bool = False) -> Callable[[], list[Tensor]]:
    return lambda: [randn(shape, requires_grad=grad)]


def branches(x: Tensor, w: Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda a: (a @ w).sin(), lambda a: (a @ w).relu() + 1, (x,)) * 2


@pytest.mark.parametrize("sign", (1, -1))
def test_branches(sign: int) -> None:
    agree(branches, lambda: (randn(4, 5).abs() * sign, randn(5, 5)), fullgraph=True)
    gradients_agree(
        branches,
        lambda: ((randn(4, 5).abs() * sign).requires_grad_(), randn(5, 5, requires_grad=True)),
    )


def test_scans_and_maps() -> None:
    def running(x: Tensor, w: Tensor) -> Any:
        return scan(lambda c, y: ((c @ w + y).tanh(), c * y), torch.zeros(3), x, dim=0)

    agree(running, lambda: (randn(5, 3), randn(3, 3)), fullgraph=True)
    gradients_agree(
        lambda x, w: running(x, w)[1],
        lambda: (randn(5, 3, requires_grad=True), randn(3, 3, requires_grad=True)),
    )
    agree(
        lambda x: associative_scan(lambda a, b: a * b + 1, x, 0, combine_mode="generic"),
        wide(8, 3),
        tol=1e-4,
    )
    agree(lambda x, y: map_over(lambda a, b: (a * b).sin(), x, y), lambda: (randn(4, 3), randn(3)))


def looped(x: Tensor, w: Tensor) -> Any:
    def body(n: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.cond(n % 2 == 0, lambda c: (c @ w).sin(), lambda c: c @ (w * 1.5), (c,))
        return n + 1, y.t() * 0.5

    return while_loop(lambda n, c: n < 5, body, (torch.tensor(0), x.t()))


def folded(x: Tensor, w: Tensor) -> Any:
    def step(c: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return c.t().sin() @ w, (c * y).t() + 1

    return scan(step, w + 1, x.transpose(1, 2), dim=0)


def mapped(x: Tensor, w: Tensor) -> Any:
    return map_over(lambda a, b: ((a * b).softmax(-1), a.t() @ b), x.transpose(1, 2), w)  # type: ignore[arg-type]


@torch.compiler.nested_compile_region
def region(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = (x @ w).sin()
    return y.exp() * 2, y.sum()


@torch.compiler.nested_compile_region
def counted(x: Tensor, n: Tensor) -> Tensor:
    n.add_(1)
    return x.sin() * n


def regions(x: Tensor, w: Tensor) -> Any:
    x, total = region(x, w)
    return *region(x.sin(), w), total


def writing_regions(x: Tensor, n: Tensor) -> Any:
    return counted(counted(x, n).exp(), n).cos()


# What a loop hands to its body has other strides in the second round, or than tracing said.
BODIES = (
    ("while_loop", looped, (4, 4), 4),
    ("scan", folded, (3, 4, 4), 1),
    ("map_impl", mapped, (3, 4, 4), 1),
    ("invoke_subgraph", regions, (4, 4), 1),
)


@pytest.mark.one_in(5)
@pytest.mark.parametrize(("op", "fn", "shape", "count"), BODIES, ids=[b[0] for b in BODIES])
@pytest.mark.parametrize("dynamic", (False, True))
def test_bodies_are_compiled(
    op: str, fn: Callable[..., Any], shape: tuple[int, ...], count: int, dynamic: bool
) -> None:
    def make() -> tuple[Tensor, Tensor]:
        return randn(shape), randn(4, 4)

    agree(fn, make, dynamic=dynamic, fullgraph=True, tol=1e-4)
    *bodies, outer = lenz.explain(fn, dynamic=dynamic)(*make()).graphs
    calls_of_bodies = {e.op for e in outer.externs if e.op.startswith("higher_order.")}
    assert calls_of_bodies == {f"higher_order.{op}"}, outer.externs
    assert [b.kind for b in bodies] == ["body"] * count
    calls = {e.op for b in bodies for e in b.externs}
    assert calls <= {"aten.mm.default", "aten.bmm.default", "higher_order.cond"}, calls
    assert not any(b.skips for b in bodies)


@pytest.mark.parametrize("grad", [False, True])
def test_nested_regions(grad: bool) -> None:
    def make(shape: tuple[int, ...] = (4, 4)) -> tuple[Tensor, ...]:
        return tuple(randn(shape, requires_grad=grad) for _ in range(2))

    if grad:
        gradients_agree(lambda x, w: torch.add(*regions(x, w)[:2]), make)
    else:
        with torch.no_grad():
            agree(writing_regions, make, options={"on_error": "raise"})


def heads(*counts: int, tokens: int = 40, grad: bool = False) -> list[Tensor]:
    """One tensor for each count of heads, with the strides of a transposed projection."""
    made = [randn(2, tokens, n, 8).transpose(1, 2) for n in counts]
    return [t.requires_grad_(grad) for t in made]


def alibi(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return s * 2 + (j - i) / (h + 1)


def flexible(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: BlockMask | None = None
) -> tuple[Tensor, Tensor]:
    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return alibi(s, b, h, i, j) + bias[h, i] * bias[h, j].tanh()

    out, aux = flex_attention(
        q, k, v, score, mask, enable_gqa=True, return_aux=AuxRequest(lse=True)
    )
    assert aux.lse is not None
    return out, aux.lse


def by_hand(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    (n, heads), group = (q.shape[2], q.shape[1]), q.shape[1] // k.shape[1]
    k, v, i = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), torch.arange(n)
    slopes = torch.arange(1, heads + 1)[:, None, None]
    s = q @ k.mT / q.shape[-1] ** 0.5 * 2 + (i - i[:, None]) / slopes
    s = s + bias[:, :, None] * bias[:, None].tanh()
    if mask is not None:
        s = s.where(mask, -float("inf"))
    return s.softmax(-1) @ v, s.logsumexp(-1)


def banded(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i >= j) & ((i - j) < 7 * (h + 1))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dynamic", (False, True))
@pytest.mark.parametrize("masked", (False, True))
def test_flexible_attention(masked: bool, dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has no gradient of it on CPUs, of which lenz knows nothing."""
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_validate_device", lambda *_: None)
    block = create_block_mask(banded, 2, 4, 40, 40, device="cpu") if masked else None
    i = torch.arange(40)
    mask = banded(i, i[:4, None, None], i[:, None], i) if masked else None

    def step(fn: Callable[..., Any], mask: Any) -> list[Tensor]:
        torch.manual_seed(0)
        args = [*heads(4, 2, 2, grad=True), randn(4, 40, requires_grad=True)]
        out, lse = fn(*args, mask)
        (out.square().sum() + lse.sin().sum()).backward()
        return [out, lse, *(a.grad for a in args)]

    report = lenz.explain(lambda m: step(flexible, m), dynamic=dynamic)(block)
    for got, want in zip(report.result, step(by_hand, mask), strict=True):  # type: ignore[call-overload]
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert {g.kind for g in report.graphs} == {"forward", "backward"}
    calls = {e.op for g in report.graphs for e in g.externs}
    assert calls == {"aten.bmm.default"}


@pytest.mark.diagonal(2)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float64))
def test_flexible_attention_is_that_of_eager(dtype: torch.dtype) -> None:
    """Also where a row is masked out, and with the strides of the queries."""

    mask = create_block_mask(lambda b, h, i, j: (i > 3) & (j < i), 1, 1, 40, 40, device="cpu")

    def make() -> list[Tensor]:
        return [t.to(dtype) for t in (*heads(4, 4, 4), randn(4, 40))]

    tol = 1e-2 if dtype is torch.bfloat16 else 1e-5
    out, lse = agree(lambda *args: flexible(*args, mask), make, tol=tol, fullgraph=True)  # type: ignore[call-arg]
    assert not out[:, :, :4].any() and lse[:, :, :4].isneginf().all()


@pytest.mark.parametrize("reentrant", (False, True))
def test_checkpoints(reentrant: bool) -> None:
    def fn(x: Tensor) -> Tensor:
        y: Tensor = checkpoint(lambda y: layer(y).relu().sin(), x, use_reentrant=reentrant)
        return y * 2

    (x,), (y,) = wide(4, 5, grad=True)(), wide(4, 5, grad=True)()
    y.data.copy_(x.data)
    fn(x).square().sum().backward()
    torch.compile(fn, backend="lenz")(y).square().sum().backward()
    torch.testing.assert_close(y.grad, x.grad)


class Square(torch.autograd.Function):
    """A gradient that is not the true one shows that it is used."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * grads[0] * x


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh())
    model[0].register_forward_hook(lambda m, i, o: o * 2)
    model[1].register_forward_pre_hook(lambda m, i: (i[0] + 1,))
    model[0].register_full_backward_hook(lambda m, g, _: (g[0] * 2,))  # type: ignore[index]
    return model


def test_gradients_that_users_change() -> None:
    def hook_inside(x: Tensor) -> Tensor:
        y = x * 2
        y.register_hook(lambda g: g * 3)
        return y.sin()

    make = wide(4, 5, grad=True)
    gradients_agree(lambda x: Square.apply(x * 2).sin(), make)
    gradients_agree(hook_inside, make)
    gradients_agree(hooked(), make)


TRANSFORMS: list[Callable[..., Any]] = [
    lambda x: vmap(lambda a: a.softmax(0).cumsum(0))(x),
    lambda x: grad(lambda a: a.sin().pow(2).sum())(x),
    lambda x: jvp(torch.tanh, (x,), (x + 1,)),
    lambda x: jacrev(lambda a: a.sin() * a.sum())(x[0]),
    lambda x: hessian(lambda a: (a.sin() * a.sum()).sum())(x[0]),
    lambda x: vmap(grad(lambda a: layer(a).tanh().sum()))(x),
    lambda x: functional_call(layer, {"weight": x, "bias": x[0]}, (x,)),
]


@pytest.mark.parametrize("number", range(len(TRANSFORMS)))
def test_function_transforms(number: int) -> None:
    agree(TRANSFORMS[number], wide(5, 5), tol=1e-4)


class Named(Tensor):
    """A subclass without behaviour of its own."""


def test_what_kernels_do_not_take() -> None:
    def sparse() -> list[Tensor]:
        return [randn(4, 5).relu().to_sparse(), randn(5, 3)]

    def quantized() -> list[Tensor]:
        return [torch.quantize_per_tensor(randn(4), 0.1, 0, torch.qint8)]

    agree(lambda x, y: torch.sparse.mm(x, y) + 1, lambda: sparse()[:2], strides=False)
    agree(lambda x: x.relu().to_sparse().to_dense() + 1, wide(4, 5))
    agree(lambda x: x.dequantize() * 2, quantized)
    agree(lambda x: (x * 2 + 1j, x.abs(), x.imag, x.conj()), lambda: (randn(4) + 1j * randn(4),))
    got = agree(lambda x: x * 2, lambda: (randn(3).as_subclass(Named),))
    assert type(got) is Named


def backward_twice(run: Callable[[Tensor], Tensor], x: Tensor) -> None:
    y = run(x).sum()
    y.backward(retain_graph=True)
    y.backward()


def on_hooks(run: Callable[[Tensor], Tensor], x: Tensor) -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.double(), lambda t: t.float()):
        y = run(x)
    y.sum().backward()


def accumulated(run: Callable[[Tensor], Tensor], x: Tensor) -> None:
    for k in range(3):
        (run(x) * k).sum().backward()


def strided(run: Callable[[Tensor], Tensor], x: Tensor) -> None:
    run(x).backward(torch.ones(x.shape[::-1]).t() * torch.arange(x.shape[1]))
    run(x).backward(torch.tensor(2.0).expand(x.shape))


USES = (backward_twice, on_hooks, accumulated, strided)


@pytest.mark.parametrize("use", USES, ids=lambda u: u.__name__)
def test_backward_in_other_ways(use: Callable[..., None]) -> None:
    def fn(x: Tensor) -> Tensor:
        return (F.gelu(x.t()) * x.t()).t()

    x, y = (t.requires_grad_() for t in (randn(4, 5), randn(4, 5)))
    y.data.copy_(x.data)
    use(fn, x)
    use(torch.compile(fn, backend="lenz"), y)
    torch.testing.assert_close(y.grad, x.grad, rtol=1e-4, atol=1e-4)


def test_errors_of_autograd() -> None:
    run = torch.compile(lambda x: x.sin() * x, backend="lenz")
    x = randn(4, requires_grad=True)
    y = run(x).sum()
    y.backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()
    z = x * 1
    y = run(z)
    with torch.no_grad():
        z.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    (g,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        g.sum().backward()
