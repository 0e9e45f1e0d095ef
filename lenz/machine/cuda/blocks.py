"""The loop form of GPU kernels: a grid of programs that hold tiles of lanes.

    for p0b in ceil(P / X) : grid {
      for p0 in X : lane {
        for r0b in ceil(R / Y) : seq { for r0 in Y : lane { v0 = reduce .. over r0b, r0 } }
        for r0b in ceil(R / Y) : seq { for r0 in Y : lane { store .. } }
      }
    }

All forms are this one with other widths: a row that fits in registers has no loop over r0b, a sum
over columns has a wide X, elements have no R. A width is a power of two. A row that is held whole
is read once, because its loops run over the same lanes (findings-gpu.md, point 1). Short rows whose
elements are not neighbours in memory are one line of lanes (`cut_lanes`).
"""

from __future__ import annotations

import itertools

from lenz.ir import kernel
from lenz.ir.expr import cost_of, loads_of, vars_of
from lenz.ir.tensor import Axes, Axis
from lenz.machine.cuda.capabilities import CAN
from lenz.machine.cuda.flat import flattened
from lenz.machine.cuda.shape import Shape
from lenz.machine.cuda.whole import in_pieces, row_piece, untested
from lenz.machine.cuda.widths import MOST_AXES, area_of, by_parts, cut_lanes, length_of, widths_in
from lenz.machines import Form
from lenz.records import dataclass, replace
from lenz.schedule.accesses import score
from lenz.schedule.cut import all_moved, cut_all, nested, over_parts, undecided
from lenz.schedule.legal import Group, in_parts, scanned
from lenz.schedule.nest import Domain, Nest, is_near
from lenz.schedule.result import Update
from lenz.schedule.stages import Stages, Statement
from lenz.sym import ONE, ZERO, Int, Sym, SymEnv, Var, product, step_of, substitute
from lenz.sym.divide import power_of_two

# Rows of a tile of columns if many programs read halves.
SHORT = 8
ONE_WARP = 32  # elements per thread of tiles that one warp reduces
FEW = 4 * CAN.units  # programs
BRIEF, LONG = 32, 96  # costs of the formulas of a group


@dataclass(frozen=True, slots=True)
class Tile:
    """The result of a rule: lanes per axis, elements per thread, stages (0: those of the shape).

    The lanes of a tile of several axes may be those of one line.
    """

    kind: kernel.KernelKind
    widths: dict[Axis, int]
    each: int
    stages: int = 0
    in_line: bool = False


