"""Random programs: a seeded generator, and one check of every stage of the compiler against eager.

    python tests/e2e/programs.py [--seed N] [--count N] [--large] [--device cuda]

Inputs hold small whole numbers, so that sums and products are exact in any order and results can
be compared bit by bit; what is rounded (exp, a mean, bf16) is tracked, compared with a tolerance
and kept out of comparisons, where a rounding would flip the result.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lenz.frontend import FxProgram, capture, origin
from lenz.ir.interp import interp
from lenz.ir.interp_schedule import interp_schedule
from lenz.ir.printer import show
from lenz.ir.reader import read
from lenz.ir.verify import verify
from lenz.lower import lower, native_ops
from lenz.opt import PASSES
from lenz.options import Options
from lenz.pipeline import Boxed, compile_program, context, optimise
from lenz.schedule import schedule
from lenz.sym import SymEnv

SIZES = (1, 2, 3, 4, 5, 8, 17, 33)
LARGE = (1, 3, 16, 40, 67, 300)
EXACT_UNARY = ("neg", "abs", "relu", "sign", "square", "logical_not", "clone", "contiguous")
ROUNDED_UNARY = ("exp", "sigmoid", "tanh", "sin", "rsqrt_", "erf", "log1p_")
BINARY = ("add", "sub", "mul", "maximum", "minimum")
REDUCTIONS = (
    "sum", "sum", "amax", "amin", "mean", "any", "all", "argmax", "argmin", "prod", "max", "min",
    "logsumexp", "norm", "var",
)  # fmt: skip
COMPARE = ("lt", "le", "eq", "ne", "gt", "ge")
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 1e-1}


@dataclass(frozen=True, slots=True)
class Spec:
    """One argument: a tensor of the base shape and type, seen through `view` (Python text)."""

    name: str
    base: tuple[int, ...]
    dtype: torch.dtype
    view: str
    seed: int

    def make(self, device: str = "cpu") -> torch.Tensor:
        """The tensor; equal on every call, and on every device."""
        g = torch.Generator().manual_seed(self.seed)
        if self.dtype is torch.bool:
            t = torch.randint(0, 2, self.base, generator=g).bool()
        else:
            low = 0 if self.dtype is torch.uint8 else -4
            t = torch.randint(low, 5, self.base, generator=g).to(self.dtype)
        return eval(f"t{self.view}", {"t": t.to(device)})  # type: ignore[no-any-return]


@dataclass(slots=True)
class Program:
    """Arguments and lines of Python; `rounded` names values that may differ in the last bits."""

    specs: list[Spec]
    lines: list[str] = field(default_factory=list)
    results: list[str] = field(default_factory=list)
    rounded: set[str] = field(default_factory=set)

    def source(self) -> str:
        """The function's text."""
        body = "".join(f"    {line}\n" for line in self.lines)
        names = ", ".join(s.name for s in self.specs)
        return f"def f({names}):\n{body}    return ({''.join(r + ', ' for r in self.results)})\n"

    def function(self) -> Callable[..., Any]:
        """The function, as Dynamo traces it."""
        scope: dict[str, Any] = {"torch": torch, "F": torch.nn.functional}
        exec(compile(self.source(), "<program>", "exec"), scope)  # text of this generator
        return scope["f"]  # type: ignore[no-any-return]

    def __str__(self) -> str:
        made = "".join(
            f"# {s.name}: {s.dtype} {s.base}, seed {s.seed}, t{s.view}\n" for s in self.specs
        )
        return made + self.source()


