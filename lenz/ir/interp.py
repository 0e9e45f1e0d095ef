"""The oracle: runs a graph or a schedule on torch tensors, by the plain meaning of its text.

Graphs run vectorised: an axis is an `arange`, an index a tensor, a load advanced indexing. Nothing
here is shared with lowering or code generation, except the `eager` entry of the op table.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, TypeAlias

import torch

from lenz.errors import InternalError, UserError
from lenz.ir import graph
from lenz.ir.dtype import BY_NAME
from lenz.ir.expr import Expr, load
from lenz.ir.interp_expr import Fault, Value, evaluate_exprs, sym_value, with_bound
from lenz.ir.interp_kernel import interp_kernel, reduce_last, scan_last, update
from lenz.ir.kernel import Kernel, Launch, Schedule
from lenz.ir.printer import show_node
from lenz.ir.tensor import Axis, Buffer, Layout
from lenz.records import dataclass
from lenz.sym import Sym, Var, as_multiple, evaluate, substitute

__all__ = ["Interpreted", "interp", "interp_kernel", "interp_schedule"]

Call: TypeAlias = Callable[[graph.Extern, "tuple[Any, ...]", "dict[str, Any]"], Any]
RunKernel: TypeAlias = Callable[[Kernel, Mapping[str, torch.Tensor], Mapping[str, int]], None]


@dataclass(frozen=True, slots=True)
class Interpreted:
    """The outputs of a graph, and each input (tensor or int) after the call."""

    outputs: tuple[Any, ...]
    inputs: tuple[Any, ...]


def interp(
    g: graph.Graph,
    inputs: Sequence[torch.Tensor | int],
    constants: Sequence[torch.Tensor] = (),
    call: Call | None = None,
    objects: Mapping[str, Any] | None = None,
) -> Interpreted:
    """Run a graph on real tensors, one per input; the caller's tensors do not change.

    `call(node, args, kwargs)` replaces the eager ops of `Extern` nodes; `objects` are the values of
    "obj:NAME". Outputs in the memory of a mutated input have its new elements. Raises UserError for
    inputs that do not fit the graph, InternalError if the graph itself is wrong (an index out of
    bounds, a result of another type or shape than stated).
    """
    run = Run(g, call, objects or {})
    run.bind(inputs, constants)
    for n in g.nodes:
        run.node(n)
    finals = {m.input: run.tensors[m.value].clone() for m in g.mutations}
    for name, final in finals.items():
        run.tensors[name].copy_(final)
    return outcome_of(run, inputs)


class Run:
    """The values of one run by name."""

    def __init__(self, g: graph.Graph, call: Call | None, objects: Mapping[str, Any]) -> None:
        self.g = g
        self.call = call
        self.objects = objects
        self.sizes: dict[Var, Value] = {}
        self.numbers: dict[Sym, float] = {}  # made from sizes, read only by calls
        self.tensors: dict[str, torch.Tensor] = {}
        self.base: dict[str, int] = {}  # where the storage of a tensor starts for its layout

    # Inputs

    def bind(self, inputs: Sequence[torch.Tensor | int], constants: Sequence[torch.Tensor]) -> None:
        """Bind inputs and constants; sizes come from integers and from shapes."""
        given = [*zip(self.g.inputs, inputs, strict=True)]
        given += zip(self.g.constants, constants, strict=True)
        for b, x in given:
            if isinstance(b, Sym) and isinstance(x, int):
                _bind_size(self.sizes, b, x)
            elif isinstance(b, Buffer) and isinstance(x, torch.Tensor):
                if x.dim() != len(b.shape):
                    raise UserError(f"input %{b.name} has {x.dim()} dimensions, wanted {b.shape}")
                told = [*zip(b.shape, x.shape, strict=True)]
                # Strides of size-1 dimensions, and of empty tensors, may be anything.
                strides = zip(b.type.layout.stride, x.stride(), x.shape, strict=True)
                told += [(s, step) for s, step, n in strides if n > 1 and x.numel()]
                for s, n in told:
                    _bind_size(self.sizes, s, n)
            else:
                raise UserError(f"input {b} cannot be {type(x).__name__}")
        for b, x in given:
            if isinstance(b, Buffer) and isinstance(x, torch.Tensor):
                self._input(b, x)
            elif isinstance(b, Sym) and self.size(b) != x:
                raise UserError(f"input {b} is {x}, but the other inputs make it {self.size(b)}")

    def _input(self, b: Buffer, x: torch.Tensor) -> None:
        self._check(b, x, UserError, f"input %{b.name}")
        # A copy of the whole storage, with the first element where the layout puts it.
        shift = x.storage_offset() - self.size(b.type.layout.offset)
        total = x.untyped_storage().nbytes() // x.element_size()
        rest = max(total - max(shift, 0), 0)  # an empty tensor may start past its memory
        flat = x.detach().as_strided((rest,), (1,), max(shift, 0)).clone()
        if shift < 0:
            flat = torch.cat([torch.zeros(-shift, dtype=x.dtype), flat])
        self.tensors[b.name] = flat.as_strided(x.shape, x.stride(), x.storage_offset() - shift)
        self.base[b.name] = 0

    def _check(self, b: Buffer, x: torch.Tensor, error: type[Exception], what: str) -> None:
        """Compare a tensor with the type of a buffer."""
        shape, stride, _ = self.layout(b.type.layout)
        if x.dtype is not b.dtype.torch:
            raise error(f"{what} is {x.dtype}, wanted {b.dtype}")
        if tuple(x.shape) != shape:
            raise error(f"{what} has shape {tuple(x.shape)}, wanted {shape}")
        strided = [d for d, n in enumerate(shape) if n > 1]
        if 0 not in shape and any(x.stride(d) != stride[d] for d in strided):
            raise error(f"{what} has strides {x.stride()}, wanted {stride}")

    # Values

    def size(self, s: Sym) -> int:
        """The value of a size."""
        missing = [v.name for v in s.free_vars if v not in self.sizes]
        if missing:
            raise UserError(f"no input gives the size {', '.join(missing)} of graph @{self.g.name}")
        return evaluate(s, {v: int(self.sizes[v]) for v in s.free_vars})

    def layout(self, x: Layout) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """Sizes, strides and offset as numbers."""
        return tuple(map(self.size, x.shape)), tuple(map(self.size, x.stride)), self.size(x.offset)

    def atom(self, a: graph.Atom) -> Any:
        """The value of an argument or output."""
        match a:
            case graph.Ref(name):
                return self.tensors[name]
            case Sym():
                return self.numbers[a] if a in self.numbers else self.size(a)
            case tuple():
                return tuple(map(self.atom, a))
            case graph.Named("dtype", value):
                return BY_NAME[value].torch
            case graph.Named("device", value):
                return torch.device(value)
            case graph.Named("obj", value):
                return self.objects[value]
            case graph.Named("op", value):
                return _callee(value, self.objects)
            case graph.Named("layout" | "memory_format", value):
                return getattr(torch, value)
        return a

    def grid(self, axes: Sequence[Axis]) -> tuple[dict[Var, Value], tuple[int, ...]]:
        """The sizes, one index tensor per axis along its own dimension, and the shape."""
        env = dict(self.sizes)
        shape = tuple(self.size(a.extent) for a in axes)
        for d, (a, n) in enumerate(zip(axes, shape, strict=True)):
            env[a.var] = torch.arange(n).reshape([n if k == d else 1 for k in range(len(axes))])
        return env, shape

    def read(self, e: Expr, index: list[Value]) -> tuple[torch.Tensor, Fault | None]:
        """Elements of a tensor by logical index, and the points where that is out of bounds."""
        name = e.attrs[0]
        t = self.tensors[name]
        if not index:
            return t, None
        where = torch.tensor(False)
        clamped = []
        for i, n in zip(map(torch.as_tensor, index), t.shape, strict=True):
            where = where | (i < 0) | (i >= n)
            clamped.append(i.clamp(0, max(n - 1, 0)))
        value = t[tuple(clamped)] if t.numel() else torch.zeros(where.shape, dtype=t.dtype)

        def why(shape: tuple[int, ...], at: tuple[int, ...]) -> str:
            text = ", ".join(str(int(torch.as_tensor(x).expand(shape)[at])) for x in index)
            return f"%{name} is read at [{text}], its shape is {list(t.shape)}"

        return value, Fault(where, why)

    # Nodes

    def node(self, n: graph.Node) -> None:
        """Run one node."""
        try:
            _NODES[type(n)](self, n)
        except InternalError as e:
            line = show_node(n)
            raise InternalError(e.what, rule=e.rule, line=e.line, where=line) from e

    def put(self, b: Buffer, value: torch.Tensor) -> None:
        """Store the elements of a buffer in its own layout."""
        shape, _, _ = self.layout(b.type.layout)
        if tuple(value.shape) != shape or value.dtype is not b.dtype.torch:
            computed = f"{value.dtype}{list(value.shape)}"
            what = f"%{b.name} was stated as {b.dtype}{list(shape)}, computed {computed}"
            raise InternalError(what, rule="dtype")
        self.allocate(b).copy_(value)

    def allocate(self, b: Buffer) -> torch.Tensor:
        """New memory for a buffer, zeroed."""
        shape, stride, offset = self.layout(b.type.layout)
        span = offset + 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        flat = torch.zeros(offset if 0 in shape else span, dtype=b.dtype.torch)
        self.tensors[b.name] = flat.as_strided(shape, stride, offset)
        self.base[b.name] = 0
        return self.tensors[b.name]

    def view(self, n: graph.View) -> None:
        """Run a view, and check that its layout is its index."""
        shape, stride, offset = self.layout(n.out.type.layout)
        t = self.tensors[n.source].as_strided(shape, stride, self.base[n.source] + offset)
        env, _ = self.grid(n.axes)
        index = [sym_value(s, env) for s in n.index]
        picked, fault = self.read(load(n.source, n.index, n.out.dtype), index)
        if fault is not None and bool(fault.where.any()):
            raise InternalError(f"the index leaves %{n.source}", rule="in-bounds")
        if not torch.equal(_bits(t), _bits(picked.expand(shape))):
            what = f"the layout of %{n.out.name} and its index differ"
            raise InternalError(what, rule="view-layout")
        self.tensors[n.out.name] = t
        self.base[n.out.name] = self.base[n.source]

    def extern(self, n: graph.Extern) -> None:
        """Run a call, which may determine sizes."""
        args = tuple(self.atom(a) for a in n.args)
        kwargs = {k: self.atom(a) for k, a in n.kwargs}
        if self.call is not None:
            result = self.call(n, args, kwargs)
        else:
            result = _callee(n.op, self.objects)(*args, **kwargs)
        values = (result,) if n.single else tuple(result or ())
        if n.single and not n.outs:
            return
        for out, value in zip(n.outs, values, strict=True):
            if isinstance(out, Var) and isinstance(value, float):
                self.numbers[out] = value
            elif isinstance(out, Var):
                self.sizes[out] = int(value)
            elif isinstance(out, Sym):
                if self.size(out) != value:
                    raise InternalError(f"{n.op} gave {value} for the size {out}")
            elif out is not None:
                for s, size in zip(out.shape, value.shape, strict=False):
                    _bind_size(self.sizes, s, size)  # a size determined here
                value = _laid(value, *self.layout(out.type.layout)[:2])
                self._check(out, value, InternalError, f"%{out.name} from {n.op}")
                self.tensors[out.name] = value
                self.base[out.name] = value.storage_offset() - self.size(out.type.layout.offset)


def _laid(x: Any, shape: tuple[int, ...], stride: tuple[int, ...]) -> Any:
    """The result of a call, copied if its strides differ from the stated ones, as in a plan."""
    if tuple(x.shape) != shape or x.stride() == stride:
        return x
    return torch.empty_strided(shape, stride, dtype=x.dtype, device=x.device).copy_(x)


def outcome_of(run: Run, inputs: Sequence[torch.Tensor | int]) -> Interpreted:
    """The results of a run after its last node."""
    outputs = tuple(map(run.atom, run.g.outputs))
    outputs = tuple(o.clone() if isinstance(o, torch.Tensor) else o for o in outputs)
    given = zip(run.g.inputs, inputs, strict=True)
    after = tuple(run.tensors[b.name] if isinstance(b, Buffer) else x for b, x in given)
    return Interpreted(outputs, after)


def interp_schedule(
    s: Schedule,
    inputs: Sequence[torch.Tensor | int],
    constants: Sequence[torch.Tensor] = (),
    call: Call | None = None,
    objects: Mapping[str, Any] | None = None,
    run_kernel: RunKernel = interp_kernel,
) -> Interpreted:
    """Run a schedule; arguments as in `interp`. Mutations of inputs are stores of its kernels.

    `run_kernel` replaces the interpreter of kernels, to test other ways to run them.

    Raises InternalError like `interp_kernel`, and for an output that no step defines.
    """
    g = s.graph
    run = Run(g, call, objects or {})
    run.bind(inputs, constants)
    buffers = graph.buffers_of(g)
    for step in s.steps:
        if isinstance(step, Launch):
            _launch(step, run, buffers, run_kernel)
        else:
            run.node(step)
    missing = [r for r in graph.atom_refs(g.outputs) if r not in run.tensors]
    if missing:
        raise InternalError(f"no step defines the output %{missing[0]}", rule="output-defined")
    return outcome_of(run, inputs)


def _launch(step: Launch, run: Run, buffers: Mapping[str, Buffer], run_kernel: RunKernel) -> None:
    k = step.kernel
    memory: dict[str, torch.Tensor] = {}
    # The sizes of a kernel may have bounds that the graph's lack.
    scope = run.g.env.scope()
    plain = {v: scope.get(v.name, v) for v in k.sizes}

    def size(s: Sym) -> int:
        return run.size(substitute(s, plain))

    for p, name in zip(k.params, step.args, strict=True):
        if p.mode == "work":
            memory[p.name] = torch.zeros(size(p.size), dtype=p.dtype.torch)
            continue
        if name not in run.tensors:
            if p.mode != "out":
                raise InternalError(f"@{k.name} reads %{name}, which no step defines")
            run.allocate(buffers[name])
        t = run.tensors[name]
        if not t.numel():  # the formula of its length assumes nonempty dimensions
            memory[p.name] = t.new_empty(max(0, size(p.size)))
            continue
        base = run.base[name]
        total = t.untyped_storage().nbytes() // t.element_size() - base
        memory[p.name] = t.as_strided((total,), (1,), base)
    run_kernel(k, memory, {v.name: size(v) for v in k.sizes})


def _body(
    run: Run, n: graph.Pointwise | graph.Reduction | graph.Scan | graph.Sort, axes: Sequence[Axis]
) -> torch.Tensor:
    env, shape = run.grid(axes)
    (value,) = evaluate_exprs((n.body,), env, _no_value, run.read)
    return value.expand(shape)


def _finish(run: Run, n: graph.Reduction | graph.Scan, acc: torch.Tensor) -> None:
    env, shape = run.grid(n.axes)
    (out,) = evaluate_exprs((n.finish,), env, {"acc": acc}.__getitem__, run.read)
    run.put(n.out, out.expand(shape))


def _reduction(run: Run, n: graph.Reduction) -> None:
    value = _body(run, n, (*n.axes, *n.raxes))
    kept, over = value.shape[: len(n.axes)], math.prod(value.shape[len(n.axes) :])
    _finish(run, n, reduce_last(n.kind, value.reshape(*kept, over), n.body.dtype))


def _scan(run: Run, n: graph.Scan) -> None:
    row = _body(run, n, n.axes).movedim(n.dim, -1)
    row = scan_last(n.kind, row.flip(-1)).flip(-1) if n.reverse else scan_last(n.kind, row)
    _finish(run, n, row.movedim(-1, n.dim))


def _sort(run: Run, n: graph.Sort) -> None:
    row = _body(run, n, n.axes).sort(n.dim)[0]
    run.put(n.out, row.narrow(n.dim, 0, run.size(n.out.shape[n.dim])))


def _scatter(run: Run, n: graph.Scatter) -> None:
    env, shape = run.grid(n.axes)
    *bound, value = evaluate_exprs((*n.bound, n.value), env, _no_value, run.read)
    at_index = with_bound(n.index, bound, env)
    out = run.tensors[n.base].clone(memory_format=torch.contiguous_format)
    flat: Value = 0
    for s, size in zip(n.index, out.shape, strict=True):
        at = torch.as_tensor(sym_value(s, at_index)).expand(shape)
        if bool(((at < 0) | (at >= size)).any()):
            raise InternalError(f"%{n.out.name} is written outside", rule="in-bounds")
        flat = flat * size + at
    where = torch.as_tensor(flat).expand(shape).reshape(-1)
    update(out.view(-1), where, value.expand(shape).reshape(-1), n.mode)
    run.put(n.out, out)


_NODES: Mapping[type, Callable[[Run, Any], None]] = {
    graph.Pointwise: lambda run, n: run.put(n.out, _body(run, n, n.axes)),
    graph.Reduction: _reduction,
    graph.Scan: _scan,
    graph.Sort: _sort,
    graph.Scatter: _scatter,
    graph.View: Run.view,
    graph.Extern: Run.extern,
}


def _bind_size(sizes: dict[Var, Value], s: Sym, n: int) -> None:
    """Bind the variable of a size that is a multiple of it, unless it is known."""
    if (multiple := as_multiple(s)) is None:
        return
    v, step = multiple
    if n % step or (v.lo is not None and n < v.lo * step) or (v.hi is not None and n > v.hi * step):
        raise UserError(f"size {s} = {n} is outside {v.lo}..{v.hi}, or not a multiple of {step}")
    sizes.setdefault(v, n // step)


def _no_value(name: str) -> torch.Tensor:
    raise InternalError(f"no value is called {name} here", rule="ref-scope")


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def _seed(device: torch.device | None = None) -> torch.Tensor:
    """A fixed seed and offset: random ops are counter-based, so these determine everything."""
    return torch.tensor([0x1234_5678_9ABC, 0], dtype=torch.int64)


def _size(of: Any) -> Any:
    """A number, or the value of [name of a function, *arguments]."""
    if not isinstance(of, (list, tuple)):
        return of
    return getattr(torch if of[0].startswith("sym_") else operator, of[0])(*map(_size, of[1:]))


_OWN: Mapping[str, Callable[..., Any]] = {
    "lenz.as_strided": torch.as_strided,
    "lenz.assert_scalar": lambda condition, message: None,  # the sizes of this run satisfy it
    "lenz.offset": torch.Tensor.storage_offset,
    "lenz.seed": _seed,
    "lenz.seeds": lambda count, device=None: [_seed()] * count,
    "lenz.size": _size,
    "lenz.to_device": lambda t, device: t.clone(memory_format=torch.contiguous_format),
    "lenz.round": round,
    "lenz.view_as_complex": lambda t: torch.view_as_complex(t.resolve_conj()),
    "lenz.view_as_real": lambda t: torch.view_as_real(t.resolve_conj()),
}


def _callee(op: str, objects: Mapping[str, Any]) -> Callable[..., Any]:
    """The callee of an `Extern`: an eager op, "py.module.name", or one of the objects."""
    if op.startswith("obj:"):
        return objects[op[4:]]  # type: ignore[no-any-return]  # the caller holds Any
    if op in _OWN:
        return _OWN[op]
    found: Any = torch.ops
    parts = op.split(".")
    if parts[0] == "py":
        found = {"math": math, "operator": operator, "torch": torch}[parts[1]]
        parts = parts[2:]
    return reduce(getattr, parts, found)  # type: ignore[no-any-return]  # torch.ops gives Any
