"""Kernels to Triton: one module of text per kernel.

A program of the grid runs the body for one point of the grid axes. Lane loops become dimensions of
its tiles, all of one rank, so that values broadcast as they are. Loops of kind "seq" and "unroll"
become loops of the text. Values of a lane loop are kept until the end of the enclosing body: a
later loop over the same lanes finds them in registers.
"""

from __future__ import annotations

from itertools import chain
from math import gcd, prod

from lenz.debug.blame import blaming
from lenz.errors import InternalError
from lenz.ir import kernel as ir
from lenz.ir.dtype import BOOL
from lenz.ir.expr import all_syms, loads_of, nodes_of
from lenz.ir.tensor import Axis
from lenz.machine.cuda.triton.accumulators import Accumulators
from lenz.machine.cuda.triton.compile import KernelText
from lenz.machine.cuda.triton.grids import PART, PROGRAM, Grid, side_by_side
from lenz.machine.cuda.triton.indices import Indices, fits, joint
from lenz.machine.cuda.triton.lanes import Lanes, widths_of
from lenz.machine.cuda.triton.legalise import legalise
from lenz.machine.cuda.triton.look_back import LookingBack
from lenz.machine.cuda.triton.random import FUNCTION, pairs_of, random_pairs_text
from lenz.machine.cuda.triton.reductions import COMBINE, UPDATES
from lenz.machine.cuda.triton.text import NO_DIMS, Dims, Term, Text
from lenz.machine.cuda.triton.types import constant, memory_type
from lenz.machine.cuda.triton.values import Values
from lenz.ops.emission import triton_type
from lenz.ops.random import SHARED_BITS
from lenz.sym import ONE, Add, Int, Sym, Var, affine_in, power_of_two
from lenz.sym.expr import sum_of

HEAD = "import triton\nimport triton.language as tl\n"
EARLY = 8  # elements per thread up to which the loads of later loops are in flight early
UNIT = 8  # elements: the widest access of a thread, 16 bytes of bf16
LIBDEVICE = "from triton.language.extra import libdevice\n"


def emit(k: ir.Kernel, arch: int = 80) -> KernelText:
    """The text of one kernel, under its own name, with everything its compiler needs.

    It is for GPUs of compute capability `arch` (90: 9.0) and later; arch 80 uses nothing newer.
    """
    with blaming(k):
        parts = [(legalise(part, arch), given) for part, given in ir.split_grids(k)]
        wide = not all(fits(_indices(part)) for part, _ in parts)
        bodies = [_Body(part, wide, PART if parts[1:] else PROGRAM) for part, _ in parts]
        lines = [body.run() for body in bodies]
    own = {**COMBINE, FUNCTION: random_pairs_text()}
    used = sorted({f for body in bodies for f in body.values.functions})
    functions, last = [own[f] for f in used], lines[0]
    if parts[1:]:
        found = zip(parts, lines, bodies, strict=True)
        grids = [Grid(*part, text, body.given_ends) for part, text, body in found]
        more, last = side_by_side(grids, k.sizes, wide)
        functions += more
    names = ", ".join([p.name for p in k.params] + [v.name for v in k.sizes])
    functions.append("\n".join([f"def {k.name}({names}):", *last]))
    texts = [f"\n@triton.jit\n{f}\n" for f in functions]
    text = HEAD + LIBDEVICE * any("libdevice." in f for f in functions) + "".join(texts)
    types = [f"*{memory_type(p.dtype)}" for p in k.params]
    types += ["i64" if wide else "i32"] * len(k.sizes)
    aligned = tuple([n for n, p in enumerate(k.params) if p.aligned])
    t, checks = k.tile, any(body.values.checks for body in bodies)
    return KernelText(k.name, text, tuple(types), aligned, t.warps, t.stages, checks, t.registers)


def _indices(k: ir.Kernel) -> list[Sym]:
    """Every index of a kernel: offsets, positions and extents."""
    found = all_syms(*ir.exprs_of(k.body))
    for s in ir.walk(k.body):
        found += ir.syms_in(s)
        if isinstance(s, ir.For):
            found.append(s.axis.extent)
        elif isinstance(s, ir.Scan) and s.back is not None:
            found.append(next(p.size for p in k.params if p.name == s.back.work))
    return found


