"""Sorts of rows: the network of vectors on every target, and Triton's tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lenz.ir.graph import Extern
from lenz.ir.kernel import Kernel
from lenz.ir.reader import read
from lenz.ir.verify import verify
from tests.codegen.codegen_run import check
from tests.gpu_oracle import TINY, assert_function, cubins, kinds_of, texts_of

G = torch.Generator().manual_seed(0)


def rows(n: int, keep: int, dtype: str, size: int, loop: str = "vector") -> Kernel:
    """Three rows of n keys in order, of which some are kept."""
    few = "" if keep == n else f", keep {keep}"
    k = read(
        f"""kernel @k sort (%x: in {dtype}[{3 * n}], %y: out {dtype}[{3 * keep}]) {{
          local %l0: {dtype}[{size}]
          for p0 in 3 : parallel {{
            for r0 in {n} : {loop} {{ store(%l0, [r0], load(%x, [{n}*p0 + r0])) }}
            sort(%l0, {n}{few})
            for k0 in {keep} : {loop} {{ store(%y, [{keep}*p0 + k0], load(%l0, [k0])) }} }} }}"""
    )
    assert isinstance(k, Kernel)
    verify(k)
    return k


def keys(n: int, dtype: str, repeats: bool) -> Tensor:
    kind = torch.int64 if dtype == "i64" else torch.int32
    low, high = (-3, 4) if repeats else (torch.iinfo(kind).min, torch.iinfo(kind).max)
    x = torch.randint(low, high, (n,), dtype=kind, generator=G)
    if not repeats:
        x[: n // 8 + 1] = torch.iinfo(kind).max  # as great as what fills a row up
    return x


@pytest.mark.one_in(5)
@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("dtype", ("i32", "i64"))
@pytest.mark.parametrize("n", (1, 2, 3, 4, 7, 8, 9, 16, 31, 32, 33, 63, 64, 65, 200, 256, 1000))
def test_rows_on_vectors(n: int, dtype: str) -> None:
    size = 1 << (n - 1).bit_length()
    for repeats in (False, True):
        check(rows(n, n, dtype, size), {"x": keys(3 * n, dtype, repeats)})
    check(rows(n, max(n // 3, 1), dtype, size, "seq"), {"x": keys(3 * n, dtype, True)})


@pytest.mark.usefixtures("oldest")
@pytest.mark.parametrize("dtype", ("i32", "i64"))
def test_rows_without_avx(dtype: str) -> None:
    for n in (3, 8, 17, 100, 300):
        size = 1 << (n - 1).bit_length()
        check(rows(n, n, dtype, size), {"x": keys(3 * n, dtype, False)})


def test_the_longest_rows() -> None:
    check(rows(4096, 4096, "i64", 4096), {"x": keys(3 * 4096, "i64", False)})
    check(rows(4001, 5, "i32", 4096), {"x": keys(3 * 4001, "i32", True)})


@pytest.mark.usefixtures("target")
def test_rows_of_a_size_that_is_only_bounded() -> None:
    k = read(
        """kernel @k sort (%x: in i64[s0], %y: out i64[s0]; s0: 0..100) {
          local %l0: i64[128]
          for r0 in s0 : vector { store(%l0, [r0], load(%x, [r0])) }
          sort(%l0, s0)
          for r0 in s0 : vector { store(%y, [r0], load(%l0, [r0])) } }"""
    )
    assert isinstance(k, Kernel)
    verify(k)
    for n in (0, 1, 31, 32, 77, 100):
        check(k, {"x": keys(n, "i64", False)}, {"s0": n})


X = (torch.randn(10, 50, generator=G) * 4).round()
X[0, :9] = torch.tensor([float("nan"), 0.0, -0.0, float("inf"), -float("inf"), -0.0, 1, 1, 1])
CASES: dict[str, tuple[Callable[..., Any], Tensor]] = {
    "sort": (lambda x: x.sort(stable=True), X),
    "columns": (lambda x: x.sort(0, descending=True), X),
    "middle": (lambda x: x.sort(1), X.view(2, 25, 10)),
    "halves": (lambda x: x.sort(1), X.bfloat16()),
    "one row": (lambda x: x.sort()[0] + 1, X[0]),
    "bytes": (lambda x: x.sort(1), X.nan_to_num().to(torch.int8)),
    "topk": (lambda x: x.topk(5), X),
    "topk of columns": (lambda x: x.topk(3, 0, largest=False), X.bfloat16()),
    "the greatest": (lambda x: x.topk(1), X),
    "kthvalue": (lambda x: x.kthvalue(3, 0), X),
    "median": (lambda x: (*x.median(1), *x.nanmedian(1)), X),
    "median of all": (lambda x: x.median(), X),
    "behind a softmax": (lambda x: x.nan_to_num(posinf=9, neginf=-9).softmax(1).topk(4), X),
    "in place": (lambda x: x.copy_(x.sort(1)[0]), X),
    "two directions": (lambda x: x.sort(1, descending=True)[0] + x.sort(1)[0], X),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", CASES)
def test_a_sort_is_one_kernel_of_a_gpu_and_right(name: str) -> None:
    fn, x = CASES[name]
    s = assert_function(fn, x)
    assert not [n.op for n in s.steps if isinstance(n, Extern)]
    assert kinds_of(s) == ["reduction" if name == "the greatest" else "sort"], s.rejected
    assert all(b.spills == 0 for b in cubins(s))
    assert_function(fn, x, tiles=TINY)


def test_a_gpu_keeps_few_elements_without_sorting_the_others() -> None:
    (text,) = texts_of(assert_function(lambda x: x.topk(5), torch.randn(3, 300)))
    assert "tl.topk(" in text and "tl.arange(0, 8)" in text


def test_long_rows_take_no_local_memory_of_a_gpu() -> None:
    s = assert_function(lambda x: x.topk(9), torch.randn(2, 2100).bfloat16())
    assert kinds_of(s) == ["sort"] and [b.spills for b in cubins(s)] == [0]


def test_a_gpu_leaves_sorts_of_long_rows_to_eager() -> None:
    for n, left in ((1024, 0), (1025, 1)):
        s = assert_function(lambda x: x.sort(1), torch.randn(2, n).bfloat16())
        assert len([x for x in s.steps if isinstance(x, Extern)]) == left
    for n, left in ((1024, 0), (1025, 1)):
        for f in (lambda x: x.kthvalue(9, 1), lambda x: x.median(1), lambda x: x.nanmedian(1)):
            s = assert_function(f, torch.randn(2, n))
            assert len([x for x in s.steps if isinstance(x, Extern)]) == left
    for k, left in ((16, 0), (17, 1)):
        s = assert_function(lambda x, k=k: x.topk(k), torch.randn(1, 2049))
        assert len([x for x in s.steps if isinstance(x, Extern)]) == left
