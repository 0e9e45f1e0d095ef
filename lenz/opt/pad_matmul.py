"""Pad ragged matrix products on GPUs with zeros to sizes that tensor cores accept.

    %y = call aten.mm.default(%x, %w)                         x: 4096 x 768, w: 768 x 50257
    ==>  %w.pad = map (i: 768, j: 50264) { masked(j < 50257, load(%w, [i, j]), 0) }
         %y.pad = call aten.mm.default(%x, %w.pad)
         %y = view (i: 4096, j: 50257) %y.pad[i, j]

The library moves 16 bytes at once if each contiguous dimension is a multiple of 8 numbers, and one
number at a time otherwise: on an H200 the products of a vocabulary of 50257 took 2.2 to 3.3 ms
each, and 0.4 ms padded. A map of this graph is computed with padding in place. Arguments and
results of calls are copied, once for all products, and so is a result whose strides are observable.
f32 stays as it is, because without tensor cores nothing moves 16 bytes at once. Padding a sum adds
products of zeros, which changes no bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import reduce

from lenz import ops
from lenz.context import Context
from lenz.debug.blame import blaming
from lenz.ir import graph as ir
from lenz.ir.dtype import I64
from lenz.ir.expr import Expr, const, index, load, loads_of, masked, reindex
from lenz.ir.tensor import Axis, Buffer, Layout, TensorType, axes_for, axis, contiguous, strided
from lenz.machines import capabilities_of
from lenz.opt.views import place_in_root
from lenz.records import dataclass, replace
from lenz.sym import ONE, Int, Sym, Var, product, substitute
from lenz.target import Capabilities
from lenz.traits import has, trait

UNIT = 8  # 2-byte numbers that the library moves at once
# A matrix that is moved one number at a time takes as long as so many. On an H200, 192 products of
# 197 x 64 by 64 x 197 bf16 take 26 to 29 us and padded 10, 64 of 1025 x 64 by 64 x 1025 211 to 254
# and 68, 12608 x 197 by 197 x 768 46 to 55 and 13.
SINGLY = 6
LEAST = 32  # 25088 of 16 x 6 by 6 x 16 take 21 us, and padded 80; the library's tiles are larger
Shape = tuple[Sym, ...]


def pad_matmul(g: ir.Graph, cx: Context) -> ir.Graph:
    """Pad products of half types on GPUs with a ragged dimension, if that pays.

    A result that stays inside the graph, or is in `g.free`, becomes a view of its padded memory.
    """
    p = _Padder(g)
    for n in g.nodes:
        if isinstance(n, ir.Extern) and has(n.op, "product"):
            with blaming(n):
                p.decide(n, cx)
    if not p.products:
        return g
    for n in g.nodes:
        with blaming(n):
            p.write(n)
    return replace(g, nodes=tuple(p.nodes))


@dataclass(frozen=True, slots=True)
class _Product:
    """The decision about a product: its arguments' shapes by position, and its result's memory.

    `is_copied` says that the result is copied out of that memory.
    """

    args: Mapping[int, Shape]
    out: Layout
    is_copied: bool


@dataclass(frozen=True, slots=True)
class _Copy:
    """A part of `root`'s memory, its longer stride first, and the shape of its padded copy."""

    root: str  # never read, but distinguishes copies of two buffers
    layout: Layout
    wanted: Shape


