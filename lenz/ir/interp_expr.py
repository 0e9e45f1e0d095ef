"""Evaluation of expressions on torch tensors, shared by both interpreters.

A masked value is computed everywhere and then selected. A failed load gives 1, and is an error only
at points that need it, which are found backwards from the roots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from lenz.errors import InternalError
from lenz.ir import op as _op
from lenz.ir.expr import Expr, is_bound_var, nodes_of, syms_of
from lenz.ir.text_expr import show_expr
from lenz.records import dataclass
from lenz.sym import Sym, Var
from lenz.sym.evaluate import evaluate_with

Value: TypeAlias = "int | torch.Tensor"


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
ValueOf: TypeAlias = Callable[[str], torch.Tensor]


def sym_value(e: Sym, env: Mapping[Var, Value]) -> Value:
    """The exact value of `e`, elementwise if variables are i64 tensors; division rounds down."""
    of: Any = lambda f: lambda a, b: f(torch.as_tensor(a), torch.as_tensor(b))
    return evaluate_with(e, dict(env), of(torch.minimum), of(torch.maximum))  # type: ignore[no-any-return]  # as `env` has them


def evaluate_exprs(
    roots: Sequence[Expr], env: Mapping[Var, Value], value_of: ValueOf, read: Read
) -> list[torch.Tensor]:
    """Values of the roots at every point of the (broadcast) index tensors of `env`.

    `value_of` returns the value of a `ref`, `read` that of a load. Raises InternalError for a load
    outside its buffer at a point where it is needed, and the error of a failed check.
    """
    values: dict[Expr, torch.Tensor] = {}
    faults: dict[Expr, Fault] = {}
    for e in nodes_of(*roots):
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
        _raise_needed(roots, values, faults)
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
    e: Expr, args: list[torch.Tensor], env: Mapping[Var, Value], value_of: ValueOf
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
    roots: Sequence[Expr], values: dict[Expr, torch.Tensor], faults: dict[Expr, Fault]
) -> None:
    """Raise for the first fault at a point that a root needs, going from users to operands."""
    need: dict[Expr, torch.Tensor] = {}

    def want(e: Expr, where: torch.Tensor) -> None:
        need[e] = where if e not in need else need[e] | where

    for root in roots:
        want(root, torch.tensor(True))
    for e in reversed(values):
        where = need[e]
        for k, a in enumerate(e.args):
            # Only the second operand of `masked` may fail where the condition is false.
            want(a, where & values[e.args[0]] if e.op is _op.MASKED and k == 1 else where)
    for e in values:
        if e not in faults:
            continue
        wrong = faults[e].where & need[e]
        if bool(wrong.any()):
            at = tuple(int(p) for p in wrong.nonzero()[0])
            what = faults[e].why(tuple(wrong.shape), at)
            if e.op.guarded:  # the caller's fault, raised like in compiled code
                raise faults[e].error(what)
            raise InternalError(what, rule="in-bounds", line=show_expr(e))
