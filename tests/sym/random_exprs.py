"""Random expressions, with values computed apart from the code under test: on plain ints, by Python's operators."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from lenz.sym import Int, Sym, Var, maximum, minimum

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
    """A tree that leans to what indices look like: sums, products with constants, floor divisions, remainders."""
    if depth == 0 or rng.random() < 0.1:
        return Tree("leaf", leaf=rng.choice(VARS) if rng.random() < 0.75 else rng.choice(INTS))
    op = rng.choice(("+", "+", "+", "-", "*", "*", "//", "//", "%", "%", "min", "max", "join"))
    a = random_tree(rng, depth - 1)
    if op == "join":  # a split and flattened again, in part with wrong factors
        k = Tree("leaf", leaf=rng.choice((2, 3, 4, 8, -2)) if rng.random() < 0.7 else rng.choice((S0, S1)))
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
    """The same tree through the constructors. Raises ZeroDivisionError where a divisor is the constant 0."""
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
