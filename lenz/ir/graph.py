"""The graph level: a list of whole-tensor computations in order, each a loop nest over one body.

A `Graph` is functional: exactly one node writes each buffer, nodes come after their operands, and
inputs never change. Mutation of an input is a pair in `mutations`, meaning "when the graph ends,
the input holds this value". Indices in loads are logical (one Sym per dimension of the buffer); the
layout of a buffer maps them to memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Literal, TypeAlias

from lenz.errors import InternalError
from lenz.ir.dtype import BOOL, I64, DType
from lenz.ir.expr import Expr, load, loads_of, renaming
from lenz.ir.syntax import exprs_in, map_fields, map_values, slots_in
from lenz.ir.tensor import Axis, Buffer, axes_for
from lenz.records import dataclass, field, replace
from lenz.sym import Sym, SymEnv

ReduceKind = Literal["sum", "prod", "max", "min", "argmax", "argmin", "any", "all"]
ScanKind = Literal["sum", "prod", "max", "min", "logaddexp"]
UpdateMode = Literal["set", "add", "mul", "max", "min"]
Draws = Literal["", "key", "numbers"]


def acc_dtype(kind: str, body: DType) -> DType:
    """Accumulator type of a reduction or scan: i64 for a position, else the body's."""
    return I64 if kind in ("argmax", "argmin") else body


def identity_of(kind: str, dtype: DType) -> float:
    """The value that a reduction, scan or update starts from; for positions the compared value."""
    if kind in ("sum", "add", "any"):
        return 0
    if kind in ("prod", "mul", "all"):
        return 1
    is_max = kind in ("max", "argmax", "logaddexp")
    if dtype.is_float:
        return -math.inf if is_max else math.inf
    if dtype is BOOL:
        return not is_max
    signed = dtype.kind == "int"
    low, high = -(1 << (dtype.bits - 1)) if signed else 0, (1 << (dtype.bits - signed)) - 1
    return low if is_max else high


@dataclass(frozen=True, slots=True)
class Ref:
    """A buffer by name, as an argument or output."""

    name: str


@dataclass(frozen=True, slots=True)
class Named:
    """A torch object by name: dtype(f32), device(cpu), memory_format(channels_last) and so on.

    Kind "op" is an eager op called by a higher-order op; kind "obj" is an entry of `Graph.objects`
    (a sub-module of a higher-order op, say).
    """

    kind: Literal["dtype", "device", "layout", "memory_format", "op", "obj"]
    value: str


Atom: TypeAlias = "Ref | Named | Sym | bool | int | float | complex | str | tuple[Atom, ...] | None"


@dataclass(frozen=True, slots=True)
class Pointwise:
    """out[axes] = body; one axis per dimension of `out`."""

    SYNTAX: ClassVar = ("{out:result} : map ({axes:axes}) {body:block}",)
    out: Buffer
    axes: tuple[Axis, ...]
    body: Expr


@dataclass(frozen=True, slots=True)
class Reduction:
    """out[axes] = reduce of body over raxes.

    The accumulator has the type of the body (for "sum" of halves the body casts to f32 first).
    Sums of floats start with 0.0, so none is -0.0. "argmax" and "argmin" give the flat i64 position
    over raxes in row-major order, the first of equals; a NaN counts as the largest (smallest), as
    in torch. "max" and "min" keep NaN. `finish` is applied to the reduced value `ref("acc")`: a
    cast, a division. It reads no buffer.
    """

    SYNTAX: ClassVar = (
        "{out:result} : reduce {kind:reduction} ({axes:axes} | {raxes:axes})"
        " {body:block}{finish:finish}",
    )
    out: Buffer
    axes: tuple[Axis, ...]
    raxes: tuple[Axis, ...]
    kind: ReduceKind
    body: Expr
    finish: Expr


