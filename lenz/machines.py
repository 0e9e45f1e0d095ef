"""The machines that lenz compiles for: their protocol and their registry.

A machine belongs to a type of PyTorch's devices ("cpu", "cuda"). It has two halves: a `Machine` for
the compiler, and a `Loader`, which runs compiled code and imports no compiler. They are found at
first use: in the modules `machine` and `loader` of `lenz.machine.<type>`, or through entry points
of the groups `lenz.machines` and `lenz.loaders` that have the name of the type. These modules
register them on import.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from operator import eq
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from lenz.errors import InternalError, UserError
from lenz.records import dataclass
from lenz.target import HOST, Capabilities, Target

if TYPE_CHECKING:  # a process that compiles nothing imports none of these
    from lenz.context import Context
    from lenz.debug.report import TuneReport
    from lenz.ir.kernel import Kernel, KernelKind, Local, Schedule, Stmt, TileConfig
    from lenz.sym import Sym, SymEnv

Functions: TypeAlias = Mapping[str, Callable[..., Any]]
Elsewhere: TypeAlias = tuple[str, Mapping[str, tuple[str, bytes]]]
Counts: TypeAlias = Mapping[str, tuple[int, int]]
# Pointers and sizes of each kernel of a plan, and its GPU; "" for kernels of the CPU.
Signatures: TypeAlias = Mapping[str, tuple[int, int, str]]
# More shapes to time for a kind of kernel with this many elements of P and of R.
Space: TypeAlias = "Callable[[KernelKind, int, int], Sequence[Any]]"


@dataclass(frozen=True, slots=True)
class Form:
    """A kernel's loops, its configuration, and its workspace in words."""

    kind: KernelKind
    body: tuple[Stmt, ...]
    tile: TileConfig
    locals: tuple[Local, ...] = ()
    work: Sym | None = None


class Refused(Exception):
    """Kernels that did not compile, by name, with the reason.

    The graph is recompiled with their ops, `origins`, in eager. If one of them is several kernels
    that share a launch (`is_shared`), it is first compiled without such launches.
    """

    def __init__(self, failed: Mapping[str, str]) -> None:
        super().__init__(next(iter(failed.values())))
        self.failed = failed
        self.origins: frozenset[str] = frozenset()
        self.is_shared = False


@dataclass(frozen=True, slots=True)
class Code:
    """Compiled kernels of one device, or of all devices of a graph.

    text       all emitted code
    files      machine code by the name of its file in a debug folder
    keys       the store's keys of the machine code, by device and name
    functions  the kernels by name; valid while `alive` lives
    """

    text: str
    files: Mapping[str, bytes]
    keys: Mapping[str, Mapping[str, str]]
    functions: Functions
    alive: tuple[object, ...] = ()


def only_here(kernels: Sequence[Kernel], what: str, cx: Context) -> Elsewhere:
    """The `elsewhere` of a machine whose devices are all alike, or whose compiler needs them."""
    raise UserError(f"kernels of this program are not compiled for {what!r}")


@dataclass(frozen=True, slots=True)
class Machine:
    """Everything that the compiler knows about one type of device.

    capabilities  the numbers behind decisions
    schedule      (group, stored, env, cx, space): the form of a `schedule.legal.Group`'s kernel,
                  then others worth timing; `stored` are the values used outside the group, `space`
                  replaces the machine's own shapes
    loss          (group, env): why a group whose elements read its own reductions is slower than
                  its parts, or None
    tune          (schedule, store): the schedule with the fastest form of each launch, and the
                  measurements
    compile       (kernels, device, cx): starts compiling; returns a function that waits for the
                  code and loads it, and raises Refused
    elsewhere     (kernels, what other devices of this type are, cx): that in the words of
                  `Loader.fits`, and the store's key and the code of each piece by name; raises
                  UserError
    """

    capabilities: Capabilities
    schedule: Callable[[Any, frozenset[str], SymEnv, Context, Space | None], Sequence[Form]]
    loss: Callable[[Any, SymEnv], str | None]
    tune: Callable[[Schedule, Any], tuple[Schedule, tuple[TuneReport, ...]]]
    compile: Callable[[Sequence[Kernel], str, Context], Callable[[], Code]]
    elsewhere: Callable[[Sequence[Kernel], str, Context], Elsewhere] = only_here


def no_graphs(*wanted: Any) -> Any:
    """The `capture` of a machine without graphs."""
    raise RuntimeError("the machine has no graphs")


@dataclass(frozen=True, slots=True)
class Loader:
    """Finds and loads the code for one type of device.

    kind   the kind of the store's entries
    files  the names of a graph's kernels -> each piece of code by name -> its file in a debug
           folder; a piece is one kernel, or a library of all of them
    load   (pieces, kernels with their counts of pointers and sizes, device): the functions, and
           their owner; raises ValueError or RuntimeError
    key    all that code for a device depends on, besides its text
    fits   the part of it that machine code needs where it is loaded
    start  called when a graph for such a device arrives: its compiler will be needed
    runs     (what machine code needs, what is here): whether it runs, both as `fits` says it
    capture  (`Wanted`, `Runner`, number of the device): its graph, as `runtime/captured.py` says;
             raises RuntimeError
    """

    kind: str
    files: Callable[[Iterable[str]], Mapping[str, str]]
    load: Callable[[Mapping[str, bytes], Counts, str], tuple[Functions, object]]
    key: Callable[[str], str]
    fits: Callable[[str], str]
    start: Callable[[], None]
    capture: Callable[..., Any] = no_graphs
    runs: Callable[[str, str], bool] = eq


