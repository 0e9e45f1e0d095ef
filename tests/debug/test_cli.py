"""`python -m lenz` and its commands."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lenz.cli import main
from lenz.debug.options_table import options_table
from lenz.runtime import script

PROGRAM = """
import torch

x, w = torch.randn(4, 8), torch.randn(8, 8)

def main():
    return torch.softmax(x @ w, -1)
"""


def test_info_names_versions_target_and_cache(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    for name in ("lenz", "torch", "compiler", "python", "target", "threads", "cache"):
        assert f"\n{name} " in f"\n{out}"


def test_options_are_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["options"]) == 0
    assert capsys.readouterr().out == options_table()


def test_ops_lists_what_is_native(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops"]) == 0
    words = capsys.readouterr().out.split()
    assert {"aten.exp", "aten.add.Tensor"} <= set(words) or {"aten.exp", "aten.add"} <= set(words)
    assert "aten.sort" not in words


def test_explain_prints_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    assert main(["explain", str(file)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("1 graph; 2 launches in this call; ops: 1 in kernels, 1 in libraries")
    assert f"{file}:7" in out


def test_a_file_gets_no_arguments_of_lenz(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that parses its arguments ended with those of `explain`."""
    file = tmp_path / "program.py"
    file.write_text(f"import sys\nassert sys.argv == [{str(file)!r}], sys.argv\n{PROGRAM}")
    monkeypatch.setattr(sys, "argv", ["lenz", "explain", str(file)])
    assert main(sys.argv[1:]) == 0
    assert capsys.readouterr().out.startswith("1 graph; ")


EXPLAINING = (
    PROGRAM.replace("def main", "import lenz\n\ndef soft")
    + """
def main():
    report = lenz.explain(soft)()
    assert report.result.shape == (4, 8) and len(report.launches) == 2, report
    return report
"""
)


def test_a_function_that_explains_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "program.py"
    file.write_text(EXPLAINING)
    assert main(["explain", str(file)]) == 0
    assert capsys.readouterr().out.startswith("1 graph; 2 launches in this call;")


@pytest.mark.one_in(1)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", "nowhere.py"], "cannot read 'nowhere.py': No such file"),
        (["compare", "a" * 5000], "aa': File name too long"),
        (["explain", "{file}/.."], "cannot read '{file}/..': Not a directory"),
        (["explain", "{file}", "--function", "mein"], "did you mean main"),
        (["explain", "{wrong}"], "cannot be compiled: source code"),
    ],
)
def test_wrong_arguments_are_told_in_a_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, wrong = tmp_path / "program.py", tmp_path / "wrong.py"
    file.write_text(PROGRAM)
    wrong.write_bytes(b"\0")
    assert main([a.format(file=file, wrong=wrong) for a in arguments]) == 1
    assert message.format(file=file) in capsys.readouterr().err


def test_a_file_without_functions_has_no_near_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "program.py"
    file.write_text("x = 1")
    assert main(["explain", str(file)]) == 1
    assert capsys.readouterr().err == f"lenz: {file} has no function 'main'\n"


def test_an_unknown_command_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["dema"])
    assert done.value.code == 2
    assert "invalid choice" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["nan", "inf", "1e300", "-1", "0", "five"])
@pytest.mark.parametrize("command", ["bisect", "compare"])
def test_a_time_that_cannot_be_waited_for(
    command: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if (command, text) == ("compare", "0"):  # the fewest rounds
        assert main([command, "--seconds", text, "nowhere.py"]) == 1
        return
    with pytest.raises(SystemExit) as done:
        main([command, "--seconds", text, "nowhere.py"])
    assert done.value.code == 2
    assert f" to 86400 seconds, got '{text}'" in capsys.readouterr().err


def test_a_pipe_that_is_closed_is_no_fault() -> None:
    """As `python -m lenz ops | head` does: what was printed is for nobody."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "lenz", "options"], stdout=write, stderr=subprocess.PIPE, text=True
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("redirected", "why"),
    [(">&-", "standard output is closed"), (">/dev/full", "cannot write the output: No space")],
)
def test_an_output_that_cannot_be_written_is_said(redirected: str, why: str) -> None:
    command = f"{shlex.quote(sys.executable)} -m lenz options {redirected}"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1 and done.stderr.startswith(f"lenz: {why}")
    assert len(done.stderr.splitlines()) == 1


def test_names_in_any_bytes_are_printed(tmp_path: Path) -> None:
    env = {**os.environ, "LENZ_CACHE_DIR": str(tmp_path), "PYTHONIOENCODING": "utf-8:strict"}
    done = subprocess.run(
        [sys.executable, "-m", "lenz", "cache", "export", os.fsencode(tmp_path) + b"/b\xff"],
        env=env, stdout=subprocess.PIPE, check=True, text=True,
    )  # fmt: skip
    assert done.stdout == f"0 entries written to {tmp_path}/b\\udcff\n"


def test_the_time_of_a_plan_for_gpus_holds_their_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A launch takes a microsecond, whatever the kernel takes: the script waits for the GPU."""
    now, pending = [0.0], [5.0]  # seconds: of the clock, and of work that nobody has waited for

    def call(args: list[object]) -> None:
        now[0], pending[0] = now[0] + 1e-6, pending[0] + 3e-3

    def synchronize(gpu: str) -> None:
        assert gpu == "cuda:1"
        now[0], pending[0] = now[0] + pending[0], 0.0

    monkeypatch.setattr(script, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    kernels = {"k": (1, 0, "cuda:1")}
    data = {"INPUTS": [], "CONSTANTS": [], "OBJECTS": {}, "SIZES": {}, "KERNELS": kernels}
    module = {**data, "call": call}
    script.main({**module, "__doc__": "graph3.inference: generated"}, {}, 5)
    assert capsys.readouterr().out == "graph3.inference: median of 5 calls 3001.0 us\n"
