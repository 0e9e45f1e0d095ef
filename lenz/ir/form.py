"""Makes the printer and the reader of a class from its `SYNTAX`; see syntax.py."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import cache
from operator import attrgetter
from typing import Any, TypeAlias

from lenz.ir.lexer import Cursor, choice_of, items_of
from lenz.ir.syntax import VALUES, Piece, Slot, piece_of, slots_of
from lenz.ir.text import Scope
from lenz.records import dataclass, replace

Made: TypeAlias = "dict[str, Any]"  # the fields of a node read so far
Show: TypeAlias = "str | Callable[[Any, Scope], str]"  # a text, or a function of the node
Reading: TypeAlias = "str | Callable[[Cursor, Scope, Made], None]"  # a token, or a field's reader


@dataclass(frozen=True, slots=True)
class Kind:
    """The text form of a field: `show` prints it, `read` reads it; `grammar` is for docs.

    A `whole` kind needs other fields of the node as well: `show` gets the node, and `read` gets the
    fields read so far, to which it adds its own.
    """

    show: Callable[..., str]
    read: Callable[..., Any]
    grammar: str
    whole: bool = False


_WITH_SIZES = "type result results outs args size sym index place axes steps"
SIZED = VALUES | {*_WITH_SIZES.split()}  # kinds of fields that contain sizes
CULPRIT = "\0"  # marks the text of the culprit


@cache
def tokens(text: str) -> tuple[str, ...]:
    """The tokens of a piece of text. Forms have the same few pieces."""
    return tuple(Cursor(text).words[:-1])


class TextForm:
    """The text form of a class. `lead` is the number of tokens and fields before its first word."""

    def __init__(self, cls: Any, kinds: Mapping[str, Kind]) -> None:
        self.cls = cls
        pieces = [piece_of(text) for text in cls.SYNTAX]
        made = [_piece(p, cls, kinds, _stops(pieces[k + 1 :])) for k, p in enumerate(pieces)]
        self._shows = tuple([x for shows, _, _ in made for x in shows])
        self._reads = tuple([x for _, reads, _ in made for x in reads])
        self.grammar = " ".join([grammar for _, _, grammar in made])
        words = [k for k, x in enumerate(self._reads) if isinstance(x, str) and x[0].isalpha()]
        self.lead = words[0] if words else 2
        self.word = str(self._reads[self.lead]) if words else ""
        self.slots = slots_of(cls)
        self.kinds = frozenset([x.kind for x in self.slots])
        both = attrgetter("args", "kwargs")
        self.sized = [both if x.kind == "args" else x.get for x in self.slots if x.kind in SIZED]
        self._nests = bool(self.kinds & {"axes", "loop"})
        self._mark = ("%" if "def" in self.kinds else "") if hasattr(cls, "dtype") else None

    def show(self, node: Any, s: Scope) -> str:
        """The text of a node; its name enters the scope."""
        text = "".join([x if isinstance(x, str) else x(node, s) for x in self._shows])
        if self._mark is not None:
            s.types[self._mark + node.name] = node.dtype
        return text if node is not s.culprit else CULPRIT + text

    def read(self, c: Cursor, s: Scope, lead: Made | None = None) -> Any:
        """A node; with `lead`, the fields before its first word have been read already."""
        made: Made = {} if lead is None else lead
        inner = replace(s, vars={**s.vars}) if self._nests else s  # it adds variables of its own
        _take(self._reads if lead is None else self._reads[self.lead :], c, inner, made)
        node = self.cls(**made)
        if self._mark is not None:
            s.types[self._mark + node.name] = node.dtype
        return node


def _take(reads: Sequence[Reading], c: Cursor, s: Scope, made: Made) -> None:
    """Read tokens and fields."""
    for x in reads:
        if isinstance(x, str):
            c.expect(x)
        else:
            x(c, s, made)


def _stops(after: list[Piece]) -> tuple[str, ...]:
    """The tokens that may follow a piece."""
    found: list[str] = []
    for p in after:
        found += tokens(p.items[0])[:1] if isinstance(p.items[0], str) else []
        if not p.field:
            break
    return tuple(found)


def part_of(
    item: str | Slot, kinds: Mapping[str, Kind], stops: tuple[str, ...], get: Callable[[Any], Any]
) -> tuple[Show, list[Reading], str]:
    """Printer, reader and grammar of one text or field; `stops` end a list."""
    if isinstance(item, str):
        words = tokens(item)
        return item, [*words], " ".join([f'"{word}"' for word in words])
    field, kind = item.field, kinds[item.kind]
    show, read = kind.show, kind.read
    if kind.whole:
        return (
            lambda node, s: show(node, s, item),
            [lambda c, s, made: read(c, s, made, item)],
            kind.grammar,
        )

    def one(c: Cursor, s: Scope, made: Made) -> None:
        made[field] = read(c, s)

    def several(c: Cursor, s: Scope, made: Made) -> None:
        made[field] = tuple(items_of(c, lambda: read(c, s), *stops))

    if not item.is_list:
        return lambda node, s: show(get(node), s), [one], kind.grammar
    listed = lambda node, s: ", ".join([show(x, s) for x in get(node)])
    return listed, [several], f"({kind.grammar}),*" if " " in kind.grammar else f"{kind.grammar},*"


def _parts(
    p: Piece, kinds: Mapping[str, Kind], stops: tuple[str, ...], own: Any = None
) -> tuple[list[Show], list[Reading], str]:
    """Printer, reader and grammar of all texts and fields of a piece; `own` reads a field."""
    made = []
    for k, item in enumerate(p.items):
        behind = [x for x in p.items[k + 1 :] if isinstance(x, str)]
        ends = tokens(behind[0])[:1] if behind else stops
        made.append(part_of(item, kinds, ends, own or getattr(item, "get", str)))
    shows, reads, grammar = zip(*made, strict=True)
    return [*shows], [x for part in reads for x in part], " ".join(filter(None, grammar))


def _piece(
    p: Piece, cls: Any, kinds: Mapping[str, Kind], stops: tuple[str, ...]
) -> tuple[list[Show], list[Reading], str]:
    """Printer, reader and grammar of one piece of a SYNTAX."""
    shows, reads, grammar = _parts(p, kinds, stops)
    if not p.field:
        return shows, reads, grammar
    show, read = _optional(p, cls, shows, reads)
    return [show], [read], f"[{grammar}]"


def _optional(p: Piece, cls: Any, shows: list[Show], reads: list[Reading]) -> tuple[Show, Reading]:
    field, usual = p.field, p.usual
    first = reads[0] if isinstance(reads[0], str) else None
    given = next(f.default for f in fields(cls) if f.name == field)
    default = () if given is MISSING else given
    is_flag = all(isinstance(x, str) for x in p.items)

    def show(node: Any, s: Scope) -> str:
        if getattr(node, field) == (getattr(node, usual) if usual else default):
            return ""
        return "".join([x if isinstance(x, str) else x(node, s) for x in shows])

    def read(c: Cursor, s: Scope, made: Made) -> None:
        if c.kind != "word" if first is None else c.text != first:
            made[field] = made[usual] if usual else default
            return
        _take(reads, c, s, made)
        if is_flag:
            made[field] = True

    return show, read


class TextLines:
    """The lines between the braces of a graph or a plan, made from `LINES`.

    `words` are the first words of items of a kind, if the line does not have them.
    """

    def __init__(
        self, cls: Any, kinds: Mapping[str, Kind], words: Mapping[str, tuple[str, ...]]
    ) -> None:
        self._what = f"a line of a {cls.__name__.lower()}"
        self._lines = [_Line(text, kinds, words) for text in cls.LINES]
        self._words = {word: line for line in self._lines for word in line.words}
        self._nodes = next((line for line in self._lines if not line.words), None)
        self.grammar = [line.grammar for line in self._lines]

    def rows(self, x: Any, s: Scope, hidden: Collection[str] = ()) -> Iterator[tuple[Any, str]]:
        """Each line with the value that it shows, without the fields in `hidden`."""
        for line in self._lines:
            if line.field not in hidden:
                value = line.get(x)
                for one in value if line.each else (value,) if value or not line.optional else ():
                    text = "".join([p if isinstance(p, str) else p(one, s) for p in line.shows])
                    yield one, text if one is not s.culprit else CULPRIT + text

    def read(self, c: Cursor, s: Scope) -> tuple[Made, dict[str, int]]:
        """The fields in the lines up to the closing brace, and where the last line of each is."""
        made: Made = {line.field: [] if line.each else () for line in self._lines if line.usual}
        places: dict[str, int] = {}
        while not c.accept("}"):
            line = self._nodes
            if line is None or not (c.text in _FIRST or c.kind == "int" or c.text in s.vars):
                word = choice_of(c, self._words, self._what)
                c.jump(c.place - 1)
                line = self._words[word]
            if line.field in places and not line.each:
                raise c.error(f"a second line `{c.text}`")
            places[line.field] = c.place
            found: Made = {}
            _take(line.reads, c, s, found)
            if line.each:
                made[line.field].append(found[line.field])
            else:
                made.update(found)
        return {k: tuple(v) if isinstance(v, list) else v for k, v in made.items()}, places


_FIRST = ("%", "(", "out", "none")  # first tokens of a graph's nodes


class _Line:
    """A line with a field, or (`each`) one item of it; `words` are its possible first words."""

    def __init__(
        self, text: str, kinds: Mapping[str, Kind], words: Mapping[str, tuple[str, ...]]
    ) -> None:
        self.each = text.endswith("+")
        p = piece_of(text.removesuffix("+"))
        slot = next(x for x in p.items if isinstance(x, Slot))
        self.field, self.get = slot.field, slot.get
        self.optional = bool(p.field)
        self.usual = self.each or self.optional
        self.shows, self.reads, self.grammar = _parts(p, kinds, (), lambda value: value)
        first = self.reads[0]
        self.words = (first,) if isinstance(first, str) else words.get(slot.kind, ())
