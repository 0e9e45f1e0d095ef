"""What explains a graph, on a card: report, page, profile, values, checks, a kernel alone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lenz
import lenz.commands.kernel
from lenz.cli import main
from lenz.commands.kernel import kernel_script, run_kernel
from lenz.debug.profile import Profile
from lenz.errors import InternalError


def model(x: Tensor, w: Tensor) -> Tensor:
    return torch.softmax(torch.tanh(x @ w) * 2, -1).sum(0)


def inputs(device: str) -> tuple[Tensor, Tensor]:
    return torch.randn(512, 256, device=device), torch.randn(256, 1024, device=device)


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch.compiler.reset()


def test_a_page_has_device_times_and_the_roofline(device: str, tmp_path: Path) -> None:
    report = lenz.explain(model, profile=3, options={"cache": False})(*inputs(device))
    report.save(str(tmp_path / "x.json"))
    data = json.loads((tmp_path / "x.json").read_text())
    report.save(str(tmp_path / "x.html"))
    page = (tmp_path / "x.html").read_text()
    assert "Content-Security-Policy" in page
    names = {k.name for g in report.graphs for k in g.kernels}
    text = json.dumps(data)
    assert names and all(name in text and name in page for name in names)
    assert "gbps" in text


def test_a_profile_has_times_of_the_device(device: str, tmp_path: Path) -> None:
    profile: Profile = lenz.profile(model, options={"cache": False})(*inputs(device))
    kernels = [r for r in profile.rows if r.is_kernel]
    assert kernels and all(r.device_us > 0 and r.gbps > 0 and 0 < r.share < 4 for r in kernels)
    profile.save(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    places = {e["tid"] for e in events}
    assert places == ({"host"} if device == "cpu" else {"host", "cuda:0"})


def test_the_profiler_shows_the_same_names(cuda: str) -> None:
    report = lenz.explain(model, options={"cache": False})(*inputs(cuda))
    names = {k.name for g in report.graphs for k in g.kernels}
    compiled = torch.compile(model, backend="lenz", options={"cache": False})
    compiled(*inputs(cuda))
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as seen:
        compiled(*inputs(cuda))
        torch.cuda.synchronize()
    assert names <= {e.key for e in seen.key_averages()}


def test_values_are_printed(device: str, capfd: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"debug_values": "1", "cache": False}
    torch.compile(model, backend="lenz", options=options)(*inputs(device))
    told = capfd.readouterr().err
    assert "before_launch" in told and f"device {device}" in told.replace("cuda:0", "cuda")


def test_the_first_nan_is_named(device: str) -> None:
    def root(x: Tensor) -> Tensor:
        return torch.sqrt(x).sum(0)

    x = torch.full((64, 64), -1.0, device=device)
    run = torch.compile(root, backend="lenz", options={"nans": True, "cache": False})
    with pytest.raises(FloatingPointError, match=r"fused_.* makes .* NaN .*test_explain.py"):
        run(x)


def test_right_kernels_pass_the_check(device: str) -> None:
    layer = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)).to(device)
    x = torch.randn(32, 64, device=device, requires_grad=True)
    run = torch.compile(layer, backend="lenz", options={"verify": "kernels", "cache": False})
    run(x).sum().backward()
    assert x.grad is not None


def planted(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    """Compile kernels with another text than the schedule has."""
    import lenz.pipeline
    from lenz.ir.printer import show
    from lenz.ir.reader import read

    real: Any = vars(lenz.pipeline)["assemble"]

    def assemble(kernels: Any, cx: Any) -> Any:
        changed = {n: (show(k), d) for n, (k, d) in kernels.items()}
        assert any(old in text for text, _ in changed.values())
        return real({n: (read(t.replace(old, new)), d) for n, (t, d) in changed.items()}, cx)

    monkeypatch.setattr(lenz.pipeline, "assemble", assemble)


def test_a_wrong_kernel_is_named(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(x: Tensor) -> Tensor:
        return torch.exp(x + 0.5).sum(-1)

    planted(monkeypatch, "0.5:f32", "0.75:f32")
    options: dict[str, Any] = {"verify": "kernels", "cache": False, "on_error": "raise"}
    run = torch.compile(shifted, backend="lenz", options=options)
    with pytest.raises(InternalError, match="computes another"):
        run(torch.randn(100, 333, device=device))


REPROS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: torch.softmax(x, -1),
    "columns": lambda x: x.exp().sum(0),
    "scan": lambda x: x.flatten().cumsum(0),
    "halves": lambda x: torch.tanh(x.bfloat16()) * 3,
}


@pytest.mark.parametrize("name", REPROS)
def test_a_kernel_runs_alone(
    name: str, device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"debug": True, "debug_dir": str(tmp_path), "cache": False}
    report = lenz.explain(REPROS[name], options=options)(torch.randn(300, 500, device=device))
    kernels = [k.name for g in report.graphs for k in g.kernels]
    assert kernels
    for kernel in kernels:
        script = kernel_script(kernel, str(tmp_path))
        found: dict[str, Any] = {"__name__": "script"}
        exec(compile(script.read_text(), str(script), "exec"), found)
        capsys.readouterr()
        run_kernel(found["KERNEL"], found["SIZES"], device if device == "cpu" else "cuda:0")
        told = capsys.readouterr().out
        numbers = re.search(r"float64 +(\S+);.* (\S+)\n.*\nof the limit +(\S+)%", told)
        assert numbers is not None, told
        error, near, share = map(float, numbers.groups())
        assert error <= 8 * near + 1e-6 and share > 0, told


def test_the_doctor_runs_a_kernel_on_the_card(
    cuda: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["doctor"])  # its status also tells of what is no fault of the card
    told = capsys.readouterr().out
    assert re.search(r"ok +on cuda:0 +a kernel is compiled and right", told), told
    assert re.search(r"ok +driver", told), told


PROGRAM = """
import torch

