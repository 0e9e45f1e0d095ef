"""Parts of a plan captured as one graph: the request, the runner of its steps, the result.

`Loader.capture` of a machine captures, and `replay` in plan/native_cuda.ll reads a `Record`.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lenz.errors import InternalError
from lenz.ir import plan as ir
from lenz.ir.tensor import TensorType
from lenz.records import dataclass
from lenz.runtime import executor
from lenz.sym import Sym, Var, evaluate

Resolve: TypeAlias = Callable[[Any, Callable[[Any], Any]], Any]


class CaptureError(RuntimeError):
    """A library op failed during a capture."""

    def __init__(self, op: str, why: str) -> None:
        super().__init__(f"{op}: {why}")
        self.op = op


@dataclass(slots=True)
class Wanted:
    """A request to capture.

    steps   the steps of the graph
    reads   tensors whose addresses may change, by name
    writes  memory of results, by name
    fixed   tensors with fixed addresses: pinned arguments, constants, other graphs' memory
    kept    results that stay in the graph's memory
    copied  reads and writes copied within the graph, since libraries use them
    mutated copied reads that are also copied back
    draws   whether the graph draws torch's random numbers
    """

    steps: Sequence[ir.Step]
    reads: Mapping[str, Tensor]
    writes: Mapping[str, Tensor]
    fixed: Mapping[str, Tensor]
    kept: Collection[str]
    copied: Collection[str]
    mutated: Collection[str]
    draws: bool = False


@dataclass(slots=True)
class KernelNode:
    """A launch of a kernel whose addresses may change."""

    handle: int
    parameters: Any  # CUDA_KERNEL_NODE_PARAMS
    values: Any  # its arguments, 8 bytes each


@dataclass(slots=True)
class Captured:
    """A graph that can be launched; `alive` holds the memory that it uses.

    If it draws random numbers, `fresh` is called before each launch; `start` does it.
    """

    exec: int
    kept: Mapping[str, Tensor]
    owners: list[tuple[int, int]]  # of kept memory: address of the count, and its value
    nodes: list[KernelNode]
    uses: Mapping[str, list[tuple[int, int, int]]]  # node, argument, offset to the address
    start: Callable[[int], None]  # launches it in a stream, with the captured addresses
    alive: Sequence[object]
    fresh: Callable[[], None] | None = None


class Runner:
    """Runs steps of a plan one by one.

    functions  the kernels
    env        tensors, and numbers returned by ops, by name
    sizes      the values of sizes
    value      the Python value of an atom, given a look-up of tensors and sizes
    """

    def __init__(
        self, functions: Mapping[str, Any], env: Mapping[str, Any], sizes: Mapping[Var, int],
        value: Resolve, stream: int,
    ) -> None:  # fmt: skip
        self.functions, self.stream, self.value = functions, stream, value
        self.env, self.sizes = dict(env), dict(sizes)
        self.failed = 0

    def do(self, f: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function of torch or of the runtime."""
        return f(*args, **kwargs)

    def size(self, s: Sym) -> Any:
        """The value of a size."""
        return evaluate(s, self.sizes)

    def layout(self, t: TensorType) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The sizes and strides of a type."""
        return tuple(map(self.size, t.shape)), tuple(map(self.size, t.layout.stride))

    def look(self, a: Any) -> Any:
        """The tensor or number that an atom refers to."""
        if isinstance(a, Sym):
            return self.env[f"%{a}"] if f"%{a}" in self.env else self.size(a)
        return self.env[a.name]

    def name(self, name: str, t: Tensor, source: str = "") -> None:
        """Name a tensor, which may be in the memory of `source`."""
        self.env[name] = t

    def bind(self, s: ir.BindSize) -> None:
        """Name a size or stride of a tensor."""
        t = self.env[s.source]
        self.sizes[s.var] = (t.stride(s.dim) if s.stride else t.size(s.dim)) // s.factor

    def step(self, s: ir.Step) -> None:
        """Run one step."""
        match s:
            case ir.BindSize():
                self.bind(s)
            case ir.Alloc():
                self.name(s.name, self.memory(s))
                if s.zero:
                    self.do(torch.ops.aten.zero_.default, self.env[s.name])
            case ir.Alias():
                source = self.env[s.source]
                made = source if s.same else self.view(s, source)
                made = self.do(torch.ops.aten.detach.default, made) if s.detached else made
                self.name(s.name, made, s.source)
                if isinstance(s, ir.Reuse):
                    del self.env[s.source]
            case ir.LaunchStep():
                self.launch(s)
            case ir.CallStep():
                self.call(s)
            case ir.Lay():
                told = *self.layout(s.type), s.type.dtype.torch, executor.place(s.type.device)
                self.name(s.name, self.do(executor.lay, self.env[s.name], *told, s.op, s.aligned))
            case ir.Free():
                self.env.pop(s.name, None)
            case ir.Check():
                if self.failed:
                    executor.raise_failed(self.failed)
            case ir.Current():
                pass
            case _:
                raise InternalError(f"nobody runs a {type(s).__name__}")

    def memory(self, s: ir.Alloc) -> Any:
        """New memory."""
        new = {"dtype": s.type.dtype.torch, "device": torch.device(s.type.device)}
        return self.do(torch.empty_strided, *self.layout(s.type), **new)

    def view(self, s: ir.Alias, source: Any) -> Any:
        """Other sizes and strides of memory, or another dtype."""
        t = s.type
        if isinstance(s, ir.Reuse):
            return executor.reuse(source, *self.layout(t), t.dtype.torch)
        return executor.view(source, *self.layout(t), self.size(t.layout.offset))

    def call(self, s: ir.CallStep) -> Any:
        """Call an eager op; returns its result."""
        args = [self.value(a, self.look) for a in s.args]
        kwargs = {k: self.value(a, self.look) for k, a in s.kwargs}
        got = self.do(executor.resolve(s.op), *args, **kwargs)
        if s.counted:
            self.do(executor.several, got, len(s.outs), s.op)
        for k, o in enumerate(() if s.into else s.outs):
            if isinstance(o, str | Var):
                part = got if s.single else self.do(operator.getitem, got, k)
                self.name(o, part) if isinstance(o, str) else self.number(o, part)
        return got

    def number(self, v: Var, x: Any) -> None:
        """Name a number that an op has returned."""
        self.env[f"%{v}"] = x
        self.sizes |= {v: x} if isinstance(x, int) else {}

    def launch(self, s: ir.LaunchStep) -> list[int]:
        """Launch a kernel; returns its addresses and sizes."""
        given = [self.env[a].data_ptr() for a in s.args] + [self.size(v) for v in s.sizes]
        if s.grid is None:
            self.failed = self.functions[s.kernel](*given)
        else:
            self.functions[s.kernel](self.stream, self.size(s.grid), *given)
        return given


class Record:
    """The words that `replay` reads; plan/native_cuda.ll explains them."""

    def __init__(
        self, c: Captured, stream: int, order: Sequence[str], pinned: Sequence[tuple[int, int]]
    ) -> None:
        self.alive: list[Any] = [c]
        places = list[int]()
        for name in order:
            uses = c.uses.get(name, [])
            rows = [(ctypes.addressof(c.nodes[n].values) + 8 * k, d, n) for n, k, d in uses]
            places += [0, self.row([x for row in rows for x in row]), len(rows)]
        nodes = [x for n in c.nodes for x in (n.handle, ctypes.addressof(n.parameters), 0)]
        kept, pairs = ([x for pair in y for x in pair] for y in (c.owners, pinned))
        words = [
            c.exec, stream, self.row(pairs), len(pinned), 0, 0, 0,
            self.row(kept), len(c.owners), 0, self.row(places), len(order),
            self.row(nodes), len(c.nodes), 0, 0,
        ]  # fmt: skip
        self.record = (ctypes.c_uint64 * len(words))(*words)

    @property
    def replays(self) -> int:
        """The number of replays."""
        return int(self.record[14])

    @property
    def is_held(self) -> bool:
        """Whether somebody still holds the graph's memory; see `ready` in native_cuda.ll."""
        pairs = (ctypes.c_uint64 * (2 * self.record[8])).from_address(self.record[7])
        counts = [ctypes.c_uint32.from_address(at).value for at in pairs[::2]]
        return any(now > alone for now, alone in zip(counts, pairs[1::2], strict=True))

    def expect(self, sizes: Sequence[int]) -> None:
        """Set the sizes that the graph was made for, in the order of the replaying code."""
        self.record[5], self.record[6] = self.row(sizes), len(sizes)

    def row(self, words: Sequence[int]) -> int:
        """The address of an array of words."""
        made = (ctypes.c_uint64 * max(len(words), 1))(*[w & (1 << 64) - 1 for w in words])
        self.alive.append(made)
        return ctypes.addressof(made)
