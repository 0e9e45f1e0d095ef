"""Checks the invariants of kernels; see verify.py."""

from __future__ import annotations

from math import prod

from lenz.ir import kernel
from lenz.ir.dtype import BOOL, I32, I64, DType
from lenz.ir.expr import Expr
from lenz.ir.forms import FORMS
from lenz.ir.verify_rules import Load, broken, check_body, check_bounds, check_gather, check_vars
from lenz.records import dataclass
from lenz.sym import Int, Sym, Var, prove_le, substitute
from lenz.sym import show as show_sym

SPREAD = ("parallel", "grid")
MOST_LANES = 1 << 20  # elements of Triton's largest tensor; its sides are powers of two


@dataclass(slots=True)
class _Scope:
    """The scope of a statement: enclosing loops and visible values.

    `outside` is the number of loops around the innermost branch.
    """

    loops: tuple[kernel.For, ...]
    sizes: frozenset[Var]
    visible: dict[str, DType]
    outside: int = 0

    @property
    def vars(self) -> set[Var]:
        """Variables that an index may use."""
        return {*self.sizes, *(f.axis.var for f in self.loops)}


def check_kernel(k: kernel.Kernel) -> None:
    """Raise Broken for the first broken rule."""
    buffers: dict[str, kernel.Param | kernel.Local] = {}
    declared: tuple[kernel.Param | kernel.Local, ...] = (*k.params, *k.locals)
    for b in declared:
        if b.name in buffers:
            broken("name-once", f"%{b.name} is declared twice", k)
        buffers[b.name] = b
    names: dict[str, Var] = {}
    for v in k.sizes:
        if names.setdefault(v.name, v) is not v:
            broken("var-once", f"the size {v.name} has two pairs of bounds", k)
    sizes = frozenset(k.sizes)
    for p in k.params:
        check_vars(p.size, sizes, k)
    run = _Check(buffers)
    run.block(k.body, _Scope((), sizes, {}))
    for p in k.params:
        if p.mode != "in" and p.name not in run.stored:
            broken("out-stored", f"%{p.name} is {p.mode}, but nothing stores to it", k)
    parts = [kernel.buffers_in(part) for part in kernel.grids(k)]
    for n, (_, writes) in enumerate(parts):
        others = {x for rest in parts[:n] + parts[n + 1 :] for names in rest for x in names}
        if both := sorted(others.intersection(writes)):
            broken("grids-apart", f"%{both[0]} is written by one grid and used by another", k)


