"""Is a legal join worth it? Losing the cores costs more than a trip to memory saves."""

from __future__ import annotations

from lenz.ir.expr import loads_of
from lenz.schedule.blocks import Shape
from lenz.schedule.legal import HELD, Group, are_alike, device_of, in_parts, registers
from lenz.schedule.nest import is_columns
from lenz.sym import SymEnv, product

# Elements from which a loop is worth several cores (about 20 us of work on one).
LARGE = 1 << 16
# Parallel iterations that a kernel of that size must have.
ENOUGH = 8
# Elements that a GPU reads in about the two microseconds that it takes to start a kernel, and of
# kernels that are worth a join with a neighbour for that; the most values of kernels so joined.
SMALL, NEARBY, GATHERED = 1 << 18, 1 << 22, 12
FAR, NEAR = 128, 32  # cells between two such kernels: tiny ones, others
# Columns that one parallel iteration of a kernel over columns takes (build.PANEL).
PANEL = 256
# On GPUs: multiprocessors; elements of 2 bytes that are moved while a kernel starts and ends; parts
# of rows with sums over columns that keep the card busy; programs from which rows are read again,
# by about as many at once, and bytes of them that the cache keeps.
GPU_UNITS, GPU_LAUNCH, GPU_PARTS, GPU_AGAIN, GPU_CACHE = 132, 1 << 22, 96, 256, 64 << 20
SHAPE = Shape()


def gathers(a: Group, b: Group, env: SymEnv) -> int:
    """How far apart, in cells, two kernels of a GPU may stand to be joined for the launch alone.

    They run over as many elements in the same way, and for little longer than a launch takes. What
    the first reads must wait for the second, so that only tiny ones may stand far apart.
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
    """Why the group is worse than its parts; None when it is not.

    A group with a reduction runs its elements once more after the reduction, row by row. When there
    are few rows (or panels of columns) that second run would leave cores idle, while by itself it
    splits as finely as one likes.
    """
    if not g.has_reduction or not g.domain.raxes or in_parts(g):
        return None
    if any(n.sorts for n in g.nests):  # rows are sorted one by one, and keys are not worth storing
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
    """The same on a GPU, where a kernel more costs as much as reading `SMALL` elements.

    Rows that registers hold are read once: a kernel of its own would read, write, and start, but on
    all of the card. Of longer ones the second run saves nothing but the launch, unless the cache
    still has what the first run has read.
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
    return f"{g.name} would find nothing of what the reduction has read"
