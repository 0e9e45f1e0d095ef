"""Every rule of sym_rules.py, by name: true on ints, done by the constructors, never worse."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from lenz.sym import Int, Sym, Var, evaluate, sym
from tests.sym.sym_rules import RULES, Hole, Rule

SPAN = 7  # open ranges are tried from -SPAN to SPAN


def ids(rule: Rule) -> str:
    return rule.name


def assignments(holes: tuple[Hole, ...]) -> Iterator[list[int]]:
    """Every choice of small ints for the holes."""

    def grow(done: list[int]) -> Iterator[list[int]]:
        if len(done) == len(holes):
            yield done
            return
        h = holes[len(done)]
        lo = -SPAN if h.lo is None else h.lo
        hi = SPAN if h.hi is None else h.hi
        if h.high is not None:
            hi = min(hi, h.high(*done) - 1)
        if len(holes) > 3 and not h.is_constant:  # keep the product small
            lo, hi = max(lo, -4), min(hi, 4)
        for x in range(lo, hi + 1):
            yield from grow([*done, x])

    yield from grow([])


def symbols(holes: tuple[Hole, ...]) -> Iterator[list[Sym]]:
    """Variables for the holes, with each choice of the constants."""
    choices = [range(h.lo or 0, (h.hi or 0) + 1) if h.is_constant else (0,) for h in holes]
    for choice in product(*choices):
        out: list[Sym] = []
        for h, x in zip(holes, choice, strict=True):
            if h.is_constant:
                out.append(Int(x))
            else:
                high = None if h.high is None else sym(h.high(*out))
                out.append(Var(h.name, h.lo, h.hi, below=high))
        yield out


@pytest.mark.parametrize("rule", RULES, ids=ids)
def test_is_true_on_ints(rule: Rule) -> None:
    tried = 0
    for values in assignments(rule.holes):
        assert rule.left(*values) == rule.right(*values), f"{rule.equation} at {values}"
        tried += 1
    assert tried >= 5


@pytest.mark.parametrize("rule", RULES, ids=ids)
def test_is_applied(rule: Rule) -> None:
    for holes in symbols(rule.holes):
        assert sym(rule.left(*holes)) is sym(rule.right(*holes)), f"{rule.equation} at {holes}"


@pytest.mark.parametrize("rule", RULES, ids=ids)
def test_built_value_is_right(rule: Rule) -> None:
    """The object the left side builds has the value that plain ints give for the left side."""
    built: dict[tuple[int, ...], Sym] = {}
    for values in assignments(rule.holes):
        consts = tuple(x for x, h in zip(values, rule.holes, strict=True) if h.is_constant)
        holes: list[Sym] = []
        for x, h in zip(values, rule.holes, strict=True):
            high = None if h.high is None else sym(h.high(*holes))
            holes.append(Int(x) if h.is_constant else Var(h.name, h.lo, h.hi, below=high))
        if consts not in built:
            built[consts] = sym(rule.left(*holes))
        at = {v: x for v, x in zip(holes, values, strict=True) if isinstance(v, Var)}
        e = built[consts]
        got = evaluate(e, at)
        assert got == rule.left(*values), f"{rule.equation} at {values}: built {e}"
        assert (e.lo is None or e.lo <= got) and (e.hi is None or got <= e.hi)


class Cost:
    """Counts the divisions and remainders that a side performs."""

    def __init__(self, n: int = 0) -> None:
        self.n = n

    def plain(self, other: Any) -> Cost:
        return Cost(self.n + (other.n if isinstance(other, Cost) else 0))

    def heavy(self, other: Any) -> Cost:
        return Cost(self.plain(other).n + 1)

    def __neg__(self) -> Cost:
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = plain
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = heavy


@pytest.mark.parametrize(
    "rule", [r for r in RULES if not r.name.startswith(("min", "max", "ceil"))], ids=ids
)
def test_right_side_is_no_worse(rule: Rule) -> None:
    for consts in symbols(rule.holes):
        holes = [h.value if isinstance(h, Int) else Cost() for h in consts]
        left, right = rule.left(*holes), rule.right(*holes)
        assert right.n <= left.n
        break


def test_names_are_unique() -> None:
    assert len({r.name for r in RULES}) == len(RULES)
