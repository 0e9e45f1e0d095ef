"""The process that compiles graphs in the background (`background.py`), one after the other.

It only writes to the disk cache. Its output goes to the client's standard error.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any, TypeAlias

import torch
from torch.fx import GraphModule

from lenz import keys
from lenz.first_calls.background import Request, requests
from lenz.frontend.asked import configuring, restore, state
from lenz.frontend.saved import as_traced, load_graph
from lenz.options import Options

# `api.compile_for`, which compiles a graph into the cache under the given key.
CompileFor: TypeAlias = Callable[[GraphModule, Sequence[Any], Options, str, str], None]
SET_PDEATHSIG = 1  # Linux: the signal that a process gets when its parent dies
NICE = 10


def serve(compile_for: CompileFor) -> None:
    """Answer requests until the client is gone, which may be in the middle of one."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(SET_PDEATHSIG, signal.SIGKILL)
    with suppress(AttributeError, OSError):
        os.nice(NICE)
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    with suppress(BrokenPipeError):
        for request in requests(sys.stdin.buffer):
            answers.write(json.dumps(compile_request(request, compile_for)).encode() + b"\n")


def compile_request(request: Request, compile_for: CompileFor) -> str:
    """Compile a graph into the cache; returns "", or why that was not possible."""
    if keys.sources() != request.sources:
        return "lenz has changed since the program began"
    given = {**request.options, "background": False, "on_error": "raise"}
    try:
        options = Options.from_environment({**given, "logs": tuple(given["logs"]), "passes": ()})
        with ExitStack() as stack:
            apply(request.settings, stack)
            gm, inputs = stack.enter_context(load_graph(request.graph))
            pairs = zip(request.state.splitlines(), state().splitlines(), strict=False)
            for there, here in pairs:
                if there != here:
                    return f"torch has another state there: {here} for {there}"
            as_traced(gm, inputs, request.statics)
            compile_for(gm, inputs, options, request.key, request.name)
    except Exception as e:  # noqa: BLE001  # the client warns with it
        return f"{type(e).__name__}: {e}"
    return ""


def apply(settings: dict[str, Any], stack: ExitStack) -> None:
    """Apply `background.settings`; autograd's state only until the stack exits."""
    torch.set_num_threads(settings["threads"])
    torch.set_float32_matmul_precision(settings["precision"])
    is_on, warns = settings["deterministic"]
    torch.use_deterministic_algorithms(is_on, warn_only=warns)
    stack.enter_context(configuring(settings["aot"]))
    restore(settings, stack)
