"""Ops that are slower than eager: some 200 of them, alone, for a look at what no model shows.

python -m benchmarks.ops [NAME ...] [--device cuda] [--above 1.5] [--forms plain,transposed,...]

Each op runs in eager and in lenz in turns, forward and as a training step. A row is printed if lenz
takes more than `--above` times as long as eager, and longer than the cost of a call explains. The
forms: `plain` (sizes are powers of two), `odd` sizes, `transposed` first operands, `last` (images
have channels last), `bf16`, matrices alone that are `tall` (rows of 8) or `long` (8 rows), and
other numbers: `masked` (half of them -1e9), `large` and `tiny` ones, and some `nan`. On a GPU the
times are those of a busy queue.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import lenz

# Forms with other numbers than normally distributed ones: functions take other paths for them.
NUMBERS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "masked": lambda t: t.masked_fill(t > 0, -1e9),
    "large": lambda t: t * 1000,
    "tiny": lambda t: t * 1e-12,
    "nan": lambda t: t.masked_fill(t > 2.5, float("nan")),
}
FORMS = ("plain", "odd", "transposed", "last", "bf16", "tall", "long", *NUMBERS)
SHORT = 8
# Seconds on a GPU and on a CPU: smaller differences are mostly guards and autograd's bookkeeping.
CALL = 15e-6, 150e-6
ROUNDS, CALLS = 4, 3
Op = tuple[Callable[..., Any], tuple[Any, ...]]

# Names of functions of torch and of torch.nn.functional.
ONE = """abs neg exp log1p sqrt rsqrt sin cos tan tanh sigmoid erf erfinv lgamma digamma asinh atan
    expm1 floor round sign frac relu triu tril nan_to_num"""
TWO = "add sub mul div pow atan2 fmod remainder maximum hypot logaddexp copysign"
ACTIVATIONS = """gelu silu mish softplus hardswish elu selu leaky_relu logsigmoid hardtanh
    softshrink"""
OVER = """sum mean amax amin prod var std logsumexp argmax argmin cumsum cumprod logcumsumexp cummax
    softmax log_softmax median sort argsort norm"""


@dataclass(frozen=True, slots=True)
class Operands:
    """Tensors of one form: matrices, vectors, places, images, sequences."""

    x: Tensor
    y: Tensor
    v: Tensor
    places: Tensor
    rows: Tensor
    images: Tensor
    words: Tensor

    @classmethod
    def of(cls, form: str, device: str) -> Operands:
        """Random operands; those for a GPU are larger."""
        large, odd = device != "cpu", form == "odd"
        n = (4096 if large else 1024) - odd
        dtype = torch.bfloat16 if form == "bf16" else torch.float32
        change = NUMBERS.get(form, lambda t: t)
        draw = lambda *size: change(torch.randn(*size, device=device, dtype=dtype))
        whole = partial(torch.randint, 0, n, device=device)
        x, images = draw(n, n), draw(32 if large else 8, 32 - odd, 64 - odd, 64 - odd)
        if form == "last":
            images = images.to(memory_format=torch.channels_last)
        x, y = x.t() if form == "transposed" else x, draw(n, n)
        if form in ("tall", "long"):
            x, y = (t.view((-1, SHORT) if form == "tall" else (SHORT, -1)) for t in (x, y))
        places, rows = whole((n, n)), whole((n,))
        return cls(x, y, draw(n), places, rows, images, draw(8 * (1 + large), 128, 512 - odd))


def ops(o: Operands) -> Iterator[tuple[str, Op]]:
    """The ops with their operands."""
    x, y, v, places, rows = o.x, o.y, o.v, o.places, o.rows
    positive, mask = x.abs() + 0.1, x > 0
    for name in ONE.split():
        yield name, (getattr(torch, name), (positive if name in ("sqrt", "rsqrt") else x * 0.5,))
    for name in TWO.split():
        yield name, (getattr(torch, name), (positive if name == "pow" else x, y))
    for name in ACTIVATIONS.split():
        yield name, (getattr(F, name), (x,))
    for name in OVER.split():
        for dim in (0, 1):
            yield f"{name} {dim}", (partial(getattr(torch, name), dim=dim), (x,))
    for name in ("sum", "var", "max", "argmax"):
        yield f"{name} all", (getattr(torch, name), (x,))
    is_short = SHORT in x.shape  # places below SHORT are in both dimensions
    near = indexed(places.view_as(x) % SHORT, rows % SHORT) if is_short else indexed(places, rows)
    for name, how in near.items():
        if not is_short or name.startswith(("gather", "scatter", "index_select")):
            yield name, (how, (x, y))
    if is_short:
        return
    for name, over in images().items():
        yield name, (over, (o.images,))
    for name, along in sequences().items():
        yield name, (along, (o.words,))
    rest: dict[str, Op] = {
        "topk": (lambda t: torch.topk(t, 10), (x,)),
        "kthvalue": (lambda t: torch.kthvalue(t, 10)[0], (x,)),
        "where": (lambda t: torch.where(mask, t, 0.0), (x,)),
        "masked_fill": (lambda t: t.masked_fill(mask, 0.0), (x,)),
        "cat 0": (lambda a, b: torch.cat([a, b]), (x, y)),
        "cat 1": (lambda a, b: torch.cat([a, b], 1), (x, y)),
        "stack last": (lambda a, b: torch.stack([a, b], -1), (x, y)),
        "transpose": (lambda t: t.t().contiguous(), (x,)), "flip": (lambda t: t.flip(1), (x,)),
        "roll": (lambda t: t.roll(3, 1), (x,)), "pad": (lambda t: F.pad(t, (3, 3, 3, 3)), (x,)),
        "repeat_interleave": (lambda t: t.repeat_interleave(2, 1), (x,)),
        "repeat": (lambda t: t.repeat(2, 2), (x,)), "outer": (torch.outer, (v, v)),
        "einsum": (lambda a, b: torch.einsum("ij,j->i", a, b), (x, v)),
        "cross_entropy": (lambda t: F.cross_entropy(t, rows), (x,)),
        "mse_loss": (F.mse_loss, (x, y)), "smooth_l1_loss": (F.smooth_l1_loss, (x, y)),
        "cosine_similarity": (F.cosine_similarity, (x, y)), "normalize": (F.normalize, (x,)),
        "cdist": (torch.cdist, (x[:256], y[:256])), "lerp": (torch.lerp, (x, y, y)),
        "dropout": (lambda t: F.dropout(t, 0.1), (x,)),
        "randn": (lambda t: t + torch.randn_like(t), (x,)),
        "to f32": (Tensor.float, (x.bfloat16(),)), "to bf16": (Tensor.bfloat16, (x,)),
        "f64 exp": (torch.exp, (x.double(),)), "diff": (torch.diff, (x,)),
        "searchsorted": (lambda t: torch.searchsorted(v.sort()[0], t), (x,)),
    }  # fmt: skip
    yield from rest.items()


def indexed(places: Tensor, rows: Tensor) -> Mapping[str, Callable[..., Any]]:
    """Ops with places in memory."""
    found: dict[str, Callable[..., Any]] = {
        "embedding": lambda t, s: F.embedding(places[:64], t),
        "embedding_bag": lambda t, s: F.embedding_bag(places[:512, :20], t),
        "index_put": lambda t, s: t.index_put((rows,), s, accumulate=True),
        "index twice": lambda t, s: t[rows, rows.flip(0)],
    }
    for d in (0, 1):
        found |= {
            f"gather {d}": lambda t, s, d=d: t.gather(d, places),
            f"scatter {d}": lambda t, s, d=d: t.scatter(d, places, s),
            f"scatter_add {d}": lambda t, s, d=d: t.scatter_add(d, places, s),
            f"index_select {d}": lambda t, s, d=d: t.index_select(d, rows),
            f"index_add {d}": lambda t, s, d=d: t.index_add(d, rows, s),
        }
    return found


def images() -> Mapping[str, Callable[..., Any]]:
    """Ops of images."""
    found: dict[str, Callable[..., Any]] = {
        f"interpolate {mode}": partial(F.interpolate, scale_factor=2, mode=mode)
        for mode in ("nearest", "bilinear", "bicubic")
    }
    return found | {
        "batch_norm": lambda t: F.batch_norm(t, None, None, training=True),
        "group_norm": lambda t: F.group_norm(t, 1), "instance_norm": F.instance_norm,
        "max_pool2d": lambda t: F.max_pool2d(t, 3, 2, 1),
        "avg_pool2d": lambda t: F.avg_pool2d(t, 3, 2, 1),
        "avg_pool2d of 7 x 7": lambda t: F.avg_pool2d(t, 7, 1, 3),
        "max_pool2d of 7 x 7": lambda t: F.max_pool2d(t, 7, 1, 3),
        "adaptive_avg_pool2d": lambda t: F.adaptive_avg_pool2d(t, 7),
        "mean of an image": lambda t: t.mean((2, 3)),
        "reflection pad": lambda t: F.pad(t, (3, 3, 3, 3), mode="reflect"),
        "unfold": lambda t: F.unfold(t, 3), "to rows": lambda t: t.flatten(2).mT.contiguous(),
    }  # fmt: skip


def sequences() -> Mapping[str, Callable[..., Any]]:
    """Ops of sequences of vectors."""
    return {
        "layer_norm": lambda t: F.layer_norm(t, t.shape[-1:]),
        "rms_norm": lambda t: F.rms_norm(t, t.shape[-1:]),
        "rotated halves": lambda t: torch.cat((-t[..., 256:], t[..., :256]), -1) * t,
        "last softmax": lambda t: t.softmax(-1),
    }


def seconds(run: Callable[[], Any], device: str) -> float:
    """The shortest of a few calls; on a GPU the mean of calls in a busy queue."""
    if device == "cpu":
        found = []
        for _ in range(CALLS):
            start = time.perf_counter()
            run()
            found.append(time.perf_counter() - start)
        return min(found)
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    torch.cuda.synchronize()
    torch.cuda._sleep(4_000_000)  # the GPU is busy until all calls are queued
    ends[0].record()
    for _ in range(CALLS):
        run()
    ends[1].record()
    torch.cuda.synchronize()
    return float(ends[0].elapsed_time(ends[1])) / CALLS / 1e3


def forward(fn: Callable[..., Any], args: tuple[Any, ...]) -> list[Callable[[], Any]]:
    """A call in eager and one in lenz."""
    return [partial(f, *args) for f in (fn, torch.compile(fn, backend=lenz.backend, dynamic=False))]


def training(fn: Callable[..., Any], args: tuple[Any, ...]) -> list[Callable[[], Any]]:
    """The same with the gradients of all floats; empty if the op has none."""
    leaves = [a.detach().clone().requires_grad_(a.is_floating_point()) for a in args]
    asked = [a for a in leaves if a.requires_grad]

    def first(*given: Any) -> Any:
        out = fn(*given)
        return out if isinstance(out, Tensor) else out[0]

    out = first(*leaves)
    if not asked or not out.requires_grad:
        return []
    g = torch.randn_like(out)
    calls = forward(first, tuple(leaves))
    return [lambda f=f: torch.autograd.grad(f(), asked, g, allow_unused=True) for f in calls]


def told(title: str, sides: Sequence[Callable[[], Any]], device: str, above: float) -> None:
    """Print a row if the second side, lenz, is slower."""
    for run in (*sides, *sides[1:]):
        run()
    rounds = [[seconds(run, device) for run in sides] for _ in range(ROUNDS)]
    eager, lenz = map(min, zip(*rounds, strict=True))
    if lenz > above * eager and lenz - eager > CALL[device == "cpu"]:
        print(f"{title} {1e6 * eager:9.0f} {1e6 * lenz:9.0f} {lenz / eager:7.2f}", flush=True)


def main() -> None:
    """Print a row for each op, form and kind in which lenz is slower than eager."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ops", description=__doc__)
    parser.add_argument("names", nargs="*", help="ops whose name contains one of these")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--above", type=float, default=1.5, help="the least ratio that is printed")
    parser.add_argument("--forms", default=",".join(FORMS))
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    if given.device == "cpu":
        torch.set_num_threads(1)
    print(f"{'op':22} {'form':11} {'kind':9} {'eager us':>9} {'lenz us':>9} {'ratio':>7}")
    for form in given.forms.split(","):
        for name, (fn, args) in ops(Operands.of(form, given.device)):
            if given.names and not any(part in name for part in given.names):
                continue
            for kind in (forward, training):
                title = f"{name:22} {form:11} {kind.__name__:9}"
                torch._dynamo.reset()
                try:
                    with torch.set_grad_enabled(kind is training):
                        if sides := kind(fn, args):
                            told(title, sides, given.device, given.above)
                except (RuntimeError, NotImplementedError) as e:
                    print(f"{title} {str(e).splitlines()[0][:60]}", flush=True)


if __name__ == "__main__":
    main()
