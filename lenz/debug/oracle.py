"""Check kernels as they run (`verify="kernels"`): by the interpreter, and whole calls by eager.

A kernel that computes something else than its IR is named before its launch. Other faults (a wrong
pass, a lost write, steps in a wrong order) show in the results, which are compared with those of
the graph run op by op.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lenz.debug.between import title_of
from lenz.debug.names import titled
from lenz.debug.precise import precise
from lenz.debug.values import names_of
from lenz.debug.watch import Tensors, Watch, Watched
from lenz.errors import InternalError, LenzError
from lenz.ir.graph import Ref
from lenz.ir.interp_kernel import interp_kernel
from lenz.ir.kernel import Kernel
from lenz.ir.plan import Input, LaunchStep
from lenz.sym import evaluate

CALLS = 2  # the calls of a graph that are checked: the first may be special, as its memory is new
PAD = 256  # bytes around memory that a kernel must not write; what it reads of them is NaN
POISON = 0xFF  # every byte of them: NaN in each float type, -1 in integers
# Kernels may round and sum in another order: error relative to the element and the mean element.
CLOSE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
WHOLE = 10  # times that, for a whole graph
NEXT = "report it with the output of LENZ_DEBUG=1; docs/howto/debug-a-miscompile.md goes on"
REST = "Each kernel computes its IR: a pass, a lost write or the order of the steps is at fault"
SIMPLE = ("aten", "prims", "_operator", "math")  # ops that may run twice


class Oracle(Watch):
    """Checks the first calls of one graph, and raises an InternalError at the first difference."""

    def __init__(self, graph: Watched) -> None:
        super().__init__(graph)
        self.kernels, self.lines, self.calls = graph.kernels, graph.lines, 0
        self.can_repeat = all(map(_is_simple, (n.target for n in graph.program.nodes)))

    def begin(self, args: Tensors) -> None:
        self.calls += 1
        self.is_on, self.results = self.calls <= CALLS, None
        if self.is_on and self.can_repeat:
            own = copies(args)
            rows = zip(self.graph.plan.inputs, args, own, strict=True)
            self.written = [
                (i.name, a, c) for i, a, c in rows if isinstance(i, Input) and i.written
            ]
            with torch.no_grad():
                exact = self.exact(copies(args))
                self.results = self.graph.program.eager()(list(own))
            self.noise = [*map(_apart, self.results, exact or self.results)]

    def exact(self, args: list[Any]) -> Any:
        """The results in double precision; None if an op has no such form."""
        try:
            with precise():
                return self.graph.program.eager()(args)
        except Exception:  # noqa: BLE001  # any error: then only fixed tolerances count
            return None

    def made(self, k: int, t: torch.Tensor) -> None:
        if self.is_on and t.numel():
            flat = torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())
            flat.fill_(1 if t.dtype is torch.bool else POISON)

    def before(self, k: int, tensors: Tensors, sizes: Sequence[int] = ()) -> None:
        step = self.steps[k]
        if not self.is_on or not isinstance(step, LaunchStep):
            return
        kernel = self.kernels[step.kernel]
        self.sizes = {v.name: n for v, n in zip(kernel.sizes, sizes, strict=True)}
        self.want = memory_of(kernel, copies(tensors, "cpu"), self.sizes)
        self.largest = max([_largest(t) for t in tensors], default=0.0)
        try:
            interp_kernel(kernel, self.want, self.sizes)
        except LenzError as e:
            raise self.fault(k, f"does what no kernel may: {e.what}") from e
        if all(t.is_cpu for t in tensors):
            self.compare(k, kernel, self.guarded(k, kernel, tensors, sizes))

    def after(self, k: int, tensors: Tensors) -> None:
        step = self.steps[k]
        if self.is_on and isinstance(step, LaunchStep) and not all(t.is_cpu for t in tensors):
            kernel = self.kernels[step.kernel]
            self.compare(k, kernel, memory_of(kernel, copies(tensors, "cpu"), self.sizes))

    def guarded(
        self, k: int, kernel: Kernel, tensors: Sequence[torch.Tensor], sizes: Sequence[int]
    ) -> dict[str, torch.Tensor]:
        """What the kernel makes of copies of its arguments, which lie between canaries."""
        memory = memory_of(kernel, tensors, self.sizes)
        spans = {name: (t.data_ptr(), t.data_ptr() + t.nbytes) for name, t in memory.items()}
        blocks: list[tuple[int, int, torch.Tensor, torch.Tensor]] = []
        for start, end in _joined(spans.values()):
            block = torch.full((end - start + 2 * PAD + 64,), POISON, dtype=torch.uint8)
            begin = PAD + (start - block.data_ptr() - PAD) % 64  # aligned as the original is
            source = next(t for t in memory.values() if start <= t.data_ptr() < max(end, start + 1))
            block[begin : begin + end - start] = _bytes(source, start, end)
            blocks.append((start, end, block, block[begin : begin + end - start]))
        made = {}
        for (name, t), p in zip(memory.items(), kernel.params, strict=True):
            start, _, _, inside = next(b for b in blocks if b[0] <= t.data_ptr() <= b[1])
            at = t.data_ptr() - start
            made[name] = inside[at : at + t.nbytes].view(p.dtype.torch)
        self.graph.functions[kernel.name](*[t.data_ptr() for t in made.values()], *sizes)
        for start, end, block, inside in blocks:
            begin = inside.data_ptr() - block.data_ptr()
            around = torch.cat([block[:begin], block[begin + end - start :]])
            if bool((around != POISON).any()):
                names = [n for n, (a, _) in spans.items() if start <= a <= end]
                raise self.fault(k, f"writes outside of its memory, near {self.called(k, names)}")
        return made

    def called(self, k: int, params: Sequence[str]) -> str:
        """The user's names of some parameters."""
        kernel = self.kernels[title_of(self.steps[k])]
        named = zip(kernel.params, names_of(self.graph, k), strict=True)
        return ", ".join(name for p, name in named if p.name in params)

    def compare(self, k: int, kernel: Kernel, got: Mapping[str, torch.Tensor]) -> None:
        """Compare what a kernel has written with what the interpreter has."""
        for p in kernel.params:
            if p.mode in ("out", "inout"):
                wrong = _first_wrong(got[p.name], self.want[p.name], 1, self.largest)
                if wrong:
                    where = self.called(k, [p.name])
                    raise self.fault(k, f"computes another {where} than the interpreter: {wrong}")

    def end(self, results: Tensors) -> None:
        if self.results is None:
            return
        atoms = [a.name if isinstance(a, Ref) else "" for a in self.graph.plan.outputs]
        rows = enumerate(zip(atoms, results, self.results, self.noise, strict=True))
        named = [(name, f"result {i}", a, b, noise) for i, (name, a, b, noise) in rows]
        named += [(n, self.graph.labels.get(n, n), a, b, 0.0) for n, a, b in self.written]
        for buffer, what, a, b, noise in named:
            if not isinstance(b, torch.Tensor):
                continue
            if wrong := _first_wrong(a, b, WHOLE, _largest(b), noise):
                told = f"{what} of {titled(self.graph.name)} is not eager's: {wrong}. {REST}"
                raise InternalError(told, where=self.writer(buffer), hint=NEXT)

    def writer(self, buffer: str) -> str:
        """The last kernel that writes a buffer, with its line."""
        for k, s in reversed([*enumerate(self.steps)]):
            if isinstance(s, LaunchStep):
                named = zip(self.kernels[s.kernel].params, s.args, strict=True)
                if any(name == buffer and p.mode != "in" for p, name in named):
                    return f"last written by {s.kernel}, {self.lines.get(k, '')}"
        return "no kernel writes it"

    def fault(self, k: int, what: str) -> InternalError:
        """The error that names a kernel."""
        name = f"kernel {title_of(self.steps[k])} of {titled(self.graph.name)}"
        return InternalError(f"{name} {what}", where=self.lines.get(k, ""), hint=NEXT)


