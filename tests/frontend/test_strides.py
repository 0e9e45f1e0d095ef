"""The strides of elementwise results, beside those that eager gives, where dimensions are 1 too."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._prims_common import suggest_memory_format

from lenz.frontend.strides import eager_strides, expanded, rule_of, viewed

# Made of several operations before lenz sees them, or of two that draw.
COMPOSED = ("relu6", "isfinite", "float_power", "ldexp", "pow.Scalar", "rrelu")
WHOLE = ("bitwise", "__", "gcd", "lcm")  # ops of integers


def made(chance: random.Random, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor with its dimensions in any order in memory, and gaps now and then."""
    order = chance.sample(range(len(shape)), len(shape))
    gap = chance.random() < 0.3
    whole = torch.zeros([shape[d] + (gap and d == order[-1]) for d in order], dtype=dtype)
    turned = whole.permute([order.index(d) for d in range(len(shape))])
    steps = [chance.choice((1, 2, 3)) if n == 1 else 1 for n in shape]
    return turned[tuple(slice(0, n, step) for n, step in zip(shape, steps, strict=True))]


def arguments(chance: random.Random, op: Any) -> list[Any]:
    """Arguments whose shapes broadcast, now and then of several types."""
    is_whole = any(x in op._schema.name for x in WHOLE)
    base = [chance.randint(1, 3) for _ in range(chance.randint(1, 4))]
    is_same, found = chance.random() < 0.5, list[Any]()
    types = (torch.int32, torch.uint8) if is_whole else (torch.float32, torch.float64, torch.int32)
    is_mixed = chance.random() < 0.5
    for a in op._schema.arguments:
        kind, dtype = str(a.type), chance.choice(types) if is_mixed else types[0]
        if a.name in ("condition", "mask"):
            dtype = torch.bool
        if kind in ("Tensor", "Optional[Tensor]"):
            first = chance.randrange(len(base)) if found and not is_same else 0
            shape = [n if is_same else chance.choice((1, n)) for n in base[first:]]
            found.append(made(chance, shape, dtype))
        elif a.kwarg_only:
            break
        elif kind == "number":
            found.append(1 if is_whole else 0.5)
        elif a.has_default_value():
            found.append(a.default_value)
        else:
            found.append({"float": 0.5, "int": 0, "bool": False}.get(kind))
    return found


def test_elementwise_ops_have_the_strides_of_an_iteration() -> None:
    seen, wrong = 0, {}
    for name in sorted(dir(torch.ops.aten)):
        packet = getattr(torch.ops.aten, name)
        for op in (getattr(packet, o) for o in getattr(packet, "overloads", list)()):
            plain = len(op._schema.returns) == 1 and not op._schema.is_mutable
            plain &= torch.Tag.pointwise in op.tags and rule_of(op) is not None
            if not plain or str(op)[5:].startswith(COMPOSED):
                continue
            chance = random.Random(str(op))
            for _ in range(24):
                args = arguments(chance, op)
                try:
                    want = op(*args)
                except (RuntimeError, TypeError, NotImplementedError):
                    continue  # another type of elements
                if not isinstance(want, Tensor):
                    continue
                told = torch.empty(want.shape, dtype=want.dtype)
                got = eager_strides(op, args, told)
                seen += 1
                if (told.stride() if got is None else got) != want.stride():
                    wrong[str(op)] = [x.stride() for x in args if isinstance(x, Tensor)], got
    assert not wrong
    assert seen > 1500


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_ldexp_of_all_types() -> None:
    op, types = torch.ops.aten.ldexp.Tensor, (torch.float32, torch.bfloat16, torch.int32)
    for x, k in product(types, types):
        chance = random.Random(0)
        for _ in range(60):
            shape = [chance.randint(1, 3) for _ in range(chance.randint(1, 4))]
            other = [chance.choice((1, n)) for n in shape[chance.randrange(len(shape)) :]]
            args = [made(chance, shape, x), made(chance, other, k)][:: chance.choice((1, -1))]
            try:
                want = op(*args)
            except RuntimeError:
                continue  # x is a half, and k is of floats
            told = torch.empty(want.shape, dtype=want.dtype)
            got = eager_strides(op, args, told) or told.stride()
            assert got == want.stride(), (x, k, [(a.shape, a.stride()) for a in args])


