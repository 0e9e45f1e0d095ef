"""Grows random programs, rule by rule; eager runs each line at once and says if it may stand."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import torch

from tests.fuzz.program import ROUNDED, Line, Machine, Program, Refused, Spec, analyse
from tests.fuzz.rules import RULES

__all__ = ["program"]

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 33)
LARGE = (1, 3, 16, 40, 65, 130, 300)
FLOATS = (torch.float32,) * 5 + (torch.float64, torch.bfloat16, torch.bfloat16, torch.float16)
OTHERS = (torch.int64, torch.int64, torch.int32, torch.uint8, torch.int8, torch.int16, torch.bool)
LONG = (100_000, 131_072, 262_147, 1_000_003)
TABLES_OF_LONG = ("exact unary", "rounded unary", "binary", "reduce", "rows", "scan", "layout")
MANY = (8, 14, 15, 16, 17, 20, 30)  # dimensions; a reduction has twice as many, and torch 64
CASTS = ("float32", "float32", "float64", "bfloat16", "float16")
VIEWS = (".flip(0)", "[1:]", "[::2]", "[..., 1:]")
WIDE_VIEWS = (
    ".transpose(0, -1)", ".transpose(0, 1)", "[:, 1:]", "[..., ::2]", ".diagonal()", ".mT",
    "[..., :1].expand(*t.shape)", "[:1].expand(*t.shape)",
)  # fmt: skip
FIELD = re.compile(r"\{(\w)(\d?)\}")
TRIES = 12  # rules that are tried for one line
BREAK = Line("torch._dynamo.graph_break()", "", (), "b")


class Generator:
    """One program in the making."""

    def __init__(self, seed: int, large: bool = False, long: bool = False) -> None:
        self.r = random.Random(f"{seed} {'long' if long else large}")
        self.seed = seed
        self.long = long
        self.tables = TABLES_OF_LONG if long else tuple(RULES)
        self.sizes: tuple[int, ...] = LARGE if large else SIZES
        self.limit = 1 << 21 if long else 200_000 if large else 3000
        self.grad = self.r.random() < 0.25
        # Programs of few sizes broadcast more; 1 is always among them.
        self.sizes = (*self.r.sample(self.sizes, 3), 1)
        if self.r.random() < 0.04:
            self.sizes = (*self.sizes[:2], 1, 0)
        specs: list[Spec] = []
        for k in range(self.r.randint(1, 4)):
            specs.append(self.spec(k, specs))
        self.m = Machine(specs, self.limit)
        self.specs = specs
        self.lines: list[Line] = []
        self.names = [s.name for s in specs if s.dtype is not None]

    def spec(self, k: int, before: list[Spec]) -> Spec:
        """The next argument: a tensor, now and then a number or a view of another one's base."""
        r = self.r
        seed = self.seed * 10 + k
        if k and r.random() < 0.08:
            return Spec(f"a{k}", (), None, "", r.choice((1, 2, 3)))
        tensors = [j for j, s in enumerate(before) if s.dtype is not None and s.of < 0 and s.base]
        if tensors and not self.grad and r.random() < 0.08:
            j = r.choice(tensors)
            return replace(before[j], name=f"a{k}", view=self.view(before[j].base), of=j)
        shape = tuple(r.choice(self.sizes) for _ in range(r.choice((0, 1, 2, 2, 2, 3, 3, 4, 4))))
        if r.random() < 0.04:
            shape = tuple(r.choice((1, 1, 1, 2)) for _ in range(r.choice(MANY)))
        if self.long and (not k or r.random() < 0.3):
            n = r.choice(LONG)
            shape = r.choice(((n,), (n,), (n, 1), (1, n), (3, n // 3), (n // 2, 2)))
        while torch.Size(shape).numel() > self.limit:
            shape = shape[1:]
        if shape and r.random() < 0.04:
            shape = (0, *shape[1:])
        dtype = r.choice(FLOATS if self.grad or r.random() < 0.7 else OTHERS)
        if self.long and dtype in (torch.bfloat16, torch.float16):
            dtype = torch.float32  # sums of so many whole numbers are not exact in those
        view = self.view(shape) if shape and r.random() < 0.4 else ""
        numbers = r.choice(("whole",) * 6 + ("noise",) * 3 + (() if self.grad else ("edges",)))
        grad = self.grad and dtype.is_floating_point and (k == 0 or r.random() < 0.5)
        return Spec(f"a{k}", shape, dtype, view, seed, numbers, grad=grad)

    def view(self, shape: tuple[int, ...]) -> str:
        """Text that makes a view of a tensor of that shape."""
        views = VIEWS + (WIDE_VIEWS * 2 if len(shape) >= 2 else ())
        if len(shape) == 4:
            views += (".permute(0, 3, 1, 2)",) * 5
            views += (".to(memory_format=torch.channels_last)",) * 2
        views += (f".unsqueeze(0).expand(3, {'-1, ' * len(shape)})", ".reshape(-1)")
        return self.r.choice(views)

    def pick(self, test: Callable[[torch.Tensor], bool], exact: bool) -> str:
        """A value of the program; the newest are the likeliest."""
        found = [
            n for n in self.names
            if test(self.m.env[n]) and not (exact and self.m.level[n] == ROUNDED)
        ]  # fmt: skip
        if not found:
            raise Refused("no such value")
        return found[-1 - min(int(self.r.expovariate(0.4)), len(found) - 1)]

    def tensor(self, kind: str, rank: str, first: torch.Tensor | None, exact: bool) -> str:
        """The name of a value for a field of a template."""
        is_kind: dict[str, Callable[[torch.Tensor], bool]] = {
            "x": lambda t: True,
            "f": lambda t: t.is_floating_point(),
            "w": lambda t: t.dtype is not torch.bool,
            "h": lambda t: not t.is_floating_point() and t.dtype is not torch.bool,
            "b": lambda t: t.dtype is torch.bool,
            "i": lambda t: t.dtype is torch.int64 and 1 <= t.dim() <= 2 and t.numel() > 0,
            "s": lambda t: first is not None and t.shape == first.shape and t.dtype is first.dtype,
            "u": lambda t: first is not None and t.shape == first.shape,
            "y": lambda t: first is not None and _joins(first, t),
            "g": lambda t: first is not None and t.is_floating_point() and _joins(first, t),
        }
        of_kind, n = is_kind[kind.lower()], int(rank or 0)
        exactly = kind.isupper()
        return self.pick(
            lambda t: of_kind(t) and (t.dim() == n if exactly else t.dim() >= n), exact
        )

    def number(self, kind: str, first: torch.Tensor) -> str:
        """The text of a dimension, a number or a type."""
        r, rank = self.r, first.dim()
        if kind in "de":
            if not rank:
                raise Refused("no dimension")
            return str(r.randrange(-rank, rank))
        if kind in "DEO":
            dims = sorted(r.sample(range(rank), r.randint(min(kind != "D", rank), rank)))
            return f"({''.join(f'{d}, ' for d in dims)})" if kind == "O" else str(dims or "None")
        if kind == "c":
            numbers = [s.name for s in self.specs if s.dtype is None]
            return r.choice((*numbers * 2, "-1", "2", "3"))
        if kind == "t":
            return f"torch.{r.choice(CASTS)}"
        return {"k": str(r.randint(-3, 3)), "p": str(r.randint(1, 3)), "B": str(r.random() < 0.5)}[
            kind
        ]

    def about_first(self, kind: str, name: str, chosen: dict[str, str]) -> None:
        """Fill in what is said of the first tensor, and choose its dimension `{d}` for that."""
        if kind in "nm" and "{d}" not in chosen:
            chosen["{d}"] = self.number("d", self.m.env[name])
        n = f"{name}.shape[{chosen.get('{d}')}]"
        chosen["{" + kind + "}"] = {
            "n": n,
            "m": f"torch.arange({n}, device={name}.device)",
            "v": f"device={name}.device",
            "z": f"torch.zeros_like({name}, dtype=torch.int64)",
        }[kind]

    def line(self, flags: str, template: str) -> Line:
        """A line of a rule. Raises Refused where no value fits."""
        chosen: dict[str, str] = {}
        reads: list[str] = []
        first: torch.Tensor | None = None
        exact = "e" in flags or "x" in flags or ("k" in flags and self.m.program.grad)
        fields = dict.fromkeys((m.group(0), *m.groups()) for m in FIELD.finditer(template))
        # What is said of the first tensor comes after it.
        for whole, kind, rank in sorted(fields, key=lambda f: f[1] in "nmvz"):
            if kind in "nmvz":
                self.about_first(kind, reads[0], chosen)
                continue
            if kind in "depkcBtDEO":
                chosen[whole] = self.number(kind, torch.empty(()) if first is None else first)
                continue
            name = self.tensor(kind, rank, first, exact)
            chosen[whole] = name
            reads.append(name)
            first = self.m.env[name] if first is None else first
        text = FIELD.sub(lambda m: chosen[m.group(0)], template)
        if "w" in flags:
            return self.separate(Line(text, reads[0], tuple(dict.fromkeys(reads)), flags))
        target = f"t{len(self.lines)}"
        return Line(f"{target} = {text}", target, tuple(dict.fromkeys(reads)), flags)

    def separate(self, line: Line) -> Line:
        """A write that does not read the memory that it writes: eager leaves open what it gets."""
        memory = self.m.env[line.target].untyped_storage().data_ptr()
        for name in line.reads:
            if name != line.target and self.m.env[name].untyped_storage().data_ptr() == memory:
                line = replace(line, text=re.sub(rf"\b{name}\b", f"{name}.clone()", line.text))
        return line

    def step(self) -> None:
        """Add one line, and one that makes its values small again."""
        for _ in range(TRIES):
            table = self.r.choices(self.tables, [RULES[t][0] for t in self.tables])[0]
            flags, template = self.r.choice(RULES[table][1])
            if self.long and re.search(r"\bprod\(|trapezoid", template):
                continue  # infinite, or not exact, where numbers are many
            try:
                line = self.line(flags, template)
                self.m.run(line)
            except Refused:
                continue
            self.lines.append(line)
            if "w" not in line.flags and isinstance(self.m.env[line.target], torch.Tensor):
                self.names.append(line.target)
            if self.m.is_large(line.target):
                self.shrink_values(line)
            return

    def shrink_values(self, line: Line) -> None:
        """Clamp what a line made; where that has no gradient to compare, scale it instead."""
        name = line.target
        if "w" in line.flags:
            small = Line(f"{name}.clamp_(-8, 8)", name, (name,), "kw")
        else:
            small = Line(f"{name} = {name}.clamp(-8, 8)", name, (name,), "k")
        if self.m.env[name].dtype is torch.uint8:
            small = replace(small, text=small.text.replace("-8", "0"))
        for tail in (small, replace(small, text=f"{name} = {name} * 0.0625", flags="r")):
            try:
                self.m.run(tail)
            except Refused:
                continue
            self.lines.append(tail)
            return

    def grow(self, lines: int) -> Program:
        """A program of about so many lines; what its lines made, or some of it, is returned."""
        for _ in range(lines):
            self.step()
        made = list(dict.fromkeys(self.names))
        count = self.r.randint(1, min(5, len(made)))
        results = sorted(self.r.sample(made, count), key=made.index)
        if made[-1] not in results:
            results.append(made[-1])
        if self.r.random() < 0.25:
            for _ in range(self.r.randint(1, 3)):
                self.lines.insert(self.r.randint(0, len(self.lines)), BREAK)
        mode = "" if self.grad else self.r.choice(("", "", "no_grad", "inference_mode"))
        p = Program(tuple(self.specs), tuple(self.lines), tuple(results), mode=mode)
        p = replace(p, dynamic=self.r.random() < 0.3)
        return replace(p, second=self.other_sizes(p)) if p.dynamic else p

    def other_sizes(self, p: Program) -> tuple[Spec, ...]:
        """The arguments with other sizes, for which the program is one as well."""
        for _ in range(4):
            new = {n: self.r.choice((2, 4, 5, 6, 7, 10, 12)) for n in self.sizes if n != 1}
            specs = tuple(
                replace(s, base=tuple(new.get(n, n) for n in s.base), seed=s.seed + 5)
                if s.dtype is not None
                else s
                for s in p.specs
            )
            # Of 30 dimensions many are larger now: a million elements in tiles of 16 take minutes
            # in Triton's interpreter.
            fits = all(
                prod(s.base) <= max(1 << 14, 16 * prod(f.base))
                for s, f in zip(specs, p.specs, strict=True)
            )
            if fits and analyse(replace(p, specs=specs)) is not None:
                return specs
        return ()


def _joins(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True when two shapes broadcast."""
    pairs = zip(reversed(a.shape), reversed(b.shape), strict=False)
    return all(m == n or m == 1 or n == 1 for m, n in pairs)


def program(seed: int, large: bool = False, long: bool = False) -> Program:
    """The program of a seed; `large` has sizes up to 300, `long` a dimension up to a million."""
    g = Generator(seed, large, long)
    p = g.grow(g.r.randint(1, 5) if long else g.r.randint(2, 14))
    return replace(p, tag=f"seed {seed}{' long' if long else ' large' if large else ''}")


def sample(seeds: Any) -> dict[str, int]:
    """How often each rule's template stands in the programs of the seeds, by its first words."""
    found: dict[str, int] = {}
    for seed in seeds:
        for line in program(seed).lines:
            key = re.sub(r"\b[at]\d+\b", "_", line.text)
            found[key] = found.get(key, 0) + 1
    return found
