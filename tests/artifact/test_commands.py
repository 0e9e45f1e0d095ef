"""`python -m lenz inspect` and `python -m lenz run`: artifacts for people."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import lenz
from lenz.cli import main


class Two(nn.Module):
    """A weight, an argument of any length, a constant argument, and two results."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, x: Tensor, by: int, y: Tensor) -> tuple[Tensor, Tensor]:
        return x * self.scale * by, (y.exp() + 1).bfloat16()


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    path = tmp_path / "m.lenz"
    args = (torch.randn(4, 3), 2, torch.randn(8))
    sizes = ({0: Dim("n", min=2, max=9)}, None, None)
    lenz.export(Two(), path, args, dynamic_shapes=sizes, levels=("host",))
    return path


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[str, str]]:
    def run(*argv: object, status: int = 0) -> tuple[str, str]:
        assert main([str(a) for a in argv]) == status
        return capsys.readouterr()

    return run


def test_inspect_says_what_is_inside(artifact: Path, told: Any) -> None:
    out, _ = told("inspect", artifact)
    for line in ("argument  0: 'float32' of size [2 to 9, 3] on 'cpu'", "argument  1: always 2",
                 "weight    'scale': float32 [3] on 'cpu', 0.0 KiB", "code      "):  # fmt: skip
        assert line in out
    assert "launch" not in out
    assert "launch" in told("inspect", artifact, "--plan")[0]


def test_run_reads_and_writes_arrays(artifact: Path, tmp_path: Path, told: Any) -> None:
    x, y = np.ones((2, 3), dtype=np.float32), np.zeros(8, dtype=np.float32)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    given = ("--input", tmp_path / "x.npy", "--input", tmp_path / "y.npy")
    out, _ = told("run", artifact, *given, "--output", tmp_path / "results")
    assert out.splitlines() == [
        "result 0: float32 [2, 3] [2, 4, 6, 2, 4, 6]",
        "result 1: bfloat16 [8] [2, 2, 2, 2, 2, 2, ...]",
    ]
    assert np.array_equal(np.load(tmp_path / "results" / "0.npy"), [[2, 4, 6]] * 2)
    assert np.array_equal(np.load(tmp_path / "results" / "1.npy"), np.full(8, 2))


class Odd(nn.Module):
    """Results of types that NumPy lacks, and with lazy bits."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        z = torch.view_as_complex(x)
        return x.to(torch.float8_e5m2), z.conj(), z.conj().imag, z.to(torch.complex32)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_results_of_any_type_are_written(tmp_path: Path, told: Any) -> None:
    np.save(tmp_path / "x.npy", np.ones((3, 2), dtype=np.float32))
    lenz.export(Odd(), tmp_path / "m.lenz", (torch.ones(3, 2),), levels=("host",))
    run = ("run", tmp_path / "m.lenz", "--input", tmp_path / "x.npy", "--output")
    told(*run, tmp_path / "made" / "here")
    found = [np.load(tmp_path / "made" / "here" / f"{k}.npy") for k in range(4)]
    assert [(a.dtype.name, a.flat[0]) for a in found] == [
        ("float32", 1), ("complex64", 1 - 1j), ("float32", -1), ("complex64", 1 + 1j)
    ]  # fmt: skip
    for place in (tmp_path / "x.npy", "/proc/no", tmp_path / "x.npy" / "a"):
        assert f"lenz: cannot write '{place}': " in told(*run, place, status=1)[1]


def test_what_cannot_be_run_is_said(artifact: Path, tmp_path: Path, told: Any) -> None:
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    (tmp_path / "short.npy").write_bytes(b"\x93NUMPY\x01\x00")
    cases: list[tuple[list[Any], str]] = [
        ([], "the program takes 2 inputs, not 0"),
        ([tmp_path / "none.npy"], "none.npy': No such file"),
        ([tmp_path], f"cannot read '{tmp_path}': Is a directory"),
        (["9" * 5000], "File name too long\n  try: inputs are .npy files or integers below 1e18"),
        ([tmp_path / "objects.npy"], "is not an array for torch"),
        ([tmp_path / "short.npy"], "is not an array for torch"),
        ([3, 4], "argument 0 is of type int, and was a tensor"),
    ]
    for given, why in cases:
        _, err = told("run", artifact, *(s for g in given for s in ("--input", g)), status=1)
        assert why in err and "Traceback" not in err
    for path, why in ((tmp_path / "none.lenz", "No such file"), ("a" * 5000, "File name too long"),
                      (tmp_path / "short.npy" / "a", "Not a directory")):  # fmt: skip
        _, err = told("inspect", path, status=1)
        assert err.startswith(f"lenz: cannot read '{path}': {why}")
