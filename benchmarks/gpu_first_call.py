"""First calls on a GPU: a new process for each, with empty caches, and again with what it left.

The clock starts when torch is imported, the model built and the CUDA context made, just before
torch.compile is called, and stops when the first result is there.  What a side imports for itself
counts, and so does Dynamo's own import, which is the same for all: see the side "dynamo".

A worker of `benchmarks.gpu`: `python -m benchmarks.gpu_first_call CASE SIDE DEVICE [--quick]`
prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import MARK, PEER

SIDES = ("dynamo", "lenz", PEER)
Prepared = tuple[Callable[..., Any], tuple[Any, ...], bool]


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def kernel(tiny: bool) -> Prepared:
    """softmax of 8192 x 8192 bf16."""
    return softmax, (torch.randn((16, 200) if tiny else (8192, 8192)).to(torch.bfloat16),), False


def model(name: str) -> Callable[[bool], Prepared]:
    """A model of benchmarks.gpu_models."""

    def make(tiny: bool) -> Prepared:
        from benchmarks.gpu_models import example

        e = example(name, tiny)
        return e.forward, (e.model.train(e.training), *e.inputs), e.training

    return make


CASES: dict[str, Callable[[bool], Prepared]] = {
    "softmax kernel": kernel,
    "BERT-base forward": model("BERT-base forward 16x512"),
    "ResNet-50 training step": model("ResNet-50 training 64"),
}


def backend(side: str) -> Any:
    """What torch.compile gets; lenz as a function, since it need not be installed."""
    if side != "lenz":
        return "eager" if side == "dynamo" else side
    from lenz.api import backend

    return backend


def first_call(case: str, side: str, device: str, tiny: bool) -> float:
    """Seconds of the first call, whose result is checked to be finite and to have eager's shape."""
    torch.manual_seed(0)
    with torch.device(device):
        fn, args, training = CASES[case](tiny)
    sync: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    # Eager first: the context, the allocator and the libraries' handles are made by it.
    with torch.set_grad_enabled(training):
        want = fn(*args)
        if training:
            want.backward()
        sync()
        start = time.perf_counter()
        got = torch.compile(fn, backend=backend(side), dynamic=False)(*args)
        if training:
            got.backward()
        sync()
        seconds = time.perf_counter() - start
    if got.shape != want.shape or not bool(got.isfinite().all()):
        raise RuntimeError(f"{side} gives a wrong first result")
    torch.testing.assert_close(got.float(), want.float(), rtol=0.1, atol=0.1)
    return seconds


def main() -> None:
    """Run one first call and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=tuple(CASES))
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("device", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true")
    o = parser.parse_args()
    print(MARK + json.dumps({"seconds": first_call(o.case, o.side, o.device, o.quick)}), flush=True)


if __name__ == "__main__":
    main()
