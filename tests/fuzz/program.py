"""A random program: its arguments and its lines, as data that prints as a Python file that runs.

How exact a value is decides what may be done with it, and how it is compared:

- WHOLE: a small whole number. Sums and products of these are exact in any order, and in any type,
  as long as they stay small.
- EXACT: any number, but the same in whatever order and type the program computes.
- ROUNDED: rounded on the way. No comparison, index or floor may depend on it, for it would flip.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch.nn import functional

import tests.fuzz.lies  # noqa: F401  # whose ops programs call

__all__ = ["EXACT", "ROUNDED", "WHOLE", "Line", "Machine", "Program", "Refused", "Spec"]

WHOLE, EXACT, ROUNDED = 0, 1, 2
EDGES = (0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1.0, -1.0, 1e-3, -65504.0, 0.5)
MOST = 1 << 26  # elements of what is computed to look at it: eager would take all memory for more
LIMIT = 16  # of the absolute value of what a line makes


class Refused(Exception):
    """The line cannot stand where it is: eager refuses it, or what it reads is not exact enough."""


@dataclass(frozen=True, slots=True)
class Spec:
    """One argument: a tensor of the base shape, seen through `view` (Python text), or a number.

    `numbers` is "whole", "noise" or "edges". `of` is the position of an argument whose base this
    one shares; -1 for a base of its own. A Python number has no dtype, and is `seed`.
    """

    name: str
    base: tuple[int, ...]
    dtype: torch.dtype | None
    view: str
    seed: int
    numbers: str = "whole"
    of: int = -1
    grad: bool = False

    def values(self) -> torch.Tensor:
        """The base; equal on every call, and on every device."""
        g = torch.Generator().manual_seed(self.seed)
        assert self.dtype is not None
        if self.dtype is torch.bool:
            return torch.randint(0, 2, self.base, generator=g).bool()
        low = 0 if self.dtype is torch.uint8 else -4
        whole = torch.randint(low, 5, self.base, generator=g).to(self.dtype)
        if not self.dtype.is_floating_point or self.numbers == "whole":
            return whole
        if self.numbers == "noise":
            return (torch.randn(self.base, generator=g) * 2).to(self.dtype)
        at = torch.randint(0, len(EDGES), self.base, generator=g)
        return torch.tensor(EDGES, dtype=self.dtype)[at]

    @property
    def level(self) -> int:
        """How exact the numbers are."""
        return WHOLE if self.numbers == "whole" or not self.is_float else EXACT

    @property
    def is_float(self) -> bool:
        """True for a tensor of floats."""
        return self.dtype is not None and self.dtype.is_floating_point


@dataclass(frozen=True, slots=True)
class Line:
    """One statement: it makes `target`, or writes into the memory of `target`.

    `flags` are those of the rule: p (picks or moves values), r (rounds), e (reads exact values
    only), x (whole ones), k (exact where there are gradients), u (there no number twice), s (the
    same however it is rounded), c (casts), w (writes), b (ends a graph of Dynamo).
    """

    text: str
    target: str
    reads: tuple[str, ...]
    flags: str

    def renamed(self, old: str, new: str) -> Line:
        """The line with one name for another."""
        text = re.sub(rf"\b{old}\b", new, self.text)
        target = new if self.target == old else self.target
        return replace(
            self, text=text, target=target, reads=tuple(new if r == old else r for r in self.reads)
        )


@dataclass(frozen=True, slots=True)
class Program:
    """Arguments, lines and the names of the results; `second` are arguments of other sizes."""

    specs: tuple[Spec, ...]
    lines: tuple[Line, ...] = ()
    results: tuple[str, ...] = ()
    second: tuple[Spec, ...] = ()
    dynamic: bool = False
    tag: str = ""
    mode: str = ""  # "no_grad" or "inference_mode", in which it is called

    @property
    def whole(self) -> bool:
        """True for one graph."""
        return not any("b" in line.flags for line in self.lines)

    @property
    def grad(self) -> bool:
        """True when the gradients of some arguments are wanted."""
        return any(s.grad for s in self.specs)

    def source(self) -> str:
        """The function's text."""
        body = "".join(f"    {line.text}\n" for line in self.lines)
        names = ", ".join(s.name for s in self.specs)
        return f"def f({names}):\n{body}    return ({''.join(r + ', ' for r in self.results)})\n"

    def function(self, double: bool = False) -> Callable[..., Any]:
        """The function, as Dynamo traces it; in `double`, all its types of floats are float64."""
        text = self.source()
        if double:
            text = re.sub(r"torch\.(float32|float16|bfloat16)", "torch.float64", text)
        scope = scope_of()
        exec(compile(text, "<program>", "exec"), scope)  # text of the generator
        return scope["f"]  # type: ignore[no-any-return]

    def arguments(
        self, device: str = "cpu", double: bool = False, second: bool = False
    ) -> list[Any]:
        """Fresh arguments, those that share a base as views of one tensor."""
        bases: list[Any] = []
        made: list[Any] = []
        for s in self.second if second else self.specs:
            if s.dtype is None:
                bases.append(None)
                made.append(s.seed)
                continue
            base = bases[s.of] if s.of >= 0 else s.values().to(device)
            if double and base.is_floating_point():
                base = base.to(torch.float64)
            bases.append(base)
            t = eval(f"t{s.view}", {"t": base, "torch": torch})
            made.append(t.requires_grad_() if s.grad else t)
        return made

    def script(self, backend: str = '"lenz"') -> str:
        """The program as a Python file that compares eager with the backend."""
        lines = ["import torch, torch.nn.functional as F"]
        lines += ["import tests.fuzz.lies"] if "ops.fuzz" in self.source() else []
        lines += ["", self.source(), "def arguments():"]
        for s in self.specs:
            if s.dtype is None:
                lines.append(f"    {s.name} = {s.seed}")
                continue
            if s.of < 0:
                lines.append(f"    {s.name}_base = {_made(s)}")
            base = f"{self.specs[s.of].name if s.of >= 0 else s.name}_base"
            grad = ".requires_grad_()" if s.grad else ""
            lines.append(f"    {s.name} = {base}{s.view}{grad}")
        names = ", ".join(s.name for s in self.specs)
        lines += [f"    return [{names}]", ""]
        lines += [f"torch.{self.mode}().__enter__()"] if self.mode else []
        lines += ["ours, theirs = arguments(), arguments()"]
        compiled = f"torch.compile(f, backend={backend}, dynamic={self.dynamic or None})"
        lines += [f"got, want = {compiled}(*ours), f(*theirs)"]
        if self.grad:
            lines += [
                "for run, given in ((got, ours), (want, theirs)):",
                "    outs = [t for t in run if torch.is_tensor(t) and t.requires_grad]",
                "    torch.autograd.backward(outs, [torch.ones_like(t) for t in outs])",
                "    print([t.grad for t in given if torch.is_tensor(t)])",
            ]
        lines += ["print(got, want, ours, theirs, sep='\\n')"]
        return "\n".join(lines) + "\n"

    def __str__(self) -> str:
        made = "".join(
            f"# {s.name}: {s.dtype} {s.base}, seed {s.seed}, {s.numbers}, t{s.view}"
            f"{f', shares {self.specs[s.of].name}' if s.of >= 0 else ''}"
            f"{', grad' if s.grad else ''}\n"
            for s in self.specs
        )
        return f"# {self.tag} dynamic={self.dynamic} {self.mode}\n{made}{self.source()}"


