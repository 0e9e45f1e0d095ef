"""Checks the invariants of plans; see verify.py."""

from __future__ import annotations

from lenz.ir.graph import Atom, atom_refs, atom_syms
from lenz.ir.plan import (
    Alloc,
    BindSize,
    CallStep,
    Free,
    Input,
    LaunchStep,
    Lay,
    Plan,
    Reuse,
    SizeInput,
    Step,
    ViewStep,
)
from lenz.ir.tensor import TensorType
from lenz.ir.verify_rules import Held, broken
from lenz.sym import Sym, Var


class _Memory:
    """Names that hold memory, names that did, and sizes that are known."""

    def __init__(self) -> None:
        self.live: dict[str, None] = {}
        self.dead: dict[str, None] = {}
        self.sizes: dict[Var, None] = {}
        self.roots: dict[str, str] = {}  # whose memory a name has, where that is another's
        self.held = Held()

    def define(self, name: str, step: object, source: str = "") -> None:
        """A new name, of new memory or of that of `source`."""
        if source:
            self.roots[name] = self.root(source)
        if name in self.live or name in self.dead:
            broken("name-once", f"%{name} is defined twice", step)
        self.live[name] = None

    def root(self, name: str) -> str:
        """The first name of the memory."""
        return self.roots.get(name, name)

    def use(self, name: str, step: object) -> None:
        """A name that must hold memory."""
        if name in self.dead:
            broken("use-after-free", f"%{name} was freed or reused before this", step)
        if name not in self.live:
            broken("alloc-before-use", f"%{name} is not defined before this", step)

    def drop(self, name: str, step: object) -> None:
        """A name that ends here."""
        self.use(name, step)
        del self.live[name]
        self.dead[name] = None

    def size(self, s: Sym, step: object) -> None:
        """A size that must be known."""
        for v in s.free_vars:
            if v not in self.sizes:
                broken("size-defined", f"nothing gives the size {v.name}", step)

    def type(self, t: TensorType, step: object) -> None:
        """A type whose sizes must be known."""
        for s in t.layout.syms:
            self.size(s, step)

    def atom(self, a: Atom, step: object) -> None:
        """An argument."""
        for name in atom_refs(a):
            self.use(name, step)
        for s in atom_syms(a):
            self.size(s, step)


def check_plan(p: Plan) -> None:
    """Raise Broken for the first rule that does not hold."""
    m = _Memory()
    for i in p.inputs:
        if isinstance(i, Input):
            m.define(i.name, i)
        elif isinstance(i, SizeInput) and isinstance(i.value, Var):
            m.sizes[i.value] = None
    for c in p.constants:
        m.define(c.name, c)
    for step in p.steps:
        _step(step, m, p)
    for a in p.outputs:
        for name in atom_refs(a):
            if name in m.dead:
                broken("output-kept", f"the output %{name} was freed or reused", p.outputs)
        m.atom(a, p.outputs)
    launched = {s.kernel for s in p.steps if isinstance(s, LaunchStep)}
    for name in p.kernels:
        if name not in launched:
            broken("kernel-listed", f"@{name} is listed, but not launched", p)


def _step(s: Step, m: _Memory, p: Plan) -> None:
    match s:
        case BindSize(var, source):
            m.use(source, s)
            m.sizes[var] = None
        case Alloc(name, type_, _, over):
            m.type(type_, s)
            if over:
                m.use(over, s)
                m.held.change(m.root(over), s)
            m.define(name, s, over)
        case Reuse(name, source, type_):
            m.type(type_, s)
            m.held.change(m.root(source), s)
            m.drop(source, s)
            m.define(name, s, source)
        case ViewStep(name, source, type_):
            m.type(type_, s)
            m.use(source, s)
            m.define(name, s, source)
        case Lay(name, type_):
            m.type(type_, s)
            m.use(name, s)
        case LaunchStep(kernel, args, sizes, grid):
            if kernel not in p.kernels:
                broken("kernel-listed", f"@{kernel} is not in the list of kernels", s)
            for name in args:
                m.use(name, s)
            for size in sizes if grid is None else (*sizes, grid):
                m.size(size, s)
        case CallStep():
            _call(s, m)
        case Free(name):
            m.drop(name, s)


def _call(s: CallStep, m: _Memory) -> None:
    given = (*s.args, *(a for _, a in s.kwargs))
    for a in given:
        m.atom(a, s)
    for name in s.waits:
        m.use(name, s)
    outs = [o for o in s.outs if isinstance(o, str)]
    memory = [m.root(name) for name in (*(r for a in given for r in atom_refs(a)), *outs)]
    m.held.call(s.holds, memory, outs, s.waits)
    for o in s.outs:
        if isinstance(o, Sym):
            for v in o.free_vars:
                m.sizes[v] = None
        elif o is not None and s.into:
            m.use(o, s)
        elif o is not None:
            m.define(o, s)