class _Padder:
    """First decides which products to pad and which maps to stretch for them, then rewrites."""

    def __init__(self, g: ir.Graph) -> None:
        self.types = {name: b.type for name, b in ir.buffers_of(g).items()}
        self.maps = {n.out.name: n for n in g.nodes if isinstance(n, ir.Pointwise)}
        self.views = {n.out.name: n for n in g.nodes if isinstance(n, ir.View)}
        roots = ir.roots_of(g.nodes)
        self.fixed = {roots.get(x, x) for x in _fixed(g)}
        # Observable: other calls may derive their results' strides from those of arguments.
        calls = [n for n in g.nodes if isinstance(n, ir.Extern) and not has(n.op, "product")]
        self.pinned = {*ir.atom_refs(g.outputs)}.difference(g.free).union(*map(ir.names_in, calls))
        self.products: dict[str, _Product] = {}
        self.stretched: dict[str, Shape] = {}
        self.copies: dict[_Copy, str] = {}
        self.nodes: list[ir.Node] = []
        self.homes: dict[str, str] = {}  # for stretched maps, the buffers that they view
        self.laid: dict[str, Layout] = {}
        self.given: dict[tuple[str, Shape], str] = {}

    def decide(self, n: ir.Extern, cx: Context) -> None:
        """Record a product that is worth padding, and the maps to stretch for it."""
        out, asked = n.outs[0], _dimensions(n, self.types)
        if asked is None or not isinstance(out, Buffer):
            return
        sizes, along, ragged, args = asked
        stretched, copies = dict(self.stretched), dict(self.copies)
        for k, wanted in args.items():
            found = self.stretch(_name(n, k), wanted, stretched)
            if found is None:
                copies.setdefault(self.copy_of(_name(n, k), wanted), "")
            else:
                stretched.update(found)
        layout = contiguous(_grown(out.shape, "mn", ragged))
        is_copied = layout.shape != out.shape and not self.relays(out.name, layout)
        moved = [c.wanted for c in copies if c not in self.copies] + [out.shape] * is_copied
        can = capabilities_of(out.type.device)
        if not _pays(can, sizes, along, ragged, moved) or not cx.allow("pad_matmul", out.name):
            return
        self.products[out.name] = _Product(args, layout, is_copied)
        self.stretched, self.copies = stretched, copies

    def stretch(self, name: str, wanted: Shape, done: dict[str, Shape]) -> dict[str, Shape] | None:
        """The map behind a buffer, with the shape that gives the buffer the `wanted` one.

        None if there is no such map, or if its strides are observable.
        """
        root, axes, where = self.shown(name)
        n = self.maps.get(root)
        if n is None or not n.out.type.layout.is_contiguous:
            return None
        shape = list(done.get(root, n.out.shape))
        for a, size in zip(axes, wanted, strict=True):
            if a.extent is size:
                continue
            places = [d for d, s in enumerate(where) if a.var in s.free_vars]
            if [where[d] for d in places] != [a.var] or n.out.shape[places[0]] is not a.extent:
                return None
            shape[places[0]] = size
        layout = contiguous(shape)
        wide, at = _widened(axes, wanted)
        shown = strided(wide, layout.at([substitute(s, at) for s in where]))
        return {root: layout.shape} if shown is not None and self.relays(root, layout) else None

    def shown(self, name: str) -> tuple[str, tuple[Axis, ...], Shape]:
        """The root of a buffer, and the position in it of the buffer's element at the axes."""
        axes = axes_for(self.types[name].shape)
        root, where = place_in_root(name, tuple(a.var for a in axes), self.views)
        return root, axes, where

    def relays(self, name: str, layout: Layout) -> bool:
        """True if a buffer may get another layout.

        All its views then remain views, and no observable layout changes.
        """
        laid = {name: layout}
        for v in self.views.values():
            if v.source in laid:
                found = strided(v.axes, laid[v.source].at(v.index))
                if found is None:
                    return False
                laid[v.out.name] = found
        pairs = [(laid[x], self.types[x].layout) for x in laid if x in self.pinned]
        same = all(a.stride == b.stride and a.offset is b.offset for a, b in pairs)
        return same and name not in self.fixed

    def copy_of(self, name: str, wanted: Shape) -> _Copy:
        """The copy that an argument needs."""
        layout = self.types[name].layout
        if _is_transposed(layout):
            layout = Layout(_swapped(layout.shape), _swapped(layout.stride), layout.offset)
            wanted = _swapped(wanted)
        return _Copy(self.shown(name)[0], layout, wanted)

    def write(self, n: ir.Node) -> None:
        """Append the replacement of a node."""
        match n:
            case ir.Pointwise() if n.out.name in self.stretched:
                axes, at = _widened(n.axes, self.stretched[n.out.name])
                body = _inside(axes, n.out.shape, reindex(n.body, at))
                home = self.define(n.out, contiguous(self.stretched[n.out.name]))
                self.nodes.append(ir.Pointwise(home, axes, body))
                self.homes[n.out.name] = home.name
                self.part(n.out, home)
            case ir.Reduction():
                self.reduction(n)
            case ir.View() if n.source in self.laid:
                layout = strided(n.axes, self.laid[n.source].at(n.index))
                assert layout is not None, n.out.name  # checked by `relays`
                self.laid[n.out.name] = layout
                self.nodes.append(replace(n, out=_with(n.out, layout)))
            case ir.Extern(outs=(Buffer(name) as out,)) if name in self.products:
                self.product(n, out, self.products[name])
            case _:
                self.nodes.append(n)

    def reduction(self, n: ir.Reduction) -> None:
        """A reduction includes the padding, to share the kernel of the map that has it.

        %s = reduce sum (j: 13 | r: 8) { load(%a, [r, j]) }
        ==>  %s.pad = reduce sum (j: 16 | r: 8) { load(%a.pad, [r, j]) }
        """
        reads = [self.read(e) for e in loads_of(n.body)]
        layout = contiguous([_common(a, reads) for a in n.axes])
        is_same = layout.shape == n.out.shape or not n.out.type.layout.is_contiguous
        if is_same or not self.relays(n.out.name, layout):
            self.nodes.append(n)
            return
        axes, at = _widened(n.axes, layout.shape)
        home = self.define(n.out, layout)
        body, finish = reindex(n.body, at), reindex(n.finish, at)
        self.nodes.append(replace(n, out=home, axes=axes, body=body, finish=finish))
        self.part(n.out, home)

    def read(self, e: Expr) -> list[tuple[Sym, Sym, Sym]]:
        """For each dimension of a load's buffer: index, size, and size with padding."""
        root, axes, where = self.shown(e.attrs[0])
        at: dict[Var, Sym] = {a.var: i for a, i in zip(axes, e.attrs[1], strict=True)}
        old = self.types[root].shape
        wide = self.stretched.get(root, old)
        return [(substitute(s, at), a, b) for s, a, b in zip(where, old, wide, strict=True)]

    def product(self, n: ir.Extern, out: Buffer, p: _Product) -> None:
        """A product of padded arguments; the unpadded part keeps the result's name."""
        args = list(n.args)
        for k, wanted in p.args.items():
            args[k] = ir.Ref(self.argument(_name(n, k), wanted))
        home = out if p.out.shape == out.shape else self.define(out, p.out)
        self.nodes.append(replace(n, args=tuple(args), outs=(home,)))
        if p.is_copied:
            self.nodes.append(ir.copying(home.name, out))
        elif home is not out:
            self.part(out, home)

    def part(self, out: Buffer, home: Buffer) -> None:
        """The view of padded memory with the original name and shape."""
        axes = axes_for(out.shape)
        self.laid[out.name] = Layout(out.shape, home.type.layout.stride)
        kept = _with(out, self.laid[out.name])
        self.nodes.append(ir.View(kept, home.name, axes, tuple(a.var for a in axes)))

    def argument(self, name: str, wanted: Shape) -> str:
        """A buffer with the `wanted` shape: a view of a stretched map, or a copy."""
        if (name, wanted) in self.given:
            return self.given[name, wanted]
        root, axes, where = self.shown(name)
        wide, at = _widened(axes, wanted)
        found = self.stretch(name, wanted, self.stretched)
        if found is not None and found[root] == self.stretched.get(root):
            source, layout = self.homes[root], contiguous(found[root])
            where = tuple(substitute(s, at) for s in where)
        else:
            copy = self.copy_of(name, wanted)
            source, layout = self.copied(name, copy), contiguous(copy.wanted)
            where = tuple(a.var for a in wide)
            if _is_transposed(self.types[name].layout):
                where = _swapped(where)
        if where != tuple(a.var for a in wide) or layout.shape != wanted:
            shown = strided(wide, layout.at(where))
            assert shown is not None, name
            view = self.define(Buffer(name, self.types[name]), shown)
            self.nodes.append(ir.View(view, source, wide, where))
            source = view.name
        self.given[name, wanted] = source
        return source

    def copied(self, name: str, copy: _Copy) -> str:
        """The padded copy of an argument; made at its first use."""
        if not self.copies.get(copy):
            home = self.define(Buffer(name, self.types[name]), contiguous(copy.wanted))
            axes = axes_for(copy.wanted)
            where = tuple(a.var for a in axes)
            is_swapped = _is_transposed(self.types[name].layout)
            body = load(name, _swapped(where) if is_swapped else where, home.dtype)
            self.nodes.append(ir.Pointwise(home, axes, _inside(axes, copy.layout.shape, body)))
            self.copies[copy] = home.name
        return self.copies[copy]

    def define(self, b: Buffer, layout: Layout) -> Buffer:
        """A new buffer like `b`, named after it."""
        name, count = f"{b.name}.pad", 1
        while name in self.types:
            name, count = f"{b.name}.pad.{count}", count + 1
        made = _with(replace(b, name=name), layout)
        self.types[name] = made.type
        return made


