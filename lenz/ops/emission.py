"""The builder's protocol for CPU forms of ops, and helpers for common forms.

A CPU form is a function (builder, result dtype, operand dtypes, operand values, attrs) -> value. A
guarded op gets an additional last operand, the bool "this lane runs". The builder itself is in
`machine/cpu/llvm/`; here is only its protocol, so that the op table imports no code generator.
Values are opaque: scalars, or vectors with one lane per iteration of the vector loop. A bool value
is i1.

A GPU form is Triton text: a template with {0} {1} {2}, or a function (result dtype, operand dtypes,
operand texts, attrs) -> text. `tl` and `libdevice` are in scope. A text of one operation is
assigned to a name, so it needs no parentheses; operands need none either, since they are names or
constants. Types in Triton text are `triton_type`: bool is tl.int1, u32 is tl.uint32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from lenz.ir.dtype import DType
from lenz.ir.op import Attrs, OpForm, Types


class Builder(Protocol):
    """The part of the LLVM builder that the op table uses."""

    def binary(self, opcode: str, dtype: DType, x: Any, y: Any) -> Any:
        """One two-operand instruction: fadd, sub, sdiv, xor, lshr and so on.

        A number as `y`, here and in `compare`, is a constant in every lane.
        """

    def compare(self, pred: str, operand_dtype: DType, x: Any, y: Any) -> Any:
        """One comparison, e.g. "fcmp olt" or "icmp slt"; the result is i1."""

    def select(self, cond: Any, dtype: DType, x: Any, y: Any) -> Any:
        """`x` where cond is true, else `y`."""

    def intrinsic(self, name: str, dtype: DType, *xs: Any) -> Any:
        """A call of an intrinsic overloaded by its result type."""

    def convert(self, opcode: str, to_dtype: DType, from_dtype: DType, x: Any) -> Any:
        """One conversion instruction, or half_to_f32 and f32_to_half."""

    def constant(self, dtype: DType, value: Any) -> Any:
        """A constant in every lane."""

    def libm(self, name: str, dtype: DType, *xs: Any) -> Any:
        """The C math function of this name for the type."""

    def has(self, feature: str) -> bool:
        """True when the target CPU has the feature, e.g. "avx512f"."""

    def rare(self, cond: Any, dtype: DType, fast: Any, slow: Callable[[], Any]) -> Any:
        """`slow()` where cond is true, else `fast`; slow only runs if any lane needs it."""


Values = tuple[Any, ...]  # the builder's operands

# Names that `Builder.intrinsic` accepts besides LLVM's: the upper and the lower half of the product
# of two u32; x * 2^k of f32 x and k (vscalefps of AVX-512, for vectors of any length).
MUL_HIGH_NAME, MUL_LOW_NAME = "lenz.mul_high", "lenz.mul_low"
SCALEF = "lenz.scalef"

Emit = Callable[[Builder, DType, Types, Values, Attrs], Any]


def by_kind(opcodes: Mapping[str, str]) -> Emit:
    """An instruction chosen by the kind of the result type."""
    return lambda b, dtype, _, xs, __: b.binary(opcodes[dtype.kind], dtype, xs[0], xs[1])


def compare_by_kind(predicates: Mapping[str, str]) -> Emit:
    """A comparison chosen by the kind of the operands' type."""
    return lambda b, _, args, xs, __: b.compare(predicates[args[0].kind], args[0], xs[0], xs[1])


def intrinsic(name: str) -> Emit:
    """A call of one intrinsic on the operands."""
    return lambda b, dtype, _, xs, __: b.intrinsic(name, dtype, *xs)


def library(
    name: str, arity: int, types: Types | None = None, gpu: Types | None = None,
    ulp: float | None = None,
) -> dict[str, OpForm]:  # fmt: skip
    """A function with the same name in the C library and CUDA's libdevice, for some types.

    `gpu`: libdevice's types, if they are others, with its error in f32.
    """
    emit: Emit = lambda b, dtype, _, xs, __: b.libm(name, dtype, *xs)
    operands = ", ".join(f"{{{i}}}" for i in range(arity))
    cuda = OpForm(f"libdevice.{name}({operands})", gpu or types, ulp=ulp)
    return {"cpu": OpForm(emit, types), "cuda": cuda}


TritonForm = Callable[[DType, Types, tuple[str, ...], Attrs], str]


def triton_type(d: DType) -> str:
    """The name of an element type's values in Triton text; 8-bit floats are bytes."""
    names = {"bool": "tl.int1", "bf16": "tl.bfloat16", "f8e4m3fn": "tl.uint8", "f8e5m2": "tl.uint8"}
    return names.get(d.name) or f"tl.{d.kind}{d.bits}"


def text_by_kind(**templates: str) -> TritonForm:
    """A template chosen by the name of the operands' type, or else by its kind."""

    def form(_: DType, args: Types, xs: tuple[str, ...], __: Attrs) -> str:
        return (templates.get(args[0].name) or templates[args[0].kind]).format(*xs)

    return form
