"""A seeded sample of calls that eager refuses; `python -m tests.fuzz.refused` runs more."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from importlib import import_module

import pytest

from tests.fuzz import numbers, refused
from tests.fuzz.refused import SAME, able, found, is_right

pytest.importorskip("expecttest", reason="torch's op database needs it")
pytestmark = [pytest.mark.usefixtures("quiet"), pytest.mark.filterwarnings("ignore")]  # torch's


@pytest.mark.one_in(6, 5)
@pytest.mark.parametrize("first", range(0, 60, 10))
def test_what_eager_refuses_is_refused(first: int) -> None:
    ops, counts = able(), Counter[str]()
    for seed in range(first, first + 10):
        title, verdict = found(seed, ops)
        assert is_right(verdict), f"seed {seed}: {title}: {verdict}"
        counts[verdict] += 1
    assert counts[SAME] > 1


@pytest.mark.parametrize("way", ["refused", "numbers"])
def test_one_in_sixteen_of_a_mix_is_such_a_call(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("CUDA_VISIBLE_DEVICES", ""), ("OMP_NUM_THREADS", "1")):
        monkeypatch.setenv(name, value)  # as the command does, for good
    fuzz = import_module("tests.fuzz.__main__")
    o = Namespace(way="", device="cpu", large=False)
    seeds = [seed for seed in range(64) if fuzz.way_of(seed, o) == way]
    assert len(seeds) == 4
    monkeypatch.setattr(refused, "found", lambda seed, ops: (f"call {seed}", "no error"))
    monkeypatch.setattr(numbers, "found", lambda seed, ops: f"call {seed}: no error")
    said: list[str] = []
    fuzz.batch(range(seeds[0], seeds[0] + 1), o, float("inf"), said.append)
    assert said[-1] == f"!call {seeds[0]}: no error"
