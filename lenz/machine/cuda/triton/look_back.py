"""Scans over several programs of a grid: what each publishes and reads from earlier ones.

With groups of G blocks, the fold of all elements before block b consists of two windows:

    far     all before b's group of groups (1 result), and its groups before that of b (up to G - 1)
    near    the blocks of b's group before b (up to G - 1)

Each window is folded as a tile in a fixed order. The result does not depend on which program was
first, and has the same bits on every run. A group's result waits only for its own blocks, so only
one in G * G blocks waits for a chain.

A 32-bit result is stored in one 64-bit word, next to a flag that a zeroed workspace lacks; a 64-bit
result in two such words. A word is written once and atomically, so value and flag become visible
together. No other ordering is needed: relaxed accesses suffice, without a fence.

Running sums of f32 publish f64, whose last bit is the flag, so that each element is rounded once.
The error between neighbours is then the same inside a block and across two blocks.

A window has at least as many lanes as the program has threads, so that one thread reads each word.
A second reader might still see the old word, and Triton takes the value of a replicated lane from
any of its threads.

A program waits only for programs with lower numbers. A GPU starts the programs of a grid in order
and does not preempt them: the lowest running program waits for nobody.
"""

from __future__ import annotations

from math import prod

from lenz import ops
from lenz.ir.dtype import F32, F64, DType
from lenz.ir.kernel import LookBack, Scan, words
from lenz.machine.cuda.triton.reductions import combine_name
from lenz.machine.cuda.triton.text import Dims, Term
from lenz.machine.cuda.triton.types import constant
from lenz.machine.cuda.triton.values import Values
from lenz.ops.emission import triton_type
from lenz.records import dataclass
from lenz.sym import ZERO, Sym, Var, maximum

VALUE = -(1 << 32)  # the bits of a word for the value
FLAG = 1


@dataclass(frozen=True, slots=True)
class Window:
    """Up to G results: for each word its pointers, their condition, and its name."""

    pointers: tuple[str, ...]
    runs: str
    names: tuple[str, ...]

    def loads(self, again: bool = False) -> list[str]:
        """Lines that read all words, or `again` the words that are still missing."""
        lines = []
        for n, p in zip(self.names, self.pointers, strict=True):
            runs, other = (f"({n} & {FLAG}) == 0", n) if again else (self.runs, str(FLAG))
            lines.append(f"{n} = tl.load({p}, {runs}, {other}, volatile=True)")
        return lines


