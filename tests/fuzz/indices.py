"""Random integer expressions in the forms in which lenz has them, and kernels that compute many.

A tree of operators (tests/sym) becomes an index, simplified and printed as one `Sym`; or scalar IR,
one op per operator, in 64-bit arithmetic; or scalar IR over indices. Its value is what Python's
operators give, which round down; trees whose values leave 64 bits are left out.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from lenz import ops
from lenz.ir.dtype import I64
from lenz.ir.expr import Expr, const, index, load
from lenz.ir.interp_kernel import interp_kernel
from lenz.ir.kernel import Kernel, LoopKind, Param, Store, TileConfig
from lenz.ir.lexer import read_sym
from lenz.ir.printer import show
from lenz.ir.reader import read
from lenz.ir.tensor import axis
from lenz.machine.cpu import loader
from lenz.machine.cpu.llvm.compile import compile_module, host_target, link
from lenz.machine.cpu.llvm.module import emit_module
from lenz.runtime import threads
from lenz.schedule.cut import nested
from lenz.sym import Int, Sym, Var, evaluate, substitute, to_python
from lenz.sym import show as show_sym
from tests.sym.test_sym_properties import VARS, Tree, build, random_tree, values

__all__ = ["WAYS", "failure"]

COUNT = 60  # expressions of a seed
LANES = 19  # a vector of sixteen or of eight lanes, and a part of one
LIMIT = 1 << 40  # of intermediate values


@dataclass(frozen=True, slots=True)
class Case:
    """A tree, its index where it is one, and its scalar expression over rows of %x."""

    tree: Tree
    sym: Sym | None
    expr: Expr


Way: TypeAlias = Callable[[Sequence[Case], Sequence[dict[Var, int]]], torch.Tensor]
LANE = Var("v", 0, LANES - 1)


def row(v: Var) -> Expr:
    """The value of a variable: row k of %x is VARS[k]."""
    return load("x", (LANES * VARS.index(v) + LANE,), I64)


def scalar(t: Tree, rng: random.Random) -> Expr:
    """The tree as scalar ops; parts of it stay indices."""
    if t.op == "leaf":
        return const(t.leaf, I64) if isinstance(t.leaf, int) else row(t.leaf)
    if t.op != "where" and "where" not in str(t) and rng.random() < 0.15:
        return indexed(build(t))
    xs = [scalar(a, rng) for a in t.args]
    if t.op == "where":
        return ops.where(ops.lt(xs[0], xs[1]), xs[2], xs[3])
    made = {
        "+": ops.add, "-": ops.sub, "*": ops.mul, "//": ops.div_floor, "%": ops.remainder,
        "min": ops.minimum, "max": ops.maximum,
    }  # fmt: skip
    return made[t.op](*xs)


def indexed(s: Sym) -> Expr:
    """A Sym over VARS as a value, its variables loaded."""
    free = s.free_vars
    bounds = {v: Var(f"@{k}", v.lo, v.hi) for k, v in enumerate(free)}
    return index(substitute(s, dict(bounds)), I64, tuple(row(v) for v in free))


def with_where(t: Tree, rng: random.Random) -> Tree:
    """The tree with some of its sums chosen by a comparison."""
    args = tuple(with_where(a, rng) for a in t.args)
    t = Tree(t.op, args, t.leaf)
    if t.op in ("+", "min", "max") and rng.random() < 0.3:
        return Tree("where", (args[1], args[0], t, args[0]))
    return t


def value(t: Tree, at: dict[Var, int]) -> int:
    """The value, by Python. Raises ZeroDivisionError, and OverflowError beyond LIMIT."""
    if t.op == "leaf":
        return t.leaf if isinstance(t.leaf, int) else at[t.leaf]
    xs = [value(a, at) for a in t.args]
    found = {
        "+": lambda: xs[0] + xs[1], "-": lambda: xs[0] - xs[1], "*": lambda: xs[0] * xs[1],
        "//": lambda: xs[0] // xs[1], "%": lambda: xs[0] % xs[1], "min": lambda: min(xs),
        "max": lambda: max(xs), "where": lambda: xs[2] if xs[0] < xs[1] else xs[3],
    }[t.op]()  # fmt: skip
    if abs(found) > LIMIT:
        raise OverflowError
    return found


def divides_by_zero(t: Tree, points: Sequence[dict[Var, int]]) -> bool:
    """True when a divisor is 0 at some of the points."""
    for at in points:
        try:
            value(t, at)
        except ZeroDivisionError:
            return True
        except OverflowError:
            continue
    return False


def cases(seed: int, count: int) -> list[Case]:
    """Expressions of a seed: a third pure indices, a third scalar, a third both with `where`."""
    points = points_of(seed)
    rng = random.Random(f"indices {seed}")
    found: list[Case] = []
    while len(found) < count:
        t = random_tree(rng, rng.randint(1, 5))
        if divides_by_zero(t, points):
            continue
        form = len(found) % 3
        try:
            s = build(t)
            if form == 2:
                t = with_where(t, rng)
                if divides_by_zero(t, points):
                    continue
            e = indexed(s) if form == 0 else scalar(t, rng)
        except ZeroDivisionError:
            continue
        found.append(Case(t, s if form == 0 else None, e))
    return found


def points_of(seed: int) -> list[dict[Var, int]]:
    """One assignment per lane, that keeps to the ranges of the variables."""
    rng = random.Random(f"points {seed}")
    return [values(rng) for _ in range(LANES)]


def table(points: Sequence[dict[Var, int]]) -> torch.Tensor:
    """The memory of %x."""
    return torch.tensor([[p[v] for p in points] for v in VARS]).reshape(-1)


def kernel(found: Sequence[Case], kind: LoopKind) -> Kernel:
    """One store per expression; an iteration of the loop is an assignment to the variables."""
    v = axis("v", Int(LANES))
    stores = tuple(Store("y", LANES * k + v.var, c.expr) for k, c in enumerate(found))
    params = (
        Param("x", I64, Int(LANES * len(VARS)), "in"),
        Param("y", I64, Int(LANES * len(found)), "out"),
    )
    tile = TileConfig(warps=1) if kind == "lane" else TileConfig()
    return Kernel("indices_0", "pointwise", params, (), nested((v,), kind, stores), tile=tile)


def compare(found: Sequence[Case], points: Sequence[dict[Var, int]], y: torch.Tensor) -> int:
    """Assert that %y holds the values of the trees; how many were compared."""
    compared = 0
    for c, got in zip(found, y.view(-1, LANES).tolist(), strict=True):
        for at, x in zip(points, got, strict=True):
            try:
                want = value(c.tree, at)
            except (ZeroDivisionError, OverflowError):
                continue
            assert x == want, f"{x} instead of {want}: {c.expr} at {at}"
            if c.sym is not None:
                assert evaluate(c.sym, at) == want, f"{show_sym(c.sym)} at {at}"
            compared += 1
    return compared


SCOPE = {v.name: v for v in VARS}
RENAMED = {v: Var("v_" + v.name.strip("@").replace(".", "_"), v.lo, v.hi, v.below) for v in VARS}


def in_python(found: Sequence[Case], points: Sequence[dict[Var, int]]) -> torch.Tensor:
    """The values by Python source where there is an index, else by the oracle."""
    y = by_oracle(found, points)
    for k, c in enumerate(found):
        if c.sym is not None:
            assert read_sym(show_sym(c.sym), SCOPE) is c.sym, show_sym(c.sym)
            code = compile(to_python(substitute(c.sym, dict(RENAMED))), "sym", "eval")
            got = [eval(code, {}, {RENAMED[v].name: x for v, x in at.items()}) for at in points]
            y[k * LANES : (k + 1) * LANES] = torch.tensor(got)
    return y


def by_oracle(found: Sequence[Case], points: Sequence[dict[Var, int]]) -> torch.Tensor:
    """The values by the interpreter of kernels; the text of the kernel reads back."""
    k = kernel(found, "vector")
    assert read(show(k)) == k, "the text of the kernel reads back as another one"
    y = torch.zeros(len(found) * LANES, dtype=torch.int64)
    interp_kernel(k, {"x": table(points), "y": y}, {})
    return y


def in_llvm(kind: LoopKind) -> Way:
    """The values by compiled code, with vectors and a partial one, or one element at a time."""

    def run(found: Sequence[Case], points: Sequence[dict[Var, int]]) -> torch.Tensor:
        k, target = kernel(found, kind), host_target()
        text = emit_module([k], target)
        code = compile_module(text, target)
        library = link(code, [k.name], threads.imports(code))
        x, y = table(points), torch.zeros(len(found) * LANES, dtype=torch.int64)
        loader.function(library.addresses[k.name], 2, 0)(x.data_ptr(), y.data_ptr())
        return y

    return run


def in_triton(found: Sequence[Case], points: Sequence[dict[Var, int]]) -> torch.Tensor:
    """The values by Triton's interpreter."""
    from tests.gpu_oracle import interpreted

    y = torch.zeros(len(found) * LANES, dtype=torch.int64)
    interpreted(kernel(found, "lane"), {"x": table(points), "y": y}, {})
    return y


WAYS: dict[str, Way] = {
    "python": in_python,
    "oracle": by_oracle,
    "vectors": in_llvm("vector"),
    "scalars": in_llvm("seq"),
    "triton": in_triton,
}


def failure(seed: int, way: str, count: int = COUNT) -> str:
    """Which of the expressions of a seed has another value than Python's; "" for none."""
    found, points = cases(seed, count), points_of(seed)
    try:
        compared = compare(found, points, WAYS[way](found, points))
    except AssertionError as e:
        return f"seed {seed}, {way}: {e}"
    return "" if compared > count * LANES // 2 else f"seed {seed}: the sample says little"
