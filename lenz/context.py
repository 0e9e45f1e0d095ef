"""What every pass gets as its last argument: options, target, and where to tell what it does.

The fields never change.  Two of them refer to objects that record: `fuel` counts the optional
rewrites, `trace` takes timings and texts.  No pass may let its result depend on either, but for
the verdict of `allow`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from lenz.options import Options
from lenz.target import Target


class Trace(Protocol):
    """Takes what the compiler tells about itself."""

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Time the body of a `with` as the stage `name`; stages may stand inside each other."""
        ...

    def text(self, stage: str, text: Callable[[], str]) -> None:
        """Offer a text that belongs to `stage`.  `text` is called only if somebody wants it."""
        ...


class Silent:
    """A trace that nobody listens to."""

    __slots__ = ()

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Time nothing."""
        return nullcontext()

    def text(self, stage: str, text: Callable[[], str]) -> None:
        """Drop the text without making it."""


class Fuel:
    """Counts the optional rewrites of one compilation, so that bisection can name the bad one."""

    __slots__ = ("last", "used")

    def __init__(self) -> None:
        self.used = 0
        self.last = ""

    def spend(self, limit: int, kind: str, what: tuple[object, ...]) -> bool:
        """True for the first `limit` calls.  `last` then names the last rewrite allowed."""
        if self.used >= limit:
            return False
        self.used += 1
        self.last = " ".join((kind, *map(str, what)))
        return True


@dataclass(frozen=True, slots=True)
class Context:
    """The surroundings of one compilation.

    `fuel` may be shared by the contexts of several graphs, to bisect over a whole program.
    """

    options: Options
    target: Target
    trace: Trace = field(default_factory=Silent, repr=False, compare=False)
    fuel: Fuel = field(default_factory=Fuel, repr=False, compare=False)

    def allow(self, kind: str, *what: object) -> bool:
        """True if the optional rewrite `kind` of `what` may be done.

        Without the option `fuel` that is always so.  With `fuel=n` the first n questions are
        answered with yes, and a pass that is told no must leave the program as it is.
        """
        limit = self.options.fuel
        return limit < 0 or self.fuel.spend(limit, kind, what)
