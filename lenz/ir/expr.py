"""Scalar expressions: an interned DAG, so `is` is structural equality, and the walks over it.

An expression computes one element. Integers that are indices are `Sym` (exact); values are `Expr`
(machine arithmetic). Two bridges join them:

- up: `index(sym, dtype)` is an index as a value;
- down: a `load` or `index` may use the variables `@0`, `@1`, ... in its Syms; `@k` is the value of
  its k-th operand (an i64 expression already wrapped and checked by the lowering). Numbering is
  canonical: by first appearance, without gaps.

Invariants: `dtype` follows from the op's rule; operand tuples never change; no cycles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Set
from itertools import chain
from typing import Any, TypeVar

from lenz.ir import op as _op
from lenz.ir.dtype import I64, DType
from lenz.ir.op import Op
from lenz.sym import Sym, Var, prove_le, prove_lt, substitute

T = TypeVar("T")
MOST_WALKS = 1 << 14
Number = bool | int | float
_TABLE: dict[tuple[Any, ...], Expr] = {}
# Builders called by operators: those of `lenz.ops`, which fold, by op name.
_BUILDERS: dict[str, Callable[..., Expr]] = {}


def enter_builder(name: str, build: Callable[..., Expr]) -> None:
    """Register `build` for the operator of the op `name`; an operand may be a number."""
    _BUILDERS[name] = build


def _unary(name: str) -> Callable[[Expr], Expr]:
    return lambda x: _BUILDERS[name](x)


def _binary(name: str, swapped: bool = False) -> Callable[[Expr, Expr | Number], Expr]:
    return lambda *xs: _BUILDERS[name](*(reversed(xs) if swapped else xs))


class Expr:
    """One node: an op, its operands, its attributes and the type of its value.

    `checks` says that it contains a check: an op that may fail.

    Operators build larger expressions, folded like those of `lenz.ops`; a Python number takes the
    type of the other operand. `==` and `hash` are identity: `ops.eq` compares values.
    """

    __slots__ = ("args", "attrs", "checks", "dtype", "op")

    op: Op
    args: tuple[Expr, ...]
    attrs: tuple[Any, ...]
    dtype: DType
    checks: bool

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("Expr is immutable")

    def __repr__(self) -> str:
        from lenz.ir.printer import show_expr

        return show_expr(self)

    def __bool__(self) -> bool:
        raise TypeError("an Expr has no truth value: a chain or `and` of comparisons needs `&`")

    __neg__, __abs__, __invert__ = _unary("neg"), _unary("abs"), _unary("not")
    __add__, __radd__ = _binary("add"), _binary("add", swapped=True)
    __sub__, __rsub__ = _binary("sub"), _binary("sub", swapped=True)
    __mul__, __rmul__ = _binary("mul"), _binary("mul", swapped=True)
    __truediv__, __rtruediv__ = _binary("div"), _binary("div", swapped=True)
    __and__, __or__, __xor__ = _binary("and"), _binary("or"), _binary("xor")
    __lshift__, __rshift__ = _binary("shl"), _binary("shr")
    __lt__, __le__, __gt__, __ge__ = map(_binary, ("lt", "le", "gt", "ge"))


def _attr_key(value: Any) -> Any:
    # 1, 1.0 and True are equal in Python but not as constants; neither are 0.0 and -0.0, and nan.
    if isinstance(value, (bool, float, complex)):
        return (type(value).__name__, repr(value))
    return value


def expr(op: Op, *args: Expr, attrs: tuple[Any, ...] = ()) -> Expr:
    """Make (or find) the node; raises TypeError if the op's type rule rejects the operands."""
    if op.arity >= 0 and len(args) != op.arity:
        raise TypeError(f"{op.name} takes {op.arity} operands, got {len(args)}")
    key = (op, args, tuple([_attr_key(a) for a in attrs]))
    found = _TABLE.get(key)
    if found is not None:
        return found
    e = object.__new__(Expr)
    put = object.__setattr__
    put(e, "op", op)
    put(e, "args", args)
    put(e, "attrs", attrs)
    put(e, "checks", op.guarded or any(a.checks for a in args))
    put(e, "dtype", op.dtype(tuple([a.dtype for a in args]), attrs))
    return _TABLE.setdefault(key, e)  # another thread may be first


