"""Runs the files tests/files/<room>/*.ir: passes, their inputs, and the lines they must give.

A file has one case or several; a line `; --- NAME` begins the next one.

    ; run: inline              names of PASSES with commas between, in order; as before if absent
    ; options: inline=false    optional, `name=value` with spaces between
    graph @g(...) { ... }
    ; want: %b = ...           a line of the result, without the indentation
    ; lacks: %a                a text that must not be in the result
    ; same: WHY                instead of both: the graph must stay as it is
    ; raises: store-once       instead of want: the rule of the InternalError that must come

A graph that stays as it is without `same` is an error, so no case passes if its pass does nothing.
Around each pass the interpreter checks that the graph still gives the same results; kernels for a
GPU run in Triton's interpreter as well. With UPDATE_FILES=1 in the environment the `want` lines are
rewritten: all lines that the pass changed, and those that were wanted before and still come.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import lenz.ops  # noqa: F401 - fills the table of ops that the reader looks in
from lenz.context import Context
from lenz.errors import InternalError
from lenz.ir.graph import Graph
from lenz.ir.kernel import Schedule
from lenz.ir.printer import show
from lenz.ir.reader import read
from lenz.ir.verify import verify
from lenz.opt import PASSES as OPT
from lenz.options import Options
from lenz.schedule import schedule
from lenz.target import Target
from tests.gpu_oracle import assert_kernels
from tests.oracle import assert_same, assert_schedule, roundtrip

HERE = Path(__file__).parent
FILES = sorted(HERE.glob("*/*.ir"))
LONGEST, NEXT = 40, "; ---"


def _show(x: Any, cx: Context) -> Any:
    return x


def _verify(x: Any, cx: Context) -> Any:
    verify(x)
    return x


PASSES: dict[str, Callable[[Any, Context], Any]] = {
    **OPT,
    "schedule": schedule,
    "show": _show,
    "verify": _verify,
}


@dataclass(slots=True)
class Case:
    """One case of a file: `source` is its part of the file."""

    passes: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    source: str = ""
    text: str = ""
    name: str = ""
    same: str = ""
    want: list[str] = field(default_factory=list)
    lacks: list[str] = field(default_factory=list)
    raises: str = ""


def cases(text: str) -> list[Case]:
    """The cases of a file."""
    parts = [p for p in re.split(f"^(?={NEXT})", text, flags=re.MULTILINE) if p]
    found = [parse(p) for p in parts]
    for case in found:
        case.passes = case.passes or found[0].passes
    return found


def parse(text: str) -> Case:
    """Take a case apart; raises ValueError for a header that nobody knows."""
    case = Case(source=text)
    body: list[str] = []
    for line in text.splitlines():
        if line.startswith(NEXT):
            case.name = line.removeprefix(NEXT).strip()
            continue
        if not line.startswith(";"):
            body.append(line)
            continue
        key, _, value = line[1:].partition(":")
        value = value.strip()
        match key.strip():
            case "run":
                case.passes = tuple(p.strip() for p in value.split(","))
            case "options":
                for pair in value.split():
                    name, _, given = pair.partition("=")
                    case.options[name] = {"true": True, "false": False}.get(given, given)
            case "want":
                case.want.append(value)
            case "lacks":
                case.lacks.append(value)
            case "same":
                case.same = value
            case "raises":
                case.raises = value
            case other:
                raise ValueError(f"unknown line `; {other}:`")
    case.text = "\n".join(body)
    return case


def run(case: Case) -> Any:
    """Read the input and run the passes, each checked by the oracle; gives the result."""
    unknown = [p for p in case.passes if p not in PASSES]
    assert case.passes and not unknown, f"`; run:` wants some of {', '.join(PASSES)}: {unknown}"
    cx = Context(Options.from_environment(case.options, {}), Target("cpu", lanes=8))
    x: Any = read(case.text)
    if "verify" not in case.passes:
        roundtrip(x)
    for name in case.passes:
        after = PASSES[name](x, cx)
        if name != "verify":
            roundtrip(after)
        if isinstance(after, Schedule):
            assert_schedule(after)
            if " on cuda:0 " in case.text:
                assert_kernels(after, after.graph)
        elif isinstance(after, Graph) and after is not x:
            assert_same(x, after, what=name)
        x = after
    return x


def updated(case: Case, result: str) -> str:
    """The case's part of its file with new `want` lines."""
    old = {line.strip() for line in case.text.splitlines()} - set(case.want)
    lines = [line.strip() for line in result.splitlines()]
    fresh = [f"; want: {line}" for line in lines if line not in old]
    kept = [line for line in case.source.rstrip().splitlines() if not line.startswith("; want:")]
    at = next((k for k, line in enumerate(kept) if line.startswith("; lacks:")), len(kept))
    return "\n".join([*kept[:at], *fresh, *kept[at:]]) + "\n"


