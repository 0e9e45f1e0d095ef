"""torch's symbolic integers become `Sym`, each expression once.

sympy takes milliseconds per simplification, so nothing here simplifies: an expression is walked
node by node and rebuilt, with a memo.  Nothing here adds a guard.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch

from lenz.errors import Unsupported
from lenz.frontend.values import storage_of
from lenz.records import dataclass
from lenz.sym import ZERO, Int, Sym, Var, as_multiple, maximum, minimum, product

if TYPE_CHECKING:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

SymbolPlace: TypeAlias = Literal["value", "size", "stride", "offset"]


@dataclass(frozen=True, slots=True)
class Binding:
    """Where the value of one `Var` is read at the start of a call.

    `argument` is the position of the placeholder; `dim` is used for size and stride only. The value
    read is torch's `symbol`: `factor` times the Var.
    """

    var: Var
    argument: int
    what: SymbolPlace
    dim: int = 0
    factor: int = 1
    symbol: str = ""

    def read(self, args: Sequence[Any]) -> int:
        """The value of torch's symbol in a call with these arguments."""
        x = args[self.argument]
        match self.what:
            case "value":
                return int(x)
            case "offset":
                return int(x.storage_offset())
            case _:
                return int((x.shape if self.what == "size" else x.stride())[self.dim])


