"""Rewrite expressions into ops that have an LLVM form, once per kernel."""

from __future__ import annotations

from dataclasses import replace

from lenz import ops
from lenz.errors import InternalError
from lenz.ir.expr import Expr, interpret, load, rebuild
from lenz.ir.kernel import For, Kernel, Let, Reduce, Scan, Stmt, Store
from lenz.ir.op import CONST, INDEX, LOAD, MASKED, REF

_STRUCTURAL = (CONST, LOAD, INDEX, REF, MASKED)


def legalise(k: Kernel) -> Kernel:
    """The same kernel over ops that have an `llvm` form, and without stores that update.

    store add(%y, [i], v)   ==>   store(%y, [i], add(load(%y, [i]), v))

    Raises InternalError for an op without any.
    """
    memo: dict[Expr, Expr] = {}

    def legal(e: Expr) -> Expr:
        return legal_expr(e, memo)

    def statement(s: Stmt) -> Stmt:
        match s:
            case For():
                return replace(s, body=tuple([statement(x) for x in s.body]))
            case Let() | Reduce() | Scan():
                return replace(s, value=legal(s.value))
            case Store():
                value = s.value
                if s.mode != "set":
                    old = load(s.buffer, (s.offset,), value.dtype, s.bound)
                    value = ops.combine(s.mode, old, value)
                bound = tuple([legal(e) for e in s.bound])
                return replace(s, value=legal(value), bound=bound, mode="set")

    return replace(k, body=tuple([statement(s) for s in k.body]))


def legal_expr(e: Expr, memo: dict[Expr, Expr] | None = None) -> Expr:
    """An expression over ops that have an `llvm` form; `memo` shares results between calls."""
    memo = {} if memo is None else memo

    def visit(e: Expr, args: list[Expr]) -> Expr:
        new = rebuild(e, tuple(args))
        if is_legal(new):
            return new
        if new.op.expand is None:
            kinds = ", ".join(a.dtype.name for a in new.args)
            raise InternalError(f"{new.op.name}({kinds}) has no LLVM form", pass_name="legalise")
        return interpret(new.op.expand(*new.args, *new.attrs), visit, memo)

    return interpret(e, visit, memo)


def is_legal(e: Expr) -> bool:
    """True when the node can be emitted as it is."""
    if e.op in _STRUCTURAL:
        return True
    if e.op.llvm is None:
        return False
    return e.op.native is None or all(a.dtype in e.op.native for a in e.args)
