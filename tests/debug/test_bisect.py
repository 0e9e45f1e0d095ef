"""`python -m lenz bisect`: planted faults are named, and the scripts that it leaves run alone."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lenz.cli import main
from lenz.commands.bisect import changed, halve
from lenz.commands.probe import ALL, STAGES, Judged, Outcome, Probe
from lenz.process import ask
from tests.arch.source import REPOSITORY

pytestmark = pytest.mark.slow  # each test starts processes, or compiles models

PROGRAM = """
import sys
import torch

x = torch.linspace(-3, 3, 96).view(2, 48)
w = torch.linspace(-1, 1, 48 * 48).view(48, 48).requires_grad_()
state = torch.zeros(48)

def main():
    y = torch.sin(x) @ w
    z = torch.softmax(y, -1) @ w
    torch._dynamo.graph_break()
    state.add_(z.detach().mean(0))
    u = (torch.tanh(z) * 2 + 1) @ w  # the line of the fault
    loss = torch.sqrt(u * u + 1).mean()
    loss.backward()
    found = w.grad.clone()
    w.grad = None
    return loss, found, state.clone()

def draws():
    return torch.rand(4).tanh()

def broken():
    return x @ torch.ones(3)

def told():
    return torch.tensor([len(sys.argv), int(sys.argv[1])])
"""
FAULTS = {
    "a pass": """
import lenz.opt
from lenz.ir.graph import Pointwise
from dataclasses import replace

def wrong(g, cx):
    return replace(g, nodes=tuple(
        replace(n, body=n.body * 1.5) if isinstance(n, Pointwise) and "tanh(" in str(n.body) else n
        for n in g.nodes))

lenz.opt.PASSES["narrow"] = wrong
""",
    "a rewrite": """
import importlib
simplify = importlib.import_module("lenz.opt.simplify")
rule = lambda e: e.args[0] if e.op.name == "tanh" else None
simplify.RULES = {**simplify.RULES, "planted": rule}
""",
    "a kernel": """
from lenz.ops import math
object.__setattr__(math.TANH, "expand", lambda x: x)  # the code of an op
""",
    "a crash": """
import lenz.machine.cpu.machine as machine
emit = machine.emit_module

def crashing(kernels, target):
    text = emit(kernels, target)
    k = next((k for k in kernels if "tanh(" in str(k.body)), None)
    if k is None:
        return text
    head, name, rest = text.partition(f"define i64 @{k.name}")
    rest = rest.replace("ret i64", "call void @llvm.trap()\\n  ret i64", 1)
    return f"{head}{name}{rest}\\ndeclare void @llvm.trap()\\n"

machine.emit_module = crashing
""",
    "an error": """
import lenz.opt
from lenz.debug.blame import blaming


def failing(g, cx):
    for n in g.nodes:
        with blaming(n):
            assert "tanh(" not in str(getattr(n, "body", "")), "planted"
    return g

