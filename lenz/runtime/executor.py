"""Functions that a plan printed as Python calls: memory, views, eager ops, checks."""

from __future__ import annotations

import ctypes
import math
import mmap
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._C._dynamo import guards

from lenz.errors import FAULTS, UserError, annotate
from lenz.runtime.user_kernel import user_kernel

empty = torch.empty_strided

Sizes = Sequence[int]
Shape = tuple[int, ...]


# empty_cpu(sizes, strides, dtype): new memory, in half the time of `empty`. empty_gpu allocates on
# the current GPU, in 0.8 us.
empty_cpu = guards._empty_strided_cpu  # type: ignore[attr-defined]  # torch's stubs lack it
empty_gpu = guards._empty_strided_cuda  # type: ignore[attr-defined]  # as above
# The number of active dispatch modes (40 ns). Fake tensors have one, and no memory for kernels.
modes = torch._C._len_torch_dispatch_stack


def exchange_gpu(number: int) -> int:
    """Make a GPU current and return the previous one."""
    return int(torch._C._cuda_exchangeDevice(number))


def restore_gpu(number: int) -> None:
    """Make the caller's GPU current again. It gets no context if it has none."""
    torch._C._cuda_maybeExchangeDevice(number)


def stream(number: int) -> int:
    """The driver's handle of a GPU's current stream."""
    return int(torch._C._cuda_getCurrentRawStream(number))


HUGE = 1 << 21  # bytes of a huge page on x86-64 and arm64 Linux
_MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", 0)


def empty_huge(size: Sizes, stride: Sizes, dtype: torch.dtype) -> torch.Tensor:
    """New CPU memory; large tensors ask for huge pages.

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
        _madvise(first, length, _MADV_HUGEPAGE)  # only advice: a failure costs speed
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
    """A view with other sizes and strides; `offset` counts elements from the tensor's first one."""
    return torch.as_strided(t, size, stride, t.storage_offset() + offset)