class Generator:
    """Grows a program line by line, and runs each line in eager to know what it gives."""

    def __init__(self, seed: int, large: bool = False) -> None:
        self.r = random.Random(seed)
        self.sizes = LARGE if large else SIZES
        self.limit = 200_000 if large else 3000
        self.p = Program([self.spec(k, seed) for k in range(self.r.randint(1, 4))])
        self.env: dict[str, Any] = {"torch": torch, "F": torch.nn.functional}
        self.names: list[str] = []
        self.writable: list[str] = []
        for s in self.p.specs:
            self.env[s.name] = s.make()
            self.names.append(s.name)
            if "expand" not in s.view:
                self.writable.append(s.name)
            if s.dtype is torch.bfloat16:
                self.p.rounded.add(s.name)

    def spec(self, k: int, seed: int) -> Spec:
        r = self.r
        shape = tuple(r.choice(self.sizes) for _ in range(r.choice((0, 1, 2, 2, 2, 3, 3, 4))))
        while torch.Size(shape).numel() > self.limit:
            shape = shape[1:]
        if shape and r.random() < 0.04:
            shape = (0, *shape[1:])
        kinds = (torch.float32,) * 6 + (
            torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool, torch.bfloat16,
        )  # fmt: skip
        view = ""
        if shape and r.random() < 0.4:
            views = [".flip(0)", "[1:]", "[::2]"]
            if len(shape) >= 2:
                views += [".transpose(0, -1)", ".transpose(0, 1)", "[:, 1:]", "[..., ::2]"] * 2
            if len(shape) == 4:
                views += [".permute(0, 3, 1, 2)"] * 3
            views.append(f".unsqueeze(0).expand(3, {', '.join(map(str, shape))})")
            view = r.choice(views)
        return Spec(f"a{k}", shape, r.choice(kinds), view, seed * 10 + k)

    def pick(
        self, test: Callable[[torch.Tensor], bool] = lambda t: True, exact: bool = False
    ) -> str:
        """A value of the program; the newest are the likeliest."""
        found = [
            n for n in self.names
            if test(self.env[n]) and not (exact and n in self.p.rounded)
        ]  # fmt: skip
        if not found:
            raise ValueError("no such value")
        return found[-1 - min(int(self.r.expovariate(0.5)), len(found) - 1)]

    def line(self) -> None:
        """Add one line; what eager refuses is dropped."""
        makers = (
            self.unary, self.unary, self.binary, self.binary, self.binary, self.view, self.view,
            self.view, self.reduce, self.reduce, self.select, self.join, self.rows, self.cast,
            self.write, self.write, self.library, self.scan, self.scatter,
        )  # fmt: skip
        name = f"t{len(self.p.lines)}"
        try:
            text, sources, rounds = self.r.choice(makers)(name)
            target = text.split(" = ")[0]
            trial = dict(self.env)
            exec(text, trial)
        except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError):
            return
        value = trial.get(target if target in trial else name)
        if isinstance(value, torch.Tensor) and value.numel() > self.limit:
            return
        self.p.lines.append(text)
        rounded = rounds or any(s in self.p.rounded for s in sources)
        if target == name:
            self.env[name] = value
            self.names.append(name)
            if rounded or value.dtype is torch.bfloat16:
                self.p.rounded.add(name)
        elif rounded:  # A write: whatever shares the memory is rounded too; all views may.
            self.p.rounded.update(self.names)

    def unary(self, name: str) -> tuple[str, tuple[str, ...], bool]:
        if self.r.random() < 0.25:
            x = self.pick(lambda t: t.is_floating_point())
            fn = self.r.choice(ROUNDED_UNARY)
            arg = f"{x}.abs() + 1" if fn.endswith("_") else x
            return f"{name} = torch.{fn.rstrip('_')}(({arg}).clamp(-8, 8))", (x,), True
        x = self.pick()
        fn = self.r.choice(EXACT_UNARY)
        exact = fn != "sign" and fn != "logical_not"
        if not exact:
            x = self.pick(exact=True)
        tail = ".clamp(-8, 8)" if fn == "square" else ""
        return f"{name} = {x}.{fn}(){tail}", (x,), False

    def binary(self, name: str) -> tuple[str, tuple[str, ...], bool]:
        fn = self.r.choice(BINARY)
        if self.r.random() < 0.2:
            fn = self.r.choice(COMPARE)
        exact = fn in COMPARE
        x = self.pick(exact=exact)
        y = self.pick(exact=exact)
        if self.r.random() < 0.25:
            return f"{name} = torch.{fn}({x}, {self.r.choice((-1, 0, 2, 3))})", (x,), False
        tail = ".clamp(-8, 8)" if fn == "mul" else ""
        if fn == "add" and self.r.random() < 0.3:
            return f"{name} = torch.add({x}, {y}, alpha=2).clamp(-16, 16)", (x, y), False
        return f"{name} = torch.{fn}({x}, {y}){tail}", (x, y), False

    def dim(self, x: str) -> int:
        return self.r.randrange(-self.env[x].dim(), self.env[x].dim())

    def view(self, name: str) -> tuple[str, tuple[str, ...], bool]:
        x = self.pick(lambda t: t.dim() > 0)
        t = self.env[x]
        d, e = self.dim(x), self.dim(x)
        n = t.shape[d]
        last = max(n - 1, 0)
        lo, hi = sorted((self.r.randint(0, last), self.r.randint(0, n)))
        texts = [
            f"{x}.transpose({d}, {e})",
            f"{x}.unsqueeze({d})",
            f"{x}.squeeze()",
            f"{x}.select({d}, {self.r.randint(0, last)})",
            f"{x}.narrow({d}, {lo}, {hi - lo})",
            f"{x}.flip({d})",
            f"{x}.roll({self.r.randint(-3, 3)}, {d})",
            f"{x}.reshape(-1)",
            f"{x}.flatten(0, {d % t.dim()})",
            f"{x}.unsqueeze(0).expand(2, {', '.join(['-1'] * t.dim())})",
            f"{x}.diagonal() + 0",
            f"{x}[..., ::2]",
            f"{x}.unfold({d}, {min(2, max(n, 1))}, 1)",
            f"{x}.movedim(0, -1)",
            f"{x}.repeat({', '.join(['2'] * t.dim())})",
            f"F.pad({x}, (1, 2), value=1)",
            f"F.pad({x}, (-1, 1))",
        ]
        divisor = next((k for k in (2, 3, 5) if n and n % k == 0), None)
        if divisor:
            texts.append(f"{x}.unflatten({d}, ({n // divisor}, {divisor}))")
        return f"{name} = {self.r.choice(texts)}", (x,), False

    def reduce(self, name: str) -> tuple[str, tuple[str, ...], bool]:
        kind = self.r.choice(REDUCTIONS)
        exact = kind in ("any", "all", "argmax", "argmin", "max", "min")
        x = self.pick(exact=exact)
        t = self.env[x]
        keep = self.r.random() < 0.5
        dims = self.r.sample(range(t.dim()), self.r.randint(0, t.dim()))
        where = f"{dims or 'None'}, keepdim={keep}"
        match kind:
            case "sum" | "mean":
                dtype = "" if t.is_floating_point() or kind == "sum" else ", dtype=torch.float32"
                text = f"{x}.{kind}({where}{dtype})"
            case "any" | "all":
                text = f"{x}.{kind}({dims or None}, keepdim={keep})"
            case "amax" | "amin":
                text = f"{x}.{kind}({tuple(dims)}, keepdim={keep})"
            case "argmax" | "argmin":
                text = f"{x}.{kind}()" if not dims else f"{x}.{kind}({dims[0]}, keepdim={keep})"
            case "prod":
                inner = f"{x}.clamp(0, 2)"
                text = f"{inner}.prod({dims[0] if dims else ''}).clamp(-8, 8)"
            case "max" | "min":
                one = f"({dims[0]}, keepdim={keep}).indices" if dims else "()"
                text = f"{x}.{kind}{one}"
            case "logsumexp" | "norm":
                over = dims or list(range(t.dim()))
                text = f"torch.{kind}({x}.float(), dim={over}, keepdim={keep})"
            case _:
                text = f"{x}.float().var({dims or None}, correction=0, keepdim={keep})"
        # Long sums of tens are exact up to 2^24 only.
        tail = ".remainder(16) - 8" if kind == "sum" and x not in self.p.rounded else ""
        return f"{name} = {text}{tail}", (x,), kind in ("mean", "logsumexp", "norm", "var")

    def select(self, name: str) -> tuple[str, tuple[str, ...], bool]:
        if self.r.random() < 0.5:
            c = self.pick(lambda t: t.dtype is torch.bool)
            x, y = self.pick(), self.pick()
            return f"{name} = torch.where({c}, {x}, {y})", (c, x, y), False
        x = self.pick(lambda t: t.dim() > 0 and t.shape[0] > 0)
        i = self.pick(lambda t: t.dtype is torch.int64 and 1 <= t.dim() <= 2, exact=True)
        n = self.env[x].shape[0]
        if self.r.random() < 0.5:
            return f"{name} = {x}[{i}.remainder({n})]", (x, i), False
        return f"{name} = F.embedding({i}.clamp(0, {n - 1}), {x})", (x, i), False

    def join(self, name: str) -> tuple[str, tuple[str, ...], bool]:
        x = self.pick(lambda t: t.dim() > 0)
        t = self.env[x]
        y = self.pick(lambda u: u.shape == t.shape)
        fn = self.r.choice(("cat", "stack"))
        return f"{name} = torch.{fn}([{x}, {y}, {x}], {self.dim(x)})", (x, y), False

    def rows(self, name: str) -> tuple[str, tuple[str, ...], bool]:
        x = self.pick(lambda t: t.is_floating_point() and t.dim() > 0)
        n = self.env[x].shape[-1]
        text = self.r.choice((
            f"F.softmax({x}, {self.dim(x)})",
            f"F.log_softmax({x}, -1)",
            f"F.layer_norm({x}, ({n},))",
            f"{x} / ({x}.abs().sum(-1, keepdim=True) + 1)",
            f"{x} - {x}.amax({self.dim(x)}, keepdim=True)",
        ))  # fmt: skip
        return f"{name} = {text}", (x,), " - " not in text

    def scan(self, name: str) -> tuple[str, tuple[str, ...], bool]:
        x = self.pick(lambda t: t.dim() > 0 and t.dtype is not torch.bool)
        d = self.dim(x)
        exact = x not in self.p.rounded
        texts = [
            f"{x}.cumsum({d}).clamp(-16, 16)",
            f"{x}.flip({d}).cumsum({d}).flip({d}).clamp(-16, 16)",
            f"{x}.clamp(0, 1).cumprod({d})",
            f"{x}.cummax({d}).values",
            f"{x}.cummin({d}).values",
        ]
        if exact:
            texts += [f"{x}.cummax({d}).indices", f"{x}.cummin({d}).indices"]
        if self.env[x].is_floating_point():
            texts.append(f"{x}.logcumsumexp({d})")
        text = self.r.choice(texts)
        return f"{name} = {text}", (x,), "log" in text or self.env[x].dtype is torch.bfloat16

    def scatter(self, name: str) -> tuple[str, tuple[str, ...], bool]:
        x = self.pick(lambda t: t.dim() > 0 and t.numel() > 0 and t.dtype is not torch.bool)
        t = self.env[x]
        d = self.dim(x)
        n = t.shape[d]
        row = f"torch.arange({n}, device={x}.device)"
        if self.r.random() < 0.5:  # whole slices, the last of repeated ones wins
            i = f"({row} * {self.r.randint(1, 3)}).remainder({max(n - 1, 1)})"
            text = self.r.choice((
                f"{x}.index_add({d}, {i}, {x}).clamp(-16, 16)", f"{x}.index_copy({d}, {i}, {x})",
                f"{x}.index_fill({d}, {i} - {n}, 2)",
                f"{x}.index_reduce({d}, {i}, {x}, 'amax')",
            ))  # fmt: skip
            return f"{name} = {text}", (x,), t.dtype is torch.bfloat16
        i = self.pick(lambda u: u.dtype is torch.int64 and u.shape == t.shape, exact=True)
        i = f"{i}.remainder({n})"
        y = self.pick(lambda u: u.shape == t.shape and u.dtype is t.dtype)
        text = self.r.choice((
            f"{x}.scatter({d}, {i}, 3)", f"{x}.scatter_add({d}, {i}, {y}).clamp(-16, 16)",
            f"{x}.scatter_reduce({d}, {i}, {y}, 'amin', include_self=False)",
            f"{x}.index_put(({i}.reshape(-1).remainder({t.shape[0]}),), {y}[0], accumulate=True)"
            ".clamp(-16, 16)",
        ))  # fmt: skip
        return f"{name} = {text}", (x, y), t.dtype is torch.bfloat16

    def cast(self, name: str) -> tuple[str, tuple[str, ...], bool]:
        to = self.r.choice(("float32", "float64", "int64", "int32", "bfloat16", "bool"))
        x = self.pick(exact=to in ("int64", "int32", "bool"))
        return f"{name} = {x}.to(torch.{to})", (x,), to == "bfloat16"

    def write(self, name: str) -> tuple[str, tuple[str, ...], bool]:
        x = self.r.choice(self.writable)
        t = self.env[x]
        y = self.pick(exact=not t.is_floating_point())
        at = x
        if t.dim() and self.r.random() < 0.5:
            views = ("[1:]", "[::2]", "[0]", ".t()", ".flatten()[1:3]", "[..., -1:]")
            at = f"{x}{self.r.choice(views)}"
        if self.env[y].untyped_storage().data_ptr() == t.untyped_storage().data_ptr():
            y = f"{y}.clone()"  # what eager does to memory that it reads and writes is not defined
        text = self.r.choice((
            f"{at}.add_({y})", f"{at}.copy_({y})", f"{at}.mul_(2).clamp_(-8, 8)", f"{at}.fill_(3)",
            f"{at}.copy_({at}.flip(0) + 0)", f"{at}.sub_({y}).clamp_(-8, 8)",
            f"{at}.index_fill_(0, torch.tensor([0]), 2)",
            f"{at}.index_add_(0, torch.arange(1), {at}[:1] + 0).clamp_(-8, 8)",
        ))  # fmt: skip
        return text, (x, y.split(".")[0]) if y in text else (x,), False

    def library(self, name: str) -> tuple[str, tuple[str, ...], bool]:
        x = self.pick(lambda t: t.dim() > 0, exact=True)
        t = self.env[x]
        if self.r.random() < 0.5 and t.dim() == 2 and t.dtype is torch.float32:
            return f"{name} = ({x} @ {x}.t()).clamp(-8, 8)", (x,), False
        return f"{name} = torch.sort({x}, {self.dim(x)}, stable=True).values", (x,), False

    def grow(self, lines: int) -> Program:
        """A program of about so many lines; what its lines made, or some of it, is returned."""
        for _ in range(lines):
            self.line()
        made = list(self.names)
        count = self.r.randint(1, min(5, len(made)))
        self.p.results = sorted(self.r.sample(made, count), key=made.index)
        if self.r.random() < 0.5 and made[-1] not in self.p.results:
            self.p.results.append(made[-1])
        return self.p


