"""Several grids in one kernel: the programs are divided among them.

Each grid is a function. Up to eight neighbours that only differ in their pointers, and in where
their lanes end, have one body, so that 32 updates of an optimizer compile like four. Here are grids
of 16 and 9 programs, for 8000 and 4208 elements, then one of 5 programs:

    if tl.program_id(0) < 25:
        if tl.program_id(0) < 16:
            own_a0 = a0
            own_end0 = 1000
            own_first = 0
        else:
            own_a0 = a1
            own_end0 = 526
            own_first = 16
        part0(own_a0, own_end0, tl.program_id(0) - own_first)
    else:
        part1(a2, tl.program_id(0) - 25)

The lanes of `part0` run below `8 * end0`: so Triton knows what divides it, and accesses are wide.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from lenz.ir import kernel as ir
from lenz.machine.cuda.triton.indices import Indices
from lenz.machine.cuda.triton.text import Term, Text
from lenz.records import dataclass
from lenz.sym import ZERO, Sym, Var

# Grids of one body. ptxas keeps all their pointers in registers if they are many: it takes 142 for
# 32 updates by SGD, 85 for 16, 24 for 8 and for 1.
ONE_BODY = 8
# The number of a program; in the function of a grid, among the programs of this grid.
PROGRAM, PART = "tl.program_id(0)", "program"


@dataclass(frozen=True, slots=True)
class Grid:
    """One grid: a kernel with parameters of its own, which ones these are, its lines and ends."""

    kernel: ir.Kernel
    given: tuple[str, ...]
    lines: Sequence[str]
    ends: Sequence[int]

    @property
    def own(self) -> dict[str, str]:
        """What it gives for the parameters of its function: pointers, then ends."""
        return {**dict(zip([p.name for p in self.kernel.params], self.given, strict=True)),
                **{f"end{n}": str(x) for n, x in enumerate(self.ends)}}  # fmt: skip


def side_by_side(
    grids: Sequence[Grid], sizes: Sequence[Var], wide: bool
) -> tuple[list[str], list[str]]:
    """The functions of the grids, and the lines of the kernel. `wide` indices have 64 bits."""
    indices, known, lines = Indices(Text(), wide), dict[str, str](), list[str]()
    indices.vars |= {v: Term(v.name) for v in sizes}
    told = [v.name for v in sizes]
    start: Sym = ZERO

    def alike(g: Grid) -> tuple[str, object]:
        """A function for pointers of these types."""
        text = "\n".join([f"({', '.join([*g.own, *told, PART])}):", *g.lines])
        name = known.setdefault(text, f"part{len(known)}")
        return name, [(p.dtype, p.aligned) for p in g.kernel.params]

    runs = []
    for (name, _), found in groupby(grids, alike):
        same = [*found]
        runs += [(name, same[k : k + ONE_BODY]) for k in range(0, len(same), ONE_BODY)]
    for n, (name, same) in enumerate(runs):
        places = []
        for g in same:
            places.append(indices.term(start, {}).text)
            start = start + ir.programs(g.kernel)
        test = f"{'el' * (n > 0)}if {PROGRAM} < {indices.term(start, {}).text}:"
        if n == len(runs) - 1:
            test = "else:" if n else "if True:"
        lines.append(f"    {test}")
        lines += _call(name, same, told, places)
    return [f"def {name}{text}" for text, name in known.items()], [*indices.text.bodies[0], *lines]


def _call(name: str, same: Sequence[Grid], told: list[str], places: list[str]) -> Iterator[str]:
    """The call for grids of one body, whose programs begin at `places`."""
    rows = [{**g.own, "first": p} for g, p in zip(same, places, strict=True)]
    args, space = dict(rows[0]), "        "
    for own in [k for k, x in args.items() if any(row[k] != x for row in rows)]:
        args[own] = f"own_{own}"
    lines = [[f"{args[k]} = {x}" for k, x in row.items() if args[k] != x] for row in rows]
    yield from _chosen(lines, places, space)
    *values, first = args.values()
    place = PROGRAM if first == "0" else f"{PROGRAM} - {first}"
    yield f"{space}{name}({', '.join([*values, *told, place])})"


def _chosen(lines: Sequence[Sequence[str]], places: Sequence[str], space: str) -> Iterator[str]:
    """The lines for a program, found by halves: those of the last place that is not after it."""
    if len(lines) == 1:
        yield from (space + line for line in lines[0])
        return
    half = len(lines) // 2
    yield f"{space}if {PROGRAM} < {places[half]}:"
    yield from _chosen(lines[:half], places[:half], space + "    ")
    yield f"{space}else:"
    yield from _chosen(lines[half:], places[half:], space + "    ")
