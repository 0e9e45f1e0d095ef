"""Measure other tiles for GPU kernels of many sizes, and say how far the cost model is from them.

    python -m benchmarks.fit_gpu [--judge or --quick] [--only PATTERN] [--limit S] [--json FILE]

Every kernel of every case is made with the shapes of `lenz.machine.cuda.tune.space` beside that of
the cost model (`Shape` of `blocks.py`), all are compiled in one batch, and each is timed on random
data. Kernels of one kind and of rows of like length are a family. For each, the table has the time
of the cost model relative to the best candidate of the same kernel (geometric mean and worst), and
the shape with the least geometric mean of those that every kernel of the family was measured with.
The file has all times. `--judge` needs no GPU: it looks up what the cost model takes today in the
file, so that a change of it is judged by what was measured; a tile that nobody measured is named.
`--quick` needs none either: a few small cases, no compiler, and a clock that counts.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu_kernels import (
    CASES,
    argmax,
    bias_gelu,
    column_squares,
    cumsum,
    layer_norm_args,
    softmax,
)
from benchmarks.gpu_kernels import transpose_add_relu as transposed
from benchmarks.gpu_measure import gpu_machine
from benchmarks.measure import Row, geomean
from lenz.context import Context
from lenz.debug.report import Tried
from lenz.debug.traffic import bytes_moved
from lenz.ir.binary import Binary
from lenz.ir.kernel import Kernel, KernelKind, Launch
from lenz.ir.printer import show
from lenz.lower import lower
from lenz.machine.cuda.shape import Shape
from lenz.machine.cuda.triton.pool import Failed, wake
from lenz.machine.cuda.tune.bench import Gpu
from lenz.machine.cuda.tune.search import Choice, built, config, confined, race
from lenz.machine.cuda.tune.space import space
from lenz.options import Options
from lenz.pipeline import optimise
from lenz.schedule import schedule
from lenz.sym import SymEnv
from lenz.target import Target
from tests.cuda import fake_cuda, programs_of

RESULTS = Path(__file__).parent / "results" / "fit_gpu.json"
BF16, F32 = torch.bfloat16, torch.float32
NAMES = {BF16: "bf16", F32: "f32"}
ELEMENTS = 1 << 26  # of a tensor whose rows are long or short: 128 MiB of bf16, beyond the L2
# Smaller sizes of a case, where an eighth of its first size is none.
SMALLER = {"transpose + add + relu": (1024, 1024), "RMS norm + rotary": (1, 1024, 4096)}
SECONDS = 0.01  # of timed calls per candidate
LIMIT = 100.0  # seconds of measuring, after which the rest is left out


@dataclass(frozen=True, slots=True)
class Fit:
    """One function; `make` gives its arguments on the current default device."""

    name: str
    fn: Callable[..., Any]
    make: Callable[[], tuple[Tensor, ...]]


def fit(name: str, fn: Callable[..., Any], dtype: torch.dtype, *shapes: tuple[int, ...]) -> Fit:
    """A case whose arguments are of one type."""
    sizes = " ".join("x".join(map(str, s)) for s in shapes[:1])
    make = lambda: tuple(torch.empty(s, dtype=dtype) for s in shapes)
    return Fit(f"{name} {sizes} {NAMES[dtype]}", fn, make)


def scale(x: Tensor) -> Tensor:
    return x * 2 + 1


def add(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w, b)


def row_max(x: Tensor) -> Tensor:
    return x.amax(-1)


def channels_last(x: Tensor) -> Tensor:
    return torch.relu(x).contiguous(memory_format=torch.channels_last)


def ordered(x: Tensor) -> Tensor:
    return x.sort(-1).values


def sweep() -> Iterator[Fit]:
    """Functions of each kind at many sizes."""
    for dtype in (BF16, F32):
        for n in (12, 16, 20, 22, 24, 26, 28):
            yield fit("scale", scale, dtype, (1 << n,))
        for n in (14, 18, 22, 26):
            yield fit("gelu", F.gelu, dtype, (1 << n,))
            yield fit("add", add, dtype, (1 << n,), (1 << n,))
        for rows, columns in ((4096, 768), (65536, 768), (16384, 3000), (300, 100)):
            yield fit("bias gelu", bias_gelu, dtype, (rows, columns), (columns,))
        for n in (64, 128, 256, 512, 768, 1024, 1500, 2048, 3000, 4096, 5000, 8192, 16384, 32768,
                  50257, 65536):  # fmt: skip
            yield fit("softmax", softmax, dtype, (ELEMENTS // n, n))
            if dtype is BF16:
                yield fit("layer norm", layer_norm, dtype, (ELEMENTS // n, n), (n,), (n,))
                yield fit("max", row_max, dtype, (ELEMENTS // n, n))
        for n in (256, 2048, 16384):
            yield fit("softmax", softmax, dtype, (512, n))
        for n in (1024, 32768):
            yield fit("argmax", argmax, dtype, (ELEMENTS // n, n))
        for columns in (32, 256, 768, 4096, 10001, 50257):
            rows = ELEMENTS // columns
            yield fit("column squares", column_squares, dtype, (rows, columns))
        yield fit("column squares", column_squares, dtype, (512, 8192))
        for a, b in ((8192, 8192), (1024, 4096), (50257, 768)):
            yield fit("transpose", transposed, dtype, (a, b), (b, a))
        yield fit("channels last", channels_last, dtype, (32, 256, 56, 56))
        for shape in ((1 << 26,), (64, 1 << 18), (8192, 1024)):
            yield fit("cumsum", cumsum, dtype, shape)
        for n in (16, 128, 512, 1024, 2048, 4096):
            yield fit("sort", ordered, dtype, ((1 << 23) // n, n))
    for rows, columns in ((65536, 768), (65536, 1024), (4096, 1024), (16384, 2048), (2048, 8192)):
        made = partial(layer_norm_args, rows, columns)
        yield Fit(f"layer norm training {rows}x{columns} bf16", layer_norm, made)
        leaf = partial(torch.empty, rows, columns, dtype=BF16, requires_grad=True)
        yield Fit(f"softmax training {rows}x{columns} bf16", softmax, lambda leaf=leaf: (leaf(),))


def cases(quick: bool) -> list[Fit]:
    """The kernels of the benchmarks, and the sweep; a few of the latter to check the harness."""
    if quick:
        picked = ("scale 4096 bf16", "bias gelu 300*", "softmax 512x256 *", "column squares 512*",
                  "softmax 512x16384 f32", "transpose 1024x4096 f32")  # fmt: skip
        return [c for c in sweep() if any(fnmatch.fnmatch(c.name, p) for p in picked)]
    made = [Fit(c.name, c.fn, lambda c=c: c.make(*c.full)) for c in CASES]  # type: ignore[misc]
    for c in CASES:
        smaller = SMALLER.get(c.name, (c.full[0] // 8, *c.full[1:]))
        made.append(Fit(f"{c.name}, an eighth", c.fn, lambda c=c, s=smaller: c.make(*s)))  # type: ignore[misc]
    return [*made, *sweep()]


@dataclass(slots=True)
class Point:
    """One kernel of a case: a candidate for each shape, and what they took.

    rows, length   elements of P and of R
    shapes         that of the cost model first; `candidates[n]` is the kernel of `shapes[n]`
    """

    case: str
    kind: KernelKind
    rows: int
    length: int
    shapes: tuple[Shape, ...]
    candidates: tuple[Kernel, ...]
    env: SymEnv
    tried: dict[str, Tried] = field(default_factory=dict)

    @property
    def choice(self) -> Choice:
        """The different candidates."""
        return Choice(tuple(dict.fromkeys(self.candidates)), self.env)

    @property
    def nbytes(self) -> int:
        """Bytes that the kernel reads and writes."""
        return bytes_moved(self.candidates[0], self.env)

    def times(self) -> dict[Shape, float]:
        """Microseconds by shape, of those that ran."""
        found: dict[Shape, float] = {}
        for s, k in zip(self.shapes, self.candidates, strict=True):
            t = self.tried.get(config(k))
            if t is not None and t.us is not None:
                found[s] = t.us
        return found

    def row(self) -> Row:
        """The point as JSON: times by what a kernel is, so that they outlive names of shapes."""
        ran = {t.config: round(t.us, 2) for t in self.tried.values() if t.us is not None}
        out = {t.config: t.why[:80] for t in self.tried.values() if t.us is None}
        made: Row = {"case": self.case, "kernel": self.candidates[0].name, "kind": self.kind}
        made |= {"rows": self.rows, "length": self.length, "bytes": self.nbytes}
        made |= {"usual": config(self.candidates[0]), "us": ran}
        return made | ({"out": out} if out else {})

    def recall(self, rows: Sequence[Row]) -> None:
        """Take the times of the same kernel from a file."""
        same = ("case", "kind", "rows", "length", "bytes")
        mine = [getattr(self, n) for n in same[:-1]] + [self.nbytes]
        for r in rows:
            if [r[n] for n in same] == mine:
                self.tried |= {c: Tried(c, us) for c, us in r["us"].items()}


def points(case: Fit, known: dict[str, None]) -> list[Point]:
    """The kernels of a case that have a choice and are not in `known`, to which they are added."""
    with fake_cuda():
        with torch.device("cuda"):
            args = case.make()
        programs = programs_of(case.fn, *args)
    made: list[Point] = []
    for p in programs:
        cx = Context(Options(cache=False), Target("cuda", "sm_90", lanes=32))
        asked: list[tuple[KernelKind, int, int]] = []

        def noted(
            kind: KernelKind, rows: int, length: int, asked: list[Any] = asked
        ) -> tuple[Shape, ...]:
            asked.append((kind, rows, length))
            return space(kind, rows, length)

        s = schedule(optimise(lower(p, cx), cx), cx, noted)
        steps = [x for x in s.steps if isinstance(x, Launch) and x.candidates]
        for step, (kind, rows, length) in zip(steps, asked, strict=True):
            text = show(replace(step.kernel, name="k"))
            if text not in known and len(set(step.candidates)) > 1:
                known[text] = None
                shapes = (Shape(), *space(kind, rows, length))
                made.append(
                    Point(case.name, kind, rows, length, shapes, step.candidates, s.graph.env)
                )
    return made


def said(s: Shape) -> str:
    """What differs from the cost model: "tile=2048 thread=8"."""
    usual = Shape()
    pairs = [(f.name, getattr(s, f.name)) for f in fields(Shape)]
    return " ".join(f"{n}={v}" for n, v in pairs if v != getattr(usual, n)) or "usual"


def family(p: Point) -> tuple[str, int]:
    """Kernels that one rule should fit: of a kind, and of rows up to the same power of two."""
    if p.kind == "reduction":
        return "rows of", 1 << max(p.length - 1, 0).bit_length()
    if p.kind == "outer_reduction":
        return ("many columns" if p.rows >= 4096 else "few columns"), 0
    return p.kind, 0


def summary(found: Sequence[Point]) -> list[Row]:
    """One row per family that was measured."""
    families: dict[tuple[str, int], list[Point]] = {}
    for p in found:
        if Shape() in p.times():
            families.setdefault(family(p), []).append(p)
    return [_summed(f"{name} {n or ''}".strip(), families[name, n]) for name, n in sorted(families)]


def _summed(name: str, members: Sequence[Point]) -> Row:
    usual, table = Shape(), [p.times() for p in members]
    behind = [t[usual] / min(t.values()) for t in table]
    worst = max(range(len(members)), key=lambda n: behind[n])
    # Without those that cannot be compared: shapes that some member was not measured with.
    shared = [s for s in table[0] if all(s in t for t in table)]
    means = {s: geomean([t[s] / min(t.values()) for t in table]) for s in shared}
    best = min(shared, key=lambda s: means[s])
    return {
        "family": name,
        "kernels": len(members),
        "usual": geomean(behind),
        "worst": behind[worst],
        "worst_case": members[worst].case,
        "worst_best": said(min(table[worst], key=lambda s: table[worst][s])),
        "best": said(best),
        "best_mean": means[best],
    }


def report(rows: Sequence[Row]) -> str:
    """The summary as a table; ratios are to the best candidate of each kernel."""
    head = f"{'family':<16}{'n':>4}{'usual':>8}{'worst':>8}  {'best for all':<34}{'mean':>6}"
    head += "  worst case: its best"
    lines = [head, "-" * len(head)]
    for r in rows:
        lines.append(
            f"{r['family']:<16}{r['kernels']:>4}{r['usual']:>8.3f}{r['worst']:>8.3f}"
            f"  {r['best']:<34}{r['best_mean']:>6.3f}  {r['worst_case']}: {r['worst_best']}"
        )
    mean = geomean([r["usual"] for r in rows for _ in range(r["kernels"])]) if rows else math.nan
    lines.append(
        f"all: {sum(r['kernels'] for r in rows)} kernels, cost model {mean:.3f} of the best"
    )
    return "\n".join(lines)


class Counting(Gpu):
    """A GPU that is not there: a launch takes as long as it has programs, in nanoseconds."""

    place, name, arch = torch.device("cpu"), "none", 90

    def __init__(self) -> None:
        self.clock = 0.0

    @contextmanager
    def current(self) -> Iterator[None]:
        yield

    def sync(self) -> None: ...

    def flush(self) -> None:
        self.clock += 60.0

    def mark(self) -> float:
        return self.clock

    def us(self, start: float, end: float) -> float:
        return end - start

    def now(self) -> float:
        return self.clock * 1e-6

    def load(self, b: Binary, pointers: int, sizes: int) -> Callable[..., None]:
        def launch(programs: int, *args: int) -> None:
            self.clock += 2.0 + programs * 1e-3

        return launch


def binaries(found: Sequence[Point], gpu: Gpu, quick: bool) -> Iterator[Binary | Failed]:
    """The compiled candidates of all points, in order."""
    kernels = [confined(k, p.choice.env) for p in found for k in p.choice.candidates]
    if quick:
        return iter([Binary(k.name, b"none", k.tile.warps, 0, 0, -1, -1) for k in kernels])
    return iter(built(kernels, gpu, None))


def slow(found: Sequence[Point], least: float = 1.05) -> list[str]:
    """Kernels whose cost model is behind the best candidate by more than 5%, the worst first."""
    behind: list[tuple[float, str]] = []
    for p in found:
        ran = {t.config: t.us for t in p.tried.values() if t.us is not None}
        usual = config(p.candidates[0])
        if usual not in ran:
            behind.append((math.inf, f"{p.case}: {p.candidates[0].name}: {usual}: not measured"))
            continue
        best = min(ran, key=lambda c: ran[c])
        ratio = ran[usual] / ran[best]
        said = f"{p.case}: {p.candidates[0].name}: {usual}, {ran[usual]:.1f} us"
        behind.append((ratio, f"{ratio:.2f} {said}; {best}, {ran[best]:.1f} us"))
    return [text for ratio, text in sorted(behind, reverse=True) if ratio > least]


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a dry run without a GPU")
    parser.add_argument("--judge", action="store_true", help="look times up in the file")
    parser.add_argument("--only", default="*", help="cases whose name matches, such as 'softmax*'")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds of measuring")
    parser.add_argument("--json", type=Path, help=f"by default {RESULTS.name}, none when quick")
    given = parser.parse_args(argv)
    given.json = given.json or (None if given.quick else RESULTS)
    return given


def measured(
    found: Sequence[Point], quick: bool, limit: float, lap: Callable[[str], None]
) -> list[str]:
    """Time all candidates of all points; gives the points for which there was no time."""
    gpu: Gpu = Counting() if quick else Gpu(0)
    made = binaries(found, gpu, quick)
    lap(f"{sum(len(p.choice.candidates) for p in found)} candidates until")
    late: list[str] = []
    end = time.perf_counter() + limit
    for p in found:
        mine = [next(made) for _ in p.choice.candidates]
        if time.perf_counter() > end:
            late.append(f"{p.case}: {p.candidates[0].name}")
        else:
            p.tried = {t.config: t for t in race(p.choice, mine, gpu, SECONDS)}
    lap("measured until")
    return late


def main(argv: Sequence[str]) -> int:
    given = arguments(argv)
    began = time.perf_counter()
    clock: list[str] = []

    def lap(what: str) -> None:
        clock.append(f"{what} {time.perf_counter() - began:.0f} s")

    if not (given.quick or given.judge):
        wake()
    known: dict[str, None] = {}
    found: list[Point] = []
    failed: dict[str, str] = {}
    for case in cases(given.quick):
        if fnmatch.fnmatch(case.name, given.only):
            try:
                found += points(case, known)
            except Exception as e:  # noqa: BLE001 - the others are measured; it is reported below
                failed[case.name] = f"{type(e).__name__}: {str(e)[:200]}"
    lap(f"{len(found)} kernels until")
    if given.judge:
        old = json.loads(given.json.read_text(encoding="utf-8"))["kernels"]
        for p in found:
            p.recall(old)
    else:
        late = measured(found, given.quick, given.limit, lap)
        failed |= dict.fromkeys(late, "out of time")
    rows = summary(found)
    print(report(rows), *slow(found), "; ".join(clock), sep="\n")
    for name, why in failed.items():
        print(f"failed: {name}: {why}")
    if given.json is not None and not given.judge:
        machine = gpu_machine("cpu" if given.quick else "cuda")
        content = {"machine": machine, "families": rows, "failed": failed}
        lines = ",\n".join(json.dumps(p.row()) for p in found if p.tried)
        head = json.dumps(content, indent=1)[:-2]
        given.json.write_text(f'{head},\n "kernels": [\n{lines}\n]}}\n', encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
