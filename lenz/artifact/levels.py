"""CPU levels that an artifact has code for: those of x86-64, or a generic one."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import replace

from lenz.errors import UserError
from lenz.machines import host
from lenz.target import Target

# The psABI of x86-64 defines the levels; feature names are LLVM's. Each level includes the features
# of the earlier ones.
X86 = {
    "v2": ("cx16", "popcnt", "sahf", "sse3", "sse4.1", "sse4.2", "ssse3"),
    "v3": ("avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "xsave"),
    "v4": ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
}
LANES = {"v2": 4, "v3": 8, "v4": 16}


def known() -> tuple[str, ...]:
    """The levels of this machine's architecture, lowest first."""
    return (*X86, "host") if platform.machine() in ("x86_64", "AMD64") else ("generic", "host")


def usual() -> tuple[str, ...]:
    """The default levels of an artifact: all but this machine's own."""
    return known()[:-1]


def targets(levels: Sequence[str]) -> list[tuple[Target, tuple[str, ...]]]:
    """Each level's target and required features, highest level first; a text is one level.

    Raises UserError for a level that this architecture does not have.
    """
    order, mine = known(), host().target()
    chosen = [levels] if isinstance(levels, str) else levels
    for level in chosen:
        if level not in order:
            raise UserError(f"unknown level {level!r}", hint=f"levels are {', '.join(order)}")
    return [_target(level, mine) for level in sorted(chosen, key=order.index, reverse=True)]


def _target(level: str, mine: Target) -> tuple[Target, tuple[str, ...]]:
    if level == "host":
        return mine, tuple(f[1:] for f in mine.features.split(",") if f.startswith("+"))
    if level == "generic":
        return replace(mine, cpu="generic", features="", lanes=4), ()
    needs = tuple(f for name in known()[: known().index(level) + 1] for f in X86[name])
    features = ",".join(f"+{f}" for f in needs)
    return replace(mine, cpu=f"x86-64-{level}", features=features, lanes=LANES[level]), needs
