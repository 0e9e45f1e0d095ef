"""Lines of text under construction, which remember the object that each begins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Lines:
    """Lines with the present indentation; `line_of` finds where an object was printed."""

    __slots__ = ("_marks", "indent", "rows")

    def __init__(self) -> None:
        self.rows: list[str] = []
        self.indent = ""
        self._marks: dict[int, tuple[object, int]] = {}  # by identity: equal nodes may print twice

    def add(self, text: str, mark: object = None, origin: tuple[str, ...] = ()) -> None:
        """Add a line, or a text of several whose later lines are indented already."""
        if mark is not None:
            self._marks.setdefault(id(mark), (mark, len(self.rows)))
        if origin:
            text = f"{text}  # from {', '.join(origin)}"
        self.rows.extend((self.indent + text).split("\n"))

    def mark_last(self, mark: object) -> None:
        """Say that the line added last stands for this object too."""
        self._marks.setdefault(id(mark), (mark, len(self.rows) - 1))

    @contextmanager
    def block(self, head: str, mark: object = None, origin: tuple[str, ...] = ()) -> Iterator[None]:
        """Open `head {`, indent what is added inside, and close it."""
        self.add(head + " {", mark, origin)
        outer = self.indent
        self.indent = outer + "  "
        yield
        self.indent = outer
        self.add("}")

    def line_of(self, mark: object) -> int | None:
        """Index of the line that began with this very object."""
        found = self._marks.get(id(mark))
        return None if found is None else found[1]

    def text(self) -> str:
        """All lines."""
        return "\n".join(self.rows) + "\n"
