"""Every figure that lenz is to reach on a GPU: its target, what was measured, met or missed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from benchmarks.measure import GUARDS, LENZ_GRAPHS, LENZ_ON, PEER, PEER_GRAPHS, Row, geomean
from benchmarks.report import Figure, unmeasured

BUSY, FAR_AHEAD = 0.8, 0.75  # of the wall time; of the peer's time: then the GPU may wait
DECODE, RESNET = "Llama-like decode 1x8", "ResNet-50 training 64"
SWIN, T5 = "Swin-T training 64", "T5-small training 8x512"

Values: TypeAlias = Mapping[str, float]


def rows_of(made: Row, section: str) -> list[Row]:
    """The rows of a section."""
    rows: list[Row] = made["groups"].get(section, {"rows": []})["rows"]
    return rows


def figures(made: Row) -> list[Figure]:
    """Every figure; one without results says that it is not measured."""
    return [
        *_starts(made),
        *_kernels(made),
        *_models(made),
        *_survey(made),
        *_host(made),
        *_graphs(made),
    ]


def judged(
    name: str, target: str, values: Values, limit: float, is_up: bool = False, form: str = ".2f"
) -> Figure:
    """The worst of some values against a limit, with the number of those that miss it."""
    known = {n: v for n, v in values.items() if not math.isnan(v)}
    if not known:
        return unmeasured(name, target)
    missed = sum((v < limit) if is_up else (v > limit) for v in known.values())
    worst = (min if is_up else max)(known, key=lambda n: known[n])
    text = f"{known[worst]:{form}} ({worst}); {missed} of {len(known)} miss it"
    return Figure(name, target, text, missed == 0)


def one(name: str, target: str, value: float, limit: float, unit: str) -> Figure:
    """A single value against an upper limit; NaN is not measured."""
    if math.isnan(value):
        return unmeasured(name, target)
    return Figure(name, target, f"{value:.2f} {unit}", value <= limit)


def told(rows: Sequence[Row], tell: Callable[[Row], float], *needs: str) -> Values:
    """A figure of each row that has what it needs."""
    return {r["case"]: tell(r) for r in rows if all(n in r for n in needs)}


def mean(name: str, values: Values) -> Figure:
    """The geometric mean of ratios to the peer."""
    if not values:
        return unmeasured(name, "<= 1.0x the peer")
    found = geomean(list(values.values()))
    return Figure(name, "<= 1.0x the peer", f"{found:.2f}", found <= 1)


# Of a start from a file, at most how many seconds.
FILES = (
    ("`aot_compile` file", "saved_warm_s", "one kernel", 0.25),
    ("`aot_compile` file", "saved_warm_s", "12-layer encoder", 0.5),
    ("`aot_compile` file", "saved_warm_s", "12-layer encoder, training", 0.8),
    ("`lenz.load`", "load_warm_s", "12-layer encoder", 0.2),
)


def _starts(made: Row) -> list[Figure]:
    rows, cold, warm = rows_of(made, "start"), "lenz_cold_s", "lenz_warm_s"
    figures = []
    for how, key, base, of, limit in (
        ("cold", cold, f"{PEER}_cold_s", "the peer", 0.2),
        ("warm", warm, f"{PEER}_warm_s", "the peer", 0.5),
        ("warm", warm, "aot_eager_cold_s", "`aot_eager`", 0.5),
    ):
        ratios = told(rows, lambda r, key=key, base=base: r[key] / r[base], key, base)
        figures.append(judged(f"start, {how}", f"<= {limit}x {of}", ratios, limit))
    for how, key, case, limit in FILES:
        seconds = told(rows, lambda r, key=key: r[key], key).get(case, math.nan)
        figures.append(one(f"start, {how}, {case}", f"<= {limit} s", seconds, limit, "s"))
    return figures


def _kernels(made: Row) -> list[Figure]:
    rows, to_peer = rows_of(made, "kernels"), f"lenz/{PEER}"
    rates = told(rows, lambda r: r["lenz_of_copy"], "lenz_of_copy")
    ratios = told(rows, lambda r: r[to_peer], to_peer)
    return [
        judged("kernels", ">= 0.9 of the copy bandwidth", rates, 0.9, is_up=True),
        judged("kernels", "each <= 1.0x the peer", ratios, 1.0),
        mean("kernels, geometric mean", ratios),
    ]


def every_model(made: Row) -> list[Row]:
    """One row for each model: of the section with all sides where it is there."""
    found = {r["case"]: r for s in ("models", "graphs") for r in rows_of(made, s) if "lenz_ms" in r}
    return list(found.values())


def _to_peer(rows: Sequence[Row]) -> tuple[Values, Values]:
    """Times and peaks of memory of models, as parts of the peer's."""
    time, peak, its = f"lenz/{PEER}", "lenz_peak", f"{PEER}_peak"
    return told(rows, lambda r: r[time], time), told(rows, lambda r: r[peak] / r[its], peak, its)


