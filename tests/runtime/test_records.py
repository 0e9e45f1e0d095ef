"""`lenz.records` makes the classes that `dataclasses` makes."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest

from lenz import records

NAN = float("nan")


class Nothing:
    """No field."""


class One:
    """One field."""

    x: Any


class Three:
    """Fields that are not compared or not shown, and a default."""

    x: Any
    y: Any = records.field(default=0, compare=False)
    z: Any = records.field(default="", repr=False)


class Own:
    """Methods of its own, and a step after `__init__`."""

    x: Any
    y: list[Any] = records.field(default_factory=list)

    def __post_init__(self) -> None:
        self.y.append(self.x)

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 7

    def __repr__(self) -> str:
        return "own"


VALUES: dict[type, list[tuple[Any, ...]]] = {
    Nothing: [()],
    One: [(1,), (1.0,), (2,), (NAN,), ("a",), ((1,),), (None,)],
    Three: [(1,), (1, 2), (1, 2, "z"), (2, 2, "z"), (NAN, 1), (True, 1)],
    Own: [(1,), (2,)],
}


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("eq", [True, False])
@pytest.mark.parametrize("body", VALUES, ids=lambda c: c.__name__)
def test_the_methods_are_those_of_the_standard_library(body: type, eq: bool, frozen: bool) -> None:
    names = {n: v for n, v in vars(body).items() if n not in ("__dict__", "__weakref__")}
    ours, theirs = (
        how.dataclass(frozen=frozen, eq=eq, slots=True)(type(body.__name__, (), dict(names)))  # type: ignore[attr-defined]
        for how in (records, dataclasses)
    )
    a, b = ([made(*v) for v in VALUES[body]] for made in (ours, theirs))
    for k, (x, y) in enumerate(zip(a, b, strict=True)):
        assert repr(x) == repr(y)
        assert [x == other for other in a] == [y == other for other in b]
        assert x != y or body is Own, "the classes differ"
        assert (type(x).__hash__ is None) == (type(y).__hash__ is None)
        if eq and frozen:
            assert hash(x) == hash(y) and {x: k}[x] == k
        assert repr(copy.deepcopy(x)) == repr(dataclasses.replace(x)) == repr(x)
    assert ours.__match_args__ == theirs.__match_args__
    assert not hasattr(a[0], "__dict__"), "slots"


@records.dataclass(frozen=True, slots=True)
class Point:
    """A frozen object."""

    x: int


def test_an_assignment_to_a_frozen_object_is_an_error_of_types() -> None:
    """mypy reads the standard declaration: without the comment, this file does not pass."""
    Point(1).x = 2  # type: ignore[misc]
