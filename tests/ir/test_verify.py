"""Each rule of the verifier: a text that breaks it, and the line that the error shows."""
# ruff: noqa: E501 - a case is one line of the table

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lenz.errors import InternalError
from lenz.ir.dtype import F32
from lenz.ir.expr import expr, load
from lenz.ir.graph import Extern, Pointwise, Ref
from lenz.ir.kernel import Launch, Schedule
from lenz.ir.op import LOAD
from lenz.ir.reader import read
from lenz.ir.tensor import axes_for, contiguous
from lenz.ir.verify import RULES, verify
from lenz.sym import Int, Var
from tests.ir import ir_graphs as make

GRAPH = "graph @g(s0: 1.., s1: 1..) on cpu {{\n  in %x : f32[s0, 4]\n  in %w : f32[4]\n  {}\n}}"
KERNEL = (
    "kernel @k pointwise (%x: in f32[s0], %y: out f32[s0], %z: inout i64[s0]; s0: 1..) {{\n  {}\n}}"
)
WORK = (
    "kernel @k split_scan (%x: in f32[64], %y: out f32[64], %w: work i64[4]) {{\n"
    "  for b in 4 : grid {{ for r in 16 : lane {{\n  {}\n  store(%y, [16*b + r], c)\n  }} }}\n}}"
)
PLAN = "plan @p(s0: 1.., s1: 1..) on cpu {{\n  in %x : f32[s0]\n  in s0 : size\n  {}\n}}"
Y = "%y = f32[s0, 4] : map (i: s0, j: 4)"
SUM = "scan sum { load(%x, [16*b + r]) }"
STORE = "store(%z, [i], 1:i64); store(%y, [i], 1.0:f32)"

