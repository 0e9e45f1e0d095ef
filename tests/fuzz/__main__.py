"""Random programs until the time is over: `python -m tests.fuzz --minutes 5 [--seed N]`.

The seed is printed; a failure is made small and printed as a file that runs. Programs run in forked
processes, so that one which crashes is a finding, too (not with `--device cuda`).
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import select
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as tests of codegen have it


from tests.fuzz.check import failure
from tests.fuzz.generator import program
from tests.fuzz.program import Program
from tests.fuzz.shrink import kind_of, shrink

WAYS = ("oracle",) * 6 + ("guarded",) * 2 + ("triton", "tiny")
PATIENCE = 120  # seconds for one program


def forked(run: Callable[[], str], seconds: float = PATIENCE) -> str:
    """What a function gives in a process of its own; a crash is a text as well."""
    sys.stdout.flush()
    out, into = os.pipe()
    child = os.fork()
    if not child:
        os.close(out)
        try:
            text = run()
        except BaseException:  # noqa: BLE001  # the child ends here, whatever it was
            text = traceback.format_exc()
        with os.fdopen(into, "w") as f:
            f.write(text)
        os._exit(0)
    os.close(into)
    text = b""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if select.select([out], [], [], 1.0)[0]:
            part = os.read(out, 1 << 16)
            if not part:
                break
            text += part
    else:
        os.kill(child, signal.SIGKILL)
    os.close(out)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code:
        return f"Crash: {signal.Signals(-code).name if code < 0 else code}"
    return text.decode()


def way_of(seed: int, chosen: str, device: str) -> str:
    """How the program of a seed is run."""
    if chosen:
        return chosen
    return "cpu" if device != "cpu" else random.Random(seed).choice(WAYS)


def batch(seeds: Sequence[int], o: argparse.Namespace, until: float) -> str:
    """Run programs up to the first failure: "seed\\twhy" after the ops that were seen."""
    seen: list[str] = []
    for done, seed in enumerate(seeds):
        if time.monotonic() > until:
            return f"{done}\t\t{' '.join(seen)}"
        Path(o.log).write_text(str(seed))
        why = failure(program(seed, o.large), way_of(seed, o.way, o.device), o.device, seen)
        if why:
            return f"{done + 1}\t{seed}\t{' '.join(dict.fromkeys(seen))}\t{why}"
    return f"{len(seeds)}\t\t{' '.join(dict.fromkeys(seen))}"


def report(p: Program, way: str, o: argparse.Namespace, why: str) -> None:
    """Shrink a failing program and print it."""
    print(f"---- {p.tag} ({way}): {why[:300]}", flush=True)

    def fails(trial: Program) -> str:
        if o.device != "cpu":
            return failure(trial, way, o.device)
        return forked(lambda: failure(trial, way, o.device))

    small = shrink(p, why, fails, o.shrink) if o.shrink else p
    why = fails(small) or why
    print(f"{small}\n{why[:1200]}\n\n{small.script()}", flush=True)


def options() -> argparse.Namespace:
    """The command line."""
    a = argparse.ArgumentParser(prog="python -m tests.fuzz")
    a.add_argument("--minutes", type=float, default=5.0)
    a.add_argument("--seed", type=int, help="of the first program; by chance if not given")
    a.add_argument("--count", type=int, default=1 << 40, help="of programs, at most")
    a.add_argument("--large", action="store_true", help="sizes up to 300")
    a.add_argument("--way", default="", help="cpu, oracle, guarded, triton or tiny; else a mix")
    a.add_argument("--device", default="cpu")
    a.add_argument("--shrink", type=float, default=90, help="seconds for making a failure small")
    a.add_argument("--failures", type=int, default=20, help="after so many it stops")
    o = a.parse_args()
    o.seed = random.SystemRandom().randrange(10**6) * 1000 if o.seed is None else o.seed
    return o


def main() -> int:
    """Run programs, and tell what failed."""
    o = options()
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    o.log = f"/tmp/lenz_fuzz_{os.getpid()}"
    print(f"fuzz: --seed {o.seed} --device {o.device}{' --large' if o.large else ''}", flush=True)
    until = time.monotonic() + 60 * o.minutes
    failure(program(0), "oracle")  # so that children have warm imports
    done, bad, ops, kinds = 0, 0, set(), Counter()
    while time.monotonic() < until and done < o.count and bad < o.failures:
        seeds = range(o.seed + done, o.seed + min(o.count, done + 50))
        run = lambda: batch(seeds, o, until)
        text = forked(run, PATIENCE * 10) if o.device == "cpu" else run()
        if text.startswith("Crash"):
            seed = int(Path(o.log).read_text())
            count, why = seed - seeds[0] + 1, text
        else:
            parts = text.split("\t", 3)
            count, why = int(parts[0]), parts[3] if len(parts) > 3 else ""
            seed = int(parts[1] or 0)
            ops |= set(parts[2].split())
        done += count
        if why:
            bad += 1
            way = way_of(seed, o.way, o.device)
            kinds[kind_of(why)] += 1
            if kinds[kind_of(why)] <= 3:
                report(program(seed, o.large), way, o, why)
            else:
                print(f"---- seed {seed} ({way}): once more {why[:200]}", flush=True)
    print(f"{done} programs, {bad} failed; {len(ops)} aten ops; --seed {o.seed}")
    Path(o.log).unlink(missing_ok=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
