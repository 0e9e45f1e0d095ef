"""GPU programs whose part of a row does not contain its end run a body without tests.

    for b in 25 : grid { for w in 2048 : lane { f(masked(2048*b + w < 50257, x, 0)) } }
    ==>  for b in 25 : grid {
           if 2048*b + 2047 < 50257 { for w in 2048 : lane { f(x) } } else { .. }    as it was
         }

Online softmax of 8192 x 50257 bf16 takes 270 us this way, and 408 us with tests everywhere.

    for b in 2 : grid { for w in 512 : lane { where(512*b + w < 512, x, y) } }
    ==>  for b in 2 : grid { if b < 1 { for w in 512 : lane { x } } else { .. y .. } }

The gradients of both halves of silu(x) * y, 8224 x 1024 bf16, take 12 us so, and 28 if each element
computes both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import gcd

from lenz.ir.dtype import BOOL
from lenz.ir.expr import Expr, const, interpret, load, nodes_of, rebuild
from lenz.ir.kernel import For, If, Scan, Sort, Stmt, exprs_of, map_leaves, walk
from lenz.ir.op import CONST, INDEX, LOAD, MASKED
from lenz.ir.syntax import map_values
from lenz.ir.tensor import Axis
from lenz.ops.bits import AND
from lenz.ops.compare import LE, LT, WHERE, sides_of
from lenz.ops.fold import apply
from lenz.schedule.cut import undecided
from lenz.sym import ONE, ZERO, Add, Int, Mod, Sym, Var, affine_in, divisor, substitute
from lenz.sym.prove import prove_le, prove_lt


def untested(body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    """Programs over parts of rows: without tests if all of the part is in the row."""
    lanes = {s.axis: None for s in walk(body) if isinstance(s, For)}
    if len(lanes) != 1 or any(isinstance(s, (Scan, Sort)) for s in walk(body)):
        return body
    (lane,) = lanes
    if not isinstance(lane.extent, Int):
        return body
    found = {e: _hardest(e, lane) for e in nodes_of(*exprs_of(body))}
    tests = {e: test for e, test in found.items() if test is not None}
    is_whole = undecided([*tests.values()])
    if is_whole is None:
        return body
    known = dict.fromkeys(tests, True)
    return (If(*is_whole, _rewritten(body, lane, known), _rewritten(body, lane, {})),)


def row_piece(bodies: Iterable[Expr], row: Axis) -> int:
    """The greatest power of two that divides all pieces of a row with formulas of their own."""
    tests = [e.args for e in nodes_of(*bodies) if e.op is LT and e.args[0].attrs[:1] == (row.var,)]
    ends = [e.attrs[0] if e.op is INDEX else ONE for _, e in tests]
    unit = gcd(*[n.value if isinstance(n, Int) else 1 for n in ends])
    return unit & -unit


def in_pieces(body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    """Programs whose lanes all lie in one piece of a row, with the formula of that piece."""
    lanes = [s.axis for s in walk(body) if isinstance(s, For)]
    found = {e: t for e in nodes_of(*exprs_of(body)) if lanes and (t := _uniform(e, lanes))}
    sure = {
        e: prove_lt(tile, end) is below
        for e, (tile, end, below) in found.items()
        if prove_lt(tile, end) or prove_le(end, tile)
    }
    if sure:
        return in_pieces(_rewritten(body, lanes[-1], sure))
    # Branches stand inside each other, and Python indents them 100 deep at most.
    low, high, _ = next(iter(found.values()), (ZERO, ZERO, True))
    if not 0 < len(found) <= 64 or any(tile is not low for tile, *_ in found.values()):
        return body
    then = {e: below for e, (_, end, below) in found.items() if prove_le(high, end)}
    orelse = {e: not below for e, (_, end, below) in found.items() if prove_le(end, high)}
    parts = [in_pieces(_rewritten(body, lanes[-1], known)) for known in (then, orelse)]
    return (If(low, high, *parts),)


def _uniform(e: Expr, lanes: Sequence[Axis]) -> tuple[Sym, Sym, bool] | None:
    """A test that holds for all lanes of a program or none: a tile, an end, if it is below that."""
    if (sides := sides_of(e, LT, LE)) is None:
        return None
    width, moving = lanes[-1].extent, {x.var for x in lanes}
    below = e.op is LT  # else the end is at most the position
    place, end = sides if below else sides[::-1]
    tile = place // width
    is_uniform = end % width is ZERO and not moving & {*tile.free_vars, *end.free_vars}
    return (tile, end // width, below) if is_uniform else None


def _hardest(e: Expr, lane: Axis) -> tuple[Sym, Sym] | None:
    """A test a < b of positions at the lane where it fails first: if it holds there, it holds.

    None if it is not such a test, or if it fails at more than a quarter of all positions, or in
    more than a quarter of the tiles.
    """
    if (sides := sides_of(e, LT, LE)) is None:
        return None
    a, b = sides
    room: Sym = b - a + (1 if e.op is LE else 0)  # positive if the test holds
    step, _ = affine_in(room, lane.var) or (ZERO, room)
    if not isinstance(step, Int) or step is ZERO or room.hi is None or room.lo is None:
        return None
    if room.hi - room.lo < 4 * abs(step.value) * (lane.extent.hi or 0) or -room.lo * 3 > room.hi:
        return None
    worst = {lane.var: lane.extent - 1 if step.value < 0 else ZERO}
    return substitute(a, worst), substitute(b + (1 if e.op is LE else 0), worst)


def _rewritten(body: tuple[Stmt, ...], lane: Axis, known: Mapping[Expr, bool]) -> tuple[Stmt, ...]:
    """The statements with tests that are known, and offsets that show their divisors."""
    memo: dict[Expr, Expr] = {}

    def visit(e: Expr, args: list[Expr]) -> Expr:
        if e in known:
            return const(known[e], BOOL)
        if e.op is MASKED and args[0].op is CONST:
            return args[1] if args[0].attrs[0] else args[2]
        if e.op is LOAD:
            return load(e.attrs[0], [_shown(s, lane.var) for s in e.attrs[1]], e.dtype, tuple(args))
        return apply(e.op, *args) if e.op in (AND, WHERE) else rebuild(e, tuple(args))

    return map_leaves(body, lambda s: map_values(s, lambda e: interpret(e, visit, memo)))


def _shown(s: Sym, lane: Var) -> Sym:
    """x - x % m as a multiple of m, if that makes the first lane's offset a multiple."""
    step, rest = affine_in(s, lane) or (ZERO, s)
    for t, c in rest.terms if isinstance(rest, Add) else ():
        if isinstance(t, Mod) and isinstance(t.den, Int):
            shown = rest - c * t + c * t.num - c * t.den * (t.num // t.den)
            if divisor(shown) % t.den.value == 0:
                return step * lane + shown
    return s
