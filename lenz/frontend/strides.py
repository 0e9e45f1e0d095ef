"""Ops whose fake tensors have other strides than eager's tensors.

AOTAutograd traces with fake tensors, and lenz's results get their strides. Elementwise ops have the
strides of ATen's TensorIterator; fake tensors only approximate it, above all for size-1 dimensions.
The other ops were found by running torch's op database with transposed and channels-last inputs,
each op in eager and with fake tensors (torch 2.13). Ops whose fake strides are right are not here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch.fx.experimental.symbolic_shapes import guard_or_false, statically_known_true

from lenz.frontend.values import are_same, dense_order, is_same_size
from lenz.traits import has, trait

# The rule for the strides of an op's first result, and the position of the argument that decides.
# `lenz/traits.py` lists the rules.
StrideRule: TypeAlias = tuple[str, int]
LIKE: StrideRule = ("like", 0)
ITERATION: StrideRule = ("iteration", 0)
VIEW: StrideRule = ("view", 0)
# The order of channels last, outermost dimension first, by the number of dimensions.
LAST = {4: (0, 2, 3, 1), 5: (0, 2, 3, 4, 1)}
# Types in which `ldexp` computes powers of a tensor of 2, not of the number.
TENSOR_POWERS = (torch.float64, torch.float16, torch.bfloat16)


def rule_of(target: Any) -> StrideRule | None:
    """The stride rule for the first result of a call; None if fake tensors are right."""
    kind = trait(target, "strides")
    if kind is not None:
        return None if kind == "told" else (kind, int(trait(target, "of") or 0))
    if torch.Tag.pointwise not in getattr(target, "tags", ()):
        return None
    return ("among", 0) if "calar" in target._overloadname else ITERATION


def eager_strides(target: Any, args: Sequence[Any], told: torch.Tensor) -> tuple[Any, ...] | None:
    """The strides of the first result of an op with a rule; None if those of `told` are right.

    `args` are its (fake) arguments; no guard is added. The strides of `told` stay if symbolic
    strides would need sorting, and on other devices if the rule was only measured on CPUs.
    """
    rule = rule_of(target)
    if str(target) == "aten.isinf.default" and not args[0].is_floating_point():
        rule = LIKE  # zeros, if floats are compared
    if str(target) == "aten.angle.default" and args[0].is_complex():
        rule = ("dense", 0)  # written into a tensor of floats that is made first
    assert rule is not None, f"no rule for {target}"
    strides = _followed(*rule, target, args, told)
    return None if strides is None or are_same(strides, told.stride()) else strides


def _followed(
    kind: str, position: int, target: Any, args: Sequence[Any], told: torch.Tensor
) -> tuple[Any, ...] | None:
    given = [(a.shape, a.stride()) for a in args if isinstance(a, torch.Tensor)]
    shape = told.shape
    order: Sequence[int] | None = None
    match kind:
        case "iteration" | "among":
            given = computed(target, args, told)
            if has(target, "reversed"):
                given.reverse()
            taken = zip(target._schema.arguments, args, strict=False)
            numbers = (a for formal, a in taken if str(formal.type) == "Tensor")
            is_mixed = not all(isinstance(a, torch.Tensor) for a in numbers)
            return elementwise(shape, given, kind == "among" or is_mixed)
        case "like":
            if not given:  # a number, or no tensor with strides
                return None
            own, steps = given[position]
            if not are_same(own, shape):  # made like it, then resized
                return elementwise(shape, given, False) if len(given) > 1 else None
            return of_copy(shape, steps)
        case "spread":
            pairs = zip(shape, told.stride(), strict=True)
            if all(is_same_size(n, 1) or not is_same_size(s, 0) for n, s in pairs):
                return None
            order = iteration(shape, [(shape, told.stride())])
        case "index":
            return indexed(args[0], args[1], shape)
        case "view":
            return (expanded if position else viewed)(*given[0], shape)
        case "power":
            return power(target, args, told, position)
        case "cut":
            # The one condition that torch guards on here: eager takes one of two paths. A size
            # that depends on data counts as padding.
            is_cut = all(guard_or_false(p <= 0) for p in args[1])
            return of_copy(shape, args[0].stride()) if is_cut else None
        case "fourier":
            order = transformed(args[0], args[1], position)
        case _:
            source = told if kind in ("dense", "here", "there") else args[position]
            here = told.device.type == "cpu"
            is_measured = not here if kind == "there" else here or kind in ("dense", "groups")
            if not is_measured or not isinstance(source, torch.Tensor):
                return None  # a number has no strides
            follows = kind in ("format", "laid", "either") or (kind == "groups" and here)
            follows |= kind == "roll" and _is_joined(*args)
            last, order = LAST.get(source.dim()), range(told.dim())
            if follows and last and source.dim() == told.dim():
                size, step = source.shape, source.stride()
                suggested = [is_suggested(n, step) for n in _parts(size, *args[1:], kind=kind)]
                is_dense = is_laid(size, step, order)
                is_last = not is_dense and is_laid(size, step, last)
                if None not in suggested:
                    is_last = all(suggested) or (is_last and kind in ("laid", "either"))
                order = last if is_last and not (is_dense and kind == "laid") else order
    return None if order is None else dense(shape, order)


def computed(target: Any, args: Sequence[Any], told: torch.Tensor) -> list[tuple[Any, Any]]:
    """The shapes and strides of operands. CPUs first copy operands to a common type."""
    dtype, found = told.dtype, []
    is_pair = len(args) > 1 and isinstance(args[0], torch.Tensor)
    if dtype is torch.bool and is_pair and not isinstance(args[1], torch.dtype | None):
        dtype = torch.result_type(args[0], args[1])  # of the compared operands
    is_choice = target._schema.name == "aten::where"
    for a in (x for x in args if isinstance(x, torch.Tensor)):
        as_is = a is args[0] if is_choice else told.device.type != "cpu"
        steps = None if as_is or not is_widened(a.dtype, dtype) else of_copy(a.shape, a.stride())
        found.append((a.shape, steps or a.stride()))
    return found


def is_widened(own: torch.dtype, to: torch.dtype) -> bool:
    """Say whether ATen converts an operand to another type before it computes."""
    try:
        return own is not to and torch.promote_types(own, to) is to
    except RuntimeError:  # unsigned types and 8-bit floats do not promote
        return False


def power(
    target: Any, args: Sequence[Any], told: torch.Tensor, position: int
) -> tuple[Any, ...] | None:
    """The strides of a power of a number, or of `ldexp(x, k)`; the exponent's position is given.

    2 ** k is dense. With integer k, x * 2 ** k is written to memory like that of x, resized if x is
    broadcast.
    """
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    first, last = tensors[0], tensors[-1].dtype
    if position and first.is_floating_point() and not last.is_floating_point:
        if are_same(first.shape, told.shape):
            return of_copy(first.shape, first.stride())
        return elementwise(told.shape, [(a.shape, a.stride()) for a in tensors], False)
    given = computed(target, args, told)
    size, by_number = given[position][0], not position or first.dtype not in TENSOR_POWERS
    order = range(len(size)) if by_number else iteration(size, given[position:])
    if order is None:
        return None
    given[position] = (size, dense(size, order))
    return elementwise(told.shape, given, False)


def is_laid(shape: Sequence[Any], stride: Sequence[Any], order: Sequence[int]) -> bool:
    """Say whether dimensions are dense in an order; size-1 dimensions may be anywhere."""
    step: Any = 1
    for d in reversed(order):
        if not (is_same_size(shape[d], 1) or is_same_size(stride[d], step)):
            return False
        step = step * shape[d]
    return True


def is_suggested(shape: Sequence[Any], stride: Sequence[Any]) -> bool | None:
    """Say whether ATen suggests channels last for a tensor; None if symbols leave it open.

    As in `is_channels_last_strides`: strides do not decrease from the channels outwards.
    """
    least: Any = 0
    try:
        if holds(stride[1] == 0):
            return False
        for d in reversed(LAST[len(shape)]):
            falls = stride[d] < least, shape[d] == 0
            if holds(*falls) or (d == 0 and holds(least == stride[1])):
                return False
            least = stride[d] * shape[d]
    except ValueError:
        return None
    return True


def elementwise(
    shape: Sequence[Any], given: Sequence[tuple[Any, Any]], number: bool
) -> tuple[Any, ...] | None:
    """The strides that ATen's TensorIterator gives the result, for operands as (shape, strides).

    `number` says that one more operand is a number. Dense operands of equal shape and strides are
    treated as one row. None if symbolic strides leave the order open.
    """
    rank = len(shape)
    if not number and all(are_same(s, shape) for s, _ in given):
        for order in (range(rank), *([LAST[4]] if rank == 4 else [])):
            if all(is_laid(*t, order) for t in given):
                return dense(shape, order)
        stride = given[0][1]
        if all(are_same(t, stride) for _, t in given) and dense_order(shape, stride) is not None:
            return tuple(stride)
    found = iteration(shape, given)
    return None if found is None else dense(shape, found)


def viewed(old: Sequence[Any], stride: Sequence[Any], new: Sequence[Any]) -> tuple[Any, ...] | None:
    """The strides of a tensor viewed in another shape, as in ATen's `computeStride`.

    None if symbols leave them open, or there are no elements and the shape is another one.
    """
    if not old or any(is_same_size(n, 0) for n in old):
        return tuple(stride) if are_same(old, new) else None
    found, at, base, size, seen = [1] * len(new), len(new) - 1, stride[-1], 1, 1
    try:
        for d in reversed(range(len(old))):
            size = size * old[d]
            if d and holds(old[d - 1] == 1, stride[d - 1] == size * base):
                continue
            while at >= 0 and holds(seen < size, new[at] == 1):
                found[at] = seen * base
                seen = seen * new[at]
                at -= 1
            if d:
                base, size, seen = stride[d - 1], 1, 1
    except ValueError:
        return None
    return tuple(found)


def expanded(old: Sequence[Any], stride: Sequence[Any], new: Sequence[Any]) -> tuple[Any, ...]:
    """The strides of an expanded tensor: a new dimension has the stride of a dense one.

    The stride is 0 if the dimension is longer than 1, and so are all before it; for a number all
    are 0. A symbol is never 1, so two symbols are the same size.
    """
    rest = len(new) - len(old)
    found = [
        0 if is_same_size(n, 1) and not is_same_size(m, 1) else s
        for n, s, m in zip(old, stride, new[rest:], strict=True)
    ]
    for d in reversed(range(rest)):
        found.insert(0, found[0] * new[d + 1] if found and is_same_size(new[d], 1) else 0)
    return tuple(found)


def holds(*claims: bool | torch.SymBool) -> bool:
    """Say whether any claim about sizes is true, without guards; ValueError if it is open."""
    if any(statically_known_true(c) for c in claims):
        return True
    not_ = torch.sym_not
    if all(statically_known_true(not_(c)) for c in claims):  # type: ignore[no-untyped-call]  # torch
        return False
    raise ValueError("a claim that symbols leave open")


def indexed(x: torch.Tensor, places: Sequence[Any], shape: Sequence[Any]) -> tuple[Any, ...] | None:
    """The strides of x[places]: an iteration over the indices and the strided `x`.

    None for masks and symbolic sizes.
    """
    given = [(d, i) for d, i in enumerate(places) if i is not None]
    sizes = (*x.shape, *x.stride(), *shape, *(s for _, i in given for s in (*i.shape, *i.stride())))
    masks = any(i.dtype in (torch.bool, torch.uint8) for _, i in given)
    if masks or not given or not all(isinstance(s, int) for s in sizes):
        return None
    at = [d for d, _ in given]
    is_row = at == list(range(at[0], at[-1] + 1))
    rest = [d for d in range(x.dim()) if d not in at]
    before = [d for d in rest if is_row and d < at[0]]
    rank = len(shape) - len(rest)
    of_x: list[int] = [x.stride(d) for d in before] + [0] * rank
    of_x += [x.stride(d) for d in rest if d not in before]
    operands: list[tuple[Any, Any]] = [(shape, of_x)]
    first, last = len(before), len(before) + rank
    common = shape[first:last]  # the indices are broadcast first
    size = [1] * first + [*common] + [1] * (len(shape) - last)
    for _, i in given:
        step = expanded(i.shape, i.stride(), common)
        operands.append((size, viewed(common, step, size) or dense(size, range(len(size)))))
    return elementwise(shape, operands, False)


def of_copy(shape: Sequence[Any], steps: Sequence[Any]) -> tuple[Any, ...] | None:
    """The strides of a copy of a tensor: its own if it has no gaps, else dense in its order.

    A tensor without elements has no gaps.
    """
    if any(is_same_size(n, 0) for n in shape) or dense_order(shape, steps) is not None:
        return tuple(steps)
    order = iteration(shape, [(shape, steps)])
    return None if order is None else dense(shape, order)


def transformed(x: torch.Tensor, dims: Sequence[int], kept: int) -> list[int] | None:
    """The order of dimensions of a Fourier transform on CPUs, by MKL; `kept` of `dims` stay last.

    The others keep their order in `x`, with transformed ones innermost. Fake tensors of torch 2.13
    agree; in 2.11 they are sorted the other way, or not at all.
    """
    has_mkl: bool = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]  # so in torch
    if x.device.type != "cpu" or not dims or not has_mkl:
        return None
    steps = x.stride()
    known = all(isinstance(s, int) for s in steps)
    by_step = sorted(range(x.dim()), key=lambda d: -steps[d] if known else 0)
    order = by_step if known else iteration(x.shape, [(x.shape, steps)])
    if order is None:
        return None
    last = list(dims[len(dims) - kept :])
    moved = [d for d in order if d in dims and d not in last]
    return [d for d in order if d not in dims] + moved + last


def _is_joined(x: torch.Tensor, shifts: Sequence[Any], dims: Sequence[int] = ()) -> bool:
    """True if every step of a roll joins two nonempty parts, as far as sizes are known."""
    steps = [(k, x.shape[d]) for k, d in zip(shifts, dims, strict=False)]
    known = [k % n for k, n in steps if isinstance(k, int) and isinstance(n, int) and n]
    known += [k for k, _ in steps if isinstance(k, int)]  # a shift of 0 leaves a part empty
    return bool(dims) and 0 not in known


def _parts(size: Sequence[Any], *how: Any, kind: str) -> list[list[Any]]:
    """The sizes whose suggested formats decide: the two parts of a roll along one dimension."""
    if kind != "roll" or len(how[1]) != 1:
        return [[*size]]
    (k,), (d,) = how
    if not (isinstance(k, int) and isinstance(size[d], int) and size[d]):
        return [[*size]]
    cut = k % size[d]
    return [[*size[:d], n, *size[d % len(size) + 1 :]] for n in (cut, size[d] - cut)]


def iteration(shape: Sequence[Any], operands: Sequence[tuple[Any, Any]]) -> list[int] | None:
    """The dimensions in the order of ATen's TensorIterator, outermost first.

    `operands` are shapes and strides. ATen uses insertion sort. Two dimensions are compared by the
    first operand that broadcasts neither and has different strides; equal strides put the larger
    dimension outside. None if symbolic strides leave open which is larger; no guard is added.
    """

    def step(operand: tuple[Any, Any], d: int) -> Any:
        sizes, strides = operand
        own = d - len(shape) + len(sizes)
        return strides[own] if own >= 0 and is_same_size(sizes[own], shape[d]) else 0

    def is_outside(a: int, b: int) -> bool | None:
        for t in operands:
            p, q = step(t, a), step(t, b)
            if any(is_same_size(s, 0) for s in (p, q)):
                continue
            same = is_same_size(p, q)
            x, y = (shape[a], shape[b]) if same else (p, q)
            if holds(x > y):
                return True
            if not same:
                return False
        return None

    order = list(reversed(range(len(shape))))  # the innermost first
    try:
        for first in range(1, len(order)):
            at = first
            for k in reversed(range(first)):
                outside = is_outside(order[k], order[at])
                if outside:
                    order[k], order[at] = order[at], order[k]
                    at = k
                elif outside is not None:
                    break
    except ValueError:
        return None
    return order[::-1]


def dense(shape: Sequence[Any], order: Sequence[int]) -> tuple[Any, ...]:
    """Dense strides for dimensions in an order, outermost first."""
    found: list[Any] = [0] * len(shape)
    step: Any = 1
    for d in reversed(order):
        found[d] = step
        step = step * (max(1, shape[d]) if isinstance(shape[d], int) else shape[d])
    return tuple(found)


def laid_as_in_eager(op: Any, rule: Callable[..., Any]) -> Callable[..., Any]:
    """A decomposition of an op with a rule, changed to give eager's strides."""

    def call(*args: Any, **kwargs: Any) -> Any:
        out = rule(*args, **kwargs)
        if all(isinstance(t, torch.Tensor) for t in (out, args[0])):
            shared = torch._C._is_alias_of(out, args[0])  # type: ignore[attr-defined]  # no stub
            if shared and out.device.type == "cpu":  # nothing was moved, and the parts are views
                out = out.clone()
        if not isinstance(out, torch.Tensor) or (want := eager_strides(op, args, out)) is None:
            return out
        return torch.ops.aten.copy.default(out.new_empty_strided(out.shape, want), out)

    return call
