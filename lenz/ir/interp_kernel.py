"""The oracle for kernels: runs the loop tree literally, and checks every access.

Loops are Python loops; the innermost one runs on vectors if its body loads nothing that it stores.
It checks bounds, reads of unwritten elements, stores to inputs, and parallel iterations that touch
the same element.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from lenz.errors import InternalError, UserError
from lenz.ir import kernel
from lenz.ir.dtype import I64, DType
from lenz.ir.expr import Expr, loads_of
from lenz.ir.graph import ReduceKind, ScanKind, UpdateMode, identity_of
from lenz.ir.interp_expr import Fault, Value, evaluate_exprs, sym_value, with_bound
from lenz.ir.kernel import Kernel, position
from lenz.ir.printer import show_node
from lenz.ir.tensor import Axis
from lenz.records import dataclass, field
from lenz.sym import Var

FAR = 1 << 62  # position of an empty argmax


def interp_kernel(k: Kernel, buffers: Mapping[str, torch.Tensor], sizes: Mapping[str, int]) -> None:
    """Run a kernel on flat 1-D tensors, one per parameter, by name; stores change them.

    `sizes` has the value of every size by name. Raises UserError for buffers that do not fit, and
    InternalError with the broken rule and the statement for an illegal access.
    """
    env: dict[Var, Value] = {}
    for v in k.sizes:
        if v.name not in sizes:
            raise UserError(f"no value for the size {v.name} of kernel @{k.name}")
        env[v] = sizes[v.name]
    run = _Run(k)
    for p in k.params:
        t = buffers[p.name]
        n = int(sym_value(p.size, env))
        if t.dim() != 1 or t.dtype is not p.dtype.torch or t.numel() < n:
            raise UserError(f"buffer %{p.name} must be {p.dtype}[{n}], is {t.dtype}{list(t.shape)}")
        run.memory[p.name] = _Memory(t[:n], p.mode)
        if p.mode == "work":
            if bool(t[:n].any()):
                raise InternalError(f"%{p.name} is not zero at the launch", rule="work-only")
            t[:n] = 1  # no launch reuses that of another
    for x in k.locals:
        run.memory[x.name] = _Memory(torch.zeros(x.size, dtype=x.dtype.torch), None)
    run.block(k.body, env, {})


class _Memory:
    """One buffer, its written elements, and the parallel iterations that wrote them."""

    def __init__(self, data: torch.Tensor, mode: kernel.Mode | None) -> None:
        self.data = data
        self.mode = mode  # None for a Local
        self.is_written = torch.full(data.shape, mode in ("in", "inout"))
        self.owner = torch.full(data.shape, -1, dtype=torch.int64)


@dataclass(slots=True)
class _Accumulator:
    """A running reduction: one value per point of the lanes."""

    stmt: kernel.Reduce
    lanes: tuple[Axis, ...]
    over: tuple[Axis, ...]
    value: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    position: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def is_arg(self) -> bool:
        return self.stmt.kind in ("argmax", "argmin")

    def start(self, env: Mapping[Var, Value]) -> None:
        """Fill with the identity."""
        dtype = self.stmt.value.dtype
        shape = [int(sym_value(a.extent, env)) for a in self.lanes]
        self.value = torch.full(shape, identity_of(self.stmt.kind, dtype), dtype=dtype.torch)
        self.position = torch.full(shape, FAR, dtype=torch.int64)

    def take(self, value: torch.Tensor, env: dict[Var, Value], lane: Axis | None) -> None:
        """Accumulate a value; `lane` is the loop that runs on vectors, if any."""
        kind, dtype = self.stmt.kind, self.stmt.value.dtype
        is_over = lane is not None and lane in self.over
        if lane is not None:
            value = value.expand(torch.as_tensor(env[lane.var]).shape)
        where = tuple(torch.as_tensor(env[a.var]) for a in self.lanes)
        if not self.is_arg:
            new = reduce_last(kind, value, dtype) if is_over else value
            self.value[where] = reduce_last(kind, _pairs(self.value[where], new), dtype)
            return
        if is_over and lane is not None:
            value, at = arg_last(kind, value)
            env = {**env, lane.var: at}
        found = torch.as_tensor(sym_value(position(self.over), env))
        # The earlier one comes first, so that it wins among equals.
        places, order = _pairs(self.position[where], found).sort(-1)
        pairs = _pairs(self.value[where], value).gather(-1, order)
        self.value[where], pick = arg_last(kind, pairs)
        self.position[where] = places.gather(-1, pick.unsqueeze(-1)).squeeze(-1)

    def result(self) -> torch.Tensor:
        """The reduced values, over the lanes."""
        return self.position if self.is_arg else self.value


@dataclass(frozen=True, slots=True)
class _Lanes:
    """A value per point of some loops, by the loop variables."""

    value: torch.Tensor
    vars: tuple[Var, ...]


def _accumulators(body: tuple[kernel.Stmt, ...]) -> dict[int, list[_Accumulator]]:
    """The reductions by the loop (its id) that ends them: the outermost that they run over."""
    found: dict[int, list[_Accumulator]] = {}
    for s, path in kernel.in_loops(body):
        if not isinstance(s, kernel.Reduce):
            continue
        inside = [f for f in path if f.axis.var in s.over]
        if not inside or len(inside) != len(s.over):
            what = f"{s.name} is reduced over a loop that is not around it"
            raise InternalError(what, rule="reduce-over-enclosing")
        axes = [f.axis for f in path[path.index(inside[0]) :]]
        lanes = tuple(a for a in axes if a.var not in s.over)
        over = tuple(next(a for a in axes if a.var is v) for v in s.over)
        found.setdefault(id(inside[0]), []).append(_Accumulator(s, lanes, over))
    return found


class _Run:
    """The state of one run of a kernel."""

    def __init__(self, k: Kernel) -> None:
        self.k = k
        self.memory: dict[str, _Memory] = {}
        self.open: dict[int, list[_Accumulator]] = _accumulators(k.body)
        self.active: dict[int, _Accumulator] = {}
        self.iteration: Value | None = None  # of the enclosing parallel loops; None outside
        self.lane: Axis | None = None  # the loop that runs on vectors
        self.path: list[Axis] = []  # the enclosing loops
        self.running: dict[tuple[int, ...], torch.Tensor] = {}  # of scans, by the loops inside
        self.types: dict[str, DType] = {"%" + p.name: p.dtype for p in k.params}

    def block(
        self, body: tuple[kernel.Stmt, ...], env: dict[Var, Value], refs: dict[str, _Lanes]
    ) -> None:
        """Run statements in order; their values are added to `refs`."""
        for s in body:
            match s:
                case kernel.For():
                    self.loop(s, env, refs, len(body) == 1)
                case kernel.If():
                    holds = sym_value(s.lower, env) < sym_value(s.upper, env)
                    self.block(s.then if holds else s.orelse, env, dict(refs))
                case kernel.Let(name, value):
                    refs[name] = _Lanes(self.value(value, env, refs), ())
                case kernel.Reduce(_, _, value):
                    self.active[id(s)].take(self.value(value, env, refs), env, self.lane)
                case kernel.Scan():
                    refs[s.name] = _Lanes(self.scan(s, self.value(s.value, env, refs), env), ())
                case kernel.Sort():
                    self.sort(s, env)
                case kernel.Store():
                    self.store(s, env, refs)

    def value(self, e: Expr, env: dict[Var, Value], refs: dict[str, _Lanes]) -> torch.Tensor:
        """The value of an expression at this point of the loops."""
        return self.values((e,), env, refs)[0]

    def values(
        self, roots: tuple[Expr, ...], env: dict[Var, Value], refs: dict[str, _Lanes]
    ) -> list[torch.Tensor]:
        """Values of several expressions."""

        def value_of(name: str) -> torch.Tensor:
            found = refs.get(name)
            if found is None:
                raise InternalError(f"no value is called {name} here", rule="ref-scope")
            if not found.vars:
                return found.value
            return found.value[tuple(torch.as_tensor(env[v]) for v in found.vars)]

        return evaluate_exprs(roots, env, value_of, self.read)

    def loop(
        self, f: kernel.For, env: dict[Var, Value], refs: dict[str, _Lanes], is_alone: bool
    ) -> None:
        """Run a loop, then publish the reductions that it ends."""
        n = int(sym_value(f.axis.extent, env))
        outer = self.iteration
        splits = f.kind in ("parallel", "grid") and (outer is None or is_alone)
        if splits and outer is None:
            for m in self.memory.values():
                m.owner.fill_(-1)
        ending = self.open.get(id(f), [])
        for acc in ending:
            acc.start(env)
            self.active[id(acc.stmt)] = acc
        inner = dict(refs)
        self.path.append(f.axis)
        before: Value = 0 if outer is None else outer
        if n > 0 and _is_vector(f) and not (splits and self.k.locals):
            lanes = torch.arange(n)
            self.iteration = before * n + lanes if splits else outer
            self.lane = f.axis
            self.block(f.body, {**env, f.axis.var: lanes}, inner)
            self.lane = None
        else:
            for i in range(n):
                if splits:
                    self.iteration = before * n + i
                    for x in self.k.locals:  # each iteration has its own
                        self.memory[x.name].is_written.fill_(False)
                self.block(f.body, {**env, f.axis.var: i}, inner)
        self.iteration = outer
        self.path.pop()
        for acc in ending:
            refs[acc.stmt.name] = _Lanes(acc.result().clone(), tuple(a.var for a in acc.lanes))

    def scan(self, s: kernel.Scan, value: torch.Tensor, env: dict[Var, Value]) -> torch.Tensor:
        """The running value at this point of the loops."""
        if self.lane is not None:
            value = value.expand(torch.as_tensor(env[self.lane.var]).shape)
            if self.lane.var is s.over:
                n = s.every or max(value.numel(), 1)
                parts = [value[k : k + n] for k in range(0, value.numel(), n)]
                value = torch.cat([scan_last(s.kind, part) for part in parts])
                if s.back is None:
                    return value
        over = (s.over,) if s.back is None else (s.back.block, s.over)
        at = next(k for k, a in enumerate(self.path) if a.var in over)
        inside = [a for a in self.path[at:] if a.var not in over and a is not self.lane]
        key = (id(s), *(int(env[a.var]) for a in inside))
        is_lane = self.lane is not None and self.lane.var is s.over
        firsts = [0 if v is s.over and is_lane else env[v] for v in over]
        if any(x % s.every if s.every else x for x in firsts):
            value = scan_last(s.kind, _pairs(self.running[key], value))[..., -1]
        self.running[key] = value[-1] if is_lane else value
        return value

    def sort(self, s: kernel.Sort, env: dict[Var, Value]) -> None:
        """Sort the elements of a local; those after the kept ones become undefined."""
        m = self.memory[s.buffer]
        size, keep = (int(sym_value(x, env)) for x in (s.size, s.keep))
        if not bool(m.is_written[:size].all()):
            raise InternalError(f"%{s.buffer} is sorted before it is full", rule="sort-local")
        m.data[:size] = m.data[:size].sort()[0]
        m.is_written[keep:] = False

    def read(self, e: Expr, index: list[Value]) -> tuple[torch.Tensor, Fault | None]:
        """Elements by flat offset, and the points where reading is an error."""
        name = e.attrs[0]
        m = self.memory[name]
        at = torch.as_tensor(index[0])
        n = m.data.numel()
        outside = (at < 0) | (at >= n)
        if n == 0:
            inside = torch.zeros(at.shape, dtype=m.data.dtype)
            unwritten = foreign = torch.full(at.shape, False)
        else:
            safe = at.clamp(0, n - 1)
            inside = m.data[safe].clone()  # an index without dimensions gives a view
            unwritten = ~m.is_written[safe]
            foreign = torch.tensor(False)
            if self.iteration is not None and m.mode is not None:
                owner = m.owner[safe]
                foreign = (owner != -1) & (owner != torch.as_tensor(self.iteration))

        def why(shape: tuple[int, ...], place: tuple[int, ...]) -> str:
            text = f"%{name} is read at {int(at.expand(shape)[place])}"
            if bool(outside.expand(shape)[place]):
                return f"{text}, it has {n} elements"
            if bool(unwritten.expand(shape)[place]):
                return f"{text}, which nothing has written"
            return f"{text}, which another parallel iteration wrote"

        return inside, Fault(outside | unwritten | foreign, why)

    def store(self, s: kernel.Store, env: dict[Var, Value], refs: dict[str, _Lanes]) -> None:
        """Write the elements, one by one if an offset repeats."""
        m = self.memory[s.buffer]
        value, *bound = self.values((s.value, *s.bound), env, refs)
        at = torch.as_tensor(sym_value(s.offset, with_bound((s.offset,), bound, env)))
        shape = torch.Size() if self.lane is None else torch.as_tensor(env[self.lane.var]).shape
        at, value = at.expand(shape).reshape(-1), value.expand(shape).reshape(-1)
        if value.dtype is not m.data.dtype:
            raise self._error(s, "dtype", f"%{s.buffer} holds {m.data.dtype}, not {value.dtype}")
        if m.mode == "in":
            raise self._error(s, "store-mode", f"%{s.buffer} is only read")
        n = m.data.numel()
        wrong = (at < 0) | (at >= n)
        if bool(wrong.any()):
            first = int(at[wrong][0])
            raise self._error(s, "in-bounds", f"%{s.buffer} has {n} elements, not one at {first}")
        who = torch.as_tensor(-1 if self.iteration is None else self.iteration).expand(at.shape)
        if torch.unique(at).numel() < at.numel():
            for k in range(at.numel()):
                self._write(s, m, at[k : k + 1], value[k : k + 1], who[k : k + 1])
        else:
            self._write(s, m, at, value, who)

    def _write(
        self, s: kernel.Store, m: _Memory, at: torch.Tensor, value: torch.Tensor, who: torch.Tensor
    ) -> None:
        clash = (m.owner[at] != -1) & (m.owner[at] != who)
        if s.mode != "set" and self.k.tile.warps:  # updates are atomic on a GPU
            clash &= False
        if self.iteration is not None and m.mode is not None and bool(clash.any()):
            what = f"two parallel iterations write %{s.buffer} at {int(at[clash][0])}"
            raise self._error(s, "parallel-write", what)
        update(m.data, at, value.clone(), s.mode)  # the value may be a view of the same memory
        m.is_written[at] = True
        m.owner[at] = who

    def _error(self, s: kernel.Store, rule: str, what: str) -> InternalError:
        return InternalError(what, rule=rule, line=show_node(s, self.types))


def _pairs(*both: torch.Tensor) -> torch.Tensor:
    shape = max((x.shape for x in both), key=len)  # each is a scalar or has one value per lane
    return torch.stack([x.expand(shape) for x in both], -1)


def _is_vector(f: kernel.For) -> bool:
    """True for an innermost loop whose iterations do not see each other's stores."""
    if any(kernel.bodies_of(s) for s in f.body):
        return False
    stored = {s.buffer for s in kernel.walk(f.body) if isinstance(s, kernel.Store)}
    return not any(e.attrs[0] in stored for e in loads_of(*kernel.exprs_of(f.body)))


