"""Calls of torch's op database with one argument, no tensor, made another one.

    python -m tests.fuzz --way numbers --minutes 5 [--seed N]

A dimension, a size, a limit, a flag, a type or a name becomes 0, -1, 2**63 - 1, NaN or another
name. What eager refuses is refused with the same error (`refused`); else values and gradients are
eager's, or as near to the same call in float64 (`compare`). What torch loses or changes before lenz
is asked is no finding, and KNOWN has the rest.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tests.e2e.sweep import UNDEFINED, Row, case, check, layout_of, name_of, recording
from tests.e2e.test_error_inputs import TAKEN, refused
from tests.fuzz.compare import same
from tests.fuzz.refused import is_right, judged

__all__ = ["KNOWN", "alone", "found"]

INTEGERS = (-99, -3, -2, -1, 0, 1, 2, 3, 4, 5, 7, 99, 2**31, -(2**63), 2**63 - 1)
FLOATS = (
    float("nan"), float("inf"), -float("inf"), 0.0, -0.0, -1.0, 0.5, 1.0, 2.0, -2.5, 1e300, 1e-300,
    1e38, -1e6, 3,
)  # fmt: skip
NAMES = (
    "sum", "mean", "none", "reflect", "xx", "constant", "linear", "left", "prod", "",
)  # fmt: skip
TYPES = (
    torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.int8,
)  # fmt: skip
OTHERS: dict[type, tuple[Any, ...]] = {
    bool: (True, False, 2, None, "x"),
    int: (*INTEGERS, 2.5, True, None),
    float: (*FLOATS, None, 2, True, 1j),
    str: NAMES,
    torch.dtype: TYPES,
    type(None): (0, 1, -1, 2.5, True, "sum", torch.float64),
}
USUAL = (torch.float32,) * 6 + (torch.int64,) + TYPES[1:]  # types of the samples
SMALL = 5_000  # elements of the largest argument
ROOM = 1 << 30  # bytes that a call may ask for
KNOWN: dict[str, str] = {
    "^as_strided_scatter .*: result": "of elements written twice, the last one is chance",
    "^as_strided_.*invalid storage offset": "no guard is added for the sign of an integer",
    "narrow\\(\\): length must be non-negative": "no guard is added for the sign of a width",
    "^grid_sampler_3d .*: result": "modes that there are not: eager writes nothing into the result",
    "the range of a histogram is not finite": "of a range that overflows, eager writes elsewhere",
    "dynamic: no error.* to type float without overflow": "no guard is added for floats, either",
    "batch_norm.* its fake kernel promised": "of a half, refused for its momentum",
    "^logsumexp .*doesn't match the broadcast shape": "over no dimension: torch's own failure",
    "^roll .*SymIntArrayRef": "a shift of a number by -2**63: torch's own failure",
    "TypeError \\(empty_strided": "sizes of no elements whose product overflows at run time",
}
"""Patterns of what a finding says, and why it stands."""


@dataclass(frozen=True, slots=True)
class Call:
    """An op, and arguments of which one is not from the database."""

    op: Any
    dtype: torch.dtype
    title: str
    given: Any
    is_dynamic: bool
    has_gradients: bool

    def __call__(self, first: Any, args: Any, kwargs: Any) -> Any:
        """Run the op."""
        return self.op.op(first, *args, **kwargs)


def are_numbers(x: Any) -> bool:
    """True for sizes, dimensions and the like."""
    return isinstance(x, (list, tuple)) and bool(x) and all(type(n) is int for n in x)


def changed(r: random.Random, x: Any) -> Any:
    """Another value: of several numbers one is another, too many or missing."""
    if not are_numbers(x):
        return r.choice(OTHERS[type(x)])
    k, other = r.randrange(len(x)), r.choice(OTHERS[int])
    return (*x[:k], *r.choice(((other,), (other,), (other,), (), (x[k], x[k]))), *x[k + 1 :])


def drawn(r: random.Random, ops: list[Any]) -> Call | None:
    """A call; None where the sample has no argument that could be changed."""
    op, dtype = r.choice(ops), r.choice(USUAL)
    if dtype not in op.dtypes:
        return None
    torch.manual_seed(1)
    grad = dtype in (torch.float32, torch.float64) and op.supports_autograd and r.random() < 0.3
    samples = list(islice(op.sample_inputs("cpu", dtype, requires_grad=grad), 60))
    if not samples:
        return None
    s = r.choice(samples)
    leaves, spec = pytree.tree_flatten((s.input, s.args, s.kwargs), are_numbers)
    places = [k for k, x in enumerate(leaves) if type(x) in OTHERS or are_numbers(x)]
    if not places or any(isinstance(x, Tensor) and x.numel() > SMALL for x in leaves):
        return None
    k = r.choice(places)
    new = changed(r, leaves[k])
    told = ", ".join(str(tuple(x.shape) if isinstance(x, Tensor) else x) for x in leaves)
    leaves[k] = new
    is_dynamic = r.random() < 0.3
    how = ", with gradients" * grad + ", dynamic" * is_dynamic
    title = f"{name_of(op)} {str(dtype)[6:]} ({told}), number {k} is {new!r}{how}"
    return Call(op, dtype, title, pytree.tree_unflatten(leaves, spec), is_dynamic, grad)


def call_of(seed: int, ops: list[Any]) -> Call | None:
    """The call of a seed."""
    r = random.Random(f"numbers {seed}")
    return next(filter(None, (drawn(r, ops) for _ in range(50))), None)


@contextmanager
def bounded() -> Iterator[None]:
    """No memory beyond what there is and ROOM, in here: wrong sizes may ask for more."""
    try:
        from resource import RLIMIT_AS, getrlimit, setrlimit

        with open("/proc/self/statm") as f:
            most = int(f.read().split()[0]) * 4096 + ROOM
    except (ImportError, OSError):
        yield
        return
    soft, hard = getrlimit(RLIMIT_AS)
    setrlimit(RLIMIT_AS, (most, hard))
    try:
        yield
    finally:
        setrlimit(RLIMIT_AS, (soft, hard))


def found(seed: int, ops: list[Any]) -> str:
    """What is wrong with lenz in the call of a seed, "" if nothing."""
    call = call_of(seed, ops)
    with bounded():
        why = failure(call) if call else ""
    return "" if any(re.search(pattern, why, re.DOTALL) for pattern in KNOWN) else why


def failure(call: Call) -> str:
    """The same for a call, known or not."""
    wanted, _ = refused(call, call.given)
    if lacks_memory(wanted):
        return ""
    verdict = judged(call, call.given, call.is_dynamic or None)
    if not is_right(verdict):
        return "" if lacks_memory(verdict) else f"{call.title}: {verdict}"
    row = Row(name_of(call.op), str(call.dtype)[6:], call.is_dynamic)
    if verdict == TAKEN:
        exact = call.op.name not in UNDEFINED
        check(row, call, call.given, call.has_gradients, call.title, "cpu", exact)
    if not row.failures or lacks_memory(row.failures) or is_near(call):
        return ""
    return row.failures[0]


def lacks_memory(what: object) -> bool:
    """True for an error that says so."""
    return isinstance(what, MemoryError) or "allocate" in str(what)


def is_near(call: Call) -> bool:
    """True where results differ from eager's as rounding explains, beside the call in float64."""

    def wide(x: Any) -> Any:
        if not isinstance(x, Tensor) or not (x.is_floating_point() or x.is_complex()):
            return x
        wider = x.detach().to(torch.complex128 if x.is_complex() else torch.float64)
        return wider.requires_grad_(x.requires_grad)

    def values(wants: Any) -> list[Any]:
        leaves = pytree.tree_leaves((wants[0], wants[3:]))
        is_pair = lambda x: isinstance(x, Tensor) and x.is_complex()
        return [torch.view_as_real(x.resolve_conj()) if is_pair(x) else x for x in leaves]

    try:
        got, want = (
            values(case(call, call.given, how, call.has_gradients, call.is_dynamic))
            for how in (recording(Row("", ""), eager_random=True), None)
        )
        ideal = values(case(call, pytree.tree_map(wide, call.given), None, call.has_gradients))
        for x, y, z in zip(got, want, ideal, strict=True):
            if isinstance(x, Tensor) and isinstance(y, Tensor) and layout_of(x) != layout_of(y):
                return False
            same(x, y, z, exact=False)
    except Exception:  # noqa: BLE001  # an error, or a difference, is what the caller knows
        return False
    return True


def alone(seed: int, ops: list[Any]) -> None:
    """Make the call of a seed without lenz: it may end the process."""
    call = call_of(seed, ops)
    if call is None:
        return
    with bounded():
        for run in (call, torch.compile(call, backend="aot_eager", dynamic=call.is_dynamic)):
            refused(run, call.given)
