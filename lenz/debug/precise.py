"""Runs an unchanged program in double precision: the reference for errors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
PAIRS = (torch.complex32, torch.complex64)
WIDER = dict.fromkeys(FLOATS, torch.float64) | dict.fromkeys(PAIRS, torch.complex128)
CAST = "aten::_to_copy"


class Precise(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch is untyped here
    """Runs every eager op, below autograd, on doubles instead of the program's floats.

    Weights and inputs keep their values and dtypes: an op gets wider copies. An op that writes to
    them works on such a copy, which is then rounded into the tensor. Views stay views.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one op."""
        kwargs = kwargs or {}
        with self:  # in inference mode, ops arrive undecomposed
            made = func.decompose(*args, **kwargs)
        if made is not NotImplemented:
            return made
        named = [a.name for a in func._schema.arguments]
        aliases = {a.name: a.alias_info.is_write for a in func._schema.arguments if a.alias_info}
        given = dict(zip(named, args, strict=False)) | kwargs
        is_view = bool(aliases) and not any(aliases.values())
        # Autograd rounds a gradient to the dtype of its leaf, and checks the dtype.
        is_gradient = func.name() == CAST and torch._C._current_graph_task_id() >= 0
        if is_view or is_gradient:
            return func(*args, **kwargs)
        taken = {name: each_of(wider, value) for name, value in given.items()}
        got = func(*[taken[n] for n in named[: len(args)]], **{n: taken[n] for n in kwargs})
        written: dict[int, Tensor] = {}
        for name in (n for n, writes in aliases.items() if writes and n in given):
            for old, new in zip(leaves(given[name]), leaves(taken[name]), strict=True):
                written[id(new)] = old
                if old is not new:
                    old.copy_(new)
        return each_of(lambda x: written.get(id(x), x), got)


@contextmanager
def precise() -> Iterator[None]:
    """Run in double precision, without libraries and kernels that lack it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TF32 acceleration")  # which these flags touch as well
        libraries = torch.backends.mkldnn.flags(enabled=False)
        with libraries, sdpa_kernel(SDPBackend.MATH), Precise():  # type: ignore[no-untyped-call]  # likewise
            yield


def wider(x: Any) -> Any:
    """A float tensor as doubles, a float dtype as double, other values unchanged."""
    if isinstance(x, Tensor):
        return x.to(WIDER[x.dtype]) if x.dtype in WIDER else x
    return WIDER.get(x, x) if isinstance(x, torch.dtype) else x


def each_of(f: Callable[[Any], Any], x: Any) -> Any:
    """Apply `f` to the items of lists and tuples."""
    return type(x)(each_of(f, y) for y in x) if isinstance(x, (list, tuple)) else f(x)


def leaves(x: Any) -> Iterator[Tensor]:
    """The tensors in a result: in sequences, in mappings, in the fields of objects."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, (list, tuple)):
        for y in x:
            yield from leaves(y)
    elif isinstance(x, Mapping):
        yield from leaves(list(x.values()))
    elif hasattr(x, "__dict__") and not isinstance(x, (type, torch.nn.Module)):
        yield from leaves(list(vars(x).values()))
