"""Starts: seconds from the call to the first result, in a new process each.

python -m benchmarks.start [--only TEXT,...] [--sides eager,lenz,...] [--turns 3] [--device cuda]

A cold start has empty caches; a warm one is another process with the caches that the cold one left.
The clock starts after torch and Dynamo are imported, the model is built, and eager has run once, so
that the context, the allocator and the libraries' handles are there.  What a side imports counts;
lenz's files are bytecode, as an installer leaves them, and Python's collector has just run, so that
no side pays for what came before it.
"dynamo" is Dynamo alone.  Two sides are files: "saved" is `aot_compile` of torch, "load" is
`lenz.export` and `lenz.load`.  Cold, they compile and save the file; warm, they load and call it.
Each side takes its turn; rows hold medians.
"""

from __future__ import annotations

import argparse
import compileall
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._dynamo

from benchmarks.measure import MARK, PEER, Row, agree, backend_of, caches, note
from benchmarks.start_cases import CASES, Case

TRACED = ("dynamo", "aot_eager", "lenz", PEER)
FILES = ("saved", "load")
SIDES = ("eager", *TRACED, *FILES)
TURNS = ("cold", "warm")
ROOT = Path(__file__).parent.parent
Run = Callable[..., Any]


def has(case: Case, side: str) -> bool:
    """Whether a side can start a case: artifacts hold inference, and what torch can save."""
    return side not in FILES or (case.is_plain and (side == "saved" or not case.training))


def starter(case: Case, side: str, turn: str, file: Path) -> Callable[[], Run]:
    """What is timed before the calls: it gives what is called."""
    if side == "eager":
        return lambda: case.fn
    if side in TRACED:
        backend = backend_of("eager" if side == "dynamo" else side)
        return lambda: torch.compile(case.fn, backend=backend, dynamic=case.dynamic)
    if side == "saved":
        return (lambda: _saved(case, file)) if turn == "cold" else (lambda: _loaded(file))
    if side == "load":
        return (lambda: _exported(case, file)) if turn == "cold" else (lambda: _artifact(file))
    raise ValueError(f"no such side: {side!r}; choose from {', '.join(SIDES)}")


def _saved(case: Case, file: Path) -> Run:
    whole: Any = torch.compile(case.fn, backend=backend_of("lenz"), fullgraph=True)
    made: Any = whole.aot_compile((case.calls[0], {}))
    made.save_compiled_function(str(file))
    run: Run = made
    return run


def _loaded(file: Path) -> Run:
    with file.open("rb") as f:
        run: Run = torch.compiler.load_compiled_function(f)
    return run


class Whole(torch.nn.Module):
    """A case as one module, with its model inside: what `lenz.export` takes."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.fn, first = case.fn, case.calls[0]
        self.models = torch.nn.ModuleList(x for x in first if isinstance(x, torch.nn.Module))

    def forward(self, *inputs: Any) -> Any:
        """The result of the case's function."""
        return self.fn(*self.models, *inputs)


