"""Rewrite expressions into ops that the target has a form for, once per kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lenz.errors import InternalError
from lenz.ir.dtype import DType
from lenz.ir.expr import Expr, interpret, rebuild
from lenz.ir.kernel import Kernel, Stmt, Store, map_leaves
from lenz.ir.op import Op
from lenz.ir.syntax import map_values

Expansion = Callable[..., Expr]
Expansions = Callable[[Op], Expansion | None]


def types_of(e: Expr) -> list[DType]:
    """The types that decide whether there is a direct form: operands, and a conversion's result."""
    return [a.dtype for a in e.args] + [a for a in e.attrs if isinstance(a, DType)]


def legalise_kernel(
    k: Kernel,
    is_legal: Callable[[Expr], bool],
    expansion: Expansions,
    target: str,
    store: Callable[[Store], Store] = lambda s: s,
) -> Kernel:
    """The same kernel over legal nodes; `expansion` gives the definition of an illegal op.

    `store` rewrites each store first. Raises InternalError, naming the target, for an op without a
    definition.
    """
    memo: dict[Expr, Expr] = {}

    def legal(e: Expr) -> Expr:
        return legal_expr(e, is_legal, expansion, target, memo)

    def statement(s: Stmt) -> Stmt:
        return map_values(store(s) if isinstance(s, Store) else s, legal)

    return replace(k, body=map_leaves(k.body, statement))


def legal_expr(
    e: Expr,
    is_legal: Callable[[Expr], bool],
    expansion: Expansions,
    target: str,
    memo: dict[Expr, Expr],
) -> Expr:
    """An expression over legal nodes; `memo` shares results between calls."""

    def visit(e: Expr, args: list[Expr]) -> Expr:
        new = rebuild(e, tuple(args))
        if is_legal(new):
            return new
        expand = expansion(new.op)
        if expand is None:
            kinds = ", ".join(a.dtype.name for a in new.args)
            raise InternalError(
                f"{new.op.name}({kinds}) has no {target} form", pass_name="legalise"
            )
        return interpret(expand(*new.args, *new.attrs), visit, memo)

    return interpret(e, visit, memo)
