"""Random programs of collectives and of what is computed while these are under way.

A program is a list of lines, drawn from a seed.  Values are matrices of ROWS x ROWS.  What a
collective gives stays in flight for a random number of lines; its argument is often dead by then,
and others of its size are made.  Values stay small, so that results can be compared closely.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

ROWS = 16
ops: Any = torch.ops._c10d_functional


@dataclass(frozen=True)
class Line:
    """values += what `act` makes of the values at `of`; a collective's results are in flight."""

    act: str
    of: tuple[int, ...]
    number: float = 0.0


@dataclass
class Drawn:
    """The lines so far, the positions of values, and those of results in flight.

    `reads` are those in flight whose call reads the argument that programs write.
    """

    chance: random.Random
    lines: list[Line] = field(default_factory=list)
    values: list[int] = field(default_factory=list)
    flying: list[int] = field(default_factory=list)
    reads: set[int] = field(default_factory=set)
    count: int = 0

    def add(self, act: str, of: tuple[int, ...], results: int = 1) -> list[int]:
        self.lines.append(Line(act, of, round(self.chance.uniform(-1, 1), 2)))
        self.count += results
        return list(range(self.count - results, self.count))

    def start(self, act: str, count: int) -> None:
        """Begin a collective of `count` values."""
        of = self.recent(count)
        made = self.add(act, of, count)
        self.flying += made
        if 1 in of:
            self.reads.update(made)

    def recent(self, count: int) -> tuple[int, ...]:
        """Some values, of which late ones are the likeliest."""
        near = self.values[-4:] if self.chance.random() < 0.7 else self.values
        return tuple(self.chance.choice(near) for _ in range(count))


COMPUTED = ("scale", "relu", "add", "mul", "product", "turn", "norm", "write", "softmax")
PAIRS = ("add", "mul", "product", "write")
STARTED = ("all_reduce", "broadcast", "all_to_all", "gather", "scatter")  # of one tensor
COALESCED = ("all_reduce_coalesced", "gather_coalesced", "scatter_coalesced")
IN_TWO = ("gather", "scatter")  # which only groups of real processes have


def drawn(seed: int, lines: int, real: bool) -> tuple[Line, ...]:
    """The lines of a program; `real` for a group of several processes."""
    chance = random.Random(seed)
    d = Drawn(chance, values=[0, 1], count=2)
    singles = [s for s in STARTED if real or s not in IN_TWO]
    for _ in range(lines):
        draw = chance.random()
        if draw < 0.45:
            act = chance.choice(COMPUTED)
            if act == "write" and not d.reads.isdisjoint(d.flying):
                continue  # in eager the call might read what was there before, or after
            d.values += d.add(act, d.recent(2 if act in PAIRS else 1))
        elif draw < 0.6:
            d.start(chance.choice(singles), 1)
        elif draw < 0.7:
            d.start(chance.choice(COALESCED), 2)
        elif d.flying:
            d.values += d.add("wait", (d.flying.pop(chance.randrange(len(d.flying))),))
    chance.shuffle(d.flying)
    for n in d.flying:
        d.values += d.add("wait", (n,))
    return tuple(d.lines)


def as_function(lines: tuple[Line, ...], group: str, size: int) -> Callable[..., Any]:
    """A program as a function of two matrices: gives its last values, and may write the second."""

    def run(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        values = [x, y]
        waited = []
        for line in lines:
            given = [values[k] for k in line.of]
            made = step(line, given, y, group, size)
            values += made
            if line.act == "wait":
                waited += made
        return (*waited[-3:], values[-1] + y, sum(values[k] for k in lines[0].of) * 1)  # type: ignore[arg-type]

    return run


def step(line: Line, xs: list[Tensor], y: Tensor, group: str, size: int) -> list[Tensor]:
    x = xs[0]
    if line.act in STARTED or line.act in COALESCED:
        return started(line.act, xs, group, size)
    if line.act == "wait":
        return [shrunk(ops.wait_tensor(x), size)]
    return [computed(line, x, xs[-1], y)]


def computed(line: Line, x: Tensor, other: Tensor, y: Tensor) -> Tensor:
    match line.act:
        case "scale":
            return x * line.number + 0.5
        case "relu":
            return x.relu() - line.number
        case "add":
            return x * 0.5 + other
        case "mul":
            return x * other.tanh()
        case "product":
            return (x @ other) / ROWS
        case "turn":
            return x.t() + line.number
        case "norm":
            return (x - x.mean(1, keepdim=True)) / (x.abs().amax() + 1)
        case "softmax":
            return x.softmax(1)
        case _:  # write
            y.mul_(0.5).add_(other.tanh())
            return x + 1


def started(act: str, xs: list[Tensor], group: str, size: int) -> list[Tensor]:
    x = xs[0]
    parts = [ROWS // size] * size
    match act:
        case "all_reduce":
            return [ops.all_reduce(x * 0.5, "sum", group)]
        case "broadcast":
            return [ops.broadcast(x, 0, group)]
        case "all_to_all":
            return [ops.all_to_all_single(x.contiguous(), parts, parts, group)]
        case "gather":
            return [ops.all_gather_into_tensor(x.contiguous(), size, group)]
        case "scatter":
            return [ops.reduce_scatter_tensor(torch.cat([x] * size), "sum", size, group)]
        case "all_reduce_coalesced":
            return list(ops.all_reduce_coalesced([t * 0.5 for t in xs], "sum", group))
        case "gather_coalesced":
            given = [t.contiguous() for t in xs]
            return list(ops.all_gather_into_tensor_coalesced(given, size, group))
        case _:
            given = [torch.cat([t] * size) for t in xs]
            return list(ops.reduce_scatter_tensor_coalesced(given, "sum", size, group))


def shrunk(x: Tensor, size: int) -> Tensor:
    """What a gather gives as one matrix; all values as of about the same size."""
    return (x.view(-1, ROWS, ROWS).sum(0) / size).clamp(-8, 8)


def arguments(seed: int, rank: int = 0, device: str = "cpu") -> list[Tensor]:
    """The arguments on a rank."""
    source = torch.Generator().manual_seed(1000 * seed + rank)
    return [torch.randn(ROWS, ROWS, generator=source).to(device) for _ in range(2)]
