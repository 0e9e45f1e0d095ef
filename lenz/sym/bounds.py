"""Interval arithmetic on integers: the bounds that every symbolic integer carries.

An interval is a pair `(lo, hi)`; None at either end means unbounded. Every function returns an
interval that holds each possible result (sound), as tight as the two intervals allow unless its
docstring says otherwise.
"""

from __future__ import annotations

Bounds = tuple[int | None, int | None]


def plus(total: Bounds, x: Bounds, times: int) -> Bounds:
    """The interval of a sum and a multiple of another number."""
    lo, hi = x if times > 0 else x[::-1]
    return (
        None if total[0] is None or lo is None else total[0] + times * lo,
        None if total[1] is None or hi is None else total[1] + times * hi,
    )


def interval_product(a: Bounds, b: Bounds) -> Bounds:
    """The interval of x*y for x in a, y in b."""
    (al, ah), (bl, bh) = a, b
    # The common case: sizes and indices.
    if al is not None and bl is not None and al >= 0 and bl >= 0:
        return al * bl, None if ah is None or bh is None else ah * bh
    if al is None or ah is None or bl is None or bh is None:
        return _product_unbounded(a, b)
    corners = (al * bl, al * bh, ah * bl, ah * bh)
    return min(corners), max(corners)


def _product_unbounded(a: Bounds, b: Bounds) -> Bounds:
    """x*y with an unbounded end: each corner is finite, or an infinity of known sign."""
    if a == (0, 0) or b == (0, 0):
        return 0, 0
    signs = (-1, 1)  # of an unbounded end: below, above
    ends = [_corner(a[i], signs[i], b[j], signs[j]) for i in (0, 1) for j in (0, 1)]
    lo = None if any(e == "-" for e in ends) else min(e for e in ends if isinstance(e, int))
    hi = None if any(e == "+" for e in ends) else max(e for e in ends if isinstance(e, int))
    return lo, hi


def _corner(x: int | None, x_sign: int, y: int | None, y_sign: int) -> int | str:
    """The product of two ends.

    "+" or "-" for an infinity. 0 times infinity is 0: the end itself is never reached.
    """
    if x is not None and y is not None:
        return x * y
    if x == 0 or y == 0:
        return 0
    return "+" if (x or x_sign) * (y or y_sign) > 0 else "-"


def quotient(a: Bounds, b: Bounds) -> Bounds:
    """The interval of x // y (floor) for x in a, y in b, y != 0.

    Not tight when y may have both signs.
    """
    (al, ah), (bl, bh) = a, b
    if bh is not None and bh < 0:
        return quotient(plus((0, 0), a, -1), plus((0, 0), b, -1))
    if bl is None or bl < 0:  # |x // y| <= |x|
        if al is None or ah is None:
            return None, None
        size = max(abs(al), abs(ah))
        return -size, size
    bl = max(bl, 1)
    # x // y increases with x; for x >= 0 it decreases with y, for x < 0 it increases with y.
    if al is None:
        lo = None
    elif al >= 0:
        lo = 0 if bh is None else al // bh
    else:
        lo = al // bl
    if ah is None:
        hi = None
    elif ah >= 0:
        hi = ah // bl
    else:
        hi = -1 if bh is None else ah // bh
    return lo, hi


def remainder(a: Bounds, b: Bounds) -> Bounds:
    """The interval of x % y (sign of y) for x in a, y in b, y != 0. Not tight in general."""
    (al, ah), (bl, bh) = a, b
    if bl is not None and bl >= 0:
        hi = None if bh is None else bh - 1
        if al is not None and al >= 0 and ah is not None and (hi is None or ah < hi):
            hi = ah
        return 0, hi
    if bh is not None and bh <= 0:
        return None if bl is None else bl + 1, 0
    return None if bl is None else bl + 1, None if bh is None else max(bh - 1, 0)


def smallest(items: list[Bounds]) -> Bounds:
    """The interval of min(x, y, ...) for each x in its own interval."""
    highs = [h for _, h in items if h is not None]
    lows = [low for low, _ in items if low is not None]
    return min(lows) if len(lows) == len(items) else None, min(highs) if highs else None


def largest(items: list[Bounds]) -> Bounds:
    """The interval of max(x, y, ...) for each x in its own interval."""
    highs = [h for _, h in items if h is not None]
    lows = [low for low, _ in items if low is not None]
    return max(lows) if lows else None, max(highs) if len(highs) == len(items) else None
