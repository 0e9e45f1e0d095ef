"""Guards on sizes as text, and back: the guards that tracing a graph would add.

The text is sympy's own. It is parsed against a list of allowed nodes; nothing is run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch.utils._sympy.functions as of_torch

from lenz.frontend.identity import Untold
from lenz.frontend.symbols import hints_of

if TYPE_CHECKING:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

functions: Any = of_torch  # it holds sympy, a package without annotations
OF_SYMPY = (
    "Equality", "Unequality", "GreaterThan", "LessThan", "StrictGreaterThan", "StrictLessThan",
    "And", "Or", "Not", "Add", "Mul", "Pow", "Integer", "true", "false",
)  # fmt: skip
OF_TORCH = ("FloorDiv", "Mod", "PythonMod", "CleanDiv", "CeilDiv", "Max", "Min", "ModularIndexing")


def is_backed(env: ShapeEnv) -> bool:
    """Say whether the arguments determine all symbols."""
    return set(env.var_to_range) <= set(hints_of(env)) and not env.deferred_runtime_asserts


def texts_of(guards: Iterable[Any]) -> list[str]:
    """Return conditions as text."""
    return [functions.sympy.srepr(g.expr) for g in guards]


def told_since(env: ShapeEnv, count: int) -> list[str]:
    """Return the guards after the first `count`. Raises Untold for one without text."""
    new = env.guards[count:]
    texts = texts_of(new)
    with suppress(ValueError):  # an expression of another kind
        if is_backed(env) and [_read(t, env) for t in texts] == [g.expr for g in new]:
            return texts
    raise Untold


def ask_again(env: ShapeEnv, texts: Sequence[str]) -> None:
    """Add guards given as text. Raises ValueError for one that is invalid or does not hold."""
    for text in texts:
        if not bool(env.evaluate_expr(_read(text, env))):
            raise ValueError(f"does not hold: {text}")


def _read(text: str, env: ShapeEnv) -> Any:
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as e:
        raise ValueError(text) from e
    return _expr(tree, {str(s): s for s in hints_of(env)})


def _expr(e: ast.expr, symbols: Mapping[str, Any]) -> Any:
    match e:
        case ast.Constant(value=int()):
            return e.value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(n))):
            return -n
        case ast.Name(id="true" | "false"):
            return getattr(functions.sympy, e.id)
        case ast.Call(func=ast.Name(id="Symbol"), args=[ast.Constant(value=str(name))]):
            if name in symbols:
                return symbols[name]
        case ast.Call(func=ast.Name(id="Float"), args=[ast.Constant(value=str(n))]):
            return functions.sympy.Float(float(n), precision=53)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
            home = functions.sympy if name in OF_SYMPY else functions if name in OF_TORCH else None
            if home is not None:
                return getattr(home, name)(*(_expr(a, symbols) for a in args))
    raise ValueError(ast.dump(e))
