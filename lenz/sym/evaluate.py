"""Evaluation of symbolic integers: values and substitution."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from typing import Any, TypeAlias

from lenz.sym.expr import ONE, Add, FloorDiv, Int, Max, Min, Mod, Mul, Sym, Var, children, sum_of
from lenz.sym.extremum import maximum, minimum

Pick: TypeAlias = Callable[[Any, Any], Any]
# How the operands of a node are joined; for minima and maxima the caller says it.
_OPERATORS: Mapping[type[Sym], Pick] = {
    Mul: operator.mul, FloorDiv: operator.floordiv, Mod: operator.mod,
}  # fmt: skip


def product(items: Iterable[Sym | int]) -> Sym:
    """The product of the items, 1 for none."""
    out: Sym = reduce(operator.mul, items, ONE)
    return out


def evaluate(e: Sym, mapping: Mapping[Var, int]) -> int:
    """The value of e.

    Raises KeyError for a variable without a value, ZeroDivisionError for a zero divisor.
    """
    value: int = evaluate_with(e, dict(mapping), min, max)
    return value


def guess(e: Sym, mapping: Mapping[Var, int]) -> int:
    """The value of e for sizes that are made up; 1 if they make a divisor 0."""
    try:
        return evaluate(e, mapping)
    except ZeroDivisionError:
        return 1


def evaluate_with(e: Sym, known: dict[Any, Any], low: Pick, high: Pick) -> Any:
    """The value of e for those of its variables in `known`, which gets the values of its parts.

    They are numbers, or tensors, whose operators are those of integers. `low` and `high` give the
    smaller and the larger one of two.
    """
    if type(e) is Int:
        return e.value
    found = known.get(e)
    if found is not None:
        return found
    if type(e) is Var:
        raise KeyError(e)
    parts = [evaluate_with(x, known, low, high) for x in children(e)]
    if type(e) is Add:
        out: Any = sum([c * x for x, (_, c) in zip(parts, e.terms, strict=True)], e.const)
    else:
        out = reduce({**_OPERATORS, Min: low, Max: high}[type(e)], parts)
    known[e] = out
    return out


def positive(e: Sym, sizes: Iterable[Sym]) -> Sym:
    """e for sizes of which none is 0: max(1, n) is n."""
    known: dict[Sym, Sym] = {v: v for v in e.free_vars}
    known |= {maximum(ONE, n): n for n in sizes if known}  # a number has no size to look for
    found: Sym = e if type(e) is Int else evaluate_with(e, known, minimum, maximum)
    return found


def substitute(e: Sym, mapping: Mapping[Var, Sym]) -> Sym:
    """e with variables replaced, simplified as it is rebuilt.

    Does not look into the `below` of variables. e was simplified for the ranges of its variables,
    so each image must stay in the range of the variable that it replaces.
    """
    return _image(e, mapping, {}) if mapping else e


def _image(e: Sym, mapping: Mapping[Var, Sym], memo: dict[Sym, Sym]) -> Sym:
    if type(e) is Var:
        return mapping.get(e, e)
    found = memo.get(e)
    if found is not None:
        return found
    for v in e.free_vars:
        if v in mapping:
            break
    else:
        return e
    parts = [_image(x, mapping, memo) for x in children(e)]
    out: Sym
    if type(e) is Add:
        out = sum_of([(x, c) for x, (_, c) in zip(parts, e.terms, strict=True)]) + e.const
    else:
        out = reduce({**_OPERATORS, Min: minimum, Max: maximum}[type(e)], parts)
    memo[e] = out
    return out


def as_multiple(e: Sym) -> tuple[Var, int] | None:
    """(v, c) with e == c*v for a variable v and a number c >= 1, or None."""
    if type(e) is Var:
        return e, 1
    if type(e) is not Add or e.const or len(e.terms) != 1:
        return None
    ((v, c),) = e.terms
    return (v, c) if type(v) is Var and c >= 1 else None
