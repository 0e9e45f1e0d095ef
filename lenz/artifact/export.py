"""Exports programs as artifacts: from `torch.export`, or from another compiler's graph."""

from __future__ import annotations

import os
import platform
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.fx import GraphModule, Node

from lenz.artifact import specs
from lenz.artifact.container import Contents, check_folder, of_bytes
from lenz.artifact.levels import targets, usual
from lenz.artifact.loaded import CompiledArtifact
from lenz.context import Context
from lenz.errors import UserError
from lenz.frontend import FxProgram
from lenz.frontend.alone import assumed, ends_of, listed, traced_context, traced_inputs
from lenz.frontend.capture import capture
from lenz.ir.plan import Boxed, Input
from lenz.ir.printer import show
from lenz.keys import native_names
from lenz.loading import foreign
from lenz.machines import loader_of, machine_of
from lenz.options import Options
from lenz.pipeline import Compiled, compile_program, kernels_of
from lenz.records import dataclass, field, replace
from lenz.runtime.constants import whole_memory
from lenz.runtime.store import store_at
from lenz.target import HOST
from lenz.version import __version__

# An artifact holds one plan, without a fallback for calls that break an assumption.
# Its machine code comes from the store of its job.
FIXED: Mapping[str, object] = {
    "aligned": False, "size_facts": False, "on_error": "raise", "cache": True
}  # fmt: skip


def export(
    program: nn.Module | ExportedProgram, path: str | os.PathLike[str],
    args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None, *,
    dynamic_shapes: Any = None, options: Mapping[str, object] | None = None,
    levels: Sequence[str] = (), compute_capabilities: Sequence[str] = (),
) -> CompiledArtifact:  # fmt: skip
    """Compile a program for inference and write it to a file, with its weights.

    program         a module, which is exported with `torch.export.export(args, kwargs,
                    dynamic_shapes)`, or the result of that function
    options         those of `torch.compile(..., backend="lenz")`
    levels          the CPU levels to compile for: "v2", "v3", "v4" of x86-64, "generic"
                    elsewhere, or "host" for this machine; by default all but "host"
    compute_capabilities  those of other GPUs to compile for, beside the one that the program is on:
                    "8.0" for example, which also runs on 8.6 and 8.9

    Raises Unsupported if lenz cannot compile all of it, UserError if a file cannot hold it, or if
    the folder of the file is missing.
    """
    check_folder(path)  # compiling takes longer
    if isinstance(program, ExportedProgram):
        exported = program
    else:
        given = dict(kwargs or {})
        exported = torch.export.export(program, args, given, dynamic_shapes=dynamic_shapes)
    job = _job(options, levels or usual(), compute_capabilities)
    made = CompiledArtifact(_contents_of(exported, job))
    made.save(path)
    return made


def standalone_compile(
    gm: GraphModule, example_inputs: Sequence[Any], *,
    options: Mapping[str, object] | None = None, levels: Sequence[str] = ("host",),
    compute_capabilities: Sequence[str] = (),
) -> CompiledArtifact:  # fmt: skip
    """Compile a graph for inference by itself, also inside another backend of torch.compile.

    gm              a graph of aten or torch calls; it is not changed
    example_inputs  its arguments: tensors (may be fake) and sizes; symbolic sizes stay symbolic

    The artifact takes the arguments of `gm` and returns its results as a list. The other arguments
    are those of `export`. Raises UserError if `gm` is no graph.
    """
    if not isinstance(gm, GraphModule):
        raise UserError(f"the graph is a {type(gm).__name__}, not a torch.fx.GraphModule")
    job = _job(options, levels, compute_capabilities)
    with job.folder:
        gm, own = listed(gm), dict[str, Tensor]()
        own |= gm.named_parameters(remove_duplicate=False)
        own |= gm.named_buffers(remove_duplicate=False)
        job.compile(gm, example_inputs, [*own, *map(str, range(len(example_inputs)))])
        inputs = traced_inputs(gm, example_inputs)
        call = {"in": None, "out": None, "written": [],
                "given": [_described(x) for x in inputs],
                "assumed": assumed([*own.values(), *inputs], job.called, False)}  # fmt: skip
        return CompiledArtifact(job.contents(call, own))


