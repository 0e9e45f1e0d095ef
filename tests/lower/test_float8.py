"""8-bit floats in graphs: moved and converted by loops; eager does, or refuses, the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lenz.ir.graph import Extern, Pointwise
from tests.lower.harness import check, lowered

E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2
Fn = Callable[[torch.Tensor], Any]

MOVES: dict[str, Fn] = {
    "to_f32": lambda x: x.float() * 2,
    "to_bf16": lambda x: x.bfloat16(),
    "to_f64": lambda x: x.double(),
    "to_i32": lambda x: x.int(),
    "to_bool": lambda x: x.bool(),
    "to_e4m3": lambda x: x.to(E4),
    "to_e5m2": lambda x: x.to(E5),
    "clone": lambda x: x.t().contiguous(),
    "cat": lambda x: torch.cat([x, x[:1]]),
    "stack": lambda x: torch.stack([x, x]),
    "pad": lambda x: F.pad(x, (1, 2)),
    "pad_value": lambda x: F.pad(x, (1, 2), value=3.0),
    "where": lambda x: torch.where(x.float() > 0, x, x.flip(0)),
    "index": lambda x: x[torch.tensor([2, 0])],
    "embedding": lambda x: F.embedding(torch.tensor([1, 0]), x),
    "repeat": lambda x: x.repeat(2, 1),
    "roll": lambda x: x.roll(1, 0),
    "full": lambda x: torch.full_like(x, 0.3),
    "zeros": lambda x: torch.zeros_like(x),
    "copy": lambda x: torch.ones(3, 4).copy_(x),
    "set_slice": lambda x: torch.slice_scatter(x, x[:, :1], 1, 2, 3),
}


@pytest.mark.parametrize("dtype", (E4, E5), ids=str)
@pytest.mark.parametrize("name", MOVES)
def test_moves_and_conversions_are_loops(name: str, dtype: torch.dtype) -> None:
    x = (torch.linspace(-3, 3, 12).reshape(3, 4)).to(dtype)
    check(MOVES[name], x, exact=True)


@pytest.mark.parametrize("to", (E4, E5), ids=str)
@pytest.mark.parametrize("frm", (torch.float16, torch.bfloat16, torch.float64, torch.int64))
def test_conversions_to_them_are_loops(frm: torch.dtype, to: torch.dtype) -> None:
    check(lambda x: (x.to(to), x.float().to(to)), torch.arange(-40, 40).to(frm), exact=True)


def test_arithmetic_stays_with_eager() -> None:
    g = lowered(lambda x: x.abs(), [torch.ones(4).to(E4)])
    (call,) = [n for n in g.nodes if isinstance(n, Extern)]
    assert (call.op, call.reason) == ("aten.abs.default", "dtype f8e4m3fn")


def test_sums_at_places_stay_with_eager() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.index_put((torch.tensor([0, 2, 0]),), x[:3], accumulate=True)

    x = torch.arange(4.0).to(E5)
    assert [n.op for n in lowered(fn, [x]).nodes if isinstance(n, Extern)][-1:] == [
        "aten.index_put.default"
    ]
    got = torch.compile(fn, backend="lenz", options={"on_error": "raise"})(x)
    torch.testing.assert_close(got.float(), fn(x).float())


@pytest.mark.parametrize("dtype", (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz), ids=str)
def test_the_types_without_a_negative_zero_stay_with_eager(dtype: torch.dtype) -> None:
    g = lowered(lambda x: (x + 1).to(dtype).float(), [torch.ones(4)])
    assert [n.op for n in g.nodes if isinstance(n, Extern)] == ["aten._to_copy.default"] * 2
    assert len([n for n in g.nodes if isinstance(n, Pointwise)]) == 1
