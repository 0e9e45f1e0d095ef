"""One loop stores neighbours in memory, such as the parts of complex numbers.

    %z = map (i: n, j: 2) { where(j == 0, load(%re, [i]), load(%im, [i])) }
    ==>  (p0: n)  store %z[2*p0] = %re[p0]          (p0: n)  store %z[2*p0 + 1] = %im[p0]

Both run over the loop that computes the parts, so one kernel does all of it, without tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lenz.ir.expr import nodes_of, reindex
from lenz.ir.graph import Loop, Pointwise
from lenz.ir.tensor import Buffer, Layout
from lenz.schedule.borders import is_test, resolved
from lenz.schedule.nest import Nest, nest_of
from lenz.sym import ONE, Int, sym

TWO = Int(2)


def nests_of(n: Loop, layouts: Mapping[str, Layout], roots: Mapping[str, str]) -> list[Nest]:
    """The nests of a loop node: two if an innermost axis of two elements selects the value."""
    d = _axis_of_pairs(n) if isinstance(n, Pointwise) else None
    if d is None or not isinstance(n, Pointwise):
        return [nest_of(n, layouts, roots)]
    type, axes = n.out.type, (*n.axes[:d], *n.axes[d + 1 :])
    shape, stride = ((*s[:d], *s[d + 1 :]) for s in (type.shape, type.layout.stride))
    made: list[Nest] = []
    for k in (0, 1):
        part = replace(type, layout=Layout(shape, stride, sym(k)))
        out = Buffer(f"{n.out.name}.part{k}", part, n.out.origin)
        body = resolved(reindex(n.body, {n.axes[d].var: sym(k)}))
        made.append(nest_of(Pointwise(out, axes, body), layouts, roots, n.out.name))
    return made


def _axis_of_pairs(n: Pointwise) -> int | None:
    """The axis whose two elements are neighbours in memory and are selected by tests of it."""
    layout = n.out.type.layout
    pairs = zip(layout.shape, layout.stride, strict=True)
    d = next((d for d, (size, step) in enumerate(pairs) if size is TWO and step is ONE), None)
    if d is None or len(n.axes) == 1:
        return None
    own = {n.axes[d].var}
    tests = (e for e in nodes_of(n.body) if is_test(e))
    chosen = any(own == {v for x in e.args for v in x.attrs[0].free_vars} for e in tests)
    return d if chosen else None
