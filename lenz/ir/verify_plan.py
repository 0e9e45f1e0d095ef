"""Checks the invariants of plans; see verify.py."""

from __future__ import annotations

from lenz.ir.graph import atom_refs, names_in
from lenz.ir.plan import BindSize, CallStep, Input, LaunchStep, Plan, Step, launched
from lenz.ir.verify_rules import Known, broken
from lenz.sym import Sym, as_multiple


def check_plan(p: Plan) -> None:
    """Raise Broken for the first broken rule."""
    m = Known("alloc-before-use")
    for i in (*p.inputs, *p.constants):
        if isinstance(i, Input):
            m.define(i.name, i.type, i)
        elif (found := as_multiple(i.value)) is not None:
            m.sizes[found[0]] = None
    for step in p.flat:
        _step(step, m, p)
    for name in atom_refs(p.outputs):
        if name in m.dead:
            broken("output-kept", f"the output %{name} was freed or reused", p.outputs)
    m.atoms(p.outputs, p.outputs)
    if p.results and len(p.results) != len(p.outputs):
        broken("results", f"{len(p.results)} types of {len(p.outputs)} outputs", p)
    if any(k >= len(p.results) for k in p.saved):
        broken("results", f"a saved result is not one of {len(p.results)}", p)
    for name in p.kernels:
        if name not in launched(p.steps):
            broken("kernel-listed", f"@{name} is listed, but not launched", p)


def _step(s: Step, m: Known, p: Plan) -> None:
    m.walk(s)
    match s:
        case BindSize():
            m.sizes[s.var] = None
        case LaunchStep() if s.kernel not in p.kernels:
            broken("kernel-listed", f"@{s.kernel} is not in the list of kernels", s)
        case CallStep():
            _call(s, m)


def _call(s: CallStep, m: Known) -> None:
    outs = [o for o in s.outs if isinstance(o, str)]
    given = names_in(s)
    if s.draws == "key" and given:
        broken("key-first", f"a key depends on %{given[0]}", s)
    m.held.call(s.holds, map(m.root, (*given, *outs)), outs, s.waits)
    for o in s.outs:
        if isinstance(o, Sym):
            m.sizes.update(dict.fromkeys(o.free_vars))
        elif o is not None and s.into:
            m.use(o, s)
        elif o is not None:
            m.define(o, None, s)
