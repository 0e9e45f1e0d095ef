"""The name of a graph is the same wherever it is shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from lenz.debug.names import titled
from lenz.options import Options
from lenz.page.explainer import Explainer

X, Y = torch.randn(4), torch.randn(6)


def first(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1


def second(x: torch.Tensor) -> torch.Tensor:
    return x.cos() * 2


def test_a_title_has_torchs_numbers() -> None:
    assert titled("graph3.inference") == "graph3.inference [3/0]"
    assert titled("graph3_1.forward") == "graph3_1.forward [3/1]"
    assert titled("mine.inference") == "mine.inference"


def test_a_graph_has_one_name_everywhere(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    torch.compiler.reset()
    options = {"debug": True, "debug_dir": str(tmp_path), "logs": "time", "ranges": "calls"}
    seen = Explainer()
    backend = seen.backend(Options.from_environment(options))
    with torch.profiler.profile() as profile:
        torch.compile(first, backend=backend)(X)
        compiled = torch.compile(second, backend=backend, dynamic=False)
        compiled(X), compiled(Y)
    report, ranges = seen.report(), {e.name for e in profile.events()}
    names = [g.name for g in report.graphs]
    titles = [titled(name) for name in names]
    # Two functions, and the second one again for another size.
    ids = [re.fullmatch(r"graph(\d+)(?:_(\d))?\.inference \[(\d+)/(\d)\]", t) for t in titles]
    (a, _, _, p), (b, _, _, q), (c, n, _, r) = [m.groups() for m in ids if m]
    assert (p, q, r, n) == ("0", "0", "1", "1") and b == c and a != b, titles
    logged = capfd.readouterr().err
    for name, title in zip(names, titles, strict=True):
        assert f"[lenz time] {title}\n" in logged
        assert f"\n{title}: 1 kernel" in f"\n{report}"
        assert title in ranges
        assert name in (tmp_path / name / "plan.py").read_text()
