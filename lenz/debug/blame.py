"""The line that an error is about. Walks over nodes name each of them with `blaming`."""

from __future__ import annotations

from types import TracebackType

from torch.fx import Node as FxNode

from lenz.debug.names import shown
from lenz.ir.graph import Node, origin_of
from lenz.ir.kernel import Kernel, Launch
from lenz.ir.printer import show_node
from lenz.ir.tensor import Buffer


class blaming:
    """Mark errors that leave the body of this `with` as being about a node, kernel or result.

    The innermost `with` counts. The error carries the node, so a handled error leaves nothing
    behind. A class, as every pass enters one per node: 0.4 us, where a generator takes 1.4 us.
    """

    __slots__ = ("subject",)

    def __init__(self, subject: FxNode | Node | Kernel | Launch | Buffer) -> None:
        self.subject = subject

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None
    ) -> None:
        if isinstance(e, Exception):
            vars(e).setdefault("about", self.subject)


def blame(e: BaseException) -> tuple[str, str]:
    """(line, where): the IR or FX line that an error is about, and the user's file:line.

    Both may be empty: an error need not be about one line.
    """
    match vars(e).pop("about", None):  # errors outlive graphs
        case None:
            return "", ""
        case Launch() as step:
            return f"kernel @{step.kernel.name}", last_line(step.origins)
        case Buffer() as out:
            return f"%{out.name}", last_line(out.origin)
        case Kernel() as kernel:
            return f"kernel @{kernel.name}", ""
        case FxNode() as node:
            return str(node.format_node()), user_line(node)
        case node:
            return " ".join(show_node(node).split()), last_line(origin_of(node))


def last_line(origins: tuple[str, ...]) -> str:
    """The last file:line: a node's own comes after those of the nodes it absorbed."""
    return next((o for o in reversed(origins) if ":" in o), "")


def user_line(node: FxNode) -> str:
    stack = str(node.meta.get("stack_trace") or "")
    lines = [x.strip() for x in stack.splitlines() if x.strip().startswith("File ")]
    return shown(lines[-1]) if lines else ""
