"""Results that are views of a written argument: of its memory, whatever its strides and offset.

AOTAutograd hands out views of the new value and rebuilds them from their strides alone: where those
are not the argument's, its own result is wrong (docs/upstream/torch_views_of_written.py).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.e2e.sides import agree


def sliced(x: Tensor) -> Tensor:
    x.add_(1)
    return x[1:]


def flat(x: Tensor) -> Tensor:
    x.add_(1)
    return x.flatten()


def moved(x: Tensor) -> Tensor:
    x.mul_(2)
    return x.unsqueeze(0).transpose(0, 1)[1:]


def filled(x: Tensor) -> Tensor:
    y = x.flatten(0, 1)
    y[..., -1:].fill_(3)
    return y


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "every second": lambda t: t[:, ::2],
    "a part": lambda t: t[:, 1:],
    "one column": lambda t: t[:, 1:2],
    "one row": lambda t: t[1:2, ::2],
    "turned": lambda t: t.T,
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("f", [sliced, flat, moved, filled])
def test_views_of_written_arguments(
    f: Callable[[Tensor], Tensor], view: str, dynamic: bool
) -> None:
    ours, theirs = torch.arange(24.0).view(4, 6), torch.arange(24.0).view(4, 6)
    got = torch.compile(f, backend="lenz", dynamic=dynamic)(VIEWS[view](ours))
    want = f(VIEWS[view](theirs))
    assert torch.equal(got, want) and torch.equal(ours, theirs)
    assert got.stride() == want.stride() and got.storage_offset() == want.storage_offset()
    same = [t.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
            for t, b in ((got, ours), (want, theirs))]  # fmt: skip
    assert same[0] == same[1]
    assert got._is_view() == want._is_view()


@pytest.mark.filterwarnings("ignore:lenz runs a graph in eager")
@pytest.mark.parametrize("view", ["nothing", "a column", "a row"])
def test_memory_around_a_written_view(view: str) -> None:
    """Only eager has it: what the graph makes of the view has nothing in between, or behind."""

    def f(x: Tensor) -> Tensor:
        x.flatten()[1:3].fill_(2)
        return x.as_strided((2, 2), (1, 1)) * 1

    columns = {"nothing": slice(1, 1), "a column": slice(1), "a row": slice(1, None)}[view]
    rows = slice(2, 3) if view == "a row" else slice(None)
    ours, theirs = torch.arange(8.0).view(4, 2), torch.arange(8.0).view(4, 2)
    got = torch.compile(f, backend="lenz", options={"on_error": "eager"})(ours[rows, columns])
    assert torch.equal(got, f(theirs[rows, columns])) and torch.equal(ours, theirs)


def test_a_written_argument_beside_a_check_of_a_matrix() -> None:
    """The check is an effect, whose token AOTAutograd's notes on the results count as one."""

    def f(a: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        x.add_(1)
        return torch.linalg.inv(a), x.t()

    def g(a: Tensor, x: Tensor) -> Tensor:
        return torch.linalg.inv(a, out=x)

    def make() -> list[Tensor]:
        return [torch.randn(3, 3).mT, torch.randn(3, 6)[:, ::2]]

    agree(f, make, fullgraph=True)
    agree(g, lambda: [make()[0], torch.zeros(3, 3)], fullgraph=True)
    run = torch.compile(f, backend="lenz")
    a, x = make()
    assert run(a, x)[1].data_ptr() == x.data_ptr(), "the view has memory of its own"
