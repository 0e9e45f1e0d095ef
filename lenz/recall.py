"""The cache of compiled graphs on disk: what an entry holds, and how a later process loads it.

A recalled graph is not lowered, scheduled or emitted, and most of the compiler is not imported. An
entry holds the text of the plan and the store's keys of its kernels. The text is read, then printed
as Python. Machine code is trusted: the store reads only files that no other user can write.
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
from lenz.ir.plan import Plan
from lenz.ir.reader import read
from lenz.loading import Boxed, kernels
from lenz.machines import host
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
    return Context(options, host().target(), Silent() if trace is None else trace)


def keep(store: Store, key: str, entry: Entry) -> None:
    """Write an entry, unless lenz's files have changed. Its kernels are in the store already."""
    if keys.sources(again=True):
        store.put("graph", key, json.dumps(asdict(entry)).encode())


def recall(program: FxProgram, cx: Context, key: str | None, again: Compile) -> Boxed | None:
    """The callable of a program that was compiled before; None if the entry or a kernel is missing.

    `again` compiles the fallback for calls that break an assumption of the plan.
    """
    store = store_in(cx.options)
    if store is None or key is None:
        return None
    return loaded(store, key, lambda p, f, alive: load_program(p, f, alive, program, cx, again))


def loaded(store: Store, key: str, load: Callable[..., Boxed]) -> Boxed | None:
    """What `load` makes of the plan, the kernels and their owner in an entry; None without one."""
    data = store.get("graph", key)
    if data is None:
        return None
    try:
        entry, plan = Entry(**json.loads(data)), plan_in(data)
        run: Any = load(plan, *kernels(plan, entry.keys, store))
    except (AssertionError, LookupError, ReadError, TypeError, ValueError):
        return None  # damaged, of another version, or without its kernels
    except RuntimeError:  # the driver refuses a kernel: a new compilation decides what to do
        return None
    run.strides = [None if s is None else tuple(s) for s in entry.strides]
    return run  # type: ignore[no-any-return]  # an Any, so that it may have `strides`


def plan_in(data: bytes) -> Plan:
    """The plan of an entry."""
    plan = read(json.loads(data)["plan"])
    assert isinstance(plan, Plan)
    return plan
