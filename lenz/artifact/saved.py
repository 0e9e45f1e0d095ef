"""Graphs saved by `torch.compile(...).aot_compile`: lenz's part of torch's file, as data.

It is an artifact: AOTAutograd's metadata of the graph, its halves as plans, and their machine code.
Loading traces and compiles nothing, and the file holds no graph. So it only works on the same kind
of machine with the same versions; others are rejected. The rest of torch's file, such as guards, is
a pickle: load only a file that you trust.
"""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NoReturn

import torch

from lenz.artifact.container import Contents, Manifest, as_bytes, of_bytes, read, to_bytes
from lenz.errors import UserError
from lenz.frontend.passing import is_message
from lenz.frontend.program import boxed
from lenz.frontend.saved import Savable
from lenz.frontend.untraced import outside
from lenz.frontend.wrapping import from_json, wrapped
from lenz.halves import loaded_half, plan_in
from lenz.ir.interned import uncollected
from lenz.ir.plan import Boxed
from lenz.loading import foreign
from lenz.machines import host, loader_of
from lenz.options import Options
from lenz.plan.python import signatures
from lenz.runtime.store import Store, store_in
from lenz.target import HOST
from lenz.version import __version__

# A saved function has no graph, so no fallback can be compiled.
FIXED: Mapping[str, Any] = {"aligned": False, "size_facts": False, "background": False}
KINDS: Sequence[set[str]] = ({"inference"}, {"forward", "backward"})
BROKEN = "this graph was not saved for arguments of these sizes"


class Pieces(Store):
    """Store entries in memory, by kind.key; those read from the store `behind` are added."""

    def __init__(self, found: dict[str, bytes], behind: Store | None = None) -> None:
        self.found, self._behind = found, behind

    def get(self, kind: str, key: str) -> bytes | None:
        """The data under `kind` and `key`."""
        data = self.found.get(f"{kind}.{key}")
        if data is None and self._behind is not None:
            data = self._behind.get(kind, key)
        return data if data is None else self.found.setdefault(f"{kind}.{key}", data)

    def put(self, kind: str, key: str, data: bytes) -> None:
        """Add data: a loaded plan compiles missing native code."""
        self.found[f"{kind}.{key}"] = data


class Saved(Savable):
    """A graph in the form for `aot_compile`: its bytes `data`, or the reason `why` there are none.

    `run` takes the arguments of Dynamo's graph.
    """

    def __init__(self, run: Callable[..., Any], data: bytes = b"", why: str = "") -> None:
        self._run, self._data, self._why = run, data, why

    @classmethod
    def serialize_compile_artifacts(cls, fn: Saved) -> bytes:
        """The bytes for torch's file. Raises UserError if something cannot be saved."""
        if fn._why:
            raise UserError(f"this graph cannot be saved: {fn._why}")
        return fn._data

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> Saved:
        """The graph in these bytes. Raises UserError if this machine or torch cannot run it."""
        with uncollected():
            return cls(SavedRun(read(data)), data)

    def __call__(self, *args: Any) -> Any:
        """Run the graph on the arguments of Dynamo's graph."""
        return self._run(*args)


class SavedRun:
    """The callable of a saved graph."""

    def __init__(self, contents: Contents) -> None:
        _check(m := contents.manifest)
        pieces = {name: to_bytes(t) for name, t in contents.tensors.items()}
        try:
            self._metadata, self._detach = from_json(m["metadata"]), m["detach"]
            self._drops = [int(k) for k in m["drops"]]
            made = halves(m["halves"], Pieces(pieces), Options.from_environment(m["options"]))
        except (LookupError, TypeError, ValueError, AttributeError) as e:
            raise UserError(f"this graph was saved by another lenz or torch: {e}") from e
        self._first, self._second = made.get("inference") or made["forward"], made.get("backward")
        self._made: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        """Run on the arguments of Dynamo's graph, in torch's state at the time of saving."""
        if self._made is None:  # guards have now compared that state, which is read here
            second = self._second and outside(self._second, "a backward pass compiled by lenz")
            given = boxed(self._first), second and boxed(second)
            run = wrapped(self._metadata, self._detach, *given, _graph)
            self._made = dropping(outside(run, "a graph compiled by lenz"), self._drops)
        return self._made(*args)


