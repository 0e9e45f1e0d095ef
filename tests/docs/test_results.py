"""Results of benchmarks on CPUs are kept group by group; nothing starts without its packages."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as benchmarks

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