def _common(a: Axis, reads: Iterable[list[tuple[Sym, Sym, Sym]]]) -> Sym:
    """The extent that an axis may have: the padding that all reads along it share."""
    found: list[Sym] = []
    for dims in reads:
        along = [x for x in dims if a.var in x[0].free_vars]
        if len(along) != 1 or along[0][0] is not a.var or along[0][1] is not a.extent:
            return a.extent
        found.append(along[0][2])
    return found[0] if found and all(size is found[0] for size in found) else a.extent


def _fixed(g: ir.Graph) -> Iterator[str]:
    """Buffers whose memory others write or alias."""
    for m in g.mutations:
        yield from (m.input, m.value)
    for n in g.nodes:
        if isinstance(n, ir.Scatter):
            yield n.base
        elif isinstance(n, ir.Extern):
            yield from (*n.mutates, *(name for _, name in n.aliases))


def _name(n: ir.Extern, k: int) -> str:
    a = n.args[k]
    assert isinstance(a, ir.Ref)
    return a.name


def _dimensions(
    n: ir.Extern, types: Mapping[str, TensorType]
) -> tuple[list[int], str, frozenset[str], dict[int, Shape]] | None:
    """A product of half types by tensor cores; None for others, and if a size is unknown.

    Batch, M, K and N; the dimensions along which the matrices m x k, k x n and m x n are
    contiguous, by their letters; which of these are ragged; the arguments that need other shapes.
    """
    first = int(trait(n.op, "product") or 0)
    out, (a, b) = n.outs[0], (types[_name(n, k)].layout for k in (first, first + 1))
    if not isinstance(out, Buffer) or not out.dtype.is_half or not out.type.layout.is_contiguous:
        return None
    known = [s.value for s in (*a.shape, b.shape[-1]) if isinstance(s, Int)]
    if len(known) <= len(a.shape) or not capabilities_of(out.type.device).products:
        return None
    along = ("m" if a.stride[-2] is ONE else "k") + ("k" if b.stride[-2] is ONE else "n") + "n"
    sizes = {"m": a.shape[-2], "k": a.shape[-1], "n": b.shape[-1]}
    ragged = frozenset(x for x in along if _up(sizes[x]) is not sizes[x])
    shapes = {k: types[_name(n, k)].shape for k in range(first + 2)}
    wide = {k: _grown(s, ("mn", "mk", "kn")[1 - first + k], ragged) for k, s in shapes.items()}
    args = {k: shape for k, shape in wide.items() if shape != shapes[k]}
    return [1, *known][-4:], along, ragged, args


