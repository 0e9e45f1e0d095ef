"""Pointwise ops of the op table, each lowered to one map; conversions, copies, choices.

Arithmetic beyond table entries is in `arithmetic` and `multiply_add`, activations in `activation`.
"""

from __future__ import annotations

from typing import Any

from lenz import ops
from lenz.errors import Unsupported
from lenz.ir.dtype import BOOL, NATIVE, compute_dtype
from lenz.ir.expr import Expr, const
from lenz.ir.graph import LOOPS, Extern
from lenz.ir.op import Op
from lenz.ir.tensor import Buffer
from lenz.lower import activation as activation
from lenz.lower import arithmetic as arithmetic
from lenz.lower import multiply_add as multiply_add
from lenz.lower.builder import Decline, GraphBuilder, Index, Value, maker
from lenz.lower.operand import Operand, broadcast, divisor, element, exact, keeps, promote
from lenz.lower.registry import Lowering, lowering, native_packets, pointwise_ops
from lenz.ops.fold import apply


@lowering(
    "_to_copy", "prims.convert_element_type", "prims.device_put", "_conj_physical", float8=True
)
def convert(b: GraphBuilder, x: Value, *_: Any, **__: Any) -> Value:
    """The elements in the result's type. The program asks for it: no rounding is implicit."""
    return b.map(lambda i: ops.cast(x.at(i), b.result.dtype))


@lowering("clone", "contiguous", "lift_fresh_copy", "alias_copy", "detach_copy", any_dtype=True)
def clone(b: GraphBuilder, x: Value, **_: Any) -> Value:
    """A copy with the strides of the result."""
    return b.map(x.at)


@lowering("copy", "fill", float8=True)
def copy(b: GraphBuilder, x: Value, src: Operand, non_blocking: bool = False) -> Value:
    """The elements of `src`, broadcast and converted to the shape and type of `x`."""
    return b.map(lambda i: exact(src, i, x.dtype))


@lowering("copy_", float8=True)
def copy_(b: GraphBuilder, x: Value, src: Value, non_blocking: bool = False) -> Value:
    """The input `x` holds the elements of `src` when the graph ends.

    Raises Unsupported for a write into any other tensor, which a functional graph does not have.
    """
    if maker(b, x.name) is not None:
        raise Unsupported(f"a write into %{x.name}, which is not an input")
    if _holds(b, x, src):
        return src
    value = src
    if src.buffer.type != x.buffer.type or not is_own(b, src):
        # An input or a view may alias the target, so its elements are copied first.
        value = b.map(lambda i: exact(src, i, x.dtype), x.buffer.type)
    b.mutate(x, value)
    return value


def _holds(b: GraphBuilder, x: Value, value: Value) -> bool:
    """True if calls have already written the value into the memory of `x`."""
    name = value.name
    while isinstance(n := maker(b, name), Extern):
        own = [k for k, o in enumerate(n.outs) if isinstance(o, Buffer) and o.name == name]
        source = next((s for k, s in n.aliases if k in own and s in n.mutates), None)
        if source is None:
            break
        name = source
    return name == x.name


def is_own(b: GraphBuilder, x: Value) -> bool:
    """True if this graph computed the buffer and it is not a view of another one.

    A call that writes an argument and returns it has written its result.
    """
    n = maker(b, x.name)
    if isinstance(n, Extern):
        return all(source in n.mutates for _, source in n.aliases)
    return isinstance(n, LOOPS)


@lowering("where.self", "where.ScalarSelf", "where.ScalarOther", "where.Scalar", float8=True)
def where(b: GraphBuilder, cond: Value, x: Operand, y: Operand) -> Value:
    """x where cond is true, else y; uint8 conditions count as bool."""
    dtype = b.result.dtype

    def at(i: Index) -> Expr:
        holds = ops.cast(cond.at(broadcast(cond, i)), BOOL)
        return ops.where(holds, exact(x, i, dtype), exact(y, i, dtype))

    return b.map(at)


# `value` where the mask is true, else x.
lowering("masked_fill")(lambda b, x, mask, value: where(b, mask, value, x))


def _logical(name: str, of: Any) -> None:
    def lower_logical(b: GraphBuilder, x: Value, y: Value) -> Value:
        t = promote((x, y))  # in which a number may be 0
        return b.map(lambda i: of(*(ops.truth(element(v, i, t)) for v in (x, y))))

    lowering(name)(lower_logical)


_logical("logical_and", ops.and_)
_logical("logical_or", ops.or_)
_logical("logical_xor", ops.xor)


def _test(name: str, of: Any) -> None:
    lowering(name)(lambda b, x: b.map(lambda i: of(x.compute(i))))


_test("logical_not", lambda x: ~ops.truth(x))
_test("isnan", ops.isnan)
_test("isinf", ops.isinf)
_test("isfinite", ops.isfinite)
_test("signbit", lambda x: const(False, BOOL) if x.dtype is BOOL else ops.signbit(x))
_OF_NUMBERS = {"floor": ops.floor, "ceil": ops.ceil, "trunc": ops.trunc, "fix": ops.trunc}
for _name, _of in {**_OF_NUMBERS, "sign": ops.sign, "sgn": ops.sign}.items():
    _test(_name, _of)


# Ops for which torch has bool and the table entry has not.
_OF_BOOL: dict[str, Any] = {"fmin": ops.and_, "fmax": ops.or_}


def direct(op: Op) -> Lowering:
    """The lowering of an op by its table entry alone: promote, apply, round."""

    def lower_direct(b: GraphBuilder, *args: Any, **kwargs: Any) -> Value:
        if kwargs or len(args) != op.arity:
            raise Decline(f"arguments of {op.name} beyond its operands")
        dtype = promote(args) if op.promotion == "bool" else b.result.dtype  # halves included
        if dtype not in NATIVE:
            raise Decline(f"dtype {dtype}")
        if dtype is BOOL and op.name in _OF_BOOL:
            return b.map(lambda i: _OF_BOOL[op.name](*[element(a, i, dtype) for a in args]))
        try:
            made = op.dtype((compute_dtype(dtype),) * op.arity, ())
        except TypeError as e:
            raise Decline(str(e)) from e
        if made.is_float and not b.result.dtype.is_float:
            raise Decline(f"{op.name} of {dtype} gives {b.result.dtype}")
        if op.name == "nextafter" and dtype.is_half:
            raise Decline("the neighbours of a half and of an f32 differ")
        device = b.result.device
        kept = [keeps(op.name, device, k) for k in range(op.arity)]
        divides = op.name in ("fmod", "remainder")
        if divides and dtype.is_integer and args[1] == 0:
            raise Decline("a division by zero is an error in eager")

        def fn(i: Index) -> Expr:
            xs = [element(a, i, dtype, kept=k) for a, k in zip(args, kept, strict=True)]
            return apply(op, xs[0], divisor(xs[1], device)) if divides else apply(op, *xs)

        return b.map(fn)

    return lower_direct


for _name, _op in pointwise_ops().items():
    if _name not in native_packets() and _op.arity > 0:
        lowering(_name)(direct(_op))
