"""Evaluation of symbolic integers: values and substitution."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from typing import Any, TypeAlias

from lenz.sym.divide import floordiv, mod
from lenz.sym.expr import ONE, Add, FloorDiv, Int, Max, Min, Mod, Mul, Sym, Var, sum_of, sym
from lenz.sym.extremum import maximum, minimum

Pick: TypeAlias = Callable[[Any, Any], Any]


def product(items: Iterable[Sym | int]) -> Sym:
    """The product of the items, 1 for none."""
    out: Sym = ONE
    for x in items:
        out = out * sym(x)
    return out


def evaluate(e: Sym, mapping: Mapping[Var, int]) -> int:
    """The value of e.

    Raises KeyError for a variable without a value, ZeroDivisionError for a zero divisor.
    """
    value: int = evaluate_with(e, dict(mapping), min, max)
    return value


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
    match e:
        case Var():
            raise KeyError(e)
        case Add():
            out: Any = e.const
            for t, c in e.terms:
                out = out + c * evaluate_with(t, known, low, high)
        case Mul():
            out = 1
            for f in e.factors:
                out = out * evaluate_with(f, known, low, high)
        case FloorDiv() | Mod():
            a, b = evaluate_with(e.num, known, low, high), evaluate_with(e.den, known, low, high)
            out = a // b if type(e) is FloorDiv else a % b
        case Min() | Max():
            parts = [evaluate_with(x, known, low, high) for x in e.args]
            out = reduce(low if type(e) is Min else high, parts)
        case _:
            raise TypeError(f"not a symbolic integer: {type(e).__name__}")
    known[e] = out
    return out


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
    out: Sym
    match e:
        case Add():
            out = sum_of([(_image(t, mapping, memo), c) for t, c in e.terms]) + e.const
        case Mul():
            out = product([_image(f, mapping, memo) for f in e.factors])
        case FloorDiv():
            out = floordiv(_image(e.num, mapping, memo), _image(e.den, mapping, memo))
        case Mod():
            out = mod(_image(e.num, mapping, memo), _image(e.den, mapping, memo))
        case Min():
            out = reduce(minimum, [_image(x, mapping, memo) for x in e.args])
        case Max():
            out = reduce(maximum, [_image(x, mapping, memo) for x in e.args])
        case _:
            raise TypeError(f"not a symbolic integer: {type(e).__name__}")
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
