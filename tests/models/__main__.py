"""`python -m tests.models`: all models on all sides, as a table; docs/models.md is written.

--only NAME...    these; prints, and writes nothing
--architectures   those of transformers, small, and not the set; prints, and writes nothing
--jobs N          processes
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

from tests.models.architectures import names as architectures
from tests.models.families import MODELS
from tests.models.table import Row, line, page, tail, total, work

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def all_rows(names: list[str], device: str, jobs: int) -> Iterator[list[Row]]:
    """The rows of all models, as they are made."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        made = [pool.submit(work, n, device) for n in names]
        yield from (m.result() for m in as_completed(made))


def main() -> int:
    """Run and print; 0 when every model passes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--architectures", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=2)
    how = parser.parse_args()
    names = how.only or (architectures() if how.architectures else list(MODELS))
    if (unknown := {*how.only} - {*MODELS}) and (unknown := unknown - {*architectures()}):
        parser.error(f"no models: {', '.join(sorted(unknown))}")
    rows: list[Row] = []
    for k, made in enumerate(all_rows(names, how.device, how.jobs), 1):
        rows += made
        for row in made:
            print(f"{k}/{len(names)} {line(row)}", flush=True)
            if row.get("traced"):
                print("    not judged: aot_eager is far from eager too", flush=True)
            for fault in row["faults"]:
                print(f"    FAULT {fault}", flush=True)
    rows.sort(key=lambda r: names.index(r["model"]))
    print(total(rows) if any("calls" in r for r in rows) else "no model ran")
    if how.architectures:
        print(tail(rows))
    elif not how.only and how.device == "cpu":
        PAGE.write_text(page(rows), encoding="utf-8")
    return int(any(r["faults"] for r in rows))


if __name__ == "__main__":
    sys.exit(main())
