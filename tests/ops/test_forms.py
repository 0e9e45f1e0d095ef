"""Both definitions of an op, `expand` and the CPU form, against its eager reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lenz import ops
from lenz.errors import InternalError
from lenz.ir import op
from lenz.ir.dtype import F32, DType
from lenz.ir.expr import Expr, const, expr, interpret, nodes_of, ref
from lenz.ir.op import CONST, REF, OpForm, add_form, op_named
from lenz.machine.cpu.llvm.legalise import MACHINE
from lenz.machine.legalise import is_direct, legal_expr
from tests.ops.cases import CASES, Case
from tests.ops.lanes import Lanes, as_lanes, as_tensor


def is_emitted(case: Case) -> bool:
    """True when the op has an LLVM form of its own for these types."""
    args = [const(0, d) for d in case.dtypes]
    return is_direct(expr(case.op, *args, attrs=case.attrs), MACHINE)


EMITTED = [c for c in CASES if is_emitted(c)]
# Ops that have both forms for a type never use the expansion there, but f32 is worth the test;
# that of casts is for 8-bit floats only.
EXPANDED = [
    c
    for c in CASES
    if c.op.expand is not None
    and (not is_emitted(c) or (c.dtypes[0] is F32 and c.op.name != "cast"))
]


def has_form(case: Case) -> bool:
    """True when a CPU kernel can compute the op for these types."""
    return is_emitted(case) or case.op.expand is not None


def evaluate(
    body: Expr, values: dict[str, torch.Tensor], memo: dict[Expr, torch.Tensor] | None = None
) -> torch.Tensor:
    """The value of an expression, every op by its eager reference; `memo` gets those of parts."""

    def visit(e: Expr, args: list[torch.Tensor]) -> torch.Tensor:
        if e.op is CONST:
            return torch.tensor(e.attrs[0], dtype=e.dtype.torch)
        if e.op is REF:
            return values[e.attrs[0]]
        out: torch.Tensor = e.op.eager(*args, *e.attrs)  # type: ignore[misc]
        assert out.dtype is e.dtype.torch, e.op
        return out

    return interpret(body, visit, memo)


def emit(body: Expr, values: dict[str, torch.Tensor], b: Lanes) -> torch.Tensor:
    """The value of an expression, every op by its LLVM form, or expanded where it has none."""

    def visit(e: Expr, args: list[Any]) -> Any:
        if e.op is CONST:
            return b.constant(e.dtype, e.attrs[0])
        if e.op is REF:
            return as_lanes(values[e.attrs[0]])
        dtypes = tuple(a.dtype for a in e.args)
        if not is_emitted(Case(e.op, dtypes, e.attrs)):
            assert e.op.expand is not None
            names = [ref(f"{i}", d) for i, d in enumerate(dtypes)]
            inner = {
                f"{i}": as_tensor(a, d) for i, (a, d) in enumerate(zip(args, dtypes, strict=True))
            }
            return as_lanes(emit(e.op.expand(*names, *e.attrs), inner, b))
        form: Any = e.op.form(MACHINE).emit
        return form(b, e.dtype, dtypes, tuple(args), e.attrs)

    return as_tensor(interpret(body, visit), body.dtype)


def errors_in_ulp(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Distance of f32 values from f64 ones in units in the last place; 0 where both are NaN."""
    rounded = want.float()
    finite = torch.where(torch.isfinite(rounded), rounded, torch.ones_like(rounded))
    with np.errstate(over="ignore"):  # beyond the greatest f32
        unit = torch.from_numpy(np.spacing(finite.abs().numpy())).double()
    error = (got.double() - want).abs() / unit
    same = (got == rounded) | (got.isnan() & rounded.isnan())
    return torch.where(same, 0.0, torch.nan_to_num(error, nan=float("inf")))


def check(
    case: Case, got: torch.Tensor, xs: tuple[torch.Tensor, ...], ulp: float | None = None
) -> None:
    """Compare with eager: exactly, or in ulp against f64 where the entry allows an error.

    `ulp` is another bound than that of the entry.
    """
    dtype = case.op.dtype(case.dtypes, case.attrs)
    assert got.dtype is dtype.torch
    allowed = case.op.ulp if ulp is None else ulp
    if not dtype.is_float or allowed == 0.0:
        want = case.op.eager(*xs, *case.attrs)  # type: ignore[misc]
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
        return
    if dtype is not F32:
        want = case.op.eager(*xs, *case.attrs)  # type: ignore[misc]
        torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-300, equal_nan=True)
        return
    exact = [x.double() if x.is_floating_point() else x for x in xs]
    want = case.op.eager(*exact, *case.attrs)  # type: ignore[misc]
    errors = errors_in_ulp(got, want)
    errors[(got.double() - want).abs() <= case.op.absolute] = 0.0
    worst = int(errors.argmax())
    assert errors[worst] <= allowed, (
        f"{case} is off by {errors[worst]:.2f} ulp at {[x[worst].item() for x in xs]}: "
        f"{got[worst].item()} for {want[worst].item()}"
    )
    lost = (got == 0) & (want == 0) & (got.signbit() != want.signbit())
    assert not lost.any(), f"{case} loses the sign of zero at {[x[lost][:3] for x in xs]}"