def _models(made: Row) -> list[Figure]:
    rows = every_model(made)
    ratios, peaks = _to_peer(rows)
    ms = told(rows, lambda r: r["lenz_ms"], "lenz_ms")
    return [
        judged("models", "each <= 1.0x the peer", ratios, 1.0),
        mean("models, geometric mean", ratios),
        judged("models, peak memory", "each <= 1.0x the peer", peaks, 1.0, form=".3f"),
        one(f"{DECODE}, default", "<= 1.0 ms", ms.get(DECODE, math.nan), 1.0, "ms"),
        one(f"{RESNET}, default", "<= 11.5 ms", ms.get(RESNET, math.nan), 11.5, "ms"),
        _busy(rows),
    ]


def _survey(made: Row) -> list[Figure]:
    """Times and memory of many networks, of which the tables of models hold a few."""
    name = "survey"
    ratios, peaks = _to_peer(rows_of(made, name))
    return [
        judged(name, "each <= 1.0x the peer", ratios, 1.0),
        mean(f"{name}, geometric mean", ratios),
        judged(f"{name}, peak memory", "each <= 1.0x the peer", peaks, 1.0),
        mean(f"{name}, peak memory, geometric mean", peaks),
    ]


def _busy(rows: Sequence[Row]) -> Figure:
    """Whether the host holds up the GPU without CUDA graphs, where it need not."""
    name = "models, default, share of the time in which the GPU is busy"
    target = f">= {BUSY}, or a wall time <= {FAR_AHEAD}x the peer's"
    known = [r for r in rows if "lenz_busy" in r]
    if not known:
        return unmeasured(name, target)
    waiting = [r for r in known if r["lenz_busy"] < BUSY]
    missed = [r for r in waiting if not r.get(f"lenz/{PEER}", math.inf) <= FAR_AHEAD]
    text = f"{len(missed)} of {len(known)} miss it"
    if waiting:
        worst = min(missed or waiting, key=lambda r: float(r["lenz_busy"]))
        ratio = f"{worst[f'lenz/{PEER}']:.2f}x the peer" if f"lenz/{PEER}" in worst else "no peer"
        text = f"{worst['lenz_busy']:.2f}, {ratio} ({worst['case']}); {text}"
    return Figure(name, target, text, not missed)


