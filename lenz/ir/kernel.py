"""The kernel level: explicit loops over flat offsets. Every decision is in here as data.

A kernel is a list of phases that run one after the other. On CPUs each phase is a "parallel" loop
around the rest, and all its iterations end before the next phase starts. Phases that are all "grid"
loops run side by side on a GPU: the first programs run the first one. Offsets are flat, in elements
from the base pointer of the parameter.

    kernel @softmax_0 reduction (%x: in f32[1024*s0], %y: out f32[1024*s0]; s0: 1..) {
      for i in s0 : parallel {
        for r in 1024 : vector { m = reduce max { load(%x, [1024*i + r]) } over r }
        for r in 1024 : vector { d = reduce sum { exp(sub(load(%x, [1024*i + r]), m)) } over r }
        for r in 1024 : vector { store(%y, [1024*i + r], div(exp(sub(...)), d)) }
      }
    }

Meaning of the statements:
- `For(axis, kind, body)`: the extent may depend on variables of enclosing loops. The kind says how
  the iterations run; it never changes the result, but "parallel" and "grid" promise that no
  iteration reads another's writes.
- `If(lower, upper, then, orelse)`: runs `then` if lower < upper, else `orelse`. Both bounds are the
  same for all lanes, so that all threads of a program run the same body. Names defined in a body
  end with it: its reductions and scans run over loops inside it.
- `Let(name, value)`: visible to the statements after it in the same and nested bodies.
- `Reduce(name, kind, value, over)`: accumulates over the enclosing loops named in `over`; the
  result is `ref(name)` after the outermost of them has closed. Enclosing loops inside that loop
  that are not in `over` index an array of accumulators: a later loop over the *same* Var reads its
  own lane (sum over the rows of a panel of columns).
- `Scan(name, kind, value, over)`: inside the loop over the variable `over` (which is not parallel),
  `ref(name)` after this statement is the fold of the values up to and including this iteration.
  Loops between that one and the statement have one running value per iteration. With `back` the
  fold continues from program to program of a GPU's grid: see `LookBack`. With `every` it restarts
  wherever the variable is a multiple of that number: short contiguous rows.
- `Sort(buffer, size, keep)`: the first `size` elements of a local in ascending order, only the
  first `keep` may be read: `sort(%l0, 512, keep 10)`.
- `Store(buffer, offset, value)`: `@k` in the offset is bound[k]. With a mode other than "set" the
  element becomes the sum (product, maximum, minimum) of its old value and the new one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import chain
from typing import Any, ClassVar, Literal, TypeAlias

from lenz.ir.dtype import DType
from lenz.ir.expr import Expr, loads_of, nodes_of, reindex, renaming
from lenz.ir.graph import Extern, Graph, ReduceKind, ScanKind, UpdateMode, View, acc_dtype
from lenz.ir.op import LOAD, MASKED, REF
from lenz.ir.syntax import exprs_in, map_fields, map_values, slots_in
from lenz.ir.tensor import Axis
from lenz.records import dataclass, field, replace
from lenz.sym import ONE, ZERO, Min, Sym, Var, maximum, minimum, product, substitute, sym
from lenz.target import HOST

LoopKind = Literal["grid", "lane", "vector", "parallel", "unroll", "seq"]
Mode = Literal["in", "out", "inout", "work"]
KernelKind = Literal[
    "pointwise", "reduction", "outer_reduction", "transpose", "scan", "split_scan", "sort",
    "scatter", "combo",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Param:
    """A pointer parameter. `size`: accessible elements from the base pointer.

    `aligned`: the launcher ensures that the pointer is a multiple of 16 bytes. Memory of mode
    "work" is i64 and zero at each launch; only scans with `back` change it.
    """

    SYNTAX: ClassVar = ("{name:def}: {mode:mode} {dtype:dtype}[{size:sym}]", "? aligned")
    name: str
    dtype: DType
    size: Sym
    mode: Mode
    aligned: bool = False


@dataclass(frozen=True, slots=True)
class Local:
    """Scratch of one parallel iteration, `size` elements, on the stack or in registers.

    On a GPU it is a row of a tile: loops that access it are loops of lanes.
    """

    SYNTAX: ClassVar = ("local {name:def}: {dtype:dtype}[{size:int}]",)
    name: str
    dtype: DType
    size: int


@dataclass(frozen=True, slots=True)
class For:
    """A loop."""

    SYNTAX: ClassVar = ("for {axis:loop} : {kind:loop_kind} {body:stmts}",)
    axis: Axis
    kind: LoopKind
    body: tuple[Stmt, ...]


@dataclass(frozen=True, slots=True)
class If:
    """One of two bodies; the first is not empty."""

    SYNTAX: ClassVar = ("if {lower:sym} < {upper:sym} {then:stmts}", "? else {orelse:stmts}")
    lower: Sym
    upper: Sym
    then: tuple[Stmt, ...]
    orelse: tuple[Stmt, ...] = ()


@dataclass(frozen=True, slots=True)
class Let:
    """A named value."""

    SYNTAX: ClassVar = ("{name:name} = {value:value}",)
    name: str
    value: Expr

    @property
    def dtype(self) -> DType:
        """Type of the value."""
        return self.value.dtype


@dataclass(frozen=True, slots=True)
class Reduce:
    """An accumulation over enclosing loops."""

    SYNTAX: ClassVar = (
        "{name:name} = reduce {kind:reduction} {value:block} over {over:loop_vars}",
    )
    name: str
    kind: ReduceKind
    value: Expr
    over: tuple[Var, ...]

    @property
    def dtype(self) -> DType:
        """Type of the result."""
        return acc_dtype(self.kind, self.value.dtype)


@dataclass(frozen=True, slots=True)
class LookBack:
    """How a scan continues the results of earlier programs of the grid loop over `block`.

    A program publishes the fold of its own elements in `work`. The last of each `group` of programs
    also publishes that of its group, and the last of `group` groups that of all elements so far.
    Each program folds the results of lower blocks in the order of their numbers, no matter which
    was first, so that the bits of a scan are reproducible. `at` is the first word of the row: see
    `slots`, `words`.
    """

    SYNTAX: ClassVar = ("{block:loop_var} by {work:writes}[{at:sym}] group {group:int}",)
    block: Var
    work: str
    at: Sym
    group: int


@dataclass(frozen=True, slots=True)
class Scan:
    """A running accumulation along one enclosing loop."""

    SYNTAX: ClassVar = (
        "{name:name} = scan {kind:scan} {value:block} over {over:loop_var}",
        "? every {every:int}",
        "? behind {back:look_back}",
    )
    name: str
    kind: ScanKind
    value: Expr
    over: Var
    back: LookBack | None = None
    every: int = 0

    @property
    def dtype(self) -> DType:
        """Type of the result."""
        return self.value.dtype


@dataclass(frozen=True, slots=True)
class Sort:
    """Sorts the elements of a local. `keep` is at most `size`."""

    SYNTAX: ClassVar = ("sort({buffer:writes}, {size:sym}", "?, keep {keep=size:sym}", ")")
    buffer: str
    size: Sym
    keep: Sym


@dataclass(frozen=True, slots=True)
class Store:
    """A write of one element, or an update of it by `mode`."""

    SYNTAX: ClassVar = (
        "store",
        "? {mode:update}",
        "({buffer:writes}, [{offset:place}], {value:value}{bound=offset:bound})",
    )
    buffer: str
    offset: Sym
    value: Expr
    bound: tuple[Expr, ...] = ()
    mode: UpdateMode = "set"


Stmt: TypeAlias = For | If | Let | Reduce | Scan | Sort | Store


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Numbers that the emitter uses unchanged.

    grain     fewest parallel iterations of a task (1 or more)
    unroll    interleaved copies of a vector loop body
    rows      rows per pass of a loop over column accumulators
    warps     warps of 32 threads per program of a GPU's grid; 0 on CPUs
    stages    loads of a loop in flight at once on a GPU (Triton's num_stages)
    registers register limit per GPU thread; 0 leaves it to the assembler
    """

    grain: int = 1
    unroll: int = 2
    rows: int = 16
    warps: int = 0
    stages: int = 1
    registers: int = 0


