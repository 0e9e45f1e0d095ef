"""Complex tensors as pairs of real ones: loops only compute with real numbers.

    z = mul(x, y)   ==>   re = x.re * y.re - x.im * y.im;  im = x.re * y.im + x.im * y.re

Arguments and results of calls are read through `view_as_real`. The parts are stored interleaved
where a call or a result needs the complex tensor itself. Ops that treat both parts alike (views,
joins, sums) apply the real lowering to each; `complex_math` has the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, cached_property, partial
from operator import getitem
from typing import Any, TypeAlias

import torch
from torch.fx import Node

from lenz import ops
from lenz.ir.dtype import BOOL, C64, C128, F32, F64, DType, dtype_of
from lenz.ir.expr import Expr, const, index
from lenz.ir.graph import LOOPS
from lenz.ir.tensor import Buffer, Layout, TensorType, contiguous
from lenz.lower.builder import At, Decline, GraphBuilder, Index, Value, alias, giving, take_back
from lenz.lower.operand import broadcast, element, promote
from lenz.lower.registry import Entry, F, Lowering, lowering
from lenz.machines import runs_programs
from lenz.sym import ONE, ZERO, Int, Sym
from lenz.traits import has

Pair: TypeAlias = tuple[Expr, Expr]
Parts: TypeAlias = tuple[Value, Value]
PARTS = {C64: F32, C128: F64}

PLACES = ("mask", "condition", "index", "indices")  # arguments that are not elements
NUMBERS = ("value", "fill_value", "other", "self", "s")  # scalars that are elements
SELECT = torch.ops.aten.select.int


class Complex:
    """A complex tensor of the graph under construction; its forms are made on demand.

    `memory` returns the tensor if a call, an argument or a view of them has it; `parts` returns its
    real and imaginary parts. One of the two may be None.
    """

    def __init__(
        self,
        b: GraphBuilder,
        type: TensorType,
        memory: Callable[[], Value | None] | None = None,
        parts: Callable[[], Parts] | None = None,
    ) -> None:
        self.b, self.type = b, replace(type, layout=replace(type.layout, offset=ZERO))
        self.make_memory, self.make_parts = memory, parts
        self.like = Value(Buffer("", type))
        self.shape, self.rank = type.shape, type.rank
        self.dtype, self.device = type.dtype, type.device

    @cached_property
    def memory(self) -> Value | None:
        """The tensor, if it need not be stored first."""
        return None if self.make_memory is None else self.make_memory()

    @cached_property
    def whole(self) -> Value:
        """The complex tensor in memory."""
        return self.memory or alias(self.b, "lenz.view_as_complex", self.pair, self.type)

    @cached_property
    def pair(self) -> Value:
        """The same memory as real numbers, with a last dimension of 2."""
        type = replace(self.type, dtype=PARTS[self.dtype], layout=interleaved(self.type.layout))
        if self.memory is not None:
            return alias(self.b, "lenz.view_as_real", self.memory, type)
        re, im = self.parts
        is_real: At = lambda i: ops.eq(index(i[-1]), index(ZERO))
        return self.b.map(lambda i: ops.where(is_real(i), re.at(i[:-1]), im.at(i[:-1])), type)

    @cached_property
    def parts(self) -> Parts:
        """The real parts and the imaginary ones."""
        return self.make_parts() if self.make_parts else halves(self.b, self.pair, self.type)


def interleaved(old: Layout) -> Layout:
    """The layout of a complex tensor's memory as real numbers, with a last dimension of 2."""
    return Layout((*old.shape, Int(2)), (*(s * 2 for s in old.stride), ONE))


def halves(b: GraphBuilder, pair: Value, type: TensorType) -> Parts:
    """Views of both elements of a last dimension of 2; `type` is the complex tensor's."""
    part = replace(type, dtype=pair.dtype)
    return b.view(pair, lambda i: (*i, ZERO), part), b.view(pair, lambda i: (*i, ONE), part)


def operand(x: Any, i: Index, dtype: DType) -> Pair:
    """Both parts of an operand in a real type; real numbers have the imaginary part 0."""
    if isinstance(x, Complex):
        re, im = (part.at(broadcast(part, i)) for part in x.parts)
        return ops.cast(re, dtype), ops.cast(im, dtype)
    if isinstance(x, complex):
        return const(x.real, dtype), const(x.imag, dtype)
    return element(x, i, dtype), const(0.0, dtype)