lenz.opt.PASSES["narrow"] = failing
""",
}
NAMED = {
    "a pass": ("stage narrow", "wrong"),
    "a rewrite": ("stage simplify, rewrite ", "simplify planted"),
    "a kernel": ("kernel fused_", "tanh(load("),
    "a crash": ("kernel fused_", "dies of SIG"),
    "an error": ("stage narrow", "AssertionError: planted"),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LENZ_DEBUG_DIR", str(tmp_path / "debug"))
    return tmp_path


def written(folder: Path, fault: str = "") -> str:
    file = folder / "program.py"
    file.write_text(fault + PROGRAM)
    return str(file)


def probed(file: str, **how: object) -> Judged:
    trial = Judged(Probe(file, **how), 100)  # type: ignore[arg-type]
    assert not trial.begin()
    return trial


@pytest.mark.one_in(5, 1)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(
    fault: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The graph, the stage or kernel, the user's line, and a script of one op that shows it."""
    file = written(folder, FAULTS[fault])
    assert main(["bisect", "--seconds", "60", file]) == 1
    out = capfd.readouterr().out
    assert ".forward [" in out.splitlines()[0], out
    lines = Path(file).read_text().splitlines()
    line = next(k for k, text in enumerate(lines, 1) if "the line of the fault" in text)
    assert all(text in out for text in (*NAMED[fault][:1], f"at {file}:{line}")), out
    assert fault == "a pass" or NAMED[fault][1] in out, out
    assert " ops to 1: " in out, out
    (made,) = (folder / "debug").glob("bisect-*")
    done = subprocess.run(
        [sys.executable, made / "fx_runnable.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    if fault == "a crash":
        assert done.returncode < 0, done
    elif fault == "an error":
        assert "planted" in done.stderr and done.returncode == 1, done
    else:
        assert done.returncode == 0 and "compiled and ran; results: 1" in done.stdout, done
        trial = probed(str(made / "fx_runnable.py"))
        assert trial.run().kind == "wrong", "the script has a main() for bisect and compare"


@pytest.mark.rest
def test_a_right_program_has_status_0_and_each_state_of_it_is_right(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """In eager, by the interpreter after each stage, kernel by kernel, and with less fuel."""
    file = written(folder)
    assert main(["bisect", file]) == 0
    trial = probed(file)
    graphs = trial.run(last=0).graphs
    assert capfd.readouterr().out.startswith(f"Nothing is wrong in {len(graphs)} graphs: error ")
    backward = 1 + next(k for k, name in enumerate(graphs) if "backward" in name)
    forward = 1 + next(k for k, name in enumerate(graphs) if "forward" in name)
    states: list[dict[str, object]] = [{"last": 2}, {"fuel": 0, "last": backward}]
    for last in (forward, backward):
        states += [{"last": last, "stage": s} for s in (STAGES[0], STAGES[6], STAGES[-1])]
        states += [{"last": last, "given": n} for n in (0, 1, ALL)]
    for state in states:
        seen = trial.run(**state)
        assert not seen.kind, f"{state}: {seen.what}"
        assert seen.graphs == graphs
        assert bool(seen.lines) == bool({"stage", "given"} & state.keys())


@pytest.mark.rest
def test_where_torch_has_gpus_no_process_is_a_fork(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork of a process that asked for GPUs cannot use them, and Dynamo's import may ask."""
    methods: list[str] = []
    context = multiprocessing.get_context
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(
        multiprocessing, "get_context", lambda m: [methods.append(m), context(m)][1]
    )
    trial = probed(written(folder), function="told", arguments=("5",))
    assert [x.tolist() for x in trial.want] == [[2.0, 5.0]]
    assert set(methods) == {"spawn"}


def test_a_failure_in_eager_has_status_2(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bisect", "--function", "broken", written(folder)]) == 2
    out = capfd.readouterr().out
    assert "fails in eager" in out and "RuntimeError: size mismatch" in out


def test_a_missing_file_or_function_is_told_in_a_line(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["bisect", str(folder / "nowhere.py")]) == 1
    assert main(["bisect", "--function", "brokem", written(folder)]) == 1
    out, err = capfd.readouterr()
    assert (
        "nowhere.py': No such file" in err
        and "did you mean broken" in err
        and "Traceback" not in err
    )
    assert "fails in eager" not in out


def test_a_program_gets_its_arguments(folder: Path) -> None:
    trial = probed(written(folder), function="told", arguments=("5",))
    assert [x.tolist() for x in trial.want] == [[2.0, 5.0]]
    assert not trial.run().kind


def test_random_programs_are_only_run(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bisect", "--function", "draws", written(folder)]) == 0
    out = capfd.readouterr().out
    assert out.startswith("Nothing is wrong in 1 graphs: draws() draws random numbers")


def died() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def slept() -> None:
    time.sleep(60)


def exited() -> None:
    sys.exit("why")


def test_a_process_says_how_it_ended() -> None:
    assert ask(len, "abc", seconds=60) == (3, "")
    assert ask(died, seconds=60) == (None, "dies of SIGTERM")
    assert ask(slept, seconds=0.1) == (None, "hangs: it has no result after 0 s")
    value, why = ask(exited, seconds=60)
    assert value is None and "SystemExit: why" in why


def test_halving_finds_the_neighbour_in_both_directions() -> None:
    tried: list[int] = []
    assert halve(0, 1000, lambda n: tried.append(n) or n >= 617) == 617  # type: ignore[func-returns-value]
    assert len(tried) <= 10
    assert halve(9, 0, lambda n: n <= 4) == 4
    assert halve(3, 4, lambda n: False) == 4, "its ends are not tried again"


def test_changed_lines_are_marked_and_located() -> None:
    old = Outcome(lines=[("a", "f.py:1"), ("b", "f.py:2"), ("c", "")])
    new = Outcome(lines=[("a", "f.py:1"), ("d", "f.py:3"), ("c", "")])
    assert changed(old, new) == (["-b", "+d"], "f.py:3")
    assert changed(old, old) == ([], "")
