"""Random chains of ops over mixed layouts that are slower than eager: what no op shows alone.

python -m benchmarks.chains [--device cuda] [--minutes 5] [--seed 0] [--training] [--above 1.2]
python -m benchmarks.chains --seed 7 --count 1   # one of them again

Each program permutes, reduces, joins, pads, gathers and stores one tensor, in two to four steps. A
row is printed if lenz takes more than `--above` times as long as eager, and longer than the cost of
a call explains; the program stands behind it. Times of other processes disturb those of a GPU.
"""

from __future__ import annotations

import argparse
import random
import time
import warnings
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.ops import forward, told, training

ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 24}  # of the first tensor; later ones may have twice that
FEWEST = 64  # no step leaves less than one in so many
# Sizes of all dimensions but one.
SIZES = ((32,), (1000,), (1024,), (8,), (8, 128), (64, 196), (4, 64), (32, 77), (8, 64, 28),
         (4, 12, 128), (2, 3, 64))  # fmt: skip
TYPES = (torch.float32, torch.float32, torch.bfloat16)

# Steps on x of n dimensions; d and e are two of them, s the size of d, and k a small number.
STEPS = """
    x.permute({order})
    x.permute({order}).contiguous()
    x.contiguous()
    x.softmax({d})
    x / (x.norm(dim={d}, keepdim=True) + 1)
    x * x.mean({d}, keepdim=True)
    x - x.mean(({d}, {e}), keepdim=True)
    x * (x.square().mean({d}, keepdim=True) + 1).rsqrt()
    x * x.var({d}, keepdim=True)
    x - x.amax({d}, keepdim=True)
    x.logsumexp({d})
    x.sum({d})
    x.cumsum({d}) * 0.01
    x * x.sigmoid()
    F.gelu(x)
    x.exp().clamp(max=3)
    x.bfloat16().float()
    x.bfloat16()
    x.flip({d})
    x.roll({k}, {d})
    x.tril()
    F.pad(x, [0, 0] * ({n} - 1 - {d}) + [{k}, 1])
    x.narrow({d}, {s} // 4, {s} // 2)
    x.index_select({d}, torch.arange(0, {s}, 2, device=x.device))
    x.index_select({d}, torch.arange({s}, device=x.device) * 5 % {s})
    x.unflatten({d}, ({s} // 2, 2)).mean({d} + 1)
    x.unflatten({d}, (-1, 4))
    x.flatten({low}, {low} + 1)
    torch.cat([x, x.sin()], {d})
    torch.cat([-x.narrow({d}, {s} // 2, {s} - {s} // 2), x.narrow({d}, 0, {s} // 2)], {d})
    torch.stack([x, -x], {d})
    x * torch.arange({s}, device=x.device).to(x.dtype).sin().reshape({along})
""".strip().splitlines()


def step(r: random.Random, shape: Sequence[int]) -> str:
    """A random step, as the text of an expression of x."""
    n = len(shape)
    d, e = r.sample(range(n), 2) if n > 1 else (0, 0)
    order, along = r.sample(range(n), n), [shape[d] if i == d else 1 for i in range(n)]
    low, k = r.randrange(max(n - 1, 1)), r.choice((1, 2, 3, 7))
    text = r.choice(STEPS).strip()
    return text.format(order=order, d=d, e=e, n=n, s=shape[d], k=k, low=low, along=along)


def run(text: str, x: Tensor) -> Tensor:
    """The value of a step."""
    made: Tensor = eval(text, {"x": x, "torch": torch, "F": F})
    return made


def chain(r: random.Random, elements: int) -> tuple[list[int], list[str]]:
    """The shape of the first tensor, and steps that fit it."""
    sizes = r.choice(SIZES)
    shape = r.sample((*sizes, elements // prod(sizes)), len(sizes) + 1)
    x, steps = torch.empty(shape, device="meta"), list[str]()
    for _ in range(r.choice((2, 2, 3, 3, 4))):
        text = step(r, x.shape)
        try:
            y = run(text, x)
        except (RuntimeError, IndexError):
            continue  # the sizes do not fit
        if elements // FEWEST <= y.numel() <= 2 * elements and 0 < y.dim() < 6:
            x = y
            steps.append(text)
    return shape, steps


def function(steps: Sequence[str]) -> Callable[[Tensor], Tensor]:
    """The program, which Dynamo can trace."""
    lines = "".join(f"    x = {text}\n" for text in steps)
    names: dict[str, Any] = {"torch": torch, "F": F}
    exec(f"def f(x):\n{lines}    return x\n", names)
    made: Callable[[Tensor], Tensor] = names["f"]
    return made


def measured(seed: int, device: str, trains: bool, above: float) -> None:
    """Print the row of one program if it is slow."""
    r = random.Random(seed)
    shape, steps = chain(r, ELEMENTS[device])
    if not steps:
        return
    dtype = r.choice(TYPES)
    x = torch.randn(shape, device=device).to(dtype)
    torch._dynamo.reset()
    title = f"{seed} {str(dtype)[6:]} {shape} {'; '.join(steps)}\n   "
    with torch.set_grad_enabled(trains):
        sides = (training if trains else forward)(function(steps), (x,))
    if sides:
        told(title, sides, device, above)


def main() -> None:
    """Print a row for each program in which lenz is slower than eager."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chains", description=__doc__)
    parser.add_argument("--device", default="cpu", choices=ELEMENTS)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--count", type=int, default=1 << 30, help="of programs, at most")
    parser.add_argument("--training", action="store_true", help="with gradients")
    parser.add_argument("--above", type=float, default=1.2, help="the least ratio that is printed")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    if given.device == "cpu":
        torch.set_num_threads(1)
    end, count = time.monotonic() + 60 * given.minutes, 0
    while time.monotonic() < end and count < given.count:
        measured(given.seed + count, given.device, given.training, given.above)
        count += 1
    print(f"{count} programs, from seed {given.seed}")


if __name__ == "__main__":
    main()
