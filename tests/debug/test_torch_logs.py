"""`TORCH_LOGS`: the log `lenz`, and torch's artifacts."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

PROGRAM = """
import sys, torch
at_start = [m for m in sys.modules if m.startswith("lenz.")]
def soft(x, w):
    return torch.softmax(x @ w, -1) * 2
torch.compile(soft, backend="lenz")(torch.randn(4, 8), torch.randn(8, 8))
print(at_start)
"""
SIGNS = {
    "output_code": "def call(args):",
    "fusion": "(reduction): ",
    "schedule": "launch @",
    "lenz": "total",
}
PREFIX = re.compile(r"V\d{4} [\d:.]+ \d+ lenz/debug/trace\.py:\d+\] \[0/0\] (\[__\w+\] )?(.*)")


def logged(setting: str) -> tuple[str, str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_LOGS": setting}
    told = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=True
    )
    return told.stdout, told.stderr


@pytest.mark.parametrize("artifact", ["output_code", "fusion", "schedule"])
def test_an_artifact_is_printed_with_torchs_prefix(artifact: str) -> None:
    out, err = logged(artifact)
    found = [PREFIX.fullmatch(line) for line in err.splitlines()]
    assert found and all(found), err
    assert {m[1] for m in found if m} == {f"[__{artifact}] "}
    assert SIGNS[artifact] in err
    assert not [sign for k, sign in SIGNS.items() if k != artifact and sign in err]
    assert out == "[]\n", "asking for an artifact imports nothing of lenz"


def test_the_log_of_lenz_has_graphs_and_times() -> None:
    _, err = logged("+lenz")
    found = [PREFIX.fullmatch(line) for line in err.splitlines()]
    assert found and all(found), err
    assert {m[1] for m in found if m} == {None}
    texts = [m[2] for m in found if m and "of graph" in m[2]]
    assert texts == [f"{t} of graph0.inference [0/0]" for t in ("fx", "graph", "ir", "time")]
    assert SIGNS["lenz"] in err


def test_nothing_is_logged_without_being_asked() -> None:
    _, err = logged("cudagraphs,graph_breaks")
    assert err == "", "artifacts of others are not those of lenz"
