"""Tests that need a GPU: skipped without one.  `--on cpu` runs what can run there, to check them.

    python -m pytest -q -n 8 tests/gpu            on a machine with a GPU
    python -m pytest -q tests/gpu --on cpu        the tests themselves, without one

`--samples N` takes more samples of each op, `--programs N` more random programs.  lenz need not be
installed: its backend is registered here if torch does not find it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
import torch
import torch._dynamo

import lenz


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--on", choices=("cuda", "cpu"), default="cuda", help="device of tests/gpu")
    parser.addoption("--samples", type=int, default=1, help="samples of an op in tests/gpu")
    parser.addoption("--programs", type=int, default=160, help="random programs in tests/gpu")


@pytest.fixture(scope="session", autouse=True)
def registered() -> None:
    """Make backend="lenz" known where lenz is not installed, only on the path."""
    if "lenz" not in torch._dynamo.list_backends(exclude_tags=()):
        torch._dynamo.register_backend(lenz.backend, name="lenz")


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    """The device under test; skips where there is none."""
    chosen: str = request.config.getoption("--on", default="cuda")
    if chosen == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return chosen


@pytest.fixture
def cuda(device: str) -> str:
    """For tests of what only a GPU has."""
    if device != "cuda":
        pytest.skip("needs a GPU")
    return device


@pytest.fixture(autouse=True)
def device_is_alive() -> Iterator[None]:
    """End the process if a test has left a device on which nothing works any more.

    A faulty access breaks the CUDA context of the process: each test after it would fail.  Under
    xdist another worker takes over; the test that ran last here is reported as a crash.
    """
    yield
    if not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as e:
        print(f"the device is broken after this test: {e}", file=sys.__stderr__, flush=True)
        if "PYTEST_XDIST_WORKER" in os.environ:
            os._exit(70)
        pytest.exit("a test broke the device; run with -n 1 to go on in new processes", 70)
