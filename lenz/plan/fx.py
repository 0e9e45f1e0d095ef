"""A plan as a `torch.fx.GraphModule`, for external compilers. It is runnable: `gm(*args)`.

The graph has a placeholder per argument; one for a size has the example size in `meta["val"]`.
Sizes are nodes too. Memory is `torch.empty_strided`, views are `torch.as_strided`. A kernel of
Triton is a `triton_kernel_wrapper_mutation`, any other one a call of the op `lenz::launch`.
`delete` ends a tensor's life. The plan's assumptions about arguments are assertions.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, GraphModule, Node

from lenz.errors import InternalError
from lenz.ir import plan as ir
from lenz.ir.dtype import DType
from lenz.ir.graph import Atom, Named, Ref
from lenz.ir.tensor import TensorType
from lenz.plan.native_objects import torch_object
from lenz.plan.python import place
from lenz.runtime import executor, graph
from lenz.runtime.graph import NumberedKernel
from lenz.sym import ZERO, Int, Sym, Var, as_multiple, children, expr, show

Size: TypeAlias = "int | Node"
NONE: Mapping[str, Any] = {}
OPERATORS: Mapping[type, Callable[..., Any]] = {
    expr.Add: operator.add,
    expr.Mul: operator.mul,
    expr.FloorDiv: operator.floordiv,
    expr.Mod: operator.mod,
    expr.Min: torch.sym_min,
    expr.Max: torch.sym_max,
}


def graph_module(
    p: ir.Plan, kernels: Mapping[str, NumberedKernel], constants: Mapping[str, torch.Tensor] = NONE,
    objects: Mapping[str, Any] = NONE, values: Mapping[str, Any] = NONE,
) -> GraphModule:  # fmt: skip
    """The plan as a graph. `values` are the `meta["val"]` of its arguments, by name."""
    r = _Reader(p, kernels)
    r.arguments(p, values)
    comments = dict(p.comments)
    for k, step in enumerate(p.flat):
        r.step(step)
        if k in comments and r.last is not None:
            r.last.meta["origin"] = comments[k]
    results = tuple(map(r.value, p.outputs))
    if r.current:
        r.call(executor.restore_gpu, r.before)
    r.graph.output(results)
    r.graph.lint()
    held = {c.name: constants[c.name] for c in p.constants} | {o: objects[o] for o in p.objects}
    return GraphModule({r.attributes[n]: x for n, x in held.items()}, r.graph, class_name="Plan")


class _Sizes:
    """Adds nodes of calls to a graph, sizes among them."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.sizes: dict[str, Size] = {}  # by text: kernels have other bounds for a size
        self.last: Any = None

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A new node."""
        self.last = self.graph.call_function(target, args, kwargs)
        return self.last

    def size(self, s: Sym) -> Size:
        """A number or a node."""
        key = show(s)
        if isinstance(s, Int):
            return s.value
        if key not in self.sizes:
            op = OPERATORS[type(s)]
            parts = [self.size(x) for x in children(s)]
            if isinstance(s, expr.Add):
                terms = zip(parts, (c for _, c in s.terms), strict=True)
                parts = [x if c == 1 else self.call(operator.mul, x, c) for x, c in terms]
                parts += [s.const] * (s.const != 0)
            self.sizes[key] = reduce(lambda a, b: self.call(op, a, b), parts)
        return self.sizes[key]

    def form(self, t: TensorType) -> tuple[tuple[Size, ...], tuple[Size, ...]]:
        """Sizes and strides."""
        return tuple(map(self.size, t.shape)), tuple(map(self.size, t.layout.stride))

    def define(self, whole: Sym, node: Node) -> None:
        """Define a variable from an argument that is its multiple; the first argument counts."""
        var, factor = as_multiple(whole) or (None, 1)
        if var is None or var.name in self.sizes:
            return
        self.sizes[var.name] = self.call(operator.floordiv, node, factor) if factor > 1 else node
        if factor > 1:
            self.expect(f"{var.name} is not a whole number", "eq", self.size(whole), node)

    def expect(self, message: str, *condition: Any) -> None:
        """Assert a condition on sizes."""
        self.call(executor.assert_scalar, [*condition], message)


class _Reader(_Sizes):
    """Adds the nodes of one step after the other."""

    def __init__(self, p: ir.Plan, kernels: Mapping[str, NumberedKernel]) -> None:
        super().__init__()
        self.kernels = kernels
        self.nodes: dict[str, Node] = {}  # of live tensors
        self.dtypes: dict[str, DType] = {}
        self.inputs = {i.name for i in p.inputs if isinstance(i, ir.Input)}
        self.own: set[str] = set()  # tensors at the start of their memory
        names = [*(c.name for c in p.constants), *p.objects]
        self.attributes = {name: f"attribute{k}" for k, name in enumerate(names)}
        self.current, self.before = "", None

    def arguments(self, p: ir.Plan, values: Mapping[str, Any]) -> None:
        """Placeholders, constants, sizes from arguments, and their checks."""
        taken: set[str] = set()
        for k, i in enumerate(p.inputs):
            name = i.name if isinstance(i, ir.Input) else show(i.value)
            called = name if name.isidentifier() and name not in taken else f"size{k}"
            taken.add(called)
            node = self.graph.placeholder(called)
            node.meta["val"] = values.get(name)
            if isinstance(i, ir.Input):
                self.nodes[i.name], self.dtypes[i.name] = node, i.type.dtype
        for c in p.constants:
            self.nodes[c.name] = self.graph.get_attr(self.attributes[c.name])
        for i, node in zip(p.inputs, list(self.graph.nodes), strict=False):
            if isinstance(i, ir.SizeInput):
                self.define(i.value, node)
        for s in p.flat:
            if isinstance(s, ir.BindSize) and s.source in self.inputs:
                self.define(s.var * s.factor, self.read(s))
        for name, most in p.most:
            self.expect(f"{name} is larger than {most}", "le", self.sizes[name], most)
        for i in p.inputs:
            if isinstance(i, ir.Input):
                self.check(i)
        for name in p.aligned:
            self.call(graph.assert_aligned, self.nodes[name])

    def check(self, i: ir.Input) -> None:
        """Assert the type and layout of an argument, or copy it."""
        device = "" if i.anywhere else i.type.device
        told = (i.called or i.name, *self.form(i.type), i.type.dtype.torch, device)
        if i.laid:
            self.nodes[i.name] = self.call(graph.laid, self.nodes[i.name], *told)
        else:
            self.call(graph.assert_tensor, self.nodes[i.name], *told, i.signed)

    def read(self, s: ir.BindSize) -> Any:
        """A size or stride of a tensor."""
        op = torch.ops.aten.sym_stride.int if s.stride else torch.ops.aten.sym_size.int
        return self.call(op, self.nodes[s.source], s.dim)

    def step(self, s: ir.Step) -> None:
        """Nodes of one step."""
        self.last = None
        match s:
            case ir.BindSize():
                if s.source not in self.inputs:
                    self.sizes[s.var.name] = self.read(s)
            case ir.Alloc():
                new = {"dtype": s.type.dtype.torch, "device": torch.device(s.type.device)}
                self.nodes[s.name] = self.call(torch.empty_strided, *self.form(s.type), **new)
                if s.zero:
                    self.call(torch.ops.aten.zero_.default, self.nodes[s.name])
            case ir.Reuse():
                node, to = self.nodes.pop(s.source), s.type.dtype
                if not s.same:
                    is_same = self.dtypes.get(s.source) is to
                    op, last = (torch.as_strided, 0) if is_same else (executor.reuse, to.torch)
                    node = self.call(op, node, *self.form(s.type), last)
                self.nodes[s.name] = self.cut(node, s.detached)
            case ir.ViewStep():
                node = self.nodes[s.source] if s.same else self.view(s)
                self.nodes[s.name] = self.cut(node, s.detached)
            case ir.Current():
                self.exchange(s.device)
            case ir.Lay():
                t = s.type
                told = (*self.form(t), t.dtype.torch, place(t.device), s.op, s.aligned)
                self.nodes[s.name] = self.call(executor.lay, self.nodes[s.name], *told)
            case ir.LaunchStep():
                self.launch(s)
            case ir.CallStep():
                self.eager(s)
            case ir.Check():
                pass  # a launch raises by itself
            case ir.Free():
                node = self.nodes.pop(s.name)
                if node not in self.nodes.values():
                    self.call(graph.delete, node)
            case _:
                raise InternalError(f"an FX graph cannot express {s}")
        if isinstance(s, (ir.Alloc, ir.Reuse)):
            self.own.add(s.name)
        if isinstance(s, (ir.Alloc, ir.Alias, ir.Lay)):
            self.dtypes[s.name] = s.type.dtype

    def view(self, s: ir.ViewStep) -> Any:
        """Other sizes and strides, from the first element of the source."""
        source, offset = self.nodes[s.source], s.type.layout.offset
        if offset is ZERO:
            return self.call(torch.as_strided, source, *self.form(s.type))
        start = self.size(offset)
        if s.source not in self.own:
            first = self.call(torch.ops.aten.sym_storage_offset.default, source)
            start = self.call(operator.add, first, start)
        return self.call(torch.as_strided, source, *self.form(s.type), start)

    def cut(self, node: Node, is_detached: bool) -> Any:
        return self.call(torch.ops.aten.detach.default, node) if is_detached else node

    def exchange(self, device: str) -> None:
        """Make a GPU current."""
        if self.current != device:
            before = self.call(executor.exchange_gpu, torch.device(device).index)
            self.before = before if self.before is None else self.before
            self.current = device

    def launch(self, s: ir.LaunchStep) -> None:
        """Run a kernel."""
        args, sizes = [self.nodes[a] for a in s.args], [*map(self.size, s.sizes)]
        k = self.kernels[s.kernel]
        if s.grid is None:
            self.call(torch.ops.lenz.launch.default, k.number, args, sizes)
        else:
            number, constants = k.places
            self.call(
                torch.ops.higher_order.triton_kernel_wrapper_mutation,
                kernel_idx=number,
                constant_args_idx=constants,
                grid=[(self.size(s.grid), 1, 1)],
                tma_descriptor_metadata={},
                kwargs=dict(zip(k.names, [*args, *sizes], strict=True)),
            )
        self.last.meta["kernel"] = k

    def eager(self, s: ir.CallStep) -> None:
        """Call an eager op."""
        args, kwargs = map(self.value, s.args), {k: self.value(a) for k, a in s.kwargs}
        node = self.call(executor.resolve(s.op), *args, **kwargs)
        if s.into:
            (out,) = s.outs
            self.nodes[str(out)] = node  # it returns the memory that it fills
            return
        if s.counted:
            self.call(executor.several, node, len(s.outs), s.op)
        for k, o in enumerate(s.outs):
            part = node if s.single or o is None else self.call(operator.getitem, node, k)
            if isinstance(o, Var):
                self.sizes[o.name] = part
            elif isinstance(o, str):
                self.nodes[o] = part
        self.last = node

    def value(self, a: Atom) -> Any:
        """An argument of a call, or a result."""
        match a:
            case Ref():
                return self.nodes[a.name]
            case Sym():
                return self.size(a)
            case tuple():
                return [*map(self.value, a)]
            case Named("obj", value):
                return self.graph.create_node("get_attr", self.attributes[value])
            case Named():
                return torch_object(a)
        return a
