"""A drop-in for `dataclasses.dataclass` that makes a class in a quarter of the time.

    @dataclass(frozen=True, slots=True)
    class Point:
        x: int
        y: int

The standard one compiles six methods per class, which takes 430 us. A cold start makes 133 classes,
a warm one 74. Here only `__init__` is compiled (100 us), and the other methods are closures. Only
the type checker sees that a class is frozen: a check at run time needs two more methods and makes
`__init__` slower.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import field, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

__all__ = ["dataclass", "field", "replace"]

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(
        *, frozen: bool = False, eq: bool = True, repr: bool = True, **options: Any
    ) -> Callable[[type], type]:
        """Turn a class into a dataclass; the options are those of `dataclasses.dataclass`.

        Objects that can be changed have no hash. A method that the class defines itself is kept.
        """

        def made(cls: type) -> type:
            own = vars(cls)
            new = dataclasses.dataclass(eq=False, repr=False, **options)(cls)
            methods = (_compared(new, frozen) if eq else {}) | (_shown(new) if repr else {})
            for name, method in methods.items():
                if name not in own:
                    setattr(new, name, method)
            return new

        return made


def _compared(cls: Any, frozen: bool) -> dict[str, Any]:
    """`==`, by the class and the tuple of its fields, and the hash of that tuple."""
    values = _values([f.name for f in dataclasses.fields(cls) if f.compare])

    def equal(self: Any, other: Any) -> Any:
        same = other.__class__ is self.__class__
        return values(self) == values(other) if same else NotImplemented

    def hashed(self: Any) -> int:
        return hash(values(self))

    return {"__eq__": equal, "__hash__": hashed if frozen else None}


def _values(names: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
    """A function from an object to the tuple of these fields."""
    if not names:
        return lambda x: ()
    get: Any = attrgetter(*names)
    return get if len(names) > 1 else lambda x: (get(x),)


def _shown(cls: Any) -> dict[str, Any]:
    names = [f.name for f in dataclasses.fields(cls) if f.repr]

    def shown(self: Any) -> str:
        return f"{cls.__qualname__}({', '.join(f'{n}={getattr(self, n)!r}' for n in names)})"

    return {"__repr__": shown}
