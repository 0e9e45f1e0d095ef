"""What holds while torch has lenz compile: a name, expressions, nothing dropped."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._dynamo.eval_frame import cached_backends
from torch._guards import CompileContext

from lenz.frontend.collectives import none_dropped
from lenz.ir.interned import release, using


def numbered() -> str:
    """Return the name of the graph that is compiled, by torch's number: `graph3`.

    The second graph of one piece of code, for other sizes say, is `graph3_1`.
    """
    first, *rest = re.findall(r"\d+", str(CompileContext.current_compile_id())) or [""]
    return "_".join(["graph" + first, *(n for n in rest if n != "0")])


class OnReset:
    """Stands among Dynamo's backends, of which it resets those that have something to reset."""

    reset = staticmethod(release)


@contextmanager
def interning() -> Iterator[None]:
    """Build expressions in here, which are forgotten when their graph is, and Dynamo is reset."""
    backends: dict[int, Any] = cached_backends
    backends.setdefault(id(OnReset), OnReset)
    with using():
        yield


@contextmanager
def compiling() -> Iterator[None]:
    """Let torch know that it compiles, as torch 2.13 tells itself, and what it may not drop.

    Else a compiled function that another thread calls meanwhile takes this thread's trace for one
    by the user, of that function, and refuses.  Dynamo compiles in one thread at a time.
    """
    was = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        with none_dropped():
            yield
    finally:
        torch.compiler._is_compiling_flag = was
