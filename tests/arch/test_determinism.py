"""Same inputs, same bytes: no order of a set, no address and no clock gets into a text."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.arch import limits
from tests.arch.source import (
    Function,
    Source,
    dotted,
    functions_of,
    imports_of,
    is_in,
    parse,
    sources,
)

SET_TYPE = re.compile(r"(set|frozenset|Set|AbstractSet|MutableSet)\b")
SET_METHODS = ("union", "intersection", "difference", "symmetric_difference")

CHANCE = ("time", "random", "uuid", "secrets", "datetime")

# What does not depend on the order in which it gets its argument's elements.
ORDERLESS = {"sorted", "len", "any", "all", "sum", "min", "max", "set", "frozenset", "bool"}


def annotation(node: ast.expr | None) -> bool | None:
    """True if an annotation says set, False if it says something else, None if it is missing."""
    return None if node is None else bool(SET_TYPE.match(ast.unparse(node)))


@cache
def set_fields() -> frozenset[str]:
    """Names of fields and properties that are sets in every class of lenz that has them."""
    verdicts: dict[str, bool] = {}
    for source in sources():
        for cls in (n for n in ast.walk(source.tree) if isinstance(n, ast.ClassDef)):
            for node in cls.body:
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    name, verdict = node.target.id, annotation(node.annotation)
                elif isinstance(node, ast.FunctionDef) and node.decorator_list:
                    name, verdict = node.name, annotation(node.returns)
                else:
                    continue
                verdicts[name] = verdicts.get(name, True) and bool(verdict)
    return frozenset(name for name, verdict in verdicts.items() if verdict)


@cache
def set_functions() -> frozenset[str]:
    """Names of functions that give a set wherever lenz defines them."""
    verdicts: dict[str, bool] = {}
    for source in sources():
        for f in functions_of(source.tree):
            verdicts[f.name] = verdicts.get(f.name, True) and bool(annotation(f.returns))
    return frozenset(name for name, verdict in verdicts.items() if verdict)


def is_set(node: ast.expr, names: frozenset[str]) -> bool:
    """True if an expression is seen to be a set; `names` are the variables that are."""
    match node:
        case ast.Set() | ast.SetComp():
            return True
        case ast.Name():
            return node.id in names
        case ast.Attribute():
            return node.attr in set_fields()
        case ast.BinOp(op=ast.BitOr() | ast.BitAnd() | ast.Sub() | ast.BitXor()):
            return is_set(node.left, names) or is_set(node.right, names)
        case ast.IfExp():
            return is_set(node.body, names) or is_set(node.orelse, names)
        case ast.Call(func=ast.Name(id="set" | "frozenset")):
            return True
        case ast.Call(func=ast.Attribute(attr=attr, value=value)) if attr in SET_METHODS:
            return is_set(value, names)
        case ast.Call(func=ast.Name(id=name)):
            return name in set_functions()
        case _:
            return False


def local_sets(function: Function) -> frozenset[str]:
    """Variables of a function that hold sets: by annotation, or by what they are assigned."""
    args = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    names = {a.arg for a in args if annotation(a.annotation)}
    for _ in range(3):  # a set made of a set made of a set
        for node in ast.walk(function):
            match node:
                case ast.AnnAssign(target=ast.Name(id=name)) if annotation(node.annotation):
                    names.add(name)
                case ast.Assign(targets=[ast.Name(id=name)]) if is_set(
                    node.value, frozenset(names)
                ):
                    names.add(name)
    return frozenset(names)


def ordered_uses(function: Function) -> Iterator[tuple[ast.expr, int]]:
    """Iterations over sets whose order can be seen in the result."""
    names = local_sets(function)
    orderless: set[int] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and dotted(node.func) in ORDERLESS:
            orderless |= {id(a) for a in node.args}
        elif isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] in (
            *SET_METHODS, "update", "isdisjoint", "issubset", "issuperset",
        ):  # fmt: skip
            orderless |= {id(a) for a in node.args if isinstance(a, ast.GeneratorExp)}
    for node in ast.walk(function):
        match node:
            case ast.For() if is_set(node.iter, names) and not is_orderless(node.body):
                yield node.iter, node.lineno
            case ast.ListComp() | ast.GeneratorExp() | ast.DictComp() if id(node) not in orderless:
                for part in node.generators:
                    if is_set(part.iter, names):
                        yield part.iter, node.lineno
            case ast.Call(func=ast.Name(id="list" | "tuple" | "iter" | "enumerate" | "dict")):
                for arg in node.args[:1]:
                    if is_set(arg, names) and id(node) not in orderless:
                        yield arg, node.lineno
            case ast.Call(func=ast.Attribute(attr="join" | "fromkeys"), args=[arg]):
                if is_set(arg, names):
                    yield arg, node.lineno
            case ast.Call(func=ast.Attribute(attr="pop", value=value), args=[]):
                if is_set(value, names):
                    yield value, node.lineno
            case ast.Starred() if is_set(node.value, names) and id(node) not in orderless:
                yield node.value, node.lineno


def is_orderless(body: list[ast.stmt]) -> bool:
    """True for a loop that only raises, or only adds to and removes from sets."""
    for node in body:
        match node:
            case ast.Expr(value=ast.Call(func=ast.Attribute(attr="add" | "discard"))):
                pass
            case ast.If() if is_orderless(node.body) and is_orderless(node.orelse):
                pass
            case ast.Continue() | ast.Pass():
                pass
            case _:
                return False
    return True


def in_sets(node: ast.AST) -> frozenset[int]:
    """Expressions that are elements of set displays, where order is lost again."""
    return frozenset(id(e) for n in ast.walk(node) if isinstance(n, ast.Set) for e in n.elts)


def faults(source: Source) -> list[str]:
    lines = source.text.splitlines()
    found = []
    for function in functions_of(source.tree):
        lost = in_sets(function)
        for node, line in ordered_uses(function):
            parent = [n for n in ast.walk(function) if isinstance(n, ast.Starred)]
            if any(p.value is node and id(p) in lost for p in parent):
                continue
            if "# any order" not in lines[line - 1]:
                found.append(f"{source.name}:{line}: the order of {ast.unparse(node)} is seen")
    return sorted(set(found))


@pytest.mark.slow
def test_no_order_of_a_set_is_seen() -> None:
    """Sort it, keep a dict instead, or say `# any order` with the reason on the line."""
    rooms = [s for s in sources() if s.room in limits.DETERMINISTIC]
    found = [fault for s in rooms for fault in faults(s)]
    assert not found, "\n".join(found)


@pytest.mark.slow
def test_no_clock_and_no_chance_in_the_compiler() -> None:
    for source in sources():
        if source.room not in limits.DETERMINISTIC:
            continue
        for i in imports_of(source):
            if i.module == "time" and source.name in limits.CLOCK_FILES:
                continue
            assert not is_in(i.module, CHANCE), f"{source.name}:{i.line}: {i.module}"


SAMPLE = """
def f(a: set[int], b: list[int]):
    c = a | {1}
    for x in c: print(x)
    for x in sorted(c): print(x)
    for x in b: print(x)
    d = [x for x in a]
    e = {x for x in a}
    g = any(x for x in e)
    h = tuple(e - a)
    i = ",".join(e)
    j = [*e]
    k = {*e}
    for x in e: k.add(x)
    l = list(a)  # any order: counted only
    return frozenset(b).pop()
"""


def test_ordered_uses_of_sets_are_found(tmp_path: Path) -> None:
    path = tmp_path / "sample.py"
    path.write_text(SAMPLE)
    found = faults(parse(path, tmp_path))
    assert sorted(int(text.split(":")[1]) for text in found) == [4, 7, 10, 11, 12, 16]
