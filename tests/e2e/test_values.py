"""Arguments and results of every kind: sizes 0 and 1, types, strides, views, other objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, randn

from tests.e2e.sides import agree

REAL = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8,
)  # fmt: skip


def test_results_that_are_arguments_views_duplicates_and_no_tensors() -> None:
    def fn(x: Tensor) -> Any:
        y = x + 1
        return x, None, 3, x.shape[0], x.t(), x[:1], y, y, y.view(-1), y.t(), ("text", [y[1:]])

    for shape in ((4, 5), (0, 5), (1, 1)):
        got = agree(fn, lambda: (randn(shape),))
        assert got[6] is got[7]


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0,), (1, 1), (2, 0, 3)])
def test_empty_tensors(shape: tuple[int, ...]) -> None:
    def fn(x: Tensor) -> Any:
        return (
            x + 1, x.sum(), x.sum(0), x.sum(-1), x.mean(-1), x.t() * 2 if x.dim() == 2 else x * 2,
            torch.cat([x, x]), x.softmax(0), x.softmax(-1), x.any(), x.all(), x.prod(0),
        )  # fmt: skip

    agree(fn, lambda: (randn(shape),))
    agree(lambda x: (x.add_(1), x.sum())[1], lambda: (randn(shape),))
    agree(lambda x, y: (x @ y).relu() + 1, lambda: (randn(4, 0), randn(0, 5)))


def test_tensors_without_dimensions() -> None:
    def fn(x: Tensor, y: Tensor) -> Any:
        return x + y, x * 2, x.sum(), x.view(1), y.sum(0) + x

    agree(fn, lambda: (randn(()), randn(4)))
    agree(lambda x, y: (x.add_(1), y * x)[1], lambda: (torch.tensor(3.0), randn(4)))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", REAL)
def test_types(dtype: torch.dtype) -> None:
    def fn(x: Tensor, y: Tensor) -> Any:
        return (
            x + y, x * 2, x - y, x.sum(), x.sum(0), x.amax(1), x.argmax(1), x > y, -x, x.abs(),
            torch.where(x > 0, x, y), x.float() / 3, x.to(torch.int32), x.cumsum(0), x.clamp(-1, 2),
            x.flip(0), torch.cat([x, y]), x.bool(), x.max(0).values, x // 2, x.any(1),
        )  # fmt: skip

    def make() -> tuple[Tensor, Tensor]:
        low = 0 if dtype is torch.uint8 else -3
        return tuple(torch.randint(low, 4, (5, 37)).to(dtype) for _ in range(2))  # type: ignore[return-value]

    agree(fn, make, tol=2e-2 if dtype.itemsize == 2 and dtype.is_floating_point else 1e-5)


def test_strides_of_results_are_those_of_eager() -> None:
    def fn(x: Tensor) -> Any:
        return (
            x * 2, x.clone(), x.double(), x.sum(1), x.softmax(-1), x.flip(0),
            x.permute(2, 0, 1) + 1,
            torch.where(x > 0, x, 0), x.contiguous() + 1, torch.zeros_like(x), x.cumsum(0),
        )  # fmt: skip

    agree(fn, lambda: (randn(3, 4, 5).permute(2, 0, 1),))
    agree(fn, lambda: (randn(8, 10, 4)[::2, ::3],))
    agree(fn, lambda: (randn(1, 5, 1).expand(4, 5, 3),))
    agree(lambda x, y: (x + y, y * x), lambda: (randn(3, 4, 5).permute(2, 0, 1), randn(5, 3, 4)))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_convolutions_keep_the_memory_format(memory_format: torch.memory_format) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 4, 1),
    ).eval()  # fmt: skip
    model = model.to(memory_format=memory_format)  # type: ignore[call-overload]
    with torch.no_grad():
        agree(model, lambda: (randn(2, 3, 8, 8).to(memory_format=memory_format),), tol=1e-4)
        agree(model, lambda: (randn(2, 3, 8, 8),), tol=1e-4)


def test_argmax_counts_in_the_order_of_the_dimensions() -> None:
    def fn(x: Tensor) -> Any:
        return x.argmax(), x.argmax(0), x.argmin(1), x.flatten().argmax(), x.max(1), x.min(0)

    agree(fn, lambda: (torch.randint(0, 4, (5, 6, 7)).float(),))
    agree(fn, lambda: (torch.randint(0, 4, (5, 6, 7)).float().permute(2, 1, 0),))
    agree(fn, lambda: (torch.randint(0, 3, (50, 60)),))


@pytest.mark.parametrize("make", [
    lambda: (randn(100_003)[None].expand(2, 100_003),), lambda: (randn(300, 1001),),
    lambda: (randn(300, 1001).t(),), lambda: (randn(70_000, 2),),
    lambda: (randn(5, 1).expand(5, 70),),
])  # fmt: skip
def test_long_reductions(make: Callable[[], Any]) -> None:
    def fn(x: Tensor) -> Any:
        return x.sum(), x.sum(0), x.square().mean(), x.amax(), x.logsumexp(0), x.sum(1), x.any()

    agree(fn, make, tol=1e-3)
    agree(fn, make, tol=1e-3, dynamic=True)


def test_as_strided_counts_from_the_storage() -> None:
    def fn(x: Tensor) -> Any:
        return x.as_strided((3, 2), (2, 1), 1) + 1, x[1:].as_strided((2, 2), (2, 1), 0) * 2

    def scattered(x: Tensor, y: Tensor) -> Any:
        put = torch.as_strided_scatter
        return put(x, y, (3, 2), (2, 1), 6), put(x, y, (3, 2), (4, 1)), put(x, y, (3, 2), (2, 1), 3)

    agree(fn, lambda: (randn(20),))
    agree(fn, lambda: (randn(40)[5:],))
    agree(scattered, lambda: (randn(20), randn(3, 2)))
    agree(scattered, lambda: (randn(40)[5:25], randn(3, 2)))
    agree(scattered, lambda: (randn(9, 5)[2:, 1:3], randn(2, 3).t()))


@pytest.mark.filterwarnings("ignore:lenz runs a graph in eager")
def test_complex_conjugate_and_negated_tensors() -> None:
    def fn(x: Tensor) -> Any:
        return x * 2, x.abs() + 1, x.real + 1, (x @ x.t()).angle(), torch.view_as_real(x) * 2

    agree(fn, lambda: (randn(4, 4, dtype=torch.cfloat),))
    agree(lambda x: (x + 1, x.imag * 2), lambda: (randn(9, dtype=torch.cfloat).conj(),))
    agree(lambda x: x + 1, lambda: (randn(9, dtype=torch.cfloat).conj().imag,))
    agree(lambda x: x * complex(float("inf"), 1), lambda: (randn(4, dtype=torch.cfloat),))
    mask = torch.tensor([True, False, True, False])
    agree(lambda x: x.index_put((mask,), x[0]), lambda: (randn(4, dtype=torch.cfloat),))
    written = lambda x: (x.mul_(2), x.real.add_(1), x.abs())[2]
    agree(written, lambda: (randn(4, dtype=torch.cfloat),))


def test_sparse_and_nested_tensors() -> None:
    agree(lambda x: torch.sparse.mm(x, torch.ones(4, 3)) + 1, lambda: (torch.eye(4).to_sparse(),))

    def rows() -> Tensor:
        parts = [torch.ones(2, 3), torch.ones(4, 3)]
        return torch.nested.nested_tensor(parts, layout=torch.jagged)

    got = torch.compile(lambda x: x.sin() * 2, backend="lenz")(rows())
    torch.testing.assert_close(got.values(), rows().values().sin() * 2)


def test_every_call_has_results_of_its_own() -> None:
    run = torch.compile(lambda a, b: (a * b, torch.tensor(0), torch.arange(3)), backend="lenz")
    a, b = randn(10), randn(10)
    results = [run(a, b) for _ in range(3)]
    assert len({t.data_ptr() for r in results for t in r}) == 9
    results[0][1].fill_(7)
    assert run(a, b)[1] == 0


def test_indices_wrap_and_are_checked() -> None:
    run = torch.compile(lambda x, i: x[i], backend="lenz")
    x = randn(7)
    torch.testing.assert_close(run(x, torch.tensor([-1, 0, -7, 6])), x[[-1, 0, -7, 6]])
    with pytest.raises(IndexError):
        run(x, torch.tensor([0, 1, 7, 2]))
    torch.testing.assert_close(run(x, torch.tensor([1, 2, 3, 4])), x[1:5])


def test_padding_by_negative_sizes_and_joined_slices() -> None:
    def fn(x: Tensor, y: Tensor, z: Tensor) -> Any:
        t = F.pad(torch.cat([x.reshape(-1), y.t().reshape(-1), z.reshape(-1)]), (-3, 5))
        return t.roll(-7)[::3], torch.cat([y.flip(0)[:, -3:], x[:, -4:-1]], 0)

    agree(fn, lambda: (randn(7, 5), randn(4, 6), randn(3)))


WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@pytest.mark.parametrize("dtype", WHOLE, ids=str)
def test_a_division_of_integers_by_zero_raises_as_in_eager(dtype: torch.dtype) -> None:
    forms: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
        lambda x, y: x // y, lambda x, y: x % y, lambda x, y: torch.fmod(x, y), lambda x, y: 5 // y,
        lambda x, y: torch.div(x, y, rounding_mode="trunc"), lambda x, y: (x % y[:, :1]).sum(1),
    )  # fmt: skip
    x, y = torch.arange(-7, 92).to(dtype).view(3, 33), torch.arange(1, 100).to(dtype).view(3, 33)
    zeros = y.clone()
    zeros[2, [0, 32]] = 0
    for fn in forms:
        run = torch.compile(fn, backend="lenz")
        assert torch.equal(run(x, y), fn(x, y))
        for side in (fn, run):
            with pytest.raises(RuntimeError, match="ZeroDivisionError"):
                side(x, zeros)
    for by_number in (lambda x: x // 0, lambda x: x % 0):
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            torch.compile(by_number, backend="lenz")(x)


def test_positions_that_are_quotients_are_checked_for_both() -> None:
    table, i = randn(10, 4), torch.arange(9)
    run = torch.compile(lambda t, i, j: t[i // j] + t[i % j], backend="lenz")
    for by in (3, -3):
        j = torch.full((9,), by)
        assert torch.equal(run(table, i, j), table[i // j] + table[i % j])
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        run(table, i, i)
    with pytest.raises(IndexError):
        run(table, i * 20, j)


@pytest.mark.diagonal(2)
@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (lambda x, i: x.gather(0, i), (randn(3, 4), torch.tensor([[0, 1, 2, 9]]))),
        (lambda x, i: x.scatter(0, i, 1.0), (randn(3, 4), torch.tensor([[0, 1, 2, 9]]))),
        (lambda x, i: x.index_add(0, i, x[0, :2]), (randn(3, 2), torch.tensor([0, 1]))),
        (lambda x, i: x.index_select(0, i), (randn(3, 4), torch.tensor([-1]))),
        (lambda x: x.uniform_(3, -1), (randn(3),)),
        (lambda x: x.normal_(0, -1), (randn(3),)),
        (lambda x: x.exponential_(0), (randn(3),)),
        (lambda x: x.bernoulli_(1.5), (randn(3),)),
    ],
)
def test_what_eager_refuses_is_refused(fn: Any, args: tuple[Tensor, ...]) -> None:
    with pytest.raises((IndexError, RuntimeError)) as wanted:
        fn(*args)
    before = [a.clone() for a in args]
    with pytest.raises(wanted.type):
        torch.compile(fn, backend="lenz")(*args)
    assert all(map(torch.equal, args, before)), "an argument was written"


def test_columns_of_values_that_wrap_around() -> None:
    def fn(x: Tensor, y: Tensor) -> Any:
        z = x.roll(1, 1) + y + x
        return z.softmax(0), (z - z.mean(0)) / z.std(0), x.roll(3, 1).sum(0), x.roll(2, 1).cumsum(1)

    agree(fn, lambda: (randn(40, 600), randn(40, 600)), dynamic=False)
    agree(fn, lambda: (randn(40, 600), randn(40, 600)), dynamic=True)