def halves(told: Mapping[str, Any], store: Store, options: Options) -> dict[str, Boxed]:
    """The halves of a graph. Raises UserError if an entry is missing, or cannot be loaded."""
    made = {kind: loaded_half(half, store, options, _refuse) for kind, half in told.items()}
    if None in made.values():
        raise UserError("its machine code cannot be loaded, or was not stored: a full disk?")
    return made


def saved(
    options: Options,
    entry_of: Callable[[Options], Mapping[str, Any]],
    compile: Callable[[], Callable[..., Any]],
    drops: Callable[[], Sequence[int]],
) -> Saved:
    """A Dynamo graph compiled so that it can be saved, or only compiled if that fails.

    `entry_of` compiles the graph into the cache and returns its trace record, or raises. `drops`
    then returns the places of arguments that are constants.
    """
    with ExitStack() as stack:
        how = replace(options, **FIXED)
        if store_in(how) is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="lenz-"))
            how = replace(how, cache=True, cache_dir=folder)
        try:
            contents = _contents({**entry_of(how), "drops": drops()}, how)
            return Saved(SavedRun(contents), as_bytes(contents))
        except UserError as e:
            why = e.what
        except Exception as e:  # `compile` raises it, warns or does without
            if is_message(e):
                raise
            why = f"{type(e).__name__}: {e}"
    return Saved(dropping(compile(), drops()), why=why)


def dropping(run: Callable[..., Any], places: Sequence[int]) -> Callable[..., Any]:
    """Return a function that runs `run` without the arguments at these places."""
    if not places:
        return run
    return lambda *args: run(*[a for k, a in enumerate(args) if k not in places])


def _contents(entry: Mapping[str, Any], options: Options) -> Contents:
    """The artifact of a trace record: all store entries that loading its halves reads."""
    if set(entry["halves"]) not in KINDS:
        raise UserError("a part of it is not in the cache")
    pieces = Pieces({}, store_in(options))
    halves(entry["halves"], pieces, options)
    plans = [plan_in(data) for name, data in pieces.found.items() if name.startswith("graph.")]
    if others := [name for p in plans for name in foreign(p)]:
        raise UserError(f"it calls {others[0]}, which is not torch's own")
    devices = {device for p in plans for _, _, device in signatures(p).values() if device}
    manifest = {
        "kind": "graph", "lenz": __version__, "torch": torch.__version__,
        "machine": platform.machine(),
        "features": [f[1:] for f in host().target().features.split(",") if f.startswith("+")],
        "devices": {d: loader_of(d).fits(d) for d in sorted(devices - {HOST})},
        "options": {"native": options.native, "cuda_graphs": options.cuda_graphs},
        **{k: entry[k] for k in ("metadata", "detach", "halves", "drops")},
    }  # fmt: skip
    return Contents(manifest, {name: of_bytes(data) for name, data in pieces.found.items()})


def _check(m: Manifest) -> None:
    """Reject a file that is not for this machine, torch or lenz."""
    if m.get("kind") != "graph":
        raise UserError("this is an artifact, but not a graph saved by `aot_compile`")
    here = {"lenz": __version__, "torch": torch.__version__, "machine": platform.machine()}
    for what, is_here in here.items():
        if m[what] != is_here:
            raise UserError(f"this graph was saved for {what} {m[what]}, and this is {is_here}")
    if lacks := sorted({*m["features"]} - host().features()):
        raise UserError(f"this CPU lacks {', '.join(lacks)}, which the saved graph needs")
    for device, want in m["devices"].items():
        if not (loader := loader_of(device)).runs(want, found := loader.fits(device)):
            raise UserError(f"this graph was saved for {want}, and {device} has {found}")


def _refuse(*args: Any) -> NoReturn:
    raise UserError(BROKEN)


def _graph() -> NoReturn:
    raise UserError("compiled autograd needs the graph, which a saved function does not have")
