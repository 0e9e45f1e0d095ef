"""Bad values of arguments: eager's type of error, and no write that eager has not made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, randn

import lenz

Fn = Callable[[Tensor, Tensor], Any]
ONES = torch.ones(3, 4)
OUTSIDE: dict[str, Fn] = {
    "index": lambda x, i: x[i] * 2,
    "gather": lambda x, i: x.gather(0, i[:, None]),
    "take": lambda x, i: x.take(i * 4),
    "index_select": lambda x, i: x.index_select(0, i),
    "embedding": lambda x, i: F.embedding(i, x).sum(0),
    "index_add": lambda x, i: x.index_add(0, i, ONES),
    "index_copy": lambda x, i: x.index_copy(0, i, ONES),
    "index_fill": lambda x, i: x.index_fill(0, i, 2.0),
    "index_put": lambda x, i: x.index_put((i,), ONES, accumulate=True),
    "scatter": lambda x, i: x.scatter(0, i[:, None], 1.0),
    "scatter_add": lambda x, i: x.scatter_add(0, i[:, None], ONES),
    "scatter_reduce": lambda x, i: x.scatter_reduce(0, i[:, None], ONES, "amax"),
    "one_hot": lambda x, i: F.one_hot(i, 10) + 1,
    "nll": lambda x, i: F.nll_loss(x[None].repeat(3, 1, 1), i[:, None].expand(3, 4)),
    "nll of equal classes": lambda x, i: F.nll_loss(x[:3, :1].expand(3, 4), i),
    "embedding_bag": lambda x, i: F.embedding_bag(i[None], x),
    # The element is the same wherever the position points.
    "repeated": lambda x, i: x[:1].expand(10, 4)[i],
    "constant": lambda x, i: torch.ones(10, 4)[i] * x[0],
    "broadcast": lambda x, i: (x[0] * torch.ones(10, 1))[i],
    "chosen by a constant": lambda x, i: torch.where(torch.ones(3, 1) > 0, x[:3], x[i]),
    "sum of repeated": lambda x, i: x[:1].expand(10, 4).index_select(0, i).sum(1),
}


def outcome(fn: Callable[..., Any], *args: Any) -> tuple[Any, type | None]:
    """The result, and the type of the error."""
    try:
        return fn(*args), None
    except Exception as e:  # noqa: BLE001  # its type is what is compared
        return None, type(e)


def same_error(fn: Callable[..., Any], good: Any, bad: Any, **kwargs: Any) -> list[Any]:
    """Assert eager's type of error for `bad`, after and before right results; gives the `bad`."""
    torch._dynamo.reset()
    run = torch.compile(fn, backend="lenz", **kwargs)
    ours, theirs, *again = ([t.clone() for t in args] for args in (bad, bad, *[good] * 4))
    torch.testing.assert_close(run(*again[0]), fn(*again[1]))
    error = outcome(run, *ours)[1]
    assert error is not None and error is outcome(fn, *theirs)[1]
    torch.testing.assert_close(run(*again[2]), fn(*again[3]))
    return ours


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dynamic", (False, True))
@pytest.mark.parametrize("name", OUTSIDE)
def test_positions_outside(name: str, dynamic: bool) -> None:
    """Writes that stand behind the error in the program have not happened; nor in another order."""
    fn, x = OUTSIDE[name], randn(10, 4)
    good, bad = torch.tensor([1, 2, 3]), torch.tensor([1, 99, 3])

    def late(x: Tensor, i: Tensor, y: Tensor) -> Any:
        found = fn(x, i) * 2
        y.add_(found.sum())
        x.mul_(2)
        return found

    kept, _, other = same_error(
        late, (x, good, torch.zeros(3)), (x, bad, torch.zeros(3)), dynamic=dynamic
    )
    torch.testing.assert_close(kept, x)
    assert not other.any()


@pytest.mark.parametrize(
    "name", ("index_select", "index_add", "index_copy", "index_fill", "index_put")
)
def test_positions_of_a_type_that_eager_refuses(name: str) -> None:
    fn, i = OUTSIDE[name], torch.tensor([1, 2, 0])
    same_error(fn, (randn(10, 4), i), (randn(10, 4), i.short()))


