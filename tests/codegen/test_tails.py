"""Partial vectors of every length: no byte outside of a buffer is touched.

Each buffer ends at a page that may not be touched, and then begins after one, so that a store or a
load which is too wide is a fault.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from lenz import ops
from lenz.ir.dtype import BF16, BOOL, F16, F32, F64, I8, I16, I32, I64, U8, U16, DType
from lenz.ir.expr import const, ref
from lenz.ir.interp_kernel import interp_kernel
from lenz.ir.kernel import For, Kernel, Param, Reduce, Store, TileConfig
from lenz.ir.tensor import axis
from lenz.machine.cpu.llvm.module import emit_module
from lenz.sym import ONE, ZERO, Sym, Var, prove_divides, sym
from lenz.sym.evaluate import evaluate
from lenz.target import Target
from tests.codegen.codegen_kernels import at
from tests.codegen.codegen_run import HASWELL, Guarded, compiled

TAILS = range(1, 16)
FORMS = ("forwards", "backwards", "apart", "pairs")
SIZE = Var("s0", 1, 1 << 20)
# (type that is loaded, type that is computed with, type that is stored)
CHAINS = (
    (BF16, F32, BF16), (F16, F32, F16), (F32, F32, BF16), (F64, F64, F32), (F32, F32, F64),
    (I64, I64, I32), (I64, I64, I16), (I64, I64, I8), (I32, I32, I16), (I32, I32, U8),
    (U8, I32, U8), (I8, I64, I8), (I16, I64, I16), (U16, I64, I32), (I32, I64, I32),
    (BOOL, BOOL, BOOL), (BOOL, I32, BOOL), (F32, F32, BOOL), (U8, F32, F16), (BF16, F64, BF16),
)  # fmt: skip


def kernel(number: int, n: Sym, chain: tuple[DType, DType, DType], form: str) -> Kernel:
    """out[i] = a[i] + 1 through a wider type, forwards, backwards, two apart, or two at a time."""
    source, middle, result = chain
    v = axis("v", n)
    step = 2 if form in ("apart", "pairs") else 1
    first: Sym = n - 1 - v.var if form == "backwards" else step * v.var
    stores: list[Store] = []
    for place in (first, first + 1) if form == "pairs" else (first,):
        x = at("a", place, source)
        x = ops.cast(x, middle) if source is not middle else x
        y = ops.eq(x, const(0, BOOL)) if middle is BOOL else ops.add(x, const(1, middle))
        y = ops.ne(y, const(0, middle)) if result is BOOL and middle is not BOOL else y
        y = ops.cast(y, result) if y.dtype is not result else y
        stores.append(Store("out", place, y))
    body = For(v, "vector", tuple(stores))
    size = step * (n - 1) + len(stores)
    params = (Param("a", source, size, "in"), Param("out", result, size, "inout"))
    return Kernel(f"tail_{number}", "pointwise", params, (*n.free_vars,), (body,))


def samples(n: int, dtype: DType) -> torch.Tensor:
    """Numbers of both signs, with bits set in the upper half of the elements."""
    x = torch.arange(n, dtype=torch.float64) * 37 - 90
    return (x % 2 == 0) if dtype is BOOL else x.abs().to(dtype.torch)


@pytest.mark.one_in(6)
@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("chain", CHAINS, ids=lambda c: "-".join(d.name for d in c))
def test_no_tail_touches_what_is_outside(chain: tuple[DType, DType, DType]) -> None:
    cases = list(itertools.product(FORMS, TAILS))
    kernels = [kernel(k, sym(n), chain, form) for k, (form, n) in enumerate(cases)]
    functions, library = compiled(kernels)
    for k in kernels:
        (n,) = {p.size.lo or 0 for p in k.params}
        buffers = {"a": samples(n, chain[0]), "out": torch.full((n,), 1, dtype=chain[2].torch)}
        wanted = {name: t.clone() for name, t in buffers.items()}
        interp_kernel(k, wanted, {})
        for at_end in (True, False):
            memory = {name: Guarded(t, at_end) for name, t in buffers.items()}
            functions[k.name](*[memory[p.name].address for p in k.params])
            assert torch.equal(memory["out"].tensor(), wanted["out"]), k.name
    del library


@pytest.mark.one_in(6)
@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("chain", CHAINS, ids=lambda c: "-".join(d.name for d in c))
def test_no_tail_of_unknown_length_touches_what_is_outside(
    chain: tuple[DType, DType, DType],
) -> None:
    kernels = [kernel(k, SIZE, chain, form) for k, form in enumerate(FORMS)]
    functions, library = compiled(kernels)
    for k, n in itertools.product(kernels, (*TAILS, 19, 36)):
        elements = evaluate(k.params[0].size, {SIZE: n})
        buffers = {
            "a": samples(elements, chain[0]),
            "out": torch.full((elements,), 1, dtype=chain[2].torch),
        }
        wanted = {name: t.clone() for name, t in buffers.items()}
        interp_kernel(k, wanted, {"s0": n})
        for at_end in (True, False):
            memory = {name: Guarded(t, at_end) for name, t in buffers.items()}
            functions[k.name](*[memory[p.name].address for p in k.params], n)
            assert torch.equal(memory["out"].tensor(), wanted["out"]), (k.name, n)
    del library


def test_constants_in_the_extent_are_seen() -> None:
    """A tail whose length is only known after arithmetic on constants takes the same way."""
    from lenz.machine.cpu.llvm.compile import host_target
    from lenz.machine.cpu.llvm.module import emit_module
    from lenz.sym import minimum

    b = axis("b", sym(2))
    v = axis("v", minimum(16, 17 - 16 * b.var))
    store = Store("out", 16 * b.var + v.var, ops.cast(at("a", 16 * b.var + v.var, I32), I16))
    body = For(b, "unroll", (For(v, "vector", (store,)),))
    params = (Param("a", I32, sym(17), "in"), Param("out", I16, sym(17), "out"))
    text = emit_module([Kernel("u_0", "pointwise", params, (), (body,))], host_target())
    assert "masked.store" not in text


@pytest.mark.usefixtures("target")
def test_rows_that_leave_one_element() -> None:
    """The rows of a bf16 map: a store that is too wide changes the row after it."""
    from tests.codegen.codegen_run import check

    for n in (17, 33, 65):
        i, v = axis("i", sym(3)), axis("v", sym(n))
        place = n * i.var + v.var
        x, y = (ops.cast(at("a", o, BF16), F32) for o in (place, n * i.var))
        store = Store("out", place, ops.cast(ops.mul(x, y), BF16))
        body = For(i, "seq", (For(v, "vector", (store,)),))
        params = (Param("a", BF16, sym(3 * n), "in"), Param("out", BF16, sym(3 * n), "out"))
        k = Kernel("rows_0", "pointwise", params, (), (body,))
        check(k, {"a": torch.randn(3 * n).bfloat16()})


@pytest.mark.parametrize(
    ("n", "whole"), ((sym(64), 4), (sym(63), 4 + 3), (sym(40), 4 + 1), (sym(9), 1), (SIZE, 4 + 1))
)
def test_only_the_last_vector_has_a_mask(n: Sym, whole: int) -> None:
    """`whole` is how many vectors the text loads without a mask: four at once, then the others."""
    v = axis("v", n)
    value, total = at("a", v.var), ref("r", F32)
    mapped = (For(v, "vector", (Store("out", v.var, ops.neg(value)),)),)
    summed = For(v, "vector", (Reduce("r", "sum", value, (v.var,)),)), Store("out", ZERO, total)
    for body, size in ((mapped, n), (summed, ONE)):
        params = (Param("a", F32, n, "in"), Param("out", F32, size, "out"))
        k = Kernel("k", "pointwise", params, (*n.free_vars,), body, (), TileConfig(unroll=4))
        text = emit_module([k], Target("cpu", "x86_64-unknown-linux-gnu", "haswell", HASWELL, 8))
        assert text.count("= load <8 x float>") == whole
        assert text.count("call <8 x float> @llvm.masked.load") == (not prove_divides(8, n))
        assert "masked.store" not in text


@pytest.mark.parametrize("features", (HASWELL, HASWELL + ",+avx512f"))
def test_tails_of_unknown_length_are_stored_in_halves_without_avx512(features: str) -> None:
    v = axis("v", SIZE)
    body = For(v, "vector", (Store("out", v.var, ops.neg(at("a", v.var))),))
    params = (Param("a", F32, SIZE, "in"), Param("out", F32, SIZE, "out"))
    k = Kernel("k", "pointwise", params, (SIZE,), (body,))
    text = emit_module([k], Target("cpu", "x86_64-unknown-linux-gnu", "haswell", features, 8))
    masked = features != HASWELL
    assert text.count("call void @llvm.masked.store") == masked
    assert [text.count(f"store <{n} x float>") for n in (4, 2)] == [not masked] * 2


@pytest.mark.diagonal(2)
@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("dtype", (BOOL, U8, BF16, F32, F64), ids=lambda d: d.name)
@pytest.mark.parametrize("step", (2, 3, 4, 5))
def test_steps_between_lanes(step: int, dtype: DType) -> None:
    """Lanes picked out of vectors: the last element is the last one of the buffer."""
    from tests.codegen.codegen_run import check
    from tests.codegen.test_loops import values

    kernels = []
    for n in (7, 16, 32, 83):
        v = axis("v", sym(n))
        size = step * (n - 1) + 1
        body = For(v, "vector", (Store("out", v.var, at("a", step * v.var, dtype)),))
        params = (Param("a", dtype, sym(size), "in"), Param("out", dtype, sym(n), "out"))
        k = Kernel("steps_0", "pointwise", params, (), (body,))
        check(k, {"a": values(size, dtype)})
        kernels.append(k)
    if step < 5:
        from lenz.machine.cpu.llvm.compile import host_target
        from lenz.machine.cpu.llvm.module import emit_module

        assert "gather" not in emit_module(kernels[1:3], host_target())


@pytest.mark.usefixtures("target")
def test_a_condition_of_an_outer_loop_does_not_replace_the_tail() -> None:
    """`torch.cat` along rows: full vectors and the tail stand under one mask, made outside."""
    from lenz.ir.dtype import I64
    from lenz.ir.expr import index, masked
    from tests.codegen.codegen_run import check

    for n in (18, 20, 33, 47):
        i, v = axis("i", sym(3)), axis("v", sym(n))
        cond = ops.lt(index(i.var, I64), const(2, I64))
        value = masked(cond, at("a", n * i.var + v.var, F32), const(0.0, F32))
        body = For(i, "seq", (For(v, "vector", (Store("out", 3 * v.var + i.var, value),)),))
        params = (Param("a", F32, sym(2 * n), "in"), Param("out", F32, sym(3 * n), "out"))
        check(Kernel("cat_0", "pointwise", params, (), (body,)), {"a": torch.randn(2 * n)})
