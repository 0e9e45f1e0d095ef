"""Random words for neighbours: two lanes share a counter, computed in a tile of half the width.

Philox dominates the time of a kernel that draws. Lanes 2k and 2k + 1 use the two words of one
counter, so the counters take half a tile. `tl.join` puts the words next to each other, in the
registers where a thread holds neighbours anyway. Dropout plus a residual of 8192 x 8192 bf16 took
150 us with a counter per lane; memory needs 99.
"""

from __future__ import annotations

from collections.abc import Mapping

from lenz.ir.expr import Expr, vars_of
from lenz.ir.op import INDEX
from lenz.ir.tensor import axis
from lenz.ops.random import MULTIPLIER, ROUNDS, SHARED_BITS, WEYL
from lenz.records import dataclass
from lenz.sym import ONE, Sym, Var, affine_in, divisor, sym

FUNCTION = "random_pairs"


@dataclass(frozen=True, slots=True)
class Pairs:
    """The innermost lanes of a kernel in pairs: `half` runs over half of them."""

    lane: Var
    half: Var
    width: int

    def counters(self, e: Expr) -> Sym | None:
        """The offset to add to the first counter, if `e` can be computed in pairs."""
        if e.op is not SHARED_BITS:
            return None
        seed, start, number = e.args
        if number.op is not INDEX or number.args or self.lane in vars_of(seed, start):
            return None
        s: Sym = number.attrs[0]
        parts = affine_in(s, self.lane)
        if parts is None or parts[0] is not ONE or s.hi is None or s.hi >= 2**31:
            return None
        return parts[1] // 2 + self.half if divisor(parts[1]) % 2 == 0 else None


def pairs_of(lanes: Mapping[Var, int]) -> Pairs | None:
    """The pairs of a kernel's last lanes, given with their widths; None without lanes."""
    for last, width in list(lanes.items())[-1:]:
        if width > 1:
            lane = next(v for v in lanes if v.name == last.name)  # for rows that are held
            return Pairs(lane, axis(f"{lane.name}_half", sym(width // 2)).var, width)
    return None


def random_pairs_text() -> str:
    """The text of `random_pairs(seed, start, number)`: both words of each counter start + number.

    seed, start: i64; number: i32 [..., W], at least 0; gives u32 [..., W, 2].
    """
    lines = (
        f"def {FUNCTION}(seed, start, number):",
        "key, n = tl.cast(seed, tl.uint32), tl.cast(number, tl.uint32)",
        "a = tl.cast(start, tl.uint32) + n",
        "b = tl.cast(start >> 32, tl.uint32) + tl.cast(a < n, tl.uint32)",
        "b = b ^ tl.cast(seed >> 32, tl.uint32)",
        f"factor = tl.full([], {MULTIPLIER}, tl.uint64)",
        f"for _ in tl.static_range({ROUNDS}):",
        "    p = tl.cast(a, tl.uint64) * factor",  # one instruction gives both words
        "    a, b = tl.cast(p >> 32, tl.uint32) ^ (b ^ key), tl.cast(p, tl.uint32)",
        f"    key = key + tl.full([], {WEYL}, tl.uint32)",
        "return tl.join(a, b)",
    )
    return "\n    ".join(lines)
