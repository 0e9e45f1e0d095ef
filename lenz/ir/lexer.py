"""Tokens of the text form, a cursor over them, and the error that shows the place.

A size or index expression is the text between two marks, handed to `lenz.sym.read_sym`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

from lenz.errors import UserError
from lenz.sym import Int, Sym, Var, read_sym

T = TypeVar("T")

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n]+|\#[^\n]*)
      | (?P<string>"(?:[^"\\\n]|\\.)*")
      | (?P<float>\d+\.\d+(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+)
      | (?P<int>\d+)
      | (?P<word>[A-Za-z_][A-Za-z0-9_.]*)
      | (?P<mark>\.\.|<-|//|[-+*%@:;,=<|(){}\[\]])""",
    re.VERBOSE,
)
END = "end of text"


class ReadError(UserError):
    """A text that is no object of the IR; `line` and `column` count from 1."""

    def __init__(self, what: str, text: str, at: int) -> None:
        start = text.rfind("\n", 0, at) + 1
        row = text[start:].split("\n", 1)[0]
        self.line = text.count("\n", 0, at) + 1
        self.column = at - start + 1
        # The caret stands under the column: "  at: " is six wide.
        where = f"{row}\n{' ' * (6 + at - start)}^"
        super().__init__(f"line {self.line}, column {self.column}: {what}", where=where)


class Cursor:
    """The tokens of one text; `text`, `kind` and `at` describe the next one."""

    __slots__ = ("_ends", "_kinds", "_place", "_starts", "_words", "source")

    def __init__(self, source: str) -> None:
        self.source = source
        self._kinds: list[str] = []
        self._words: list[str] = []
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._place = 0
        at = 0
        while at < len(source):
            found = _TOKEN.match(source, at)
            if found is None:
                raise ReadError(f"{source[at]!r} is no part of the text form", source, at)
            kind = found.lastgroup or ""
            if kind != "space":
                self._kinds.append(kind)
                self._words.append(found.group())
                self._starts.append(at)
                self._ends.append(found.end())
            at = found.end()
        self._kinds.append("end")
        self._words.append(END)
        self._starts.append(len(source))
        self._ends.append(len(source))

    @property
    def text(self) -> str:
        """The next token."""
        return self._words[self._place]

    @property
    def kind(self) -> str:
        """Kind of the next token: string, float, int, word, mark or end."""
        return self._kinds[self._place]

    @property
    def place(self) -> int:
        """Number of the next token, for `jump`."""
        return self._place

    def jump(self, place: int) -> None:
        """Go to a place that was the next one before."""
        self._place = place

    def error(self, what: str, place: int | None = None) -> ReadError:
        """An error at the next token, or at another place."""
        return ReadError(what, self.source, self._starts[self._place if place is None else place])

    def fail(self, wanted: str) -> NoReturn:
        """Raise: something else was wanted here."""
        shown = self.text if self.kind == "end" else f"`{self.text}`"
        raise self.error(f"expected {wanted}, found {shown}")

    def take(self) -> str:
        """Pass the next token and give its text."""
        word = self._words[self._place]
        self._place += self._kinds[self._place] != "end"
        return word

    def follows(self, *words: str) -> bool:
        """True when the next tokens are these."""
        return self._words[self._place : self._place + len(words)] == list(words) and (
            self._kinds[self._place] != "string"
        )

    def accept(self, word: str) -> bool:
        """Pass the token if it is next."""
        if self._words[self._place] == word and self._kinds[self._place] != "end":
            self._place += 1
            return True
        return False

    def expect(self, *words: str) -> None:
        """Pass these tokens; anything else is an error."""
        for word in words:
            if not self.accept(word):
                self.fail(f"`{word}`")

    def glued(self) -> bool:
        """True when no space stands in front of the next token."""
        return self._place > 0 and self._starts[self._place] == self._ends[self._place - 1]

    def skip_to(self, close: str) -> None:
        """Pass everything up to a closing mark at this level, which is next then."""
        depth = 0
        while depth or self.text != close:
            if self.kind == "end":
                self.fail(f"`{close}`")
            if self.kind == "mark":
                depth += (self.text in "([{") - (self.text in ")]}")
            self._place += 1


