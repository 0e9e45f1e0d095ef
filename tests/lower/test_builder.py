"""What the builder knows of its nodes."""

from __future__ import annotations

from lenz.ir.dtype import F32
from lenz.ir.expr import const
from lenz.ir.tensor import TensorType, contiguous
from lenz.lower.builder import GraphBuilder, Value, maker, take_back
from lenz.sym import Int


def filled(b: GraphBuilder, name: str) -> Value:
    """Add a node."""
    b.begin(name, (), (TensorType(F32, "cpu", contiguous((Int(4),))),))
    return b.map(lambda i: const(1.0, F32))


def test_nodes_in_place_of_others_are_found() -> None:
    b = GraphBuilder()
    first, second = filled(b, "first"), filled(b, "second")
    assert maker(b, first.name) is b.nodes[0] and maker(b, second.name) is b.nodes[1]
    take_back(b, 1)
    third = filled(b, "third")
    assert maker(b, third.name) is b.nodes[1]
