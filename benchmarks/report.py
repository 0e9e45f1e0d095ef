"""Turn results into Markdown: benchmarks/results/cpu.md, or FILE with the ending `.md`.

Run: python -m benchmarks.report [FILE.json]
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import PEER, Row, geomean

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "cpu.json"
Groups = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table of targets; `reached` is None where nothing was measured."""

    name: str
    target: str
    measured: str
    reached: bool | None

    @property
    def verdict(self) -> str:
        """Met, missed, or not measured."""
        return "not measured" if self.reached is None else "met" if self.reached else "**missed**"


def unmeasured(name: str, target: str) -> Figure:
    """The line of a figure without results."""
    return Figure(name, target, "-", None)


def rows_of(groups: Groups, group: str) -> list[Row]:
    """The rows of a group that did not fail."""
    return [r for r in groups.get(group, {"rows": []})["rows"] if "failed" not in r]


def figures(groups: Groups) -> list[Figure]:
    """Every figure to reach; one without results says so."""
    made = [*start_figures(groups), *_kernels(groups), *_models(groups)]
    return [*made, *_host(groups), *_memory(groups)]


# Of a start: what is called, the row, the keys of its time and of the time it is compared with, and
# at most how many times, or seconds more than, that it may take.
STARTS: tuple[tuple[str, str, str, str, float, str], ...] = (
    ("cold", "one kernel", "lenz_cold_s", f"{PEER}_cold_s", 0.1, "x the peer"),
    ("cold", "one kernel", "lenz_cold_s", "aot_eager_cold_s", 0.3, " s above `aot_eager`"),
    ("cold", "12-layer encoder", "lenz_cold_s", "aot_eager_cold_s", 0.35, " s above `aot_eager`"),
    ("cold", "12-layer encoder, training", "lenz_cold_s", "aot_eager_cold_s", 1.2,
     " s above `aot_eager`"),
    ("warm", "12-layer encoder", "lenz_warm_s", "aot_eager_cold_s", 0.5, "x `aot_eager`"),
    ("warm", "12-layer encoder, training", "lenz_warm_s", "aot_eager_cold_s", 0.5,
     "x `aot_eager`"),
    ("warm", "12-layer encoder", "lenz_warm_s", f"{PEER}_warm_s", 0.5, "x the peer"),
    ("warm", "12-layer encoder, training", "lenz_warm_s", f"{PEER}_warm_s", 0.5, "x the peer"),
)  # fmt: skip
# At most how many seconds: a saved file on a CPU, and the demo's model.
LIMITS = (
    ("warm", "MiniLM, four lengths", "lenz_warm_s", 1.5),
    ("`aot_compile` file", "one kernel", "saved_warm_s", 0.1),
    ("`aot_compile` file", "12-layer encoder", "saved_warm_s", 0.25),
    ("`aot_compile` file", "12-layer encoder, training", "saved_warm_s", 0.4),
    ("`lenz.load`", "12-layer encoder", "load_warm_s", 0.2),
)


def start_figures(groups: Groups) -> list[Figure]:
    """The figures of starts, of one machine."""
    rows, made = {r["case"]: r for r in rows_of(groups, "start")}, []
    for how, case, key, base, bound, of in STARTS:
        name, target, r = f"start, {how}, {case}", f"<= {bound}{of}", rows.get(case, {})
        if key not in r or base not in r:
            made.append(unmeasured(name, target))
            continue
        found = r[key] / r[base] if of.startswith("x") else r[key] - r[base]
        seconds = f"{r[key]:.2f} s against {r[base]:.2f} s"
        made.append(Figure(name, target, f"{found:.2f}: {seconds}", found <= bound))
    for how, case, key, bound in LIMITS:
        name, target, r = f"start, {how}, {case}", f"<= {bound} s", rows.get(case, {})
        known = key in r
        made.append(
            Figure(name, target, f"{r[key]:.2f} s", r[key] <= bound) if known else
            unmeasured(name, target)
        )  # fmt: skip
    return made


def _kernels(groups: Groups) -> list[Figure]:
    made: list[Figure] = []
    rows, target = rows_of(groups, "kernels"), "each <= 1.0x the peer"
    for threads in sorted({r["threads"] for r in rows} or (1, 2)):
        ratios = {f"{r['kind']} {r['size']}": r for r in rows if r["threads"] == threads}
        name = f"kernels, {_threads(threads)}"
        peers = [r[f"lenz/{PEER}"] for r in ratios.values()]
        if peers:
            worst = max(ratios, key=lambda n: float(ratios[n][f"lenz/{PEER}"]))
            slow = sum(p > 1.0 for p in peers)
            measured = f"{max(peers):.2f}x ({worst}); {slow} of {len(peers)} above 1.0"
            made.append(Figure(name, target, measured, slow == 0))
        else:
            made.append(unmeasured(name, target))
        made.append(_mean(f"{name}, geometric mean", peers, 0.6, "the peer"))
    return made


