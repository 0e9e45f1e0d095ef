"""The one rule about implicit roundings, shared by the graph pass and by fusion."""

from __future__ import annotations

from collections.abc import Set

from lenz.ir.dtype import F32, F64
from lenz.ir.expr import Expr, interpret, rebuild
from lenz.ops.cast import cast


def widen(body: Expr, kept: Set[Expr] = frozenset()) -> Expr:
    """cast(narrow(x, half), f32) ==> x, everywhere in one expression (x: f32).

    `narrow` is the rounding of an op that returns a half tensor. A user's `cast` to a half type
    always stays; roundings in `kept` become such casts. A cast to f64 reads the unrounded x as
    well: a mean in f64 and the numbers it is subtracted from must agree.
    """

    def visit(e: Expr, args: list[Expr]) -> Expr:
        if e.op.name == "narrow" and e in kept:
            return cast(args[0], e.dtype)
        if e.op.name == "cast" and e.dtype in (F32, F64) and args[0].op.name == "narrow":
            return cast(args[0].args[0], e.dtype)
        return rebuild(e, tuple(args))

    return interpret(body, visit)


def settled(e: Expr) -> Expr:
    """narrow(x, half) ==> cast(x, half): a rounding that no reader removes."""
    return cast(e.args[0], e.dtype) if e.op.name == "narrow" else e
