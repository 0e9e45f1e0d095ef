"""The user's names for a graph's inputs: `w16` where tracing says `L['w16']` and `arg4_1`.

Names of files, attributes and functions may contain any character. They pass through `shown` on
entry, so that each stays on its line, in comments and on a terminal.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch.fx import GraphModule

ROOT = re.compile(r"^[LG]\['(\w+)'\]")
MEMBER = re.compile(r"\._(?:modules|parameters|buffers)\['([^']+)'\]")
ARGUMENT = re.compile(r"\bargs\[(\d+)\]")
NUMBERED = re.compile(r"graph(\d+)(?:_(\d+))?\b.*")


def shown(text: str) -> str:
    """The text on one line, in valid UTF-8; other characters become Python escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def plain(source: str) -> str:
    """Dynamo's name of a value, as the user would write it.

    L['w16'] -> w16      L['self']._modules['fc']._parameters['bias'] -> self.fc.bias
    """
    return shown(MEMBER.sub(r".\1", ROOT.sub(r"\1", source)))


def readable(source: str, arguments: Sequence[str]) -> str:
    """Put the user's names into AOTAutograd's name of an argument: `args[0]` -> `w16`.

    `arguments` are the names of Dynamo's arguments by position; others stay as they are.
    """

    def named(m: re.Match[str]) -> str:
        k = int(m.group(1))
        return arguments[k] if k < len(arguments) and arguments[k] else m.group(0)

    return ARGUMENT.sub(named, source)


def titled(name: str) -> str:
    """The name of a graph and torch's id of its compilation: `graph3_1.forward [3/1]`.

    The second number counts the compilations of one piece of code. Other names stay as they are.
    """
    found = NUMBERED.fullmatch(name)
    return f"{name} [{found[1]}/{found[2] or 0}]" if found else name


def arguments_of(gm: Any) -> tuple[str, ...]:
    """The user's name of each argument of Dynamo's graph; empty if it has none."""
    places = gm.graph.find_nodes(op="placeholder") if isinstance(gm, GraphModule) else ()
    sources = (getattr(n.meta.get("grapharg"), "source", None) for n in places)
    return tuple("" if s is None else plain(str(s.name)) for s in sources)