@dataclass(frozen=True, slots=True)
class Scan:
    """out[.., s, ..] = fold of body over s' <= s (s' >= s with `reverse`); s is axis number `dim`.

    The accumulator has the type of the body, and the order of folding is free: the kinds are
    associative up to rounding. A sum of only -0.0 is -0.0. `finish` works as in a reduction, for
    each element.
    """

    SYNTAX: ClassVar = (
        "{out:result} : scan {kind:scan} ({axes:axes}) over {dim:along}",
        "? reverse",
        " {body:block}{finish:finish}",
    )
    out: Buffer
    axes: tuple[Axis, ...]
    dim: int
    kind: ScanKind
    body: Expr
    finish: Expr
    reverse: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.dim < len(self.axes):
            raise InternalError(f"%{self.out.name} is scanned along a missing axis {self.dim}")


@dataclass(frozen=True, slots=True)
class Sort:
    """out[.., s, ..] is the s-th smallest of the bodies along axis number `dim`, an i32 or an i64.

    `out` may have fewer elements than that axis: then it has the smallest ones.
    """

    SYNTAX: ClassVar = ("{out:result} : sort ({axes:axes}) over {dim:along} {body:block}",)
    out: Buffer
    axes: tuple[Axis, ...]
    dim: int
    body: Expr

    def __post_init__(self) -> None:
        if not 0 <= self.dim < len(self.axes):
            raise InternalError(f"%{self.out.name} is sorted along a missing axis {self.dim}")


@dataclass(frozen=True, slots=True)
class Scatter:
    """out is `base`, updated at out[index] for every point of the axes, in row-major order.

    `@k` in the index is bound[k]. Mode "set" keeps the last value of an element; the others combine
    values with the old one. `base` has the shape and element type of `out`.
    """

    SYNTAX: ClassVar = (
        "{out:result} : scatter {mode:update} ({axes:axes})"
        " ({base:use}, [{index:place*}]{bound=index:bound*}) {value:block}",
    )
    out: Buffer
    base: str
    axes: tuple[Axis, ...]
    index: tuple[Sym, ...]
    bound: tuple[Expr, ...]
    value: Expr
    mode: UpdateMode = "set"


@dataclass(frozen=True, slots=True)
class View:
    """out[axes] is source[index]: other strides over the same storage, no computation.

    `out.type.layout` counts elements of `source`'s storage. A result is `detached` if it is not a
    view for autograd, although it shares the memory.
    """

    SYNTAX: ClassVar = (
        "{out:result} : view ({axes:axes}) {source:use}[{index:index*}]",
        "? detached",
    )
    out: Buffer
    source: str
    axes: tuple[Axis, ...]
    index: tuple[Sym, ...]
    detached: bool = False


@dataclass(frozen=True, slots=True)
class Extern:
    """A call of the eager op, with its aliasing and mutation.

    op       qualified overload, "aten.mm.default"; or "obj:NAME" for an entry of Graph.objects
    outs     one per tensor result; a Var for a size result; None for an unused result
    single   True if the op returns one value, not a tuple or list
    mutates  names of buffers it writes (only buffers that nothing else reads afterwards)
    aliases  pairs (position in outs, buffer it may share memory with)
    reason   why lenz does not lower it natively; "library" for intended library calls
    holds    True if the op may use the memory of its arguments and results after it has returned,
             until a call waits for it: a collective, or an op that lenz does not know
    waits    the buffers held by the calls that this one waits for
    draws    what it draws from torch's generator: nothing, the `key` of numbers made by kernels,
             which depends on no buffer, or its own random `numbers`
    refuses  True if it may raise for these arguments, as in eager
    origin   like a buffer's; a call may have no buffer that has it
    """

    SYNTAX: ClassVar = (
        "{outs:results} : call {op:word}({args:args}){single:single}",
        "? mutates ({mutates:writes*})", "? aliases ({aliases:alias*})", "? holds",
        "? waits ({waits:use*})", "? draws {draws:draws}", "? refuses", "? because {reason:string}",
    )  # fmt: skip
    outs: tuple[Buffer | Sym | None, ...]
    op: str
    args: tuple[Atom, ...]
    kwargs: tuple[tuple[str, Atom], ...] = ()
    single: bool = True
    mutates: tuple[str, ...] = ()
    aliases: tuple[tuple[int, str], ...] = ()
    reason: str = ""
    holds: bool = False
    waits: tuple[str, ...] = ()
    draws: Draws = ""
    refuses: bool = False
    origin: tuple[str, ...] = field(default=(), compare=False)

    @property
    def is_seen(self) -> bool:
        """True for a call that must keep its order and is not dropped.

        A collective, which `holds`, must match those of other processes. Keys keep their order
        anyway, since they wait for nothing.
        """
        is_met = self.holds or bool(self.waits)
        return self.draws == "numbers" or self.refuses or is_met or not outs_of(self)


