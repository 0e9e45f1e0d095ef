"""How far results and gradients are from float64, of lenz and of eager on the same device.

    python -m tests.e2e.accuracy                          all ops, lengths 1 to 10^6, on the CPU
    python -m tests.e2e.accuracy --lengths 10000000 --device cuda --ops cumsum mean

A line is printed for each op, length and form that breaks the rule of docs/numerics.md.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

Fn = Callable[[Tensor], Tensor]
# Elements below this part of the greatest result are measured as if they had it: what cancels has
# no digits in eager either.
FLOOR = 1e-3
LENGTHS = (1, 2, 17, 256, 1000, 4099, 65536, 100_000, 1_000_000)
# The shapes of a length: all, rows that are reduced, columns that are.
FORMS = {"all": lambda n: (n,), "rows": lambda n: (3, n), "columns": lambda n: (n, 24)}
MOST = 1 << 25  # elements of an input
MORE = 8


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def about(mean: float, spread: float) -> Callable[..., Tensor]:
    """Numbers about a mean."""
    return lambda *shape: mean + spread * normal(*shape)


def equal(*shape: int) -> Tensor:
    """One number per draw: it is its mean, and nothing deviates."""
    return normal().float().double().expand(shape)


@dataclass(frozen=True)
class Case:
    """fn(x, d) over dimension d, for x drawn by `draw`; d is 0 for all there is."""

    fn: Callable[[Tensor, int], Tensor]
    draw: Callable[..., Tensor] = normal
    forms: tuple[str, ...] = ("all", "rows", "columns")
    least: int = 1
    most: int = 1 << 30


def last(f: Callable[[Tensor, tuple[int, ...]], Tensor]) -> Callable[[Tensor, int], Tensor]:
    return lambda x, d: f(x, (x.shape[-1],))


def images(x: Tensor) -> Tensor:
    """2 images of 3 channels, as many elements of which as fit."""
    n = x.numel() // 6
    return x.reshape(-1)[: 6 * n].reshape(2, 3, n)


def other(x: Tensor) -> Tensor:
    return x.detach().flip(0) * 0.7 + 0.1


def classes(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0], device=x.device) * 7 % x.shape[1]


ROWS, ALL = ("rows",), ("all",)
CASES: dict[str, Case] = {
    "sum": Case(lambda x, d: x.sum(d)),
    "sum of positive": Case(lambda x, d: x.sum(d), about(3, 1)),
    "1 / sum": Case(lambda x, d: 1 / x.sum(d), about(3, 1)),
    "mean": Case(lambda x, d: x.mean(d), about(100, 1)),
    "nansum": Case(lambda x, d: x.nansum(d)),
    "prod": Case(lambda x, d: x.prod(d), about(1, 1e-4)),
    "var": Case(lambda x, d: x.var(d), least=2),
    "var of large means": Case(lambda x, d: x.var(d), about(1000, 1), least=2),
    "var of larger means": Case(lambda x, d: x.var(d), about(30000, 1), least=2),
    "std": Case(lambda x, d: x.std(d), about(100, 1), least=2),
    "norm 1": Case(lambda x, d: x.norm(1, d)),
    "norm 2": Case(lambda x, d: x.norm(2, d)),
    "norm 3": Case(lambda x, d: x.norm(3, d)),
    "norm inf": Case(lambda x, d: x.norm(math.inf, d)),
    "normalize": Case(lambda x, d: F.normalize(x, dim=d)),
    "logsumexp": Case(lambda x, d: x.logsumexp(d)),
    "softmax": Case(lambda x, d: x.softmax(d)),
    "log_softmax": Case(lambda x, d: x.log_softmax(d)),
    "cumsum": Case(lambda x, d: x.cumsum(d)),
    "cumprod": Case(lambda x, d: x.cumprod(d), about(1, 1e-4)),
    "logcumsumexp": Case(lambda x, d: x.logcumsumexp(d)),
    "diff of cumsum": Case(lambda x, d: x.cumsum(d).diff(dim=d), about(1, 0.1), least=2),
    "cummax": Case(lambda x, d: x.cummax(d)[0]),
    "trapezoid": Case(lambda x, d: torch.trapezoid(x, dim=d), least=2),
    "cumulative_trapezoid": Case(lambda x, d: torch.cumulative_trapezoid(x, dim=d), least=2),
    "dot": Case(lambda x, d: x.dot(other(x)), forms=ALL),
    "mv": Case(lambda x, d: x.mv(other(x[0])), forms=ROWS),
    "mv of columns": Case(lambda x, d: x.t().mv(other(x[:, 0])), forms=("columns",)),
    "layer_norm": Case(last(F.layer_norm), about(3, 2), forms=("all", "rows"), least=2),
    "layer_norm far": Case(last(F.layer_norm), about(300, 1), forms=("all", "rows"), least=2),
    # Its gradients are exact while sums of the weights are, and an accident beyond.
    "layer_norm of equals": Case(last(F.layer_norm), equal, ("all", "rows"), 2, 5000),
    "rms_norm": Case(last(F.rms_norm), forms=("all", "rows")),
    "batch_norm": Case(
        lambda x, d: F.batch_norm(images(x), None, None, training=True), about(1, 2), ALL, 17
    ),
    "batch_norm far": Case(
        lambda x, d: F.batch_norm(images(x), None, None, training=True), about(300, 1), ALL, 17
    ),
    "batch_norm of equals": Case(
        lambda x, d: F.batch_norm(images(x), None, None, training=True), equal, ALL, 17
    ),
    "group_norm of equals": Case(lambda x, d: F.group_norm(images(x), 1), equal, ALL, 17),
    "group_norm": Case(lambda x, d: F.group_norm(images(x), 1), about(1, 2), ALL, 17),
    "instance_norm": Case(lambda x, d: F.instance_norm(images(x)), about(30, 2), ALL, 17),
    "cross_entropy": Case(lambda x, d: F.cross_entropy(x, classes(x)), forms=("rows", "columns")),
    "nll of many": Case(
        lambda x, d: F.nll_loss(x, classes(x), reduction="sum"), about(-3, 1), ("columns",)
    ),
    "mse_loss": Case(lambda x, d: F.mse_loss(x, other(x)), forms=ALL),
    "l1_loss": Case(lambda x, d: F.l1_loss(x, other(x)), forms=ALL),
    "smooth_l1_loss": Case(lambda x, d: F.smooth_l1_loss(x, other(x)), forms=ALL),
    "huber_loss": Case(lambda x, d: F.huber_loss(x, other(x)), forms=ALL),
    "kl_div": Case(
        lambda x, d: F.kl_div(x.log_softmax(0), other(x).softmax(0), reduction="sum"), forms=ALL
    ),
    "bce": Case(lambda x, d: F.binary_cross_entropy_with_logits(x, other(x).sigmoid()), forms=ALL),
    "cosine_similarity": Case(lambda x, d: F.cosine_similarity(x, other(x), dim=d), least=2),
    "pairwise_distance": Case(lambda x, d: F.pairwise_distance(x, other(x)), forms=("all", "rows")),
    "cdist": Case(lambda x, d: torch.cdist(x, other(x)), forms=ROWS),
    "cdist 1": Case(lambda x, d: torch.cdist(x, other(x), p=1.0), forms=ROWS),
    "adaptive_avg_pool": Case(lambda x, d: F.adaptive_avg_pool1d(x[None], 1), forms=ROWS),
    "adaptive_avg_pool 2": Case(
        lambda x, d: F.adaptive_avg_pool2d(images(x)[..., None], (1, 1)), about(3, 1), ALL, 17
    ),
    "sum of exp": Case(lambda x, d: x.exp().sum(d)),
    "mean of squares": Case(lambda x, d: (x - x.mean(d, keepdim=True)).square().mean(d), least=2),
    "index_add": Case(
        lambda x, d: x.new_zeros(5).index_add(0, torch.arange(len(x), device=x.device) % 5, x),
        forms=ALL,
    ),
    "digamma": Case(lambda x, d: x.digamma(), about(4, 1), ALL),
    "polygamma": Case(lambda x, d: x.polygamma(2), about(4, 1), ALL),
    "embedding": Case(
        lambda x, d: x[torch.arange(x.shape[0], device=x.device) % 3], forms=("columns",)
    ),
}


def error(got: Tensor, want: Tensor) -> float:
    """The greatest relative error of finite elements, and infinite where others differ."""
    got = got.double()
    if not want.numel():
        return 0.0
    finite = want.isfinite()
    if not torch.equal(got[~finite], want[~finite]) and not torch.equal(got.isnan(), want.isnan()):
        return math.inf
    if not bool(finite.any()):
        return 0.0
    size = want[finite].abs()
    floor = max(FLOOR * size.max().item(), 1e-30)
    found = ((got[finite] - want[finite]).abs() / size.clamp(min=floor)).max().item()
    return math.inf if math.isnan(found) else found


@lru_cache(1)
def weights(shape: torch.Size) -> Tensor:
    """The same numbers in every type."""
    g = torch.Generator().manual_seed(5)
    return (torch.rand(shape, generator=g, dtype=torch.float64) + 0.5).bfloat16()


def both(fn: Fn, x: Tensor) -> tuple[Tensor, Tensor]:
    """The result and the gradient of a fixed sum of it."""
    x = x.detach().requires_grad_()
    y = fn(x)
    (grad,) = torch.autograd.grad(y, x, weights(y.shape).to(x.device, y.dtype))
    return y.detach(), grad


def ratios(
    name: str, form: str, n: int, dtype: torch.dtype, device: str, draws: int
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Geometric means over the draws of (lenz's, eager's) errors, of results and of gradients.

    What breaks the rule is drawn MORE times as often before it is judged, by all draws. The mean of
    a set is one number, which all of its gradient's elements hold: the logarithm of its error has a
    deviation of 1, and two ways to add that are as good as each other are a factor of 2 apart in
    one of 25 rows of 8 draws, and in none of 10^5 of 64.
    """
    case = CASES[name]
    dim = 1 if form == "rows" else 0

    def fn(x: Tensor) -> Tensor:
        return case.fn(x, dim)

    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="lenz", dynamic=False)
    least = torch.finfo(dtype).eps / 8
    logs = [[0.0, 0.0], [0.0, 0.0]]
    for draw in range(MORE * draws):
        torch.manual_seed(1000 * draw + n % 997)
        x = case.draw(*FORMS[form](n)).to(dtype).to(device)
        want = both(fn, x.double())
        for k, values in enumerate((both(compiled, x), both(fn, x))):
            for part in range(2):
                logs[part][k] += math.log(max(error(values[part], want[part]), least))
        y, dx = [[math.exp(total / (draw + 1)) for total in part] for part in logs]
        if draw + 1 == draws and not breaks(*y, dtype) and not breaks(*dx, dtype):  # type: ignore[arg-type, call-arg]
            break
    return (y[0], y[1]), (dx[0], dx[1])


