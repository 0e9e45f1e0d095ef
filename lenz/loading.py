"""A plan and its kernels as a callable. Another process may have compiled them.

Loading imports neither Dynamo, nor AOTAutograd, nor a pass of lenz.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from lenz.ir.plan import Boxed, CallStep, Plan
from lenz.machines import Counts, Functions, Loader, load_kernels
from lenz.plan.native import native, on_gpu
from lenz.plan.native_frame import TYPES, NotNative, TorchLayout
from lenz.plan.native_link import Unavailable, linked
from lenz.plan.native_objects import objects
from lenz.plan.python import own_names, signatures, source
from lenz.records import replace
from lenz.runtime import executor
from lenz.runtime.constants import packed
from lenz.runtime.native import address_of_kernel, addresses, method, places, plain_keys
from lenz.runtime.store import Store
from lenz.sym import Var

NONE: Mapping[str, Any] = {}
# Namespaces of torch's ops, arithmetic of sizes, lenz's random keys.
OWN = ("aten.", "prims.", "lenz.", "py.operator.", "py.math.", "py.torch.sym_")


def kernels(
    p: Plan, keys: Mapping[str, Mapping[str, str]], store: Store
) -> tuple[Functions, object]:
    """The kernels of a plan, and an object that owns them.

    `keys` are the store's keys of their code, by device and name. Raises LookupError if the store
    has lost a kernel.
    """

    def code(device: str, loader: Loader, counts: Counts) -> Mapping[str, bytes]:
        found = {name: store.get(loader.kind, key) for name, key in keys[device].items()}
        pieces = {name: piece for name, piece in found.items() if piece is not None}
        if len(pieces) < len(found):
            raise LookupError(f"the store has lost a kernel of {p.name}")
        return pieces

    return load_kernels(signatures(p), code)


def complete(p: Plan, constants: Mapping[str, torch.Tensor]) -> tuple[Plan, dict[str, bytes]]:
    """The plan with constants named by their content, and the bytes of each."""
    found = [packed(constants[c.name]) for c in p.constants]
    named = [replace(c, content=name) for c, (name, _) in zip(p.constants, found, strict=True)]
    return replace(p, constants=tuple(named)), dict(found)


def load(
    p: Plan, functions: Functions, alive: object = None,
    constants: Mapping[str, torch.Tensor] = NONE, objects: Mapping[str, Any] = NONE,
    otherwise: Callable[..., Sequence[Any]] | None = None, fast: bool = False,
    store: Store | None = None, watch: object = None,
) -> Boxed:  # fmt: skip
    """The callable of a plan. Python runs what native code does not, and is printed when it does.

    functions  the kernels; their code lives as long as `alive`
    otherwise  the fallback for calls that break an assumption of the plan
    fast       run native code if possible; `store` caches it
    watch      a `debug.watch.Watch` that sees each step

    Raises ValueError for a plan with a name that cannot be one in code.
    """
    own_names(p)  # native code has them too
    values = {**functions, **{c.name: aligned(constants[c.name]) for c in p.constants}}
    own = {o: objects[o] for o in p.objects}

    @cache
    def python() -> Boxed:
        module: dict[str, Any] = {"__name__": f"lenz.{p.name}", "__file__": f"<{p.name}>"}
        text = source(p, watched=watch is not None)
        exec(compile(text, f"<lenz {p.name}>", "exec"), module)
        module.update(values, watch=watch, _alive=alive)
        module.update((py, own[o]) for py, o in module["OBJECTS"].items())
        if otherwise is not None:
            module["otherwise"] = otherwise
        return module["call"]  # type: ignore[no-any-return]  # a Boxed, as printed

    def slow(args: list[Any]) -> Sequence[Any]:
        checks = sys.modules.get("lenz.frontend.untraced") if executor.modes() else None
        if checks is not None and not foreign(p) and (context := checks.unchecked()) is not None:
            with context:
                return (python() if quick is None else quick[0])(args)
        return python()(args)

    quick = fast_call(p, values, own, slow, store, alive) if fast else None
    return python() if quick is None else quick[0]


def foreign(p: Plan) -> list[str]:
    """Callees of a plan other than torch's own ops and lenz's random keys."""
    calls = [s.op for s in p.flat if isinstance(s, CallStep)]
    return [*p.objects, *(op for op in calls if not op.startswith(OWN))]


def fast_call(
    p: Plan, values: Mapping[str, Any], own: Mapping[str, Any], slow: Boxed,
    store: Store | None, alive: object = None,
) -> tuple[Boxed, Sequence[Var]] | None:  # fmt: skip
    """The native function of a plan, and the sizes in the order in which it determines them.

    None if only Python can run the plan.

    values  the constants, and the kernels: callables, or objects with their record
    own     the plan's objects
    slow    runs calls that the native function rejects
    """
    found = places()
    if found is None:
        return None
    handle, keys, mask, plain, negative, autograd, bare = found
    gpu = on_gpu(p)
    if gpu and not torch.cuda.is_available():
        return None
    tensors = {"cpu": plain, **({"cuda": plain_keys("cuda", mask)} if gpu else {})}
    ops = lambda op: getattr(op_of(op), "_schema", None), lambda name: bool(addresses((name,), gpu))
    try:
        layout = TorchLayout(handle, keys, mask, tensors, negative, autograd, bare, *ops)
        made = native(p, layout)
        imports = {name: address_of_kernel(values[name]) for name in signatures(p)}
        imports |= {name: id(type) for name, type in TYPES.items()} | addresses(made.shims, gpu)
        library = linked(made.text, imports, gpu, store)
    except (NotNative, Unavailable):
        return None
    given = objects(made, p, values, own, slow)
    call = method(library.addresses["call"], given, (library, values, own, alive))
    return call, tuple(made.sizes)


def op_of(op: str) -> Any:
    """The OpOverload of an op; None for a function of another kind."""
    found = executor.resolve(op, direct=False)
    return found if hasattr(found, "_schema") else None


def aligned(t: torch.Tensor) -> torch.Tensor:
    """The constant; on a GPU aligned to 16 bytes, as kernels assume."""
    if t.is_cpu or t.data_ptr() % 16 == 0:
        return t
    with torch.no_grad():
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t)