def program(seed: int, large: bool = False) -> Program:
    """The program of a seed."""
    g = Generator(seed, large)
    return g.grow(g.r.randint(2, 14))


@dataclass(slots=True)
class Stages:
    """Runs each compiled graph through every stage on the arguments of its first calls."""

    options: Options
    oracle: bool

    def compile_fx(self, p: FxProgram) -> Boxed:
        """The compiled callable, which first checks all stages on clones of its arguments."""
        cx = context(self.options)
        env = SymEnv()
        for b in p.symbols.bindings:
            env = env.with_var(b.var, p.symbols.hints.get(b.var.name))
        graphs = {}
        if self.oracle:
            g = lower(p.gm, p.name, p.symbols.sym, p.constants, origin, env)
            graphs["lower"] = g
            for name, run in PASSES.items():
                g = run(g, cx)
                graphs[name] = g
            for name, g in graphs.items():
                verify(g)
                assert read(show(g)) == g, f"after {name} the text reads back as another graph"
            planned = schedule(optimise(graphs["lower"], cx), cx)
            verify(planned)
        call = compile_program(p, cx).call
        if not self.oracle:
            return call

        def run(args: list[Any]) -> Sequence[Any]:
            given = copied(args)
            inputs = copied(args)
            try:
                want = list(p.interpret(list(inputs)))
            except RuntimeError:
                return call(args)  # torch's own aten.copy fails on an input copied to itself
            wanted = [t.clone() if isinstance(t, torch.Tensor) else t for t in want]
            for name, g in graphs.items():
                constants = [p.constants[_target(p, c.name)] for c in g.constants]
                got = interp(g, copied(given), constants, objects=p.modules)
                compare(list(got.outputs), wanted, f"outputs after {name}\n{show(g)}")
                compare(list(got.inputs), inputs, f"inputs after {name}\n{show(g)}")
            constants = [p.constants[_target(p, c.name)] for c in planned.graph.constants]
            got = interp_schedule(planned, copied(given), constants, objects=p.modules)
            compare(list(got.inputs), inputs, f"inputs after schedule\n{show(planned)}")
            del got
            return call(args)

        return run


