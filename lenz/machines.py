"""The machines that lenz compiles for: what each of them does, and which there are.

A machine belongs to a type of PyTorch's devices ("cpu", "cuda"). It is found when it is first asked
for: the module `lenz.machine.<type>.machine`, or a module outside of lenz that an entry point of
the group `lenz.machines` names by the type. Importing that module registers the machine.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from lenz.errors import InternalError
from lenz.target import Capabilities

if TYPE_CHECKING:  # a process that compiles nothing imports none of these
    from lenz.context import Context
    from lenz.ir.kernel import KernelKind, Local, Stmt, TileConfig
    from lenz.sym import Sym, SymEnv

GROUP = "lenz.machines"

# More shapes to time for a kind of kernel with this many elements of P and of R.
Space: TypeAlias = "Callable[[KernelKind, int, int], Sequence[Any]]"


@dataclass(frozen=True, slots=True)
class Form:
    """The loops of a kernel, its configuration, and the size of its workspace in words."""

    kind: KernelKind
    body: tuple[Stmt, ...]
    tile: TileConfig
    locals: tuple[Local, ...] = ()
    work: Sym | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    """Everything that the compiler knows of one type of devices.

    capabilities  the numbers that decisions depend on
    schedule      (group, stored, env, cx, space): the form of the kernel of a
                  `schedule.legal.Group`, then others that are worth timing; `stored` are the values
                  that are used outside of the group, `space` replaces the machine's own shapes
    loss          (group, env): why a group whose elements read its own reductions is worse than its
                  parts, None if it is not
    """

    capabilities: Capabilities
    schedule: Callable[[Any, frozenset[str], SymEnv, Context, Space | None], Sequence[Form]]
    loss: Callable[[Any, SymEnv], str | None]


_MACHINES: dict[str, Machine] = {}


def register(type: str, machine: Machine) -> None:
    """Make a machine known for a type of devices."""
    if _MACHINES.setdefault(type, machine) is not machine:
        raise InternalError(f"there are two machines for {type} devices")


def machine_of(device: str) -> Machine:
    """The machine of a device ("cpu", "cuda:0"); raises InternalError if there is none."""
    type = device.partition(":")[0]
    if type not in _MACHINES:
        if importlib.util.find_spec(f"lenz.machine.{type}") is not None:
            importlib.import_module(f"lenz.machine.{type}.machine")
        for found in importlib.metadata.entry_points(group=GROUP, name=type):
            found.load()
        if type not in _MACHINES:
            raise InternalError(f"lenz has no machine for {device}")
    return _MACHINES[type]
