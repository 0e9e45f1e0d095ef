"""10,000 random integer expressions: every printer's text has the value that Python gives.

Python source, the text of a Sym and of the IR, LLVM (vectors, with a partial one, and one element
at a time), Triton, and the interpreter that is the oracle of all other tests.
"""

from __future__ import annotations

import pytest
import torch

from lenz.codegen.llvm.compile import compile_module, host_target, link
from lenz.codegen.llvm.module import emit_module
from lenz.ir.interp_kernel import interp_kernel
from lenz.ir.kernel import LoopKind
from lenz.ir.printer import show
from lenz.ir.reader import read
from lenz.runtime import loader, threads
from lenz.sym import Var, read_sym, substitute, to_python
from lenz.sym import show as show_sym
from tests.fuzz.indices import LANES, cases, compare, kernel, points_of, table
from tests.sym.test_sym_properties import VARS

BATCH, BATCHES = 60, 4  # `make fuzz` takes more of them
SCOPE = {v.name: v for v in VARS}
RENAMED = {v: Var("v_" + v.name.strip("@").replace(".", "_"), v.lo, v.hi, v.below) for v in VARS}


@pytest.mark.parametrize("batch", range(BATCHES))
def test_texts_and_oracle(batch: int) -> None:
    found, points = cases(batch, BATCH), points_of(batch)
    for c in found:
        if c.sym is not None:
            assert read_sym(show_sym(c.sym), SCOPE) is c.sym
            code = compile(to_python(substitute(c.sym, dict(RENAMED))), "sym", "eval")
            got = [eval(code, {}, {RENAMED[v].name: x for v, x in at.items()}) for at in points]
            compare([c], points, torch.tensor(got))
    k = kernel(found, "vector")
    assert read(show(k)) == k
    y = torch.zeros(BATCH * LANES, dtype=torch.int64)
    interp_kernel(k, {"x": table(points), "y": y}, {})
    assert compare(found, points, y) > BATCH * LANES // 2


@pytest.mark.parametrize("kind", ["vector", "seq"])
@pytest.mark.parametrize("batch", range(BATCHES))
def test_llvm(batch: int, kind: LoopKind) -> None:
    found, points = cases(batch, BATCH), points_of(batch)
    k = kernel(found, kind)
    target = host_target()
    library = link(compile_module(emit_module([k], target), target), [k.name], threads.imports())
    x, y = table(points), torch.zeros(BATCH * LANES, dtype=torch.int64)
    loader.function(library.addresses[k.name], 2, 0)(x.data_ptr(), y.data_ptr())
    assert compare(found, points, y) > BATCH * LANES // 2


@pytest.mark.parametrize("batch", range(BATCHES))
def test_triton(batch: int) -> None:
    pytest.importorskip("triton")
    from gpu_oracle import interpreted

    found, points = cases(batch, BATCH), points_of(batch)
    y = torch.zeros(BATCH * LANES, dtype=torch.int64)
    interpreted(kernel(found, "lane"), {"x": table(points), "y": y}, {})
    assert compare(found, points, y) > BATCH * LANES // 2
