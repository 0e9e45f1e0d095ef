"""The page of a graph for a GPU that is not here: Triton's text, regions, and no times."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lenz.debug.profile import Profile, Ran
from lenz.debug.report import Tried, TuneReport, graph_report, launches_report
from lenz.lower import lower
from lenz.machine.cuda.triton.kernel import emit
from lenz.page.report import Report
from lenz.page.sections import graph_data
from lenz.page.write import page
from lenz.pipeline import caller_facts, kernels_of, named, optimise
from lenz.plan.build import build
from lenz.schedule import schedule
from tests.cuda import cuda_program
from tests.gpu_oracle import gpu_context
from tests.page.browser import browser


def step(x: Tensor, w: Tensor) -> Tensor:
    h = torch.poisson(F.gelu(x @ w).softmax(-1))
    return (h @ w).relu().sum()


@pytest.fixture(scope="module")
def report() -> Report:
    p, cx = cuda_program(step, (32, 32), (32, 32)), gpu_context()
    g = optimise(lower(p, cx), cx)
    s = named(schedule(g, cx))
    plan = build(s, cx, caller_facts(p, replace(cx.options, cuda_graphs="on")))
    told = launches_report(s, {q.name: q.source for q in p.placeholders})
    tuned = TuneReport("k", 1, (Tried("rows", 2.0), Tried("flat", 1.5), Tried("panel", None, "no")))
    graph = replace(graph_report(p, g, s, plan, told), autotune=(tuned,))
    details = graph_data(s, plan, "\n".join(emit(k).text for k, _ in kernels_of(s).values()), told)
    return Report((graph,), told, None, ({**details, "symbols": [], "conditions": []},))


def test_each_kernel_has_its_text(report: Report) -> None:
    (graph,) = report.data()["graphs"]
    assert graph["kernels"]
    for name, texts in graph["kernels"].items():
        assert f"def {name}(a0" in texts["code"] and texts["code"].count("import triton\n") == 1


def test_what_is_elsewhere_has_no_time(report: Report) -> None:
    data = report.data()
    assert {s["place"] for s in data["graphs"][0]["steps"]} == {"cuda:0"}
    if not data["machines"]:
        assert all(s["us"] is None for s in data["graphs"][0]["steps"])
        assert "0.0 us" in str(report).splitlines()[2], "what is not known costs nothing"


def test_regions_say_what_no_graph_holds(report: Report) -> None:
    regions = report.data()["graphs"][0]["regions"]
    assert {r["kind"] for r in regions} == {"graph", "outside"}
    for r in regions:
        assert r["steps"] and bool(r["why"]) == (r["kind"] == "outside")


def test_a_browser_draws_the_host_and_the_device(
    report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launches take 5 us on the host and 20 on the device, which waits once for 7."""
    known = {"gbps": 3000.0, "gflops": {"float32": 5e4, "bfloat16": 7e5}}
    monkeypatch.setattr("lenz.page.report.machine", lambda place: known)
    monkeypatch.setattr("lenz.debug.profile.bandwidth", lambda place: 3000.0)
    (graph,) = report.graphs
    names = [m.what for m in graph.timeline]
    ran = [
        Ran(graph.name, name, "", "cuda:0", 100.0 * call + 6 * k, 7.0 * (k == 3), 5, 20, 1000, True)
        for call in range(2)
        for k, name in enumerate(names)
    ]
    profile = Profile(ran=ran, calls=[(graph.name, 0.0, 30.0), (graph.name, 100.0, 30.0)])
    told = replace(report, ran=profile)
    steps = told.data()["graphs"][0]["steps"]
    assert [s["measured"]["device"] for s in steps] == [20] * len(names)
    assert [s["measured"]["gap"] for s in steps] == [0, 0, 0, 7, 0]
    told.save(tmp_path / "x.html")
    with browser(tmp_path / "profile") as b:
        b.open(tmp_path / "x.html")
        assert b.run("document.querySelectorAll('#time .bar').length") == 2 * len(names)
        assert b.run("document.querySelectorAll('#time .k-gap').length") == 2, "two lanes"
        row = "[...document.querySelector('#time tbody tr').cells].map((c) => c.textContent)"
        assert b.run(row) == ["7 µs", names[2], names[3]], "the gap, after what, before what"
        roofs = b.run("document.getElementById('roofline').textContent")
        assert "700000 GFLOP/s in products of bfloat16" in roofs and "3000 GB/s" in roofs
        assert not b.errors


def test_a_browser_links_tritons_lines(report: Report, tmp_path: Path) -> None:
    file = tmp_path / "x.html"
    report.save(str(file))
    assert "tl.store" not in page(report.data()), "texts of kernels are compressed"
    with browser(tmp_path / "profile", width=480, dark=True) as b:
        b.open(file)
        b.wait("document.querySelectorAll('.pane').length === 3")
        steps = report.data()["graphs"][0]["steps"]
        first = next(k for k, x in enumerate(steps) if x["what"] == "kernel")
        b.click(f"#step-{first}")
        b.wait("document.querySelector('.pane:nth-child(3) h3').textContent.endsWith('Triton')")
        b.click(".pane:nth-child(1) .l.linked")
        lit = "[...document.querySelectorAll('.pane:nth-child(%d) .lit')].map((x) => x.textContent)"
        assert any("tl.store" in x for x in b.run(lit % 3)), "what the line computes is stored"
        b.click(".pane:nth-child(3) .l.linked")
        assert "tl.load" in b.run(lit % 3)[0] and "load(" in "".join(b.run(lit % 2))
        assert b.run(lit % 1)
        assert "outside of graphs" in b.run("document.getElementById('cuda-graphs').textContent")
        assert "1.5 us with flat" in b.run("document.getElementById('tuning').textContent")
        assert b.run("document.body.scrollWidth <= innerWidth"), "it fits a narrow screen"
        assert not b.errors
