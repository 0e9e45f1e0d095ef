"""Text to object to address: errors, repeatability, and calls from Python."""

from __future__ import annotations

import ctypes

import pytest
import torch

from lenz import ops
from lenz.errors import InternalError
from lenz.ir.dtype import F32
from lenz.ir.kernel import For, Kernel, Let, Param, Store, TileConfig
from lenz.ir.tensor import axis
from lenz.machine.cpu.llvm.compile import compile_module, host_target, link
from lenz.machine.cpu.llvm.module import emit_module
from lenz.runtime import threads
from lenz.sym import sym
from tests.codegen.codegen_kernels import at, pointwise
from tests.codegen.codegen_run import compiled


def test_equal_text_gives_equal_objects() -> None:
    text = emit_module([pointwise(ops.exp, 100, (F32,), F32)], host_target())
    assert compile_module(text) == compile_module(text)


def test_text_that_llvm_refuses_is_a_bug() -> None:
    with pytest.raises(InternalError, match="LLVM does not accept"):
        compile_module("define void @f( {")
    early = "define i64 @f(i64 %a) {\n %b = add i64 %c, 1\n %c = add i64 %a, 1\n ret i64 %b\n}\n"
    with pytest.raises(InternalError, match="does not dominate"):
        compile_module(early)


def test_a_missing_import_is_refused() -> None:
    text = emit_module([pointwise(ops.exp, 100000, (F32,), F32)], host_target())
    with pytest.raises(InternalError, match="does not link"):
        link(compile_module(text), ["pointwise_0"], {})


def test_every_import_that_torch_offers_is_found() -> None:
    found = threads.imports()
    assert found["torch_parallel_for"] and found["memset"] and found["lgammaf"]


def test_several_kernels_in_one_module() -> None:
    v = axis("v", sym(20))
    params = (Param("a", F32, sym(20), "in"), Param("out", F32, sym(20), "out"))
    kernels = [
        Kernel(name, "pointwise", params, (), (For(v, "vector", (Store("out", v.var, value),)),))
        for name, value in (("first", ops.sin(at("a", v.var))), ("second", ops.neg(at("a", v.var))))
    ]
    functions, library = compiled(kernels)
    a, out = torch.randn(20), torch.empty(20)
    for name, want in (("first", torch.sin(a)), ("second", -a)):
        functions[name](a.data_ptr(), out.data_ptr())
        torch.testing.assert_close(out, want)
    del library


def test_a_wrong_argument_is_refused() -> None:
    functions, library = compiled([pointwise(ops.neg, 10, (F32,), F32)])
    with pytest.raises(ctypes.ArgumentError):
        functions["pointwise_0"](1.5, 2.5)
    del library


def test_threads_share_the_work() -> None:
    n = 300_000
    k = pointwise(ops.neg, n, (F32,), F32, tile=TileConfig(4, 2, 4))
    functions, library = compiled([k])
    a, out = torch.randn(n), torch.empty(n)
    functions[k.name](a.data_ptr(), out.data_ptr())
    assert torch.equal(out, -a)
    del library


def test_one_name_for_two_values_is_refused() -> None:
    v = axis("v", sym(20))
    lets = tuple(Let("t", at("a", v.var + d)) for d in (0, 1))
    body = (For(v, "vector", (*lets, Store("out", v.var, at("a", v.var)))),)
    params = (Param("a", F32, sym(21), "in"), Param("out", F32, sym(20), "out"))
    with pytest.raises(InternalError, match="defined twice"):
        emit_module([Kernel("twice_0", "pointwise", params, (), body)], host_target())