class SymbolMap:
    """The symbols of one graph: torch's expression to `Sym`, ranges, hints, bindings.

    `bindings` has one entry for each symbol that is an argument's size, in the order of the
    arguments. `hints` maps the name of each Var so far to its value in the traced call; an unbacked
    one has none. `opaque` maps the name of a Var that stands for an expression that `Sym` cannot
    represent (a float's ceiling, say) to that expression's text. `multiples` are facts about
    symbols: a multiple of 8 is 8 times a Var.
    """

    def __init__(
        self, shape_env: ShapeEnv | None, multiples: Mapping[str, int] | None = None
    ) -> None:
        self.shape_env = shape_env
        self._multiples = multiples or {}
        self._guarded: set[Any] | None = None  # the expressions of all guards
        self._memo: dict[Any, Sym] = {} if shape_env is None else settled(shape_env)
        self.hints: dict[str, int] = {}
        self.bindings: tuple[Binding, ...] = ()
        self.opaque: dict[str, str] = {}

    def sym(self, value: Any) -> Sym:
        """Return an int, a SymInt or a sympy expression as a Sym: one object for equal values."""
        if isinstance(value, int):
            return Int(value)
        if not isinstance(value, torch.SymInt):
            return self._expr(value)
        if not hasattr(value.node, "expr"):  # a constant or a nested int
            constant = value.node.maybe_as_int()
            if constant is None:
                raise Unsupported(f"the size {value} is not an integer expression")
            return Int(constant)
        return self._expr(value.node.expr)

    def syms(self, values: Iterable[int | torch.SymInt]) -> tuple[Sym, ...]:
        """Return a shape or strides as a tuple of Sym."""
        return tuple(self.sym(v) for v in values)

    def bind(self, values: Sequence[Any], is_first: bool = False) -> None:
        """Find the argument that determines each symbol; `values` are the traced arguments.

        A SymInt argument is preferred over a size, a size over a stride or an offset. In a graph
        that `is_first` to see the sizes, only those that Dynamo passes as SymInts surely have
        guards: torch loses those of others (docs/upstream/torch_lost_guards.py).
        """
        if is_first:
            given = (v.node.expr for v in values if isinstance(v, torch.SymInt))
            self._guarded = set[Any]().union(*(e.free_symbols for e in given))
        if self.shape_env is not None:
            self._solve(self.shape_env, values)
        found: dict[Var, Binding] = {}

        def offer(value: Any, argument: int, what: SymbolPlace, dim: int = 0) -> None:
            if isinstance(value, torch.SymInt):
                scaled = as_multiple(self.sym(value))
                if scaled is not None and scaled[0].name not in self.opaque:
                    var, factor = scaled
                    symbol = str(value.node.expr)
                    if factor == self._multiples.get(symbol, 1):
                        found.setdefault(var, Binding(var, argument, what, dim, factor, symbol))

        for i, value in enumerate(values):
            offer(value, i, "value")
        tensors = [(i, v) for i, v in enumerate(values) if storage_of(v) is not None]
        for i, value in tensors:
            for d, size in enumerate(value.shape):
                offer(size, i, "size", d)
        for i, value in tensors:
            for d, stride in enumerate(value.stride()):
                offer(stride, i, "stride", d)
            offer(value.storage_offset(), i, "offset")
        self.bindings = tuple(found.values())

    def _solve(self, env: ShapeEnv, values: Sequence[Any]) -> None:
        """Express data-dependent sizes by the sums that they are a part of, if nothing tells them.

        A gradient has u0 + 8 rows, say, where the backward half uses u0 for nothing else.
        """
        numbers = (n for v in values for n in getattr(v, "shape", (v,)))
        sizes = [n.node.expr for n in numbers if isinstance(n, torch.SymInt)]
        told = {s for e in sizes if not e.is_Add for s in e.free_symbols}
        for e in (e for e in sizes if e.is_Add):
            for s in sorted(e.free_symbols - told - {*hints_of(env)}, key=str)[:1]:
                if (c := e.coeff(s)).is_Integer and c > 0:
                    told.add(s)
                    self._memo[e] = whole = Var(f"{s}sum", *ends(env.bound_sympy(e)))
                    self._memo[s] = (whole - self._expr(e - c * s)) // int(c)

    def _expr(self, e: Any) -> Sym:
        """Rebuild a sympy expression as a Sym."""
        if e not in self._memo:
            self._memo[e] = self._rebuild(e)
        return self._memo[e]

    def _rebuild(self, e: Any) -> Sym:
        if e.is_Integer:
            if not -(1 << 63) <= e < 1 << 63:
                raise Unsupported(f"{e} does not fit in 64 bits")
            return Int(int(e))
        if e.is_Symbol:
            return self._variable(e)
        args = e.args
        match type(e).__name__:
            case "Add" | "Mul" if any(_is_fraction(a) for t in args for a in (t, *t.args)):
                # ShapeEnv only keeps n/d if d divides n.
                numerator, denominator = e.as_numer_denom()
                if denominator == 1:
                    return self._stand_in(e)
                return self._expr(numerator) // self._expr(denominator)
            case "Add":
                return sum(map(self._expr, args), ZERO)
            case "Mul":
                return product(map(self._expr, args))
            case "Pow" | "PowByNatural" if args[1].is_Integer and 0 <= int(args[1]) <= 64:
                return product([self._expr(args[0])] * int(args[1]))
            case "FloorDiv" | "CleanDiv":
                return self._expr(args[0]) // self._expr(args[1])
            case "CeilDiv":
                return -(-self._expr(args[0]) // self._expr(args[1]))
            case "Mod" | "PythonMod":
                return self._expr(args[0]) % self._expr(args[1])
            case "ModularIndexing":
                return self._expr(args[0]) // self._expr(args[1]) % self._expr(args[2])
            case "Min" | "Max" as name:
                return reduce(minimum if name == "Min" else maximum, map(self._expr, args))
            case "CeilToInt" | "FloorToInt" if type(args[0]).__name__ == "IntTrueDiv":
                # Attention on GPUs pads its statistics to 32 * ceil(n / 32), for one.
                n, d = (self._expr(a) for a in args[0].args)
                return n // d if type(e).__name__ == "FloorToInt" else -(-n // d)
            case "Identity":
                return self._expr(args[0])
            case _:
                return self._stand_in(e)

    def _variable(self, symbol: Any) -> Sym:
        env = self.shape_env
        name = str(symbol)
        lo, hi = ends(env.var_to_range.get(symbol)) if env is not None else (None, None)
        hint = hints_of(env).get(symbol) if env is not None else None
        if hint is not None and self._guarded is not None and symbol not in self._guarded:
            lo, hi = min(lo or 0, 2), None
        m = self._multiples.get(name, 1)
        if m > 1:
            name = f"{name}by{m}"
            lo, hi = (lo if lo is None else -(-lo // m)), (hi if hi is None else hi // m)
        if hint is not None and hint.is_Integer:
            self.hints[name] = int(hint) // m
        return Var(name, lo, hi) * m

    def _stand_in(self, e: Any) -> Sym:
        """Return a fresh variable for an expression that `Sym` cannot represent."""
        name = f"x{len(self.opaque)}"
        self.opaque[name] = str(e)
        env = self.shape_env
        lo, hi = ends(env.bound_sympy(e)) if env is not None else (None, None)
        if env is not None:
            value = e.xreplace(hints_of(env))
            if value.is_Integer:
                self.hints[name] = int(value)
        return Var(name, lo, hi)


def _is_fraction(e: Any) -> bool:
    return (e.is_Rational and not e.is_Integer) or (e.is_Pow and bool(e.args[1].is_negative))


def about(m: SymbolMap, symbols: Sequence[Any]) -> list[str]:
    """Return ShapeEnv's facts about symbols as text: ranges, values, settled expressions."""
    env = m.shape_env
    if env is None or not symbols:
        return list(map(str, symbols))
    values, ranges = hints_of(env), env.var_to_range
    known = [f"{s} {ranges.get(s)} {values.get(s)}" for s in symbols]
    return known + sorted(f"{e} is {n}" for e, n in settled(env).items())


def hints_of(env: ShapeEnv) -> Mapping[Any, Any]:
    """Return the values of symbols in the traced call; the attribute's name differs by release."""
    found = getattr(env, "backed_var_to_val", None)
    return found if found is not None else env.var_to_val


def settled(env: ShapeEnv) -> dict[Any, Sym]:
    """Return the expressions that a guard fixes to a number, such as `n//2 == 1`.

    Implications of guards count as well: torch writes `max(1, n//2) == 1` if n is at least 2. An
    assertion about an unbacked symbol implies nothing before it has run.
    """
    implied, backed = [e for e, holds in env.axioms.items() if holds], {*hints_of(env)}
    equal = [e for e in implied if type(e).__name__ == "Equality" and e.free_symbols <= backed]
    equal += [g.expr for g in env.guards if type(g.expr).__name__ == "Equality"]
    return {e.lhs: Int(int(e.rhs)) for e in equal if e.rhs.is_Integer}


def ends(values: Any) -> tuple[int | None, int | None]:
    """Return the bounds of a ValueRanges as integers, None for infinity."""
    if values is None:
        return None, None
    lo = int(values.lower) if values.lower.is_Integer else None
    # sys.maxsize - 1 is how older ShapeEnvs write "no upper end".
    return lo, int(values.upper) if values.upper.is_Integer and values.upper < 2**62 else None
