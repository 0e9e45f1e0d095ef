"""Scripts and folders that repeat a compilation without the user's program."""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Callable, Mapping
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from lenz.debug.trace import TEXTS, file_name, one_by_one, write_in
from lenz.errors import InternalError, UserError
from lenz.ir.dtype import dtype_of
from lenz.options import Options

SMALL = 64  # largest constant that is written out; larger ones are drawn at random

SCRIPT = '''\
"""Compiles one graph again, without its program; inputs and weights are {inputs_are}."""

import math
import operator
from pathlib import Path

import torch
from torch import device, inf, nan

from lenz.runtime.script import random_tensor
{head}

{classes}

def tensor(shape, stride, dtype, where="cpu"):
    return random_tensor(tuple(map(str, shape)), tuple(map(str, stride)), dtype, where, {{}})


torch.manual_seed(0)
INPUTS = {inputs}
GRAPH = {root}()


def main():
    with torch.no_grad():
        return GRAPH(*INPUTS)


if __name__ == "__main__":
    with torch.no_grad():
        made = torch.compile(GRAPH, backend="lenz", dynamic={dynamic}, options={options!r})(*INPUTS)
    print("compiled and ran; results:", len(made))
'''


def runnable(gm: GraphModule, options: Options, head: str = "", saved: bool = False) -> str:
    """A script that compiles `gm` on inputs of the types it was traced for.

    It raises the error of a graph that cannot be compiled. Its `main()` is one for the commands
    compare and bisect. `head` runs first; `saved` inputs are in `inputs.pt` beside it.
    """
    places = [n for n in gm.graph.nodes if n.op == "placeholder"]
    values = [n.meta.get("val") for n in places]
    inputs = "".join(f"    {_value(v)},  # {n.name}\n" for n, v in zip(places, values, strict=True))
    classes: dict[str, str] = {}
    root = _class(gm, "Graph", classes)
    return SCRIPT.format(
        inputs_are="the program's" if saved else "random",
        head=head,
        classes="\n\n".join(classes.values()),
        inputs='torch.load(Path(__file__).with_name("inputs.pt"))' if saved else f"[\n{inputs}]",
        root=root,
        dynamic=any(isinstance(v, torch.SymInt) for v in values),
        options={**_changed(options), "cache": False, "on_error": "raise"},
    )


def _class(gm: GraphModule, name: str, classes: dict[str, str]) -> str:
    """Add the class of a module after those of its submodules; returns its name."""
    lines = ["    def __init__(self):", "        super().__init__()"]
    for target in dict.fromkeys(str(n.target) for n in gm.graph.nodes if n.op == "get_attr"):
        value = attrgetter(target)(gm)
        if isinstance(value, torch.Tensor):
            lines.append(f"        self.{target} = {_constant(value)}")
        elif isinstance(value, GraphModule):
            lines.append(f"        self.{target} = {_class(value, f'{name}_{target}', classes)}()")
        else:
            lines.append(f"        self.{target} = None  # {type(value).__name__}: not kept")
    body = "\n".join(f"    {line}" for line in gm.code.strip().splitlines())
    classes[name] = f"class {name}(torch.nn.Module):\n" + "\n".join(lines) + f"\n\n{body}\n"
    return name


def _constant(t: torch.Tensor) -> str:
    if t.numel() <= SMALL and t.device.type == "cpu":
        return f"torch.tensor({t.tolist()!r}, dtype={t.dtype}).reshape({tuple(t.shape)})"
    return _value(t)


def _value(v: Any) -> str:
    """Python text for a value like `v`, at the example sizes."""
    match v:
        case torch.Tensor():
            dtype = dtype_of(v.dtype)
            if dtype is None:
                return f"None  # {v.dtype}: not kept"
            shape, stride = tuple(map(_size, v.shape)), tuple(map(_size, v.stride()))
            grad = ".requires_grad_()" if v.requires_grad else ""
            where = "" if v.device.type == "cpu" else f", {str(v.device)!r}"
            return f"tensor({shape}, {stride}, {dtype.name!r}{where}){grad}"
        case torch.SymInt() | torch.SymFloat():
            return repr(_size(v))
        case bool() | int() | float() | complex() | str() | None:
            return repr(v)
    return f"None  # {type(v).__name__}: not kept"


def _size(v: Any) -> Any:
    """The example value of a size."""
    if not isinstance(v, torch.SymInt | torch.SymFloat):
        return v
    hint = getattr(v.node, "hint", None)
    return 64 if hint is None else hint


def _changed(options: Options) -> dict[str, object]:
    """The options that change code and differ from their defaults; `passes` have run already."""
    plain = Options()
    names = [f.name for f in fields(options) if f.metadata["key"] and f.name != "passes"]
    return {n: getattr(options, n) for n in names if getattr(options, n) != getattr(plain, n)}


def write_repro(
    error: BaseException, fault: InternalError, offered: Mapping[str, Callable[[], str]], name: str,
    options: Options,
) -> str:  # fmt: skip
    """Write down a program on which the compiler failed; returns the folder.

    The folder is named by its contents, so that the same fault is written once. Returns "" if it
    cannot be written: the fault itself matters more.
    """
    if options.debug_dir is None:
        return ""
    texts = {TEXTS.get(k, ("", "", f"{k}.txt"))[2]: _made(text) for k, text in offered.items()}
    texts["options.txt"] = f"{options}\n"
    texts["error.txt"] = f"{fault}\n\n{''.join(traceback.format_exception(error))}"
    program = texts.get("fx_transformed.py", "") + fault.what
    code = hashlib.sha256(f"{name}\n{program}".encode(errors="replace")).hexdigest()[:8]
    folder = Path(options.debug_dir) / file_name(f"repro-{name}-{code}")
    try:
        write_in(folder, {k: one_by_one(text) for k, text in texts.items()}, make=True)
    except UserError:  # the fault itself counts more
        return ""
    return str(folder)


def _made(text: Callable[[], str]) -> str:
    try:
        return text()
    except Exception as e:  # noqa: BLE001 - a fault of the compiler may break its printer too
        return f"cannot be shown: {type(e).__name__}: {e}"
