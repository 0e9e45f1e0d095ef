"""What a plan printed as Python calls: memory, views, eager ops, checks."""

from __future__ import annotations

import ctypes
import mmap
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._C._dynamo import guards

from lenz.errors import FAULTS, UserError
from lenz.runtime.user_kernel import user_kernel

# check(tensor, sizes, strides): torch's own C function, about 0.1 us; raises AssertionError.
check = guards.assert_size_stride
empty = torch.empty_strided

Sizes = Sequence[int]
Shape = tuple[int, ...]


# empty_cpu(sizes, strides, dtype): new memory, half the time of `empty`; and on the GPU that is
# current, 0.8 us.
empty_cpu = guards._empty_strided_cpu  # type: ignore[attr-defined]  # torch's stubs lack it
empty_gpu = guards._empty_strided_cuda  # type: ignore[attr-defined]  # as above
# How many modes see torch's calls: fake tensors have one, and no memory for kernels; 40 ns.
modes = torch._C._len_torch_dispatch_stack


def exchange_gpu(number: int) -> int:
    """Make a GPU the current one; gives the one that was."""
    return int(torch._C._cuda_exchangeDevice(number))


def stream(number: int) -> int:
    """The driver's handle of the stream that is current on a GPU."""
    return int(torch._C._cuda_getCurrentRawStream(number))


HUGE = 1 << 21  # bytes of a huge page on x86-64 and arm64 Linux
_MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", 0)


