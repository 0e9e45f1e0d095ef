"""Scans: the running values of one statement, in vectors along its loop or in lanes beside it.

Along the loop (w lanes, here 4), log2(w) steps give the prefixes of each vector by itself, and only
their last lanes are combined one after the other:

    v = a b c d;  v += 0 a b c;  v += 0 0 v0 v1;  out = carry + v;  carry += v3

All copies of an unrolled body take these steps side by side.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lenz import ops
from lenz.codegen.llvm import accumulate
from lenz.codegen.llvm import reductions as red
from lenz.codegen.llvm.accumulators import Accumulator
from lenz.codegen.llvm.builder import Names
from lenz.codegen.llvm.legalise import legal_expr
from lenz.codegen.llvm.scopes import Value
from lenz.codegen.llvm.types import value_type
from lenz.ir.expr import Expr, interpret, rebuild, ref
from lenz.ir.op import REF

if TYPE_CHECKING:
    from lenz.codegen.llvm.body import Body


def take(body: Body, acc: Accumulator) -> None:
    """Accumulate one value, and name the running value."""
    scopes, (dtype,) = body.scopes, acc.dtypes
    value = accumulate.operand(body, acc, scopes.copies)
    level = scopes.fn.level
    if acc.axes:
        place = body.accesses.place(acc.arrays[0], dtype, acc.offset, {})
        old = body.accesses.load(place, dtype, None, level)
        new = combine(body, acc, scopes.spread(old, dtype, acc.lanes, scopes.copies), value)
        body.accesses.store(place, dtype, Value(new, level, acc.lanes), None)
    elif acc.across:
        new = _along(body, acc, value)
    else:
        (cells,) = acc.cells
        new = combine(body, acc, tuple([c.name for c in cells[: scopes.copies]]), value)
        for cell, name in zip(cells, new, strict=False):
            cell.name = name
    running = accumulate.converted(body, acc, Value(new, level, acc.lanes))
    body.values.refs[acc.stmt.name] = running


def _along(body: Body, acc: Accumulator, value: Names) -> Names:
    """The running values where the lanes are neighbours in the loop."""
    scopes, (dtype,) = body.scopes, acc.dtypes
    fn, level, width = scopes.fn, scopes.fn.level, scopes.width
    t = value_type(dtype, width)
    start = red.identity_text(acc.stmt.kind, dtype, width)

    def shuffle(name: str, lanes: list[int]) -> str:
        order = ", ".join(f"i32 {i}" for i in lanes)
        return fn.let(level, f"shufflevector {t} {name}, {t} {start}, <{width} x i32> <{order}>")

    lane = body.indices.lane
    # A row that is shorter than a vector needs fewer steps.
    count = width if lane is None or lane.hi is None else min(width, lane.hi + 1)
    step = 1
    while step < count:
        lanes = [i - step if i >= step else width for i in range(width)]
        value = combine(body, acc, tuple([shuffle(v, lanes) for v in value]), value)
        step *= 2
    lasts = [shuffle(v, [width - 1] * width) for v in value]
    ((carry,),) = acc.cells
    carries = []
    for last in lasts:
        carries.append(carry.name)
        (carry.name,) = combine(body, acc, (carry.name,), (last,))
    return combine(body, acc, tuple(carries), value)


def combine(body: Body, acc: Accumulator, x: Names, y: Names) -> Names:
    """The op table's combination of two values, x being the earlier."""
    (dtype,) = acc.dtypes
    fn, level = body.scopes.fn, body.scopes.fn.level
    # Names of their own, so that the memo of values cannot take one use for another.
    number = fn.label()
    for name, names in (("x", x), ("y", y)):
        body.values.refs[f"{name}.{number}"] = Value(names, level, acc.lanes)
    e = _renamed(legal_expr(ops.combine(acc.stmt.kind, ref("x", dtype), ref("y", dtype))), number)
    made = body.values.value(e)
    return body.scopes.spread(made, dtype, acc.lanes, len(x))


def _renamed(e: Expr, number: str) -> Expr:
    def visit(e: Expr, args: list[Expr]) -> Expr:
        if e.op is REF:
            return ref(f"{e.attrs[0]}.{number}", e.dtype)
        return rebuild(e, tuple(args))

    return interpret(e, visit)
