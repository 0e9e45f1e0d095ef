"""A seeded sample of calls with one number changed; `python -m tests.fuzz --way numbers` has more.

It runs in a process of its own, since eager itself ends the process in some calls: another release
of torch has other samples, so that the calls of a seed are others too.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.e2e.sweep import cases
from tests.fuzz import numbers

pytest.importorskip("expecttest", reason="torch's op database needs it")
pytestmark = [pytest.mark.usefixtures("quiet"), pytest.mark.filterwarnings("ignore")]  # torch's
COUNT = 25


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a crash would be the test's")
@pytest.mark.one_in(6, 2)
@pytest.mark.parametrize("first", range(0, 6 * COUNT, COUNT))
def test_calls_with_another_number_agree_with_eager(first: int) -> None:
    told = f"--way numbers --seed {first} --count {COUNT} --patience 60"
    command = [sys.executable, "-m", "tests.fuzz", *told.split()]
    made = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert made.returncode == 0, made.stdout + made.stderr
    assert f"fuzz: {COUNT} programs, 0 failed" in made.stdout


def test_a_difference_is_told_unless_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = "no error, but in eager ValueError"
    monkeypatch.setattr(numbers, "judged", lambda call, given, dynamic: wrong)
    ops = list(cases(["roll"]))
    why = numbers.found(0, ops)
    assert why.startswith("roll ") and why.endswith(wrong)
    monkeypatch.setitem(numbers.KNOWN, "^roll .* in eager ValueError", "the reason")
    assert numbers.found(0, ops) == ""
