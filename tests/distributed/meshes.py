"""Random programs of distributed tensors: device meshes are arguments and results of their graphs.

A program is a list of lines, drawn from a seed.  Values are ROWS x ROWS, and lie on the ranks as
one of PLACES has it: each rank holds rows or columns, or everything.  Some lines leave the mesh
for what a rank holds itself, and come back.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.distributed.programs import ROWS

PLACES = (Shard(0), Shard(1), Replicate())
Line = tuple[str, int, int, int]  # what to do, with which values, to lie where


def drawn(seed: int, lines: int) -> list[Line]:
    """The lines of a program, which begins with two values."""
    chance = random.Random(f"mesh {seed}")
    kinds = ("move", "move", "add", "mul", "product", "turn", "relu", "rows", "own", "write")
    return [
        (chance.choice(kinds), chance.randrange(k), chance.randrange(k), chance.randrange(3))
        for k in range(2, 2 + lines)
    ]


def as_function(lines: list[Line], mesh: DeviceMesh, local: bool) -> Callable[..., Any]:
    """A program as a function of what a rank holds of two matrices, or of the matrices.

    It gives the last values, as distributed tensors, and one as what a rank holds.
    """

    def run(x: Any, y: Any) -> tuple[Any, ...]:
        if local:
            x, y = (DTensor.from_local(t, mesh, [Shard(0)]) for t in (x, y))
        values = [x, y]
        for line in lines:
            values.append(step(line, values, mesh))
        return (*values[-2:], values[-3].redistribute(mesh, [Replicate()]).to_local() + 1)

    return run


def step(line: Line, values: list[Any], mesh: DeviceMesh) -> Any:
    """One more value."""
    act, first, second, place = line
    a, b = values[first], values[second]
    match act:
        case "move":
            return a.redistribute(mesh, [PLACES[place]]) * 0.5
        case "add":
            return a + b.sin()
        case "mul":
            return a * b.tanh()
        case "product":
            return (a @ b) / ROWS
        case "turn":
            return a.t().contiguous() - 0.25
        case "relu":
            return a.relu() + 0.5
        case "rows":
            return a - a.mean(1, keepdim=True)
        case "own":  # each rank adds something else
            moved = a.redistribute(mesh, [Shard(0)])
            own = moved.to_local()
            return DTensor.from_local(own + own.amax(), mesh, [Shard(0)])
        case _:
            return a.clone().mul_(0.5)


def arguments(seed: int, mesh: DeviceMesh, local: bool, device: str) -> list[Tensor]:
    """Parts of two matrices, or the matrices spread over the mesh; all of them have gradients."""
    source = torch.Generator().manual_seed(seed)
    chance = random.Random(seed)
    found: list[Tensor] = []
    for _ in range(2):
        whole = torch.randn(ROWS, ROWS, generator=source).to(device)
        held = whole.chunk(mesh.size())[mesh.get_local_rank()].clone()
        places = [chance.choice(PLACES)]
        spread: Any = held if local else DTensor.from_local(whole, mesh, [Replicate()])
        found.append(spread if local else spread.redistribute(mesh, places))
    return [t.detach().requires_grad_() for t in found]
