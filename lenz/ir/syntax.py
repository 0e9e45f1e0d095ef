"""One declaration per node of the IR: its text form, and the kind of each field.

A class has `SYNTAX`, a tuple of pieces in the order of the text:

    SYNTAX = ("alloc {name:def} : {type:type}", "? zero", "? over {over:over}")

- Text is literal. `{field:kind}` is a field; `{field:kind*}` has commas between its items.
- A piece that starts with `?` is omitted if its first field has its default, and read if its first
  word is next. `{keep=size:sym}` has the value of `size` by default. A piece without a field is a
  flag, named by its word.
- The kind says how a field is printed and read (`forms.KINDS`), and its role in walks: `def` is a
  new buffer, `use` one that is read, `share` one whose memory the new one shares, `over` the same
  and overwritten, `take` the same and dead afterwards, `end` one that only dies; `sym` is a size or
  an index, `value` and `block` are expressions, `args` arguments of a call; `writes` is a buffer
  that a statement or a call changes.

A graph and a plan also have `LINES`, the lines between their braces: one with `+` is repeated for
each item of its field, one with `?` is omitted if its field is empty.

`form.Form` makes the printer and the reader of a class from it, docs/generate.py its line of the
grammar, `graph.reads_of` and the verifiers their walks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

_SLOT = re.compile(r"(\{[a-z.]+(?:=[a-z]+)?:[a-z_]+\*?\})")


class Slot(NamedTuple):
    """A field in a piece of text; `usual` is the field that gives its default."""

    field: str
    kind: str
    is_list: bool
    usual: str
    get: Callable[[Any], Any]  # reads its value from a node


class Piece(NamedTuple):
    """Texts and fields; `field` decides whether an optional piece is present."""

    items: tuple[str | Slot, ...]
    field: str
    usual: str


def _slot(text: str) -> str | Slot:
    if not text.startswith("{"):
        return text
    field, kind = text[1:-1].split(":")
    name, _, usual = field.partition("=")
    return Slot(name, kind.removesuffix("*"), kind.endswith("*"), usual, attrgetter(name))


def piece_of(text: str) -> Piece:
    """One entry of a SYNTAX."""
    items = tuple([_slot(part) for part in _SLOT.split(text.removeprefix("?")) if part])
    if not text.startswith("?"):
        return Piece(items, "", "")
    slot = next((x for x in items if isinstance(x, Slot)), None)
    field, usual = (text[1:].strip(), "") if slot is None else (slot.field, slot.usual)
    return Piece(items, field, usual)


VALUES = frozenset({"value", "block", "finish", "bound"})  # kinds of fields that hold expressions


@cache
def slots_of(cls: Hashable, kinds: frozenset[str] = frozenset()) -> tuple[Slot, ...]:
    """The fields of a class in text order; with `kinds`, only those of these kinds."""
    syntax: tuple[str, ...] = getattr(cls, "SYNTAX", ())
    found = [x for text in syntax for x in piece_of(text).items if isinstance(x, Slot)]
    return tuple([x for x in found if not kinds or x.kind in kinds])


def slots_in(x: Any, kinds: frozenset[str]) -> tuple[Slot, ...]:
    """The fields of a node that have one of these kinds."""
    cls: Any = type(x)
    return slots_of(cls, kinds)


def exprs_in(x: Any) -> tuple[Any, ...]:
    """The expressions of a node or statement in the order of its text."""
    found: list[Any] = []
    for slot in slots_in(x, VALUES):
        value = slot.get(x)
        found += value if type(value) is tuple else (value,)
    return tuple(found)


def map_fields(x: T, kinds: frozenset[str], f: Callable[[Any], Any]) -> T:
    """A node or statement with f applied to each field of these kinds."""
    new = {slot.field: f(slot.get(x)) for slot in slots_in(x, kinds)}
    node: Any = x
    return replace(node, **new) if new else x


def map_values(x: T, f: Callable[[Any], Any]) -> T:
    """A node or statement with f applied to every expression."""
    return map_fields(x, VALUES, lambda v: tuple(map(f, v)) if isinstance(v, tuple) else f(v))
