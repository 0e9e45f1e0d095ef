"""The text of a Triton function while it is written: open bodies, and the memo of values.

A `Term` is the name (or constant) of a value, the lanes it varies over, and the level of the body
that defines it. A value that depends only on outer loops is written into an outer body and computed
once. A body's values are forgotten when it closes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from lenz.records import dataclass

Dims = frozenset[int]
NO_DIMS: Dims = frozenset()


@dataclass(frozen=True, slots=True)
class Term:
    """One value: its text, the dimensions of the tile it varies over, its level."""

    text: str
    dims: Dims = NO_DIMS
    level: int = 0


class Text:
    """The body of a function: a stack of open bodies, outermost first.

    No value is written into a body outside level `least`, the innermost branch.
    """

    def __init__(self) -> None:
        self.bodies: list[list[str]] = [[]]
        self.keys: list[list[Hashable]] = [[]]
        self.memo: dict[Hashable, Term] = {}
        self.least = 0
        self._count = 0

    @property
    def level(self) -> int:
        """Number of the innermost open body."""
        return len(self.bodies) - 1

    def put(self, level: int, line: str) -> None:
        """Append one line to an open body."""
        self.bodies[level].append("    " * (level + 1) + line)

    def let(self, text: str, dims: Dims, level: int) -> Term:
        """Give a value a name."""
        level = max(level, self.least)
        name = f"t{self._count}"
        self._count += 1
        self.put(level, f"{name} = {text}")
        return Term(name, dims, level)

    def keep(self, key: Hashable, term: Term) -> Term:
        """Remember a value until the body that defines it closes."""
        self.memo[key] = term
        self.keys[term.level].append(key)
        return term

    def once(self, key: Hashable, make: Callable[[], Term]) -> Term:
        """The value of a key, which is made unless it is remembered."""
        return self.memo.get(key) or self.keep(key, make())

    def push(self) -> None:
        """Open the body of a loop."""
        self.bodies.append([])
        self.keys.append([])

    def pop(self, head: str) -> None:
        """Close the innermost body and append it, under `head`, to the enclosing one."""
        lines = self.bodies.pop()
        for key in self.keys.pop():
            self.memo.pop(key, None)
        self.put(self.level, head)
        self.bodies[-1] += lines or ["    " * (self.level + 2) + "pass"]
