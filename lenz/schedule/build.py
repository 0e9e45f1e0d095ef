"""Turn a group of nests into one `Kernel`: every loop, block and scratch row is written here.

Names inside a kernel are positions (a0, a1, ... for parameters, v0 ... for values), so that equal
layers of a model give equal kernels, which are compiled once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lenz.context import Context
from lenz.ir import kernel as ir
from lenz.ir.dtype import I64
from lenz.ir.expr import all_syms, is_bound_var, loads_of, renaming
from lenz.ir.tensor import Buffer
from lenz.machines import Form, Space, machine_of
from lenz.schedule.cut import bounded
from lenz.schedule.legal import Group, device_of
from lenz.schedule.result import mapped
from lenz.sym import SymEnv, Var, substitute


def build(
    g: Group,
    stored: frozenset[str],
    buffers: Mapping[str, Buffer],
    unaligned: frozenset[str],
    env: SymEnv,
    cx: Context,
    space: Space | None,
    made: dict[object, ir.Launch],
) -> ir.Launch:
    """The kernel of a group, memoised in `made`: groups that differ only in names share one.

    `stored` are the values that are used outside of the group, `unaligned` the buffers without a
    known alignment, such as views returned by library calls.

    A training step of ResNet-50 launches 316 kernels, 96 of them distinct.
    """
    names: dict[str, str] = {}

    def number(name: str) -> str:
        return names.setdefault(name, f"b{len(names)}")

    numbered = renaming(number)
    nests = tuple(
        replace(
            n,
            out=Buffer(number(n.name), n.out.type),
            target=number(n.target),
            body=numbered(n.body),
            result=mapped(n.result, numbered),
        )
        for n in g.nests
    )
    own = {new: buffers[old] for old, new in names.items() if old in buffers}
    lives, strange = (frozenset(names[x] for x in names if x in s) for s in (stored, unaligned))
    key = g.domain, nests, lives, strange, tuple((name, b.type) for name, b in own.items())
    if key not in made:
        group = replace(g, nests=nests)
        machine = machine_of(device_of(g))
        forms = machine.schedule(group, lives, env, cx, space)
        relies = machine.capabilities.relies
        launches = [_finish(group, f, own, strange if relies else None) for f in forms]
        kernels = [_bounded(x.kernel, env) if relies else x.kernel for x in launches]
        made[key] = ir.Launch(kernels[0], launches[0].args, tuple(kernels) if kernels[1:] else ())
    same = made[key]
    old = {new: name for name, new in names.items()}
    args = tuple(old.get(a) or f"{g.name}.work" for a in same.args)
    name, origins = kernel_name(g), tuple(dict.fromkeys(o for n in g.nests for o in n.out.origin))
    kernel, *candidates = (replace(k, name=name) for k in (same.kernel, *same.candidates))
    return ir.Launch(kernel, args, tuple(candidates), origins, device_of(g))


def _bounded(k: ir.Kernel, env: SymEnv) -> ir.Kernel:
    """The kernel with the upper bounds on sizes that its plan checks, where they are lower.

    Lanes may rely on a lower bound that follows from the program's own checks.
    """
    most = dict(env.most)
    looser = [v for v in k.sizes if v.name in most and (v.hi is None or v.hi > most[v.name])]
    ends = {v: Var(v.name, v.lo, most[v.name]) for v in looser}
    if not ends:
        return k
    params = tuple(replace(p, size=substitute(p.size, ends)) for p in k.params)
    sizes = tuple(ends.get(v, v) for v in k.sizes)
    return replace(k, params=params, sizes=sizes, body=bounded(k.body, ends))


def _finish(
    g: Group, form: Form, buffers: Mapping[str, Buffer], unaligned: frozenset[str] | None
) -> ir.Launch:
    local = {x.name for x in form.locals}
    stores = [x for x in ir.walk(form.body) if isinstance(x, ir.Store) and x.buffer not in local]
    writes = dict.fromkeys(x.buffer for x in stores)
    reads = dict.fromkeys(e.attrs[0] for e in loads_of(*ir.exprs_of(form.body)))
    reads = {name: None for name in reads if name not in local}
    if form.kind == "scatter":  # elements that the kernel does not write keep their value
        reads |= writes
    args = tuple({**reads, **writes})
    names = {name: f"a{k}" for k, name in enumerate(args)}
    found: list[ir.Param] = []
    for a in args:
        type, is_aligned = buffers[a].type, unaligned is not None and a not in unaligned
        mode: ir.Mode = "in" if a not in writes else "inout" if a in reads else "out"
        found.append(ir.Param(names[a], type.dtype, type.layout.storage, mode, is_aligned))
    if form.work is not None:
        names[""] = f"a{len(args)}"
        found.append(ir.Param(names[""], I64, form.work, "work", True))
        args += (f"{g.name}.work",)
    params, body = tuple(found), ir.renamed(form.body, names)
    parts = params, _sizes(params, body), body
    return ir.Launch(ir.Kernel(g.name, form.kind, *parts, form.locals, form.tile), args)


def kernel_name(g: Group) -> str:
    """fused_<last values>: the name in profilers; the pipeline adds a number."""
    names = [n.name.split(".")[0].rstrip("_0123456789") for n in g.nests]
    return "_".join(["fused", *list(dict.fromkeys(filter(None, names)))[-3:]])[:48]


def _sizes(params: tuple[ir.Param, ...], body: tuple[ir.Stmt, ...]) -> tuple[Var, ...]:
    """The size variables of the kernel, by name: all variables that no loop binds."""
    axes = [s.axis for s in ir.walk(body) if isinstance(s, ir.For)]
    syms = [*(p.size for p in params), *(a.extent for a in axes)]
    syms += [x for s in ir.walk(body) for x in ir.syms_in(s)] + all_syms(*ir.exprs_of(body))
    used = dict.fromkeys(v for s in syms for v in s.free_vars if not is_bound_var(v))
    bound = {a.var for a in axes}
    return tuple(sorted((v for v in used if v not in bound), key=lambda v: v.name))
