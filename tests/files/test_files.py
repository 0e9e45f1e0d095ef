"""Runs the files tests/files/<room>/*.ir: a pass, its input, and the lines it must give.

    ; run: inline              names of PASSES with commas between, in order
    ; options: inline=false    optional, `name=value` with spaces between
    graph @g(...) { ... }
    ; want: %b = ...           a line of the result, without the indentation
    ; lacks: %a                a text that must not be in the result
    ; raises: store-once       instead of want: the rule of the InternalError that must come

Around each pass the interpreter checks that the graph still gives the same results; kernels for a
GPU run in Triton's interpreter as well. With
UPDATE_FILES=1 in the environment the `want` lines are rewritten: all lines that the pass changed.
"""

from __future__ import annotations

import os
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
LONGEST = 40


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
    """One file."""

    passes: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    want: list[str] = field(default_factory=list)
    lacks: list[str] = field(default_factory=list)
    raises: str = ""


def parse(text: str) -> Case:
    """Take a file apart; raises ValueError for a header that nobody knows."""
    case = Case()
    body: list[str] = []
    for line in text.splitlines():
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


def updated(source: str, case: Case, result: str) -> str:
    """The file with new `want` lines."""
    old = {line.strip() for line in case.text.splitlines()}
    fresh = [f"; want: {line.strip()}" for line in result.splitlines() if line.strip() not in old]
    kept = [line for line in source.rstrip().splitlines() if not line.startswith("; want:")]
    at = next((k for k, line in enumerate(kept) if line.startswith("; lacks:")), len(kept))
    return "\n".join([*kept[:at], *fresh, *kept[at:]]) + "\n"


@pytest.mark.parametrize("path", FILES, ids=[f"{p.parent.name}/{p.stem}" for p in FILES])
def test_file(path: Path) -> None:
    source = path.read_text()
    assert len(source.splitlines()) < LONGEST, "a file test has under 40 lines"
    case = parse(source)
    if case.raises:
        with pytest.raises(InternalError) as caught:
            run(case)
        assert caught.value.rule == case.raises, str(caught.value)
        for line in case.want:
            assert line in str(caught.value)
        return
    result = show(run(case))
    if os.environ.get("UPDATE_FILES"):
        path.write_text(updated(source, case, result))
        return
    assert case.want or case.lacks, "the file checks nothing"
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
        test_file(wrong)


def test_update_writes_the_changed_lines() -> None:
    case = parse("; run: show\na\nb\n; want: old\n; lacks: z\n")
    text = updated("; run: show\na\nb\n; want: old\n; lacks: z\n", case, "a\n  new\n")
    assert text == "; run: show\na\nb\n; want: new\n; lacks: z\n"