def reuse(t: torch.Tensor, size: Sizes, stride: Sizes, dtype: torch.dtype) -> torch.Tensor:
    """Another tensor in the memory of a dead one with the same number of bytes."""
    if t.dtype is not dtype:
        t = torch.as_strided(t, (t.untyped_storage().nbytes() // t.itemsize,), (1,), 0).view(dtype)
    return torch.as_strided(t, size, stride, 0)


def held(t: torch.Tensor) -> tuple[int, ...]:
    """Reference counts of a tensor in Python and C++; its storage's owners and spare bytes.

    Memory that torch did not allocate has one owner more: the array of numpy, say.
    """
    memory, count = t.untyped_storage(), t._use_count()  # type: ignore[attr-defined]  # as above
    owners = torch._C._storage_Use_Count(memory._cdata) + (not memory.resizable())
    return sys.getrefcount(t), count, owners, memory.nbytes() - t.nbytes


def over(t: torch.Tensor, size: Sizes, stride: Sizes) -> torch.Tensor | None:
    """Donate a saved tensor's memory to another tensor of its dtype; None if it has other holders.

    Other holders are a graph retained for a second backward pass, hooks on saved tensors, views,
    and code that reads autograd's saved tensors.
    """
    # Expected: one tensor, its storage with the handle that `held` creates, and no spare bytes.
    return torch.as_strided(t, size, stride, 0) if held(t) == (_alone(), 1, 2, 0) else None


def _alone() -> int:
    """The Python count that `held` reports for a tensor held only by a variable of `over`'s caller.

    It is measured in frames like those, because frames that Dynamo inspects hold their arguments
    too.
    """
    x = object()
    return _as_over(x)


def over_called(t: torch.Tensor, size: Sizes, stride: Sizes) -> torch.Tensor | None:
    """`over` for native code, which holds the tensor in a slot and lends it to the call."""
    x = object()
    alone = next(map(_as_over, [x])) - 2  # the list and `map` hold it besides
    return torch.as_strided(t, size, stride, 0) if held(t) == (alone, 1, 2, 0) else None


def _as_over(x: object) -> int:
    return _as_held(x)


def _as_held(x: object) -> int:
    return sys.getrefcount(x)


CPU = torch.device("cpu")


def seed(device: torch.device = CPU, size: Sequence[int] = (2,)) -> torch.Tensor:
    """Draw two i64 from the device's default generator: the key of this call's random numbers."""
    return torch.randint(-(1 << 63), (1 << 63) - 1, size, dtype=torch.int64, device=device)


def seeds(count: int, device: torch.device = CPU) -> Sequence[torch.Tensor]:
    """Draw several keys at once."""
    return seed(device, (count, 2)).unbind()


def to_device(t: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The elements of `t` on another device, contiguous.

    A copy to a GPU does not wait for the GPU: the driver reads pageable memory before it returns.
    It would read pinned memory when the copy runs, and the caller may have changed it by then.
    """
    to_gpu = device.type != "cpu"
    if to_gpu and t.is_cpu and t.is_pinned():
        t = t.clone()
    return t.to(device, non_blocking=to_gpu, memory_format=torch.contiguous_format)


def view_as_real(t: torch.Tensor) -> torch.Tensor:
    """A complex tensor as pairs of its parts; a copy where memory holds the conjugate.

    The copy has the strides of `t`, also 0, which that of `resolve_conj` does not.
    """
    if t.is_conj():
        own = t[tuple(slice(None if step else 1) for step in t.stride())]
        t = own.new_empty_strided(own.size(), own.stride()).copy_(own).expand(t.size())
    return torch.view_as_real(t)


def view_as_complex(t: torch.Tensor) -> torch.Tensor:
    """Pairs as complex numbers, detached: a result of the plan must not be a view to autograd."""
    return torch.view_as_complex(t).detach()


def assert_scalar(condition: Any, message: str) -> None:
    """Raise a RuntimeError unless a condition on sizes holds, such as ["ge", 3, 0].

    With Python's message about a division by 0 it is a ZeroDivisionError.
    """
    if not size(condition):
        raise (ZeroDivisionError if message.endswith("modulo by zero") else RuntimeError)(message)


def size(of: Any) -> Any:
    """The value of a number, or of a list [name of a function of numbers, *arguments]."""
    if isinstance(of, list):
        name, *given = of
        of = getattr(torch if name.startswith("sym_") else operator, name)(*map(size, given))
    # A file may name any function of `operator`: those that make functions are no sizes.
    if not isinstance(of, (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise TypeError(f"{of!r} is not a size")
    return of


def resolve(op: str, direct: bool = True) -> Callable[..., Any]:
    """The eager function that a plan names: "aten.mm.default", "py.operator.add", "lenz.seed".

    If `direct`, it is torch's faster function instead of the OpOverload, if there is one.
    """
    if op in _OWN:
        return _OWN[op]
    if op.startswith("py."):
        _, module, *names = op.split(".", 2)  # only functions of the module itself
        root: Any = {"torch": torch, "operator": operator, "math": math}[module]
    else:
        root, names = torch.ops, op.split(".")
    if op in _DIRECT and direct:
        return _DIRECT[op]
    for name in names:
        root = getattr(root, name)
    if op == "higher_order.auto_functionalized_v2":  # its checks of arguments take 30 us a call
        root = root.py_kernels[torch._C.DispatchKey.CompositeExplicitAutograd]
    return _below_autograd(root) if op.startswith("higher_order.") else root


def _below_autograd(op: Callable[..., Any]) -> Callable[..., Any]:
    """A higher-order operator without its autograd rule, which would trace the bodies again."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args, **kwargs)

    return call


_OWN: Mapping[str, Callable[..., Any]] = {
    # Its dispatch takes 15 us a call.
    "higher_order.invoke_subgraph": _below_autograd(lambda body, _, *args: body(*args)),
    "lenz.as_strided": torch.as_strided,
    "lenz.assert_scalar": assert_scalar,
    "lenz.offset": torch.Tensor.storage_offset,
    "lenz.round": round,
    "lenz.size": size,
    "lenz.renew": lambda fresh: fresh(),  # random numbers for a graph
    "lenz.seed": seed,
    "lenz.seeds": seeds,
    "lenz.to_device": to_device,
    "lenz.user_kernel": user_kernel,
    "lenz.view_as_complex": view_as_complex,
    "lenz.view_as_real": view_as_real,
}
# For these, torch's Python binding takes about 1 us less per call than the OpOverload.
_DIRECT: Mapping[str, Callable[..., Any]] = {
    f"aten.{name}.out": getattr(torch, name) for name in ("mm", "addmm", "bmm", "baddbmm")
}


def place(device: str) -> int | str:
    """The number of a GPU, -1 for the CPU; other devices have their names."""
    d = torch.device(device)
    return d.index if d.type == "cuda" else -1 if d.type == "cpu" else device


def is_laid_out(t: Any, size: Shape, stride: Shape, may_lack: bool = False) -> bool:
    """Whether it is a dense tensor with these sizes and, where a size is above 1, these strides.

    With `may_lack` it may have no elements instead. torch's `assert_size_stride` ends the process
    for a sparse CSR tensor, which has no strides, and for a size beyond 64 bits: it lets C++
    exceptions through the interpreter.
    """
    if not isinstance(t, torch.Tensor) or t.layout is not torch.strided or t.shape != size:
        return may_lack and isinstance(t, torch.Tensor) and not t.numel()
    rows = zip(size, t.stride(), stride, strict=True)
    return t.stride() == stride or all(x == y or n < 2 for n, x, y in rows)


def holds_elements(t: torch.Tensor) -> bool:
    """Whether memory holds the elements: not negated, not as sparse ones, not zeros without any."""
    return not (t.is_neg() or t._is_zerotensor()) and t.layout is torch.strided


def dense_copy(t: torch.Tensor, size: Sizes, stride: Sizes) -> torch.Tensor:
    """A copy of the elements in dense memory."""
    return torch.empty_strided(size, stride, dtype=t.dtype, device=t.device).copy_(t.to_dense())


def lay(
    t: Any,
    size: Shape,
    stride: Shape,
    dtype: torch.dtype,
    place: int | str,
    op: str,
    aligned: bool = False,
) -> torch.Tensor:
    """The result of an eager call, copied if its strides differ from the promised ones; 0.3 us.

    It is also copied if its memory does not hold its elements, and if it must be `aligned` and does
    not start at a multiple of 16 bytes. `place` is the number of its GPU, -1 for the CPU, or the
    name of another device. Raises UserError if anything else was promised wrongly.
    """
    if is_laid_out(t, size, stride) and t.dtype is dtype and holds_elements(t):
        here = t.is_cpu if place == -1 else t.get_device() == place or str(t.device) == place
        if here and not (aligned and t.data_ptr() & 15):
            return t  # type: ignore[no-any-return]  # an op's result is Any
    device = "cpu" if place == -1 else f"cuda:{place}" if isinstance(place, int) else place
    told = f"{dtype} of size {size} on {device}"
    given = type(t).__name__
    if isinstance(t, torch.Tensor):
        given = f"{t.dtype} of size {tuple(t.shape)} on {t.device}"
        if told == given:
            return torch.empty_strided(size, stride, dtype=dtype, device=t.device).copy_(t)
    hint = "torch.library.opcheck compares an op with its fake kernel"
    raise UserError(f"{op} returned {given}, but its fake kernel promised {told}", hint=hint)


def several(results: Any, count: int, op: str) -> Any:
    """The results of an op that is not torch's own; raises UserError if their number is wrong."""
    if len(results) != count:
        raise UserError(f"{op} returned {len(results)} results, but its fake kernel {count}")
    return results


def raise_failed(code: int, where: str = "") -> None:
    """Raise the error for the code of a failed check, with a note that says where."""
    error, what = tuple(FAULTS.values())[code - 1]
    e = error(what)
    if where:
        annotate(e, where)
    raise e


Wanted = tuple[str, Sizes, Sizes, torch.dtype, str]


def laid(got: Sequence[Any], wanted: Sequence[Wanted]) -> tuple[Any, ...]:
    """Arguments of a backward graph with the strides it expects; others are copied.

    Arguments whose memory does not hold their elements are copied too. Hooks on saved tensors may
    return any tensors. Raises UserError for any other difference.
    """
    made = tuple(
        t
        if tuple(t.shape) != tuple(size) or (holds_elements(t) and t.stride() == tuple(stride))
        else dense_copy(t, size, stride)
        for t, (_, size, stride, _, _) in zip(got, wanted, strict=True)
    )
    refuse(made, wanted)
    return made


def refuse_fakes() -> None:
    """Raise UserError if one of the modes makes fake tensors."""
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        what = "a graph compiled for tensors with memory is called under a FakeTensorMode"
        raise UserError(what, hint="call it outside the mode, or with fake tensors")


def refuse_call(args: list[Any], aligned: bool = True) -> Sequence[Any]:
    """Raise UserError; takes the place of a fallback in a plan without one."""
    raise UserError("the call breaks an assumption of the plan on a size or an address")


def refuse(got: Sequence[Any], wanted: Sequence[Wanted]) -> None:
    """Raise a UserError with the first wrong argument, its expected and its actual type."""
    for t, (name, size, stride, dtype, device) in zip(got, wanted, strict=True):
        if not isinstance(t, torch.Tensor):
            raise UserError(f"argument {name} must be a tensor, got {type(t).__name__}")
        pairs: list[tuple[str, Any, Any]] = [
            ("dtype", dtype, t.dtype),
            ("device", device or str(t.device), str(t.device)),
            ("size", tuple(size), tuple(t.shape)),
        ]
        # The stride of a dimension of size 1 (or of an empty tensor) means nothing.
        if t.numel():
            kept = [d for d, s in enumerate(t.shape) if s != 1]
            if any(d >= len(stride) or t.stride(d) != stride[d] for d in kept):
                pairs.append(("stride", tuple(stride), t.stride()))
        pairs.append(("negative bit", False, t.is_neg()))
        for what, expected, actual in pairs:
            if expected != actual:
                raise UserError(f"argument {name}: expected {what} {expected}, got {actual}")