# Where a size or index expression ends, when no bracket that it opened is open.
_STOP = frozenset({",", ":", ";", "|", "=", "{", "}", "]", ")", "@", END})


def sym_of(c: Cursor, scope: Mapping[str, Var], may_gather: bool = False) -> Sym:
    """A size or index expression over the variables in scope; `may_gather` allows `@0`, `@1`."""
    first = c.place
    if c.kind == "int" or (c.kind == "word" and c.text in scope):
        word = c.take()
        if c.text in _STOP:
            return scope[word] if word in scope else Int(int(word))
        c.jump(first)
    start = c._starts[first]
    depth = 0
    while depth or c.text not in _STOP or (may_gather and c.text == "@"):
        depth += (c.text == "(") - (c.text == ")")
        if c.kind == "end":
            break
        c.take()
    if c.place == first:
        c.fail("a size or index expression")
    text = c.source[start : c._ends[c.place - 1]]
    try:
        return read_sym(text, scope)
    except ValueError as e:
        found = re.search(r"column (\d+): (.*)", str(e))
        column, why = (int(found[1]) - 1, found[2]) if found else (0, str(e))
        raise ReadError(why, c.source, start + column) from e


def name_of(c: Cursor) -> str:
    """A name, plain or quoted."""
    if c.kind == "string":
        return string_of(c)
    if c.kind != "word":
        c.fail("a name")
    return c.take()


def string_of(c: Cursor) -> str:
    """A quoted text."""
    if c.kind != "string":
        c.fail("a quoted text")
    try:
        return str(json.loads(c.text))
    except ValueError as e:
        raise c.error(f"bad quoted text: {e}") from e
    finally:
        c.take()


def buffer_of(c: Cursor) -> str:
    """A buffer, `%x`; gives its name."""
    c.expect("%")
    return name_of(c)


def word_of(c: Cursor) -> str:
    """A word that may end in a number, as `cuda:0`, or a quoted text."""
    if c.kind == "string":
        return string_of(c)
    word = name_of(c)
    place = c.place
    if c.text == ":" and c.glued():
        c.take()
        if c.kind == "int" and c.glued():
            return f"{word}:{c.take()}"
        c.jump(place)
    return word


def int_of(c: Cursor) -> int:
    """A whole number, which may be negative."""
    sign = -1 if c.accept("-") else 1
    if c.kind != "int":
        c.fail("a whole number")
    return sign * int(c.take())


def list_of(c: Cursor, one: Callable[[], T], close: str, until: tuple[str, ...] = ()) -> list[T]:
    """Items with commas between up to `close`, which is passed; a last comma is allowed.

    With `until`, up to `close` or one of these, which is next then.
    """
    stops = (close, *until)
    items: list[T] = []
    while c.kind != "mark" or c.text not in stops:
        if items:
            c.expect(",")
            if c.kind == "mark" and c.text in stops:
                break
        items.append(one())
    if not until:
        c.expect(close)
    return items


def tuple_of(c: Cursor, one: Callable[[], T], brackets: str = "()") -> tuple[T, ...]:
    """Items with commas between, in brackets."""
    c.expect(brackets[0])
    return tuple(list_of(c, one, brackets[1]))


def numbers_of(c: Cursor) -> tuple[tuple[str, int], ...]:
    """`(name: number, ..)`."""

    def one() -> tuple[str, int]:
        name = name_of(c)
        c.expect(":")
        return name, int_of(c)

    return tuple_of(c, one)


def enclosed(c: Cursor, one: Callable[[], T], brackets: str = "[]") -> T:
    """One item in brackets."""
    c.expect(brackets[0])
    item = one()
    c.expect(brackets[1])
    return item


def choice_of(c: Cursor, table: Mapping[str, Any] | tuple[str, ...], what: str) -> str:
    """One of some words."""
    if c.kind != "word" or c.text not in table:
        c.fail(f"{what} ({', '.join(table)})")
    return c.take()