x = torch.randn(256, 256, device="{device}")

def main():
    return torch.nn.functional.gelu(x @ x).mean(0)
"""


def test_programs_are_compared(
    device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM.format(device=device))
    assert main(["compare", str(file), "--seconds", "0.2"]) == 0
    told = capsys.readouterr().out
    ours = re.search(r"lenz .* (\S+)$", told, re.MULTILINE)
    assert ours is not None and float(ours[1]) < 1e-2, told


def test_a_replayed_graph_says_so(cuda: str) -> None:
    def several(x: Tensor, w: Tensor) -> Tensor:
        return torch.softmax(torch.relu(x @ w) @ w.t(), -1).sum(0)

    options: dict[str, Any] = {"cuda_graphs": "on", "cache": False}
    report = lenz.explain(several, options=options)(*inputs(cuda))
    assert report.graphs and all(g.cuda_graph for g in report.graphs)


FAULT = """
import lenz.commands.probe
import lenz.pipeline
from lenz.ir.printer import show
from lenz.ir.reader import read

real = lenz.pipeline.assemble

def assemble(kernels, cx):
    changed = {n: (show(k).replace("0.5:f32", "0.75:f32"), d) for n, (k, d) in kernels.items()}
    return real({n: (read(text), d) for n, (text, d) in changed.items()}, cx)

lenz.pipeline.assemble = lenz.commands.probe.assemble = assemble
"""
WRONG = """
import torch

x = torch.linspace(-1, 1, 64 * 64, device="{device}").view(64, 64)

def main():
    y = torch.softmax(x, -1) @ x
    return torch.exp(y * 0.5).sum(0)  # the line of the fault
"""


def test_bisect_names_the_kernel(
    device: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LENZ_DEBUG_DIR", str(tmp_path / "debug"))
    file = tmp_path / "program.py"
    file.write_text(FAULT + WRONG.format(device=device))
    lines = file.read_text().splitlines()
    line = next(k for k, text in enumerate(lines, 1) if "the line of the fault" in text)
    assert main(["bisect", "--seconds", "40", str(file)]) == 1
    told = capfd.readouterr().out
    assert "The fault is in kernel fused_" in told and f"at {file}:{line}" in told, told