def _host(made: Row) -> list[Figure]:
    """What a call costs the host, on tensors so small that the device never holds it up."""
    rows = {r["case"]: r for r in rows_of(made, "host")}
    us: dict[str, float] = {n: r["lenz_us"] for n, r in rows.items() if "lenz_us" in r}
    first, each = rows.get("one_op", {}), math.nan
    keys = "lenz_us", "aot_eager_us", "eager_us"
    above = first_us = math.nan
    if all(k in first for k in keys):
        # aot_eager's own cost is without the eager ops that it runs.
        first_us, aot, eager = (float(first[k]) for k in keys)
        above = first_us - (aot - eager)
    if "one_op" in us and "ten_kernels" in us:
        each = (us["ten_kernels"] - first_us) / (rows["ten_kernels"]["kernels"] - first["kernels"])

    def call(name: str) -> float:
        if name not in us or math.isnan(each) or not rows[name]["calls"]:
            return math.nan
        kernels = rows[name]["kernels"] - first["kernels"]
        return (us[name] - first_us - kernels * each) / int(rows[name]["calls"])

    above_guards = math.nan
    if f"{LENZ_GRAPHS}_us" in first and f"{GUARDS}_us" in first:
        above_guards = first[f"{LENZ_GRAPHS}_us"] - first[f"{GUARDS}_us"]
    name = "host, a call of one kernel"
    return [
        one(name, "<= 5 us above `aot_eager`'s own", above, 5.0, "us"),
        one("host, each further kernel", "<= 3.5 us", each, 3.5, "us"),
        one("host, each `mm` or `addmm`", "<= 5 us", call("ten_products"), 5.0, "us"),
        one("host, each convolution", "<= 9 us", call("ten_convolutions"), 9.0, "us"),
        one("host, each attention", "<= 9 us", call("ten_attentions"), 9.0, "us"),
        one(f"{name}, graphs on", "<= 12 us above Dynamo's guards", above_guards, 12.0, "us"),
    ]


def _graphs(made: Row) -> list[Figure]:
    """What is to be reached with CUDA graphs, and what they may cost."""
    rows = [r for r in rows_of(made, "graphs") if f"{LENZ_GRAPHS}_ms" in r]
    ms, busy, peak = (f"{LENZ_GRAPHS}_{k}" for k in ("ms", "busy", "peak"))
    to_peer, host = f"{LENZ_GRAPHS}/{PEER_GRAPHS}", f"{LENZ_GRAPHS}_host_ms"
    times, gaps = told(rows, lambda r: r[ms], ms), told(rows, lambda r: 1 / r[busy], busy)
    ratios = told(rows, lambda r: r[to_peer], to_peer)
    best = lambda r: min(r["lenz_ms"], r[f"{LENZ_ON}_ms"])
    chosen = told(rows, lambda r: r[ms] / best(r), ms, "lenz_ms", f"{LENZ_ON}_ms")
    memory = told(rows, lambda r: r[peak] / r["lenz_peak"], peak, "lenz_peak")
    decodes = lambda x, wanted: {n: v for n, v in x.items() if ("decode" in n) == wanted}
    hosts = told(rows, lambda r: r[host] * 1e3, host)
    swin, t5 = (times.get(n, math.nan) for n in (SWIN, T5))
    lengths = rows_of(made, "lengths")
    over = {
        how: told(lengths, lambda r, k=how: r[f"{k}_ms"] / r["off_ms"], f"{how}_ms", "off_ms")  # type: ignore[misc]
        for how in ("on", "auto")
    }
    return [
        judged("graphs, decode", "<= 0.95x the peer's graphs", decodes(ratios, True), 0.95),
        judged("graphs, other models", "<= 1.0x the peer's graphs", decodes(ratios, False), 1.0),
        judged("graphs, decode, host", "<= 20 us a call", decodes(hosts, True), 20.0, form=".0f"),
        judged("graphs, decode, wall time", "<= 1.3x the busy time", decodes(gaps, True), 1.3),
        # Kernels of few us in a decode step: the gaps between them count.
        judged("graphs, wall time", "<= 1.12x the busy time", decodes(gaps, False), 1.12),
        one(f"graphs, {SWIN}", "<= 8.2 ms", swin, 8.2, "ms"),
        one(f"graphs, {T5}", "<= 7.5 ms", t5, 7.5, "ms"),
        judged("graphs, auto", "<= 1.03x the better of on and off", chosen, 1.03),
        judged("graphs, peak memory", "<= 1.1x without", memory, 1.1),
        judged("graphs on, random lengths", "<= 1.03x without", over["on"], 1.03, form=".3f"),
        judged("graphs auto, random lengths", "<= 1.03x without", over["auto"], 1.03, form=".3f"),
    ]
