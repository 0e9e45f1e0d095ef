"""Two sides of a test: a function in eager and through lenz, on arguments made twice alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

Make = Callable[[], Sequence[Any]]


def agree(
    fn: Callable[..., Any], make: Make, *, tol: float = 1e-5, strides: bool = True,
    calls: int = 1, **kwargs: Any,
) -> Any:  # fmt: skip
    """Assert equal results, strides and arguments after the calls; gives lenz's last result."""
    torch._dynamo.reset()
    run = torch.compile(fn, backend="lenz", **checked(kwargs))
    theirs, ours = seeded(make), seeded(make)
    got: Any = None
    for _ in range(calls):
        torch.manual_seed(1)
        want = fn(*theirs)
        torch.manual_seed(1)
        got = run(*ours)
        same(got, want, tol, strides)
        same(ours, theirs, tol, strides)
    return got


def gradients_agree(fn: Callable[..., Any], make: Make, tol: float = 1e-4, **kwargs: Any) -> None:
    """Assert equal results and gradients of the sum of squares of the first result."""

    def step(run: Callable[..., Any]) -> tuple[Any, Any]:
        args = seeded(make)
        tensors = [t for t in pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
        leaves = [t for t in tensors if t.requires_grad]
        torch.manual_seed(1)
        out = run(*args)
        loss = out.square().sum() if out.dim() else out
        return out.detach(), torch.autograd.grad(loss, leaves, allow_unused=True)

    torch._dynamo.reset()
    same(step(torch.compile(fn, backend="lenz", **checked(kwargs))), step(fn), tol, True)


def checked(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of torch.compile that ask lenz to check its IR, layouts with it."""
    return (
        kwargs
        if "mode" in kwargs
        else {**kwargs, "options": {"verify": True, **kwargs.get("options", {})}}
    )


def seeded(make: Make) -> list[Any]:
    """Arguments, the same on every call."""
    torch.manual_seed(0)
    return list(make())


def same(got: Any, want: Any, tol: float, strides: bool) -> None:
    """Compare structures; strides where there are elements, also of dimensions of one."""
    a, b = pytree.tree_leaves(got), pytree.tree_leaves(want)
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        if not isinstance(y, torch.Tensor):
            assert x == y
            continue
        if y.dtype.itemsize == 1 and y.is_floating_point():  # not every torch compares these
            assert x.dtype is y.dtype
            x, y = x.float(), y.float()
        torch.testing.assert_close(x, y, rtol=tol, atol=tol, equal_nan=True)
        if strides and y.layout is torch.strided and y.numel():
            assert x.stride() == y.stride()
