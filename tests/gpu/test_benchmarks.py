"""The kernels of the GPU benchmarks at small sizes, and how the benchmarks judge and merge rows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from benchmarks import gpu_report
from benchmarks.gpu_kernels import CASES, Case, Inputs
from benchmarks.gpu_measure import Watch, cloned, distance, error, exact, side


@pytest.mark.parametrize("case", CASES, ids=[c.name for c in CASES])
def test_a_kernel_is_as_exact_as_its_benchmark_asks(case: Case, device: str) -> None:
    with torch.device(device):
        inputs = case.inputs(tiny=True)
    wanted: Any = None
    if not case.judge:
        wanted = case.call(case.fn, Inputs(exact(inputs.args), exact(inputs.upstream)))
    watch = Watch()
    for who in ("eager", "lenz"):
        mine = Inputs(cloned(inputs.args), inputs.upstream)
        got = case.call(side(case.fn, who, watch, fullgraph=True), mine)
        off = case.judge(inputs, got) if case.judge else error(got, wanted)
        assert off <= case.tol, f"{who}: {off}"
        assert case.nbytes(inputs, got) > 0
    assert not watch.refused and watch.kernels + sum(watch.externs.values()) > 0


def test_errors_are_relative_to_the_largest_magnitude_and_nan_never_passes() -> None:
    want = torch.tensor([0.0, 10.0], dtype=torch.float64)
    assert error(torch.tensor([0.1, 10.0]), want) == pytest.approx(0.01)
    assert error(torch.tensor([math.nan, 10.0]), want) == math.inf
    assert error(torch.tensor([math.inf, 10.0]), want) == math.inf
    assert error(torch.tensor([1, 2]), torch.tensor([1, 3])) == 0.5
    assert distance([torch.tensor([3.0, 4.0])], [torch.zeros(2)]) == 5.0
    with pytest.raises(AssertionError, match="shape"):
        error(torch.zeros(3), want)
    wrong = {"case": "k", "tol": 0.1, "lenz_error": distance([want * math.nan], [want])}
    assert gpu_report.faults("kernels", wrong), "a NaN passed as a number"


def test_a_later_run_replaces_only_rows_that_it_measured_as_fully() -> None:
    def run(*rows: dict[str, Any]) -> dict[str, Any]:
        groups = {"kernels": {"rows": list(rows), "quick": False}}
        return {"machine": {"gpu": "g"}, "copy_gbps": {}, "groups": groups}

    old = run({"case": "a", "lenz_ms": 1.0, "eager_ms": 1.0}, {"case": "b", "lenz_ms": 2.0})
    new = run({"case": "a", "lenz_ms": 9.0}, {"case": "b", "lenz_ms": 3.0}, {"case": "c"})
    rows = gpu_report.merged(old, new)["groups"]["kernels"]["rows"]
    assert [(r["case"], r.get("lenz_ms")) for r in rows] == [("a", 1.0), ("b", 3.0), ("c", None)]
    other = {**new, "machine": {"gpu": "h"}}
    assert gpu_report.merged(old, other) == other


def test_a_model_may_be_twice_as_far_from_float32_as_eager() -> None:
    row = {"case": "m", "eager_error": 0.1, "lenz_error": 0.2, "eager_gradient_error": 0.01}
    assert not gpu_report.faults("models", row | {"lenz_gradient_error": 0.02})
    assert gpu_report.faults("models", row | {"lenz_gradient_error": 0.05})
    assert gpu_report.faults("models", row | {"refused": ["a tensor on cuda"]})


def test_wrong_results_of_graphs_are_faults() -> None:
    row = {"case": "m", "eager_error": 0.1, "lenz_error": 0.1, "lenz_graphs_error": 0.3}
    assert "lenz with graphs is wrong" in gpu_report.faults("graphs", row)[0]
    assert not gpu_report.faults("graphs", row | {"lenz_graphs_error": 0.2})
    assert not gpu_report.faults("graphs", {"case": "m", "skipped": "timm is not installed"})


def test_a_gpu_may_wait_where_lenz_is_far_ahead_of_the_peer() -> None:
    row = {"case": "m", "lenz_ms": 1.0, "lenz_busy": 0.5, "lenz/inductor": 0.7}
    made = {"groups": {"graphs": {"rows": [row]}}}
    assert not [f for f in gpu_report.figures(made) if "busy" in f.name]
    row["lenz/inductor"] = 0.8
    assert [f.reached for f in gpu_report.figures(made) if "busy" in f.name] == [False]


def test_figures_of_graphs() -> None:
    """The worst model counts: near its busy time, and chosen where it is faster."""
    row: dict[str, Any] = {
        "case": "m", "lenz_ms": 2.0, "lenz_graphs_ms": 1.0, "lenz_graphs_busy": 0.95,
        "lenz_graphs/inductor_graphs": 0.9, "lenz_peak": 100, "lenz_graphs_peak": 120,
    }  # fmt: skip
    made = {
        "groups": {
            "graphs": {
                "rows": [
                    row,
                    {**row, "case": "n", "lenz_graphs_ms": 2.1},
                    {"case": "decode", "lenz_graphs_ms": 1.0, "lenz_graphs_busy": 0.8},
                ]
            }
        }
    }
    told = {f.name: (f.measured.split()[0], f.reached) for f in gpu_report.figures(made)}
    assert told == {
        "graphs, wall over busy time": ("1.05", True),
        "graphs of decode, wall over busy time": ("1.25", True),
        "graphs by choice, over the better of both": ("1.05", False),
        "peak memory, graphs over none": ("1.20", False),
        "graphs over the peer's graphs": ("0.90", True),
    }
