"""Attention keeps its fused form: known masks go, and CUDA operands fit the kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import checkpoint

from lenz.frontend.attention import SDPA, fit, fuse_attention
from tests.cuda import Fake, choose, cuda_programs, fake_cuda, programs_of

sdpa = F.scaled_dot_product_attention
L, MIN = 12, torch.finfo(torch.float32).min


def traced(fn: Callable[..., Any], *args: Any, dynamic: bool = False) -> GraphModule:
    """Dynamo's graph of `fn`."""
    found: list[GraphModule] = []

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> GraphModule:
        found.append(gm)
        return gm

    torch.compile(fn, backend=backend, fullgraph=True, dynamic=dynamic)(*args)
    (gm,) = found
    return gm


def calls(gm: GraphModule) -> list[Node]:
    return [n for n in gm.graph.nodes if n.target is SDPA]


def qkv(*shape: int, requires_grad: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, requires_grad=requires_grad) for _ in range(3)]


def result(mask: Callable[[Tensor], Tensor], *shape: int) -> str:
    """What became of the mask, with the numbers checked: "all", "causal", or "" for kept."""

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v, attn_mask=mask(q))

    args = qkv(*(shape or (2, 3, L, 8)))
    gm = traced(f, *args)
    fuse_attention(gm)
    (got,) = gm(*args)
    torch.testing.assert_close(got, f(*args))
    (n,) = calls(gm)
    if n.kwargs["attn_mask"] is not None:
        return ""
    return "causal" if n.kwargs["is_causal"] else "all"


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bool)


def filled_in_place(q: Tensor) -> Tensor:
    mask = torch.full((L, L), MIN)
    i = torch.arange(L)
    mask.masked_fill_(i < (i + 1).view(L, 1), 0)
    return mask[None, None].expand(2, 1, L, L)


def written_through_a_view(q: Tensor) -> Tensor:
    mask = ones(L, L)
    mask.view(-1)[3:] = False
    return mask


def written_by_an_input(q: Tensor) -> Tensor:
    mask = ones(L, L)
    mask[0] = q[0, 0, 0, :1] > 9
    mask[0, 0] = True
    return mask


def from_positions(q: Tensor) -> Tensor:
    rows, columns = torch.arange(L)[None, None, :, None], torch.arange(L)[None, None, None, :]
    return (rows.new_ones((), dtype=torch.bool) & (columns <= rows)).expand(2, -1, L, L)


@pytest.mark.parametrize(
    ("mask", "want"),
    [
        (lambda q: ones(L, L), "all"),
        (lambda q: ones(2, 1, 1, L).expand(2, 1, L, L), "all"),
        (lambda q: (torch.arange(L) >= 0).view(1, 1, L, 1).expand(2, 1, L, L), "all"),
        (lambda q: (1.0 - torch.ones(2, 1, 1, L)) * MIN, "all"),
        (lambda q: torch.ones_like(q[..., :1]) @ torch.zeros(1, L), "all"),
        (lambda q: ones(L, L).tril(), "causal"),
        (lambda q: torch.full((L, L), float("-inf")).triu(1), "causal"),
        (filled_in_place, "causal"),
        (from_positions, "causal"),
        (lambda q: ones(L, L).tril(1), ""),
        (lambda q: ones(L, L).triu(), ""),
        (lambda q: torch.full((L, L), -1e4).triu(1), ""),
        (lambda q: torch.full((L, L), 0.5), ""),
        (lambda q: torch.rand(L, L) < 2, ""),
        (lambda q: q[:1, :1, :, :1] < 99, ""),
        (written_through_a_view, ""),
        (written_by_an_input, ""),
    ],
)
def test_what_a_mask_says(mask: Callable[[Tensor], Tensor], want: str) -> None:
    assert result(mask) == want


