"""Chains of conversions between element types, to the bit as in eager.

All inputs of 8 and 16 bits, and hard ones of more. Two conversions in one kernel are what a card
got wrong: see docs/upstream. tests/gpu runs all chains of two and three, there or `--on cpu`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
import torch

E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2
TYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, E4, E5,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool,
)  # fmt: skip
# No loop has these: each conversion from or to them is a call of the eager op.
OTHERS = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
Chain = tuple[torch.dtype, ...]


def chains(first: torch.dtype, length: int, types: Sequence[torch.dtype] = TYPES) -> list[Chain]:
    """The types that `length` conversions of values of `first` go through, each to another one."""
    found: list[Chain] = [()]
    for _ in range(length):
        found = [(*c, t) for c in found for t in types if t is not (c[-1] if c else first)]
    return found


def numbers(dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """Every value of a type of 8 or 16 bits; those of all halves, and more, of a wider one."""
    if dtype is torch.bool:
        found = torch.arange(64).remainder(3) == 0
    elif dtype.itemsize == 1:
        found = torch.arange(256, dtype=torch.uint8).view(dtype)
    else:
        found = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
        if dtype.is_floating_point and dtype.itemsize == 2:
            found = found.view(dtype)
        elif dtype.is_floating_point:
            random = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0), dtype=dtype)
            halves = [found.view(t).to(dtype) for t in (torch.bfloat16, torch.float16)]
            found = torch.cat([*halves, random * 1e5, random * 1e11])
        elif dtype.itemsize > 2:
            bound = 1 << (8 * dtype.itemsize - 1)
            random = torch.randint(
                -bound,
                bound - 1,
                (1 << 16,),
                generator=torch.Generator().manual_seed(0),
                dtype=dtype,
            )
            found = torch.cat([found.to(dtype), random, random >> (4 * dtype.itemsize)])
    return found.to(device)


def converted(x: torch.Tensor, several: Sequence[Chain]) -> list[torch.Tensor]:
    """The results of the chains."""
    found = []
    for chain in several:
        y = x
        for t in chain:
            y = y.to(t)
        found.append(y)
    return found


def assert_chains(x: torch.Tensor, several: Sequence[Chain]) -> None:
    """Assert that one compiled function of all chains gives what eager gives, signs of 0 too."""
    torch._dynamo.reset()
    got = torch.compile(lambda x: converted(x, several), backend="lenz")(x)
    wrong = []
    for chain, a, b in zip(several, got, converted(x, several), strict=True):
        assert a.dtype is b.dtype
        if b.is_floating_point():
            a, b = a.double(), b.double()
            differs = (a != b) | (a.signbit() != b.signbit())
            differs &= ~(a.isnan() & b.isnan())
        else:
            differs = a != b
        if differs.any():
            n = int(differs.nonzero()[0])
            wrong.append(
                f"{x[n]} through {chain} is {a[n]}, not {b[n]} ({int(differs.sum())} wrong)"
            )
    assert not wrong, "\n".join(wrong)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("first", (torch.float64, torch.float16, E5, torch.int64), ids=str)
def test_two_conversions_are_two_conversions(first: torch.dtype) -> None:
    assert_chains(numbers(first), chains(first, 2))


@pytest.mark.parametrize("first", (torch.float32, torch.bfloat16, torch.uint8), ids=str)
def test_three_conversions_are_three_conversions(first: torch.dtype) -> None:
    assert_chains(numbers(first), [c for c in chains(first, 3) if {E4, E5} <= {*c}])


def test_types_of_the_eager_op_alone() -> None:
    assert_chains(numbers(torch.bfloat16), chains(torch.bfloat16, 2, (*OTHERS, torch.float16, E5)))


@pytest.mark.parametrize("to", (E4, E5), ids=str)
@pytest.mark.parametrize("first", (torch.float16, torch.bfloat16, torch.uint8), ids=str)
def test_kernels_for_gpus_convert_twice(first: torch.dtype, to: torch.dtype) -> None:
    from tests.gpu_oracle import assert_function

    x = numbers(first)
    few = x[:: max(1, len(x) // 500)]
    several = [c for c in chains(first, 3) if c[0] is to][::7]
    assert_function(lambda x: converted(x, several), few)


@pytest.mark.parametrize("arch", (89, 90))
@pytest.mark.parametrize("to", (E4, E5), ids=str)
def test_no_word_has_an_8_bit_float_and_what_is_computed_from_it(
    to: torch.dtype, arch: int
) -> None:
    """What ptxas gets wrong (docs/upstream) is not in the text that it is given."""
    pytest.importorskip("triton")
    from lenz.lower import lower
    from lenz.machine.cuda.triton import compile as compiler
    from lenz.machine.cuda.triton.kernel import emit
    from tests.cuda import CX, Fake, cuda_program
    from tests.gpu_oracle import kernels_of, on_gpu, scheduled

    several = [c for c in chains(torch.float16, 3) if c[0] is to and c[2] in (E4, torch.float16)]
    p = cuda_program(
        lambda x, y: [*converted(x, several), x.amax(0, keepdim=True).to(to).float(), y.to(to)],
        Fake((999_999,), torch.float16),
        Fake((2,), torch.float16),  # fewer lanes than a word has numbers
    )
    g = lower(p, CX)
    texts = []

    class Entry:
        @staticmethod
        def search(text: str) -> re.Match[str] | None:
            texts.append(text)
            return found.search(text)

    found = compiler.ENTRY
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "ENTRY", Entry)
        for k in kernels_of(scheduled(on_gpu(g))):
            assert compiler.compile_text(emit(k, arch), arch).code
    converts = [
        line
        for text in texts
        for line in text.splitlines()
        if re.search(r"cvt\S*\.e[45]m[32]x2\.", line)
    ]
    assert len(converts) > 10, "no instruction converts to 8-bit floats"
    for line in converts:
        registers = re.findall(r"x2\.f32\s+(\S+),", line)
        assert registers, line
        for register in registers:
            uses = re.findall(rf"[^;]*(?<!\w){re.escape(register)}\b[^;]*;", line)
            assert len(uses) == 3 and uses[2].split()[0] == "cvt.u32.u16", f"{register} in {line}"


def test_the_sign_of_what_came_from_f64_by_way_of_halves() -> None:
    """LLVM's own copysign ends in a call of a function that no JIT has: docs/upstream."""

    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.std([0], correction=0).tanh(), x.double().half().tanh()

    x = torch.tensor([1.5], dtype=torch.float16)
    got = torch.compile(f, backend="lenz", dynamic=False)(x)
    torch.testing.assert_close(got, f(x))
