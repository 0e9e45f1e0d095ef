"""Scalar operations as data: one `Op` has all facts about one operation.

The entries are in `lenz/ops/`. The structural operations, which are not arithmetic (constants,
loads, indices, references, guarded evaluation), are here because the IR itself defines them.
Invariant: one `Op` object per name (intern table `_OPS`), so `is` compares operations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

from lenz.ir.dtype import DType
from lenz.records import dataclass, field

# How the aten lowering of an op derives its compute and result type from its operands.
Promotion = Literal[
    "default",  # usual torch type promotion
    "int_to_float",  # like default, but integers and bool become the default float type
    "bool",  # operands are promoted as usual, the result is bool
    "no_bool",  # like default, but bool operands become i64 (sum-like)
]
Types = tuple[DType, ...]  # of the operands, in order
Attrs = tuple[Any, ...]  # attributes besides operands
DTypeRule = Callable[[Types, Attrs], DType]
Emission = str | Callable[..., Any]


@dataclass(frozen=True, slots=True)
class OpForm:
    """How one machine computes an op.

    emit    the direct form, as the machine's emitter defines it (`ops/emission.py` describes those
            of CPUs and GPUs); None if there is only an expansion
    types   element types of operands, and of a conversion's result, that `emit` supports (None:
            every type that the dtype rule accepts)
    expand  definition in simpler ops for the other types (None: the op's)
    ulp     largest error of this form (None: the op's)
    check   for guarded ops, like `emit`: the bool that must be true in every active lane. The
            emitter asserts it, and `emit` gives a value in range in both cases. None if `emit`
            itself checks
    """

    emit: Emission | None = None
    types: Types | None = None
    expand: Callable[..., Any] | None = None
    ulp: float | None = None
    check: Emission | None = None


_EXPANDED = OpForm()


def on(**machines: OpForm | Emission) -> dict[str, OpForm]:
    """The forms of an op, by machine: `on(cpu=intrinsic("llvm.floor"), cuda="tl.floor({0})")`."""
    return {m: f if isinstance(f, OpForm) else OpForm(f) for m, f in machines.items()}


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """One scalar operation. Construction registers it; raises ValueError if the name is taken.

    name      name in the text form; unique
    arity     number of expression operands; -1 for any number
    dtype     (operand types, attrs) -> result type; raises TypeError with the reason if illegal
    eager     reference on torch tensors: eager(*tensors, *attrs); None for structural ops
    expand    definition in simpler ops: expand(*operand Exprs, *attrs) -> Expr; used by machines
              without a direct form (None: the op is primitive)
    forms     how lenz's machines compute it, by device type (`add_form` adds others); an absent
              machine uses `expand`
    aten      names of the aten overload packets this op lowers directly, e.g. ("exp",)
    promotion how that lowering picks types
    commutes  operands may be swapped (to order them canonically)
    cost      time per element relative to an f32 addition
    domain    interval of f32 inputs for tests, per operand or one for all
    ulp       largest error in tests inside `domain`, in units in the last place of f32
    absolute  error below which `ulp` does not count, for results that are only used in sums
    guarded   the op has an effect, so emission needs the mask of active lanes
    """

    name: str
    arity: int
    dtype: DTypeRule
    eager: Callable[..., Any] | None = None
    expand: Callable[..., Any] | None = None
    forms: Mapping[str, OpForm] = field(default_factory=dict)
    aten: tuple[str, ...] = ()
    promotion: Promotion = "default"
    commutes: bool = False
    cost: float = 1.0
    domain: tuple[Any, ...] = (-10.0, 10.0)
    ulp: float = 0.0
    absolute: float = 0.0
    guarded: bool = False

    def __post_init__(self) -> None:
        if _OPS.setdefault(self.name, self) is not self:
            raise ValueError(f"op {self.name!r} is defined twice")

    def __repr__(self) -> str:
        return f"Op({self.name})"

    def form(self, machine: str) -> OpForm:
        """How a machine computes the op."""
        return self.forms.get(machine) or _ADDED.get((self, machine), _EXPANDED)


_OPS: dict[str, Op] = {}
_ADDED: dict[tuple[Op, str], OpForm] = {}  # forms of machines outside lenz


def add_form(op: Op, machine: str, form: OpForm) -> None:
    """Register how another machine computes an op; raises ValueError if it has a form already."""
    if machine in op.forms or _ADDED.setdefault((op, machine), form) is not form:
        raise ValueError(f"op {op.name!r} has two forms on {machine}")


def op_named(name: str) -> Op:
    """Return the op with this name; raises KeyError for an unknown name."""
    return _OPS[name]


def all_ops() -> tuple[Op, ...]:
    """Every op so far, in order of definition."""
    return tuple(_OPS.values())


def _attr_dtype(_: Types, attrs: Attrs) -> DType:
    dtype = attrs[-1]
    if not isinstance(dtype, DType):
        raise TypeError("the last attribute must be a dtype")
    return dtype


def _masked_dtype(args: Types, _: Attrs) -> DType:
    if args[0].name != "bool" or args[1] is not args[2]:
        raise TypeError(f"masked needs (bool, T, T), got {args}")
    return args[1]


def _checked_dtype(args: Types, _: Attrs) -> DType:
    if not args[1].is_integer:
        raise TypeError(f"checked needs (T, an integer), got {args}")
    return args[0]


# The structural ops. attrs end in the dtype if the operands do not determine it.
CONST = Op("const", 0, _attr_dtype, cost=0.0)  # attrs (value, dtype)
LOAD = Op("load", -1, _attr_dtype, cost=1.0)  # attrs (buffer name, index Syms, dtype)
INDEX = Op("index", -1, _attr_dtype, cost=0.5)  # attrs (Sym, dtype)
REF = Op("ref", 0, _attr_dtype, cost=0.0)  # attrs (name of Let or Reduce, dtype)
# masked(cond, value, other): `value` (and its loads) is evaluated only where cond is true.
MASKED = Op("masked", 3, _masked_dtype, cost=1.0)
# checked(value, i): `value`; i is a guarded op whose check counts, although its result is unused.
CHECKED = Op(
    "checked",
    2,
    _checked_dtype,
    # For every dtype: torch 2.11 has no `where` of u16.
    eager=lambda value, i: torch.ops.aten.broadcast_tensors([value, i])[0],
    forms=on(cpu=lambda b, dtype, types, xs, attrs: xs[0], cuda="tl.where({1} < 0, {0}, {0})"),
    cost=0.0,
)
STRUCTURAL = len(_OPS)
