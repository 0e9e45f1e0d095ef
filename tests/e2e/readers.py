"""Which reader runs a plan: native code, or the plan's Python function, and why.

AOTAutograd runs first calls under a mode to look for aliases, and under modes plans run in Python:
it is told not to, or nothing but backward passes would run by native code here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch._functorch.config

from lenz import loading
from lenz.ir.plan import Boxed
from lenz.plan.native import native
from lenz.plan.native_frame import NotNative
from lenz.plan.native_link import Unavailable, linked

NATIVE, LEFT, OFF = "native", "calls that native code left to Python", "by Python alone"


@contextmanager
def watched(count: Counter[str]) -> Iterator[None]:
    """Count plans and calls in here.

    Plans with native code count as NATIVE, those that it refuses under the reason; with the option
    `native` off as OFF. A call that native code leaves to the Python function counts as LEFT, but
    for one with a tensor that has no elements.
    """
    fast_call, load = loading.fast_call, loading.load

    def noting(make: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            try:
                return make(*args)
            except (NotNative, Unavailable) as e:
                count[str(e)] += 1
                raise

        return noted

    def fast(p: Any, values: Any, own: Any, slow: Boxed, *rest: Any) -> Any:
        def left(args: list[Any]) -> Sequence[Any]:
            # Strides and bits of a tensor without elements are seldom what fake tensors told.
            count[LEFT] += all(x.numel() > 0 for x in args if isinstance(x, torch.Tensor))
            return slow(args)

        made = fast_call(p, values, own, left, *rest)
        count[NATIVE] += made is not None
        return made

    def loaded(*args: Any) -> Boxed:
        count[OFF] += not args[6]
        return load(*args)

    with (
        torch._functorch.config.patch(check_custom_op_aliasing=False),
        mock.patch.object(loading, "native", noting(native)),
        mock.patch.object(loading, "linked", noting(linked)),
        mock.patch.object(loading, "fast_call", fast),
        mock.patch("lenz.respecialise.load", loaded),
    ):
        yield


def together(counts: Iterable[Mapping[str, int]]) -> Counter[str]:
    """The sum of counts."""
    found = Counter[str]()
    for count in counts:
        found.update(count)
    return found


def told(count: Mapping[str, int]) -> str:
    """The counts as a line of a report."""
    rest = [f"{n} {what}" for what, n in sorted(count.items()) if n and what not in (NATIVE, LEFT)]
    others = f" ({', '.join(rest)})" if rest else ""
    plans = sum(n for what, n in count.items() if what != LEFT)
    ran = f"{count.get(NATIVE, 0)} of {plans} plans by native code{others}"
    return f"{ran}; {count.get(LEFT, 0)} {LEFT}"
