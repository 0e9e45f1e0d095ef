"""The graph under construction, and the methods for lowerings: `map`, `reduce`, `view`, `extern`.

A lowering is a small Python function of index variables. It runs once, with Syms for the indices,
and adds one loop node with its expression. Result types come from the FX node's fake tensors, so
shape, dtype and strides are torch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lenz import ops
from lenz.errors import InternalError
from lenz.ir import graph as ir
from lenz.ir.dtype import DType, compute_dtype
from lenz.ir.expr import Expr, canonical_bound, load, loads_of, ref
from lenz.ir.op import LOAD
from lenz.ir.tensor import Axis, Buffer, Layout, TensorType, axes_for, contiguous, strided
from lenz.records import dataclass, replace
from lenz.sym import ONE, ZERO, Sym, SymEnv, positive, substitute

Index = tuple[Sym, ...]
At = Callable[[Index], Expr]
Move = Callable[[Index], Index]
Fn = Callable[[Expr], Expr]
Term = Callable[[Index, Index], Expr]  # an element of a reduction: its place, and that in the row
Update = tuple[Index, tuple[Expr, ...], Expr]  # of a scatter: the place, its operands, the value


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the graph under construction.

    `is_number` marks a 0-d CPU tensor that was moved to a GPU, where torch treats it as a number.
    """

    buffer: Buffer
    is_number: bool = False

    @property
    def name(self) -> str:
        """Name of the buffer."""
        return self.buffer.name

    @property
    def shape(self) -> tuple[Sym, ...]:
        """Sizes."""
        return self.buffer.type.layout.shape

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return self.buffer.type.layout.rank

    @property
    def dtype(self) -> DType:
        """Element type."""
        return self.buffer.type.dtype

    @property
    def device(self) -> str:
        """Device, as torch spells it."""
        return self.buffer.type.device

    def at(self, index: Sequence[Sym], bound: tuple[Expr, ...] = ()) -> Expr:
        """The element at a logical index, in the tensor's own type."""
        return load(self.name, index, self.dtype, bound)

    def compute(self, index: Sequence[Sym], bound: tuple[Expr, ...] = ()) -> Expr:
        """The element at an index, in its compute type: f32 for bf16 and fp16."""
        return ops.cast(self.at(index, bound), compute_dtype(self.dtype))


class Decline(Exception):
    """A lowering declines this case: the op is called in eager, for the given reason."""


