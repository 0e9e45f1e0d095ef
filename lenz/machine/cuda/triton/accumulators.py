"""Open reductions: their state in the loops of the text, and the step over the lanes.

A reduction over lanes alone is one `tl.reduce` of the value's tile. A reduction that also runs over
a loop of the text carries a tile of partial results through the loop and reduces it afterwards.
"""

from __future__ import annotations

from math import prod

from lenz import ops
from lenz.ir.dtype import I64
from lenz.ir.kernel import For, Reduce, Scan, position
from lenz.ir.tensor import Axis
from lenz.machine.cuda.triton.reductions import combine_name, is_arg, state_dtype
from lenz.machine.cuda.triton.text import Dims, Term
from lenz.machine.cuda.triton.types import constant
from lenz.machine.cuda.triton.values import Values
from lenz.machine.reduces import reduces_of
from lenz.ops.cast import cast_text
from lenz.ops.emission import triton_type
from lenz.records import dataclass
from lenz.sym import ZERO, Var, substitute


@dataclass(slots=True)
class Accumulator:
    """One reduction: its axes, the dimensions of its tile, and the reduced ones among them.

    carried  the names of the state that a loop of the text carries; empty without such a loop
    value    the tile of values (and of positions), once it has been computed
    """

    stmt: Reduce
    over: tuple[Axis, ...]
    dims: Dims
    lanes: Dims
    carried: tuple[str, ...] = ()
    value: tuple[str, ...] = ()