@dataclass(frozen=True, slots=True)
class Kernel:
    """One launch: parameters in call order (pointers, then sizes as i64), phases, configuration."""

    SYNTAX: ClassVar = (
        "kernel @{name:name} {kind:kernel_kind} ({params:params}{sizes=params:sizes})",
        "? tile({tile:tile})",
        " {body:kernel_body}",
    )
    name: str
    kind: KernelKind
    params: tuple[Param, ...]
    sizes: tuple[Var, ...]
    body: tuple[Stmt, ...]
    locals: tuple[Local, ...] = ()
    tile: TileConfig = TileConfig()


def bodies_of(s: Stmt) -> tuple[tuple[Stmt, ...], ...]:
    """The bodies of a statement: a loop has one, a branch two, others none."""
    return tuple([slot.get(s) for slot in slots_in(s, _BODIES)])


def map_bodies(s: Stmt, f: Callable[[tuple[Stmt, ...]], tuple[Stmt, ...]]) -> Stmt:
    """The statement with f applied to each of its bodies."""
    return map_fields(s, _BODIES, f)


def in_loops(
    body: tuple[Stmt, ...], loops: tuple[For, ...] = ()
) -> Iterator[tuple[Stmt, tuple[For, ...]]]:
    """Every statement with the loops around it, outer before inner."""
    for s in body:
        yield s, loops
        for inner in bodies_of(s):
            yield from in_loops(inner, (*loops, s) if isinstance(s, For) else loops)