def test_views_have_the_strides_that_aten_computes() -> None:
    chance = random.Random(0)
    for _ in range(500):
        x = made(chance, [chance.randint(1, 3) for _ in range(chance.randint(1, 4))], torch.float32)
        sizes = [n for n in x.shape if n > 1 or chance.random() < 0.5]
        for _ in range(chance.randint(0, 2)):
            sizes.insert(chance.randint(0, len(sizes)), 1)
        assert viewed(x.shape, x.stride(), sizes) == x.view(sizes).stride(), (x.stride(), sizes)


def test_copies_have_the_strides_that_eager_keeps() -> None:
    """What padding leaves lay dense where one row or column was left, and keeps its strides."""
    chance, aten = random.Random(1), torch.ops.aten
    for _ in range(500):
        x = made(chance, [chance.randint(1, 4) for _ in range(chance.randint(1, 4))], torch.float32)
        x = x[..., : chance.choice((0, 4, 4, 4))]
        pad = [-1 if chance.random() < 0.4 and n > 0 else 0 for n in reversed(x.shape)]
        sides = [side for width in pad for side in (width, 0)]
        calls: list[tuple[Any, list[Any]]] = [(aten.constant_pad_nd.default, [x, sides])]
        like = (aten.zeros_like, aten.nan_to_num, aten.clone, aten._to_copy, aten.exponential)
        calls += [(op.default, [x]) for op in like]
        calls += [(aten.huber_loss.default, [x, x, 0]), (aten.sort.default, [x])]
        calls += [(aten.index_fill.int_Scalar, [x, 0, torch.tensor([0]), 2])] * (len(x) > 0)
        for op, args in calls:
            found = op(*args)
            want = found if isinstance(found, Tensor) else found[0]
            told = torch.empty(want.shape)
            got = eager_strides(op, args, told)
            assert (got or told.stride()) == want.stride(), (op, x.shape, x.stride(), args[1:])
            assert want is found or found[1].stride() == want.stride(), "a second result beside it"


def test_expanded_tensors_have_the_strides_that_aten_computes() -> None:
    chance = random.Random(2)
    for _ in range(500):
        x = made(chance, [chance.randint(1, 3) for _ in range(chance.randint(0, 3))], torch.float32)
        sizes = [chance.randint(1, 3) if n == 1 else n for n in x.shape]
        sizes = [chance.randint(1, 3) for _ in range(chance.randint(0, 3))] + sizes
        assert expanded(x.shape, x.stride(), sizes) == x.expand(sizes).stride(), (x.stride(), sizes)


aten = torch.ops.aten
F32, I64 = torch.float32, torch.int64
# Calls on images whose results have the memory format of the argument, or one of channels last.
FORMATTED: dict[Any, Any] = {
    aten.native_batch_norm.default: lambda x: (x, None, None, None, None, True, 0.1, 1e-5),
    aten.native_batch_norm_backward.default: lambda x: (
        torch.ones(x.shape), x, None, None, None, of(x), of(x), True, 1e-5, [True] * 3,
    ),
    aten.native_group_norm.default: lambda x: (
        x.contiguous(memory_format=suggest_memory_format(x)),
        None, None, *x.shape[:2], x[0, 0].numel(), 1, 1e-5,
    ),
    aten.channel_shuffle.default: lambda x: (x, 1),
    aten.roll.default: lambda x: (x, [len(x) % 2 + 1], [x.stride(0) % x.dim()]),
    aten.replication_pad2d.default: lambda x: (x, [1] * 4),
    aten.replication_pad3d.default: lambda x: (x, [1] * 6),
    aten.replication_pad2d_backward.default: lambda x: (F.pad(x, [1] * 4), x, [1] * 4),
    aten.replication_pad3d_backward.default: lambda x: (F.pad(x, [1] * 6), x, [1] * 6),
    aten.max_unpool2d.default: lambda x: (
        x, torch.zeros(x.shape, dtype=torch.int64), [*x.shape[2:]],
    ),
}  # fmt: skip


