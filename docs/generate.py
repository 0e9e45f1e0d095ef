"""Write the pages that follow from code: options, ops, lowerings, errors, the grammar in ir.md.

    python docs/generate.py

tests/docs/test_generated.py fails if a page is out of date.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))

import lenz.ops  # noqa: E402, F401 - fills the op table
from lenz.api import MODES  # noqa: E402
from lenz.debug.options_table import options_table  # noqa: E402
from lenz.errors import FAULTS, InternalError, Missing, Unsupported, UserError  # noqa: E402
from lenz.ir.dtype import FLOAT8, MOVED, NATIVE, DType  # noqa: E402
from lenz.ir.forms import FORMS, GRAPH, NODES, PLAN, STEPS, STMTS  # noqa: E402
from lenz.ir.graph import Mutation  # noqa: E402
from lenz.ir.kernel import Kernel, Launch, Local, LookBack, Param, Rejected  # noqa: E402
from lenz.ir.op import Op, OpForm, all_ops  # noqa: E402
from lenz.ir.tensor import Buffer  # noqa: E402
from lenz.lower import native_ops  # noqa: E402
from lenz.lower.registry import entry_for, pointwise_ops  # noqa: E402

HEAD = "<!-- Written by `python docs/generate.py`; a test holds it to the code. -->\n"

OPTIONS = """\
# Options

Set an option with `torch.compile(f, backend="lenz", options={"fuse": False})` or with its
environment variable; `options=` wins. An unknown name is an error that lists similar names, and so
is a variable `LENZ_...` of another name. Options that change code are part of the disk cache's key.
Variables are read whenever a graph is compiled: set them before the first call.

"""

MODES_OF = """
## Modes

`mode=` of torch.compile sets options for GPUs, and wins over variables. On CPUs modes change
nothing. torch takes a mode or options, not both.

| mode | options |
|---|---|
"""

OPS = """\
# The op table

Every scalar op, in order of definition (`lenz/ops/`). The lowering promotes mixed types: an op
takes operands of one type, and half types are computed in f32.

- **takes**: element types of the operands. T is one type for all of them; "any" is every type
  except 8-bit floats.
- **CPU**, **GPU**: how a kernel computes it. `llvm` and `triton` are direct forms; `expand` is a
  definition in simpler ops; `units` is an expansion that uses the GPU's units for 2^x and 1/x. If
  there are several, the first is for the types named.
- **cost**: of one element, relative to an f32 addition. **domain**, **ulp**: the f32 inputs that
  tests sample, and the largest error they accept there, in units in the last place; empty: exact.
- **aten**: overload packets that the entry lowers by itself, unless `lenz/lower/` has a function
  for them ([lowerings.md](lowerings.md)).

| op | takes | CPU | GPU | cost | domain | ulp | aten |
|---|---|---|---|---|---|---|---|
"""

LOWERINGS = """\
# aten ops that lenz lowers

{count} names, by the file of `lenz/lower/` that lowers them. A name with a dot is one overload. A
name without a dot stands for all overloads that have no entry of their own. Names without a
namespace are aten's.

A lowering may still decline a case (complex numbers, say). Ops that are not listed, and cases that
are declined, become calls of the eager op: an `Extern` with its reason
(`lenz.explain(fn)(*args).graphs[0].fallbacks`).

Some calls pass torch's fake tensors and decompositions although eager may reject the types, shapes
or values of their arguments. These run in eager too, which raises its own error. They are listed in
`lenz/frontend/refusals.py`; an entry that covers too much only costs speed.
"""

ERRORS = """\
# Errors

An error of lenz says what went wrong, where (`at:`), and what to do next (`try:`). Its class says
whose fault it is. All are subclasses of `lenz.errors.LenzError`.

