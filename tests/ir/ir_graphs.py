"""Objects of every form, which the tests of this room share."""

from __future__ import annotations

from dataclasses import replace

import torch

import lenz.ops  # noqa: F401 - fills the table of ops
from lenz.ir.dtype import BF16, BOOL, C64, F16, F32, F64, I8, I32, I64, U8, DType
from lenz.ir.expr import Expr, const, expr, index, load, masked, ref
from lenz.ir.graph import (
    Atom,
    Extern,
    Graph,
    Mutation,
    Named,
    Node,
    Pointwise,
    Reduction,
    Ref,
    Scan,
    Scatter,
    Sort,
    View,
)
from lenz.ir.kernel import (
    For,
    Kernel,
    Launch,
    Let,
    Local,
    LookBack,
    Param,
    Reduce,
    Rejected,
    Schedule,
    Store,
    TileConfig,
)
from lenz.ir.kernel import Scan as Running
from lenz.ir.kernel import Sort as SortLocal
from lenz.ir.op import op_named
from lenz.ir.plan import (
    Alloc,
    BindSize,
    CallStep,
    Check,
    Current,
    Free,
    Input,
    LaunchStep,
    Lay,
    Plan,
    Region,
    Reuse,
    SizeInput,
    ViewStep,
)
from lenz.ir.tensor import Axis, Buffer, Layout, TensorType, axes_for, axis, contiguous, lane_axis
from lenz.sym import Int, Sym, SymEnv, Var, maximum, minimum, sym

S0, S1 = Var("s0", 1), Var("s1", 2, 64)
BOTH = SymEnv((S0, S1))
ONE = SymEnv((S0,))
USUAL = TileConfig()


def call(name: str, *args: Expr, attrs: tuple[object, ...] = ()) -> Expr:
    """A node of the op, not simplified."""
    return expr(op_named(name), *args, attrs=attrs)


def buf(name: str, *shape: Sym | int, dtype: DType = F32, device: str = "cpu") -> Buffer:
    """A row-major buffer."""
    return Buffer(name, TensorType(dtype, device, contiguous([sym(s) for s in shape])))


def strided(name: str, shape: tuple[int, ...], stride: tuple[int, ...], offset: int = 0) -> Buffer:
    """A buffer with other strides."""
    layout = Layout(tuple(map(Int, shape)), tuple(map(Int, stride)), Int(offset))
    return Buffer(name, TensorType(F32, "cpu", layout))


def softmax() -> Graph:
    """Rows of s0 x 7."""
    x = buf("x", S0, 7)
    (i, j), r = axes_for(x.shape), axis("r", Int(7))
    e = call("exp", call("sub", load("x", (i.var, j.var), F32), load("m", (i.var,), F32)))
    quotient = call("div", load("e", (i.var, j.var), F32), load("d", (i.var,), F32))
    acc = ref("acc", F32)
    nodes = (
        Reduction(buf("m", S0), (i,), (r,), "max", load("x", (i.var, r.var), F32), acc),
        Pointwise(buf("e", S0, 7), (i, j), e),
        Reduction(buf("d", S0), (i,), (r,), "sum", load("e", (i.var, r.var), F32), acc),
        Pointwise(buf("y", S0, 7), (i, j), quotient),
    )
    return Graph("softmax", (x,), nodes, (Ref("y"),), env=ONE)


def gather() -> Graph:
    """Rows of a table by an index that may be negative; the shared index is a temporary."""
    w, idx = buf("w", 10, S0), buf("idx", S1, dtype=I32)
    i, j = axes_for((S1, S0))
    raw = call("cast", load("idx", (i.var,), I32), attrs=(I64,))
    wrapped = call("where", call("lt", raw, const(0, I64)), call("add", raw, const(10, I64)), raw)
    row = Var("@0", 0, 9)
    body = load("w", (row, j.var), F32, (wrapped,))
    position = call("cast", index(row + j.var, I64, (wrapped,)), attrs=(F32,))
    out = Pointwise(buf("y", S1, S0), (i, j), call("add", body, position))
    return Graph("gather", (w, idx, S0), (out,), (Ref("y"),), env=BOTH)


