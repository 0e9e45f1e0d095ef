"""The graph level: a list of whole-tensor computations in order, each a loop nest over one body.

A `Graph` is functional: every buffer is written by exactly one node, nodes stand after what they
read, and inputs never change. Mutation of an input is a pair in `mutations`, meaning "when the
graph ends, the input holds this value". Indices in loads are logical (one Sym per dimension of the
buffer that is read); the layout of a buffer says where they lie in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from lenz.errors import InternalError
from lenz.ir.expr import Expr, loads_of
from lenz.ir.tensor import Axis, Buffer
from lenz.sym import Sym, SymEnv

ReduceKind = Literal["sum", "prod", "max", "min", "argmax", "argmin", "any", "all"]
REDUCE_KINDS: tuple[ReduceKind, ...] = (
    "sum", "prod", "max", "min", "argmax", "argmin", "any", "all",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ref:
    """A buffer by name, as an argument or output."""

    name: str


@dataclass(frozen=True, slots=True)
class Named:
    """A torch object by name: dtype(f32), device(cpu), memory_format(channels_last) and so on.

    kind "op" is an eager op that a higher-order op calls; kind "obj" is an entry of
    `Graph.objects` (a sub-module of a higher-order op, say).
    """

    kind: Literal["dtype", "device", "layout", "memory_format", "op", "obj"]
    value: str


Atom: TypeAlias = "Ref | Named | Sym | bool | int | float | complex | str | tuple[Atom, ...] | None"


@dataclass(frozen=True, slots=True)
class Pointwise:
    """out[axes] = body; one axis per dimension of `out`."""

    out: Buffer
    axes: tuple[Axis, ...]
    body: Expr


@dataclass(frozen=True, slots=True)
class Reduction:
    """out[axes] = reduce of body over raxes.

    The accumulator has the type of the body (for "sum" of halves the body casts to f32 first).
    "argmax" and "argmin" give the flat i64 position over raxes in row-major order, the first of
    equals; a NaN counts as the greatest (smallest), as in torch. "max" and "min" keep NaN.
    `finish` is applied to the reduced value, which it sees as `ref("acc")`: a cast, a division. It
    reads no buffer.
    """

    out: Buffer
    axes: tuple[Axis, ...]
    raxes: tuple[Axis, ...]
    kind: ReduceKind
    body: Expr
    finish: Expr


@dataclass(frozen=True, slots=True)
class View:
    """out[axes] is source[index]: other strides over the same storage, no computation.

    `out.type.layout` is given in elements of the storage that `source` lies in.
    """

    out: Buffer
    source: str
    axes: tuple[Axis, ...]
    index: tuple[Sym, ...]


@dataclass(frozen=True, slots=True)
class Extern:
    """A call of the eager op, with its aliasing and mutation stated.

    op       qualified overload, "aten.mm.default"; or "obj:NAME" for an entry of Graph.objects
    outs     one per tensor result; a Var for a size it yields; None for a result nobody uses
    single   True when the op returns one value and not a tuple or list
    mutates  names of buffers it writes (only buffers that nothing else reads afterwards)
    aliases  pairs (position in outs, buffer it may share memory with)
    reason   why lenz does not lower it natively; "library" for what is meant to be a library call
    """

    outs: tuple[Buffer | Sym | None, ...]
    op: str
    args: tuple[Atom, ...]
    kwargs: tuple[tuple[str, Atom], ...] = ()
    single: bool = True
    mutates: tuple[str, ...] = ()
    aliases: tuple[tuple[int, str], ...] = ()
    reason: str = ""


Node: TypeAlias = Pointwise | Reduction | View | Extern
Loop: TypeAlias = Pointwise | Reduction


@dataclass(frozen=True, slots=True)
class Mutation:
    """When the graph ends, `input` holds the elements of `value`."""

    input: str
    value: str


@dataclass(frozen=True, slots=True)
class Graph:
    """One traced graph: inputs (tensors and sizes, in call order), nodes in order, outputs."""

    name: str
    inputs: tuple[Buffer | Sym, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Atom, ...]
    mutations: tuple[Mutation, ...] = ()
    constants: tuple[Buffer, ...] = ()
    env: SymEnv = field(default_factory=SymEnv)
    objects: tuple[str, ...] = ()


def atom_refs(a: Atom) -> Iterator[str]:
    """Names of the buffers in an argument, in order."""
    if isinstance(a, Ref):
        yield a.name
    elif isinstance(a, tuple):
        for part in a:
            yield from atom_refs(part)


def outs_of(n: Node) -> tuple[Buffer, ...]:
    """The buffers a node defines."""
    if isinstance(n, Extern):
        return tuple(o for o in n.outs if isinstance(o, Buffer))
    return (n.out,)


def reads_of(n: Node) -> tuple[str, ...]:
    """Names of the buffers a node reads, each once, in order of first use."""
    match n:
        case Pointwise(_, _, body):
            names = [e.attrs[0] for e in loads_of(body)]
        case Reduction(_, _, _, _, body, finish):
            names = [e.attrs[0] for e in loads_of(body, finish)]
        case View(_, source):
            names = [source]
        case Extern():
            names = [r for a in n.args for r in atom_refs(a)]
            names += [r for _, a in n.kwargs for r in atom_refs(a)]
    return tuple(dict.fromkeys(names))


def buffers_of(g: Graph) -> dict[str, Buffer]:
    """Every buffer of the graph by name; raises InternalError when a name is defined twice."""
    found: dict[str, Buffer] = {}
    defined = [b for b in g.inputs if isinstance(b, Buffer)] + list(g.constants)
    for n in g.nodes:
        defined.extend(outs_of(n))
    for b in defined:
        if b.name in found:
            raise InternalError(f"buffer %{b.name} is defined twice in graph @{g.name}")
        found[b.name] = b
    return found


def roots_of(g: Graph) -> dict[str, str]:
    """For each view, the buffer in whose memory it lies."""
    roots: dict[str, str] = {}
    for n in g.nodes:
        if isinstance(n, View):
            roots[n.out.name] = roots.get(n.source, n.source)
    return roots
