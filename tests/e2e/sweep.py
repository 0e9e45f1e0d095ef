"""Every op of torch's own op database through lenz and eager, and who lowered it.

    python tests/e2e/sweep.py [--from N] [--to N] [--dtypes float32,int64] [--samples 3]
                             [--op NAME] [--dynamic] [--device cuda]

Prints one line per op and dtype: the number of cases that agree, what failed, and the ops that were
called in eager. A case counts as failed only where backend="aot_eager" agrees with eager.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from lenz.api import compile_graph
from lenz.debug.trace import Recorder
from lenz.frontend import FxProgram
from lenz.ir.graph import Extern
from lenz.options import Options
from lenz.pipeline import Boxed, Compiled

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
# Memory without defined values: only shapes and dtypes can be compared.
UNDEFINED = (
    "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided",
)  # fmt: skip


@dataclass(slots=True)
class Row:
    """What happened to the samples of one op and dtype."""

    op: str
    dtype: str
    dynamic: bool = False
    passed: int = 0
    skipped: int = 0
    failures: list[str] = field(default_factory=list)
    externs: dict[str, str] = field(default_factory=dict)
    whole: dict[str, None] = field(default_factory=dict)

    @property
    def native(self) -> bool:
        """True when every sample passed without a call of an eager op."""
        return self.passed > 0 and not self.failures and not self.externs and not self.whole

    def __str__(self) -> str:
        state = "native" if self.native else "ok" if self.passed else "skip"
        state = "FAIL" if self.failures else state
        text = f"{state:6s} {self.op:45s} {self.dtype:9s} pass={self.passed} skip={self.skipped}"
        if self.whole:
            text += f" whole-graph-eager: {'; '.join(self.whole)}"
        if self.externs:
            text += f" extern={', '.join(f'{k} ({v})' for k, v in self.externs.items())}"
        return "\n".join([text, *(f"       {f}" for f in self.failures)])


@dataclass(slots=True)
class Watch:
    """Notes the eager calls of each compiled graph in the row."""

    row: Row

    def compiled(self, made: Compiled, recorder: Recorder) -> Boxed:
        """A graph was compiled."""
        for n in made.graph.nodes:
            if isinstance(n, Extern):
                self.row.externs[n.op] = n.reason
        return made.call

    def refused(self, program: FxProgram, why: str, run: Boxed) -> Boxed:
        """A whole graph runs in eager."""
        self.row.whole[why.split(": ", 1)[-1]] = None
        return run


def recording(row: Row) -> Backend:
    """The backend, with the eager calls of each compiled graph noted in the row."""

    def backend(gm: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
        return compile_graph(gm, inputs, Options.from_environment({}), Watch(row))

    return backend


def case(
    fn: Callable[..., Any],
    args: Any,
    backend: Backend | str | None,
    grad: bool,
    dynamic: bool = False,
) -> Any:
    """Outputs (and gradients of the leaves) of one call, eager when there is no backend."""
    torch.manual_seed(0)
    args = pytree.tree_map(_fresh, args)
    tensors = [t for t in pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
    leaves = [t for t in tensors if t.requires_grad]
    run = fn
    if backend is not None:
        torch._dynamo.reset()
        run = torch.compile(fn, backend=backend, fullgraph=True, dynamic=dynamic)
    out = run(*args)
    if not grad or not leaves:
        return out
    outs = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad]
    if not outs:
        return out
    cot = [torch.ones_like(t) * 0.5 for t in outs]
    grads = torch.autograd.grad(outs, leaves, cot, allow_unused=True)
    return out, grads


def _fresh(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    if x.layout is not torch.strided or x.is_nested:
        return x.detach().clone().requires_grad_(x.requires_grad)
    flat = (
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        if 0 not in (x.stride() if x.numel() > 1 else (1,))
        else torch.empty_like(x)
    )
    flat.copy_(x.detach())
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
            if x.layout is torch.strided and x.numel():
                kept = [d for d, s in enumerate(x.shape) if s > 1]
                if [x.stride(d) for d in kept] != [y.stride(d) for d in kept]:
                    return f"result {k}: strides {x.stride()} instead of {y.stride()}"
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


def check(row: Row, fn: Callable[..., Any], args: Any, grad: bool, label: str, exact: bool) -> None:
    """Run one case through eager and lenz, and through aot_eager where they differ."""
    try:
        want = case(fn, args, None, grad)
    except Exception:  # noqa: BLE001  # eager itself refuses the sample
        row.skipped += 1
        return
    problem = outcome(fn, args, recording(row), grad, want, exact, row.dynamic)
    if problem:
        if outcome(fn, args, "aot_eager", grad, want, exact, row.dynamic):
            row.skipped += 1
            return
        row.failures.append(f"{label}: {problem}")
        return
    row.passed += 1


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
        meta = lambda t: (t.shape, t.dtype) if isinstance(t, torch.Tensor) else t
        return agrees(pytree.tree_map(meta, got), pytree.tree_map(meta, want))
    return agrees(got, want)


def is_random(fn: Callable[..., Any], args: Any, device: str = "cpu") -> bool:
    """True when the op draws from the default generator of the CPU, or of the device."""
    before = _random_states(device)
    with contextlib.suppress(Exception):
        fn(*pytree.tree_map(_fresh, args))
    pairs = zip(before, _random_states(device), strict=True)
    return not all(torch.equal(a, b) for a, b in pairs)


def _random_states(device: str) -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    return states if device == "cpu" else [*states, torch.cuda.get_rng_state(device)]


def sweep(
    op: Any, dtype: torch.dtype, samples: int, dynamic: bool = False, device: str = "cpu"
) -> Row:
    """Run the first samples of one op and dtype; float32 and float64 also backward."""
    name = op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")
    row = Row(name, str(dtype)[6:], dynamic)
    grad = dtype in (torch.float32, torch.float64) and op.supports_autograd
    torch.manual_seed(1)
    try:
        inputs = []
        for s in op.sample_inputs(device, dtype, requires_grad=grad):
            inputs.append(s)
            if len(inputs) == samples:
                break
    except Exception:  # noqa: BLE001  # the database has samples that this build cannot make
        row.skipped += 1
        return row
    for k, s in enumerate(inputs):

        def fn(first: Any, args: Any, kwargs: Any) -> Any:
            return op.op(first, *args, **kwargs)

        given = (s.input, s.args, s.kwargs)
        exact = op.name not in UNDEFINED and not is_random(fn, given, device)
        check(row, fn, given, grad, f"sample {k}", exact)
    return row


def cases(names: Sequence[str] | None = None) -> Iterator[Any]:
    """The entries of the op database, by name where given."""
    from torch.testing._internal.common_methods_invocations import op_db

    for op in op_db:
        if not names or op.name in names:
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
            rows.append(sweep(op, dtype, a.samples, a.dynamic, a.device))
            print(rows[-1], flush=True)
    bad = sum(bool(r.failures) for r in rows)
    native = sum(r.native for r in rows)
    passed = sum(r.passed > 0 and not r.failures for r in rows)
    print(f"# {passed} pass ({native} native), {bad} fail, {len(rows) - passed - bad} skipped"
          f" of {len(rows)} in {time.monotonic() - began:.0f} s")  # fmt: skip
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
