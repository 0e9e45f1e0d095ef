"""An artifact as a callable, in a process that imports neither Dynamo nor the compiler."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence, Set
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lenz.artifact import container, specs
from lenz.artifact.container import Contents, Manifest, read, to_bytes
from lenz.errors import UserError, some, untrusted
from lenz.ir.interned import uncollected
from lenz.ir.lexer import ReadError
from lenz.ir.plan import Boxed, Input, Plan
from lenz.ir.reader import read as read_text
from lenz.loading import foreign
from lenz.loading import load as load_plan
from lenz.machines import Counts, Loader, host, load_kernels
from lenz.options import Options
from lenz.plan.python import signatures
from lenz.runtime.constants import unpacked
from lenz.runtime.executor import size
from lenz.runtime.store import store_in
from lenz.target import HOST


def release_of(version: str) -> str:
    """A torch version without its patch level: ops may change between such releases."""
    return ".".join(version.split(".")[:2])


def load(source: str | os.PathLike[str] | bytes) -> CompiledArtifact:
    """Load an artifact of `export` or `CompiledArtifact.save`, from a path or from bytes.

    CPU weights stay in the mapped file, which all processes share. Nothing is compiled or traced.
    Raises UserError, with the reason, if the artifact is damaged or if this machine or torch cannot
    run it.
    """
    with uncollected(), untrusted("this artifact cannot be loaded here, or is damaged"):
        return CompiledArtifact(read(source))


class CompiledArtifact:
    """A compiled program that can be called and saved.

    It has the signature of the exported program. It runs without gradients.
    """

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        call = contents.manifest["call"]
        self._in = None if call["in"] is None else specs.loads(call["in"])
        self._out = None if call["out"] is None else specs.loads(call["out"])
        self._weights = [_weight(w, contents.tensors) for w in call["weights"]]
        self._given, self._written = call["given"], call["written"]
        self._run, places = _loaded(contents)
        self._writes = places | {k for _, k in self._written}
        self._spans = [*map(_span, self._weights)]
        self._assumed, self._fitting = call.get("assumed", ()), list[Any]()

    @property
    def manifest(self) -> Manifest:
        """The artifact's manifest."""
        return self._contents.manifest

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The parameters and buffers by name; a call reads them, and may write buffers."""
        names = [w["name"] for w in self._contents.manifest["call"]["weights"]]
        return dict(zip(names, self._weights, strict=True))

    def save(
        self, path: str | os.PathLike[str], format: Literal["binary", "unpacked"] = "binary"
    ) -> None:
        """Write the artifact for `lenz.load`: one file, or a folder with readable texts."""
        if format not in ("binary", "unpacked"):
            raise UserError(f"unknown format {format!r}", hint="formats are binary, unpacked")
        writer = container.write if format == "binary" else container.write_folder
        writer(path, self._contents)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program. Raises UserError for arguments that it was not exported for."""
        kept = self.flat_call(self._varying(args, kwargs))
        return kept if self._out is None else pytree.tree_unflatten(kept, self._out)

    def flat_call(self, values: Sequence[Any]) -> list[Any]:
        """Run the program on its non-constant arguments; return the leaves of its results.

        Both are in the order in which `torch.utils._pytree` lists leaves. Raises UserError for
        arguments that the program was not exported for.
        """
        given = [(k, g) for k, g in enumerate(self._given) if "is" not in g]
        if len(values) != len(given):
            raise UserError(f"the program takes {some(given, 'input')}, not {len(values)}")
        for value, (k, g) in zip(values, given, strict=True):
            _check(k, value, g)
        if self._writes:
            _check_apart([*self._spans, *map(_span, values)], self._writes, [k for k, _ in given])
        held = [*self._weights, *values]
        sizes = [v.shape if isinstance(v, Tensor) else v for v in values]
        if sizes != self._fitting:
            for condition, text in self._assumed:
                if not size(_filled(condition, held)):
                    raise UserError(f"the program was exported for sizes with {text}")
            self._fitting = sizes  # a check takes 10 us
        with torch.no_grad():
            results = list(self._run([*held]))
            for place, k in self._written:
                held[k].copy_(results[place])
        return results[len(self._written) :]

    def _varying(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        if self._in is None:
            flat: list[Any] = list(args)
        else:
            try:
                flat = self._in.flatten_up_to((args, dict(kwargs)))
            except ValueError:
                raise UserError(_mismatch(self._in, (args, dict(kwargs)))) from None
        if len(flat) != len(self._given):
            raise UserError(f"the program takes {some(self._given, 'argument')}, not {len(flat)}")
        found = []
        for k, (value, g) in enumerate(zip(flat, self._given, strict=True)):
            if "is" not in g:
                found.append(value)
            # As text: NaN is itself, and 0.0 is not -0.0.
            elif type(value) is not type(g["is"]) or repr(value) != repr(g["is"]):
                told = f"argument {k} is {value!r}, and was {g['is']!r}"
                raise UserError(f"{told} when the program was exported")
        return found


def _check(k: int, value: Any, g: Mapping[str, Any]) -> None:
    """Check the type of an argument and the bounds of its sizes; plans do not."""
    if g["kind"] == "number":
        if type(value) is not int:
            raise UserError(f"argument {k} is of type {type(value).__name__}, and was an int")
        return
    if not isinstance(value, Tensor):
        raise UserError(f"argument {k} is of type {type(value).__name__}, and was a tensor")
    if value.layout is not torch.strided or value.is_nested:
        raise UserError(f"argument {k} is sparse, nested or packed, and was a dense tensor")
    told = f"{g['dtype']} with {len(g['size'])} dimensions on {g['device']}"
    dtype = str(value.dtype).removeprefix("torch.")
    if (dtype, value.dim(), value.device.type) != (g["dtype"], len(g["size"]), g["device"]):
        found = f"{dtype} with {value.dim()} dimensions on {value.device.type}"
        raise UserError(f"argument {k} is {found}, and the program takes {told}")
    for d, (n, want) in enumerate(zip(value.shape, g["size"], strict=True)):
        low, high = want
        if n < low or (high is not None and n > high):
            ends = f"{low}" if low == high else f"{low} to {'any' if high is None else high}"
            raise UserError(f"size {d} of argument {k} is {n}, and the program takes {ends}")


def _check_apart(spans: Sequence[tuple[int, int]], writes: Set[int], places: Sequence[int]) -> None:
    """Refuse an argument that overlaps a tensor if one is written: plans take them as apart.

    `spans` has the weights, then the arguments, whose numbers are `places`.
    """
    weights = len(spans) - len(places)
    last: dict[tuple[bool, bool], int] = {}  # of those before, by kind: what ends last
    for k in sorted(range(len(spans)), key=spans.__getitem__):
        kind = k in writes, k < weights
        for (written, is_weight), j in last.items():
            if (written or kind[0]) and not (is_weight and kind[1]) and spans[k][0] < spans[j][1]:
                names = [f"argument {places[i - weights]}" for i in sorted((j, k)) if i >= weights]
                told = f"{' and '.join([*names, 'a weight'][:2])} share memory"
                raise UserError(f"{told}, and the program writes into it", hint="pass a copy")
        last[kind] = max(last.get(kind, k), k, key=lambda i: spans[i][1])


def _span(value: Any) -> tuple[int, int]:
    """The addresses from the first element of a tensor to the end of its last one."""
    if not isinstance(value, Tensor) or value.numel() == 0:
        return 0, 0
    last = sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
    return value.data_ptr(), value.data_ptr() + (last + 1) * value.element_size()


def _filled(condition: Any, held: Sequence[Any]) -> Any:
    """A condition with the sizes of these arguments in place of [argument, dimension]."""
    match condition:
        case [str(name), *given]:
            return [name, *(_filled(c, held) for c in given)]
        case [k, d]:
            return held[k].shape[d]
        case [k]:
            return held[k]
    return condition


def _mismatch(want: pytree.TreeSpec, given: Any) -> str:
    """What the program takes and what a call gives: numbers, or structures with `*` for values."""
    got = pytree.tree_structure(given)
    told = _told if _told(want) != _told(got) else pytree.treespec_pprint
    return f"the program takes {told(want)}, not {told(got)}"


def _told(spec: pytree.TreeSpec) -> str:
    """The number of arguments, and the keywords."""
    names = ", ".join(sorted(spec.child(1).context))
    keywords = f" and the keyword{'s' * (', ' in names)} {names}" if names else ""
    return some(spec.child(0).children(), "argument") + keywords


def _weight(w: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Tensor:
    t = torch.as_strided(tensors[w["tensor"]], w["size"], w["stride"])
    return t if w["device"] == HOST else t.to(w["device"])


def _loaded(contents: Contents) -> tuple[Boxed, Set[int]]:
    """The plan for this machine, as a callable, and the arguments that it writes into."""
    m = contents.manifest
    if (want := release_of(m["torch"])) != (here := release_of(torch.__version__)):
        raise UserError(f"this artifact is for torch {want}, and this is torch {here}")
    plan, code_for = _fitting(m)

    def code(device: str, loader: Loader, counts: Counts) -> Mapping[str, bytes]:
        known, here = code_for[device], loader.fits(device)
        fitting = [made for made in known if loader.runs(made, here)]
        if not fitting:
            told = f"this artifact is for {' or '.join(known)}"
            raise UserError(f"{told}, and {device} has {here}")
        # Those that fit differ in the minor number alone: the greatest text has the latest.
        return {piece: to_bytes(contents.tensors[t]) for piece, t in known[max(fitting)].items()}

    constants = {
        c.name: unpacked(to_bytes(contents.tensors[f"constant.{c.content}"]), c.type.device)
        for c in plan.constants
    }
    functions, alive = load_kernels(signatures(plan), code)
    store = store_in(Options.from_environment({}))
    run = load_plan(plan, functions, alive, constants, {}, _refuse, True, store)
    return run, {k for k, i in enumerate(plan.inputs) if isinstance(i, Input) and i.written}


def _refuse(*args: Any) -> NoReturn:
    raise UserError("the program was not exported for arguments of these sizes")


def _fitting(m: Manifest) -> tuple[Plan, Mapping[str, Mapping[str, Mapping[str, str]]]]:
    """The plan of the best variant that this CPU can run, and its code.

    The code of a device is given by what it needs there, and by the names of its pieces.
    Variants are sorted by speed.
    """
    if platform.machine() != m["machine"]:
        raise UserError(f"this artifact is for {m['machine']}, and this is {platform.machine()}")
    has = host().features()
    for v in m["variants"]:
        if has.issuperset(v["features"]):
            try:
                plan = read_text(v["plan"])
            except ReadError as e:
                raise UserError(f"this artifact is from another lenz, {m['lenz']}: {e}") from e
            if not isinstance(plan, Plan) or foreign(plan):
                raise UserError(
                    "this artifact has no plan, or one that calls more than torch's ops"
                )
            return plan, v["code"]
    lacks = sorted({*m["variants"][-1]["features"]} - has)
    raise UserError(f"this CPU lacks {', '.join(lacks)}, which the artifact needs")