Loop: TypeAlias = Pointwise | Reduction | Scan | Sort | Scatter
LOOPS = (Pointwise, Reduction, Scan, Sort, Scatter)
Node: TypeAlias = Loop | View | Extern


@dataclass(frozen=True, slots=True)
class Mutation:
    """When the graph ends, `input` holds the elements of `value`."""

    SYNTAX: ClassVar = ("mutate {input:writes} <- {value:use}",)
    input: str
    value: str


@dataclass(frozen=True, slots=True)
class Graph:
    """One traced graph: inputs (tensors and sizes, in call order), nodes in order, outputs.

    An object passed to calls, such as a device mesh, is a variable like a size. `free` names
    outputs that may have other strides than stated, `unaligned` inputs that may start anywhere.
    """

    LINES: ClassVar = (
        "ranges ({env.ranges:size*})", "?hint ({env.hints:number*})", "?most ({env.most:number*})",
        "object {objects:name}+", "in {inputs:given}+", "?unaligned ({unaligned:use*})",
        "const {constants:buffer}+", "{nodes:node}+", "?free ({free:use*})",
        "{mutations:mutation}+", "return ({outputs:atom*})",
    )  # fmt: skip
    name: str
    inputs: tuple[Buffer | Sym, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Atom, ...]
    mutations: tuple[Mutation, ...] = ()
    constants: tuple[Buffer, ...] = ()
    env: SymEnv = field(default_factory=SymEnv)
    objects: tuple[str, ...] = ()
    free: tuple[str, ...] = ()
    unaligned: tuple[str, ...] = ()


def _parts_of(a: Atom) -> Iterator[Atom]:
    """What an argument consists of, without tuples, in order."""
    if isinstance(a, tuple):
        for part in a:
            yield from _parts_of(part)
    else:
        yield a


def atom_refs(a: Atom) -> Iterator[str]:
    """Names of the buffers in an argument, or in a tuple of them, in order."""
    return (x.name for x in _parts_of(a) if isinstance(x, Ref))


def names_in(call: Any) -> tuple[str, ...]:
    """Names of the buffers in the arguments of a call, of a graph or a plan, in order."""
    return tuple(atom_refs((*call.args, *(a for _, a in call.kwargs))))


def atom_syms(a: Atom) -> Iterator[Sym]:
    """The sizes in an argument, or in a tuple of them, in order."""
    return (x for x in _parts_of(a) if isinstance(x, Sym))


def origin_of(n: Node) -> tuple[str, ...]:
    """The FX nodes of a node, and the user's lines."""
    return n.origin if isinstance(n, Extern) else n.out.origin


def outs_of(n: Node) -> tuple[Buffer, ...]:
    """The buffers a node defines."""
    if isinstance(n, Extern):
        return tuple(o for o in n.outs if isinstance(o, Buffer))
    return (n.out,)


def copying(name: str, out: Buffer) -> Pointwise:
    """A loop that makes `out` a copy of the buffer of this name."""
    axes = axes_for(out.shape)
    return Pointwise(out, axes, load(name, [a.var for a in axes], out.dtype))


def bodies_of(n: Loop) -> tuple[Expr, ...]:
    """The expressions of a loop node; the last one is its value."""
    return exprs_in(n)


def map_bodies(n: Loop, f: Callable[[Expr], Expr]) -> Loop:
    """The node with f applied to every expression."""
    return map_values(n, f)