def walk(body: tuple[Stmt, ...]) -> Iterator[Stmt]:
    """Every statement, outer before inner."""
    return (s for s, _ in in_loops(body))


def exprs_of(body: tuple[Stmt, ...]) -> list[Expr]:
    """Every expression in the statements, in order."""
    return [e for s in walk(body) for e in exprs_in(s)]


def map_leaves(body: tuple[Stmt, ...], f: Callable[[Stmt], Stmt]) -> tuple[Stmt, ...]:
    """The statements with f applied to each that has no body."""
    within = lambda inner: map_leaves(inner, f)
    return tuple([map_bodies(s, within) if bodies_of(s) else f(s) for s in body])


def moved(s: Stmt | LookBack, at: Mapping[Var, Sym], over: bool = False) -> Any:
    """A statement over other variables; with `over`, also where it names enclosing loops."""
    new = lambda x: substitute(x, at) if isinstance(x, Sym) else tuple([at.get(v, v) for v in x])
    kinds = _MOVED | _LOOPS if over else _MOVED
    return _with_fields(map_values(s, lambda e: reindex(e, at)), kinds, new)


def renamed(body: tuple[Stmt, ...], names: Mapping[str, str]) -> tuple[Stmt, ...]:
    """The statements with renamed buffers."""
    name_of = lambda name: names.get(name, name)
    change = renaming(name_of)
    return map_leaves(body, lambda s: _with_fields(map_values(s, change), _WRITES, name_of))


def _with_fields(s: Stmt | LookBack, kinds: frozenset[str], f: Callable[[Any], Any]) -> Any:
    """The statement with each field of some kinds replaced by f of it; also within a look-back."""

    def new(x: Any) -> Any:
        return _with_fields(x, kinds, f) if isinstance(x, LookBack) else x if x is None else f(x)

    return map_fields(s, kinds, new)


def syms_in(s: Stmt | LookBack) -> Iterator[Sym]:
    """The sizes and offsets in a statement itself."""
    for slot in slots_in(s, _MOVED | {"look_back"}):
        value = slot.get(s)
        if isinstance(value, Sym):
            yield value
        elif value is not None:
            yield from syms_in(value)


_BODIES = frozenset({"stmts"})
_WRITES = frozenset({"writes", "look_back"})
_MOVED = frozenset({"sym", "place"})
_LOOPS = frozenset({"loop_var", "loop_vars", "look_back"})


def position(over: Sequence[Axis]) -> Sym:
    """The number of an element over the axes of loops, outermost first.

    A split axis counts with its own length, not with that of its blocks: the last one is shorter.
    """
    at, step = sym(0), sym(1)
    blocks: dict[Var, tuple[Sym, Sym]] = {}  # the step of the blocks, and that outside of them
    for a in reversed(over):
        own, step = blocks.get(a.var, (step, step * a.extent))
        at = at + a.var * own
        cut = [b.var for b in over if b.var in a.extent.free_vars]
        if cut and a.extent.hi is not None:
            ends = a.extent.args if isinstance(a.extent, Min) else (a.extent,)
            length = reduce(minimum, [e for e in ends if cut[0] in e.free_vars])
            blocks[cut[0]] = own * a.extent.hi, own * substitute(length, {cut[0]: ZERO})
    return at


def digits(axes: Sequence[Axis], position: Sym) -> dict[Var, Sym]:
    """The indices of element `position` in row-major order over the axes."""
    if len(axes) == 1:
        return {axes[0].var: position}
    if any(a.extent is ZERO for a in axes):  # no elements, and no divisor
        return {a.var: ZERO for a in axes}
    at: dict[Var, Sym] = {}
    step: Sym = ONE
    for k in reversed(range(len(axes))):
        digit = position // step
        at[axes[k].var] = digit if k == 0 else digit % axes[k].extent
        step = step * axes[k].extent
    return at


def slots(blocks: Sym, group: int) -> Sym:
    """The number of results of one row's programs: of each, each group, each group of groups.

    They are stored in this order, each in `words` of 64 bits. The last block of a row has none.
    """
    before = maximum(blocks - 1, ZERO)
    return before + before // group + before // (group * group)


def words(dtype: DType) -> int:
    """64-bit words of a result in a workspace: each has 32 bits of data, the rest is a flag."""
    return 2 if dtype.bytes == 8 else 1


