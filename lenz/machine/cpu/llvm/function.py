"""The text of a module and of a function while they are written.

A function is a stack of scopes, outermost first. A scope is the straight-line text of one loop
body. Every scope dominates the scopes above it, so appending a value that depends only on outer
loops to an outer scope hoists it out of the inner loop. A scope that closes appends its text to the
scope below.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from lenz.target import Target

# Branch weights of rare paths.
COLD = "!prof !0"


class Module:
    """Declarations and helper functions that the kernels of one module share."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.declarations: dict[str, str] = {}
        self.functions: dict[str, str] = {}

    def declare(self, name: str, result: str, *args: str) -> str:
        """Declare an external function or intrinsic once; returns its name with the @."""
        if name not in self.declarations:
            self.declarations[name] = f"declare {result} @{name}({', '.join(args)})"
        return f"@{name}"


class OpenBody:
    """One open body: its text, the label of its current block, and the memo keys made in it."""

    __slots__ = ("keys", "label", "lines")

    def __init__(self, label: str) -> None:
        self.lines: list[str] = []
        self.label = label
        self.keys: list[Hashable] = []


class Function:
    """The body of one function; code of a level goes to `scopes[level]`.

    products  even and odd 64-bit products by the names of their operands, for their other half
    """

    def __init__(self, module: Module) -> None:
        self.module = module
        self.scopes = [OpenBody("entry")]
        self.allocas: list[str] = []
        self.products: dict[tuple[tuple[str, ...], ...], tuple[tuple[str, ...], ...]] = {}
        self._count = 0

    @property
    def level(self) -> int:
        """Number of the innermost open scope."""
        return len(self.scopes) - 1

    def fresh(self) -> str:
        """A new SSA name."""
        self._count += 1
        return f"%t{self._count}"

    def label(self) -> str:
        """A new number for the labels of one construct."""
        self._count += 1
        return str(self._count)

    def put(self, level: int, line: str) -> None:
        """Append one line to a scope."""
        self.scopes[level].lines.append(line)

    def let(self, level: int, text: str) -> str:
        """Append an instruction with a result; returns the name of the result."""
        self._count += 1
        name = f"%t{self._count}"
        self.scopes[level].lines.append(f"  {name} = {text}")
        return name

    def lets(self, level: int, texts: Iterable[str]) -> tuple[str, ...]:
        """Append instructions, one per copy of the body; returns the names of their results."""
        return tuple([self.let(level, text) for text in texts])

    def block(self, level: int, label: str) -> None:
        """Start a new basic block in a scope."""
        scope = self.scopes[level]
        scope.lines.append(f"{label}:")
        scope.label = label

    def alloca(self, element: str, count: int) -> str:
        """Stack memory of the function, aligned to a cache line and made in the entry block."""
        name = self.fresh()
        self.allocas.append(f"  {name} = alloca [{count} x {element}], align 64")
        return name

    def text(self) -> str:
        """The finished body, from the entry block on."""
        return "\n".join(["entry:", *self.allocas, *self.scopes[0].lines])
