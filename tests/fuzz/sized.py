"""Programs whose sizes come from integers: arguments, attributes of a module, items of a tensor.

Starts, ends and steps of slices, pads, repeats, shifts, splits, new sizes, kernels, strides and
dimensions are expressions of these integers and of sizes. A program is called with several values,
so that guards are evaluated again, and also with values that eager refuses.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional

from tests.fuzz.compare import same_strides

__all__ = ["Sized", "failure", "found", "sized"]

# t: a tensor, f: one of floats, n: an integer, p: a positive one, d: a dimension
LINES = (
    "{t}[{n}:{n}]", "{t}[..., {n}:{n}:{p}]", "{t}[:, {n}:]", "{t}[:{n}]", "{t}[::{p}]", "{t}[{n}]",
    "{t}[{n}:{n}, {n}:{n}]", "{t}.narrow({d}, {n}, {n})", "{t}.select({d}, {n})",
    "{t}.chunk({p}, {d})[0]", "{t}.chunk({p}, {d})[-1]", "{t}.split({p}, {d})[-1]",
    "{t}.split({p}, {d})[0]", "{t}.split([{n}, {t}.shape[0] - {n}])[1]",
    "{t}.tensor_split({p}, {d})[-1]", "{t}.tensor_split(({n}, {n}), {d})[1]",
    "{t}.expand({n}, *{t}.shape)", "{t}[:1].expand({n}, *{t}.shape[1:])", "{t}.repeat({n}, {n})",
    "{t}.repeat({n}, {p}, {p})", "torch.tile({t}, ({n},))", "{t}.tile(({p}, {n}))",
    "{t}.repeat_interleave({n}, {d})", "{t}.roll({n}, {d})", "{t}.roll(({n}, {n}), (0, -1))",
    "{t}.roll({n})", "F.pad({t}, ({n}, {n}))", "F.pad({t}, ({n}, {n}, {n}, {n}), value={n})",
    "F.pad({f}[None], ({n}, {n}), mode='reflect')",
    "F.pad({f}[None], ({n}, {n}), mode='replicate')",
    "F.pad({f}[None], ({n}, {n}), mode='circular')", "torch.arange({n})",
    "torch.arange({n}, {n}, {n})", "torch.arange({n}, {n}, {n} / 2)", "torch.linspace(0, {n}, {n})",
    "torch.zeros({n}, {n})", "torch.full(({n}, {p}), {n})", "torch.full((3,), {n} / {p})",
    "torch.eye({n}, {n})", "{t}.tril({n})", "{t}.triu({n})", "{t}.diagonal({n})",
    "torch.diag_embed({t}, {n})", "{t}.unfold({d}, {p}, {p})", "{t}.view({p}, -1)",
    "{t}.reshape(-1, {p})", "{t}.reshape({n}, {n})", "{t}.unflatten({d}, ({p}, -1))",
    "{t}.unflatten({d}, (-1, {n}))", "{t}.index_select({d}, torch.arange({n}))", "{t} + {n}",
    "{t} * ({n} / {p})", "{n} - {t}", "{t} ** {p}", "{f} ** {n}", "{t} // {n}", "{t} % {n}",
    "{t}.remainder({n})", "{t}.fmod({n})", "{f} / {n}", "{n} / {f}", "{n} // {f}",
    "{t}.div({n}, rounding_mode='trunc')", "{t}.div({n}, rounding_mode='floor')",
    "torch.where({t} > {n}, {t}, {n})", "{t}.clamp({n}, {n})", "{t}.clamp(max={n})",
    "{t}.clamp(min={n})", "torch.maximum({t}, torch.tensor({n}))", "{t}.add({t}, alpha={n})",
    "{t}.sub({t}, alpha={n})", "{t}.topk({n}, {d})[0]", "{t}.kthvalue({p}, {d})[0]",
    "F.avg_pool1d({f}[None], {p}, {p}, {n})", "F.max_pool1d({f}[None], {p}, {p}, {n}, {p})",
    "F.max_pool1d({f}[None], {p}, {p}, {n}, {p}, ceil_mode=True)",
    "F.avg_pool1d({f}[None], {p}, {p}, {n}, True, False)",
    "F.avg_pool2d({f}[None, None], ({p}, {p}), ({p}, {p}), ({n}, {n}))",
    "F.max_pool2d({f}[None, None], {p}, {p}, {n}, {p})",
    "F.unfold({f}[None, None], {p}, {p}, {n}, {p})", "F.interpolate({f}[None], {p})",
    "F.interpolate({f}[None], {p}, mode='linear')",
    "F.interpolate({f}[None, None], ({p}, {p}), mode='bilinear')",
    "F.interpolate({f}[None, None], ({p}, {p}), mode='bicubic', align_corners=True)",
    "F.interpolate({f}[None, None], ({p}, {p}), mode='nearest-exact')",
    "F.interpolate({f}[None], scale_factor={p} / {p})", "F.adaptive_avg_pool1d({f}[None], {p})",
    "F.adaptive_max_pool1d({f}[None], {p})", "F.adaptive_avg_pool2d({f}[None], ({p}, {p}))",
    "F.one_hot({t}.long().clamp(0, 3), {n})",
    "F.conv1d({f}[None, :1], torch.ones(2, 1, {p}), None, {p}, {n}, {p})",
    "F.conv_transpose1d({f}[None, :1], torch.ones(1, 2, {p}), None, {p}, {n}, {n}, 1, {p})",
    "F.conv2d({f}[None, None], torch.ones(2, 1, {p}, {p}), None, ({p}, {p}), ({n}, {n}))",
    "torch.bincount({t}.reshape(-1).long().clamp(0, 3), minlength={n})",
    "F.channel_shuffle({t}[None, :, :, None], {p})",
    "F.pixel_shuffle({t}[:, None, None, :].mT, {p})", "{t}.rot90({n})", "{t}.cumsum({n})",
    "{t}.sum({n})", "{t}.amax({n})", "{f}.softmax({n})", "{t}.transpose({n}, {n})",
    "{t}.unsqueeze({n})", "{t}.squeeze({n})", "{t}.flip({n})", "{t}.movedim({n}, {n})",
    "{f}.var({d}, correction={n})", "{f}.std(correction={n})", "F.group_norm({f}[None], {p})",
    "{t}.long() << {n}", "{t}.long() >> {n}", "{t}.long() & {n}", "{t}.long() ^ {n}",
    "{t}.slice_scatter(torch.ones_like({t}[{n}:{n}]), 0, {n}, {n})",
    "torch.slice_scatter({t}, torch.zeros_like({t}[{n}:{n}:{p}]), 0, {n}, {n}, {p})",
    "{t}.select_scatter(torch.ones_like({t}[0]), 0, {n})",
    "torch.cat([{t}, {t}.new_zeros({n}, {t}.shape[1])])", "{t}.new_full(({n},), {n})",
    "torch.vander({f}.reshape(-1), {n})", "torch.hann_window({n})",
    "torch.tril_indices({n}, {n}, {n})", "torch.triu_indices({n}, {n}, {n})", "{t}.diff({n}, {d})",
    "torch.fft.rfft({f}, {p}).abs()", "torch.addmm({f}[:1, :1], {f}, {f}.mT, beta={n}, alpha={n})",
    "{f}[:{n}] @ {f}[:, :{n}].mT", "{f} @ {f}[{n}:].mT", "torch.stack([{t}] * {p}, {n})",
    "{t}.as_strided(({p}, {p}), ({n}, {n}), {n})",
    "{t}.gather({d}, torch.full_like({t}, {n}).long())",
    "{t}.scatter({d}, torch.full_like({t}, {n}).long(), {n})",
    "{t}.index_fill({d}, torch.tensor([0]), {n})", "{t}.masked_fill({t} > {n}, {n})",
    "F.threshold({f}, {n}, {n})", "F.leaky_relu({f}, {n} / {p})", "F.hardtanh({f}, {n}, {n})",
    "torch.combinations({t}.reshape(-1)[:{n}])", "{t}[torch.arange({n})]",
    "{t}[torch.arange({n}), {n}]", "{t}[..., None].expand(-1, -1, {n})", "{t} == {n}", "{t} < {n}",
    "{t}.sum() * {n}", "{t}.mean(dtype=torch.float64) + {n}", "torch.tensor([{n}, {n}])",
    "torch.tensor({n} / {p})", "torch.scalar_tensor({n})", "torch.full_like({t}, {n})",
    "torch.ones({n}).cumsum(0)", "torch.outer(torch.arange({n}), torch.arange({n}))",
    "torch.block_diag({t}, {t}[:{p}])", "{t}.unsafe_chunk({p}, {d})[0]",
    "torch.logspace({n}, {n}, {p})", "F.local_response_norm({f}[None], {p})",
    "F.embedding(torch.arange({n}), {f})", "F.layer_norm({f}[:, :{p}], ({p},))",
    "{f}.renorm({p}, 0, {p})", "torch.cartesian_prod(torch.arange({n}), torch.arange({n}))",
    "F.glu({f}[:, :{p} * 2])",
    "F.scaled_dot_product_attention(*[{f}[None, :{p}]] * 3, scale={n} / {p})",
)  # fmt: skip
WRITES = (
    "{t}[{n}:{n}] = {n}", "{t}[{n}] += {n}", "{t}.narrow({d}, {n}, {n}).fill_({n})",
    "{t}[..., {n}:{n}:{p}].add_({n})", "{t}.select({d}, {n}).zero_()", "{t}.clamp_(max={n})",
    "{t}[:, {n}:].copy_({t}[:, :1])", "{t}.fill_diagonal_({n})",
    "{t}.index_fill_({d}, torch.tensor([0]), {n})", "{t}[torch.arange({n})] = {n}", "{t}.mul_({n})",
)  # fmt: skip
INTEGERS = (
    "{a}", "{a}", "{a}", "{c}", "{c}", "({a} + {c})", "({a} - {b})", "({a} // {q})", "({a} % {q})",
    "(-{a})", "max({a}, {b})", "min({a}, {b})", "({a} * {b})", "{s}", "({s} // {q})", "({s} - {a})",
    "({s} % {q})", "(-{a} // {q})", "(-{a} % {q})", "({a} // {b})", "({a} % {b})", "abs({a} - {b})",
    "({a} if {a} > {b} else {c})", "int({a} / 2)", "math.ceil({a} / 2)", "math.floor({a} * 0.75)",
    "({a} & 3)", "({a} << 1)", "({a} >> 1)", "({a} ^ {b})", "(({a} + {b}) // 2)", "-(-{a} // {q})",
    "({a} + {b} - 1) // {b}", "({s} + {a} - 1) // {q}", "({a} ** 2)", "({a} | 1)", "int({a} > {b})",
    "math.isqrt(abs({a}))", "round({a} / 2)", "divmod({a}, {q})[1]", "sum([{a}, {b}, {c}])",
    "max({s} - {a}, 0)", "min({a}, {s})", "int({a} == {b})", "({a} or {c})", "(not {a}) * 2",
)  # fmt: skip
POSITIVE = (
    "{q}", "max({a}, 1)", "{a}", "(abs({a}) + 1)", "({a} % {q} + 1)", "{s}", "({a} // 2 + 1)",
    "min({a}, {s})", "max({s} - {a}, 1)", "{a}",
)  # fmt: skip
VALUES = (-3, -2, -1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8, 9)
SIZES = (0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 12)
TYPES = ("float32",) * 5 + ("float64", "int64", "int64", "int32", "uint8", "bool", "bfloat16")
KINDS = ("argument",) * 5 + ("module", "item", "list", "shape")
MOST = 20_000  # elements of a value
TOLERANCE = {torch.bfloat16: 0.05, torch.float32: 1e-4, torch.float64: 1e-8}
FIELD = re.compile(r"\{(\w)\}")
Call = tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]  # integers and shapes


@dataclass(frozen=True, slots=True)
class Sized:
    """A program: where its integers come from, its lines, and the values of each call."""

    seed: int
    kind: str
    dtypes: tuple[str, ...]
    lines: tuple[str, ...]
    results: tuple[str, ...]
    calls: tuple[Call, ...]
    dynamic: bool | None = None

    @property
    def names(self) -> list[str]:
        """The integers."""
        return [f"n{k}" for k in range(len(self.calls[0][0]))]

    def source(self) -> str:
        """The function's text."""
        heads = {
            "item": [f"{n} = {n}.item()" for n in self.names],
            "list": [f"{', '.join(self.names)}, = ns['k']"],
            "shape": [f"{n} = {n}.shape[0]" for n in self.names],
            "module": [f"{n} = self.{n}" for n in self.names],
        }
        given = {"module": ["self"], "list": ["ns"]}.get(self.kind, self.names)
        given = [*given, *(f"x{k}" for k in range(len(self.dtypes)))]
        body = "".join(f"    {line}\n" for line in (*heads.get(self.kind, []), *self.lines))
        return f"def f({', '.join(given)}):\n{body}    return {', '.join(self.results)},\n"

    def function(self, name: str = "") -> Callable[..., Any]:
        """The function. Dynamo keeps which integers change by the `name` of its file."""
        scope = scope_of()
        exec(compile(self.source(), f"<sized {self.seed} {name}>", "exec"), scope)
        return scope["f"]  # type: ignore[no-any-return]

    def arguments(self, call: Call, holder: Holder) -> list[Any]:
        """Fresh arguments of a call; `holder` is the module, whose attributes are set."""
        numbers, shapes = call
        kinds = enumerate(zip(shapes, self.dtypes, strict=True))
        tensors = [tensor(shape, dtype, k) for k, (shape, dtype) in kinds]
        vars(holder).update(zip(self.names, numbers, strict=True))
        made: dict[str, list[Any]] = {
            "item": [torch.tensor(n) for n in numbers],
            "shape": [torch.zeros(abs(n), 2) for n in numbers],
            "list": [{"k": [*numbers]}],
            "module": [holder],
        }
        return [*made.get(self.kind, numbers), *tensors]

    def __str__(self) -> str:
        head = f"# sized {self.seed}: {self.kind}, dynamic={self.dynamic}, {self.dtypes}"
        return f"{head}\n{self.source()}# called with {self.calls}"


