"""Text of plans; see printer.py."""

from __future__ import annotations

from typing import assert_never

from lenz.ir.lines import Lines
from lenz.ir.plan import (
    Alloc,
    BindSize,
    CallStep,
    Check,
    Free,
    Input,
    LaunchStep,
    Lay,
    Plan,
    Reuse,
    Step,
    ViewStep,
)
from lenz.ir.printer_expr import (
    show_atom,
    show_call,
    show_held,
    show_name,
    show_range,
    show_type,
    show_word,
)
from lenz.ir.tensor import TensorType
from lenz.sym import Sym, Var
from lenz.sym import show as show_sym


def launched(p: Plan) -> tuple[str, ...]:
    """Names of the kernels in order of first launch."""
    return tuple(dict.fromkeys(s.kernel for s in p.steps if isinstance(s, LaunchStep)))


def plan_sizes(p: Plan) -> tuple[Var, ...]:
    """The size variables of a plan in order of first use."""
    found: dict[Var, None] = {}

    def take(s: Sym) -> None:
        for v in s.free_vars:
            if v not in found:
                if v.below is not None:
                    take(v.below)
                found[v] = None

    def walk(x: object) -> None:
        match x:
            case Sym():
                take(x)
            case tuple():
                for part in x:
                    walk(part)
            case TensorType():
                walk(x.layout.syms)
            case Input() | Alloc() | Reuse() | ViewStep():
                walk(x.type)
            case BindSize():
                take(x.var)
            case LaunchStep():
                walk((x.sizes, x.grid))
            case CallStep():
                walk((x.args, tuple(a for _, a in x.kwargs), x.outs))

    for i in p.inputs:
        walk(i if isinstance(i, Input) else i.value)
    walk((p.constants, p.steps, p.outputs))
    return tuple(found)


def plan_device(p: Plan) -> str:
    """The device in the header: that of the first tensor of the plan; "" when it has none."""
    for x in (*p.inputs, *p.constants, *p.steps):
        if isinstance(x, (Input, Alloc, Reuse, ViewStep)):
            return x.type.device
    return ""


def plan_lines(p: Plan, out: Lines, origins: bool) -> Lines:
    """Add the text of a plan to `out`; `origins` adds its comments."""
    device = plan_device(p)
    sizes = ", ".join(f"{v.name}: {show_range(v)}" for v in plan_sizes(p))
    on = f" on {show_word(device)}" if device else ""
    comments: dict[int, list[str]] = {}
    for at, text in p.comments if origins else ():
        comments.setdefault(at, []).append(text)
    with out.block(f"plan @{show_name(p.name)}({sizes}){on}", p):
        for name in p.objects:
            out.add(f"object {show_name(name)}")
        for i in p.inputs:
            if isinstance(i, Input):
                out.add(f"in {_tensor(i, device)}", i)
            else:
                out.add(f"in {show_sym(i.value)} : size", i)
        for c in p.constants:
            out.add(f"const {_tensor(c, device)}", c)
        if p.aligned:
            out.add(f"aligned ({', '.join('%' + show_name(a) for a in p.aligned)})")
        if p.most:
            out.add(f"most ({', '.join(f'{name}: {end}' for name, end in p.most)})")
        for at, step in enumerate(p.steps):
            for text in comments.get(at, ()):
                out.rows.extend(f"{out.indent}# {row}" for row in text.split("\n"))
            out.add(show_step(step, device), step)
        if p.kernels != launched(p):
            out.add(f"kernels ({', '.join('@' + show_name(k) for k in p.kernels)})")
        out.add(f"return ({', '.join(map(show_atom, p.outputs))})", p.outputs)
    return out


def _tensor(x: Input | Alloc | Reuse | ViewStep | Lay, device: str) -> str:
    return f"%{show_name(x.name)} : {show_type(x.type, device)}"


def show_step(s: Step, device: str = "") -> str:
    """One step."""
    match s:
        case BindSize(var, source, dim, stride, factor):
            what = f"{'stride' if stride else 'size'}(%{show_name(source)}, {dim})"
            return f"bind {var.name} = {what}" + (f" by {factor}" if factor > 1 else "")
        case Alloc(_, _, zero, over):
            kind = " zero" if zero else f" over %{show_name(over)}" if over else ""
            return f"alloc {_tensor(s, device)}{kind}"
        case Reuse(_, source, _):
            return f"reuse {_tensor(s, device)} of %{show_name(source)}"
        case ViewStep(_, source, _, detached):
            return f"view {_tensor(s, device)} of %{show_name(source)}" + " detached" * detached
        case Lay():
            return f"lay {_tensor(s, device)}"
        case LaunchStep(kernel, args, sizes, grid, on):
            inner = ", ".join("%" + show_name(a) for a in args)
            inner += ("; " if sizes else "") + ", ".join(map(show_sym, sizes))
            where = "" if grid is None else f" on {show_word(on)} grid [{show_sym(grid)}]"
            return f"launch @{show_name(kernel)}({inner}){where}"
        case CallStep():
            return _call(s)
        case Free(name):
            return f"free %{show_name(name)}"
        case Check():
            return "check"
        case _:
            assert_never(s)


def _call(s: CallStep) -> str:
    outs = [
        "none" if o is None else f"%{show_name(o)}" if isinstance(o, str) else show_sym(o)
        for o in s.outs
    ]
    head, call = show_call(outs, s.op, s.args, s.kwargs, s.single)
    return f"call {head} = {call}" + " into" * s.into + show_held(s.holds, s.waits)