def test_a_mask_written_after_its_use_is_what_it_was() -> None:
    def f(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        mask = torch.ones(L, L, dtype=torch.bool)
        first = sdpa(q, k, v, attn_mask=mask)
        mask[0, 1:] = False
        return first, sdpa(q, k, v, attn_mask=mask)

    args = qkv(2, 3, L, 8)
    gm = traced(f, *args)
    fuse_attention(gm)
    torch.testing.assert_close(tuple(gm(*args)), f(*args))
    assert [n.kwargs["attn_mask"] is None for n in calls(gm)] == [True, False]


def test_a_triangle_of_other_numbers_of_keys_stays() -> None:
    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v, attn_mask=torch.ones(4, L, dtype=torch.bool).tril())

    q, k, v = qkv(1, 3, L, 8)
    gm = traced(f, q[:, :, :4], k, v)
    fuse_attention(gm)
    assert calls(gm)[0].kwargs["attn_mask"] is not None


def test_checkpointed_layers_see_the_mask() -> None:
    def layer(x: Tensor, mask: Tensor, extra: Tensor) -> Tensor:
        return sdpa(x, x.sin(), x.cos(), attn_mask=mask & extra)

    def f(x: Tensor) -> Tensor:
        rows = torch.arange(L)
        mask, extra = rows[:, None] >= rows, torch.ones(L, dtype=torch.bool)
        for _ in range(2):
            x = checkpoint(layer, x, mask, extra, use_reentrant=False)
        return checkpoint(layer, x, mask, rows < 5, use_reentrant=False)

    (x, y, _) = qkv(2, 3, L, 8, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    gm = traced(f, x)
    fuse_attention(gm)
    bodies = [calls(b)[0].kwargs for b in gm.children()]  # type: ignore[arg-type]
    assert [k["attn_mask"] is None for k in bodies] == [True, True, False]
    got, want = torch.compile(f, backend="lenz")(x), f(y)
    torch.testing.assert_close(got, want)
    got.sin().sum().backward()
    want.sin().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


def positions(n: Any) -> tuple[Tensor, Tensor]:
    return torch.arange(n)[:, None], torch.arange(n) + 0


@pytest.mark.diagonal(2)
@pytest.mark.parametrize(
    ("mask", "want"),
    [
        (lambda n: torch.ones(n, n, dtype=torch.bool), "all"),
        (lambda n: (torch.arange(n) >= 0).expand(n, n), "all"),
        (lambda n: torch.ones(n, n).tril().bool(), "causal"),
        (lambda n: torch.full((n, n), float("-inf")).triu(1), "causal"),
        (lambda n: positions(n)[0] >= positions(n)[1], "causal"),
        (
            lambda n: torch.where(positions(n)[0] + 1 > positions(n)[1], 0.0, -float("inf")),
            "causal",
        ),
        (lambda n: torch.ones(n, n, dtype=torch.bool).tril(1), ""),
        # What is the same for small sizes alone.
        (lambda n: (torch.arange(n) < 1000).expand(n, n), ""),
        (lambda n: (torch.arange(n).to(torch.int8) >= 0).expand(n, n), ""),
        (lambda n: positions(n)[0].half() >= positions(n)[1].half(), ""),
        (lambda n: positions(n)[0] - positions(n)[1] + 30 >= 0, ""),
        (lambda n: (torch.arange(n) < n).expand(n, n), ""),
        (lambda n: positions(n)[0] >= (positions(n)[1] & 63), ""),
        (lambda n: torch.full((n, n), n % 36).bool(), ""),
    ],
)
def test_masks_of_symbolic_sizes(mask: Callable[[Any], Tensor], want: str) -> None:
    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v, attn_mask=mask(q.shape[2]))

    gm = traced(f, *qkv(2, 3, L, 8), dynamic=True)
    env = next(
        n.meta["example_value"].node.shape_env
        for n in gm.graph.nodes
        if isinstance(n.meta.get("example_value"), torch.SymInt)
    )
    before = len(env.guards)
    fuse_attention(gm)
    assert len(env.guards) == before, "a question about a mask has added a guard"
    (n,) = calls(gm)
    found = "" if n.kwargs["attn_mask"] is not None else "all"
    assert ("causal" if n.kwargs.get("is_causal") else found) == want
    compiled = torch.compile(f, backend="lenz", dynamic=True)
    for size in (L, 5, 40):
        args = qkv(2, 3, size, 8)
        torch.testing.assert_close(compiled(*args), f(*args))


