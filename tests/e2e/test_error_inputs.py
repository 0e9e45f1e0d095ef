"""Every bad input of torch's op database: what eager refuses is refused, with the same error.

    make errors     (all of it, with the table of counts)

The error has eager's type, or aot_eager's where Dynamo or AOTAutograd raises before lenz is asked.
The arguments are left as eager leaves them.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from tests.e2e.sweep import cases, fresh, name_of, tensors_of

PARTS = 12  # so that workers share it: about 60 s together
# Results of a call, in the order of the table.
SAME, TRACED, TAKEN = "eager's error", "aot_eager's error", "no error in eager"
# AOTAutograd makes a conversion of an `out=` of another type, before any backend is asked.
LOST = ("complex", "aminmax", "multinomial")
FOREIGN = ("a bug in lenz", "BackendCompilerFailed", "report a bug")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """No warnings and no logs, of which bad inputs give many."""
    pytest.importorskip("expecttest", reason="torch's op database needs it")
    was = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(was)


@pytest.mark.one_in(12, 2)
@pytest.mark.parametrize("part", range(PARTS))
def test_what_eager_refuses_is_refused(part: int) -> None:
    ops = [op for op in cases() if op.error_inputs_func is not None][part::PARTS]
    counts: Counter[str] = Counter()
    found = [f"{name_of(op)}: {what}" for op in ops for what in refusals(op, counts)]
    print(f"of {sum(counts.values())} bad inputs: {dict(counts)}")
    assert not found, "\n".join(found)
    assert counts[SAME] > 10 and counts[SAME] + counts[TRACED] > 0.9 * counts.total()


def refusals(op: Any, counts: Counter[str]) -> Iterator[str]:
    """What is wrong with how the op refuses each of its bad inputs; counts what becomes of them."""
    for k, bad in enumerate(op.error_inputs("cpu")):
        s = bad.sample_input

        def fn(first: Any, args: Any, kwargs: Any) -> Any:
            return op.op(first, *args, **kwargs)

        verdict = compared(fn, (s.input, s.args, s.kwargs))
        counts[verdict if verdict in (SAME, TRACED, TAKEN) else "wrong"] += 1
        if verdict.startswith("no error,") and op.name in LOST:
            aot = torch.compile(fn, backend="aot_eager")
            if refused(aot, (s.input, s.args, s.kwargs))[0] is None:
                counts["lost in tracing"] += 1
                counts["wrong"] -= 1
                continue
        if verdict not in (SAME, TRACED, TAKEN):
            yield f"{k}: {verdict}"


def compared(fn: Callable[..., Any], given: Any, dynamic: bool | None = None) -> str:
    """One of the table's words, or what is wrong."""
    wanted, left = refused(fn, given)
    if wanted is None:
        return TAKEN  # some are bad on other devices only
    got, ours = refused(torch.compile(fn, backend="lenz", dynamic=dynamic), given)
    if got is None:
        return f"no error, but in eager {type(wanted).__name__}: {wanted}"
    if type(got) is type(wanted):
        if any(text in str(got) and text not in str(wanted) for text in FOREIGN):
            return f"eager's type, but the text of another: {got}"
        return SAME if all(map(alike, ours, left)) else "arguments that eager leaves are written"
    theirs, _ = refused(torch.compile(fn, backend="aot_eager", dynamic=dynamic), given)
    if type(got) is type(theirs) and "a bug in lenz" not in str(got):
        return TRACED
    return f"{type(got).__name__} ({got}) and not {type(wanted).__name__} ({wanted})"


def refused(fn: Callable[..., Any], given: Any) -> tuple[Exception | None, list[torch.Tensor]]:
    """The error of a call, if it raises, and its arguments as it leaves them."""
    torch._dynamo.reset()
    args = pytree.tree_map(fresh, given)
    try:
        fn(*args)
    except Exception as e:  # noqa: BLE001  # whatever is raised is compared
        return e, tensors_of(args)
    return None, tensors_of(args)


def alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in all bits that mean something."""
    if a.layout is not torch.strided or a.is_meta:
        return True
    if a.dtype.itemsize == 1:  # 8-bit floats have no function of NaN
        return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    return torch.equal(a.nan_to_num(), b.nan_to_num())