def _models(groups: Groups) -> list[Figure]:
    rows, name = rows_of(groups, "models"), "models, inference and training step"
    first = unmeasured(name, "each <= 1.03x eager")
    if rows:
        worst = max(rows, key=lambda r: float(r["lenz/eager"]))
        measured = f"{worst['lenz/eager']:.2f}x ({worst['model']} {worst['mode']})"
        first = Figure(name, first.target, measured, worst["lenz/eager"] <= 1.03)
    ratios = [r[f"lenz/{PEER}"] for r in rows]
    return [first, _mean(f"{name}, geometric mean", ratios, 0.9, "the peer")]


def _host(groups: Groups) -> list[Figure]:
    rows = {r["fn"]: r for r in rows_of(groups, "host") if "lenz_us" in r}
    one, ten = (rows.get(n, {}) for n in ("one_op", "ten_kernels"))
    name, target = "host cost of a call of one kernel, above `aot_eager`'s own", "<= 1.15 us"
    made = [unmeasured(name, target)]
    if "aot_eager_us" in one:
        # aot_eager's own cost is without the eager ops that it runs.
        above = one["lenz_us"] - (one["aot_eager_us"] - one["eager_us"])
        made = [Figure(name, target, f"{above:+.2f} us", above <= 1.15)]
    name, target = "host cost of each further kernel, with the kernel's time", "<= 0.15 us"
    if "kernels" not in one or "kernels" not in ten:
        return [*made, unmeasured(name, target)]
    each = (ten["lenz_us"] - one["lenz_us"]) / (ten["kernels"] - one["kernels"])
    return [*made, Figure(name, target, f"{each:.2f} us", each <= 0.15)]


def _memory(groups: Groups) -> list[Figure]:
    rows, name = rows_of(groups, "memory"), "peak memory of a training step"
    target = "<= 1.0x the peer"
    if not rows:
        return [unmeasured(name, target)]
    worst = max(rows, key=lambda r: float(r[f"lenz/{PEER}"]))
    ratio = worst[f"lenz/{PEER}"]
    slow = sum(r[f"lenz/{PEER}"] > 1.0 for r in rows)
    measured = f"{ratio:.2f}x ({worst['model']}); {slow} of {len(rows)} above 1.0"
    return [Figure(name, target, measured, slow == 0)]


def _mean(name: str, ratios: Sequence[float], target: float, base: str) -> Figure:
    if not ratios:
        return unmeasured(name, f"<= {target}x {base}")
    mean = geomean(ratios)
    return Figure(name, f"<= {target}x {base}", f"{mean:.2f}x", mean <= target)


def _threads(count: int) -> str:
    return f"{count} thread" + "s" * (count != 1)


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *lines))


def figure_table(found: Sequence[Figure]) -> list[str]:
    """Return the lines of a Markdown table of figures."""
    return [
        "| figure | target | measured | met or missed |",
        "|---|---|---|---|",
        *(f"| {f.name} | {f.target} | {f.measured} | {f.verdict} |" for f in found),
    ]


def lifted(made: dict[str, Any]) -> Groups:
    """The groups of results, each with its machine: older files have it only once."""
    return {name: {"machine": made["machine"], **g} for name, g in made["groups"].items()}


def _measured(group: dict[str, Any]) -> str:
    """On what machine and at which commit a group was measured."""
    m, commit = group["machine"], group.get("commit")
    loads = [x for x in group["load"] if not math.isnan(x)]
    note = f"; load average {min(loads):.1f} to {max(loads):.1f}" if loads else ""
    return (
        f"Measured on {m['cpu']} with {m['vector']}, {m['cores']} cores, {m['memory_gib']} GiB, "
        f"{m['system']}, Python {m['python']}, torch {m['torch']}; "
        f"commit {commit or 'not noted'}{note}."
    )


def summary(made: dict[str, Any]) -> str:
    """Return the table of targets, and what failed."""
    groups = made["groups"]
    lines = figure_table(figures(groups))
    failed = [
        f"- failed: {' '.join(str(r[k]) for k in ('kind', 'size', 'model', 'mode') if k in r)}: "
        f"{r['failed']}"
        for g in groups.values()
        for r in g["rows"]
        if "failed" in r
    ]
    head = (
        "The peer is torch's default backend. Medians of interleaved rounds; a ratio below 1 means "
        "that lenz is faster. Each section has its machine: ratios compare, times do not."
    )
    return "\n".join([head, "", *lines, *([""] if failed else []), *failed])


