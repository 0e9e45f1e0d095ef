"""Graphs that a process before compiled: what to keep of one, under which key, and how to load it.

A graph that is found again is neither lowered nor scheduled nor emitted: most of the compiler is
not even imported.  The key holds all that a compilation depends on: the program as text, options,
target and GPUs, torch and Triton, and every source file of lenz.  An entry holds the text of the
plan, which is read and then printed as Python, and the store's keys of the kernels.  Machine code
is trusted, since the store reads nothing that another user could have written.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any, TypeAlias

import torch

from lenz.codegen.llvm.compile import Library, host_target, link
from lenz.codegen.triton.compile import version
from lenz.context import Context, Silent, Trace
from lenz.errors import InternalError
from lenz.frontend import FxProgram, assuming, kept
from lenz.frontend.identity import identity
from lenz.frontend.program import Facts
from lenz.ir.binary import decode
from lenz.ir.interned import using
from lenz.ir.lexer import ReadError
from lenz.ir.plan import LaunchStep, Plan
from lenz.ir.reader import read
from lenz.options import Options
from lenz.plan.python import source
from lenz.runtime import cuda, loader
from lenz.runtime.store import Store, store_at
from lenz.runtime.threads import imports

Boxed: TypeAlias = Callable[[list[Any]], Sequence[Any]]
Compile: TypeAlias = Callable[[FxProgram, Context], Boxed]
Functions: TypeAlias = Mapping[str, Callable[..., Any]]

State: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """What is kept of a compiled graph.

    `plan` is its text; `strides` are what `CompileFX` tells.  `object` is the store's key of the
    machine code for the CPU, empty without any; `cubins` has the keys of that for GPUs, by kernel.
    """

    plan: str
    strides: Sequence[Sequence[int] | None]
    object: str
    cubins: Mapping[str, str]


def store_in(options: Options) -> Store | None:
    """The disk cache; None without one."""
    folder = options.cache_dir
    return store_at(folder) if options.cache and folder is not None else None


def context(options: Options, trace: Trace | None = None) -> Context:
    """The context of one compilation for this machine's CPU."""
    return Context(options, host_target(), Silent() if trace is None else trace)


class Sources:
    """The Python files below a folder as this process read them, from time `since` on.

    Most are imported late. What one of other files made must not be found by a process that has
    those alone, so that there is no digest once one has changed: by any of its numbers, as a copy
    may have the size and the time of the original.
    """

    __slots__ = ("_digest", "_files", "_root")

    def __init__(self, root: str, since: float) -> None:
        self._root, self._files = root, _files(root)
        old = all(max(mtime, ctime) <= since * 1e9 for *_, mtime, ctime in self._files.values())
        self._digest = _digest(root, self._files) if old else ""

    def digest(self, again: bool = False) -> str:
        """The hash of the files, empty if one has changed; `again` looks, which takes 1 ms."""
        if again and self._digest and (files := _files(self._root)) != self._files:
            # The text may be the same: a link to a file or another mode change its numbers too.
            same = _digest(self._root, files) == self._digest
            self._files, self._digest = files, self._digest if same else ""
        return self._digest


def _files(root: str) -> dict[str, State]:
    """Every Python file: device, number, size, time of its contents, time of its last change."""
    found = {}
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if f != "__pycache__")
        for name in sorted(n for n in names if n.endswith(".py")):
            path = os.path.join(folder, name)
            found[path] = _state(os.stat(path))
    return found


def _state(i: os.stat_result) -> State:
    return i.st_dev, i.st_ino, i.st_size, i.st_mtime_ns, i.st_ctime_ns


def _digest(root: str, files: Mapping[str, State]) -> str:
    """The hash of names and texts; empty if one changes meanwhile."""
    digest = hashlib.sha256()
    for path, state in files.items():
        with open(path, "rb") as file:
            data = file.read()
            if _state(os.fstat(file.fileno())) != state:
                return ""
        digest.update(f"{os.path.relpath(path, root)} {len(data)}\n".encode() + data)
    return digest.hexdigest()


# Read now, before what is imported late.
OWN = Sources(os.path.dirname(os.path.abspath(__file__)), sys.modules["lenz"].STARTED)


def sources(again: bool = False) -> str:
    """The hash of lenz's own files; empty, which is said once, where this process may mix two."""
    digest = OWN.digest(again)
    if not digest:
        _say_changed()
    return digest


@cache
def _say_changed() -> None:
    warnings.warn(
        "lenz's files have changed since this process began to import them. What it compiles from"
        " now on is not kept in the cache; a new process does that again.",
        RuntimeWarning,
        stacklevel=2,
    )


def is_extended() -> bool:
    """Say whether somebody gave this process ops or lowerings of their own, which no key tells."""
    registry = sys.modules.get("lenz.lower.registry")
    return registry is not None and not registry.is_own()


def native_names(store: Store | None) -> frozenset[str]:
    """The ops that have a lowering; from the store, if no op has been defined in this process."""
    store = store if store and "lenz.ir.op" not in sys.modules and sources() else None
    data = None if store is None else store.get("native", sources())
    if data is not None:
        return frozenset(data.decode().split())
    from lenz.lower import native_ops

    names = native_ops()
    if store is not None and (digest := sources(again=True)):
        store.put("native", digest, " ".join(sorted(names)).encode())
    return names


