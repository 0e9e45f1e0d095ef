"""What an error says: what, where, whose fault, what next."""

from __future__ import annotations

import copy
import pickle  # noqa: TID251 - errors of workers come back in this way

import pytest

from lenz.context import Context
from lenz.errors import InternalError, LenzError, Unsupported, UserError, annotate, near_names
from lenz.options import Options
from lenz.target import Target


def test_a_message_has_its_parts_in_order() -> None:
    error = UserError("argument x: expected f32, got f64", where="model.py:3", hint="cast it")
    assert str(error) == "argument x: expected f32, got f64\n  at: model.py:3\n  try: cast it"
    assert str(Unsupported("aten.foo")) == "aten.foo"


def test_whose_fault_is_in_the_class() -> None:
    for kind in (Unsupported, UserError, InternalError):
        assert issubclass(kind, LenzError)
    assert issubclass(UserError, ValueError)
    assert not issubclass(InternalError, (UserError, Unsupported))


def test_an_internal_error_shows_pass_rule_line_and_repro() -> None:
    inner = InternalError(
        "%y[i, j] is stored twice", rule="store-once", line="6: store(%y, [i, j], %4)"
    )
    error = inner.located(pass_name="fuse", repro="lenz_debug/0")
    text = str(error).splitlines()
    assert text[0] == "a bug in lenz after fuse, rule store-once:"
    assert text[1:3] == ["    6: store(%y, [i, j], %4)", "    ^ %y[i, j] is stored twice"]
    assert text[3] == "  saved: lenz_debug/0"
    assert 'on_error="eager"' in text[4]


def test_located_keeps_what_the_inner_room_knew() -> None:
    inner = InternalError("no", pass_name="inline", line="3: x", repro="there")
    outer = inner.located(pass_name="pipeline", line="9: y", repro="here", hint="next")
    assert (outer.pass_name, outer.line, outer.repro) == ("inline", "3: x", "there")
    assert outer.hint == "next"


@pytest.mark.parametrize("duplicate", [copy.copy, lambda e: pickle.loads(pickle.dumps(e))])
def test_errors_survive_a_copy_and_another_process(duplicate: object) -> None:
    error = InternalError("no", pass_name="fuse", rule="r", line="3: x", repro="there", hint="h")
    assert callable(duplicate)
    assert str(duplicate(error)) == str(error)


def test_near_names() -> None:
    assert near_names("fuse_reduction", ["fuse", "fuse_reductions"]).startswith(
        "did you mean fuse_reductions"
    )
    assert near_names("q", ["b", "a"]) == "known names: a, b"


def test_fuel_allows_the_first_rewrites_and_names_the_last() -> None:
    target = Target("cpu")
    assert all(Context(Options(), target).allow("fuse", n) for n in range(100))
    cx = Context(Options(fuel=2), target)
    assert [cx.allow("fuse", "a", n) for n in range(4)] == [True, True, False, False]
    assert cx.fuel.used == 2
    assert cx.fuel.last == "fuse a 1"
    assert not Context(Options(fuel=0), target).allow("fuse")


def test_fuel_may_be_shared_by_graphs() -> None:
    first = Context(Options(fuel=1), Target("cpu"))
    second = Context(Options(fuel=1), Target("cpu"), fuel=first.fuel)
    assert first.allow("inline", "x")
    assert not second.allow("inline", "x")


def test_a_silent_trace_makes_no_text() -> None:
    trace = Context(Options(), Target("cpu")).trace

    def text() -> str:
        raise AssertionError("a text that nobody wants was made")

    with trace.stage("lower"):
        trace.text("ir", text)


def test_targets_differ_in_their_key() -> None:
    keys = [
        Target("cpu", "x86_64", "a", "+avx2", 8, "1").key(),
        Target("cpu", "x86_64", "a", "+avx2", 8, "2").key(),
        Target("cpu", "x86_64", "a", "+avx2", 16, "1").key(),
        Target("cpu", "x86_64", "a", "-avx2", 8, "1").key(),
        Target("cpu", "x86_64", "b", "+avx2", 8, "1").key(),
    ]
    assert len(set(keys)) == len(keys)
    assert Target("cpu", features="+avx2,-avx512f").has("avx2")
    assert not Target("cpu", features="+avx2,-avx512f").has("avx512f")
    assert not Target("cpu", features="+avx512fp16").has("avx512f")


class Older(RuntimeError):
    """An exception as Python 3.10 has it."""

    add_note = None  # type: ignore[assignment]


@pytest.mark.parametrize("kind", (RuntimeError, Older))
def test_notes_need_no_method_of_a_later_python(kind: type[Exception]) -> None:
    error = kind("eager's own words")
    annotate(error, "plan 0, step 3")
    annotate(error, "model.py:3")
    assert vars(error)["__notes__"] == ["plan 0, step 3", "model.py:3"]
    assert str(error) == "eager's own words"
