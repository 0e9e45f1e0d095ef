"""What is known of one compiled graph, as plain data: one function per section of the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from lenz.debug.names import titled
from lenz.debug.report import ExternReport, GraphReport, KernelReport
from lenz.debug.work import call_flops, kernel_flops
from lenz.ir.graph import Extern, buffers_of, outs_of, reads_of, roots_of
from lenz.ir.kernel import Launch, Schedule
from lenz.ir.plan import CallStep, LaunchStep, Plan, Region
from lenz.ir.printer import show
from lenz.opt import PASSES
from lenz.page.texts import code_of, node_rows, nodes_by_step, owners, user_lines, values_of
from lenz.target import HOST

# Fields of a graph's report that are in `graph_data` in another form, or too long.
APART = ("kernels", "externs", "rejected", "ir")


def graph_data(s: Schedule, p: Plan, code: str, reports: Sequence[Any]) -> dict[str, Any]:
    """A graph's steps, kernels, pairs that are not fused, and regions of CUDA graphs."""
    told = {"kernels": kernel_texts(s, code), "apart": apart(s), "regions": regions(p)}
    return {"steps": steps_of(s, reports), **told}


def eager_data(g: GraphReport) -> dict[str, Any]:
    """The same of a graph that runs in eager, of which only the calls are known."""
    steps = [call_row(e) | {"needs": [], "loads": [], "stores": list(e.outs)} for e in g.externs]
    return {"steps": steps, "kernels": {}, "apart": [], "regions": []}


def steps_of(s: Schedule, reports: Sequence[Any]) -> list[dict[str, Any]]:
    """The launches and calls in order: the work of each, what it needs, and its nodes."""
    buffers, roots, nodes = buffers_of(s.graph), roots_of(s.steps), nodes_by_step(s)
    rows = node_rows(s.graph, nodes)
    env, writer, made = s.graph.env, dict[str, int](), list[dict[str, Any]]()
    for (k, step), told in zip(calls_of(s).items(), reports, strict=True):
        taken, given = taken_by(step), given_by(step)
        if isinstance(step, Launch):
            row = kernel_row(told, step.device) | {
                "flops": kernel_flops(step.kernel, env),
                "args": _arguments(step),
                "values": values_of(step.kernel, nodes.get(k, ())),
                "nodes": rows.get(k, []),
                "nodes_count": len(rows.get(k, [])),
            }
        else:
            types = {a: buffers[a].type for a in (*taken, *given) if a in buffers}
            size = {a: env.hint(t.nbytes) for a, t in types.items()}
            row = call_row(told, next((t.device for t in types.values()), HOST)) | {
                "loads": taken,
                "stores": given,
                "bytes_read": sum(size.get(a, 0) for a in taken),
                "bytes_written": sum(size.get(a, 0) for a in given),
                "flops": call_flops(step, buffers, env),
            }
        row["needs"] = sorted({writer[r] for a in taken if (r := roots.get(a, a)) in writer})
        writer.update({roots.get(a, a): len(made) for a in given})
        made.append(row)
    return made


def kernel_row(k: KernelReport, place: str) -> dict[str, Any]:
    """A launch by its report."""
    told = {f.name: getattr(k, f.name) for f in fields(k) if f.name != "text"}
    return told | {"what": "kernel", "place": place, "lines": user_lines(k.origins)}


def call_row(e: ExternReport, place: str = HOST) -> dict[str, Any]:
    """A call by its report."""
    what = "eager" if e.is_fallback else "library"
    told = {"what": what, "name": e.op, "kind": e.reason, "place": place, "flops": 0}
    told |= {"bytes_read": 0, "bytes_written": 0, "mutated_args": e.mutated_args}
    return told | {"origins": e.origins, "lines": user_lines(e.origins)}


def calls_of(s: Schedule) -> dict[int, Launch | Extern]:
    """The launches and calls by their position among the steps."""
    return {k: x for k, x in enumerate(s.steps) if isinstance(x, (Launch, Extern))}


