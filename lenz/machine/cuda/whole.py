"""GPU programs whose part of a row does not contain its end run a body without tests.

    for b in 25 : grid { for w in 2048 : lane { f(masked(2048*b + w < 50257, x, 0)) } }
    ==>  for b in 25 : grid {
           for whole in (1 if 2048*b + 2047 < 50257 else 0) : seq { for w in 2048 : lane { f(x) } }
           for ends in 1 - whole : seq { for w in 2048 : lane { .. } }    as it was
         }

Online softmax of 8192 x 50257 bf16 takes 270 us this way, and 408 us with tests everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lenz import ops
from lenz.ir.dtype import BOOL
from lenz.ir.expr import Expr, const, interpret, load, nodes_of, rebuild
from lenz.ir.kernel import For, Let, Reduce, Scan, Sort, Stmt, Store, exprs_of, walk
from lenz.ir.op import INDEX, LOAD, MASKED
from lenz.ir.tensor import Axis, axis
from lenz.ops.bits import AND
from lenz.ops.compare import LE, LT, WHERE
from lenz.ops.fold import apply
from lenz.sym import ONE, ZERO, Add, Int, Mod, Sym, Var, affine_in, divisor, maximum, minimum


def untested(body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    """Programs over parts of rows: without tests if all of the part is in the row."""
    if len(body) == 1 and isinstance(body[0], For) and body[0].kind == "grid":
        return (replace(body[0], body=untested(body[0].body)),)
    lanes = {s.axis: None for s in walk(body) if isinstance(s, For)}
    if len(lanes) != 1 or any(isinstance(s, (Scan, Sort)) for s in walk(body)):
        return body
    (lane,) = lanes
    if not isinstance(lane.extent, Int):
        return body
    found = {e: _holds(e, lane) for e in nodes_of(*exprs_of(body))}
    holds = {e: held for e, held in found.items() if held is not None}
    is_whole: Sym = ONE
    for held in holds.values():
        is_whole = minimum(is_whole, held)
    if isinstance(is_whole, Int):
        return body
    return (
        For(axis("whole", is_whole), "seq", _rewritten(body, lane, holds)),
        For(axis("ends", ONE - is_whole), "seq", _rewritten(body, lane, {})),
    )


def _holds(e: Expr, lane: Axis) -> Sym | None:
    """1 if a test of positions holds for all lanes, else 0.

    None if it is not such a test, or if it fails at more than a quarter of all positions, or in
    more than a quarter of the tiles.
    """
    if e.op not in (LT, LE) or any(x.op is not INDEX or x.args for x in e.args):
        return None
    a, b = (x.attrs[0] for x in e.args)
    room: Sym = b - a + (1 if e.op is LE else 0)  # positive if the test holds
    step, first = affine_in(room, lane.var) or (ZERO, room)
    if not isinstance(step, Int) or step is ZERO or room.hi is None or room.lo is None:
        return None
    if room.hi - room.lo < 4 * abs(step.value) * (lane.extent.hi or 0) or -room.lo * 3 > room.hi:
        return None
    least = first + step * (lane.extent - 1) if step.value < 0 else first
    return maximum(ZERO, minimum(ONE, least))


def _rewritten(body: tuple[Stmt, ...], lane: Axis, true: Mapping[Expr, Sym]) -> tuple[Stmt, ...]:
    """The statements with tests that hold, and offsets that show their divisors."""
    memo: dict[Expr, Expr] = {}

    def visit(e: Expr, args: list[Expr]) -> Expr:
        if e in true:
            return const(1, BOOL)
        if e.op is MASKED and ops.is_value(args[0], 1):
            return args[1]
        if e.op is LOAD:
            return load(e.attrs[0], [_shown(s, lane.var) for s in e.attrs[1]], e.dtype, tuple(args))
        return apply(e.op, *args) if e.op in (AND, WHERE) else rebuild(e, tuple(args))

    def statement(s: Stmt) -> Stmt:
        match s:
            case For():
                return replace(s, body=tuple([statement(x) for x in s.body]))
            case Let() | Reduce() | Store():
                return replace(s, value=interpret(s.value, visit, memo))
            case _:
                return s

    return tuple([statement(s) for s in body])


def _shown(s: Sym, lane: Var) -> Sym:
    """x - x % m as a multiple of m, if that makes the first lane's offset a multiple."""
    step, rest = affine_in(s, lane) or (ZERO, s)
    for t, c in rest.terms if isinstance(rest, Add) else ():
        if isinstance(t, Mod) and isinstance(t.den, Int):
            shown = rest - c * t + c * t.num - c * t.den * (t.num // t.den)
            if divisor(shown) % t.den.value == 0:
                return step * lane + shown
    return s
