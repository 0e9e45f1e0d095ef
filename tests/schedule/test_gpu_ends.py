"""Long rows on GPUs whose ends lie between multiples of 16 bytes, or inside of tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lenz.ir.kernel import For, If, Kernel, walk
from lenz.machine.cuda.triton import compile as compiler
from tests.gpu_oracle import TINY, assert_function, cubins, kernels_of, on_gpu, scheduled
from tests.lower.harness import lowered

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
FLAT = ["p0b grid", "if", "p0 lane", "part seq", "p0 lane"]


def loops(k: Kernel) -> list[str]:
    """The loops and branches of a kernel, outer ones first: `p0b grid`."""
    return [
        "if" if isinstance(s, If) else f"{s.axis.name} {s.kind}"
        for s in walk(k.body)
        if isinstance(s, (For, If))
    ]


def of_rows(x: Tensor, m: Tensor) -> Tensor:
    return (x - m) * 2


def of_columns(x: Tensor, m: Tensor) -> Tensor:
    return torch.where(torch.arange(x.shape[-1]) == m.long(), x + 1, x * m)


def of_halves(x: Tensor, m: Tensor) -> Tensor:
    return (x.float() * torch.exp(m)).to(x.dtype)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("fn", [of_rows, of_columns, of_halves])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((3, 129), BF16),
        ((16, 131), F16),
        ((2, 3, 257), BF16),
        ((5, 1001), torch.int8),
        ((4, 130), torch.uint8),
    ],
)
def test_elements_of_odd_rows(fn: Callable[..., Tensor], shape: Any, dtype: torch.dtype) -> None:
    x = torch.randint(0, 9, shape).to(dtype)
    m = torch.randint(0, 3, (*shape[:-1], 1)).to(F32 if fn is of_halves else dtype)
    s = assert_function(fn, x, m, tiles=TINY)
    assert [loops(k) for k in kernels_of(s)] == [FLAT]


def test_rows_of_several_axes_and_weights() -> None:
    x, m, w = torch.randn(3, 2, 129).to(BF16), torch.randn(3, 1, 1), torch.randn(129)
    s = assert_function(lambda x, m, w: x * m + w * m.exp(), x, m, w, tiles=TINY)
    assert [loops(k) for k in kernels_of(s)] == [FLAT]


def test_odd_rows_are_overwritten() -> None:
    def fn(x: Tensor, m: Tensor) -> Tensor:
        return x.mul_(m)

    assert_function(fn, torch.randn(5, 131).to(BF16), torch.randn(5, 1).to(BF16), tiles=TINY)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((5, 130), BF16), ((5, 129), F32), ((9, 127), BF16), ((5, 132), torch.int8)],
)
def test_rows_that_gain_nothing_stay(shape: Any, dtype: torch.dtype) -> None:
    x, m = torch.ones(shape, dtype=dtype), torch.ones(shape[0], 1, dtype=dtype)
    s = assert_function(of_rows, x, m, tiles=TINY)
    assert len(loops(kernels_of(s)[0])) > 2


@pytest.mark.parametrize(("dtype", "length"), [(BF16, 1517), (F32, 1518), (torch.uint8, 1519)])
@pytest.mark.parametrize("over", [False, True], ids=["new", "in place"])
def test_one_row_tests_its_last_tile_alone(dtype: torch.dtype, length: int, over: bool) -> None:
    x = torch.randint(0, 9, (length,)).to(dtype)
    fn = (lambda x: x.add_(1)) if over else (lambda x: (x + 1, x * 2))
    s = assert_function(fn, x, tiles=TINY)
    assert [loops(k) for k in kernels_of(s)] == [FLAT]


def test_odd_rows_of_dynamic_sizes() -> None:
    x, m = torch.randn(5, 131).to(BF16), torch.randn(5, 1).to(BF16)
    assert_function(of_rows, x, m, tiles=TINY, dynamic=True)


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "n", "dtype"), [(9, 32777, BF16), (3, 40962, BF16), (2, 45057, F32), (2, 36861, F32)]
)
def test_parts_of_long_rows(rows: int, n: int, dtype: torch.dtype) -> None:
    x = torch.randn(rows, n).to(dtype)
    x[0, 0], x[0, -1], x[1, :] = 30, 31, -float("inf")
    s = assert_function(lambda x: torch.log_softmax(x, -1), x)
    assert loops(kernels_of(s)[0])[:4] == ["p0 grid", "p1 grid", "if", "r0 lane"]


def test_parts_that_end_with_their_rows_have_no_tests() -> None:
    s = scheduled(on_gpu(lowered(lambda x: torch.log_softmax(x, -1), [torch.empty(3, 40960)])))
    assert "if" not in loops(kernels_of(s)[0])


@pytest.mark.parametrize(
    ("fn", "loads", "stores"),
    [(lambda x: torch.softmax(x, -1), 1, 0), (lambda x: x - x[:, :1], 1, 1)],
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


def test_a_position_that_stands_in_two_dimensions_keeps_its_test() -> None:
    """A row of 8 may be loaded to its end, but not the one column that is named by it as well."""

    def f(x: Tensor) -> Tensor:
        pair = torch.hstack([x, x])
        return torch.diagonal_scatter(pair, pair.diagonal() + 1)

    assert_function(f, torch.randn(8, 1)[:1].expand(8, 1))


def test_an_argmin_over_one_element_is_no_reduction() -> None:
    """Beside other reductions of its input it was one over no axis, whose result nobody gave."""

    def f(x: Tensor) -> tuple[Tensor, ...]:
        best = x.gather(-1, x.argmax(-1, keepdim=True)) == x.max(-1, keepdim=True).values
        return best, x.min(), x.argmin(-3)

    assert_function(f, torch.randint(-4, 5, (17, 1, 8, 8)).to(torch.bfloat16).transpose(0, -1))
