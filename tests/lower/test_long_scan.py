"""Scans of rows that a program of a GPU cannot hold: in parts, checked by Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_oracle import assert_triton, kernels_of, lowered_there, scheduled

from lenz.ir.graph import Extern, Graph, atom_refs, buffers_of
from lenz.lower import long_scan
from lenz.sym import evaluate
from tests.cuda import cuda_program

CASES: dict[str, tuple[Callable[..., Any], tuple[int, ...], torch.dtype]] = {
    "whole parts": (lambda x: x.cumsum(-1), (2, 96), torch.float32),
    "a last part that is short": (lambda x: x.cumsum(-1) * 2, (3, 90), torch.float32),
    "columns": (lambda x: x.cumsum(0), (70, 5), torch.bfloat16),
    "products": (lambda x: x.cumprod(0), (67,), torch.float32),
    "extrema with positions": (lambda x: x.cummax(-1), (2, 70), torch.float32),
    "integers": (lambda x: (x > 0).long().cumsum(-1), (2, 70), torch.float32),
}


@pytest.fixture(autouse=True)
def short_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_scan, "LONGEST", 32)
    monkeypatch.setattr(long_scan, "PART", 16)


def lowered(fn: Callable[..., Any], shape: tuple[int, ...], dtype: torch.dtype) -> Graph:
    return lowered_there(cuda_program(fn, shape, dtype=dtype))


@pytest.mark.parametrize("name", CASES)
def test_a_long_row_is_scanned_in_parts(name: str) -> None:
    fn, shape, dtype = CASES[name]
    g = lowered(fn, shape, dtype)
    assert not [n for n in g.nodes if isinstance(n, Extern)]
    want = fn(torch.rand(shape, dtype=dtype))
    names = [r for a in g.outputs for r in atom_refs(a)]
    for out, made in zip(names, want if isinstance(want, tuple) else (want,), strict=True):
        strides = [evaluate(x, {}) for x in buffers_of(g)[out].type.layout.stride]
        assert strides == list(made.stride())
    s = assert_triton(g)
    assert "scan" in {k.kind for k in kernels_of(s)}


def test_whole_parts_are_written_where_they_belong() -> None:
    s = scheduled(lowered(*CASES["whole parts"]))
    assert len(kernels_of(s)) == 3


def test_logcumsumexp_of_a_long_row_is_eager_s() -> None:
    g = lowered(lambda x: x.logcumsumexp(0), (70,), torch.float32)
    assert [n.reason for n in g.nodes if isinstance(n, Extern)] == [long_scan.WHY]