# (rule, frame, what is put in, the start of the line that must be shown)
BROKEN: list[tuple[str, str, str, str]] = [
    ("name-once", GRAPH, f"{Y} {{ 1.0:f32 }}\n{Y} {{ 2.0:f32 }}", "5: %y"),
    ("name-once", GRAPH, "%y = f32[s0] : map (s0: s0) { 1.0:f32 }", "4: %y"),
    ("name-once", GRAPH, "%y = f32[4, 4] : map (i: 4, i: 4) { 1.0:f32 }", "4: %y"),
    ("name-once", KERNEL, f"local %x: f32[4]\nfor i in s0 : parallel {{ {STORE} }}", "1: kernel"),
    ("name-once", KERNEL, f"for i in s0 : seq {{ a = 1:i64; a = 2:i64; {STORE} }}", "4: a = 2"),
    ("name-once", KERNEL, f"for i in s0 : seq {{ for i in 4 : seq {{ {STORE} }} }}", "3: for i in 4"),
    ("name-once", PLAN, "alloc %x : f32[s0]", "4: alloc"),
    ("defined-before-use", GRAPH, f"{Y} {{ load(%q, [i, j]):f32 }}", "4: %y"),
    ("defined-before-use", GRAPH, "%c = f32[4] : call aten.mm.default(%q)", "4: %c"),
    ("defined-before-use", GRAPH, "%v = f32[4] : view (i: 4) %q[i]", "4: %v"),
    ("defined-before-use", KERNEL, f"for i in s0 : seq {{ {STORE}; store(%q, [i], 1:i64) }}", "5: store"),
    ("dtype", GRAPH, f"{Y} {{ 1:i64 }}", "4: %y"),
    ("dtype", GRAPH, f"{Y} {{ load(%x, [i, j]):f64 }}", "4: %y"),
    ("dtype", GRAPH, "%v = i64[4] : view (i: 4) %w[i]", "4: %v"),
    ("dtype", KERNEL, "for i in s0 : seq { store(%z, [i], 1.0:f32) }", "2: for i"),
    ("dtype", KERNEL, f"for i in s0 : seq {{ a = load(%x, [i]):f64; {STORE} }}", "3: a ="),
    ("size-defined", GRAPH, "%y = f32[s1] : map (i: s1) { 1.0:f32 }", "4: %y"),
    ("size-defined", GRAPH, "return ([s1])", "4: return"),
    ("size-defined", PLAN, "alloc %a : f32[s1]", "4: alloc"),
    ("free-var", GRAPH, "%y = f32[s0] : map (i: s0) { load(%w, [s1 % 4]) }", "4: %y"),
    ("free-var", KERNEL, "for i in s0 : seq { store(%z, [i], 1:i64) }", ""),
    ("ref-scope", GRAPH, f'{Y} {{ ref("acc", f32) }}', "4: %y"),
    ("ref-scope", KERNEL, f'for i in s0 : seq {{ {STORE} a = ref("b", f32) }}', "5: a ="),
    ("ref-scope", KERNEL, f'for i in s0 : seq {{ b = 1:i64; {STORE} a = ref("b", f32) }}', "6: a ="),
    (
        "ref-scope",  # the sum is not complete inside of its own loop
        KERNEL,
        f"for i in s0 : seq {{ m = reduce sum {{ load(%x, [i]) }} over i; a = m; {STORE} }}",
        "4: a =",
    ),
    ("index-in-bounds", GRAPH, f"{Y} {{ load(%w, [j + 4]) }}", "4: %y"),
    ("index-in-bounds", GRAPH, f"{Y} {{ load(%x, [i + s0, j]) }}", "4: %y"),
    ("index-in-bounds", KERNEL, f"for i in s0 : seq {{ {STORE} a = load(%x, [i - s0 - 5]) }}", "5: a"),
    ("index-in-bounds", KERNEL, "for i in s0 : seq { store(%z, [-5], 1:i64) }", "2: for i"),
    ("rank", GRAPH, f"{Y} {{ load(%x, [i]) }}", "4: %y"),
    ("rank", GRAPH, "%y = f32[s0, 4] : map (i: s0) { 1.0:f32 }", "4: %y"),
    ("rank", GRAPH, "%v = f32[4] : view (i: 4) %x[i]", "4: %v"),
    ("axes-match-out", GRAPH, "%y = f32[4] : map (i: 5) { 1.0:f32 }", "4: %y"),
    ("reduce-dtype", GRAPH, "%y = f32[] : reduce any ( | r: 4) { load(%w, [r]) }", "4: %y"),
    ("reduce-dtype", KERNEL, f"for i in s0 : seq {{ {STORE} a = reduce all {{ 1:i64 }} over i }}", "5: a"),
    ("scatter-base", GRAPH, "%y = f32[4] : scatter set (i: 4) (%x, [i]) { 1.0:f32 }", "4: %y"),
    ("scatter-base", GRAPH, "%y = i64[4] : scatter set (i: 4) (%w, [i]) { 1:i64 }", "4: %y"),
    ("rank", GRAPH, "%y = f32[4] : scatter set (i: 4) (%w, [i, i]) { 1.0:f32 }", "4: %y"),
    ("dtype", GRAPH, "%y = f32[4] : scatter set (i: 4) (%w, [i]) { 1:i64 }", "4: %y"),
    ("gather", GRAPH, "%y = f32[4] : scatter set (i: 4) (%w, [@0]; @0 = 1.0:f32) { 1.0:f32 }", "4: %y"),
    ("ref-scope", GRAPH, '%y = f32[4] : scan sum (i: 4) over i { load(%w, [i]) } finish { ref("acc", f64) }', "4: %y"),
    ("sort", GRAPH, "%y = f32[4] : sort (i: 4) over i { load(%w, [i]) }", "4: %y"),
    ("sort", GRAPH, "%y = i64[5] : sort (i: 4) over i { index(i, i64) }", "4: %y"),
    ("axes-match-out", GRAPH, "%y = i64[3, 4] : sort (i: 4, j: 5) over j { 1:i64 }", "4: %y"),
    ("view-layout", GRAPH, "%v = f32[3] : view (i: 3) %w[i + 1]", "4: %v"),
    ("extern", GRAPH, "%c = f32[4] : call aten.t.default(%w) aliases (1: %w)", "4: %c"),
    ("extern", GRAPH, "(%c = f32[4], %d = f32[4]) : call aten.t.default() single", "4: (%c"),
    ("mutates-last", GRAPH, f"none : call a.b.c(%x) mutates (%x)\n{Y} {{ load(%x, [i, j]) }}", "5: %y"),
    ("mutation", GRAPH, "mutate %q <- %x", "4: mutate"),
    ("mutation", GRAPH, "mutate %x <- %w", "4: mutate"),
    ("mutation", GRAPH, "mutate %x <- %x\nmutate %x <- %x", "5: mutate"),
    ("mutation", GRAPH, "%y = i64[4] : map (i: 4) { 1:i64 }\nmutate %w <- %y", "5: mutate"),
    ("unaligned", GRAPH, f"unaligned (%y)\n{Y} {{ load(%x, [i, j]) }}", "4: unaligned"),
    ("output-defined", GRAPH, "return (%q)", "4: return"),
    ("output-free", GRAPH, "free (%x)\nreturn (%w)", "4: free"),
    ("output-free", GRAPH, "free (%x)\nreturn (%x, %x)", "4: free"),
    ("flat", KERNEL, f"for i in s0 : seq {{ {STORE} a = load(%x, [i, i]) }}", "5: a ="),
    ("store-mode", KERNEL, f"for i in s0 : seq {{ {STORE} store(%x, [i], 1.0:f32) }}", "5: store(%x"),
    ("out-stored", KERNEL, "for i in s0 : seq { store(%z, [i], 1:i64) }", "1: kernel"),
    ("store-once", KERNEL, f"for i in s0 : seq {{ {STORE} {STORE} }}", "5: store(%z"),
    ("reduce-over-enclosing", KERNEL, f"for i in s0 : seq {{ {STORE} a = reduce sum {{ 1:i64 }} over i, i }}", "5: a"),
    ("reduce-over-enclosing", KERNEL, f"for i in s0 : seq {{ {STORE} a = reduce sum {{ 1:i64 }} over none }}", "5: a"),
    ("scan-over-enclosing", KERNEL, f"for i in s0 : parallel {{ {STORE} a = scan sum {{ 1:i64 }} over i }}", "5: a"),
    ("branch", KERNEL, f"for i in 4 below s0 : lane {{ if i < 4 {{ {STORE} }} }}", "3: if"),
    ("branch", KERNEL, f"for i in s0 : seq {{ if i < 4 {{ }} else {{ {STORE} }} }}", "3: if"),
    ("ref-scope", KERNEL, f"for i in s0 : seq {{ if i < 4 {{ a = 1:i64; {STORE} }} b = a }}", "8: b"),
    ("reduce-over-enclosing", KERNEL, f"for i in s0 : seq {{ {STORE} if i < 4 {{ a = reduce sum {{ 1:i64 }} over i }} }}", "6: a"),
    ("scan-over-enclosing", KERNEL, f"for i in s0 : seq {{ {STORE} if i < 4 {{ a = scan sum {{ 1:i64 }} over i }} }}", "6: a"),
    ("vector-loop", KERNEL, f"for i in s0 : vector {{ if s0 < 4 {{ {STORE} }} }}", "2: for i"),
    ("scan-over-enclosing", WORK, f"c = {SUM} over r behind r by %w[0] group 2", "4: c"),
    ("scan-over-enclosing", WORK, f"c = {SUM} over r behind b by %w[0] group 1", "4: c"),
    ("scan-over-enclosing", WORK, f"c = {SUM} over r every 4 behind b by %w[0] group 2", "4: c"),
    ("work-only", WORK, f"c = {SUM} over r behind b by %y[0] group 2", "4: c"),
    ("work-only", WORK, f"c = {SUM} over r behind b by %w[1] group 2", "4: c"),
    ("work-only", WORK, f"c = {SUM} over r behind b by %w[0] group 2; store(%w, [0], 1:i64)", "5: store"),
    ("work-only", WORK, f"c = {SUM} over r behind b by %w[0] group 2; a = load(%w, [0])", "5: a"),
    ("out-stored", WORK, f"c = {SUM} over r", "1: kernel"),
    ("grids-apart", KERNEL, f"for i in s0 : grid {{ {STORE} }} for j in s0 : grid {{ store(%z, [j], 2:i64) }}", "1: kernel"),
    ("ref-scope", KERNEL, f"for i in s0 : seq {{ {STORE} for j in 4 : seq {{ a = scan sum {{ 1:i64 }} over j }} b = a }}", ""),
    ("sort-local", KERNEL, f"for i in s0 : seq {{ {STORE} sort(%z, 4) }}", "5: sort"),
    ("sort-local", KERNEL, f"local %l: f32[4]\nfor i in s0 : seq {{ {STORE} sort(%l, 4) }}", "6: sort"),
    ("sort-local", KERNEL, f"local %l: i64[4]\nfor i in s0 : seq {{ {STORE} sort(%l, 5) }}", "6: sort"),
    ("sort-local", KERNEL, f"local %l: i64[4]\nfor i in s0 : seq {{ {STORE} sort(%l, 3, keep 4) }}", "6: sort"),
    ("update-inout", KERNEL, "for i in s0 : seq { store(%z, [i], 1:i64); store add(%y, [i], 1.0:f32) }", "4: store add"),
    ("vector-loop", KERNEL, f"for i in s0 : vector {{ for j in 4 : seq {{ {STORE} }} }}", "2: for i"),
    ("vector-loop", KERNEL, f"for i in s0 : vector {{ for j in 4 : vector {{ a = reduce sum {{ 1:i64 }} over j }} {STORE} }}", "2: for i"),
    ("lanes", KERNEL, f"for i in s0 : lane {{ {STORE} }}", "2: for i"),
    ("lanes", KERNEL, f"for i in 1000 : lane {{ {STORE} }}", "2: for i"),
    ("lanes", KERNEL, f"for i in 1000 below s0 : lane {{ {STORE} }}", "2: for i"),
    ("lanes", KERNEL, f"for i in s0 below 4 : lane {{ {STORE} }}", "2: for i"),
    ("lanes", KERNEL, f"for i in 4 below s0 : seq {{ {STORE} }}", "2: for i"),
    ("lanes", KERNEL, f"for j in 2048 below 1025 : lane {{ for i in 1024 : lane {{ {STORE} }} }}", "3: for i"),
    ("parallel-outermost", KERNEL, f"for j in s0 : seq {{ for i in 4 : parallel {{ {STORE} }} }}", "3: for i"),
    ("alloc-before-use", PLAN, "launch @k(%x, %a)", "4: launch"),
    ("alloc-before-use", PLAN, "free %a", "4: free"),
    ("use-after-free", PLAN, "free %x\nlaunch @k(%x)", "5: launch"),
    ("use-after-free", PLAN, "reuse %a : f32[s0] of %x\nview %b : f32[s0] of %x", "5: view"),
    ("use-after-free", PLAN, "free %x\nfree %x", "5: free"),
    ("held", PLAN, "call %a = a.b.c(%x) holds\nreuse %b : f32[s0] of %x", "5: reuse"),
    ("results", PLAN, "results (f32[s0], none)\n  return (%x)", "1: plan"),
    ("results", PLAN, "results (f32[s0])\n  saved (1)\n  return (%x)", "1: plan"),
    ("key-first", GRAPH, "%k = i64[2] : call a.b.c(%x) draws key", "4: %k"),
    ("key-first", PLAN, "call %k = a.b.c(%x) draws key", "4: call"),
    ("held", PLAN, "view %v : f32[s0] of %x\ncall %a = a.b.c(%v) holds\nalloc %b : f32[s0] over %x", "6: alloc"),
    ("held", PLAN, "call (%a, %b) = a.b.c(%x) holds\ncall %c = a.w.d(%a) waits (%x, %a)\nreuse %d : f32[s0] of %x", "6: reuse"),
    ("held", PLAN, "call none = a.b.c(%x) holds\ncall %c = a.w.d(%x) waits (%x)\nreuse %d : f32[s0] of %x", "6: reuse"),
    ("output-kept", PLAN, "free %x\nreturn (%x)", "5: return"),
    ("kernel-listed", PLAN, "launch @k(%x)\nkernels ()", "4: launch"),
    ("kernel-listed", PLAN, "kernels (@k)", "1: plan"),
]  # fmt: skip