def tiled(g: Group, s: Stages, env: SymEnv, shape: Shape) -> Form:
    """The form of the first rule that applies to a group."""
    made = next(t for rule in RULES if (t := rule(g, s, env, shape)) is not None)
    if isinstance(made, Form):
        return made
    grid, inside = _loops(g.domain, _part(g), s, made, env)
    apart = {"reduction": untested, "pointwise": in_pieces}.get(made.kind)
    at = [(e.attrs[1][0], e.args, e.dtype) for e in loads_of(*(n.body for n in g.nests))]
    grid = by_parts(grid, at, g.domain.axes, made.widths, env)
    body, area = apart(inside) if apart else inside, area_of(made.widths)
    warps = _warps(area, made.each, shape)
    if body != inside and made.kind == "reduction" and not shape.thread:
        # Online softmax of 8192 x 50257 bf16 in parts of 2048: 270 us with 2 warps, 311 with 4.
        warps = max(1, min(warps, area // 1024))
    if made.kind == "outer_reduction" and made.each < ONE_WARP and not shape.thread:
        warps = _column_warps(warps, g, made.widths, env)
    tile = kernel.TileConfig(warps=warps, stages=made.stages or shape.stages)
    return Form(made.kind, nested(grid, "grid", body), tile)


def _scans(g: Group, s: Stages, env: SymEnv, shape: Shape) -> Tile | None:
    """Whole rows that are scanned or sorted; lanes of P fill the rest of the tile.

    Half as many warps scan 4096 rows of 16384 f32 in 133 us instead of 150. A row in one warp is
    sorted without shared memory: 8192 rows of 1024 f32 take 262 us with one warp per row and 542
    with 4. Longer rows in one warp would be faster too, but they compile slowly and spill.
    """
    sorts = any(n.sorts for n in g.nests)
    if not sorts and not any(n.scans for n in g.nests):
        return None
    if not g.domain.raxes:
        widths = widths_in(g.domain.axes, shape.tile, env)
    else:
        (r,), columns = g.domain.raxes, s.in_columns
        row = max(2, power_of_two(length_of(r, env)))  # an axis of one lane would be a loop
        room, most = shape.panel if columns else shape.rows // row, min(shape.row, scanned(g))
        if sorts:
            most = shape.sort
            if 512 <= row <= 1024 and not columns and not shape.thread:
                room = 1024 // row
        if columns and row <= 32 and shape.is_usual and not sorts:
            # Each thread has columns of its own: 65536 x 8 x 8 bf16 take 7.6 us, in panels 42.
            widths = widths_in(g.domain.axes, shape.tile // row, env)
            return Tile("scan", widths | {r: row}, ONE_WARP)
        widths = {r: row} | widths_in(g.domain.axes[-1:], min(room, most // row), env)
    area = area_of(widths)
    if not sorts:
        return Tile("scan", widths, max(area // 256, 16))
    return Tile("sort", widths, 32 if area == 1024 and max(widths.values()) >= 512 else 8)


def _rows_and_columns(g: Group, s: Stages, env: SymEnv, shape: Shape) -> Tile | None:
    """Programs that walk over many rows and also sum their columns.

    Many programs have one warp and one row at a time, few more warps: the gradient of a layer norm
    of 12608 x 384 in 788 programs takes 17 us with one and 20 with two; of 8192 x 512 in 512
    programs 17 and 13; of 4112 x 1024 in 514 programs 15, with four 12.5.
    """
    if not (part := _part(g)):
        return None
    widths = {a: power_of_two(length_of(a, env)) for a in g.domain.raxes}
    grid, area = [a.extent for a in g.domain.axes if a not in part], area_of(widths)
    room, each = shape.rows, 16
    if not shape.thread and area <= 2048 and env.hint(product(grid)) < FEW:
        each = min(32, 16384 // area)
    elif not shape.thread and area <= 1024:
        room, each = 1024, 32
    if len(loads_of(*(n.body for n in g.nests))) > 12:  # 32 elements per thread would be spilled
        each = min(each, 16)
    return Tile("reduction", widths | widths_in(part, room // area, env), each)


def _transposed(g: Group, s: Stages, env: SymEnv, shape: Shape) -> Tile | None:
    """Elements, if accesses walk along two axes."""
    if g.domain.raxes or (across := _across(g.domain.axes, s, env)) is None:
        return None
    widths = {a: power_of_two(env.hint(a.extent)) for a in across}
    # 512 x 512 f32 take 1.66 us in tiles of 32 x 32, 1.92 in tiles of 64 x 64. 2^20 x 8 bf16 take
    # 7.4 us in tiles of 128 x 8, and 37 without.
    edge = 32 if shape.is_usual and env.hint(g.domain.rows) <= 1 << 20 else shape.edge
    edge = max(edge, shape.tile // min(widths.values()))
    return Tile("transpose", {a: min(edge, width) for a, width in widths.items()}, 16)


def _flat(g: Group, s: Stages, env: SymEnv, shape: Shape) -> Form | None:
    """Elements, without a division of their number into rows."""
    if g.domain.raxes or not (flat := flattened(g, s, env, shape.tile)):
        return None
    each = shape.thread or _each(g, 16 if len(g.domain.axes) > 1 else 8)
    warps = max(1, shape.tile // (32 * each))
    # 48 registers hold 16 elements of short formulas. The gradient of cross-entropy for 8192 x
    # 50257 bf16 takes 413 us with 48, 447 with 64, and 458 with 72, the assembler's choice.
    tile = kernel.TileConfig(warps=warps, registers=3 * each if each > 8 else 0)
    return Form("pointwise", flat, tile)


def _each(g: Group, most: int) -> int:
    """Elements per thread: fewer of long formulas, whose values would be spilled.

    4095 x 4095 f32 of atan2 take 160 us with 16 elements in 48 registers and 75 with 8; of digamma
    838 us, 151 with 8, and 122 with 4.
    """
    cost = cost_of(*(n.body for n in g.nests))
    return 4 if cost > LONG else min(most, 8) if cost > BRIEF else most


def _elements(g: Group, s: Stages, env: SymEnv, shape: Shape) -> Tile | None:
    """All other elements."""
    axes = g.domain.axes
    if g.domain.raxes:
        return None
    # No axis of an access is contiguous. Rotary embeddings of pairs, 4 x 2048 x 32 x 128 bf16, take
    # 56 us in a line, 284 in tiles; with stores of pairs 40 in lines of 512, 49 in lines of 1024.
    known = axes and isinstance(axes[-1].extent, Int)
    steps = [[step_of(x, a.var) for a in axes] for x in s.offsets if known]
    in_line = any(ONE not in each and each[-1] is not ZERO for each in steps)
    if shape.is_usual and (total := env.hint(g.domain.rows)) <= 1 << 19:
        # Latency decides: silu of 22528 bf16 takes 1.36 us in tiles of 256 with 8 warps, 1.51 with
        # the usual tile; 180224 take 1.52 in tiles of 512, 1.69 with the usual one. 2^21 would take
        # twice as long in tiles of 256.
        tile = 256 if total <= 1 << 15 and isinstance(g.domain.rows, Int) else 512
        return Tile("pointwise", widths_in(axes, tile, env), tile // 256, in_line=in_line)
    places = [x for n in g.nests for e in loads_of(n.body) for x in loads_of(*e.args)]
    if any(a.var in vars_of(x) for a in axes[-1:] for x in places):
        # Lanes read anywhere in a row. 64 channels of 16 images at the points of a grid take 31 us
        # by rows, 74 in tiles of 4 rows, which do not fit in the cache together. Short rows share a
        # program: gathers of 3 of 3 and 300 of 300 take 6 and 64 us so, in tiles 8 and 107.
        is_short = length_of(axes[-1], env) <= shape.tile
        widths = widths_in(axes, 512, env) if is_short else widths_in(axes[-1:], shape.tile, env)
        return Tile("pointwise", widths, max(1, area_of(widths) // 128), in_line=True)
    if axes and (piece := row_piece([n.body for n in g.nests], axes[-1])) >= 128:
        widths = widths_in(axes[-1:], min(piece, shape.tile), env)
        widths |= widths_in(axes[:-1], shape.tile // area_of(widths), env)
        return Tile("pointwise", widths, 8)
    # Odd rows are loaded and stored element by element: twice the tile is 18% faster.
    twice = any(length_of(a, env) > 2 * shape.tile and _odd(a, env) for a in axes[-1:])
    # The elements of a thread share the work of positions, most of it if there is one load: every
    # third of 14M bf16 takes 7.6 us with eight elements per thread, and 8.5 with four.
    half = in_line and len(loads_of(*(n.body for n in g.nests))) > 1
    widths = widths_in(axes, shape.tile << twice >> half, env)
    return Tile("pointwise", widths, _each(g, 8), in_line=in_line)


def _columns(g: Group, s: Stages, env: SymEnv, shape: Shape) -> Tile | None:
    """Reductions whose elements of P are contiguous."""
    if not s.in_columns:
        return None
    d, again = g.domain, _reads_again(s)
    length, programs = env.hint(d.length), env.hint(d.rows) // shape.panel
    many = length <= 128 and programs >= (64 if length <= 32 else CAN.programs)
    whole = {a: power_of_two(length_of(a, env)) for a in d.raxes}
    # Variances of 512 x 128 x 196 bf16, two sums, take 10 us so, in panels 26; x - amax 28 and 20.
    sums = sum(isinstance(x, kernel.Reduce) for loop in s.loops for x in loop)
    most = 4 if programs < CAN.units else 8 if sums == 1 else 16
    if shape.is_usual and len(whole) == 1 and area_of(whole) <= SHORT * (most if again else 1):
        # Each thread has columns of its own. 65536 x 3 x 16 bf16 less their greatest of 3 take 4.9
        # us, in panels 42; softmax of 4 x 16 x 2^19 39 and 167, variances of 33 x 2^20 24 and 93.
        tile = shape.tile << (area_of(whole) > 4 * SHORT)
        widths = widths_in(d.axes, tile // area_of(whole), env) | whole
        return Tile("outer_reduction", widths, tile // 32)
    if many and shape.is_usual and not again and not _odd(d.axes[-1], env, 4):
        # Threads of one warp add up elements of their own. The columns of 64 x 65536 f32 take 4.8
        # us so, in tiles of 64 x 64 with 8 warps 6.0; of 8 x 2^20, with their places, 14 and 48; of
        # 65536 x 32 x 8 bf16 13 and 42. 512 rows take up to 1.1 times as long, odd columns 1.4 to
        # 1.7 times, 64 rows of too few programs 1.2 (gradients of batch norms, channels last).
        columns = widths_in(d.axes if length <= 64 else d.axes[-1:], shape.panel, env)
        return Tile("outer_reduction", columns | widths_in(d.raxes, SHORT, env), ONE_WARP)
    return Tile("outer_reduction", *_column_tile(g, s, env, shape))


def _rows(g: Group, s: Stages, env: SymEnv, shape: Shape) -> Tile:
    """All other reductions: of rows."""
    raxes, stages = g.domain.raxes, shape.stages
    arg = any(n.finds_place for n in g.nests)
    if arg and shape.is_usual and len(raxes) == 1 and length_of(raxes[0], env) > 16384:
        # Each value carries a position. 4096 rows of 32768 bf16 take 77 us in a loop of tiles with
        # prefetched loads, and 98 us if held.
        shape, stages = replace(shape, row=16384, chunk=4096), 3
    widths = _row_widths(g, s, env, shape)
    room, each = _row_room(g, s, widths, env, shape)
    widths |= widths_in(g.domain.axes, room // area_of(widths), env)
    return Tile("reduction", widths, each, stages)


def scattered(n: Nest, env: SymEnv, shape: Shape) -> Form:
    """All updates of a scatter at once; updates of the same element are combined in memory."""
    assert isinstance(n.result, Update)
    offsets = [n.offset, *[e.attrs[1][0] for e in loads_of(*n.exprs)]]
    p, r = (score(offsets, x[-1].var) if x else 0 for x in (n.axes, n.raxes))
    # Lanes are contiguous: those of P, unless the scatter is along the last dimension.
    axes = (*n.axes, *n.raxes) if n.axes and r > p else (*n.raxes, *n.axes)
    # 65536 rows of 4096 f32 are added to 8192 in 530 us, in tiles of 1024 in 662.
    widths = widths_in(axes, shape.tile // 2, env)
    # Sums of 2^24 f32 within rows of 16 take 104 us in a line, 219 in tiles of 64 rows; within rows
    # of 300, 177 and 205.
    in_line = any(a.var in vars_of(x) for a in axes[-1:] for x in n.result.bound)
    grid, lanes, at = cut_lanes(axes, widths, in_line, env)
    grid = by_parts(grid, [(n.offset, n.result.bound, n.body.dtype)], axes, widths, env)
    store = all_moved([kernel.Store(n.target, n.offset, n.body, n.result.bound, n.result.mode)], at)
    body = nested(grid, "grid", nested(lanes, "lane", store))
    return Form("scatter", body, kernel.TileConfig(warps=_warps(area_of(widths), 8, shape)))


def _scan_parts(g: Group, s: Stages, env: SymEnv, shape: Shape) -> Form | None:
    """Parts of rows to scan. A program continues from the end of the previous part.

    The parts are the outermost loop: a program waits only for lower program numbers, which start
    earlier. All other rows come between two parts of one row, so the wait is short.
    """
    if not in_parts(g):
        return None
    axes, (r,) = g.domain.axes, g.domain.raxes
    scans = [kernel.words(x.value.dtype) for x in s.loops[0] if isinstance(x, kernel.Scan)]
    wide, group = (sum(scans) - 1).bit_length(), shape.group
    part, total = shape.part >> wide, env.hint(g.domain.rows) * env.hint(g.domain.length)
    while part > 2048 and total < FEW * part:  # (10, 131072): 8.1 us, in parts of 8192 9.1 us
        part //= 2
    most = min(part, max(2, power_of_two(length_of(r, env))))
    beside = part // most
    if s.in_columns:
        size = min((e.dtype.bytes for x in s.loops[0] for e in loads_of(x.value)), default=4)
        beside = max(beside, 8 * shape.narrow // size)
    widths = widths_in(axes[-1:], min(beside, 32), env)
    if widths:
        # Each row has its own window. 2^16 rows of 1024 bf16, down their columns, take 138 us; with
        # 16 bytes instead of 64, and groups of 64, 203 us.
        group = min(group, 16)
    widths[r] = max(2, min(most, part // area_of(widths)))  # an axis of one lane would be a loop
    at: dict[Var, Sym] = {}
    grid, lanes = cut_all(axes, widths, at)
    (block,), (lane,) = cut_all([r], widths, at)
    row = substitute(kernel.position(axes), at)
    work: Sym = ZERO
    body: list[Statement] = []
    for x in s.loops[0]:
        if isinstance(x, kernel.Scan):
            each = kernel.words(x.value.dtype) * kernel.slots(block.extent, group)
            back = kernel.LookBack(block.var, "", work + row * each, group)
            x, work = replace(x, over=lane.var, back=back), work + g.domain.rows * each
        body.append(x)
    inside = nested([*lanes, lane], "lane", all_moved(body, at))
    area = area_of(widths)
    # 64 registers of 32 bits per thread hold the values of its elements, or 128 if they have 64
    # bits: 2^26 i64 take 290 us with 2 warps, 326 us with 4.
    warps = max(1 if area <= 256 else 2 if scans == [2] else 4, area // 2048)
    warps = _warps(area, 16, shape) if shape.thread else warps
    tile = kernel.TileConfig(warps=warps, stages=shape.stages)
    return Form("split_scan", nested([block, *grid], "grid", inside), tile, work=work)


def _warps(area: int, each: int, shape: Shape) -> int:
    """Warps of a program that holds a tile of this many elements, `each` per thread."""
    least = 1 if area <= 256 or shape.thread or each >= 32 else 4
    return max(least, min(shape.warps, area // (32 * (shape.thread or each))))


def _row_widths(g: Group, s: Stages, env: SymEnv, shape: Shape) -> dict[Axis, int]:
    """Lanes per axis of R: the whole row if it fits in registers, else a part of it."""
    raxes = g.domain.raxes
    whole = {a: power_of_two(length_of(a, env)) for a in raxes if a.extent is not ONE}
    pays = all(a.extent.hi is not None for a in raxes) or _reads_again(s)
    if pays and area_of(whole) <= shape.row and len(raxes) < MOST_AXES:
        return whole
    return widths_in(raxes, shape.chunk, env, shape.idle)


def _row_room(
    g: Group, s: Stages, widths: dict[Axis, int], env: SymEnv, shape: Shape
) -> tuple[int, int]:
    """Elements per tile of rows and per thread, fitted to benchmarks/results/fit_gpu.json.

    Short rows that are stored run best in one warp (87381 x 768 bf16: 68 us, with 4 warps and two
    rows 81). Long rows of halves that are only read, or that fill a program, have 64 elements per
    thread (amax and sum of 7168 rows: 451 us, with 16: 482). All lanes should be busy in the last
    sweep over a row: 22369 x 3000 takes 85 us with 8 warps, 4 of which idle in one of two sweeps,
    and 70 us with 4. Few elements run best in many programs (RMS norm of 512 x 64 bf16: 1.61 us in
    tiles of 256, 1.76 in tiles of 1024).
    """
    area, raxes = area_of(widths), g.domain.raxes
    is_held = all(length_of(r, env) <= widths.get(r, 1) for r in raxes)
    rows = env.hint(g.domain.rows)
    if shape.is_usual and rows * area <= 1 << 18:
        return max(area, 256), 16
    if shape.thread or not is_held or rows < FEW // 4:
        return shape.rows, 16
    stores = any(isinstance(x, kernel.Store) for loop in s.loops for x in loop)
    if area <= 1024:
        return (min(shape.rows, 1024), 32) if stores else (shape.rows, 16)
    over = {r.var for r in raxes}
    loads = [e for loop in s.loops for x in loop for e in loads_of(x.value)]
    read = [e.dtype.bytes for e in loads if over & {v for i in e.attrs[1] for v in i.free_vars}]
    size = max(read, default=4)
    if size <= 2 and area >= (16384 if stores else 8192):
        return shape.rows, 64
    n, each, threads = length_of(raxes[-1], env), 16, min(area // 16, 512)
    while each < 64:
        sweep = threads * 16 // size
        if sweep > 2 * n or -(-n // sweep) * sweep <= n + n // 8:
            break
        each, threads = 2 * area // threads, threads // 2
    return shape.rows, each


def _column_tile(g: Group, s: Stages, env: SymEnv, shape: Shape) -> tuple[dict[Axis, int], int]:
    """Lanes of panels of columns: short tiles in loops, or all rows if they are read to be stored.

    Also returns the elements per thread.

    Few columns are cut into narrow panels, because only more programs can read them faster. Rows
    that several loops reduce and none stores come from the cache the second time: the statistics of
    batches of 224 rows in channels last take 43 us in short tiles and 88 us held whole.
    """
    axes, raxes = g.domain.axes, g.domain.raxes
    few = env.hint(g.domain.rows) < 64 * shape.panel
    panel, budget = (shape.narrow, shape.chunk) if few else (shape.panel, shape.rows)
    if shape.is_usual and not few:
        # 4096 x 256 f32, twice: 8.5 us, in 64 panels 10.6. 1335 x 50257 bf16, whose rows are
        # misaligned and loaded element by element: 50 us, in tiles of 32 rows 67.
        panel >>= env.hint(g.domain.rows) < FEW // 4 * panel
        budget <<= _odd(axes[-1], env)
    widths = widths_in(axes[-1:], panel, env)
    whole = {a: power_of_two(length_of(a, env)) for a in raxes}
    stores = any(isinstance(x, kernel.Store) for loop in s.loops for x in loop)
    again = _reads_again(s) and (few or stores) and len(raxes) < MOST_AXES
    # Half of a row's limit, because such loops share several values, or f64.
    room = shape.row // 2 // area_of(whole)
    if again and room >= (2 if few else area_of(widths)):
        return widths_in(axes[-1:], min(panel, room), env) | whole, 16
    rows = budget // area_of(widths)
    sums = sum(isinstance(x, kernel.Reduce) for loop in s.loops for x in loop)
    if few and shape.is_usual:
        # Latency decides, so lanes may be idle: one loop turn instead of seven adds up 788 parts of
        # 768 columns. In a loop each sum has its own registers.
        if raxes and length_of(raxes[-1], env) > rows:
            rows //= max(1, power_of_two(sums) // 2)
        return widths | widths_in(raxes, rows, env, idle=1), 16
    # A tile that ends with the rows needs no mask: 784 rows take 0.75 of the time in tiles of 16 as
    # in tiles of 32.
    if not few and raxes[-1:] and length_of(raxes[-1], env) % rows and not _odd(raxes[-1], env, 16):
        rows = 16
    if shape.is_usual and raxes and not _odd(raxes[-1], env) and _many_halves(g, widths, env):
        rows = SHORT
    if shape.is_usual and sums > 2:
        # Each sum has its own registers. Most statistics and gradients of several batch norms take
        # 0.4 to 0.9 of the time so; one kernel of FastViT-T8 takes 69 us instead of 145.
        return widths | widths_in(raxes, max(1, rows // 4), env), 4
    return widths | widths_in(raxes, rows, env), 16


def _reads_again(s: Stages) -> bool:
    """True if several loops run over a row; a row that is held is read once."""
    return sum(map(bool, s.loops)) > 1


def _many_halves(g: Group, widths: dict[Axis, int], env: SymEnv) -> bool:
    """True if many programs read columns of a single 16-bit tensor.

    They use tiles of 8 rows and 2 warps: sums over the middle of 128 x 512 x 2048 bf16 take 72.4
    us, and 74.5 with 32 rows and 4 warps. f32 gains nothing.
    """
    loads = {e.attrs[0]: e.dtype for n in g.nests for e in loads_of(n.body)}
    many = env.hint(g.domain.rows) >= 4096 * area_of(widths)
    return many and len(loads) == 1 and all(d.bits == 16 for d in loads.values())


def _column_warps(warps: int, g: Group, widths: dict[Axis, int], env: SymEnv) -> int:
    """Warps of a program over columns: 8 if many columns are held, or if few programs run.

    Up to 4 programs per multiprocessor use 8 warps each (4096 x 256, 64 times: 45 us, with 4 warps
    56 us). Held columns use no more than 8 (softmax over 256 rows: 92 us, with 16 warps 118 us).
    """
    columns = {a: w for a, w in widths.items() if a in g.domain.axes}
    panel = area_of(columns)
    if area_of(widths) == SHORT * panel and _many_halves(g, columns, env):
        return 2
    programs = env.hint(g.domain.rows) // panel
    return min(warps, 8) if warps > 4 or programs > FEW or area_of(widths) < 2048 else 8


def _odd(a: Axis, env: SymEnv, unit: int = 8) -> bool:
    """True if a row of this length is not a whole number of units of elements."""
    return length_of(a, env) % unit != 0


def _across(axes: Axes, s: Stages, env: SymEnv) -> list[Axis] | None:
    """The two axes of a tile, if some accesses are contiguous along each of them."""

    def walks(a: Axis, b: Axis) -> bool:
        # An access that does not move along b, such as a broadcast vector, is read once per tile.
        return any(is_near(x, a.var) and step_of(x, b.var) is not ZERO for x in s.offsets)

    long = [a for a in axes if env.hint(a.extent) >= 4]
    pairs = [(a, b) for a, b in itertools.combinations(long, 2) if walks(a, b) and walks(b, a)]
    # 2^17 matrices of 16 x 4 bf16 take 15 us in rows and 81 in tiles of one matrix.
    pairs = [(a, b) for a, b in pairs if env.hint(a.extent * b.extent) >= 1024]
    return list(pairs[-1]) if pairs else None


def _part(g: Group) -> Axes:
    """The axes of P over which columns are summed next to the rows."""
    return next((n.raxes for n in g.nests if n.across), ())


def _loops(
    d: Domain, part: Axes, s: Stages, tile: Tile, env: SymEnv
) -> tuple[list[Axis], tuple[kernel.Stmt, ...]]:
    """The grid, and the loops of a program. If the length is unknown, short rows are held."""
    widths = tile.widths
    own, along = tuple([a for a in d.axes if a not in part]), (*part, *d.raxes)
    grid, lanes, at = cut_lanes(own, widths, tile.in_line, env)
    turns, rows = cut_all(part, widths, at)

    def row(most: dict[Axis, int] | None) -> tuple[kernel.Stmt, ...]:
        steps, inner = cut_all(d.raxes, widths, at, most)
        new = (*turns, *rows, *steps, *inner)
        over = {a.var: tuple(x.var for x in new if x.name in (a.name, f"{a.name}b")) for a in along}
        found: list[kernel.Stmt] = []
        for k, statements in enumerate(s.rows):
            found.extend((*s.sorts.get(k, ()), *all_moved(statements, at)))
            if k < len(s.loops) and s.loops[k]:
                body = all_moved([over_parts(x, over) for x in s.loops[k]], at)
                found.extend(nested(steps, "seq", nested(inner, "lane", body)))
        return (*found, *nested(d.kept, "lane", all_moved(s.kept, at))) if s.kept else tuple(found)

    body, most = row(None), dict[Axis, int]()
    for a in d.raxes:
        # A tighter bound tells the compiler which registers stay idle: 2050 is below 2560, not just
        # 4096.
        width = widths.get(a, 1)
        unit = width // 8 if width >= 128 else width
        most[a] = -(-length_of(a, env) // unit) * unit
    held = undecided([(a.extent, Int(n + 1)) for a, n in most.items()])
    if all(n <= widths.get(a, 1) for a, n in most.items()) and held is not None and _reads_again(s):
        body = (kernel.If(*held, row(most), body),)
    body = nested(turns, "seq", nested(rows, "lane", body))
    if s.columns:
        body += nested(cut_all(d.raxes, widths, at)[1], "lane", all_moved(s.columns, at))
    return grid, nested(lanes, "lane", body)


RULES = (_scan_parts, _scans, _rows_and_columns, _transposed, _flat, _elements, _columns, _rows)
