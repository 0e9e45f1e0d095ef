"""Triton kernels that reduce: every form, kind and type, with NaN, infinities, ties and empty rows.

A form is a shape and the dimensions that are reduced. With tiny tiles each of them also runs as a
loop of the text over parts of a row, the last of which is not full.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from lenz.machine.cuda.shape import Shape
from tests.gpu_oracle import TINY, assert_function, cubins, kinds_of, texts_of

pytest.importorskip("triton")

INF, NAN = float("inf"), float("nan")
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
FORMS: dict[str, tuple[tuple[int, ...], tuple[int, ...], str]] = {
    "a row": ((1, 37), (1,), "reduction"),
    "rows that share a program": ((20, 16), (1,), "reduction"),
    "rows that fill their tile": ((5, 128), (1,), "reduction"),
    "rows of one": ((40, 1), (1,), "pointwise"),
    "columns": ((21, 20), (0,), "outer_reduction"),
    "more columns than lanes": ((19, 36), (0,), "outer_reduction"),
    "the middle": ((2, 18, 12), (1,), "outer_reduction"),
    "rows and columns": ((2, 6, 3, 4), (1, 3), "reduction"),
    "first and last": ((6, 3, 5), (0, 2), "reduction"),
    "all": ((7, 9), (0, 1), "reduction"),
    "no elements": ((3, 0), (1,), "reduction"),
    "no rows": ((0, 30), (1,), "pointwise"),  # nothing to reduce, and nothing to store
}
Fn = Callable[..., Any]


def functions(dims: tuple[int, ...], dtype: torch.dtype, empty: bool) -> dict[str, Fn]:
    """The reductions over the dimensions that torch has for the type."""
    found: dict[str, Fn] = {
        "sum": lambda x: x.sum(dims),
        "any": lambda x: torch.any(x, dims),
        "all": lambda x: torch.all(x, dims),
    }
    if not empty:
        found |= {"amax": lambda x: x.amax(dims), "amin": lambda x: x.amin(dims)}
    if len(dims) == 1:
        found["prod"] = lambda x: x.prod(dims[0])
        if dtype is not torch.bool and not empty:
            found["argmax"] = lambda x: x.argmax(dims[0])
            found["argmin"] = lambda x: x.argmin(dims[0])
    return found


def numbers(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Small whole numbers with many ties, of which sums and products are exact in any order."""
    g = torch.Generator().manual_seed(sum(shape))
    low = 0 if dtype in (torch.uint8, torch.bool) else -2
    return torch.randint(low, 3, shape, generator=g).to(dtype)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str, all_kernels: bool) -> None:
    shape, dims, kind = FORMS[form]
    dtypes = FLOATS + WHOLE
    for dtype in dtypes if all_kernels else random.Random(form).sample(dtypes, 4):
        x = numbers(dtype, *shape)
        chosen = functions(dims, dtype, x.numel() == 0)
        s = assert_function(lambda x, fs=chosen: [f(x) for f in fs.values()], x)
        assert set(kinds_of(s)) == {kind}
        assert not all_kernels or all(b.code for b in cubins(s))
        assert_function(lambda x, fs=chosen: [f(x) for f in fs.values()], x, tiles=TINY)


