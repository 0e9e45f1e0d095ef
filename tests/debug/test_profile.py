"""`lenz.profile`, the option `profile`, and ranges of torch.profiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import lenz
from lenz.debug.names import titled
from lenz.debug.profile import Profile, bandwidth

COLUMNS = ("ms", "GB", "GB/s", "limit", "launch us", "gap us", "launches")


def soft(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x @ w, -1) * 2 + x.sum(0)


X, W = torch.randn(40, 30), torch.randn(30, 30)


def test_rows_are_the_kernels_and_calls_of_the_report() -> None:
    graph = lenz.explain(soft)(X, W).graphs[0]
    profile = lenz.profile(soft, calls=3)(X, W)
    kernels = {r.name: r for r in profile.rows if r.is_kernel}
    assert kernels.keys() == {k.name for k in graph.kernels}
    assert {r.name for r in profile.rows if not r.is_kernel} == {"aten.mm.out"}
    for k in graph.kernels:
        row = kernels[k.name]
        assert row.nbytes == k.bytes_read + k.bytes_written
        assert row.launches == 3 and row.graph.endswith(".inference")
        assert row.line in k.origins
        assert row.host_us == row.device_us > 0 and row.gap_us >= 0, "on a CPU they are the same"
        assert row.gbps == pytest.approx(row.nbytes / row.device_us / 1e3)
        assert row.share == pytest.approx(row.gbps / bandwidth("cpu"))
    (mm,) = [r for r in profile.rows if not r.is_kernel]
    assert mm.nbytes == (40 * 30 + 30 * 30 + 40 * 30) * 4
    assert len(profile.calls) == 3, "the first call, which compiles, does not count"


def test_the_time_between_launches_counts_if_asked() -> None:
    with_gaps = lenz.profile(soft, options={"profile_device_time": False}, calls=2)(X, W)
    alone = Profile(False, with_gaps.ran, with_gaps.calls)
    for a, b in zip(alone.rows, with_gaps.rows, strict=True):
        assert a.name == b.name and a.gbps >= b.gbps > 0


def test_bytes_follow_the_sizes_of_a_call() -> None:
    seen = lenz.profile(lambda xs: [torch.exp(x) + 1 for x in xs], dynamic=True, calls=1)(
        [torch.randn(8), torch.randn(800)]
    )
    assert sorted(r.nbytes for r in seen.ran) == [2 * 8 * 4, 2 * 800 * 4]


def test_a_profile_prints_numbers_and_a_summary() -> None:
    head, *rest = str(lenz.profile(soft, calls=2)(X, W)).splitlines()
    assert head.startswith("graph") and head == titled(head.split()[0])
    columns, *rows, summary = rest
    assert columns.split("  ")[-1] == "name" and all(c in columns for c in COLUMNS)
    for row in rows:
        ms, gb, gbps, limit, host, gap, launches, name, *at = row.split()
        assert min(map(float, (ms, gb, gbps, limit.rstrip("%"), host, gap))) >= 0, row
        assert launches == "2" and name and at[0].startswith(__file__)
    assert summary.startswith("SUMMARY 2 calls of graphs: ") and "measured limit: cpu" in summary


def test_a_trace_opens_in_chrome(tmp_path: Path) -> None:
    profile = lenz.profile(soft, calls=2)(X, W)
    profile.save(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {e["ph"] for e in events} == {"X"} and {e["tid"] for e in events} == {"host"}
    graphs = [e for e in events if e["name"].startswith("graph")]
    steps = [e for e in events if e not in graphs]
    assert len(graphs) == 2 and len(steps) == len(profile.ran)
    for e in steps:
        inside = [
            g for g in graphs if g["ts"] <= e["ts"] and e["ts"] + e["dur"] <= g["ts"] + g["dur"]
        ]
        assert len(inside) == 1, "a launch lies within one call of its graph"
    profile.save(str(tmp_path / "table.txt"))
    assert (tmp_path / "table.txt").read_text() == f"{profile}\n"


PROGRAM = """
import torch
def soft(x, w):
    return torch.softmax(x @ w, -1) * 2
run = torch.compile(soft, backend="lenz")
for _ in range(3):
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8)
    run(x, w).sum().backward()
"""


@pytest.mark.rest
def test_a_variable_profiles_a_whole_program(tmp_path: Path) -> None:
    path = tmp_path / "table.txt"
    env = {**os.environ, "LENZ_PROFILE": "1", "LENZ_PROFILE_OUTPUT": str(path)}
    subprocess.run([sys.executable, "-c", PROGRAM], env=env, check=True, capture_output=True)
    text = path.read_text()
    assert "graph0.forward [0/0]\n" in text and "graph0.backward [0/0]\n" in text
    assert "SUMMARY 6 calls of graphs: " in text


@pytest.mark.rest
def test_a_file_that_cannot_be_written_is_told_before_the_table(tmp_path: Path) -> None:
    path = tmp_path / "none" / "table.txt"
    env = {**os.environ, "LENZ_PROFILE": "1", "LENZ_PROFILE_OUTPUT": str(path)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, check=True, capture_output=True)
    text = done.stderr.decode()
    assert f"lenz: cannot write {path}: No such file" in text and "Traceback" not in text
    assert "SUMMARY 6 calls of graphs: " in text


def test_results_and_gradients_are_the_same_as_without() -> None:
    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        soft(x, w).sum().backward()
        return x.grad  # type: ignore[return-value]  # backward has made it

    x = X.clone().requires_grad_()
    want = step(x, W)
    again = X.clone().requires_grad_()
    run = torch.compile(soft, backend="lenz", options={"ranges": "kernels"})
    run(again, W).sum().backward()
    torch.testing.assert_close(again.grad, want)


def ranges(**options: Any) -> Counter[str]:
    torch.compiler.reset()
    run = torch.compile(soft, backend="lenz", options=options)
    run(X, W)
    with torch.profiler.profile() as seen:
        run(X, W), run(X, W)
    return Counter(e.name for e in seen.events() if not e.name.startswith(("aten::", "Torch")))


def test_a_call_is_one_range_if_asked() -> None:
    assert ranges(ranges="calls")["graph0.inference [0/0]"] == 2
    assert not [name for name in ranges() if name.startswith("graph")]


def test_cpu_kernels_are_ranges_if_asked() -> None:
    names = [k.name for k in lenz.explain(soft)(X, W).graphs[0].kernels]
    found = ranges(ranges="kernels")
    assert {name: found[name] for name in names} == dict.fromkeys(names, 2)
    assert found["aten.mm.out"] == found["graph0.inference [0/0]"] == 2
    assert not set(names) & set(ranges(ranges="calls"))


def test_only_a_watched_plan_has_calls_of_a_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []
    real = compile

    def seen(text: Any, *rest: Any, **more: Any) -> Any:
        texts.append(str(text))
        return real(text, *rest, **more)

    monkeypatch.setattr("lenz.loading.compile", seen, raising=False)
    python = {"cache": False, "native": False}  # else it is printed when a call needs it
    # A watched graph has the plan that is not watched as well.
    for options in ({}, {"ranges": "calls"}, {"ranges": "kernels"}):
        torch.compiler.reset()
        torch.compile(soft, backend="lenz", options={**python, **options})(X, W)
    assert ["watch." in text for text in texts] == [False, False, False, True]
