"""Split long reductions with few results in two, so that all cores take part.

    %s = reduce sum (| r: N) { f(r) }
    ==>  %p = reduce sum (c: C | r: K) { masked(c*K + r < N, f(c*K + r), 0) }     K = ceil(N / C)
         %s = reduce sum (| c: C) { load(%p, [c]) }

C depends only on sizes, not on the number of threads, so results are the same on any machine.
Partial results keep the accumulator's type. Those in f32 are added in f64: the last sums are the
largest, and their roundings are most of the error.

    %s = reduce argmax (| r: N) { f(r) }
    ==>  %p = reduce max (c: C | r: K) { f(c*K + r) };  %q = reduce argmax (c: C | r: K) { .. }
         %b = reduce max (| c: C) { load(%p, [c]) }
         %s = reduce min (| c: C) { where(eq(load(%p, [c]), load(%b, [])), c*K + load(%q, [c]), N) }
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from lenz import ops
from lenz.context import Context
from lenz.ir.axes import by_stride, merged, taken_apart
from lenz.ir.dtype import F32, F64, I64
from lenz.ir.expr import Expr, finished, index, load, loads_of, masked, nodes_of, ref, reindex
from lenz.ir.graph import Graph, Node, ReduceKind, Reduction, acc_dtype, buffers_of
from lenz.ir.kernel import digits
from lenz.ir.op import INDEX
from lenz.ir.tensor import Axes, Buffer, Layout, TensorType, axis, contiguous
from lenz.machines import capabilities_of, runs_programs
from lenz.opt.dedup import dedup
from lenz.opt.each import each
from lenz.records import dataclass, replace
from lenz.sym import ONE, Int, Sym, SymEnv, Var, ceildiv, flatten, power_of_two, product, step_of
from lenz.target import Capabilities

# Below this many elements one core finishes before another wakes (findings-cpu.md section 5).
MIN_ELEMENTS = 65536
CHUNK = 16384
MAX_CHUNKS = 32
# Rows of a few columns are added as longer ones: 250,000 rows of 4 f32 take 0.63 ms one by one, and
# 0.26 by 16. Rows of 10 gain nothing.
FEW, COLUMNS = 8, 64
NEAR = 4  # results closer than this lie side by side: their rows share lines of the cache


def split_reduce(g: Graph, cx: Context) -> Graph:
    """Split every reduction with too few results to occupy the cores."""
    layouts = {name: b.type.layout for name, b in buffers_of(g).items()}
    rows = {(_count(n.axes), _count(n.raxes)) for n in g.nodes
            if isinstance(n, Reduction) and runs_programs(n.out.type.device)
            and not is_outer(n, layouts)}  # fmt: skip

    def parts(n: Node) -> Node | Sequence[Node]:
        if not isinstance(n, Reduction):
            return n
        whole, n = n, n if runs_programs(n.out.type.device) else _long_rows(n, layouts)
        chunks = chunk_count(n, layouts, g.env)
        if chunks > 1 and cx.allow("split_reduce", n.out.name):
            beside = _beside_rows(n) if (_count(n.raxes), _count(n.axes)) in rows else None
            n = n if beside else _in_memory_order(n, layouts)
            return _split(whole, n, beside or _cut(n, chunks, g.env))
        return whole

    made = each(g, parts)
    # The parts of an extremum are also those of its place.
    return dedup(made, cx) if len(made.nodes) > len(g.nodes) else made


def _count(axes: Axes) -> Sym:
    return product(a.extent for a in axes)


def _beside_rows(n: Reduction) -> _Cut | None:
    """Parts of a sum over the columns of a matrix whose rows are reduced too.

    One kernel can do both, row by row (`schedule/nest.py`, crossing). A part is then a program:
    there must be enough of them, but fewer parts write less. The gradient of a layer norm of 12608
    x 768, a residual and one more sum take 60 us with 788 parts, 70 with 394, and 75 with 1576.
    """
    count, width, (*outer, last) = _count(n.raxes), _count(n.axes).hi, n.raxes
    can = capabilities_of(n.out.type.device)
    if not isinstance(count, Int) or not width or width > can.chunk:
        return None
    most_rows = min(max(can.least_rows, can.least_row // width), count.value // can.enough)
    # 64 images of 197 rows are cut as 12608 rows, and 6272 of 16 as 100352.
    best, most = None, 0
    for axes, split, length in ((outer, (last,), last.extent), ((), n.raxes, count)):
        fit = [m for m in range(4, most_rows + 1) if length // m * m is length]
        many = [m for m in fit if 2 * count.value >= can.programs * m]
        m = max(many, default=min(fit, default=0))
        if m > 2 * most:
            c, r = axis("c", length // m), axis("rc", Int(m))
            position = c.var * m + r.var
            best, most = _Cut((*axes, c), (r,), digits(split, position), position, length), m
    return best


def chunk_count(n: Reduction, layouts: Mapping[str, Layout], env: SymEnv) -> int:
    """The number of parts of a split reduction."""
    results, length = env.hint(_count(n.axes)), env.hint(_count(n.raxes))
    outer, device = is_outer(n, layouts), n.out.type.device
    if runs_programs(device):
        return _gpu_chunks(capabilities_of(device), max(results, 1), length, outer)
    are_few = results < 8 or (results < 512 and length >= 1024 and outer)
    if results * length < MIN_ELEMENTS or not are_few:
        return 1
    return min(MAX_CHUNKS, max(2, results * length // CHUNK))


def _gpu_chunks(can: Capabilities, results: int, length: int, outer: bool) -> int:
    """Parts that give every GPU multiprocessor several programs, none of them too short."""
    programs = -(-results // can.panel) if outer else results
    shortest = can.least_rows if outer else can.least_row
    # One program holds it all, so loops that read the results may share its kernel.
    is_held = length <= (can.held // 2 // min(results, can.panel) if outer else can.held)
    # Short columns finish in programs of 8 columns each before a second kernel could start.
    if is_held or programs >= can.enough or (outer and results * length <= can.launch):
        return 1
    return max(1, min(can.programs // programs, length // shortest))


def is_outer(n: Reduction, layouts: Mapping[str, Layout]) -> bool:
    """True if results lie side by side in memory and the reduction runs over rows of them."""
    flats = [layouts[e.attrs[0]].at(e.attrs[1]) for e in loads_of(n.body)]
    # Next to a matrix, a vector that is shared by all results, or all rows, does not count.
    matrices = [s for s in flats if _moves(s, n.axes) and _moves(s, n.raxes)] or flats
    by_rows, by_columns = (_nearest(matrices, axes) for axes in (n.raxes, n.axes))
    return by_columns < min(by_rows, NEAR)


def _nearest(matrices: Sequence[Sym], axes: Axes) -> float:
    """The fewest elements from one place to the next along an axis."""
    moves = [step_of(s, a.var) for s in matrices for a in axes if a.extent is not ONE]
    return min((abs(m.value) for m in moves if isinstance(m, Int) and m.value), default=math.inf)


def _moves(flat: Sym, axes: Axes) -> bool:
    return any(a.var in flat.free_vars and a.extent is not ONE for a in axes)


@dataclass(frozen=True, slots=True)
class _Cut:
    """Axes that number the parts, axes of one part, and its position on the split axes.

    `position` runs along the split axes, which have `length` elements.
    """

    parts: Axes
    inside: Axes
    at: dict[Var, Sym]
    position: Sym
    length: Sym


def _long_rows(n: Reduction, layouts: Mapping[str, Layout]) -> Reduction:
    """Rows of a few columns, several of them as one that fills vectors, on CPUs.

    reduce sum (p: 4 | r: N) { load(%x, [r, p]) }
    ==>  reduce sum (rq: 16, p: 4 | rw: N / 16) { load(%x, [16*rw + rq, p]) }
    """
    columns = [a for a in n.axes if a.extent is not ONE]
    # The parts of an extremum are also those of its place, a number of a row.
    if n.kind not in ("sum", "prod") or not n.raxes or len(columns) != 1:
        return n
    (p,), r = columns, n.raxes[-1]
    steps, width, rows = {p.var: ONE, r.var: p.extent}, p.extent, r.extent
    if not isinstance(width, Int) or not isinstance(rows, Int) or not 0 < width.value <= FEW:
        return n
    flats = [layouts[e.attrs[0]].at(e.attrs[1]) for e in loads_of(n.body)]
    for s in (*flats, *(e.attrs[0] for e in nodes_of(n.body) if e.op is INDEX)):
        found = {v: step_of(s, v) for v in steps if v in s.free_vars}
        if found and steps != found:
            return n
    k = next(k for k in range(COLUMNS // width.value, 0, -1) if rows.value % k == 0)
    if k == 1:
        return n
    q, few = axis("rq", Int(k)), axis("rw", Int(rows.value // k))
    d, body = n.axes.index(p), reindex(n.body, {r.var: few.var * k + q.var})
    return replace(n, axes=(*n.axes[:d], q, *n.axes[d:]), raxes=(*n.raxes[:-1], few), body=body)


def _in_memory_order(n: Reduction, layouts: Mapping[str, Layout]) -> Reduction:
    """The reduction over axes that walk through memory, as few as possible: the first is cut.

    Sums of a transposed 4096 x 64 f32 that is cut into parts of 2 columns take 0.15 ms, of 64 rows
    0.03. GPUs keep axes that are in this order: their kernels know their lengths.
    """
    positions = [e.attrs[0] for e in nodes_of(n.body) if e.op is INDEX]
    loads = [layouts[e.attrs[0]].at(e.attrs[1]) for e in loads_of(n.body)]
    raxes = n.raxes
    if runs_programs(n.out.type.device) and by_stride(raxes, loads) == raxes:
        return n
    if n.kind not in ("argmax", "argmin"):  # they give a position in the order of the axes
        if found := taken_apart(raxes, [*loads, *positions]):
            whole, parts, at = found
            raxes = tuple(x for a in raxes for x in (parts if a is whole else (a,)))
            return _in_memory_order(replace(n, raxes=raxes, body=reindex(n.body, at)), layouts)
        raxes = by_stride(raxes, loads)
    raxes, at = merged(raxes, "r", [*loads, *positions])
    return replace(n, raxes=raxes, body=reindex(n.body, at))


def _split(whole: Reduction, n: Reduction, x: _Cut) -> tuple[Reduction, ...]:
    """Reductions of the parts of `n`, and of their results to those of `whole`."""
    if all(a.extent is ONE for a in x.parts):
        return (whole,)
    body = reindex(n.body, x.at)
    if x.length is not product(a.extent for a in x.inside[:1]) * x.parts[-1].extent:
        inside = index(x.position, I64) < index(x.length, I64)
        body = masked(inside, body, ops.neutral(n.kind, body.dtype))
    if n.kind in ("argmax", "argmin"):
        return _place(n, x, body)
    first, again = partial_result(n, "part", (*x.parts, *n.axes), x.inside, n.kind, body)
    over = (*x.parts, *(a for a in n.axes if a not in whole.axes))
    return first, _in_f64(replace(whole, raxes=over, body=again))


def partial_result(
    n: Reduction, name: str, axes: Axes, raxes: Axes, kind: ReduceKind, body: Expr
) -> tuple[Reduction, Expr]:
    """An intermediate reduction of `n`, and the load of its result."""
    to = acc_dtype(kind, body.dtype)
    type = TensorType(to, n.out.type.device, contiguous([a.extent for a in axes]))
    out = Buffer(f"{n.out.name}.{name}", type, n.out.origin)
    made = Reduction(out, axes, raxes, kind, body, ref("acc", to))
    return made, load(out.name, [a.var for a in axes], to)


def _place(n: Reduction, x: _Cut, body: Expr) -> tuple[Reduction, ...]:
    """The place in the first part whose best value is the best of all; NaN is the best."""
    kind: ReduceKind = "max" if n.kind == "argmax" else "min"
    axes = (*x.parts, *n.axes)
    first, own = partial_result(n, "part", axes, x.inside, kind, body)
    second, place = partial_result(n, "place", axes, x.inside, n.kind, body)
    third, best = partial_result(n, "best", n.axes, x.parts, kind, own)
    same = ops.eq(own, best) | (ops.ne(own, own) & ops.ne(best, best))
    outer = flatten([a.var for a in x.parts[:-1]], [a.extent for a in x.parts[:-1]])
    start = (outer * x.length + x.position - x.inside[0].var) * _count(x.inside[1:])
    at = ops.where(same, index(start, I64) + place, index(_count(n.raxes), I64))
    return first, second, third, replace(n, kind="min", raxes=x.parts, body=at)


def _in_f64(n: Reduction) -> Reduction:
    """The reduction, accumulated in f64 if it adds or multiplies f32."""
    if n.kind not in ("sum", "prod") or n.body.dtype is not F32:
        return n
    narrow = ops.cast(ref("acc", F64), F32)
    return replace(n, body=ops.cast(n.body, F64), finish=finished(n.finish, narrow))


def _cut(n: Reduction, chunks: int, env: SymEnv) -> _Cut:
    """Number the parts by outer axes and by blocks of the next one: no index needs a division."""
    raxes, k, can = n.raxes, 0, capabilities_of(n.out.type.device)
    while k + 1 < len(raxes) and env.hint(raxes[k].extent) < chunks:
        chunks = -(-chunks // max(env.hint(raxes[k].extent), 1))
        k += 1
    outer = raxes[k]
    chunk = ceildiv(outer.extent, Int(chunks))
    if can.units and isinstance(chunk, Int) and isinstance(outer.extent, Int):
        count, least = outer.extent.value, chunk.value
        even = [m for m in range(least, 2 * least) if count % m == 0]
        if product(a.extent for a in raxes[k + 1 :]) is ONE:
            # Parts without a remainder share loops with the producers and readers of the same
            # elements.
            unit = can.least_rows
            rows = [m for m in even if (m % unit == 0 and m < can.least_row) or m == least <= unit]
            chunk = Int(rows[0]) if rows else _whole_tiles(least, can)
        elif even:
            chunk = Int(even[0])
    # With an unknown size the last parts may be empty, but the index of a part stays bounded.
    known = can.units and isinstance(outer.extent, Int)
    c = axis("c", ceildiv(outer.extent, chunk) if known else Int(chunks))
    r = axis("rc", chunk)
    position = c.var * chunk + r.var
    parts, inside = (*raxes[:k], c), (r, *raxes[k + 1 :])
    return _Cut(parts, inside, {outer.var: position}, position, outer.extent)


def _whole_tiles(chunk: int, can: Capabilities) -> Int:
    """A part of about `chunk` elements that fills tiles of lanes."""
    unit = can.least_rows if chunk < can.least_row else min(can.chunk, power_of_two(chunk))
    return Int(-(-chunk // unit) * unit)
