"""Views against eager: values, strides, and which of them are views and not copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lenz.ir.graph import Extern, Pointwise, View
from tests.lower.harness import check, lowered

aten = torch.ops.aten

X = torch.arange(2 * 3 * 4, dtype=torch.float32).reshape(2, 3, 4)
Fn = Callable[[torch.Tensor], Any]

VIEWS: dict[str, Fn] = {
    "view": lambda x: x.view(6, 4),
    "view_split": lambda x: x.view(2, 3, 2, 2),
    "view_flat": lambda x: x.view(-1),
    "view_ones": lambda x: x.view(1, 2, 1, 12, 1),
    "permute": lambda x: x.permute(2, 0, 1),
    "permute_negative": lambda x: x.permute(-1, -3, -2),
    "transpose": lambda x: x.transpose(0, -1),
    "t": lambda x: x[0].t(),
    "t_vector": lambda x: x[0, 0].t(),
    "expand": lambda x: x[:, :1].expand(5, 2, 3, 4),
    "unsqueeze": lambda x: x.unsqueeze(-1).unsqueeze(0),
    "squeeze": lambda x: x[:1, :, :1].squeeze(),
    "squeeze_dim": lambda x: x[:1].squeeze(0).squeeze(0),
    "squeeze_dims": lambda x: x[:1, :, :1].squeeze((0, -1)),
    "select": lambda x: x[1, :, -2],
    "slice": lambda x: x[:, 1:, ::2],
    "slice_negative": lambda x: x[:, -2:, -100:-1],
    "slice_beyond": lambda x: x[:, :100],
    "slice_empty": lambda x: x[:, 5:],
    "narrow": lambda x: x.narrow(2, 1, 2),
    "diagonal": lambda x: x.diagonal(0, 1, 2),
    "diagonal_above": lambda x: x.diagonal(2, -2, -1),
    "diagonal_below": lambda x: x.diagonal(-1, 2, 0),
    "unfold": lambda x: x.unfold(2, 2, 1).unfold(1, 3, 2),
    "split": lambda x: x.split(3, 2),
    "split_sizes": lambda x: x.split([1, 0, 3], -1),
    "chunk": lambda x: x.chunk(3, 2),
    "tensor_split": lambda x: x.tensor_split(3, 2),
    "unbind": lambda x: x.unbind(1),
    "view_as": lambda x: x.view_as(x.reshape(4, 6).view(2, 3, 4)),
    "movedim": lambda x: x.movedim(0, 2),
    "flatten": lambda x: x.flatten(1),
    "unflatten": lambda x: x.unflatten(2, (2, 2)),
    "alias": lambda x: torch.ops.aten.alias(x),
    "detach": lambda x: x.detach() + 0,
    "swap_and_cut": lambda x: x.permute(1, 0, 2)[1:].transpose(1, 2)[..., 1],
    "broadcast_to": lambda x: x[0].broadcast_to(5, 3, 4),
}
COPIES: dict[str, Fn] = {
    "reshape": lambda x: x.transpose(0, 1).reshape(-1),
    "reshape_cut": lambda x: x.permute(2, 1, 0).reshape(3, 8),
    "flip": lambda x: x.flip(0, 2),
    "roll": lambda x: x.roll((1, -2), (0, 2)),
    "roll_flat": lambda x: x.roll(5),
    "rot90": lambda x: x.rot90(1, (1, 2)),
    "repeat": lambda x: x.repeat(2, 1, 3),
    "repeat_new": lambda x: x.repeat(3, 1, 2, 1),
    "tile": lambda x: x.tile(2, 2),
    "repeat_interleave": lambda x: x.repeat_interleave(3, 1),
    "pixel_shuffle": lambda x: torch.nn.functional.pixel_shuffle(x.view(1, 4, 2, 3), 2),
    "pixel_unshuffle": lambda x: torch.nn.functional.pixel_unshuffle(x.view(1, 1, 4, 6), 2),
    "channel_shuffle": lambda x: torch.nn.functional.channel_shuffle(x.view(1, 4, 2, 3), 2),
    "meshgrid": lambda x: torch.meshgrid(x[0, 0], x[0, :, 0], indexing="ij"),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dynamic", (False, True), ids=("static", "dynamic"))
@pytest.mark.parametrize("name", VIEWS)
def test_view(name: str, dynamic: bool) -> None:
    g = check(VIEWS[name], X, dynamic=dynamic)
    if name != "detach" and not dynamic:
        assert not any(isinstance(n, Pointwise) for n in g.nodes)
    check(lambda x: torch.utils._pytree.tree_map(lambda y: y + 1, VIEWS[name](x * 2)), X)


@pytest.mark.parametrize("dynamic", (False, True), ids=("static", "dynamic"))
@pytest.mark.parametrize("name", COPIES)
def test_copy(name: str, dynamic: bool) -> None:
    check(COPIES[name], X, dynamic=dynamic)


@pytest.mark.parametrize("name", VIEWS)
def test_view_of_strided_input(name: str) -> None:
    strided = torch.arange(200.0).as_strided((2, 3, 4), (24, 8, 2), 3)
    turned = X.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    for x in (strided, turned):
        try:
            VIEWS[name](x)
        except RuntimeError:
            continue  # no such view of these strides
        check(VIEWS[name], x)


@pytest.mark.parametrize(
    "dtype", (torch.complex64, torch.float16, torch.bool, torch.uint16, torch.float8_e5m2), ids=str
)
def test_views_move_elements_of_every_type(dtype: torch.dtype) -> None:
    x = torch.zeros(2, 3).to(dtype)
    lowered_nodes = lowered(lambda x: (x.t()[1:], x.flatten()), (x,)).nodes
    assert all(isinstance(n, View) for n in lowered_nodes)


def test_a_dimension_is_cut_where_only_its_own_sizes_agree_by_facts() -> None:
    """3 * (s0 // 3) is s0 by a guard alone; dimensions before it keep variables and strides."""
    for shape in ((4, 6), (1, 4, 6)):
        g = check(lambda x: x.unflatten(-1, (3, -1)), torch.randn(shape), dynamic=True)
        assert all(isinstance(n, View) for n in g.nodes)
    x = torch.randn(6)
    g = check(lambda x: x.expand(4, -1).unflatten(-1, (3, -1)), x, dynamic=True)
    assert all(isinstance(n, View) for n in g.nodes)
    check(lambda x: x.expand(4, -1).unflatten(-1, (1, -1, 3)) + 1, x, dynamic=True)


def test_sizes_of_zero_and_scalars() -> None:
    check(lambda x: x.view(3, 0, 2), torch.zeros(0, 3))
    check(lambda x: x.reshape(0), torch.zeros(2, 0))
    check(lambda x: x.repeat(2, 0), torch.zeros(2, 3))
    check(lambda x: x.roll(1, 0), torch.zeros(0, 3))
    check(lambda x: x.view(1, 1), torch.tensor(3.0))
    check(lambda x: x.expand(2, 3), torch.tensor(3.0))
    check(lambda x: x.squeeze(), torch.tensor(3.0))
    check(lambda x: x.t(), torch.tensor(3.0))
    check(lambda x: x.unfold(0, 1, 1), torch.tensor(3.0))
    check(lambda x: x.flip(0), torch.zeros(0))
    check(lambda x: x.flatten(), torch.tensor(3.0))


def test_as_strided() -> None:
    """Over memory of the graph's own, and over that of arguments, which may be a part of others."""
    own = [
        ((3, 2), (2, 7), 1),
        ((4,), (0,), 5),
        ((2, 1), (1, 9), None),
        ((), (), 3),
        ((0,), (1,), 0),
    ]
    for size, stride, offset in own:
        how = (size, stride, offset)
        for dynamic in (False, True):
            check(
                lambda x: ((x * 1).as_strided(*how), aten.as_strided_copy(x * 1, *how)),
                X,
                dynamic=dynamic,
            )
        for x in (X, X.mT):
            g = check(
                lambda x: (x.as_strided(*how) * 2, aten.as_strided_copy(x, *how)), x, native=False
            )
            assert {n.op for n in g.nodes if isinstance(n, Extern)} == {"lenz.as_strided"}
        y = torch.randn(size)
        if stride != (0,):
            check(lambda x, y: aten.as_strided_scatter(x * 1, y, *how), X, y)


def test_a_copy_of_a_view_is_one_map() -> None:
    g = check(lambda x: x.transpose(0, 1).contiguous(), X)
    assert sum(isinstance(n, Pointwise) for n in g.nodes) == 1