def _job(
    options: Mapping[str, object] | None, levels: Sequence[str], capabilities: Sequence[str]
) -> _Job:
    """A compilation; one text is one level, or one compute capability."""
    capabilities = [capabilities] if isinstance(capabilities, str) else capabilities
    return _Job(Options.from_environment({**(options or {}), **FIXED}), levels, capabilities)


@dataclass(slots=True)
class _Job:
    """One compilation for several CPU levels and GPUs, with its own store for machine code.

    called  the weights by name and the program's arguments by number, as messages name them
    """

    options: Options
    levels: Sequence[str]
    capabilities: Sequence[str]
    called: Sequence[str] = ()
    folder: tempfile.TemporaryDirectory[str] = field(
        default_factory=lambda: tempfile.TemporaryDirectory(prefix="lenz-")
    )
    variants: list[dict[str, Any]] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    name: str = ""

    def compile(self, gm: GraphModule, inputs: Sequence[Any], called: Sequence[str]) -> None:
        """Compile a graph for all levels."""
        native, self.called = native_names(None), called
        with torch.no_grad(), traced_context(inputs):
            capture(gm, inputs, self.program, self.options, native, "artifact")
        if not self.variants:
            raise UserError("this graph computes nothing that can be saved")

    def program(self, p: FxProgram) -> Boxed:
        """Compile a program of AOTAutograd for all levels."""
        if p.kind != "inference":
            what = "gradients, branches or loops, such as torch.cond"
            raise UserError(f"an artifact is for inference without {what}; this is a {p.kind}")
        options = replace(self.options, cache_dir=self.folder.name)
        for k, (target, needs) in enumerate(targets(self.levels)):
            cx = Context(options, target)
            self.add(compile_program(p, cx), k, needs, cx)
        return p.eager()

    def add(self, made: Compiled, k: int, needs: Sequence[str], cx: Context) -> None:
        """Keep the plan, constants and code of a compilation."""
        plan, constants = made.complete
        given = zip(plan.inputs, self.called, strict=True)
        told = [replace(i, called=c) if isinstance(i, Input) else i for i, c in given]
        plan = replace(plan, inputs=tuple(told))
        self.name = plan.name
        if others := foreign(plan):
            raise UserError(f"an artifact cannot call {others[0]}, which is not torch's own")
        self.tensors |= {f"constant.{c}": of_bytes(data) for c, data in constants.items()}
        code = {d: self.code(made, d, k, cx) for d in made.entry.keys}
        if self.capabilities and code.keys() <= {HOST}:
            raise UserError("compute_capabilities are for programs with kernels on a GPU")
        self.variants.append({"features": list(needs), "plan": show(plan), "code": code})

    def code(self, made: Compiled, device: str, k: int, cx: Context) -> dict[str, dict[str, str]]:
        """Keep the code of a device; where it is, by what it needs and by the names of pieces."""
        loader, pieces = loader_of(device), dict[str, tuple[str, bytes]]()
        for piece, key in made.entry.keys[device].items():
            data = store_at(self.folder.name).get(loader.kind, key)
            if data is None:
                raise UserError("the machine code could not be stored: is the disk full?")
            pieces[piece] = f"{k}.{key}" if device == HOST else key, data
        known: dict[str, Mapping[str, tuple[str, bytes]]] = {loader.fits(device): pieces}
        kernels = [x for x, at in kernels_of(made.schedule).values() if at == device]
        for capability in self.capabilities if device != HOST else ():
            known.update([machine_of(device).elsewhere(kernels, capability, cx)])
        found: dict[str, dict[str, str]] = {}
        for need, code in known.items():
            found[need] = {piece: f"code.{key}" for piece, (key, _) in code.items()}
            self.tensors |= {f"code.{key}": of_bytes(data) for key, data in code.values()}
        return found

    def contents(self, call: Mapping[str, Any], own: Mapping[str, Tensor]) -> Contents:
        """The whole artifact, with the program's weights."""
        names, weights = _weights(own)
        manifest = {
            "lenz": __version__, "torch": torch.__version__, "machine": platform.machine(),
            "name": self.name, "call": {**call, "weights": names},
            "variants": self.variants,
        }  # fmt: skip
        return Contents(manifest, {**self.tensors, **weights})


