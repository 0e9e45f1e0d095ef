"""The frontend's result: an FX graph of aten calls, and all facts that FX lacks.

An `FxProgram` is complete: its readers need no tracing context, no ShapeEnv and no module of torch
beyond `torch.fx`.  The graph is not changed after the program is built.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import _BoxedCodeGen

from lenz.debug.names import shown
from lenz.frontend.symbols import SymbolMap
from lenz.ir.plan import Boxed
from lenz.records import dataclass, field, replace
from lenz.sym import Sym, SymEnv

GraphKind: TypeAlias = Literal["inference", "forward", "backward", "body"]
ValueKind: TypeAlias = Literal["tensor", "symint", "symfloat", "scalar", "none", "object"]


@dataclass(frozen=True, slots=True)
class Fact:
    """`multiple` divides a size, and `most` is its upper bound; 1 and None say nothing."""

    multiple: int = 1
    most: int | None = None

    def told(self, name: str) -> tuple[str, ...]:
        """The fact as conditions on the size of this name."""
        divides = (f"{name} % {self.multiple} == 0",) if self.multiple > 1 else ()
        return (*divides, f"{name} <= {self.most}") if self.most is not None else divides

    def without(self, value: int) -> Fact:
        """The part of the fact that holds for this size."""
        return Fact(
            1 if value % self.multiple else self.multiple,
            None if self.most is not None and value > self.most else self.most,
        )


Facts: TypeAlias = Mapping[str, Fact]  # by the name of a symbol


@dataclass(frozen=True, slots=True)
class Placeholder:
    """One argument of the compiled callable, by position.

    `value` is the fake tensor, the SymInt/SymFloat, or the constant used in tracing. `is_static`
    says that the tensor keeps its address over calls: a parameter or a buffer, or one that the
    forward half saved for the backward half. `source` is a name for reports: the parameter's path,
    or AOTAutograd's name. `is_donated` says that the forward half made the tensor only for the
    backward half, which may overwrite it in a call where nothing else holds it.
    """

    name: str
    kind: ValueKind
    value: Any
    is_static: bool
    source: str
    is_donated: bool = False


@dataclass(frozen=True, slots=True)
class Output:
    """One result of the compiled callable, by position.

    `node` is None for a constant result, which is then `value` (None, a number). `shape` and
    `stride`, in elements, are AOTAutograd's; eager's strides are those of `value`. `alias_input` is
    the position of the placeholder whose storage the result shares.
    """

    node: Node | None
    value: Any
    shape: tuple[Sym, ...] = ()
    stride: tuple[Sym, ...] = ()
    alias_input: int | None = None


@dataclass(frozen=True, slots=True)
class FxProgram:
    """One graph for `compile_fx`: inference, a half of a training step, or the body of a loop.

    `gm.graph` has placeholders, `get_attr`, `call_function` and one output whose single argument
    is a tuple.  `mutated` holds the positions of placeholders that the graph writes into.
    `constants` maps each tensor `get_attr` target to its real tensor; if the program needs a fresh
    one on every call, the graph clones it.  `modules` maps the other `get_attr` targets: the bodies
    of higher-order operators, to be called as they are.  `guards` counts the guards of Dynamo and
    ShapeEnv; `ended_by` is the reason and line of the graph break that ended the graph, empty where
    the function ended by itself.  `saved` holds the positions of results that only the backward
    half reads: they may have other strides than `outputs` says. `apart` holds those of the user's
    results in a forward half that are not views: autograd forbids writes to views made in a half.
    `facts` are the assumptions in `symbols` beyond torch's guards (see `facts.py`). `called` is the
    user's line that caused the compilation, for calls without a line of the user's. `deterministic`
    says whether torch uses deterministic algorithms.
    """

    name: str
    kind: GraphKind
    gm: GraphModule
    placeholders: tuple[Placeholder, ...]
    outputs: tuple[Output, ...]
    mutated: tuple[int, ...]
    constants: Mapping[str, torch.Tensor]
    modules: Mapping[str, Any]
    symbols: SymbolMap
    guards: int
    ended_by: str
    saved: Sequence[int] = ()
    apart: Sequence[int] = ()
    facts: Facts = field(default_factory=dict)
    called: str = ""
    deterministic: bool = False

    @property
    def env(self) -> SymEnv:
        """The sizes: their variables with hints, and upper bounds from the facts."""
        env, most = SymEnv(), []
        for b in self.symbols.bindings:
            env = env.with_var(b.var, self.symbols.hints.get(b.var.name))
            if (end := self.facts.get(b.symbol, Fact()).most) is not None:
                most.append((b.var.name, end // b.factor))
        return replace(env, most=tuple(sorted(most)))

    def sym(self, size: Any) -> Sym:
        """A size of a fake tensor."""
        return self.symbols.sym(size)

    def origin(self, node: Node) -> str:
        """The user's source line of a node; empty if unknown."""
        return origin(node, self.called)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The calls of the graph in order: no placeholders, attributes or output."""
        return tuple(n for n in self.gm.graph.nodes if n.op == "call_function")

    @property
    def calls(self) -> dict[str, int]:
        """The number of calls of each op, without sizes, parts of results and higher-order ops."""
        ops = [str(n.target) for n in self.nodes if isinstance(n.target, torch._ops.OpOverload)]
        return dict(Counter(op for op in ops if not op.startswith("aten.sym_")))

    def eager(self) -> Boxed:
        """Return the graph as a Python function of one list, which it empties.

        This is the fallback for a graph that lenz cannot compile.
        """
        return boxed_eager(self.gm)


def boxed_eager(gm: GraphModule, graph: Graph | None = None) -> Boxed:
    """Return `gm`, or another graph with its attributes, as a function of one list.

    The function empties the list.
    """
    own = Graph()
    own.output(own.graph_copy(graph or gm.graph, {}))
    own.set_codegen(_BoxedCodeGen())
    return GraphModule(gm, own).forward


def boxed(run: Boxed) -> Boxed:
    """Mark `run` as taking one list of arguments, which it empties.

    AOTAutograd asks for the mark; a callable that takes no attributes is wrapped.
    """
    if not getattr(run, "_boxed_call", False):
        try:
            run._boxed_call = True  # type: ignore[attr-defined]  # torch's own protocol
        except AttributeError:  # a method
            run = partial(run)
            run._boxed_call = True  # type: ignore[attr-defined]  # likewise
    return run


# Its result may have an attribute `strides`: for each result its actual strides, or None.
CompileFX: TypeAlias = Callable[[FxProgram], Boxed]


FRAME = re.compile(r'File "(?P<file>.*?)", line (?P<line>\d+)', re.DOTALL)


# Folders and files that are not part of the user's program.
OWN = (
    os.path.join(os.path.dirname(torch.__file__), ""),
    os.path.join(os.path.dirname(os.path.dirname(__file__)), ""),
    contextlib.__file__,
)


def origin(node: Node, called: str = "") -> str:
    """Return `file:line` of the user's line behind `node`; empty if unknown.

    It is the innermost frame of the recorded stack outside torch and lenz, or else `called`, the
    line that called the compiled function: a module of torch has no other.
    """
    frames = FRAME.findall(node.meta.get("stack_trace") or "")
    mine = [f"{file}:{line}" for file, line in frames if not file.startswith(OWN)]
    return shown(mine[-1] if mine else called)


def caller() -> str:
    """Return `file:line` of the user's current call; empty if there is none."""
    frame = sys._getframe()
    while frame.f_code.co_filename.startswith(OWN):
        if frame.f_back is None:
            return ""
        frame = frame.f_back
    return shown(f"{frame.f_code.co_filename}:{frame.f_lineno}")
