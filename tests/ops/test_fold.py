"""Constant folding and the identities: exact for every value."""

from __future__ import annotations

import math

import pytest
import torch

from lenz import ops
from lenz.ir.dtype import BF16, BOOL, F16, F32, F64, I8, I16, I32, I64, NATIVE, U8, U16, U64
from lenz.ir.expr import Expr, const, expr, ref
from lenz.ir.op import CONST, op_named
from lenz.ops.fold import apply, holds_exactly
from tests.ops.cases import CASES, INF, NAN, SPECIALS, Case

X, Y, N, P = ref("x", F32), ref("y", F32), ref("n", I32), ref("p", BOOL)


def same_value(a: object, b: object) -> bool:
    """Equal, with NaN equal to NaN and the zeros apart."""
    if isinstance(a, float) and isinstance(b, float):
        if math.isnan(a) or math.isnan(b):
            return math.isnan(a) and math.isnan(b)
        return a == b and math.copysign(1.0, a) == math.copysign(1.0, b)
    return a == b


@pytest.mark.parametrize("case", CASES, ids=str)
def test_folding_equals_eager(case: Case) -> None:
    xs = [x[-40::4] for x in case.samples(20)]
    for values in zip(*[x.tolist() for x in xs], strict=True):
        operands = [const(v, d) for v, d in zip(values, case.dtypes, strict=True)]
        made = apply(case.op, *operands, attrs=case.attrs)
        tensors = [torch.tensor(v, dtype=d.torch) for v, d in zip(values, case.dtypes, strict=True)]
        want = case.op.eager(*tensors, *case.attrs).item()  # type: ignore[misc]
        if case.op.name == "bitcast" and made.op is not CONST:
            assert math.isnan(values[0]) or math.isnan(want)
            continue
        if case.op.name == "cast" and made.op is not CONST:
            assert not made.dtype.holds(values[0], values[0]), "CPUs and GPUs give other integers"
            continue
        assert made.op is CONST
        assert same_value(made.attrs[0], want), (values, made.attrs[0], want)


SAME = [
    (ops.add(N, const(0, I32)), N),
    (ops.add(const(0, I32), N), N),
    (ops.add(X, const(-0.0, F32)), X),
    (ops.sub(X, const(0.0, F32)), X),
    (ops.sub(N, N), const(0, I32)),
    (ops.mul(X, const(1.0, F32)), X),
    (ops.mul(const(0, I32), N), const(0, I32)),
    (ops.div(X, const(1.0, F32)), X),
    (ops.div(X, const(4.0, F32)), ops.mul(X, const(0.25, F32))),
    (ops.div(X, const(-0.5, F32)), ops.mul(X, const(-2.0, F32))),
    (ops.neg(ops.neg(X)), X),
    (ops.abs(ops.neg(X)), ops.abs(X)),
    (ops.floor(ops.trunc(X)), ops.trunc(X)),
    (ops.minimum(X, X), X),
    (ops.and_(P, const(True, BOOL)), P),
    (ops.and_(P, const(False, BOOL)), const(False, BOOL)),
    (ops.or_(P, const(True, BOOL)), const(True, BOOL)),
    (ops.xor(N, const(-1, I32)), ops.not_(N)),
    (ops.not_(ops.not_(P)), P),
    (ops.not_(ops.eq(X, Y)), ops.ne(X, Y)),
    (ops.not_(ops.lt(N, const(3, I32))), ops.ge(N, const(3, I32))),
    (ops.lt(X, X), const(False, BOOL)),
    (ops.eq(N, N), const(True, BOOL)),
    (ops.where(const(True, BOOL), X, Y), X),
    (ops.where(P, X, X), X),
    (ops.where(ops.not_(P), X, Y), ops.where(P, Y, X)),
    (ops.where(P, const(True, BOOL), const(False, BOOL)), P),
    (ops.cast(X, F32), X),
    (ops.cast(ops.cast(ref("h", F16), F32), F16), ref("h", F16)),
    (ops.cast(ops.cast(N, I64), I32), N),
    (ops.narrow(ops.cast(ref("b", BF16), F32), BF16), ref("b", BF16)),
    (ops.bitcast(ops.bitcast(X, I32), F32), X),
    (ops.pow(X, const(2.0, F32)), ops.mul(X, X)),
    (ops.pow(X, const(0.0, F32)), const(1.0, F32)),
    (ops.add(P, ref("q", BOOL)), ops.or_(P, ref("q", BOOL))),
    (ops.mul(P, ref("q", BOOL)), ops.and_(P, ref("q", BOOL))),
]


