"""Dynamo's graph as bytes, for the background process, and back there.

torch's own class for graphs writes and reads the bytes, which are a pickle. They only go through
the pipe to a child process, never into a file. They hold the graph with the user's source lines and
the types of its arguments: enough to compile it there.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from lenz.errors import UserError
from lenz.frontend.values import storage_of

try:
    from torch._dynamo.aot_compile_types import SerializableCallable
except ImportError:  # before 2.13

    class SerializableCallable:  # type: ignore[no-redef]  # older torch never uses it
        """What `aot_compile` requires from a backend."""


Savable = SerializableCallable
STATIC = "_dynamo_static_input_type"
KEPT = ("stack_trace", "custom")  # Dynamo's notes on a node


def is_asked() -> bool:
    """Say whether torch is compiling a graph to save it."""
    return bool(getattr(functorch_config, "bundled_autograd_cache", False))


def dumped(gm: GraphModule) -> bytes:
    """Return a Dynamo graph as bytes.

    Raises UserError if an argument is not a plain tensor or shares memory with another, or if the
    graph calls something without a name in torch, such as a user's kernel.
    """
    from torch.fx._graph_pickler import GraphPickler, Options

    from lenz.frontend.capture import prepared

    made, how = prepared(gm), Options(ops_filter=None, node_metadata_key_filter=KEPT.__contains__)
    own = GraphModule(made, copy.deepcopy(made.graph))  # without Dynamo's data about the graph
    inputs = [n.meta.get("example_value") for n in gm.graph.find_nodes(op="placeholder")]
    shared = [s for v in inputs if (s := storage_of(v)) is not None]
    if len(shared) != len(set(shared)):
        raise UserError("this graph cannot be sent to another process: two arguments share memory")
    try:
        return GraphPickler.dumps((own, [*map(_described, inputs)]), how)
    except (NotImplementedError, AttributeError, TypeError, AssertionError) as e:
        raise UserError(f"this graph cannot be sent to another process: {e}") from e


@contextmanager
def load_graph(data: bytes) -> Iterator[tuple[GraphModule, list[Any]]]:
    """Yield the graph and fake arguments, ready to compile as if just traced."""
    from torch.fx._graph_pickler import GraphPickler

    mode = FakeTensorMode(shape_env=ShapeEnv())
    found: Any = GraphPickler.loads(data, mode)
    gm, described = found
    gm.recompile()
    with mode:
        inputs = [_made(*d) if isinstance(d, tuple) else d for d in described]
    with tracing(TracingContext(mode)):
        yield gm, inputs


def statics(gm: GraphModule) -> list[Any]:
    """Return torch's static-address mark of each argument of a Dynamo graph."""
    holes = gm.graph.find_nodes(op="placeholder")
    return [n.meta.get("tensor_dict", {}).get(STATIC) for n in holes]


def as_traced(gm: GraphModule, inputs: Sequence[Any], static: Sequence[Any]) -> None:
    """Restore Dynamo's notes on the arguments of a loaded graph, in place."""
    for n, x, how in zip(gm.graph.find_nodes(op="placeholder"), inputs, static, strict=True):
        n.meta["example_value"] = x
        n.meta["tensor_dict"] = {} if how is None else {STATIC: how}


def _described(v: Any) -> Any:
    """Describe a fake tensor, to make it again; other arguments are returned unchanged."""
    if not isinstance(v, torch.Tensor):
        return v
    if type(v) is not FakeTensor or v.layout is not torch.strided:
        raise TypeError(f"an argument is a {type(v).__name__} of layout {v.layout}")
    if v.is_conj() or v.is_neg():
        raise TypeError("the memory of an argument holds conjugated or negated values")
    grad = v.requires_grad, v.is_leaf
    return tuple(v.shape), v.stride(), v.storage_offset(), v.dtype, v.device, *grad


def _made(
    size: Sequence[Any], stride: Sequence[Any], offset: Any, dtype: Any, device: Any,
    grad: bool, is_leaf: bool,
) -> torch.Tensor:  # fmt: skip
    most = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) + 1
    flat = torch.empty((max(0, most),), dtype=dtype, device=device)  # below 0 for an empty tensor
    made = torch.as_strided(flat, size, stride, offset).detach().requires_grad_(grad)
    # As Dynamo makes them: torch compiles other code for what autograd has made.
    return made if is_leaf else torch._C._functions.DelayedError("an example", 1)(made)