def around(body: tuple[Stmt, ...], kind: LoopKind) -> tuple[list[Axis], tuple[Stmt, ...]]:
    """The axes of the loops of a kind that enclose the whole body, and what stands in them."""
    axes: list[Axis] = []
    while len(body) == 1 and isinstance(body[0], For) and body[0].kind == kind:
        axes.append(body[0].axis)
        body = body[0].body
    return axes, body


def grids(k: Kernel) -> tuple[Kernel, ...]:
    """One kernel per grid of a GPU kernel. The next programs run the next grid."""
    several = all(isinstance(s, For) and s.kind == "grid" for s in k.body)
    return tuple([replace(k, body=(s,)) for s in k.body]) if several and k.body[1:] else (k,)


def buffers_in(k: Kernel) -> tuple[list[str], list[str]]:
    """The parameters and locals that a kernel reads, and those that it writes, in order of use."""
    stores = [s.buffer for s in walk(k.body) if isinstance(s, (Store, Sort))]
    return [e.attrs[0] for e in loads_of(*exprs_of(k.body))], stores


def split_grids(k: Kernel) -> list[tuple[Kernel, tuple[str, ...]]]:
    """One kernel per grid with parameters of its own, in order of use, and their names in `k`."""
    if len(parts := grids(k)) == 1:
        return [(k, tuple([p.name for p in k.params]))]
    found = []
    known = {x.name: x for x in chain[Param | Local](k.params, k.locals)}
    for part in parts:
        used = [known[n] for n in dict.fromkeys(chain(*buffers_in(part)))]
        new = {x.name: f"a{n}" for n, x in enumerate(used)}
        own = [replace(x, name=new[x.name]) for x in used]
        params = tuple([x for x in own if isinstance(x, Param)])
        scratch = tuple([x for x in own if isinstance(x, Local)])
        body = renamed(part.body, new)
        given = tuple([x.name for x in used if isinstance(x, Param)])
        found.append((replace(part, params=params, body=body, locals=scratch), given))
    return found


def programs(k: Kernel) -> Sym:
    """The number of programs of a GPU kernel's grids."""
    sizes = [product([a.extent for a in around(part.body, "grid")[0]]) for part in grids(k)]
    return sum(sizes, ZERO)


def branches(k: Kernel) -> tuple[Kernel, ...]:
    """One kernel per grid, or per body of the top-level branch; () if there is only one."""
    if (parts := grids(k))[1:]:
        return parts
    match k.body:
        case (For(_, "grid", body) as f,):
            inner = branches(replace(k, body=body))
            return tuple([replace(x, body=(replace(f, body=x.body),)) for x in inner])
        case (If(_, _, then, orelse),):
            return replace(k, body=then), replace(k, body=orelse)
    return ()


def overwrites_safely(k: Kernel, read: str, written: str) -> bool:
    """True if no thread can store to `written` before another has loaded the element of `read`.

    Threads of a GPU program are not synchronised, and a load may distribute elements differently
    from a store. But a value is stored only after its operands are loaded: so the only load of
    `read` must be in the value of the only store to `written`, and not in a masked value.
    """
    if taken := branches(k):
        return all(overwrites_safely(b, read, written) for b in taken)
    lets = {s.name: s.value for s in walk(k.body) if isinstance(s, Let)}
    stores = [s for s in walk(k.body) if isinstance(s, Store) and s.buffer == written]
    nodes = nodes_of(*exprs_of(k.body))
    loads = [e for e in nodes if e.op is LOAD and e.attrs[0] == read]
    if not loads:
        return True
    if len(stores) != 1 or len(loads) != 1 or any(e.op is MASKED for e in nodes):
        return False
    value = stores[0].value
    while value.op is REF and value.attrs[0] in lets:
        value = lets[value.attrs[0]]
    return loads[0] in nodes_of(value)


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel with its arguments, one buffer per parameter.

    `candidates` compute the same with other tiles, and `tune` picks one: the kernel itself, then
    one per requested shape. They are not part of the text. `origins` are the FX nodes that this
    launch computes, and the user's lines: launches of the same kernel differ in them. `device` runs
    the kernel.
    """

    SYNTAX: ClassVar = ("launch @{kernel:kernel}({args:use*})", "? on {device:word}")
    kernel: Kernel
    args: tuple[str, ...]
    candidates: tuple[Kernel, ...] = field(default=(), compare=False)
    origins: tuple[str, ...] = field(default=(), compare=False)
    device: str = HOST


@dataclass(frozen=True, slots=True)
class Rejected:
    """Two computations that were not fused, and why."""

    SYNTAX: ClassVar = ("reject {first:string} {second:string} {why:string}",)
    first: str
    second: str
    why: str


@dataclass(frozen=True, slots=True)
class Schedule:
    """The graph as an ordered list of launches, library calls and views."""

    graph: Graph
    steps: tuple[Launch | Extern | View, ...]
    rejected: tuple[Rejected, ...] = ()
