"""Arguments that overlap, or belong to InferenceMode: writes to them are eager's."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, arange
from torch._C._dynamo.guards import compute_overlapping_tensors
from torch.fx import symbolic_trace

from lenz.frontend.calls import unwritable


def written(x: Tensor, y: Tensor) -> Tensor:
    return y.mul_(10).sum() + (x + 1)


def test_overlaps_are_found_those_that_torch_overlooks_too() -> None:
    random.seed(0)
    memory, gm, count = arange(60), symbolic_trace(written), 0
    for _ in range(3000):
        step = random.randint(1, 6)

        def matrix(step: int = step) -> Tensor:
            sizes = random.randint(1, 4), random.randint(1, step)
            return memory.as_strided(sizes, (step, 1), random.randint(0, 20))

        pair = [matrix(), matrix()]
        first, second = (set(t.flatten().tolist()) for t in pair)
        seen = bool(compute_overlapping_tensors(pair, symbolic=False))
        found = unwritable(gm, pair) != ""
        assert found == (seen or bool(first & second)), [
            (t.storage_offset(), t.shape) for t in pair
        ]
        count += found and not seen
    assert 100 < count < 1000
    assert not unwritable(symbolic_trace(lambda x, y: x + y), pair), "it writes nothing"


@pytest.mark.parametrize("dynamic", (False, True))
@pytest.mark.filterwarnings("ignore:lenz runs a graph in eager")
def test_the_distance_of_two_arguments_may_change(dynamic: bool) -> None:
    """docs/upstream/torch_overlapping_arguments.py: AOTAutograd would keep the first distance."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        return x + y

    torch._dynamo.reset()
    run = torch.compile(fn, backend="lenz", dynamic=dynamic)
    for places in ((0, 2), (0, 4), (0, 1), (0, 3), (0, 0), (4, 0)):
        memory, own = arange(8.0), arange(8.0)
        got = run(*[memory[k : k + 4] for k in places])
        assert torch.equal(got, fn(*[own[k : k + 4] for k in places])), places
        assert torch.equal(memory, own)


@pytest.mark.filterwarnings("ignore:lenz runs a graph in eager")
def test_a_tensor_of_inference_mode_is_not_written_outside_it() -> None:
    with torch.inference_mode():
        y = torch.ones(3)
    torch._dynamo.reset()
    run = torch.compile(lambda x: x.add_(1), backend="lenz")
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
        run(y)  # eager raises once it has written
    with torch.inference_mode():
        run(y)
    assert y.tolist() == [3.0] * 3


@pytest.mark.parametrize("dynamic", (False, True))
@pytest.mark.filterwarnings("ignore:lenz runs a graph in eager")
def test_a_write_shows_in_the_other_argument(dynamic: bool) -> None:
    run = torch.compile(written, backend="lenz", dynamic=dynamic)
    for part in (slice(0, 2), slice(1, 3)):
        mine, theirs = (arange(20.0).reshape(5, 4) for _ in range(2))
        got = run(mine[:-1, part], mine[1:, part])
        assert torch.equal(got, written(theirs[:-1, part], theirs[1:, part]))
        assert torch.equal(mine, theirs)


@pytest.mark.filterwarnings("error:lenz")
def test_arguments_that_are_apart_are_compiled() -> None:
    x = arange(20.0).reshape(5, 4)
    torch.compile(written, backend="lenz")(x[:, :2], x[:, 2:])
    torch.compile(lambda a, b: a + b, backend="lenz")(x[:-1, :2], x[1:, :2])


@pytest.mark.filterwarnings("error:lenz")
def test_writes_to_other_memory_are_compiled() -> None:
    """The columns of `unbind` overlap for torch; losses of boxes write to a third tensor."""

    def fn(boxes: Tensor) -> Tensor:
        x, y = boxes.unbind(-1)
        area = torch.zeros_like(x)
        torch._dynamo.graph_break()
        area[x < y] = 1.0
        area.add_(x)
        return area + y

    torch._dynamo.reset()
    boxes = arange(12.0).reshape(6, 2).roll(1)
    assert torch.equal(torch.compile(fn, backend="lenz")(boxes), fn(boxes))


@pytest.mark.parametrize("write", (lambda x, z: x[:1].add_(1), lambda x, z: z.set_(x).add_(1)))
@pytest.mark.filterwarnings("ignore:lenz runs a graph in eager")
def test_writes_through_views_are_eagers(write: Callable[[Tensor, Tensor], Tensor]) -> None:
    def fn(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        write(x, z)
        return x + y

    torch._dynamo.reset()
    run = torch.compile(fn, backend="lenz")
    for places in ((0, 2), (0, 1), (0, 3)):
        memory, own = arange(8.0), arange(8.0)
        mine, theirs = ([*(m[k : k + 4] for k in places), torch.zeros(4)] for m in (memory, own))
        assert torch.equal(run(*mine), fn(*theirs)), places
        assert torch.equal(memory, own)
