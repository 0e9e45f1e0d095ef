"""Graphs for "cuda:0" on a machine without a GPU: Dynamo, AOTAutograd and lenz on fake tensors.

`cuda_program(fn, (8, 16), (16,))` gives the `FxProgram` that lenz would be asked to compile for
CUDA tensors of these shapes, `cuda_programs` the forward and backward halves of a training step.
Everything up to compiled kernels can be tested with them; nothing can be run.

A torch without CUDA aborts the process when autograd meets a CUDA tensor, since nobody has told it
of a stream or a device.  `fake_cuda` gives it both, in memory of this process: a device guard that
knows one device and one stream, and the answer that CUDA is built.  With CUDA at hand the real ones
are used.

What is not as on a GPU: only device 0 exists; cuDNN is said to be there (so that convolutions keep
channels last), but what depends on the card is as without one; which kernel
`scaled_dot_product_attention` chooses is told by `attention`, whatever shapes and masks are;
constants on the device cannot be made.
Needs Linux, and a torch whose C++ classes are laid out as in 2.13 (else pytest skips the test).
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from lenz.context import Context
from lenz.frontend import FxProgram
from lenz.frontend.capture import capture
from lenz.lower import native_ops
from lenz.options import Options
from lenz.target import Target

__all__ = ["CX", "Fake", "choose", "cuda_program", "cuda_programs", "fake_cuda", "programs_of"]

CX = Context(Options(), Target("cpu"))  # for lowering, which asks for no more
Attention = Literal["math", "flash", "efficient", "cudnn"]
CHOICES: tuple[Attention, ...] = ("math", "flash", "efficient", "cudnn")  # sdp::SDPBackend
CUDA, META = 1, 14  # c10::DeviceType

# {i64, i64} is c10::Stream: device (type 1, index 0 in the two low bytes), then the stream's id.
FUNCTIONS = """
@choice = global i64 0
define i8 @yes() { ret i8 1 }
define void @nothing() { ret void }
define i64 @version() { ret i64 91000 }
define double @epsilon() { ret double 0.0 }
define i16 @device() { ret i16 1 }
define {i64, i64} @stream() { ret {i64, i64} {i64 1, i64 0} }
define i64 @choose() {
  %c = load i64, ptr @choice
  ret i64 %c
}
"""
# Places in the tables of virtual functions, as the headers list them.
GUARD = {
    0: "yes",  # type(): 1 is CUDA
    1: "device",  # exchangeDevice
    2: "device",  # getDevice
    5: "stream",  # getStream
    8: "stream",  # getNewStream
    9: "stream",  # exchangeStream
    12: "nothing",  # record
    13: "nothing",  # block
    14: "yes",  # queryEvent
}
# isBuilt, isAvailable, hasPrimaryContext, deviceCount; cuDNN: compiled, dilated, depthwise, bf16,
# its version twice, and the least epsilon of its batch norm.
HOOKS = {
    **dict.fromkeys((2, 3, 4, 6, 28, 30, 31, 32), "yes"),
    34: "version",
    35: "version",
    41: "epsilon",
}


@dataclass(frozen=True, slots=True)
class Fake:
    """A tensor to be made inside of the fake mode."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"
    grad: bool = False

    def make(self) -> torch.Tensor:
        """The tensor; only inside of `fake_cuda`."""
        return torch.empty(
            self.shape, dtype=self.dtype, device=self.device, requires_grad=self.grad
        )