def elementwise(fn: Callable[..., Any]) -> Lowering:
    """The lowering of an op by fn(pair, ..) -> pair, or -> one expression if the result is real."""

    def lower(b: GraphBuilder, *xs: Any, **kwargs: Any) -> Complex | Value:
        common = promote([x.like if isinstance(x, Complex) else x for x in xs])
        common = b.result.dtype if b.result.dtype in PARTS else common
        if kwargs or common not in PARTS:
            raise Decline("")

        at: Callable[[Index], Any] = lambda i: fn(*[operand(x, i, PARTS[common]) for x in xs])
        if b.result.dtype not in PARTS:
            return b.map(at)
        part = replace(b.result, dtype=PARTS[common])
        parts = b.map(lambda i: at(i)[0], part), b.map(lambda i: at(i)[1], part)
        return Complex(b, b.result, parts=lambda: parts)

    return lower


_RULES: dict[str, Lowering] = {}


def rule(*names: str) -> Callable[[F], F]:
    """Register fn(builder, *args, **kwargs) for packets with complex operands or results."""

    def enter(fn: F) -> F:
        _RULES.update(dict.fromkeys(names, fn))
        return fn

    return enter


class Complexes:
    """The complex tensors of one graph, and the lowering of ops on them."""

    def __init__(self, b: GraphBuilder) -> None:
        self.b = b
        self.held: dict[str, Complex] = {}  # by the name of the complex tensor in memory
        self.pairs: dict[str, Complex] = {}  # by the name of the view of both parts

    def of(self, a: Any) -> Any:
        """An argument with its complex buffers as `Complex`."""
        if isinstance(a, (list, tuple)):
            return [self.of(x) for x in a]
        if not isinstance(a, Value) or a.dtype not in PARTS:
            return a
        return self.held.setdefault(a.name, Complex(self.b, a.buffer.type, lambda: a))

    def takes(self, n: Node, args: list[Any]) -> bool:
        """Say whether an op extracts a part; a returned part must have the pair's strides."""
        z = self.pairs.get(args[0].name) if n.target is SELECT else None
        last = z is not None and args[1] in (-1, z.rank) and isinstance(args[2], int)
        return last and not _is_returned(n)

    def lower(self, n: Node, entry: Entry | None, args: Any, kwargs: dict[str, Any]) -> Any:
        """Lower an op with complex operands or results: a value, or a tuple of them."""
        b = self.b
        target: Any = n.target
        name = target._schema.name.split("::")[1]
        args, kwargs = self.of(args), {k: self.of(a) for k, a in kwargs.items()}
        if target is SELECT and isinstance(args[0], Value):
            return self.pairs[args[0].name].parts[args[2]]
        if (own := _RULES.get(name)) is not None:
            made = own(b, *args, **kwargs)
            if name == "view_as_real" and args[0].make_memory is None:
                self.pairs[made.name] = args[0]
            return made
        if entry is None:
            raise Decline("no lowering")
        if name == "as_strided":  # it counts in elements of memory
            made = entry.fn(b, args[0].whole, *args[1:], **kwargs)
            return Complex(b, b.result, lambda: made)
        if _is_view(target):
            found = viewed(b, entry, args[0], args[1:], kwargs)
            return found if str(target._schema.returns[0].type) != "Tensor" else found[0]
        if has(target, "truth"):
            args = [truth(b, a) if isinstance(a, Complex) else a for a in args]
            return entry.fn(b, *args, **kwargs)
        if has(target, "norm"):
            part = TensorType(PARTS[args[0].dtype], args[0].device, contiguous(args[0].shape))
            size = giving(b, (part,), partial(_RULES["abs"], b, args[0]))
            return entry.fn(b, size, *args[1:], **{k: _real(a) for k, a in kwargs.items()})
        moves = (entry.any_dtype or entry.float8) and not has(target, "memory")
        torn = has(target, "torn") and (name == "scatter" or runs_programs(b.result.device))
        if (moves or has(target, "linear")) and not torn:
            return alike(b, target, entry, args, kwargs)
        raise Decline("")


def _is_returned(n: Node) -> bool:
    """Whether the node or a view of it is a result."""
    views = [u for u in n.users if u.target is getitem or _is_view(u.target)]
    return any(u.op == "output" for u in n.users) or any(map(_is_returned, views))


def _is_view(target: Any) -> bool:
    return getattr(target, "is_view", False) or has(target, "view") or has(target, "views")


