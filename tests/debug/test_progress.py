"""The line of a compilation that takes long: on a terminal, after two seconds, and nowhere else."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lenz.debug import progress
from lenz.debug.progress import Progress
from lenz.debug.trace import Recorder

PROGRAM = """
import sys, time, torch
from lenz.debug import progress

progress.AFTER = 0.1

def slow(gm):
    time.sleep(1.2)

def small(x):
    return torch.softmax(x, -1)

if __name__ == "__main__":
    for option in (True, False):
        torch.compiler.reset()
        options = {"passes": "program:slow", "progress": option}
        fast = torch.compile(small, backend="lenz", options=options)
        print(fast(torch.ones(2, 2)).sum().item())
        print("END", file=sys.stderr, flush=True)
"""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal(patch: pytest.MonkeyPatch, after: float = 0.0) -> Terminal:
    """Standard error from now on; pytest puts its own there after the fixtures."""
    made = Terminal()
    patch.setattr(sys, "stderr", made)
    patch.setattr(progress, "AFTER", after)
    patch.setattr(progress, "EVERY", 0.01)
    return made


def wait_for(text: str, said: Terminal) -> None:
    end = time.monotonic() + 30
    while text not in said.getvalue():
        assert time.monotonic() < end, f"no {text!r} in {said.getvalue()!r}"
        time.sleep(0.01)


def lines() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "lenz progress"]


def test_graph_stage_and_kernels_are_in_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    said = terminal(monkeypatch)
    recorder = Recorder("graph3_1.forward", line=Progress(True))
    with recorder.line.at("graph3_1", "trace"):
        wait_for("lenz compiles graph3_1 [3/1]: trace, 0 s", said)
        with recorder.stage("other"):
            recorder.kernels(0, 7)
            wait_for("graph3_1.forward [3/1]: other, 0 of 7 kernels, 0 s", said)
            with recorder.stage("triton"):
                recorder.kernels(5, 7)
                wait_for("triton, 5 of 7 kernels", said)
            assert len(lines()) == 1, "a stage inside of another has the same line"
    assert not lines()
    assert said.getvalue().endswith("\r"), "the line is still there"
    assert not said.getvalue().rpartition("\r")[0].rpartition("\r")[2].strip()


def test_an_error_ends_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    said = terminal(monkeypatch)
    recorder = Recorder("g", line=Progress(True))
    with pytest.raises(ValueError, match="planted"), recorder.stage("lower"):
        wait_for("lower", said)
        raise ValueError("planted")
    assert not lines() and said.getvalue().endswith("\r")


def test_a_second_compilation_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    said = terminal(monkeypatch)
    line = Progress(True)
    with line.at("forward", "llvm"):
        line.count(4, 4)
        wait_for("4 of 4", said)
    with line.at("backward", "lower"):
        wait_for("backward: lower, 0 s", said)


def test_a_short_compilation_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    said = terminal(monkeypatch, after=60.0)
    with Progress(True).at("g", "lower"):
        assert lines()
    assert said.getvalue() == "" and not lines()


@pytest.mark.parametrize("stream", [None, io.StringIO(), object()], ids=["none", "file", "other"])
def test_no_terminal_no_line(stream: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress(True).at("g", "lower"):
        assert not lines()


def test_the_option_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal(monkeypatch)
    with Progress(False).at("g", "lower"):
        assert not lines()


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
def test_a_slow_pass_is_seen_on_a_terminal(program: Path) -> None:
    """Unless the option turns it off."""
    import pty

    mine, theirs = pty.openpty()
    env = {**os.environ, "LENZ_CACHE": "0"}
    command = [sys.executable, "program.py"]
    run = subprocess.Popen(command, cwd=program, env=env, stdout=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    said = b""
    while True:
        try:
            part = os.read(mine, 4096)
        except OSError:  # Linux, when the other end is closed
            break
        if not part:
            break
        said += part
    os.close(mine)
    assert run.stdout is not None and run.stdout.read().split() == [b"2.0", b"2.0"]
    assert run.wait() == 0
    shown, hidden, rest = said.split(b"END")
    line = re.compile(rb"lenz compiles graph\S* \[[\d/]+\]: \w+")
    assert line.search(shown) and not line.search(hidden) and not rest.strip(), said


@pytest.mark.rest
@pytest.mark.slow
def test_a_slow_pass_is_not_seen_in_a_pipe(program: Path) -> None:
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=program,
        env={**os.environ, "LENZ_CACHE": "0"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "2.0\n2.0\n", "END\nEND\n")
