"""The forms of a GPU kernel: that of the cost model, and those that max-autotune measures."""

from __future__ import annotations

from dataclasses import replace

from lenz.context import Context
from lenz.ir.expr import loads_of
from lenz.machine.cuda.blocks import scattered, tiled
from lenz.machine.cuda.capabilities import CAN
from lenz.machine.cuda.reciprocal import share_reciprocals
from lenz.machine.cuda.shape import Shape
from lenz.machine.cuda.tune.space import space as usual_space
from lenz.machines import Form, Space
from lenz.schedule.legal import Group, registers
from lenz.schedule.stages import stages
from lenz.sym import SymEnv

SHAPE = Shape()


def forms(
    g: Group, stored: frozenset[str], env: SymEnv, cx: Context, space: Space | None
) -> list[Form]:
    """The cost model's form of a group's kernel; then those of `space`, or of max-autotune."""
    if g.nests[0].updates:
        return [scattered(g.nests[0], env, Shape())]
    space = space or (usual_space if cx.options.autotune else None)
    elide = not cx.options.emulate_rounding
    s = stages(g, stored, env, elide, named=True, scratch=False)
    share_reciprocals(s, g.domain.axes, g.domain.raxes, elide)

    def shaped(shape: Shape) -> Form:
        return replace(tiled(g, s, env, shape), locals=tuple(s.locals))

    usual = shaped(Shape())
    rows, length = env.hint(g.domain.rows), env.hint(g.domain.length)
    return [usual, *map(shaped, space(usual.kind, rows, length) if space else ())]


def loss(g: Group, env: SymEnv) -> str | None:
    """Why a group whose elements read its own reductions is worse than its parts, or None.

    One more kernel costs as much as reading `launch` elements.

    Rows in registers are read once; a separate kernel would read, write and launch again, but on
    the whole card (all counted in halves). For longer rows, fusing the second run saves only the
    launch, unless the cache still holds the data of the first run.
    """
    rows, length = env.hint(g.domain.rows), env.hint(g.domain.length)
    if rows * length <= CAN.launch:
        return None
    panel, held = 1, registers(g.domain, env) <= CAN.held
    if g.has_columns:
        few, room = rows < 64 * SHAPE.panel, CAN.held // 2 // registers(g.domain, env)
        held = room >= (2 if few else SHAPE.panel)
        panel = min(SHAPE.narrow if few else SHAPE.panel, room if held else SHAPE.panel)
    tasks = -(-rows // panel)
    if held:
        pays = tasks * (2 * rows * length + CAN.moved // 2) >= CAN.units * rows * length
        return None if pays else f"{g.name} would run in {tasks} programs only"
    loads = loads_of(*(n.body for n in g.nests if n.raxes))
    inner = {a.var for a in g.domain.raxes}
    size = sum(e.dtype.bytes for e in loads if inner & set(e.attrs[1][0].free_vars))
    is_cached = tasks >= CAN.enough and panel * CAN.enough * size * length <= CAN.cache
    return None if is_cached else f"{g.name} would find nothing of the reduction's reads in cache"
