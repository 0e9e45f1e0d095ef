"""Math functions of whole vectors from Sleef, which libtorch exports: names, errors, extremes."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from lenz import ops
from lenz.ir.dtype import F64
from lenz.machine.cpu import loader
from lenz.machine.cpu.llvm.compile import compile_module, host_target, link
from lenz.machine.cpu.llvm.library import SLEEF
from lenz.machine.cpu.llvm.module import emit_module
from lenz.runtime import threads
from tests.codegen.codegen_kernels import pointwise

HAS_SLEEF = any(host_target().has(f) for f in ("avx2", "avx512f")) and host_target().has("fma")
VALUES = [
    *(0.0, 5e-324, 2.2e-308, 1e-310, 1e-200, 1e-16, 1e-8, 0.1, 0.5, 1 - 1e-10, 1.0, 1 + 1e-10),
    *(1.5, 2.0, 2.5, 3.0, 7.3, 20.0, 26.5, 88.0, 171.5, 300.0, 700.0, 709.7, 709.8, 710.5, 745.0),
    *(746.0, 1e5, 1e8, 1e15, 1e22, 1e100, 1.3e154, 2e154, 1e200, 1e300, 1.79e308, math.inf),
]
BOTH = torch.tensor([math.nan, *VALUES, *[-v for v in VALUES]], dtype=torch.float64)  # has a tail
TWO = ("atan2", "hypot", "nextafter", "pow")
NAMES = sorted({*SLEEF, "asinh", "acosh", "sinh", "cosh"})


@pytest.mark.skipif(not HAS_SLEEF, reason="a CPU without vectors of Sleef")
def test_libtorch_exports_every_function_that_kernels_may_call() -> None:
    family = "avx512f" if host_target().has("avx512f") else "avx2"
    lanes = {"f": 16, "d": 8} if family == "avx512f" else {"f": 8, "d": 4}
    names = [f"Sleef_{n}{t}{k}_{u}{family}" for n, u in SLEEF.items() for t, k in lanes.items()]
    found = threads.imports(" ".join(names).encode())
    assert [n for n in names if n not in found] == []


def test_an_object_serves_without_sleef() -> None:
    k = pointwise(ops.exp, 1003, (F64,), F64)
    code = compile_module(emit_module([k], host_target()))
    x = torch.linspace(-700, 700, 1003, dtype=torch.float64)
    for imports in (threads.imports(), threads.imports(code)):
        library, out = link(code, [k.name], imports), torch.empty_like(x)
        loader.function(library.addresses[k.name], 2, 0)(x.data_ptr(), out.data_ptr())
        torch.testing.assert_close(out, x.exp(), rtol=5e-16, atol=0)
    more = {*threads.imports(code)} - {*threads.imports()}
    assert [n.startswith("Sleef_exp") for n in more] == [True] * HAS_SLEEF


def _or_inf(fn: Callable[[float], float], x: float) -> float:
    try:
        return fn(x)
    except OverflowError:
        return fn(math.copysign(math.inf, x))


@pytest.mark.parametrize("name", NAMES)
def test_extremes_are_those_of_eager(name: str) -> None:
    fn = getattr(torch, name)
    two = [t.reshape(-1) for t in torch.meshgrid(BOTH, BOTH, indexing="ij")]
    args = two if name in TWO else [BOTH]
    want, got = fn(*args), torch.compile(fn, backend="lenz", dynamic=False)(*args)
    if name in ("sinh", "cosh"):  # eager's are infinite too early, but for the last elements
        want = torch.tensor(
            [_or_inf(getattr(math, name), x) for x in BOTH.tolist()], dtype=torch.float64
        )
    near = (got - want).abs() <= 4 * 2.0**-52 * want.abs() + 1e-322
    zeros = (want == 0) & (got == 0)
    right = (got == want) | (got.isnan() & want.isnan()) | near
    right &= ~zeros | (got.signbit() == want.signbit())
    wrong = [t[~right].tolist()[:5] for t in (*args, got, want)]
    assert not wrong[0], f"arguments, result, eager's result: {wrong}"
