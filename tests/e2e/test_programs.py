"""Random programs: eager, the interpreter after every pass and the compiled code agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from tests.e2e.programs import Program, Spec, check, fails, program


@pytest.mark.parametrize("first", range(0, 18, 6))
def test_every_stage_gives_what_eager_gives(first: int) -> None:
    for seed in range(first, first + 6):
        p = program(seed)
        why = fails(p, dynamic=seed % 3 == 2, oracle=True)
        assert not why, f"seed {seed}\n{p}\n{why}"


@pytest.mark.parametrize("first", (1000, 1004))
def test_large_sizes_give_what_eager_gives(first: int) -> None:
    for seed in range(first, first + 4):
        p = program(seed, large=True)
        why = fails(p, dynamic=seed % 3 == 2, oracle=False)
        assert not why, f"seed {seed}\n{p}\n{why}"


def test_a_wrong_result_is_found() -> None:
    def wrong(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return lambda *args: [t + 1 for t in gm(*args)]

    p = Program([Spec("a0", (3, 4), torch.float32, "", 1)], ["t0 = a0.sum(1)"], ["t0"])
    check(p)
    with pytest.raises(AssertionError, match="result t0"):
        check(p, backend=wrong)
