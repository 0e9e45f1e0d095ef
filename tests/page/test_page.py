"""The page of a report: whole, self-contained, and inert whatever names it holds."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lenz
from lenz.cli import main
from lenz.debug.names import titled
from lenz.debug.report import ExternReport, KernelReport
from lenz.debug.work import rates
from lenz.errors import Unsupported, UserError
from lenz.page.guards import advice
from lenz.page.report import MOST, Report
from lenz.page.texts import code_of, sources_of
from lenz.page.write import as_script, page
from tests.page.browser import browser

EVIL = "</script><img src=x onerror=alert(1)>"
SECTIONS = (
    "totals", "graph-section", "kernels", "roofline", "apart", "calls", "memory", "time",
    "compile", "torch", "cuda-graphs", "tuning",
)  # fmt: skip
VOID = {"meta", "link", "input", "br", "img"}


def block(x: Tensor, w: Tensor) -> Tensor:
    h = torch.softmax(x @ w, -1)
    y = h * 2
    return (y @ w).relu() + x.sum(-1, keepdim=True)


X, W = torch.randn(64, 64), torch.randn(64, 64)


@pytest.fixture(scope="module")
def report() -> Report:
    torch._dynamo.reset()
    return lenz.explain(block, profile=3)(X, W)


class Parsed(HTMLParser):
    """The elements of a page; its end tags must match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self.feed(text)
        self.close()
        assert not self.open, f"{self.open} are not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("script", "style"):
            key = str(self.found[-1][1].get("id") or self.open[-1])
            self.texts[key] = self.texts.get(key, "") + data


def heavy_of(parsed: Parsed) -> Any:
    return json.loads(gzip.decompress(base64.b64decode(parsed.texts["heavy"])))


def test_the_data_are_the_fields_of_the_report(report: Report) -> None:
    data = json.loads(Parsed(page(report.data())).texts["data"])
    (graph,), (told,) = data["graphs"], report.graphs
    assert data["launches"] == len(report.launches) == len(graph["steps"])
    assert tuple(data["ops"].values()) == report.op_calls
    assert [name for name, _ in graph["timeline"]] == [m.what for m in told.timeline]
    assert graph["peak"] == told.peak > 0 and graph["guards"] == told.guards
    for step, launch in zip(graph["steps"], report.launches, strict=True):
        assert step["origins"] == list(launch.origins)
        assert step["mutated_args"] == list(launch.mutated_args)
        if isinstance(launch, KernelReport):
            for name in ("name", "kind", "bytes_read", "bytes_written"):
                assert step[name] == getattr(launch, name)
            assert step["loads"] == list(launch.loads) and step["stores"] == list(launch.stores)
        else:
            assert isinstance(launch, ExternReport)
            assert (step["what"], step["name"]) == ("library", launch.op)
    assert [s["needs"] for s in graph["steps"]] == [[], [0], [1], [2]]


def test_texts_stand_behind_the_launches(report: Report) -> None:
    parsed = Parsed(page(report.data()))
    (heavy,), (graph,) = heavy_of(parsed), report.graphs
    data = json.loads(parsed.texts["data"])
    assert heavy["source"] == graph.source
    for k in graph.kernels:
        assert heavy["kernels"][k.name]["ir"] == k.text
        assert (
            "define" in heavy["kernels"][k.name]["code"]
            and k.name in heavy["kernels"][k.name]["code"]
        )
    for step, texts in zip(data["graphs"][0]["steps"], heavy["steps"], strict=True):
        if step["what"] == "kernel":
            assert step["nodes_count"] == len(texts["nodes"]) > 0
            made = {d for n in texts["nodes"] for d in n["defines"]}
            assert {b for _, b, mode in texts["args"] if mode == "out"} <= made
            assert set(texts["values"].values()) <= made
    lines = {line for s in data["graphs"][0]["steps"] for line in s["lines"]}
    assert lines
    for line in lines:
        file, _, number = line.rpartition(":")
        text = Path(file).read_text().splitlines()[int(number) - 1]
        assert data["sources"][file][number] == text


def test_the_page_is_one_document_with_all_sections(report: Report, tmp_path: Path) -> None:
    report.save(str(tmp_path / "x.html"))
    parsed = Parsed((tmp_path / "x.html").read_text(encoding="utf-8"))
    tags = [tag for tag, _ in parsed.found]
    assert tags[:2] == ["html", "head"] and tags.count("main") == 1
    assert tuple(a["id"] for tag, a in parsed.found if tag == "section") == SECTIONS
    ids = [a["id"] for _, a in parsed.found if "id" in a]
    assert len(ids) == len(set(ids))