@pytest.mark.parametrize("pair", SAME, ids=lambda p: str(SAME.index(p)))
def test_identities_give_the_simpler_node(pair: tuple[Expr, Expr]) -> None:
    assert pair[0] is pair[1]


KEPT = [
    (ops.add(X, const(0.0, F32)), "add"),  # -0.0 + 0.0 is 0.0
    (ops.sub(X, const(-0.0, F32)), "sub"),
    (ops.sub(X, X), "sub"),  # NaN and infinities
    (ops.mul(X, const(0.0, F32)), "mul"),
    (ops.eq(X, X), "eq"),
    (ops.not_(ops.lt(X, Y)), "not"),  # both false with NaN
    (ops.div(X, const(3.0, F32)), "div"),
    (ops.div(X, const(2.0**127, F32)), "div"),  # the reciprocal is denormal
    (ops.cast(ops.cast(X, I32), F32), "cast"),
    (ops.cast(ops.narrow(X, BF16), F32), "cast"),
    (ops.cast(const(1e10, F32), I32), "cast"),  # the highest on GPUs, the lowest on CPUs
    (ops.cast(const(NAN, F32), I32), "cast"),  # 0 on GPUs
    (ops.cast(const(2.0**31 - 1, F32), I32), "cast"),  # 2^31 as f32
    (ops.cast(const(-3.0, F32), U16), "cast"),  # 0 on GPUs
    (ops.cast(ops.cast(X, F16), F32), "cast"),
    (ops.apply(op_named("shift_left"), N, const(40, I32)), "shift_left"),
]


@pytest.mark.parametrize("kept", KEPT, ids=lambda k: str(KEPT.index(k)))
def test_what_is_not_exact_is_left_alone(kept: tuple[Expr, str]) -> None:
    assert kept[0].op is op_named(kept[1])


@pytest.mark.parametrize("operation", [ops.add, ops.sub, ops.mul, ops.div, ops.minimum, ops.pow])
def test_simplified_float_nodes_keep_special_values(operation: object) -> None:
    assert callable(operation)
    for c in (0.0, -0.0, 1.0, -1.0, 2.0, 0.5, -0.5, 3.0, INF, NAN):
        made = operation(X, const(c, F32))
        for v in SPECIALS:
            x = torch.tensor(v, dtype=torch.float32)
            got = _value(made, x)
            want = op_named(operation.__name__).eager(x, torch.tensor(c))  # type: ignore[misc, attr-defined]
            if operation is ops.pow:
                torch.testing.assert_close(got, want, rtol=3e-7, atol=1e-44, equal_nan=True)
            else:
                assert same_value(got.item(), want.item()), (operation, v, c)


def _value(e: Expr, x: torch.Tensor) -> torch.Tensor:
    if e is X:
        return x
    if e.op is CONST:
        return torch.tensor(e.attrs[0], dtype=e.dtype.torch)
    out: torch.Tensor = e.op.eager(*[_value(a, x) for a in e.args], *e.attrs)  # type: ignore[misc]
    return out


def test_types_that_hold_others() -> None:
    pairs = {(a.name, b.name) for a in NATIVE for b in NATIVE if holds_exactly(a, b)}
    assert {("f32", "i16"), ("f64", "i32"), ("i16", "u8"), ("bf16", "i8"), ("f16", "i8")} <= pairs
    assert not {("f32", "i32"), ("i8", "u8"), ("u8", "i8"), ("f16", "bf16"), ("u64", "i8")} & pairs
    assert ("f64", "i64") not in pairs and ("bf16", "i16") not in pairs


