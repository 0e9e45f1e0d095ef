"""Products of matrices with few terms, rows or columns are loops, others calls; both as eager."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lenz.context import Context
from lenz.ir.graph import Extern, Reduction
from lenz.lower import lower
from lenz.options import Options
from lenz.target import Target
from tests.cuda import Fake, cuda_program
from tests.gpu_oracle import assert_function
from tests.lower.harness import check, lowered

FLOATS = (torch.float32, torch.float64)
# Batch, m, n, k; one of one column, one of one term.
FORMS = [
    ((), 300, 5, 3), ((), 256, 4, 4), ((), 50, 64, 2), ((), 1024, 1, 4), ((), 64, 64, 1),
    ((160,), 3, 3, 3),
]  # fmt: skip


def matrices(batch: tuple[int, ...], m: int, n: int, k: int, dtype: torch.dtype) -> list[Tensor]:
    """The two factors, then what is added to rows, and to all of it."""
    shapes = [(*batch, m, k), (*batch, k, n), (n,), (*batch, m, n)]
    return [torch.randn(s).to(dtype) for s in shapes]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_few_terms(form: tuple[tuple[int, ...], int, int, int], dtype: torch.dtype) -> None:
    x, y, row, whole = matrices(*form, dtype)
    product, added = (torch.bmm, torch.baddbmm) if form[0] else (torch.mm, torch.addmm)
    check(product, x, y)
    check(product, x.mT.contiguous().mT, y)
    for c in (whole, row):
        check(lambda c, x, y: added(c, x, y), c, x, y)
        check(lambda c, x, y: added(c, x, y, beta=0.5, alpha=-2), c, x, y)


def test_nan_is_ignored_with_a_beta_of_zero() -> None:
    x, y, row, _ = matrices((), 700, 3, 2, torch.float32)
    check(lambda c, x, y: torch.addmm(c, x, y, beta=0), row * float("nan"), x, y)


def test_the_number_of_rows_may_be_symbolic() -> None:
    x, _, row, _ = matrices((), 9, 3, 4, torch.float32)
    check(lambda c, x: torch.addmm(c, x, torch.ones(4, 3)), row, x, dynamic=True)


@pytest.mark.parametrize(
    "form",
    [((), 900, 5, 5), ((), 300, 300, 4), ((), 5, 5, 5), ((), 3, 3, 900), ((), 900, 3, 0)],
    ids=str,
)
def test_others_are_calls(form: tuple[tuple[int, ...], int, int, int]) -> None:
    x, y, row, _ = matrices(*form, torch.float32)
    for g in (lowered(torch.mm, [x, y]), lowered(torch.addmm, [row, x, y])):
        assert [n.op.split(".")[1] for n in g.nodes if isinstance(n, Extern)] in (["mm"], ["addmm"])


def test_weights_with_distant_columns_are_for_a_library() -> None:
    """A vector of columns would be gathered: 20,000 x 4 by 4 x 16 took 2.7 times as long."""
    x, y, *_ = matrices((), 256, 16, 4, torch.float32)
    (call,) = lowered(torch.mm, [x, y.mT.contiguous().mT]).nodes
    assert isinstance(call, Extern)


def test_types_without_such_loops_are_calls() -> None:
    for dtype in (torch.bfloat16, torch.int64, torch.complex64):
        x, y, *_ = matrices((), 400, 4, 4, dtype)
        (call,) = lowered(torch.mm, [x, y]).nodes
        assert isinstance(call, Extern)


@pytest.mark.parametrize(
    ("m", "n", "k", "kind"),
    [(64, 8, 8, "map"), (64, 300, 4, "map"), (8, 8, 500, "sum"), (64, 9, 8, "call"),
     (4, 9, 500, "call"), (8, 8, 8, "call")],
)  # fmt: skip
def test_a_gpu_has_more_of_them_in_halves_too(m: int, n: int, k: int, kind: str) -> None:
    p = cuda_program(torch.mm, Fake((m, k)), Fake((k, n)))
    (node,) = lower(p, Context(Options(), Target("cpu"))).nodes
    found = "call" if isinstance(node, Extern) else "map"
    assert kind == ("sum" if isinstance(node, Reduction) else found)


LOOPS_OF_GPUS = [
    ((), 80, 8, 7), ((), 20, 70, 3), ((), 5, 8, 200), ((9,), 4, 3, 60), ((200,), 3, 3, 3),
]  # fmt: skip


@pytest.mark.parametrize("form", LOOPS_OF_GPUS, ids=str)
def test_kernels_of_a_gpu(form: tuple[tuple[int, ...], int, int, int]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x, y, row, _ = matrices(*form, dtype)
        product, added = (torch.bmm, torch.baddbmm) if form[0] else (torch.mm, torch.addmm)
        for w in (y, y.mT.contiguous().mT):
            plain = assert_function(product, x, w)
            fused = assert_function(lambda c, x, w: added(c, x, w, alpha=2).relu(), row, x, w)
            assert not any(isinstance(s, Extern) for s in (*plain.steps, *fused.steps))
