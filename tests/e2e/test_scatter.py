"""Scatters into arguments: in place where nothing sees it, with copies where something would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lenz
from lenz.debug.report import KernelReport
from lenz.page.report import Report
from tests.e2e.sides import agree, gradients_agree

K = torch.tensor([3, 0, 3, 5])


def args() -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(6, 8, generator=g), torch.randn(4, 8, generator=g), K.clone()]


def explained(fn: Callable[..., Any], given: list[Tensor]) -> Report:
    """The report of `fn`, whose result and whose arguments afterwards are those of eager."""
    mine, theirs = [a.clone() for a in given], [a.clone() for a in given]
    report = lenz.explain(fn)(*mine)
    torch.testing.assert_close(report.result, fn(*theirs))
    torch.testing.assert_close(mine, theirs)
    return report


def cache(x: Tensor, v: Tensor, k: Tensor) -> Any:
    x.index_copy_(0, k[1:], v[1:])
    return x.t() @ x, x.exp()


def cache_twice(x: Tensor, v: Tensor, k: Tensor) -> Any:
    x.index_add_(0, k, v)
    x.index_put_((k,), v, accumulate=True)
    return x.sum(1)


@pytest.mark.one_in(1)
@pytest.mark.parametrize("fn", [cache, cache_twice])
def test_a_cache_is_written_in_place(fn: Callable[..., Any]) -> None:
    report = explained(fn, args())
    kernels = [k for k in report.launches if isinstance(k, KernelReport)]
    assert kernels[0].kind == "scatter" and kernels[0].mutated_args == ("x",)
    copies = [k.name for k in kernels if k.kind == "pointwise"]
    assert len(copies) == (fn is cache), "only the exponential is a loop of its own"


def old_is_returned(x: Tensor, v: Tensor, k: Tensor) -> Any:
    old = x * 1
    x.index_add_(0, k, v)
    return old, x + 1


def old_is_read_later(x: Tensor, v: Tensor, k: Tensor) -> Any:
    y = x.index_add(0, k, v)
    z = (x - y).amax(0)
    x.copy_(y)
    return z


def old_is_read_by_the_updates(x: Tensor, v: Tensor, k: Tensor) -> Any:
    x.index_add_(0, k, x[k.flip(0)] + v)


def old_is_read_through_a_view(x: Tensor, v: Tensor, k: Tensor) -> Any:
    t = x.t()
    y = x.index_fill(0, k, 1.0)
    z = t @ v.new_ones(6, 2)
    x.copy_(y)
    return z


def result_is_returned_too(x: Tensor, v: Tensor, k: Tensor) -> Any:
    y = x.index_copy(0, k[1:], v[1:])
    x.copy_(y)
    return y


def result_is_returned_as_a_view(x: Tensor, v: Tensor, k: Tensor) -> Any:
    y = x.index_copy(0, k[1:], v[1:])
    x.copy_(y)
    return y.t()[1:]


def two_of_one(x: Tensor, v: Tensor, k: Tensor) -> Any:
    y, z = x.index_add(0, k, v), x.index_fill(0, k, 2.0)
    x.copy_(y)
    return z


def through_a_view(x: Tensor, v: Tensor, k: Tensor) -> Any:
    x[1:5].index_add_(1, k, v[:, :4])
    x.t()[::2].scatter_(1, k[None, :3].expand(4, 3), 7.0)
    return x.sum(0)


def chain_with_a_reader(x: Tensor, v: Tensor, k: Tensor) -> Any:
    y = (x + 1).index_add(0, k, v)
    return y.index_fill(0, k[:1], 0.0), y.sum(1)


def into_each_other(x: Tensor, v: Tensor, k: Tensor) -> Any:
    x.index_add_(0, k, v)
    v.index_copy_(0, k[:1], x[2:3])
    x.index_add_(0, k, v)


@pytest.mark.parametrize(
    "fn",
    [
        old_is_returned, old_is_read_later, old_is_read_by_the_updates, old_is_read_through_a_view,
        result_is_returned_too, result_is_returned_as_a_view, two_of_one, through_a_view,
        chain_with_a_reader, into_each_other,
    ],
)  # fmt: skip
def test_what_is_seen_is_as_in_eager(fn: Callable[..., Any]) -> None:
    explained(fn, args())


def test_the_result_does_not_share_memory_with_the_argument() -> None:
    for fn in (result_is_returned_too, result_is_returned_as_a_view):
        x, v, k = args()
        out = torch.compile(fn, backend="lenz")(x, v, k)
        assert out.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


# Of an index without elements, which may have any rank, torch takes the argument as it is.
EMPTY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    **{
        f"scatter_reduce {how}{', without own' * (not own)}": (
            lambda x, i, r=how, s=own: torch.scatter_reduce(x, 1, i, x, r, include_self=s) + 1
        )
        for how in ("sum", "prod", "mean", "amax")
        for own in (True, False)
    },
    "scatter": lambda x, i: torch.scatter(x, 1, i, x) + 1,
    "scatter of a number": lambda x, i: torch.scatter(x, 0, i, 2.0) + 1,
    "scatter add": lambda x, i: torch.scatter_add(x, -1, i, x) + 1,
    "gather": lambda x, i: torch.gather(x, 1, i).sum() + x,
    "take": lambda x, i: torch.take(x, i).sum() + x,
    "put": lambda x, i: torch.put(x, i, i.to(x.dtype), accumulate=True) + 1,
    "index": lambda x, i: x[i].sum() + x[i, i].sum() + x,
    "index_put": lambda x, i: x.index_put((i,), torch.tensor(1.0)) + 1,
    "index_put, add": lambda x, i: x.index_put((i, i), torch.tensor(1.0), accumulate=True) + 1,
    "index_add": lambda x, i: x.index_add(0, i.flatten(), x[:0]) + 1,
    "index_reduce": lambda x, i: x.index_reduce(0, i.flatten(), x[:0], "mean") + 1,
    "index_copy": lambda x, i: x.index_copy(0, i.flatten(), x[:0]) + 1,
    "embedding": lambda x, i: F.embedding(i, x).sum() + x,
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dynamic", (False, True))
@pytest.mark.parametrize("shape", ((0,), (16, 0, 16)), ids=str)
def test_an_index_without_elements(shape: tuple[int, ...], dynamic: bool) -> None:
    index = torch.zeros(shape, dtype=torch.int64)

    def every(x: Tensor, i: Tensor) -> list[Tensor]:
        return [fn(x, i) for fn in EMPTY.values()]

    for sizes in ((3, 4), (1, 1)):
        agree(every, lambda s=sizes: [torch.randn(s), index], dynamic=dynamic)  # type: ignore[misc]


def test_a_gradient_whose_checks_alone_are_left() -> None:
    """What a check needs stays, though nobody needs what is written there."""

    def fn(x: Tensor) -> Tensor:
        v = torch.var_mean(torch.floor(x * 1), dim=0, correction=0, keepdim=True)[0]
        v = torch.kthvalue(torch.msort(v)[:], 1, 0, keepdim=True)[0]
        return torch.index_copy(v, -1, torch.tensor([0]), v.narrow(-1, 0, 1) + 1)

    for dynamic in (True, False):
        gradients_agree(fn, lambda: [torch.randn(3, requires_grad=True)], dynamic=dynamic)


def test_gradients_of_reads_are_scatters() -> None:
    table = torch.randn(50, 8, requires_grad=True)
    at = torch.tensor([[3, 49, 3], [0, 3, 7]])

    def loss(w: Tensor) -> Tensor:
        a = torch.nn.functional.embedding(at, w, padding_idx=7)
        return (a.cumsum(1) * w[at].gather(2, at[..., None] % 8)).square().sum()

    (want,) = torch.autograd.grad(loss(table), table)
    (got,) = torch.autograd.grad(torch.compile(loss, backend="lenz")(table), table)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_many_updates_give_the_same_sums_every_time() -> None:
    g = torch.Generator().manual_seed(1)
    v, k = torch.randn(4096, 96, generator=g), torch.randint(0, 7, (4096,), generator=g)
    add = torch.compile(lambda v, k: v.new_zeros(7, 96).index_add(0, k, v), backend="lenz")
    want = v.new_zeros(7, 96).index_add(0, k, v)
    for _ in range(5):
        assert torch.equal(add(v, k), want), "sums run in the order of the updates"


def test_a_running_value_of_one_long_row_does_not_hold_up_what_follows() -> None:
    report = lenz.explain(lambda x: x.cumsum(0).sin())(torch.randn(200_000))
    assert len(report.launches) == 2, "the sine by itself runs on all cores"
