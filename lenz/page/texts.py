"""Texts behind a launch: its nodes in the graph, the emitted code of its kernel, the user's lines.

Names connect them. A node names the buffers that it defines and reads; a parameter of a kernel has
its argument's name; `v0`, `v1`, ... are the reductions and scans of its nodes, in order.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lenz.debug.names import shown
from lenz.ir import graph as ir
from lenz.ir.kernel import Kernel, Launch, Reduce, Scan, Schedule, walk
from lenz.ir.printer import show_node

FUNCTION = re.compile(r'^define [^\n]*?@"?([^\s"(.]+)[^\n]*\{\n.*?^\}\n?', re.DOTALL | re.MULTILINE)
MODULE = re.compile(r"^import triton\n.*?(?=^import triton\n|\Z)", re.DOTALL | re.MULTILINE)
DEFINED = re.compile(r"^def (\w+)\(", re.MULTILINE)
AROUND = 2  # lines of the user's above and below


def code_of(text: str) -> dict[str, str]:
    """The emitted text of each kernel, out of that of a whole graph."""
    found: dict[str, str] = {}
    for m in FUNCTION.finditer(text):
        found[m[1]] = found.get(m[1], "") + m[0]
    for m in MODULE.finditer(text):
        found[DEFINED.findall(m[0])[-1]] = m[0]
    return found


def owners(s: Schedule) -> dict[str, int]:
    """The step that computes each loop of the graph, by the name of the loop.

    A value that no launch stores is read only inside the launch that computes it.
    """
    written: dict[str, int] = {}
    for k, step in enumerate(s.steps):
        if isinstance(step, Launch):
            for p, a in zip(step.kernel.params, step.args, strict=True):
                if p.mode != "in":
                    written.setdefault(a, k)
        elif isinstance(step, ir.Extern):
            written.update({b.name: k for b in ir.outs_of(step)})
    for m in s.graph.mutations:
        if m.input in written:
            written.setdefault(m.value, written[m.input])
    found: dict[str, int] = {}
    for n in reversed(s.graph.nodes):
        for b in ir.outs_of(n):
            at = written.get(b.name, found.get(b.name))
            if at is not None:
                found[b.name] = at
        own = next((found[b.name] for b in ir.outs_of(n) if b.name in found), None)
        if isinstance(n, ir.LOOPS) and own is not None:
            for name in ir.reads_of(n):
                if name not in written:
                    found.setdefault(name, own)
    return found


def nodes_by_step(s: Schedule) -> dict[int, list[ir.Loop]]:
    """The loops of the graph that each launch computes, in order."""
    made: dict[int, list[ir.Loop]] = {}
    of = owners(s)
    for n in s.graph.nodes:
        if isinstance(n, ir.LOOPS) and n.out.name in of:
            made.setdefault(of[n.out.name], []).append(n)
    return made


def node_rows(
    g: ir.Graph, by_step: Mapping[int, Sequence[ir.Loop]]
) -> dict[int, list[dict[str, Any]]]:
    """The text of each node, what it defines and reads, and the user's lines of it, by step."""
    types = {"%" + name: b.type.dtype for name, b in ir.buffers_of(g).items()}
    targets: dict[str, list[str]] = {m.value: [m.input] for m in g.mutations}

    def row(n: ir.Loop) -> dict[str, Any]:
        defines = [n.out.name, *targets.get(n.out.name, [])]
        told = {"text": show_node(n, types), "defines": defines, "reads": ir.reads_of(n)}
        return told | {"lines": user_lines(ir.origin_of(n))}

    return {k: [row(n) for n in nodes] for k, nodes in by_step.items()}


def values_of(k: Kernel, nodes: Sequence[ir.Loop]) -> dict[str, str]:
    """The buffer behind each reduction or scan of a kernel; empty if the kernel has others."""
    mine = [n for n in nodes if isinstance(n, (ir.Reduction, ir.Scan))]
    found = {s.name: s for s in walk(k.body) if isinstance(s, (Reduce, Scan))}
    stmts = [found[name] for name in sorted(found, key=lambda v: (len(v), v))]
    if [s.kind for s in stmts] != [n.kind for n in mine]:
        return {}
    return {s.name: n.out.name for s, n in zip(stmts, mine, strict=True)}


def user_lines(origins: Iterable[str]) -> list[str]:
    """The user's lines among origins, as file:line."""
    return [o for o in origins if o.rpartition(":")[2].isdigit()]


def sources_of(lines: Iterable[str]) -> dict[str, dict[str, str]]:
    """Text of these lines of the user's, and of their neighbours: by file, then by number."""
    found: dict[str, dict[int, str]] = {}
    for line in lines:
        file, _, at = line.rpartition(":")
        for n in range(max(1, int(at) - AROUND), int(at) + AROUND + 1):
            text = linecache.getline(file, n).rstrip("\n")
            if text or n == int(at):
                found.setdefault(file, {})[n] = shown(text.expandtabs(4))
    return {f: {str(n): found[f][n] for n in sorted(found[f])} for f in sorted(found)}