def broken_objects() -> list[tuple[str, Any, str]]:
    """What no text can say, because the reader resolves names."""
    (i,) = axes_for((make.S0,))
    x, y = make.buf("x", make.S0), make.buf("y", make.S0)
    other = Var("i", 0, 99)
    g = make.Graph("g", (x,), (), (Ref("y"),), env=make.ONE)
    strange = replace(g, nodes=(Pointwise(y, (i,), load("x", (other,), F32)),))
    bound = expr(LOAD, make.const(1, F32), attrs=("x", (Var("@0", 0),), F32))
    wrong_type = replace(g, nodes=(Pointwise(y, (i,), bound),))
    unused = expr(LOAD, make.const(1, make.I64), attrs=("x", (i.var,), F32))
    gap = replace(g, nodes=(Pointwise(y, (i,), unused),))
    free = replace(g, nodes=(Pointwise(y, (i,), load("x", (Var("k", 0, 0),), F32)),))
    two_sizes = replace(g, inputs=(x, Var("s0", 2)))
    s = make.schedule()
    short = Schedule(s.graph, (Launch(make.row_softmax(), ("x",)),))
    unknown = Schedule(s.graph, (Launch(make.row_softmax(), ("x", "nowhere")),))
    typed = Schedule(s.graph, (Launch(make.row_softmax(), ("x", "w")),))
    afar = Schedule(s.graph, (Launch(make.row_softmax(), ("x", "mm"), device="cuda:0"),))
    lent = Extern((), "a.b.c", (Ref("mm"),), holds=True)
    written = Schedule(s.graph, (lent, Launch(make.row_softmax(), ("x", "mm"))))
    return [
        ("var-once", strange, "4: out %y"),
        ("gather", wrong_type, "3: out %y"),
        ("gather", gap, "3: out %y"),
        ("free-var", free, "4: out %y"),
        ("var-once", two_sizes, "4: in s0"),
        ("launch", short, "launch"),
        ("launch", unknown, "launch"),
        ("launch", typed, "launch"),
        ("launch", afar, "launch"),
        ("held", written, "launch"),
    ]


