"""Turn GPU results into Markdown: benchmarks/results/gpu.md.

Run: python -m benchmarks.gpu_report [FILE ...]; FILEs, results of other runs on the same machine,
are first merged into benchmarks/results/gpu.json: row by row for the same machine, section by
section for another one. Each section keeps the machine, and each row the commit, that it is of.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_figures import figures, rows_of
from benchmarks.host import GPU_BACKENDS as HOSTS
from benchmarks.measure import LENZ_GRAPHS, LENZ_ON, PEER, PEER_GRAPHS, Row
from benchmarks.report import HERE, STARTED, figure_table, table

RESULTS = HERE / "results" / "gpu.json"
SIDES = ("eager", "lenz", PEER)
GRAPH_SIDES = ("eager", "lenz", LENZ_GRAPHS, LENZ_ON, PEER, PEER_GRAPHS)
NAMES = {"lenz": "lenz", LENZ_GRAPHS: "lenz with graphs", LENZ_ON: "lenz with graphs on"}
# A model may be this many times as far from float32 as eager is, plus a rounding of bf16.
MODEL_ERROR, ROUNDING = 2.0, 2.0**-8


def measured(row: Row) -> set[str]:
    """The figures of a row that are times."""
    return {k for k in row if k.endswith(("_ms", "_us", "_cold_s", "_warm_s"))}


def lifted(made: Row) -> Row:
    """Results in which each section has its machine, as older files have it only once."""
    groups = {s: {"machine": made["machine"], **g} for s, g in made["groups"].items()}
    if "kernels" in groups and "copy_gbps" in made:
        groups["kernels"].setdefault("copy_gbps", made["copy_gbps"])
    return {"machine": made["machine"], "groups": groups}


def merged(old: Row | None, new: Row) -> Row:
    """`new` with the sections of `old` that it lacks, and those rows that it has not as fully.

    Rows are of one machine in each section: where that is another one, the section is replaced.
    """
    new = lifted(new)
    if old is None:
        return new
    old, groups = lifted(old), dict[str, Any]()
    for section in TABLES:
        was, now = (x["groups"].get(section) for x in (old, new))
        if was is None or now is None or was["machine"] != now["machine"] or not now["rows"]:
            if found := now if was is None or (now is not None and now["rows"]) else was:
                groups[section] = found
            continue
        rows = {r["case"]: r for r in was["rows"]}
        for r in now["rows"]:
            before = rows.get(r["case"])
            if before is None or measured(r) >= measured(before):
                rows[r["case"]] = r
        groups[section] = {**was, **now, "rows": list(rows.values())}
    return {"machine": new["machine"], "groups": groups}


def faults(section: str, row: Row) -> list[str]:
    """What is wrong with a row: sides that failed, wrong results of lenz, graphs left to eager."""
    made = [row["failed"]] if "failed" in row else []
    sides = dict.fromkeys((*GRAPH_SIDES, *HOSTS))
    made += [f"{s}: {row[f'{s}_failed']}" for s in sides if f"{s}_failed" in row]
    for kind in ("error", "gradient_error"):
        limit = row.get("tol", math.inf)
        if section in ("models", "graphs", "survey") and f"eager_{kind}" in row:
            limit = MODEL_ERROR * row[f"eager_{kind}"] + ROUNDING
        for who in NAMES:
            if not (off := row.get(f"{who}_{kind}", 0.0)) <= limit:
                made.append(f"{NAMES[who]} is wrong: {kind} {off:.2g}, allowed {limit:.2g}")
    made += [f"lenz left a graph to eager: {why}" for why in row.get("refused", [])]
    return made


def skips(row: Row) -> list[str]:
    """Why a row was not measured, if nothing is wrong with that."""
    return [f"skipped: {row['skipped']}"] if "skipped" in row else []


def fallbacks(row: Row) -> list[str]:
    """The ops that lenz leaves to eager although it is no library's work, with the reason."""
    return [f"lenz calls eager's {op}: {why}" for op, why in row.get("fallbacks", {}).items()]


def number(row: Row, key: str, form: str, scale: float = 1.0) -> str:
    """A figure of a row as text; "-" where the row has none.

    No figure is below 0: a side that gives back memory that it held before has no peak of its own,
    as the peer's graphs, which keep a pool from their first call on.
    """
    return format(row[key] * scale, form) if row.get(key, -1) >= 0 else "-"


def _ratios(r: Row) -> list[str]:
    return [number(r, f"lenz/{b}", ".2f") for b in ("eager", PEER)]


