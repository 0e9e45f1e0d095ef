"""A plan and its kernels as a callable. Another process may have compiled them.

Loading imports neither Dynamo, nor AOTAutograd, nor a pass of lenz.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from lenz.ir.plan import Plan
from lenz.machines import Counts, Functions, Loader, load_kernels
from lenz.plan.python import signatures, source
from lenz.runtime.constants import packed
from lenz.runtime.store import Store

Boxed: TypeAlias = Callable[[list[Any]], Sequence[Any]]
NONE: Mapping[str, Any] = {}


def kernels(
    p: Plan, keys: Mapping[str, Mapping[str, str]], store: Store
) -> tuple[Functions, object]:
    """The kernels of a plan, and an object that must live as long as they do.

    `keys` are the store's keys of their code, by device and name. Raises LookupError if the store
    has lost one.
    """

    def code(device: str, loader: Loader, counts: Counts) -> Mapping[str, bytes]:
        found = {name: store.get(loader.kind, key) for name, key in keys[device].items()}
        pieces = {name: piece for name, piece in found.items() if piece is not None}
        if len(pieces) < len(found):
            raise LookupError(f"the store has lost a kernel of {p.name}")
        return pieces

    return load_kernels(signatures(p), code)


def complete(p: Plan, constants: Mapping[str, torch.Tensor]) -> tuple[Plan, dict[str, bytes]]:
    """The plan with its constants named by their content, and their bytes by these names."""
    found = [packed(constants[c.name]) for c in p.constants]
    named = [replace(c, content=name) for c, (name, _) in zip(p.constants, found, strict=True)]
    return replace(p, constants=tuple(named)), dict(found)


def load(
    p: Plan,
    functions: Functions,
    alive: object = None,
    constants: Mapping[str, torch.Tensor] = NONE,
    objects: Mapping[str, Any] = NONE,
    otherwise: Callable[..., Sequence[Any]] | None = None,
) -> Boxed:
    """Print a plan as a module, execute it, and put kernels, constants and objects into it.

    functions  the kernels; their code lives as long as `alive`
    otherwise  the fallback for calls that break an assumption of the plan
    """
    module: dict[str, Any] = {"__name__": f"lenz.{p.name}", "__file__": f"<{p.name}>"}
    exec(compile(source(p), f"<lenz {p.name}>", "exec"), module)
    module.update(functions)
    module.update((c.name, _aligned(constants[c.name])) for c in p.constants)
    module.update((py, objects[o]) for py, o in module["OBJECTS"].items())
    if otherwise is not None:
        module["otherwise"] = otherwise
    module["_alive"] = alive
    call: Boxed = module["call"]
    return call


def _aligned(t: torch.Tensor) -> torch.Tensor:
    """The constant; on a GPU at a multiple of 16 bytes, as kernels assume."""
    if t.is_cpu or t.data_ptr() % 16 == 0:
        return t
    with torch.no_grad():
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t)
