"""The table of results in README.md, from those of the benchmarks.

python -m benchmarks.summary

Writes the lines from the table's head to the paragraph after it; tests/docs/test_results.py fails
if they are out of date. The README is the page of the package too, so it has no marks for them.
"""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.gpu_figures import every_model, rows_of
from benchmarks.measure import PEER, Row, geomean

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
HEAD, AFTER = "| | CPU, ", "\nAll rows: "
MACHINES = {"CPU, AVX-512": "cpu", "CPU, AVX2": "cpu_avx2", "NVIDIA H200": "gpu"}
ENCODER = "12-layer encoder"
OTHERS = {"eager": "eager", PEER: "torch's default backend"}


def ratio(rows: list[Row], other: str) -> str:
    """The geometric mean of lenz's time over another's."""
    found = [r[f"lenz/{other}"] for r in rows if f"lenz/{other}" in r]
    return f"{geomean(found):.2f}" if found else "-"


def start(rows: list[Row], how: str) -> str:
    """Seconds to the encoder's first result, of lenz and of the default backend."""
    (row,) = [r for r in rows if r["case"] == ENCODER] or [{}]
    lenz, peer = row.get(f"lenz_{how}_s"), row.get(f"{PEER}_{how}_s")
    return "-" if lenz is None or peer is None else f"{lenz:.1f} s / {peer:.1f} s"


def table() -> str:
    """The lines of the table."""
    made = [json.loads((RESULTS / f"{name}.json").read_text()) for name in MACHINES.values()]
    models = [
        every_model(m) if "graphs" in m["groups"] else rows_of(m, "models")  # on a GPU
        for m in made
    ]
    lines = {}
    for kind, sets in (("kernels", [rows_of(m, "kernels") for m in made]), ("models", models)):
        for other, name in OTHERS.items():
            lines[f"{kind}, against {name}"] = [ratio(rows, other) for rows in sets]
    starts = [rows_of(m, "start") for m in made]
    lines[f"first call of a {ENCODER}, lenz / default backend"] = [start(s, "cold") for s in starts]
    lines["the same in a second process"] = [start(s, "warm") for s in starts]
    head = f"| | {' | '.join(MACHINES)} |\n|---{'|---' * len(MACHINES)}|\n"
    return head + "".join(f"| {name} | {' | '.join(cells)} |\n" for name, cells in lines.items())


def readme() -> str:
    """README.md with the table of today's results."""
    before, head, rest = README.read_text(encoding="utf-8").partition(HEAD)
    assert head and AFTER in rest, "README.md has no table of results"
    return f"{before}{table()}{AFTER}{rest.partition(AFTER)[2]}"


if __name__ == "__main__":
    README.write_text(readme(), encoding="utf-8")