def memory_of(
    k: Kernel, tensors: Sequence[Any], sizes: Mapping[str, int]
) -> dict[str, torch.Tensor]:
    """The elements that each parameter of a kernel may touch, as flat views of its arguments."""
    env, found = {v: sizes[v.name] for v in k.sizes}, {}
    for p, t in zip(k.params, tensors, strict=True):
        n = evaluate(p.size, env) if t.numel() else 0
        found[p.name] = t.as_strided((n,), (1,), t.storage_offset())
    return found


def _is_simple(target: Any) -> bool:
    """Whether an op gives the same again, and does nothing else."""
    if "empty" in str(target):
        return False
    space = getattr(target, "namespace", "") or getattr(target, "__module__", "")
    return space in SIMPLE and torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ())


def copies(tensors: Tensors, device: str = "") -> list[Any]:
    """Copies of tensors, which share memory where the originals do."""
    memory: dict[int, Any] = {}
    made: list[Any] = []
    for t in tensors:
        if not isinstance(t, torch.Tensor):
            made.append(t)
        elif t.is_neg() or t.is_conj():
            made.append(t.to(device or t.device, copy=True))
        else:
            store: Any = t.untyped_storage()  # torch gives its methods no types
            at, place = store.data_ptr(), (t.storage_offset(), t.size(), t.stride())
            if at not in memory:
                moved = device and store.device.type != device
                memory[at] = store.cpu() if moved else store.clone()
            new = torch.empty(0, dtype=t.dtype, device=device or t.device)
            made.append(new.set_(memory[at], *place))
    return made


