"""Random expressions: value, bounds, text and Python source agree with plain ints.

Seeded, so always the same.

The values are computed apart from the code under test: on plain ints, by Python's operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lenz.ir.lexer import read_sym
from lenz.sym import (
    Int,
    Sym,
    Var,
    affine_in,
    children,
    divisor,
    evaluate,
    maximum,
    minimum,
    prove_divides,
    prove_eq,
    prove_le,
    prove_lt,
    show,
    substitute,
    to_python,
)

S0 = Var("s0", 1)
S1 = Var("s1", 1, 12)
VARS = (
    S0,
    S1,
    Var("i", 0, 63),
    Var("j", 0, 7),
    Var("n", -9, 9),
    Var("x"),
    Var("y", 0),
    Var("@0", -4, None),
    Var("p", 0, below=S0),
    Var("q", 0, below=S1),
    Var("f.1", 0, below=S0 * S1),
)
INTS = (-8, -3, -2, -1, 0, 1, 2, 3, 4, 6, 7, 8, 12, 16, 32, 64)


def values(rng: Random) -> dict[Var, int]:
    """Values in the ranges."""
    at: dict[Var, int] = {}
    sizes = {"s0": 0, "s1": 0}
    for v in VARS:
        lo = -40 if v.lo is None else v.lo
        hi = (200 if rng.random() < 0.5 else 6) if v.hi is None else v.hi
        if v.name in ("p", "f.1"):
            hi = sizes["s0"] * (sizes["s1"] if v.name == "f.1" else 1) - 1
        if v.name == "q":
            hi = sizes["s1"] - 1
        at[v] = rng.randint(lo, max(hi, lo))
        if v.name in sizes:
            sizes[v.name] = at[v]
    return at


@dataclass(frozen=True, slots=True)
class Tree:
    """An operator over trees, a variable or an int; nothing is simplified."""

    op: str
    args: tuple[Tree, ...] = ()
    leaf: Var | int = 0


def random_tree(rng: Random, depth: int) -> Tree:
    """A tree that leans to what indices look like.

    Sums, products with constants, floor divisions, remainders.
    """
    if depth == 0 or rng.random() < 0.1:
        return Tree("leaf", leaf=rng.choice(VARS) if rng.random() < 0.75 else rng.choice(INTS))
    op = rng.choice(("+", "+", "+", "-", "*", "*", "//", "//", "%", "%", "min", "max", "join"))
    a = random_tree(rng, depth - 1)
    if op == "join":  # a split and flattened again, in part with wrong factors
        k = Tree(
            "leaf",
            leaf=rng.choice((2, 3, 4, 8, -2)) if rng.random() < 0.7 else rng.choice((S0, S1)),
        )
        m = k if rng.random() < 0.8 else Tree("leaf", leaf=4)
        return Tree("+", (Tree("*", (Tree("//", (a, k)), m)), Tree("%", (a, k))))
    small = rng.random() < 0.6 and op in ("*", "//", "%")
    b = Tree("leaf", leaf=rng.choice(INTS)) if small else random_tree(rng, depth - 1)
    return Tree(op, (a, b))


def value(t: Tree, at: dict[Var, int]) -> int:
    """The value, by Python. Raises ZeroDivisionError."""
    if t.op == "leaf":
        return t.leaf if isinstance(t.leaf, int) else at[t.leaf]
    a, b = (value(x, at) for x in t.args)
    match t.op:
        case "+":
            return a + b
        case "-":
            return a - b
        case "*":
            return a * b
        case "//":
            return a // b
        case "%":
            return a % b
        case "min":
            return min(a, b)
        case _:
            return max(a, b)


def build(t: Tree) -> Sym:
    """The same tree through the constructors.

    Raises ZeroDivisionError where a divisor is the constant 0.
    """
    if t.op == "leaf":
        return Int(t.leaf) if isinstance(t.leaf, int) else t.leaf
    a, b = (build(x) for x in t.args)
    match t.op:
        case "+":
            return a + b
        case "-":
            return a - b
        case "*":
            return a * b
        case "//":
            return a // b
        case "%":
            return a % b
        case "min":
            return minimum(a, b)
        case _:
            return maximum(a, b)


SCOPE = {v.name: v for v in VARS}
BATCHES, BATCH = 20, 500  # 10,000 expressions


def trees(batch: int) -> list[tuple[Tree, Sym, Random]]:
    """The expressions of a batch, without those that divide by the constant 0."""
    out: list[tuple[Tree, Sym, Random]] = []
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        rng = Random(seed)
        t = random_tree(rng, rng.randint(1, 5))
        try:
            out.append((t, build(t), rng))
        except ZeroDivisionError:
            continue
    assert len(out) > BATCH // 2
    return out


def points(t: Tree, rng: Random, n: int = 4) -> list[tuple[dict[Var, int], int]]:
    """Assignments where no divisor is 0, with the value there."""
    out: list[tuple[dict[Var, int], int]] = []
    for _ in range(n):
        at = values(rng)
        try:
            out.append((at, value(t, at)))
        except ZeroDivisionError:
            continue
    return out


@pytest.mark.one_in(2)
@pytest.mark.parametrize("batch", range(BATCHES))
def test_value_bounds_and_text(batch: int) -> None:
    for t, e, rng in trees(batch):
        assert read_sym(show(e), SCOPE) is e, show(e)
        for at, want in points(t, rng):
            assert evaluate(e, at) == want, f"{show(e)} at {at}"
            assert e.lo is None or e.lo <= want, show(e)
            assert e.hi is None or want <= e.hi, show(e)
            assert want % divisor(e) == 0 if divisor(e) else want == 0


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(4))
def test_python_source(batch: int) -> None:
    renamed = {v: Var("v_" + v.name.strip("@").replace(".", "_"), v.lo, v.hi) for v in VARS}
    for t, e, rng in trees(batch):
        source = to_python(substitute(e, dict(renamed)))
        code = compile(source, "sym", "eval")
        for at, want in points(t, rng):
            try:
                got = eval(code, {}, {renamed[v].name: x for v, x in at.items()})
            except (
                ZeroDivisionError
            ):  # the plain Var of the same range may not cancel what `below` did
                continue
            assert got == want, source


@pytest.mark.parametrize("batch", range(4))
def test_substitute_and_affine(batch: int) -> None:
    for t, e, rng in trees(batch):
        for at, want in points(t, rng, 2):
            chosen = [v for v in VARS if rng.random() < 0.5]
            image = substitute(e, {v: Int(at[v]) for v in chosen})
            assert evaluate(image, at) == want, f"{show(e)} with {chosen} at {at}"
            assert not set(chosen) & set(image.free_vars)
            for v in e.free_vars:
                parts = affine_in(e, v)
                if parts is not None:
                    assert v not in parts[0].free_vars + parts[1].free_vars
                    assert evaluate(parts[0], at) * at[v] + evaluate(parts[1], at) == want


@pytest.mark.parametrize("batch", range(4))
def test_proofs_hold(batch: int) -> None:
    exprs = trees(batch)
    proved = 0
    for (t, e, rng), (u, f, _) in pairwise(exprs):
        claims = (prove_le(e, f), prove_lt(e, f), prove_eq(e, f), prove_divides(4, e))
        proved += any(claims)
        for at, a in points(t, rng, 3):
            try:
                b = value(u, at)
            except ZeroDivisionError:
                continue
            assert not claims[0] or a <= b, f"{show(e)} <= {show(f)} at {at}"
            assert not claims[1] or a < b, f"{show(e)} < {show(f)} at {at}"
            assert not claims[2] or a == b, f"{show(e)} == {show(f)} at {at}"
            assert not claims[3] or a % 4 == 0, f"4 divides {show(e)} at {at}"
    assert proved > 10


def test_equal_keys_mean_equal_nodes() -> None:
    seen: dict[str, Sym] = {}

    def visit(e: Sym) -> None:
        if e.key:
            assert seen.setdefault(e.key, e) is e
        for child in children(e):
            visit(child)

    for _, e, _ in trees(0) + trees(1):
        visit(e)
    assert len(seen) > 500


SHAPES = st.lists(st.integers(2, 9), min_size=1, max_size=5)


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(SHAPES, SHAPES)
def test_reshape_and_back_is_the_same_index(shape: list[int], other: list[int]) -> None:
    """An index of one shape, read through another shape of as many elements and back."""
    first, second = [*shape, _size(other)], [*other, _size(shape)]
    axes = [Var(f"a{i}", 0, n - 1) for i, n in enumerate(first)]
    there = _split(_flatten(list(axes), first), second)
    assert _split(_flatten(there, second), first) == axes


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.permutations(["s0", "s1", "s2"]), st.integers(1, 4))
def test_symbolic_reshape_and_back(names: list[str], k: int) -> None:
    """One flat index split over symbolic sizes and flattened is itself.

    An index of these sizes survives too.
    """
    shape: list[Sym] = [Var(n, 1) for n in names]
    shape.insert(k % 3, Int(k + 1))
    total: Sym = Int(1)
    for n in shape:
        total = total * n
    f = Var("f", 0, below=total)
    assert _flatten(_split(f, shape), shape) is f
    axes = [Var(f"a{i}", 0, below=n) for i, n in enumerate(shape)]
    assert _split(_flatten(list(axes), shape), shape) == axes


def _size(shape: list[int]) -> int:
    out = 1
    for n in shape:
        out *= n
    return out


def _flatten(index: Sequence[Sym], shape: Sequence[Sym | int]) -> Sym:
    out: Sym = Int(0)
    for x, n in zip(index, shape, strict=True):
        out = out * n + x
    return out


def _split(flat: Sym, shape: Sequence[Sym | int]) -> list[Sym]:
    out: list[Sym] = []
    for n in reversed(shape):
        out.append(flat % n)
        flat = flat // n
    return out[::-1]
