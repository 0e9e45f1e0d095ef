"""The text form of symbolic integers: `show` prints it, `to_python` is Python."""

from __future__ import annotations

import keyword
from collections.abc import Callable

from lenz.sym.expr import Add, FloorDiv, Int, Max, Min, Mod, Mul, Sym, Var

SUM, PRODUCT, ATOM = 0, 1, 2  # how tightly a text binds


def show(e: Sym) -> str:
    """The canonical text of e, with minimal parentheses."""
    return _show(e, lambda v: v.name)[0]


def to_python(e: Sym) -> str:
    """Python source for e, with the names of its variables.

    Raises ValueError for a name that is not valid in Python.
    """
    return _show(e, _python_name)[0]


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