class GraphBuilder:
    """Collects the nodes of one graph while its FX nodes are lowered in order.

    With `eager_random`, random numbers come from eager's own generators; `env` knows the sizes.
    """

    def __init__(self, eager_random: bool = False, env: SymEnv | None = None) -> None:
        self.eager_random, self.env = eager_random, env or SymEnv()
        self.nodes: list[ir.Node] = []
        self.mutations: list[ir.Mutation] = []
        self.given: list[str] = []  # tensors passed to the graph
        self._layouts: dict[str, Layout] = {}
        self._copies: dict[str, ir.Pointwise] = {}
        self._taken: dict[str, int] = {}
        self._makers: dict[str, ir.Node] = {}
        self._indexed = 0  # nodes indexed in `_makers`
        self._hint = "t"
        self._origin: tuple[str, ...] = ()
        # Types of the current FX node's results; None for one that is not a tensor.
        self.results: tuple[TensorType | None, ...] = ()
        self.read: frozenset[int] | None = None  # results with readers, if known

    def begin(
        self, name: str, origin: tuple[str, ...], results: tuple[TensorType | None, ...],
        read: frozenset[int] | None = None,
    ) -> None:  # fmt: skip
        """Start lowering an FX node: its name, origin, and the types of its results."""
        self._hint, self._origin, self.results, self.read = name, origin, results, read

    @property
    def result(self) -> TensorType:
        """Type of the single (or first) tensor result of the current FX node."""
        return self.kind(0)

    def kind(self, position: int) -> TensorType:
        """Type of one of several results, which must be a tensor."""
        found = self.results[position] if self.results else None
        if found is None:
            raise InternalError(f"lowering of {self._hint} asked for a tensor result it lacks")
        return found

    def define(self, name: str, type: TensorType) -> Buffer:
        """A new buffer under a free name: the hint itself, or hint.1, hint.2, ..."""
        count = self._taken.get(name, 0)
        self._taken[name] = count + 1
        found = Buffer(name if count == 0 else f"{name}.{count}", type, self._origin)
        self._layouts[found.name] = type.layout
        return found

    def temp(self, shape: Sequence[Sym], dtype: DType, like: Value | None = None) -> TensorType:
        """A contiguous type for an intermediate, on the device of `like` or of a result."""
        made = next((r for r in self.results if r is not None), None)
        device = like.device if like is not None else (made or self.result).device
        return TensorType(dtype, device, contiguous(shape))

    def map(self, fn: At, type: TensorType | None = None, name: str = "") -> Value:
        """out[index] = fn(index), rounded to the result type if fn computes in another type."""
        type = self.result if type is None else type
        axes = axes_for(type.shape)
        body = round_to(fn(_vars(axes)), type.dtype)
        out = _out(self, type, name)
        node = ir.Pointwise(out, axes, body)
        if body.op is LOAD and not body.args:
            self._copies[out.name] = node
        return _added(self, node)

    def reduce(
        self,
        kind: ir.ReduceKind,
        shape: Sequence[Sym],
        over: Sequence[Sym],
        fn: Term,
        finish: Fn | None = None,
        type: TensorType | None = None,
        name: str = "",
    ) -> Value:
        """out[i] = finish(reduce of fn(i, r) over r in `over`); `shape` and `type.shape` agree.

        The accumulator has fn's type; `finish` defaults to rounding to the result type.
        """
        type = self.result if type is None else type
        axes, raxes = axes_for(shape), axes_for(over, prefix="r")
        body = fn(_vars(axes), _vars(raxes))
        acc = ref("acc", ops.reduce_dtype(kind, body.dtype))
        done = round_to(acc if finish is None else finish(acc), type.dtype)
        if loads_of(done):
            raise InternalError(f"the finish of {self._hint} reads a buffer: that is a map's work")
        return _added(self, ir.Reduction(_out(self, type, name), axes, raxes, kind, body, done))

    def scan(
        self, kind: ir.ScanKind, dim: int, fn: At, type: TensorType | None = None, name: str = ""
    ) -> Value:
        """out[.., s, ..] = fold of fn(index) over the indices up to s in dimension `dim`.

        The accumulator has fn's type, and is rounded to the result type for each element.
        """
        type = self.result if type is None else type
        axes = axes_for(type.shape)
        body = fn(_vars(axes))
        done = round_to(ref("acc", body.dtype), type.dtype)
        return _added(self, ir.Scan(_out(self, type, name), axes, dim, kind, body, done))

    def sort(self, dim: int, size: Sym, fn: At, type: TensorType) -> Value:
        """out[.., s, ..] = the s-th smallest of fn(index) over `size` indices in dimension `dim`.

        fn returns an i32 or i64; the result `type` gives the number of elements kept.
        """
        axes = axes_for([size if d == dim else s for d, s in enumerate(type.shape)])
        out = _out(self, type, f"{self._hint}_keys")
        return _added(self, ir.Sort(out, axes, dim, fn(_vars(axes))))

    def scatter(
        self,
        mode: ir.UpdateMode,
        base: Value | Expr,
        over: Sequence[Sym],
        fn: Callable[[Index], Update],
        type: TensorType | None = None,
        name: str = "",
    ) -> Value:
        """`base`, updated for each index i of the shape `over`, in row-major order.

        A `base` that is no tensor is the old value of every element. fn(i) returns the place, the
        expressions bound to `@k` in it, and the value, which is rounded to the result type.
        """
        type = self.result if type is None else type
        start = base if isinstance(base, Value) else self.map(lambda i: base, type)
        axes = axes_for(over)
        where, positions, value = fn(_vars(axes))
        where, positions = canonical_bound(where, positions, reads=False)
        parts = axes, where, positions, round_to(value, type.dtype), mode
        return _added(self, ir.Scatter(_out(self, type, name), start.name, *parts))

    def view(
        self, x: Value, fn: Move, type: TensorType | None = None, detached: bool = False
    ) -> Value:
        """out[index] = x[fn(index)]: a view if strides can express it, else a copy."""
        type = self.result if type is None else type
        axes = axes_for(type.shape)
        where = fn(_vars(axes))
        flat, sizes = self._layouts[x.name].at(where), (*x.shape, *type.shape)
        # Strides of sizes that may be 0 are made of max(1, size), which cancels no division by it.
        layout = strided(axes, flat) or strided(axes, positive(flat, sizes))
        if layout is None:
            return self.map(lambda i: x.at(fn(i)), type)
        # Indices do not determine the strides of size-1 dimensions or of empty tensors; torch does.
        told = zip(layout.stride, type.layout.stride, type.shape, strict=True)
        some = ZERO not in type.shape
        stride = tuple(
            s if some and n is not ONE and positive(t, sizes) is not s else t for s, t, n in told
        )
        out = self.define(self._hint, replace(type, layout=replace(layout, stride=stride)))
        return _added(self, ir.View(out, x.name, axes, where, detached))

    def extern(
        self,
        op: str,
        args: tuple[ir.Atom, ...],
        kwargs: tuple[tuple[str, ir.Atom], ...] = (),
        *,
        outs: tuple[TensorType | Sym | None, ...],
        reason: str = "library",
        **facts: Any,
    ) -> tuple[Value | Sym | None, ...]:
        """Call the eager op; returns one Value (or Sym, or None) per result.

        `facts` are the other fields of an `Extern`.
        """
        made = tuple(self.define(self._hint, t) if isinstance(t, TensorType) else t for t in outs)
        facts |= {"reason": reason, "origin": self._origin}
        self.nodes.append(ir.Extern(made, op, args, kwargs, **facts))
        return tuple(Value(o) if isinstance(o, Buffer) else o for o in made)

    def mutate(self, target: Value, value: Value) -> None:
        """The input holds `value` when the graph ends (same shape and dtype)."""
        self.mutations = [m for m in self.mutations if m.input != target.name]
        self.mutations.append(ir.Mutation(target.name, value.name))

    def flat(self, x: Value, at: Index) -> Sym:
        """The storage offset at which opt/ reads an element; for a copy, in its source."""
        name = x.name
        while (n := self._copies.get(name)) is not None:
            name, index, _ = n.body.attrs
            where = {a.var: i for a, i in zip(n.axes, at, strict=True)}
            at = tuple(substitute(i, where) for i in index)
        return self._layouts[name].at(at)