# Reductions, scans and updates, shared by both interpreters.

_WIDE = {torch.uint16: torch.int64, torch.uint32: torch.int64, torch.uint64: torch.int64}


def reduce_last(kind: ReduceKind, x: torch.Tensor, dtype: DType) -> torch.Tensor:
    """Reduce the last dimension; an empty one gives the identity (an error for a position)."""
    if x.shape[-1] == 0:
        if kind in ("argmax", "argmin"):
            raise InternalError(f"{kind} over no elements", rule="reduce-empty")
        return torch.full(x.shape[:-1], identity_of(kind, dtype), dtype=dtype.torch)
    if kind in ("argmax", "argmin"):
        return arg_last(kind, x)[1]
    if kind in ("max", "min"):
        return arg_last("argmax" if kind == "max" else "argmin", x)[0]
    return _REDUCTIONS[kind](x.to(_WIDE.get(x.dtype, x.dtype))).to(dtype.torch)


_REDUCTIONS: Mapping[ReduceKind, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda x: torch.sum(x, -1, dtype=x.dtype),
    "prod": lambda x: torch.prod(x, -1, dtype=x.dtype),
    "any": lambda x: torch.any(x, -1),
    "all": lambda x: torch.all(x, -1),
}
_SCANS: Mapping[ScanKind, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda x: _running_sums(x),
    "prod": lambda x: torch.cumprod(x, -1, dtype=x.dtype),
    "max": lambda x: torch.cummax(x, -1).values,
    "min": lambda x: torch.cummin(x, -1).values,
    "logaddexp": lambda x: torch.logcumsumexp(x, -1),
}


