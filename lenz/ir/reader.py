"""Reads the text form back: `read(show(x)) == x` for graphs, kernels, plans and schedules.

Recursive descent, in time linear in the text. Scalar ops are found by name, so import `lenz.ops`
first. docs/ir.md has the grammar, and syntax.py says where it is declared.
"""

from __future__ import annotations

from typing import Any

from lenz.ir.forms import FORMS, GRAPH, PLAN, node_of
from lenz.ir.graph import Extern, Graph, Ref, View
from lenz.ir.kernel import Kernel, Launch, Rejected, Schedule
from lenz.ir.lexer import Cursor, ReadError, choice_of, list_of, name_of, word_of
from lenz.ir.plan import Plan, launched
from lenz.ir.text import Scope, size_of
from lenz.sym import SymEnv, Var

__all__ = ["ReadError", "read"]


def read(text: str) -> Graph | Kernel | Plan | Schedule:
    """The object of a text; raises ReadError with line, column and the line itself."""
    c = Cursor(text)
    word = choice_of(c, ("graph", "kernel", "plan", "schedule"), "what this is")
    if word == "kernel":
        c.jump(0)
    of: Any = {"graph": _graph, "plan": _plan, "schedule": _schedule}.get(word, FORMS[Kernel].read)
    try:
        x: Graph | Kernel | Plan | Schedule = of(c, Scope())
    except (RecursionError, ZeroDivisionError) as e:
        raise c.error("an index is nested too deeply, or divides by zero") from e
    if c.kind != "end":
        c.fail("the end of the text")
    return x


def _header(c: Cursor, s: Scope) -> tuple[str, tuple[Var, ...]]:
    """`@name(s0: 1..) on cuda:0 {`: the name, and the sizes, which enter the scope."""
    c.expect("@")
    name = name_of(c)
    c.expect("(")
    sizes = list_of(c, lambda: size_of(c, s), ")")
    if c.accept("on"):
        s.device = word_of(c)
    c.expect("{")
    return name, tuple(sizes)


def _graph(c: Cursor, s: Scope) -> Graph:
    name, sizes = _header(c, s)
    made, places = GRAPH.read(c, s)
    if s.outputs and "outputs" in places:
        raise c.error("`return` beside buffers that are marked `out`", places["outputs"])
    made.setdefault("outputs", tuple([Ref(name) for name in s.outputs]))
    ranges = made.pop("env.ranges", tuple(sorted(sizes, key=lambda v: v.name)))
    return Graph(name, env=SymEnv(ranges, made.pop("env.hints"), made.pop("env.most")), **made)


def _plan(c: Cursor, s: Scope) -> Plan:
    name, _ = _header(c, s)
    made, _ = PLAN.read(c, s)
    made.setdefault("kernels", launched(made["steps"]))
    return Plan(name, **{"outputs": (), **made})


def _schedule(c: Cursor, s: Scope) -> Schedule:
    c.expect("{", "graph")
    g = _graph(c, s)
    steps: list[Launch | Extern | View] = []
    rejected: list[Rejected] = []
    while not c.accept("}"):
        place = c.place
        if c.text == "kernel":
            k = FORMS[Kernel].read(c, Scope())
            s.kernels[k.name] = k
        elif c.text == "launch":
            steps.append(FORMS[Launch].read(c, s))
        elif c.text == "reject":
            rejected.append(FORMS[Rejected].read(c, s))
        else:
            n = node_of(c, s)
            if not isinstance(n, (Extern, View)):
                raise c.error("a step of a schedule is a launch, a call or a view", place)
            steps.append(n)
    return Schedule(g, tuple(steps), tuple(rejected))
