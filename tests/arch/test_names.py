"""A public name means one thing: those that stand in several files are listed, with the reason."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

from tests.arch import limits
from tests.arch.source import Source, parse, sources


def names_of(source: Source) -> set[str]:
    """Public functions, classes and types that a file defines at its top level."""
    found = set()
    for node in source.tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "TypeAlias":
            found.add(ast.unparse(node.target))
    return {name for name in found if not name.startswith("_")}


def repeated(files: tuple[Source, ...]) -> dict[str, list[str]]:
    """Names in several files; files of lowerings and of scalar ops name functions after ops."""
    found = defaultdict[str, list[str]](list)
    for source in files:
        if source.room not in limits.NAMED_AFTER_OPS:
            for name in names_of(source):
                found[name].append(source.name)
    return {name: where for name, where in found.items() if len(where) > 1}


def test_a_public_name_stands_in_one_file_or_has_a_reason() -> None:
    found, allowed = repeated(sources()), limits.REPEATED_NAMES
    new = {name: where for name, where in found.items() if name not in allowed}
    assert not new, f"give these other names, or a reason in tests/arch/limits.py: {new}"
    assert allowed.keys() <= found.keys(), f"no longer repeated: {allowed.keys() - found.keys()}"
    grown = {n: (where, allowed[n][0]) for n, where in found.items() if len(where) > allowed[n][0]}
    assert not grown, f"more files than the reason was given for: {grown}"


def test_a_repeated_name_is_found(tmp_path: Path) -> None:
    text = "Pair: TypeAlias = tuple[int, int]\nclass Row: ...\ndef row(): ...\ndef _own(): ...\n"
    for name in ("one.py", "two.py"):
        (tmp_path / name).write_text(text)
    files = tuple(parse(tmp_path / name, tmp_path) for name in ("one.py", "two.py"))
    assert repeated(files).keys() == {"Pair", "Row", "row"}