class Library(Protocol):
    """Linked code, alive as long as this object, and the addresses of its exports."""

    addresses: dict[str, int]


@dataclass(frozen=True, slots=True)
class Host:
    """The compiler for the host: plans are CPU code beside the kernels.

    target    this process's CPU
    features  its features, by the compiler's names
    compile   (text, target or None for this CPU, level) -> an object; raises InternalError
    link      (object, exports, addresses of its callees) -> the code; raises InternalError
    """

    target: Callable[[], Target]
    features: Callable[[], frozenset[str]]
    compile: Callable[[str, Target | None, int], bytes]
    link: Callable[[bytes, Sequence[str], Mapping[str, int]], Library]


FOLDER = Path(__file__).parent / "machine"
_HALVES: dict[tuple[str, str], Any] = {}


def register(type: str, half: Machine | Loader | Host) -> None:
    """Register a half of a machine for a type of device, or the compiler of the host."""
    key = type, half.__class__.__name__.lower()
    if _HALVES.setdefault(key, half) is not half:
        raise InternalError(f"there are two machines for {type} devices")


def types() -> frozenset[str]:
    """The device types that have a machine."""
    return _types(tuple(sys.path))


@lru_cache(maxsize=4)
def _types(path: tuple[str, ...]) -> frozenset[str]:
    outside = _outside(path).select(group="lenz.machines").names
    return frozenset(outside | {p.parent.name for p in FOLDER.glob("*/machine.py")})


@lru_cache(maxsize=4)
def _outside(path: tuple[str, ...]) -> Any:
    """The entry points of packages on `path`. Reading them takes 4 ms."""
    return importlib.metadata.entry_points()


def is_known(type: str) -> bool:
    """True if a device type has a machine; imports nothing of it."""
    return (FOLDER / type).is_dir() or type in types()


def machine_of(device: str) -> Machine:
    """The machine of a device ("cpu", "cuda:0"); raises InternalError if there is none."""
    return _half(device, "machine")  # type: ignore[no-any-return]  # a Machine, by `register`


def capabilities_of(device: str) -> Capabilities:
    """The capabilities of a device's machine, without importing its compiler; empty if it has none.

    A machine of lenz keeps its numbers in `lenz.machine.<type>.capabilities`.
    """
    type = device.partition(":")[0]
    known = (type, "machine") in _HALVES
    if not known and (FOLDER / type).is_dir():
        found: Capabilities = importlib.import_module(f"lenz.machine.{type}.capabilities").CAN
        return found
    return machine_of(device).capabilities if known or is_known(type) else Capabilities(0)


def runs_programs(device: str) -> bool:
    """True if a device runs loops as many programs of many lanes, as GPUs do.

    Such a machine computes faster than it loads, and updates one element in any order.
    """
    return capabilities_of(device).units > 0


def loader_of(device: str) -> Loader:
    """The loader of a device; raises InternalError if there is none."""
    return _half(device, "loader")  # type: ignore[no-any-return]  # a Loader, likewise


def host() -> Host:
    """The compiler for the host."""
    return _half(HOST, "host")  # type: ignore[no-any-return]  # a Host, likewise


def _half(device: str, name: str) -> Any:
    type = device.partition(":")[0]
    if (type, name) not in _HALVES:
        if (FOLDER / type).is_dir():
            importlib.import_module(f"lenz.machine.{type}.{name}")
        for found in _outside(tuple(sys.path)).select(group=f"lenz.{name}s", name=type):
            found.load()
        if (type, name) not in _HALVES:
            raise InternalError(f"lenz has no machine for {device}")
    return _HALVES[type, name]


def load_kernels(
    signatures: Signatures, code: Callable[[str, Loader, Counts], Mapping[str, bytes]]
) -> tuple[Functions, object]:
    """The kernels of a plan as functions, and an object that owns them.

    `code` returns the machine code of a device, by the names of its pieces.
    """
    functions: dict[str, Callable[..., Any]] = {}
    alive: list[object] = []
    for device in dict.fromkeys(s[2] for s in signatures.values()):
        loader = loader_of(device or HOST)
        counts = {name: s[:2] for name, s in signatures.items() if s[2] == device}
        made, kept = loader.load(code(device or HOST, loader, counts), counts, device or HOST)
        functions |= made
        alive.append(kept)
    return functions, alive


def assemble(kernels: Mapping[str, tuple[Kernel, str]], cx: Context) -> Callable[[], Code]:
    """Start compiling kernels, given by name with their device; returns a function that loads them.

    Compilers in other processes run until the caller calls the function. It raises Refused with the
    kernels that a compiler or driver rejects.
    """
    devices = dict.fromkeys(device for _, device in kernels.values())
    mine = {d: [k for k, device in kernels.values() if device == d] for d in devices}
    # The CPU comes last: its code is compiled while other compilers run.
    begun = [machine_of(d).compile(mine[d], d, cx) for d in sorted(mine, key=lambda d: d == HOST)]

    def finish() -> Code:
        made = [load() for load in begun]
        return Code(
            "\n".join(c.text for c in made),
            {name: code for c in made for name, code in c.files.items()},
            {device: keys for c in made for device, keys in c.keys.items()},
            {name: f for c in made for name, f in c.functions.items()},
            tuple(x for c in made for x in c.alive),
        )

    return finish