def _kernel_cells(r: Row) -> list[str]:
    return [
        f"{r['case']} {r.get('size', '')}",
        *(number(r, f"{s}_ms", ".4f") for s in (*SIDES, "copy")),
        *_ratios(r),
        *(number(r, f"{s}_of_copy", ".0f", 100) for s in ("lenz", PEER)),
        number(r, "lenz_gbps", ".0f"),
        *(number(r, f"{s}_error", ".1e") for s in ("lenz", PEER)),
        _launches(r),
        *(number(r, f"{s}_host_us", ".0f") for s in ("lenz", PEER)),
    ]


def _model_cells(r: Row) -> list[str]:
    return [
        r["case"],
        *(number(r, f"{s}_ms", ".3f") for s in SIDES),
        *_ratios(r),
        *(number(r, f"{s}_peak", ".0f", 2.0**-20) for s in SIDES),
        *(number(r, f"{s}_error", ".1e") for s in SIDES),
        *(number(r, f"{s}_gradient_error", ".1e") for s in SIDES),
        _launches(r),
    ]


def _graph_cells(r: Row) -> list[str]:
    return [
        r["case"],
        *(number(r, f"{s}_ms", ".3f") for s in GRAPH_SIDES),
        *(number(r, k, ".2f") for k in (f"{LENZ_GRAPHS}/lenz", f"{LENZ_GRAPHS}/{PEER_GRAPHS}")),
        *(number(r, f"{s}_host_ms", ".3f") for s in GRAPH_SIDES),
        *(number(r, f"{s}_busy", ".0f", 100) for s in GRAPH_SIDES),
        *(number(r, f"{s}_peak", ".0f", 2.0**-20) for s in GRAPH_SIDES),
    ]


def _survey_cells(r: Row) -> list[str]:
    return [
        r["case"],
        *(number(r, f"{s}_ms", ".2f") for s in SIDES),
        *_ratios(r),
        *(number(r, f"{s}_peak", ".0f", 2.0**-20) for s in SIDES),
        *(number(r, f"{s}_busy", ".0f", 100) for s in ("lenz", PEER)),
        *(number(r, f"{s}_gradient_error", ".1e") for s in SIDES),
        _launches(r),
    ]


def _launches(r: Row) -> str:
    if "kernels" not in r:
        return "-"
    return f"{r['kernels']}+{r['calls'] if 'calls' in r else sum(r['externs'].values())}"


def _host_cells(r: Row) -> list[str]:
    return [r["case"], _launches(r), *(number(r, f"{s}_us", ".1f") for s in HOSTS)]


def _lengths_cells(r: Row) -> list[str]:
    ratio = lambda how: f"{r[f'{how}_ms'] / r['off_ms']:.3f}" if f"{how}_ms" in r else "-"
    times = [number(r, f"{how}_ms", ".2f") for how in ("off", "on", "auto")]
    return [r["case"], *times, ratio("on"), ratio("auto")]


def _start_cells(r: Row) -> list[str]:
    return [r["case"], *(number(r, key, ".2f") for key in STARTED.values())]


SHOWN = ("eager", "lenz", "lenz graphs", "lenz on", "peer", "peer graphs")
TABLES: dict[str, tuple[str, list[str], Callable[[Row], list[str]]]] = {
    "start": (
        "Start: seconds to the first result, new process, empty caches (warm: those it left)",
        ["case", *STARTED],
        _start_cells,
    ),
    "kernels": (
        "Kernels, ms of the device; launches are lenz's kernels + eager calls",
        ["kernel", "eager", "lenz", "peer", "copy", "lenz / eager", "lenz / peer",
         "lenz % of copy", "peer %", "lenz GB/s", "lenz error", "peer error", "launches",
         "lenz host us", "peer host us"],
        _kernel_cells,
    ),
    "models": (
        "Models, ms per call; peak memory in MiB; errors of result, and of all gradients",
        ["model", "eager", "lenz", "peer", "lenz / eager", "lenz / peer", "eager MiB", "lenz MiB",
         "peer MiB", "eager error", "lenz error", "peer error", "eager grad", "lenz grad",
         "peer grad", "launches"],
        _model_cells,
    ),
    "graphs": (
        "CUDA graphs: ms per call, ms of the host, busy share of the GPU in %, peak memory in MiB",
        ["model", *SHOWN, "graphs / lenz", "graphs / peer's graphs",
         *(f"{s} {what}" for what in ("host", "busy", "MiB") for s in SHOWN)],
        _graph_cells,
    ),
    "survey": (
        "Survey: training steps under autocast, ms per step; peak memory in MiB, busy share in %",
        ["network", "eager", "lenz", "peer", "lenz / eager", "lenz / peer", "eager MiB", "lenz MiB",
         "peer MiB", "lenz busy", "peer busy", "eager grad", "lenz grad", "peer grad", "launches"],
        _survey_cells,
    ),
    "lengths": (
        "CUDA graphs where sizes change: ms for 200 calls of a layer of an encoder",
        ["lengths", "off", "on", "auto", "on / off", "auto / off"],
        _lengths_cells,
    ),
    "host": (
        "Host cost of a call on 64 elements, us, least batch of 200",
        ["function", "launches", *(n.replace("_", " ").replace(PEER, "peer") for n in HOSTS)],
        _host_cells,
    ),
}  # fmt: skip