@pytest.mark.parametrize("part", (lambda n: n // 8, lambda n: n - 70, lambda n: n % 37 + 1))
def test_a_mask_of_part_of_a_size_is_not_judged_by_a_few_elements(part: Any) -> None:
    """`arange(s0 // 8) < 4` was all true for the size in place of s0, and so was dropped."""

    def f(x: Tensor) -> Tensor:
        q = x[..., : part(x.shape[2]), :]
        n = q.shape[2]
        return sdpa(q, q, q, attn_mask=(torch.arange(n) < 4).expand(n, n))

    compiled = torch.compile(f, backend="lenz", dynamic=True)
    for size in (100, 105):
        x = torch.randn(1, 2, size, 8)
        torch.testing.assert_close(compiled(x), f(x))


def test_a_mask_of_a_shorter_sequence_is_still_known() -> None:
    def f(x: Tensor) -> Tensor:
        q = x[:, :, :-1]
        return sdpa(q, q, q, attn_mask=torch.ones(q.shape[2], q.shape[2]).tril().bool())

    gm = traced(f, torch.randn(1, 2, L, 8), dynamic=True)
    fuse_attention(gm)
    assert calls(gm)[0].kwargs["is_causal"]


def test_a_mask_of_plain_shape_may_follow_a_symbolic_size() -> None:
    def f(x: Tensor) -> Tensor:
        q = x[None, :3, :3]
        return sdpa(q, q, q, attn_mask=torch.arange(3).expand(3, 3) < x.shape[0] - 2)

    compiled = torch.compile(f, backend="lenz", dynamic=True)
    for size in (9, 3, 4):
        x = torch.randn(size, size)
        torch.testing.assert_close(compiled(x), f(x))


def test_gradients_are_eagers() -> None:
    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.full((L, L), float("-inf")).triu(1)
        return sdpa(q, k, v, attn_mask=mask).sin().sum()

    ours, theirs = qkv(2, 3, L, 8, requires_grad=True), qkv(2, 3, L, 8, requires_grad=True)
    torch.compile(f, backend="lenz")(*ours).backward()
    f(*theirs).backward()
    torch.testing.assert_close([t.grad for t in ours], [t.grad for t in theirs])


def attend(**options: Any) -> Callable[..., Tensor]:
    def f(q: Tensor, k: Tensor, v: Tensor, *mask: Tensor) -> Tensor:
        return sdpa(q, k, v, *mask, **options)  # type: ignore[arg-type]

    return f


def fitting(f: Callable[..., Tensor], args: Sequence[Tensor]) -> Node:
    """The attention call after `fit`, with the numbers checked on the CPU."""
    gm = traced(f, *args)
    (n,) = calls(gm)
    fuse_attention(gm)
    fit(gm, n)
    gm.recompile()
    gm.graph.lint()
    (got,) = gm(*args)
    want = f(*args)
    assert got.shape == want.shape
    torch.testing.assert_close(got, want, check_stride=True)
    return n


def test_heads_are_widened_for_masks() -> None:
    q, k, v = torch.randn(2, 3, L, 20), torch.randn(2, 3, 7, 20), torch.randn(2, 3, 7, 13)
    n = fitting(attend(), (q, k, v, torch.randn(L, 7)))
    assert n.kwargs["scale"] == 20**-0.5
    n = fitting(attend(scale=0.3), (q, k, v, torch.randn(2, 1, L, 7) > 0))
    assert n.kwargs["scale"] == 0.3


def test_grouped_keys_are_repeated_for_masks() -> None:
    q, k, v = torch.randn(2, 6, L, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 8)
    n = fitting(attend(enable_gqa=True), (q, k, v, torch.randn(L, 7)))
    assert n.kwargs["enable_gqa"] is False


def test_three_dimensions_become_four() -> None:
    q, k, v = torch.randn(6, L, 8), torch.randn(6, 7, 8), torch.randn(6, 7, 9)
    for mask in ((), (torch.randn(L, 7),), (torch.randn(6, L, 7) > 0,)):
        n = fitting(attend(), (q, k, v, *mask))
        assert n.args == () and n.kwargs["query"].target == "unsqueeze"


@pytest.mark.parametrize("empty", [(0, 1, 17), (2, 0, L, 8)])
def test_nothing_is_given_to_no_fused_kernel(empty: tuple[int, ...]) -> None:
    """No matrices were no heads of one batch, and the flash kernel divides by their number."""
    n = fitting(attend(), [torch.randn(empty) for _ in range(3)])
    assert all(n.kwargs[name].op == "placeholder" for name in ("query", "key", "value"))
    many = traced(attend(), *qkv(6, L, 8), dynamic=True)
    (n,) = calls(many)
    fuse_attention(many)
    fit(many, n)
    assert n.kwargs["query"].target == "unsqueeze", "a size that is 2 at least is some"


def test_last_dimensions_become_dense() -> None:
    q, k, v = torch.randn(2, 3, 8, L).mT, torch.randn(2, 3, 8, 7).mT, torch.randn(2, 3, 7, 8)
    n = fitting(attend(), (q, k, v, torch.randn(1, L, 1).expand(2, 1, L, 7)))
    dense = [n.kwargs[x].target == "contiguous" for x in ("query", "key", "value", "attn_mask")]
    assert dense == [True, True, False, True]


@pytest.fixture
def fused_if_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What eager is given goes the way of matrix products, and what `fit` makes of it does not."""

    def fitted(gm: GraphModule, n: Node) -> None:
        before = n.kwargs
        choose("math")
        fit(gm, n)
        choose("math" if n.kwargs == before else "efficient")

    monkeypatch.setattr("lenz.frontend.attention.fit", fitted)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("shapes", "dtype", "options"),
    [
        ([(6, 5, 8), (6, 7, 8), (6, 7, 8)], torch.float32, {}),
        ([(6, 5, 12), (6, 7, 12), (6, 7, 12)], torch.float32, {"is_causal": True}),
        ([(2, 3, 5, 20), (2, 3, 7, 20), (2, 3, 7, 20)], torch.float32, {"scale": 0.5}),
        ([(2, 6, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)], torch.float32, {"enable_gqa": True}),
        ([(1, 1, 17)] * 3, torch.float32, {}),
    ],
)
def test_another_kernel_leaves_eagers_strides(
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    options: dict[str, Any],
    dynamic: bool,
    fused_if_fitted: None,
) -> None:
    f = attend(**options)
    with fake_cuda("math"):
        args = [Fake(s, dtype, grad=True).make() for s in shapes]
        want = f(*args)
        with torch.autograd.set_multithreading_enabled(False):
            gradients = torch.autograd.grad(want, args, torch.empty_like(want))
        forward, backward = programs_of(f, *args, dynamic=dynamic)
        assert dynamic or any("efficient_attention" in str(n.target) for n in forward.nodes)
        for p, wanted in ((forward, [want]), (backward, gradients)):
            made = [o.value for o in p.outputs if isinstance(o.value, Tensor)]
            for x, y in zip(made, wanted, strict=False):
                found = tuple(s if isinstance(s, int) else s.node.hint for s in x.stride())
                assert found == y.stride(), p.kind


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_follows_another_kernel_has_eagers_strides(
    dynamic: bool, fused_if_fitted: None
) -> None:
    """The backward graph computes with what attention gave, and with its layout."""

    def f(x: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(sdpa(x, x, x), x.sigmoid())

    with fake_cuda("math"):
        x = Fake((6, 6, 1), torch.float32, grad=True).make()
        _, backward = programs_of(f, x, dynamic=dynamic)
        (made,) = [o.value for o in backward.outputs if isinstance(o.value, Tensor)]
        assert tuple(int(s) for s in made.stride()) == (6, 1, 1)


def test_halves_of_three_dimensions_are_computed_in_f32(fused_if_fitted: None) -> None:
    """Eager's matrix products are; a fused kernel rounds what its gradient subtracts."""
    shape = (6, 5, 8)
    for p in cuda_programs(sdpa, *[Fake(shape, torch.bfloat16, grad=True)] * 3, attention="math"):
        assert not any("_attention" in str(n.target) for n in p.nodes)


MASKED = [
    ([(2, 4, 64, 64)] * 3, lambda q: (q[:, :1, :, :1] > 0).expand(2, 1, 64, 64), {}),
    ([(2, 4, 64, 64)] * 3, lambda q: q[:1, :1, :1, :1], {}),
    ([(2, 4, 64, 64)] * 3, lambda q: q[0, 0, :, :1], {}),
    ([(2, 4, 64, 20)] * 3, lambda q: q.new_zeros(64, 64).masked_fill(q[0, 0, :, :1] > 0, -9), {}),
    ([(2, 4, 64, 64), (2, 2, 64, 64), (2, 2, 64, 64)], lambda q: q[0, 0] > 0, {"enable_gqa": True}),
]


@pytest.mark.diagonal(2)
@pytest.mark.parametrize("case", range(len(MASKED)))
@pytest.mark.parametrize("grad", [False, True])
def test_masked_attention_on_cuda_is_fused(case: int, grad: bool, fused_if_fitted: None) -> None:
    # With a GPU torch itself chooses the kernel; without one, what it is given can be looked at.
    shapes, mask, options = MASKED[case]

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v, attn_mask=mask(q), **options)

    programs = cuda_programs(f, *map(Fake, shapes), attention="efficient")
    if grad:
        programs = cuda_programs(f, *shapes, grad=True, attention="efficient")
    for p in programs:
        names = [str(n.target) for n in p.nodes]
        assert [x for x in names if "_scaled_dot_product" in x], names
        assert not [x for x in names if "bmm" in x or "softmax" in x], names
        for n in p.nodes:
            if "_scaled_dot_product" in str(n.target) and "backward" not in str(n.target):
                for a in n.args[:3]:
                    value = a.meta["val"]
                    assert value.dim() == 4 and value.stride(-1) == 1 and value.shape[-1] % 8 == 0
                assert n.args[1].meta["val"].shape[1] == n.args[0].meta["val"].shape[1]
                assert n.args[3].meta["val"].stride(-1) == 1, "(*bias): last dimension"


def test_a_mask_that_torch_pads_may_have_any_size() -> None:
    """Its kernels want rows of a multiple of 8 and pad what is shorter."""
    with fake_cuda("efficient"):
        args = [Fake((2, 4, 13, 12), torch.float32, grad=True).make() for _ in range(3)]
        mask = Fake((2, 1, 13, 13), torch.float32).make()
        for x, d in ((mask, 3), *((a, 2) for a in args)):
            torch._dynamo.mark_dynamic(x, (2, d))
        forward, backward = programs_of(attend(), *args, mask)
    assert any("efficient_attention" in str(n.target) for n in forward.nodes)
    assert backward.kind == "backward"


@pytest.mark.parametrize("columns", [slice(None), slice(1, None)])
def test_a_result_that_is_written_later(columns: slice, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused kernel saves it for the gradient; eager's way by matrix products does not."""

    def fitted(gm: GraphModule, n: Node) -> None:
        fit(gm, n)
        choose("efficient")

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = sdpa(q, k, v)
        out[..., columns].sub_(2)
        return out

    monkeypatch.setattr("lenz.frontend.attention.fit", fitted)
    with fake_cuda("math"):
        args = [Fake((2, 5, 32), torch.float32, grad=True).make() for _ in range(3)]
        programs = programs_of(f, *args)
    assert [p.kind for p in programs] == ["forward", "backward"]
    assert any("efficient_attention" in str(n.target) for n in programs[0].nodes)


def test_a_known_mask_leaves_nothing_behind_on_cuda() -> None:
    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v, attn_mask=torch.ones(64, 64, device=q.device).tril().bool())

    for p in cuda_programs(f, *[(2, 4, 64, 64)] * 3, grad=True):
        names = [str(n.target) for n in p.nodes]
        kept = [x for x in names if "getitem" not in x and "detach" not in x]
        assert len(kept) == 1 and "_scaled_dot_product" in kept[0], names


def test_a_mask_of_more_batches_gives_more_results() -> None:
    """Eager's kernel rejects it on CPUs; traced, it is one of several kernels, which takes it."""
    q = torch.randn(1, 3, L, 8)
    f = lambda q: sdpa(q, q, q, attn_mask=torch.ones(2, 1, L, L, dtype=torch.bool))
    torch._dynamo.reset()
    want, got = (torch.compile(f, backend=b)(q) for b in ("aot_eager", "lenz"))
    torch.testing.assert_close(got, want)
