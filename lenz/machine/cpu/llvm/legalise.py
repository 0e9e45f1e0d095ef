"""Which ops have a direct form in LLVM."""

from __future__ import annotations

from dataclasses import replace

from lenz import ops
from lenz.ir.expr import Expr, load
from lenz.ir.kernel import Kernel, Store
from lenz.ir.op import CONST, INDEX, LOAD, MASKED, REF
from lenz.machine.legalise import legal_expr as legal_for
from lenz.machine.legalise import legalise_kernel, types_of

_STRUCTURAL = (CONST, LOAD, INDEX, REF, MASKED)


def legalise(k: Kernel) -> Kernel:
    """The same kernel over ops that have an `llvm` form, and without stores that update.

    store add(%y, [i], v)   ==>   store(%y, [i], add(load(%y, [i]), v))

    Raises InternalError for an op that has none.
    """
    return legalise_kernel(k, is_legal, lambda op: op.expand, "LLVM", _set)


def _set(s: Store) -> Store:
    if s.mode == "set":
        return s
    old = load(s.buffer, (s.offset,), s.value.dtype, s.bound)
    return replace(s, value=ops.combine(s.mode, old, s.value), mode="set")


def legal_expr(e: Expr, memo: dict[Expr, Expr] | None = None) -> Expr:
    """An expression over ops that have an `llvm` form; `memo` shares results between calls."""
    return legal_for(e, is_legal, lambda op: op.expand, "LLVM", {} if memo is None else memo)


def is_legal(e: Expr) -> bool:
    """True if the node can be emitted as it is."""
    if e.op in _STRUCTURAL:
        return True
    if e.op.llvm is None:
        return False
    return e.op.native is None or all(d in e.op.native for d in types_of(e))
