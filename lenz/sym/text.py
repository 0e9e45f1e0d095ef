"""The text form: `show` prints, `read_sym` reads the same object back, `to_python` is Python.

sum     = ["-"] product { ("+" | "-") product }
product = unary { ("*" | "//" | "%") unary }          left to right, as in Python
unary   = ["-"] atom
atom    = int | name | "(" sum ")" | ("min" | "max") "(" sum { "," sum } ")"
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Mapping

from lenz.sym.expr import Add, FloorDiv, Int, Max, Min, Mod, Mul, Sym, Var, multiply, sum_of
from lenz.sym.extremum import maximum, minimum

SUM, PRODUCT, ATOM = 0, 1, 2  # how tightly a text binds


def show(e: Sym) -> str:
    """The canonical text of e, with minimal parentheses."""
    return _show(e, _plain_name)[0]


def to_python(e: Sym) -> str:
    """Python source for e, with the names of its variables.

    Raises ValueError for a name that is not valid in Python.
    """
    return _show(e, _python_name)[0]


def _plain_name(v: Var) -> str:
    return v.name


def _python_name(v: Var) -> str:
    name = v.name
    if not name.isidentifier() or keyword.iskeyword(name) or name in ("min", "max"):
        raise ValueError(f"Var {name!r} is not valid in Python source: give it another name first")
    return name


def _show(e: Sym, name: Callable[[Var], str]) -> tuple[str, int]:
    match e:
        case Int():
            return str(e.value), ATOM if e.value >= 0 else SUM
        case Var():
            return name(e), ATOM
        case Add():
            return _show_sum(e, name)
        case Mul():
            return "*".join([_factor(f, name) for f in e.factors]), PRODUCT
        case FloorDiv() | Mod():
            num, binds = _show(e.num, name)
            if binds < PRODUCT:
                num = f"({num})"
            sign = "//" if type(e) is FloorDiv else "%"
            return f"{num} {sign} {_factor(e.den, name)}", PRODUCT
        case Min() | Max():
            call = "min" if type(e) is Min else "max"
            return f"{call}({', '.join([_show(x, name)[0] for x in e.args])})", ATOM
        case _:
            raise TypeError(f"not a symbolic integer: {type(e).__name__}")


def _factor(e: Sym, name: Callable[[Var], str]) -> str:
    text, binds = _show(e, name)
    return text if binds == ATOM else f"({text})"


def _show_sum(e: Add, name: Callable[[Var], str]) -> tuple[str, int]:
    out = ""
    for t, c in e.terms:
        size = abs(c)
        plain = type(t) is Mul or type(t) is Var
        if size == 1 and (plain or c > 0 or out):
            text = _show(t, name)[0]
        elif size == 1:
            text = _factor(t, name)
        else:
            text = f"{size}*{_show(t, name)[0] if plain else _factor(t, name)}"
        sign = ("-" if c < 0 else "") if not out else (" - " if c < 0 else " + ")
        out += sign + text
    if e.const:
        out += f" - {-e.const}" if e.const < 0 else f" + {e.const}"
    single = e.const == 0 and len(e.terms) == 1
    return out, PRODUCT if single else SUM


TOKEN = re.compile(r"\s*(?:(\d+)|([@A-Za-z_][A-Za-z0-9_.]*)|(//|[-+*%(),]))")


def read_sym(text: str, scope: Mapping[str, Var]) -> Sym:
    """The symbolic integer that a text denotes.

    Names come from scope. Raises ValueError with the position of an error.
    """
    tokens: list[tuple[str, int]] = []
    at = 0
    end = len(text.rstrip())
    while at < end:
        found = TOKEN.match(text, at)
        if found is None:
            start = len(text) - len(text[at:].lstrip())
            raise ValueError(f"{text!r}: column {start + 1}: not a token")
        tokens.append((found.group(found.lastindex or 0), found.start(found.lastindex or 0)))
        at = found.end()
    reader = _Reader(text, tokens, scope)
    e = reader.sum()
    if reader.at != len(tokens):
        raise reader.error("expected an operator or the end")
    return e


class _Reader:
    """One pass over the tokens; `at` is the next one."""

    __slots__ = ("at", "scope", "text", "tokens")

    def __init__(self, text: str, tokens: list[tuple[str, int]], scope: Mapping[str, Var]) -> None:
        self.text, self.tokens, self.scope, self.at = text, tokens, scope, 0

    def error(self, why: str) -> ValueError:
        column = self.tokens[self.at][1] + 1 if self.at < len(self.tokens) else len(self.text) + 1
        return ValueError(f"{self.text!r}: column {column}: {why}")

    def peek(self) -> str:
        return self.tokens[self.at][0] if self.at < len(self.tokens) else ""

    def take(self, token: str) -> None:
        if self.peek() != token:
            raise self.error(f"expected {token!r}")
        self.at += 1

    def sum(self) -> Sym:
        parts = [(self.product(), 1)]
        while self.peek() in ("+", "-"):
            sign = 1 if self.peek() == "+" else -1
            self.at += 1
            parts.append((self.product(), sign))
        return parts[0][0] if len(parts) == 1 else sum_of(parts)

    def product(self) -> Sym:
        e = self.unary()
        while (op := self.peek()) in ("*", "//", "%"):
            self.at += 1
            other = self.unary()
            e = multiply(e, other) if op == "*" else e // other if op == "//" else e % other
        return e

    def unary(self) -> Sym:
        if self.peek() == "-":
            self.at += 1
            return -self.unary()
        return self.atom()

    def atom(self) -> Sym:
        token = self.peek()
        if token.isdigit():
            self.at += 1
            return Int(int(token))
        if token == "(":
            self.at += 1
            e = self.sum()
            self.take(")")
            return e
        following = self.tokens[self.at + 1][0] if self.at + 1 < len(self.tokens) else ""
        if token in ("min", "max") and following == "(":
            self.at += 2
            e = self.sum()
            while self.peek() == ",":
                self.at += 1
                e = minimum(e, self.sum()) if token == "min" else maximum(e, self.sum())
            self.take(")")
            return e
        if token in self.scope:
            self.at += 1
            return self.scope[token]
        raise self.error(
            f"unknown name {token!r}" if token and token[0] not in "+-*/%,)" else "expected a value"
        )