def _running_sums(x: torch.Tensor) -> torch.Tensor:
    """Like `cumsum`, but without its initial 0.0, which drops -0.0."""
    zeros = torch.cumprod((x == 0) & torch.signbit(x), -1).bool()
    return torch.where(zeros, x, torch.cumsum(x, -1, dtype=x.dtype))


_UPDATES = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


def scan_last(kind: ScanKind, x: torch.Tensor) -> torch.Tensor:
    """Running values along the last dimension."""
    return _SCANS[kind](x)


def update(flat: torch.Tensor, at: torch.Tensor, value: torch.Tensor, mode: UpdateMode) -> None:
    """Write or combine elements of a 1-d tensor in place; repeated positions in order."""
    if mode == "add" and flat.dtype in (torch.bfloat16, torch.float16):  # rounds after each value
        flat.index_add_(0, at, value)
    elif mode != "set":
        flat.scatter_reduce_(0, at, value, _UPDATES[mode])
    elif torch.unique(at).numel() == at.numel():
        flat[at] = value
    else:
        for k in range(at.numel()):
            flat[at[k]] = value[k]


def arg_last(kind: ReduceKind, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The extremum over the last dimension (NaN wins), and its lowest position."""
    same = wide = x.to(_WIDE.get(x.dtype, x.dtype))
    if x.dtype is torch.uint64:
        wide = wide ^ torch.iinfo(torch.int64).min  # keeps the order of unsigned numbers
    best = torch.amax(wide, -1) if kind == "argmax" else torch.amin(wide, -1)
    hit = wide == best.unsqueeze(-1)
    if x.is_floating_point():
        hit = hit | torch.isnan(wide)
    far = torch.full((), x.shape[-1], dtype=I64.torch)
    position = torch.where(hit, torch.arange(x.shape[-1]), far).amin(-1)
    return torch.gather(same, -1, position.unsqueeze(-1)).squeeze(-1).to(x.dtype), position
