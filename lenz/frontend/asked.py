"""A Dynamo graph as text: graphs with equal text give equal AOTAutograd halves.

The text holds everything that AOTAutograd and lenz read: calls and arguments, the types of the
graph's arguments, facts about their sizes, and torch's global state. Some graphs have no text:
those with data-dependent sizes, arguments that share memory, custom and higher-order ops, stored
tensors, active modes and hooks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any

import torch
import torch._functorch.config as functorch_config
from torch._C._dynamo.guards import GlobalStateGuard
from torch._guards import TracingContext, tracing
from torch.fx import GraphModule, Node
from torch.fx.node import _get_qualified_name
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from lenz.frontend.guards import ask_again, is_backed, texts_of, told_since
from lenz.frontend.identity import PLAIN, IdentityText, Untold
from lenz.frontend.symbols import SymbolMap, about
from lenz.frontend.values import hint_of, storage_of

if TYPE_CHECKING:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

OWN = ("torch.", "_operator.", "math.", "getattr")
# Settings that composite ops read to choose the op that does the work.
CHOICES = (
    "_get_cudnn_enabled", "_get_cudnn_benchmark", "_get_cudnn_deterministic",
    "_get_cudnn_sdp_enabled", "_get_flash_sdp_enabled", "_get_math_sdp_enabled",
    "_get_mem_efficient_sdp_enabled", "_get_overrideable_sdp_enabled", "_get_sdp_priority_order",
    "_get_mkldnn_enabled",
    "_get_math_sdp_allow_fp16_bf16_reduction", "_get_linalg_preferred_backend",
)  # fmt: skip


def asked(gm: Any, inputs: Sequence[Any]) -> str | None:
    """Return the text of a graph with its real arguments; None if it has none."""
    context = TracingContext.try_get()
    is_split = getattr(context, "ddp_optimizer_ctx", None) is not None
    if not isinstance(gm, GraphModule) or context is None or is_split:
        return None
    try:
        env = context.fake_mode.shape_env if context.fake_mode is not None else None
        return "\n".join([*_state(), *_arguments(gm, inputs, env), *_calls(gm)])
    except (Untold, RuntimeError):  # torch raises it for a function without a name
        return None


def state() -> str:
    """Return torch's state that tracing reads. Raises Untold if it has no text."""
    return "\n".join(_state())


def configured() -> dict[str, Any]:
    """Return those of AOTAutograd's settings that are plain values."""
    found: Any = functorch_config.save_config_portable()  # it has no annotations
    return {k: v for k, v in found.items() if type(v) in (bool, int, float, str, type(None))}


def configuring(values: dict[str, Any]) -> AbstractContextManager[Any]:
    """Return a context manager that sets AOTAutograd's settings."""
    how: AbstractContextManager[Any] = functorch_config.patch(values)
    return how


def ambient() -> dict[str, Any]:
    """Return the state of autograd and autocast and the default dtype, as plain data."""
    casts = [
        (d, str(torch.get_autocast_dtype(d)).removeprefix("torch."), torch.is_autocast_enabled(d))
        for d in ("cpu", "cuda")
    ]
    dtype = str(torch.get_default_dtype()).removeprefix("torch.")
    return {"grad": torch.is_grad_enabled(), "autocast": casts, "dtype": dtype}


def restore(found: Mapping[str, Any], stack: ExitStack) -> None:
    """Restore the state that `ambient` returned, until the stack exits."""
    stack.enter_context(torch.set_grad_enabled(found["grad"]))
    stack.callback(torch.set_default_dtype, torch.get_default_dtype())
    torch.set_default_dtype(getattr(torch, found["dtype"]))
    for device, dtype, is_on in found["autocast"]:
        stack.enter_context(torch.autocast(device, getattr(torch, dtype), enabled=is_on))


