"""The rows of docs/models.md: what each model is on all sides, and what falls back."""

from __future__ import annotations

from collections import Counter
from typing import Any, TypeAlias

Row: TypeAlias = dict[str, Any]
HEAD = """\
<!-- Written by `make models`. -->
# The model set

{models} models with random weights (`tests/models/`), on the CPU. Inference runs four draws of
weights and inputs; training compares loss, gradients, running statistics and three steps of SGD.
lenz is compared with eager and with a reference in float64.

- **eager**, **lenz**: distance from float64, the root mean square over all tensors, each relative
  to its size. lenz passes if it is at most 1.5 times as far as eager, plus 1e-7 (bf16: 2^-9),
  in one draw or in the geometric mean of eight.
- **kernels**: launches per call; for training, forward and backward. **breaks**: graph breaks of
  Dynamo, which happen before lenz sees the graph.
- **native**: aten calls that are kernels or views. **library**: matrix products, convolutions and
  attention, computed by libraries. **fallback**: calls in eager for lack of a lowering. The counts
  are those of `Report.op_calls`, before fusion.

{total}

"""


def work(name: str, device: str) -> list[Row]:
    """The rows of one model; none for an architecture that cannot be made small.

    traced   aot_eager is far from eager too: the model computes something else when traced, so
             that eager cannot judge lenz
    """
    import torch

    torch.set_num_threads(1)
    if device == "cuda":  # torch's op database freezes such flags
        torch.backends.cudnn.allow_tf32 = False
    from tests.models.architectures import Unbuilt
    from tests.models.compare import compare, judge
    from tests.models.families import MODELS, example, kinds

    rows: list[Row] = []
    try:
        made = example(name)
    except Unbuilt:
        return []
    for kind in kinds(made):
        row: Row = {"model": name, "kind": kind}
        rows.append(row)
        try:
            sides, faults = judge(name, kind, device)
            if faults and name not in MODELS:
                row["traced"] = bool(compare(name, kind, device, backend="aot_eager").faults())
                faults = [] if row["traced"] else faults
        except Exception as e:  # noqa: BLE001 - one model must not hide the others
            row["faults"] = [f"{type(e).__name__}: {e}"[:300]]
            if isinstance(e, Unbuilt) and name not in MODELS:
                rows.pop()
            continue
        graphs = sides.report.graphs
        falls = Counter((e.op, e.reason) for g in graphs for e in g.fallbacks)
        row |= {
            "errors": sides.errors,
            "kernels": sum(len(g.kernels) for g in graphs),
            "breaks": sides.breaks,
            "calls": sides.report.op_calls,
            "falls": dict(falls),
            "faults": [*faults, *sides.skips],
        }
    return rows


def line(row: Row) -> str:
    """A row of the table."""
    name, kind = row["model"], row["kind"]
    if "errors" not in row:
        return f"| {name} | {kind} | failed | | | | | | |"
    eager, lenz = row["errors"]
    breaks = sum(row["breaks"].values())
    cells = (name, kind, f"{eager:.1e}", f"{lenz:.1e}", row["kernels"], breaks, *row["calls"])
    return f"| {' | '.join(map(str, cells))} |"


def total(rows: list[Row]) -> str:
    """What the rows give together."""
    passed = sum(not r["faults"] and not r.get("traced") for r in rows)
    native, library, fallback = (sum(r["calls"][k] for r in rows if "calls" in r) for k in range(3))
    every = native + library + fallback
    traced = sum(bool(r.get("traced")) for r in rows)
    apart = f", {traced} cannot be judged" if traced else ""
    return (
        f"{passed} of {len(rows)} rows pass{apart}."
        f" Of {every:,} calls {native / every:.1%} are native,"
        f" {library / every:.1%} library calls and {fallback / every:.1%} fallbacks; of those that"
        f" are no library calls, {native / (native + fallback):.1%} are native."
    )


def tail(rows: list[Row]) -> str:
    """Fallbacks by frequency, and why graphs break."""
    falls: Counter[tuple[str, str]] = Counter()
    users: dict[tuple[str, str], dict[str, None]] = {}
    breaks: dict[str, dict[str, None]] = {}
    for row in rows:
        for key, n in row.get("falls", {}).items():
            falls[key] += n
            users.setdefault(key, {})[row["model"]] = None
        for why in row.get("breaks", {}):
            breaks.setdefault(why, {})[row["model"]] = None
    found = ["\n## Fallbacks\n", "| op | why | calls | models |", "|---|---|---|---|"]
    found += [
        f"| `{op}` | {why} | {n} | {', '.join(users[op, why])} |"
        for (op, why), n in sorted(falls.items(), key=lambda kv: (-kv[1], kv[0]))
    ]
    if breaks:
        found += ["\n## Graph breaks\n", "| why | models |", "|---|---|"]
        found += [f"| {why} | {', '.join(breaks[why])} |" for why in sorted(breaks)]
    return "\n".join(found) + "\n"


def page(rows: list[Row]) -> str:
    """docs/models.md."""
    models = len({r["model"] for r in rows})
    table = [
        "| model | | eager | lenz | kernels | breaks | native | library | fallback |",
        "|---|---|---|---|---|---|---|---|---|",
        *map(line, rows),
    ]
    return HEAD.format(models=models, total=total(rows)) + "\n".join(table) + "\n" + tail(rows)