class Holder:
    """An object whose attributes are integers."""


def tensor(shape: Sequence[int], dtype: str, seed: int) -> torch.Tensor:
    """Small whole numbers; equal on every call."""
    g = torch.Generator().manual_seed(seed)
    low = 0 if dtype in ("bool", "uint8") else -4
    return torch.randint(low, 5, tuple(shape), generator=g).to(getattr(torch, dtype))


def scope_of() -> dict[str, Any]:
    """The globals of a program."""
    return {"torch": torch, "F": functional, "math": math}


class Maker:
    """One program in the making: eager runs each line at once, and says if it may stand."""

    def __init__(self, seed: int) -> None:
        self.r = random.Random(f"sized {seed}")
        self.seed = seed
        self.kind = self.r.choice(KINDS)
        self.names = [f"n{k}" for k in range(self.r.choice((1, 2, 2, 3)))]
        self.dtypes = tuple(self.r.choice(TYPES) for _ in range(self.r.choice((1, 1, 2))))
        self.made = [f"x{k}" for k in range(len(self.dtypes))]

    def shape(self) -> tuple[int, ...]:
        """The shape of an argument."""
        return tuple(self.r.choice(SIZES) for _ in range(self.r.choice((1, 2, 2, 2, 2, 3))))

    def numbers(self) -> tuple[int, ...]:
        """The integers of a call."""
        low = 0 if self.kind == "shape" else -9
        return tuple(max(low, self.r.choice(VALUES)) for _ in self.names)

    def integer(self, forms: Sequence[str]) -> str:
        """An expression of integers and sizes."""
        r, a = self.r, {"a": self.names, "b": self.names, "q": "12234"}
        size = lambda: f"{r.choice(self.made)}.shape[{r.choice((0, -1))}]"
        number = lambda: str(r.choice(VALUES))
        of = lambda k: size() if k == "s" else number() if k == "c" else r.choice(a[k])
        return FIELD.sub(lambda m: of(m[1]), r.choice(forms))

    def line(self, form: str, env: dict[str, Any]) -> str:
        """A line of a form."""
        floats = [t for t in self.made if env[t].is_floating_point()]
        first = self.r.choice(self.made[-3:])
        other = self.r.choice(floats[-3:]) if floats else first
        makers: dict[str, Callable[[], str]] = {
            "t": lambda: first,
            "f": lambda: other,
            "n": lambda: self.integer(INTEGERS),
            "p": lambda: self.integer(POSITIVE),
            "d": lambda: self.r.choice(("0", "0", "-1", "1")),
        }
        return FIELD.sub(lambda m: makers[m[1]](), form)

    def step(self, env: dict[str, Any], count: int) -> str:
        """A line that runs; its result enters `env`. Empty if none was found."""
        for _ in range(20):
            is_write = self.r.random() < 0.1
            text = self.line(self.r.choice(WRITES if is_write else LINES), env)
            text = text if is_write else f"t{count} = {text}"
            trial = env | {t: env[t].clone() for t in self.made if is_write}
            # A copy of an expanded tensor may be written, the tensor itself not.
            if not runs(text, trial) or (is_write and not runs(text, env)):
                continue
            if is_write:
                return text
            value = trial[f"t{count}"]
            # Eager crops empty tensors to negative sizes, which nothing takes.
            if min(value.shape, default=0) >= 0 and value.numel() <= MOST and value.dim() <= 6:
                env[f"t{count}"] = value
                self.made.append(f"t{count}")
                return text
        return ""

    def grown(self) -> Sized:
        """The program, which is called up to four times; eager may refuse one of the calls."""
        r, numbers, shapes = self.r, self.numbers(), tuple(self.shape() for _ in self.dtypes)
        env = scope_of() | dict(zip(self.names, numbers, strict=True))
        for name, shape, dtype in zip(tuple(self.made), shapes, self.dtypes, strict=True):
            env[name] = tensor(shape, dtype, int(name[1:]))
        found = [self.step(env, k) for k in range(r.choice((1, 2, 3, 4, 5)))]
        results = [
            self.made[-1],
            *r.sample(self.made[:-1], min(len(self.made) - 1, r.choice((0, 1, 2)))),
        ]
        last = self.integer(INTEGERS)
        results += [last] * (r.random() < 0.3 and runs(last, dict(env)))
        p = Sized(
            self.seed, self.kind, self.dtypes, tuple(filter(None, found)), tuple(results),
            ((numbers, shapes),), r.choice((True, True, None)),
        )  # fmt: skip
        calls, refused = list(p.calls), 0
        for _ in range(30):
            sizes = lambda s: tuple(r.choice(SIZES) if r.random() < 0.5 else n for n in s)
            other = tuple(map(sizes, shapes)) if r.random() < 0.4 else shapes
            call = self.numbers() if r.random() < 0.8 else numbers, other
            wrong = isinstance(outcome(p, p.function(), call), Exception)
            if len(calls) < 4 and not (wrong and refused):
                refused += wrong
                calls.append(call)
        return replace(p, calls=tuple(calls))


