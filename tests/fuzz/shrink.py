"""Makes a failing program small: fewer lines, results and arguments, simpler text and sizes.

A trial is kept when it still fails in the same way (`kind_of` its message).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from tests.fuzz.program import Line, Program, analyse

__all__ = ["kind_of", "shrink"]

CALL = re.compile(r"\.\w+\([^()]*\)|\[[^\[\]]*\]|, [a-z_]+=[^,()]+")
PART = re.compile(r"\([^()]+\)\.\w+\([^()]*\)")


def kind_of(why: str) -> str:
    """What a failure is about: numbers, names and texts of programs left out."""
    head = why.split("\n")[0][:160]
    return re.sub(r"'[^']*'|[-+]?\d[\d.e+-]*|\b[at]\d*\b|nan|inf|\[.*\]|\(.*\)|%\w+", "", head)[:60]


def shrink(p: Program, why: str, fails: Callable[[Program], str], seconds: float = 90) -> Program:
    """The smallest program found in the time; `fails` says why a program fails, "" if not."""
    until = time.monotonic() + seconds
    kind = kind_of(why)
    seen = {str(p)}
    changed = True
    while changed:
        changed = False
        for trial in trials(p):
            if time.monotonic() > until:
                return p
            if str(trial) in seen or analyse(trial) is None:
                continue
            seen.add(str(trial))
            if kind_of(fails(trial)) == kind:
                p, changed = trial, True
                break
    return p


def trials(p: Program) -> Iterator[Program]:
    """Simpler programs, the boldest first."""
    for wanted in (*((r,) for r in p.results), p.results):
        yield _sliced(p, wanted)
    n = len(p.lines)
    size = n // 2
    while size:
        for k in range(n - size, -1, -size):
            yield replace(p, lines=p.lines[:k] + p.lines[k + size :])
        size //= 2
    if p.second:
        yield replace(p, second=())
    if p.mode:
        yield replace(p, mode="")
    if p.dynamic:
        yield replace(p, dynamic=False, second=())
    for r in p.results:
        if len(p.results) > 1:
            yield replace(p, results=tuple(x for x in p.results if x != r))
    for k, line in enumerate(p.lines):
        if "w" not in line.flags:
            for source in line.reads:
                if source != line.target:
                    yield _without(p, k, source)
    yield from _fewer_arguments(p)
    yield from _simpler_arguments(p)
    for k, line in enumerate(p.lines):
        for text in _simpler_texts(line.text):
            yield replace(p, lines=(*p.lines[:k], replace(line, text=text), *p.lines[k + 1 :]))


def _sliced(p: Program, wanted: tuple[str, ...]) -> Program:
    """Some results, and the lines that those are made of; no argument that nobody reads."""
    needed, kept = set(wanted), []
    for line in reversed(p.lines):
        if line.target in needed or "b" in line.flags:
            needed |= set(line.reads)
            kept.append(line)
    p = replace(p, lines=tuple(reversed(kept)), results=wanted)
    while fewer := next(_fewer_arguments(p), None):
        p = fewer
    return p


def _without(p: Program, k: int, source: str) -> Program:
    """The program with a source of line k for what the line makes."""
    name = p.lines[k].target
    later: tuple[Line, ...] = tuple(x.renamed(name, source) for x in p.lines[k + 1 :])
    results = tuple(dict.fromkeys(source if r == name else r for r in p.results))
    return replace(p, lines=p.lines[:k] + later, results=results)


def _fewer_arguments(p: Program) -> Iterator[Program]:
    used = {r for line in p.lines for r in (*line.reads, line.target)} | set(p.results)
    texts = " ".join(line.text for line in p.lines)
    for k, s in enumerate(p.specs):
        if s.name in used or s.name in texts or any(o.of == k for o in p.specs):
            continue
        kept = [
            tuple(
                replace(o, of=o.of - (o.of > k)) for j, o in enumerate(specs) if j != k
            )
            for specs in (p.specs, p.second)
        ]  # fmt: skip
        if kept[0]:
            yield replace(p, specs=kept[0], second=kept[1])


def _simpler_arguments(p: Program) -> Iterator[Program]:
    sizes = sorted({n for s in p.specs for n in s.base if n > 1}, reverse=True)
    for n in sizes:
        for small in sorted({1, 2, 3, n // 2} - {n}):
            if 0 < small < n:
                specs = tuple(
                    replace(s, base=tuple(small if m == n else m for m in s.base)) for s in p.specs
                )
                yield replace(p, specs=specs)
    for k, s in enumerate(p.specs):
        if s.of >= 0:
            yield replace(p, specs=(*p.specs[:k], replace(s, of=-1), *p.specs[k + 1 :]))
        for small in (  # type: ignore[assignment]
            replace(s, grad=False),
            replace(s, view=""),
            replace(s, numbers="whole"),
            replace(s, dtype=torch.float32 if s.dtype is not None else None),
            replace(s, base=s.base[1:]),
        ):
            if small != s and s.of < 0 and not any(o.of == k for o in p.specs):
                yield replace(p, specs=(*p.specs[:k], small, *p.specs[k + 1 :]))  # type: ignore[arg-type]


def _simpler_texts(text: str) -> Iterator[str]:
    """The text without one of its calls, indices or options."""
    head, eq, body = text.partition(" = ")
    head, body = (head + eq, body) if eq else ("", head)
    for found in CALL.finditer(body):
        if found.start():
            yield head + body[: found.start()] + body[found.end() :]