def numbered() -> list[Any]:
    """Each file with the numbers of its cases."""
    found: list[Any] = []
    for p in FILES:
        for k, case in enumerate(cases(p.read_text())):
            number = f"[{k}]" if case.name else ""
            found.append(pytest.param(p, k, id=f"{p.parent.name}/{p.stem}{number}"))
    return found


@pytest.mark.parametrize(("path", "number"), numbered())
def test_file(path: Path, number: int) -> None:
    found = cases(path.read_text())
    case = found[number]
    assert len(case.source.splitlines()) < LONGEST, "a case has under 40 lines"
    if case.raises:
        with pytest.raises(InternalError) as caught:
            run(case)
        assert caught.value.rule == case.raises, str(caught.value)
        for line in case.want:
            assert line in str(caught.value)
        return
    result = show(run(case))
    is_same = set(case.passes) <= OPT.keys() and result == show(read(case.text))
    assert bool(case.same) == is_same, f"; same: {case.same}\n{result}"
    if os.environ.get("UPDATE_FILES"):
        texts = [updated(c, result) if c is case and not c.same else c.source for c in found]
        path.write_text("\n".join(t.rstrip("\n") for t in texts) + "\n")
        return
    assert case.want or case.lacks or case.same, "the case checks nothing"
    lines = [line.strip() for line in result.splitlines()]
    for line in case.want:
        assert line in lines, f"no line\n  {line}\nin\n{result}"
    for text in case.lacks:
        assert text not in result, f"{text} is still in\n{result}"


def test_there_are_files() -> None:
    assert FILES


def test_unknown_header_is_an_error() -> None:
    with pytest.raises(ValueError, match="unknown line"):
        parse("; wnat: x\n")


def test_unknown_pass_is_an_error() -> None:
    with pytest.raises(AssertionError, match="inlin"):
        run(parse("; run: inlin\ngraph @g() { }"))


def test_wrong_want_fails(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.ir"
    wrong.write_text("; run: show\ngraph @g() {\n}\n; want: %a = nothing\n")
    with pytest.raises(AssertionError, match="no line"):
        test_file(wrong, 0)


def test_a_pass_that_does_nothing_fails(tmp_path: Path) -> None:
    idle = tmp_path / "idle.ir"
    graph = "graph @g() on cpu {\n  in %x : f32[4]\n  out %a = f32[4] : map (i: 4) { 1.0:f32 }\n}\n"
    head, wrong = "; --- no wish\n; run: drop\n", "; lacks: exp\n"
    idle.write_text(f"{head}{graph}{wrong}; --- two\n{graph}; same: nothing is dead\n")
    with pytest.raises(AssertionError, match="same"):
        test_file(idle, 0)
    test_file(idle, 1)
    assert [c.name for c in cases(idle.read_text())] == ["no wish", "two"]


def test_update_writes_the_changed_lines() -> None:
    case = parse("; run: show\na\nb\n; want: old\n; lacks: z\n")
    text = updated(case, "a\n  new\n")
    assert text == "; run: show\na\nb\n; want: new\n; lacks: z\n"
