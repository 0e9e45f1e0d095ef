"""Is a legal join worth it? Idle cores cost more than a saved trip to memory gains."""

from __future__ import annotations

from lenz.ir.expr import cost_of, loads_of
from lenz.machines import machine_of
from lenz.schedule.legal import Group, are_alike, capabilities, device_of, in_parts
from lenz.schedule.nest import gathers_in_order, near_axis
from lenz.sym import SymEnv, product

# Maximum of values in a join that saves a launch.
GATHERED = 12
FAR, NEAR = 128, 32  # maximum of cells between two such kernels: tiny ones, others


def gathers(a: Group, b: Group, env: SymEnv) -> int:
    """The largest number of cells between two kernels that are joined only to save a launch.

    They run over the same number of elements in the same way, and hardly longer than a launch
    takes. The inputs of the first stay alive until the second, so only tiny kernels may be far
    apart.
    """
    can = min((capabilities(g) for g in (a, b)), key=lambda c: c.launch)
    same = a.has_columns is b.has_columns and a.has_reduction is b.has_reduction
    if not can.launch or not same or not are_alike(a, b):
        return 0
    size = env.hint(a.domain.rows) * env.hint(a.domain.length)
    if len(a.nests) + len(b.nests) > GATHERED or size > can.moved // 2:
        return 0
    return FAR if size <= can.launch else NEAR


def loss(g: Group, env: SymEnv) -> str | None:
    """Why the group is worse than its parts; None if it is not.

    A group with a reduction runs over its elements once more after the reduction, row by row. With
    few rows (or panels of columns) that second run leaves cores idle, while a loop of its own
    splits as finely as needed.
    """
    if not g.has_reduction or not g.domain.raxes or in_parts(g):
        return None
    if not capabilities(g).held and (name := gathers_in_order(g.nests)):
        return f"{name} would be gathered, as its index wraps around"
    if any(n.sorts for n in g.nests):  # rows are sorted one by one; storing keys does not pay
        return None
    if part := next((n.raxes for n in g.nests if n.across), ()):
        tasks = env.hint(product(a.extent for a in g.domain.axes if a not in part))
        few = tasks < capabilities(g).busy
        return f"{g.name} would run in {tasks} programs only" if few else None
    elements = [n for n in g.nests if not n.is_reduction and n.raxes]
    can, rows, length = capabilities(g), env.hint(g.domain.rows), env.hint(g.domain.length)
    # Elements of a row that are stored far apart, next to those of other rows: a layer norm of
    # 16384 x 1024 bf16 whose result is transposed takes 260 us, and 35 with a kernel for that.
    many = 0 < can.launch < rows * length and not g.has_columns
    near = near_axis([n.offset for n in elements[-1:]], (*g.domain.raxes, *g.domain.axes))
    if many and near in g.domain.axes:
        return f"{elements[-1].name} would be stored one element per line of the cache"
    # On CPUs values of rows are computed from sums too: means, and what is made of them.
    values = {n.name for n in g.nests if n.is_reduction or not (n.raxes or capabilities(g).held)}
    if any(e.attrs[0] in values for n in elements for e in loads_of(n.body)):
        return machine_of(device_of(g)).loss(g, env)
    # Elements that are reduced: rows * length * cost additions take units / rows times as long as
    # on the whole card. 32 rows of 25088 means of nine others take 275 us in one kernel, whose
    # registers they also exceed, and 20 in two.
    late = length * cost_of(*(n.body for n in elements)) * (can.units - rows)
    is_late = not g.has_columns and late > can.start * can.adds
    return f"{elements[0].name} would be computed in {rows} programs only" if is_late else None