@cache
def _addresses() -> dict[str, int]:
    """The functions of FUNCTIONS, compiled; they live as long as the process."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(FUNCTIONS), machine)
    engine.finalize_object()
    names = {*GUARD.values(), *HOOKS.values(), "choose"}
    found = {n: engine.get_function_address(n) for n in sorted(names)}
    found["choice"] = engine.get_global_value_address("choice")
    _KEPT.append(engine)
    return found


_KEPT: list[Any] = []


def _table(instance: int, entries: int, changes: dict[int, str]) -> Any:
    """A copy of the table of virtual functions of the C++ object at `instance`, with changes."""
    table = (ctypes.c_void_p * (entries + 2))()  # two words stand before the first function
    old = ctypes.c_void_p.from_address(instance).value
    assert old is not None
    ctypes.memmove(table, old - 16, 8 * (entries + 2))
    for place, name in changes.items():
        table[place + 2] = _addresses()[name]
    return table


@contextmanager
def _pretended(attention: Attention) -> Iterator[None]:
    """Tell torch of a CUDA device, until the end of the `with`."""
    folder = Path(torch.__file__).parent / "lib"
    try:
        core = ctypes.CDLL(str(folder / "libc10.so"))
        slots = (ctypes.c_void_p * 22).in_dll(core, "_ZN3c104impl26device_guard_impl_registryE")
        aten = ctypes.CDLL(str(folder / "libtorch_cpu.so"))
        chooser = (ctypes.c_void_p * 2).in_dll(aten, "_ZN2at6native22_fused_sdp_choice_stubE")
        get_hooks = aten._ZN2at6detail12getCUDAHooksEv
    except (OSError, AttributeError, ValueError) as e:
        pytest.skip(f"no way to pretend CUDA with this torch: {e}")
    get_hooks.restype = ctypes.c_void_p
    hooks = ctypes.c_void_p.from_address(get_hooks())
    guard_table, hooks_table = _table(slots[META], 30, GUARD), _table(get_hooks(), 80, HOOKS)  # type: ignore[arg-type]
    guard = (ctypes.c_void_p * 1)(ctypes.addressof(guard_table) + 16)
    before = slots[CUDA], hooks.value, chooser[1]
    slots[CUDA] = ctypes.addressof(guard)
    hooks.value = ctypes.addressof(hooks_table) + 16
    chooser[1] = _addresses()["choose"]
    choose(attention)
    try:
        yield
    finally:
        slots[CUDA], hooks.value, chooser[1] = before


def choose(attention: Attention) -> None:
    """Name the kernel that attention takes from now on, inside of `fake_cuda` without CUDA."""
    ctypes.c_int64.from_address(_addresses()["choice"]).value = CHOICES.index(attention)


@contextmanager
def fake_cuda(attention: Attention = "flash") -> Iterator[FakeTensorMode]:
    """A FakeTensorMode in which "cuda" tensors exist, with autograd.

    Modules are built inside, under `with torch.device("cuda")`; `module.to("cuda")` cannot swap
    fake parameters.

    `attention` is the kernel that scaled_dot_product_attention chooses for CUDA tensors.
    """
    if not sys.platform.startswith("linux"):
        pytest.skip("CUDA is pretended on Linux only")
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    if torch.cuda.is_available():
        with mode:
            yield mode
        return
    with _pretended(attention), mode:
        yield mode


def programs_of(fn: Callable[..., Any], *args: Any, dynamic: bool | None = None) -> list[FxProgram]:
    """Capture one call of `fn`, and its backward pass if there is one; inside of `fake_cuda`.

    Gives the programs in the order in which lenz would compile them.
    """
    found: list[FxProgram] = []

    def compile_fx(p: FxProgram) -> Callable[[list[Any]], Sequence[Any]]:
        found.append(p)
        return p.eager()

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return capture(gm, inputs, compile_fx, Options(cache=False, verify=True), native_ops())

    torch._dynamo.reset()
    try:
        results = torch.compile(fn, backend=backend, dynamic=dynamic)(*args)
    except DataDependentOutputException:
        return found  # captured, but a fake tensor has no number to give to `item()`
    leaves = torch.utils._pytree.tree_leaves(results)
    outs = [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]
    if outs:
        # On this thread: autograd's own for CUDA were started, or not, by its first use.
        with torch.autograd.set_multithreading_enabled(False):
            torch.autograd.backward(outs, [torch.empty_like(t) for t in outs])
    return found


def cuda_programs(
    fn: Callable[..., Any],
    *args: Any,
    dtype: torch.dtype = torch.bfloat16,
    grad: bool = False,
    dynamic: bool | None = None,
    attention: Attention = "flash",
) -> list[FxProgram]:
    """The programs of `fn`: a tuple of ints among `args` is the shape of a CUDA tensor.

    `dtype` and `grad` are for the tensors given by their shape; `Fake` says all of it for one.
    Other arguments are given as they are.
    """
    with fake_cuda(attention):
        made = []
        for a in args:
            if isinstance(a, tuple):
                a = Fake(a, dtype, grad=grad and dtype.is_floating_point)
            made.append(a.make() if isinstance(a, Fake) else a)
        return programs_of(fn, *made, dynamic=dynamic)


def cuda_program(fn: Callable[..., Any], *args: Any, **options: Any) -> FxProgram:
    """The single inference program of `fn`; arguments as for `cuda_programs`."""
    (program,) = cuda_programs(fn, *args, **options)
    return program
