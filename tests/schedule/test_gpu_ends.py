"""Long rows on GPUs whose ends lie between multiples of 16 bytes, or inside of tiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_oracle import assert_function, cubins, kernels_of, on_gpu, scheduled
from harness import lowered

from lenz.codegen.triton import compile as compiler
from lenz.ir.kernel import For, Kernel, walk

BF16, F32 = torch.bfloat16, torch.float32


def loops(k: Kernel) -> list[str]:
    """The loops of a kernel, outer ones first: `p0b in 25 grid`."""
    return [f"{s.axis.name} {s.kind}" for s in walk(k.body) if isinstance(s, For)]


@pytest.mark.parametrize(
    ("rows", "n", "dtype"), [(9, 32777, BF16), (3, 40962, BF16), (2, 45057, F32), (2, 36861, F32)]
)
def test_parts_of_long_rows(rows: int, n: int, dtype: torch.dtype) -> None:
    x = torch.randn(rows, n).to(dtype)
    x[0, 0], x[0, -1], x[1, :] = 30, 31, -float("inf")
    s = assert_function(lambda x: torch.log_softmax(x, -1), x)
    assert loops(kernels_of(s)[0])[:4] == ["p0 grid", "p1 grid", "whole seq", "r0 lane"]


def test_parts_that_end_with_their_rows_have_no_tests() -> None:
    s = scheduled(on_gpu(lowered(lambda x: torch.log_softmax(x, -1), [torch.empty(3, 40960)])))
    assert "seq" not in " ".join(loops(kernels_of(s)[0]))


@pytest.mark.parametrize(
    ("fn", "loads", "stores"),
    [(lambda x: torch.softmax(x, -1), 1, 0)],
)
def test_odd_rows_are_moved_by_16_bytes(
    fn: Any, loads: int, stores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []

    class Entry:
        def search(self, text: str) -> Any:
            texts.append(text)
            return real.search(text)

    real = compiler.ENTRY
    monkeypatch.setattr(compiler, "ENTRY", Entry())
    cubins(scheduled(on_gpu(lowered(fn, [torch.empty(64, 50257, dtype=BF16)]))))
    assert texts[0].count("ld.global.v4") >= loads and texts[0].count("st.global.v4") >= stores
