"""Calls that eager refuses: samples of torch's op database with one argument made wrong.

    python -m tests.fuzz.refused --minutes 5 [--seed N]

lenz raises what eager raises, or what aot_eager does where torch refuses to trace the call. Where
aot_eager raises nothing, torch has lost the error before any backend could see the call.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tests.e2e.sweep import cases, name_of
from tests.e2e.test_error_inputs import SAME, TAKEN, TRACED, compared, refused

# Eager itself ends the process for some wrong arguments of these (torch 2.13), or does not end.
CRASH = (
    "lu_unpack", "addmv", "native_batch_norm", "_batch_norm_with_update", "put", "index_put",
    "_native_batch_norm_legit", "nn.functional.linear_cross_entropy", "_segment_reduce",
    "_softmax_backward_data", "nn.functional.embedding_bag",
)  # fmt: skip
TYPES = (
    torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64,
)  # fmt: skip
SMALL = 20_000  # elements of the largest argument
LOST = "lost while torch traces"
Change = Callable[[Tensor], Tensor]
CHANGES: dict[str, Change] = {
    **{str(t): (lambda x, t=t: x.to(t)) for t in TYPES},
    "another rank": lambda x: x.unsqueeze(0),
    "two of it": lambda x: torch.stack([x, x]),
    "a part": lambda x: x.select(0, 0),
    "longer": lambda x: torch.cat([x, x], -1),
    "more rows": lambda x: torch.cat([x, x], 0),
    "no rows": lambda x: x[:0],
    "+ 99": lambda x: x + 99,
    "- 99": lambda x: x - 99,
    "zeros": lambda x: x * 0,
}


def drawn(r: random.Random, ops: list[Any]) -> tuple[str, Callable[..., Any], Any] | None:
    """A title, a function and arguments of which one may be wrong; None where that is no call."""
    op = r.choice(ops)
    dtype = torch.float32 if torch.float32 in op.dtypes else min(op.dtypes, key=str)
    torch.manual_seed(1)
    samples = list(islice(op.sample_inputs("cpu", dtype), 40))
    if not samples:
        return None
    s = r.choice(samples)
    leaves, spec = pytree.tree_flatten((s.input, s.args, s.kwargs))
    places = [k for k, x in enumerate(leaves) if isinstance(x, Tensor)]
    title = r.choice(list(CHANGES))
    if not places:
        return None
    chosen = places if r.random() < 0.2 else [r.choice(places)]
    try:
        made = [CHANGES[title](x) if k in chosen else x for k, x in enumerate(leaves)]
    except (RuntimeError, IndexError, NotImplementedError):
        return None
    if any(isinstance(x, Tensor) and x.numel() > SMALL for x in made):
        return None
    where = "all" if len(chosen) > 1 else places.index(chosen[0])
    return (
        f"{name_of(op)}, {title} for argument {where}",
        lambda first, args, kwargs: op.op(first, *args, **kwargs),
        pytree.tree_unflatten(made, spec),
    )


def judged(fn: Callable[..., Any], given: Any, dynamic: bool | None = None) -> str:
    """One of the words of `compared`, LOST, or what is wrong."""
    verdict = compared(fn, given, dynamic)
    if verdict.startswith("no error,"):
        theirs, _ = refused(torch.compile(fn, backend="aot_eager", dynamic=dynamic), given)
        verdict = verdict if theirs is not None else LOST
    return verdict


def found(seed: int, ops: list[Any], tries: int = 50) -> tuple[str, str]:
    """(title, verdict) of the seed's first call that eager refuses."""
    r = random.Random(seed)
    for _ in range(tries):
        case = drawn(r, ops)
        if case is None:
            continue
        title, fn, given = case
        verdict = judged(fn, given)
        if verdict != TAKEN:
            return title, verdict
    return "", TAKEN


def is_right(verdict: str) -> bool:
    """True for all but a finding."""
    return verdict in (SAME, TRACED, TAKEN, LOST)


def able() -> list[Any]:
    """The ops of the database that eager refuses without ending the process."""
    return [op for op in cases() if op.dtypes and not name_of(op).startswith(CRASH)]


def main() -> int:
    """Draw until the time is over; 1 where something was found."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--minutes", type=float, default=5)
    p.add_argument("--seed", type=int, default=None)
    a = p.parse_args()
    first = random.randrange(10**9) if a.seed is None else a.seed
    end, ops, counts = time.monotonic() + 60 * a.minutes, able(), Counter[str]()
    seed = first
    while time.monotonic() < end:
        title, verdict = found(seed, ops)
        counts[verdict if is_right(verdict) else "found"] += 1
        if not is_right(verdict):
            print(f"--seed {seed}: {title}: {verdict}", flush=True)
        seed += 1
    print(f"seeds {first} to {seed - 1}: {dict(counts)}")
    return int(counts["found"] > 0)


if __name__ == "__main__":
    import logging
    import os
    import warnings

    os.environ["LENZ_ON_ERROR"] = "raise"
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    raise SystemExit(main())