class Accumulators:
    """The reductions of the current function."""

    def __init__(self, values: Values, dims: dict[Var, int]) -> None:
        self.values = values
        self.dims = dims
        self.open: dict[str, Accumulator] = {}

    def ending(self, f: For, around: Dims) -> list[Accumulator]:
        """The reductions that end with a loop, the outermost one that they run over.

        `around` are the dimensions that are open outside the loop.
        """
        found: list[Accumulator] = []
        for s, path in reduces_of(f):
            axes = {x.axis.var: x.axis for x in path}
            if isinstance(s, Scan) or s.name in self.open or not axes.keys() >= {*s.over}:
                continue
            over = tuple([axes[v] for v in s.over])
            lanes = frozenset(self.dims[v] for v in s.over if v in self.dims)
            inner = frozenset(self.dims[v] for v in axes if v in self.dims)
            found.append(acc := Accumulator(s, over, around | inner, lanes))
            self.open[s.name] = acc
        return found

    def start(self, acc: Accumulator) -> None:
        """Create the state that a loop of the text carries, before the loop."""
        s, v = acc.stmt, self.values
        dtype = state_dtype(s.value.dtype)
        first = constant(dtype, ops.neutral(s.kind, s.value.dtype).attrs[0])
        shape, level = v.lanes.shape(acc.dims), v.text.level
        total, at_name = f"{s.name}_acc", f"{s.name}_at"
        acc.carried = (total, at_name) if is_arg(s.kind) else (total,)
        v.text.put(level, f"{total} = tl.full({shape}, {_plain(first)}, {triton_type(dtype)})")
        if is_arg(s.kind):  # if all values of a row are neutral, the first element wins
            loops = {a.var: ZERO for a in acc.over if a.var not in self.dims}
            at = v.indices.term(substitute(position(acc.over), loops), {})
            v.text.put(level, f"{at_name} = {v.lanes.spread(at, acc.dims, v.indices.dtype)}")

    def take(self, s: Reduce) -> None:
        """Accumulate the value of a reduction at this point of the loops."""
        acc, v = self.open[s.name], self.values
        parts = self._tile(acc)
        level = v.text.level
        if not acc.carried:
            acc.value = parts
        elif is_arg(s.kind):
            # Every position comes after the earlier ones, so only a better value wins.
            (x, i), (y, j) = acc.carried[:2], parts[:2]
            better = f"{y} {'>' if s.kind == 'argmax' else '<'} {x}"
            if s.value.dtype.is_float:
                better = f"({better}) | (({y} != {y}) & ({x} == {x}))"
            take = v.text.let(better, acc.dims, level).text
            v.text.put(level, f"{x} = tl.where({take}, {y}, {x})")
            v.text.put(level, f"{i} = tl.where({take}, {j}, {i})")
        else:
            (x,), (y,), function = acc.carried, parts, self.function(s)
            call = f"{x} + {y}" if function == "add" else f"{function}({x}, {y})"
            v.text.put(level, f"{x} = {call}")

    def finish(self, acc: Accumulator) -> None:
        """Reduce the lanes; from here on the reduction's name stands for its result."""
        s, v = acc.stmt, self.values
        del self.open[s.name]  # another branch may have a reduction with this name
        state = acc.carried or acc.value
        dims, level = acc.dims - acc.lanes, v.text.level
        result = self._across(acc, state[0], self.function(s), dims) if acc.lanes else state[0]
        if s.kind == "sum" and s.value.dtype.is_float and not acc.carried:
            result = f"({result} + 0.0)"  # as if it had started with 0.0: no sum is -0.0
        if is_arg(s.kind):
            hit = f"{state[0]} == {result}"
            if s.value.dtype.is_float:  # if there is a NaN, the result is NaN
                hit = f"({hit}) | ({state[0]} != {state[0]})"
            v.functions["least"] = None
            far = (1 << (63 if v.indices.wide else 31)) - 1  # after all others: no element is there
            there = v.text.let(f"tl.where({hit}, {state[1]}, {far})", acc.dims, level)
            result = self._across(acc, there.text, "least", dims) if acc.lanes else state[1]
        to, held = s.value.dtype, state_dtype(s.value.dtype)
        if is_arg(s.kind):
            to, held = I64, v.indices.dtype
        v.text.put(level, f"{s.name} = {cast_text(to, held, result)}")
        v.refs[s.name] = Term(s.name, dims, level)

    def _across(self, acc: Accumulator, tile: str, function: str, dims: Dims) -> str:
        v = self.values
        if not dims:
            # A result for all lanes is a scalar, like every value without lanes. In one dimension
            # each thread first reduces its own elements, and threads synchronise once.
            if len(acc.dims) > 1:
                count = prod([v.lanes.widths[d] for d in acc.dims])
                flat = f"tl.reshape({tile}, [{count}], can_reorder=True)"
                tile = v.text.let(flat, acc.dims, v.text.level).text
            elif len(v.lanes.vars) > 1:
                tile = f"tl.reshape({tile}, [{v.lanes.widths[min(acc.dims)]}])"
            return v.text.let(f"tl.reduce({tile}, 0, {function})", dims, v.text.level).text
        for d in sorted(acc.lanes, reverse=True):
            line = f"tl.reduce({tile}, {d}, {function}, keep_dims=True)"
            tile = v.text.let(line, dims, v.text.level).text
        return tile

    def _tile(self, acc: Accumulator) -> tuple[str, ...]:
        """The value in every lane of the tile, neutral in lanes without an element."""
        s, v = acc.stmt, self.values
        dtype = state_dtype(s.value.dtype)
        text = v.lanes.spread(v.value(s.value), acc.dims, s.value.dtype)
        text = cast_text(dtype, s.value.dtype, text)
        tails = v.lanes.conditions(acc.lanes)
        neutral = constant(dtype, ops.neutral(s.kind, s.value.dtype).attrs[0])
        if tails:
            text = f"tl.where({' & '.join([t.text for t in tails])}, {text}, {neutral})"
        level = v.text.level
        parts = [v.text.let(text, acc.dims, level).text]
        if is_arg(s.kind):
            at = v.indices.term(position(acc.over), {})
            at_text = v.lanes.spread(at, acc.dims, v.indices.dtype)
            parts.append(v.text.let(at_text, acc.dims, level).text)
        return tuple(parts)

    def function(self, s: Reduce | Scan) -> str:
        """The function that combines two values, which the text then contains."""
        name = combine_name(s.kind, s.value.dtype)
        self.values.functions[name] = None
        return name


def _plain(text: str) -> str:
    """The number in a constant that is written out."""
    return text.split(",")[1].strip() if text.startswith("tl.full") else text