def const(value: bool | int | float, dtype: DType) -> Expr:
    """A constant of the type; ints become floats for float types and wrap for integer types."""
    if dtype.kind == "bool":
        value = bool(value)
    elif dtype.is_float:
        value = float(value)
    elif dtype.is_integer:
        value = int(value) & ((1 << dtype.bits) - 1)
        if dtype.kind == "int" and value >> (dtype.bits - 1):
            value -= 1 << dtype.bits
    return expr(_op.CONST, attrs=(value, dtype))


def load(buffer: str, index: Iterable[Sym], dtype: DType, bound: tuple[Expr, ...] = ()) -> Expr:
    """One element of a buffer; `@k` in the index is `bound[k]`."""
    index, used = canonical_bound(tuple(index), bound)
    e = expr(_op.LOAD, *used, attrs=(buffer, index, dtype))
    return e if len(used) == len(bound) else keep_checks(e, bound)


def keep_checks(e: Expr, among: tuple[Expr, ...]) -> Expr:
    """`e` with the checks of operands that it does not contain: of a repeated row, say.

    A check of a masked value only counts where the mask is true, as before.
    """
    is_checked = any(a.checks for a in among)
    return _keep(e, among, unmasked((e,), checks=True).keys()) if is_checked else e


def _keep(e: Expr, among: Iterable[Expr], found: Set[Expr]) -> Expr:
    """`e` and the checks of `among` that are not `found` already."""
    nodes = unmasked(among, checks=True)
    for c in (c for c in reversed(nodes) if c not in found):
        if c.op.guarded:
            e = expr(_op.CHECKED, e, c)
        elif c.op is _op.MASKED:
            kept = _keep(e, (c.args[1],), found | nodes.keys())
            e = e if kept is e else masked(c.args[0], kept, e)
    return e


def unmasked(roots: Iterable[Expr], checks: bool = False) -> dict[Expr, None]:
    """The nodes in the DAG of the roots that are evaluated whatever the masks; users come first.

    With `checks`, only those that contain a check.
    """
    nodes, stack = dict[Expr, None](), [*roots]
    while stack:
        x = stack.pop()
        if x not in nodes and (x.checks or not checks):
            nodes[x] = None
            stack += (x.args[0], x.args[2]) if x.op is _op.MASKED else x.args
    return nodes


def index(value: Sym, dtype: DType = I64, bound: tuple[Expr, ...] = ()) -> Expr:
    """An exact integer as a value of the type; `@k` in it is `bound[k]`."""
    (value,), bound = canonical_bound((value,), bound)
    return expr(_op.INDEX, *bound, attrs=(value, dtype))


def exact_place(e: Expr) -> Sym | None:
    """The number that an index without operands equals; None if its type may not hold it."""
    if e.op is not _op.INDEX or e.args:
        return None
    s, t = e.attrs
    known = t is I64 or None not in (s.lo, s.hi)  # sizes and positions fit 64 bits
    return s if known and t.holds(s.lo or 0, s.hi or 0) else None


def ref(name: str, dtype: DType) -> Expr:
    """The value of a `Let` or `Reduce` of the enclosing kernel."""
    return expr(_op.REF, attrs=(name, dtype))


def masked(cond: Expr, value: Expr, other: Expr) -> Expr:
    """`value` where cond is true, else `other`; loads in `value` only happen there."""
    return value if cond.op is _op.CONST and cond.attrs[0] else expr(_op.MASKED, cond, value, other)


def is_bound_var(v: Var) -> bool:
    """True for the variables `@k` that stand for operands of a load or index."""
    return v.name[0] == "@"


