"""The invariants by name, and the checks of expressions that graphs and kernels share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from lenz.ir import op as _op
from lenz.ir.dtype import I64, DType
from lenz.ir.expr import Expr, is_bound_var, nodes_of, syms_of, unmasked
from lenz.ir.forms import FORMS
from lenz.ir.graph import Atom, atom_refs, atom_syms
from lenz.ir.tensor import TensorType
from lenz.ir.text import show_range
from lenz.ir.text_expr import show_expr
from lenz.sym import Sym, Var, prove_le
from lenz.sym import show as show_sym

Load = tuple[Expr, tuple[Sym, ...]]  # and the sizes of its buffer
RULES: dict[str, str] = {
    # every level
    "name-once": "a buffer, value, parameter or constant is defined once",
    "defined-before-use": "every operand is defined earlier in the text",
    "dtype": "a load, store or result has the element type of its buffer",
    "size-defined": "a size comes from an input, or from a call before its use",
    "var-once": "one name is one variable: the same bounds everywhere",
    # expressions
    "free-var": "an index uses sizes, variables of the loops around it and its own @0, @1, ...",
    "gather": "the operands of a load or index are @0, @1, ... without gaps, each of type i64",
    "ref-scope": "a named value is used where it is visible, with its own type",
    "index-in-bounds": "no index is provably outside its buffer (behind a mask it may be)",
    # graphs
    "rank": "a load has one index per dimension, a loop one axis per dimension of its result",
    "axes-match-out": "the extent of each axis is the size of that dimension of the result",
    "reduce-dtype": "any and all reduce bool; argmax and argmin give i64",
    "scatter-base": "the tensor that a scatter updates has the type and shape of its result",
    "view-layout": "a view's index and its strides name the same elements",
    "sort": "a sort is of i32 or i64, and has no more results than its axis has elements",
    "extern": "aliases and mutated buffers of a call exist; a single result is one",
    "key-first": "the key of random numbers depends on no buffer, so that it may be drawn early",
    "mutates-last": "a buffer that a call writes is not read by a later node",
    "held": "memory that a call holds is neither written nor reused before a call waits for it",
    "mutation": "a mutation writes an input, once, with a value of its shape and type",
    "unaligned": "what may start anywhere is an input",
    "output-defined": "an output is a defined buffer or size",
    "output-free": "a buffer that may leave with other strides is an output, once",
    "layout-told": "outputs, and arguments of calls, have the strides that were promised",
    # kernels
    "flat": "a load in a kernel has one index, a flat offset",
    "store-mode": "a parameter with the mode in is not stored to",
    "out-stored": "a parameter with the mode out or inout is stored to",
    "work-only": "a workspace is zeroed i64, large enough, and only scans over the grid use it",
    "store-once": "one list of statements stores to one place of a parameter once",
    "reduce-over-enclosing": "a reduction runs over loops around it, one or more, each once",
    "scan-over-enclosing": "a scan runs over a loop around it that is not parallel",
    "sort-local": "a sort works on a local of i32 or i64 and keeps no more elements than it sorts",
    "update-inout": "a store that updates goes to a local or to a parameter with the mode inout",
    "branch": "all lanes run the same body of a branch, and the first body is not empty",
    "vector-loop": "a vector loop has no branch inside, and no loop but those of reductions",
    "lanes": "lane loops have a power of two as width, and together fit Triton's largest tensor",
    "parallel-outermost": "only parallel and grid loops enclose a parallel or grid loop",
    "grids-apart": "what one of several grids of a kernel writes, no other grid uses",
    "launch": "a launch passes one buffer of the right type and device per parameter",
    # plans
    "alloc-before-use": "a step uses memory of an input, a constant or an earlier step",
    "use-after-free": "memory is not used after its free or reuse",
    "output-kept": "an output is not freed",
    "results": "a plan has the types of all outputs or of none, and valid positions of saved ones",
    "kernel-listed": "a launched kernel is listed in the plan, and a listed one is launched",
}


class Broken(Exception):
    """A broken rule, and the object whose line shows it."""

    def __init__(self, rule: str, what: str, culprit: object) -> None:
        super().__init__(what)
        self.rule = rule
        self.what = what
        self.culprit = culprit


def broken(rule: str, what: str, culprit: object) -> NoReturn:
    """Raise for a rule of `RULES`."""
    assert rule in RULES, rule
    raise Broken(rule, what, culprit)


class Held:
    """Memory that calls use after they have returned, with the results not yet waited for."""

    def __init__(self) -> None:
        self.calls: list[tuple[frozenset[str], set[str]]] = []

    def call(
        self, holds: bool, memory: Iterable[str], outs: Iterable[str], waits: Collection[str]
    ) -> None:
        """A call releases the memory that it waits for, and may hold memory itself."""
        for _, results in self.calls:
            results.difference_update(waits)
        self.calls = [c for c in self.calls if c[1]]
        if holds:
            self.calls.append((frozenset(memory), set(outs) or {""}))

    def change(self, memory: str, culprit: object) -> None:
        """Record a write to memory."""
        if any(memory in held for held, _ in self.calls):
            broken("held", f"the memory of %{memory} is in use by a call before this", culprit)


LENT = ("share", "over", "take")  # kinds of fields whose memory the new buffer shares


class Known:
    """The buffers with memory, those without it any more, and the sizes known so far."""

    def __init__(self, undefined: str) -> None:
        self.undefined = undefined  # the rule that operands are defined
        self.types: dict[str, Any] = {}
        self.dead: set[str] = set()
        self.sizes: dict[Var, None] = {}
        self.names: dict[str, Var] = {}  # of sizes
        self.roots: dict[str, str] = {}  # name -> the buffer whose memory it shares
        self.held = Held()

    def root(self, name: str) -> str:
        """The first name of a buffer's memory."""
        return self.roots.get(name, name)

    def define(self, name: str, t: TensorType | None, culprit: object, source: str = "") -> None:
        """A new name for new memory, or for that of `source`."""
        if name in self.types or name in self.dead:
            broken("name-once", f"%{name} is defined twice", culprit)
        if source:
            self.roots[name] = self.root(source)
        self.types[name] = t

    def use(self, name: str, culprit: object, rule: str = "") -> Any:
        """The type of a buffer that must hold memory."""
        if name in self.dead:
            broken(rule or "use-after-free", f"%{name} was freed or reused before this", culprit)
        if name not in self.types:
            broken(rule or self.undefined, f"%{name} is not defined before this", culprit)
        return self.types[name]

    def need(self, syms: Iterable[Sym], culprit: object, of: str = "this") -> None:
        """Check that sizes are known."""
        for s in syms:
            for v in s.free_vars:
                if v not in self.sizes:
                    broken("size-defined", f"nothing gives the size {v.name} of {of}", culprit)

    def atoms(self, given: Iterable[Atom], culprit: object, rule: str = "") -> None:
        """Arguments and outputs."""
        for a in given:
            for name in atom_refs(a):
                self.use(name, culprit, rule)
            self.need(atom_syms(a), culprit)

    def walk(self, x: Any) -> None:
        """Check names, sizes and lifetimes of a node or step by its declaration."""
        source = ""
        for slot in FORMS[type(x)].slots:
            value, kind = slot.get(x), slot.kind
            several = value if slot.is_list else () if value in (None, "") else (value,)
            if kind == "type":
                self.need(value.layout.syms, x, x.name)
            elif kind == "sym":
                self.need(several, x)
            elif kind == "args":
                self.atoms((*x.args, *(a for _, a in x.kwargs)), x)
            elif kind in ("use", "writes", "end", *LENT):
                for name in several:
                    self.use(name, x)
                    if kind in ("over", "take"):
                        self.held.change(self.root(name), x)
                    if kind in ("end", "take"):
                        self.dead.add(name)
                    source = name if kind in LENT else source
        if "def" in FORMS[type(x)].kinds:
            self.define(x.name, x.type, x, source)


