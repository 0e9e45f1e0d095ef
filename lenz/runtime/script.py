"""Run a printed plan as a script: random inputs of the right types, and the time of a call."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lenz.errors import UserError
from lenz.ir.dtype import BY_NAME
from lenz.ir.lexer import read_sym
from lenz.sym import Var, evaluate

UNKNOWN = 64  # value of a size without a known example


def main(module: dict[str, Any], kernels: Mapping[str, Callable[..., Any]], rounds: int) -> None:
    """Run the plan in `module` on random inputs and print the median time of a call.

    For a GPU plan the time includes the GPUs' work.

    `module` holds the globals of the printed text; `kernels` are its kernels by name. Raises
    UserError for a plan that calls objects of the user's program, which text cannot hold.
    """
    for name in module["OBJECTS"].values():
        raise UserError(f"the plan calls {name}, an object of the program it came from")
    module.update(kernels)
    sizes: dict[str, int] = dict(module["SIZES"])
    described = (*module["INPUTS"], *module["KERNELS"].values())
    gpus = sorted({d[-1] for d in described if not isinstance(d, str) and d[-1][:4] == "cuda"})
    times: list[float] = []
    for _ in range(rounds):
        args = [argument(i, sizes) for i in module["INPUTS"]]
        for gpu in gpus:  # the arguments were made on this stream
            torch.cuda.synchronize(gpu)
        start = time.perf_counter()
        with torch.no_grad():
            module["call"](args)
        for gpu in gpus:
            torch.cuda.synchronize(gpu)
        times.append(time.perf_counter() - start)
    name = str(module["__doc__"]).split(":")[0]
    print(f"{name}: median of {rounds} calls {statistics.median(times) * 1e6:.1f} us")


def argument(described: tuple[Any, ...] | str, sizes: dict[str, int]) -> Any:
    """One argument from its line in `INPUTS`: a tensor, or a size by its text."""
    if isinstance(described, str):
        return size_value(described, sizes)
    _, shape, stride, dtype, device = described
    return random_tensor(shape, stride, dtype, device, sizes)


def random_tensor(
    shape: Sequence[str], stride: Sequence[str], dtype: str, device: str, sizes: dict[str, int]
) -> torch.Tensor:
    """A tensor of the described type, sizes and strides as text over the names in `sizes`.

    Floats are uniform in 0..1; integers are 0 or 1, so that they are legal indices.
    """
    dims, steps = (tuple(size_value(s, sizes) for s in x) for x in (shape, stride))
    t = torch.empty_strided(dims, steps, dtype=BY_NAME[dtype].torch, device=device)
    storage = torch.as_strided(t, (t.untyped_storage().nbytes() // t.itemsize,), (1,), 0)
    if t.is_floating_point() or t.is_complex():
        storage.copy_(torch.rand(storage.shape))
    else:
        storage.copy_(torch.randint(0, 2, storage.shape))
    return t


def size_value(text: str, sizes: dict[str, int]) -> int:
    """The value of a size expression; a name without an example value gets one."""
    names = dict.fromkeys(re.findall(r"[A-Za-z_]\w*", text))
    scope = {n: Var(n) for n in names if n not in ("min", "max")}
    values = {v: sizes.setdefault(n, UNKNOWN) for n, v in scope.items()}
    return evaluate(read_sym(text, scope), values)