def _check(rule: str, x: Any, line: str) -> None:
    with pytest.raises(InternalError) as caught:
        verify(x)
    e = caught.value
    assert e.rule == rule, str(e)
    assert line in e.line, str(e)
    assert "\n    ^ " in str(e)


@pytest.mark.parametrize(("rule", "frame", "inside", "line"), BROKEN)
def test_broken_text(rule: str, frame: str, inside: str, line: str) -> None:
    if rule == "free-var" and frame is KERNEL:
        x: Any = make.row_softmax()
        x = replace(x, sizes=())
        line = "1: kernel"
    else:
        x = read(frame.format(inside))
    _check(rule, x, line)


@pytest.mark.parametrize("n", range(9))
def test_broken_object(n: int) -> None:
    _check(*broken_objects()[n])


def test_an_argument_may_be_a_multiple_of_a_size() -> None:
    verify(read("plan @p(s0: 1..) on cpu {\n  in 8*s0 : size\n  alloc %a : f32[s0]\n}"))


def test_memory_serves_again_when_all_that_use_it_are_waited_for() -> None:
    calls = "call (%a, %b) = a.b.c(%x) holds\n"
    waits = "call %c = a.w.d(%a) waits (%x, %a, %b)\ncall %d = a.w.d(%b) waits (%x, %a, %b)\n"
    verify(read(PLAN.format(f"{calls}{waits}reuse %e : f32[s0] of %x")))


