"""Arguments that overlap though torch says that they do not: a write to one shows in the other."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, arange
from torch._C._dynamo.guards import compute_overlapping_tensors
from torch.fx import symbolic_trace

from lenz.frontend.calls import overlooked


def written(x: Tensor, y: Tensor) -> Tensor:
    return y.mul_(10).sum() + (x + 1)


def test_what_torch_overlooks_is_found_and_nothing_else() -> None:
    random.seed(0)
    memory, gm, count = arange(60), symbolic_trace(written), 0
    for _ in range(3000):
        step = random.randint(1, 6)

        def matrix(step: int = step) -> Tensor:
            sizes = random.randint(1, 4), random.randint(1, step)
            return memory.as_strided(sizes, (step, 1), random.randint(0, 20))

        pair = [matrix(), matrix()]
        first, second = (set(t.flatten().tolist()) for t in pair)
        missed = bool(first & second) and not compute_overlapping_tensors(pair, symbolic=False)
        assert overlooked(gm, pair) == missed, [(t.storage_offset(), t.shape) for t in pair]
        count += missed
    assert 100 < count < 1000
    assert not overlooked(symbolic_trace(lambda x, y: x + y), pair), "it writes nothing"


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
