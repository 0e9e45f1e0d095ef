"""`python -m lenz`: this installation, programs and artifacts, for people."""

from __future__ import annotations

import argparse
import errno
import os
import platform
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from io import TextIOWrapper
from pathlib import Path

from lenz.errors import LenzError, UserError, untrusted
from lenz.private import naming

# The output's reader is gone, or its disk is full, of quota, or broken.
LOST = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EIO)
DAY = 86400  # seconds
Command = Callable[[argparse.Namespace], int]
CACHE = {
    "path": "print its folder",
    "stats": "entries, sizes and last use",
    "verify": "read every entry, delete damaged ones",
    "clear": "delete every entry",
    "export": "write all entries to FILE",
    "import": "add the entries of FILE, which are code: only from those you trust",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0 for success, 1 for a fault, 2 for wrong usage."""
    parsed = _parser().parse_args(arguments)
    try:
        if sys.stdout is None:  # as after `>&-`
            raise UserError("standard output is closed")
        if isinstance(sys.stdout, TextIOWrapper):  # names of files can hold any character
            sys.stdout.reconfigure(errors="backslashreplace")
        status: int = parsed.run(parsed)
        sys.stdout.flush()
        return status
    except LenzError as e:
        print(f"lenz: {e}", file=sys.stderr)
        return 1
    except OSError as e:
        if e.errno not in LOST or e.filename is not None:
            raise
        os.dup2(os.pipe()[1], sys.stdout.fileno())  # discards what is still buffered
        if e.errno == errno.EPIPE:  # the reader, such as `head`, has closed the pipe
            return 0
        print(f"lenz: cannot write the output: {e.strerror}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lenz", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")

    def command(run: Command, help: str) -> argparse.ArgumentParser:
        made = commands.add_parser(run.__name__, help=help, description=help)
        made.set_defaults(run=run)
        return made

    command(info, "Versions, target, threads and cache of this installation.")
    command(doctor, "Check what lenz needs: versions, GPUs, cache, a kernel on each machine.")
    command(options, "The table of options.")
    command(ops, "The aten ops that lenz lowers itself.")
    told = command(explain, "The report of a function without arguments in a file.")
    told.add_argument("file", help="a Python file; it is run")
    told.add_argument("--function", default="main", help="the function to compile (main)")
    told.add_argument("--save", metavar="FILE", help="also write its page (.html) or data (.json)")
    told.add_argument("--profile", type=int, default=0, metavar="N", help="also time N calls")
    timed = command(compare, "Time a function in eager, lenz and torch's default backend.")
    timed.add_argument("file", help="a Python file; one process per backend runs it")
    timed.add_argument("--function", default="main", help="the function to time (main)")
    timed.add_argument("--seconds", type=_seconds, default=5.0, help="how long to time (5)")
    searched = command(bisect, "Find the first graph, pass, rewrite or kernel that is wrong.")
    searched.add_argument("--function", default="main", help="the function to compile (main)")
    limit = partial(_seconds, least=0.1)
    searched.add_argument("--seconds", type=limit, default=300.0, help="limit of one run (300)")
    searched.add_argument("file", help="a Python file; many processes run it anew")
    searched.add_argument("arguments", nargs=argparse.REMAINDER, help="the file's own")
    alone = command(repro, "Write one kernel as a script: its error, its time and the limit.")
    alone.add_argument("kernel", help="its name, as reports and profiles show it")
    where = "a folder that LENZ_DEBUG=1 wrote, or one of several (LENZ_DEBUG_DIR)"
    alone.add_argument("folder", nargs="?", help=where)
    made = command(inspect, "The contents of an artifact: arguments, weights, code, plan.")
    made.add_argument("artifact", help="a file or folder that lenz.export wrote; nothing is run")
    made.add_argument("--plan", action="store_true", help="also print the plan")
    made = command(run, "Run an artifact on arrays from files.")
    made.add_argument("artifact", help="a file or folder that lenz.export wrote")
    given = "a .npy file, or an integer; once for each argument, in order"
    made.add_argument("--input", action="append", default=[], metavar="FILE", help=given)
    made.add_argument("--output", metavar="FOLDER", help="where to write the results, as .npy")
    kept = command(cache, "The disk cache: locate, list, check, clear or carry it.")
    kept.add_argument("what", choices=CACHE, help="; ".join(f"{k}: {v}" for k, v in CACHE.items()))
    kept.add_argument("file", nargs="?", help="the bundle of export and import")
    return parser


def _seconds(text: str, least: float = 0.0) -> float:
    """A time that a process can wait for."""
    with suppress(ValueError):
        if least <= (seconds := float(text)) <= DAY:
            return seconds
    raise argparse.ArgumentTypeError(f"expected {least:g} to {DAY} seconds, got {text!r}")


def info(parsed: argparse.Namespace) -> int:
    """Print the facts for a bug report."""
    import torch

    import lenz
    from lenz.machines import host
    from lenz.options import Options

    target = host().target()
    vectors = [f for f in ("avx512f", "avx2", "neon", "sve") if target.has(f)]
    rows = {
        "lenz": lenz.__version__,
        "torch": torch.__version__,
        "compiler": target.version,
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "target": f"{target.cpu}, {target.triple}",
        "vectors": f"{target.lanes} lanes{''.join(f', {v}' for v in vectors)}",
        "threads": str(torch.get_num_threads()),
        "cache": str(Options.from_environment().cache_dir),
    }
    for name, value in rows.items():
        print(f"{name:<10}{value}")
    return 0


def doctor(parsed: argparse.Namespace) -> int:
    """Check everything that lenz needs, and say what to do."""
    from lenz.commands.doctor import examine

    return examine()


def options(parsed: argparse.Namespace) -> int:
    """Print the options as a Markdown table."""
    from lenz.debug.options_table import options_table

    print(options_table(), end="")
    return 0


def ops(parsed: argparse.Namespace) -> int:
    """Print the names of all native ops, a line per first letter."""
    from lenz.lower import native_ops

    names = sorted(native_ops())
    for letter in sorted({_letter(n) for n in names}):
        print("  ".join(n for n in names if _letter(n) == letter))
    told = "torch takes others apart into these, or they are calls of the eager op"
    print(f"\n{len(names)} aten ops and overloads are lowered natively; {told}.")
    return 0


def _letter(name: str) -> str:
    return name.split(".")[1].lstrip("_")[:1]


def explain(parsed: argparse.Namespace) -> int:
    """Compile and run a function of a file, and print the report."""
    from lenz.commands.script import function_of
    from lenz.explaining import explain as explained

    report = explained(function_of(parsed.file, parsed.function), profile=parsed.profile)()
    # If the function itself returns a report, that report is printed.
    report = report.result if isinstance(report.result, type(report)) else report
    print(report)
    if parsed.save is not None:
        with naming(f"cannot write {parsed.save!r}"):
            report.save(parsed.save)
        print(f"written to {Path(parsed.save).resolve()}")
    return 0


def compare(parsed: argparse.Namespace) -> int:
    """Time a function of a file in three ways, and print the table."""
    from lenz.commands.compare import compared_ways

    print(compared_ways(parsed.file, parsed.function, parsed.seconds))
    return 0


def bisect(parsed: argparse.Namespace) -> int:
    """Find what is wrong with a function of a file under lenz."""
    from lenz.commands.bisect import bisected

    return bisected(parsed.file, parsed.function, parsed.arguments, parsed.seconds)


def repro(parsed: argparse.Namespace) -> int:
    """Write one kernel of a debug folder as a script that runs alone."""
    from lenz.commands.kernel import kernel_script
    from lenz.options import Options

    folder = parsed.folder or Options.from_environment().debug_dir
    print(f"written to {kernel_script(parsed.kernel, str(folder))}: run it with Python")
    return 0


def inspect(parsed: argparse.Namespace) -> int:
    """Print the contents of an artifact; nothing of it is run."""
    from lenz.artifact.container import read
    from lenz.artifact.show import summary

    with untrusted("this artifact is damaged"):
        text = summary(read(parsed.artifact), plan=parsed.plan)
    print(text, end="")
    return 0


def run(parsed: argparse.Namespace) -> int:
    """Run an artifact on arrays from files, and print or write its results."""
    from lenz.artifact.loaded import load
    from lenz.artifact.show import arrays_for, result_line, write_arrays

    program = load(parsed.artifact)
    results = program.flat_call(arrays_for(parsed.input, program.manifest))
    for k, value in enumerate(results):
        print(result_line(k, value))
    if parsed.output is not None:
        write_arrays(Path(parsed.output), results)
    return 0


def cache(parsed: argparse.Namespace) -> int:
    """Show, check, clear or carry the disk cache."""
    from lenz.commands import upkeep
    from lenz.options import Options
    from lenz.runtime.store import store_in

    options = Options.from_environment({"cache": True})
    store, bundle = store_in(options), Path(parsed.file or "")
    assert store is not None
    if (parsed.file is None) == (parsed.what in ("export", "import")):
        raise UserError(f"`cache {parsed.what}` takes {'a' if parsed.file is None else 'no'} file")
    match parsed.what:
        case "path":
            print(options.cache_dir)
        case "stats":
            print(upkeep.table(store))
        case "verify":
            whole, damaged = upkeep.verify(store)
            print(f"{whole} entries are whole, {len(damaged)} were damaged and are deleted")
            return int(bool(damaged))
        case "clear":
            print(f"{upkeep.clear(store)} entries deleted")
        case "export":
            print(f"{upkeep.export(store, bundle)} entries written to {bundle}")
        case "import":
            print(f"{upkeep.include(store, bundle)} entries added")
    return 0
