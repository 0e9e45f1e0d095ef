"""Graphs that a process before compiled: what is kept of one, and how it is found again.

A graph that is found again is neither lowered nor scheduled nor emitted: most of the compiler is
not even imported.  An entry holds the text of the plan, which is read and then printed as Python,
and the store's keys of the kernels.  Machine code is trusted, since the store reads nothing that
another user could have written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lenz import keys
from lenz.context import Context, Silent, Trace
from lenz.frontend import FxProgram
from lenz.ir.lexer import ReadError
from lenz.ir.plan import LaunchStep, Plan
from lenz.ir.reader import read
from lenz.loading import Boxed
from lenz.machine.cpu.llvm.compile import host_target
from lenz.machines import Functions, loader_of
from lenz.options import Options
from lenz.respecialise import Compile, load_program
from lenz.runtime.store import Store, store_in
from lenz.target import HOST


@dataclass(frozen=True, slots=True)
class Entry:
    """What is kept of a compiled graph.

    `plan` is its text; `strides` are what `CompileFX` tells.  `keys` are the store's keys of its
    machine code, by device and name.
    """

    plan: str
    strides: Sequence[Sequence[int] | None]
    keys: Mapping[str, Mapping[str, str]]


def context(options: Options, trace: Trace | None = None) -> Context:
    """The context of one compilation for this machine's CPU."""
    return Context(options, host_target(), Silent() if trace is None else trace)


def keep(store: Store, key: str, entry: Entry) -> None:
    """Keep an entry; its kernels are in the store by now.  All that made it is imported by now."""
    if keys.sources(again=True):
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
        run: Any = None if found is None else load_program(plan, *found, program, cx, again)
    except (AssertionError, LookupError, ReadError, TypeError, ValueError):
        return None  # of no version with this key, or a kernel of another version
    except RuntimeError:  # a driver that does not take a kernel: compiling anew settles what then
        return None
    if run is None:
        return None
    run.strides = [None if s is None else tuple(s) for s in entry.strides]
    return run  # type: ignore[no-any-return]  # an Any, so that it may have `strides`


def _functions(p: Plan, entry: Entry, store: Store) -> tuple[Functions, object] | None:
    """The kernels of a plan, loaded, and what must live as long; None if the store lost one."""
    steps = {s.kernel: s for s in p.steps if isinstance(s, LaunchStep)}
    functions: dict[str, Callable[..., Any]] = {}
    alive: list[object] = []
    for device, own in entry.keys.items():
        loader = loader_of(device)
        found = {name: store.get(loader.kind, key) for name, key in own.items()}
        pieces = {name: code for name, code in found.items() if code is not None}
        if len(pieces) < len(own):
            return None
        mine = [s for s in steps.values() if (s.device or HOST) == device]
        counts = {s.kernel: (len(s.args), len(s.sizes)) for s in mine}
        more, kept = loader.load(pieces, counts, device)
        functions |= more
        alive.append(kept)
    return functions, alive
