"""FX graph -> ir.Graph: one pass over the nodes, each lowered once."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node as FxNode

from lenz.context import Context
from lenz.debug.blame import blaming
from lenz.errors import Unsupported
from lenz.ir.dtype import C32, MOVED, NATIVE, DType, dtype_of
from lenz.ir.graph import LOOPS, Atom, Graph, Named, Node, Reduction, Ref, Scatter, View, atom_refs
from lenz.ir.tensor import Buffer, Layout, TensorType
from lenz.lower import user_kernel
from lenz.lower.builder import Decline, GraphBuilder, Value, take_back
from lenz.lower.complex import PARTS, Complex, Complexes
from lenz.lower.fallback import call_eager, is_object, move
from lenz.lower.program import Program
from lenz.lower.registry import Entry, entry_for
from lenz.machines import runs_programs, types
from lenz.records import dataclass, field, replace
from lenz.sym import ONE, ZERO, Int, Sym, Var, guess, maximum, prove_le, sym
from lenz.traits import has

SHARED = "elements of the result may share memory"
ASSERTION = "_assert_scalar.default"
OFFSET = torch.ops.aten.sym_storage_offset.default


def lower(p: Program, cx: Context, refused: frozenset[str] = frozenset()) -> Graph:
    """Lower every node of a program. An op without a lowering becomes an `Extern`.

    All operands of a loop are on the device of its result: 0-d CPU tensors are moved there once.
    The nodes in `refused` are called in eager, since their kernels do not compile. In deterministic
    programs eager runs ops whose order of additions varies on GPUs; it fixes the order, or raises.
    It also runs `empty`, to fill the memory with NaN or the largest integer.
    Raises Unsupported for a graph with values that the IR cannot represent (sparse, nested or
    quantized tensors, symbolic floats, devices without a machine); the caller then runs it in
    eager.
    """
    b = GraphBuilder(cx.options.eager_random, p.env)
    g = _Walk(p, types(), refused, b, Complexes(b)).run()
    names = [*atom_refs(g.outputs)]
    free = [g.outputs[k] for k in p.saved]
    # AOTAutograd would view a complex result as the base of its views, which is real here.
    is_real = "lenz.view_as_complex" in {getattr(n, "op", "") for n in g.nodes}
    apart = {*names} if is_real else {r for k in p.apart for r in atom_refs(g.outputs[k])}
    nodes = [
        replace(n, detached=True) if isinstance(n, View) and n.out.name in apart else n
        for n in g.nodes
    ]
    alone = [a.name for a in free if isinstance(a, Ref) and names.count(a.name) == 1]
    return replace(g, nodes=tuple(nodes), free=tuple(alone))


@dataclass(slots=True, eq=False)
class _Walk:
    """The state of one lowering; `env` maps FX nodes to their values."""

    p: Program
    devices: frozenset[str]
    refused: frozenset[str]
    b: GraphBuilder
    complexes: Complexes
    moved: dict[tuple[str, str], Value] = field(default_factory=dict)
    env: dict[FxNode, Any] = field(default_factory=dict)
    # Written inputs: placeholder -> new value.
    arguments: dict[FxNode, Value] = field(default_factory=dict)
    inputs: list[Buffer | Sym] = field(default_factory=list)
    constants: list[Buffer] = field(default_factory=list)
    objects: list[str] = field(default_factory=list)
    unaligned: list[str] = field(default_factory=list)
    outputs: tuple[Atom, ...] = ()
    # Variables defined so far, and those that are floats of sizes, not integers.
    sizes: set[Sym] = field(default_factory=set)
    numbers: set[Sym] = field(default_factory=set)

    def run(self) -> Graph:
        for n in self.p.gm.graph.nodes:
            with blaming(n):
                match n.op:
                    case "placeholder":
                        self.placeholder(n)
                    case "get_attr":
                        self.attribute(n)
                    case "call_function":
                        self.call(n)
                    case "output":
                        args = n.args[0] if isinstance(n.args[0], (tuple, list)) else (n.args[0],)
                        self.outputs = tuple(self.atom(self.arguments.get(a, a)) for a in args)
                    case _:
                        raise Unsupported(f"FX node kind {n.op} ({n})")
        return Graph(
            self.p.name,
            tuple(self.inputs),
            tuple(self.b.nodes),
            self.outputs,
            tuple(self.b.mutations),
            tuple(self.constants),
            self.p.env,
            tuple(self.objects),
            unaligned=tuple(self.unaligned),
        )

    def placeholder(self, n: FxNode) -> None:
        val = n.meta.get("val")
        if isinstance(val, torch.Tensor):
            buffer = self.b.define(n.name, self.type_of(val, given=True))
            self.given(*buffer.type.layout.shape, *buffer.type.layout.stride)
            self.inputs.append(buffer)
            self.b.given.append(buffer.name)
            self.env[n] = Value(buffer)
            start = val.storage_offset()
            if isinstance(start, int) and start * val.itemsize % 16:  # a part of another tensor
                self.unaligned.append(buffer.name)
        elif isinstance(val, (int, torch.SymInt)) and not isinstance(val, bool):
            size = self.p.sym(val)
            self.given(size)
            self.inputs.append(size)
            self.env[n] = size
        elif val is None and not n.users:
            # An unused argument still has a position in the call.
            self.inputs.append(self.p.sym(0))
        elif is_object(val) or isinstance(val, torch.SymFloat):
            self.env[n] = passed = Var(f"{n.name}_object")
            self.inputs.append(passed)
            self.given(passed)
            self.numbers.add(passed)
        else:
            raise Unsupported(f"input {n.name} of type {type(val).__name__}")

    def attribute(self, n: FxNode) -> None:
        target = str(n.target)
        tensor = self.p.constants.get(target)
        if tensor is None:
            self.objects.append(target)
            self.env[n] = Named("obj", target)
            return
        buffer = self.b.define(n.name, self.type_of(tensor, given=True))
        self.constants.append(buffer)
        self.env[n] = Value(buffer)

    def call(self, n: FxNode) -> None:
        val = n.meta.get("val")
        is_size = isinstance(val, (torch.SymInt, int)) and not isinstance(val, bool)
        if is_size and not _yields_new_size(n):
            size = self.p.sym(val)
            # Functions of `math` and `round` take floats, which `size` cannot represent.
            known = self.sizes.issuperset(size.free_vars)
            if known or getattr(n.target, "__module__", "") not in ("math", "builtins"):
                self.env[n] = self.size(n, size)
                return
        if n.target is operator.getitem:
            self.env[n] = self.value(n.args[0])[n.args[1]]
            return
        if isinstance(val, torch.SymBool) and _is_data(n):
            # A condition on sizes, as data for the assertion that reads it. Pointers point at first
            # elements, so offsets are never asked for.
            offset = any(isinstance(a, FxNode) and a.target is OFFSET for a in n.args)
            self.env[n] = True if offset else self.data(n)
            return
        if getattr(n.target, "__name__", "") == ASSERTION and self.value(n.args[0]) is True:
            return
        where = self.p.origin(n)
        origin = (n.name, where) if where else (n.name,)
        if user_kernel.is_user_kernel(n):
            self.b.begin(n.meta["user_kernel"].target, origin, ())
            self.env[n] = user_kernel.call_user_kernel(self.b, n, self.env, self.atom, self.type_of)
            return
        written = user_kernel.given_to(n).values() if user_kernel.is_custom_op(n) else None
        if written is not None and all(_is_plain(self.env.get(x)) for x in written):
            self.b.begin(n.name, origin, ())
            self.env[n] = user_kernel.call_custom_op(self.b, n, self.env, self.atom, self.type_of)
            return
        parts = val if isinstance(val, (tuple, list)) else (val,)
        results = tuple(self.type_of(v) if isinstance(v, torch.Tensor) else None for v in parts)
        read = None
        if all(u.target is operator.getitem for u in n.users):
            read = frozenset(u.args[1] for u in n.users if isinstance(u.args[1], int))
        self.b.begin(n.name, origin, results, read)
        reason = self.native(n, results)
        if reason is not None:
            if n.target is torch.ops.aten.copy_.default:
                _settle(self)
            self.env[n] = call_eager(self.b, n, self.atom, val, self.p.sym, reason)
            if n.target is torch.ops.aten.copy_.default and isinstance(n.args[0], FxNode):
                self.env[n.args[0]] = self.env[n]  # later reads see the call's result
            made = self.env[n] if isinstance(self.env[n], (tuple, list)) else (self.env[n],)
            if isinstance(val, (torch.SymFloat, torch.SymBool)):
                self.numbers.update(made)
            self.given(*(s for m in made for s in (m.shape if isinstance(m, Value) else (m,))))

    def size(self, n: FxNode, size: Sym) -> Sym:
        """The size computed by a node; Python computes it if it is not a polynomial of others."""
        if not _is_python(n) or self.sizes.issuperset(size.free_vars):
            return size
        if not isinstance(size, Var):
            raise Unsupported(f"the size {size}, a part of which only Python computes")
        self.b.begin(n.name, (n.name,), ())
        self.b.extern("lenz.size", (self.data(n),), outs=(size,))
        self.given(size)
        return size

    def data(self, n: FxNode) -> tuple[Any, ...]:
        """A call of a Python function of sizes, as data: its name and operands."""
        return (getattr(n.target, "__name__", ""), *map(self.value, n.args))

    def given(self, *sizes: Any) -> None:
        """Record variables of sizes that are defined from here on."""
        for s in sizes:
            if isinstance(s, Sym):
                self.sizes.update(s.free_vars)

    def native(self, n: FxNode, results: Sequence[TensorType | None]) -> str | None:
        """Lower the node; returns None, or the reason why it must be called in eager."""
        if not isinstance(n.target, torch._ops.OpOverload):
            return "not an aten op"
        if n.name in self.refused:
            return "its kernel does not compile"
        if n.meta.get("refused"):
            return "eager may reject it"
        entry = entry_for(str(n.target))
        args = [self.value(a) for a in n.args]
        written = n.args[0] if "of_argument" in n.meta else None
        if isinstance(written, FxNode) and written in self.arguments:
            args[0] = self.arguments[written]
        kwargs = {k: self.value(a) for k, a in n.kwargs.items()}
        values = (*_values([args, *kwargs.values()]), *results)
        found = {v.dtype: None for v in values if v is not None and v.dtype.is_complex}
        kind = next(iter(found), None)
        is_complex = not found.keys().isdisjoint(PARTS)
        if is_complex and C32 in found:
            return f"dtype {C32}"
        if entry is None and not is_complex:
            return "no lowering"
        if n.kwargs.get("pin_memory"):
            return "pinned memory"
        if self.p.deterministic and has(n.target, "unset"):
            return "deterministic algorithms fill new memory"
        shapes = [s for r in results if r is not None for s in r.shape]
        if any(not self.sizes.issuperset(s.free_vars) for s in shapes):
            return "the size of the result depends on values"
        given = [self.env[a] for a in n.all_input_nodes]
        if any(isinstance(a, Sym) and not self.numbers.isdisjoint(a.free_vars) for a in given):
            return "a number made from sizes that is not an integer"
        device = next((r.device for r in results if r is not None), None)
        if device is not None:
            whole = has(n.target, "across")
            args = [self.near(a, device, whole) for a in args]
            kwargs = {k: self.near(a, device, whole) for k, a in kwargs.items()}
            if any(v.device != device for v in _values([args, list(kwargs.values())])):
                return "copy between devices"
        if entry is None or is_complex or self.complexes.takes(n, args):
            return _in_parts(self, n, entry, args, kwargs, kind)
        return self.lowered(n, entry, results, args, kwargs)

    def lowered(
        self, n: FxNode, entry: Entry, results: Sequence[TensorType | None], args: Any, kwargs: Any
    ) -> str | None:
        """Lower a node whose operands are on the right devices, like `native`."""
        types = [v.buffer.type for v in _values(args) + _values(list(kwargs.values()))]
        able = MOVED if entry.float8 else NATIVE
        kinds = (t.dtype for t in (*types, *results) if t is not None)
        odd = next((d for d in kinds if d not in able), None)
        if odd is not None and not entry.any_dtype:
            return f"dtype {odd}"
        before, mutations = len(self.b.nodes), self.b.mutations
        try:
            made = entry.fn(self.b, *args, **kwargs)
        except Decline as e:
            why: str | None = str(e)
        except TypeError:
            # A few lowerings need the number itself, not float(s0) of a size argument. A complex
            # one is no number of a real type: eager has an error for it.
            given = (*args, *kwargs.values())
            if odd is None and not any(isinstance(a, (Sym, complex)) for a in given):
                raise
            # In some cases it computes with elements after all.
            why = "a scalar that is complex or a size" if odd is None else f"dtype {odd}"
        else:
            new = self.b.nodes[before:]
            why = _unfit(new, entry.any_dtype)
            if self.b.mutations is not mutations and _overlaps(args[0].buffer.type.layout):
                why = SHARED  # eager decides which of two elements is written last
            if self.p.deterministic and any(_is_left_to_chance(x) for x in new):
                why = "deterministic algorithms are enabled"
        if why is not None:
            take_back(self.b, before)
            self.b.mutations = mutations
            return why
        self.env[n] = made
        if n.target is torch.ops.aten.copy_.default:
            written = n.args[0]
            assert isinstance(written, FxNode)
            if isinstance(given := args[0], Value) and given.name == written.name:
                self.arguments[written] = given
            self.env[written] = made  # later reads see the new value
        return None

    def value(self, a: Any) -> Any:
        """FX argument -> argument of a lowering: Value, Sym or the plain object."""
        if isinstance(a, FxNode):
            made = self.env[a]
            # A scalar that tracing specialised is a number, as without dynamic sizes.
            return made.value if isinstance(made, Int) else made
        return [self.value(x) for x in a] if isinstance(a, (list, tuple)) else a

    def near(self, a: Any, device: str, whole: bool) -> Any:
        """An operand with its 0-d CPU tensors (`whole`: all tensors) moved to the device."""
        if isinstance(a, list):
            return [self.near(x, device, whole) for x in a]
        if not isinstance(a, (Value, Complex)) or a.device == device:
            return a
        if not whole and (a.rank > 0 or a.device != "cpu"):
            return a
        a = a.whole if isinstance(a, Complex) else a
        key = (a.name, device)
        if key not in self.moved:
            of_cpu = a.rank == 0 and a.device == "cpu"
            self.moved[key] = replace(move(self.b, a, device), is_number=of_cpu)
        return self.moved[key]

    def atom(self, a: Any) -> Atom:
        """FX argument -> argument of an Extern or an output."""
        if isinstance(a, FxNode):
            a = self.env[a]
        return to_atom(a, self.atom)

    def type_of(self, val: torch.Tensor, given: bool = False) -> TensorType:
        """The type of a fake tensor; raises Unsupported for one without strides.

        Kernels read the memory of `given` tensors, so these must not have the negation flag.
        """
        if given and val.is_neg():
            raise Unsupported("a tensor whose memory holds the negated values")
        return type_of(val, self.p.sym, self.devices)


def _settle(walk: _Walk) -> None:
    """Store pending complex results before a call writes their operands."""
    for a in walk.p.gm.graph.output_node().all_input_nodes:
        if isinstance(made := walk.env.get(a), Complex):
            _ = made.whole


def _in_parts(
    walk: _Walk, n: FxNode, entry: Entry | None, args: Any, kwargs: Any, kind: DType | None
) -> str | None:
    """Lower a node of complex tensors, like `native`."""
    try:
        walk.env[n] = walk.complexes.lower(n, entry, args, kwargs)
    except Decline as e:
        return str(e) or f"dtype {kind}"
    except TypeError:
        if not any(isinstance(a, Sym) for a in (*args, *kwargs.values())):
            raise
        return "a scalar that is a symbolic size"
    return None


def type_of(val: torch.Tensor, to_sym: Callable[[Any], Sym], devices: frozenset[str]) -> TensorType:
    """The type of a tensor, without its offset: pointers point at the first element."""
    dtype = dtype_of(val.dtype)
    if dtype is None or val.layout is not torch.strided or val.is_nested:
        raise Unsupported(f"a tensor of dtype {val.dtype} and layout {val.layout}")
    if val.device.type not in devices:
        made = " and ".join(sorted(devices))
        raise Unsupported(f"a tensor on {val.device}: kernels are made for {made} only")
    shape = tuple(to_sym(s) for s in val.shape)
    return TensorType(dtype, str(val.device), Layout(shape, tuple(to_sym(s) for s in val.stride())))


def to_atom(a: Any, inner: Callable[[Any], Atom]) -> Atom:
    """One argument as data; raises Unsupported for an object without a text form."""
    match a:
        case Value():
            return Ref(a.name)
        case Complex():
            return Ref(a.whole.name)
        case None | bool() | int() | float() | complex() | str() | Sym() | Named() | Ref():
            return a
        case list() | tuple():
            return tuple(inner(x) for x in a)
        case torch.dtype():
            if (dtype := dtype_of(a)) is None:
                raise Unsupported(f"an op with the argument {a}")
            return Named("dtype", dtype.name)
        case torch.device() | torch.layout() | torch.memory_format():
            kind: Any = type(a).__name__
            return Named(kind, str(a).removeprefix("torch."))
        case torch._ops.OpOverload():
            return Named("op", str(a))
        case _:
            raise Unsupported(f"an argument of type {type(a).__name__}")


def _values(args: Sequence[Any]) -> list[Any]:
    found: list[Any] = []
    for a in args:
        if isinstance(a, (Value, Complex)):
            found.append(a)
        elif isinstance(a, (list, tuple)):
            found.extend(_values(a))
    return found


def _unfit(made: list[Node], any_dtype: bool) -> str | None:
    """Why the nodes made by a lowering are not valid; None if they are."""
    if any(isinstance(x, LOOPS) and _overlaps(x.out.type.layout) for x in made):
        return SHARED
    if any(isinstance(x, Reduction) and len(x.axes) != len(x.out.shape) for x in made):
        return "tracing gives another rank than the op"  # norm of one element in torch 2.11
    # Views of any type are fine, but kernels move elements of some types only.
    kinds = (n.out.dtype for n in made if any_dtype and isinstance(n, LOOPS))
    return next((f"dtype {d}" for d in kinds if d not in MOVED), None)


def _is_left_to_chance(n: Node) -> bool:
    """True for GPU scatters whose order matters: rounded sums, and writes to unknown places.

    Scans have a fixed order on GPUs too, even if several programs share a row: each folds the
    results of earlier ones in the order of their numbers (`machine/cuda/triton/look_back.py`).
    """
    if not isinstance(n, Scatter) or not runs_programs(n.out.type.device):
        return False
    return bool(n.bound) if n.mode == "set" else n.out.dtype.is_float and n.mode in ("add", "mul")


def _is_plain(x: Any) -> bool:
    """True for a tensor that a loop can copy with its strides."""
    return isinstance(x, Value) and x.dtype in MOVED and not _overlaps(x.buffer.type.layout)


def _overlaps(layout: Layout) -> bool:
    """False if it is proved that no two elements share memory; also for empty tensors.

    A write to a part of such a tensor's clone changes elements outside the part too.
    """
    if any(n is ZERO for n in layout.shape):
        return False
    # One past the last offset so far, from the sizes and from the sizes clamped to at least 1:
    # strides are products of either. A proof does not need the order by size, only a likely one.
    end = other = sym(1)
    pairs = [d for d in zip(layout.stride, layout.shape, strict=True) if d[1] is not ONE][::-1]
    pairs.sort(key=lambda d: guess(d[0], dict.fromkeys(d[0].free_vars, 1009)))
    for stride, size in pairs:
        if not (prove_le(end, stride) or prove_le(other, stride)):
            return True
        end, other = end + (size - 1) * stride, other + (maximum(size, ONE) - 1) * stride
    return False


def _is_data(n: FxNode) -> bool:
    """True for a condition on sizes read only by assertions and sizes; a branch needs a bool."""
    return _is_python(n) and all(
        getattr(u.target, "__name__", "") == ASSERTION
        or (_is_python(u) and isinstance(u.meta.get("val"), torch.SymInt))
        or (isinstance(u.meta.get("val"), torch.SymBool) and _is_data(u))
        for u in n.users
    )


def _is_python(n: FxNode) -> bool:
    """True for a function of sizes, such as operator.lt and torch.sym_ite."""
    return getattr(n.target, "__module__", "") in ("_operator", "torch")


def _yields_new_size(n: FxNode) -> bool:
    # An op on tensors whose result is a size (such as item) must run; arithmetic on sizes need not.
    given = (a.meta.get("val") for a in n.all_input_nodes)
    return any(isinstance(v, torch.Tensor) for v in given) and not has(n.target, "size")