def empty_huge(size: Sizes, stride: Sizes, dtype: torch.dtype) -> torch.Tensor:
    """New CPU memory, with huge pages asked for when it is large.

    Page faults dominate large outputs: exp of 16M f32 takes 77 ms into fresh 4 KiB pages and 16 ms
    into huge ones (findings-cpu.md section 2).
    """
    t: torch.Tensor = empty_cpu(size, stride, dtype)
    if t.nbytes < 2 * HUGE:  # a symbolic size that is small in this call
        return t
    start = t.data_ptr()
    first = -(-start // HUGE) * HUGE
    length = (start + t.untyped_storage().nbytes() - first) // HUGE * HUGE
    if length > 0 and _MADV_HUGEPAGE and _madvise is not None:
        _madvise(first, length, _MADV_HUGEPAGE)  # advice: a refusal changes speed alone
    return t


def _find_madvise() -> Callable[[int, int, int], int] | None:
    try:
        fn = ctypes.CDLL(None).madvise
    except (OSError, AttributeError, TypeError):
        return None  # no such call on this system
    fn.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return fn


_madvise = _find_madvise()


def view(t: torch.Tensor, size: Sizes, stride: Sizes, offset: int) -> torch.Tensor:
    """Other sizes and strides; `offset` counts elements from the tensor's first one."""
    return torch.as_strided(t, size, stride, t.storage_offset() + offset)


def reuse(t: torch.Tensor, size: Sizes, stride: Sizes, dtype: torch.dtype) -> torch.Tensor:
    """The memory of a dead tensor of the same number of bytes, as another tensor."""
    if t.dtype is not dtype:
        t = torch.as_strided(t, (t.untyped_storage().nbytes() // t.itemsize,), (1,), 0).view(dtype)
    return torch.as_strided(t, size, stride, 0)


def held(t: torch.Tensor) -> tuple[int, ...]:
    """How many hold a tensor in Python and in C++, how many its memory; bytes of that beside it."""
    memory, count = t.untyped_storage(), t._use_count()  # type: ignore[attr-defined]  # as above
    owners = torch._C._storage_Use_Count(memory._cdata)
    return sys.getrefcount(t), count, owners, memory.nbytes() - t.nbytes


def over(t: torch.Tensor, size: Sizes, stride: Sizes) -> torch.Tensor | None:
    """The memory of a saved tensor as another one of its dtype; None if anything else holds it.

    That are a graph that is kept for a second backward pass, hooks on saved tensors, views, and
    whoever looks at what autograd has saved.
    """
    # One tensor, and the memory of it and of the object by which `held` asks; nothing beside it.
    alone = (_alone(), 1, 2, 0)
    return torch.as_strided(t, size, stride, 0) if held(t) == alone else None


def _alone() -> int:
    """What `held` counts in Python for what only a variable of the function calling `over` holds.

    It is counted anew, in frames like those: frames that Dynamo looks at hold their arguments too.
    """
    x = object()
    return _as_over(x)


def _as_over(x: object) -> int:
    return _as_held(x)


def _as_held(x: object) -> int:
    return sys.getrefcount(x)


CPU = torch.device("cpu")


def seed(device: torch.device = CPU) -> torch.Tensor:
    """Two i64 drawn from the device's default generator: the key of this call's random numbers."""
    return torch.randint(-(1 << 63), (1 << 63) - 1, (2,), dtype=torch.int64, device=device)


def to_device(t: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The elements of `t` on another device, contiguous.

    A copy to a GPU does not wait for it: the driver takes pageable memory before it returns.
    Pinned memory would be read when the copy runs, after the caller may have changed it.
    """
    to_gpu = device.type != "cpu"
    if to_gpu and t.is_cpu and t.is_pinned():
        t = t.clone()
    return t.to(device, non_blocking=to_gpu, memory_format=torch.contiguous_format)


def view_as_real(t: torch.Tensor) -> torch.Tensor:
    """A complex tensor as pairs of its parts; a copy where memory holds the conjugate."""
    return torch.view_as_real(t.resolve_conj())


def view_as_complex(t: torch.Tensor) -> torch.Tensor:
    """Pairs as complex numbers.  It may leave the plan, as no view to autograd: see `_view`."""
    return torch.view_as_complex(t).detach()


def assert_scalar(condition: Any, message: str) -> None:
    """Raise a RuntimeError unless a condition on sizes holds, such as ["ge", 3, 0]."""
    if not size(condition):
        raise RuntimeError(message)


def size(of: Any) -> Any:
    """The value of a number, or of a list of a function of numbers by its name and of those."""
    if not isinstance(of, list):
        return of
    name, *given = of
    return getattr(torch if name.startswith("sym_") else operator, name)(*map(size, given))


def resolve(op: str) -> Callable[..., Any]:
    """The eager function that a plan names: "aten.mm.default", "py.operator.add", "lenz.seed"."""
    if op in _OWN:
        return _OWN[op]
    if op.startswith("py."):
        _, module, *names = op.split(".")
        root: Any = {"torch": torch, "operator": operator}.get(module)
        if root is None:
            root = __import__(module)
    else:
        root, names = torch.ops, op.split(".")
    if op in _DIRECT:
        return _DIRECT[op]
    for name in names:
        root = getattr(root, name)
    if op.startswith("higher_order."):
        return _below_autograd(root)
    return root  # type: ignore[no-any-return]  # torch.ops gives Any


def _below_autograd(op: Callable[..., Any]) -> Callable[..., Any]:
    """A higher-order operator without its rule for autograd, which traces the bodies again."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args, **kwargs)

    return call


_OWN: Mapping[str, Callable[..., Any]] = {
    "lenz.as_strided": torch.as_strided,
    "lenz.assert_scalar": assert_scalar,
    "lenz.offset": torch.Tensor.storage_offset,
    "lenz.size": size,
    "lenz.seed": seed,
    "lenz.to_device": to_device,
    "lenz.user_kernel": user_kernel,
    "lenz.view_as_complex": view_as_complex,
    "lenz.view_as_real": view_as_real,
}
# torch's Python bindings of these take about 1 us less per call than the OpOverload.
_DIRECT: Mapping[str, Callable[..., Any]] = {
    "aten.mm.out": torch.mm,
    "aten.addmm.out": torch.addmm,
    "aten.bmm.out": torch.bmm,
    "aten.baddbmm.out": torch.baddbmm,
}


def lay(
    t: Any, size: Shape, stride: Shape, dtype: torch.dtype, place: int, op: str
) -> torch.Tensor:
    """The result of an eager call, copied if its strides are not the ones told; 0.2 us.

    `place` is the number of its GPU, or -1. Raises UserError for what is told wrong else.
    """
    try:
        check(t, size, stride)
        if t.dtype is dtype and (t.is_cpu if place < 0 else t.get_device() == place):
            return t  # type: ignore[no-any-return]  # whatever an op has given
    except (AssertionError, TypeError):
        pass  # other sizes, or no tensor
    device = f"cuda:{place}" if place >= 0 else "cpu"
    told = f"{dtype} of size {size} on {device}"
    given = type(t).__name__
    if isinstance(t, torch.Tensor):
        given = f"{t.dtype} of size {tuple(t.shape)} on {t.device}"
        if told == given:
            return torch.empty_strided(size, stride, dtype=dtype, device=t.device).copy_(t)
    hint = "torch.library.opcheck compares an op with its fake kernel"
    raise UserError(f"{op} gave {given}, and its fake kernel {told}", hint=hint)


def several(results: Any, count: int, op: str) -> Any:
    """The results of an op that is not torch's own; raises UserError for another number of them."""
    if len(results) != count:
        raise UserError(f"{op} gave {len(results)} results, and its fake kernel {count}")
    return results


def raise_failed(code: int) -> None:
    """Raise the error of a kernel in which the check of this code has failed."""
    error, what = tuple(FAULTS.values())[code - 1]
    raise error(what)


Wanted = tuple[str, Sizes, Sizes, torch.dtype, str]


def laid(got: Sequence[Any], wanted: Sequence[Wanted]) -> tuple[Any, ...]:
    """Arguments of a backward half with the strides it wants; those with others are copied.

    So are those with the negative bit, which kernels do not know. Hooks on
    saved tensors may give other tensors back. Raises UserError for what is wrong else.
    """
    made = tuple(
        torch.empty_strided(size, stride, dtype=t.dtype, device=t.device).copy_(t)
        if tuple(t.shape) == tuple(size) and (t.stride() != tuple(stride) or t.is_neg())
        else t
        for t, (_, size, stride, _, _) in zip(got, wanted, strict=True)
    )
    refuse(made, wanted)
    return made


def refuse_fakes() -> None:
    """Raise UserError where one of the modes makes fake tensors."""
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        what = "a graph was compiled for tensors with memory, and is called under a FakeTensorMode"
        raise UserError(what, hint="call it outside of the mode, or with fake tensors")


def refuse(got: Sequence[Any], wanted: Sequence[Wanted]) -> None:
    """Raise the UserError that names the first wrong argument, what it must be and what it is."""
    for t, (name, size, stride, dtype, device) in zip(got, wanted, strict=True):
        if not isinstance(t, torch.Tensor):
            raise UserError(f"argument {name} must be a tensor, got {type(t).__name__}")
        pairs: list[tuple[str, Any, Any]] = [
            ("dtype", dtype, t.dtype),
            ("device", device or str(t.device), str(t.device)),
            ("size", tuple(size), tuple(t.shape)),
        ]
        # The stride of a dimension of one element (or of an empty tensor) has no meaning.
        if t.numel():
            kept = [d for d, s in enumerate(t.shape) if s != 1]
            strides = t.stride()
            if any(d >= len(stride) or strides[d] != stride[d] for d in kept):
                pairs.append(("stride", tuple(stride), tuple(strides)))
        pairs.append(("negative bit", False, t.is_neg()))
        for what, expected, actual in pairs:
            if expected != actual:
                raise UserError(f"argument {name}: expected {what} {expected}, got {actual}")
