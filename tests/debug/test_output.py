"""LENZ_LOGS and LENZ_DEBUG: what they print and write."""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lenz.commands.script import function_of
from lenz.debug.names import plain, readable
from lenz.debug.profile import bandwidth
from lenz.debug.report import Tried, TuneReport, fusions
from lenz.debug.trace import Recorder, new_folder, write_in
from lenz.errors import UserError
from lenz.ir.graph import Graph
from lenz.ir.kernel import Schedule
from lenz.ir.reader import read
from lenz.options import LOGS
from lenz.runtime.constants import packed
from tests import children

FILES = {
    "fx_readable.py",
    "fx_runnable.py",
    "fx_transformed.py",
    "graph.ir",
    "ir_before_fusion.ir",
    "fusion.txt",
    "ir_after_fusion.ir",
    "kernels.ll",
    "kernels.o",
    "plan.py",
}
SIGNS = {
    "graph": "torch.ops.aten.mm.default",
    "ir": "[lenz ir]",
    "schedule": "launch @",
    "fusion": "us by its bytes",
    "code": "def call(args):",
    "time": "total",
}
PYTHON = {**os.environ, "OMP_NUM_THREADS": "1"}


def soft(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x @ w, -1) * 2


def run(**options: Any) -> None:
    x, w = torch.randn(4, 8), torch.randn(8, 8)
    made = torch.compile(soft, backend="lenz", options=options)(x, w)
    torch.testing.assert_close(made, soft(x, w))


@pytest.mark.parametrize("log", LOGS)
def test_each_log_prints_its_stage_only(log: str, capfd: pytest.CaptureFixture[str]) -> None:
    run(logs=log)
    out, err = capfd.readouterr()
    assert out == ""
    assert set(re.findall(r"^\[lenz (\w+)\]", err, re.MULTILINE)) == {log}
    assert SIGNS[log] in err
    assert not [sign for k, sign in SIGNS.items() if k != log and sign in err]


def test_launches_and_calls_have_an_estimated_time(capfd: pytest.CaptureFixture[str]) -> None:
    run(logs="fusion")
    call, kernel = capfd.readouterr().err.splitlines()[1:3]
    rate = 1e3 * bandwidth("cpu")  # bytes in a microsecond
    for line, start, moved in ((call, "call aten.mm", 128), (kernel, "kernel fused_", 64)):
        assert line.startswith(start) and f"at {__file__}:" in line
        took = float(line.split("about ")[1].removesuffix(" us by its bytes"))
        assert took == pytest.approx(4 * moved / rate, abs=0.006)


def test_what_tuning_chose_is_logged() -> None:
    tried = (Tried("warps 4", 3.0), Tried("warps 8", 2.0))
    text = fusions(Schedule(Graph("g", (), (), ()), ()), [TuneReport("fused_0", 1, tried)])
    assert text == "tuned fused_0: 2.0 us with warps 8, 3.0 us with warps 4"


def test_each_graph_has_a_name_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return y + 1

    compiled = torch.compile(f, backend="lenz", options={"logs": "time"}, dynamic=False)
    for n in (4, 5, 6):
        compiled(torch.randn(n))
    names = re.findall(r"^\[lenz time\] (.*)$", capfd.readouterr().err, re.MULTILINE)
    assert len(set(names)) == len(names) == 6, f"names of graphs are {names}"
    form = re.compile(r"graph(\d+)(?:_(\d))?\.inference \[(\d+)/(\d)\]")
    ids = [m.groups() for n in names if (m := form.fullmatch(n))]
    assert len(ids) == 6 and all((k, n or "0") == (a, b) for k, n, a, b in ids), names


def test_nothing_is_printed_without_being_asked(capfd: pytest.CaptureFixture[str]) -> None:
    run()
    assert capfd.readouterr() == ("", "")


def test_printed_times_add_up(capfd: pytest.CaptureFixture[str]) -> None:
    run(logs="time", cache=False)
    rows = re.findall(r"^  (\w+) +([\d.]+) ms$", capfd.readouterr().err, re.MULTILINE)
    times = {name: float(ms) for name, ms in rows}
    total = times.pop("total")
    assert times.keys() >= {"trace", "lower", "inline", "schedule", "codegen", "plan"}
    assert sum(times.values()) == pytest.approx(total, abs=0.01 * len(rows))


