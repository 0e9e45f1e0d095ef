"""The disk cache of compiled graphs: what an entry holds, and how a later process loads it.

A recalled graph is not lowered, scheduled or emitted, and most of the compiler is not imported. An
entry holds the text of the plan and the store's keys of its kernels. The text is read, then printed
as Python. Machine code is trusted: the store reads only files that no other user can write.
"""

from __future__ import annotations

import json
from dataclasses import asdict

from lenz import keys
from lenz.context import Context
from lenz.debug.trace import Trace
from lenz.frontend import FxProgram
from lenz.halves import Entry, loaded
from lenz.ir.plan import Boxed
from lenz.machines import host
from lenz.options import Options
from lenz.respecialise import Compile, load_program
from lenz.runtime.store import Store, store_in


def context(options: Options, trace: Trace | None = None) -> Context:
    """The context of one compilation for this machine's CPU."""
    return Context(options, host().target(), Trace() if trace is None else trace)


def keep(store: Store, key: str, entry: Entry) -> None:
    """Write an entry, unless lenz's files have changed. Its kernels are in the store already."""
    if keys.sources(again=True):
        store.put("graph", key, json.dumps(asdict(entry)).encode())


def recall(program: FxProgram, cx: Context, key: str | None, again: Compile) -> Boxed | None:
    """The callable of a cached program; None if the entry or a kernel is missing.

    `again` compiles the fallback for calls that break an assumption of the plan.
    """
    store = store_in(cx.options)
    if store is None or key is None:
        return None
    return loaded(store, key, lambda p, f, alive: load_program(p, f, alive, program, cx, again))
