"""The body of the `torch.compile` backend: Dynamo's graph in, a callable out.

AOTAutograd functionalises the graph, differentiates it and splits it; each half is normalised and
given to `compile_fx`. Arguments arrive in a list that the compiled half empties itself, so that an
argument can die before the last kernel runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch._functorch.config as functorch_config
from torch._dynamo.utils import counters, flatten_graph_inputs
from torch._functorch.aot_autograd import aot_module_simplified
from torch._guards import TracingContext
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import _disable_current_modes

from lenz.debug.names import shown
from lenz.frontend.attention import fuse_attention, has_attention
from lenz.frontend.bodies import with_bodies
from lenz.frontend.build import build
from lenz.frontend.calls import called, copied, fake_of
from lenz.frontend.composites import composites
from lenz.frontend.decompose import decompositions
from lenz.frontend.facts import assuming, facts_of
from lenz.frontend.floats import not_again
from lenz.frontend.layout import channels_last, convolutions_of
from lenz.frontend.levels import unbatched
from lenz.frontend.passes import run_passes
from lenz.frontend.program import CompileFX, GraphKind, boxed, boxed_eager
from lenz.frontend.session import compiling, interning
from lenz.frontend.split import split
from lenz.frontend.untraced import outside
from lenz.frontend.values import dense_order, is_same_size
from lenz.ir.interned import uncollected
from lenz.ir.plan import Boxed
from lenz.options import Options

# torch's own CSE imports its default compiler's pattern matcher (0.65 s); `split` has its own.
# Effect tokens are made inside the graph, so that no argument only stands for order.
CONFIG = {"cse": False, "unlift_effect_tokens": True}
NORMS = ("norm", torch.norm, torch.linalg.norm, torch.linalg.vector_norm)
# Methods that write in place, and whose functional forms give contiguous results.
WRITES = """addbmm_ addmm_ baddbmm_ cumprod_ cumsum_ index_add_ index_copy_ index_reduce_
masked_fill_ masked_scatter_ renorm_ scatter_ scatter_add_ scatter_reduce_ tril_ triu_"""
# AOTAutograd's cache only takes the output of torch's own compiler.
KEEPING = {k: False for k in ("force_autograd_cache",) if hasattr(functorch_config, k)}


class Compiler(Protocol):
    """A compiler as AOTAutograd calls it. Its result takes one list and empties it."""

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Any: ...


def capture(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    compile_fx: CompileFX,
    options: Options,
    native: frozenset[str] = frozenset(),
    name: str = "graph",
    entered: Callable[[GraphKind, GraphModule], None] = lambda kind, gm: None,
    failed: Callable[[Exception, GraphKind], None] | None = None,
) -> Callable[..., Any]:
    """Compile one graph of Dynamo with `compile_fx`; return a callable with the graph's signature.

    `native` names the aten ops that have a lowering; `name` is for logs, and each program appends
    its kind; `entered` is called with each half from AOTAutograd before lenz starts on it. With
    grad off, or nothing to differentiate, `compile_fx` is called once, with kind "inference".
    Otherwise it is called with "forward" now, and with "backward" now or, if torch defers it, at
    the first backward pass. Errors propagate unchanged. No caller sees a fault in the backward
    half, so it goes to `failed`: if that returns, the half runs in eager.
    """
    if any(isinstance(x, (list, tuple, dict)) for x in example_inputs):
        # Compiled autograd passes its inputs as one list.
        again = lambda g, xs: capture(g, xs, compile_fx, options, native, name, entered, failed)
        return flatten_graph_inputs(gm, example_inputs, again)
    gm = prepared(gm)
    ended_by = break_reason(gm)
    static_names, donated = list[str](), list[int]()  # from the forward half, for the backward half

    def compiler(kind: GraphKind) -> Compiler:
        @interning()
        def compile_part(gm: GraphModule, example_inputs: Sequence[Any]) -> Boxed:
            entered(kind, gm)
            title, static, given = f"{name}.{kind}", frozenset(static_names), frozenset(donated)
            gm = run_passes(gm, kind, options.passes)
            program = build(gm, example_inputs, kind, title, static, ended_by, native, given)
            program = assuming(program, facts_of(program) if options.size_facts else {})
            if options.verify:
                program.gm.graph.lint()
            static_names.extend(p.name for p in program.placeholders if p.is_static)
            donated.extend(given_up())
            # The compiler folds constants with eager ops, which must not meet fake tensors.
            with _disable_current_modes():
                return boxed(reported(compile_fx(with_bodies(program, compile_fx, native))))

        return compile_part if kind != "backward" else rescued(compile_part, failed)

    counters["aot_autograd"]["total"] += 1
    patched = functorch_config.patch({**CONFIG, **KEEPING})
    with patched, uncollected(), compiling(), composites(), not_again(gm):
        compiled = aot_module_simplified(
            gm,
            example_inputs,
            fw_compiler=compiler("forward"),
            bw_compiler=undynamic(compiler("backward")),
            inference_compiler=compiler("inference"),
            partition_fn=partial(split, native=native, options=options),
            decompositions=decompositions(native),
            keep_inference_input_mutations=True,
        )
    counters["aot_autograd"]["ok"] += 1
    return compiled


def rescued(compiler: Compiler, failed: Callable[[Exception, GraphKind], None] | None) -> Compiler:
    """Run a backward half in eager if `compiler` fails and `failed` returns, or for batches."""

    def compile_part(gm: GraphModule, example_inputs: Sequence[Any]) -> Boxed:
        as_given = Graph()
        as_given.output(as_given.graph_copy(gm.graph, {}))
        try:
            return unbatched(compiler(gm, example_inputs), lambda: boxed_eager(gm, as_given))
        except Exception as e:
            if failed is None:
                raise
            failed(e, "backward")
            return boxed(boxed_eager(gm, as_given))

    return compile_part


def prepared(gm: GraphModule) -> GraphModule:
    """Return Dynamo's graph, or a copy that protects ops which AOTAutograd would decompose.

    The graph is the caller's.  A copy of one with 1,000 nodes takes 30 ms.
    """
    # After flattening it may be a wrapper without a graph.
    if isinstance(gm, GraphModule) and (
        has_attention(gm) or [*norms_of(gm), *turned_by(gm), *convolutions_of(gm)]
    ):
        gm = copied(gm)
        copy_results(gm)
        count_from_front(gm)
        gm.recompile()
        fuse_attention(gm)
        channels_last(gm)
    return gm


def turned_by(gm: GraphModule) -> Iterator[Node]:
    """Yield the writes after which AOTAutograd takes a tensor with other strides as contiguous.

    It gives the tensor the strides of the functional form: docs/upstream/torch_in_place_strides.py.
    """
    for n in gm.graph.nodes:
        x = fake_of(n.args[0]) if n.op == "call_method" and n.target in WRITES.split() else None
        order = x is not None and dense_order(x.shape, x.stride())
        if order and order != tuple(sorted(order)):
            yield n


def copy_results(gm: GraphModule) -> None:
    """Copy the functional results of `turned_by` into the tensors, which keeps their strides."""
    for n in turned_by(gm):
        made = called(gm, n, str(n.target).removesuffix("_"), *n.args)
        made.kwargs = n.kwargs
        n.target, n.args, n.kwargs = "copy_", (n.args[0], made), {}


def norms_of(gm: GraphModule) -> Iterator[tuple[Node, list[int]]]:
    """Yield norms over size-1 dims counted from the end, with the dims counted from the front.

    torch 2.11 gets the size of such a norm wrong: docs/upstream/torch_fake_norms.py.
    """
    for n in gm.graph.nodes:
        x = fake_of(n.args[0]) if n.target in NORMS and n.args else None
        dim = n.kwargs.get("dim", n.args[2] if len(n.args) > 2 else None)
        dims = [dim] if isinstance(dim, int) else dim
        if x is None or not isinstance(dims, (list, tuple)):
            continue
        new = [d + x.dim() if isinstance(d, int) and -x.dim() <= d < 0 else d for d in dims]
        if any(d != at and is_same_size(x.shape[at], 1) for d, at in zip(dims, new, strict=True)):
            yield n, new


def count_from_front(gm: GraphModule) -> None:
    """Count the dimensions of `norms_of` from the front, in place."""
    for n, dims in norms_of(gm):
        if "dim" in n.kwargs:
            n.kwargs = {**n.kwargs, "dim": dims}
        else:
            n.args = (*n.args[:2], dims, *n.args[3:])


def break_reason(gm: GraphModule) -> str:
    """Return why Dynamo ended its graph early, with the user's line; empty if it did not."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not getattr(reason, "graph_break", False):
        return ""
    stack: list[Any] = list(getattr(reason, "user_stack", None) or ())
    where = f" at {stack[-1].filename}:{stack[-1].lineno}" if stack else ""
    return shown(f"{str(reason.reason).strip().partition(chr(10))[0]}{where}")