def runs(text: str, env: dict[str, Any]) -> bool:
    """Whether a statement runs."""
    try:
        exec(text, env)
    except Exception:  # noqa: BLE001  # whatever eager raises, the line may not stand
        return False
    return True


def sized(seed: int) -> Sized:
    """The program of a seed."""
    return Maker(seed).grown()


def outcome(p: Sized, fn: Callable[..., Any], call: Call, holder: Holder | None = None) -> Any:
    """The results and the arguments after a call, or its error."""
    args = p.arguments(call, holder or Holder())
    try:
        return (*fn(*args), *(a for a in args if isinstance(a, torch.Tensor)))
    except Exception as e:  # noqa: BLE001  # what is raised is compared
        return e


def differ(got: Any, want: Any) -> str:
    """Why two outcomes differ; empty if they agree."""
    if isinstance(want, Exception) and type(got) is type(want):
        return ""
    if isinstance(want, Exception) or isinstance(got, Exception):
        return f"{told(got)} instead of {told(want)}"
    for k, (x, y) in enumerate(zip(got, want, strict=True)):
        if not isinstance(y, torch.Tensor):
            if type(x) is not type(y) or x != y:
                return f"value {k}: {x!r} instead of {y!r}"
            continue
        try:
            same_strides(x, y)
            scale = max([1.0, *y[y.isfinite()].double().abs().reshape(-1).tolist()])
            tol = TOLERANCE.get(y.dtype, 0.0)
            torch.testing.assert_close(x, y, rtol=tol, atol=tol * scale, equal_nan=True)
        except AssertionError as e:
            return f"value {k}: {e}"
    return ""


