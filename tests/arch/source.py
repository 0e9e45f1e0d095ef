"""The source of lenz, parsed once, and the questions that the tests of structure ask of it."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
LENZ = REPOSITORY / "lenz"

# Tokens of lines that may hold no code.
EMPTY_TOKENS = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER),
    *(tokenize.INDENT, tokenize.DEDENT),
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """One file of lenz: `name` is its path below lenz/, with forward slashes."""

    path: Path
    name: str
    text: str
    tree: ast.Module

    @property
    def room(self) -> str:
        """The folder of lenz/ it stands in, or its own name if it stands in none."""
        return self.name.split("/")[0].removesuffix(".py")

    @property
    def module(self) -> str:
        """Its name in import statements."""
        return "lenz." + self.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@dataclass(frozen=True)
class Import:
    """One imported name: `lazy` if it stands in a function."""

    module: str
    line: int
    lazy: bool


def parse(path: Path, root: Path = LENZ) -> Source:
    text = path.read_text(encoding="utf-8")
    return Source(path, path.relative_to(root).as_posix(), text, ast.parse(text, str(path)))


@cache
def sources() -> tuple[Source, ...]:
    """Every Python file of lenz."""
    return tuple(parse(path) for path in sorted(LENZ.rglob("*.py")))


def code_lines(source: Source) -> int:
    """How many lines hold code: no blanks, no comments, no docstrings."""
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type not in EMPTY_TOKENS:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(source.tree):
        if isinstance(node, holders) and ast.get_docstring(node, clean=False) is not None:
            doc = node.body[0]
            found.difference_update(range(doc.lineno, (doc.end_lineno or doc.lineno) + 1))
    return len(found)


@cache
def imports_of(source: Source) -> tuple[Import, ...]:
    """Every import, whether at load, in a function, for types only, or by importlib."""
    return tuple(found_imports(source))


def found_imports(source: Source) -> Iterator[Import]:
    for node, depth in with_depth(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, depth > 0)
        elif isinstance(node, ast.ImportFrom):
            above = ""
            if node.level:
                package = source.module if source.name.endswith("__init__.py") else ""
                parts = (package + ".x" if package else source.module).split(".")
                above = ".".join(parts[: -node.level])
            module = ".".join(p for p in (above, node.module or "") if p)
            for alias in node.names:
                yield Import(f"{module}.{alias.name}", node.lineno, depth > 0)
        elif isinstance(node, ast.Call) and dotted(node.func).endswith(
            ("import_module", "__import__")
        ):
            for arg in node.args[:1]:
                if isinstance(arg, ast.Constant) and isinstance(arg.value, str):
                    yield Import(arg.value, node.lineno, depth > 0)


def with_depth(tree: ast.AST, depth: int = 0) -> Iterator[tuple[ast.AST, int]]:
    """Every node with the number of functions around it."""
    for node in ast.iter_child_nodes(tree):
        yield node, depth
        inner = depth + isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        yield from with_depth(node, inner)


def functions_of(tree: ast.AST) -> Iterator[Function]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def classes_of(tree: ast.AST) -> Iterator[ast.ClassDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node


def lines_of(node: Function) -> int:
    """Lines of a function with its decorators."""
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    return (node.end_lineno or first) - first + 1


def dotted(node: ast.expr) -> str:
    """`a.b.c` for a chain of attributes of a name, or what follows the last other expression."""
    match node:
        case ast.Name():
            return node.id
        case ast.Attribute():
            below = dotted(node.value)
            return f"{below}.{node.attr}" if below else node.attr
        case _:
            return ""


def is_in(module: str, packages: tuple[str, ...]) -> bool:
    """True if `module` is one of `packages` or stands below one."""
    return any(module == p or module.startswith(p + ".") for p in packages)
