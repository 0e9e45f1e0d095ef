"""The option `compare_eager`: times a graph against eager at its first call; the faster one stays.

Both run in turns on copies of the arguments, and random generators are restored, so that the caller
sees one call.  A graph in training is timed with its backward pass.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx import GraphModule

from lenz.first_calls.background import Background
from lenz.frontend.asked import asked
from lenz.frontend.untraced import outside
from lenz.runtime.constants import whole_memory

WARM = 3  # a plan is captured as a CUDA graph in its second call
ROUNDS = 15
SECONDS = 1.0  # no new round starts after this time

Called: TypeAlias = Callable[..., Any]


def compared(run: Called, gm: GraphModule, inputs: Sequence[Any], name: str) -> Called:
    """Return a callable that runs the faster one of a compiled graph and its eager form.

    A background graph is compared once it is ready. Graphs whose second run might be visible are
    not compared: custom and higher-order ops, and arguments that share memory.
    """
    if isinstance(run, Background):
        return run
    if asked(gm, inputs) is None:
        _print(f"{name} is not compared with eager: a second run might be visible")
        return run
    return outside(Compared(run, gm.forward, name), "a graph compiled by lenz")


class Compared:
    """A compiled graph and its eager form; the faster one runs."""

    def __init__(self, run: Called, eager: Called, name: str) -> None:
        self._run, self._eager, self._name = run, eager, name
        self._lock = threading.Lock()
        self._faster: Called | None = None

    def __call__(self, *args: Any) -> Any:
        """Run on the arguments of Dynamo's graph; the first call compares."""
        if self._faster is None:
            with self._lock:  # one thread compares, and others wait for its choice
                if self._faster is None:
                    self._faster = self._choice(args)
        return self._faster(*args)

    def _choice(self, args: Sequence[Any]) -> Called:
        try:
            ours, eagers = times((self._run, self._eager), args)
        except Exception as e:  # noqa: BLE001  # memory for the copies, say; the call itself goes on
            _print(f"{self._name} is not compared with eager: {type(e).__name__}: {e}")
            return self._run
        is_faster = ours <= eagers
        told = f"{ours * 1e3:.3g} ms a call in lenz, {eagers * 1e3:.3g} ms in eager"
        _print(f"{self._name}: {told}; {'lenz' if is_faster else 'eager'} runs it")
        return self._run if is_faster else self._eager


def times(runs: Sequence[Called], args: Sequence[Any]) -> list[float]:
    """Return the median seconds of a call of each function, timed in turns on copies of `args`."""
    tensors = [a for a in args if isinstance(a, Tensor)]
    gpus = sorted({a.device.index for a in tensors if a.device.type == "cuda"})
    found: list[list[float]] = [[] for _ in runs]
    with torch.random.fork_rng(gpus):
        since = time.perf_counter()
        for n in range(WARM + ROUNDS):
            for run, seconds in zip(runs, found, strict=True):
                took = _step(run, [_copy(a) for a in args], gpus)
                if n >= WARM:
                    seconds.append(took)
            if n == WARM - 1:
                since = time.perf_counter()
            elif n >= WARM and time.perf_counter() - since > SECONDS:
                break
    return [median(seconds) for seconds in found]


def _step(run: Called, args: Sequence[Any], gpus: Sequence[int]) -> float:
    """Return the seconds of a call, with its backward pass if there is one."""
    _wait(gpus)
    since = time.perf_counter()
    out = run(*args)
    results = [o for o in out if isinstance(o, Tensor) and o.requires_grad]
    if results and torch.is_grad_enabled():
        leaves = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
        given = [torch.ones_like(o) for o in results]
        torch.autograd.grad(results, leaves, given, allow_unused=True)
    _wait(gpus)
    return time.perf_counter() - since


def _wait(gpus: Sequence[int]) -> None:
    for gpu in gpus:
        torch.cuda.synchronize(gpu)


def _copy(x: Any) -> Any:
    """Return a copy of a tensor with the same strides; other values unchanged."""
    if not isinstance(x, Tensor):
        return x
    with torch.no_grad():
        made = whole_memory(x).clone().as_strided(x.shape, x.stride(), 0).detach()
    made.requires_grad_(x.requires_grad)
    if x.is_leaf or not x.requires_grad:
        return made
    with torch.enable_grad():
        inner = made.clone()  # a graph may write into it, but not into a leaf
    if inner.stride() != x.stride():
        raise ValueError(f"no copy has the strides {x.stride()} of an argument")
    return inner


def _print(text: str) -> None:
    print(f"lenz: {text}", file=sys.stderr)