def key_of(program: FxProgram, cx: Context) -> str | None:
    """The key of a program's compilation; None if it has none, or is not to be skipped."""
    options = cx.options
    if options.verify or options.fuel >= 0 or not options.cache or is_extended():
        return None
    if not sources():
        return None
    text = identity(program)
    if text is None:
        return None
    gpus = {
        v.device.index or 0
        for n in program.gm.graph.nodes
        if isinstance(v := n.meta.get("val"), torch.Tensor) and v.device.type == "cuda"
    }
    head = [
        sources(),
        f"torch {torch.__version__} {torch.version.git_version}",
        f"{torch.get_default_dtype()} {options.key()} {cx.target.key()}",
        f"deterministic: {torch.are_deterministic_algorithms_enabled()}",
        *(f"cuda:{n} {torch.cuda.get_device_name(n)} {cuda.capability(n)}" for n in sorted(gpus)),
    ]
    if gpus:
        head.append(version())
    return hashlib.sha256("\n".join([*head, text]).encode()).hexdigest()


def keep(store: Store, key: str, entry: Entry) -> None:
    """Keep an entry; its kernels are in the store by now.  All that made it is imported by now."""
    if sources(again=True):
        store.put("graph", key, json.dumps(asdict(entry)).encode())


def recall(program: FxProgram, cx: Context, key: str | None, again: Compile) -> Boxed | None:
    """The callable of a program that was compiled before; None if it, or a kernel, is not there.

    `again` compiles it for other sizes and addresses, should such a call come.
    """
    store = store_in(cx.options)
    data = store.get("graph", key) if store is not None and key is not None else None
    if store is None or data is None:
        return None
    try:
        entry = Entry(**json.loads(data))
        plan = read(entry.plan)
        assert isinstance(plan, Plan)
        found = _functions(plan, entry, store)
    except (AssertionError, ReadError, TypeError, ValueError):
        return None  # of no version with this key, or a kernel of another version
    except RuntimeError:  # a driver that does not take a kernel: compiling anew settles what then
        return None
    if found is None:
        return None
    run: Any = load(plan, *found, program, cx, again)
    run.strides = [None if s is None else tuple(s) for s in entry.strides]
    return run  # type: ignore[no-any-return]  # an Any, so that it may have `strides`


def _functions(p: Plan, entry: Entry, store: Store) -> tuple[Functions, Library | None] | None:
    """The kernels of a plan, loaded; None if the store has lost one."""
    functions: dict[str, Callable[..., Any]] = {}
    library = None
    cubins = {name: store.get("cubin", key) for name, key in entry.cubins.items()}
    binaries = {name: decode(code) for name, code in cubins.items() if code is not None}
    if len(binaries) < len(cubins):
        return None
    if entry.object:
        obj = store.get("object", entry.object)
        if obj is None:
            return None
        library = link(obj, [n for n in p.kernels if n not in binaries], imports())
    for s in {s.kernel: s for s in p.steps if isinstance(s, LaunchStep)}.values():
        counts = len(s.args), len(s.sizes)
        if s.kernel in binaries:
            gpu = torch.device(s.device).index or 0
            functions[s.kernel] = cuda.function(binaries[s.kernel], gpu, *counts)
        elif library is not None:
            functions[s.kernel] = loader.function(library.addresses[s.kernel], *counts)
    return functions, library


def load(
    p: Plan,
    functions: Functions,
    library: Library | None,
    program: FxProgram,
    cx: Context,
    again: Compile,
) -> Boxed:
    """Print a plan as a module, execute that, and put kernels, constants and objects into it."""
    name = program.name
    module: dict[str, Any] = {"__name__": f"lenz.{name}", "__file__": f"<{name}>"}
    exec(compile(source(p), f"<lenz {name}>", "exec"), module)
    module.update(functions)
    names = {n.name: str(n.target) for n in program.gm.graph.nodes if n.op == "get_attr"}
    for c in p.constants:
        module[c.name] = _aligned(program.constants[names[c.name]])
    for py, o in module["OBJECTS"].items():
        module[py] = program.modules[o]
    if "otherwise" in module:
        module["otherwise"] = _Otherwise(program, cx, again)
    module["_library"] = library  # the code lives as long as the module
    call: Boxed = module["call"]
    return call


class _Otherwise:
    """The graph for calls that break what it takes to be so, compiled when the first one comes.

    What holds in such a call is kept: its own graph may be left again, if a later one breaks that.
    """

    __slots__ = ("_again", "_lock", "_made", "_options", "_program", "_target")

    def __init__(self, program: FxProgram, cx: Context, again: Compile) -> None:
        self._program, self._again = program, again
        self._options, self._target = cx.options, cx.target
        self._made: dict[tuple[object, ...], Boxed] = {}
        self._lock = threading.RLock()

    def __call__(self, args: list[Any], aligned: bool = True) -> Sequence[Any]:
        """Run the graph on boxed arguments, of which one may be at an odd address."""
        facts = kept(self._program, args)
        key = (aligned, *facts.items())
        with self._lock:  # of threads that come here at once, one compiles
            run = self._made.get(key) or self._compiled(key, aligned, facts)
        return run(args)

    def _compiled(self, key: tuple[object, ...], aligned: bool, facts: Facts) -> Boxed:
        if aligned and facts == self._program.facts:
            raise InternalError("nothing that was taken to be so is broken", pass_name="plan")
        options = replace(self._options, aligned=self._options.aligned and aligned)
        cx = Context(options, self._target)
        with using():
            self._made[key] = self._again(assuming(self._program, facts), cx)
        return self._made[key]


def _aligned(t: torch.Tensor) -> torch.Tensor:
    """A constant as GPU kernels take it to be: at a multiple of 16 bytes, as new memory is."""
    if t.is_cpu or t.data_ptr() % 16 == 0:
        return t
    with torch.no_grad():
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t)
