"""Kernels to one module of LLVM IR.

A kernel is `i64 NAME(ptr, ..., i64, ...)`: its pointers, then its sizes. It returns the code of a
failed check, or 0. A phase is a separate function, `void NAME.pK(i64 begin, i64 end, ptr context)`,
which runs a range of the parallel iterations. The context is the array of the kernel's arguments
plus one word for failed checks. The kernel calls a phase through libtorch's `torch_parallel_for`,
or directly if there are no more iterations than the grain.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

from lenz.debug.blame import blaming
from lenz.errors import InternalError
from lenz.ir.expr import loads_of
from lenz.ir.kernel import For, Kernel, Let, Stmt, Store, exprs_of, walk
from lenz.ir.tensor import Axis
from lenz.machine.cpu.llvm.access import LINE, STREAMED, Accesses
from lenz.machine.cpu.llvm.body import Body
from lenz.machine.cpu.llvm.builder import FAILED
from lenz.machine.cpu.llvm.function import Module
from lenz.machine.cpu.llvm.indices import Indices
from lenz.machine.cpu.llvm.legalise import legalise
from lenz.machine.cpu.llvm.scopes import Scopes, Value
from lenz.machine.cpu.llvm.types import memory_type
from lenz.machine.cpu.llvm.values import Values
from lenz.records import replace
from lenz.sym import ONE, Int, Sym, product, step_of
from lenz.target import Target

Phase = tuple[tuple[Axis, ...], tuple[Stmt, ...]]
_L3 = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")  # as "32768K"
_KIB = int("0" + "".join(filter(str.isdigit, _L3.read_text()))) if _L3.exists() else 0
# A result of so many bytes is evicted before the next kernel reads it: 4 MiB for each core, about
# its share of the last-level cache, or a quarter of that cache. Two cores of a processor with 480
# MiB of it add up f32 to results of 32 MB in 5.7 ms below this size, and in 9.7 above it.
LARGE = max((4 << 20) * max(os.cpu_count() or 1, 2), _KIB << 8)


def emit_module(kernels: Sequence[Kernel], target: Target) -> str:
    """The text of a module that defines every kernel under its name."""
    module = Module(target)
    parts = [part for k in kernels for part in _kernel(module, k)]
    head = f'target triple = "{target.triple}"'
    attributes = (
        f'attributes #0 = {{ nounwind "target-cpu"="{target.cpu}" '
        f'"target-features"="{target.features}" "prefer-vector-width"="512" }}\n'
        '!0 = !{!"branch_weights", i32 1, i32 2000}\n!1 = !{i32 1}'
    )
    declared = [module.declarations[name] for name in sorted(module.declarations)]
    helpers = [module.functions[name] for name in sorted(module.functions)]
    return "\n\n".join([head, "\n".join(declared), *helpers, *parts, attributes]) + "\n"


def phases_of(k: Kernel) -> list[Phase]:
    """The axes and the body of each phase; statements between parallel loops form one phase."""
    phases: list[Phase] = []
    loose: list[Stmt] = []
    named: list[Stmt] = []  # values that later phases may use
    for s in k.body:
        if isinstance(s, For) and s.kind == "parallel":
            if any(not isinstance(x, Let) for x in loose):
                phases.append(((), tuple(named + loose)))
            named += [_pure(k, x) for x in loose if isinstance(x, Let)]
            loose = []
            axes, body = _collapse(s)
            phases.append((axes, (*named, *body)))
        else:
            loose.append(s)
    if loose:
        phases.append(((), tuple(named + loose)))
    return phases


def _pure(k: Kernel, s: Let) -> Let:
    """A value that is the same in every phase, and is recomputed in each."""
    written = {x.buffer for x in walk(k.body) if isinstance(x, Store)}
    if any(e.attrs[0] in written for e in loads_of(s.value)):
        raise InternalError(f"{s.name} reads what another phase writes", pass_name="codegen")
    return s


def _collapse(s: For) -> tuple[tuple[Axis, ...], tuple[Stmt, ...]]:
    """Collapse directly nested parallel loops; those whose extent varies run in sequence."""
    axes, body = [s.axis], s.body
    while len(body) == 1 and isinstance(inner := body[0], For) and inner.kind == "parallel":
        if any(a.var in inner.axis.extent.free_vars for a in axes):
            break
        axes, body = [*axes, inner.axis], inner.body
    return tuple(axes), tuple(map(_in_sequence, body))


def _in_sequence(s: Stmt) -> Stmt:
    """A statement whose parallel loops run within one task."""
    if not isinstance(s, For) or s.kind != "parallel":
        return s
    return replace(s, kind="seq", body=tuple(map(_in_sequence, s.body)))


def _kernel(module: Module, k: Kernel) -> list[str]:
    with blaming(k):
        k = legalise(k)
        phases, streamed = phases_of(k), _streamed(k, module.target)
        texts = [_phase(module, k, n, x, ()) for n, x in enumerate(phases)]
        more = [_phase(module, k, n, x, streamed) for n, x in enumerate(phases) if streamed]
        if not any(STREAMED in text for text in more):
            more, streamed = [], ()
        return [*texts, *more, _entry(module, k, phases, streamed)]


def _streamed(k: Kernel, target: Target) -> tuple[str, ...]:
    """Results too large to stay cached until they are read: their stores bypass the caches.

    A plain store first reads the line that it fills (docs/decisions/0039).
    """
    if not target.triple.startswith("x86_64"):
        return ()
    used = {e.attrs[0] for e in loads_of(*exprs_of(k.body))}
    used |= {s.buffer for s in walk(k.body) if isinstance(s, Store) and s.mode != "set"}
    large = [p for p in k.params if p.mode == "out" and p.name not in used]
    return tuple(p.name for p in large if (p.size.lo or 0) * p.dtype.bytes >= LARGE)


def _scopes(module: Module, k: Kernel) -> tuple[Scopes, Indices]:
    scopes = Scopes(module)
    indices = Indices(scopes)
    for n, v in enumerate(k.sizes):
        indices.vars[v] = Value((f"%s{n}",), 0)
    return scopes, indices


def _phase(module: Module, k: Kernel, number: int, phase: Phase, streamed: Collection[str]) -> str:
    """The function that runs iterations begin <= i < end of one phase."""
    scopes, indices = _scopes(module, k)
    fn = scopes.fn
    for n, (kind, name) in enumerate(_arguments(k)):
        at = fn.let(0, f"getelementptr inbounds i64, ptr %context, i64 {n}")
        fn.put(0, f"  {name} = load {kind}, ptr {at}, align 8")
    fn.put(0, f"  {FAILED} = getelementptr inbounds i64, ptr %context, i64 {len(_arguments(k))}")
    bases = {p.name: f"%p{n}" for n, p in enumerate(k.params)}
    for x in k.locals:
        bases[x.name] = fn.alloca(memory_type(x.dtype), x.size)
    written = frozenset(s.buffer for s in walk(k.body) if isinstance(s, Store))
    accesses = Accesses(scopes, indices, bases, streamed)
    values = Values(scopes, indices, accesses, written)
    scratch, elements = {x.name: x for x in k.locals}, {p.name: p.size for p in k.params}
    body = Body(scopes, indices, accesses, values, k.tile, scratch, elements)
    axes, stmts = phase
    if k.kind == "scatter" and (rows_first := _rows_first(axes, stmts)):
        body.statements(rows_first)
    elif axes:
        with scopes.loop("%begin", "%end", 1, []) as counter:
            scopes.guard = 0
            _unflatten(indices, axes, counter)
            body.parallel(stmts, tuple(x.name for x in k.locals))
    else:
        body.statements(stmts)
    name = f"@{k.name}.p{number}{'.streamed' if streamed else ''}"
    head = f"define internal void {name}(i64 %begin, i64 %end, ptr %context) #0 {{"
    # Streamed stores are only in order after a fence.
    end = "  fence seq_cst\n  ret void" if streamed else "  ret void"
    return f"{head}\n{fn.text()}\n{end}\n}}"


def _rows_first(axes: tuple[Axis, ...], body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    """Updates of columns with the loop over panels of columns inside those over rows; or none.

    So a task reads its part of one row after the other. By panels, 64 of 128 columns at a time, it
    takes five times as long: processors request what follows in memory.
    """
    match axes, body:
        case (panel,), (For(lane, "vector", (Store() as s,)),):
            follows = step_of(s.offset, panel.var) is Int(lane.extent.hi or 0)
            return (For(panel, "parallel", body),) if follows else ()
        case (panel,), (For(row, "seq", inner),) if panel.var not in row.extent.free_vars:
            first = _rows_first(axes, inner)
            return (For(row, "seq", first),) if first else ()
    return ()


def _unflatten(indices: Indices, axes: tuple[Axis, ...], counter: str) -> None:
    """Variables of the collapsed parallel loops from the number of the iteration."""
    fn = indices.scopes.fn
    rest, level = counter, fn.level
    for k in range(len(axes) - 1, 0, -1):
        extent = indices.scalar(axes[k].extent).names[0]
        quotient = fn.let(level, f"udiv i64 {rest}, {extent}")
        whole = fn.let(level, f"mul i64 {quotient}, {extent}")
        indices.vars[axes[k].var] = Value((fn.let(level, f"sub i64 {rest}, {whole}"),), level)
        rest = quotient
    indices.vars[axes[0].var] = Value((rest,), level)


def _arguments(k: Kernel) -> list[tuple[str, str]]:
    """The type and the name of each argument."""
    pointers = [("ptr", f"%p{n}") for n in range(len(k.params))]
    return pointers + [("i64", f"%s{n}") for n in range(len(k.sizes))]


def _entry(module: Module, k: Kernel, phases: list[Phase], streamed: Collection[str]) -> str:
    """The function that is called from outside."""
    scopes, indices = _scopes(module, k)
    fn = scopes.fn
    given = _arguments(k)
    context = fn.alloca("i64", len(given) + 1)
    for n, (kind, name) in enumerate(given):
        at = fn.let(0, f"getelementptr inbounds i64, ptr {context}, i64 {n}")
        fn.put(0, f"  store {kind} {name}, ptr {at}, align 8")
    fn.put(0, f"  {FAILED} = getelementptr inbounds i64, ptr {context}, i64 {len(given)}")
    fn.put(0, f"  store i64 0, ptr {FAILED}, align 8")
    starts = [f"%p{n}" for n, p in enumerate(k.params) if p.name in streamed]
    if starts:
        bits = "0"
        for p in starts:
            bits = fn.let(0, f"or i64 {bits}, {fn.let(0, f'ptrtoint ptr {p} to i64')}")
        whole = fn.let(0, f"icmp eq i64 {fn.let(0, f'and i64 {bits}, {LINE - 1}')}, 0")
    for number, (axes, _) in enumerate(phases):
        phase = f"@{k.name}.p{number}"
        if starts:
            phase = fn.let(0, f"select i1 {whole}, ptr {phase}.streamed, ptr {phase}")
        _call_phase(indices, phase, k.tile.grain, product([a.extent for a in axes]), context)
    result = fn.let(0, f"load i64, ptr {FAILED}, align 8")
    params = ", ".join([f"{kind} {name}" for kind, name in given])
    return f"define i64 @{k.name}({params}) #0 {{\n{fn.text()}\n  ret i64 {result}\n}}"


def _call_phase(indices: Indices, phase: str, grain: int, count: Sym, context: str) -> None:
    scopes, fn = indices.scopes, indices.scopes.fn
    grain = max(grain, 1)
    if count is ONE:
        fn.put(0, f"  call void {phase}(i64 0, i64 1, ptr {context})")
        return
    n = indices.scalar(count).names[0]
    direct = f"  call void {phase}(i64 0, i64 {n}, ptr {context})"
    args = ("i64", "i64", "i64", "ptr", "ptr")
    spread = (
        f"call i32 {fn.module.declare('torch_parallel_for', 'i32', *args)}"
        f"(i64 0, i64 {n}, i64 {grain}, ptr {phase}, ptr {context})"
    )
    if count.lo is not None and count.lo > grain:
        fn.let(0, spread)
        return
    if count.hi is not None and count.hi <= grain and count.lo is not None and count.lo >= 1:
        fn.put(0, direct)
        return
    some = fn.let(0, f"icmp sgt i64 {n}, 0")
    few = fn.let(0, f"icmp sle i64 {n}, {grain}")
    with scopes.when(fn.let(0, f"and i1 {some}, {few}"), []):
        fn.put(fn.level, direct)
    with scopes.when(fn.let(0, f"icmp sgt i64 {n}, {grain}"), []):
        fn.let(fn.level, spread)
