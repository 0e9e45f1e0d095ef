"""The cache of compiled graphs on disk: what an entry holds, and how a later process loads it.

A recalled graph is not lowered, scheduled or emitted, and most of the compiler is not imported. An
entry holds the text of the plan and the store's keys of its kernels. The text is read, then printed
as Python. Machine code is trusted: the store reads only files that no other user can write.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lenz import keys
from lenz.context import Context, Silent, Trace
from lenz.frontend import FxProgram
from lenz.ir.lexer import ReadError
from lenz.ir.plan import Plan
from lenz.ir.reader import read
from lenz.loading import Boxed, kernels
from lenz.machine.cpu.llvm.compile import host_target
from lenz.options import Options
from lenz.respecialise import Compile, load_program
from lenz.runtime.store import Store, store_in


@dataclass(frozen=True, slots=True)
class Entry:
    """One compiled graph on disk.

    plan     its text
    strides  of each result, as in `CompileFX`
    keys     the store's keys of its machine code, by device and name
    """

    plan: str
    strides: Sequence[Sequence[int] | None]
    keys: Mapping[str, Mapping[str, str]]


def context(options: Options, trace: Trace | None = None) -> Context:
    """The context of one compilation for this machine's CPU."""
    return Context(options, host_target(), Silent() if trace is None else trace)


def keep(store: Store, key: str, entry: Entry) -> None:
    """Write an entry, unless lenz's files have changed. Its kernels are in the store already."""
    if keys.sources(again=True):
        store.put("graph", key, json.dumps(asdict(entry)).encode())


def recall(program: FxProgram, cx: Context, key: str | None, again: Compile) -> Boxed | None:
    """The callable of a program that was compiled before; None if the entry or a kernel is missing.

    `again` compiles the fallback for calls that break an assumption of the plan.
    """
    store = store_in(cx.options)
    data = store.get("graph", key) if store is not None and key is not None else None
    if store is None or data is None:
        return None
    try:
        entry = Entry(**json.loads(data))
        plan = read(entry.plan)
        assert isinstance(plan, Plan)
        run: Any = load_program(plan, *kernels(plan, entry.keys, store), program, cx, again)
    except (AssertionError, LookupError, ReadError, TypeError, ValueError):
        return None  # damaged, of another version, or without its kernels
    except RuntimeError:  # the driver refuses a kernel: a new compilation decides what to do
        return None
    run.strides = [None if s is None else tuple(s) for s in entry.strides]
    return run  # type: ignore[no-any-return]  # an Any, so that it may have `strides`