def loop_axes(n: Loop) -> tuple[Axis, ...]:
    """All axes that a loop node runs over."""
    return n.axes + n.raxes if isinstance(n, Reduction) else n.axes


_USED = frozenset({"use"})
_READ = _USED | {"args"}


def reads_of(n: object) -> tuple[str, ...]:
    """Names of the buffers that a node or a launch uses, each once, in order of first use."""
    names = [e.attrs[0] for e in loads_of(*exprs_in(n))]
    for slot in slots_in(n, _READ):
        if slot.kind == "use":
            names += slot.get(n) if slot.is_list else (slot.get(n),)
        elif isinstance(n, Extern):
            names += names_in(n)
    return tuple(dict.fromkeys(names))


def buffers_of(g: Graph) -> dict[str, Buffer]:
    """Every buffer of the graph by name; raises InternalError when a name is defined twice."""
    found: dict[str, Buffer] = {}
    defined = [b for b in g.inputs if isinstance(b, Buffer)] + list(g.constants)
    defined += [b for n in g.nodes for b in outs_of(n)]
    for b in defined:
        if b.name in found:
            raise InternalError(f"buffer %{b.name} is defined twice in graph @{g.name}")
        found[b.name] = b
    return found


def returned_by(g: Graph) -> set[str]:
    """The buffers that a graph returns, and those whose memory it returns as a view."""
    roots = roots_of(g.nodes)
    return {x for name in atom_refs(g.outputs) for x in (name, roots.get(name, name))}


def roots_of(steps: Iterable[object]) -> dict[str, str]:
    """Each view among nodes or steps -> the buffer whose memory it shares."""
    return first_names((n.out.name, n.source) for n in steps if isinstance(n, View))


def first_names(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Each (name, source) in order: the name -> the first name of the memory that it shares."""
    found: dict[str, str] = {}
    for name, source in pairs:
        found[name] = found.get(source, source)
    return found


def note_memory(item: Extern | View, memory: dict[str, tuple[str, ...]]) -> None:
    """Record which buffers a view, or the result of a call, may alias."""
    if isinstance(item, View):
        pairs: list[tuple[object, str]] = [(item.out, item.source)]
    else:
        pairs = [(item.outs[k], source) for k, source in item.aliases if k < len(item.outs)]
    for out, source in pairs:
        if isinstance(out, Buffer):
            memory[out.name] = (*memory.get(out.name, ()), source, *memory.get(source, ()))


def spread_over(names: Sequence[str], memory: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    """The names and the buffers that they alias: reading a view reads its root."""
    return tuple(dict.fromkeys((*names, *(m for name in names for m in memory.get(name, ())))))


def held_by(n: Extern) -> tuple[str, ...]:
    """The buffers that a call may use after it has returned."""
    return (*reads_of(n), *(b.name for b in outs_of(n))) if n.holds else ()


def held_for_good(nodes: Sequence[object]) -> frozenset[str]:
    """Buffers held by a call without a later wait for all its results."""
    waited: set[str] = set()
    found: set[str] = set()
    for n in reversed(nodes):
        if isinstance(n, Extern):
            waited.update(n.waits)
            if n.holds and not (outs_of(n) and waited.issuperset(b.name for b in outs_of(n))):
                found.update(held_by(n))
    return frozenset(found)


def rename_reads(n: Node, same: dict[str, str]) -> Node:
    """The node with its operands renamed."""
    name_of: Callable[[str], str] = lambda name: same.get(name, name)
    new: Callable[[Any], Any] = lambda x: (
        name_of(x) if isinstance(x, str) else tuple(map(name_of, x))
    )
    n = map_values(map_fields(n, _USED, new), renaming(name_of))
    if not isinstance(n, Extern):
        return n
    args = tuple([_atom(a, same) for a in n.args])
    return replace(n, args=args, kwargs=tuple([(k, _atom(a, same)) for k, a in n.kwargs]))


def _atom(a: Atom, same: dict[str, str]) -> Atom:
    if isinstance(a, Ref):
        return Ref(same.get(a.name, a.name))
    return tuple(_atom(x, same) for x in a) if isinstance(a, tuple) else a
