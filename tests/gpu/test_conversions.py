"""All chains of two and three conversions between element types, each source in one process."""

from __future__ import annotations

import pytest
import torch

from tests.codegen.test_conversions import OTHERS, TYPES, assert_chains, chains, numbers


@pytest.mark.parametrize("second", TYPES, ids=str)
@pytest.mark.parametrize("first", TYPES, ids=str)
def test_chains(first: torch.dtype, second: torch.dtype, device: str) -> None:
    several = [c for n in (2, 3) for c in chains(first, n) if c[0] is second]
    if several:
        assert_chains(numbers(first, device), several)


@pytest.mark.parametrize("first", TYPES, ids=str)
def test_types_of_the_eager_op_alone(first: torch.dtype, device: str) -> None:
    several = [c for c in chains(first, 2, (*TYPES, *OTHERS)) if {*c} & {*OTHERS}]
    assert_chains(numbers(first, device), several)


@pytest.mark.parametrize("to", (torch.float8_e4m3fn, torch.float8_e5m2), ids=str)
@pytest.mark.parametrize("first", (torch.float16, torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("dynamic", (False, True))
def test_there_and_back(first: torch.dtype, to: torch.dtype, dynamic: bool, device: str) -> None:
    """Half of the results were infinite on an H200: tiles of 15, 3, 13."""
    x = torch.rand(15, 3, 13, device=device).to(first)
    run = torch.compile(lambda x: x.to(to).to(x.dtype), backend="lenz", dynamic=dynamic)
    assert torch.equal(run(x), x.to(to).to(first))