def operands(dtypes: tuple[DType, ...]) -> list[Expr]:
    """One reference per operand."""
    return [ref(f"x{i}", d) for i, d in enumerate(dtypes)]


def named(xs: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    """The values of `operands`."""
    return {f"x{i}": x for i, x in enumerate(xs)}


@pytest.mark.parametrize("case", EXPANDED, ids=str)
def test_the_expansion_agrees_with_eager(case: Case) -> None:
    xs = case.samples()
    args = operands(case.dtypes)
    body = case.op.expand(*args, *case.attrs)  # type: ignore[misc]
    assert expr(case.op, *args, attrs=case.attrs) not in nodes_of(body), "it is made of itself"
    check(case, evaluate(body, named(xs)), xs)


@pytest.mark.parametrize("features", [(), ("avx512f",)], ids=["plain", "avx512"])
@pytest.mark.parametrize("case", EMITTED, ids=str)
def test_the_llvm_form_agrees_with_eager(case: Case, features: tuple[str, ...]) -> None:
    xs = case.samples(500)
    dtype = case.op.dtype(case.dtypes, case.attrs)
    b = Lanes(len(xs[0]), features)
    lanes = tuple(as_lanes(x) for x in xs)
    emit: Any = case.op.form(MACHINE).emit
    found = emit(b, dtype, case.dtypes, lanes, case.attrs)
    check(case, as_tensor(found, dtype), xs)


@pytest.mark.parametrize("case", [c for c in EXPANDED if c not in EMITTED], ids=str)
def test_the_expansion_emitted_agrees_with_eager(case: Case) -> None:
    xs = case.samples(500)
    body = case.op.expand(*operands(case.dtypes), *case.attrs)  # type: ignore[misc]
    check(case, emit(body, named(xs), Lanes(len(xs[0]))), xs)


LIMITS = (1.0, 20.0, 50.0, 200.0, 1000.0, 1e9, float("inf"))
# Small numbers whose squares are subnormal; functions that take squares have larger ones.
SMALL = {"exp": 1e-22, "exp2": 1e-22, "expm1": 1e-22, "log1p": 1e-22, "sigmoid": 1e-22}


@pytest.mark.parametrize("case", [c for c in EXPANDED if c.dtypes == (F32,)], ids=str)
def test_no_step_of_a_normal_result_is_subnormal(case: Case) -> None:
    """Numbers below the normal ones, and products that underflow, take CPUs ten times as long."""
    size = torch.tensor((SMALL.get(case.op.name, 1e-13), *LIMITS))
    x = torch.cat([size, -size])
    memo: dict[Expr, torch.Tensor] = {}
    evaluate(case.op.expand(*operands(case.dtypes), *case.attrs), named((x,)), memo)  # type: ignore[misc]
    for e in (e for e in memo if e.dtype is F32 and e.op.name in ("mul", "fma", "scale", "div")):
        found, a, b, *added = (memo[part].expand(len(x)) for part in (e, *e.args))
        is_zero = (a == 0) | (b.isinf() if e.op.name == "div" else b == 0)
        is_zero |= added[0] != 0 if added else False  # the sum may cancel
        slow = (found.abs() < 2.0**-126) & ((found != 0) | ~is_zero)
        assert not slow.any(), (e, x[slow])


def test_every_case_has_a_form() -> None:
    assert [str(c) for c in CASES if not has_form(c)] == []


COMMUTING = [c for c in CASES if c.op.commutes]


@pytest.mark.parametrize("case", COMMUTING, ids=str)
def test_operands_of_commuting_ops_may_be_swapped(case: Case) -> None:
    x, y = case.samples(200)
    eager = case.op.eager
    assert eager is not None
    torch.testing.assert_close(eager(x, y), eager(y, x), rtol=0, atol=0, equal_nan=True)


def test_a_machine_from_outside_brings_its_own_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a direct form of 2^x, in which it writes e^x; its table needs no change of lenz."""
    x = ref("x", F32)
    mine = {
        "exp2": OpForm("npu.exp2 {0}", types=(F32,)),
        "mul": OpForm("npu.mul {0} {1}"),
        "exp": OpForm(expand=lambda e: ops.exp2(e * 1.4426950408889634)),
    }

    def written(e: Expr) -> Expr:
        return legal_expr(e, "npu", {})

    monkeypatch.setattr(op, "_ADDED", {})
    for name, form in mine.items():
        add_form(op_named(name), "npu", form)
    assert written(ops.exp(x)) is ops.exp2(x * 1.4426950408889634)
    with pytest.raises(InternalError, match=r"sqrt\(f32\) has no form on npu"):
        written(ops.sqrt(x))
    for machine in ("npu", "cuda"):
        with pytest.raises(ValueError, match=f"'mul' has two forms on {machine}"):
            add_form(op_named("mul"), machine, OpForm("{0} * {1}"))
