"""The last argument of every pass: options, target, and a trace.

The fields never change. Two of them refer to recorders: `fuel` counts optional rewrites, `trace`
receives timings and texts. The result of a pass must not depend on either, except through the
answer of `allow`.
"""

from __future__ import annotations

from lenz.debug.trace import Trace
from lenz.options import Options
from lenz.records import dataclass, field
from lenz.target import Target


class Fuel:
    """Counts the optional rewrites of one compilation, so that bisection can name the bad one."""

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
    """The context of one compilation.

    The contexts of several graphs may share `fuel`, to bisect a whole program.
    """

    options: Options
    target: Target
    trace: Trace = field(default_factory=Trace, repr=False, compare=False)
    fuel: Fuel = field(default_factory=Fuel, repr=False, compare=False)

    def allow(self, kind: str, *what: object) -> bool:
        """True if the optional rewrite `kind` of `what` may be done.

        Without the option `fuel` every rewrite is allowed. With `fuel=n` the first n are; a pass
        that is denied must leave the program unchanged.
        """
        limit = self.options.fuel
        return limit < 0 or self.fuel.spend(limit, kind, what)
