"""Kernels that try every op of the table in its Triton form: texts, inputs, and the verdict.

They are written by lenz's own emitter. A kernel holds many ops, since each costs its compiler
little more than nothing; a parameter is an operand or the result of one of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from lenz.ir.dtype import F32, FLOAT8, I32, DType
from lenz.ir.expr import Expr, const, expr, load
from lenz.ir.kernel import For, Kernel, Param, Store, TileConfig
from lenz.ir.tensor import axis, lane_axis
from lenz.machine.cuda.triton.compile import KernelText
from lenz.machine.cuda.triton.kernel import emit
from lenz.sym import sym
from tests.ops.cases import CASES, Case
from tests.ops.test_forms import check


@dataclass(frozen=True)
class Form:
    """One op with its types; `fixed` is the place of an operand that is a constant, or None."""

    case: Case
    fixed: int | None = None

    def __str__(self) -> str:
        return f"{self.case}" + ("" if self.fixed is None else f"-constant{self.fixed}")

    @property
    def dtype(self) -> DType:
        """The type of the result."""
        return self.case.op.dtype(self.case.dtypes, self.case.attrs)

    @property
    def value(self) -> float | int:
        """The constant operand: one that is valid as an exponent and as a count of bits too."""
        assert self.fixed is not None
        return 3.0 if self.case.dtypes[self.fixed] is F32 else 3

    def samples(self, count: int) -> tuple[torch.Tensor, ...]:
        """One tensor of `count` elements per operand."""
        found = self.case.samples(count // 4 if self.case.op.arity > 1 else count - 100)
        rounds = -(-count // len(found[0]))
        xs = [x.repeat(rounds)[:count].contiguous() for x in found]
        if self.fixed is not None:
            xs[self.fixed] = torch.full((count,), self.value, dtype=xs[self.fixed].dtype)
        if self.case.op.name == "cast" and xs[0].is_floating_point():
            xs[0] = torch.where(_holds(self.dtype, xs[0].double()), xs[0], 1)
        return tuple(xs)


def _holds(to: DType, x: torch.Tensor) -> torch.Tensor:
    """Where a float may become the type; beyond it CPUs and GPUs give different answers."""
    if not to.is_integer:
        return torch.ones_like(x, dtype=torch.bool)
    # Narrow types are the low bits of an i32; on GPUs u8 of an i64, and u16 of a u32.
    most = 2.0 ** (to.bits if to.bits >= 32 and to.kind == "uint" else max(to.bits, 32) - 1)
    least = -1.0 if to.kind == "uint" and to.bits > 8 else -most
    return (x > least) & (x < most)  # false for NaN


def _forms() -> Iterator[Form]:
    for case in CASES:
        yield Form(case)
        for k, d in enumerate(case.dtypes):
            # These are literals in the text, others are scalars of their type.
            if len(case.dtypes) > 1 and d in (F32, I32):
                yield Form(case, k)


FORMS = tuple(_forms())


def form_named(name: str) -> Form:
    """The form that prints as `name`."""
    (found,) = [f for f in FORMS if str(f) == name]
    return found


# Which zero they give for two zeros of different sign is not specified.
_EITHER_ZERO = ("minimum", "maximum", "fmin", "fmax")


def check_form(form: Form, got: torch.Tensor, xs: tuple[torch.Tensor, ...], ulp: float) -> None:
    """Compare with eager, the signs of zeros too."""
    case = form.case
    check(case, got, xs, ulp)
    if form.dtype.is_float and form.dtype.bits >= 32 and case.op.name not in _EITHER_ZERO:
        want = case.op.eager(*xs, *case.attrs)  # type: ignore[misc]
        lost = (got == 0) & (want == 0) & (got.signbit() != want.signbit())
        assert not lost.any(), f"{form} loses the sign of zero at {[x[lost][:3] for x in xs]}"


def kernel(name: str, forms: Sequence[Form], count: int, block: int) -> Kernel:
    """out<n> = op(x<n>_0, ...) for every form, each over `count` elements."""
    g, v = axis("g", sym(count // block)), lane_axis(axis("v", sym(block)))
    at = block * g.var + v.var
    params, stores = [], []
    for n, form in enumerate(forms):
        operands: list[Expr] = []
        for k, d in enumerate(form.case.dtypes):
            if k == form.fixed:
                operands.append(const(form.value, d))
                continue
            params.append(Param(f"x{n}_{k}", d, sym(count), "in"))
            operands.append(load(f"x{n}_{k}", (at,), d))
        params.append(Param(f"out{n}", form.dtype, sym(count), "out"))
        value = expr(form.case.op, *operands, attrs=form.case.attrs)
        stores.append(Store(f"out{n}", at, value))
    body = (For(g, "grid", (For(v, "lane", tuple(stores)),)),)
    return Kernel(name, "pointwise", tuple(params), (), body, tile=TileConfig(warps=4))


def text_of(name: str, forms: Sequence[Form], count: int, block: int, arch: int = 80) -> KernelText:
    """The Triton text of `kernel`."""
    return emit(kernel(name, forms, count, block), arch)


def arguments(
    forms: Sequence[Form], samples: Sequence[tuple[torch.Tensor, ...]]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What a launch takes, in order, and the results among it; bools and 8-bit floats are bytes."""
    args: list[torch.Tensor] = []
    outs: list[torch.Tensor] = []
    for form, xs in zip(forms, samples, strict=True):
        args += [x for k, x in enumerate(xs) if k != form.fixed]
        outs.append(torch.empty(len(xs[0]), dtype=form.dtype.torch))
        args.append(outs[-1])
    small = {torch.bool: torch.int8} | {d.torch: torch.uint8 for d in FLOAT8}
    return [a.view(small[a.dtype]) if a.dtype in small else a for a in args], outs