def _kernel_table(rows: list[Row]) -> str:
    lines = [
        [
            f"{r['kind']} {r['size']}",
            str(r["threads"]),
            *(f"{r[f'{b}_us']:.0f}" for b in ("eager", "lenz", PEER)),
            f"{r['lenz/eager']:.2f}",
            f"{r[f'lenz/{PEER}']:.2f}",
        ]
        for r in rows
    ]
    head = ["kernel", "threads", "eager us", "lenz us", "peer us", "lenz / eager", "lenz / peer"]
    return table(head, lines)


def _model_table(rows: list[Row]) -> str:
    lines = [
        [
            f"{r['model']} {r['mode']}",
            *(f"{r[f'{b}_us'] / 1e3:.1f}" for b in ("eager", "lenz", PEER)),
            f"{r['lenz/eager']:.2f}",
            f"{r[f'lenz/{PEER}']:.2f}",
        ]
        for r in rows
    ]
    return table(["model", "eager ms", "lenz ms", "peer ms", "lenz / eager", "lenz / peer"], lines)


STARTED = {
    "eager": "eager_cold_s", "Dynamo alone": "dynamo_cold_s", "aot_eager": "aot_eager_cold_s",
    "lenz": "lenz_cold_s", "peer": f"{PEER}_cold_s", "lenz, warm": "lenz_warm_s",
    "peer, warm": f"{PEER}_warm_s", "`aot_compile` file": "saved_warm_s",
    "`lenz.load`": "load_warm_s",
}  # fmt: skip


def start_table(rows: list[Row]) -> str:
    """Seconds of each side; a side that failed, or that has no such file, is a dash."""
    lines = [[r["case"], *(f"{r[n]:.2f}" if n in r else "-" for n in STARTED.values())]
             for r in rows]  # fmt: skip
    return table(["case", *STARTED], lines)


def _host_table(rows: list[Row]) -> str:
    names = ("eager", "aot_eager", "lenz", "lenz_python", PEER)
    head = ["function", "kernels + calls", *(f"{n} us" for n in names[:3])]
    us = lambda r, n: f"{r[f'{n}_us']:.2f}" if f"{n}_us" in r else "-"
    launches = lambda r: f"{r['kernels']} + {r['calls']}" if "kernels" in r else "-"
    lines = [[r["fn"], launches(r), *(us(r, n) for n in names)] for r in rows]
    return table([*head, "lenz without native plans us", "peer us"], lines)


def _mib(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**20:.1f}"


def _memory_table(rows: list[Row]) -> str:
    names = [f"{b}_{k}" for k in ("allocated", "resident") for b in ("eager", "lenz", PEER)]
    head = [f"{b}, {k} MiB" for k in ("allocated", "resident") for b in ("eager", "lenz", "peer")]
    return table(["model", *head], [[r["model"], *(_mib(r[n]) for n in names)] for r in rows])


TABLES: dict[str, tuple[str, Callable[[list[Row]], str]]] = {
    "start": (
        "Start: seconds to the first result, new process, empty caches (warm: those it left)",
        start_table,
    ),
    "kernels": ("Kernels", _kernel_table),
    "models": ("Models, both cores", _model_table),
    "host": ("Host cost of a call on 64 elements, least batch of 200", _host_table),
    "memory": ("Peak memory of a training step above the level before it", _memory_table),
}


def details(made: dict[str, Any]) -> str:
    """Return every table of rows."""
    groups = lifted(made)
    shown = [
        (title, _measured(groups[g]), show(rows_of(groups, g)))
        for g, (title, show) in TABLES.items()
        if g in groups
    ]
    return "\n\n".join(f"## {title}\n\n{where}\n\n{body}" for title, where, body in shown)


def document(made: dict[str, Any]) -> str:
    """Return the whole document."""
    return f"# lenz on CPU, measured\n\n{summary(made)}\n\n{details(made)}\n"


def write(made: dict[str, Any], path: Path) -> None:
    """Write the tables of results beside them."""
    path.with_suffix(".md").write_text(document(made))


def main() -> int:
    """Make the tables of the last run."""
    path = Path(sys.argv[1]) if sys.argv[1:] else RESULTS
    if not path.exists():
        print("no results yet: run python -m benchmarks", file=sys.stderr)
        return 1
    write(json.loads(path.read_text()), path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
