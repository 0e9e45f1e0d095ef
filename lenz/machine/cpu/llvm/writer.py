"""A function under construction: the state shared by its loops and statements."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from lenz.errors import InternalError
from lenz.ir.kernel import For, Local, Stmt, Store, TileConfig, walk
from lenz.machine.cpu.llvm.access import Accesses
from lenz.machine.cpu.llvm.indices import Indices
from lenz.machine.cpu.llvm.scopes import Cell, Scopes
from lenz.machine.cpu.llvm.values import Values
from lenz.records import dataclass, field
from lenz.sym import Sym


@dataclass(slots=True, eq=False)
class Writer:
    """The parts of a function's emission, and the statements that contain others (`Body`).

    locals    the kernel's scratch, by name
    sizes     elements of its parameters, by name
    names     the statement that defines each name
    row_pass  the copies of the body are rows that share accumulators
    """

    scopes: Scopes
    indices: Indices
    accesses: Accesses
    values: Values
    tile: TileConfig
    locals: Mapping[str, Local]
    sizes: Mapping[str, Sym]
    names: dict[str, Stmt] = field(default_factory=dict)
    row_pass: bool = False

    @abstractmethod
    def statements(self, body: tuple[Stmt, ...]) -> None:
        """Emit statements in order."""

    @abstractmethod
    def plain_loop(self, s: For) -> None:
        """Emit a loop that is not a vector loop."""

    @abstractmethod
    def counted(self, s: For, start: str, stop: str, step: int, copies: int) -> None:
        """for var in range(start, stop, step): the body, in `copies` copies if step is not 1."""

    @abstractmethod
    def cells(self, s: For, copies: int | None = None) -> list[Cell]:
        """The registers that a loop changes, for the first `copies` copies."""

    def define(self, name: str, s: Stmt) -> None:
        """Names are unique in a phase, so that the memo cannot confuse them."""
        if self.names.setdefault(name, s) is not s:
            raise InternalError(f"{name} is defined twice", pass_name="codegen")

    @contextmanager
    def writing(self, body: tuple[Stmt, ...]) -> Iterator[None]:
        """A loop or branch that stores to buffers: reads of them are repeated inside and after."""
        buffers = stored(body)
        for name in buffers:
            self.values.forget(name)
        yield
        for name in buffers:
            self.values.forget(name)


def stored(body: tuple[Stmt, ...]) -> list[str]:
    """The buffers that the statements store to."""
    return list(dict.fromkeys([x.buffer for x in walk(body) if isinstance(x, Store)]))