def tensors(args: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments but the model, which is in the artifact."""
    return tuple(x for x in args if not isinstance(x, torch.nn.Module))


def _exported(case: Case, file: Path) -> Run:
    import lenz

    lenz.export(Whole(case), file, tensors(case.calls[0]))
    return _artifact(file)


def _artifact(file: Path) -> Run:
    import lenz

    run = lenz.load(file)
    return lambda *args: run(*tensors(args))


def first(name: str, side: str, turn: str, device: str, file: Path) -> Row:
    """Start one case once; return the seconds, having checked the result."""
    torch.manual_seed(0)
    torch.set_default_device(device)
    case = CASES[device][name]()
    if not has(case, side):
        return {}
    torch.set_default_device("cpu")
    sync: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    start = starter(case, side, turn, file)
    with torch.set_grad_enabled(case.training):
        began = time.perf_counter()
        want = called(case, case.fn)
        sync()
        if side != "eager":
            for model in case.calls[0]:
                # torch 2.13 saves a model with gradients that it cannot load.
                if isinstance(model, torch.nn.Module):
                    model.zero_grad(set_to_none=True)
            gc.collect()
            began = time.perf_counter()
            got = called(case, start())
            sync()
            ended = time.perf_counter()
            agree(want, got, 1e-2, 5e-2 if device == "cuda" else 1e-3)  # GPU models are in bf16
            return {"seconds": ended - began}
    return {"seconds": time.perf_counter() - began}


def called(case: Case, run: Run) -> list[torch.Tensor]:
    """The results of all calls, with gradients made in training."""
    made = []
    for args in case.calls:
        result = run(*args)
        if case.training:
            result.backward()
        made.append(result.detach())
    return made


def child(
    name: str, side: str, turn: str, device: str, folder: Path, env: Mapping[str, str], limit: float
) -> Row:
    """Start a case in a new process, and give its row; with `failed` where it failed."""
    args = ["--worker", name, side, turn, str(folder / "file"), "--device", device]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.start", *args],
            env={**os.environ, **env, "TOKENIZERS_PARALLELISM": "false"},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=limit,
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"{turn}: took more than {limit:.0f} s"}
    lines = [x[len(MARK) :] for x in done.stdout.splitlines() if x.startswith(MARK)]
    if done.returncode or not lines:
        last = done.stderr.strip().splitlines()
        return {"failed": f"{turn}: {last[-1][:200] if last else done.returncode}"}
    row: Row = json.loads(lines[-1])
    return row


def measure(
    name: str, device: str, turns: int, sides: tuple[str, ...] = SIDES, limit: float = 300.0
) -> Row:
    """The row of one case: medians of `turns` new processes for each side, cold and warm.

    A process may take `limit` seconds.
    """
    took: dict[str, list[float]] = {}
    # A checkout has none where the environment forbids it: then each process compiles 130 files.
    compileall.compile_dir(ROOT / "lenz", quiet=1)
    row: Row = {"case": name, "turns": turns}
    for k in range(turns):
        for side in sides[k % len(sides) :] + sides[: k % len(sides)]:
            if f"{side}_failed" in row:
                continue
            with caches() as env:
                folder = Path(next(iter(env.values()))).parent
                for turn in TURNS if side in ("lenz", PEER, *FILES) else TURNS[:1]:
                    made = child(name, side, turn, device, folder, env, limit)
                    if "failed" in made:
                        row[f"{side}_failed"] = made["failed"]
                        note(f"{name}, {side}: {made['failed']}")
                        break
                    if "seconds" in made:
                        took.setdefault(f"{side}_{turn}_s", []).append(made["seconds"])
                        note(f"{name}, {side}, {turn}: {made['seconds']:.2f} s")
    return {**row, **{key: statistics.median(times) for key, times in took.items()}}


def main() -> None:
    """Measure and print the table; or start one case once, and print JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="cases whose name contains one of these texts")
    parser.add_argument("--sides", default=",".join(SIDES), help="some of %(default)s")
    parser.add_argument("--turns", type=int, default=3, help="processes for each side and turn")
    parser.add_argument("--device", choices=tuple(CASES), default="cpu")
    parser.add_argument("--worker", nargs=4, metavar=("CASE", "SIDE", "TURN", "FILE"))
    o = parser.parse_args()
    if o.worker:
        name, side, turn, file = o.worker
        print(MARK + json.dumps(first(name, side, turn, o.device, Path(file))), flush=True)
        return
    from benchmarks.report import start_table

    wanted, sides = o.only.lower().split(","), tuple(o.sides.split(","))
    names = [n for n in CASES[o.device] if any(w in n.lower() for w in wanted)]
    print(start_table([measure(n, o.device, o.turns, sides) for n in names]))


if __name__ == "__main__":
    main()
