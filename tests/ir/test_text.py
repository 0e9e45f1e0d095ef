"""The text form: exact lines, reading back, errors with their place."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

import pytest

from lenz.errors import UserError
from lenz.ir.dtype import F32, I64, DType
from lenz.ir.expr import Expr, const, load
from lenz.ir.forms import FORMS
from lenz.ir.lexer import Cursor
from lenz.ir.printer import show, show_expr
from lenz.ir.reader import ReadError, read
from lenz.ir.tensor import axis
from lenz.ir.text import Scope
from lenz.ir.text_expr import value_of
from lenz.sym import Int, Var
from tests.ir import ir_graphs as make
from tests.oracle import roundtrip


def read_expr(
    text: str, vars: Mapping[str, Var] | None = None, types: Mapping[str, DType] | None = None
) -> Expr:
    """One expression; `types` has the types of buffers ("%x") and values ("m")."""
    c = Cursor(text)
    e = value_of(c, Scope(dict(vars or {}), dict(types or {})), {})
    assert c.kind == "end", f"{c.text!r} is left of {text!r}"
    return e


OBJECTS: dict[str, Any] = {**make.GRAPHS, **make.KERNELS, "plan": make.plan}


@pytest.mark.parametrize("name", OBJECTS)
def test_roundtrip(name: str) -> None:
    roundtrip(OBJECTS[name]())


def test_roundtrip_of_a_schedule() -> None:
    s = make.schedule()
    text = show(s)
    assert read(text) == s
    assert show(read(text)) == text
    assert text.count("kernel @softmax_0") == 2, "an equal kernel is printed once"


def test_softmax() -> None:
    assert (
        show(make.softmax())
        == """\
graph @softmax(s0: 1..) on cpu {
  in %x : f32[s0, 7]
  %m = f32[s0] : reduce max (i: s0 | r: 7) { load(%x, [i, r]) }
  %e = f32[s0, 7] : map (i: s0, j: 7) { exp(sub(load(%x, [i, j]), load(%m, [i]))) }
  %d = f32[s0] : reduce sum (i: s0 | r: 7) { load(%e, [i, r]) }
  out %y = f32[s0, 7] : map (i: s0, j: 7) { div(load(%e, [i, j]), load(%d, [i])) }
}
"""
    )


def test_kernel() -> None:
    assert (
        show(make.row_softmax())
        == """\
