"""The maximum and the sum of exponentials of very long rows, from one read of them."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

import lenz.machine.cuda.machine
from lenz.ir.graph import Graph
from lenz.ir.reader import read
from lenz.machines import machine_of
from tests.gpu_oracle import assert_function, kernels_of, on_gpu, scheduled

LONG = """
graph @long() on cpu {
  in %x : f32[64, 16777216]
  %m = f32[64] : reduce max (i: 64 | r: 16777216) { load(%x, [i, r]) }
  %s = f32[64] : reduce sum (i: 64 | r: 16777216) { exp(sub(load(%x, [i, r]), load(%m, [i]))) }
  return (%m, %s)
}
"""


def test_so_many_parts_that_their_results_are_split_too() -> None:
    """The parts of both splits had one name: an error of lenz, for softmax of 2^30 elements."""
    g = read(LONG)
    assert isinstance(g, Graph)
    assert len(kernels_of(scheduled(on_gpu(g)))) > 4


def test_results_of_parts_that_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with limits that fit a small tensor."""
    pytest.importorskip("triton")
    assert lenz.machine.cuda.machine  # it is registered
    machine = machine_of("cuda:0")
    few: dict[str, Any] = {"held": 16, "launch": 64, "least_rows": 2, "least_row": 4, "panel": 4}
    small = replace(machine.capabilities, **few, programs=16, enough=8)
    before = machine.capabilities
    monkeypatch.setattr(sys.modules["lenz.opt.online"], "PART", 4)
    object.__setattr__(machine, "capabilities", small)
    try:
        s = assert_function(lambda x: x.log_softmax(1), torch.randn(3, 700))
    finally:
        object.__setattr__(machine, "capabilities", before)
    assert len(kernels_of(s)) > 3, "the results of the parts are split"
