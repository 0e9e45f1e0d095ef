"""Sums and products of many halves in one element: rounded as rarely as eager rounds them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

N = 1089
Fn = Callable[[Tensor, Tensor, Tensor], Tensor]


def grad(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    y = x.clone().requires_grad_()
    (made,) = torch.autograd.grad(fn(y).sum(), y)
    return made


CASES: dict[str, tuple[Fn, tuple[int, ...], tuple[int, ...]]] = {
    "scatter_add": (lambda x, i, s: x.scatter_add(0, i, s), (4,), (N,)),
    "scatter_add rows": (lambda x, i, s: x.scatter_add(1, i.expand(5, N), s), (5, 4), (5, N)),
    "scatter add": (lambda x, i, s: x.scatter(0, i, s, reduce="add"), (4,), (N,)),
    "scatter multiply": (
        lambda x, i, s: x.scatter(0, i, s * 0.01 + 1, reduce="multiply"), (4,), (N,),
    ),
    **{
        f"scatter_reduce {kind} {own}": (
            lambda x, i, s, kind=kind, own=own: x.scatter_reduce(  # type: ignore[misc]
                0, i, s * 0.01 + 1 if kind == "prod" else s, kind, include_self=own
            ),
            (4,), (N,),
        )
        for kind in ("sum", "mean", "prod", "amax")
        for own in (True, False)
    },
    "index_add": (lambda x, i, s: x.index_add(0, i, s), (4,), (N,)),
    "index_add rows": (lambda x, i, s: x.index_add(0, i, s), (4, 5), (N, 5)),
    "index_add alpha": (lambda x, i, s: x.index_add(0, i, s, alpha=0.5), (4, 5), (N, 5)),
    "index_reduce": (lambda x, i, s: x.index_reduce(0, i, s, "mean"), (4, 5), (N, 5)),
    "index_put": (lambda x, i, s: x.index_put((i,), s, accumulate=True), (4, 5), (N, 5)),
    "put": (lambda x, i, s: x.put(i, s, accumulate=True), (4,), (N,)),
    "gradient of gather": (lambda x, i, s: grad(lambda y: y.gather(0, i), x), (4,), (N,)),
    "gradient of index_select": (
        lambda x, i, s: grad(lambda y: y.index_select(0, i), x), (4, 5), (N, 5),
    ),
    "gradient of an embedding": (
        lambda x, i, s: grad(lambda y: torch.nn.functional.embedding(i, y), x), (4, 5), (N, 5),
    ),
}  # fmt: skip


def error(a: Tensor, want: Tensor) -> float:
    return float((a.double() - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("name", CASES)
def test_no_farther_from_float64_than_twice_eager(name: str, dtype: torch.dtype) -> None:
    """In bf16, 256 + 1 is 256: a count that is rounded after each step stops there."""
    fn, shape, source = CASES[name]
    torch.manual_seed(1)
    places = torch.randint(0, 4, (N,))
    for values in (torch.ones(source), torch.rand(source)):
        x, s = torch.ones(shape).to(dtype), values.to(dtype)
        want = fn(x.double(), places, s.double())
        torch.compiler.reset()
        made = torch.compile(fn, backend="lenz", options={"on_error": "raise"})(x, places, s)
        assert error(made, want) <= 2 * error(fn(x, places, s), want) + torch.finfo(dtype).eps
