"""Tokens of the text form, a cursor over them, and errors with their position; sizes and indices.

sum     = ["-"] product { ("+" | "-") product }
product = unary { ("*" | "//" | "%") unary }          left to right, as in Python
unary   = ["-"] atom
atom    = int | name | "@" int | "(" sum ")" | ("min" | "max") "(" sum { "," sum } ")"
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

from lenz.errors import UserError
from lenz.sym import Int, Sym, Var, maximum, minimum
from lenz.sym.expr import multiply, sum_of

T = TypeVar("T")

# Python reads no integer of more than 4300 digits.
_TOKEN = re.compile(
    r"""(?:[ \t\r\n]+|\#[^\n]*)*
    (?: (?P<word>[A-Za-z_][A-Za-z0-9_.]*)
      | (?P<mark>\.\.|<-|//|[-+*%@:;,=<|(){}\[\]])
      | (?P<float>\d+\.\d+(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+)
      | (?P<int>\d{1,400}(?!\d))
      | (?P<string>"(?:[^"\\\n]|\\.)*")
      | (?P<end>\Z)
      | (?P<other>[\s\S]+))""",
    re.VERBOSE,
)
END = "end of text"


class ReadError(UserError):
    """A text that is not an object of the IR; `line` and `column` count from 1."""

    def __init__(self, what: str, text: str, at: int) -> None:
        start = text.rfind("\n", 0, at) + 1
        row = text[start:].split("\n", 1)[0]
        self.line = text.count("\n", 0, at) + 1
        self.column = at - start + 1
        # The caret is under the column: "  at: " is six wide.
        where = f"{row}\n{' ' * (6 + at - start)}^"
        super().__init__(f"line {self.line}, column {self.column}: {what}", where=where)


class Cursor:
    """The tokens of one text: `text` is the next, of kind word, mark, float, int, string or end.

    `place` is its number, for `jump`.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self._kinds: list[str] = []
        self.words: list[str] = []
        self._starts: list[int] = []
        for found in _TOKEN.finditer(source):
            group = found.lastindex or 0
            self._kinds.append(found.lastgroup or "")
            self.words.append(found[group] or END)
            self._starts.append(found.start(group))
        if self.words[-2:] == [END, END]:  # trailing blanks add another empty match
            self.words.pop()
        if "other" in self._kinds:
            self.jump(self._kinds.index("other"))
            raise self.error(f"{self.text[0]!r} is not part of the text form")
        self.jump(0)

    def jump(self, place: int) -> None:
        """Move to a token."""
        self.place = place
        self.text, self.kind = self.words[place], self._kinds[place]

    def span(self, place: int) -> tuple[int, int]:
        """The start and end of a token."""
        start = self._starts[place]
        return start, start + len(self.words[place])

    def error(self, what: str, place: int | None = None) -> ReadError:
        """An error at the next token, or at another one."""
        return ReadError(what, self.source, self.span(self.place if place is None else place)[0])

    def fail(self, wanted: str) -> NoReturn:
        """Raise an error that says what is wanted here."""
        shown = self.text if self.kind == "end" else f"`{self.text}`"
        raise self.error(f"expected {wanted}, found {shown}")

    def take(self) -> str:
        """Consume the next token and return its text."""
        word = self.text
        if self.kind != "end":
            self.jump(self.place + 1)
        return word

    def accept(self, word: str) -> bool:
        """Consume the token if it is next."""
        if self.text != word or self.kind == "end":
            return False
        self.jump(self.place + 1)
        return True

    def expect(self, *words: str) -> None:
        """Consume these tokens; anything else is an error."""
        for word in words:
            if not self.accept(word):
                self.fail(f"`{word}`")

    def glued(self) -> bool:
        """True if no space precedes the next token."""
        return self.place > 0 and self.span(self.place)[0] == self.span(self.place - 1)[1]

    def skip_to(self, *closes: str) -> None:
        """Skip to a closing mark at this level, or to an unmatched one."""
        depth = 0
        while depth or self.text not in closes:
            if self.kind == "end":
                self.fail(f"`{closes[-1]}`")
            depth += (self.text in ("(", "[", "{")) - (self.text in (")", "]", "}"))
            if depth < 0:
                return
            self.take()


# Tokens that end a size or index expression.
_STOP = frozenset({",", ":", ";", "|", "=", "<", "{", "}", "]", ")", "@", "below", "in", END})
_UNFINISHED = "expected an operator or the end"


def read_sym(text: str, scope: Mapping[str, Var]) -> Sym:
    """The symbolic integer that a whole text denotes, over the variables in scope."""
    c = Cursor(text)
    e = _sum(c, scope)
    if c.kind != "end":
        raise c.error(_UNFINISHED)
    return e


def sym_of(c: Cursor, scope: Mapping[str, Var]) -> Sym:
    """A size or index expression over the variables in scope, `@0`, `@1` of a gather among them."""
    is_int = c.kind == "int"
    if (is_int or c.text in scope) and c.words[c.place + 1] in _STOP:
        return Int(int(c.take())) if is_int else scope[c.take()]
    if c.text in _STOP and not (c.text == "@" and "@0" in scope):
        c.fail("a size or index expression")
    e = _sum(c, scope)
    if c.text not in _STOP:
        raise c.error(_UNFINISHED)
    return e


def _sum(c: Cursor, scope: Mapping[str, Var]) -> Sym:
    parts = [(_product(c, scope), 1)]
    while c.text in ("+", "-"):
        sign = 1 if c.take() == "+" else -1
        parts.append((_product(c, scope), sign))
    return parts[0][0] if len(parts) == 1 else sum_of(parts)


def _product(c: Cursor, scope: Mapping[str, Var]) -> Sym:
    e = _unary(c, scope)
    while c.text in ("*", "//", "%"):
        op, other = c.take(), _unary(c, scope)
        e = multiply(e, other) if op == "*" else e // other if op == "//" else e % other
    return e


def _unary(c: Cursor, scope: Mapping[str, Var]) -> Sym:
    return -_unary(c, scope) if c.accept("-") else _atom(c, scope)


def _atom(c: Cursor, scope: Mapping[str, Var]) -> Sym:
    if c.kind == "int":
        return Int(int(c.take()))
    is_call = c.text in ("min", "max") and c.words[c.place + 1] == "("
    pick = maximum if is_call and c.take() == "max" else minimum
    if c.accept("("):
        e = _sum(c, scope)
        while is_call and c.accept(","):
            e = pick(e, _sum(c, scope))
        if not c.accept(")"):
            raise c.error("expected ')'")
        return e
    is_operand = c.text == "@"
    name = f"@{c.words[c.place + 1]}" if is_operand else c.text
    if name not in scope:
        is_name = is_operand or c.kind == "word"
        raise c.error(f"unknown name {name!r}" if is_name else "expected a value")
    c.jump(c.place + 1 + is_operand)
    return scope[name]


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
    """A buffer, `%x`; returns its name."""
    c.expect("%")
    return name_of(c)


def word_of(c: Cursor) -> str:
    """A word that may end in a number, like `cuda:0`, or a quoted text."""
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


def items_of(c: Cursor, one: Callable[[], T], *stops: str) -> list[T]:
    """Comma-separated items up to one of `stops`, which is next; a trailing comma is allowed."""
    items: list[T] = []
    while c.kind != "mark" or c.text not in stops:
        items.append(one())
        if c.kind != "mark" or c.text not in stops:
            c.expect(",")
    return items


def list_of(c: Cursor, one: Callable[[], T], close: str) -> list[T]:
    """The same up to `close`, which is consumed."""
    items = items_of(c, one, close)
    c.expect(close)
    return items


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