def given_up() -> tuple[int, ...]:
    """Take AOTAutograd's list of donated arguments of the backward half, and empty it.

    With any left, AOTAutograd refuses to retain the graph for a second backward pass. lenz needs no
    such rule: a plan overwrites a tensor only in calls where nothing else holds it.
    """
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    places: list[int] = (metadata.bw_donated_idxs if metadata is not None else None) or []
    taken = tuple(places)
    places.clear()  # in place: the metadata of tensor subclasses holds the same list
    return taken


def reported(run: Boxed) -> Boxed:
    """Report strides other than eager's to AOTAutograd, which compiles the backward for them.

    It keeps a list for them while the forward half is compiled.
    """
    context = TracingContext.try_get()
    if context is not None and context.output_strides == []:
        context.output_strides += getattr(run, "strides", ())
    return run


def undynamic(compiler: Compiler) -> Compiler:
    """Keep Dynamo out of the backward compiler and its result.

    The backward runs inside the autograd engine, where Dynamo's callback may be active.
    """

    def compile_part(gm: GraphModule, example_inputs: Sequence[Any]) -> Boxed:
        with uncollected():
            return boxed(outside(compiler(gm, example_inputs), "a backward pass compiled by lenz"))

    return outside(compile_part, "a compiler of lenz")
