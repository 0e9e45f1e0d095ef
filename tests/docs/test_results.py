"""Results of benchmarks are kept group by group, and their pages are what the reports make."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as benchmarks
from benchmarks import gpu_report, measure, report, start, start_cases, summary

ROW = {"case": "c", "threads": 1, "failed": "eager: ValueError: not measured here"}


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["benchmarks", *args])
    return benchmarks.main()


def test_a_group_that_fails_loses_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results" / "cpu.json"
    seen: list[list[str]] = []

    def rows(*_: Any) -> list[dict[str, Any]]:
        seen.append(list(json.loads(path.read_text())["groups"]) if path.exists() else [])
        return [ROW]

    def breaks(*_: Any) -> list[dict[str, Any]]:
        raise RuntimeError("exit code 1")

    runs = {"host": rows, "kernels": breaks, "memory": rows}
    monkeypatch.setattr(benchmarks, "RUNS", runs)
    monkeypatch.setattr(benchmarks, "NEEDED", ())
    assert run(monkeypatch, *runs, "--json", str(path)) == 1
    assert seen == [[], ["host"]], "what was measured before is written before the next group"
    assert list(json.loads(path.read_text())["groups"]) == ["host", "memory"]
    assert "kernels: FAILED RuntimeError: exit code 1" in capsys.readouterr().err
    runs["host"] = breaks
    run(monkeypatch, "host", "--json", str(path))
    assert json.loads(path.read_text())["groups"]["host"]["rows"] == [ROW], "of the former run"


def test_missing_packages_are_named_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmarks, "NEEDED", ("json", "a_package_that_is_missing"))
    monkeypatch.setattr(benchmarks, "RUNS", {})
    with pytest.raises(SystemExit) as e:
        run(monkeypatch, "host", "models")
    assert e.value.code == 2
    said = capsys.readouterr().err
    assert 'a_package_that_is_missing missing: pip install "lenz[demo]"' in said
    assert "json missing" not in said and "==" not in said
    assert not benchmarks.missing(["host", "kernels"], False)
    assert not benchmarks.missing(["models"], True), "the quick model needs none"


@pytest.mark.parametrize("name", summary.MACHINES.values())
def test_the_pages_are_made_of_the_results(name: str) -> None:
    made: Any = gpu_report if name == "gpu" else report
    path = summary.RESULTS / f"{name}.json"
    page = path.with_suffix(".md").read_text()
    assert page == made.document(json.loads(path.read_text())), f"run python -m {made.__name__}"


def test_the_table_in_the_readme_is_made_of_the_results() -> None:
    found = summary.README.read_text(encoding="utf-8")
    assert found == summary.readme(), "run python -m benchmarks.summary"
    rows = [line.split(" | ") for line in summary.table().splitlines()[2:6]]
    assert all(float(cell.rstrip(" |")) > 0 for row in rows for cell in row[1:])


def test_every_figure_on_a_cpu_is_a_line_before_anything_is_measured() -> None:
    lines = report.figures({})
    assert {f.verdict for f in lines} == {"not measured"}
    assert {f.name for f in lines} == {f.name for f in report.figures(results())}


@pytest.mark.rest
def test_a_start_from_a_file_is_warm_after_a_cold_one(tmp_path: Path) -> None:
    """In two processes: one compiles and saves the file, the other loads it."""
    with measure.caches() as env:
        for turn in start.TURNS:
            row = start.child("one kernel", "load", turn, "cpu", tmp_path, env, 120)
            assert row.keys() == {"seconds"}, row
    training = start_cases.CASES["cpu"]["12-layer encoder, training"]()
    assert not start.has(training, "load") and start.has(training, "saved")


@pytest.mark.rest
def test_a_start_that_fails_says_why(tmp_path: Path) -> None:
    row = start.child("one kernel", "no such side", "cold", "cpu", tmp_path, {}, 120)
    assert row.keys() == {"failed"} and "no such side" in row["failed"]


def results() -> dict[str, Any]:
    groups: dict[str, Any] = json.loads(report.RESULTS.read_text())["groups"]
    return groups