def padded() -> Graph:
    """A load that only a mask keeps inside."""
    x = buf("x", S0)
    (i,) = axes_for((S0 + 2,))
    inside = call(
        "and", call("ge", index(i.var), const(1, I64)), call("lt", index(i.var - 1), index(S0))
    )
    body = masked(inside, load("x", (i.var - 1,), F32), const(-0.0, F32))
    return Graph("pad", (x,), (Pointwise(buf("y", S0 + 2), (i,), body),), (Ref("y"),), env=ONE)


def constants() -> Graph:
    """Every kind of constant."""
    (i,) = axes_for((Int(3),))
    values = [
        const(value, F32) for value in (0.0, -0.0, 1e-45, 0.1, 3e38, float("inf"), float("nan"))
    ]
    body = values[0]
    for value in (*values[1:], const(-float("inf"), F32), const(float("nan"), F32)):
        body = call("add", body, value)
    ints = call("add", const(-128, I8), const(127, I8))
    doubles = call("mul", const(0.1, F64), const(1 / 3, F64))
    flags = call("or", const(True, BOOL), const(False, BOOL))
    nodes = (
        Pointwise(buf("a", 3), (i,), body),
        Pointwise(buf("b", 3, dtype=I8), (i,), ints),
        Pointwise(buf("c", 3, dtype=F64), (i,), doubles),
        Pointwise(buf("d", 3, dtype=BOOL), (i,), flags),
        Pointwise(buf("e", 3, dtype=U8), (i,), const(255, U8)),
        Pointwise(buf("f", 3, dtype=F16), (i,), const(0.1, F16)),
    )
    return Graph("constants", (), nodes, tuple(Ref(n.out.name) for n in nodes))


def calls() -> Graph:
    """Calls with every form of argument and result, views, constants, mutations."""
    x, big = buf("x", S0, 4), strided("big", (3, 4), (1, 3), 2)
    i, j = axes_for((S0, Int(4)))
    u = Var("u0", 0)
    transposed = TensorType(F32, "cpu", Layout((Int(4), S0), (Int(1), Int(4))))
    view = View(Buffer("v", transposed), "x", tuple(axes_for((Int(4), S0))), (Var("q"), Var("q")))
    p, q = view.axes
    view = replace(view, index=(q.var, p.var), detached=True)
    args: tuple[Atom, ...] = (
        Ref("x"),
        (Ref("w"), None),
        (1,),
        (),
        S0 * 2,
        True,
        -3,
        2.5,
        1e30,
        complex(0.5, -1.0),
        'a "text" # with\nmarks',
        Named("dtype", "bf16"),
        Named("device", "cuda:0"),
        Named("memory_format", "channels_last"),
        Named("obj", "body 0"),
    )
    kwargs: tuple[tuple[str, Atom], ...] = (("alpha", 1), ("dtype", Named("dtype", "f32")))
    nodes: tuple[Node, ...] = (
        view,
        Extern((buf("mm", S0, S0),), "aten.mm.default", (Ref("x"), Ref("v")), reason="library"),
        Extern(
            (buf("p", S0, device="cuda:0"), None, u, buf("q", u, dtype=C64)),
            "test.many.default",
            args,
            kwargs,
            single=False,
            aliases=((0, "x"), (3, "w")),
        ),
        Extern((buf("l", 2, dtype=BF16),), "test.list.default", (), single=False, refuses=True),
        Extern((buf("g", 2),), "test.start.default", (Ref("l"),), reason="late", holds=True),
        Extern((buf("h", 2),), "test.wait.default", (Ref("g"),), waits=("g", "l")),
        Extern((), "test.nothing.default", (Ref("mm"),), mutates=("mm",)),
        Extern((None,), "obj:odd name", (), draws="numbers"),
        Extern((u * 2,), "test.size.default", ()),
        Pointwise(buf("odd name", S0, 4), (i, j), load("x", (i.var, j.var), F32)),
    )
    return Graph(
        "a graph",
        (x, S0 * 3, big),
        nodes,
        (Ref("p"), None, S0 + 1, (Ref("odd name"), 3), Ref("p")),
        (Mutation("x", "odd name"),),
        (buf("w", 3, dtype=F64),),
        BOTH.with_var(u).with_var(S0, 16),
        ("body 0",),
        ("odd name",),
    )


