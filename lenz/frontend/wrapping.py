"""Rebuilds AOTAutograd's wrappers of compiled halves from data, without a trace.

AOTAutograd describes arguments and results by classes of plain values. These are written as JSON,
and read back with a list of allowed classes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import is_dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo  # before AOTAutograd, whose modules import it
import torch._functorch.config as functorch_config
from torch._functorch._aot_autograd import descriptors, functional_utils, runtime_wrappers, schemas
from torch._guards import TracingContext
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx import GraphModule

from lenz.frontend.asked import configuring
from lenz.frontend.identity import Untold
from lenz.ir.plan import Boxed

TYPES: Mapping[str, type] = {
    t.__name__: t
    for t in (torch.Tensor, FunctionalTensor, int, float, bool, type(None), torch.SymInt)
}
VIEWS: Any = torch._C._functionalization
INVERSE: Any = getattr(VIEWS, "InverseReturnMode", None)
# Classes of schemas.py, and all of descriptors.py, which name arguments and results.
CLASSES = (
    "ViewAndMutationMeta", "InputAliasInfo", "OutputAliasInfo", "PlainTensorMeta",
    "MemoryFormatMeta",
)  # fmt: skip
ENUMS = ("OutputType", "MutationType")
ALIASES = ("alias_of_input", "alias_of_intermediate", "alias_of_intermediate_save_as_output",
           "alias_of_intermediate_base_is_user_output")  # fmt: skip
NONE = ("tokens", "num_backward_tokens", "num_graphsafe_rng_states", "is_rng_op_functionalized",
        "num_opaque_objects_saved_for_bw", "traced_tangents",
        "indices_of_inputs_that_requires_grad_with_mutations_in_bw")  # fmt: skip


def described() -> Any:
    """Return AOTAutograd's metadata of the graph that it has just compiled."""
    context = TracingContext.try_get()
    return context.fw_metadata if context is not None else None


def as_json(metadata: Any) -> Any:
    """Return the metadata as JSON. Raises Untold if it holds more than plain values."""
    has_more = any(getattr(metadata, name, None) for name in NONE)
    if type(metadata) is not schemas.ViewAndMutationMeta or has_more:
        raise Untold
    return _plain(metadata)


def _plain(v: Any) -> Any:
    if v is None or type(v) in (bool, int, float, str):
        return v
    if type(v) is list:
        return [_plain(x) for x in v]
    if isinstance(v, tuple):
        return {"tuple": [_plain(x) for x in v]}
    if type(v) is set:
        return {"set": sorted(v)}
    if type(v) is dict:
        return {"dict": [[_plain(k), _plain(x)] for k, x in v.items()]}
    if isinstance(v, Enum) and type(v).__name__ in ENUMS:
        return {"enum": type(v).__name__, "name": v.name}
    if isinstance(v, type) and TYPES.get(v.__name__) is v:
        return {"type": v.__name__}
    if isinstance(v, torch.dtype | torch.memory_format):
        return {"torch": str(v).removeprefix("torch.")}
    if INVERSE is not None and isinstance(v, INVERSE):
        return {"inverse": v.value}
    name = type(v).__name__
    if name == "ViewMetaSequence":  # how a result is a view of an argument
        if any(not hasattr(m, "as_tuple") for m in v.sequence):
            raise Untold
        if any(m.has_symbolic_inputs for m in v.sequence):
            return None  # as in torch's own cache: such views are not replayed
        return {"views": [[type(m).__name__, _plain(m.as_tuple())] for m in v.sequence]}
    if _class(name) is type(v):
        state = {k: vars(v)[k] for k in sorted(vars(v))}
        if name == "OutputAliasInfo" and state["output_type"].name not in ALIASES:
            state["view_meta_sequence"] = None  # nothing replays it
        return {"class": name, "state": {k: _plain(x) for k, x in state.items()}}
    raise Untold


def _class(name: str) -> Any:
    found = getattr(schemas, name, None) if name in CLASSES else getattr(descriptors, name, None)
    return found if isinstance(found, type) and is_dataclass(found) else None


