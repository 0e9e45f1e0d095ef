"""Evaluation of expressions and reductions on torch tensors, shared by both interpreters.

A masked value is computed everywhere and then selected. A failed load gives 1, and is an error only
at points that need it, which are found backwards from the roots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from lenz.errors import InternalError
from lenz.ir import op as _op
from lenz.ir.dtype import I64, DType
from lenz.ir.expr import Expr, is_bound_var, nodes_of, syms_of
from lenz.ir.graph import ReduceKind, ScanKind, UpdateMode, identity_of
from lenz.ir.text_expr import show_expr
from lenz.records import dataclass
from lenz.sym import Sym, Var
from lenz.sym.evaluate import evaluate_with

Value: TypeAlias = "int | torch.Tensor"
_WIDE = {torch.uint16: torch.int64, torch.uint32: torch.int64, torch.uint64: torch.int64}


@dataclass(frozen=True, slots=True)
class Fault:
    """Points where a load must not happen, and the message for one: why(shape, position in it).

    `error` is the exception of a check: the caller's fault.
    """

    where: torch.Tensor
    why: Callable[[tuple[int, ...], tuple[int, ...]], str]
    error: type[Exception] = IndexError


# read(load, values of its index) -> elements, and the points where reading is an error
Read: TypeAlias = Callable[[Expr, list[Value]], "tuple[torch.Tensor, Fault | None]"]


def sym_value(e: Sym, env: Mapping[Var, Value]) -> Value:
    """The exact value of `e`, elementwise if variables are i64 tensors; division rounds down."""
    found: Value = evaluate_with(e, dict(env), _minimum, _maximum)
    return found


def _minimum(a: Value, b: Value) -> Value:
    return torch.minimum(torch.as_tensor(a), torch.as_tensor(b))


def _maximum(a: Value, b: Value) -> Value:
    return torch.maximum(torch.as_tensor(a), torch.as_tensor(b))


def evaluate_exprs(
    roots: Sequence[Expr],
    env: Mapping[Var, Value],
    value_of: Callable[[str], torch.Tensor],
    read: Read,
) -> list[torch.Tensor]:
    """Values of the roots at every point of the (broadcast) index tensors of `env`.

    `value_of` returns the value of a `ref`, `read` that of a load. Raises InternalError for a load
    outside its buffer at a point where it is needed, and the error of a failed check.
    """
    nodes = nodes_of(*roots)
    values: dict[Expr, torch.Tensor] = {}
    faults: dict[Expr, Fault] = {}
    for e in nodes:
        args = [values[a] for a in e.args]
        if e.op is _op.LOAD:
            where = with_bound(syms_of(e), args, env)
            value, fault = read(e, [sym_value(s, where) for s in e.attrs[1]])
            if fault is not None and bool(fault.where.any()):
                faults[e] = fault
                value = torch.where(fault.where, torch.ones((), dtype=value.dtype), value)
            values[e] = value
        elif e.op.guarded:
            values[e], fault = _guarded(e, args)
            if fault is not None:
                faults[e] = fault
        else:
            values[e] = _node(e, args, env, value_of)
    # Point-independent values are computed even if there are no points.
    if faults and all(torch.as_tensor(v).numel() for v in env.values()):
        _raise_needed(roots, nodes, values, faults)
    return [values[e] for e in roots]


def with_bound(
    syms: Sequence[Sym], args: Sequence[torch.Tensor], env: Mapping[Var, Value]
) -> Mapping[Var, Value]:
    """The environment with the values of variables @k."""
    if not args:
        return env
    bound = dict.fromkeys(v for s in syms for v in s.free_vars if is_bound_var(v))
    return {**env, **{v: args[int(v.name[1:])].to(torch.int64) for v in bound}}


def _node(
    e: Expr,
    args: list[torch.Tensor],
    env: Mapping[Var, Value],
    value_of: Callable[[str], torch.Tensor],
) -> torch.Tensor:
    if e.op is _op.CONST:
        return torch.tensor(e.attrs[0], dtype=e.dtype.torch)
    if e.op is _op.REF:
        return value_of(e.attrs[0])
    if e.op is _op.INDEX:
        value = torch.as_tensor(sym_value(e.attrs[0], with_bound(syms_of(e), args, env)))
        return value.to(e.dtype.torch)
    if e.op is _op.MASKED:
        return torch.where(args[0], args[1], args[2])
    if e.op.eager is None:
        raise InternalError(f"op {e.op.name} has no eager form", rule="eager")
    out: Any = e.op.eager(*args, *e.attrs)
    if out.dtype is not e.dtype.torch:
        raise InternalError(
            f"{e.op.name} of {[a.dtype for a in args]} gave {out.dtype}, its rule says {e.dtype}",
            rule="eager-dtype",
            line=show_expr(e),
        )
    return out  # type: ignore[no-any-return]  # eager is typed loosely: Callable[..., Any]


def _guarded(e: Expr, args: list[torch.Tensor]) -> tuple[torch.Tensor, Fault | None]:
    """An op that may raise: 0 at the points where it does, and these points."""
    assert e.op.eager is not None
    raised = (IndexError, RuntimeError)
    try:
        return e.op.eager(*args, *e.attrs), None
    except raised as error:
        what, kind = str(error), type(error)
    shape = torch.broadcast_shapes(*[a.shape for a in args])  # type: ignore[no-untyped-call]  # torch has no types here
    flat = [a.expand(shape).reshape(-1) for a in args]
    value = torch.zeros(flat[0].shape, dtype=e.dtype.torch)
    wrong = torch.full(flat[0].shape, False)
    for k in range(value.numel()):
        try:
            value[k] = e.op.eager(*[a[k] for a in flat], *e.attrs)
        except raised:
            wrong[k] = True
    wrong = wrong.reshape(shape)
    return value.reshape(shape), Fault(wrong, lambda _, at: f"{what} (point {at})", kind)


def _raise_needed(
    roots: Sequence[Expr],
    nodes: list[Expr],
    values: dict[Expr, torch.Tensor],
    faults: dict[Expr, Fault],
) -> None:
    """Raise for the first fault at a point that a root needs, going from users to operands."""
    need: dict[Expr, torch.Tensor] = {}

    def want(e: Expr, where: torch.Tensor) -> None:
        need[e] = where if e not in need else need[e] | where

    for root in roots:
        want(root, torch.tensor(True))
    for e in reversed(nodes):
        where = need[e]
        for k, a in enumerate(e.args):
            # Only the second operand of `masked` may fail where the condition is false.
            want(a, where & values[e.args[0]] if e.op is _op.MASKED and k == 1 else where)
    for e in nodes:
        if e not in faults:
            continue
        wrong = faults[e].where & need[e]
        if bool(wrong.any()):
            at = tuple(int(p) for p in wrong.nonzero()[0])
            what = faults[e].why(tuple(wrong.shape), at)
            if e.op.guarded:  # the caller's fault, raised like in compiled code
                raise faults[e].error(what)
            raise InternalError(what, rule="in-bounds", line=show_expr(e))


def reduce_last(kind: ReduceKind, x: torch.Tensor, dtype: DType) -> torch.Tensor:
    """Reduce the last dimension; an empty one gives the identity (an error for a position)."""
    if x.shape[-1] == 0:
        if kind in ("argmax", "argmin"):
            raise InternalError(f"{kind} over no elements", rule="reduce-empty")
        return torch.full(x.shape[:-1], identity_of(kind, dtype), dtype=dtype.torch)
    if kind in ("argmax", "argmin"):
        return arg_last(kind, x)[1]
    wide = x.to(_WIDE.get(x.dtype, x.dtype))
    if x.dtype is torch.uint64 and kind in ("max", "min"):
        wide = wide ^ torch.iinfo(torch.int64).min  # keeps the order of unsigned numbers
    out = _REDUCTIONS[kind](wide)
    if x.dtype is torch.uint64 and kind in ("max", "min"):
        out = out ^ torch.iinfo(torch.int64).min
    return out.to(dtype.torch)


_REDUCTIONS: Mapping[ReduceKind, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda x: torch.sum(x, -1, dtype=x.dtype),
    "prod": lambda x: torch.prod(x, -1, dtype=x.dtype),
    "max": lambda x: torch.amax(x, -1),
    "min": lambda x: torch.amin(x, -1),
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
    wide = x.to(_WIDE.get(x.dtype, x.dtype))
    if x.dtype is torch.uint64:
        wide = wide ^ torch.iinfo(torch.int64).min
    best = torch.amax(wide, -1) if kind == "argmax" else torch.amin(wide, -1)
    hit = wide == best.unsqueeze(-1)
    if x.is_floating_point():
        hit = hit | torch.isnan(wide)
    far = torch.full((), x.shape[-1], dtype=I64.torch)
    position = torch.where(hit, torch.arange(x.shape[-1]), far).amin(-1)
    return torch.gather(x, -1, position.unsqueeze(-1)).squeeze(-1), position
