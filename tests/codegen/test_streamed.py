"""Stores of large results bypass the caches, where they fill whole cache lines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from lenz import ops
from lenz.ir.dtype import BF16, BOOL, F32, F64, I8, I64, DType
from lenz.machine.cpu.llvm import module
from lenz.machine.cpu.llvm.compile import host_target
from lenz.machine.cpu.llvm.module import emit_module
from tests.codegen.codegen_kernels import at, pointwise
from tests.codegen.codegen_run import compiled, targets

STORE = "!nontemporal"
X86 = host_target().triple.startswith("x86_64")
N = 3 * 4096 + 64 * 5


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every result of a page or more counts as large."""
    monkeypatch.setattr(module, "LARGE", 4096)
    yield


def text_of(n: int, block: int = 4096) -> str:
    """The text of -x over n elements."""
    return emit_module([pointwise(ops.neg, n, (F32,), F32, block)], host_target())


@pytest.mark.skipif(not X86, reason="stores are streamed on x86-64 alone")
def test_which_stores_are_streamed() -> None:
    assert STORE in text_of(N)
    assert STORE not in text_of(1023), "a result of less than a page"
    assert STORE not in text_of(N, block=72), "blocks that end within cache lines"
    text = text_of(N)
    assert text.count("define internal void @pointwise_0.p0.streamed") == 1
    assert text.count("fence seq_cst") == 1, "before other threads read"


@pytest.mark.skipif(not X86, reason="stores are streamed on x86-64 alone")
def test_what_a_kernel_reads_or_updates_is_not_streamed() -> None:
    k = pointwise(ops.neg, N, (F32,), F32)
    a, out = k.params
    updated = replace(k, params=(a, replace(out, mode="inout")))
    assert STORE not in emit_module([updated], host_target())
    again = pointwise(lambda x: x + at("out", 0), N, (F32,), F32)
    assert STORE not in emit_module([again], host_target())


@pytest.mark.parametrize("name", targets())
@pytest.mark.parametrize("offset", [0, 1, 8, 16])
@pytest.mark.parametrize("dtype", [F32, F64, BF16, I64, I8, BOOL], ids=str)
def test_results_at_any_address(dtype: DType, offset: int, name: str) -> None:
    """A result that starts within a cache line takes the usual stores."""
    f = ops.logical_not if dtype is BOOL else ops.neg
    wide = F32 if dtype is BF16 else dtype  # in which halves are computed
    k = pointwise(lambda e: ops.cast(f(ops.cast(e, wide)), dtype), N, (dtype,), dtype)
    functions, library = compiled([k], targets()[name])
    x = torch.randn(N + offset) * 9
    x = (x > 0) if dtype is BOOL else x.to(dtype.torch)
    out = torch.zeros_like(x)
    source, into = x[offset:], out[offset:]
    functions[k.name](source.data_ptr(), into.data_ptr())
    assert torch.equal(into, ~source if dtype is BOOL else -source)
    assert not out[:offset].any()
    del library


def test_arguments_that_are_written_may_start_anywhere() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        y.copy_(x * 2)
        return x + 1

    run = torch.compile(fn, backend="lenz", dynamic=False)
    for offset in (0, 1):
        x, memory = torch.randn(N), torch.zeros(N + 1)
        y = memory[offset : N + offset]
        torch.testing.assert_close(run(x, y), x + 1)
        torch.testing.assert_close(y, x * 2)
