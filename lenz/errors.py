"""Errors that lenz raises. The class says whose fault it is, the message what to do next.

`Unsupported` is a gap of lenz, `UserError` is the caller's (`Missing`: the machine's),
`InternalError` is a bug of lenz. Any other exception from the compiler is a bug too: `api` wraps it
in an InternalError.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy

# Eager's errors by the name of the check (`ops/check.py`). A kernel returns the index of its failed
# check in this table, counted from 1.
FAULTS: Mapping[str, tuple[type[Exception], str]] = {
    "assert_in_range": (IndexError, "index out of range in self"),
    "assert_in_bounds": (RuntimeError, "index out of bounds"),
    "assert_nonzero": (RuntimeError, "ZeroDivisionError"),
    "assert_parameter": (RuntimeError, "a probability beyond [0, 1], all 0, or a deviation < 0"),
    "assert_finite": (RuntimeError, "the range of a histogram is not finite"),
}


class LenzError(Exception):
    """The base of every error that lenz raises on purpose.

    `what` says what went wrong and with which object. `where` is a line of the user's program or of
    the IR text. `hint` says what to do next. The message omits empty parts.
    """

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        return self._told([self.what], self.hint)

    def _told(self, lines: Sequence[str], hint: str, saved: str = "") -> str:
        parts = ("at", self.where), ("saved", saved), ("try", hint)
        return "\n".join([*lines, *(f"  {name}: {text}" for name, text in parts if text)])


class Unsupported(LenzError):
    """Something that lenz cannot compile yet: the graph, or just the op, runs in eager instead."""


class UserError(LenzError, ValueError):
    """A wrong argument, option or environment variable: the caller can fix it."""


class Missing(UserError):
    """A driver, a GPU or a package that a graph needs; `on_error="eager"` runs without it."""


class InternalError(LenzError):
    """A bug in lenz, with the facts for a bug report.

    `pass_name` is the pass that ran last, `rule` the broken invariant, `line` the line of IR text
    that breaks it (with its number if known), and `repro` the folder with the saved program. The
    raising code fills in what it knows; `api` adds the rest with `located`.
    """

    def __init__(
        self, what: str, *, pass_name: str = "", rule: str = "", line: str = "", repro: str = "",
        where: str = "", hint: str = "",
    ) -> None:  # fmt: skip
        super().__init__(what, where=where, hint=hint)
        self.pass_name, self.rule, self.line, self.repro = pass_name, rule, line, repro

    def located(self, **parts: str) -> InternalError:
        """Return the same error with the named parts filled in if they were empty."""
        new = copy(self)
        vars(new).update({name: text for name, text in parts.items() if not getattr(self, name)})
        return new

    def __str__(self) -> str:
        after = f" after {self.pass_name}" if self.pass_name else ""
        rule = f", rule {self.rule}" if self.rule else ""
        lines = [f"a bug in lenz{after}{rule}:"]
        lines += [f"    {self.line}", f"    ^ {self.what}"] if self.line else [f"    {self.what}"]
        return self._told(lines, self.hint or RUN_EAGERLY, self.repro)


@contextmanager
def untrusted(what: str) -> Iterator[None]:
    """Raise a UserError that begins with `what` for any error that foreign data causes."""
    try:
        yield
    except UserError:
        raise
    except Exception as e:  # data can be wrong in any way
        raise UserError(f"{what}: {type(e).__name__}: {e}") from e


RUN_EAGERLY = 'on_error="eager", the default, runs such a graph in eager'
REPORT = "report it with the saved files; until it is fixed you only lose speed"
UNSAVED = "report it; until it is fixed you only lose speed"  # there is no folder to write to


def near_names(name: str, known: Iterable[str]) -> str:
    """Return a hint with the names of `known` closest to `name`, best first, or else all."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    listed = f"known names: {', '.join(names)}" if names else ""
    return f"did you mean {', '.join(near)}?" if near else listed


def some(things: Sequence[object], noun: str) -> str:
    """Their number, with the noun."""
    ending = "" if len(things) == 1 else "es" if noun.endswith("ch") else "s"
    return f"{len(things)} {noun}{ending}"


def annotate(e: BaseException, text: str) -> None:
    """Add a note to an exception. Tracebacks show it from Python 3.11 on; 3.10 only keeps it."""
    if add := getattr(e, "add_note", None):
        add(text)
    else:
        vars(e)["__notes__"] = [*getattr(e, "__notes__", ()), text]
