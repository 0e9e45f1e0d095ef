"""Several grids in one kernel: the programs are divided among them.

Each grid is a function. Up to eight neighbours that only differ in their pointers have one body, so
that 32 updates of an optimizer compile like four. Here are two grids of 16 programs, then one of 5:

    if tl.program_id(0) < 32:
        which = tl.program_id(0) // 16
        if which < 1:
            own0 = a0
        else:
            own0 = a1
        part0(own0, tl.program_id(0) - which * 16)
    else:
        part1(a2, tl.program_id(0) - 32)
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
    """One grid: a kernel with parameters of its own, which ones these are, and its lines."""

    kernel: ir.Kernel
    given: tuple[str, ...]
    lines: Sequence[str]


def side_by_side(
    grids: Sequence[Grid], sizes: Sequence[Var], wide: bool
) -> tuple[list[str], list[str]]:
    """The functions of the grids, and the lines of the kernel. `wide` indices have 64 bits."""
    indices, known, lines = Indices(Text(), wide), dict[str, str](), list[str]()
    indices.vars |= {v: Term(v.name) for v in sizes}
    told = [v.name for v in sizes]
    end: Sym = ZERO

    def alike(g: Grid) -> tuple[str, Sym, object]:
        """A function for pointers of these types, and a number of programs."""
        names = [p.name for p in g.kernel.params]
        text = "\n".join([f"({', '.join([*names, *told, PART])}):", *g.lines])
        name = known.setdefault(text, f"part{len(known)}")
        return name, ir.programs(g.kernel), [(p.dtype, p.aligned) for p in g.kernel.params]

    runs = []
    for key, found in groupby(grids, alike):
        given = [g.given for g in found]
        runs += [(key, given[k : k + ONE_BODY]) for k in range(0, len(given), ONE_BODY)]
    for n, ((name, each, _), given) in enumerate(runs):
        place = f"{PROGRAM} - {indices.term(end, {}).text}" if n else PROGRAM
        end = end + each * len(given)
        test = f"{'el' * (n > 0)}if {PROGRAM} < {indices.term(end, {}).text}:"
        if n == len(runs) - 1:
            test = "else:" if n else "if True:"
        lines.append(f"    {test}")
        lines += _call(name, given, indices.term(each, {}).text, told, place)
    return [f"def {name}{text}" for text, name in known.items()], [*indices.text.bodies[0], *lines]


def _call(
    name: str, given: Sequence[Sequence[str]], extent: str, sizes: Sequence[str], place: str
) -> Iterator[str]:
    """The call for program `place` of equal grids, of `extent` programs each."""
    own, space = [*given[0]], "        "
    if given[1:]:
        yield f"{space}which = ({place}) // {extent}"
        place = f"{place} - which * {extent}"
        varies = [k for k, names in enumerate(zip(*given, strict=True)) if len({*names}) > 1]
        for k in varies:
            own[k] = f"own{k}"
        yield from _chosen([[f"own{k} = {names[k]}" for k in varies] for names in given], space)
    yield f"{space}{name}({', '.join([*own, *sizes, place])})"


def _chosen(lines: Sequence[Sequence[str]], space: str, first: int = 0) -> Iterator[str]:
    """The lines of number `which`, found by halves."""
    if len(lines) == 1:
        yield from (space + line for line in lines[0])
        return
    half = len(lines) // 2
    yield f"{space}if which < {first + half}:"
    yield from _chosen(lines[:half], space + "    ", first)
    yield f"{space}else:"
    yield from _chosen(lines[half:], space + "    ", first + half)
