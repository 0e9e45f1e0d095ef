"""The table of traits: one row per op, known traits, ops that torch has."""

from __future__ import annotations

import re
from collections import Counter

import torch

from lenz import traits
from lenz.traits import has, trait

aten = torch.ops.aten
MEANINGS = re.findall(r"^([a-z]+)(?:=\w+)? +\S", str(traits.__doc__), re.MULTILINE)
KINDS = re.findall(r"^    (\w+) +\S", str(traits.__doc__), re.MULTILINE)
# Ops of some builds of torch, or of newer ones.
ELSEWHERE = ("mkldnn_rnn_layer",)


def test_each_op_stands_once() -> None:
    counts = Counter(name for name, _ in traits.table_rows())
    assert [name for name, n in counts.items() if n > 1] == []


def test_each_trait_has_a_meaning() -> None:
    for name, facts in traits.table_rows():
        assert set(facts) <= set(MEANINGS), f"{name}: {sorted(facts)}"
        assert facts.get("strides", "told") in KINDS, f"{name}: {facts}"


def test_each_op_is_one_of_torch() -> None:
    for name, _ in traits.table_rows():
        space, _, rest = name.rpartition("prims.") if "prims." in name else ("", "", name)
        if name.startswith("higher_order.") or name in ELSEWHERE:
            continue
        place = torch.ops.prims if name != rest or space else aten
        packet, _, overload = rest.partition(".")
        assert hasattr(place, packet), f"torch has no {name}"
        assert not overload or overload in getattr(place, packet).overloads(), name


def test_an_overload_stands_for_itself_or_for_its_packet() -> None:
    assert trait(aten.sum.dim_IntList, "linear") == "" == trait("aten.sum.default", "linear")
    assert trait(aten.masked_fill.Scalar, "strides") == "here"
    assert trait(aten.masked_fill.Tensor, "strides") == "told"
    assert has(aten.mm.default, "into"), "its result goes where the plan wants it"
    assert not has(aten.mm.dtype, "into"), "its third argument is a type"
    assert not has(aten.view.dtype, "view"), "its elements are others"
    assert not has("tests.mm.default", "library") and not has(len, "view")
