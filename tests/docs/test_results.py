"""The table of results in README.md is the one of the benchmarks' results."""

from __future__ import annotations

from benchmarks import summary


def test_the_table_of_results_is_current() -> None:
    found = summary.README.read_text(encoding="utf-8")
    assert found == summary.readme(), "run python -m benchmarks.summary"


def test_every_machine_has_figures() -> None:
    rows = [line.split(" | ") for line in summary.table().splitlines()[2:]]
    for k in range(1, 1 + len(summary.MACHINES)):
        assert all(float(row[k].rstrip(" |")) > 0 for row in rows[:4])
