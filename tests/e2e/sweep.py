"""Every op of torch's own op database through lenz and eager, and who lowered it.

    python -m tests.e2e.sweep [--from N] [--to N] [--dtypes float32,int64] [--samples 3]
                              [--op NAME] [--dynamic] [--layouts] [--special] [--device cuda]

Prints one line per op and dtype: the number of cases that agree, what failed, and the ops that were
called in eager. A case agrees when values, strides and shared memory of the results are eager's,
and the arguments are what eager leaves of them. Gradients, and errors, count as failed only where
backend="aot_eager" agrees with eager. `opinfo.py` runs all of it, and counts.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from lenz.api import compile_graph
from lenz.debug.trace import Recorder
from lenz.frontend import FxProgram
from lenz.ir.graph import Extern
from lenz.ir.plan import Boxed
from lenz.options import Options
from lenz.pipeline import Compiled
from tests.e2e.readers import together, told, watched

Backend = Callable[..., Any]
# (relative, absolute) error allowed beside eager, which rounds at other places.
TOLERANCE = {
    torch.float32: (1e-4, 1e-4),
    torch.float64: (1e-7, 1e-7),
    torch.bfloat16: (3e-2, 3e-2),
    torch.float16: (1e-2, 1e-2),
    torch.complex64: (1e-4, 1e-4),
    torch.complex128: (1e-7, 1e-7),
}
# What reads memory that is not behind expanded tensors: strides that are asked for; weights; a
# median (docs/upstream/torch_median_expanded.py) of a mask's copy.
BEHIND = ("as_strided", "native_group_norm", "masked.median")
# Samples of one op that are looked at: a few ops have thousands.
MOST = 200
# Memory without defined values: only shapes and dtypes can be compared.
UNDEFINED = (
    "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided",
)  # fmt: skip
# The first results of ops whose others, a seed and an offset, nobody sets where nothing is drawn.
SET = {f"torch.ops.aten._{kind}_attention_forward": 2 for kind in ("efficient", "flash")}
# Ops whose differences from eager, aot_eager's as well, are left.
THEIRS = {
    "nn.functional.multi_margin_loss": "NaN beside infinite differences, which ATen leaves out",
    "normal.in_place": "draws in the order of memory",
}
# Ops that may give the place of any of several equal elements.
TIES = ("sort", "argsort", "msort", "topk", "kthvalue", "median", "nanmedian", "mode")


@dataclass(slots=True)
class Row:
    """What happened to the samples of one op and dtype."""

    op: str
    dtype: str
    dynamic: bool = False
    passed: int = 0
    skipped: int = 0
    failures: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)  # where aot_eager has not what eager has
    externs: dict[str, str] = field(default_factory=dict)
    backward: dict[str, str] = field(default_factory=dict)
    whole: dict[str, None] = field(default_factory=dict)
    readers: dict[str, int] = field(default_factory=dict)  # plans by who runs them: readers.py

    @property
    def native(self) -> bool:
        """True when every sample passed without a call of an eager op."""
        return self.state == "native"

    @property
    def state(self) -> str:
        """What became of the op, by its worst case.

        "native": kernels only. "library": calls of what is meant to be a library's, and no other
        call. "extern": some call of an eager op. "skip": eager or aot_eager refuse every sample.
        """
        if self.failures:
            return "FAIL"
        if not self.passed:
            return "skip"
        reasons = {*self.externs.values(), *self.backward.values()}
        if self.whole or reasons - {"library"}:
            return "extern"
        return "library" if reasons else "native"

    def __str__(self) -> str:
        text = f"{self.state:7s} {self.op:45s} {self.dtype:9s}"
        text += f" pass={self.passed} skip={self.skipped}"
        if self.whole:
            text += f" whole-graph-eager: {'; '.join(self.whole)}"
        for kind, calls in (("extern", self.externs), ("backward", self.backward)):
            if calls:
                text += f" {kind}={', '.join(f'{k} ({v})' for k, v in calls.items())}"
        return "\n".join([text, *(f"       {f}" for f in self.failures)])


@dataclass(slots=True)
class Watch:
    """Notes the eager calls of each compiled graph in the row."""

    row: Row

    def compiled(self, made: Compiled, recorder: Recorder) -> Boxed:
        """A graph was compiled."""
        row = self.row
        calls = row.backward if made.program.kind == "backward" else row.externs
        externs = [n for n in made.graph.nodes if isinstance(n, Extern)]
        # lenz.seed and the like are calls of its own runtime.
        calls.update({n.op: n.reason for n in externs if not n.op.startswith("lenz.")})
        return made.call

    def refused(self, program: FxProgram, why: str, run: Boxed) -> Boxed:
        """A whole graph runs in eager."""
        self.untraced("", "", why)
        return run

    def untraced(self, name: str, kind: str, why: str) -> None:
        """The same, of a graph that was not captured."""
        self.row.whole[why.split(": ", 1)[-1]] = None


def recording(row: Row, **options: object) -> Backend:
    """The backend, with the eager calls of each compiled graph noted in the row."""

    chosen = {"on_error": "raise", "verify": True, **options}

    def backend(gm: GraphModule, inputs: list[Any], **kwargs: Any) -> Callable[..., Any]:
        return compile_graph(gm, inputs, Options.from_environment(chosen), Watch(row))

    return backend


def case(
    fn: Callable[..., Any],
    args: Any,
    backend: Backend | str | None,
    grad: bool,
    dynamic: bool = False,
) -> Any:
    """One call, eager when there is no backend: results, shared memory, arguments, gradients.

    The arguments are copies of `args`, as the call leaves them.
    """
    torch.manual_seed(0)
    args = pytree.tree_map(fresh, args)
    tensors = tensors_of(args)
    leaves = [t for t in tensors if t.requires_grad]
    run = fn
    if backend is not None:
        torch._dynamo.reset()
        run = torch.compile(fn, backend=backend, fullgraph=True, dynamic=dynamic)
    out = run(*args)
    shared = _sharing([*tensors, *tensors_of(out)])
    outs = [t for t in tensors_of(out) if t.requires_grad]
    if not grad or not leaves or not outs:
        return out, shared, tensors
    cot = [torch.ones_like(t) * 0.5 for t in outs]
    grads = torch.autograd.grad(outs, leaves, cot, allow_unused=True)
    return out, shared, tensors, grads


def layout_of(x: torch.Tensor) -> tuple[tuple[int, ...], int]:
    """Strides, those of dimensions of one as well, and the place of the first element."""
    return x.stride(), x.storage_offset()  # type: ignore[return-value]


def tensors_of(values: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(values) if isinstance(t, torch.Tensor)]


def _sharing(tensors: Sequence[torch.Tensor]) -> list[int]:
    """For each tensor the first one that has the same memory; -1 where it has none."""
    first: dict[int, int] = {}
    places = []
    for k, t in enumerate(tensors):
        held = t.layout is torch.strided and not t.is_nested and t.untyped_storage().nbytes()
        places.append(first.setdefault(t.untyped_storage().data_ptr(), k) if held else -1)
    return places


def fresh(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    if x.layout is not torch.strided or x.is_nested:
        return x.detach().clone().requires_grad_(x.requires_grad)
    shape, stride = x.shape, x.stride()
    own = x.detach()[tuple(slice(0, None if s else 1) for s in stride)]
    flat = torch.empty_strided(own.shape, stride, dtype=x.dtype, device=x.device)
    flat = flat.copy_(own).expand(shape)
    if x.is_conj():
        flat = flat.conj().resolve_conj()
    return flat.requires_grad_(x.requires_grad)


def agrees(got: Any, want: Any) -> str:
    """Empty when two results agree in type, shape, strides and values; else what differs."""
    a, b = pytree.tree_leaves(got), pytree.tree_leaves(want)
    if len(a) != len(b):
        return f"{len(a)} results instead of {len(b)}"
    for k, (x, y) in enumerate(zip(a, b, strict=True)):
        if isinstance(y, torch.Tensor):
            if not isinstance(x, torch.Tensor):
                return f"result {k} is a {type(x).__name__}"
            if x.dtype != y.dtype or x.shape != y.shape:
                return f"result {k}: {x.dtype}{list(x.shape)} instead of {y.dtype}{list(y.shape)}"
            if x.layout is torch.strided and x.numel() and layout_of(x) != layout_of(y):
                return f"result {k}: strides {layout_of(x)} instead of {layout_of(y)}"
            if (x.is_conj(), x.is_neg()) != (y.is_conj(), y.is_neg()):
                return f"result {k}: marks of a conjugate or a sign are not the same"
            if y.is_meta:
                continue
            rtol, atol = TOLERANCE.get(y.dtype, (0.0, 0.0))
            try:
                torch.testing.assert_close(
                    x.detach(), y.detach(), rtol=rtol, atol=atol, equal_nan=True
                )
            except (AssertionError, NotImplementedError, RuntimeError) as e:
                return f"result {k}: " + " ".join(str(e).split())[:230]
        elif isinstance(y, float):
            if not (x == y or abs(x - y) <= 1e-4 * max(1.0, abs(y)) or (x != x and y != y)):
                return f"result {k}: {x} instead of {y}"
        elif x != y:
            return f"result {k}: {x!r} instead of {y!r}"
    return ""


def check(
    row: Row, fn: Callable[..., Any], args: Any, grad: bool, label: str, device: str, exact: bool
) -> None:
    """Run one case through eager and lenz, and through aot_eager where they differ.

    In half types a result may also differ where it is nearer to the true one than eager's.
    Values are compared where `exact`, and those of ops that draw with eager's own draws.
    """
    want: Any
    draws = exact and is_random(fn, args, device)
    exact = exact and not draws
    try:
        want = case(fn, args, None, grad)
    except Exception:  # noqa: BLE001  # eager itself refuses the sample
        row.skipped += 1
        return
    problem = outcome(fn, args, recording(row), grad, want, exact, row.dynamic)
    if draws and not problem:
        # What lenz draws is its own; with this option it is eager's.
        calls = recording(Row(row.op, row.dtype), eager_random=True)
        exact, problem = True, outcome(fn, args, calls, grad, want, True, row.dynamic)
    if problem:
        if theirs := outcome(fn, args, "aot_eager", grad, want, exact, row.dynamic):
            if found := _differs(fn, args, exact, row):
                row.failures.append(f"{label}, in aot_eager too: {found}")
                return
            row.skipped += 1
            row.others.append(f"{label}: {theirs}")
            return
        if exact and (_is_nearer(fn, args, want, row) or _points_alike(fn, args, want, row)):
            row.passed += 1
            return
        row.failures.append(f"{label}: {problem}")
        return
    row.passed += 1


def _differs(fn: Callable[..., Any], args: Any, exact: bool, row: Row) -> str:
    """What differs in lenz's results, not its gradients: torch's decompositions may be wrong."""
    if row.op in THEIRS:
        return ""
    want = case(fn, args, None, False)
    found = outcome(fn, args, recording(Row(row.op, row.dtype)), False, want, exact, row.dynamic)
    return found if found.startswith("result") else ""  # and not an error that Dynamo raises


def _points_alike(fn: Callable[..., Any], args: Any, want: Any, row: Row) -> bool:
    """True when results differ in places alone, and those of both are places of equal elements."""
    x = next(iter(tensors_of(args)), None)
    if row.op not in TIES or x is None:
        return False
    got = case(fn, args, recording(row), False, row.dynamic)
    pairs = list(zip(tensors_of(got[0]), tensors_of(want[0]), strict=True))
    values = [
        [t for t in (g, w) if t.dtype is not torch.int64 or x.dtype is t.dtype] for g, w in pairs
    ]
    places = [(g, w) for g, w in pairs if g.dtype is torch.int64 and x.dtype is not torch.int64]
    if any(len(v) == 2 and agrees(*v) for v in values):
        return False

    def alike(g: torch.Tensor, w: torch.Tensor) -> bool:
        for d in range(x.dim()):
            a, b = [t if t.dim() == x.dim() else t.unsqueeze(d) for t in (g, w)]
            inside = bool(((a >= 0) & (a < x.shape[d])).all()) and a.dtype is b.dtype
            if inside and not agrees(x.detach().gather(d, a), x.detach().gather(d, b)):
                return a.stride() == b.stride()
        return False

    return all(alike(g, w) for g, w in places)


def _is_nearer(fn: Callable[..., Any], args: Any, want: Any, row: Row) -> bool:
    """True when lenz errs no more than eager in half types, beside eager in float64."""

    def wide(x: Any) -> Any:
        is_half = isinstance(x, torch.Tensor) and x.dtype in (torch.float16, torch.bfloat16)
        return x.to(torch.float64) if is_half else x

    try:
        got = case(fn, args, recording(row), False, row.dynamic)
        true = case(fn, pytree.tree_map(wide, args), None, False)
    except Exception:  # noqa: BLE001  # not an op of both types
        return False
    triples = list(zip(*(pytree.tree_leaves(r[0]) for r in (got, want, true)), strict=True))
    if not all(wide(t).dtype is t.dtype is torch.float64 for *_, t in triples):
        return False

    def error(x: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
        same = (x == true) | (x.isnan() & true.isnan())
        return torch.where(same, 0.0, (x - true).abs()).nan_to_num(float("inf")).max()

    errors = [[error(wide(x), t) for x in (g, w)] for g, w, t in triples if t.numel()]
    same = [g.dtype is w.dtype and g.stride() == w.stride() for g, w, _ in triples]
    return row.dtype.endswith("16") and all(same) and all(bool(g <= w) for g, w in errors)


def check_together(
    row: Row, fn: Callable[..., Any], given: Sequence[Any], grad: bool, device: str
) -> bool:
    """Run all cases as one function; True when they agree, else each must be looked at alone.

    Most of a small case is Dynamo's and AOTAutograd's constant cost: three take half the time.
    """
    if len(given) < 2 or any(is_random(fn, args, device) for args in given):
        return False

    def every(*given: Any) -> list[Any]:
        return [fn(*args) for args in given]

    trial = Row(row.op, row.dtype)
    try:
        want = case(every, given, None, grad)
    except Exception:  # noqa: BLE001  # eager itself refuses a sample
        return False
    if outcome(every, given, recording(trial), grad, want, True, row.dynamic):
        return False
    row.passed += len(given)
    row.externs.update(trial.externs)
    row.backward.update(trial.backward)
    row.whole.update(trial.whole)
    return True


def outcome(
    fn: Callable[..., Any],
    args: Any,
    backend: Backend | str,
    grad: bool,
    want: Any,
    exact: bool,
    dynamic: bool,
) -> str:
    """Empty when the backend gives what eager gave; else what went wrong."""
    try:
        got = case(fn, args, backend, grad, dynamic)
    except Exception as e:  # noqa: BLE001  # whatever is raised is the finding
        last = traceback.extract_tb(e.__traceback__)[-1]
        text = " ".join(str(e).split("Set TORCHDYNAMO_VERBOSE")[0].split())
        text = text if len(text) < 400 else f"{text[:180]} ... {text[-200:]}"
        return f"{type(e).__name__}: {text} ({last.name}:{last.lineno})"
    if not exact:
        got, want = pytree.tree_map(_without_values, (got, want))
    return agrees(got, want)


def _without_values(x: Any) -> Any:
    """The same with zeros, and NaN for a number: draws agree in all but values."""
    if isinstance(x, torch.Tensor):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return float("nan") if isinstance(x, float) else x


def is_random(fn: Callable[..., Any], args: Any, device: str = "cpu") -> bool:
    """True when the op draws from the default generator of the CPU, or of the device."""
    before = _random_states(device)
    with contextlib.suppress(Exception):
        fn(*pytree.tree_map(fresh, args))
    pairs = zip(before, _random_states(device), strict=True)
    return not all(torch.equal(a, b) for a, b in pairs)


def _random_states(device: str) -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    return states if device == "cpu" else [*states, torch.cuda.get_rng_state(device)]


def sweep(
    op: Any,
    dtype: torch.dtype,
    samples: int,
    dynamic: bool = False,
    device: str = "cpu",
    layouts: bool = False,
    first: int = 0,
    special: bool = False,
) -> Row:
    """Run samples of one op and dtype, spread over all it has; float32 and float64 also backward.

    Other numbers for `first` give other samples.
    With `layouts` samples run once more with other strides (`_other_layouts`); with `special` all
    have NaN, infinities and zeros.
    """
    row = Row(name_of(op), str(dtype)[6:], dynamic)
    grad = dtype in (torch.float32, torch.float64) and op.supports_autograd
    torch.manual_seed(1)
    try:
        every = list(islice(op.sample_inputs(device, dtype, requires_grad=grad), MOST))
        step = max(1, (len(every) - 1) // max(1, samples - 1))
        inputs = [(f"sample {k}", every[k]) for k in range(first % step, len(every), step)][
            :samples
        ]
        if layouts:
            inputs += _other_layouts(every, op.name.startswith(BEHIND))
        if special and op.name not in TWO_ANSWERS:
            inputs = [(f"special {label}", s.transform(_planted)) for label, s in inputs]
    except Exception:  # noqa: BLE001  # the database has samples that this build cannot make
        row.skipped += 1
        return row

    def fn(first: Any, args: Any, kwargs: Any) -> Any:
        found = op.op(first, *args, **kwargs)
        return found[: SET[op.name]] if op.name in SET else found

    given = [(s.input, s.args, s.kwargs) for _, s in inputs]
    exact = op.name not in UNDEFINED
    count = Counter[str]()
    with watched(count):
        if not (exact and check_together(row, fn, given, grad, device)):
            for (label, _), args in zip(inputs, given, strict=True):
                check(row, fn, args, grad, label, device, exact)
    row.readers = dict(+count)
    return row


def _other_layouts(every: Sequence[Any], strided: bool) -> Iterator[tuple[str, Any]]:
    """The first sample with gaps between elements, the first images channels-last, and others.

    Those are the first of at least 2, and of 3, dimensions with other orders of dimensions in
    memory, and with elements that are repeated along the first, and the last, dimension.
    """
    for s in every[:1]:
        yield "strided sample 0", s.noncontiguous()
    for dims, what, change in _CHANGES:
        if what == "expanded" and strided:
            continue
        for k, s in enumerate(every):
            found = (t for t in tensors_of(s.input) if t.layout is torch.strided)
            if any(t.dim() in dims and t.numel() > 1 for t in found):
                yield f"{what} sample {k}", s.transform(partial(_laid, dims, change))
                break


def _laid(dims: range, change: Callable[[torch.Tensor], torch.Tensor], x: Any) -> Any:
    if not isinstance(x, torch.Tensor) or x.layout is not torch.strided or x.dim() not in dims:
        return x
    return change(x.detach()).requires_grad_(x.requires_grad)


_CHANGES: tuple[tuple[range, str, Callable[[torch.Tensor], torch.Tensor]], ...] = (
    (range(4, 5), "channels-last", lambda x: x.to(memory_format=torch.channels_last)),
    (range(5, 6), "channels-last", lambda x: x.to(memory_format=torch.channels_last_3d)),
    (range(2, 9), "turned", lambda x: x.mT.contiguous().mT),
    (range(3, 9), "turned", lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)),
    (range(1, 9), "expanded", lambda x: x[:1].expand(x.shape)),
    (range(2, 9), "expanded", lambda x: x[..., :1].expand(x.shape)),
)


# Ops that give two answers in eager for NaN or infinity: by the place of an element in its row, in
# loops over vectors and outside of them, or by what was in memory.
TWO_ANSWERS: tuple[str, ...] = (
    "nn.functional.celu", "nn.functional.elu", "nn.functional.gelu", "nn.functional.hardswish",
    "nn.functional.hardtanh", "nn.functional.relu6", "nn.functional.selu",
    "nn.functional.softshrink", "logit", "var_mean", "std_mean",
    "special.chebyshev_polynomial_u", "special.chebyshev_polynomial_w",
    "special.shifted_chebyshev_polynomial_u", "special.shifted_chebyshev_polynomial_w",
)  # fmt: skip
if torch.__version__ < "2.13":  # x = NaN gives a variable that was never set
    TWO_ANSWERS = (*TWO_ANSWERS, "special.chebyshev_polynomial_t")
SPECIAL = (float("nan"), float("inf"), -0.0, float("-inf"), 0.0)


def _planted(x: Any) -> Any:
    """A tensor of floats with special values in about a third of its places, all in long ones."""
    if (
        not isinstance(x, torch.Tensor)
        or not x.is_floating_point()
        or x.layout is not torch.strided
    ):
        return x
    chance = torch.Generator().manual_seed(x.numel())
    here = torch.rand(x.shape, generator=chance) < 0.3
    which = torch.randint(len(SPECIAL), x.shape, generator=chance)
    values = torch.tensor(SPECIAL, dtype=x.dtype)[which].to(x.device)
    found = torch.where(here.to(x.device), values, x.detach())
    return fresh(found.requires_grad_(x.requires_grad))


def name_of(op: Any) -> str:
    """The op's name with that of its variant."""
    return op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")


