"""Compiled code that several Python threads run at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor


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


@torch.library.custom_op("lenz_threads::meet", mutates_args=())
def meet(x: Tensor) -> Tensor:
    return x.clone()


def test_a_call_while_another_thread_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch 2.11 nothing but the backend tells other threads that a trace is no user's."""
    monkeypatch.setattr(torch.compiler, "_compile_session_context", nullcontext, raising=False)
    ready = torch.compile(lambda x: x * 2, backend="lenz")
    x, seen = torch.randn(3), list[Tensor]()
    ready(x)

    @meet.register_fake
    def _(y: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            seen.append(pool.submit(ready, x).result())
        return torch.empty_like(y)

    got = torch.compile(lambda y: meet(y) + 1, backend="lenz")(x)
    torch.testing.assert_close(got, x + 1)
    assert len(seen) > 1, "the op was not traced by AOTAutograd"
    torch.testing.assert_close(seen, [x * 2] * len(seen))
    assert not torch.compiler.is_compiling()
