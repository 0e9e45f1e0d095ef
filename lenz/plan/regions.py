"""The regions of a plan: which of its steps a CUDA graph may hold.

A plan is cut at each step that cannot be captured. Such a step is a region `outside`, with the
reason. The steps between two cuts are a region `graph`, unless it would have only one launch or
call, which gains nothing. Random keys are drawn before the graph that uses them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from lenz.ir import plan as ir
from lenz.ir.graph import Named, atom_syms, names_in
from lenz.plan.forms import returns_argument
from lenz.records import dataclass, field, replace
from lenz.runtime import executor
from lenz.sym import Var
from lenz.traits import has

ALONE = "one kernel alone gains nothing"
NAMED = ir.Input | ir.Alloc | ir.Alias | ir.Lay  # they give a buffer a type
LOOKS = "it reads the result of another step"


@dataclass(frozen=True, slots=True)
class CaptureFacts:
    """What decides whether a graph can hold a step.

    known   the sizes that arguments determine
    there   buffers on the CPU
    sized   buffers whose sizes the call itself determines
    refused ops that failed when they were captured
    """

    known: Collection[Var] = ()
    there: Collection[str] = ()
    sized: Collection[str] = ()
    refused: Collection[str] = ()


@dataclass(slots=True)
class _Part:
    """Consecutive steps, the random keys drawn before them, and why they are outside graphs."""

    steps: list[ir.Step]
    drawn: list[ir.Step] = field(default_factory=list)
    why: str = ""


def regioned(p: ir.Plan, refused: Collection[str] = ()) -> ir.Plan:
    """The plan, divided into regions; the `refused` ops failed when a graph was captured."""
    binds = p.binds
    known = {v for i in p.inputs if isinstance(i, ir.SizeInput) for v in i.value.free_vars}
    known |= {s.var for s in binds}
    rest, (device, why) = [s for s in p.flat if s not in binds], _device(p)
    steps: list[ir.Step | ir.Region] = [*binds]
    there = {s.name for s in (*p.inputs, *rest) if isinstance(s, NAMED) and s.type.device == "cpu"}
    sized = {s.source for s in rest if isinstance(s, ir.BindSize)}
    for x in [] if why else _parts(rest, CaptureFacts(known, there, sized, refused)):
        work = [s for s in x.steps if isinstance(s, ir.LaunchStep | ir.CallStep)]
        is_graph = not x.why and len(work) > 1
        kind: Any = "graph" if is_graph else "outside"
        region = ir.Region(kind, tuple(x.steps), x.why, device * is_graph)
        steps += [*x.drawn, *([region] if is_graph or x.why else x.steps)]
    if not any(isinstance(s, ir.Region) for s in steps):
        steps = [*binds, ir.Region("outside", tuple(rest), why or ALONE)]
    old = p.flat
    whys = {id(old[k]): text for k, text in p.comments}
    made = replace(p, steps=tuple(steps))
    comments = tuple((k, whys[id(s)]) for k, s in enumerate(made.flat) if id(s) in whys)
    return replace(made, comments=comments)


def _parts(steps: Sequence[ir.Step], facts: CaptureFacts) -> list[_Part]:
    """Cut the steps where one cannot be captured."""
    parts, own = [_Part([]), _Part([])], set[str]()
    drawn = {n for s in steps if _draws(s) for n in ir.defined(s)}
    for s in steps:
        if _draws(s) or (isinstance(s, ir.Lay) and s.name in drawn):
            parts[-1].drawn.append(s)
        elif (looks := isinstance(s, ir.Lay) and s.name not in own) and not parts[-1].steps:
            parts[-2].steps.append(s)  # it reads the result of the step before
        elif why := LOOKS if looks else _refusal(s, facts):
            parts += [_Part([s], why=why), _Part([])]
            own = set()
        else:
            parts[-1].steps.append(s)
            own |= {*ir.defined(s)}
    return [x for x in parts if x.steps or x.drawn]


def _draws(s: ir.Step) -> bool:
    return isinstance(s, ir.CallStep) and s.draws == "key"


def _device(p: ir.Plan) -> tuple[str, str]:
    """The GPU of a plan, or why it has no graph."""
    named = [s.device for s in p.flat if isinstance(s, ir.Current)]
    named += [s.type.device for s in (*p.inputs, *p.flat) if isinstance(s, NAMED)]
    found = list(dict.fromkeys(d for d in named if d.startswith("cuda")))
    if len(found) == 1:
        return found[0], ""
    return "", "it runs on more than one GPU" if found else "it has no tensor on a GPU"


def _refusal(s: ir.Step, facts: CaptureFacts) -> str:
    """Why a graph cannot hold this step; "" if it can."""
    if not _sizes(s) <= {*facts.known}:
        return "its sizes depend on values"
    match s:
        case ir.LaunchStep(grid=None) | ir.Check():
            return "a kernel runs on the CPU"
        case ir.Alloc() if not s.type.device.startswith("cuda"):
            return "it allocates CPU memory"
        case ir.BindSize():
            return f"{s.source} has a size known only to the call"
        case ir.CallStep() if any(n in facts.there for n in names_in(s)):
            return f"{s.op} takes a tensor on the CPU"
        case ir.CallStep():
            return _refused_call(s, facts)
    return ""


def _refused_call(s: ir.CallStep, facts: CaptureFacts) -> str:
    if s.op in facts.refused:
        return f"{s.op} failed when it was captured"
    if any(n in facts.sized for n in ir.defined(s)):
        return f"{s.op} has a result whose size depends on values"
    if not s.op.startswith("aten."):
        return f"{s.op} may do anything"
    op: Any = executor.resolve(s.op, direct=False)
    named = [a for a in (*s.args, *(a for _, a in s.kwargs)) if isinstance(a, Named)]
    numbers = [o for o in s.outs if isinstance(o, Var)]
    whys = {
        "is a collective": s.holds or s.waits,
        "returns numbers to the CPU": any(o not in facts.known for o in numbers),
        "returns an alias of its argument": returns_argument(s),
        "works on the CPU": any(a.kind == "device" and a.value.startswith("cpu") for a in named),
        "looks at values": s.op == "aten._linalg_check_errors.default",
        "is tagged as unsafe for CUDA graphs": torch.Tag.cudagraph_unsafe in op.tags,
        "draws random numbers": s.draws and not has(s.op, "replayed"),
    }
    return next((f"{s.op} {why}" for why, holds in whys.items() if holds), "")


def _sizes(s: ir.Step) -> set[Var]:
    """The variables in the sizes of a step."""
    match s:
        case ir.Alloc() | ir.Alias() | ir.Lay():
            told = s.type.layout.syms
        case ir.LaunchStep():
            told = (*s.sizes, *(() if s.grid is None else (s.grid,)))
        case ir.CallStep():
            told = tuple(atom_syms((*s.args, *(a for _, a in s.kwargs))))
        case _:
            told = ()
    return {v for x in told for v in x.free_vars}