def _contents_of(exported: ExportedProgram, job: _Job) -> Contents:
    """Compile an exported program."""
    with warnings.catch_warnings():  # torch copies specs that it deprecates itself
        warnings.filterwarnings("ignore", ".*LeafSpec.*", FutureWarning)
        exported = exported.run_decompositions({})
    with job.folder:
        gm, kept, given = _flat(exported)
        inputs = [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")]
        job.compile(gm, inputs, [*kept, *(str(k) for k, g in enumerate(given) if "is" not in g)])
        held = {**exported.constants, **exported.state_dict}
        call = {
            "in": specs.dumps(exported.call_spec.in_spec),
            "out": specs.dumps(exported.call_spec.out_spec),
            "given": given, "written": _written(exported, kept),
            "assumed": assumed(inputs, job.called, True),
        }  # fmt: skip
        return job.contents(call, {n: held[n] for n in kept})


def _flat(exported: ExportedProgram) -> tuple[GraphModule, list[str], list[dict[str, Any]]]:
    """The graph with weights and tensors as arguments, the weights' names, and the arguments."""
    graph, kept, given = torch.fx.Graph(), list[str](), list[dict[str, Any]]()
    graph.output(graph.graph_copy(exported.graph, {}))
    places = graph.find_nodes(op="placeholder")
    for node, spec in zip(places, exported.graph_signature.input_specs, strict=True):
        value = node.meta.get("val")
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            kept.append(spec.target or "")
        elif spec.kind is not InputKind.USER_INPUT:
            raise UserError(f"an artifact cannot hold {spec.target}, a {spec.kind.name.lower()}")
        elif isinstance(value, (Tensor, torch.SymInt)):
            given.append(_described(value, exported.range_constraints))
        else:
            given.append({"is": _plain(spec.arg.value)})
            _drop(node, spec.arg.value)
    return GraphModule(exported.graph_module, graph), kept, given


def _drop(node: Node, value: Any) -> None:
    """Replace an argument by a constant."""
    for user in tuple(node.users):
        same: Callable[[Node], Any] = lambda n: value if n is node else n
        user.args = torch.fx.map_arg(user.args, same)
        user.kwargs = torch.fx.map_arg(user.kwargs, same)
    node.graph.erase_node(node)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise UserError(f"an artifact cannot hold an argument that is a {type(value).__name__}")


def _described(value: Any, ranges: Mapping[Any, Any] | None = None) -> dict[str, Any]:
    """The type of an argument, with the bounds of its sizes."""
    if not isinstance(value, Tensor):
        return {"kind": "number"}
    return {"kind": "tensor", "dtype": str(value.dtype).removeprefix("torch."),
            "device": value.device.type,
            "size": [ends_of(n, ranges or {}) for n in value.shape]}  # fmt: skip


def _weights(weights: Mapping[str, Tensor]) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Where each weight is in the file, and the stored tensors: shared memory only once."""
    tensors: dict[str, Tensor] = {}
    seen: dict[Any, str] = {}
    found = []
    for name, given in weights.items():
        t = given.detach()
        place = t.untyped_storage().data_ptr(), t.storage_offset(), t.shape, t.stride(), t.dtype
        own = seen.setdefault(place, f"weight.{name}")
        if own not in tensors:
            memory = t if t.is_contiguous() else whole_memory(t)
            tensors[own] = memory.cpu().clone() if memory.is_cpu else memory.cpu()
        found.append({"name": name, "tensor": own, "size": [*t.shape], "stride": [*t.stride()],
                      "device": t.device.type})  # fmt: skip
    return found, tensors


def _written(exported: ExportedProgram, weights: Sequence[str]) -> list[tuple[int, int]]:
    """The (result, place) pairs: results that are written into a weight, or into an argument.

    Weights come first, then the arguments that are no constants.
    """
    given = [s.arg for s in exported.graph_signature.input_specs if s.kind is InputKind.USER_INPUT]
    places = [*weights, *(a.name for a in given if not isinstance(a, ConstantArgument))]
    found = []
    for k, spec in enumerate(exported.graph_signature.output_specs):
        if spec.kind in (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION):
            found.append((k, places.index(spec.target or "")))
        elif spec.kind is not OutputKind.USER_OUTPUT:
            raise UserError(f"an artifact cannot return a {spec.kind.name.lower()}")
    return found
