"""Writes into arguments: in what order, through which views, and what may run before what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, randn
from torch.utils import _pytree as pytree

import lenz
from tests.e2e.sides import agree


def view_is_read_by_a_call(x: Tensor, w: Tensor) -> Any:
    z = (x + 1).sin()
    y = x[:, 1:] @ w
    x.copy_(z)
    return y, z


def row_is_read_in_a_loop(a: Tensor, x: Tensor) -> Any:
    s = (a - x).square().sum(-1, keepdim=True)
    x.add_(1)
    return s


def row_is_read_in_a_late_loop(a: Tensor, x: Tensor) -> Any:
    s = (a - x).square().sum(-1, keepdim=True)
    t = (a * s).sum(-1, keepdim=True)
    u = (t * a * x).sum(-1, keepdim=True)
    x.add_(s)
    return u


def bodies_are_computed_again(x: Tensor, y: Tensor) -> Any:
    n = x * x
    s = n.sum(-1, keepdim=True)
    z = (y * s).sum(-1, keepdim=True)
    x.copy_(n / s)
    y.copy_(n / z)
    return z


def dear_bodies_are_kept(x: Tensor, y: Tensor) -> Any:
    n = (x * 1.5).tanh()
    s = n.square().sum(-1, keepdim=True)
    z = (y * s).sum(-1, keepdim=True)
    x.copy_(n / s)
    y.copy_(n / z)
    return z


def swap(x: Tensor, y: Tensor) -> None:
    t = x.clone()
    x.copy_(y)
    y.copy_(t)


def chained(x: Tensor, y: Tensor) -> Any:
    x.copy_(y * 2)
    y.copy_(x + 1)
    x.add_(y.flip(0))
    return x.sum()


def row_and_elements(a: Tensor, x: Tensor) -> Any:
    s = (a * x).sum(-1, keepdim=True)
    t = (a * s * x).sum(-1, keepdim=True)
    x.copy_(s)
    a.copy_(a * t.tanh() + x)
    return t


TWO: list[tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...]]] = [
    (view_is_read_by_a_call, (5, 5), (4, 3)),
    (row_is_read_in_a_loop, (7, 40), (7, 1)),
    (row_is_read_in_a_late_loop, (7, 40), (7, 1)),
    (bodies_are_computed_again, (7, 40), (7, 40)),
    (bodies_are_computed_again, (3, 9000), (3, 9000)),
    (dear_bodies_are_kept, (7, 40), (7, 40)),
    (dear_bodies_are_kept, (3, 9000), (3, 9000)),
    (swap, (30, 40), (30, 40)),
    (chained, (30, 40), (30, 40)),
    (row_and_elements, (7, 40), (7, 1)),
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("fn", "a", "b"), TWO)
def test_two_arguments(fn: Callable[..., Any], a: tuple[int, ...], b: tuple[int, ...]) -> None:
    agree(fn, lambda: (randn(a), randn(b)), tol=1e-4, calls=2)
    agree(fn, lambda: (randn(a[::-1]).t(), randn(b[::-1]).t()), tol=1e-4)


ONE: list[tuple[str, Callable[..., Any]]] = [
    ("flip", lambda x: (x.copy_(x.flip(0)), None)[1]),
    ("shift", lambda x: (x[1:].copy_(x[:-1].clone() * 2), None)[1]),
    ("transposed", lambda x: (x.copy_(x.t().contiguous() + 1), None)[1]),
    ("views", lambda x: (x.t()[1:].mul_(2), x[1].add_(x[:, 0].sum()), x.sum(0))[2]),
    ("twice", lambda x: (x.add_(1), x.mul_(2), x[2:5], x.view(-1) if x.is_contiguous() else x)[2:]),
    ("strided", lambda x: (x.as_strided((3,), (2,), 1).add_(1), x.sum())[1]),
    ("and sorted", lambda x: (torch.sort(x[::2])[0], x.add_(1))[0]),
]


def filled(x: Tensor, y: Tensor) -> Tensor:
    x[:, 3:5] = y[:, :2] * 2
    return x


def grown(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    old = x[2] * 2
    x[2].add_(y[0])
    return old, x[1:]


def shifted(x: Tensor, y: Tensor) -> None:
    x[0:3] = x[1:4].clone()
    y[0], x[5] = x[5], y[1]


def two_parts(x: Tensor, y: Tensor) -> Tensor:
    x[0].copy_(y[0])
    x[0, :3].mul_(y[1, :3])
    return (x @ y.t()).sum(0)


def at_a_place(x: Tensor, y: Tensor, at: int) -> Tensor:
    x[at : at + 1] = y[:1]
    return x[at]


@pytest.mark.parametrize("dynamic", (False, True))
@pytest.mark.parametrize("f", (filled, grown, shifted, two_parts), ids=lambda f: f.__name__)
def test_parts_of_an_argument(f: Callable[..., Any], dynamic: bool) -> None:
    """Only the part is written (`opt/write_parts.py`); what is returned shows it."""
    agree(f, lambda: [randn(40, 20), randn(40, 20)], tol=1e-5, dynamic=dynamic)
    agree(f, lambda: [randn(20, 40).t(), randn(40, 60)[:, ::3]], tol=1e-5, dynamic=dynamic)


def test_a_place_in_an_argument_is_a_number_of_each_call() -> None:
    c = torch.compile(at_a_place, backend="lenz", dynamic=True)
    for at in (3, 0, 7, 39, 40):
        x, y = randn(40, 20), randn(40, 20)
        ours = x.clone()
        if at == 40:
            with pytest.raises((RuntimeError, IndexError)):
                c(ours, y, at)
            continue
        torch.testing.assert_close(c(ours, y, at), at_a_place(x, y, at), rtol=0, atol=0)
        torch.testing.assert_close(ours, x, rtol=0, atol=0)


@pytest.mark.parametrize(("name", "fn"), ONE)
def test_one_argument(name: str, fn: Callable[..., Any]) -> None:
    agree(fn, lambda: (randn(70, 70),), tol=1e-4)
    if name in ("flip", "shift"):
        agree(fn, lambda: (randn(3000, 2),))


def test_arguments_that_share_memory() -> None:
    def split(n: int, m: int) -> Callable[[], tuple[Tensor, Tensor]]:
        def make() -> tuple[Tensor, Tensor]:
            base = randn(10)
            return base[:n], base[m:]

        return make

    agree(lambda x, y: (x.add_(1), y.mul_(2), x.sum())[2], split(6, 3), calls=2)
    agree(lambda x, y: x[:4] + y[:4], split(6, 3))

    def turned() -> tuple[Tensor, Tensor]:
        base = randn(40, 40)
        return base, base.t()

    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="refer to a single memory location"):  # as in eager
        torch.compile(lambda x, y: x.add_(y), backend="lenz")(*turned())

    def twice() -> tuple[Tensor, Tensor]:
        base = randn(10)
        return base, base

    agree(lambda x, y: (x.add_(1), x + y)[1], twice)


def memory_is_given_and_wanted(p: Tensor, q: Tensor, x: Tensor) -> Any:
    p.data = x + 1
    y = p @ x
    return torch.zeros(4, 4, dtype=torch.int32), y @ x


def equal_memory_is_given(p: Tensor, q: Tensor, x: Tensor) -> Any:
    p.data, q.data = x + 1, x + 1
    return x + 1


def constants_are_given(p: Tensor, q: Tensor, x: Tensor) -> Any:
    p.data, q.data = torch.arange(4.0), torch.tensor([3.0, 1.0, 2.0])
    return x + 1


@pytest.mark.parametrize(
    "fn", (memory_is_given_and_wanted, equal_memory_is_given, constants_are_given)
)
def test_memory_that_an_argument_takes_over_is_its_own(fn: Callable[..., Any]) -> None:
    torch._dynamo.reset()
    run = torch.compile(fn, backend="lenz", options={"on_error": "raise"})
    for _ in range(2):
        x = randn(4, 4)
        want, got = ([torch.zeros(4, 4), torch.zeros(4, 4), x] for _ in range(2))
        want.append(fn(*want))
        got.append(run(*got))
        torch.testing.assert_close(got, want)
        got[0].fill_(7)
        torch.testing.assert_close(got[1:], want[1:])


def test_memory_of_another_type() -> None:
    def fn(x: Tensor) -> Any:
        y = x.view(torch.int32) * 2
        y.sub_(-4)
        x[:, 2:5] = 2
        return y.view(torch.int64)

    agree(fn, lambda: (torch.arange(-12, 12).reshape(4, 6),))


def test_unaligned_arguments_are_written_in_place() -> None:
    run = torch.compile(lambda x: x.add_(1), backend="lenz", dynamic=False)
    base = torch.arange(4097, dtype=torch.float32)
    want = base.clone()
    run(base[:-1])
    run(base[1:])
    want[:-1] += 1
    want[1:] += 1
    torch.testing.assert_close(base, want)


def test_results_that_are_views_of_a_written_argument() -> None:
    base = torch.arange(65.0)
    fn = lambda x: (x.mul_(2), x[2:5], x.view(-1))[1:]
    run = torch.compile(fn, backend="lenz", dynamic=False)
    run(base[:-1].clone())
    part, _ = run(base[1:])
    part.zero_()
    assert base[3] == 0 and base[6] == 12


def test_a_fused_optimizer_writes_its_arguments_and_returns_nothing() -> None:
    def adam(w16: Tensor, g16: Tensor, m: Tensor, v: Tensor, w32: Tensor) -> None:
        g = g16.float()
        mean, square = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        w = w32 - 0.001 * mean / (square.sqrt() + 1e-5)
        w16.copy_(w)
        m.copy_(mean)
        v.copy_(square)
        w32.copy_(w)

    def make() -> tuple[Tensor, ...]:
        w = randn(10_003)
        return w.bfloat16(), randn(10_003).bfloat16(), torch.rand(10_003), torch.rand(10_003), w

    agree(adam, make, calls=3)
    agree(adam, make, dynamic=True)


def test_copies_do_not_share_memory() -> None:
    def fn(x: Tensor) -> Any:
        parts = torch.split_with_sizes_copy(x, [2, 3])
        same = x.clone()
        x.add_(1)
        return (*parts, same)

    agree(fn, lambda: (randn(5, 4),))


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.add_(1),
        lambda x: x.add_(1)[1:],
        lambda x: x.add_(1).view(-1, 2),
        lambda x: x[2:].add_(1),
        lambda x: (x[2:].add_(1), x),
    ],
)
def test_a_result_that_is_an_argument_is_written_once(f: Callable[[Tensor], Any]) -> None:
    report = lenz.explain(f)(torch.randn(4096))
    assert not report.allocs
    assert sum(k.bytes_written for g in report.graphs for k in g.kernels) <= 4096 * 4
    agree(f, lambda: [torch.randn(4096)])
    x = torch.randn(4096)
    got, want = torch.compile(f, backend="lenz")(x), f(x)
    leaves = zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True)
    assert all(a.data_ptr() == b.data_ptr() for a, b in leaves), "another memory"


WINDOWS = lambda: torch.arange(40.0).as_strided((4, 9), (4, 1))
SHARED = {
    "windows": WINDOWS,
    "windows, turned": lambda: WINDOWS().t(),
    "steps of one": lambda: torch.arange(20.0).as_strided((3, 3), (1, 1)),
    "windows, apart": lambda: torch.arange(60.0).as_strided((4, 9), (8, 2)),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dynamic", (False, True))
@pytest.mark.parametrize("name", SHARED)
def test_elements_that_share_memory_are_written_as_aot_eager_does(name: str, dynamic: bool) -> None:
    """Eager reads while it writes there; what it gives has one value for each of the elements."""
    fns: list[Callable[[Tensor], Any]] = [
        lambda x: x[0].add_(1),
        lambda x: x[0].copy_(x[-1] + 0),
        lambda x: x[:, 0].add_(1),
        lambda x: x.add_(1),
        lambda x: x.mul_(x),
        lambda x: x[1:, 1:].zero_(),
    ]
    for fn in fns:
        found = []
        for backend in ("lenz", "aot_eager"):
            torch._dynamo.reset()
            x = SHARED[name]()
            memory = x.as_strided((x.untyped_storage().nbytes() // 4,), (1,), 0)
            run = torch.compile(fn, backend=backend, dynamic=dynamic)
            found.append((run(x), memory))
        torch.testing.assert_close(*found, rtol=0, atol=0)


INDEX = torch.tensor([1, 0])
TURNED: dict[str, Callable[[Tensor], Any]] = {
    "masked_fill_": lambda x: x.masked_fill_(x > 0, 7.0),
    "scatter_": lambda x: x.scatter_(0, torch.zeros_like(x, dtype=torch.int64), 3.0),
    "scatter_add_": lambda x: x.scatter_add_(1, torch.zeros_like(x, dtype=torch.int64), x.clone()),
    "index_add_": lambda x: x.index_add_(0, INDEX, x[:2].clone(), alpha=2),
    "index_copy_": lambda x: x.index_copy_(0, INDEX, x[:2].clone()),
    "cumsum_": lambda x: x.cumsum_(dim=1),
    "tril_": lambda x: x.tril_(),
    "addmm_": lambda x: x[0, 0].addmm_(x[0, 0], x[0, 0].mT @ x[0, 0], alpha=0.5),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dynamic", (False, True))
@pytest.mark.parametrize("name", TURNED)
def test_a_tensor_written_in_place_keeps_its_strides(name: str, dynamic: bool) -> None:
    """AOTAutograd gives it those of the functional form, and fails at the view."""

    def fn(x: Tensor) -> Any:
        last, plain = x.clone(), x.contiguous() * 2
        TURNED[name](last)
        TURNED[name](plain.transpose(0, 1))
        return last, last.permute(0, 2, 3, 1).view(-1), plain, plain.view(-1)

    layout = torch.channels_last
    agree(fn, lambda: (randn(2, 2, 4, 4).to(memory_format=layout),), dynamic=dynamic)
    agree(TURNED[name], lambda: (randn(2, 2, 4, 4).to(memory_format=layout),), dynamic=dynamic)


EXPANDED: dict[str, Callable[[Tensor], Any]] = {
    "add_": lambda x: x.add_(1),
    "copy_ of a result": lambda x: x.copy_(x + 1),
    "fill_": lambda x: x.fill_(3),
    "zero_": lambda x: x.zero_(),
    "a row": lambda x: x[0].copy_(x[-1] + 1),
    "a column": lambda x: x[:, 0].add_(1),
    "masked_fill_": lambda x: x.masked_fill_(x > 0, 7.0),
    "index_put_": lambda x: x.index_put_((torch.zeros(1).long(),), torch.ones(())),
    "index_add_": lambda x: x.index_add_(0, torch.zeros(1).long(), torch.ones(1, 3)),
    "cumsum_": lambda x: x.cumsum_(0),
}


def written(run: Callable[[Tensor], Any]) -> Any:
    """What a call gives and has written, or the type of its error."""
    torch._dynamo.reset()
    x = torch.arange(3.0)
    try:
        return run(x), x
    except Exception as e:  # noqa: BLE001  # its type is what is compared
        return type(e)


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore")  # torch's and lenz's, of such calls
@pytest.mark.parametrize("name", EXPANDED)
def test_an_expanded_tensor_is_written_as_aot_eager_does(name: str) -> None:
    """An argument, a view of one, and a value of the graph; the rule is in docs/numerics.md."""
    fn = EXPANDED[name]
    outside: Callable[[Any], Callable[[Tensor], Any]] = lambda run: lambda x: run(x.expand(2, 3))
    for inside in (lambda x: fn(x.expand(2, 3)), lambda x: fn((x + 1).expand(2, 3))):
        ours, theirs = (written(torch.compile(inside, backend=b)) for b in ("lenz", "aot_eager"))
        same_or_error(ours, theirs)
    ours, theirs = (written(outside(torch.compile(fn, backend=b))) for b in ("lenz", "aot_eager"))
    same_or_error(ours, theirs)
    run = torch.compile(fn, backend="lenz", options={"on_error": "eager"})
    if theirs is torch._dynamo.exc.BackendCompilerFailed:  # the graph then runs in eager
        same_or_error(written(outside(run)), written(outside(fn)))


def same_or_error(got: Any, want: Any) -> None:
    if isinstance(got, type) or isinstance(want, type):
        assert got is want, f"{got} for {want}"
        return
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_a_later_call_has_elements_that_share_memory() -> None:
    """Strides are symbols then, of which the first call says nothing."""
    run = torch.compile(lambda x: x[0].add_(1), backend="lenz", dynamic=True)
    run(torch.zeros(5, 7)[:, :6])
    x = torch.arange(5.0)
    run(x.as_strided((2, 3), (2, 1)))
    assert x.tolist() == [1.0, 2.0, 3.0, 3.0, 4.0]


@pytest.mark.parametrize("turn", (lambda x: x, lambda x: x.mT, lambda x: x.permute(1, 2, 0)))
def test_dense_arguments_of_symbolic_sizes_are_written_by_kernels(
    turn: Callable[[Tensor], Tensor],
) -> None:
    def fn(x: Tensor, y: Tensor) -> None:
        x[1:].add_(y[1:])
        x.mul_(2)

    report = lenz.explain(fn, dynamic=True)(turn(randn(3, 4, 5)), turn(randn(3, 4, 5)))
    assert not [e.op for g in report.graphs for e in g.externs]


def dense_windows(x: Tensor) -> Any:
    windows = x.unfold(dimension=1, size=2, step=2)
    windows.mul_(2)
    windows[:, 1].add_(x.sum())
    return x + 1


def windows_with_gaps(x: Tensor) -> Any:
    x.unfold(0, 2, 3).mul_(2)
    return x.sum()


def windows_over_each_other(x: Tensor) -> Any:
    x[0].unfold(0, 3, 1).add_(1)
    return x[:, 1]


def windows_by_an_op(x: Tensor) -> Any:
    return torch.ops.aten.unfold.default(x, 0, 2, 3).fill_(7.0)


PLACES = (dense_windows, windows_with_gaps, windows_over_each_other, windows_by_an_op)


@pytest.mark.filterwarnings("ignore:.*it writes to windows of")
@pytest.mark.parametrize("dynamic", (False, True))
@pytest.mark.parametrize("f", PLACES)
def test_elements_beside_written_windows_stay(f: Callable[..., Any], dynamic: bool) -> None:
    """docs/upstream/torch_written_windows.py"""
    for rows in (8, 5):
        agree(f, lambda rows=rows: [randn(rows, rows)], dynamic=dynamic)  # type: ignore[misc]
    assert not lenz.explain(lambda x: x.unfold(1, 2, 2) * 2)(randn(3, 8)).graphs[0].skips
    columns = lambda x: torch.nn.functional.unfold(x, 2).mul_(2)
    assert not lenz.explain(columns)(randn(1, 1, 4, 4)).graphs[0].skips


def strided_from_a_row(x: Tensor) -> Tensor:
    x[0].copy_(x[-1] + 0)
    return x.as_strided((x.shape[0], 1), (x.stride(0), 1))


def strided_and_viewed(x: Tensor) -> Tensor:
    x.add_(1)
    return x.as_strided((2, 2), (2, 1)).view(4)[1:]


@pytest.mark.parametrize("dynamic", (False, True))
@pytest.mark.parametrize("f", (strided_from_a_row, strided_and_viewed))
def test_strided_results_lie_where_the_written_argument_does(
    f: Callable[..., Any], dynamic: bool
) -> None:
    c = torch.compile(f, backend="lenz", dynamic=dynamic)
    for start, end, step in ((3, 8, 1), (0, 6, 1), (1, 9, 2)):
        ours, theirs = (torch.arange(40.0) for _ in "ab")
        got, want = c(ours[start:end:step]), f(theirs[start:end:step])
        torch.testing.assert_close(got, want, rtol=0, atol=0)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        assert got.storage_offset() == want.storage_offset()
