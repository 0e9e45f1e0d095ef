"""Programs that call Triton kernels of their own, with what they compute, and a Triton without GPU.

`PROGRAMS` are for CUDA tensors; `wanted` says in plain torch what a program gives, and does to its
arguments. `triton_there` lets Dynamo trace such calls on a machine without a GPU: it tells Triton
of an sm_90 that can be asked for its name alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["PROGRAMS", "Program", "Sum", "triton_there"]


@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """out = x + y."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    tl.store(out + i, tl.load(x + i, inside) + tl.load(y + i, inside), inside)


@triton.jit
def scale_kernel(x, n, factor, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """x *= factor."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    tl.store(x + i, tl.load(x + i, inside) * factor, inside)


@triton.jit
def column_kernel(x, out, rows, stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """out = the first column of x, whose rows are `stride` elements apart."""
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i * stride, i < rows), i < rows)


@triton.autotune(
    configs=[triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128}, num_warps=8)], key=["n"]
)
@triton.jit
def twice_kernel(x, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """out = 2 x."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, i < n) * 2, i < n)


def blocks(n: int) -> Callable[[dict[str, Any]], tuple[int]]:
    return lambda meta: (triton.cdiv(n, meta["BLOCK"]),)


def add(x: Tensor, y: Tensor) -> Tensor:
    out = torch.empty_like(x)
    add_kernel[(triton.cdiv(x.numel(), 128),)](x, y, out, x.numel(), BLOCK=128)
    return out


def scale_(x: Tensor, factor: float) -> None:
    scale_kernel[blocks(x.numel())](x, x.numel(), factor, BLOCK=128)


class Sum(torch.autograd.Function):
    """x + y by the kernel; the gradients are halves, made by it as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return add(x, y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        made = torch.zeros_like(grad)
        grad = grad.contiguous()
        add_kernel[blocks(grad.numel())](grad, made, made, grad.numel(), BLOCK=64)
        scale_(made, 0.5)
        return made, grad * 0.5


def surrounded(x: Tensor, y: Tensor) -> Tensor:
    return add(x.sin() * 2, y + 1).relu() * 3


def in_place(x: Tensor, y: Tensor) -> Tensor:
    scale_(x, 2.0)
    scale_(x, 4.0)
    return x + y


def in_place_and_returned(x: Tensor) -> tuple[Tensor, Tensor]:
    scale_(x, 2.0)
    return x, x + 1


def read_before(x: Tensor) -> Tensor:
    old = x + 1
    scale_(x, 3.0)
    return old * x


def original_needed(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.cos()
    z = y.clone()
    scale_(z, 2.0)
    return y + 1, z


def argument_kept(x: Tensor) -> Tensor:
    z = x.clone()
    scale_(z, 2.0)
    return x - z


def equal_fills(x: Tensor) -> Tensor:
    a, b = torch.zeros(x.shape, device=x.device), torch.full(x.shape, 0.0, device=x.device)
    add_kernel[blocks(x.numel())](x, x, a, x.numel(), BLOCK=128)
    return a + b


def part_of_a_tensor(x: Tensor) -> Tensor:
    out = torch.cat([x, x])
    add_kernel[blocks(100)](x, x, out[100:], 100, BLOCK=64)
    return out


def strided(x: Tensor) -> Tensor:
    square = x[:256].reshape(16, 16).t()
    out = torch.empty(16, device=x.device)
    column_kernel[(1,)](square, out, 16, square.stride(0), BLOCK=16)
    return out * 2


def tuned(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    twice_kernel[blocks(x.numel())](x + 1, out, x.numel())
    return out.sum()


def with_warps(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    add_kernel[blocks(x.numel())](x, x, out, x.numel(), BLOCK=64, num_warps=2)
    return out


@torch.library.triton_op("lenz_tests::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    """A custom op whose kernel torch lets compilers see."""
    out = torch.empty_like(x)
    torch.library.wrap_triton(add_kernel)[blocks(x.numel())](x, x, out, x.numel(), BLOCK=64)
    return out


def in_a_custom_op(x: Tensor) -> Tensor:
    return twice(x + 1) * 2


@dataclass(frozen=True)
class Program:
    """`fn` of one or two f32 vectors of 300 elements.

    `wanted` gives its results and then its arguments afterwards; `copies` is how many tensors must
    be copied before a kernel writes into them, `kernels` how many of lenz's own there are at most.
    """

    fn: Callable[..., Any]
    wanted: Callable[..., tuple[Tensor, ...]]
    copies: int = 0
    kernels: int = 1
    count: int = 1

    def __str__(self) -> str:
        return self.fn.__name__


PROGRAMS = (
    Program(surrounded, lambda x, y: ((x.sin() * 2 + y + 1).relu() * 3, x, y), 0, 3, 2),
    Program(in_place, lambda x, y: (x * 8 + y, x * 8, y), count=2),
    Program(in_place_and_returned, lambda x: (x * 2, x * 2 + 1, x * 2)),
    Program(read_before, lambda x: ((x + 1) * x * 3, x * 3), 0, 2),
    Program(original_needed, lambda x: (x.cos() + 1, x.cos() * 2, x), 1, 2),
    Program(argument_kept, lambda x: (x - x * 2, x), 1, 2),
    Program(equal_fills, lambda x: (x * 2, x), 0, 2),
    Program(part_of_a_tensor, lambda x: (torch.cat([x[:100], x[:100] * 2, x[200:], x]), x), 1, 2),
    Program(strided, lambda x: (x[:16] * 2, x)),
    Program(tuned, lambda x: ((x + 1).sum() * 2, x), 0, 2),
    Program(in_a_custom_op, lambda x: ((x + 1) * 4, x), 0, 2),
    Program(with_warps, lambda x: (x * 2, x), 0, 0),
)


class _Driver:
    """What Triton asks before it makes its first IR of a kernel."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


@contextmanager
def triton_there() -> Iterator[None]:
    """Let Triton, and what torch knows of it, seem to have a GPU."""
    import torch.utils._triton
    from triton.runtime import driver

    if torch.cuda.is_available():
        yield
        return
    before = driver._active
    driver.set_active(_Driver())
    try:
        with mock.patch.object(torch.utils._triton, "has_triton", lambda: True):
            yield
    finally:
        driver._active = before