def viewed(b: GraphBuilder, entry: Entry, z: Complex, args: Any, kwargs: dict[str, Any]) -> Any:
    """Views of the tensor in memory and of both parts, made on demand."""
    types = b.results

    @cache
    def made(form: int) -> Any:
        """Values of part 0 or 1, or of the memory; None if a view of it would be a copy."""
        x, results = (z.whole, types) if form == 2 else (z.parts[form], _parts(types))
        before = len(b.nodes)
        out = giving(b, results, lambda: entry.fn(b, x, *args, **kwargs))
        if form == 2 and any(isinstance(n, LOOPS) for n in b.nodes[before:]):
            take_back(b, before)
            return None
        return (out,) if isinstance(out, Value) else out

    def one(k: int, type: TensorType) -> Complex:
        return Complex(b, type, lambda: (made(2) or {k: None})[k], lambda: (made(0)[k], made(1)[k]))

    made(2 if z.make_memory is not None else 0)  # it may decline
    return [one(k, t) for k, t in enumerate(types) if t is not None]


def _parts(types: tuple[TensorType | None, ...]) -> tuple[TensorType | None, ...]:
    return tuple(None if t is None else replace(t, dtype=PARTS[t.dtype]) for t in types)


def alike(b: GraphBuilder, target: Any, entry: Entry, args: Any, kwargs: dict[str, Any]) -> Any:
    """The real lowering, applied to each part; a real result comes from the real part."""
    types, names = b.results, [a.name for a in target._schema.arguments]
    if b.result.dtype not in PARTS:
        if b.result.dtype is BOOL and not {"like", "new"} & {*target._opname.split("_")}:
            return truth(b, args[-1], b.result)
        return entry.fn(b, *[a.parts[0] if isinstance(a, Complex) else a for a in args], **kwargs)

    def made(k: int) -> Any:
        (first, *_) = results = _parts(types)
        if k and has(target, "ones") and first is not None:
            return b.map(lambda i: const(0, first.dtype), first)
        xs = [_part(b, a, k, name) for a, name in zip(args, names, strict=False)]
        named = {name: _part(b, a, k, name) for name, a in kwargs.items()}
        return giving(b, results, lambda: entry.fn(b, *xs, **named))

    re, im = made(0), made(1)
    if isinstance(re, Value):
        return Complex(b, b.result, None, lambda: (re, im))
    rows = zip(types, re, im, strict=True)
    return tuple(Complex(b, t, None, lambda p=p: p) for t, *p in rows if t is not None)  # type: ignore[misc]  # a default binds p


def _part(b: GraphBuilder, a: Any, k: int, name: str) -> Any:
    """An argument for the lowering of part k."""
    match a:
        case Complex():
            return a.parts[k]
        case list():
            return [_part(b, x, k, name) for x in a]
        case Value() if k and name not in PLACES:
            return b.map(lambda i: const(0, a.dtype), b.temp(a.shape, a.dtype, a))
        case complex():
            return a.imag if k else a.real
        case bool() | int() | float() | Sym() if k and name in NUMBERS:
            return 0
    return _real(a)


def _real(a: Any) -> Any:
    """An argument, with a complex type as the type of its parts."""
    dtype = dtype_of(a) if isinstance(a, torch.dtype) else None
    return PARTS[dtype].torch if dtype in PARTS else a


def truth(b: GraphBuilder, z: Complex, type: TensorType | None = None) -> Value:
    """Whether elements are nonzero."""
    zero = const(0.0, PARTS[z.dtype])

    def fn(i: Index) -> Expr:
        re, im = operand(z, i, zero.dtype)
        return ops.ne(re, zero) | ops.ne(im, zero)

    return b.map(fn, type or b.temp(z.shape, BOOL, z.like))


@rule("view_as_real")
@lowering("view_as_real")
def view_as_real(b: GraphBuilder, z: Complex) -> Value:
    """Both parts interleaved, in the memory of the tensor."""
    return z.pair


@rule("view_as_complex")
@lowering("view_as_complex")
def view_as_complex(b: GraphBuilder, x: Value) -> Complex:
    """The elements of a last dimension of 2 as the parts of complex numbers."""
    t = b.result
    whole = replace(t, layout=replace(t.layout, offset=ZERO))
    make = partial(alias, b, "lenz.view_as_complex", x, whole)
    return Complex(b, t, make, lambda: halves(b, x, t))


@rule("_conj")
@lowering("_conj")
def conj(b: GraphBuilder, z: Complex | complex) -> Any:
    """The conjugate; in memory it is a flag on the tensor, which a library may handle itself.

    Gradients have conjugates of Python numbers.
    """
    if isinstance(z, complex):
        return elementwise(lambda p: (p[0], -p[1]))(b, z)
    t = b.result

    def parts() -> Parts:
        re, im = z.parts
        return re, b.map(lambda i: -im.at(i), replace(t, dtype=im.dtype))

    return Complex(b, t, lambda: alias(b, "aten._conj.default", z.whole, z.type), parts)