@dataclass(frozen=True, slots=True)
class LookingBack:
    """The current scan: its dimension, the dimensions of its tile, its blocks."""

    values: Values
    scan: Scan
    back: LookBack
    d: int
    dims: Dims
    blocks: Sym
    threads: int

    @property
    def dtype(self) -> DType:
        """The type of the results."""
        dtype = self.scan.value.dtype
        return F64 if dtype is F32 and self.scan.kind == "sum" else dtype

    def joined(self, tile: str, running: str) -> str:
        """The scan's tile: `running`, the scan of `tile` alone, after all earlier blocks."""
        text, b, g = self.values.text, self.back.block, self.back.group
        level, function = text.level, combine_name(self.scan.kind, self.dtype)
        before = maximum(self.blocks - 1, ZERO)
        groups = before + before // g
        others = f"{b.name} < {self.values.indices.term(before, {}).text}"
        tile = tile if tile.isidentifier() else text.let(tile, self.dims, level).text
        own = f"{self._fold(tile)}.to({triton_type(self.dtype)})"
        own = text.let(own, self.dims - {self.d}, level).text
        self._leave(b, own, others)
        lane = self._lane()
        part = self.values.indices.term(b % g, {}).text
        near = self._window("near", [(b // g * g, f"{lane.name} < {part}")], lane)
        windows, few = [near], self.blocks.hi is not None and self.blocks.hi <= g
        if not few:
            outer = self.values.indices.term(b // g % g, {}).text
            start = before + b // (g * g) * g
            first = groups + b // (g * g) - 1 - lane
            parts = [(start, f"{lane.name} < {outer}"), (first, f"{b.name} >= {g * g}")]
            windows.append(self._window("far", parts, lane))
        for line in [line for w in windows for line in w.loads()]:
            text.put(level, line)
        # While other programs work; but 64-bit values would occupy all registers meanwhile (10%
        # slower).
        early = words(self.scan.value.dtype) == 1
        here = text.let(running, self.dims, level).text if early else ""
        ahead = self._awaited(near)
        if not few:
            total = f"{function}({ahead}, {own})"
            self._leave(before + b // g, total, f"({b.name} % {g} == {g - 1}) & ({others})")
            ahead = f"{function}({self._awaited(windows[1])}, {ahead})"
            ahead = text.let(ahead, self.dims - {self.d}, level).text
            total = f"{function}({ahead}, {own})"
            last = f"({b.name} % {g * g} == {g * g - 1}) & ({others})"
            self._leave(groups + b // (g * g), total, last)
        here = here or text.let(running, self.dims, level).text
        if self.dtype is self.scan.value.dtype:
            return f"{function}({ahead}, {here})"
        # The nearest f32 and the remainder: -0.0 if there is none, which keeps the sign of a zero.
        high = text.let(f"{ahead}.to(tl.float32)", self.dims - {self.d}, level).text
        rest = f"({high} - {ahead}).to(tl.float32) * -1.0"
        rest = f"tl.where({high} - {high} == 0.0, {rest}, {constant(F32, -0.0)})"
        return f"{high} + ({text.let(rest, self.dims - {self.d}, level).text} + {here})"

    def _fold(self, tile: str) -> str:
        keep = ", keep_dims=True" if len(self.dims) > 1 else ""
        return f"tl.reduce({tile}, {self.d}, {combine_name(self.scan.kind, self.dtype)}{keep})"

    def _lane(self) -> Var:
        """A variable over the results of a window, in the dimension of the scan."""
        indices, lanes = self.values.indices, self.values.lanes
        rows = prod(lanes.widths[d] for d in self.dims if d != self.d)
        width = max(self.back.group, self.threads // rows)
        made = Var(f"{self.scan.name}_lane", 0, width - 1)
        line = f"{made.name} = tl.arange(0, {width}){indices.cast}{lanes.place(self.d)}"
        self.values.text.put(self.values.text.level, line)
        indices.vars[made] = Term(made.name, frozenset((self.d,)), self.values.text.level)
        return made

    def _window(self, name: str, parts: list[tuple[Sym, str]], lane: Var) -> Window:
        """Results from a position on; with two parts, lane G - 1 belongs to the second."""
        text, last = self.values.text, self.back.group - 1
        count, dims = words(self.scan.value.dtype), frozenset((self.d,))
        rows = [t.text for t in self.values.lanes.conditions(self.dims - {self.d})]
        places = [self._place(start + lane) for start, _ in parts]
        at, runs = places[0], parts[0][1]
        if len(parts) > 1:
            at = f"tl.where({lane.name} < {last}, {at}, {places[1]})"
            second = f"({lane.name} == {last}) & ({parts[1][1]})"
            runs = f"tl.where({lane.name} < {last}, {runs}, {second})"
        at = text.let(at, self.dims, text.level).text
        runs = text.let(" & ".join([f"({runs})", *rows]), dims, text.level).text
        pointers = [f"{self.back.work} + {at}" + f" + {k}" * (k > 0) for k in range(count)]
        names = [f"{self.scan.name}_{name}{k}" for k in range(count)]
        return Window(tuple(pointers), runs, tuple(names))

    def _place(self, result: Sym) -> str:
        """The index of the first word of a result in this row."""
        count = words(self.scan.value.dtype)
        return self.values.indices.term(self.back.at + result * count, {}).text

    def _awaited(self, w: Window) -> str:
        """Wait for all results of a window and fold them."""
        text, dtype = self.values.text, self.dtype
        level = text.level
        flags = f"({' & '.join([*w.names, str(FLAG)])}).to(tl.int32)"
        for d in range(len(self.values.lanes.vars) - 1, -1, -1):
            flags = f"tl.reduce({flags}, {d}, least)"
        text.put(level, f"while {flags} == 0:")
        for line in w.loads(again=True):
            text.put(level, f"    {line}")
        neutral = ops.neutral(self.scan.kind, dtype).attrs[0]
        if dtype.is_float and neutral == 0:
            neutral = -0.0  # which is neutral for every float, zeros included
        found = f"tl.where({w.runs}, {self._value(w.names)}, {constant(dtype, neutral)})"
        found = text.let(found, self.dims, level).text
        return text.let(self._fold(found), self.dims - {self.d}, level).text

    def _leave(self, result: Sym, value: str, condition: str) -> None:
        """Publish a result of this program, if it has one."""
        text = self.values.text
        rows = [t.text for t in self.values.lanes.conditions(self.dims - {self.d})]
        mask = f", mask={' & '.join([*rows, f'({condition})'])}"
        at = self._place(result)
        for k, word in enumerate(self._words(value)):
            pointer = f"{self.back.work} + {at}" + f" + {k}" * (k > 0)
            text.put(text.level, f'tl.atomic_xchg({pointer}, {word}{mask}, sem="relaxed")')

    def _words(self, value: str) -> list[str]:
        """The words of a result."""
        dtype = self.scan.value.dtype
        if self.dtype is not dtype:
            return [f"{value}.to(tl.int64, bitcast=True) | {FLAG}"]
        if dtype.bytes == 8:
            bits = f"{value}.to(tl.int64, bitcast=True)" if dtype.is_float else value
            bits = self.values.text.let(bits, self.dims - {self.d}, self.values.text.level).text
            return [f"({bits} << 32) | {FLAG}", f"({bits} & {VALUE}) | {FLAG}"]
        whole = ".to(tl.float32).to(tl.int32, bitcast=True)" if dtype.is_float else ".to(tl.int32)"
        return [f"({value}{whole}.to(tl.int64) << 32) | {FLAG}"]

    def _value(self, names: tuple[str, ...]) -> str:
        """The result from its words."""
        dtype = self.scan.value.dtype
        kind = triton_type(self.dtype)
        if self.dtype is not dtype:
            return f"({names[0]} & {~FLAG}).to({kind}, bitcast=True)"
        if len(names) == 2:
            low, high = names
            bits = f"(({high} & {VALUE}) | (({low} >> 32) & {(1 << 32) - 1}))"
            return f"{bits}.to({kind}, bitcast=True)" if dtype.is_float else bits
        bits = f"({names[0]} >> 32).to(tl.int32)"
        if dtype.is_float:
            return f"{bits}.to(tl.float32, bitcast=True).to({kind})"
        return f"{bits}.to({kind})"
