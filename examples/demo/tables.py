"""Tables and progress bars of the demo, by rich."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import track
from rich.table import Table

Item = TypeVar("Item")


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table; columns after the first are aligned to the right where they hold numbers."""
    made = [[str(cell) for cell in row] for row in rows]
    shown = Table(title=title, title_justify="left", title_style="bold")
    for k, name in enumerate(head):
        numbers = all(_is_number(row[k]) for row in made)
        shown.add_column(name, justify="right" if numbers else "left")
    for row in made:
        shown.add_row(*row)
    Console().print(shown)


def _is_number(text: str) -> bool:
    return text[:1].isdigit() or text in ("", "-")


def progress(items: Sequence[Item], what: str) -> Iterable[Item]:
    """The items, with a bar while they are worked on; it is gone at the end."""
    return track(items, description=what, transient=True)


def say(text: str) -> None:
    """Print a line."""
    Console().print(text, highlight=False, soft_wrap=True)
