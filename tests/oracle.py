"""What tests of any room check graphs with: the text reads back, and a pass keeps the meaning."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch

from lenz.ir.dtype import DType
from lenz.ir.expr import Expr, is_bound_var, loads_of, nodes_of, syms_of
from lenz.ir.graph import LOOPS, Graph, Scatter, View, bodies_of
from lenz.ir.interp import Interpreted, interp, interp_schedule
from lenz.ir.kernel import Kernel, Schedule
from lenz.ir.plan import Plan
from lenz.ir.printer import show, sizes_of
from lenz.ir.reader import read
from lenz.ir.tensor import Buffer
from lenz.ir.verify import verify
from lenz.sym import Sym, Var, evaluate

X = TypeVar("X", Graph, Kernel, Plan, Schedule)
LARGEST = 9  # of a random size, where the ranges allow it
TOLERANCE: dict[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-10, 1e-12),
    torch.float32: (1e-4, 1e-5),
    torch.float16: (5e-3, 1e-3),
    torch.bfloat16: (2e-2, 1e-2),
}
"""(relative, absolute) error between two graphs that may round and sum in other orders."""


def roundtrip(x: X) -> X:
    """Assert that the text of a valid object reads back as the same object; gives the object."""
    verify(x)
    text = show(x)
    back = read(text)
    assert show(back) == text, f"read and shown again:\n{show(back)}\nwas:\n{text}"
    assert back == x, f"reads back as another object:\n{text}"
    return x


def random_inputs(g: Graph, seed: int = 0) -> list[torch.Tensor | int]:
    """Random tensors and sizes for the inputs of a graph; the sizes obey ranges and facts.

    Integers that the graph uses as indices stay inside the bounds that the graph gives them.
    """
    return _tensors(g.inputs, g, seed)


def random_constants(g: Graph, seed: int = 0) -> list[torch.Tensor]:
    """Random tensors for the constants of a graph."""
    return [t for t in _tensors(g.constants, g, seed) if isinstance(t, torch.Tensor)]


def assert_same(before: Graph, after: Graph, seeds: Iterable[int] = (0, 1), what: str = "") -> None:
    """Assert that two graphs give the same outputs and mutations on random inputs."""
    assert after.inputs == before.inputs, f"{what} changed the inputs"
    for seed in seeds:
        inputs, constants = random_inputs(before, seed), random_constants(before, seed)
        want = interp(before, inputs, constants)
        got = interp(after, inputs, _matched(before, after, constants))
        message = f"{what or 'it'} changed the result of\n{show(before)}to\n{show(after)}"
        assert_results(got, want, message)


def assert_schedule(s: Schedule, seeds: Iterable[int] = (0, 1)) -> None:
    """Assert that a schedule, its kernels run by the interpreter, does what its graph does."""
    verify(s)
    for seed in seeds:
        inputs, constants = random_inputs(s.graph, seed), random_constants(s.graph, seed)
        want = interp(s.graph, inputs, constants)
        got = interp_schedule(s, inputs, constants)
        assert_results(got, want, f"the schedule differs from its graph\n{show(s)}")


def assert_results(got: Interpreted, want: Interpreted, message: str = "") -> None:
    """Compare outputs and inputs after the call."""
    assert len(got.outputs) == len(want.outputs), message
    pairs = [
        *zip(got.outputs, want.outputs, strict=True),
        *zip(got.inputs, want.inputs, strict=True),
    ]
    for k, (a, b) in enumerate(pairs):
        _compare(a, b, f"value {k}: {message}")


def _compare(a: Any, b: Any, message: str) -> None:
    if not isinstance(b, torch.Tensor):
        if isinstance(b, tuple):
            assert len(a) == len(b), message
            for x, y in zip(a, b, strict=True):
                _compare(x, y, message)
            return
        assert a == b, message
        return
    rtol, atol = TOLERANCE.get(b.dtype, (0.0, 0.0))
    torch.testing.assert_close(
        a, b, rtol=rtol, atol=atol, equal_nan=True, msg=lambda m: f"{m}\n{message}"
    )


def _matched(before: Graph, after: Graph, constants: list[torch.Tensor]) -> list[torch.Tensor]:
    given = dict(zip((b.name for b in before.constants), constants, strict=True))
    return [given[b.name] for b in after.constants]


def _tensors(buffers: Sequence[Buffer | Sym], g: Graph, seed: int) -> list[torch.Tensor | int]:
    sizes = random_sizes(g, seed)
    limits = _index_limits(g, sizes)
    generator = torch.Generator().manual_seed(seed)
    found: list[torch.Tensor | int] = []
    for b in buffers:
        if isinstance(b, Sym):
            found.append(evaluate(b, sizes))
            continue
        layout = b.type.layout
        shape = [evaluate(s, sizes) for s in layout.shape]
        stride = [evaluate(s, sizes) for s in layout.stride]
        offset = evaluate(layout.offset, sizes)
        flat = _random(evaluate(layout.storage, sizes), b.dtype, limits.get(b.name), generator)
        found.append(flat.as_strided(shape, stride, min(offset, flat.numel())))
    return found


def random_sizes(g: Graph, seed: int = 0) -> dict[Var, int]:
    """A value for each size of a graph, inside its range."""
    chance = random.Random(seed)
    values: dict[Var, int] = {}
    for v in sizes_of(g):
        lo = 1 if v.lo is None else v.lo
        hi = max(lo, LARGEST) if v.hi is None else min(v.hi, max(lo + 4, LARGEST))
        if v.below is not None:
            hi = min(hi, evaluate(v.below, values) - 1)
        values[v] = chance.randint(lo, max(lo, hi))
    return values


def _random(
    n: int, dtype: DType, limit: tuple[int, int] | None, generator: torch.Generator
) -> torch.Tensor:
    if dtype.kind == "bool":
        return torch.randint(0, 2, (n,), generator=generator).to(torch.bool)
    if dtype.is_integer:
        low, high = limit or (0 if dtype.kind == "uint" else -4, 4)
        return torch.randint(low, high + 1, (n,), generator=generator).to(dtype.torch)
    if dtype.is_complex:
        return torch.randn(n, dtype=torch.complex64, generator=generator).to(dtype.torch)
    return torch.randn(n, generator=generator).to(dtype.torch)


def _index_limits(g: Graph, sizes: dict[Var, int]) -> dict[str, tuple[int, int]]:
    """For each integer buffer whose elements become indices, the interval they must stay in."""
    limits: dict[str, tuple[int, int]] = {}

    def narrow(name: str, lo: int, hi: int) -> None:
        old = limits.get(name, (lo, hi))
        limits[name] = (max(lo, old[0]), min(hi, old[1]))

    def from_body(e: Expr, name: str | None) -> None:
        for x in loads_of(e):
            if x.dtype.is_integer and name in limits:
                narrow(x.attrs[0], *limits[name])

    for n in reversed(g.nodes):
        if isinstance(n, LOOPS):
            for body in bodies_of(n):
                from_body(body, n.out.name)
            places = [(syms_of(e), e.args) for e in nodes_of(*bodies_of(n))]
            places += [(n.index, n.bound)] if isinstance(n, Scatter) else []
            for syms, operands in places:
                for v in (v for s in syms for v in s.free_vars if is_bound_var(v)):
                    hi = LARGEST if v.hi is None else v.hi
                    if v.below is not None and all(w in sizes for w in v.below.free_vars):
                        hi = min(hi, evaluate(v.below, sizes) - 1)
                    for x in loads_of(operands[int(v.name[1:])]):
                        if x.dtype.is_integer:
                            narrow(x.attrs[0], max(v.lo or 0, 0), hi)
        elif isinstance(n, View) and n.out.name in limits:
            narrow(n.source, *limits[n.out.name])
    return limits
