"""`TORCH_LOGS`: the log `lenz`, and torch's artifacts."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow  # each test starts processes, or compiles models

# One process for all: each takes seconds to import torch, which reads the variable then.
PROGRAM = """
import os, sys, torch

at_start = [m for m in sys.modules if m.startswith("lenz.")]
def soft(x, w):
    return torch.softmax(x @ w, -1) * 2
for k, setting in enumerate(sys.argv[1:]):
    if k:
        torch._dynamo.reset()
        os.environ["TORCH_LOGS"] = setting
        torch._logging._internal._init_logs()
    run = torch.compile(soft, backend="lenz", options={"cache": False})
    run(torch.randn(4, 8), torch.randn(8, 8))
    print("END", file=sys.stderr, flush=True)
print(at_start)
"""
SIGNS = {
    "output_code": "def call(args):",
    "fusion": "(reduction): ",
    "schedule": "launch @",
    "lenz": "total",
}
ARTIFACTS = [k for k in SIGNS if k != "lenz"]
TOGETHER, OTHERS = ",".join(ARTIFACTS), "cudagraphs,graph_breaks"
SETTINGS = (TOGETHER, *ARTIFACTS, "+lenz", OTHERS)
PREFIX = re.compile(r"V\d{4} [\d:.]+ \d+ lenz/debug/trace\.py:\d+\] \[0/0\] (\[__\w+\] )?(.*)")


@pytest.fixture(scope="module")
def said() -> tuple[str, dict[str, str]]:
    """What the program prints, and what it logs under each setting."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_LOGS": TOGETHER}
    command = [sys.executable, "-c", PROGRAM, *SETTINGS]
    told = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    *logs, rest = told.stderr.split("END\n")
    assert not rest
    return told.stdout, dict(zip(SETTINGS, logs, strict=True))


def test_all_that_is_asked_for_at_the_start_is_logged(said: tuple[str, dict[str, str]]) -> None:
    out, logs = said
    found = [PREFIX.fullmatch(line) for line in logs[TOGETHER].splitlines()]
    assert found and all(found), logs[TOGETHER]
    assert {m[1] for m in found if m} == {f"[__{k}] " for k in ARTIFACTS}
    assert all(SIGNS[k] in logs[TOGETHER] for k in ARTIFACTS)
    assert out == "[]\n", "asking for artifacts imports nothing of lenz"


@pytest.mark.parametrize("artifact", ARTIFACTS)
def test_an_artifact_is_printed_with_torchs_prefix(
    artifact: str, said: tuple[str, dict[str, str]]
) -> None:
    err = said[1][artifact]
    found = [PREFIX.fullmatch(line) for line in err.splitlines()]
    assert found and all(found), err
    assert {m[1] for m in found if m} == {f"[__{artifact}] "}
    assert SIGNS[artifact] in err
    assert not [sign for k, sign in SIGNS.items() if k != artifact and sign in err]


def test_the_log_of_lenz_has_graphs_and_times(said: tuple[str, dict[str, str]]) -> None:
    err = said[1]["+lenz"]
    found = [PREFIX.fullmatch(line) for line in err.splitlines()]
    assert found and all(found), err
    assert {m[1] for m in found if m} == {None}
    texts = [m[2] for m in found if m and "of graph" in m[2]]
    assert texts == [f"{t} of graph0.inference [0/0]" for t in ("fx", "graph", "ir", "time")]
    assert SIGNS["lenz"] in err


def test_nothing_is_logged_without_being_asked(said: tuple[str, dict[str, str]]) -> None:
    assert said[1][OTHERS] == "", "artifacts of others are not those of lenz"