def from_json(v: Any) -> Any:
    """Return the metadata in such JSON. Raises ValueError if it is from another version."""
    if type(v) is list:
        return [from_json(x) for x in v]
    if type(v) is not dict:
        return v
    match v:
        case {"tuple": items}:
            return tuple(map(from_json, items))
        case {"set": items}:
            return set(items)
        case {"dict": items}:
            return {from_json(k): from_json(x) for k, x in items}
        case {"enum": name, "name": member} if name in ENUMS:
            return getattr(schemas, name)[member]
        case {"type": name}:
            return TYPES[name]
        case {"torch": name}:
            return getattr(torch, name)
        case {"inverse": number} if INVERSE is not None:
            return INVERSE(number)
        case {"views": views} if all(name.endswith("_ViewMeta") for name, _ in views):
            made = object.__new__(functional_utils.ViewMetaSequence)
            made.sequence = [getattr(VIEWS, name)(from_json(args)) for name, args in views]
            return made
        case {"class": name, "state": state} if _class(name) is not None:
            made = object.__new__(_class(name))
            vars(made).update({k: from_json(x) for k, x in state.items()})
            return made
    raise ValueError(f"no value of AOTAutograd: {v!r}")


def detached(metadata: Any, gradients: Sequence[bool]) -> list[int]:
    """Return the arguments to detach: non-leaves for which the graph returns no gradient.

    gradients  of each argument, whether the backward half returns one
    """
    if len(gradients) != len(metadata.input_info):
        raise Untold
    return [
        i
        for i, (given, info) in enumerate(zip(gradients, metadata.input_info, strict=True))
        if not given and info.requires_grad and not info.is_leaf
        and not (info.mutation_type.name == "MUTATED_IN_GRAPH" and info.mutates_storage_metadata)
    ]  # fmt: skip


def are_leaves(metadata: Any) -> bool:
    """Say whether all arguments are leaves: `detached` is empty for them."""
    return all(info.is_leaf or not info.requires_grad for info in metadata.input_info)


# Older versions of torch compile a backward half when it is called, or never.
CAN_FORCE = hasattr(functorch_config, "force_non_lazy_backward_lowering")


def now() -> AbstractContextManager[Any]:
    """Make AOTAutograd compile the backward half with the forward half."""
    return configuring({"force_non_lazy_backward_lowering": True} if CAN_FORCE else {})


def wrapped(
    metadata: Any,
    detach: Sequence[int],
    forward: Boxed,
    backward: Boxed | None,
    traced: Callable[[], GraphModule],
) -> Callable[..., Any]:
    """Return AOTAutograd's callable for compiled halves.

    `forward` is the whole graph if there is no backward half; `traced` returns the backward half as
    a graph, for compiled autograd.
    """
    # AOTAutograd counts its graphs from 0.
    config = SimpleNamespace(keep_inference_input_mutations=True, aot_id=id(metadata))
    casts = torch._C._is_any_autocast_enabled()
    if backward is None:
        around = runtime_wrappers.RuntimeWrapper(
            indices_of_inps_to_detach=[], trace_joint=False, disable_amp=casts
        )
        run = around.post_compile(forward, config, runtime_metadata=metadata)  # type: ignore[arg-type]  # what it reads of a config
    else:
        given = {
            "compiled_fw_func": forward,
            "compiled_bw_func": backward,
            "maybe_subclass_meta": None,
            "num_symints_saved_for_bw": metadata.num_symints_saved_for_bw,
            "num_symints_saved_for_bw_": metadata.num_symints_saved_for_bw,
            "backward_state_indices": [],
            "disable_amp": casts,
            "indices_of_inps_to_detach": list(detach),
            "lazy_backward_info": runtime_wrappers.CachedAutogradLazyBackwardCompileInfo(traced),
            "bw_compiler": None,
            "aot_config": config,
            "fw_metadata": metadata,
            "try_save_cache_entry": None,
        }
        function: Any = runtime_wrappers.AOTDispatchAutograd.post_compile
        spec = getattr(runtime_wrappers, "AOTDispatchAutogradCompileSpec", None)  # from torch 2.13
        names = inspect.signature(spec or function).parameters
        own = {k: v for k, v in given.items() if k in names}
        run = function(spec(**own)) if spec is not None else function(**own)
    return lambda *args: run(list(args))
