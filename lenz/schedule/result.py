"""What a nest does with the values of its body: one of five kinds, each with its own fields."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from lenz.ir.expr import Expr
from lenz.ir.graph import ReduceKind, ScanKind, UpdateMode
from lenz.ir.tensor import Axis
from lenz.records import dataclass, replace


@dataclass(frozen=True, slots=True)
class Each:
    """Every value is an element of the target."""


@dataclass(frozen=True, slots=True)
class Fold:
    """The values along R are reduced to one element, which is finished.

    A fold `across` runs over axes of P, the nest's `raxes`, for each element of its group's rows
    (see `nest.crossing`).
    """

    kind: ReduceKind
    finish: Expr
    across: bool = False


@dataclass(frozen=True, slots=True)
class Running:
    """Each position along R, a single axis, gets the finished fold of all values up to it."""

    kind: ScanKind
    finish: Expr


@dataclass(frozen=True, slots=True)
class Sorted:
    """The values along R are stored in order: the smallest ones over `kept`, or all of them."""

    kept: tuple[Axis, ...] = ()


@dataclass(frozen=True, slots=True)
class Update:
    """Each value is combined with the element at an offset in which `@k` is `bound[k]`.

    No two elements of P update the same place; those of R run in order.
    """

    mode: UpdateMode
    bound: tuple[Expr, ...] = ()


Result: TypeAlias = Each | Fold | Running | Sorted | Update


def result_exprs(r: Result) -> tuple[Expr, ...]:
    """Every expression of it."""
    match r:
        case Fold() | Running():
            return (r.finish,)
        case Update():
            return r.bound
    return ()


def mapped(r: Result, change: Callable[[Expr], Expr]) -> Result:
    """The same with changed expressions."""
    match r:
        case Fold() | Running():
            return replace(r, finish=change(r.finish))
        case Update():
            return replace(r, bound=tuple(map(change, r.bound)))
    return r