| class | meaning | what happens to the graph |
|---|---|---|
"""

BECOMES = {
    Unsupported: "it runs in eager, with one warning; a single op runs in eager",
    UserError: "the error is raised",
    Missing: 'it runs in eager, with one warning; with `on_error="raise"` the error is raised',
    InternalError: "it runs in eager, with one warning that names saved files; with"
    ' `on_error="raise"` the error is raised',
}

CHECKS = """
Any other exception inside the compiler becomes an `InternalError`. If torch itself cannot trace a
graph, it runs in eager, with one warning; with `on_error="raise"` torch's error is raised. Errors
of your own program are raised as they are.

The same warning is given once in a process.

## Errors of kernels

Kernels check values where eager does, and the call raises an error of eager's class; its message
names neither the value nor the size. On GPUs a failed check stops the context, as it does in eager.

| check | raises | message |
|---|---|---|
"""

GROUPS = (
    ("any", NATIVE),
    ("number", tuple(d for d in NATIVE if d.is_integer or d.name in ("f32", "f64"))),
    ("int", tuple(d for d in NATIVE if d.is_integer)),
    ("unsigned", tuple(d for d in NATIVE if d.kind == "uint")),
    ("signed", tuple(d for d in NATIVE if d.kind == "int")),
    ("half", tuple(d for d in NATIVE if d.is_half)),
    ("8-bit float", FLOAT8),
)


def types(found: tuple[DType, ...]) -> str:
    """A set of types in few words: the largest groups first, then single names."""
    rest, words = dict.fromkeys(d for d in MOVED if d in found), []
    for name, group in GROUPS:
        if all(d in rest for d in group):
            words.append(name)
            rest = {d: None for d in rest if d not in group}
    return " ".join([*words, *[d.name for d in rest]])


def attributes() -> Iterator[tuple[Any, ...]]:
    """The attributes that ops of the table take: nothing, a type, a word, a C function."""
    yield ()
    yield from ((d,) for d in MOVED)
    yield from ((0,), ("sin",))


def accepts(op: Op, args: tuple[DType, ...], attrs: tuple[Any, ...]) -> bool:
    """True when the type rule of the op takes the operands."""
    try:
        op.dtype(args, attrs)
    except TypeError:
        return False
    return True


def takes(op: Op) -> str:
    """The operand types that the type rule accepts."""
    found = [
        args
        for args in itertools.product(MOVED, repeat=op.arity)
        if any(accepts(op, args, attrs) for attrs in attributes())
    ]
    if all(d is args[0] for args in found for d in args):
        return types(tuple(args[0] for args in found))
    columns = [tuple(dict.fromkeys(c)) for c in zip(*found, strict=True)]
    if len(columns) == 3 and len(columns[0]) == 1 and columns[1] == columns[2]:
        return f"({types(columns[0])} T T), T: {types(columns[1])}"
    return ", ".join(f"({' '.join(d.name for d in args)})" for args in found)


def form(name: str, f: OpForm, other: str) -> str:
    """How kernels of one kind compute an op: by its own form, and by `other` where it has none."""
    if f.emit is None or f.types is None:
        return other if f.emit is None else name
    return f"{name} ({types(f.types)})" + (f", {other}" if other else "")


def forms(op: Op) -> tuple[str, str]:
    """How CPU kernels and how GPU kernels compute the op."""
    expand = "" if op.expand is None else "expand"
    cpu, cuda = op.form("cpu"), op.form("cuda")
    return form("llvm", cpu, expand), form("triton", cuda, "units" if cuda.expand else expand)


def domain(op: Op) -> str:
    """The sampled interval, or one per operand; empty for ops that no test samples in f32."""
    pairs = op.domain if isinstance(op.domain[0], tuple) else (op.domain,)
    return " x ".join(f"{low:g}..{high:g}" for low, high in pairs) if op.ulp else ""


def ops_page() -> str:
    """docs/ops.md."""
    rows = []
    for op in all_ops():
        if op.eager is None or op.arity < 1:
            continue
        aten = ", ".join(f"`{name}`" for name in op.aten)
        error = f"{op.ulp:g}" + (f" (or {op.absolute:g} absolute)" if op.absolute else "")
        if (gpu := op.form("cuda").ulp) is not None:
            error += f", GPU {gpu:g}"
        cells = (f"`{op.name}`", takes(op), *forms(op), f"{op.cost:g}", domain(op))
        rows.append(f"| {' | '.join((*cells, error if op.ulp else '', aten))} |\n")
    return HEAD + OPS + "".join(rows)


def lowerings_page() -> str:
    """docs/lowerings.md."""
    by_file: dict[str, list[str]] = {}
    table = pointwise_ops()
    for name in sorted(native_ops()):
        entry = entry_for(name if name.count(".") == 2 else f"{name}.default")
        assert entry is not None, name
        file = entry.fn.__module__.removeprefix("lenz.lower.")
        short = name.removeprefix("aten.")
        by_file.setdefault(file, []).append(
            f"`{short}`" + ("*" if direct(entry.fn, short, table) else "")
        )
    parts = [f"\n## {file}.py\n\n{', '.join(names)}\n" for file, names in sorted(by_file.items())]
    note = (
        "\nA star marks an op that its table entry lowers without a function ([ops.md](ops.md)).\n"
    )
    return HEAD + LOWERINGS.format(count=len(native_ops())) + note + "".join(parts)


def direct(fn: Callable[..., Any], name: str, table: dict[str, Op]) -> bool:
    """True when the lowering is the one that `pointwise.direct` makes of a table entry."""
    return name in table and fn.__name__ == "lower_direct"


def declared() -> str:
    """The rules of the grammar that follow from the declarations of the IR."""
    one: dict[str, Any] = {"buffer": Buffer, "param": Param, "local": Local, "look_back": LookBack}
    one |= {"launch": Launch, "reject": Rejected, "mutation": Mutation, "kernel": Kernel}
    rules = {name: [FORMS[x].grammar] for name, x in one.items()}
    rules |= {"line": GRAPH.grammar, "entry": PLAN.grammar}
    for name, forms_ in (("node", NODES), ("stmt", STMTS), ("step", STEPS)):
        rules[name] = [f.grammar for f in forms_.values()]
    return "".join(f"{name:8} = {f'{chr(10)}         | '.join(x)}\n" for name, x in rules.items())


def ir_page() -> str:
    """docs/ir.md, whose declared rules alone are generated."""
    found = (DOCS / "ir.md").read_text(encoding="utf-8")
    head, _, rest = found.partition("<!-- declared -->\n```\n")
    return f"{head}<!-- declared -->\n```\n{declared()}```{rest.partition('```')[2]}"


def options_page() -> str:
    """docs/options.md."""
    parts = [HEAD, OPTIONS, options_table(), MODES_OF]
    for mode, chosen in MODES.items():
        told = ", ".join(f"`{name}={value!r}`" for name, value in chosen.items())
        parts.append(f"| `{mode}` | {told or 'the defaults'} |\n")
    return "".join(parts)


def errors_page() -> str:
    """docs/errors.md."""
    parts = [HEAD, ERRORS]
    for kind, becomes in BECOMES.items():
        meaning = (kind.__doc__ or "").partition("\n\n")[0].replace("\n", " ").strip()
        parts.append(f"| `{kind.__name__}` | {meaning} | {becomes} |\n")
    parts.append(CHECKS)
    for name, (raised, message) in FAULTS.items():
        parts.append(f"| `{name}` | `{raised.__name__}` | {message} |\n")
    return "".join(parts)


def pages() -> dict[str, str]:
    """File name -> text of every generated page."""
    return {
        "options.md": options_page(),
        "ops.md": ops_page(),
        "lowerings.md": lowerings_page(),
        "errors.md": errors_page(),
        "ir.md": ir_page(),
    }


if __name__ == "__main__":
    for file, text in pages().items():
        (DOCS / file).write_text(text, encoding="utf-8")
