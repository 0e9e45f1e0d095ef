"""torch's side of a report: symbols, the conditions on each call, and why code was recompiled."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch._dynamo.utils as of_dynamo
from torch._guards import TracingContext

from lenz.debug.names import plain, shown
from lenz.sym import SymEnv

SIZE = re.compile(r"tensor '(.+?)' size mismatch at index (\d+)(?!.*(?:expected|actual) [01]\b)")
VALUE = re.compile(r"^([\w.\[\]']+) == (-?\d+|True|False)\b")


def symbols(env: SymEnv, shape_env: Any) -> list[dict[str, Any]]:
    """The sizes that may change from call to call: range, example, and the argument they are of."""
    sources: Mapping[Any, Any] = getattr(shape_env, "var_to_sources", {})
    places = {str(s): [plain(str(x.name)) for x in found] for s, found in sources.items()}
    hints, found = dict(env.hints), list[dict[str, Any]]()
    for v in env.ranges:
        told = {"name": v.name, "least": v.lo, "most": v.hi, "example": hints.get(v.name)}
        found.append(told | {"sources": places.get(v.name.partition("by")[0], [])})
    return found


def conditions(shape_env: Any) -> list[dict[str, str]]:
    """What Dynamo checks before each call of the graph that is being compiled."""
    found: list[dict[str, str]] = []
    context = TracingContext.try_get()
    for g in sorted(context.guards_context.dynamo_guards) if context is not None else ():
        line = "".join(f"{at.filename}:{at.lineno}" for at in (g.user_stack or ())[-1:])
        found.append({"kind": g.create_fn_name(), "on": plain(g.name), "line": shown(line)})
    sizes = getattr(shape_env, "guards", ())
    return [*found, *({"kind": "SIZES", "on": str(e.expr), "line": ""} for e in sizes)]


def recompiles(since: int) -> list[dict[str, str]]:
    """What torch recompiled after `since`, in microseconds of the epoch, and what to do about it.

    torch remembers the last 64 compilations.
    """
    found: list[dict[str, str]] = []
    for m in of_dynamo.get_compilation_metrics():
        if m.recompile_reason and (m.start_time_us or 0) >= since:
            which, _, why = str(m.recompile_reason).partition(": ")
            why = " ".join(why.partition("\n")[0].partition("  #")[0].split())
            where = f"{m.co_name} at {m.co_filename}:{m.co_firstlineno}"
            row = {"id": str(m.compile_id), "of": which, "code": where, "guard": why}
            found.append({k: shown(v) for k, v in row.items()} | {"advice": advice(why)})
    return found


def advice(guard: str) -> str:
    """What makes a condition that failed hold for more calls."""
    if m := SIZE.search(guard):
        return f"torch._dynamo.mark_dynamic({shown(m[1])}, {m[2]}), or dynamic=True"
    if m := VALUE.match(guard):
        return f"{plain(m[1])} changes from call to call: keep it the same, or pass it as a tensor"
    if "dtype mismatch" in guard:
        return "calls with several dtypes need a compilation each"
    return "calls that differ in this need a compilation each"
