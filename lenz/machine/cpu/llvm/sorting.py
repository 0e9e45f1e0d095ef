"""Sorts of rows of scratch: a bitonic network over vectors.

    @sort.i64(ptr row, i64 count, i64 size)      row[count..size-1] is filled with the greatest key

A network takes the same steps for every row, so all of them are minima and maxima of vectors. A
merge of two sorted runs compares each key with its mirror image in the other run, then cleans
halves of halves: every comparison has the same direction (Batcher 1968, in the form of Dowd et al.
1989). A block of four vectors is sorted or cleaned in registers; longer distances go through
memory. In rows of 256 to 4096, one core with AVX-512 takes 3 ns per 64-bit key and 2 ns per 32-bit
key, where eager's stable sort takes 70.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from lenz.ir.kernel import Sort
from lenz.machine.cpu.llvm.function import Function, Module
from lenz.machine.cpu.llvm.types import shuffle, suffix, vector
from lenz.machine.cpu.llvm.writer import Writer

# Vectors per block; 8 run 10% faster but take twice as long to compile, 0.2 s.
HELD = 4


def emit_sort(w: Writer, s: Sort) -> None:
    """Sort a local."""
    fn, local = w.scopes.fn, w.locals[s.buffer]
    count = w.indices.scalar(s.size).names[0]
    callee = sorter(fn.module, local.dtype.bits, local.size)
    row = w.accesses.bases[s.buffer]
    fn.put(fn.level, f"  call void {callee}(ptr {row}, i64 {count}, i64 {local.size})")
    w.values.forget(s.buffer)


def sorter(module: Module, bits: int, size: int) -> str:
    """The name (with @) of the function that sorts rows of `size` keys, a power of two."""
    lanes = max(2, module.target.lanes * 32 // bits)
    block, is_long = min(size, HELD * lanes), size >= HELD * lanes
    key, own = f"i{bits}", f"i{bits}.{block}"
    name = f"sort.{key}" if is_long else f"sort.{own}"
    if name in module.functions:
        return f"@{name}"
    parts: list[tuple[str, str, Callable[[_Text], None]]] = [
        (name, ", i64 %count, i64 %size", _whole if is_long else _single),
        (f"block.{own}", "", _block),
    ]
    if is_long:
        parts += [
            (f"clean.{own}", "", _cleaned_block),
            (f"near.{key}", ", i64 %size, i64 %half", partial(_compared, mirrored=False)),
            (f"mirror.{key}", ", i64 %size, i64 %half", partial(_compared, mirrored=True)),
        ]
    for part, sizes, write in parts:
        text = _Text(module, bits, block)
        write(text)
        head = f"define internal void @{part}(ptr %row{sizes}) noinline #0 {{"
        module.functions[part] = f"{head}\n{text.fn.text()}\n  ret void\n}}"
    return f"@{name}"


class _Text:
    """The text of one function. Vectors have `lanes` keys; registers hold `block` keys at once."""

    def __init__(self, module: Module, bits: int, block: int) -> None:
        self.fn = Function(module)
        self.lines = self.fn.scopes[0].lines
        self.bits, self.block, self.key = bits, block, f"i{bits}"
        self.lanes = min(block, max(2, module.target.lanes * 32 // bits))
        self.type = vector(self.key, self.lanes)
        own = suffix(self.key, self.lanes)
        names = (f"llvm.smin.{own}", f"llvm.smax.{own}")
        self.low, self.high = (module.declare(n, self.type, self.type, self.type) for n in names)

    def let(self, text: str) -> str:
        """Append an instruction; returns the name of its result."""
        return self.fn.let(0, text)

    def place(self, at: str, k: int = 0) -> str:
        """The address of vector k after an offset."""
        moved = self.let(f"add i64 {at}, {k * self.lanes}") if k else at
        return self.let(f"getelementptr {self.key}, ptr %row, i64 {moved}")

    def load(self, at: str, k: int) -> str:
        """Load vector k after an offset."""
        return self.let(f"load {self.type}, ptr {self.place(at, k)}, align {self.bits // 8}")

    def store(self, name: str, at: str, k: int) -> None:
        """Store vector k after an offset."""
        place = self.place(at, k)
        self.lines.append(f"  store {self.type} {name}, ptr {place}, align {self.bits // 8}")

    def call(self, name: str, at: str, *sizes: str) -> None:
        """Call another function of the network on the keys after an offset."""
        args = "".join(f", i64 {s}" for s in sizes)
        self.lines.append(f"  call void @{name}(ptr {self.place(at)}{args})")

    def loop(self, start: str, more: str, following: str, once: Callable[[str], None]) -> None:
        """once(c) for c = start and its successors, while `more` holds."""
        n, scope, place = self.fn.label(), self.fn.scopes[0], len(self.lines) + 2
        c, first = f"%c{n}", scope.label
        self.lines += [f"  br label %head.{n}", f"head.{n}:", ""]
        holds = self.let(f"icmp {more.format(c)}")
        self.lines.append(f"  br i1 {holds}, label %body.{n}, label %end.{n}")
        self.fn.block(0, f"body.{n}")
        once(c)
        then = self.let(following.format(c))
        self.lines[place] = f"  {c} = phi i64 [ {start}, %{first} ], [ {then}, %{scope.label} ]"
        self.lines.append(f"  br label %head.{n}")
        self.fn.block(0, f"end.{n}")

    def shuffled(self, x: str, order: Sequence[int], y: str = "poison") -> str:
        """Lanes of two vectors, in the given order."""
        return self.let(shuffle(self.type, x, y, order))

    def turned(self, x: str) -> str:
        """The lanes in reverse order."""
        return self.shuffled(x, range(self.lanes - 1, -1, -1))

    def ordered(self, x: str, y: str) -> tuple[str, str]:
        """The smaller and the greater key of each lane."""
        args = f"({self.type} {x}, {self.type} {y})"
        low = self.let(f"call {self.type} {self.low}{args}")
        return low, self.let(f"call {self.type} {self.high}{args}")

    def within(self, x: str, bits: int) -> str:
        """Compare lanes whose numbers differ in `bits`; the lower lane gets the smaller key."""
        n = self.lanes
        low, high = self.ordered(x, self.shuffled(x, [i ^ bits for i in range(n)]))
        return self.shuffled(low, [i if i < i ^ bits else n + i for i in range(n)], high)


def _single(t: _Text) -> None:
    """Pad a row and sort its only block."""
    fill = f"  store {t.key} {(1 << (t.bits - 1)) - 1}, ptr {{}}, align {t.bits // 8}"
    more, following = "ult i64 {}, %size", "add i64 {}, 1"
    t.loop("%count", more, following, lambda c: t.lines.append(fill.format(t.place(c))))
    _blocks(t, "block")


def _whole(t: _Text) -> None:
    """Pad a row, sort its blocks, and merge runs of them."""

    def merge(run: str) -> None:
        t.call(f"mirror.{t.key}", "0", "%size", t.let(f"lshr i64 {run}, 1"))
        start, more = t.let(f"lshr i64 {run}, 2"), f"uge i64 {{}}, {t.block}"
        t.loop(start, more, "lshr i64 {}, 1", lambda c: t.call(f"near.{t.key}", "0", "%size", c))
        _blocks(t, "clean")

    _single(t)
    t.loop(str(2 * t.block), "ule i64 {}, %size", "shl i64 {}, 1", merge)


def _blocks(t: _Text, name: str) -> None:
    """Call a function on each block of the row."""
    own, following = f"{name}.{t.key}.{t.block}", f"add i64 {{}}, {t.block}"
    t.loop("0", "ult i64 {}, %size", following, lambda c: t.call(own, c))


def _compared(t: _Text, mirrored: bool) -> None:
    """Compare the halves of runs of 2*half keys: each key with the one `half` away, or its mirror.

    Four vectors of each half at a time, over half a row.
    """
    sign, turned = (-1, t.turned) if mirrored else (1, lambda v: v)
    rest, rows = t.let("sub i64 %half, 1"), t.let("sub i64 0, %half")

    def four(done: str) -> None:
        low = t.let(f"add i64 {done}, {t.let(f'and i64 {done}, {rows}')}")
        high = t.let(f"add i64 {low}, %half")
        if mirrored:
            twice = t.let(f"shl i64 {t.let(f'and i64 {done}, {rest}')}, 1")
            back = t.let(f"sub i64 {t.let(f'sub i64 {rest}, {twice}')}, {t.lanes - 1}")
            high = t.let(f"add i64 {high}, {back}")
        pairs = [(t.load(low, k), turned(t.load(high, sign * k))) for k in range(4)]
        for k, (x, y) in enumerate(pairs):
            a, b = t.ordered(x, y)
            t.store(a, low, k)
            t.store(turned(b), high, sign * k)

    t.loop("0", f"ult i64 {{}}, {t.let('lshr i64 %size, 1')}", f"add i64 {{}}, {4 * t.lanes}", four)


def _block(t: _Text) -> None:
    """Sort a block."""
    vs = [t.load("0", k) for k in range(t.block // t.lanes)]
    run = 2
    while run <= t.lanes:
        vs = _cleaned(t, [t.within(v, run - 1) for v in vs], run // 4)
        run *= 2
    while run <= t.block:
        count = run // t.lanes
        for first in range(0, len(vs), count):
            group = vs[first : first + count]
            far = [t.turned(v) for v in group[: count // 2 - 1 : -1]]
            pairs = [t.ordered(x, y) for x, y in zip(group[: count // 2], far, strict=True)]
            # The greater half stays reversed until it is cleaned.
            vs[first : first + count] = [a for a, _ in pairs] + [b for _, b in pairs]
        vs = _cleaned(t, vs, run // 4)
        run *= 2
    for k, v in enumerate(vs):
        t.store(v, "0", k)


def _cleaned_block(t: _Text) -> None:
    """Sort a block that is one bitonic run."""
    vs = _cleaned(t, [t.load("0", k) for k in range(t.block // t.lanes)], t.block // 2)
    for k, v in enumerate(vs):
        t.store(v, "0", k)


def _cleaned(t: _Text, vs: list[str], distance: int) -> list[str]:
    """Sort bitonic runs of twice the distance, of vectors in registers."""
    while distance >= t.lanes:
        step = distance // t.lanes
        for i in range(len(vs)):
            if not i & step:
                vs[i], vs[i + step] = t.ordered(vs[i], vs[i + step])
        distance //= 2
    while distance:
        vs = [t.within(v, distance) for v in vs]
        distance //= 2
    return vs
