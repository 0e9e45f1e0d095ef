"""Trace a function, lower it, run the graph in the interpreter and compare with eager.

The reference is eager in double precision (integers and bool as they are). Where the rounding of
the inputs' own type decides (floor of a half, say), eager in that type is accepted as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree

import lenz.lower
from lenz.context import Context
from lenz.frontend.build import build
from lenz.frontend.decompose import decompositions
from lenz.ir.graph import Extern, Graph
from lenz.ir.interp import Interpreted, interp
from lenz.ir.printer import show
from lenz.ir.reader import read
from lenz.ir.verify import verify
from lenz.lower import native_ops
from lenz.options import Options
from lenz.target import Target

__all__ = ["TOLERANCE", "check", "evaluated", "lowered", "trace"]

# Relative and absolute error that is accepted against the double-precision reference.
TOLERANCE: dict[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-9, 1e-11),
    torch.float32: (2e-5, 2e-6),
    torch.float16: (2e-3, 1e-4),
    torch.bfloat16: (1e-2, 1e-3),
}
WIDE = {torch.float32: torch.float64, torch.float16: torch.float64, torch.bfloat16: torch.float64}


def trace(fn: Callable[..., Any], inputs: Sequence[Any], dynamic: bool = False) -> GraphModule:
    """The functional aten graph of fn, decomposed as AOTAutograd would decompose it."""

    def functional(*args: Any) -> Any:
        return torch.func.functionalize(fn, remove="mutations")(*args)

    mode = "symbolic" if dynamic else "fake"
    table = decompositions(native_ops())
    with torch.no_grad():
        return make_fx(functional, decomposition_table=table, tracing_mode=mode)(*inputs)  # type: ignore[arg-type]


def lowered(fn: Callable[..., Any], inputs: Sequence[Any], dynamic: bool = False) -> Graph:
    """The verified graph of a function."""
    return _lower(trace(fn, inputs, dynamic), inputs)[0]


def evaluated(
    fn: Callable[..., Any], *inputs: Any, dynamic: bool = False
) -> tuple[Graph, tuple[Any, ...]]:
    """The graph of a function and its outputs by the interpreter."""
    g, constants = _lower(trace(fn, inputs, dynamic), inputs)
    _read_back(g, show(g))
    return g, interp(g, inputs, constants).outputs


def check(
    fn: Callable[..., Any],
    *inputs: Any,
    tolerance: tuple[float, float] | None = None,
    dynamic: bool = False,
    native: bool = True,
    exact: bool = False,
    names: Sequence[str] = (),
) -> Graph:
    """Lower fn, run it by the interpreter and compare every output and every mutated input.

    `tolerance` is (relative, absolute) and replaces TOLERANCE; `exact` asks for the bits of eager.
    `dynamic` traces with symbolic sizes. `native` asserts that no eager op is left in the graph.
    `names` are what messages call the outputs.
    """
    gm = trace(fn, inputs, dynamic)
    g, constants = _lower(gm, inputs)
    text = show(g)
    if native:
        left = [n.op for n in g.nodes if isinstance(n, Extern) and n.op != "lenz.seed"]
        assert not left, f"not lowered: {left}\n{text}"
    _read_back(g, text)
    result = interp(g, inputs, constants)
    given = [_copy(x) for x in inputs]
    wanted = _pytree.tree_leaves(fn(*given))
    double = None if exact else _reference(fn, inputs)
    _compare(result, wanted, given, double, tolerance, exact, text, names)
    return g


def _lower(gm: GraphModule, inputs: Sequence[Any]) -> tuple[Graph, tuple[torch.Tensor, ...]]:
    program = build(gm, [], "inference", "test", native=native_ops())
    g = lenz.lower.lower(program, Context(Options(), Target("cpu")))
    verify(g)
    named = {n.name: program.constants[n.target] for n in gm.graph.nodes if n.op == "get_attr"
             and n.target in program.constants}  # fmt: skip
    return g, tuple(named[b.name] for b in g.constants)


def _read_back(g: Graph, text: str) -> None:
    again = read(text)
    assert show(again) == text, f"{text}\n--- reads back as\n{show(again)}"


def _copy(x: Any) -> Any:
    """A copy with the same strides."""
    if not isinstance(x, torch.Tensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x)


def _reference(fn: Callable[..., Any], inputs: Sequence[Any]) -> list[Any] | None:
    """The outputs in double precision; None where fn does not take doubles."""
    wide = [x.to(WIDE.get(x.dtype, x.dtype)) if isinstance(x, torch.Tensor) else x
            for x in map(_copy, inputs)]  # fmt: skip
    try:
        return _pytree.tree_leaves(fn(*wide))
    except RuntimeError:
        return None


def _compare(
    result: Interpreted,
    wanted: list[Any],
    given: Sequence[Any],
    double: list[Any] | None,
    tolerance: tuple[float, float] | None,
    exact: bool,
    text: str,
    names: Sequence[str],
) -> None:
    outputs = [o for o in _pytree.tree_leaves(result.outputs) if o is not None]
    wanted = [w for w in wanted if w is not None]
    assert len(outputs) == len(wanted), f"{len(outputs)} outputs, wanted {len(wanted)}\n{text}"
    widths = [w for w in double if w is not None] if double is not None else [None] * len(wanted)
    for i, (got, want) in enumerate(zip(outputs, wanted, strict=True)):
        what = names[i] if names else f"output {i}"
        _same(got, want, widths[i], tolerance, exact, what, text)
    for i, (got, want) in enumerate(zip(result.inputs, given, strict=True)):
        _same(got, want, None, tolerance, exact, f"input {i} after the call", text)


def _same(
    got: Any,
    want: Any,
    double: Any,
    tolerance: tuple[float, float] | None,
    exact: bool,
    what: str,
    text: str,
) -> None:
    if not isinstance(want, torch.Tensor):
        assert got == want, f"{what}: {got}, wanted {want}\n{text}"
        return
    want = want.detach()
    assert got.dtype is want.dtype, f"{what}: {got.dtype}, wanted {want.dtype}\n{text}"
    assert got.shape == want.shape, f"{what}: {got.shape}, wanted {want.shape}\n{text}"
    if want.clone().stride() == want.stride():  # the interpreter's outputs are clones
        dims = [d for d, n in enumerate(want.shape) if n > 1]
        assert all(got.stride(d) == want.stride(d) for d in dims), (
            f"{what}: strides {got.stride()}, wanted {want.stride()}\n{text}"
        )
    if exact or not want.is_floating_point():
        assert torch.equal(_bits(got), _bits(want)), f"{what}: {got}\nwanted {want}\n{text}"
        return
    rtol, atol = TOLERANCE.get(want.dtype, (1e-9, 1e-11)) if tolerance is None else tolerance
    near = torch.isclose(got.double(), want.double(), rtol, atol, equal_nan=True)
    if isinstance(double, torch.Tensor) and double.is_floating_point():
        # The double may be outside the type's range: round it to the type first.
        ideal = double.detach().to(want.dtype).double()
        close = torch.isclose(got.double(), ideal, rtol, atol, equal_nan=True)
        near = near | close
    assert bool(near.all()), f"{what}: {got}\nwanted {want}\nin double {double}\n{text}"


def _bits(x: torch.Tensor) -> torch.Tensor:
    """The bits as integers, so that NaN equals NaN and 0.0 differs from -0.0."""
    if not x.is_floating_point():
        return x
    x = torch.where(torch.isnan(x), torch.tensor(torch.nan).to(x.dtype), x).contiguous()
    widths = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.view(widths[x.element_size()])
