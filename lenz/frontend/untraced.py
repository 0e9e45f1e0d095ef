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
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack


def outside(run: Callable[..., Any], reason: str) -> Callable[..., Any]:
    """Return `run` as a function that Dynamo does not trace."""
    disable: Any = torch._dynamo.disable  # it has no annotations
    hidden: Callable[..., Any] = disable(run, reason=reason)
    return hidden


def calling(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a module, method or other callable as a plain function, which Dynamo does trace."""
    return wrap_inline(fn)


def unchecked() -> Any:
    """A context without AOTAutograd's check of custom ops; None under another mode.

    The check is a dispatch mode around the first call of a graph, so that all its ops go through
    Python, those of torch too.
    """
    names = [type(mode).__name__ for mode in _get_current_dispatch_mode_stack()]
    return _disable_current_modes() if names == ["_AnalyzeCustomOpInputOutputMode"] else None


def skip_frames() -> None:
    """Make Dynamo skip the files of lenz, and plans, whose file is `<lenz graph.forward>`."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    files = (f.path for f in os.scandir(root) if not f.name.startswith("_"))
    trace_rules.SKIP_DIRS.extend([*sorted(files), "<lenz "])
    trace_rules._recompile_re()


skip_frames()
