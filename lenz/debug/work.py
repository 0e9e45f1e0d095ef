"""The work of launches and calls: floating-point operations, and the rates of a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from math import prod
from time import perf_counter
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from lenz.debug.profile import bandwidth
from lenz.debug.traffic import first_bodies
from lenz.ir.expr import nodes_of
from lenz.ir.graph import Atom, Extern, Ref
from lenz.ir.kernel import Kernel, Reduce, Scan, in_loops
from lenz.ir.syntax import exprs_in
from lenz.ir.tensor import Buffer
from lenz.sym import ZERO, Sym, SymEnv, substitute
from lenz.target import HOST

# Ops of floats that move or compare bits. Others count as one operation each, `fma` as two.
NO_FLOPS = (
    "const", "load", "index", "ref", "masked", "checked", "neg", "abs", "copysign", "minimum",
    "maximum", "fmin", "fmax", "where", "cast", "narrow", "bitcast",
)  # fmt: skip
SIZES = {HOST: 768}  # of square products that are timed; a GPU needs larger ones
ROUNDS = 12


def kernel_flops(k: Kernel, env: SymEnv) -> int:
    """Floating-point operations of a launch at the example sizes; of a branch the first body."""
    found = 0
    for s, loops in in_loops(first_bodies(k.body)):
        # An extent that depends on an outer loop is that of the first iteration.
        first = {f.axis.var: ZERO for f in loops}
        times = prod(max(0, env.hint(substitute(f.axis.extent, first))) for f in loops)
        nodes = [n for n in nodes_of(*exprs_in(s)) if n.dtype.is_float]
        ops = sum(1 + (n.op.name == "fma") for n in nodes if n.op.name not in NO_FLOPS)
        folds = isinstance(s, (Reduce, Scan)) and s.dtype.is_float
        found += times * (ops + folds)
    return found


def call_flops(n: Extern, buffers: Mapping[str, Buffer], env: SymEnv) -> int:
    """Floating-point operations of a call by torch's formula for its op; 0 if it has none."""
    target: Any = torch.ops
    for name in n.op.removesuffix(".default").removesuffix("_for_cpu").split(".")[:2]:
        target = getattr(target, name, None)
    count: Callable[..., Any] | None = flop_registry.get(target)
    if count is None:
        return 0

    def made(a: Atom | Buffer) -> Any:
        match a:
            case Ref(name):
                return made(buffers[name])
            case Buffer():
                shape = [env.hint(s) for s in a.type.shape]
                return torch.empty(shape, dtype=a.type.dtype.torch, device="meta")
            case Sym():
                return env.hint(a)
            case tuple():
                return [made(x) for x in a]
            case _:
                return a

    outs = [made(o) for o in n.outs if isinstance(o, Buffer)]
    kwargs = {name: made(a) for name, a in n.kwargs}
    try:
        return int(count(*map(made, n.args), **kwargs, out_val=outs[0] if n.single else outs))
    except (AssertionError, IndexError, TypeError, ValueError, RuntimeError):
        return 0  # a form of the op that torch's formula does not know


def machine(place: str) -> dict[str, Any] | None:
    """Measured GB/s and GFLOP/s of a device; None if it is elsewhere or has no memory left."""
    if place != HOST and not (place.startswith("cuda") and torch.cuda.is_available()):
        return None
    try:
        return {"gbps": bandwidth(place), "gflops": rates(place)}
    except torch.OutOfMemoryError:
        return None


@cache
def rates(place: str) -> dict[str, float]:
    """Measured GFLOP/s of square matrix products by dtype; those of halves only on GPUs."""
    n = SIZES.get(place, 4096)
    made: dict[str, float] = {}
    for dtype in (torch.float32,) if place == HOST else (torch.float32, torch.bfloat16):
        x, best = torch.ones(n, n, dtype=dtype, device=place), float("inf")
        for _ in range(ROUNDS):
            start = perf_counter()
            last = float((x @ x)[0, 0])  # waits for the device
            best = min(best, perf_counter() - start)
            assert last > 0
        made[str(dtype).removeprefix("torch.")] = 2 * prod((n, n, n)) / best / 1e9
    return made
