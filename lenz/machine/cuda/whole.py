"""GPU programs whose part of a row does not contain its end run a body without tests.

    for b in 25 : grid { for w in 2048 : lane { f(masked(2048*b + w < 50257, x, 0)) } }
    ==>  for b in 25 : grid {
           if 2048*b + 2047 < 50257 { for w in 2048 : lane { f(x) } } else { .. }    as it was
         }

Online softmax of 8192 x 50257 bf16 takes 270 us this way, and 408 us with tests everywhere.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from lenz import ops
from lenz.ir.dtype import BOOL
from lenz.ir.expr import Expr, const, interpret, load, nodes_of, rebuild
from lenz.ir.kernel import For, If, Let, Reduce, Scan, Sort, Stmt, Store, exprs_of, walk
from lenz.ir.op import INDEX, LOAD, MASKED
from lenz.ir.tensor import Axis
from lenz.ops.bits import AND
from lenz.ops.compare import LE, LT, WHERE
from lenz.ops.fold import apply
from lenz.schedule.cut import undecided
from lenz.sym import ZERO, Add, Int, Mod, Sym, Var, affine_in, divisor, substitute


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
    found = {e: _hardest(e, lane) for e in nodes_of(*exprs_of(body))}
    tests = {e: test for e, test in found.items() if test is not None}
    is_whole = undecided([*tests.values()])
    if is_whole is None:
        return body
    return (If(*is_whole, _rewritten(body, lane, tests), _rewritten(body, lane, ())),)


def _hardest(e: Expr, lane: Axis) -> tuple[Sym, Sym] | None:
    """A test a < b of positions at the lane where it fails first: if it holds there, it holds.

    None if it is not such a test, or if it fails at more than a quarter of all positions, or in
    more than a quarter of the tiles.
    """
    if e.op not in (LT, LE) or any(x.op is not INDEX or x.args for x in e.args):
        return None
    a, b = (x.attrs[0] for x in e.args)
    room: Sym = b - a + (1 if e.op is LE else 0)  # positive if the test holds
    step, _ = affine_in(room, lane.var) or (ZERO, room)
    if not isinstance(step, Int) or step is ZERO or room.hi is None or room.lo is None:
        return None
    if room.hi - room.lo < 4 * abs(step.value) * (lane.extent.hi or 0) or -room.lo * 3 > room.hi:
        return None
    worst = {lane.var: lane.extent - 1 if step.value < 0 else ZERO}
    return substitute(a, worst), substitute(b + (1 if e.op is LE else 0), worst)


def _rewritten(body: tuple[Stmt, ...], lane: Axis, true: Container[Expr]) -> tuple[Stmt, ...]:
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
