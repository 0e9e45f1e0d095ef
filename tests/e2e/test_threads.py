"""Compiled code that several Python threads run at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch


def test_a_failed_check_is_raised_in_its_own_thread() -> None:
    compiled = torch.compile(lambda x, i: x[i] * 2, backend="lenz", dynamic=False)
    x = torch.randn(50, 8)
    good, bad = torch.arange(40), torch.full((40,), 1000)
    compiled(x, good)

    def outcome(i: torch.Tensor) -> bool:
        try:
            compiled(x, i)
        except IndexError:
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(outcome, [good, bad] * 200))
    assert results == [True, False] * 200
