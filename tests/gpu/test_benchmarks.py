"""The kernels of the GPU benchmarks at small sizes, and how the benchmarks judge and merge rows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from benchmarks import gpu_figures, gpu_lengths, gpu_report
from benchmarks.gpu_kernels import CASES, Case, Inputs
from benchmarks.gpu_measure import Watch, cloned, distance, error, exact, side
from benchmarks.report import Figure


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
    def run(gpu: str, *rows: dict[str, Any], section: str = "kernels") -> dict[str, Any]:
        groups = {section: {"rows": list(rows), "quick": False, "machine": {"gpu": gpu}}}
        return {"machine": {"gpu": gpu}, "groups": groups}

    old = run("g", {"case": "a", "lenz_ms": 1.0, "eager_ms": 1.0}, {"case": "b", "lenz_ms": 2.0})
    new = run("g", {"case": "a", "lenz_ms": 9.0}, {"case": "b", "lenz_ms": 3.0}, {"case": "c"})
    rows = gpu_report.merged(old, new)["groups"]["kernels"]["rows"]
    assert [(r["case"], r.get("lenz_ms")) for r in rows] == [("a", 1.0), ("b", 3.0), ("c", None)]
    other = run("h", {"case": "a", "lenz_ms": 5.0})
    assert gpu_report.merged(old, other) == other, "rows of two machines in one table"
    hosts = run("h", {"case": "one_op", "lenz_us": 5.0}, section="host")
    groups = gpu_report.merged(old, hosts)["groups"]
    assert {s: g["machine"]["gpu"] for s, g in groups.items()} == {"kernels": "g", "host": "h"}
    nothing = gpu_report.merged(old, run("h"))["groups"]["kernels"]["rows"]
    assert nothing == old["groups"]["kernels"]["rows"], "a run that measured nothing lost rows"


def test_older_results_name_their_machine_once() -> None:
    row = {"case": "k", "lenz_ms": 1.0}
    old = {
        "machine": {"gpu": "g"},
        "copy_gbps": {"16 MiB": 2.0},
        "groups": {"kernels": {"rows": [row]}},
    }
    lifted = gpu_report.lifted(old)
    assert gpu_report.lifted(lifted) == lifted
    told = gpu_report.origin(lifted["groups"]["kernels"])
    assert "Measured on g" in told and "2 at 16 MiB" in told and "not noted" in told


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


def figures(**sections: list[dict[str, Any]]) -> dict[tuple[str, str], Figure]:
    made = {"groups": {s: {"rows": rows} for s, rows in sections.items()}}
    return {(f.name, f.target): f for f in gpu_figures.figures(made)}


def only(found: dict[tuple[str, str], Figure], name: str) -> tuple[str, bool | None]:
    (figure,) = [f for (n, _), f in found.items() if n == name]
    return figure.measured.split()[0], figure.reached


def test_every_figure_is_a_line_before_anything_is_measured() -> None:
    lines = figures()
    assert len(lines) >= 28, "two figures of one name and target"
    assert {f.reached for f in lines.values()} == {None}
    assert {f.verdict for f in lines.values()} == {"not measured"}


def test_a_gpu_may_wait_where_lenz_is_far_ahead_of_the_peer() -> None:
    name = "models, default, share of the time in which the GPU is busy"
    row = {"case": "m", "lenz_ms": 1.0, "lenz_busy": 0.5, "lenz/inductor": 0.7}
    assert only(figures(graphs=[row]), name) == ("0.50,", True), "a line that all models meet"
    assert only(figures(graphs=[row | {"lenz/inductor": 0.8}]), name) == ("0.50,", False)
    assert only(figures(graphs=[row | {"lenz_busy": 0.9}]), name) == ("0", True)


def test_figures_of_graphs() -> None:
    """The worst model counts: near its busy time, and chosen where it is faster."""
    row: dict[str, Any] = {
        "case": "m", "lenz_ms": 2.0, "lenz_on_ms": 1.0, "lenz_graphs_ms": 1.0,
        "lenz_graphs_busy": 0.95, "lenz_graphs/inductor_graphs": 0.9, "lenz_peak": 100,
        "lenz_graphs_peak": 120, "inductor_peak": 99,
    }  # fmt: skip
    decode = {
        "case": "Llama-like decode 1x8", "lenz_ms": 1.6, "lenz_graphs_ms": 1.0,
        "lenz_graphs_busy": 0.8, "lenz_graphs/inductor_graphs": 0.97, "lenz_graphs_host_ms": 0.019,
    }  # fmt: skip
    lengths = {"case": "200 random", "off_ms": 100.0, "on_ms": 104.0, "auto_ms": 102.0}
    slow = {**row, "case": "n", "lenz_graphs_ms": 2.1}
    found = figures(graphs=[row, slow, decode], lengths=[lengths])
    assert only(found, "graphs, wall time") == ("1.05", True)
    assert only(found, "graphs, decode, wall time") == ("1.25", True)
    assert only(found, "graphs, auto") == ("2.10", False)
    assert only(found, "graphs, peak memory") == ("1.20", False)
    assert only(found, "graphs, other models") == ("0.90", True)
    assert only(found, "graphs, decode") == ("0.97", False)
    assert only(found, "graphs, decode, host") == ("19", True)
    assert only(found, "graphs on, random lengths") == ("1.040", False)
    assert only(found, "graphs auto, random lengths") == ("1.020", True)
    assert only(found, "models, peak memory") == ("1.010", False), "peaks of all models count"
    assert only(found, "Llama-like decode 1x8, default") == ("1.60", False)
    assert only(found, "graphs, Swin-T training 64") == ("-", None)


def test_figures_of_the_host() -> None:
    one = {
        "case": "one_op", "kernels": 1, "calls": 0, "lenz_us": 24.0, "aot_eager_us": 25.0,
        "eager_us": 5.0, "lenz_graphs_us": 30.0, "guards_us": 17.0,
    }  # fmt: skip
    ten = {"case": "ten_kernels", "kernels": 11, "calls": 0, "lenz_us": 54.0}
    products = {"case": "ten_products", "kernels": 9, "calls": 10, "lenz_us": 98.0}
    found = figures(host=[one, ten, products])
    assert only(found, "host, a call of one kernel") == ("4.00", True)
    assert only(found, "host, each further kernel") == ("3.00", True)
    assert only(found, "host, each `mm` or `addmm`") == ("5.00", True)
    assert only(found, "host, a call of one kernel, graphs on") == ("13.00", False)
    assert only(found, "host, each convolution") == ("-", None)
    assert only(figures(host=[ten]), "host, each further kernel") == ("-", None)


@pytest.mark.parametrize("case", gpu_lengths.CASES)
def test_lengths_are_measured(case: str, device: str) -> None:
    row = gpu_lengths.measure(case, True, device)
    assert all(row[f"{how}_ms"] > 0 for how in gpu_lengths.SIDES), row
