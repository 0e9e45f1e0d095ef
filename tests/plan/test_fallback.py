"""A call that breaks an assumption of a plan runs the fallback, or says that there is none."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from lenz.errors import UserError
from lenz.ir.plan import Plan
from lenz.ir.reader import read
from lenz.loading import load

TEXT = """
plan @p(s0: 1..) on cpu {
  in %x : f32[8*s0]
  most (s0: 4)
  bind s0 = size(%x, 0) by 8
  call %y = aten.neg.default(%x)
  return (%y)
}
"""


@pytest.mark.parametrize("size", [36, 48])
def test_a_broken_assumption_without_a_fallback_is_named(size: int) -> None:
    plan = read(TEXT)
    assert isinstance(plan, Plan)
    seen: list[Any] = []
    own, other = load(plan, {}), load(plan, {}, otherwise=lambda args: seen.append(args) or ())
    x = torch.ones(32)
    assert torch.equal(own([x])[0], -x) and torch.equal(other([x])[0], -x)
    with pytest.raises(UserError, match="breaks an assumption"):
        own([torch.ones(size)])
    assert not seen
    other([torch.ones(size)])
    assert len(seen[0]) == 1 and seen[0][0].numel() == size


@pytest.mark.parametrize("native", [False, True])
def test_a_fallback_frees_arguments_after_their_last_use(native: bool) -> None:
    plan = read(TEXT)
    assert isinstance(plan, Plan)
    alive: list[Tensor | None] = []

    def otherwise(args: list[Tensor]) -> tuple[Tensor, ...]:
        args.clear()
        alive.append(known())
        return ()

    run = load(plan, {}, otherwise=otherwise, fast=native)
    given = [torch.ones(48)]
    known = weakref.ref(given[0])
    run(given)
    assert alive == [None]
