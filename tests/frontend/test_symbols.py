"""SymInt to Sym and back: values agree with sympy's, and no conversion adds a guard."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from lenz.frontend import SymbolMap
from lenz.sym import Int, Var, evaluate

HINTS = (12, 7)


def symbols() -> tuple[ShapeEnv, SymbolMap, torch.SymInt, torch.SymInt, torch.Tensor]:
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    fake = mode.from_tensor(
        torch.empty(HINTS),
        symbolic_context=torch.fx.experimental.symbolic_shapes.StatelessSymbolicContext(
            dynamic_sizes=[torch.fx.experimental.symbolic_shapes.DimDynamic.DYNAMIC] * 2
        ),
    )
    a, b = fake.shape
    assert isinstance(a, torch.SymInt) and isinstance(b, torch.SymInt)
    return env, SymbolMap(env), a, b, fake


EXPRESSIONS: list[Any] = [
    lambda a, b: a + b - 3,
    lambda a, b: 2 * a * b + a * a,
    lambda a, b: (a * b) // 4,
    lambda a, b: (a + 5) % 3,
    lambda a, b: torch.sym_max(a, b + 2),
    lambda a, b: torch.sym_min(a - 20, b),
    lambda a, b: -(-(a + 1) // 5),
    lambda a, b: (a * b + 7 * b) // b,
    lambda a, b: a**3,
    lambda a, b: math.prod([a] * 40) * b,  # the stride of an axis before 40 of one size
    lambda a, b: math.ceil(a / 5) * 5,
    lambda a, b: math.floor(a / b) + 1,
]


@pytest.mark.parametrize("number", range(len(EXPRESSIONS)))
def test_expressions_have_the_same_value(number: int) -> None:
    env, m, a, b, _ = symbols()
    before = len(env.guards)
    f = EXPRESSIONS[number]
    s = m.sym(f(a, b))
    va, vb = m.sym(a), m.sym(b)
    assert isinstance(va, Var) and isinstance(vb, Var)
    for x, y in ((12, 7), (3, 2), (100, 33)):
        concrete = f(x, y)
        assert evaluate(s, {va: x, vb: y}) == concrete
    assert len(env.guards) == before
    assert m.sym(f(a, b)) is s


def test_ranges_and_hints_come_from_shape_env() -> None:
    _, m, a, b, _ = symbols()
    v = m.sym(a)
    assert isinstance(v, Var) and v.lo is not None and v.lo >= 0 and v.hi is None
    m.sym(b)
    assert sorted(m.hints.values()) == sorted(HINTS)


def test_bindings_prefer_integers_over_sizes_over_strides() -> None:
    _, m, a, b, fake = symbols()
    m.bind((fake, a))
    found = {str(x.var): (x.argument, x.what, x.dim) for x in m.bindings}
    assert found == {str(m.sym(a)): (1, "value", 0), str(m.sym(b)): (0, "size", 1)}


def test_an_expression_outside_of_our_integers_gets_a_variable() -> None:
    _, m, a, _, _ = symbols()
    half = torch.sym_int(a / 2.5)
    s = m.sym(half)
    assert isinstance(s, Var) and list(m.opaque) == [s.name]
    assert m.hints[s.name] == 4
    assert m.sym(half) is s


def test_what_a_guard_has_settled_is_a_number() -> None:
    env, _, a, _, _ = symbols()
    half = a // 2
    assert bool(half - 1 == 5)  # a is 12
    assert SymbolMap(env).sym(half - 1) is Int(5)
    assert len(env.guards) == 1


def test_unbacked_symbols_have_no_hint() -> None:
    env = ShapeEnv()
    m = SymbolMap(env)
    u = env.create_unbacked_symint()
    torch._check(u >= 0)
    v = m.sym(u)
    assert isinstance(v, Var) and v.name not in m.hints
