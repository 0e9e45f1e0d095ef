"""Accumulate long sums and products of f32 in f64 on CPUs.

    %s = reduce sum (i: N | r: R) { f(i, r) } finish { div(acc, R) }
    ==>  %s = reduce sum (i: N | r: R) { cast(f(i, r), f64) } finish { div(cast(acc, f32), R) }

Eager adds f32 in cascades, whose error hardly grows with the length. Running sums of n numbers in k
lanes are off by sqrt(n / k) units in the last place: for 10^6 numbers, 5 times eager's error.
Columns have one lane each: means of 24 columns of 256 numbers about 1000 were 3 times as far off as
eager's. In a product the errors of all factors add up. In cache f64 takes 5 to 30% longer, a cost
that short sums avoid; if a loop does nothing else, the CPU's loops sum parts of it in f32 again.
"""

from __future__ import annotations

from lenz.context import Context
from lenz.ir.graph import Graph, Node, Reduction, buffers_of
from lenz.machines import runs_programs
from lenz.opt.each import each
from lenz.opt.split_reduce import in_f64, runs_along
from lenz.sym import product

LONGEST_ROW = 4096  # longest sum that stays in f32: 64 numbers per lane
LONGEST_COLUMN = LONGEST_PRODUCT = 64


def wide_sums(g: Graph, cx: Context) -> Graph:
    """Accumulate long reductions in f64; needs complete bodies that are not split yet."""
    layouts = {name: b.type.layout for name, b in buffers_of(g).items()}

    def is_long(n: Reduction) -> bool:
        if runs_programs(n.out.type.device):
            return False  # the lanes of a tile are added in a tree, and there are few tiles
        length = g.env.hint(product(a.extent for a in n.raxes))
        if n.kind == "prod":
            return length > LONGEST_PRODUCT
        # Which of two layouts a kernel follows depends on the loops that it is fused with.
        _, by_columns = runs_along(n, layouts)
        return length > (LONGEST_COLUMN if by_columns else LONGEST_ROW)

    def wide(n: Node) -> Node:
        if isinstance(n, Reduction) and is_long(n) and cx.allow("wide_sums", n.out.name):
            return in_f64(n)
        return n

    return each(g, wide)
