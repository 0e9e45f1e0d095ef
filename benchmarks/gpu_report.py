"""Turn GPU results into Markdown: benchmarks/results/gpu.md.

Run: python -m benchmarks.gpu_report [FILE ...]; FILEs, results of other runs on the same machine,
are first merged into benchmarks/results/gpu.json, row by row.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import LENZ_GRAPHS, PEER, PEER_GRAPHS, Row, geomean
from benchmarks.report import HERE, Figure, figure_table, table

RESULTS = HERE / "results" / "gpu.json"
SIDES = ("eager", "lenz", PEER)
GRAPH_SIDES = ("eager", "lenz", LENZ_GRAPHS, PEER, PEER_GRAPHS)
NAMES = {"lenz": "lenz", LENZ_GRAPHS: "lenz with graphs"}
HOST_BOUND = 0.75  # of the peer's time: then the GPU may wait
# A model may be this many times as far from float32 as eager is, plus a rounding of bf16.
MODEL_ERROR, ROUNDING = 2.0, 2.0**-8


def rows_of(made: Row, section: str) -> list[Row]:
    """The rows of a section."""
    rows: list[Row] = made["groups"].get(section, {"rows": []})["rows"]
    return rows


def measured(row: Row) -> set[str]:
    """The sides of a row that have a time."""
    return {s for s in (*GRAPH_SIDES, "dynamo") if f"{s}_ms" in row or f"{s}_cold_s" in row}


def merged(old: Row | None, new: Row) -> Row:
    """`new` with those rows of `old` that it lacks, or has for fewer sides; same machine only."""
    if old is None or old["machine"] != new["machine"]:
        return new
    groups: dict[str, Any] = {}
    for section in TABLES:
        if section not in old["groups"] and section not in new["groups"]:
            continue
        rows = {r["case"]: r for r in rows_of(old, section)}
        for r in rows_of(new, section):
            before = rows.get(r["case"])
            if before is None or measured(r) >= measured(before):
                rows[r["case"]] = r
        last = new["groups"].get(section) or old["groups"][section]
        groups[section] = {**last, "rows": list(rows.values())}
    return {**old, **new, "groups": groups}


def faults(section: str, row: Row) -> list[str]:
    """What is wrong with a row: sides that failed, wrong results of lenz, graphs left to eager."""
    made = [row["failed"]] if "failed" in row else []
    made += [f"{s}: {row[f'{s}_failed']}" for s in GRAPH_SIDES if f"{s}_failed" in row]
    for kind in ("error", "gradient_error"):
        limit = row.get("tol", math.inf)
        if section in ("models", "graphs") and f"eager_{kind}" in row:
            limit = MODEL_ERROR * row[f"eager_{kind}"] + ROUNDING
        for who in ("lenz", LENZ_GRAPHS):
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


def _figure(name: str, target: str, ratios: dict[str, float], limit: float, is_up: bool) -> Figure:
    """The worst of some figures against a limit, with the number of those that miss it."""
    missed = sum((r < limit) if is_up else (r > limit) for r in ratios.values())
    worst = (min if is_up else max)(ratios, key=lambda n: ratios[n])
    text = f"{ratios[worst]:.2f} ({worst}); {missed} of {len(ratios)} miss it"
    return Figure(name, target, text, missed == 0)


def figures(made: Row) -> list[Figure]:
    """Every figure to reach for which there are results."""
    found: list[Figure] = []
    calls = [r for r in rows_of(made, "first_call") if f"{PEER}_cold_s" in r and "lenz_cold_s" in r]
    if calls:
        ratios = {r["case"]: r["lenz_cold_s"] / r[f"{PEER}_cold_s"] for r in calls}
        found.append(_figure("first call, cold", "<= 0.33x the peer", ratios, 1 / 3, False))
    calls = [r for r in calls if "lenz_warm_s" in r and "dynamo_cold_s" in r]
    if calls:
        above = {r["case"]: r["lenz_warm_s"] - r["dynamo_cold_s"] for r in calls}
        found.append(_figure("first call, warm", "<= 0.1 s above Dynamo alone", above, 0.1, False))
    if kernels := [r for r in rows_of(made, "kernels") if "lenz_ms" in r]:
        rates = {r["case"]: r["lenz_of_copy"] for r in kernels}
        found.append(_figure("kernels", ">= 0.9 of the copy bandwidth", rates, 0.9, True))
    for section in ("kernels", "models"):
        rows = [r for r in rows_of(made, section) if f"lenz/{PEER}" in r]
        if rows:
            ratios = {r["case"]: r[f"lenz/{PEER}"] for r in rows}
            mean = geomean(list(ratios.values()))
            found += [
                _figure(section, "each <= 1.0x the peer", ratios, 1.0, False),
                Figure(f"{section}, geometric mean", "<= 1.0x the peer", f"{mean:.2f}", mean <= 1),
            ]
    found += _graph_figures([r for r in rows_of(made, "graphs") if f"{LENZ_GRAPHS}_ms" in r])
    found += _host_figures([r for r in rows_of(made, "graphs") if "lenz_busy" in r])
    rows = [r for r in rows_of(made, "models") if "lenz_peak" in r and f"{PEER}_peak" in r]
    if rows:
        ratios = {r["case"]: r["lenz_peak"] / r[f"{PEER}_peak"] for r in rows}
        found.append(_figure("peak memory of models", "<= 1.0x the peer", ratios, 1.0, False))
    return found


def _graph_figures(rows: Sequence[Row]) -> list[Figure]:
    """What is to be reached with CUDA graphs, and what they may cost."""
    mine: dict[str, dict[str, float]] = {}
    for r in rows:
        wall = r[f"{LENZ_GRAPHS}_ms"]
        told: dict[str, float] = {}
        if f"{LENZ_GRAPHS}_busy" in r:
            is_decode = "decode" in r["case"]  # kernels of few us: the gaps between them count
            kind = "graphs of decode" if is_decode else "graphs"
            told[f"{kind}, wall over busy time"] = 1 / r[f"{LENZ_GRAPHS}_busy"]
        if "lenz_ms" in r:
            told["graphs by choice, over the better of both"] = wall / min(wall, r["lenz_ms"])
        if f"{LENZ_GRAPHS}_peak" in r and r.get("lenz_peak"):
            told["peak memory, graphs over none"] = r[f"{LENZ_GRAPHS}_peak"] / r["lenz_peak"]
        if f"{LENZ_GRAPHS}/{PEER_GRAPHS}" in r:
            told["graphs over the peer's graphs"] = r[f"{LENZ_GRAPHS}/{PEER_GRAPHS}"]
        for name, value in told.items():
            mine.setdefault(name, {})[r["case"]] = value
    limits = {
        "graphs, wall over busy time": 1.12,
        "graphs of decode, wall over busy time": 1.3,
        "graphs by choice, over the better of both": 1.03,
        "peak memory, graphs over none": 1.1,
        "graphs over the peer's graphs": 1.0,
    }
    return [_figure(n, f"<= {limits[n]}x", ratios, limits[n], False) for n, ratios in mine.items()]


def _host_figures(rows: Sequence[Row]) -> list[Figure]:
    """Whether the host holds up the GPU without CUDA graphs, where it need not."""
    held = {
        r["case"]: r["lenz_busy"] for r in rows if not r.get(f"lenz/{PEER}", math.inf) <= HOST_BOUND
    }
    if not held:
        return []
    title = f"busy share without graphs, where lenz takes more than {HOST_BOUND}x the peer's time"
    return [_figure(title, ">= 0.8", held, 0.8, True)]


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


def _launches(r: Row) -> str:
    if "kernels" not in r:
        return "-"
    return f"{r['kernels']}+{sum(r['externs'].values())}"


def _first_call_cells(r: Row) -> list[str]:
    keys = ("dynamo_cold", "lenz_cold", f"{PEER}_cold", "lenz_warm", f"{PEER}_warm")
    return [r["case"], *(number(r, f"{k}_s", ".2f") for k in keys)]


TABLES: dict[str, tuple[str, list[str], Callable[[Row], list[str]]]] = {
    "first_call": (
        "First call, new process, seconds",
        ["case", "Dynamo alone", "lenz", "peer", "lenz warm", "peer warm"],
        _first_call_cells,
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
        ["model", "eager", "lenz", "lenz graphs", "peer", "peer graphs", "graphs / lenz",
         "graphs / peer's graphs",
         *(f"{s} {what}" for what in ("host", "busy", "MiB")
           for s in ("eager", "lenz", "lenz graphs", "peer", "peer graphs"))],
        _graph_cells,
    ),
}  # fmt: skip


def line(section: str, row: Row) -> str:
    """One row as it is measured."""
    head, cells = TABLES[section][1], TABLES[section][2](row)
    shown = [f"{h} {c}" for h, c in zip(head[1:], cells[1:], strict=True) if c != "-"]
    return "\n    ! ".join(
        [f"{cells[0]:40} " + "  ".join(shown), *faults(section, row), *skips(row), *fallbacks(row)]
    )


def summary(made: Row) -> str:
    """The machine, the table of targets, and what went wrong."""
    m = made["machine"]
    copies = ", ".join(f"{rate:.0f} at {size}" for size, rate in made["copy_gbps"].items())
    named = ", ".join(f"{k} {v}" for k, v in m.items() if k != "gpu" and v is not None)
    head = (
        f"Measured on {m['gpu']} ({named}). Copy bandwidth in GB/s, by the size of each buffer: "
        f"{copies}. The peer is torch's default backend; medians of interleaved rounds; a ratio "
        "below 1 means that lenz is faster. `copy` is a plain copy that moves the bytes that the "
        "kernel has to move."
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
            parts.append(f"## {title}\n\n{padded(head, [cells(r) for r in rows])}")
    return "\n\n".join(parts)


def document(made: Row) -> str:
    """The whole document."""
    quick = any(g.get("quick") for g in made["groups"].values())
    note = "**Tiny sizes: this checks the harness and measures nothing.**\n\n" if quick else ""
    return f"# lenz on a GPU, measured\n\n{note}{summary(made)}\n\n{details(made)}\n"


def write(made: Row) -> None:
    """Write gpu.md."""
    RESULTS.with_suffix(".md").write_text(document(made))


def main(files: Sequence[str]) -> int:
    """Merge the files into the results, and make the documents of them."""
    made: Row | None = json.loads(RESULTS.read_text()) if RESULTS.exists() else None
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
