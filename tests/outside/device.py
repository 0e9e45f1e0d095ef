"""A third kind of device, as a package from outside would give it to torch: memory and eager ops.

Its memory is memory of the host, which torch takes for the device's own. lenz is not imported here.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch.utils import _pytree, backend_registration

NAME, CPU = "npu", torch.device("cpu")
HOST_KERNELS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


class DLTensor(ctypes.Structure):
    """Memory as DLPack hands it over, always of rank 1, and what frees it."""

    _fields_ = (
        ("data", ctypes.c_void_p), ("device", ctypes.c_int32 * 2), ("rank", ctypes.c_int32),
        ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("stride", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p),
    )  # fmt: skip


_memory: dict[int, Any] = {}  # what torch holds, and the libraries of ops
_free = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_memory.pop)
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


def allocate(count: int) -> torch.Tensor:
    """Bytes on the device, in multiples of 16, which are bytes of the host to all but torch."""
    n = max(-(-count // 16), 1) * 16
    data, end, one = ctypes.create_string_buffer(n + 63), (ctypes.c_int64 * 1)(n), ctypes.c_int64(1)
    start = -(-ctypes.addressof(data) // 64) * 64
    device = (ctypes.c_int32 * 2)(12, 0)  # DLPack's number of such devices, and the first of them
    free = ctypes.cast(_free, ctypes.c_void_p)
    t = DLTensor(start, device, 1, 1, 8, 1, end, ctypes.pointer(one), 0, None, free)
    _memory[ctypes.addressof(t)] = t, data, end, one
    made: torch.Tensor = torch._C._from_dlpack(_capsule(ctypes.addressof(t), b"dltensor", None))
    return made


def at(address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Elements of the host's memory."""
    bytes = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(bytes, dtype=dtype) if count else torch.empty(0, dtype=dtype)


def empty_strided(size: Any, stride: Any, dtype: Any = None, **_: Any) -> torch.Tensor:
    """New memory; kernels of the host make the views of it, for they look at no element."""
    dtype = dtype or torch.get_default_dtype()
    length = 0 if 0 in size else 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    flat = on_host(torch.ops.aten.view.dtype, allocate(length * dtype.itemsize), dtype)
    made: torch.Tensor = on_host(torch.ops.aten.as_strided.default, flat, size, stride)
    return made


def empty(size: Any, dtype: Any = None, memory_format: Any = None, **_: Any) -> torch.Tensor:
    """New memory in a memory format."""
    like = torch.empty(size, memory_format=memory_format or torch.contiguous_format, device="meta")
    return empty_strided(size, like.stride(), dtype)


def on_host(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the host's kernel of an op on tensors of the device."""
    return op.redispatch(HOST_KERNELS, *args, **kwargs)


def seen(x: Any) -> Any:
    """A tensor's memory as a tensor of the host, where new tensors are made, too."""
    if isinstance(x, torch.Tensor) and x.device.type == NAME:
        memory = x.untyped_storage()
        flat = at(memory.data_ptr(), memory.nbytes() // x.itemsize, x.dtype)
        return flat.as_strided(x.shape, x.stride(), x.storage_offset())
    return CPU if isinstance(x, torch.device) else x


def there(t: torch.Tensor) -> torch.Tensor:
    """A copy on the device."""
    return copy_from(t, empty_strided(t.shape, t.stride(), t.dtype))


def copy_from(source: torch.Tensor, into: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """What `copy_` calls where one of the two is on the device."""
    seen(into).copy_(seen(source))
    return into


def eager(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Any other op: the host runs it on the same memory."""
    returns = [r.alias_info for r in op._schema.returns]
    if returns and all(r is not None and not r.is_write for r in returns):
        return on_host(op, *args, **kwargs)
    leaves, spec = _pytree.tree_flatten((args, kwargs))
    mine = [seen(x) for x in leaves]
    own = {id(m): x for m, x in zip(mine, leaves, strict=True)}
    args, kwargs = _pytree.tree_unflatten(mine, spec)
    back = lambda t: own[id(t)] if id(t) in own else there(t)
    return _pytree.tree_map_only(torch.Tensor, back, op(*args, **kwargs))


def setup() -> None:
    """Give the device to torch."""
    backend_registration._setup_privateuseone_for_python_backend(NAME)
    library, other = (torch.library.Library(n, "IMPL", "PrivateUse1") for n in ("aten", "_"))
    library.impl("empty_strided", empty_strided)
    library.impl("empty.memory_format", empty)
    library.impl("_copy_from", copy_from)
    other.fallback(eager)
    _memory[0] = library, other
