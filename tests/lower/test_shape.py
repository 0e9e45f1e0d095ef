"""Joins, borders, replaced parts, triangles, against eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lenz.ir.graph import Pointwise
from tests.lower.harness import check

aten = torch.ops.aten
X = torch.arange(1, 25, dtype=torch.float32).reshape(2, 3, 4)
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
Fn = Callable[[torch.Tensor], Any]

OPS: dict[str, Fn] = {
    "cat": lambda x: torch.cat([x, x[:, :1], x[:, 1:]], 1),
    "cat_last": lambda x: torch.cat([x, x], -1),
    "cat_one": lambda x: torch.cat([x]),
    "cat_empty": lambda x: torch.cat([x[:0], x, x[:0]]),
    "cat_views": lambda x: torch.cat([x.transpose(1, 2), x.reshape(2, 4, 3)], 2),
    "stack": lambda x: torch.stack([x, x.flip(0)], 1),
    "stack_last": lambda x: torch.stack([x[0], x[1], x[0]], -1),
    "hstack": lambda x: torch.hstack([x, x]),
    "pad": lambda x: F.pad(x, (1, 2)),
    "pad_two": lambda x: F.pad(x, (1, 0, 0, 3), value=1),
    "pad_all": lambda x: F.pad(x, (1, 1, 2, 0, 0, 1)),
    "pad_negative": lambda x: F.pad(x, (-1, 2, 1, -2)),
    "pad_cut": lambda x: F.pad(x, (-1, -1)),
    "select_scatter": lambda x: x.select_scatter(x[:, 0], 1, -1),
    "slice_scatter": lambda x: x.slice_scatter(x[:, :, :2], 2, 1, 3),
    "slice_scatter_step": lambda x: x.slice_scatter(x[:, :, :2], 2, 0, None, 2),
    "slice_scatter_all": lambda x: x.slice_scatter(x.flip(0)),
    "slice_scatter_none": lambda x: x.slice_scatter(x[:, :0], 1, 3),
    "diagonal_scatter": lambda x: x.diagonal_scatter(x[:, :, 0], 0, 1, 2),
    "diagonal_scatter_off": lambda x: x.diagonal_scatter(x[:, :2, 0], 2, 1, 2),
    "diagonal_scatter_low": lambda x: x.diagonal_scatter(x[:, :2, 0], -1, 1, 2),
    "triu": lambda x: x.triu(),
    "triu_up": lambda x: x.triu(1),
    "tril": lambda x: x.tril(),
    "tril_low": lambda x: x.tril(-1),
    "select_backward": lambda x: aten.select_backward(x[0], [5, 3, 4], 0, -2),
    "slice_backward": lambda x: aten.slice_backward(x, [2, 3, 9], 2, 1, 9, 2),
    "diagonal_backward": lambda x: aten.diagonal_backward(x[0], [3, 5, 5], 1, 1, 2),
    "diag_embed": lambda x: torch.diag_embed(x, 1, 0, -1),
    "diag": lambda x: torch.diag(x[0, 0], -1),
    "block_diag": lambda x: torch.block_diag(x[0], x[1]),
}
BORDERS: dict[str, Fn] = {
    "reflect_1d": lambda x: F.pad(x, (2, 3), mode="reflect"),
    "reflect_2d": lambda x: F.pad(x, (1, 3, 2, 0), mode="reflect"),
    "reflect_3d": lambda x: F.pad(x[None], (1, 3, 2, 1, 1, 0), mode="reflect"),
    "reflect_cut": lambda x: F.pad(x, (-1, 2), mode="reflect"),
    "replicate_1d": lambda x: F.pad(x, (2, 5), mode="replicate"),
    "replicate_2d": lambda x: F.pad(x, (1, 6, 2, 0), mode="replicate"),
    "replicate_3d": lambda x: F.pad(x[None], (1, 3, 2, 1, 3, 0), mode="replicate"),
    "replicate_cut": lambda x: F.pad(x, (-1, 2), mode="replicate"),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_op(dtype: torch.dtype) -> None:
    turned = X.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    for x in (X, turned):
        check(lambda x: [fn(x) for fn in OPS.values()], x.to(dtype), exact=True, names=list(OPS))


@pytest.mark.parametrize("name", OPS)
def test_op_with_dynamic_sizes(name: str) -> None:
    check(OPS[name], X, exact=True, dynamic=True)


@pytest.mark.parametrize("dynamic", (False, True), ids=("static", "dynamic"))
@pytest.mark.parametrize("name", BORDERS)
def test_border(name: str, dynamic: bool) -> None:
    check(BORDERS[name], X, exact=True, dynamic=dynamic)


def test_cat_promotes_and_leaves_out_old_empties() -> None:
    x, n = torch.rand(2, 3), torch.arange(3)[None]
    check(lambda x, n: torch.cat([x.bfloat16(), n, x > 0.5]), x, n)
    check(lambda x, n: torch.cat([torch.zeros(0), x, n]), x, n)
    check(lambda x, n: torch.cat([x[:0, 0], n[0, :0]]), x, n)
    check(lambda x, y: torch.cat([x, y]), torch.rand(5), torch.rand(0))
    check(lambda x: F.pad(x, (1, 1), value=2.5), torch.zeros(2, 0))


def test_cat_is_one_map_and_many_parts_stay_eager() -> None:
    g = check(lambda x: torch.cat([x, x * 2, x + 1], 1), X)
    assert sum(isinstance(n, Pointwise) for n in g.nodes) == 3
    check(lambda x: torch.cat([x] * 17), X, native=False)


def test_mutation_through_views() -> None:
    def write(x: torch.Tensor) -> torch.Tensor:
        x[0, 1:] = 7
        x.diagonal(0, 1, 2).mul_(2)
        x[:, ::2].add_(x[:, :1].clone())
        return x * 2

    check(write, X.clone(), exact=True)
    check(lambda x: write(x.clone()), X, exact=True, dynamic=True)


ENDS = [(1, 2), (0, 3), (-1, 2), (2, -1), (-1, -2)]


@pytest.mark.parametrize("low_high", ENDS, ids=str)
def test_gradients_of_borders(low_high: tuple[int, int]) -> None:
    """Each element gathers from where it shows: mirrored or repeated, cut off by widths below 0."""
    low, high = low_high
    for rank in (1, 2, 3):
        x = torch.randn(2, 3, *(4, 5, 6)[:rank])
        pads = [low, high, 1, 0, 2, 2][: 2 * rank]
        for kind in ("reflection", "replication"):
            if kind == "reflection" and min(pads) < 0:
                continue  # eager refuses them
            for dtype in (torch.float32, torch.float64):
                y = getattr(aten, f"{kind}_pad{rank}d")(x.to(dtype), pads)
                back = getattr(aten, f"{kind}_pad{rank}d_backward")
                check(lambda g, x, f=back: f(g, x, pads), torch.randn_like(y), x.to(dtype))
    x = torch.randn(2, 3, 5)

    def symbolic(g: Any, x: Any) -> Any:
        low = x.shape[0]
        return torch.ops.aten.reflection_pad1d_backward(g, x, [low, low + 1])

    check(symbolic, torch.randn(2, 3, 10), x, dynamic=True)
    wide = torch.randn(2, 3, 60)
    check(lambda g: aten.reflection_pad1d_backward(g, g[..., :30], [20, 10]), wide)
    check(
        lambda g: aten.replication_pad1d_backward(g, g[..., :10], [40, 10]), wide.double(),
        native=False,
    )  # fmt: skip
