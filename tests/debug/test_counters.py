"""`lenz.counters()`: numbers of known programs, and what sets them to 0."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters as of_torch
from torch.fx import symbolic_trace

import lenz
from lenz.debug.failing import in_eager, recorder_of
from lenz.frontend.session import until_reset
from lenz.options import Options

ZERO = {
    "graphs": 0, "kernels": 0, "externs": 0, "fusions": 0, "recompiles": 0, "cache_hits": 0,
    "cache_misses": 0, "eager": 0,
}  # fmt: skip


def soft(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ w).exp() + 1


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch.compiler.reset()


def run(rows: int, **options: Any) -> None:
    compiled = torch.compile(soft, backend="lenz", options=options, dynamic=False)
    compiled(torch.randn(rows, 7), torch.randn(7, 7))


def test_a_known_program_is_counted() -> None:
    assert lenz.counters() == ZERO
    run(5, cache=False, inline=False)
    # One product, and three loops in one kernel.
    made = {"graphs": 1, "kernels": 1, "externs": 1, "fusions": 2, "cache_misses": 1}
    assert lenz.counters() == {**ZERO, **made}
    run(5, cache=False, inline=False)
    assert lenz.counters() == {**ZERO, **made}, "nothing was compiled"
    run(6, cache=False, inline=False)
    assert lenz.counters() == {**ZERO, **{k: 2 * n for k, n in made.items()}, "recompiles": 1}


def test_both_halves_of_a_training_step_count() -> None:
    x = torch.randn(5, 7, requires_grad=True)
    torch.compile(torch.sin, backend="lenz", options={"cache": False})(x).sum().backward()
    assert {k: n for k, n in lenz.counters().items() if n} == {
        "graphs": 2, "kernels": 2, "cache_misses": 2,
    }  # fmt: skip


def test_graphs_from_the_cache_are_hits(tmp_path: Any) -> None:
    run(5, cache_dir=str(tmp_path))
    assert lenz.counters()["cache_misses"] == 1
    torch.compiler.reset()
    run(5, cache_dir=str(tmp_path))
    assert lenz.counters() == {**ZERO, "graphs": 1, "cache_hits": 1}


def test_graphs_that_run_in_eager_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no schedule")

    monkeypatch.setattr("lenz.pipeline.schedule", broken)
    with pytest.warns(UserWarning, match="no schedule"):
        run(5, cache=False, on_error="eager")
    assert lenz.counters()["eager"] == 1


def test_a_later_half_that_fails_counts() -> None:
    until_reset()
    gm, options = symbolic_trace(lambda x: x.sin()), Options(on_error="eager")
    recorder = recorder_of(gm, "backward", options)
    with pytest.warns(UserWarning, match="no plan"):
        in_eager(RuntimeError("no plan"), recorder, "backward", options, lambda args: args)
    assert lenz.counters() == {**ZERO, "eager": 1}


@pytest.mark.filterwarnings("ignore:lenz runs a graph in eager")
def test_a_graph_that_is_not_captured_counts() -> None:
    torch.compile(lambda x: x.unfold(0, 3, 1).add_(1), backend="lenz")(torch.zeros(8))
    assert lenz.counters() == {**ZERO, "eager": 1}
    torch.compiler.reset()
    assert lenz.counters() == ZERO


def test_they_are_torchs_own_and_are_reset_with_them() -> None:
    run(5, cache=False)
    assert of_torch["lenz"]["kernels"] == lenz.counters()["kernels"] == 1
    of_torch.clear()
    assert lenz.counters() == ZERO
    run(6, cache=False)
    assert lenz.counters()["graphs"] == 1
    torch._dynamo.reset()
    assert lenz.counters() == ZERO and "lenz" not in of_torch