def test_stage_times_are_own_times(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    r = Recorder("g")
    with r.stage("outer"):
        now[0] += 1
        with r.stage("inner"):
            now[0] += 2
        now[0] += 4
        with r.stage("inner"):
            now[0] += 8
    assert r.times == {"inner": 10, "outer": 5}


def test_the_innermost_stage_that_failed_is_kept() -> None:
    r = Recorder("g")
    with pytest.raises(KeyError), r.stage("outer"), r.stage("inner"):
        raise KeyError
    assert r.failed == "inner"


def test_a_debug_folder_holds_every_stage(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run(debug=True, debug_dir=str(tmp_path))
    (folder,) = tmp_path.iterdir()
    assert {f.name for f in folder.iterdir()} == FILES
    assert f"in {folder}" in capfd.readouterr().err
    assert isinstance(read((folder / "graph.ir").read_text()), Graph)
    assert isinstance(read((folder / "ir_before_fusion.ir").read_text()), Graph)
    assert isinstance(read((folder / "ir_after_fusion.ir").read_text()), Schedule)
    assert "softmax" in (folder / "fx_readable.py").read_text()
    assert "aten.mm.default" in (folder / "fx_transformed.py").read_text()
    assert f"{__file__}:" in (folder / "plan.py").read_text()


@pytest.mark.skipif(os.name == "nt", reason="Windows has no permission bits")
def test_debug_folders_and_repros_are_for_the_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        run(debug=True, debug_dir=str(tmp_path / "a" / "b"), cache=False)
        write_in(tmp_path / "c" / "repro", {"error.txt": "text", "../x": b"data"}, make=True)
    finally:
        os.umask(before)
    made = [*(tmp_path / "a").rglob("*"), tmp_path / "a", *(tmp_path / "c").rglob("*")]
    assert {p.name for p in tmp_path.iterdir()} == {"a", "c"}
    for path in made:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such links")
def test_nothing_is_written_through_a_link_or_into_a_strangers_folder(tmp_path: Path) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "repro"
    victim.write_text("mine")
    folder.mkdir(0o700)
    (folder / "error.txt").symlink_to(victim)
    write_in(folder, {"error.txt": "text"}, make=True)
    assert victim.read_text() == "mine" and (folder / "error.txt").read_text() == "text"
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(UserError):
        write_in(tmp_path / "link", {"error.txt": "text"}, make=True)
    folder.chmod(0o777)
    with pytest.raises(UserError, match="others own it or can write to it"):
        write_in(folder, {"error.txt": "text"}, make=True)


def test_by_default_nothing_is_written_to_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HOME", "USERPROFILE", "LOCALAPPDATA", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.delenv("LENZ_DEBUG_DIR")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    run(debug=True, cache=False)
    assert not list((tmp_path / "work").iterdir())
    assert list((tmp_path / "home").rglob("plan.py"))


def test_each_graph_has_a_folder_of_its_own(tmp_path: Path) -> None:
    for _ in range(2):
        torch.compiler.reset()
        run(debug=True, debug_dir=str(tmp_path))
    assert len(list(tmp_path.iterdir())) == 2


def script(path: Path) -> str:
    done = children.run([path.name], PYTHON, path.parent)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_dumped_files_run_alone(tmp_path: Path) -> None:
    """A training graph with sizes that vary: the forward half is compiled again and timed."""
    table = torch.arange(300.0).reshape(3, 100)

    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (torch.relu(x @ w) + table.sum(1)[0]).mean()

    x, w = torch.randn(5, 3), torch.randn(3, 4, requires_grad=True)
    options = {"debug": True, "debug_dir": str(tmp_path)}
    run = torch.compile(loss, backend="lenz", dynamic=True, options=options)  # type: ignore[arg-type]
    torch.testing.assert_close(run(x, w), loss(x, w))
    folder = next(f for f in tmp_path.iterdir() if "forward" in f.name)
    assert re.search(r"median of \d+ calls [\d.]+ us", script(folder / "plan.py"))
    assert "compiled and ran" in script(folder / "fx_runnable.py")


BROKEN = """
import runpy, sys
import lenz.opt
def broken(g, cx):
    raise RuntimeError("planted")
lenz.opt.PASSES["inline"] = broken
"""


@pytest.mark.rest
@pytest.mark.slow
def test_the_repro_of_a_failed_graph_fails_alone(tmp_path: Path) -> None:
    """It compiles the graph again, without the cache and without a way out to eager."""
    end = "runpy.run_path(sys.argv[1], run_name='__main__')"
    lines = "import torch\nprint(torch.compile(torch.tanh, backend='lenz')(torch.ones(3)).sum())"
    env = {**PYTHON, "LENZ_DEBUG_DIR": str(tmp_path), "LENZ_ON_ERROR": "eager"}
    done = children.run(["-c", BROKEN + lines], env)
    assert "tensor(2.2848)" in done.stdout and "fx_runnable" not in done.stdout, done
    (repro,) = tmp_path.iterdir()
    assert f"saved: {repro}" in done.stderr
    done = children.run(["-c", BROKEN + end, str(repro / "fx_runnable.py")], env)
    assert done.returncode == 1 and "planted" in done.stderr and not done.stdout, done
    assert "compiled and ran" in script(repro / "fx_runnable.py"), "when the fault is gone"
    want = function_of(str(repro / "fx_runnable.py"), "main")()
    assert [x.shape for x in want] == [(3,)], "commands run the main() of the script"


@pytest.mark.slow
def test_a_script_has_the_constants_of_the_graph(tmp_path: Path) -> None:
    """They were random: an index was 0 or 1, whatever the program said."""
    options = {"debug": True, "debug_dir": str(tmp_path)}
    pick = torch.compile(lambda x: x[torch.tensor([2, 7, 5])], backend="lenz", options=options)  # type: ignore[arg-type]
    assert pick(torch.arange(8.0)).tolist() == [2.0, 7.0, 5.0]
    (folder,) = tmp_path.iterdir()
    (file,) = folder.glob("*.constant")
    assert packed(torch.tensor([2, 7, 5])) == (file.stem, file.read_bytes())
    script(folder / "plan.py")
    file.write_bytes(packed(torch.tensor([2, 8, 5]))[1])
    done = children.run([str(folder / "plan.py")], PYTHON)
    assert "IndexError" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("end", ["o", "constant"])
def test_a_plan_without_a_file_beside_it_says_so(tmp_path: Path, end: str) -> None:
    options = {"debug": True, "debug_dir": str(tmp_path)}
    fn = torch.compile(lambda x: x * torch.tensor([1.0, 3.0]), backend="lenz", options=options)  # type: ignore[arg-type]
    fn(torch.ones(2))
    (folder,) = tmp_path.iterdir()
    (file,) = folder.glob(f"*.{end}")
    file.unlink()
    done = children.run([str(folder / "plan.py")], PYTHON)
    assert done.returncode != 0 and f"{file.name}': No such file" in done.stderr


def test_a_debug_folder_that_cannot_be_made_is_the_users_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(UserError, match="LENZ_DEBUG_DIR"):
        new_folder(str(file), "graph")


def test_a_full_disk_is_not_a_bug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("lenz.debug.trace.write", full)
    options: dict[str, Any] = {"debug": True, "debug_dir": str(tmp_path), "cache": False}
    run = torch.compile(lambda x: x.sin(), backend="lenz", options=options)
    with pytest.raises(UserError, match=r"cannot write to the debug folder .*: No space left"):
        run(torch.ones(3))


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("L['w16']", "w16"),
        ("L['self']._modules['fc']._parameters['bias']", "self.fc.bias"),
        ("L['net']._modules['0']._buffers['running_mean']", "net.0.running_mean"),
        ("L['d']['q'][0]", "d['q'][0]"),
        ("G['table']", "table"),
    ],
)
def test_names_are_the_users(source: str, name: str) -> None:
    assert plain(source) == name


def test_names_of_autograd_are_made_readable() -> None:
    assert readable("args[1]", ["x", "w"]) == "w"
    assert readable("__output_tangent(args[0])", ["x"]) == "__output_tangent(x)"
    assert readable("args[7]", ["x"]) == "args[7]"
    assert readable("addmm", ["x"]) == "addmm"


def test_torch_traces_nothing_for_pytest() -> None:
    """tests/conftest.py: with a handler, torch would print each graph to be captured."""
    assert not any("Capture" in str(h) for h in logging.getLogger("torch.__trace").handlers)