def told(found: Any) -> str:
    """An outcome in words."""
    is_error = isinstance(found, Exception)
    return f"{type(found).__name__} ({str(found)[:500]})" if is_error else "no error"


def failure(p: Sized, backend: str = "lenz") -> str:
    """Why a program fails with a backend; empty if all of its calls agree with eager."""
    torch._dynamo.reset()
    options = {"cache": False, "on_error": "raise"} if backend == "lenz" else None
    how: dict[str, Any] = {"backend": backend, "dynamic": p.dynamic, "options": options}
    with torch._dynamo.config.patch(capture_scalar_outputs=p.kind == "item"):
        fn, holder = torch.compile(p.function(backend), **how), Holder()
        for k, call in enumerate((*p.calls, p.calls[0])):
            want = outcome(p, p.function(), call)
            if why := differ(outcome(p, fn, call, holder), want):
                return f"call {k}, {call}: {why}"
    return ""


def found(seed: int) -> str:
    """Why the program of a seed fails, with its text; empty if aot_eager fails in that call too.

    Of a width that may have either sign, lenz does not ask whether it crops more than there is.
    """
    p = sized(seed)
    why = failure(p)
    if not why or "narrow(): length must be non-negative" in why:
        return ""
    theirs = failure(p, "aot_eager")
    return "" if theirs.split(":")[0] == why.split(":")[0] else f"{p}\n{why}"