def test_nothing_is_loaded_and_the_policy_forbids_it(report: Report) -> None:
    text = page(report.data())
    parsed = Parsed(text)
    for tag, attributes in parsed.found:
        assert tag not in ("link", "iframe", "object", "base", "img", "form"), tag
        assert not {"src", "style", "srcset", "action"} & attributes.keys(), attributes
        assert not [name for name in attributes if name.startswith("on")], attributes
    (policy,) = [a["content"] for t, a in parsed.found if t == "meta" and "http-equiv" in a]
    assert policy is not None and policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    for name in ("style", "script"):
        digest = hashlib.sha256(parsed.texts[name].encode()).digest()
        assert f"{name}-src 'sha256-{base64.b64encode(digest).decode()}'" in policy
    code = parsed.texts["script"] + parsed.texts["style"]
    assert re.findall(r"https?://[^\"']*", code) == ["http://www.w3.org/2000/svg"], "a namespace"
    doors = (
        r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function|fetch\(|XMLHttp"
    )
    assert not re.findall(rf"{doors}|WebSocket|@import|url\(|import\(|sendBeacon", code)


def test_hostile_names_are_inert(tmp_path: Path) -> None:
    """Of a file, an argument and a line of the program."""
    file = tmp_path / f"{EVIL.replace('/', '')}.py"
    source = f"def evil(x):\n    y = x['{EVIL}'].exp()  # {EVIL} <!-- \u2028\n    return y + 1\n"
    file.write_text(source, encoding="utf-8")
    module: dict[str, Any] = {}
    exec(compile(source, str(file), "exec"), module)
    told = lenz.explain(module["evil"])({EVIL: X})
    text = page(told.data())
    assert EVIL not in text and "<img" not in text and "<!--" not in text
    assert "\u2028" not in text
    parsed = Parsed(text)
    assert [t for t, _ in parsed.found].count("script") == 3
    data = json.loads(parsed.texts["data"])
    assert EVIL in str(data["sources"]) and EVIL in str(data["graphs"][0]["steps"][0]["loads"])


@pytest.mark.parametrize("text", [EVIL, "<!--", "]]>", "\u2028\u2029", "&amp;", "'\"\\", "\ud800"])
def test_any_text_can_stand_in_a_script(text: str) -> None:
    made = as_script({text: [text]})
    assert made.isascii() and not set(made) & set("<>&")
    assert json.loads(made) == {text: [text]}


def test_infinite_numbers_are_no_json() -> None:
    with pytest.raises(ValueError, match="JSON"):
        as_script(float("inf"))


def test_a_report_as_data(report: Report, tmp_path: Path) -> None:
    report.save(tmp_path / "x.json")
    data = json.loads((tmp_path / "x.json").read_text())
    assert data["graphs"][0]["name"] == report.graphs[0].name
    with pytest.raises(UserError, match=r"x\.pdf: a report is an \.html or a \.json file"):
        report.save(tmp_path / "x.pdf")
    assert not (tmp_path / "x.pdf").exists()


def test_times_are_those_of_the_steps(report: Report) -> None:
    data = report.data()
    (graph,) = data["graphs"]
    for step in graph["steps"]:
        assert step["us"] > 0 and step["measured"].keys() == {"device", "host", "gap"}
        assert step["measured"]["device"] > 0
    events = data["profile"]["events"]
    assert [e["name"] for e in events] == [m.what for m in report.graphs[0].timeline]
    assert data["machines"]["cpu"]["gbps"] > 0 and data["machines"]["cpu"]["gflops"] == rates("cpu")
    untimed = lenz.explain(block)(X, W).data()
    assert untimed["profile"] is None
    assert all(s["measured"] is None and s["us"] > 0 for s in untimed["graphs"][0]["steps"])


def test_a_device_without_memory_has_no_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(place: str) -> float:
        raise torch.OutOfMemoryError("a test")

    monkeypatch.setattr("lenz.debug.work.bandwidth", full)
    told = lenz.explain(block)(X, W)
    assert str(told).startswith("1 graph; 4 launches")
    assert told.data()["machines"] == {} and Parsed(page(told.data()))
    assert all(s["us"] is None for s in told.data()["graphs"][0]["steps"])


def test_the_work_of_kernels_and_calls() -> None:
    (graph,) = lenz.explain(lambda x, w: (x @ w).exp() * 2 + 1)(
        torch.randn(5, 7), torch.randn(7, 3)
    ).data()["graphs"]
    product, kernel = graph["steps"]
    assert product["flops"] == 2 * 5 * 7 * 3
    assert product["bytes_read"] == 4 * (5 * 7 + 7 * 3) and product["bytes_written"] == 4 * 5 * 3
    assert kernel["flops"] == 3 * 5 * 3
    (graph,) = lenz.explain(lambda x: x.sum(-1))(torch.randn(6, 40)).data()["graphs"]
    assert graph["steps"][0]["flops"] == 6 * 40
    (graph,) = lenz.explain(lambda x: x.t().contiguous())(torch.randn(6, 40)).data()["graphs"]
    assert graph["steps"][0]["flops"] == 0


def test_recompiles_name_the_guard_and_what_to_mark() -> None:
    torch._dynamo.reset()

    def scaled(x: Tensor, k: int) -> Tensor:
        return x.sin() * k

    first, others = (torch.ones(3, 4), 2), [(torch.ones(5, 4), 2), (torch.ones(5, 4), 3)]
    told = lenz.explain(scaled, dynamic=False, others=others, profile=2)(*first)
    assert told.ran is not None and len(told.ran.calls) == 2, "the others are not timed"
    assert len(told.graphs) == 3 and len(told.launches) == 1, "the launches are of the first call"
    size, value = told.data()["recompiles"]
    assert size["guard"] == "tensor 'x' size mismatch at index 0. expected 3, actual 5"
    assert size["advice"] == "torch._dynamo.mark_dynamic(x, 0), or dynamic=True"
    assert value["guard"] == "k == 2" and value["advice"].startswith("k changes from call to call")
    for row, number in ((size, 1), (value, 2)):
        assert row["id"].endswith(f"/{number}") and row["of"].endswith(f"/{number - 1}")
        assert row["code"].startswith(f"scaled at {__file__}:")
    assert not lenz.explain(block)(X, W).recompiles


@pytest.mark.parametrize(
    ("guard", "wanted"),
    [
        ("tensor 'x' size mismatch at index 1. expected 3, actual 4", "mark_dynamic(x, 1)"),
        ("tensor 'x' size mismatch at index 10. expected 3, actual 1", "differ in this"),
        ("tensor 'x' size mismatch at index 1. expected 0, actual 10", "differ in this"),
        ("tensor 'x' size mismatch at index 1. expected 10, actual 11", "mark_dynamic(x, 1)"),
        ("k == 2", "k changes from call to call"),
        ("tensor 'x' dtype mismatch. expected Float, actual Double", "dtypes"),
        ("___check_global_state()", "differ in this"),
    ],
)
def test_advice(guard: str, wanted: str) -> None:
    assert wanted in advice(guard)


def test_symbols_and_conditions() -> None:
    torch._dynamo.reset()
    (graph,) = lenz.explain(lambda x: x * 2, dynamic=True)(torch.randn(6, 8)).data()["graphs"]
    found = {(s["example"], *s["sources"]) for s in graph["symbols"]}
    assert found == {(6, "x.size()[0]"), (8, "x.size()[1]")}
    assert all(s["least"] >= 0 for s in graph["symbols"])
    assert ("TENSOR_MATCH", "x") in {(c["kind"], c["on"]) for c in graph["conditions"]}


def test_a_graph_in_eager_is_told() -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise Unsupported("a test")

    with pytest.MonkeyPatch.context() as patch, pytest.warns(UserWarning):
        patch.setattr("lenz.pipeline.compile_program", broken)
        told = lenz.explain(lambda x: x.exp() + 1)(X)
    (graph,) = told.data()["graphs"]
    assert [s["what"] for s in graph["steps"]] == ["eager", "eager"] and graph["skips"]
    assert "runs in eager: " in str(told)
    Parsed(page(told.data()))


@pytest.mark.filterwarnings("ignore:lenz runs a graph in eager")
def test_a_graph_that_is_not_captured_is_told() -> None:
    """It becomes no program of aten ops, so that its launches are not known."""
    told = lenz.explain(lambda x: x.unfold(0, 3, 1).add_(1))(torch.zeros(8))
    (graph,) = told.data()["graphs"]
    assert graph["kind"] == "capture" and graph["steps"] == []
    assert "it writes to windows of `unfold`" in graph["skips"][0]
    assert f"{titled(graph['name'])}: runs in eager: {graph['skips'][0]}" in str(told)
    Parsed(page(told.data()))


def test_a_report_without_graphs_says_where_to_look() -> None:
    told = lenz.explain(lambda x: x.to_sparse().to_dense())(torch.eye(3))
    assert told.graphs == () and "TORCH_LOGS=graph_breaks" in str(told)


def test_a_graph_break_ends_the_forward_half_alone() -> None:
    def step(x: Tensor) -> None:
        x.sin().sum().backward()

    told = lenz.explain(step)(torch.ones(3, requires_grad=True))
    assert [(g.kind, bool(g.ended_by)) for g in told.graphs] == [
        ("forward", True), ("backward", False),
    ]  # fmt: skip


TRITON = """import triton
import triton.language as tl

@triton.jit
def greatest(a, b):
    return a

@triton.jit
def fused_max_0(a0, a1):
    pass

import triton
import triton.language as tl

@triton.jit
def fused_exp_1(a0):
    pass
"""


def test_emitted_code_is_divided_by_kernel() -> None:
    found = code_of(TRITON)
    assert found.keys() == {"fused_max_0", "fused_exp_1"}
    assert "greatest" in found["fused_max_0"] and "greatest" not in found["fused_exp_1"]
    llvm = "\n".join(
        f"define void {name}(ptr %p0) {{\nentry:\n  ret void\n}}\n"
        for name in ("@k_0.p0", "@k_0", '@"k_1"')
    )
    found = code_of(llvm)
    assert found["k_0"].count("define") == 2 and found["k_1"].count("define") == 1


def test_lines_of_a_file_that_is_gone_are_empty() -> None:
    assert sources_of(["nowhere.py:3"]) == {"nowhere.py": {"3": ""}}


def test_a_printed_report_is_totals_and_the_costliest(report: Report) -> None:
    first, second, *rest = str(report).splitlines()
    assert first.startswith("1 graph; 4 launches in this call; ops: ")
    assert "MB read and written" in second and "ms to compile" in second
    assert len(rest) == 5 and all(re.search(r"\d [um]s", line) for line in rest[:4])
    assert repr(report.graphs[0]).splitlines()[0] == rest[-1]

    def long(x: Tensor, w: Tensor) -> Tensor:
        for k in range(15):
            x = (x[: 60 - k] @ w).relu() if k else x @ w
        return x

    told = lenz.explain(long)(X, W)
    *lines, more, graph = str(told).splitlines()[2:]
    assert len(lines) == MOST and graph.startswith(f"{titled(told.graphs[0].name)}: ")
    assert re.fullmatch(r"  and \d+ more, which `save` writes", more)
    times = [re.search(r"about ([\d.]+) us", line) for line in lines]
    costs = [float(m[1]) for m in times if m]
    assert len(costs) == MOST and costs == sorted(costs, reverse=True)


PROGRAM = """
import torch

def main():
    return torch.softmax(torch.randn(4, 8), -1)
"""


def test_the_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    file = tmp_path / "report.html"
    assert (
        main(["explain", str(tmp_path / "program.py"), "--save", str(file), "--profile", "2"]) == 0
    )
    assert capsys.readouterr().out.splitlines()[-1] == f"written to {file}"
    data = json.loads(Parsed(file.read_text()).texts["data"])
    assert data["profile"] is not None
    nowhere = str(tmp_path / "no" / "x.html")
    assert main(["explain", str(tmp_path / "program.py"), "--save", nowhere]) == 1
    assert "cannot write" in capsys.readouterr().err


def test_a_browser_draws_it_and_clicks_work(report: Report, tmp_path: Path) -> None:
    file = tmp_path / "x.html"
    report.save(str(file))
    with browser(tmp_path / "profile") as b:
        b.open(file)
        b.wait("document.querySelectorAll('.pane').length === 3")
        for section in SECTIONS:
            assert b.run(f"document.querySelector('#{section} .body').childElementCount > 0"), (
                section
            )
        b.click("#step-1")
        b.wait("document.querySelector('#graph-section h3').textContent.startsWith('Step 1')")
        assert b.run("document.querySelectorAll('.edges path').length") == 2
        # A line of the user's lights the nodes, the kernel and the code that come from it.
        b.click(".pane:nth-child(1) .l.linked")
        for pane in (1, 2, 3):
            assert b.run(f"document.querySelectorAll('.pane:nth-child({pane}) .lit').length") > 0
        b.click("#kernels th:nth-child(1) button")
        names = (
            "[...document.querySelectorAll('#kernels tbody tr')].map((r) => r.cells[0].textContent)"
        )
        assert b.run(names) == sorted(b.run(names)) and len(b.run(names)) == 4
        b.click("#kernels input")
        for letter in "relu":
            b.call("Input.insertText", text=letter)
        assert b.run("document.querySelectorAll('#kernels tbody tr').length") == 1
        b.run("document.querySelector('#kernels tbody tr').focus()")
        b.call("Input.dispatchKeyEvent", type="keyDown", key="Enter", code="Enter", text="\r")
        b.wait("document.querySelector('#graph-section h3').textContent.startsWith('Step 3')")
        b.key("ArrowUp")  # the list has the focus
        b.wait("document.querySelector('#graph-section h3').textContent.startsWith('Step 2')")
        assert b.requests == [file.as_uri()] and not b.errors


@pytest.mark.filterwarnings("ignore:lenz runs a graph in eager")
def test_a_browser_says_why_sections_are_empty(tmp_path: Path) -> None:
    """Without a graph, and for one that runs in eager and of which no call is known."""
    none = lenz.explain(lambda x: x.to_sparse().to_dense())(torch.eye(3))
    eager = lenz.explain(lambda x: x.unfold(0, 3, 1).add_(1))(torch.zeros(8))
    for k, (told, why) in enumerate(((none, "There is no graph."), (eager, "runs in eager"))):
        file = tmp_path / f"{k}.html"
        told.save(str(file))
        with browser(tmp_path / f"profile{k}") as b:
            b.open(file)
            b.wait("document.documentElement.dataset.ready === 'yes'")
            for section in SECTIONS:
                assert b.run(f"document.querySelector('#{section} .body').textContent"), section
            for section in ("kernels", "roofline", "apart", "calls"):
                text = b.run(f"document.querySelector('#{section} .body').textContent")
                assert why in text, section
            assert not b.errors


def test_a_browser_shows_hostile_names_as_text(tmp_path: Path) -> None:
    source = f"def evil(x):\n    return x['{EVIL}'].exp() + 1  # {EVIL}\n"
    file = tmp_path / "evil.py"
    file.write_text(source)
    module: dict[str, Any] = {}
    exec(compile(source, str(file), "exec"), module)
    lenz.explain(module["evil"])({EVIL: X}).save(str(tmp_path / "x.html"))
    with browser(tmp_path / "profile") as b:
        b.open(tmp_path / "x.html")
        b.wait("document.querySelectorAll('.pane').length === 3")
        assert b.run("document.images.length") == 0
        assert EVIL in b.run("document.querySelector('.pane').textContent")
        assert len(b.requests) == 1 and not b.errors


def enlarged(report: Report, steps: int) -> dict[str, Any]:
    """The data of a report as if its graph had so many launches and calls."""
    data = report.data()
    (graph,) = data["graphs"]
    few, times = graph["steps"], steps // len(graph["steps"])
    graph["steps"] = [
        {**s, "needs": [n + k * len(few) for n in s["needs"]], "name": f"{s['name']}_{k}"}
        for k in range(times)
        for s in few
    ]
    graph["kernels"] = {
        f"{name}_{k}": {"ir": t["ir"], "code": t["code"].replace(name, f"{name}_{k}")}
        for k in range(times)
        for name, t in graph["kernels"].items()
    }
    graph["timeline"] *= times
    graph["apart"] = [
        {**p, "first": f"{p['first']}_{k}"} for k in range(times) for p in graph["apart"]
    ]
    events = [
        {**e, "ts": e["ts"] + 1e4 * k} for k in range(times) for e in data["profile"]["events"]
    ]
    data["profile"]["events"] = events
    return data


def test_a_page_of_thousands_of_steps_stays_small(report: Report, tmp_path: Path) -> None:
    text = page(enlarged(report, 5_000))
    assert len(text) < 10_000_000
    (tmp_path / "x.html").write_text(text, encoding="utf-8")
    with browser(tmp_path / "profile") as b:
        b.open(tmp_path / "x.html")
        b.wait("document.querySelectorAll('.pane').length === 3")
        assert b.run("document.querySelectorAll('.row').length") < 60, "only those in sight"
        rows = "document.querySelectorAll('#kernels tbody tr').length"
        assert b.run(rows) == 200
        b.click("#kernels button.plain")
        assert b.run(rows) == 5_000
        b.run("document.querySelector('.list').focus()")
        b.key("End")
        b.wait("document.querySelector('#graph-section h3').textContent.startsWith('Step 4999')")
        assert b.run("document.getElementById('step-4999').classList.contains('picked')")
        assert not b.errors
