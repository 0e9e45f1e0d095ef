"""A plan and its kernels as a callable. Another process may have compiled them.

Loading imports neither Dynamo, nor AOTAutograd, nor a pass of lenz.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from lenz.ir.dtype import dtype_named
from lenz.ir.graph import Named
from lenz.ir.plan import Plan
from lenz.machine.cpu.llvm.compile import compile_module, link
from lenz.machines import Counts, Functions, Loader, load_kernels
from lenz.plan.native import native
from lenz.plan.native_frame import Layout, Refused
from lenz.plan.native_text import IMPORTS
from lenz.plan.python import signatures, source
from lenz.runtime import executor
from lenz.runtime.constants import packed
from lenz.runtime.native import address_of, addresses, method, places, raise_error
from lenz.runtime.store import Store
from lenz.sym import Int

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
    fast: bool = False,
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
    return _native(p, functions, module, call) or call if fast else call


def _native(p: Plan, functions: Functions, module: Mapping[str, Any], slow: Boxed) -> Boxed | None:
    """The native function of a plan; None where only the Python function runs it."""
    found, imports = places(), addresses(tuple(IMPORTS))
    if found is None or imports is None:
        return None
    known = found
    types = id(torch.Tensor), id(torch.nn.Parameter)
    try:
        made = native(p, Layout(*known, types, id(int)), _mutates)
    except Refused:
        return None
    kernels = {name: address_of(f) for name, f in functions.items()}
    library = link(compile_module(made.text, level=0), ["call"], {**imports, **kernels})
    own = tuple([_object(x, module, slow) for x in made.objects])
    return method(library.addresses["call"], own, (library, module))


def _mutates(op: str) -> bool:
    """True unless the schema of an op says that it writes nothing."""
    schema = getattr(executor.resolve(op), "_schema", None)
    return schema is None or bool(schema.is_mutable)


def _object(what: Any, module: Mapping[str, Any], slow: Boxed) -> Any:
    """What the native function finds in its `self`."""
    match what:
        case "slow":
            return slow
        case "raise_error":
            return raise_error
        case "detach":
            return torch.Tensor.detach
        case str():
            return getattr(executor, what)
        case ("constant", name):
            return module[name]
        case ("op", name):
            return executor.resolve(name)
        case ("names", names):
            return names
        case ("value", atom, sequence, _):
            return _value(atom, tuple if sequence == "tuple" else list)
    raise TypeError(f"{what!r} is no object of a plan")


def _value(a: Any, sequence: Any) -> Any:
    """The Python value of an atom."""
    match a:
        case tuple():
            return sequence([_value(x, sequence) for x in a])
        case Int():
            return a.value
        case Named("device", value):
            return torch.device(value)
        case Named("op", value):
            return executor.resolve(value)
        case Named("dtype", value):
            return getattr(torch, str(dtype_named(value).torch).removeprefix("torch."))
        case Named(_, value):
            found: Any = torch
            for name in value.split("."):
                found = getattr(found, name)
            return found
        case _:
            return a


def _aligned(t: torch.Tensor) -> torch.Tensor:
    """The constant; on a GPU at a multiple of 16 bytes, as kernels assume."""
    if t.is_cpu or t.data_ptr() % 16 == 0:
        return t
    with torch.no_grad():
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t)
