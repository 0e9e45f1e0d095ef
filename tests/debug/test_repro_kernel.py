"""`python -m lenz repro KERNEL`: a script of one kernel that runs alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, ones, randn

import lenz
import lenz.commands.kernel
from lenz.cli import main
from lenz.ir.kernel import Kernel
from lenz.ir.printer import show
from lenz.ir.reader import read
from tests import children

pytestmark = pytest.mark.slow  # each test starts processes, or compiles models


CASES: dict[str, tuple[Callable[..., Any], list[Any], bool]] = {
    "softmax": (lambda x, y: torch.softmax(x * 2 + y, -1), [randn(33, 100), randn(100)], True),
    "halves": (lambda x: torch.tanh(x).sum(0), [randn(65, 300).bfloat16()], False),
    "gather": (lambda x, i: x[i] * 2, [randn(50, 7), torch.randint(0, 50, (300,))], False),
    "scan": (lambda x: x.cumsum(0).exp(), [randn(1000, 3)], False),
    "of f32 alone": (lambda x: torch.nn.functional.gelu(x) * 2, [randn(64, 768)], False),
    "dropout": (lambda x: torch.nn.functional.dropout(x), [ones(5000)], False),
    "written": (lambda x, y: x.add_(y), [randn(40, 40), randn(40)], False),
    "bool": (lambda x: (x > 0) | x.isnan(), [randn(999)], False),
}


def names_of(fn: Callable[..., Any], args: list[Any], dynamic: bool, folder: Path) -> list[str]:
    """Compile into a debug folder; the names of the kernels."""
    torch.compiler.reset()
    options = {"debug": True, "debug_dir": str(folder), "cache": False}
    report = lenz.explain(fn, dynamic=dynamic, options=options)(*args)
    return [k.name for g in report.graphs for k in g.kernels]


def ran(script: Path) -> tuple[float, float, float]:
    """Run a script; the errors of the kernel and of the interpreter, and the percentage."""
    done = children.run([str(script)])
    assert done.returncode == 0, done.stderr
    said = done.stdout.replace("float64 lacks one of its ops", "nothing else: 0.0")
    assert ("nothing else" in said) == ("one_plus_erf" in script.read_text()), said
    found = re.search(r"error against .*  (\S+);.* (\S+)\n.*\nof the limit +(\S+)%", said)
    assert found is not None, done.stdout
    error, near, share = map(float, found.groups())
    return error, near, share


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", CASES)
def test_each_kernel_runs_alone(name: str, tmp_path: Path, capsys: Any) -> None:
    fn, args, dynamic = CASES[name]
    kernels = names_of(fn, args, dynamic, tmp_path)
    assert kernels
    for kernel in kernels:
        assert main(["repro", kernel, str(tmp_path)]) == 0
        told = capsys.readouterr().out
        script = Path(told.removeprefix("written to ").partition(": run")[0])
        assert script.name == f"{kernel}.py"
        error, near, share = ran(script)
        assert error <= 4 * near + 1e-6
        assert share > 0


def test_a_wrong_kernel_is_far_from_float64(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def double(x: Tensor) -> Tensor:
        return x * 2.0 + 1.0

    (name,) = names_of(double, [randn(64)], False, tmp_path)
    (file,) = tmp_path.rglob("ir_after_fusion.ir")
    schedule: Any = read(file.read_text())
    real: Any = vars(lenz.commands.kernel)["assemble"]

    def planted(kernels: Mapping[str, tuple[Kernel, str]], cx: Any) -> Any:
        changed: Any = read(show(kernels[name][0]).replace("1.0:f32", "9.0:f32"))
        return real({name: (changed, kernels[name][1])}, cx)

    text = show(schedule.steps[0].kernel)
    assert "1.0:f32" in text
    lenz.commands.kernel.run_kernel(text, {}, "cpu")
    monkeypatch.setattr(lenz.commands.kernel, "assemble", planted)
    lenz.commands.kernel.run_kernel(text, {}, "cpu")
    right, wrong = re.findall(r"float64 +(\S+);", capsys.readouterr().out)
    assert float(right) < 1e-6 < 1 < float(wrong)


def test_a_kernel_that_is_not_there_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["repro", "fused_exp_0", str(tmp_path)]) == 1
    assert "LENZ_DEBUG=1" in capsys.readouterr().err
    (name,) = names_of(lambda x: x.exp(), [ones(3)], False, tmp_path)
    assert main(["repro", name + "x", str(tmp_path)]) == 1
    assert f"did you mean {name}?" in capsys.readouterr().err
    (file,) = tmp_path.rglob("ir_after_fusion.ir")
    for data, why in ((b"\xff", "cannot read '{}': 'utf-8' codec"),
                      (b"graph @g() on cpu { }", "{} is not a schedule: it holds a graph"),
                      (b"word", "{} is not a schedule: line 1, column 1: ")):  # fmt: skip
        file.write_bytes(data)
        assert main(["repro", name, str(tmp_path)]) == 1
        assert capsys.readouterr().err.startswith(f"lenz: {why.format(file)}")
    assert main(["repro", name, "a" * 5000]) == 1
    assert "File name too long" in capsys.readouterr().err
