"""Run the benchmarks: all groups, or those named.  `--quick` takes minutes and writes no file.

python -m benchmarks [kernels] [models] [first_call] [host] [memory] [--quick] [--json FILE]

Writes benchmarks/results/cpu.json and the tables that `python -m benchmarks.report` makes of it.
Groups that are not run keep their former results if the machine is the same.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import first_call, memory, report
from benchmarks.measure import Row, caches, child, load, machine, note
from benchmarks.models import MODELS

GROUPS = ("host", "first_call", "kernels", "models", "memory")
Run = Callable[[bool, list[str], dict[str, str]], list[Row]]


def run_host(quick: bool, flags: list[str], env: dict[str, str]) -> list[Row]:
    """Host cost, with one thread: more threads add nothing to a tiny kernel."""
    rows: list[Row] = child("host", ["--quick"] if quick else [], env, 1)
    return rows


def run_first_call(quick: bool, flags: list[str], env: dict[str, str]) -> list[Row]:
    """First calls; each has empty caches of its own."""
    cases = ["kernel"] if quick else list(first_call.CASES)
    return [first_call.measure(c, 1 if quick else 3) for c in cases]


def run_kernels(quick: bool, flags: list[str], env: dict[str, str]) -> list[Row]:
    """Kernels with 1 and with 2 threads; quick ones with 1."""
    rows: list[Row] = []
    for threads in (1,) if quick else (1, 2):
        rows += child("kernels", flags, env, threads)
    return rows


def run_models(quick: bool, flags: list[str], env: dict[str, str]) -> list[Row]:
    """Models with both cores."""
    rows: list[Row] = child("models", flags, env, 2)
    return rows


def run_memory(quick: bool, flags: list[str], env: dict[str, str]) -> list[Row]:
    """Peak memory; after `models`, the caches are warm."""
    return memory.measure(["MLP-mixer-like"] if quick else list(MODELS), env)


RUNS: dict[str, Run] = {
    "host": run_host,
    "first_call": run_first_call,
    "kernels": run_kernels,
    "models": run_models,
    "memory": run_memory,
}


def run(groups: list[str], quick: bool, flags: list[str]) -> dict[str, Any]:
    """Run `groups` and return their results, each with its load averages and seconds."""
    results: dict[str, Any] = {}
    with caches() as env:
        for group in groups:
            note(f"== {group} (load {load():.1f})")
            before, start = load(), time.perf_counter()
            rows = RUNS[group](quick, flags, env)
            results[group] = {
                "rows": rows,
                "load": [round(before, 2), round(load(), 2)],
                "seconds": round(time.perf_counter() - start, 1),
            }
    return results


def merged(former: Path, made: dict[str, Any]) -> dict[str, Any]:
    """Keep the groups of an earlier run on the same machine that were not run now."""
    if former.exists():
        old = json.loads(former.read_text())
        if old.get("machine") == made["machine"]:
            made["groups"] = {**old["groups"], **made["groups"]}
    made["groups"] = {g: made["groups"][g] for g in GROUPS if g in made["groups"]}
    return made


def main() -> int:
    """Run, write, print; the exit code is 1 if a row failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=", ".join(GROUPS))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--json", type=Path, help="where to write; else nothing if --quick")
    options = parser.parse_args()
    unknown = [g for g in options.groups if g not in GROUPS]
    if unknown:
        parser.error(f"unknown group {unknown[0]!r}: choose from {', '.join(GROUPS)}")
    flags = [*(["--quick"] if options.quick else []), "--clock", options.clock]
    groups = [g for g in GROUPS if not options.groups or g in options.groups]
    made = {"machine": machine(), "groups": run(groups, options.quick, flags)}
    path = options.json or (None if options.quick else report.RESULTS)
    if path is not None:
        made = merged(path, made)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(made, indent=1) + "\n")
    print(report.document(made))
    if path == report.RESULTS:
        report.write(made)
    rows = [r for g in made["groups"].values() for r in g["rows"]]
    return int(any("failed" in r for r in rows))


if __name__ == "__main__":
    sys.exit(main())
