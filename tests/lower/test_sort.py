"""Sorted rows and what is read out of them: the elements' own bits, their places, NaN, and ties."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lenz.ir.dtype import BF16, F16, F32, F64, I8, I16, I64, U8
from lenz.ir.graph import Extern, Sort
from lenz.lower.builder import Decline
from lenz.lower.sort import keys_for
from lenz.sym import Int, Var
from tests.e2e.sides import agree
from tests.lower.harness import check, evaluated

G = torch.Generator().manual_seed(0)
NAN, INF = float("nan"), float("inf")
X = (torch.randn(6, 40, generator=G) * 4).round()
X[0, :9] = torch.tensor([NAN, 0.0, -0.0, INF, -INF, -NAN, 1e-40, -1e-40, -0.0])
SAME_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTS = (torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


def bits(t: Tensor) -> Tensor:
    return t if t.dtype is torch.bool else t.view(SAME_BITS[t.element_size()])


def typed(x: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype.is_floating_point:
        return x.to(dtype)
    x = x.nan_to_num(posinf=9, neginf=-9)
    return (x.abs() if dtype is torch.uint8 else x).to(dtype)


@pytest.mark.parametrize("falls", (False, True), ids=("rising", "falling"))
@pytest.mark.parametrize("dtype", FLOATS + INTS, ids=str)
def test_a_stable_sort_has_the_bits_of_eager(dtype: torch.dtype, falls: bool) -> None:
    x = typed(X, dtype)
    for dim in (0, 1):
        g, got = evaluated(lambda x, d=dim: torch.sort(x, stable=True, dim=d, descending=falls), x)
        assert [type(n).__name__ for n in g.nodes] == ["Sort", "Pointwise", "Pointwise"]
        values, places = torch.sort(x, stable=True, dim=dim, descending=falls)
        assert torch.equal(got[1], places)
        assert torch.equal(bits(got[0]), bits(values)), "a zero or a NaN has lost its sign"


def test_a_nan_comes_back_with_what_processors_put_into_it() -> None:
    """Of x86 (sign set), of torch, of a GPU (all bits set), and one with few bits, in long rows."""
    raw = torch.tensor([0xFFC00000 - (1 << 32), 0x7FC00000, 0x7FFFFFFF, 0x7FC80000, -1])
    for n in (5, 4096):
        x = torch.zeros(n, dtype=torch.int32)
        x[-5:] = raw.int()
        _, (values, _) = evaluated(lambda x: torch.sort(x.view(torch.float32), stable=True), x)
        assert torch.equal(bits(values[-5:]), raw.int())


@pytest.mark.parametrize("falls", (False, True), ids=("rising", "falling"))
@pytest.mark.parametrize("dtype", FLOATS + INTS[:-1], ids=str)  # eager has no topk of bool
def test_places_that_nobody_reads_are_no_part_of_keys(dtype: torch.dtype, falls: bool) -> None:
    x = typed(X, dtype).clone()
    if dtype is torch.float32:  # all bits of a NaN come back
        x[1, :4] = torch.tensor([-1, 0x7FFFFFFF, 0x7F800001, 0x7FC80000], dtype=torch.int32).view(
            dtype
        )
    g, (got, top) = evaluated(lambda x: (x.sort(descending=falls)[0], x.topk(9, 1, falls)[0]), x)
    sorts = [n for n in g.nodes if isinstance(n, Sort)]
    assert [n.out.dtype.bits for n in sorts] == [32, 32]
    want = torch.sort(x, descending=falls)[0]
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(top.isnan(), want[:, :9].isnan())
    assert torch.equal(got.nan_to_num(99), want.nan_to_num(99))
    assert torch.equal(top.nan_to_num(99), want[:, :9].nan_to_num(99))
    kept = [bits(t).to(torch.int64).sort()[0] for t in (got, x)]
    assert torch.equal(*kept), "an element has lost bits, or came twice"


PICKS: dict[str, Callable[[Tensor], Any]] = {
    "topk": lambda x: x.topk(3),
    "topk of columns": lambda x: x.topk(2, 0, largest=False),
    "topk of one": lambda x: x.topk(1),
    "topk of all": lambda x: x.topk(40),
    "kthvalue": lambda x: x.kthvalue(7),
    "kthvalue of columns": lambda x: x.kthvalue(2, 0, keepdim=True),
    "median": lambda x: x.median(1),
    "median of columns": lambda x: x.median(0, keepdim=True),
    "nanmedian": lambda x: x.nanmedian(1),
    "argsort": lambda x: (x.sort(1)[0], x.argsort(stable=True, dim=1)),
    "middle": lambda x: x.transpose(0, 1).reshape(8, 5, 6).sort(1),
    "msort": lambda x: (x.msort(), x.msort().argsort(stable=True, dim=0)),
}


@pytest.mark.diagonal(2)
@pytest.mark.parametrize("name", PICKS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.int32), ids=str)
def test_what_a_sorted_row_gives(name: str, dtype: torch.dtype) -> None:
    """Eager's values; of equal elements eager may pick any, so places must only point at them."""
    x = typed(X, dtype)
    g, got = evaluated(PICKS[name], x)
    assert not any(isinstance(n, Extern) for n in g.nodes)
    values, places = PICKS[name](x)
    assert torch.equal(got[0].nan_to_num(99), values.nan_to_num(99))
    assert torch.equal(got[0].isnan(), values.isnan())
    assert got[1].shape == places.shape and got[1].dtype is torch.int64
    if name in ("argsort", "middle", "msort"):
        assert torch.equal(got[1], places)
        return
    dim = 0 if "columns" in name else 1
    at = got[1] if got[1].dim() == 2 else got[1].unsqueeze(dim)
    there = bits(x).gather(dim, at).reshape(got[0].shape)
    assert torch.equal(there, bits(got[0])), "a place is not that of the element"
    assert bool((at.sort(dim)[0].diff(dim=dim) > 0).all()), "an element is given twice"


