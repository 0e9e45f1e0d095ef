"""Parameters that ATen treats differently from torch's decompositions, on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.e2e.sides import agree
from tests.e2e.test_parameters import cases

GROUPS = 8


@pytest.mark.parametrize("group", range(GROUPS))
def test_parameters_are_treated_as_in_eager(group: int, device: str) -> None:
    place = torch.device(device)
    for name, fn, make in cases(place)[group::GROUPS]:
        with place:
            try:
                made = make()
                fn(*made)
            except NotImplementedError:
                continue  # a dtype that eager refuses
        try:
            check(fn, lambda made=made: [x.clone() for x in made])
        except Exception as e:
            raise AssertionError(name) from e


def check(fn: Callable[..., Any], make: Callable[[], list[Tensor]]) -> None:
    agree(lambda *args: fn(*args), make, tol=2e-5)


@pytest.mark.parametrize("mode", ("bilinear", "bicubic", "linear", "trilinear"))
def test_interpolation_of_bytes_is_refused_as_in_eager(mode: str, device: str) -> None:
    if device == "cpu":
        pytest.skip("CPUs have it")
    dims = {"linear": 1, "trilinear": 3}.get(mode, 2)
    x = torch.ones((1, 2) + (3,) * dims, dtype=torch.uint8, device=device)
    torch._dynamo.reset()
    run = torch.compile(lambda x: F.interpolate(x, scale_factor=2, mode=mode), backend="lenz")
    with pytest.raises(NotImplementedError):
        run(x)