def _bytes(t: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """The bytes at some addresses of the memory of a tensor."""
    store = torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage())
    return store[start - store.data_ptr() : end - store.data_ptr()]


def _joined(spans: Any) -> list[tuple[int, int]]:
    """Ranges of addresses, those that overlap as one."""
    made: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if made and start < made[-1][1]:
            made[-1] = made[-1][0], max(end, made[-1][1])
        elif not made or (start, end) != made[-1]:
            made.append((start, end))
    return made


def _largest(t: Any) -> float:
    """The largest finite magnitude in a tensor of floats."""
    if not isinstance(t, torch.Tensor) or t.dtype not in CLOSE or not t.numel():
        return 0.0
    return float(torch.nan_to_num(t.detach().double(), 0.0, 0.0, 0.0).abs().max())


def _apart(a: Any, b: Any) -> float:
    """The largest finite distance of two results of floats."""
    return _largest(a.detach().double() - b.detach().double()) if _largest(a) else 0.0


def _first_wrong(
    a: torch.Tensor, b: torch.Tensor, factor: float, scale: float, noise: float = 0.0
) -> str:
    """The first element of `a` that is not that of `b`; empty if all are close.

    `noise` is the distance of eager from double precision.
    """
    a, b = a.detach().cpu().reshape(-1), b.detach().cpu().reshape(-1)
    if a.numel() != b.numel():
        return f"it has {a.numel()} elements, not {b.numel()}"
    if b.dtype.is_complex:
        a, b = (torch.view_as_real(t.resolve_conj()).reshape(-1) for t in (a, b))
    if b.dtype in CLOSE:
        tolerance, eps = CLOSE[b.dtype] * factor, torch.finfo(b.dtype).eps
        x, y = a.double(), b.double()
        mean = torch.nan_to_num(y, 0.0, 0.0, 0.0).abs().mean()
        least = 64 * factor * eps * scale + factor * noise
        near = (x - y).abs() <= tolerance * (y.abs() + mean) + least
        wrong = ~(near | (x == y) | (x.isnan() & y.isnan()))
    else:
        x, y = (t.float() if t.is_floating_point() else t for t in (a, b))
        wrong = ~((x == y) | ((x != x) & (y != y)))
    if not bool(wrong.any()):
        return ""
    at = int(wrong.nonzero()[0])
    return f"element {at} is {x[at].item()}, not {y[at].item()} ({int(wrong.sum())} differ)"
