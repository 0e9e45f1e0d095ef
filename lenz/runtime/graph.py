"""Functions called by a plan as an FX graph: kernels by number, assertions, ends of lifetimes.

An op takes tensors and numbers only, so a graph names a kernel by its number in a table. GPU
kernels are also in torch's table of Triton kernels. The tables keep no machine code alive: the
nodes that launch it do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.fx import has_side_effect

from lenz.records import dataclass
from lenz.runtime import executor
from lenz.runtime.executor import Shape

_NUMBERS = count()
_KERNELS: WeakValueDictionary[int, NumberedKernel] = WeakValueDictionary()


class NumberedKernel:
    """A kernel that graphs launch by its `number`.

    run    takes pointers, then sizes, and returns the code of a failed check; a GPU's takes its
           stream and the number of programs before these
    names  the parameters of a GPU kernel
    alive  an object that must live as long as `run`
    """

    def __init__(
        self, run: Callable[..., Any], names: Sequence[str] = (), gpu: int = -1,
        alive: object = None,
    ) -> None:  # fmt: skip
        self.run, self.alive, self.number = run, alive, next(_NUMBERS)
        self.names = tuple(names)
        _KERNELS[self.number] = self
        self.places = _listed(TableKernel(self.number, self.names, gpu)) if gpu >= 0 else (-1, -1)

    def __deepcopy__(self, memo: object) -> NumberedKernel:
        """The kernel itself: a copy of a graph launches the same one."""
        return self


@dataclass(frozen=True, slots=True)
class TableKernel:
    """A GPU kernel in torch's table, launched like Triton's: `entry[grid](*args)`."""

    number: int
    arg_names: tuple[str, ...]
    gpu: int

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        """The kernel on a grid of programs."""
        return partial(self.launch, grid[0])

    def launch(self, programs: int, *args: Any) -> None:
        """Run the kernel on the current stream."""
        given = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args]
        _KERNELS[self.number].run(executor.stream(self.gpu), programs, *given)


def _listed(entry: TableKernel) -> tuple[int, int]:
    """Put a kernel in torch's table; returns its index, and that of its (empty) constants."""
    from torch._higher_order_ops import triton_kernel_wrap as wrap

    has_side_effect(wrap.triton_kernel_wrapper_mutation)  # otherwise FX drops launches
    return wrap.kernel_side_table.add_kernel(entry), wrap.kernel_side_table.add_constant_args({})


def _launch(kernel: int, args: Sequence[torch.Tensor], sizes: Sequence[int]) -> None:
    """Run a kernel, which may write to all of `args`; raises the error of a failed check."""
    if failed := _KERNELS[kernel].run(*[t.data_ptr() for t in args], *sizes):
        executor.raise_failed(failed)


SCHEMA = "(int kernel, Tensor(a!)[] args, SymInt[] sizes) -> ()"
torch.library.define("lenz::launch", SCHEMA)
torch.library.impl("lenz::launch", "default", _launch)
torch.library.register_fake("lenz::launch", lambda *args: None)


@has_side_effect
def assert_tensor(
    t: Any, name: str, size: Shape, stride: Shape, dtype: torch.dtype, device: str,
    signed: bool = False,
) -> None:  # fmt: skip
    """Raise UserError unless the argument `name` is such a tensor; the device "" means any.

    A `signed` one must not have the negative bit. Strides of dimensions of size 1 are free.
    """
    is_right = executor.is_laid_out(t, size, stride, not device) and not (signed and t.is_neg())
    if not is_right or t.dtype is not dtype or device not in ("", str(t.device)):
        executor.refuse((t,), ((name, size, stride, dtype, device),))


@has_side_effect
def assert_aligned(t: torch.Tensor) -> None:
    """Raise UserError unless a tensor starts at a multiple of 16 bytes."""
    if t.data_ptr() & 15:
        executor.refuse_call([t])


def laid(
    t: Any, name: str, size: Shape, stride: Shape, dtype: torch.dtype, device: str
) -> torch.Tensor:
    """An argument with the required strides and no negative bit; a copy if necessary."""
    return executor.laid((t,), ((name, size, stride, dtype, device),))[0]  # type: ignore[no-any-return]  # a tensor


@has_side_effect
def delete(t: torch.Tensor) -> None:
    """Mark the end of a tensor's life: no later node uses the tensor, so that FX frees it."""


for _name in ("assert_scalar", "exchange_gpu", "restore_gpu", "several"):
    has_side_effect(getattr(executor, _name))