def rows(dtype: torch.dtype, n: int) -> torch.Tensor:
    """Nine rows with what is special about floats."""
    x = numbers(dtype, 9, n)
    x[0], x[1], x[2], x[6] = -INF, INF, NAN, 2
    x[3, n // 2], x[4, n // 3], x[5, n - 1] = NAN, INF, -INF
    x[7, n // 2 :] = NAN
    x[8] = -INF
    x[8, n - 1] = NAN
    return x


SPECIAL: dict[str, Callable[[torch.Tensor, int], Any]] = {
    "sum": lambda x, d: x.sum(d),
    "prod": lambda x, d: x.prod(d),
    "amax": lambda x, d: (x.amax(d), x.amin(d)),
    "argmax": lambda x, d: (x.argmax(d), x.argmin(d)),
    "max": lambda x, d: (*x.max(d), *x.min(d)),
    "softmax": lambda x, d: x.softmax(d),
    "log_softmax": lambda x, d: x.log_softmax(d),
    "logsumexp": lambda x, d: x.logsumexp(d),
    "all": lambda x, d: (x.argmax(), x.max(), x.isnan().any(d)),
}


@pytest.mark.diagonal(2)
@pytest.mark.parametrize("n,tiles", [(64, None), (11, TINY)], ids=["a tile", "a loop"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_special_values(dtype: torch.dtype, n: int, tiles: Any, all_kernels: bool) -> None:
    for k, f in enumerate(SPECIAL.values()):
        for d in (0, 1):
            if all_kernels or (k + d + n + FLOATS.index(dtype)) % 2 == 0:
                x = rows(dtype, n) if d else rows(dtype, n).t().contiguous()
                assert_function(lambda x, f=f, d=d: f(x, d), x, tiles=tiles)


def neutral() -> Iterator[torch.Tensor]:
    """Rows, longer than a tile, of nothing but what max starts from."""
    for dtype in (*FLOATS, *WHOLE[:-1]):
        low = -INF if dtype.is_floating_point else torch.iinfo(dtype).min
        yield torch.full((2, 11), low, dtype=dtype)


def test_of_a_row_of_the_least_value_the_first_one_wins() -> None:
    for x in neutral():
        assert_function(lambda x: (x.argmax(1), x.max(1), x.argmax()), x, tiles=TINY)
        if x.is_floating_point():
            assert_function(lambda x: x.argmin(1), -x, tiles=TINY)


def test_places_of_strided_rows() -> None:
    """Any axis may be cut; lanes past its end hold what max starts from."""

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x[:, ::2].argmax(), x[::2].t().argmin(), x[None, :, 1::3].argmin()

    for x in (numbers(torch.float32, 21, 12), torch.full((21, 12), -INF), torch.zeros(3, 37)):
        for n in (0, 5):
            x[-2 * n :, -2 * n :] = NAN if n else x[0, 0]
            for tiles in (None, TINY):
                assert_function(fn, x, tiles=tiles)
                s = assert_function(fn, x, dynamic=True, tiles=tiles)
    assert "r1 = tl.arange(0, 8)" in texts_of(s)[0]


def test_lanes_of_places_run_along_rows() -> None:
    """Of a matrix of symbolic sizes that no tile holds, lanes read neighbours."""
    x = numbers(torch.float32, 140, 500)  # about the smallest that is split
    s = assert_function(lambda x: x.argmax(), x, dynamic=True, tiles=replace(TINY, chunk=128))
    assert kinds_of(s) == ["reduction"] * 2
    assert "r1 = tl.arange" in texts_of(s)[0]


def test_places_of_strided_rows_without_lanes() -> None:
    """A position starts as the number 0, and is one of 64 bits if a size may be large."""
    for dtype in (torch.float32, torch.int64):
        x = numbers(dtype, 5, 6)
        fn = lambda x: (x[:, ::2].argmax(), x[::2].t().argmin())
        s = assert_function(fn, x, dynamic=True, tiles=Shape(chunk=1, row=1, rows=1))
        assert all(b.code for b in cubins(s))


LONG: dict[str, Callable[..., Any]] = {
    "sum": lambda x: x.sum(1),
    "amax": lambda x: (x.amax(1), x.amin(1)),
    "argmax": lambda x: (x.argmax(1), x.argmin(1)),
    "var": lambda x: x.var(1),
}


@pytest.mark.parametrize("n", [32768, 33000])
@pytest.mark.parametrize("name", LONG)
def test_rows_are_held_whole_up_to_32768_elements(name: str, n: int) -> None:
    x = numbers(torch.float32, 2, n)
    x[0, 17], x[0, n - 5], x[1, n - 1] = 7, 7, 8
    s = assert_function(LONG[name], x, split=False)
    has_loop = any(" in tl.range(" in text for text in texts_of(s))
    longest = 16384 if name == "argmax" else 32768
    assert has_loop == (n > longest), "the text has a loop over parts of a row, or not"


SPLIT = ((70_000,), (300, 200), (3, 9000), (9000, 7), (2, 3, 9000))


@pytest.mark.parametrize("shape", SPLIT, ids=str)
def test_long_reductions_are_split(shape: tuple[int, ...]) -> None:
    x = numbers(torch.float32, *shape)
    for fn in (lambda x: x.sum(), lambda x: x.amax(), lambda x: (x > 2).any()):
        s = assert_function(fn, x)
        assert len(shape) > 1 or kinds_of(s) == ["reduction"] * 2, "parts, and their result"
    far = tuple(range(len(shape) - 1))
    assert_function(lambda x: (x.sum(-1), x.argmax(-1)), x)
    if far:
        assert_function(lambda x: (x.sum(far), x.amin(far)), x)


DYNAMIC: dict[str, Callable[..., Any]] = {
    "rows": lambda x: (x.sum(1), x.argmax(1)),
    "columns": lambda x: (x.sum(0), x.argmin(0)),
    "all": lambda x: (x.amax(), x.argmax()),
    "mean": lambda x: x - x.mean(),
    "softmax": lambda x: x.softmax(-1),
}


@pytest.mark.parametrize("name", DYNAMIC)
def test_one_text_runs_at_several_sizes(name: str) -> None:
    for tiles in (None, TINY):
        x = numbers(torch.float32, 6, 7)
        assert_function(
            DYNAMIC[name], x, dynamic=True, given=None, seeds=range(4), tiles=tiles, split=False
        )


def test_a_number_is_reduced() -> None:
    """Constants have no lanes: a tile is made of them."""
    s = assert_function(
        lambda x: x.new_full((6, 37), 3.0).sum(1) + x.new_ones(6, 37, dtype=torch.int32).sum(1),
        numbers(torch.float32, 6),
        tiles=TINY,
    )
    assert texts_of(s)


def test_sums_of_halves_are_rounded_once() -> None:
    """1 + 1 + ... stops growing at 256 in bf16, and at 2048 in f16."""
    for half in (torch.bfloat16, torch.float16):
        for tiles in (None, TINY):
            s = assert_function(lambda x: x.sum(1), torch.ones(2, 3000, dtype=half), tiles=tiles)
            assert "tl.float32" in texts_of(s)[0]


@pytest.mark.diagonal(2)
@pytest.mark.parametrize("tiles", (None, TINY), ids=("usual", "tiny"))
@pytest.mark.parametrize("n", (1, 3, 16, 37))
def test_no_sum_is_minus_zero(n: int, tiles: Shape | None) -> None:
    """A tile without a masked lane has no 0.0 that its sums begin with."""

    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        return [1 / x.sum(1), 1 / x.sum(0), 1 / x.sum(), 1 / x.prod(1), 1 / (x.mean(1) - 0.0)]

    for zero in (-0.0, 0.0):
        assert_function(fn, torch.full((16, n), zero), tiles=tiles)
    scans = torch.full((4, n), -0.0)
    assert_function(lambda x: (1 / x.cumsum(0), 1 / x.cumsum(1), 1 / x[0].cumsum(0)), scans)
