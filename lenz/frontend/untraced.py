"""Keeps Dynamo from tracing code of lenz.

Functions that may run while its callback is active are disabled, with all their callees: the
autograd engine calls the compiler of a backward half, and its plan. Other frames of lenz are
skipped: a finalizer, `explain` in a compiled function.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
from torch._dynamo import trace_rules
from torch._dynamo.external_utils import wrap_inline


def outside(run: Callable[..., Any], reason: str) -> Callable[..., Any]:
    """Return `run` as a function that Dynamo does not trace."""
    disable: Any = torch._dynamo.disable  # it has no annotations
    hidden: Callable[..., Any] = disable(run, reason=reason)
    return hidden


def calling(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a module, method or other callable as a plain function, which Dynamo does trace."""
    made: Callable[..., Any] = wrap_inline(fn)
    return made


def skip_frames() -> None:
    """Make Dynamo skip the files of lenz, and plans, whose file is `<lenz graph.forward>`."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    files = (f.path for f in os.scandir(root) if not f.name.startswith("_"))
    trace_rules.SKIP_DIRS.extend([*sorted(files), "<lenz "])
    trace_rules._recompile_re()


skip_frames()
