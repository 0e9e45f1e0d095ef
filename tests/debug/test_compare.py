"""`python -m lenz compare`: what it times, against what it measures errors, and what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo import register_backend

from lenz.cli import main
from lenz.commands import compare
from lenz.commands.compare import Row, exact, in_turns, worst
from lenz.debug.precise import leaves, precise

pytestmark = pytest.mark.slow  # each test starts processes, or compiles models

PROGRAM = """
import torch
import beside


x, state = torch.linspace(-3, 3, 96).view(2, 48), torch.zeros(48)

def main():
    state.add_(x.sum(0))
    return {"out": torch.softmax(x + state, -1), "rest": [state, beside.ONE]}

def draws():
    return torch.rand(4)

def nothing():
    x.sin()

def fails():
    raise KeyError("the program's own")
"""
COMPILED = """
compiled = torch.compile(torch.sin, backend="broken")

def within():
    return compiled(x)
"""


@register_backend  # type: ignore[arg-type]  # it takes any function
def wrong(gm: Any, inputs: Any) -> Callable[..., Any]:
    return lambda *args: [y * 1.25 for y in gm(*args)]


@register_backend  # type: ignore[arg-type]  # likewise
def broken(gm: Any, inputs: Any) -> Callable[..., Any]:
    raise RuntimeError("planted")


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "beside.py").write_text("import torch\nONE = torch.ones(1)\n")
    made = tmp_path / "program.py"
    made.write_text(PROGRAM)
    return str(made)


@pytest.fixture
def say(
    file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., dict[str, list[str]]]:
    """Compares a function, with another backend in place of torch's; the words of each line."""

    def run(function: str, default: str = "aot_eager") -> dict[str, list[str]]:
        torch.compiler.reset()
        monkeypatch.setattr(compare, "DEFAULT", default)
        assert main(["compare", file, "--function", function, "--seconds", "0"]) == 0
        return {w[0]: w for line in capsys.readouterr().out.splitlines() if (w := line.split())}

    return run


def test_each_way_has_a_row_and_the_state_of_a_new_run(say: Callable[..., Any]) -> None:
    said = say("main")
    for name in ("eager", "lenz", "aot_eager"):
        error = float(said[name][-1])
        assert error < 1e-6, f"{name} saw the state of another run: {said[name]}"
    assert said["eager"][-2] == "1.00" and float(said["lenz"][-1]) > 0


def test_a_wrong_backend_is_seen_by_its_error(say: Callable[..., Any]) -> None:
    assert say("main", "wrong")["wrong"][-1] == "2.5e-01"


def test_a_backend_that_cannot_run_says_why(say: Callable[..., Any]) -> None:
    said = say("main", "broken")
    line = " ".join(said["broken"])
    assert line.startswith("broken cannot run: ") and line.endswith("RuntimeError: planted")
    assert float(said["lenz"][-1]) < 1e-6


def test_errors_need_results_that_can_be_repeated(say: Callable[..., Any]) -> None:
    said = say("draws")
    assert said["lenz"][-1] == "-" and "draws random numbers" in " ".join(said["There"])
    assert "returns no tensors" in " ".join(say("nothing")["There"])


def test_eager_runs_what_the_file_compiles_as_it_is(file: str, say: Callable[..., Any]) -> None:
    Path(file).write_text(PROGRAM + COMPILED)
    assert float(say("within")["eager"][-1]) < 1e-6, "the broken backend was called"


def test_an_error_of_the_program_is_raised(file: str) -> None:
    with pytest.raises(KeyError, match="the program's own"):
        main(["compare", file, "--function", "fails"])


