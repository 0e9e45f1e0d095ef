"""Every op of the table compiled, for vectors and for scalars, against eager on its own domain."""

from __future__ import annotations

import pytest
import torch

from lenz.ir.expr import expr
from lenz.ir.kernel import For, Kernel, Param, Store, TileConfig
from lenz.ir.tensor import axis
from lenz.sym import Sym, sym
from tests.codegen.codegen_kernels import at
from tests.codegen.codegen_run import compiled
from tests.ops.cases import CASES, Case
from tests.ops.test_forms import check

OPS = list(dict.fromkeys(c.op.name for c in CASES))
CHECKED = 200  # elements that the scalar form computes


def kernel(case: Case, number: int, count: int) -> Kernel:
    """out = op(x0, ...) by vectors; few = the same of the last elements, one by one."""
    v, i = axis("v", sym(count)), axis("i", sym(CHECKED))
    dtype = case.op.dtype(case.dtypes, case.attrs)

    def value(offset: Sym):  # type: ignore[no-untyped-def]
        xs = [at(f"x{k}", offset, d) for k, d in enumerate(case.dtypes)]
        return expr(case.op, *xs, attrs=case.attrs)

    body = (
        For(v, "vector", (Store("out", v.var, value(v.var)),)),
        For(i, "seq", (Store("few", i.var, value(i.var + (count - CHECKED))),)),
    )
    params = [Param(f"x{k}", d, sym(count), "in") for k, d in enumerate(case.dtypes)]
    params += [Param("out", dtype, sym(count), "out"), Param("few", dtype, sym(CHECKED), "out")]
    return Kernel(f"op_{number}", "pointwise", tuple(params), (), body, tile=TileConfig(1, 1, 1))


@pytest.mark.usefixtures("oldest")
@pytest.mark.parametrize("name", ("cast", "narrow", "exp", "div_floor", "floor", "fma"))
def test_op_without_wide_vectors(name: str) -> None:
    run_op(name)


@pytest.mark.diagonal(2)
@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("name", OPS)
def test_op(name: str) -> None:
    run_op(name)


def run_op(name: str) -> None:
    """Compile and run an op for all types it takes."""
    cases = [c for c in CASES if c.op.name == name]
    samples = [c.samples(1000) for c in cases]
    kernels = [
        kernel(c, n, len(xs[0])) for n, (c, xs) in enumerate(zip(cases, samples, strict=True))
    ]
    functions, library = compiled(kernels)
    for case, xs, k in zip(cases, samples, kernels, strict=True):
        dtype = case.op.dtype(case.dtypes, case.attrs).torch
        out, few = torch.empty(len(xs[0]), dtype=dtype), torch.empty(CHECKED, dtype=dtype)
        functions[k.name](*[x.data_ptr() for x in xs], out.data_ptr(), few.data_ptr())
        for got, operands in ((out, xs), (few, tuple(x[-CHECKED:] for x in xs))):
            if name == "or_libm":  # the C library's own error, below one ulp
                want = case.op.eager(*operands, *case.attrs)  # type: ignore[misc]
                torch.testing.assert_close(got, want, rtol=2.5e-7, atol=0, equal_nan=True)
            else:
                check(case, got, operands)
    del library