WRONG = [
    lambda: ops.add(X, N),
    lambda: ops.add(ref("h", F16), ref("g", F16)),
    lambda: ops.exp(N),
    lambda: ops.exp(ref("h", BF16)),
    lambda: ops.sub(P, P),
    lambda: ops.and_(X, Y),
    lambda: ops.where(N, X, Y),
    lambda: ops.where(P, X, N),
    lambda: ops.bitcast(X, I16),
    lambda: ops.bitcast(P, I8),
    lambda: ops.narrow(ref("d", F64), F16),
    lambda: ops.narrow(X, F64),
    lambda: ops.shl(N, ref("m", I64)),
    lambda: ops.scale(X, ref("m", I64)),
    lambda: ops.rand_bits(ref("s", I64), N),
    lambda: ops.rand_bits(ref("s", I64), ref("t", I64), 4),
    lambda: expr(op_named("cast"), X),
    lambda: expr(op_named("add"), X),
    lambda: ops.pow(ref("u", U64), ref("v", U64)),
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda w: str(WRONG.index(w)))
def test_wrong_types_are_refused(wrong: object) -> None:
    assert callable(wrong)
    with pytest.raises(TypeError):
        wrong()


@pytest.mark.parametrize(
    ("x", "y"), [(7, 3), (-7, 3), (7, -3), (-7, -3), (-128, -1), (5, 0), (-1, 127), (127, -128)]
)
def test_integer_division_is_pythons(x: int, y: int) -> None:
    a, b = const(x, I8), const(y, I8)
    quotient = x if y == 0 else x // y
    assert ops.div_floor(a, b) is const(quotient, I8)
    assert ops.remainder(a, b) is const(0 if y == 0 else x % y, I8)
    assert ops.div_trunc(a, b) is const(x if y == 0 else int(x / y), I8)
    assert ops.fmod(a, b) is const(0 if y == 0 else int(math.fmod(x, y)), I8)


def test_unsigned_types_wrap() -> None:
    top = const(2**64 - 1, U64)
    assert ops.add(top, const(2, U64)) is const(1, U64)
    assert ops.mul(top, top) is const(1, U64)
    assert ops.shr(top, const(63, U64)) is const(1, U64)
    assert ops.lt(const(1, U64), top) is const(True, BOOL)
    assert ops.neg(const(1, U8)) is const(255, U8)


@pytest.mark.parametrize(
    ("made", "want"),
    [
        (-X, ops.neg(X)),
        (abs(X), ops.abs(X)),
        (~P, ops.not_(P)),
        (X + Y, ops.add(X, Y)),
        (1 + X, ops.add(const(1, F32), X)),
        (X - 1, ops.sub(X, const(1, F32))),
        (1 - X, ops.sub(const(1, F32), X)),
        (2 * X * Y, ops.mul(ops.mul(const(2, F32), X), Y)),
        (X / Y, ops.div(X, Y)),
        (1 / X, ops.div(const(1, F32), X)),
        ((N & 7) | (N ^ 1), ops.or_(ops.and_(N, const(7, I32)), ops.xor(N, const(1, I32)))),
        ((N << 3) >> 1, ops.shr(ops.shl(N, const(3, I32)), const(1, I32))),
        ((X < 1) & (X >= Y), ops.and_(ops.lt(X, const(1, F32)), ops.ge(X, Y))),
        ((X > 1) | (X <= Y), ops.or_(ops.gt(X, const(1, F32)), ops.le(X, Y))),
        (N * 0, const(0, I32)),
        (ops.where(P, 0, X), ops.where(P, const(0, F32), X)),
        (ops.fma(X, 2, -1), ops.fma(X, const(2, F32), const(-1, F32))),
        (ops.eq(X, 1), ops.eq(X, const(1, F32))),
    ],
    ids=str,
)
def test_operators_are_the_functions(made: Expr, want: Expr) -> None:
    assert made is want


def test_an_expression_has_identity_and_no_truth() -> None:
    assert X == X and X != Y, "a comparison by == is one of identity"
    assert {X: 1, Y: 2}[X] == 1
    with pytest.raises(TypeError, match="no truth value"):
        assert 0 < X < 1
    with pytest.raises(TypeError, match="are numbers"):
        ops.where(P, 0, 1)
