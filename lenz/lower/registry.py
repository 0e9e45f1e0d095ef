"""The lowering of each aten op. Filled when the family files are imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from lenz import ops
from lenz.ir.op import Op, all_ops
from lenz.records import dataclass
from lenz.traits import has

Lowering: TypeAlias = Callable[..., Any]
F = TypeVar("F", bound=Lowering)


@dataclass(frozen=True, slots=True)
class Entry:
    """A lowering. `any_dtype`: it only moves elements, so every type is fine.

    `float8`: it only moves and converts, so 8-bit floats are fine.
    """

    fn: Lowering
    any_dtype: bool = False
    float8: bool = False


_BY_OVERLOAD: dict[str, Entry] = {}


def lowering(*names: str, any_dtype: bool = False, float8: bool = False) -> Callable[[F], F]:
    """Register fn(builder, *args, **kwargs) for overloads ("add.Tensor") or packets ("relu").

    Tensors arrive as `Value`, sizes as Sym, the rest as in FX. It returns a `Value`, a tuple of
    them, or raises `Decline(reason)`. Names without a namespace are aten's.
    """

    def enter(fn: F) -> F:
        for name in names:
            if name in _BY_OVERLOAD:
                raise ValueError(f"{name} is lowered twice")
            _BY_OVERLOAD[name] = Entry(fn, any_dtype, float8)
        return fn

    return enter


def entry_for(overload: str) -> Entry | None:
    """The lowering of "aten.add.Tensor": by overload, else by packet, else None."""
    namespace, packet, name = overload.split(".", 2)
    prefix = "" if namespace == "aten" else f"{namespace}."
    return _BY_OVERLOAD.get(f"{prefix}{packet}.{name}") or _BY_OVERLOAD.get(f"{prefix}{packet}")


def native_packets() -> frozenset[str]:
    """Registered names ("add.Tensor" or "relu")."""
    return frozenset(_BY_OVERLOAD)


def native_ops() -> frozenset[str]:
    """Ops that have a lowering ("aten.add.Tensor", "aten.relu"); the frontend keeps them whole.

    Ops that mostly stay library calls, such as products, are not among them.
    """
    names = (n if n.startswith("prims.") else f"aten.{n}" for n in _BY_OVERLOAD)
    return frozenset(n for n in names if not has(n, "library"))


def is_unextended() -> bool:
    """Say whether all lowerings and ops are lenz's own."""
    own = all(e.fn.__module__.startswith("lenz.") for e in _BY_OVERLOAD.values())
    return own and len(all_ops()) == ops.OWN


def pointwise_ops() -> dict[str, Op]:
    """aten packet -> scalar op, for ops lowered one to one by their table entry."""
    return {name: op for op in all_ops() for name in op.aten}