class _Check:
    """One walk over the statements."""

    def __init__(self, buffers: dict[str, kernel.Param | kernel.Local]) -> None:
        self.buffers = buffers
        self.stored: set[str] = set()

    def block(self, body: tuple[kernel.Stmt, ...], s: _Scope) -> dict[str, kernel.Reduce]:
        """Check statements; returns the reductions that an outer loop ends."""
        pending: dict[str, kernel.Reduce] = {}
        places: dict[tuple[object, ...], kernel.Store] = {}
        for x in body:
            if isinstance(x, kernel.For):
                pending.update(self.loop(x, s))
                continue
            self.walk(x, s)
            match x:
                case kernel.If():
                    self.branch(x, s)
                case kernel.Let():
                    s.visible[x.name] = x.dtype
                case kernel.Reduce():
                    self.reduce(x, s)
                    pending[x.name] = x
                case kernel.Scan():
                    self.scan(x, s)
                    s.visible[x.name] = x.dtype
                case kernel.Sort():
                    self.sort(x)
                case kernel.Store():
                    self.store(x, s, places)
        return pending

    def walk(self, x: kernel.Stmt, s: _Scope) -> None:
        """Check names, sizes and values of a statement by its declaration."""
        for slot in FORMS[type(x)].slots:
            value = slot.get(x)
            match slot.kind:
                case "name":
                    if value in s.visible:
                        broken("name-once", f"{value} is already defined and visible", x)
                case "writes" if value not in self.buffers:
                    broken("defined-before-use", f"%{value} is no parameter and no local", x)
                case "sym":
                    check_vars(value, s.vars, x)
                case "value" | "block":
                    self.body(value, s, x)

    def loop(self, f: kernel.For, s: _Scope) -> dict[str, kernel.Reduce]:
        """Check a loop; the reductions it ends become visible after it."""
        check_vars(f.axis.extent, s.vars, f)
        if any(v.name == f.axis.name for v in s.vars):
            broken("name-once", f"{f.axis.name} is a size or a loop around this one", f)
        if f.kind == "vector" and not all(map(_fits_lanes, f.body)):
            broken("vector-loop", f"{f.axis.name} has a branch in it, or a loop that stores", f)
        if f.kind in SPREAD and any(o.kind not in SPREAD for o in s.loops):
            broken("parallel-outermost", f"{f.axis.name} is inside a loop that is not parallel", f)
        widths = [o.axis.width for o in (*s.loops, f) if o.kind == "lane"]
        is_odd = (f.kind == "lane") != (f.axis.width > 0) or f.axis.width & (f.axis.width - 1)
        if is_odd or prod(widths) > MOST_LANES:
            broken("lanes", f"{f.axis.name} is one of {len(widths)} axes of lanes", f)
        inner = _Scope((*s.loops, f), s.sizes, dict(s.visible), s.outside)
        pending = self.block(f.body, inner)
        around = {o.axis.var for o in s.loops}
        later = {name: x for name, x in pending.items() if not around.isdisjoint(x.over)}
        s.visible.update((name, x.dtype) for name, x in pending.items() if name not in later)
        return later

    def branch(self, x: kernel.If, s: _Scope) -> None:
        """Check a branch: names of its bodies are not visible outside."""
        used = {*x.lower.free_vars, *x.upper.free_vars}
        if any(f.kind == "lane" and f.axis.var in used for f in s.loops) or not x.then:
            broken("branch", "the lanes part ways, or the first body is empty", x)
        for body in kernel.bodies_of(x):
            self.block(body, _Scope(s.loops, s.sizes, dict(s.visible), len(s.loops)))

    def reduce(self, x: kernel.Reduce, s: _Scope) -> None:
        """Check the loops of a reduction."""
        around = [f.axis.var for f in s.loops[s.outside :]]
        if not x.over or len(set(x.over)) != len(x.over) or any(v not in around for v in x.over):
            shown = ", ".join(v.name for v in x.over) or "nothing"
            broken("reduce-over-enclosing", f"{x.name} runs over {shown}", x)
        if x.kind in ("any", "all") and x.value.dtype is not BOOL:
            broken("reduce-dtype", f"{x.kind} of {x.value.dtype}", x)

    def sort(self, x: kernel.Sort) -> None:
        """Check a sort."""
        b = self.buffers[x.buffer]
        if not isinstance(b, kernel.Local) or b.dtype not in (I32, I64):
            broken("sort-local", f"%{x.buffer} is not a local of i32 or i64", x)
        for size in (x.size, x.keep):
            if size.hi is None or size.hi > b.size:
                broken("sort-local", f"%{x.buffer} may not have {show_sym(size)} elements", x)
        if prove_le(x.size + 1, x.keep):
            broken("sort-local", f"{show_sym(x.keep)} of {show_sym(x.size)} elements", x)

    def scan(self, x: kernel.Scan, s: _Scope) -> None:
        """Check the loops of a scan, and the workspace that carries it from program to program."""
        if not any(f.axis.var is x.over and f.kind not in SPREAD for f in s.loops[s.outside :]):
            broken("scan-over-enclosing", f"{x.name} runs over {x.over.name}", x)
        if x.every < 0 or (x.every and x.back is not None):
            broken("scan-over-enclosing", f"{x.name} starts anew every {x.every}", x)
        if x.back is None:
            return
        grid = next((f for f in s.loops if f.axis.var is x.back.block and f.kind == "grid"), None)
        if grid is None or x.back.group < 2:
            broken("scan-over-enclosing", f"{x.name} goes on over {x.back.block.name}", x)
        b = self.buffers.get(x.back.work)
        if not isinstance(b, kernel.Param) or b.mode != "work" or b.dtype is not I64:
            broken("work-only", f"%{x.back.work} is not a workspace of i64", x)
        self.stored.add(b.name)
        check_vars(x.back.at, s.vars, x)
        last: dict[Var, Sym] = {}  # of the loops, the last turn: panels of 16 of 24 rows end at 24
        for f in s.loops:
            last[f.axis.var] = substitute(f.axis.extent - 1, last)
        each = kernel.words(x.value.dtype) * kernel.slots(grid.axis.extent, x.back.group)
        end = substitute(x.back.at, last) + each
        if end.hi is not None and isinstance(b.size, Int) and end.hi > b.size.value:
            broken("work-only", f"%{b.name} has {b.size.value} words, not {end.hi}", x)

    def store(
        self, x: kernel.Store, s: _Scope, places: dict[tuple[object, ...], kernel.Store]
    ) -> None:
        """Check a store."""
        b = self.buffers[x.buffer]
        self.stored.add(b.name)
        mode = b.mode if isinstance(b, kernel.Param) else "inout"
        if mode == "in":
            broken("store-mode", f"%{x.buffer} is only read", x)
        if mode == "work":
            broken("work-only", f"%{x.buffer} is stored to, which is for scans", x)
        if mode != "inout" and x.mode != "set":
            broken("update-inout", f"%{x.buffer} is {mode}", x)
        if b.dtype is not x.value.dtype:
            broken("dtype", f"%{x.buffer} is {b.dtype}, the value {x.value.dtype}", x)
        check_vars(x.offset, s.vars, x, len(x.bound))
        check_gather((x.offset,), x.bound, x)
        for e in x.bound:
            self.body(e, s, x)
        place = (x.buffer, x.offset, x.bound)
        if isinstance(b, kernel.Param) and places.setdefault(place, x) is not x:
            broken("store-once", f"%{x.buffer}[{show_sym(x.offset)}] is stored twice", x)
        if x.offset.hi is not None and x.offset.hi < 0 and _runs(s):
            broken("index-in-bounds", f"{show_sym(x.offset)} is below 0", x)

    def body(self, e: Expr, s: _Scope, x: kernel.Stmt) -> None:
        """Check an expression."""
        loads: list[Load] = []

        def on_load(load: Expr) -> None:
            name, index, dtype = load.attrs
            b = self.buffers.get(name)
            if b is None:
                broken("defined-before-use", f"%{name} is no parameter and no local", x)
            if isinstance(b, kernel.Param) and b.mode == "work":
                broken("work-only", f"%{name} is read, which is for scans", x)
            if len(index) != 1:
                broken("flat", f"{len(index)} indices in a load of %{name}", x)
            if b.dtype is not dtype:
                broken("dtype", f"%{name} is {b.dtype}, loaded as {dtype}", x)
            loads.append((load, (Int(b.size) if isinstance(b, kernel.Local) else b.size,)))

        check_body(e, s.vars, s.visible, on_load, x)
        check_bounds(loads, (e,), [f.axis.extent for f in s.loops], x)


def _runs(s: _Scope) -> bool:
    return all(f.axis.extent.lo is not None and f.axis.extent.lo > 0 for f in s.loops)


def _fits_lanes(s: kernel.Stmt) -> bool:
    """Whether a vector loop may contain the statement."""
    if isinstance(s, kernel.For):
        return s.kind == "seq" and all(isinstance(x, kernel.Reduce) for x in s.body)
    return not isinstance(s, kernel.If)