def _arguments(x: Launch) -> list[tuple[str, str, str]]:
    """Name, buffer and mode of each parameter."""
    return [(p.name, a, p.mode) for p, a in zip(x.kernel.params, x.args, strict=True)]


def taken_by(x: Launch | Extern) -> list[str]:
    """The buffers that a launch or call reads."""
    if isinstance(x, Launch):
        return [a for _, a, mode in _arguments(x) if mode in ("in", "inout")]
    return list(reads_of(x))


def given_by(x: Launch | Extern) -> list[str]:
    """The buffers that it writes."""
    if isinstance(x, Launch):
        return [a for _, a, mode in _arguments(x) if mode in ("out", "inout")]
    return [*(b.name for b in outs_of(x)), *x.mutates]


def kernel_texts(s: Schedule, code: str) -> dict[str, dict[str, str]]:
    """IR and emitted code of the different kernels, by name."""
    emitted = code_of(code)
    found = {x.kernel.name: x.kernel for x in s.steps if isinstance(x, Launch)}
    return {name: {"ir": show(k), "code": emitted.get(name, "")} for name, k in found.items()}


def apart(s: Schedule) -> list[dict[str, Any]]:
    """Neighbours that were not fused, with the reason.

    First the pairs that the scheduler tried, then those where a kernel reads a call's result or a
    call a kernel's.
    """
    of, steps, roots = owners(s), calls_of(s), roots_of(s.steps)
    number = {k: n for n, k in enumerate(steps)}
    found: dict[tuple[str, str, str], list[int]] = {}
    for r in s.rejected:
        near = [of.get(n, of.get(n.partition(".")[0])) for n in (r.first, r.second)]
        at = [k for k in near if k is not None]
        if len({*at}) != 1 or len(at) == 1:  # else another way to join them was found later
            found.setdefault((r.first, r.second, r.why), [number[k] for k in at if k in number])
    tried, writer = {(*at,) for at in found.values()}, dict[str, int]()
    for k, x in steps.items():
        for name in dict.fromkeys(roots.get(a, a) for a in taken_by(x)):
            before = writer.get(name, k)
            pair, at = (steps[before], x), [number[before], number[k]]
            calls = [y for y in pair if isinstance(y, Extern)]
            if before != k and len(calls) < 2 and (calls or (*at,) not in tried):
                first, second = (y.kernel.name if isinstance(y, Launch) else y.op for y in pair)
                found.setdefault((first, second, _why_apart(calls)), at)
        writer.update({roots.get(a, a): k for a in given_by(x)})
    return [{"first": a, "second": b, "why": w, "steps": at} for (a, b, w), at in found.items()]


def _why_apart(calls: Sequence[Extern]) -> str:
    if not calls:
        return "the scheduler did not try to join them: a scatter, or an update in place"
    if calls[0].reason == "library":
        return f"{calls[0].op} is a library call, which no kernel can join"
    return f"{calls[0].op} runs in eager: {calls[0].reason}"


def regions(p: Plan) -> list[dict[str, Any]]:
    """The parts of a plan that CUDA graphs hold, and those that they cannot, with the reason."""
    found: list[dict[str, Any]] = []
    for s in (s for s in p.steps if isinstance(s, Region)):
        inside = [x for x in s.steps if isinstance(x, (LaunchStep, CallStep))]
        names = [x.kernel if isinstance(x, LaunchStep) else x.op for x in inside]
        found.append({"kind": s.kind, "device": s.device, "why": s.why, "steps": names})
    return found


def report_data(g: GraphReport) -> dict[str, Any]:
    """A graph's report; each stage of the compilation with the part of the compiler it is in."""
    told = {f.name: getattr(g, f.name) for f in fields(g) if f.name not in APART}
    part = {**dict.fromkeys(PASSES, "opt"), "trace": "torch"}
    return told | {
        "title": titled(g.name),
        "peak": g.peak,
        "allocs": [asdict(a) for a in g.allocs],
        "timeline": [(m.what, m.nbytes) for m in g.timeline],
        "autotune": [asdict(t) | {"told": str(t)} for t in g.autotune],
        "timings": [(part.get(k, "lenz"), k, v) for k, v in g.timings.items()],
    }
