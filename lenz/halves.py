"""Halves of graphs in the store: their entries, and how to load them.

Imports neither the compiler nor the keys of the cache, which read all files of lenz.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from lenz.ir.lexer import ReadError
from lenz.ir.plan import Boxed, Plan
from lenz.ir.reader import read
from lenz.loading import kernels
from lenz.options import Options
from lenz.records import dataclass
from lenz.respecialise import Needs, load_plan
from lenz.runtime.constants import unpacked
from lenz.runtime.store import Store

# What a plan needs from its program, as JSON, and the key of its entry.
Half: TypeAlias = "dict[str, Any]"


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


def loaded(store: Store, key: str, load: Callable[..., Boxed]) -> Boxed | None:
    """Call `load` with the plan, kernels and owner of an entry; None without an entry."""
    data = store.get("graph", key)
    if data is None:
        return None
    try:
        entry, plan = Entry(**json.loads(data)), plan_in(data)
        run: Any = load(plan, *kernels(plan, entry.keys, store))
    except (AssertionError, LookupError, ReadError, TypeError, ValueError):
        return None  # damaged, of another version, or without its kernels
    except RuntimeError:  # the driver rejects a kernel: compile again
        return None
    run.strides = [None if s is None else tuple(s) for s in entry.strides]
    return run  # type: ignore[no-any-return]  # an Any, so that it may have `strides`


def plan_in(data: bytes) -> Plan:
    """The plan of an entry."""
    plan = read(json.loads(data)["plan"])
    assert isinstance(plan, Plan)
    return plan


def loaded_half(
    half: Half, store: Store, options: Options, otherwise: Callable[..., Sequence[Any]]
) -> Any:
    """A half as a callable; None if the store lacks a part of it.

    `otherwise` runs calls that break an assumption of the plan.
    """
    constants = {}
    for name, (content, device) in half["constants"].items():
        data = store.get("constant", content)
        if data is None:
            return None
        constants[name] = unpacked(data, device)
    needs = Needs(constants, {})
    load = lambda p, f, alive: load_plan(p, f, alive, needs, options, otherwise, store)
    return loaded(store, half["key"], load)