def _made(s: Spec) -> str:
    g = f"generator=torch.Generator().manual_seed({s.seed})"
    if s.dtype is torch.bool:
        return f"torch.randint(0, 2, {s.base}, {g}).bool()"
    if not s.is_float or s.numbers == "whole":
        return (
            f"torch.randint({0 if s.dtype is torch.uint8 else -4}, 5, {s.base}, {g}).to({s.dtype})"
        )
    if s.numbers == "noise":
        return f"(torch.randn({s.base}, {g}) * 2).to({s.dtype})"
    edges = str(list(EDGES)).replace("inf", "float('inf')").replace("nan", "float('nan')")
    return f"torch.tensor({edges}).to({s.dtype})[torch.randint(0, {len(EDGES)}, {s.base}, {g})]"


def scope_of() -> dict[str, Any]:
    """The globals of a program."""
    return {"torch": torch, "F": functional}


class Machine:
    """Runs lines in eager and knows how exact each value is."""

    def __init__(self, specs: Sequence[Spec], limit: int = 1 << 18) -> None:
        self.program = Program(tuple(specs))
        self.limit = limit
        self.env: dict[str, Any] = scope_of()
        self.level: dict[str, int] = {}
        self.unit: dict[str, float] = {}  # the coarsest epsilon of the roundings on the way
        if any(prod(s.base) > MOST for s in specs):
            raise Refused("too large")
        for s, t in zip(specs, self.program.arguments(), strict=True):
            self.env[s.name] = t
            self.level[s.name] = s.level
            self.unit[s.name] = 0.0

    def run(self, line: Line) -> None:
        """Run a line. Raises Refused where it may not stand, and then has changed nothing."""
        if "b" in line.flags:
            return
        missing = [r for r in line.reads if r not in self.level]
        if missing:
            raise Refused(f"{missing[0]} is not there")
        worst = max([self.level[r] for r in line.reads if self.is_float(r)], default=WHOLE)
        kinks = "k" in line.flags or ".abs()" in line.text or ".clamp(" in line.text
        needs = "e" in line.flags or (kinks and self.program.grad)
        if (needs and worst == ROUNDED) or ("x" in line.flags and worst != WHOLE):
            raise Refused("reads what is rounded")
        if "u" in line.flags and self.program.grad and not all(map(self.is_unique, line.reads)):
            raise Refused("eager leaves open whose gradient it is")
        if "w" in line.flags:
            self.write(line, worst)
            return
        if self.is_too_large(line):
            raise Refused("too large")
        value = self.value(line)
        if isinstance(value, torch.Tensor):
            if value.numel() > self.limit or value.dim() > 64:  # which not even abs() takes
                raise Refused("too large")
            if not value.dtype.is_floating_point and worst == ROUNDED and "s" not in line.flags:
                raise Refused("a whole number made of rounded ones")
        self.env[line.target] = value
        self.level[line.target] = self.after(line, value, worst)
        self.unit[line.target] = self.rounding(line.target, line.reads)

    def after(self, line: Line, value: Any, worst: int) -> int:
        """How exact the value is that a line made."""
        if not (isinstance(value, torch.Tensor) and value.is_floating_point()):
            return WHOLE
        if "p" in line.flags:
            return worst
        return ROUNDED if "r" in line.flags or worst > WHOLE else WHOLE

    def rounding(self, name: str, reads: Sequence[str]) -> float:
        """The coarsest epsilon of what a value is made of and, if that was rounded, of its type."""
        units = [self.unit[r] for r in reads]
        if self.level[name] == ROUNDED and self.is_float(name):
            units.append(float(torch.finfo(self.env[name].dtype).eps))
        return max(units, default=0.0)

    def write(self, line: Line, worst: int) -> None:
        """Run a write on clones first, since one that fails may have written.

        Of elements that share memory torch's own half of compiling differs: docs/numerics.md.
        """
        target = self.env[line.target]
        if not isinstance(target, torch.Tensor) or _overlaps(target):
            raise Refused("elements share memory, or nothing has any")
        trial = {n: _kept(self.env[n]) for n in (*line.reads, line.target)}
        self.value(line, {**self.env, **trial})
        memory = _memory(self.env[line.target])
        self.value(line)
        rounds = worst if "p" in line.flags and worst < ROUNDED else ROUNDED
        exact = worst == WHOLE and "r" not in line.flags
        for n, t in self.env.items():
            if n in self.level and isinstance(t, torch.Tensor) and _memory(t) == memory:
                self.level[n] = max(self.level[n], WHOLE if exact else rounds)
                self.unit[n] = self.rounding(n, (*line.reads, n))

    def value(self, line: Line, env: dict[str, Any] | None = None) -> Any:
        """What the line makes; nothing is stored."""
        env = dict(self.env) if env is None else env
        try:
            exec(line.text, env)
        except Exception as e:  # whatever eager raises, the line is not a program
            raise Refused(str(e)) from e
        return env.get(line.target)

    def is_too_large(self, line: Line) -> bool:
        """True where meta tensors say so: what has 10^10 elements must not be computed to know it.

        Only asked where it may be: an outer product has so many squared, and `repeat` doubles each
        of up to 64 dimensions.
        """
        reads = {r: t for r in line.reads if isinstance(t := self.env[r], torch.Tensor)}
        sizes = [t.numel() for t in reads.values()]
        if sum(sizes) < 8192 and all(t.dim() <= 12 for t in reads.values()):
            return False
        try:
            value = self.value(line, {**self.env, **{r: _meta(t) for r, t in reads.items()}})
        except Refused:  # an op of no use there, or in eager either, which will say so
            return False
        return isinstance(value, torch.Tensor) and value.numel() > self.limit

    def is_float(self, name: str) -> bool:
        """True for a tensor of floats."""
        t = self.env[name]
        return isinstance(t, torch.Tensor) and t.is_floating_point()

    def is_unique(self, name: str) -> bool:
        """True where no number of a tensor stands in it twice."""
        return bool(self.env[name].unique().numel() == self.env[name].numel())

    def is_large(self, name: str) -> bool:
        """True when a value has grown so that sums of such values would not be exact for long."""
        t = self.env[name]
        if not isinstance(t, torch.Tensor) or t.numel() == 0 or t.dtype is torch.bool:
            return False
        t = t.detach().reshape(-1)  # as not every kernel takes more than 64 dimensions
        t = t.double().nan_to_num(0.0, 0.0, 0.0) if t.is_floating_point() else t
        return bool((t.abs() > LIMIT).any())


def _memory(t: torch.Tensor) -> int:
    return t.untyped_storage().data_ptr() or id(t)


def _overlaps(t: torch.Tensor) -> bool:
    """True where two elements of a tensor are one in memory."""
    if t.numel() < 2 or t.is_contiguous():
        return False
    most = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return torch.arange(most).as_strided(t.shape, t.stride()).unique().numel() < t.numel()


def _meta(t: torch.Tensor) -> torch.Tensor:
    """A tensor without memory, of the same type and layout."""
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


def _kept(t: Any) -> Any:
    if not isinstance(t, torch.Tensor):
        return t
    memory = t.detach().new_empty(0).set_(t.detach().untyped_storage()).clone()
    return memory.as_strided(t.shape, t.stride(), t.storage_offset())


def analyse(p: Program) -> Machine | None:
    """The machine after the last line; None where the program is not one any more."""
    try:
        m = Machine(p.specs, 1 << 21)
        for line in p.lines:
            m.run(line)
    except (Refused, RuntimeError, IndexError):  # the latter from views that arguments have not
        return None
    return m if all(r in m.level for r in p.results) else None