def _vars(axes: tuple[Axis, ...]) -> Index:
    return tuple(a.var for a in axes)


def _out(b: GraphBuilder, type: TensorType, name: str) -> Buffer:
    """The buffer of a loop's result, which starts where its memory starts."""
    layout = type.layout if type.layout.offset is ZERO else replace(type.layout, offset=ZERO)
    return b.define(name or b._hint, replace(type, layout=layout))


def _added(b: GraphBuilder, node: ir.Loop | ir.View) -> Value:
    """Append a node; returns its result."""
    b.nodes.append(node)
    return Value(node.out)


def alias(
    b: GraphBuilder, op: str, x: Value, type: TensorType, *args: ir.Atom, **facts: Any
) -> Value:
    """A call of `op` with `x` and other arguments, whose result aliases `x`."""
    given, aliases = (ir.Ref(x.name), *args), ((0, x.name),)
    (made,) = b.extern(op, given, outs=(type,), aliases=aliases, **facts)
    assert isinstance(made, Value)
    return made


def round_to(e: Expr, dtype: DType) -> Expr:
    """`e` in the type; f32 to a half type is an implicit rounding, which fusion may remove."""
    if e.dtype is dtype:
        return e
    return ops.narrow(e, dtype) if dtype.is_half and e.dtype.name == "f32" else ops.cast(e, dtype)


def maker(b: GraphBuilder, name: str) -> ir.Node | None:
    """The node that defines a buffer; None for an argument or a constant."""
    for n in b.nodes[b._indexed :]:
        b._makers.update((o.name, n) for o in ir.outs_of(n))
    b._indexed = len(b.nodes)
    return b._makers.get(name)


def take_back(b: GraphBuilder, count: int) -> None:
    """Drop the nodes after the first `count`."""
    del b.nodes[count:]
    b._indexed = min(b._indexed, count)


def giving(b: GraphBuilder, results: tuple[TensorType | None, ...], run: Callable[[], Any]) -> Any:
    """Call `run` as the lowering of an op with these result types."""
    own, b.results = b.results, results
    try:
        return run()
    finally:
        b.results = own