def _is_inside(s: Sym, v: Var) -> bool:
    """True if s keeps the bounds of v."""
    below = v.below if v.below is not None or v.hi is None else v.hi + 1
    return below is not None and prove_le(v.lo or 0, s) and prove_lt(s, below)


def canonical_bound(
    index: tuple[Sym, ...], bound: tuple[Expr, ...], reads: bool = True
) -> tuple[tuple[Sym, ...], tuple[Expr, ...]]:
    """Renumber `@k` by first appearance and drop operands that no index uses.

    If it `reads`, operands that are exact indices become parts of the index. A write does not: its
    operands say that it may write one place twice.
    """
    if not bound:
        return index, bound
    # Operands with different bounds stay separate: the bounds say how the variable may be used.
    order: dict[tuple[Expr, int | None, int | None, Sym | None], int] = {}
    mapping: dict[Var, Sym] = {}
    # By number, not by name, which puts @10 before @2: renumbering must change nothing.
    at: Callable[[Var], int] = lambda v: int(v.name[1:])
    for v in chain(*[sorted(filter(is_bound_var, part.free_vars), key=at) for part in index]):
        e = bound[at(v)]
        if reads and (s := exact_place(e)) is not None and _is_inside(s, v):
            mapping[v] = s
        else:
            k = order.setdefault((e, v.lo, v.hi, v.below), len(order))
            mapping[v] = Var(f"@{k}", v.lo, v.hi, v.below)
    operands = tuple(e for e, *_ in order)
    if operands == bound and all(v is s for v, s in mapping.items()):
        return index, bound
    return tuple(substitute(part, mapping) for part in index), operands


def interpret(
    body: Expr, visit: Callable[[Expr, list[T]], T], memo: dict[Expr, T] | None = None
) -> T:
    """Walk the DAG once, operands first: visit(node, results of its operands) -> result.

    Every analysis and every emitter is such an interpretation. Iterative, so that chains of any
    depth work; pass `memo` to share results between bodies.
    """
    memo = {} if memo is None else memo
    stack: list[Expr] = [body]
    while stack:
        e = stack.pop()
        if e in memo:
            continue
        todo = [a for a in e.args if a not in memo]
        if todo:
            stack += (e, *reversed(todo))
        else:
            memo[e] = visit(e, [memo[a] for a in e.args])
    return memo[body]


# Memo: the nodes of bodies, and the loads among them.
_WALKS: dict[Expr, tuple[tuple[Expr, ...], tuple[Expr, ...]]] = {}


def _walked(body: Expr) -> tuple[tuple[Expr, ...], tuple[Expr, ...]]:
    """The nodes of one body, and its loads. Memoised: the scheduler asks for the same ones often.

    A training step of ResNet-50 with 1,233 calls took 50,000 walks of 4,000 bodies. Inlining puts a
    few nodes around a body that was walked before, so that its walk is reused as a prefix.
    """
    found = _WALKS.get(body)
    if found is None:
        inner, memo = body, dict[Expr, None]()
        for _ in range(8):
            inner = inner.args[0] if inner.args else inner
            if (known := _WALKS.get(inner)) is not None:
                memo = dict.fromkeys(known[0])
                break
        interpret(body, lambda e, _: None, memo)
        if len(_WALKS) >= MOST_WALKS:
            _WALKS.clear()
        found = _WALKS[body] = tuple(memo), tuple(e for e in memo if e.op is _op.LOAD)
    return found


def nodes_of(*bodies: Expr) -> list[Expr]:
    """Every distinct node of the bodies, operands before users."""
    return list(dict.fromkeys(chain.from_iterable(_walked(body)[0] for body in bodies)))


def loads_of(*bodies: Expr) -> list[Expr]:
    """Every distinct load of the bodies, operands before users."""
    return list(dict.fromkeys(chain.from_iterable(_walked(body)[1] for body in bodies)))


