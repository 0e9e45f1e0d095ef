"""Graph -> Graph passes, one per file. Their order is defined here and nowhere else.

Each pass keeps the meaning of the graph, and any pass may be skipped.
"""

from __future__ import annotations

from collections.abc import Callable

from lenz.context import Context
from lenz.ir.graph import Graph
from lenz.opt.dedup import dedup
from lenz.opt.draws import draws
from lenz.opt.drop import drop
from lenz.opt.equal_terms import equal_terms
from lenz.opt.in_range import in_range
from lenz.opt.inline import inline
from lenz.opt.narrow import narrow
from lenz.opt.online import online
from lenz.opt.pad_matmul import pad_matmul
from lenz.opt.pad_rows import pad_rows
from lenz.opt.precision import precision
from lenz.opt.reinterpret import reinterpret
from lenz.opt.relayout import relayout
from lenz.opt.rotate import rotate
from lenz.opt.simplify import simplify
from lenz.opt.split_reduce import split_reduce
from lenz.opt.unloop import unloop
from lenz.opt.unmask import unmask
from lenz.opt.views import views
from lenz.opt.write_parts import write_parts

Pass = Callable[[Graph, Context], Graph]

IN_ORDER = (
    reinterpret, pad_matmul, views, dedup, in_range, unloop, relayout, inline, precision, rotate,
    simplify, equal_terms, pad_rows, online, write_parts, split_reduce, unmask, narrow,
    drop, draws,
)  # fmt: skip
PASSES: dict[str, Pass] = {run.__name__: run for run in IN_ORDER}