@pytest.mark.parametrize("dynamic", (False, True))
def test_positions_outside_of_an_argument_that_repeats(dynamic: bool) -> None:
    x = randn(1, 4).expand(10, 4)
    run = torch.compile(lambda x, i: x[i] * 2, backend="lenz", dynamic=dynamic)
    torch.testing.assert_close(run(x, torch.tensor([1, -10])), x[:2] * 2)
    for bad in (10, -11):
        with pytest.raises(IndexError):
            run(x, torch.tensor([1, bad]))


@pytest.mark.parametrize("name", ("index_put_", "index_add_", "index_copy_"))
def test_a_write_in_place_waits_for_earlier_checks(name: str) -> None:
    def fn(x: Tensor, i: Tensor, table: Tensor) -> None:
        update = table[i]
        position = torch.arange(3)
        if name == "index_put_":
            x.index_put_((position,), update)
        else:
            getattr(x, name)(0, position, update)

    x, good, bad = randn(5, 4), torch.tensor([1, 2, 3]), torch.tensor([1, 2, -99])
    kept, *_ = same_error(fn, (x, good, randn(6, 4)), (x, bad, randn(6, 4)))
    torch.testing.assert_close(kept, x)


CALLS: dict[str, Fn] = {
    "cond": lambda x, i: torch.cond(
        x.sum() < 99, lambda x, i: x[i] * 1, lambda x, i: x[i] + 1, (x, i)
    ),
    "bincount": lambda x, i: torch.bincount(50 - i) * x.sum(),
    "complex": lambda x, i: torch.complex(x, x)[i].abs(),
    "repeat_interleave": lambda x, i: i.repeat_interleave(50 - i) * x.sum(),
}


@pytest.mark.filterwarnings("ignore:.*in eager.*")
@pytest.mark.parametrize("name", CALLS)
def test_a_write_waits_for_calls_of_eager_ops(name: str) -> None:
    """What stands behind the call is not written, nor is what stands before it lost."""

    def fn(x: Tensor, i: Tensor) -> Any:
        x.add_(1)
        found = CALLS[name](x, i)
        x.mul_(3)
        return found

    x, good, bad = randn(10, 4), torch.tensor([1, 2, 3]), torch.tensor([1, 2, 99])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        kept, _ = same_error(fn, (x, good), (x, bad), fullgraph=True)
    assert torch.equal(kept, x) or torch.equal(kept, x + 1)