@pytest.mark.parametrize("skip", (False, True), ids=("median", "nanmedian"))
def test_medians_of_nan(skip: bool) -> None:
    fn = torch.nanmedian if skip else torch.median
    x = X[:, :7].clone()
    x[1, :3], x[2, 3], x[3, 5:] = NAN, NAN, NAN
    check(lambda x: (*fn(x, 1), fn(x), fn(x[4:]), fn(x * NAN, 0)[0]), x)


def test_short_rows() -> None:
    one, none = X[:, :1], torch.empty(6, 0)
    check(lambda x: (*x.sort(1), *x.topk(1), *x.median(1), *x.kthvalue(1, 1, True)), one)
    check(lambda x: (*x.sort(0), *x.median(0), x.median()), one[3, 0])
    check(lambda x: x.sort(1), none)
    check(lambda x: x.sort(0), torch.empty(6, 0))


def test_sizes_that_are_bounded() -> None:
    def f(n: int, x: Tensor) -> Any:  # as Dynamo passes a size: only its range is believed
        torch._check(n <= 64)
        return x.sort(1)

    _, got = evaluated(f, X.shape[1], X, dynamic=True)
    assert torch.equal(got[1], X.sort(stable=True, dim=1)[1])


@pytest.mark.parametrize(
    ("dtype", "size", "why"),
    [
        (F64, Int(5), "64-bit"),
        (I64, Int(5), "64-bit"),
        (F32, Int(4097), "4096"),
        (F32, Var("s0", 1), "unknown length"),
    ],
)
def test_what_is_left_to_eager(dtype: Any, size: Any, why: str) -> None:
    with pytest.raises(Decline, match=why):
        keys_for(dtype, size, False, "cuda:0")


@pytest.mark.parametrize("dtype", (F32, BF16, F16, U8, I8, I16), ids=str)
@pytest.mark.parametrize("size", (2, 3, 256, 257, 4096))
def test_keys_fit_their_type(dtype: Any, size: int) -> None:
    keys = keys_for(dtype, Int(size), False, "cuda:0")
    own = dtype.bits + (dtype.kind == "uint")
    assert own + keys.position + keys.rest <= keys.type.bits
    assert keys.type.bits == (64 if dtype is F32 else 32), "keys of 32 bits are twice as fast"
    assert 1 << keys.position >= size and (not dtype.is_float or keys.rest >= 4)


def test_few_of_many_are_left_to_eager_on_cpus() -> None:
    g, _ = evaluated(lambda x: x.topk(2), torch.randn(2, 500))
    assert [n.op for n in g.nodes if isinstance(n, Extern)] == ["aten.topk.default"]
    g, _ = evaluated(lambda x: x.topk(9), torch.randn(2, 500))
    assert [n.out.shape[1] for n in g.nodes if isinstance(n, Sort)] == [Int(9)]


def test_gradients() -> None:
    """Autograd's own formulas scatter into the places."""

    def f(x: Tensor, g: Tensor) -> Any:
        return torch.func.vjp(lambda x: (x.sort(1)[0], x.topk(2)[0].sum(1)), x)[1]((g, g[:, 0]))

    check(f, torch.randn(4, 7), torch.randn(4, 7))


@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_mode_is_the_least_of_the_most_frequent(dtype: torch.dtype) -> None:
    """The place is one that has it."""
    x = typed(X, dtype)
    x[1] = x[1, 0]
    for dim, keepdim in ((0, True), (1, False)):
        g, got = evaluated(lambda x, d=dim, k=keepdim: torch.mode(x, d, k), x)
        assert not [n for n in g.nodes if isinstance(n, Extern)]
        assert torch.equal(got[0], torch.mode(x, dim, keepdim)[0])
        wide = [t if keepdim else t.unsqueeze(dim) for t in got]
        assert torch.equal(x.gather(dim, wide[1]), wide[0])


def test_mode_of_rows_with_nan_is_eager_s() -> None:
    """Its sort compares by `<`, so that NaN, and what is beside it, stay where they were."""
    nan, inf = float("nan"), float("inf")
    for rows in (
        [[nan, 1.0, -inf], [inf, nan, nan], [2.0, -inf, 2.0]],
        [[nan, -inf, 0.0, 1.0, 5.0, 7.0, -2.0]],
    ):
        check(lambda x: torch.mode(x, 1)[0], torch.tensor(rows), native=False)


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_rows_that_may_be_empty_are_left_to_eager() -> None:
    for fn in (torch.median, torch.nanmedian):
        agree(lambda x, fn=fn: fn(x[x > 0]), lambda: [-torch.rand(9)], fullgraph=True)
        run = torch.compile(lambda x, fn=fn: fn(x[x > 0], 0), backend="lenz", fullgraph=True)
        with pytest.raises(IndexError, match="non-zero size"):
            run(-torch.rand(9))
