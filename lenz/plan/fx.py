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

from lenz.ir import plan as ir
from lenz.ir.dtype import DType
from lenz.plan.native_objects import value
from lenz.runtime import executor, graph
from lenz.runtime.captured import Runner
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
    results = tuple([r.value(a, r.look) for a in p.outputs])
    if r.current:
        r.do(executor.restore_gpu, r.before)
    r.graph.output(results)
    r.graph.lint()
    held = {c.name: constants[c.name] for c in p.constants} | {o: objects[o] for o in p.objects}
    return GraphModule({r.attributes[n]: x for n, x in held.items()}, r.graph, class_name="Plan")


class _Reader(Runner):
    """Adds the nodes of one step after the other to a graph, instead of running them."""

    def __init__(self, p: ir.Plan, kernels: Mapping[str, NumberedKernel]) -> None:
        own = self.own = dict[str, Node]()  # objects of the plan
        super().__init__(kernels, {}, {}, lambda a, look: value(a, own, look), 0)
        self.graph = Graph()
        self.known: dict[str, Size] = {}  # by text: kernels have other bounds for a size
        self.last: Any = None
        self.dtypes: dict[str, DType] = {}
        self.inputs = p.tensors
        self.starts: set[str] = set()  # tensors at the start of their memory
        names = [*(c.name for c in p.constants), *p.objects]
        self.attributes = {name: f"attribute{k}" for k, name in enumerate(names)}
        self.current, self.before = "", None

    def do(self, f: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A new node."""
        self.last = self.graph.call_function(f, args, kwargs)
        return self.last

    def size(self, s: Sym) -> Any:
        """A number or a node."""
        key = show(s)
        if isinstance(s, Int):
            return s.value
        if key not in self.known:
            op = OPERATORS[type(s)]
            parts = [self.size(x) for x in children(s)]
            if isinstance(s, expr.Add):
                terms = zip(parts, (c for _, c in s.terms), strict=True)
                parts = [x if c == 1 else self.do(operator.mul, x, c) for x, c in terms]
                parts += [s.const] * (s.const != 0)
            self.known[key] = reduce(lambda a, b: self.do(op, a, b), parts)
        return self.known[key]

    def number(self, v: Var, x: Any) -> None:
        """Name a number that an op returns."""
        self.known[v.name] = x

    def define(self, whole: Sym, node: Node) -> None:
        """Define a variable from an argument that is its multiple; the first argument counts."""
        var, factor = as_multiple(whole) or (None, 1)
        if var is None or var.name in self.known:
            return
        self.known[var.name] = self.do(operator.floordiv, node, factor) if factor > 1 else node
        if factor > 1:
            self.expect(f"{var.name} is not a whole number", "eq", self.size(whole), node)

    def expect(self, message: str, *condition: Any) -> None:
        """Assert a condition on sizes."""
        self.do(executor.assert_scalar, [*condition], message)

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
                self.env[i.name], self.dtypes[i.name] = node, i.type.dtype
        for c in p.constants:
            self.env[c.name] = self.graph.get_attr(self.attributes[c.name])
        self.own.update({o: self.graph.get_attr(self.attributes[o]) for o in p.objects})
        for i, node in zip(p.inputs, list(self.graph.nodes), strict=False):
            if isinstance(i, ir.SizeInput):
                self.define(i.value, node)
        for s in p.binds:
            self.define(s.var * s.factor, self.read(s))
        for name, most in p.most:
            self.expect(f"{name} is larger than {most}", "le", self.known[name], most)
        for i in p.tensors.values():
            self.check(i)
        for name in p.aligned:
            self.do(graph.assert_aligned, self.env[name])

    def check(self, i: ir.Input) -> None:
        """Assert the type and layout of an argument, or copy it."""
        device = "" if i.anywhere else i.type.device
        told = (i.called or i.name, *self.layout(i.type), i.type.dtype.torch, device)
        if i.laid:
            self.env[i.name] = self.do(graph.laid, self.env[i.name], *told)
        else:
            self.do(graph.assert_tensor, self.env[i.name], *told, i.signed)

    def read(self, s: ir.BindSize) -> Any:
        """A size or stride of a tensor."""
        op = torch.ops.aten.sym_stride.int if s.stride else torch.ops.aten.sym_size.int
        return self.do(op, self.env[s.source], s.dim)

    def bind(self, s: ir.BindSize) -> None:
        """Name a size of an op's result; those of arguments are known."""
        if s.source not in self.inputs:
            self.known[s.var.name] = self.read(s)

    def step(self, s: ir.Step) -> None:
        """Nodes of one step."""
        self.last = None
        match s:
            case ir.Current():
                self.exchange(s.device)
            case ir.Free():
                node = self.env.pop(s.name)
                if node not in self.env.values():
                    self.do(graph.delete, node)
            case _:
                super().step(s)
        if isinstance(s, (ir.Alloc, ir.Reuse)):
            self.starts.add(s.name)
        if isinstance(s, (ir.Alloc, ir.Alias, ir.Lay)):
            self.dtypes[s.name] = s.type.dtype

    def view(self, s: ir.Alias, source: Any) -> Any:
        """Other sizes and strides of memory, or another dtype."""
        to, offset = s.type.dtype, s.type.layout.offset
        if isinstance(s, ir.Reuse):
            is_same = self.dtypes.get(s.source) is to
            op, last = (torch.as_strided, 0) if is_same else (executor.reuse, to.torch)
            return self.do(op, source, *self.layout(s.type), last)
        if offset is ZERO:
            return self.do(torch.as_strided, source, *self.layout(s.type))
        start = self.size(offset)
        if s.source not in self.starts:
            first = self.do(torch.ops.aten.sym_storage_offset.default, source)
            start = self.do(operator.add, first, start)
        return self.do(torch.as_strided, source, *self.layout(s.type), start)

    def exchange(self, device: str) -> None:
        """Make a GPU current."""
        if self.current != device:
            before = self.do(executor.exchange_gpu, torch.device(device).index)
            self.before = before if self.before is None else self.before
            self.current = device

    def launch(self, s: ir.LaunchStep) -> list[int]:
        """Run a kernel, which raises the error of a failed check by itself."""
        args, sizes = [self.env[a] for a in s.args], [*map(self.size, s.sizes)]
        k = self.functions[s.kernel]
        if s.grid is None:
            self.do(torch.ops.lenz.launch.default, k.number, args, sizes)
        else:
            number, constants = k.places
            self.do(
                torch.ops.higher_order.triton_kernel_wrapper_mutation,
                kernel_idx=number,
                constant_args_idx=constants,
                grid=[(self.size(s.grid), 1, 1)],
                tma_descriptor_metadata={},
                kwargs=dict(zip(k.names, [*args, *sizes], strict=True)),
            )
        self.last.meta["kernel"] = k
        return []

    def call(self, s: ir.CallStep) -> Any:
        """Call an eager op, which returns the memory that it fills."""
        node = self.last = super().call(s)
        if s.into:
            self.env[str(s.outs[0])] = node
        return node