class _Body:
    """Writes the statements of one kernel."""

    def __init__(self, k: ir.Kernel, wide: bool, program: str) -> None:
        self.k, self.program = k, program
        self.given_ends = list[int]()
        self.text = Text()
        self.widths = widths_of(k)
        self.scratch = {x.name for x in k.locals}
        twins = _twins(k, self.widths, self.scratch)
        own = {v: width for v, width in self.widths.items() if v not in twins}
        self.dims = {v: list(own).index(twins.get(v, v)) for v in self.widths}
        self.indices = Indices(self.text, wide)
        written = frozenset(s.buffer for s in ir.walk(k.body) if isinstance(s, ir.Store))
        widths = list(own.values())
        nobody: list[Term | None] = [None] * len(own)
        self.lanes = Lanes(list(own), widths, nobody, self.fast(), pairs_of(self.widths))
        self.values = Values(self.text, self.indices, self.lanes, written)
        self.accs = Accumulators(self.values, self.dims)
        self.around: Dims = NO_DIMS
        self.read = {e.attrs[0] for e in loads_of(*ir.exprs_of(k.body))}
        self.stored: ir.Store | None = None  # written with its neighbour
        self.grid: list[Axis] = []
        changed = [p.name for p in k.params if p.mode == "inout"]
        self.fence = any(not ir.overwrites_safely(k, n, n) for n in changed)

    def fast(self) -> Dims:
        """The dimensions of contiguous elements, for indices that move along several dimensions."""
        found = set[int]()
        for s in _indices(self.k):
            moves = [v for v in s.free_vars if v in self.dims]
            if len(moves) > 1:
                affine = [(v, affine_in(s, v)) for v in moves]
                found |= {self.dims[v] for v, parts in affine if parts and parts[0] is ONE}
        return frozenset(found)

    def run(self) -> list[str]:
        """The lines of the function's body."""
        for v in self.k.sizes:
            self.indices.vars[v] = Term(v.name)
        self.grid, stmts = ir.around(self.k.body, "grid")
        self.unflatten()
        for v, d in self.dims.items():
            places = f"tl.arange(0, {self.widths[v]}){self.indices.cast}{self.lanes.place(d)}"
            self.text.put(0, f"{v.name} = {places}")
            self.indices.vars[v] = Term(v.name, frozenset((d,)))
        self.halves()
        self.statements(stmts)
        return self.text.bodies[0]

    def halves(self) -> None:
        """The positions of the pairs of lanes, if anything is computed by pairs."""
        pairs = self.lanes.pairs
        nodes = nodes_of(*ir.exprs_of(self.k.body))
        if pairs is None or all(e.op is not SHARED_BITS for e in nodes):
            return
        d = self.dims[pairs.lane]
        half = f"tl.arange(0, {pairs.width // 2}){self.lanes.place(d)}"
        self.text.put(0, f"{pairs.half.name} = {half}")
        self.indices.vars[pairs.half] = Term(pairs.half.name, frozenset((d,)))

    def unflatten(self) -> None:
        """Variables of the grid axes from the program number, the last axis fastest."""
        rest = f"{self.program}{self.indices.cast}"
        for k, a in reversed([*enumerate(self.grid)]):
            if k:
                extent = self.indices.term(a.extent, {}).text
                name = f"pid{k}"
                self.text.put(0, f"{name} = {rest}")
                self.text.put(0, f"{a.name} = {name} % {extent}")
                rest = f"{name} // {extent}"
            else:
                self.text.put(0, f"{a.name} = {rest}")
            self.indices.vars[a.var] = Term(a.name)

    def statements(self, body: tuple[ir.Stmt, ...]) -> None:
        """Write statements in order."""
        for k, s in enumerate(body, 1):
            if not isinstance(s, (ir.For, ir.If, ir.Sort)):
                self.values.ahead(s.value)
            match s:
                case ir.For(_, "lane", _):
                    self.lane(s, body[k:])
                case ir.For():
                    self.loop(s)
                case ir.If():
                    self.branch(s)
                case ir.Let(name, value):
                    self.values.refs[name] = self.values.value(value)
                case ir.Reduce():
                    self.accs.take(s)
                case ir.Scan():
                    self.scan(s)
                case ir.Sort():
                    self.sort(s)
                case ir.Store() if s is not self.stored:
                    self.store(s, body[k : k + 1])

    def lane(self, f: ir.For, later: tuple[ir.Stmt, ...]) -> None:
        """Open a dimension of the tile while its statements are written.

        What `later` loops over these lanes load is loaded before a reduction, for which all threads
        wait, if registers allow it.
        """
        d = self.dims[f.axis.var]
        self.lanes.vars[d], self.lanes.widths[d] = f.axis.var, self.widths[f.axis.var]
        self.lanes.tails[d] = self.tail(f.axis)
        ending = self.accs.ending(f, self.around)
        self.around |= {d}
        self.statements(f.body)
        if ending and prod(self.lanes.widths) <= EARLY * 32 * self.k.tile.warps:
            same = [x for x in later if isinstance(x, ir.For) and x.axis == f.axis]
            for x in chain.from_iterable(loop.body for loop in same):
                if isinstance(x, ir.Let | ir.Reduce | ir.Store):
                    self.values.load(x.value)
        self.around -= {d}
        for acc in ending:
            self.accs.finish(acc)

    def loop(self, f: ir.For) -> None:
        """A loop of the text."""
        if f.kind not in ("seq", "unroll"):
            raise InternalError(f"a {f.kind} loop inside a program", pass_name="codegen")
        ending = self.accs.ending(f, self.around)
        for acc in ending:
            self.accs.start(acc)
        extent = self.indices.term(f.axis.extent, {}).text
        self.text.push()
        # Triton counts in 32 bits.
        name = f"{f.axis.name}{self.indices.cast}"
        self.indices.vars[f.axis.var] = Term(name, NO_DIMS, self.text.level)
        floor = self.values.floor
        if f.axis.extent.lo is None or f.axis.extent.lo < 1:
            self.values.floor = self.text.level
        self.statements(f.body)
        self.values.floor = floor
        stages = f", num_stages={self.k.tile.stages}" if self.k.tile.stages > 1 else ""
        self.text.pop(f"for {f.axis.name} in tl.range(0, {extent}{stages}):")
        for acc in ending:
            self.accs.finish(acc)

    def branch(self, s: ir.If) -> None:
        """The one body or the other; nothing of it is known outside."""
        lower, upper = [self.indices.term(x, {}).text for x in (s.lower, s.upper)]
        floor, least, fence = self.values.floor, self.text.least, self.fence
        for head, body in ((f"if {lower} < {upper}:", s.then), ("else:", s.orelse)):
            if not body:
                continue
            self.text.push()
            self.values.floor = self.text.least = self.text.level
            self.statements(body)
            self.text.pop(head)
            self.values.floor, self.text.least, self.fence = floor, least, fence

    def tail(self, a: Axis) -> Term | None:
        """The condition under which a lane has an element; None if all have one."""
        return self.text.once(("tail", a.var, a.ends), lambda: self.inside(a)) if a.ends else None

    def inside(self, a: Axis) -> Term:
        """Whether each lane of an axis comes before its ends."""
        # W*block + lane < N: in this form Triton knows which groups of lanes agree.
        tests: list[tuple[Term, Term]] = []
        for end in a.ends:
            terms = end.terms if isinstance(end, Add) else ()
            moved = sum_of([(t, -c) for t, c in terms if c < 0])
            tests.append((self.indices.term(a.var + moved, {}), self.end(end + moved)))
        dims, level = joint([side for sides in tests for side in sides])
        text = [f"{left.text} < {right.text}" for left, right in tests]
        text = [f"({x})" for x in text] if len(text) > 1 else text
        return self.text.let(" & ".join(text), dims, level)

    def end(self, s: Sym) -> Term:
        """Where lanes end. It is a parameter of a grid beside others, which may end elsewhere."""
        if self.program == PROGRAM or not isinstance(s, Int):
            return self.indices.term(s, {})
        unit = gcd(s.value, UNIT)
        self.given_ends.append(s.value // unit)
        return Term(f"{unit} * end{len(self.given_ends) - 1}")

    def scan(self, s: ir.Scan) -> None:
        """Running results along one dimension of the tile; lanes past the end come last."""
        v, d = self.values, self.dims[s.over]
        # Triton 3.6 takes the carry of a row from the wrong lane where lanes hold copies of it.
        dims = self.around
        tile = self.lanes.spread(v.value(s.value), dims, s.value.dtype)
        text = f"tl.associative_scan({tile}, {d}, {self.accs.function(s)})"
        if s.back is not None:
            self.values.functions["least"] = None
            blocks = next(a.extent for a in self.grid if a.var is s.back.block)
            before = LookingBack(v, s, s.back, d, dims, blocks, 32 * self.k.tile.warps)
            text = before.joined(tile, text)
        v.refs[s.name] = self.text.let(text, dims, self.text.level)

    def sort(self, s: ir.Sort) -> None:
        """Sort the rows of a tile; padding comes last."""
        v = self.values
        tile, dtype = v.locals[s.buffer]
        last = len(self.lanes.vars) - 1
        if last not in tile.dims:
            raise InternalError(f"%{s.buffer} lies across the tile", pass_name="codegen")
        text = tile.text
        if tail := self.lanes.tails[last]:
            text = f"tl.where({tail.text}, {text}, {constant(dtype, (1 << (dtype.bits - 1)) - 1)})"
        few = power_of_two(s.keep.hi or 1)
        # The least are the largest complements, in descending order.
        text = f"~tl.topk(~{text}, {few})" if few < self.lanes.widths[last] else f"tl.sort({text})"
        v.forget(s.buffer)
        v.locals[s.buffer] = (self.text.let(text, tile.dims, self.text.level), dtype)

    def store(self, s: ir.Store, later: tuple[ir.Stmt, ...]) -> None:
        """One store of a tile by the lanes that have an element, with that of their neighbours."""
        v = self.values
        value = v.value(s.value)
        if s.buffer in self.scratch:
            dims = value.dims | {self.dims[x] for x in s.offset.free_vars}
            tile = v.lanes.spread(value, dims, s.value.dtype)
            v.locals[s.buffer] = (Term(tile, dims, value.level), s.value.dtype)
            return
        for e in s.bound:
            v.value(e)
        bound = v.bound((s.offset,), s.bound, ())
        # Every lane has its own update, even if neither position nor value depends on it.
        over = self.around if self.k.kind == "scatter" else NO_DIMS
        pointer, runs, dims, _ = v.pointer(s.buffer, s.offset, bound, (), over)
        if not value.dims <= dims:
            raise InternalError(f"lanes share an element of %{s.buffer}", pass_name="codegen")
        if self.fence:
            v.barrier()
            self.fence = False
        text = f"{value.text}.to(tl.int8)" if s.value.dtype is BOOL else value.text
        if dims and (after := _neighbour(s, later, self.read)) is not None:
            # Rotary embeddings of pairs of f32 take 67 us so, and 97 with two stores.
            self.stored, kind = after, triton_type(s.value.dtype)
            two = [v.lanes.spread(x, dims, s.value.dtype) for x in (value, v.value(after.value))]
            text = f"tl.join({two[0]}.to({kind}), {two[1]}.to({kind}))"
            each = ":, " * len(v.lanes.vars)
            pointer = f"({pointer})[{each}None] + tl.arange(0, 2)"
            runs = runs and f"({runs})[{each}None]"
        update = UPDATES.get(s.mode, "tl.store")
        mask, how = f", mask={runs}" if runs else "", ', sem="relaxed"' if s.mode in UPDATES else ""
        self.text.put(self.text.level, f"{update}({pointer}, {text}{mask}{how})")
        v.forget(s.buffer)


def _neighbour(s: ir.Store, later: tuple[ir.Stmt, ...], read: set[str]) -> ir.Store | None:
    """The next statement, if it stores the elements after those of `s`, and nothing reads them."""
    t = later[0] if later else None
    if not isinstance(t, ir.Store) or (t.buffer, t.offset) != (s.buffer, s.offset + 1):
        return None
    is_set = s.mode == t.mode == "set" and not s.bound
    return t if is_set and s.buffer not in read and s.value.dtype.bytes > 1 else None


def _twins(k: ir.Kernel, widths: dict[Var, int], scratch: set[str]) -> dict[Var, Var]:
    """Lanes of another branch, or that read a sort's result -> the lanes with their dimension."""
    first: dict[tuple[str, int], Var] = {}
    twins = {v: first.setdefault((v.name, width), v) for v, width in widths.items()}
    stores = [s for s in ir.walk(k.body) if isinstance(s, ir.Store) and s.buffer in scratch]
    full = {s.buffer: s.offset for s in stores if isinstance(s.offset, Var)}
    for e in loads_of(*ir.exprs_of(k.body)):
        if e.attrs[0] in full:
            twins[e.attrs[1][0]] = full[e.attrs[0]]
    return {v: of for v, of in twins.items() if of is not v}
