"""Random programs until the time is over: `python -m tests.fuzz --minutes 5 [--seed N]`.

The seed is printed; a failure is made small and printed as a file that runs. Programs run in forked
processes, so that one which crashes or hangs is a finding, too, and says where it was. One
in sixteen is no program but a call that eager refuses (`refused`), one a call with another number
(`numbers`), and one a program whose sizes come from integers (`sized`).
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import random
import re
import select
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

if "cuda" not in " ".join(sys.argv):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Whether there is a GPU is asked without CUDA: a forked process could not start it once more.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
# A forked process would wait for threads that its parent has started.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch._functorch.config

from tests.fuzz import indices, sized
from tests.fuzz.check import Notes, failure
from tests.fuzz.generator import program
from tests.fuzz.program import Program
from tests.fuzz.shrink import kind_of, shrink

TRITON = ("triton", "tiny") if find_spec("triton") else ()
GUARDED = ("guarded", "guarded avx2", "guarded sse2")
CALLS = ("threads", "steps", "graphs", "options", "warm", "exported")
WAYS = ("oracle",) * 8 + (*GUARDED, *CALLS, *TRITON)
WAYS_OF_GPUS = ("cpu", "graphs", "graphs threads", "graphs steps", "options", "warm", "exported")
OF_DATABASE = {11: "refused", 13: "numbers"} if find_spec("expecttest") else {}  # torch needs it
TURNS = {5: "sized", **OF_DATABASE}  # of sixteen seeds
WAYS_OF_LARGE = ("cpu", "guarded")  # the others are too slow
FORKS = hasattr(os, "fork")
BATCH = 50  # programs in one process
Say = Callable[[str], None]


def forked(run: Callable[[Say], None], seconds: float) -> tuple[str, str]:
    """What a function says in a process of its own, and how that crashed, or "".

    `seconds` is how long it may be silent. This process must not have met a GPU.
    """
    sys.stdout.flush()
    out, into = os.pipe()
    child = os.fork()
    if not child:
        os.close(out)
        faulthandler.enable()
        try:
            run(lambda text: (os.write(into, text.encode()), None)[1])
        except BaseException:  # noqa: BLE001  # whatever it was, the child ends here and says so
            os.write(into, f"!{traceback.format_exc()}".encode())
        os._exit(0)
    os.close(into)
    text = b""
    while True:
        if not select.select([out], [], [], seconds)[0]:
            os.kill(child, signal.SIGABRT)  # it says where it is
            if not select.select([out], [], [], 5)[0]:
                os.kill(child, signal.SIGKILL)
            break
        part = os.read(out, 1 << 16)
        if not part:
            break
        text += part
    os.close(out)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    crash = f"Crash: {signal.Signals(-code).name if code < 0 else code}" if code else ""
    return text.decode(errors="replace"), crash


def way_of(seed: int, o: argparse.Namespace) -> str:
    """How the program of a seed is run."""
    if o.way:
        return str(o.way)
    if is_long(seed, o):
        return "cpu"
    if seed % 16 in TURNS and o.device == "cpu":
        return TURNS[seed % 16]
    ways = WAYS_OF_LARGE if is_large(seed, o) else WAYS
    return random.Random(seed).choice(ways if o.device == "cpu" else WAYS_OF_GPUS)


def is_large(seed: int, o: argparse.Namespace) -> bool:
    """True for all programs if asked for, and for some in any case."""
    return bool(o.large) or (not o.way and seed % 8 == 7)


def is_long(seed: int, o: argparse.Namespace) -> bool:
    """True for some: what is slow to check is rarer."""
    return not o.way and seed % 16 == 3


def made(seed: int, o: argparse.Namespace) -> Program:
    """The program of a seed."""
    return program(seed, is_large(seed, o), is_long(seed, o))


@cache
def callable_ops() -> list[Any]:
    """The ops of torch's database that are called; it takes seconds to load."""
    from tests.fuzz.refused import able

    return able()


def why_wrong(way: str, seed: int) -> str:
    """What is wrong with a call of torch's database, "" if nothing."""
    from tests.fuzz import numbers, refused

    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # torch's, of wrong calls
    try:
        if way == "numbers":
            return numbers.found(seed, callable_ops())
        title, verdict = refused.found(seed, callable_ops())
    finally:
        logging.disable(disabled)
    return "" if refused.is_right(verdict) else f"{title}: {verdict}"


def batch(seeds: Sequence[int], o: argparse.Namespace, until: float, say: Say) -> None:
    """Run programs up to the first failure.

    Says the seed before each, then "=" and its ops, or "~" and why it says nothing; then "!" and
    why the last one failed.
    """
    for seed in seeds:
        if time.monotonic() > until:
            return
        say(f"\n{seed}")
        notes, how = Notes(), way_of(seed, o)
        if how == "indices":
            ways = [w for w in indices.WAYS if w != "triton" or TRITON]
            why = "\n".join(filter(None, (indices.failure(seed, way) for way in ways)))
        elif how in ("refused", "numbers"):
            why = why_wrong(how, seed)
        elif how == "sized":
            why = sized.found(seed)
        else:
            why = failure(made(seed, o), how, o.device, notes)
        skipped = " ".join(notes.skipped.split()).replace("!", ".")[:200]
        say(f"~{skipped}" if skipped else f"={' '.join(sorted(set(notes.ops)))}")
        if why:
            say(f"!{why}")
            return