def test_every_rule_has_a_test() -> None:
    tested = {rule for rule, *_ in BROKEN} | {rule for rule, *_ in broken_objects()}
    assert tested | {"layout-told"} == set(RULES)


NEG = "%y = f32[4, 1] : map (i: 4, j: 1) { neg(load(%x, [i, j])) }"
CALL = f"{NEG}\n  out %z = f32[4] : call a.b.c(%y)"


@pytest.mark.parametrize("inside", [f"out {NEG}", CALL])
def test_a_layout_that_was_told(inside: str) -> None:
    """A stride counts where the graph leaves it, or a call sees it, also of one element."""
    g = read("graph @g() on cpu {\n  in %x : f32[4, 1]\n  " + inside + "\n}")
    rows = contiguous((Int(4), Int(1)))
    verify(g, {"y": rows})
    told = {"y": replace(rows, stride=(Int(1), Int(4)))}
    with pytest.raises(InternalError, match="%y has strides 1, 1 and not 1, 4") as caught:
        verify(g, told)
    assert caught.value.rule == "layout-told"
    if inside != CALL:
        free = replace(g, free=("y",))  # type: ignore[arg-type]
        verify(free, told)  # as it may leave with any strides


def test_the_error_shows_rule_line_and_reason() -> None:
    text = GRAPH.format(f"{Y} {{ load(%x, [i]) }}")
    with pytest.raises(InternalError) as caught:
        verify(read(text))
    assert str(caught.value).splitlines()[:3] == [
        "a bug in lenz, rule rank:",
        f"    4: {Y} {{ load(%x, [i]) }}",
        "    ^ 1 indices for %x of 2 dimensions",
    ]


def test_what_is_masked_may_be_out_of_bounds() -> None:
    body = "masked(lt(index(j, i64), 2:i64), load(%w, [j + 4]), 0.0:f32)"
    verify(read(GRAPH.format(f"{Y} {{ {body} }}")))


def test_an_axis_that_may_be_empty_proves_nothing() -> None:
    verify(
        read("graph @g() on cpu {\n in %x : f32[0]\n %y = f32[0] : map (i: 0) { load(%x, [i]) }\n}")
    )


def test_scalars_before_and_after_loops() -> None:
    verify(make.row_softmax())
    verify(make.columns())
