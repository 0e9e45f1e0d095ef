"""Whole programs are killed, they fork, and another version of lenz shares their cache."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests import children
from tests.arch.source import LENZ, REPOSITORY

PROGRAM = """
    import os, sys, torch
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16))
    fast = torch.compile(model, backend="lenz")
    x = torch.randn(4, 8)

    def step(f):
        model.zero_grad()
        f(x).square().sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    def check(f):
        for got, want in zip(step(f), step(model)):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)

    print("begun", flush=True)
    check(fast)
"""


def environment(cache: Path, where: Path = REPOSITORY) -> dict[str, str]:
    env = {**os.environ, "PYTHONPATH": str(where), "LENZ_CACHE_DIR": str(cache)}
    return env | {"LENZ_ON_ERROR": "raise", "PYTHONDONTWRITEBYTECODE": "1"}


def started(code: str, cache: Path, where: Path = REPOSITORY) -> subprocess.Popen[str]:
    """Run `code` with the lenz of a folder, and a cache of its own."""
    env = environment(cache, where)
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=env, cwd=where, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finished(run: subprocess.Popen[str]) -> str:
    out, err = run.communicate(timeout=300)
    assert run.returncode == 0, err
    return out


def code(more: str = "") -> str:
    return textwrap.dedent(PROGRAM) + textwrap.dedent(more)


def kinds(cache: Path) -> list[str]:
    return sorted(p.name for p in cache.rglob("*") if p.is_file())


@pytest.mark.rest
@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGKILL")
def test_a_program_that_is_killed_while_it_compiles(tmp_path: Path) -> None:
    """Whatever it has left in the cache, the next one gives eager's numbers."""
    killed = 0
    for wait in (0.3, 0.8, 1.3, 1.8, 2.5):
        run = started(code(), tmp_path)
        assert run.stdout is not None and run.stdout.readline() == "begun\n"
        time.sleep(wait)
        killed += run.poll() is None
        run.send_signal(signal.SIGKILL)
        run.communicate()
    assert killed
    finished(started(code(), tmp_path))
    finished(started(code(), tmp_path))


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_after_a_compilation(tmp_path: Path) -> None:
    """The child runs what its parent has compiled, and compiles for itself; so does the parent."""
    more = """
        def other(x):
            return torch.softmax(x.sin(), -1)

        def both():
            check(fast)
            torch.testing.assert_close(torch.compile(other, backend="lenz")(x), other(x))

        child = os.fork()
        if child == 0:
            both()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        both()
    """
    done = children.run(["-c", code(more)], environment(tmp_path), REPOSITORY)
    assert done.returncode == 0, done.stderr


@pytest.mark.rest
@pytest.mark.slow
def test_two_versions_share_a_folder(tmp_path: Path) -> None:
    """Neither takes what the other has compiled, and each finds its own again."""
    other = tmp_path / "other"
    shutil.copytree(LENZ, other / "lenz", ignore=shutil.ignore_patterns("__pycache__"))
    file = other / "lenz" / "version_of_the_test.py"
    file.write_text("x = 1\n")
    time.sleep(0.1)  # or the files would be younger than the process
    cache, seen = tmp_path / "cache", []
    for where in (REPOSITORY, other, REPOSITORY, other):
        finished(started(code(), cache, where))
        seen.append(kinds(cache))
    assert set(seen[0]) < set(seen[1]), "the second version has entries of its own"
    assert seen[1] == seen[2] == seen[3], "both versions find what they have compiled"
