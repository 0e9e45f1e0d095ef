"""Axes merged."""

from __future__ import annotations

from lenz.ir.axes import merged
from lenz.ir.tensor import axis
from lenz.sym import ZERO, Int


def test_a_loop_without_iterations_has_one_axis() -> None:
    """Or `new_zeros((2**63 - 1, 0))` would run 2**63 - 1 times without a store."""
    many, none = axis("i", Int(2**63 - 1)), axis("j", ZERO)
    for axes in ((many, none), (none, many), (none,), (none, none)):
        made, at = merged(axes, "p", [many.var])
        assert [(a.name, a.extent) for a in made][:1] == [("p0", ZERO)]
        assert many not in axes or (len(made) == 1 and at[many.var] is ZERO)