def line(section: str, row: Row) -> str:
    """One row as it is measured."""
    head, cells = TABLES[section][1], TABLES[section][2](row)
    shown = [f"{h} {c}" for h, c in zip(head[1:], cells[1:], strict=True) if c != "-"]
    return "\n    ! ".join(
        [f"{cells[0]:40} " + "  ".join(shown), *faults(section, row), *skips(row), *fallbacks(row)]
    )


def origin(group: Row) -> str:
    """Where and of which commits the rows of a section are."""
    m = group["machine"]
    named = ", ".join(f"{k} {v}" for k, v in m.items() if k != "gpu" and v is not None)
    commits = dict.fromkeys(str(r.get("commit") or "not noted") for r in group["rows"])
    found = f"Measured on {m['gpu']} ({named}); commit {', '.join(commits)}."
    if workers := group.get("workers"):
        found += f" By up to {workers} processes, which time in turns while the others compile."
    if copies := group.get("copy_gbps"):
        rates = ", ".join(f"{rate:.0f} at {size}" for size, rate in copies.items())
        found += f" Copy bandwidth in GB/s, by the size of each buffer: {rates}."
    return found


def summary(made: Row) -> str:
    """The table of targets, and what went wrong."""
    head = (
        "The peer is torch's default backend; medians of interleaved rounds; a ratio below 1 means "
        "that lenz is faster. `copy` is a plain copy that moves the bytes that the kernel has to "
        "move. The tables say on which machine and at which commit they were measured."
    )
    wrong = [
        f"- {row['case']}: {fault}"
        for section in TABLES
        for row in rows_of(made, section)
        for fault in [*faults(section, row), *skips(row), *fallbacks(row)]
    ]
    return "\n".join([head, "", *figure_table(figures(made)), *([""] if wrong else []), *wrong])


def padded(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table that also reads well as it is."""
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]

    def full(cells: Sequence[str]) -> list[str]:
        pairs = list(zip(cells, widths, strict=True))
        return [c.ljust(w) if k == 0 else c.rjust(w) for k, (c, w) in enumerate(pairs)]

    return table(full(head), [full(cells) for cells in lines])


def details(made: Row) -> str:
    """Every table of rows."""
    parts = []
    for section, (title, head, cells) in TABLES.items():
        rows = [r for r in rows_of(made, section) if not {"failed", "skipped"} & {*r}]
        if rows:
            told = padded(head, [cells(r) for r in rows])
            parts.append(f"## {title}\n\n{origin(made['groups'][section])}\n\n{told}")
    return "\n\n".join(parts)


def document(made: Row) -> str:
    """The whole document."""
    made = lifted(made)
    quick = any(g.get("quick") for g in made["groups"].values())
    note = "**Tiny sizes: this checks the harness and measures nothing.**\n\n" if quick else ""
    return f"# lenz on a GPU, measured\n\n{note}{summary(made)}\n\n{details(made)}\n"


def write(made: Row) -> None:
    """Write gpu.md."""
    RESULTS.with_suffix(".md").write_text(document(made))


def main(given: Sequence[str]) -> int:
    """Merge the files into the results, and make the documents of them."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_report", description=main.__doc__
    )
    parser.add_argument("files", nargs="*", help="JSON of runs on other machines")
    files = parser.parse_args(given).files
    made: Row | None = lifted(json.loads(RESULTS.read_text())) if RESULTS.exists() else None
    for name in files:
        new: Row = json.loads(Path(name).read_text())
        if any(g.get("quick") for g in new["groups"].values()):
            print(f"{name} is of a quick run: its sizes are no results", file=sys.stderr)
            return 1
        made = merged(made, new)
    if made is None:
        print("no results yet: run python -m benchmarks.gpu", file=sys.stderr)
        return 1
    if files:
        RESULTS.write_text(json.dumps(made, indent=1) + "\n")
    write(made)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