@pytest.mark.skipif(sys.platform == "win32", reason="/bin/false stands for a compiler")
def test_without_a_c_compiler_the_default_backend_is_a_line(file: str, tmp_path: Path) -> None:
    caches = {n: str(tmp_path / n) for n in ("TORCHINDUCTOR_CACHE_DIR", "LENZ_CACHE_DIR")}
    done = subprocess.run(
        [sys.executable, "-m", "lenz", "compare", file, "--seconds", "0"],
        env={**os.environ, **caches, "CC": "/bin/false", "CXX": "/bin/false"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^inductor +cannot run: \w+: .*compiler", done.stdout, re.I | re.M)
    assert re.search(r"^lenz +\d", done.stdout, re.M)


@pytest.mark.parametrize(("count", "told"), [(1, "1 thread\n"), (2, "2 threads\n")])
def test_threads_are_counted(count: int, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: count)
    row = compare.Row("eager", times=[1.0])
    assert next(compare.shown_rows("main", [row], row)).endswith(f"in turns, {told}")


def test_rounds_begin_with_another_row_each_time() -> None:
    order: list[str] = []
    rows = [Row(n, lambda n=n: order.append(n)) for n in "abc"]  # type: ignore[misc]
    in_turns(rows, 0)
    changes = [n for k, n in enumerate(order) if k == 0 or order[k - 1] != n]
    assert len(rows[0].times) == compare.LEAST
    assert "".join(changes) == "abc" + "abc" + "bca" + "cab" + "abc" + "bca", changes


@pytest.mark.parametrize(
    ("have", "want", "error"),
    [
        ([1.0, 2.0], [1.0, 2.0], "0.0e+00"),
        ([1.0, 2.5], [1.0, 2.0], "2.5e-01"),
        ([1.0, float("nan")], [1.0, 2.0], "inf"),
        ([float("inf"), 2.0], [float("inf"), 2.0], "0.0e+00"),
        ([float("inf"), 2.0], [1.0, 2.0], "inf"),
        ([1.0], [1.0, 2.0], "shapes"),
    ],
)
def test_the_worst_error(have: list[float], want: list[float], error: str) -> None:
    assert worst([torch.tensor(have)], [torch.tensor(want, dtype=torch.float64)]) == error


def test_the_reference_trains_as_doubles_do() -> None:
    """Weights and statistics are rounded to their own dtype; all else is that of a double model."""

    def net() -> torch.nn.Module:
        torch.manual_seed(1)
        conv = torch.nn.Conv1d(3, 4, 3)
        return torch.nn.Sequential(conv, torch.nn.BatchNorm1d(4), torch.nn.Flatten())

    def steps(model: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        made, losses = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9), []
        for _ in range(3):
            made.zero_grad()
            losses.append(model(x).pow(4).sum())
            losses[-1].backward()
            made.step()
        return [loss.detach() for loss in losses]

    x, ours, theirs = torch.randn(5, 3, 8), net(), net().double()
    with precise():
        losses = steps(ours, x)
    want = steps(theirs, x.double())
    torch.testing.assert_close(losses[0], want[0], rtol=1e-13, atol=0)
    torch.testing.assert_close(losses, want, rtol=1e-5, atol=0)
    for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-4, atol=1e-5)
    assert all(p.dtype == torch.float32 for p in ours.parameters())


def test_writes_through_views_reach_what_they_view() -> None:
    x = torch.zeros(4, 4)
    with precise():
        x[:, 1] = torch.ones(4) / 3
        x[2].mul_(2)
        torch._foreach_add_([x[0], x[1]], 1.0)
        torch.add(torch.ones(4), torch.ones(4), out=x[3])
    want = torch.zeros(4, 4)
    want[:, 1] = torch.ones(4) / 3
    want[2] *= 2
    want[:2] += 1
    want[3] = 2
    torch.testing.assert_close(x, want, rtol=0, atol=0)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_casts_of_the_program_round_nothing(mode: Any) -> None:
    x, w = torch.randn(8, 32), torch.nn.Linear(32, 16).bfloat16()
    with precise(), mode():
        got = w(x.to(torch.bfloat16)).to(torch.float32)
    want = x.double() @ w.weight.double().T + w.bias.double()
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_libraries_that_take_no_doubles_are_left_out() -> None:
    q, lstm = torch.randn(1, 2, 4, 8, dtype=torch.bfloat16), torch.nn.LSTM(4, 4)
    with precise(), torch.no_grad():
        attended = torch.nn.functional.scaled_dot_product_attention(q, q, q)
        states = lstm(torch.randn(3, 2, 4))[0]
    assert attended.dtype == states.dtype == torch.float64


def test_a_reference_that_does_not_run_says_why(tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text(
        "import torch\nx = torch.ones(4)\ndef main():\n"
        "    return x.add(1).view(torch.int32).view(2, 2)\n"
    )
    assert "does not run in float64: " in exact(str(tmp_path / "p.py"), "main").failed


def test_tensors_are_found_in_results_of_any_form() -> None:
    class Out:
        def __init__(self, x: torch.Tensor) -> None:
            self.x, self.n = x, 3

    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
    assert [t.numel() for t in leaves([{"a": a}, (b, None), Out(c), 4])] == [1, 2, 3]
