"""`python -m lenz repro`: one kernel of a debug folder as a script that runs alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from lenz.commands.compare import distance
from lenz.debug.names import titled
from lenz.debug.profile import bandwidth
from lenz.debug.trace import file_name, write_in
from lenz.debug.traffic import bytes_moved
from lenz.errors import UserError, near_names
from lenz.ir.interp_kernel import interp_kernel
from lenz.ir.kernel import Kernel, Launch, Schedule, programs
from lenz.ir.lexer import ReadError
from lenz.ir.printer import show
from lenz.ir.reader import read
from lenz.machines import assemble, runs_programs
from lenz.options import Options
from lenz.pipeline import context  # which fills the table of scalar ops, for the reader
from lenz.private import naming, reading
from lenz.runtime.executor import raise_failed
from lenz.runtime.script import random_tensor
from lenz.sym import SymEnv, evaluate

FILE = "ir_after_fusion.ir"
NARROW = re.compile(r"\b(bf16|f16|f32|f8e\w+)\b")  # types in the text of a kernel
SECONDS = 0.5  # for which a kernel is timed
SCRIPT = '''\
"""{name} of {graph}, on random arguments. The kernel and its sizes may be changed."""

from lenz.commands.kernel import run_kernel

SIZES = {sizes}
KERNEL = """
{text}"""

if __name__ == "__main__":
    run_kernel(KERNEL, SIZES, {device!r})
'''


def kernel_script(name: str, folder: str) -> Path:
    """Write a kernel as a script into the debug folder of its graph; return the path.

    `folder` is that one, or one that holds several: the latest graph counts. Raises UserError if no
    graph has such a kernel.
    """
    known: set[str] = set()
    with naming(f"cannot read {folder!r}"):
        files = [(f.stat().st_mtime, f) for f in Path(folder).rglob(FILE) if f.is_file()]
    for _, file in sorted(files, reverse=True):
        s = _schedule_in(file)
        found = {x.kernel.name: x for x in s.steps if isinstance(x, Launch)}
        known |= found.keys()
        if (x := found.get(name)) is not None:
            sizes = {v.name: s.graph.env.hint(v) for v in x.kernel.sizes}
            text = show(x.kernel).replace("\\", r"\\").replace('"', r"\"")
            given = {"graph": titled(s.graph.name), "sizes": sizes, "device": x.device}
            made = file_name(f"{name}.py")
            write_in(file.parent, {made: SCRIPT.format(name=name, text=text, **given)})
            return file.parent / made
    hint = near_names(name, known) if known else "run the program with LENZ_DEBUG=1 first"
    raise UserError(f"there is no kernel {name} in {folder}", hint=hint)


def _schedule_in(file: Path) -> Schedule:
    with reading(file) as opened:
        text = opened.read().decode()
    try:
        if isinstance(s := read(text), Schedule):
            return s
        why = f"it holds a {type(s).__name__.lower()}"
    except ReadError as e:
        why = e.what
    raise UserError(f"{file} is not a schedule: {why}")


def run_kernel(text: str, sizes: Mapping[str, int], device: str) -> None:
    """Run a kernel, given as text, on random arguments; print its error and its time.

    The interpreter runs it in float64, and in its own types: a kernel that is much farther from
    float64 than that is wrong. If float64 lacks one of its ops, there is only the second result.
    The limit is a copy of as many bytes as it reads and writes. Integers are 0 or 1, so that they
    are legal indices.
    """
    k: Any = read(text)
    env = SymEnv(hints=tuple(sizes.items()))
    xs = [random_tensor([str(env.hint(p.size))], ["1"], p.dtype.name, "cpu", {}) for p in k.params]
    for t in _those(k, xs, "work"):
        t.zero_()
    try:
        exact: Any = read(NARROW.sub("f64", text))
    except ReadError:  # an op has only its own type, as a look at the bits of a float has
        exact = k
    wide, near = (_interpreted(x, xs, sizes) for x in (exact, k))
    code = assemble({k.name: (k, device)}, context(Options(cache=False)))()
    own = [t.to(device, copy=True) for t in xs]

    def run() -> None:
        for t in _those(k, own, "work"):
            t.zero_()
        call_kernel(code.functions[k.name], k, own, sizes, device)

    run()
    error = distance([t.cpu() for t in _those(k, own, "out", "inout")], wide)
    timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    us = 1e6 * timer.blocked_autorange(min_run_time=SECONDS).median
    nbytes = bytes_moved(k, env)
    limit = nbytes / bandwidth(device) / 1e3
    if exact is k:
        print(f"error against the interpreter  {error:.1e}; float64 lacks one of its ops")
    else:
        own_types = f"the interpreter's in its own types: {distance(near, wide):.1e}"
        print(f"error against float64  {error:.1e}; {own_types}")
    print(f"time of a launch       {us:.2f} us on {device}, for {nbytes / 1e6:.3f} MB")
    print(f"of the limit           {limit / us:.1%}: a copy of that takes {limit:.2f} us")


def call_kernel(
    call: Callable[..., Any], k: Kernel, tensors: Sequence[Tensor], sizes: Mapping[str, int],
    device: str,
) -> None:  # fmt: skip
    """Run a compiled kernel on tensors of its device; raises the error of a failed check."""
    values = {v: sizes[v.name] for v in k.sizes}
    args = [*(t.data_ptr() for t in tensors), *values.values()]
    if runs_programs(device):
        stream = torch.cuda.current_stream(device).cuda_stream
        args = [stream, evaluate(programs(k), values), *args]
    if failed := call(*args):
        raise_failed(failed)


def _interpreted(k: Kernel, given: Sequence[Tensor], sizes: Mapping[str, int]) -> list[Tensor]:
    """The results of a kernel by the interpreter."""
    own = [t.to(p.dtype.torch, copy=True) for p, t in zip(k.params, given, strict=True)]
    interp_kernel(k, {p.name: t for p, t in zip(k.params, own, strict=True)}, sizes)
    return _those(k, own, "out", "inout")


def _those(k: Kernel, tensors: Sequence[Tensor], *modes: str) -> list[Tensor]:
    """The tensors of the parameters that have one of these modes."""
    return [t for p, t in zip(k.params, tensors, strict=True) if p.mode in modes]