def _target(p: FxProgram, name: str) -> str:
    return next(str(n.target) for n in p.gm.graph.nodes if n.op == "get_attr" and n.name == name)


def copied(args: Sequence[Any]) -> list[Any]:
    """Clones with the same strides, also of tensors whose elements overlap."""

    def one(t: Any) -> Any:
        if not isinstance(t, torch.Tensor):
            return t
        steps = zip(t.shape, t.stride(), strict=True)
        n = 1 + sum((size - 1) * stride for size, stride in steps) if t.numel() else 0
        flat = t.detach().as_strided((n,), (1,), t.storage_offset()).clone()
        return flat.as_strided(t.shape, t.stride(), 0)

    return [one(a) for a in args]


def compare(got: Sequence[Any], want: Sequence[Any], message: str, exact: bool = False) -> None:
    """Assert that two lists of results agree, within the type's tolerance unless exact."""
    assert len(got) == len(want), message
    for k, (x, y) in enumerate(zip(got, want, strict=True)):
        if isinstance(y, torch.Tensor):
            tol = 0.0 if exact else TOLERANCE.get(y.dtype, 0.0)
            torch.testing.assert_close(
                x, y, rtol=tol, atol=tol, equal_nan=True, msg=lambda m: f"value {k}: {m}\n{message}"
            )
        else:
            assert x == y, f"value {k}: {x} instead of {y}\n{message}"


