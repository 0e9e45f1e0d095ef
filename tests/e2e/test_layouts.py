"""What leaves lenz lies in memory as in eager: strides, also of dimensions of one, and views."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.e2e.sides import agree

Relation = list[tuple[bool, int | None, bool]]
MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "grad": torch.enable_grad,
    "leaf": torch.enable_grad,  # with an argument that asks for no gradient
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


def views(x: Tensor) -> Sequence[Tensor]:
    y = x * 2
    return y, y[:, 1:], y.t(), y.view(-1), y[:, None, :1], y.expand(2, 4, 4)


def views_of_what_stays(x: Tensor) -> Sequence[Tensor]:
    y = x * 2
    return y[:1], y[1:]


def views_without_a_gradient(x: Tensor) -> Sequence[Tensor]:
    with torch.no_grad():
        y = x * 2
    return x * 3, y, y[:, 1:]


def detached(x: Tensor) -> Sequence[Tensor]:
    t = x * 2
    d = t.detach()
    return t, t[:, 1:].detach(), t.t().detach()[0], d, d[1:], d[1:][0].detach()[None]


def views_of_a_product(x: Tensor) -> Sequence[Tensor]:
    a = torch.mm(x, x)
    b = torch.mm(a, x).t().contiguous()
    c = torch.mm(b, a)
    return c, c[1:], b + c, torch.mm(c, c).abs()


def written(x: Tensor) -> Sequence[Tensor]:
    y = x + 1
    v = y[0]
    v.mul_(2)
    return y, v


def parts_of_an_argument(x: Tensor) -> Sequence[Tensor]:
    return *x.chunk(2), x * 2


PROGRAMS = (
    views, views_of_what_stays, views_without_a_gradient, detached, views_of_a_product, written,
    parts_of_an_argument,
)  # fmt: skip


def relation(found: Sequence[Tensor]) -> Relation:
    """Of each result whether autograd takes it for a view, which result is its base, and grad."""

    def base(t: Tensor) -> int | None:
        return next((k for k, o in enumerate(found) if t._base is o), -1) if t._is_view() else None

    return [(t._is_view(), base(t), t.requires_grad) for t in found]


def argument(mode: str) -> Tensor:
    return torch.arange(16.0).view(4, 4).requires_grad_(mode == "grad")


@pytest.mark.one_in(5)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("f", PROGRAMS)
def test_views_among_results_are_those_of_eager(
    f: Callable[[Tensor], Sequence[Tensor]], mode: str
) -> None:
    found = []
    for backend in ("aot_eager", "lenz"):
        torch._dynamo.reset()
        with MODES[mode]():
            results = torch.compile(f, backend=backend)(argument(mode))
        found.append((relation(results), [(t.stride(), t.storage_offset()) for t in results]))
    assert found[1] == found[0]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("mode", ["leaf", "no_grad", "inference"])
@pytest.mark.parametrize("f", [views_of_what_stays, views_without_a_gradient, views_of_a_product])
def test_a_second_graph_writes_into_the_views_of_the_first(
    f: Callable[[Tensor], Sequence[Tensor]], mode: str
) -> None:
    def write(results: Sequence[Tensor], k: int) -> Sequence[Tensor]:
        results[k].add_(1)
        return [t + 0 for t in results]

    count = len(f(argument(mode)))
    for k in range(count):
        torch._dynamo.reset()
        made, then = torch.compile(f, backend="lenz"), torch.compile(write, backend="lenz")
        with MODES[mode]():
            got, want = made(argument(mode)), f(argument(mode))
            after, wanted = then(got, k), write(want, k)
        for a, b in zip((*got, *after), (*want, *wanted), strict=True):
            assert torch.equal(a, b), f"result {k} is written"


def test_a_view_is_written_after_a_graph_break() -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x + 1
        v = y[0:2]
        torch._dynamo.graph_break()
        v.add_(1)
        return y + 0, v + 0

    for mode in (torch.enable_grad, torch.no_grad):
        with mode():
            agree(f, lambda: [torch.arange(3.0)])


@pytest.mark.parametrize(
    "f",
    [
        lambda x: (x + 1)[:, None],
        lambda x: (x + 1).view(1, 8),
        lambda x: (x + 1).view(2, 1, 4, 1),
        lambda x: (x + 1).unsqueeze(0),
        lambda x: (x + 1).view(-1, 1, 2),
        lambda x: (x.view(2, 4) + 1).t().reshape(4, 1, 2),
        lambda x: (x + 1)[:, None].view(torch.int16),
        lambda x: (x + 1)[None, 2:3].expand(1, 3),
    ],
)
def test_dimensions_of_one_have_eagers_strides(f: Callable[[Tensor], Tensor]) -> None:
    agree(f, lambda: [torch.arange(8.0)])


@pytest.mark.parametrize(
    "f",
    [
        lambda x: torch.einsum("aij,kj->aik", x, x[0]),
        lambda x: (x * 2).view(x.shape[1], 1, 1, -1),
        lambda x: (x * 2).mT.view(1, 1, x.shape[2], -1, 1),
        lambda x: x[:, :1].zero_() + torch.ldexp(x, (x > 0).long()),
        lambda x: torch.diff(x[0, :, :1], n=0, dim=1),
    ],
)
def test_so_they_do_where_others_are_symbols(f: Callable[[Tensor], Tensor]) -> None:
    agree(f, lambda: [torch.randn(1, 3, 4)], dynamic=True)
    agree(f, lambda: [torch.randn(1, 4, 3).mT], dynamic=True)


def test_symbols_that_turn_out_to_be_numbers() -> None:
    x, m = torch.randn(5, 5).T.requires_grad_(), torch.ones(5, 5, dtype=torch.bool).T
    f = torch.masked.cumprod  # whose gradient asks for the sizes
    compiled = torch.compile(f, backend="lenz", dynamic=True)
    got, want = (torch.autograd.grad(g(x, 0, mask=m).sum(), x)[0] for g in (compiled, f))
    assert got.stride() == want.stride()


@pytest.mark.parametrize("f", [torch.add, torch.lt, torch.atan2, lambda x, y: (x[0] > 0) * y])
def test_operands_of_other_types_are_copied_without_gaps(f: Callable[..., Tensor]) -> None:
    agree(f, lambda: [torch.arange(6).view(1, 3, 2)[..., 0].T.T, torch.randn(1, 3)])
    agree(f, lambda: [torch.arange(6).view(3, 2)[:, :1], torch.randn(1, 3).double().T])


@pytest.mark.parametrize(
    "f",
    [
        lambda x: F.batch_norm(x, torch.zeros(2), torch.ones(2), training=False),
        lambda x: F.group_norm(x, 2),
        F.instance_norm,
        lambda x: F.layer_norm(x, (8,)),
        F.normalize,
        lambda x: torch.tril(x) + torch.full_like(x, 2.0),
        lambda x: x[:, :, -1 - torch.arange(6).view(2, 3)],
        lambda x: x.mT[torch.arange(4).view(2, 2).t() % 3],
        lambda x: x[torch.arange(2), :, torch.arange(2)],
        lambda x: x * x[:1, :, :1].transpose(1, 2).transpose(1, 2) + x[0],
        lambda x: x[..., :1].abs() + 1,
        lambda x: x.mT.reshape(3, 1, 8, 2),
    ],
)
def test_values_of_transposed_tensors_have_eagers_strides(f: Callable[[Tensor], Tensor]) -> None:
    agree(f, lambda: [torch.randn(3, 8, 2).transpose(1, 2)])


def test_indices_that_follow_a_transposed_tensor() -> None:
    agree(lambda x: x[-1 - x.remainder(x.shape[0])], lambda: [torch.arange(81).reshape(9, 9).t()])


@pytest.mark.parametrize("turn", (lambda x: x.t(), lambda x: x.t()[:, ::2], lambda x: x))
@pytest.mark.parametrize("shape", ((9, 1), (1, 9), (4, 6)))
def test_what_is_filled_keeps_its_strides(
    shape: tuple[int, int], turn: Callable[[Tensor], Tensor]
) -> None:
    agree(lambda x: (x + 1).fill_(2), lambda: [turn(torch.ones(shape))])
    agree(lambda x: x.clone().fill_(x.sum()), lambda: [turn(torch.ones(shape))])
    agree(lambda x: torch.fill(x, 2), lambda: [turn(torch.ones(shape))])


def filled(x: Tensor) -> Tensor:
    y = x.clone()
    y.index_fill_(0, torch.tensor([0]), 2.0)
    return F.mse_loss(y, y, reduction="none")


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "f",
    [
        torch.clone,
        filled,
        F.hardswish,
        F.logsigmoid,
        torch.rad2deg,
        torch.isnan,
        lambda x: x.to(torch.float64),
        lambda x: x.clone(memory_format=torch.preserve_format).sort(-1),
        lambda x: torch.sort(x, stable=True, dim=0),
        lambda x: torch.empty_like(x, memory_format=torch.preserve_format).fill_(1),
        lambda x: F.huber_loss(x, x, reduction="none"),
        lambda x: F.prelu(x, torch.ones(())),
        lambda x: torch.rsub(x, x),
        lambda x: torch.quantile(x.flatten(), torch.ones(2)),
        lambda x: torch.put(x, torch.tensor([0]), torch.ones(1)),
        lambda x: torch.renorm(x, 2, 0, 3.0),
        lambda x: torch.diag_embed(x, 1, 0, -1),
    ],
)
def test_values_of_odd_strides_have_eagers(f: Callable[[Tensor], Any]) -> None:
    """Of dimensions of 1, and of diagonals: fake tensors told them dense, or turned."""
    agree(f, lambda: [torch.ones(1, 1)[..., ::2]])
    agree(f, lambda: [torch.ones(2, 2, 2).diagonal()])
    agree(f, lambda: [torch.ones(1, 2, 1, 1).permute(0, 3, 1, 2)])
    agree(f, lambda: [torch.ones(1, 2, 1, 1, 3).permute(0, 4, 2, 3, 1)])


@pytest.mark.parametrize(
    "x",
    [
        torch.arange(4).reshape(4, 1).expand(4, 5),
        torch.arange(5).expand(4, 5),
        torch.arange(40).view(4, 10)[:, ::2],
    ],
)
@pytest.mark.parametrize(
    "f",
    [
        lambda x: torch.as_strided_scatter(x, x.reshape(-1)[:2], (2,), (1,), 0) + 1,
        lambda x: torch.as_strided_scatter(x, x.reshape(-1)[:2] * 7 + 5, (2,), (3,), 1),
        lambda x: torch.select_scatter(x, x[0] * 3 + 1, 0, 1),
        lambda x: torch.diagonal_scatter(x, x.diagonal() + 7),
    ],
)
def test_a_part_is_written_into_an_expanded_tensor(
    f: Callable[[Tensor], Tensor], x: Tensor
) -> None:
    agree(f, lambda: [x])


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_view_without_elements_of_the_same_shape_has_the_same_strides(dynamic: bool) -> None:
    def f(n: int) -> list[Tensor]:
        x, y = torch.ones(6, 7)[:, :n].contiguous(), torch.ones(2, n).exp()
        return [x, x.reshape(6, -1), y.t().reshape(n, 2), y.view(n, 2)]

    torch._dynamo.reset()
    got, want = torch.compile(f, backend="lenz", dynamic=dynamic)(0), f(0)
    assert [t.stride() for t in got] == [t.stride() for t in want]


def test_an_empty_diagonal_begins_where_its_matrix_does() -> None:
    def f(x: Tensor) -> Tensor:
        return x.diagonal(-3).as_strided((2,), (1,))

    x = torch.arange(4.0).view(2, 2)
    torch.testing.assert_close(torch.compile(f, backend="lenz")(x), f(x))


def test_a_view_of_nothing_has_the_memory_of_what_it_was() -> None:
    def f(x: Tensor) -> Tensor:
        return x[:, :0].reshape(1, 0, 2).as_strided((2,), (1,))

    x = torch.randn(2, 2)
    torch.testing.assert_close(torch.compile(f, backend="lenz")(x), f(x))


def padded(x: Tensor, left: int, right: int) -> Tensor:
    return F.pad(x, (left, right))


@pytest.mark.parametrize("widths", [(-1, -1), (-1, 0), (1, 2), (-1, 2), (2, -1)], ids=str)
def test_what_padding_leaves_lies_as_in_eager(widths: tuple[int, int]) -> None:
    """With symbolic widths: what only cuts is a copy of what is left, and keeps its order."""
    for x in (torch.randn(5, 6).t(), torch.randn(2, 3, 4, 4).mT, torch.randn(1, 5)):
        agree(padded, lambda x=x: [x, *widths], dynamic=True)


def test_bools_have_one_bound() -> None:
    """The type of the operands was asked for with the missing bound among them."""
    a, b = torch.tensor([True, False, True]), torch.tensor([False, False, True])
    agree(lambda a, b: (torch.clamp(a, max=b), torch.clamp(a, min=b)), lambda: (a, b))


@pytest.mark.parametrize(
    "f",
    [
        lambda x: [torch.view_copy(x, (2, 8))[1:]],
        lambda x: torch.view_copy(x, (2, 8)).unbind(),
        lambda x: [torch.as_strided_scatter(torch.zeros(4, 4), x, (4, 4), (4, 1))[1:]],
        lambda x: [x.softmax(-1)[1:], x.softmax(-1)[1:]],
    ],
    ids=["copy", "parts of a copy", "written over", "equal values"],
)
def test_a_view_of_a_value_made_in_another_way_shares_no_other_memory(
    f: Callable[[Tensor], Sequence[Tensor]],
) -> None:
    def sharing(run: Callable[[Tensor], Sequence[Tensor]]) -> list[int]:
        x = argument("grad")
        owners = [t.untyped_storage().data_ptr() for t in (x, *run(x))]
        return [owners.index(p) for p in owners]

    assert sharing(torch.compile(f, backend="lenz")) == sharing(f)