def _pays(
    can: Capabilities, sizes: list[int], along: str, ragged: frozenset[str], moved: list[Shape]
) -> bool:
    """Compare the time of a product with that of its padded form and the copies."""
    batch, m, k, n = sizes
    moves = [2 * batch * x / can.bandwidth for x in (m * k, k * n, m * n)]
    slow = [SINGLY * s if x in ragged else s for s, x in zip(moves, along, strict=True)]
    operations = 2 * batch * m * k * n
    copies = sum(2 * 2 * (product(s).hi or 0) / can.bandwidth + can.start for s in moved)
    after = max(operations / can.products, sum(moves)) + copies
    return min(m, k, n) >= LEAST and after < operations / can.ragged + sum(slow)


def _up(size: Sym) -> Sym:
    assert isinstance(size, Int)
    return size if size.value % UNIT == 0 else Int(-(-size.value // UNIT) * UNIT)


def _grown(shape: Shape, letters: str, ragged: frozenset[str]) -> Shape:
    """The shape that ends with the letters, ragged ones padded; a size of 1 broadcasts."""
    found = list(shape)
    for d, letter in enumerate(reversed(letters), 1):
        if letter in ragged and d <= len(shape) and shape[-d] is not ONE:
            found[-d] = _up(shape[-d])
    return tuple(found)


def _widened(axes: tuple[Axis, ...], shape: Shape) -> tuple[tuple[Axis, ...], dict[Var, Sym]]:
    """The axes with new extents, and the new variable for each old one."""
    wide = tuple(axis(a.name, size) for a, size in zip(axes, shape, strict=True))
    return wide, {a.var: w.var for a, w in zip(axes, wide, strict=True)}


def _inside(axes: tuple[Axis, ...], shape: Shape, body: Expr) -> Expr:
    """The body if all axes are inside the shape, else zero."""
    padded = [(a, size) for a, size in zip(axes, shape, strict=True) if a.extent is not size]
    tests = [index(a.var, I64) < index(size, I64) for a, size in padded]
    return masked(reduce(ops.and_, tests), body, const(0, body.dtype))


def _is_transposed(layout: Layout) -> bool:
    return layout.rank > 1 and layout.stride[-2] is ONE and layout.stride[-1] is not ONE


def _swapped(x: Shape) -> Shape:
    return (*x[:-2], x[-1], x[-2])


def _with(b: Buffer, layout: Layout) -> Buffer:
    return replace(b, type=replace(b.type, layout=layout))
