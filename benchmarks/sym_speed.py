"""Speed of lenz.sym against sympy with torch's own division functions, on index expressions.

Workload: 144 distinct accesses. A contiguous 4-d tensor is permuted (24 ways) and viewed in another
shape (6 ways); for each the offset of an element is built from the axes of the view (flatten, split
by // and %, times strides), then simplified, two axes are replaced (one tiled, one fixed), the step
of the offset along each axis is taken, and it is compared with the offset of the access before. The
same steps run on both algebras; values are checked to agree.

Run: python benchmarks/sym_speed.py [--no-sympy]. Prints one line per algebra, milliseconds, and the
ratios.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations
from typing import Any

SHAPE = (8, 12, 16, 32)
VIEWS = ((96, 512), (8, 192, 32), (24, 4, 512), (49152,), (64, 24, 32), (16, 6, 128, 4))


@dataclass(frozen=True)
class Algebra:
    """What the workload needs: expressions also have +, - and *."""

    name: str
    var: Callable[[str, int], Any]  # name, extent
    floordiv: Callable[[Any, int], Any]
    mod: Callable[[Any, int], Any]
    simplify: Callable[[Any], Any]
    substitute: Callable[[Any, dict[Any, Any]], Any]
    value: Callable[[Any, dict[Any, int]], int]


def lenz_algebra() -> Algebra:
    from lenz.sym import Var, evaluate, substitute, sym

    return Algebra(
        "lenz.sym",
        lambda name, extent: Var(name, 0, extent - 1),
        lambda e, k: e // k,
        lambda e, k: e % k,
        lambda e: e,
        lambda e, to: substitute(e, {v: sym(x) for v, x in to.items()}),
        evaluate,
    )


def sympy_algebra() -> Algebra:
    import sympy
    from torch.utils._sympy.functions import FloorDiv, Mod

    return Algebra(
        "sympy + torch functions",
        lambda name, extent: sympy.Symbol(name, integer=True, nonnegative=True),
        lambda e, k: FloorDiv(e, k),
        lambda e, k: Mod(e, k),
        sympy.expand,
        lambda e, to: e.subs(to),
        lambda e, at: int(sympy.sympify(e).subs(at)),
    )


def offset(al: Algebra, axes: list[Any], view: tuple[int, ...], order: tuple[int, ...]) -> Any:
    """The offset of view[axes], a view of the permuted tensor."""
    strides = [0] * 4
    step = 1
    for d in reversed(range(4)):
        strides[d], step = step, step * SHAPE[d]
    flat: Any = 0
    for axis, extent in zip(axes, view, strict=True):
        flat = flat * extent + axis
    out: Any = 0
    for d in reversed(order):
        out = out + al.mod(flat, SHAPE[d]) * strides[d]
        flat = al.floordiv(flat, SHAPE[d])
    return al.simplify(out)


def run(al: Algebra) -> tuple[float, int, int]:
    """(seconds, a checksum of values, comparisons that found equal offsets)."""
    start = time.perf_counter()
    results: list[tuple[Any, list[Any]]] = []
    before: Any = None
    equal = 0
    for order in permutations(range(4)):
        for view in VIEWS:
            axes = [al.var(f"i{d}_{n}", n) for d, n in enumerate(view)]
            e = offset(al, axes, view, order)
            outer, inner = al.var("o", -(-view[-1] // 4)), al.var("l", 4)
            tiled = al.simplify(al.substitute(e, {axes[-1]: outer * 4 + inner}))
            fixed = al.simplify(al.substitute(tiled, {axes[0]: 1}))
            steps = [al.simplify(al.substitute(e, {v: v + 1}) - e) for v in axes]
            equal += before is not None and (e == before or al.simplify(e - before) == 0)
            before = e
            results.append((fixed, [*axes[1:-1], inner, outer]))
            results.append((steps[-1], axes))
    seconds = time.perf_counter() - start
    total = 0
    for e, axes in results:
        total += al.value(e, {v: int(v is not axes[-1]) for v in axes})
    return seconds, total, equal


def main() -> None:
    """Measure both, first on distinct expressions, then again on the same ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-sympy", action="store_true", help="measure lenz.sym alone")
    args = parser.parse_args()
    algebras = [lenz_algebra()] + ([] if args.no_sympy else [sympy_algebra()])
    cold: list[float] = []
    sums: set[int] = set()
    for al in algebras:
        first, total, _ = run(al)
        again, _, _ = run(al)
        cold.append(first)
        sums.add(total)
        print(f"{al.name:26} first {first * 1e3:9.1f} ms   again {again * 1e3:9.1f} ms")
    if len(sums) > 1:
        raise SystemExit(f"the algebras disagree on values: {sorted(sums)}")
    if len(cold) > 1:
        print(f"sympy takes {cold[1] / cold[0]:.0f} times as long on first use")


if __name__ == "__main__":
    main()
