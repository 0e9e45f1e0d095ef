"""Sizes: a file, a function, a class and lenz as a whole stay small enough to be read."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

from tests.arch import limits
from tests.arch.source import Source, classes_of, code_lines, functions_of, lines_of, parse, sources


def too_large(source: Source) -> list[str]:
    found = []
    count = len(source.text.splitlines())
    if count > limits.FILE_LINES:
        found.append(f"{source.name} has {count} lines")
    for function in functions_of(source.tree):
        if (count := lines_of(function)) > limits.FUNCTION_LINES:
            found.append(f"{source.name}:{function.lineno}: {function.name} has {count} lines")
    for cls in classes_of(source.tree):
        count = sum(isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)) for n in cls.body)
        if count > limits.CLASS_METHODS:
            found.append(f"{source.name}:{cls.lineno}: {cls.name} has {count} methods")
    return found


def test_files_functions_and_classes_are_small() -> None:
    found = [fault for s in sources() for fault in too_large(s)]
    assert not found, "\n".join(found)


def test_rooms_and_all_of_lenz_are_small() -> None:
    rooms = Counter[str]()
    for s in sources():
        rooms[s.name.split("/")[0] if "/" in s.name else "."] += code_lines(s)
    over = {room: n for room, n in rooms.items() if n > limits.CODE_LINES[room]}
    assert not over, over
    assert rooms.keys() == limits.CODE_LINES.keys()
    assert 1000 < rooms.total() <= limits.TOTAL_CODE_LINES


def test_code_lines_are_those_with_code(tmp_path: Path) -> None:
    path = tmp_path / "sample.py"
    code = ["X = 1  # why", "def f():", "    return '''a", "b'''"]
    path.write_text(f'"""Doc.\n\nText."""\n\n{code[0]}\n# what\n\n\n{code[1]}\n    "Doc."\n')
    path.write_text(path.read_text() + "\n".join(code[2:]) + "\n")
    assert code_lines(parse(path, tmp_path)) == len(code)


def test_names_say_something() -> None:
    for source in sources():
        stem = Path(source.name).stem
        assert not {stem, *stem.split("_")} & set(limits.EMPTY_WORDS), source.name
        assert source.room not in limits.EMPTY_WORDS, source.name
        for cls in classes_of(source.tree):
            assert not cls.name.endswith(limits.EMPTY_CLASS_WORDS), f"{source.name}: {cls.name}"


def test_the_limits_bite(tmp_path: Path) -> None:
    path = tmp_path / "sample.py"
    body = "\n".join("    x = 1" for _ in range(limits.FUNCTION_LINES))
    methods = "\n".join(f"    def m{n}(self): ..." for n in range(limits.CLASS_METHODS + 1))
    path.write_text(f"@cache\ndef f():\n{body}\nclass C:\n{methods}\n" + "\n" * limits.FILE_LINES)
    found = too_large(parse(path, tmp_path))
    assert [text.split(" has ")[1] for text in found] == ["579 lines", "62 lines", "16 methods"]