def breaks(lenz: float, eager: float, dtype: torch.dtype) -> bool:
    """True where lenz is farther from float64 than twice eager and one unit in the last place."""
    return not lenz <= 2 * eager + torch.finfo(dtype).eps


def cells(ops: Sequence[str], lengths: Sequence[int]) -> Iterator[tuple[str, str, int]]:
    for name in ops:
        for form in CASES[name].forms:
            for n in lengths:
                fits = CASES[name].least <= n <= CASES[name].most
                if fits and math.prod(FORMS[form](n)) <= MOST:
                    yield name, form, n


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ops", nargs="*", default=list(CASES), choices=list(CASES), metavar="OP")
    parser.add_argument("--lengths", nargs="*", type=int, default=LENGTHS)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--draws", type=int, default=4)
    parser.add_argument("--all", action="store_true", help="print every line")
    given = parser.parse_args()
    dtype, bad = getattr(torch, given.dtype), 0
    for name, form, n in cells(given.ops, given.lengths):
        found = ratios(name, form, n, dtype, given.device, given.draws)
        wrong = [breaks(*pair, dtype) for pair in found]
        bad += any(wrong)
        if given.all or any(wrong):
            text = "   ".join(
                f"{what} {a:.1e} eager {b:.1e} {'BREAKS' if w else '      '}"
                for what, (a, b), w in zip(("result", "gradient"), found, wrong, strict=True)
            )
            print(f"{name:22} {form:8} {n:9} {text}", flush=True)
    print(f"{bad} break the rule")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
