"""Data classes of lenz behave as the library's."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import FrozenInstanceError, asdict, astuple, field, fields, replace
from typing import Any, ClassVar

import pytest

from lenz import records

NAN = float("nan")


def made(dataclass: Any, **how: bool) -> Any:
    """A class with every kind of field that lenz's classes have."""

    @dataclass(slots=True, **how)
    class Sample:
        """What is compared."""

        FIXED: ClassVar = 1
        size: int
        name: str = "x"
        parts: list[int] = field(default_factory=list)
        seen: tuple[object, ...] = field(default=(), compare=False)
        hidden: int = field(default=0, repr=False)

        def __post_init__(self) -> None:
            if self.size < 0:
                raise ValueError("a negative size")

    return Sample


def both(**how: bool) -> list[Any]:
    return [made(dataclasses.dataclass, **how), made(records.dataclass, **how)]


def outcome(run: Callable[[], Any]) -> object:
    """The result of a call, or the type and text of its error."""
    try:
        return run()
    except Exception as e:  # noqa: BLE001  # compared with the library's
        return type(e), str(e)


SAID: dict[str, Callable[[Any], Any]] = {
    "repr": lambda c: repr(c(3, "y", [1], (2,), 4)),
    "defaults": lambda c: astuple(c(3)),
    "own lists": lambda c: c(1).parts is c(1).parts,
    "by name": lambda c: repr(c(size=1, parts=[2])),
    "equal": lambda c: (c(1) == c(1), c(1) == c(2), c(1) != c(2), c(1) == 1),
    "uncompared": lambda c: c(1, seen=(1,)) == c(1, seen=(2,)),
    "the same nan": lambda c: (c(1, NAN) == c(1, NAN), c(1, float("nan")) == c(1, NAN)),
    "changed": lambda c: (
        repr(replace(c(1, hidden=2), size=3)) + str(replace(c(1, hidden=2)).hidden)
    ),
    "as a dict": lambda c: asdict(c(1)),
    "fields": lambda c: [(f.name, f.compare, f.repr) for f in fields(c)],
    "pattern": lambda c: c.__match_args__,
    "too few": lambda c: c(),
    "too many": lambda c: c(1, 2, 3, 4, 5, 6),
    "twice": lambda c: c(1, size=1),
    "unknown": lambda c: c(1, other=1),
    "checked": lambda c: c(-1),
    "copied": lambda c: repr(copy.deepcopy(c(1, "y", [2]))),
    "assigned": lambda c: setattr(c(1), "size", 2),
    "deleted": lambda c: delattr(c(1), "size"),
    "hashed": lambda c: len({c(1, parts=()), c(1, parts=(), seen=(1,)), c(2, parts=())}),
    "hashed list": lambda c: hash(c(1)),
    "in slots": lambda c: hasattr(c(1), "__dict__"),
}


@pytest.mark.parametrize("how", [{}, {"frozen": True}, {"repr": False}])
@pytest.mark.parametrize("what", SAID)
def test_a_class_behaves_as_the_librarys(what: str, how: dict[str, bool]) -> None:
    if what in ("repr", "by name", "changed", "copied") and "repr" in how:
        return  # an address
    theirs, ours = (outcome(lambda c=c: SAID[what](c)) for c in both(**how))  # type: ignore[misc]
    assert ours == theirs


def test_fields_by_name_only() -> None:
    for c in both(kw_only=True, frozen=True):
        assert c(size=1, name="y").name == "y"
        with pytest.raises(TypeError, match="positional"):
            c(1)


def test_own_methods_stay() -> None:
    @records.dataclass(frozen=True, slots=True)
    class Own:
        """Compared by its first field."""

        a: int
        b: int = 0

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Own) and self.a == other.a

        def __hash__(self) -> int:
            return self.a

        def __repr__(self) -> str:
            return f"<{self.a}>"

    assert Own(1, 2) == Own(1, 3) and hash(Own(5)) == 5 and repr(Own(4)) == "<4>"


def test_without_comparison_objects_are_themselves() -> None:
    for c in both(eq=False, frozen=True):
        assert c(1) != c(1) and len({c(1), c(1)}) == 2


@records.dataclass(frozen=True, slots=True)
class Base:
    """Fields that are inherited."""

    a: int


@records.dataclass(frozen=True, slots=True)
class Derived(Base):
    """One more."""

    b: tuple[int, ...] = ()


def test_inherited_fields_come_first_and_are_frozen() -> None:
    x = Derived(1, (2,))
    assert (x.a, x.b) == (1, (2,)) and x == Derived(1, (2,)) and x != Base(1)
    with pytest.raises(FrozenInstanceError):
        x.a = 2  # type: ignore[misc]


def test_a_frozen_object_can_be_copied() -> None:
    x = Derived(1, (2,))
    assert copy.copy(x) == x and copy.deepcopy(x) == x
