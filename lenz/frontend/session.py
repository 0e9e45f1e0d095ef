"""The context of a compilation: a graph name, interned expressions, torch's settings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._dynamo.eval_frame import cached_backends
from torch._guards import CompileContext

from lenz.debug.counters import clear_counters
from lenz.frontend.collectives import none_dropped
from lenz.ir.interned import release, using


def numbered() -> str:
    """Return the name of the current graph, by torch's number: `graph3`.

    The second graph of the same code, for other sizes say, is `graph3_1`.
    """
    first, *rest = re.findall(r"\d+", str(CompileContext.current_compile_id())) or [""]
    return "_".join(["graph" + first, *(n for n in rest if n != "0")])


def is_again() -> bool:
    """Whether the code that is compiled was compiled before, for other sizes say."""
    found = CompileContext.current_compile_id()
    return found is not None and bool(found.frame_compile_id)


class OnReset:
    """Registered as a Dynamo backend, so that `torch._dynamo.reset` also resets lenz."""

    @staticmethod
    def reset() -> None:
        """Forget what belongs to compilations so far."""
        release()
        clear_counters()


def until_reset() -> None:
    """Let the next reset of Dynamo reset lenz too."""
    backends: dict[int, Any] = cached_backends
    backends.setdefault(id(OnReset), OnReset)


@contextmanager
def interning() -> Iterator[None]:
    """A context for building expressions, freed with their graph or by a reset of Dynamo."""
    until_reset()
    with using():
        yield


@contextmanager
def compiling() -> Iterator[None]:
    """Tell torch that a compilation is running, as torch 2.13 does itself; drop no collectives.

    Otherwise a compiled function called by another thread meanwhile takes this trace for a user's
    trace of that function, and raises. Dynamo compiles in one thread at a time.
    """
    with patch.object(torch.compiler, "_is_compiling_flag", True), none_dropped():
        yield
