"""`lenz.standalone_compile`: a graph compiled on its own, also inside of another backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, symbolic_trace

import lenz
from lenz.errors import UserError


def fn(x: Tensor, y: Tensor) -> Tensor:
    return torch.softmax(x @ y, -1).cumsum(0) + x.shape[0]


def test_a_graph_with_plain_arguments(tmp_path: Path) -> None:
    x, y = torch.randn(3, 4), torch.randn(4, 5)
    gm = symbolic_trace(lambda x, y: (torch.relu(x @ y) + 1, x.sum(0)))
    before = str(gm.graph)
    made = lenz.standalone_compile(gm, [x, y])
    assert str(gm.graph) == before
    torch.testing.assert_close(made(x, y), [*gm(x, y)])
    made.save(tmp_path / "m.lenz")
    torch.testing.assert_close(lenz.load(tmp_path / "m.lenz")(x, y), [*gm(x, y)])


@pytest.mark.parametrize("dynamic", [False, True])
def test_inside_of_another_backend(dynamic: bool, tmp_path: Path) -> None:
    made: list[lenz.CompiledArtifact] = []
    before: list[str] = []

    def mine(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        before.append(str(gm.graph))
        made.append(lenz.standalone_compile(gm, inputs))
        assert str(gm.graph) == before[-1]
        return made[-1]

    run = torch.compile(fn, backend=mine, dynamic=dynamic, fullgraph=True)
    with torch.no_grad():
        for n in (6, 9) if dynamic else (6,):
            x, y = torch.randn(n, 4), torch.randn(4, 5)
            torch.testing.assert_close(run(x, y), fn(x, y))
    assert len(made) == 1, "symbols stay symbols"
    sizes = [g["size"][0] for g in made[0].manifest["call"]["given"] if g["kind"] == "tensor"]
    assert sizes[0] == ([2, None] if dynamic else [6, 6])


def test_an_argument_that_is_written() -> None:
    gm = symbolic_trace(lambda x, y: (x.mul_(2) + y,))
    x, y = torch.randn(5), torch.randn(5)
    made, mine = lenz.standalone_compile(gm, [x.clone(), y]), x.clone()
    torch.testing.assert_close(made(mine, y), [2 * x + y])
    torch.testing.assert_close(mine, 2 * x)


def test_a_module_with_parameters(tmp_path: Path) -> None:
    gm = symbolic_trace(nn.Linear(3, 4))
    x = torch.randn(2, 3)
    lenz.standalone_compile(gm, [x]).save(tmp_path / "m.lenz")
    run = lenz.load(tmp_path / "m.lenz")
    torch.testing.assert_close(run(x), [gm(x).detach()])
    assert list(run.weights) == ["weight", "bias"]


def test_what_is_no_graph_is_refused() -> None:
    with pytest.raises(UserError, match=r"is a Linear, not a torch\.fx\.GraphModule"):
        lenz.standalone_compile(nn.Linear(3, 4), [torch.ones(2, 3)])  # type: ignore[arg-type]


def test_a_level_that_is_not_there_is_refused() -> None:
    with pytest.raises(UserError, match="unknown level 'v0'"):
        lenz.standalone_compile(symbolic_trace(lambda x: x + 1), [torch.ones(2)], levels=("v0",))