def check_vars(s: Sym, scope: Collection[Var], culprit: object, gathers: int = 0) -> None:
    """Check that every variable of `s` is in scope, or one of the first @k."""
    for v in s.free_vars:
        if v in scope or (is_bound_var(v) and v.name[1:].isdigit() and int(v.name[1:]) < gathers):
            continue
        other = next((w for w in scope if w.name == v.name), None)
        if other is not None:
            own, seen = show_range(v), show_range(other)
            what = f"{v.name} with bounds {own} is not the {v.name} with {seen}"
            broken("var-once", what, culprit)
        broken("free-var", f"{v.name} in {show_sym(s)} is no size, axis or operand here", culprit)


def check_body(
    body: Expr,
    scope: Collection[Var],
    visible: Mapping[str, DType],
    on_load: Callable[[Expr], None],
    culprit: object,
) -> None:
    """Check that indices use names in scope, gathers are canonical, named values are visible."""
    for e in nodes_of(body):
        if e.op is _op.REF:
            name, dtype = e.attrs
            if name not in visible:
                broken("ref-scope", f"{name} is not visible here", culprit)
            if visible[name] is not dtype:
                broken("ref-scope", f"{name} is {visible[name]}, used as {dtype}", culprit)
            continue
        syms = syms_of(e)
        for s in syms:
            check_vars(s, scope, culprit, len(e.args))
        if syms:
            check_gather(syms, e.args, culprit)
        if e.op is _op.LOAD:
            on_load(e)


def check_gather(syms: Sequence[Sym], operands: tuple[Expr, ...], culprit: object) -> None:
    """Check that the operands are @0, @1, ..., all used, all i64, each with one pair of bounds."""
    found = list(dict.fromkeys(v for s in syms for v in s.free_vars if is_bound_var(v)))
    names = {v.name for v in found}
    if names != {f"@{k}" for k in range(len(operands))}:
        shown = ", ".join(sorted(names)) or "none"
        broken("gather", f"{len(operands)} operands, but the index uses {shown}", culprit)
    if len(names) != len(found):
        broken("var-once", "one operand of a gather has two pairs of bounds", culprit)
    for k, e in enumerate(operands):
        if e.dtype is not I64:
            broken("gather", f"operand @{k} is {e.dtype}, not i64", culprit)


def check_bounds(
    loads: Iterable[Load], bodies: tuple[Expr, ...], extents: Iterable[Sym], culprit: object
) -> None:
    """Check that no index is outside its size for all values of the variables."""
    wrong = [(e, s) for e, shape in loads if (s := _outside(e.attrs[1], shape)) is not None]
    # An axis that may be empty proves nothing: its variable counts as 0, but the loop may not run.
    if not wrong or any(x.lo is None or x.lo < 1 for x in extents):
        return
    plain = unmasked(bodies)
    for e, s in wrong:
        if e in plain:
            broken("index-in-bounds", f"{show_sym(s)} is outside, in {show_expr(e)}", culprit)


def _outside(index: Sequence[Sym], shape: Sequence[Sym]) -> Sym | None:
    for s, size in zip(index, shape, strict=True):
        if (s.lo is None or s.lo < 0) and prove_le(s, -1):
            return s
        if s.lo is not None and s.lo > 0 and prove_le(size, s):
            return s
    return None
