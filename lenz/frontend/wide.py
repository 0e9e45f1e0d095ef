"""Integers of a graph that might not fit in 64 bits, or that are divided by 0.

Python's integers do not wrap and raise an error for a division by 0; those of kernels do neither.

Memory bounds sizes of tensors and products of them, but no powers of sizes, for one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf, log2, prod
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from lenz.errors import Unsupported
from lenz.frontend.calls import callee, inserter, traced
from lenz.frontend.program import GraphKind
from lenz.frontend.values import storage_of

# How many bits integers may have: the most for which all numbers made from them fit is allowed.
BITS = (63, 62, 60, 46, 31, 20, 15, 12, 10, 7, 5)
SIZE = 1 << 48  # more elements fit in no memory
EVERY: Any = ValueRanges(-int_oo, int_oo)
# Functions whose results are no farther from 0 than one of their arguments.
SMALLER = (
    "Min", "Max", "Piecewise", "ExprCondPair", "Abs", "Identity", "FloorDiv", "CleanDiv", "CeilDiv",
    "IntTrueDiv", "ToFloat", "CeilToInt", "FloorToInt", "RoundToInt", "TruncToInt", "TruncToFloat",
    "OpaqueUnaryFn_sqrt", "OpaqueUnaryFn_log2", "RShift", "RoundDecimal",
)  # fmt: skip
TOO_LARGE = "lenz: an integer is so large that a number made from it might not fit in 64 bits"

SYMBOLIC = (torch.SymInt, torch.SymFloat)
ASSERT = torch.ops.aten._assert_scalar.default
BY_ZERO = {  # what Python says
    operator.floordiv: "integer division or modulo by zero",
    operator.mod: "integer modulo by zero",
}

# Arguments for which Python's functions raise no error. torch computes floats made from sizes as
# tensors, which have an infinity or NaN in place of an error.
DOMAINS: Mapping[str, Callable[..., Any]] = {
    "_sym_sqrt": lambda x: x >= 0,
    "_sym_log2": lambda x: x > 0,
    "pow": lambda x, y: not isinstance(y, int | float) or y >= 0 or x != 0,
    "truediv": lambda x, y: not isinstance(x, float) or y != 0,
}


def bound_integers(gm: GraphModule, inputs: Sequence[Any]) -> None:
    """Guard integer arguments, so that they and all numbers made from them fit in 64 bits.

    Also guard arguments of DOMAINS. Raises Unsupported if those of this call break a guard.
    """
    symbols = [x for x in inputs if isinstance(x, torch.SymInt) and hasattr(x.node, "expr")]
    given = [x for x in symbols if x.node.expr.is_Symbol and isinstance(x.node.hint, int)]
    sizes, ends = _ends(gm.graph.nodes) if given else ((), {})
    for x in given:
        end = ends.get(x.node.expr, 1 << BITS[0])
        if x.node.expr not in sizes and not -end <= x < end:
            raise Unsupported(f"a number made from {x.node.hint} might not fit in 64 bits")
    known = {x.node.expr for x in given}
    for n in [n for n in gm.graph.nodes if callee(n) in DOMAINS]:
        args = [traced(a) if isinstance(a, Node) else a for a in n.args]
        made = [a.node.expr.free_symbols for a in args if isinstance(a, SYMBOLIC)]
        if made and known.issuperset(set().union(*made)) and not DOMAINS[callee(n)](*args):
            raise Unsupported(f"{callee(n)} of {args} is an error")


def assert_integers(gm: GraphModule, kind: GraphKind) -> None:
    """Assert it in the graph where there is no guard: for values of tensors, and when exporting.

    Raises Unsupported if no bound would do.
    """
    graph, (sizes, ends) = gm.graph, _ends(gm.graph.nodes)
    places = [n for n in graph.nodes if n.op == "placeholder"]
    for n in [n for n in graph.nodes if isinstance(traced(n), torch.SymInt)]:
        node, is_given = traced(n).node, n.op == "placeholder"
        if node.expr in sizes or not isinstance(node.hint, int | None):  # nested tensors' are not
            continue
        is_argument = is_given and node.expr.is_Symbol and kind == "inference"
        limit = 1 << 64 if is_argument or _is_from_wider(n) else 1 << 63
        end = min(ends.pop(node.expr, limit), 1 << 63)
        known = node.shape_env.var_to_range.get(node.expr, EVERY)
        if end < limit and not known.issubset(ValueRanges(-end, end - 1)):
            with graph.inserting_before((places[-1] if is_given else n).next):
                _assert_between(graph, n, -end, end - 1)


def assert_divisors(graph: Graph) -> None:
    """Assert that divisors made from sizes or integers are not 0, unless that is known."""
    for n in [n for n in graph.nodes if n.target in BY_ZERO and isinstance(n.args[1], Node)]:
        by = traced(n.args[1])
        if isinstance(by, torch.SymInt) and not statically_known_true(by != 0):
            with graph.inserting_before(n):
                holds = inserter(graph, n)(operator.ne, n.args[1], 0)
                graph.call_function(ASSERT, (holds, BY_ZERO[n.target]))


def _is_from_wider(n: Node) -> bool:
    """Whether an integer is from an unsigned tensor or a float, and not only a result."""
    is_read = any(u.op != "output" for u in n.users)
    unsigned = (getattr(traced(a), "dtype", None) is torch.uint64 for a in n.all_input_nodes)
    return is_read and (any(unsigned) or not _is_whole(traced(n).node.expr))


def _is_whole(e: Any) -> bool:
    """Whether a number is made from integers alone."""
    return all(s.is_integer for s in e.free_symbols)


def _assert_between(graph: Graph, n: Node, low: int, high: int) -> None:
    """Assert that an integer is in [low, high]."""
    call = inserter(graph, n)
    holds = call(operator.and_, call(operator.ge, n, low), call(operator.le, n, high))
    graph.call_function(ASSERT, (holds, TOO_LARGE))


def _ends(nodes: Iterable[Node]) -> tuple[set[Any], dict[Any, int]]:
    """The symbols of layouts, and the ends of others from which larger numbers are made."""
    values = [traced(n) for n in nodes]
    numbers = [v for v in values if isinstance(v, SYMBOLIC)]
    exprs = {v.node.expr: None for v in numbers if hasattr(v.node, "expr")}
    if not exprs:
        return set(), {}
    tensors = [v for v in values if storage_of(v) is not None]
    told = (n for t in tensors for n in (*t.shape, *t.stride(), t.storage_offset()))
    layouts = dict.fromkeys(n.node.expr for n in told if isinstance(n, torch.SymInt))
    sizes = set[Any]().union(*(e.free_symbols for e in layouts))
    exprs = {e: None for e in exprs if e not in layouts and not e.is_Symbol and _is_whole(e)}
    wide = _unlimited([e for e in exprs if e.free_symbols <= sizes], sizes, tensors)
    others = {e: e.free_symbols - (set() if e in wide else sizes) for e in exprs}
    sizes = sizes.difference(*(e.free_symbols for e in wide))
    made = {e: symbols for e, symbols in others.items() if symbols}
    far = {s: max(-r.lower, r.upper) for s, r in numbers[0].node.shape_env.var_to_range.items()}
    end = next((1 << b for b in BITS if _fit(made, {s: min(far[s], 1 << b) for s in far})), None)
    if end is None:
        raise Unsupported(f"no bound is known for {', '.join(map(str, made))}, made from integers")
    return sizes, {s: end for e in made for s in made[e]}


def _unlimited(
    numbers: Sequence[Any], sizes: Iterable[Any], tensors: Sequence[torch.Tensor]
) -> list[Any]:
    """The numbers made from sizes alone that memory does not bound."""
    limits = dict.fromkeys(sizes, SIZE)
    if wide := [e for e in numbers if not _fit([e], limits)]:
        counts: Iterable[Any] = (t.numel() for t in tensors)
        wholes = {n.node.expr for n in counts if isinstance(n, torch.SymInt)}
        parts = {p.as_coeff_Mul()[1] for e in wholes for p in e.as_ordered_terms()}
        products = (p for e in wide for p in e.find(lambda p: p.is_Mul or p.is_Pow))
        factors = dict.fromkeys(p.as_coeff_Mul()[1] for p in products)
        limits |= {f: SIZE for f in factors if any(_divides(f, p) for p in parts)}
    return [e for e in wide if not _fit([e], limits)]


def _divides(factor: Any, product: Any) -> bool:
    """Whether a product of sizes divides another. Its quotients count as what they divide."""
    most = factor.replace(lambda e: type(e).__name__ == "FloorDiv", lambda e: e.args[0])
    return bool((product / most).as_numer_denom()[1] == 1)


def _fit(numbers: Iterable[Any], ends: Mapping[Any, Any]) -> bool:
    """Whether all integers in numbers fit in 64 bits if symbols are so far from 0."""
    try:
        return all(_most(e, ends) >= 0 for e in numbers)
    except OverflowError:
        return False


def _most(e: Any, ends: Mapping[Any, Any]) -> float:
    """How far a number may be from 0.

    Raises OverflowError if an integer in it might not fit in 64 bits.
    """
    # A condition's numbers are other nodes'.
    if e in ends or e.is_Symbol or e.is_Boolean or e.is_Relational:
        return int(ends.get(e, 1))
    times, rest = e.as_coeff_Mul() if e.is_Mul else (e, None)
    if e.is_Number:
        found = abs(int(e) if e.is_Integer else float(e))
    elif rest in ends:
        found = _most(times, ends) * int(ends[rest])
    elif type(e).__name__ == "FloatTrueDiv" and e.args[1].is_Number:
        return _most(e.args[0] / e.args[1], ends)
    else:
        found = _most_of(type(e).__name__, [_most(a, ends) for a in e.args])
    if getattr(e, "is_integer", False) and found >= 1 << 63:
        raise OverflowError
    return found


def _most_of(name: str, args: Sequence[float]) -> float:
    """The same of a function of sympy or torch, from that of its arguments."""
    match name:
        case "Add":
            return sum(args)
        case "Mul":
            return prod(args)
        case "Pow" | "PowByNatural" | "FloatPow":
            base = max(args[0], 1)
            return base ** args[1] if log2(base) * args[1] < 128 else inf
        case "Mod" | "PythonMod" | "ModularIndexing":
            return args[-1]
        case "BitwiseFn_bitwise_and" | "BitwiseFn_bitwise_or" | "BitwiseFn_bitwise_xor":
            return 2 * max(args)
        case _ if name in SMALLER:
            return max(args)
        case _:
            return inf
