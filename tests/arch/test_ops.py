"""One place per op: the table defines each name once, and no other room knows ops by name."""

from __future__ import annotations

import ast
import importlib
from collections import Counter
from typing import Any

from tests.arch import limits
from tests.arch.source import dotted, sources


def table() -> dict[str, Any]:
    importlib.import_module("lenz.ops")  # fills the table
    found: dict[str, Any] = importlib.import_module("lenz.ir.op")._OPS
    return found


def test_each_op_is_defined_once() -> None:
    """A second `Op` of a name raises; this finds a second entry that replaces the table's."""
    defined: Counter[str] = Counter()
    for source in sources():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] == "Op":
                assert source.room == "ops" or source.name == "ir/op.py", (
                    f"{source.name}:{node.lineno}: an op stands in lenz/ops/"
                )
                if node.args and isinstance(node.args[0], ast.Constant):
                    defined[str(node.args[0].value)] += 1
    assert not [name for name, n in defined.items() if n > 1]
    assert set(defined) <= set(table())


def test_each_aten_name_is_lowered_by_one_op() -> None:
    counts: Counter[str] = Counter()
    for op in table().values():
        counts.update(op.aten)
    assert not [name for name, n in counts.items() if n > 1]


def test_no_other_room_knows_an_op_by_its_name() -> None:
    """Neither `op.name == "exp"` nor `match op.name`: what differs is a field of the entry."""
    names = set(table())
    assert len(names) > 50
    for source in sources():
        if source.room not in limits.NO_OP_NAMES:
            continue
        for node in ast.walk(source.tree):
            where = f"{source.name}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
                assert not any(dotted(s).endswith("op.name") for s in sides), where
            elif isinstance(node, ast.Match):
                assert not dotted(node.subject).endswith("op.name"), where
            elif isinstance(node, ast.Dict):
                keys = {k.value for k in node.keys if isinstance(k, ast.Constant)}
                assert len(keys & names) < 8, f"{where}: a table of ops by name"
