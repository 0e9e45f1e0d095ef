"""Rewrite expressions into ops that the machine has a form for, once per kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lenz.errors import InternalError
from lenz.ir.dtype import DType
from lenz.ir.expr import Expr, interpret, rebuild
from lenz.ir.kernel import Kernel, Stmt, Store, map_leaves
from lenz.ir.op import CONST, INDEX, LOAD, MASKED, REF, Types
from lenz.ir.syntax import map_values

_STRUCTURAL = (CONST, LOAD, INDEX, REF, MASKED)


def is_direct(e: Expr, machine: str, more: Types = ()) -> bool:
    """True if a machine has a direct form of the node, for its types or one of `more`."""
    form = e.op.form(machine)
    if form.emit is None:
        return e.op in _STRUCTURAL
    asked = [a.dtype for a in e.args] + [a for a in e.attrs if isinstance(a, DType)]
    return form.types is None or all(d in form.types or d in more for d in asked)


def legalise_kernel(
    k: Kernel, machine: str, is_legal: Callable[[Expr], bool],
    store: Callable[[Store], Store] = lambda s: s,
) -> Kernel:  # fmt: skip
    """The same kernel over nodes that a machine emits; others are expanded.

    `store` rewrites each store first. Raises InternalError for an op without a definition.
    """
    memo: dict[Expr, Expr] = {}

    def legal(e: Expr) -> Expr:
        return legal_expr(e, machine, is_legal, memo)

    def statement(s: Stmt) -> Stmt:
        return map_values(store(s) if isinstance(s, Store) else s, legal)

    return replace(k, body=map_leaves(k.body, statement))


def legal_expr(
    e: Expr, machine: str, is_legal: Callable[[Expr], bool], memo: dict[Expr, Expr]
) -> Expr:
    """An expression over legal nodes; `memo` shares results between calls."""

    def visit(e: Expr, args: list[Expr]) -> Expr:
        new = rebuild(e, tuple(args))
        if is_legal(new):
            return new
        expand = new.op.form(machine).expand or new.op.expand
        if expand is None:
            what = f"{new.op.name}({', '.join(a.dtype.name for a in new.args)})"
            raise InternalError(f"{what} has no form on {machine}", pass_name="legalise")
        return interpret(expand(*new.args, *new.attrs), visit, memo)

    return interpret(e, visit, memo)
