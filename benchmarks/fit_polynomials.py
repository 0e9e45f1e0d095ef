"""Fit the minimax polynomials that `lenz/ops/coefficients.py` holds, and print that file.

    python benchmarks/fit_polynomials.py > lenz/ops/coefficients.py

Each fit minimises the greatest weighted error by Remez exchange in 40-digit arithmetic (mpmath).
The coefficients are then rounded to f32 one after another, the lowest power first, each rounding
followed by a fresh fit of the higher powers, which is kept when the rounded result is better.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mpmath as mp
import numpy as np

Real = Callable[[mp.mpf], mp.mpf]
_GRID = 1500


@dataclass(frozen=True)
class Fit:
    """Approximate `target` on [lo, hi] by a polynomial; `weight` times the error is minimised."""

    name: str
    about: str
    target: Real
    weight: Real
    lo: float
    hi: float
    degree: int
    single: bool = True  # round to f32, else to f64


def _solve(fit: Fit, fixed: list[mp.mpf], nodes: list[mp.mpf]) -> tuple[list[mp.mpf], mp.mpf]:
    """The free coefficients whose error alternates with equal size at the nodes."""
    first, n = len(fixed), fit.degree + 1 - len(fixed)
    a, b = mp.matrix(n + 1, n + 1), mp.matrix(n + 1, 1)
    for i, x in enumerate(nodes):
        for j in range(n):
            a[i, j] = x ** (first + j)
        a[i, n] = (-1) ** i / fit.weight(x)
        b[i] = fit.target(x) - sum(c * x**k for k, c in enumerate(fixed))
    found = mp.lu_solve(a, b)
    return [found[j] for j in range(n)], found[n]


def _extrema(errors: list[mp.mpf], count: int) -> list[int]:
    """Places of `count` alternating extrema, the greatest ones, left to right."""
    places: list[int] = []
    for i, e in enumerate(errors):
        if places and (errors[places[-1]] > 0) == (e > 0):
            if abs(e) > abs(errors[places[-1]]):
                places[-1] = i
        else:
            places.append(i)
    while len(places) > count:
        drop_first = abs(errors[places[0]]) < abs(errors[places[-1]])
        places.pop(0 if drop_first else -1)
    return places


def _remez(fit: Fit, fixed: list[mp.mpf]) -> tuple[list[mp.mpf], mp.mpf]:
    n = fit.degree + 1 - len(fixed)
    lo, hi = mp.mpf(fit.lo), mp.mpf(fit.hi)
    # Chebyshev points: dense at both ends, where the error varies fastest.
    grid = [
        (lo + hi) / 2 - (hi - lo) / 2 * mp.cos(mp.pi * (i + mp.mpf(0.5)) / _GRID)
        for i in range(_GRID)
    ]
    targets = [fit.target(x) for x in grid]
    weights = [fit.weight(x) for x in grid]
    picks = [round((_GRID - 1) * (1 - np.cos(np.pi * i / n)) / 2) for i in range(n + 1)]
    worst = mp.mpf(0)
    free: list[mp.mpf] = []
    for _ in range(12):
        free, level = _solve(fit, fixed, [grid[i] for i in picks])
        every = (fixed + free)[::-1]
        errors = [
            w * (t - mp.polyval(every, x)) for x, t, w in zip(grid, targets, weights, strict=True)
        ]
        worst = max(abs(e) for e in errors)
        found = _extrema(errors, n + 1)
        if len(found) < n + 1 or worst <= abs(level) * mp.mpf("1.001"):
            break
        picks = found
    return free, worst


def _rounded(value: mp.mpf, fit: Fit) -> mp.mpf:
    with np.errstate(over="ignore"):  # an unusable fit may be out of range
        return mp.mpf(float(np.float32(float(value))) if fit.single else float(value))


def _error(fit: Fit, coefficients: list[mp.mpf]) -> mp.mpf:
    places = [mp.mpf(x) for x in np.linspace(fit.lo, fit.hi, 400)]
    reverse = coefficients[::-1]
    return max(fit.weight(x) * abs(fit.target(x) - mp.polyval(reverse, x)) for x in places)


def run(fit: Fit) -> tuple[list[float], float]:
    """Coefficients, lowest power first, and the greatest weighted error after rounding."""
    free, _ = _remez(fit, [])
    best = [_rounded(c, fit) for c in free]
    least = _error(fit, best)
    fixed = best[:1]
    while fit.single and len(fixed) <= fit.degree:
        try:
            free, _ = _remez(fit, fixed)
        except ZeroDivisionError:
            break  # on a symmetric interval odd or even powers alone cannot alternate
        candidate = fixed + [_rounded(c, fit) for c in free]
        error = _error(fit, candidate)
        if error < least:
            best, least = candidate, error
        fixed = [*fixed, best[len(fixed)]]
    return [float(c) for c in best], float(least)


def _limit(f: Real, at_zero: mp.mpf | float) -> Real:
    return lambda x: mp.mpf(at_zero) if abs(x) < mp.mpf("1e-12") else f(x)


def _scaled_erfc(u: mp.mpf) -> mp.mpf:
    x = 4 * (1 + u) / (1 - u)
    return mp.exp(x * x) * mp.erfc(x) * (1 + 2 * x)


def _inverse_erf(w: mp.mpf) -> mp.mpf:
    if w < mp.mpf("1e-12"):
        return mp.sqrt(mp.pi) / 2
    x = mp.sqrt(-mp.expm1(-w))
    return mp.erfinv(x) / x


def _fits() -> list[Fit]:
    ln2_half = float(mp.log(2) / 2) * 1.001
    half_pi = float(mp.pi / 2) * 1.0001
    root = mp.sqrt
    e1 = 1 / root(mp.pi)
    return [
        Fit("EXP", "exp(r) = 1 + r + r^2 p(r), |r| <= ln2/2",
            _limit(lambda r: (mp.exp(r) - 1 - r) / r**2, 0.5),
            lambda r: r**2 / mp.exp(r) + mp.mpf("1e-9"), -ln2_half, ln2_half, 4),
        Fit("EXPM1", "exp(r) - 1 = r + r^2 p(r), |r| <= ln2/2, relative to the result",
            _limit(lambda r: (mp.expm1(r) - r) / r**2, 0.5),
            lambda r: abs(r) + mp.mpf("1e-9"), -ln2_half, ln2_half, 4),
        Fit("EXP2", "2^r = 1 + r p(r), |r| <= 1/2",
            _limit(lambda r: (mp.mpf(2) ** r - 1) / r, mp.log(2)),
            lambda r: abs(r) + mp.mpf("1e-9"), -0.5005, 0.5005, 5),
        Fit("LOG", "log(1 + f) = f - f^2/2 + f^3 p(f), 2/3 <= 1 + f <= 4/3",
            _limit(lambda f: (mp.log1p(f) - f + f * f / 2) / f**3, mp.mpf(1) / 3),
            lambda f: f**2 + mp.mpf("1e-9"), -0.33334, 0.33334, 7),
        Fit("TANH", "tanh(x) = x + x^3 p(x^2), |x| <= 0.65",
            _limit(lambda s: (mp.tanh(root(s)) / root(s) - 1) / s, -mp.mpf(1) / 3),
            lambda s: s + mp.mpf("1e-9"), 0.0, 0.4225, 4),
        Fit("ERF", "erf(x) = x + x p(x^2), |x| <= 0.93",
            _limit(lambda s: mp.erf(root(s)) / root(s) - 1, 2 * e1 - 1),
            lambda s: mp.mpf(1), 0.0, 0.865, 5),
        Fit("ERFC_LOG", "log(1 - erf(x)) = -x p(x), 0.92 <= x <= 4",
            lambda x: -mp.log(mp.erfc(x)) / x,
            lambda x: x * mp.erfc(x) / mp.erf(x) + mp.mpf("1e-9"), 0.92, 4.0, 7),
        Fit("ERFC_LOG_ALL", "log(1 - erf(x)) = -x p(x), 0 <= x <= 4, absolute in 1 - erf(x)",
            _limit(lambda x: -mp.log(mp.erfc(x)) / x, e1),
            lambda x: x * mp.erfc(x) + mp.mpf("1e-4"), 0.0, 4.0, 8),
        Fit("ERFC_LOG2", "log2(1 - erf(x)) = x p(x), 0 <= x <= 3.9, absolute in 1 - erf(x)",
            _limit(lambda x: mp.log(mp.erfc(x), 2) / x, -2 * e1 / mp.log(2)),
            lambda x: x * mp.erfc(x) * mp.log(2) + mp.mpf("3e-5"), 0.0, 3.9, 7),
        Fit("SIN", "sin(r) = r + r^3 p(r^2), |r| <= pi/2",
            _limit(lambda s: (mp.sin(root(s)) / root(s) - 1) / s, -mp.mpf(1) / 6),
            lambda s: s + mp.mpf("1e-9"), 0.0, half_pi**2, 3),
        Fit("TAN", "tan(r) = r + r^3 p(r^2), |r| <= pi/4",
            _limit(lambda s: (mp.tan(root(s)) / root(s) - 1) / s, mp.mpf(1) / 3),
            lambda s: s + mp.mpf("1e-9"), 0.0, (half_pi / 2) ** 2, 5),
        Fit("ATAN", "atan(x) = x + x^3 p(x^2), |x| <= 1",
            _limit(lambda s: (mp.atan(root(s)) / root(s) - 1) / s, -mp.mpf(1) / 3),
            lambda s: s + mp.mpf("1e-9"), 0.0, 1.0, 8),
        Fit("ASIN", "asin(x) = x + x^3 p(x^2), |x| <= 1/2",
            _limit(lambda s: (mp.asin(root(s)) / root(s) - 1) / s, mp.mpf(1) / 6),
            lambda s: s + mp.mpf("1e-9"), 0.0, 0.25, 5),
        Fit("ERFCX", "exp(x^2) erfc(x) (1 + 2 x) = p((x - 4) / (x + 4)), 0 <= x <= 11",
            _scaled_erfc, lambda u: 1 / _scaled_erfc(u), -1.0, 7 / 15, 12),
        Fit("ERFINV_NEAR", "erfinv(x) / x = p(w - 2.5), w = -log(1 - x^2) <= 5",
            lambda v: _inverse_erf(v + 2.5), lambda v: 1 / _inverse_erf(v + 2.5), -2.5, 2.5, 10,
            single=False),
        Fit("ERFINV_FAR", "erfinv(x) / x = p(sqrt(w) - 3), 5 <= w = -log(1 - x^2) <= 17",
            lambda v: _inverse_erf((v + 3) ** 2), lambda v: 1 / _inverse_erf((v + 3) ** 2),
            -0.77, 1.13, 10, single=False),
        Fit("LOG2_F64", "log2(m) = t p(t^2), t = (m - 1) / (m + 1), sqrt(1/2) <= m <= sqrt(2)",
            _limit(lambda s: mp.log((1 + root(s)) / (1 - root(s)), 2) / root(s), 2 / mp.log(2)),
            lambda s: mp.mpf(1), 0.0, 0.0296, 5, single=False),
        Fit("EXP2_F64", "2^r = 1 + r p(r), |r| <= 1/2",
            _limit(lambda r: (mp.mpf(2) ** r - 1) / r, mp.log(2)),
            lambda r: abs(r) + mp.mpf("1e-9"), -0.5005, 0.5005, 6, single=False),
    ]  # fmt: skip


def table(name: str, coefficients: Sequence[float]) -> str:
    """The coefficients in rows, as in `lenz/lower/special.py`."""
    head = f"{name} = ("
    rows = textwrap.wrap(", ".join(map(repr, coefficients)), 86 - len(head), break_on_hyphens=False)
    return head + ("\n" + " " * len(head)).join(rows) + ")  # fmt: skip"


def main() -> None:
    """Print the module, or the errors alone with --errors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--errors", action="store_true", help="print only the fitted errors")
    errors_only = parser.parse_args().errors
    mp.mp.dps = 40
    if not errors_only:
        print('"""Coefficients of the minimax polynomials in `poly.py`, lowest power first.\n')
        print(
            "Written by benchmarks/fit_polynomials.py; the error is that of exact evaluation with"
        )
        print('the rounded coefficients, weighted so that it is relative to the function.\n"""\n')
        print("from __future__ import annotations")
    for fit in _fits():
        coefficients, error = run(fit)
        if errors_only:
            print(f"{fit.name:10} 2^{float(mp.log(error, 2)):.1f}")
            continue
        print(f"\n# {fit.about}; error 2^{float(mp.log(error, 2)):.1f}.")
        print(table(fit.name, coefficients))


if __name__ == "__main__":
    main()
