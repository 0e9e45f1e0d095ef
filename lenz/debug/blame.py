"""Find the line that an error is about, from the frames that it passed through."""

from __future__ import annotations

import traceback

from torch.fx import Node as FxNode

from lenz.debug.names import shown
from lenz.ir.graph import LOOPS, Extern, View, origin_of
from lenz.ir.kernel import Kernel, Launch
from lenz.ir.printer import show_node

IR = (*LOOPS, View, Extern)


def blame(e: BaseException) -> tuple[str, str]:
    """(line, where): the IR or FX line of the innermost frame, and the user's file:line.

    Both may be empty: an error need not be about one line.
    """
    frames = [f for f, _ in traceback.walk_tb(e.__traceback__)]
    for frame in reversed(frames):
        for value in reversed(list(frame.f_locals.values())):
            if isinstance(value, IR):
                return " ".join(show_node(value).split()), _last_line(origin_of(value))
            if isinstance(value, Launch):
                return f"kernel @{value.kernel.name}", _last_line(value.origins)
            if isinstance(value, Kernel):
                return f"kernel @{value.name}", ""
            if isinstance(value, FxNode):
                return str(value.format_node()), _user_line(value)
    return "", ""


def _last_line(origins: tuple[str, ...]) -> str:
    """The last file:line: a node's own comes after those of the nodes it absorbed."""
    return next((o for o in reversed(origins) if ":" in o), "")


def _user_line(node: FxNode) -> str:
    stack = str(node.meta.get("stack_trace") or "")
    lines = [x.strip() for x in stack.splitlines() if x.strip().startswith("File ")]
    return shown(lines[-1]) if lines else ""