def check(
    p: Program, dynamic: bool = False, oracle: bool = True, backend: Any = None, device: str = "cpu"
) -> None:
    """Assert that eager, every stage of the compiler and the compiled code agree on a program.

    With a `backend` of torch, the two are compared instead; so are eager and lenz on a GPU.
    """
    f = p.function()
    ours, theirs = [s.make(device) for s in p.specs], [s.make(device) for s in p.specs]
    want = f(*theirs)
    stages = Stages(Options.from_environment({"cache": False}), oracle)

    def staged(gm: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        return capture(gm, inputs, stages.compile_fx, stages.options, native_ops())

    torch._dynamo.reset()
    backend = backend or (staged if device == "cpu" else "lenz")
    got = torch.compile(f, backend=backend, dynamic=dynamic, fullgraph=True)(*ours)
    for name, x, y in zip(p.results, got, want, strict=True):
        compare([x], [y], f"result {name}\n{p}", exact=name not in p.rounded)
        kept = [d for d, n in enumerate(y.shape) if n > 1] if y.numel() else []
        assert [x.stride(d) for d in kept] == [y.stride(d) for d in kept], (
            f"result {name} has strides {x.stride()}, eager {y.stride()}\n{p}"
        )
    for s, x, y in zip(p.specs, ours, theirs, strict=True):
        compare([x], [y], f"argument {s.name} after the call\n{p}", s.name not in p.rounded)


def fails(p: Program, dynamic: bool, oracle: bool, device: str = "cpu") -> str:
    """Why the check fails; empty when it passes, or where eager or torch's own half fails too."""
    try:
        p.function()(*[s.make(device) for s in p.specs])
    except Exception:  # noqa: BLE001  # not a program any more
        return ""
    try:
        check(p, dynamic, oracle, device=device)
    except Exception as e:  # noqa: BLE001  # whatever is raised is the finding
        why = f"{type(e).__name__}: {e}"
    else:
        return ""
    try:
        check(p, dynamic, oracle, backend="aot_eager", device=device)
    except Exception:  # noqa: BLE001  # Dynamo drops a write to a 0-d f64 with dynamic=True, say
        return ""
    return why


def shrink(p: Program, dynamic: bool, oracle: bool, device: str = "cpu") -> Program:
    """The program with every line and result dropped that the failure does not need."""
    best = p
    changed = True
    while changed:
        changed = False
        for k in reversed(range(len(best.lines))):
            lines = best.lines[:k] + best.lines[k + 1 :]
            trial = Program(best.specs, lines, best.results, best.rounded)
            if fails(trial, dynamic, oracle, device):
                best, changed = trial, True
        for r in best.results:
            rest = [x for x in best.results if x != r]
            trial = Program(best.specs, best.lines, rest, best.rounded)
            if rest and fails(trial, dynamic, oracle, device):
                best, changed = trial, True
    return best


def main() -> int:
    """Check the programs of many seeds, shrink what fails and print it."""
    a = argparse.ArgumentParser()
    a.add_argument("--seed", type=int, default=0)
    a.add_argument("--count", type=int, default=100)
    a.add_argument("--large", action="store_true")
    a.add_argument("--device", default="cpu")
    o = a.parse_args()
    bad = 0
    for seed in range(o.seed, o.seed + o.count):
        p = program(seed, o.large)
        dynamic = seed % 3 == 2
        why = fails(p, dynamic, not o.large, o.device)
        if why:
            bad += 1
            small = shrink(p, dynamic, not o.large, o.device)
            why = fails(small, dynamic, not o.large, o.device) or why
            print(f"---- seed {seed} dynamic={dynamic}\n{small}\n{why[:1500]}\n", flush=True)
    print(f"{o.count} programs, {bad} failed")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
