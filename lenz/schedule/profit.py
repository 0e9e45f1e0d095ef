"""Is a legal join worth it? Idle cores cost more than a saved trip to memory gains."""

from __future__ import annotations

from lenz.ir.expr import loads_of
from lenz.schedule.blocks import Shape
from lenz.schedule.legal import HELD, Group, are_alike, device_of, in_parts, registers
from lenz.schedule.nest import is_columns
from lenz.sym import SymEnv, product

# Elements from which a loop is worth several cores (about 20 us of work on one core).
LARGE = 1 << 16
# Minimum of parallel iterations for a kernel of that size.
ENOUGH = 8
# Elements that a GPU reads in the two microseconds that a launch takes; elements of kernels that
# are worth joining with a neighbour to save a launch; maximum of values in such a join.
SMALL, NEARBY, GATHERED = 1 << 18, 1 << 22, 12
FAR, NEAR = 128, 32  # maximum of cells between two such kernels: tiny ones, others
# Columns per parallel iteration of a kernel over columns (build.PANEL).
PANEL = 256
# On GPUs: multiprocessors; 2-byte elements moved while a kernel starts and ends; parts of rows with
# sums over columns that keep the card busy; programs that run at once and read their rows again;
# bytes of those rows that the cache keeps.
GPU_UNITS, GPU_LAUNCH, GPU_PARTS, GPU_AGAIN, GPU_CACHE = 132, 1 << 22, 96, 256, 64 << 20
SHAPE = Shape()


def gathers(a: Group, b: Group, env: SymEnv) -> int:
    """How many cells may lie between two GPU kernels that are joined only to save a launch.

    They run over the same number of elements in the same way, and hardly longer than a launch
    takes. The inputs of the first stay alive until the second, so only tiny kernels may be far
    apart.
    """
    if "cpu" in (device_of(a), device_of(b)) or not are_alike(a, b):
        return 0
    size = env.hint(a.domain.rows) * env.hint(a.domain.length)
    if len(a.nests) + len(b.nests) > GATHERED or size > NEARBY:
        return 0
    kinds = [[is_columns(n) for n in g.nests if n.is_reduction] for g in (a, b)]
    if any(kinds[0]) is not any(kinds[1]) or a.has_reduction is not b.has_reduction:
        return 0
    return FAR if size <= SMALL else NEAR


def loss(g: Group, env: SymEnv) -> str | None:
    """Why the group is worse than its parts; None if it is not.

    A group with a reduction runs over its elements once more after the reduction, row by row. With
    few rows (or panels of columns) that second run leaves cores idle, while a loop of its own
    splits as finely as needed.
    """
    if not g.has_reduction or not g.domain.raxes or in_parts(g):
        return None
    if any(n.sorts for n in g.nests):  # rows are sorted one by one; storing keys does not pay
        return None
    if part := next((n.raxes for n in g.nests if n.across), ()):
        tasks = env.hint(product(a.extent for a in g.domain.axes if a not in part))
        return None if tasks >= GPU_PARTS else f"{g.name} would run in {tasks} programs only"
    elements = [n for n in g.nests if not n.is_reduction and n.raxes]
    values = {n.name for n in g.nests if n.is_reduction}
    if not any(e.attrs[0] in values for n in elements for e in loads_of(n.body)):
        return None
    rows = env.hint(g.domain.rows)
    if device_of(g) != "cpu":
        return _gpu_loss(g, rows, env)
    if rows * env.hint(g.domain.length) < LARGE:
        return None
    tasks = -(-rows // PANEL) if any(is_columns(n) for n in g.nests if n.is_reduction) else rows
    if tasks >= ENOUGH or (tasks >= 4 and rows >= 4 * PANEL):
        return None
    return f"{elements[-1].name} would run in {tasks} parallel parts only"


def _gpu_loss(g: Group, rows: int, env: SymEnv) -> str | None:
    """The same on a GPU, where one more kernel costs as much as reading `SMALL` elements.

    Rows in registers are read once; a separate kernel would read, write and launch again, but on
    the whole card. For longer rows, fusing the second run saves only the launch, unless the cache
    still holds the data of the first run.
    """
    length = env.hint(g.domain.length)
    if rows * length <= SMALL:
        return None
    panel, held = 1, registers(g.domain, env) <= HELD
    if any(is_columns(n) for n in g.nests if n.is_reduction):
        few, room = rows < 64 * SHAPE.panel, HELD // 2 // registers(g.domain, env)
        held = room >= (2 if few else SHAPE.panel)
        panel = max(1, min(SHAPE.narrow if few else SHAPE.panel, room))
    tasks = -(-rows // panel)
    if held:
        pays = tasks * (2 * rows * length + GPU_LAUNCH) >= GPU_UNITS * rows * length
        return None if pays else f"{g.name} would run in {tasks} programs only"
    loads = loads_of(*(n.body for n in g.nests if n.raxes))
    inner = {a.var for a in g.domain.raxes}
    size = sum(e.dtype.bytes for e in loads if inner & set(e.attrs[1][0].free_vars))
    if tasks >= GPU_AGAIN and panel * GPU_AGAIN * size * length <= GPU_CACHE:
        return None
    return f"{g.name} would find nothing of the reduction's reads in cache"
