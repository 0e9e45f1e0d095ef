"""Runs native code of plans: field offsets of libtorch and CPython, addresses, and callables."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial, reduce
from operator import or_
from typing import Any

import torch

from lenz.runtime.threads import address_of, addresses_in, torch_libraries

WORDS = 24  # words of a tensor's implementation searched for its dispatch keys


class _MethodDef(ctypes.Structure):
    """CPython's PyMethodDef."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


METH_O = 8


@cache
def places() -> tuple[int, int, int, int, int, int, int] | None:
    """The first fields of `TorchLayout` in plan/native_frame.py, in order.

    `plain` is the CPUs'. They are determined with tensors of many kinds; None if this torch or
    Python has another layout.
    """
    if sys.implementation.name != "cpython" or not getattr(sys, "_is_gil_enabled", lambda: True)():
        return None
    behind = object.__basicsize__
    with torch.inference_mode(False), torch.device("cpu"):
        kinds = _kinds()
    found = set(range(0, 8 * WORDS, 8))
    for t in kinds:
        start = _word(id(t) + behind)
        if start == 0 or start % 8:
            return None
        found &= {at for at in found if _word(start + at) == _keys(t)}
    if len(found) != 1:
        return None
    plain = [_keys(t) for t in kinds[:PLAIN]]
    differ = reduce(or_, [keys ^ plain[0] for keys in plain])
    mask = ~differ & (1 << 64) - 1
    if any(_keys(t) & mask == plain[0] & mask for t in kinds[PLAIN:]):
        return None
    negative = _keys(kinds[PLAIN]) & ~plain[0]
    autograd, bare = _bits("AutogradFunctionality", "ADInplaceOrView"), _bits("Meta", "ZeroTensor")
    return behind, found.pop(), mask, plain[0] & mask, negative, autograd, bare


@cache
def plain_keys(kind: str, mask: int) -> int:
    """The masked keys of a plain strided tensor on this type of device."""
    return _keys(torch.empty(0, device=kind)) & mask


PLAIN = 5  # the first kinds are plain


def _kinds() -> list[torch.Tensor]:
    """Tensors on a CPU: plain ones, with and without a gradient, and others."""
    x = torch.ones(2, 3)
    with torch.inference_mode():
        inferred = torch.ones(2)
    return [
        x, torch.ones(2, requires_grad=True), torch.nn.Parameter(torch.ones(1)), x[1:], inferred,
        torch._neg_view(x), torch.ones(2, dtype=torch.complex64).conj(), x.to_sparse(),
        x.to("meta"),
    ]  # fmt: skip


def _keys(t: torch.Tensor) -> int:
    return int(torch._C._dispatch_keys(t).raw_repr())


def _bits(*names: str) -> int:
    keys = [torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)) for name in names]
    return reduce(or_, [int(k.raw_repr()) for k in keys])


def _word(address: int) -> int:
    return int(ctypes.c_uint64.from_address(address).value)


@cache
def _libraries(gpu: bool) -> Sequence[Any]:
    """Libraries to search for functions of CPython, the C library, libtorch and the CUDA driver."""
    names = ["torch_cpu", "torch_python", "c10", *["torch_cuda", "c10_cuda"] * gpu]
    known = [ctypes.pythonapi, ctypes.CDLL(None), *torch_libraries(*[f"lib{n}.so" for n in names])]
    return [*known, ctypes.CDLL("libcuda.so.1")] if gpu else known


def addresses(names: Sequence[str], gpu: bool) -> dict[str, int]:
    """The addresses of these functions, without those that no library has."""
    return addresses_in(_libraries(gpu), names)


def address_of_kernel(function: Any) -> int:
    """The address of a ctypes kernel, or of the launch record of a driver's kernel."""
    record = getattr(function, "record", None)
    return address_of(function) if record is None else ctypes.addressof(record)


def method(address: int, own: tuple[Any, ...], alive: object) -> Callable[[list[Any]], Any]:
    """Code at an address as a CPython function; `own` is its `self`."""
    described = _MethodDef(b"call", address, METH_O, None)
    own = (*own, described, alive)  # kept alive by the function
    new = ctypes.pythonapi.PyCFunction_NewEx
    new.restype = ctypes.py_object
    new.argtypes = (ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)
    # CPython's built-in functions have no attributes, and a call of a `partial` costs 20 ns.
    return partial(new(ctypes.addressof(described), own, None))


def said() -> str:
    """The error of the last call of libtorch's C shim."""
    try:
        get = torch_libraries("libtorch_cpu.so")[0].torch_exception_get_what_without_backtrace
    except (IndexError, AttributeError):  # before torch 2.12
        return "a call of libtorch failed"
    get.restype = ctypes.c_char_p
    return (get() or b"a call of libtorch failed").decode(errors="replace")