def syms_of(e: Expr) -> tuple[Sym, ...]:
    """The Syms in the attributes of one node (load and index have some)."""
    if e.op is _op.LOAD:
        return tuple(e.attrs[1])
    return (e.attrs[0],) if e.op is _op.INDEX else ()


def all_syms(*bodies: Expr) -> list[Sym]:
    """The Syms in the attributes of all nodes of the bodies."""
    return [s for e in nodes_of(*bodies) for s in syms_of(e)]


def vars_of(*bodies: Expr) -> set[Var]:
    """The axes and sizes in the Syms of the bodies."""
    return {v for s in all_syms(*bodies) for v in s.free_vars}


def finished(finish: Expr, acc: Expr) -> Expr:
    """A reduction's finish with its result in place of ref(acc)."""
    return rewritten(finish, lambda e: acc if e.op is _op.REF and e.attrs[0] == "acc" else e)


def rebuild(e: Expr, args: tuple[Expr, ...]) -> Expr:
    """The same node over other operands."""
    if args == e.args:
        return e
    if e.op is _op.LOAD:
        return load(e.attrs[0], e.attrs[1], e.attrs[2], args)
    if e.op is _op.INDEX:
        return index(e.attrs[0], e.attrs[1], args)
    return expr(e.op, *args, attrs=e.attrs)


def reindex(body: Expr, mapping: Mapping[Var, Sym], bound: tuple[Expr, ...] = ()) -> Expr:
    """Substitute index variables in all loads and indices of the body.

    The new Syms may use `@k`, which stands for `bound[k]` (a gathered index).
    """

    def visit(e: Expr, args: list[Expr]) -> Expr:
        syms = syms_of(e)
        if not syms:
            return rebuild(e, tuple(args))
        # The load's own operands are numbered after the outer ones, so that the numbers cannot
        # clash.
        own: dict[Var, Sym] = dict(mapping)
        for v in (v for s in syms for v in s.free_vars if is_bound_var(v)):
            own[v] = Var(f"@{int(v.name[1:]) + len(bound)}", v.lo, v.hi, v.below)
        new = tuple(substitute(s, own) for s in syms)
        new, operands = canonical_bound(new, bound + tuple(args))
        attrs = (e.attrs[0], new, e.attrs[2]) if e.op is _op.LOAD else (new[0], e.attrs[1])
        return expr(e.op, *operands, attrs=attrs)

    if not bound and all(v is s for v, s in mapping.items()):
        return body  # equal axes are the same variable, as in most chains of maps
    return keep_checks(interpret(body, visit), bound)


def rewritten(body: Expr, f: Callable[[Expr], Expr], memo: dict[Expr, Expr] | None = None) -> Expr:
    """The body with each node replaced by f of it, operands first."""
    return interpret(body, lambda e, args: f(rebuild(e, tuple(args))), memo)


def replaced(body: Expr, new: Mapping[Expr, Expr]) -> Expr:
    """The body with other expressions in place of some."""
    return rewritten(body, lambda e: e, {**new})


def replace_loads(
    body: Expr, replacement: Callable[[Expr], Expr | None], memo: dict[Expr, Expr] | None = None
) -> Expr:
    """Replace loads, innermost first: replacement(load) is an expression, or None to keep it."""

    def visit(e: Expr) -> Expr:
        other = replacement(e) if e.op is _op.LOAD else None
        return e if other is None else other

    return rewritten(body, visit, memo)


def renaming(name_of: Callable[[str], str]) -> Callable[[Expr], Expr]:
    """A function that renames the buffers that an expression reads."""
    memo: dict[Expr, Expr] = {}
    new = lambda e: load(name_of(e.attrs[0]), e.attrs[1], e.attrs[2], e.args)
    return lambda body: replace_loads(body, new, memo)


def cost_of(*bodies: Expr) -> float:
    """Arithmetic per element, in f32 additions: the sum of op costs over distinct nodes."""
    return math.fsum(e.op.cost for e in nodes_of(*bodies))