kernel @softmax_0 reduction (%x: in f32[7*s0], %y: out f32[7*s0]; s0: 1..) {
  local %row: f32[7]
  for i in s0 : parallel {
    for r in 7 : vector { m = reduce max { load(%x, [7*i + r]) } over r }
    for r in 7 : vector {
      e = exp(sub(load(%x, [7*i + r]), m))
      store(%row, [r], e)
      d = reduce sum { e } over r
    }
    for r in 7 : vector { store(%y, [7*i + r], div(load(%row, [r]), d)) }
  }
}
"""
    )


def test_gather_keeps_the_bounds_of_its_operand() -> None:
    text = show(make.gather())
    assert "t0 = cast(load(%idx, [i]), i64)" in text
    assert "load(%w, [@0, j]; @0: 0..9 = t1)" in text


def test_constants_are_exact() -> None:
    text = show(make.constants())
    for part in ("-0.0:f32", "1e-45:f32", "0.1:f64", "inf:f32", "-inf:f32", "nan:f32", "-128:i8"):
        assert part in text
    assert "or(true, false)" in text


def test_nan_and_zeros_are_told_apart() -> None:
    for value in (0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1.0):
        assert read_expr(show_expr(const(value, F32))) is const(value, F32)
    assert read_expr("1:f32") is const(1.0, F32)
    assert const(0.0, F32) is not const(-0.0, F32)


def test_text_is_linear_in_the_dag() -> None:
    """Twice the nodes give about twice the text, though the tree grows as 2**n."""
    short, long = len(show(make.deep(500))), len(show(make.deep(1000)))
    assert long < 2.1 * short


def test_origins_are_comments_on_demand() -> None:
    g = make.softmax()
    first, *rest = g.nodes
    named = replace(first, out=replace(first.out, origin=("amax", "model.py:3")))  # type: ignore[arg-type]
    g2 = replace(g, nodes=(named, *rest))
    assert show(g2) == show(g)
    text = show(g2, origins=True)
    assert text.splitlines()[2].endswith("# from amax, model.py:3")
    assert read(text) == g2 == g
    assert "@softmax_0(%x, %mm)  # from softmax, model.py:7" in show(make.schedule(), origins=True)
    assert "model.py" not in show(make.schedule())
    assert "  # softmax\n  launch @k0" in show(make.plan(), origins=True)


def test_bounds_that_do_not_follow_are_printed() -> None:
    assert "map (i as 0..3 < s0: min(4, s0))" in show(make.odd_axes()).replace(
        "min(s0, 4)", "min(4, s0)"
    )
    assert "ranges ()" in show(make.odd_axes())


def test_temporaries_avoid_the_names_of_values() -> None:
    from lenz.ir.expr import ref

    shared = make.call("exp", ref("t0", F32))
    e = make.call("mul", shared, shared)
    text = show_expr(e, {"t0": F32})
    assert text == "{ t1 = exp(t0); mul(t1, t1) }"
    assert read_expr(text, types={"t0": F32}) is e


def test_expression_without_context() -> None:
    i = axis("i", Int(4)).var
    e = load("odd name", (i + 1,), F32)
    assert show_expr(e) == 'load(%"odd name", [i + 1]):f32'
    assert read_expr(show_expr(e), {"i": i}) is e
    assert repr(e) == show_expr(e)


def test_hand_written_text_may_be_loose() -> None:
    g = read(
        """graph @g(s0: 1..) on cpu {  # a comment
        in %x : f32[s0,]
        out %y = f32[s0] : map (i: s0) { t0 = neg(
            load(%x, [ (i) ])) mul(t0, t0) ; }
    }"""
    )
    assert "{ t0 = neg(load(%x, [i])); mul(t0, t0) }" in show(g)


ERRORS = [
    ("graph @g() { in %x : f31[4] }", 1, 22, "expected an element type"),
    ("graph @g() {\n  in %x : f32[4, s9]\n}", 2, 18, "unknown name 's9'"),
    (
        "graph @g() {\n  out %x = f32[4] : map (i: 4) { foo(1:i64) }\n}",
        2,
        34,
        "no op is called `foo`",
    ),
    (
        "graph @g() {\n  out %x = f32[4] : map (i: 4) { load(%y, [i]) }\n}",
        2,
        39,
        "%y is not defined",
    ),
    ("graph @g() {\n  out %x = f32[4] : map (i: 4) { t5 }\n}", 2, 34, "no value is called `t5`"),
    ("graph @g() {\n  out %x = f32[4] : map (i: 4) { 1.5:i64 }\n}", 2, 34, "1.5 is no i64"),
    ("graph @g() {\n  in %x : f32[4", 2, 16, "expected `,`"),
    ("graph @g() {\n  wobble\n}", 2, 3, "expected a line of a graph"),
    ("graph @g() { } }", 1, 16, "expected the end of the text"),
    ("graf @g() { }", 1, 1, "expected what this is"),
    ("graph @g() { in %x : f32[4 : 1, 2] }", 1, 28, "1 sizes but 2 strides"),
    ("graph @g() {\n  ?\n}", 2, 3, "'?' is not part of the text form"),
    ("kernel @k pointwise () { for i in 4 : fast { } }", 1, 39, "expected a kind of loop"),
    ("kernel @k pointwise (%x: in f32[4]", 1, 35, "expected `)`"),
    ("plan @p() { free x }", 1, 18, "expected `%`"),
    (
        "graph @g() { in %x : f32[4] %y = f32[4] : map (i: 4) { load(%x, [i) } }",
        1,
        67,
        "expected `]`",
    ),
    (
        "kernel @k pointwise (%x: out f32[4]) { store(%x, [], 1.0:f32) }",
        1,
        51,
        "expected a size or index expression",
    ),
    ("plan @p() { return () return () }", 1, 23, "a second line `return`"),
    ("graph @g() { out %x = i64[4] : map (i: 4) { add(1:i64, 1.0:f32) } }", 1, 45, ""),
]


@pytest.mark.parametrize("cls", FORMS)
def test_every_field_stands_in_the_text(cls: Any) -> None:
    named = set(re.findall(r"[a-z]+", " ".join(cls.SYNTAX)))
    named |= {"kwargs"} if "args" in named else set()  # both stand in one list
    named |= {"locals"} if "body" in named else set()  # in front of the statements
    silent = [f.name for f in fields(cls) if f.compare and f.name not in named]
    assert not silent, f"{cls.__name__} loses {silent} in its text"


@pytest.mark.parametrize(("text", "line", "column", "what"), ERRORS)
def test_errors_name_the_place(text: str, line: int, column: int, what: str) -> None:
    with pytest.raises(ReadError) as caught:
        read(text)
    e = caught.value
    assert what in str(e)
    assert (e.line, e.column) == (line, column), str(e)
    shown, caret = str(e).split("\n")[1:3]
    assert shown == f"  at: {text.splitlines()[line - 1]}"
    assert caret.index("^") == 6 + column - 1


def test_too_deep_a_text_is_an_error() -> None:
    text = "neg(" * 5000 + "1.0:f32" + ")" * 5000
    with pytest.raises(ReadError, match="nested too deeply"):
        read_expr(text)
    graph = "graph @g() { in %x : f32[4] out %y = f32[4] : map (i: 4) { load(%x, [I]) } }"
    for index in ("(" * 5000 + "i" + ")" * 5000, "-" * 5000 + "i", "i % 0", "i // 0"):
        with pytest.raises(ReadError, match="nested too deeply, or divides by zero"):
            read(graph.replace("I", index))


def test_a_text_that_is_none_is_refused_in_linear_time() -> None:
    """Each digit was read to the end of the number: hours for a few megabytes."""
    for text in ("9" * 3_000_000, '\\"' * 500_000):
        with pytest.raises(ReadError, match="is not part of the text form"):
            read(text)


def test_every_cut_of_a_text_is_an_error() -> None:
    """No prefix of a text is another text, and no prefix ends in another kind of error."""
    for x in (make.calls(), make.gather(), make.row_softmax(), make.plan()):
        text = show(x).rstrip()
        for end in range(0, len(text), 7):
            with pytest.raises(UserError):
                read(text[:end])


def test_every_lost_token_is_an_error_or_another_object() -> None:
    for x in (make.calls(), make.gather(), make.columns(), make.plan()):
        text = show(x)
        for token in list(re.finditer(r"[A-Za-z_0-9.]+|\S", text))[::5]:
            with suppress(UserError):
                read(text[: token.start()] + text[token.end() :])


def test_var_of_a_size_is_shared() -> None:
    g: Any = read("graph @g(s0: 1.., u0: 0..9 < s0) on cpu { in %x : f32[s0, u0] }")
    (x,) = g.inputs
    assert x.shape == (Var("s0", 1), Var("u0", 0, 9, Var("s0", 1)))
    assert I64 is const(1, I64).dtype