def test_what_a_loss_checks_does_not_hold_up_statistics() -> None:
    """Running statistics are written by the kernel that computes them: eager writes them first."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    report = lenz.explain(loss)(randn(16, 8), torch.randint(0, 5, (16,)))
    forward = report.graphs[0]
    assert len(forward.kernels) <= 4, [k.name for k in forward.kernels]


def column(*values: float) -> tuple[Tensor]:
    return (torch.tensor(values),)


# Others are refused while they are traced, by a size that is a number then.
EMPTY: list[Callable[[Tensor], Any]] = [
    torch.max, torch.min, lambda x: x.max(0), lambda x: x.argmin(0),
]  # fmt: skip


@pytest.mark.diagonal(2)
@pytest.mark.parametrize("dynamic", (False, True))
@pytest.mark.parametrize("number", range(len(EMPTY)))
def test_extrema_of_nothing(number: int, dynamic: bool) -> None:
    fn = EMPTY[number]
    same_error(lambda x: fn(x * 2), (randn(4, 3),), (randn(0, 3),), dynamic=dynamic)


def test_extrema_of_what_data_leaves() -> None:
    def fn(x: Tensor) -> Any:
        return x[x > 0].max() + 1

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        same_error(fn, column(1.0, -1.0), column(-1.0, -2.0), fullgraph=True)
        kept = torch.compile(lambda x: x[x > 0].softmax(0).exp(), backend="lenz", fullgraph=True)
        x = torch.tensor([-1.0], requires_grad=True)
        kept(x).sum().backward()
        assert x.grad is not None and not x.grad.any()


PARAMETERS: list[Callable[[Tensor], Any]] = [
    lambda p: torch.bernoulli(p) * 0,
    lambda p: torch.normal(0.0, p) * 0,
    lambda p: F.binary_cross_entropy(p, torch.ones(2)),
    lambda p: torch.multinomial(p, 1) < 2,
]


@pytest.mark.parametrize("number", range(len(PARAMETERS)))
def test_parameters_outside_of_their_range(number: int) -> None:
    fn = PARAMETERS[number]
    same_error(fn, column(0.5, 1.0), column(0.5, -1.0))
    same_error(fn, column(0.5, 0.0), column(float("nan"), 1.0))


UNREAD: dict[str, Fn] = {
    "times 0": lambda x, i: x[i].long() * 0,
    "and False": lambda x, i: (x[i] > 3) & False,
    "equal to itself": lambda x, i: x.long()[i] >= x.long()[i],
    "through others": lambda x, i: (x.long()[i].sum(1) + 2) * 0,
    "sampled": lambda x, i: torch.multinomial(torch.where(i == 99, -1.0, i.float()), 1) * 0,
    "its shape": lambda x, i: x[i].new_zeros(3),
    "a part": lambda x, i: x[i][:1] * 2,
    "a sum of a part": lambda x, i: x[i][:1].sum(),
    "a part of each": lambda x, i: (x[i].T[2:] * 2, x[i][:, :3] + 1),
    "padded": lambda x, i: F.pad(x[i], (1, 2, 3, -2)) * 2,
    "joined, then cut": lambda x, i: torch.cat([x * 2, x[i], x * 2])[:11] * 2,
    "positions of positions": lambda x, i: x[i][i[:1] - 1] * 2,
    "of nothing": lambda x, i: x[i][:, :0] * 2,
    "a diagonal": lambda x, i: (x[i] * 2).diagonal()[:1] * 2,
    "turned round": lambda x, i: x[i].flip(0)[1:] * 2,
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dynamic", (False, True))
@pytest.mark.parametrize("name", UNREAD)
def test_a_check_of_what_nobody_reads(name: str, dynamic: bool) -> None:
    """What a fold or a slice throws away has been checked in eager."""
    good, bad = torch.tensor([1, 2, 3]), torch.tensor([1, 2, 99])
    same_error(UNREAD[name], (randn(10, 4), good), (randn(10, 4), bad), dynamic=dynamic)


BESIDE_NOTHING: dict[str, Fn] = {
    "outer": lambda x, i: x[i][:, :1] * x[0][x[0] > 99],
    "sum": lambda x, i: (x[i][:, :1] * x[0][x[0] > 99]).sum(1),
    "division": lambda x, i: torch.outer(x[0][x[0] > 99].long(), 7 // (i - 99)),
    "unread columns": lambda x, i: x[i][:, : x[x > 99].shape[0]] * 2,
    "index_select": lambda x, i: x[:, x[0] > 99].index_select(0, i),
    "embedding": lambda x, i: F.embedding(i, x[:, x[0] > 99]).sum(1),
}


@pytest.mark.parametrize("name", BESIDE_NOTHING)
def test_positions_outside_beside_an_axis_that_data_leaves_empty(name: str) -> None:
    x, good, bad = randn(10, 4), torch.tensor([1, 2, 3]), torch.tensor([1, 2, 99])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        same_error(BESIDE_NOTHING[name], (x, good), (x, bad), fullgraph=True)


def test_rows_without_elements_are_not_looked_up() -> None:
    run = torch.compile(lambda x, i: x[:, x[0] > 99][i] * 0, backend="lenz", fullgraph=True)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert run(torch.arange(40).view(10, 4), torch.tensor([1, 99])).shape == (2, 0)


ALL_READ: dict[str, Fn] = {
    "turned round": lambda x, i: x[i].flip(0).T * 2,
    "flat": lambda x, i: x[i].reshape(-1) * 2,
    "a part of each row": lambda x, i: x[i][:, 2:] * 2,
    "joined columns": lambda x, i: torch.cat([F.embedding(i, x), F.embedding(i, x * 2)]),
    "extrema": lambda x, i: x[i].max(1).values + 1,
}


@pytest.mark.diagonal(2)
@pytest.mark.parametrize("dynamic", (False, True))
@pytest.mark.parametrize("name", ALL_READ)
def test_a_check_is_done_once_where_all_is_read(name: str, dynamic: bool) -> None:
    report = lenz.explain(ALL_READ[name], dynamic=dynamic)(randn(10, 4), torch.tensor([1, 2, 3]))
    (graph,) = report.graphs
    assert len(graph.kernels) == 1, [k.name for k in graph.kernels]


def test_powers_of_integers() -> None:
    def fn(x: Tensor, n: Tensor) -> Any:
        return x ** n.item()

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        x = torch.arange(5)
        same_error(fn, (x, torch.tensor(2)), (x, torch.tensor(-1)))