def cases(names: Sequence[str] | None = None) -> Iterator[Any]:
    """The entries of the op database, by name where given."""
    from torch.testing._internal import common_methods_invocations as database

    # The database seeds ops that draw in a way that Dynamo does not trace; `case` seeds every op.
    database.wrapper_set_seed = lambda fn, *args, **kwargs: fn(*args, **kwargs)
    for op in database.op_db:
        if not names or op.name in names or name_of(op) in names:
            yield op


def main() -> int:
    """Run a slice and print the table and its sums."""
    p = argparse.ArgumentParser()
    p.add_argument("--from", dest="start", type=int, default=0)
    p.add_argument("--to", type=int, default=10**6)
    p.add_argument("--dtypes", default="float32")
    p.add_argument("--samples", type=int, default=3)
    p.add_argument("--op", action="append")
    p.add_argument("--dynamic", action="store_true")
    p.add_argument("--layouts", action="store_true")
    p.add_argument("--special", action="store_true")
    p.add_argument("--device", default="cpu")
    a = p.parse_args()
    warnings.simplefilter("ignore")
    rows: list[Row] = []
    began = time.monotonic()
    for k, op in enumerate(cases(a.op)):
        if not a.start <= k < a.to:
            continue
        for name in a.dtypes.split(","):
            dtype = getattr(torch, name)
            if dtype not in op.supported_dtypes(a.device):
                continue
            print(f"#{k} {op.name} {name}", file=sys.stderr, flush=True)
            rows.append(
                sweep(op, dtype, a.samples, a.dynamic, a.device, a.layouts, special=a.special)
            )
            print(rows[-1], flush=True)
    bad = sum(bool(r.failures) for r in rows)
    native = sum(r.native for r in rows)
    passed = sum(r.passed > 0 and not r.failures for r in rows)
    print(f"# {passed} pass ({native} native), {bad} fail, {len(rows) - passed - bad} skipped"
          f" of {len(rows)} in {time.monotonic() - began:.0f} s")  # fmt: skip
    print(f"# {told(together(r.readers for r in rows))}")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