def deep(n: int = 3000) -> Graph:
    """A chain far deeper than Python recurses, and a ladder whose tree has 2**n leaves."""
    (i,) = axes_for((S0,))
    chain = ladder = load("x", (i.var,), F32)
    for _ in range(n):
        chain = call("neg", chain)
        ladder = call("mul", ladder, ladder)
    nodes = (Pointwise(buf("a", S0), (i,), chain), Pointwise(buf("b", S0), (i,), ladder))
    return Graph("deep", (buf("x", S0),), nodes, (Ref("a"), Ref("b")), env=ONE)


def odd_axes() -> Graph:
    """An axis whose bounds do not follow from its extent, and sizes with min and max."""
    i = Axis(Var("i", 0, 3, S0), minimum(S0, Int(4)))
    size = maximum(minimum(S0, Int(4)), Int(0))
    body = load("x", (i.var // 2 + i.var % 2,), F32)
    nodes = (Pointwise(buf("y", size), (i,), body),)
    return Graph("odd", (buf("x", S0),), nodes, (Ref("y"),), env=SymEnv())


def reductions() -> Graph:
    """All kinds, one with a finish, one over everything."""
    x = buf("x", 3, 4)
    (i, r), acc = axes_for(x.shape), ref("acc", F32)
    item = load("x", (i.var, r.var), F32)
    positive = call("gt", item, const(0.0, F32))
    mean = call("cast", call("div", acc, const(4.0, F32)), attrs=(F16,))
    nodes = (
        Reduction(buf("a", 3, dtype=F16), (i,), (r,), "sum", item, mean),
        Reduction(buf("b"), (), (i, r), "prod", item, acc),
        Reduction(buf("c", dtype=I64), (), (i, r), "argmax", item, ref("acc", I64)),
        Reduction(buf("d", 3, dtype=I64), (i,), (r,), "argmin", item, ref("acc", I64)),
        Reduction(buf("e", 3, dtype=BOOL), (i,), (r,), "any", positive, ref("acc", BOOL)),
        Reduction(buf("f", 3, dtype=BOOL), (i,), (r,), "all", positive, ref("acc", BOOL)),
        Reduction(buf("g", 3), (i,), (r,), "min", item, acc),
    )
    return Graph("reductions", (x,), nodes, tuple(Ref(n.out.name) for n in nodes))


def ordered() -> Graph:
    """Rows in order, and the three smallest of each column."""
    x = buf("x", S0, 5, dtype=I64)
    axes = i, j = axes_for(x.shape)
    item, few = load("x", (i.var, j.var), I64), axes_for((Int(4), Int(5)))
    nodes = (
        Sort(buf("a", S0, 5, dtype=I64), axes, 1, item),
        Sort(buf("b", 3, 5, dtype=I64), few, 0, load("w", (few[0].var, few[1].var), I64)),
    )
    return Graph("ordered", (x, buf("w", 4, 5, dtype=I64)), nodes, (Ref("a"), Ref("b")), env=ONE)


def bins() -> Graph:
    """Running sums of rows, a running maximum from the end, and rows added up by number."""
    x, idx, base = buf("x", S0, 5), buf("idx", S0, dtype=I64), buf("base", 3, 5)
    axes = i, j = axes_for(x.shape)
    each = (i.var, j.var)
    halves = call("cast", ref("acc", F32), attrs=(F16,))
    wide = call("cast", load("m", each, F16), attrs=(F32,))
    row = (call("assert_in_range", load("idx", (i.var,), I64), index(Int(3))),)
    place = (Var("@0", 0, 2), j.var)
    nodes = (
        Scan(buf("c", S0, 5), axes, 1, "sum", load("x", each, F32), ref("acc", F32)),
        Scan(buf("m", S0, 5, dtype=F16), axes, 0, "max", load("c", each, F32), halves, True),
        Scatter(buf("y", 3, 5), "base", axes, place, row, wide, "add"),
        Scatter(buf("z", 3, 5), "y", axes, place, row, load("x", each, F32)),
    )
    return Graph("bins", (x, idx, base), nodes, (Ref("c"), Ref("y"), Ref("z")), env=ONE)


GRAPHS = {
    g.__name__: g
    for g in (softmax, gather, padded, constants, calls, deep, odd_axes, reductions, bins, ordered)
}


def row_softmax(tile: TileConfig = USUAL) -> Kernel:
    """Softmax of rows of 7, with a named value and a row of scratch."""
    i, r = axis("i", S0), axis("r", Int(7))
    at = 7 * i.var + r.var
    x = load("x", (at,), F32)
    scaled = call("exp", call("sub", x, ref("m", F32)))
    body = (
        For(r, "vector", (Reduce("m", "max", x, (r.var,)),)),
        For(
            r,
            "vector",
            (
                Let("e", scaled),
                Store("row", r.var, ref("e", F32)),
                Reduce("d", "sum", ref("e", F32), (r.var,)),
            ),
        ),
        For(r, "vector", (Store("y", at, call("div", load("row", (r.var,), F32), ref("d", F32))),)),
    )
    params = (Param("x", F32, 7 * S0, "in"), Param("y", F32, 7 * S0, "out"))
    loop = For(i, "parallel", body)
    return Kernel("softmax_0", "reduction", params, (S0,), (loop,), (Local("row", F32, 7),), tile)


def columns() -> Kernel:
    """Sums and argmax over the rows of a panel: one accumulator per lane."""
    b, r, i = axis("b", Int(2)), axis("r", S0), axis("i", Int(4))
    x = load("x", (8 * r.var + 4 * b.var + i.var,), F32)
    at = 4 * b.var + i.var
    accumulate = (Reduce("t", "sum", x, (r.var,)), Reduce("k", "argmax", x, (r.var,)))
    store = (Store("y", at, ref("t", F32)), Store("z", at, ref("k", I64)))
    body = (For(r, "seq", (For(i, "vector", accumulate),)), For(i, "vector", store))
    params = (
        Param("x", F32, 8 * S0, "in"),
        Param("y", F32, Int(8), "out"),
        Param("z", I64, Int(8), "out"),
    )
    return Kernel("columns", "outer_reduction", params, (S0,), (For(b, "parallel", body),))


def scatter() -> Kernel:
    """A store at a loaded offset, into an argument that is also read."""
    i = axis("i", S0)
    where = call("cast", load("idx", (i.var,), I32), attrs=(I64,))
    at = Var("@0", 0, None, S1)
    value = call("add", load("y", (at,), F32, (where,)), const(1.0, F32))
    store = Store("y", at, value, (where,))
    params = (Param("idx", I32, S0, "in"), Param("y", F32, S1, "inout"))
    return Kernel("scatter", "pointwise", params, (S0, S1), (For(i, "seq", (store,)),))


def running() -> Kernel:
    """Sums along rows and maxima down columns, which are added to what is there."""
    i, j, down, across = axis("i", S0), axis("j", Int(7)), axis("d", S0), axis("a", Int(7))
    at, there = 7 * i.var + j.var, 7 * down.var + across.var
    row = (Running("c", "sum", load("x", (at,), F32), j.var), Store("y", at, ref("c", F32)))
    column = (
        Running("m", "max", load("x", (there,), F32), down.var),
        Store("y", there, ref("m", F32), mode="add"),
    )
    body = (
        For(i, "parallel", (For(j, "vector", row),)),
        For(down, "seq", (For(across, "vector", column),)),
    )
    params = (Param("x", F32, 7 * S0, "in"), Param("y", F32, 7 * S0, "inout"))
    along = axis("l", 7 * S0)
    again = Running("e", "sum", load("x", (along.var,), F32), along.var, every=7)
    body = (*body, For(along, "vector", (again, Store("y", along.var, ref("e", F32), mode="add"))))  # type: ignore[assignment]
    return Kernel("running", "scan", params, (S0,), body)


def looking_back() -> Kernel:
    """Sums along rows, each of them by several programs."""
    b = axis("b", (S0 + 11) // 12)
    r = lane_axis(axis("r", minimum(12, S0 - 12 * b.var)))
    at = 12 * b.var + r.var
    back = LookBack(b.var, "w", Int(3), 4)
    stmts = (Running("c", "sum", load("x", (at,), F32), r.var, back), Store("y", at, ref("c", F32)))
    body = (For(b, "grid", (For(r, "lane", stmts),)),)
    params = (
        Param("x", F32, S0, "in"),
        Param("y", F32, S0, "out"),
        Param("w", I64, 3 * S0 + 3, "work", True),
    )
    return Kernel("looking_back", "split_scan", params, (S0,), body, tile=TileConfig(warps=4))


def sorted_rows() -> Kernel:
    """Rows in order, of which the three smallest elements are kept."""
    i, r, k = axis("i", S0), axis("r", Int(5)), axis("k", Int(3))
    take = For(r, "vector", (Store("row", r.var, load("x", (5 * i.var + r.var,), I64)),))
    give = For(k, "vector", (Store("y", 3 * i.var + k.var, load("row", (k.var,), I64)),))
    body = (For(i, "parallel", (take, SortLocal("row", Int(5), Int(3)), give)),)
    params = (Param("x", I64, 5 * S0, "in"), Param("y", I64, 3 * S0, "out"))
    return Kernel("sorted_rows", "sort", params, (S0,), body, (Local("row", I64, 8),))


KERNELS = {
    "row_softmax": row_softmax,
    "tiled": lambda: row_softmax(TileConfig(grain=3, rows=8)),
    "columns": columns,
    "scatter": scatter,
    "running": running,
    "sorted_rows": sorted_rows,
    "looking_back": looking_back,
}


def plan() -> Plan:
    """Every kind of step."""
    half = TensorType(F16, "cpu", Layout((S0, Int(4)), (Int(4), Int(1)), Int(2)))
    wide = TensorType(F32, "cpu", contiguous((S0, Int(4))))
    u = Var("u0", 0)
    return Plan(
        "p",
        (
            Input("x", wide, "L['x']", signed=True),
            SizeInput(S1),
            SizeInput(S0 * 2),
            Input("odd name", half, anywhere=True, laid=True, pinned=True, written=True),
        ),
        (Input("w", wide),),
        (
            BindSize(S0, "x", 0),
            BindSize(Var("t", 0), "x", 1, stride=True),
            Alloc("a", wide, zero=True),
            Alloc("o", wide, huge=True, over="x"),
            LaunchStep("k0", ("x", "a"), (S0,)),
            LaunchStep("k1", ("a",), ()),
            Check(),
            ViewStep("v", "a", half, detached=True, taker="kernels"),
            Lay("v", half, "aten.mm.default"),
            Reuse("b", "a", wide, same=True, taker="autograd"),
            Current("cuda:0"),
            CallStep("aten.mm.out", (Ref("x"), 1), (("out", Ref("b")),), ("b",), True, into=True),
            CallStep("aten.two.default", (), (), ("c", u, None), False, counted=True),
            CallStep("aten.none.default", (), (), (), True, draws="key", writes=True),
            CallStep("test.start.default", (Ref("b"),), (), ("d",), True, holds=True),
            CallStep("test.wait.default", (Ref("d"),), (), ("e",), True, False, True, ("b", "d")),
            Region("graph", (Alloc("g", wide), LaunchStep("k1", ("g",), ())), device="cuda:0"),
            Region("outside", (Free("b"), Check()), why="a kernel runs on the CPU"),
        ),
        (Ref("c"), S0 + u, None),
        ("k0", "k1"),
        ("body 0",),
        ((4, "softmax"),),
        results=(half, None, wide),
        saved=(2,),
    )


def schedule() -> Schedule:
    """One kernel launched twice, a view and a call."""
    g, k = calls(), row_softmax()
    view, mm, *_ = g.nodes
    assert isinstance(view, View) and isinstance(mm, Extern)
    twice = (Launch(k, ("x", "mm"), (), ("softmax", "model.py:7")), Launch(k, ("mm", "x")))
    again = Launch(replace(k, tile=TileConfig(grain=2)), ("x", "mm"))
    return Schedule(g, (view, *twice, again, mm), (Rejected("mm", "p", 'a "call"'),))


def tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