def of(x: Tensor) -> Tensor:
    return torch.ones(x.shape[1])


@pytest.mark.parametrize("op", FORMATTED, ids=str)
def test_formats_of_images_in_any_layout(op: Any) -> None:
    """Where dimensions have one element, the format of an image is what ATen takes it for."""
    chance = random.Random(str(op))
    deep = "3d" in str(op)
    for _ in range(150):
        rank = 5 if deep else 4 if "2d" in str(op) else chance.choice((4, 5))
        shape = [chance.choice((1, 1, 2, 3)) for _ in range(rank)]
        x = made(chance, shape, torch.float32)
        if chance.random() < 0.3:
            kinds = {4: torch.channels_last, 5: torch.channels_last_3d}
            x = x.contiguous(memory_format=kinds[rank])
        if chance.random() < 0.3:
            steps = zip(shape, x.stride(), strict=True)
            x = x.as_strided(shape, [chance.choice((1, 2, 7)) if n == 1 else s for n, s in steps])
        args = FORMATTED[op](x)
        y = op(*args)
        y = y[0] if isinstance(y, tuple) else y
        found = eager_strides(op, args, y)
        assert found is None, f"{shape} {x.stride()}: {found} instead of {y.stride()}"


def test_one_index_in_any_layout() -> None:
    """The ones that ATen appends to an index have strides, which order dimensions of one."""
    chance = random.Random(0)
    for _ in range(500):
        x = made(chance, [chance.choice((1, 1, 2, 3)) for _ in range(chance.randint(1, 4))], F32)
        at = made(chance, [chance.choice((1, 2, 3)) for _ in range(chance.randint(0, 3))], I64)
        places = [None] * chance.randrange(x.dim()) + [at]
        y = aten.index.Tensor(x, places)
        found = eager_strides(aten.index.Tensor, (x, places), y)
        assert found is None, f"{x.shape} {x.stride()} {at.stride()}: {found} for {y.stride()}"


def test_several_indices_that_broadcast() -> None:
    """ATen expands them to one shape first: a dimension that grows has no stride of its own."""
    chance, several = random.Random(3), 0
    for _ in range(2000):
        x = made(chance, [chance.randint(1, 3) for _ in range(chance.randint(2, 4))], F32)
        common = [chance.randint(1, 3) for _ in range(3)]
        places: list[Tensor | None] = []
        for _ in range(chance.randint(2, x.dim())):
            shape = [n if chance.random() < 0.6 else 1 for n in common][chance.randint(0, 3) :]
            places.append(made(chance, shape, I64) if chance.random() < 0.7 else None)
        several += sum(i is not None for i in places) > 1
        if any(i is not None for i in places):
            y = aten.index.Tensor(x, places)
            found = eager_strides(aten.index.Tensor, (x, places), y)
            assert found is None, f"{x.stride()} {places}: {found} for {y.stride()}"
    assert several > 500


def test_a_roll_by_nothing_is_no_image_for_any_size() -> None:
    """Eager joins an empty part with the rest, which is no longer channels last."""

    def f(x: Tensor) -> Tensor:
        return x.roll((0, 3), (0, 1))

    run = torch.compile(f, backend="lenz", dynamic=True)
    for n in (4, 5):
        x = torch.randn(n, 10, n + 2, 3).to(memory_format=torch.channels_last)
        assert run(x).stride() == f(x).stride()
