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

IsLegal = Callable[[Expr], bool] | None  # whether a machine emits a node; None: `is_direct`
_STRUCTURAL = (CONST, LOAD, INDEX, REF, MASKED)


def is_direct(e: Expr, machine: str, more: Types = ()) -> bool:
    """True if a machine has a direct form of the node, for its types or one of `more`."""
    form = e.op.form(machine)
    if form.emit is None:
        return e.op in _STRUCTURAL
    asked = [a.dtype for a in e.args] + [a for a in e.attrs if isinstance(a, DType)]
    return form.types is None or all(d in form.types or d in more for d in asked)


def legalise_kernel(
    k: Kernel, machine: str, is_legal: IsLegal = None, store: Callable[[Store], Store] = lambda s: s
) -> Kernel:
    """The same kernel over nodes that a machine emits; others are expanded.

    `store` rewrites each store first. Raises InternalError for an op without a definition.
    """
    memo: dict[Expr, Expr] = {}

    def statement(s: Stmt) -> Stmt:
        new = store(s) if isinstance(s, Store) else s
        return map_values(new, lambda e: legal_expr(e, machine, memo, is_legal))

    return replace(k, body=map_leaves(k.body, statement))


def legal_expr(e: Expr, machine: str, memo: dict[Expr, Expr], is_legal: IsLegal = None) -> Expr:
    """An expression over nodes with a direct form; `memo` shares results between calls."""

    def visit(e: Expr, args: list[Expr]) -> Expr:
        new = rebuild(e, tuple(args))
        if is_direct(new, machine) if is_legal is None else is_legal(new):
            return new
        expand = new.op.form(machine).expand or new.op.expand
        if expand is None:
            what = f"{new.op.name}({', '.join(a.dtype.name for a in new.args)})"
            raise InternalError(f"{what} has no form on {machine}", pass_name="legalise")
        return interpret(expand(*new.args, *new.attrs), visit, memo)

    return interpret(e, visit, memo)
