"""The text of a watched plan, with calls of `watch` between the lines of its steps."""

from __future__ import annotations

from collections.abc import Callable

from lenz.ir.plan import Alloc, CallStep, LaunchStep, Step, defined, used
from lenz.sym import to_python


def taken_and_made(s: Step) -> tuple[list[str], list[str]]:
    """The buffers that a launch or call takes, and those that it defines; empty for other steps."""
    if not isinstance(s, (LaunchStep, CallStep)):
        return [], []
    taken = used(s) if isinstance(s, LaunchStep) else dict.fromkeys(used(s))
    return [*taken], [*defined(s)]


def title_of(s: Step) -> str:
    """The name of a kernel, or of the op that a step calls."""
    return s.kernel if isinstance(s, LaunchStep) else s.op if isinstance(s, CallStep) else ""


def between(k: int, s: Step, lines: list[str], var: Callable[[str], str]) -> list[str]:
    """The lines of step `k`, with calls of `watch` around them; `var` maps buffers to variables."""
    if isinstance(s, Alloc) and not s.zero and not s.over:
        return [*lines, f"watch.made({k}, {var(s.name)})"]
    if not isinstance(s, (LaunchStep, CallStep)):
        return lines
    taken, made = taken_and_made(s)
    before = "".join(f"{var(name)}, " for name in taken)
    after = before + "".join(f"{var(name)}, " for name in made)
    sizes = "".join(f"{to_python(v)}, " for v in s.sizes) if isinstance(s, LaunchStep) else ""
    told = f"({before}), ({sizes})" if sizes else f"({before})"
    return [f"watch.before({k}, {told})", *lines, f"watch.after({k}, ({after}))"]