def checked(p: Program, way: str, o: argparse.Namespace) -> str:
    """Why one program fails, or how it crashes."""
    if not FORKS:
        return failure(p, way, o.device)
    text, crash = forked(lambda say: say(failure(p, way, o.device)), o.patience)
    return crash or text


def is_torchs(seed: int, o: argparse.Namespace) -> bool:
    """True where the process of a program ends in torch's own half, too."""
    way = way_of(seed, o)
    if way == "numbers":
        from tests.fuzz.numbers import alone

        return bool(forked(lambda say: alone(seed, callable_ops()), o.patience)[1])
    if way in ("refused", "sized", "indices"):
        return False
    p = made(seed, o)
    return bool(forked(lambda say: say(failure(p, "aot_eager", o.device)), o.patience)[1])


def report(p: Program, way: str, o: argparse.Namespace, why: str) -> None:
    """Shrink a failing program and print it."""
    print(f"---- {p.tag} ({way}): {why[:300]}", flush=True)
    small = shrink(p, why, lambda q: checked(q, way, o), o.shrink) if o.shrink else p
    why = checked(small, way, o) or why
    print(f"{small}\n{why[:1200]}\n\n{small.script()}", flush=True)
    flags = f"--count 1{o.way and f' --way {o.way!r}'} --device {o.device}"
    flags += " --large" * bool(o.large)
    print(f'again: make fuzz SEED={p.tag.split()[1]} FLAGS="{flags}"\n', flush=True)


def options() -> argparse.Namespace:
    """The command line."""
    a = argparse.ArgumentParser(prog="python -m tests.fuzz")
    a.add_argument("--minutes", type=float, default=5.0)
    a.add_argument("--seed", type=int, help="of the first program; by chance if not given")
    a.add_argument("--count", type=int, default=1 << 40, help="of programs, at most")
    a.add_argument("--large", action="store_true", help="sizes up to 300")
    a.add_argument(
        "--way",
        default="",
        help="one of those in check.py, refused, numbers, sized or indices; a mix if not given",
    )
    a.add_argument("--device", default="cpu")
    a.add_argument("--shrink", type=float, default=90, help="seconds for making a failure small")
    a.add_argument("--failures", type=int, default=20, help="after so many it stops")
    a.add_argument("--patience", type=float, default=400, help="seconds that a program may take")
    o = a.parse_args()
    o.seed = random.SystemRandom().randrange(10**6) * 1000 if o.seed is None else o.seed
    return o


def run_batch(seeds: Sequence[int], o: argparse.Namespace, until: float) -> tuple[str, str]:
    """What `batch` says, and how it crashed."""
    if FORKS:
        return forked(lambda say: batch(seeds, o, until, say), o.patience)
    said: list[str] = []
    batch(seeds, o, until, said.append)
    return "".join(said), ""


def main() -> int:
    """Run programs, and tell what failed."""
    o = options()
    os.environ["LENZ_ON_ERROR"] = "raise"  # of calls that eager refuses; programs have it anyway
    if hasattr(torch._functorch.config, "check_custom_op_aliasing"):  # a quarter of the time
        torch._functorch.config.check_custom_op_aliasing = False
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    print(f"fuzz: --seed {o.seed} --device {o.device}{' --large' if o.large else ''}", flush=True)
    until = time.monotonic() + 60 * o.minutes
    if FORKS and o.device == "cpu":  # compiling anything would meet the GPU
        failure(program(0), "oracle")  # so that children have warm imports
        first = range(o.seed, o.seed + min(o.count, 16))
        if any(way_of(s, o) in OF_DATABASE.values() for s in first):
            callable_ops()
    done, bad = 0, 0
    ops: set[str] = set()
    skipped: list[str] = []
    kinds: Counter[str] = Counter()
    while time.monotonic() < until and done < o.count and bad < o.failures:
        first = o.seed + done
        said, crash = run_batch(range(first, first + min(BATCH, o.count - done)), o, until)
        told, _, why = said.partition("!")
        starts = told.split("\n")[1:]
        done += len(starts)
        for line in starts:
            head, _, names = line.partition("=")
            ops |= set(names.split())
            skipped += [line.partition("~")[2]] if "~" in head else []
        why = why or crash
        if not why:
            continue
        failed = re.match(r"\d+", starts[-1]) if starts else None
        seed = int(failed.group()) if failed else first
        if crash and is_torchs(seed, o):
            skipped.append(f"torch: {crash}")
            continue
        bad += 1
        kinds[kind_of(why)] += 1
        if o.way == "indices":
            print(f"---- {why[:2000]}", flush=True)
        elif (way := way_of(seed, o)) in ("refused", "numbers", "sized"):
            flags = f"--count 1{o.way and f' --way {way}'}"
            print(f"---- seed {seed} ({way}): {why[:2000]}", flush=True)
            print(f'again: make fuzz SEED={seed} FLAGS="{flags}"\n', flush=True)
        elif kinds[kind_of(why)] <= 3:
            report(made(seed, o), way_of(seed, o), o, why)
        else:
            print(f"---- seed {seed} ({way_of(seed, o)}): once more {why[:200]}", flush=True)
    told = f"{bad} failed, {len(skipped)} say nothing; {len(ops)} aten ops; --seed {o.seed}"
    print(f"fuzz: {done} programs, {told}")
    blind = len(skipped) > 5 + done // 3
    if blind:
        print(f"fuzz: too few programs run here, the last one: {skipped[-1]}")
    return int(bad > 0 or blind)


if __name__ == "__main__":
    sys.exit(main())
