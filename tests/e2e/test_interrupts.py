"""Ctrl-C while a graph is compiled: the next call compiles it again, and its results are right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lenz.debug.trace import Recorder

STAGES = ("target", "recall", "import", "lower", "schedule", "codegen", "plan", "llvm", "link")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("turn", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_a_call_after_an_interrupt(stage: str, turn: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the `turn`-th start of a stage: of the forward half, then mostly of the backward half."""
    real, left = Recorder.stage, [turn]

    @contextmanager
    def interrupted(self: Recorder, name: str) -> Iterator[None]:
        with real(self, name):
            if name == stage:
                left[0] -= 1
                if left[0] == 0:
                    raise KeyboardInterrupt
            yield

    w = torch.randn(16, 16, requires_grad=True)

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = F.layer_norm(torch.softmax(x @ w, -1) + x, (16,))
        return (y.sin().cumsum(0) @ w).square().sum()

    def step(f: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        w.grad = None
        loss = f(x)
        loss.backward()
        assert w.grad is not None
        return loss.detach(), w.grad.clone()

    run = torch.compile(fn, backend="lenz", options={"cache": False})
    x = torch.randn(8, 16)
    monkeypatch.setattr(Recorder, "stage", interrupted)
    with pytest.raises(KeyboardInterrupt):
        for _ in range(2):
            step(run, x)
    for _ in range(2):
        torch.testing.assert_close(step(run, x), step(fn, x), rtol=1e-4, atol=1e-4)
