"""Peak memory of one training step, in a new process for each contestant.

Two measures: `allocated`, the most bytes that torch's allocator had out at once above the level
before the step (exact, counted by the profiler in a step of its own); and `resident`, how far the
high-water mark of resident memory rose above the level before the step (Linux; it also sees what
libraries allocate for themselves, and what malloc keeps).

A worker: `python -m benchmarks.memory --model M --backend B` prints one line of JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.measure import CONTESTANTS, PEER, Call, Row, agree, child, note
from benchmarks.models import ATOL, MODELS, RTOL, reference, training_call

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")


def allocated(step: Call) -> int:
    """Return the peak of bytes allocated during one step above the level at its start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as made:
        result = step()
    del result
    results = made.profiler.kineto_results
    changes = [(e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]"]
    level = peak = 0
    for _, size in sorted(changes, key=lambda c: c[0]):
        level += size
        peak = max(peak, level)
    return peak


def resident(step: Call) -> int | None:
    """Return how many bytes the high-water mark rose in one step; None where it cannot be reset."""
    gc.collect()
    try:
        # Memory that malloc kept from compiling would hide what the step needs.
        ctypes.CDLL(None).malloc_trim(0)
        CLEAR.write_text("5")  # resets VmHWM to VmRSS, see proc(5)
    except (AttributeError, OSError):
        return None
    before = _status("VmRSS")
    result = step()
    del result
    return _status("VmHWM") - before


def _status(field: str) -> int:
    for line in STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def training_peak(name: str, backend: str) -> Row:
    """Check the step against eager, then measure its peaks in bytes."""
    torch.manual_seed(0)
    example = MODELS[name]()
    step = training_call(example, backend)
    result = step()
    if backend != "eager":
        eager = training_call(example, "eager")()
        agree(reference(example, "training"), result, RTOL, ATOL, eager)
        del eager
    del result
    step()
    gc.collect()
    # The median of a few steps: one may find memory that malloc had not given back.
    peaks = [resident(step) for _ in range(3)]
    known = [p for p in peaks if p is not None]
    return {
        "resident": sorted(known)[len(known) // 2] if known else None,
        "allocated": allocated(step),
    }


def measure(names: Sequence[str], env: dict[str, str]) -> list[Row]:
    """Return one row per model; a failure becomes a row with `failed`."""
    rows: list[Row] = []
    for name in names:
        made: Row = {"model": name}
        for backend in CONTESTANTS:
            try:
                args = ["--model", name, "--backend", backend]
                peaks = child("memory", args, env, 2)
            except RuntimeError as e:
                made["failed"] = f"{backend}: {e}"
                break
            made |= {f"{backend}_{k}": v for k, v in peaks.items()}
        if "failed" not in made:
            made[f"lenz/{PEER}"] = made["lenz_allocated"] / made[f"{PEER}_allocated"]
            made["lenz/eager"] = made["lenz_allocated"] / made["eager_allocated"]
            shown = "  ".join(f"{b} {made[f'{b}_allocated'] / 2**20:.1f}" for b in CONTESTANTS)
            note(f"memory {name:15} allocated {shown} MiB  lenz/peer {made[f'lenz/{PEER}']:.2f}")
        rows.append(made)
    return rows


def main() -> None:
    """Measure one model with one backend and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", choices=tuple(MODELS), default="MLP-mixer-like")
    parser.add_argument("--backend", choices=CONTESTANTS, default="lenz")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(json.dumps(training_peak(options.model, options.backend)))


if __name__ == "__main__":
    main()