def _state() -> Iterator[str]:
    functions: Any = _get_current_function_mode_stack  # it has no annotations
    has_hooks = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    is_inner = torch._C._functorch.peek_interpreter_stack() is not None
    table = torch._decomp.decomposition_table.values()
    is_own = all((f.__module__ or "").startswith("torch.") for f in table)
    if _get_current_dispatch_mode_stack() or functions() or has_hooks or is_inner or not is_own:
        raise Untold
    guard: Any = GlobalStateGuard()
    yield str(guard.__getstate__())
    yield f"{torch.is_inference_mode_enabled()} {torch.backends.mha.get_fastpath_enabled()}"
    yield functorch_config.get_hash().hex()
    for name in CHOICES:
        found = getattr(torch._C, name, None)
        yield f"{name} {found() if found is not None else None}"
    impls = (k for k in torch.library._impls if k.startswith("aten/") and not k.endswith("Meta"))
    yield " ".join(sorted(impls))


def _arguments(gm: GraphModule, inputs: Sequence[Any], env: ShapeEnv | None) -> Iterator[str]:
    holes, text = gm.graph.find_nodes(op="placeholder"), IdentityText()
    seen: set[int | None] = set()
    for n, real in zip(holes, inputs, strict=True):
        # Not traced by Dynamo in this process; or a list, which capture flattens.
        if "example_value" not in n.meta or isinstance(real, (list, tuple, dict)):
            raise Untold
        fake, kind = n.meta["example_value"], type(real).__name__
        if isinstance(real, torch.Tensor):
            if type(real) not in PLAIN or real.layout is not torch.strided:
                raise Untold
            if storage_of(real) in seen:
                raise Untold
            seen.add(storage_of(real))
            # Writes that were traced may have given it other sizes and strides.
            if not isinstance(fake, torch.Tensor) or _numbers(fake) != _numbers(real):
                raise Untold
            kind += f" {real.is_leaf:d}{real.is_inference():d}"
        source = getattr(n, "_dynamo_source", None)
        static = n.meta.get("tensor_dict", {}).get("_dynamo_static_input_type")
        yield f"{n.name} {getattr(source, 'name', source)!r} {static} {kind} {text.value(fake)}"
    if env is not None:
        if not is_backed(env):
            raise Untold
        yield from texts_of(env.guards)
        yield from about(SymbolMap(env), [text.symbols[name] for name in sorted(text.symbols)])


def _numbers(t: torch.Tensor) -> list[Any]:
    """Return the type, sizes, strides and offset of a tensor, real or fake, as known numbers."""
    return [t.dtype, *map(hint_of, (*t.shape, *t.stride(), t.storage_offset()))]


def _calls(gm: GraphModule) -> Iterator[str]:
    text = IdentityText()
    for n in gm.graph.nodes:
        if n.op not in ("placeholder", "call_function", "call_method", "output"):
            raise Untold
        yield f"{n.op} {n.name} {_target(n)} {text.value(n.args)} {text.value(n.kwargs)}"


def _target(n: Node) -> str:
    t = n.target
    if isinstance(t, str):
        return t
    if isinstance(t, torch._ops.HigherOrderOperator):
        raise Untold
    is_op = isinstance(t, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))
    name = str(t) if is_op else _get_qualified_name(t)
    if not name.startswith(("aten.", "prims.") if is_op else OWN):
        raise Untold
    return name


class Moment:
    """The state before a graph is traced: finds the guards that tracing adds, and traces again."""

    def __init__(self) -> None:
        self.context = TracingContext.get()
        mode = self.context.fake_mode
        self.env = mode.shape_env if mode is not None else None
        self.guards = len(self.env.guards) if self.env is not None else 0
        self.ambient = ambient()

    def told(self) -> list[str]:
        """Return the guards added since. Raises Untold for one without text."""
        return told_since(self.env, self.guards) if self.env is not None else []

    def ask(self, guards: Sequence[str]) -> None:
        """Add guards given as text. Raises ValueError for one that is invalid or does not hold."""
        if self.env is not None:
            ask_again(self.env, guards)

    def again(self) -> ExitStack:
        """Return a context manager that restores the state."""
        stack = ExitStack()
        stack.enter_context(_disable_current_modes())  # compiled autograd's
        stack.enter_context(tracing(self.context))
        restore(self.ambient, stack)
        return stack
