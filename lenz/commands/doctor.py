"""`python -m lenz doctor`: checks that everything lenz needs works, and says what to do if not.

Each check yields findings. The last ones compile and run a kernel on the CPU and on each GPU, which
shows more than versions do.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

from lenz.entry import FORMAT, SHARDS
from lenz.errors import LenzError, UserError
from lenz.explaining import explain
from lenz.machines import host
from lenz.options import Options, redacted
from lenz.private import folder, unlink, write
from lenz.records import dataclass
from lenz.remote import remote_at
from lenz.runtime.store import Store

# The lowest version of each package, and the first that is too new. A test compares pyproject.toml.
VERSIONS = {"torch": ((2, 11), (2, 14)), "llvmlite": ((0, 46), None), "triton": ((3, 6), None)}
PYTHON = (3, 10)
PROBE = "doctor-probe"  # a file that is written and deleted at once


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of output: the subject and the finding.

    `do` is empty if all is well. `fails` is true if the finding stops lenz, not if it costs time or
    is optional.
    """

    name: str
    found: str
    do: str = ""
    fails: bool = True

    def __str__(self) -> str:
        mark = "ok" if not self.do else "FAIL" if self.fails else "note"
        return f"{mark:<6}{self.name:<11}{self.found}" + (f"\n{'':<17}{self.do}" if self.do else "")


def examine() -> int:
    """Print every finding at once; returns 1 if one is a failure, else 0."""
    failed = 0
    for check in (_python, _packages, _cpu, _gpus, _options, _runs):
        for found in check():
            print(found, flush=True)
            failed += bool(found.do) and found.fails
    print(f"\n{failed or 'no'} problem{'s' * (failed != 1)} found")
    return int(failed > 0)


def _python() -> Iterator[Finding]:
    """The interpreter, and whether it keeps lenz's files as byte code."""
    import lenz

    told = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    old = sys.version_info[:2] < PYTHON
    yield Finding("python", told, "lenz needs 3.10 or newer" if old else "")
    here = Path(lenz.__file__)
    kept = Path(importlib.util.cache_from_source(str(here))).exists()
    how = "unset PYTHONDONTWRITEBYTECODE or " if sys.dont_write_bytecode else ""
    do = f"{how}run `python -m compileall {here.parent}`: each process reads source files again"
    state = "with byte code" if kept else "without byte code"
    yield Finding("lenz", f"{here.parent}, {state}", "" if kept else do, fails=False)


def _packages() -> Iterator[Finding]:
    """torch, llvmlite and Triton in the versions that lenz is tested with."""
    known = "lenz" in torch.compiler.list_backends()
    do = "" if known else "install lenz with pip: torch finds it by an entry point"
    yield Finding("backend", 'torch.compile(f, backend="lenz")', do)
    for name, (least, end) in VERSIONS.items():
        wanted = f"{_dotted(least)} or newer" + (f", below {_dotted(end)}" if end else "")
        optional = name == "triton" and not torch.version.cuda
        try:
            text = torch.__version__ if name == "torch" else importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if optional:
                yield Finding(name, "not installed; only GPUs need it")
            else:
                package = "'lenz[gpu]'" if name == "triton" else name
                yield Finding(name, "not installed", f"pip install {package}: {wanted}")
            continue
        found = tuple(map(int, re.findall(r"\d+", text)[:2]))
        is_right = least <= found and (end is None or found < end)
        yield Finding(name, text, "" if is_right else f"lenz needs {wanted}", not optional)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _cpu() -> Iterator[Finding]:
    """The instructions that kernels use, and their threads."""
    try:
        target = host().target()
    except ImportError as e:
        yield Finding("CPU", f"unknown: {e}", "pip install --force-reinstall llvmlite")
        return
    vectors = [f for f in ("avx512f", "avx2", "neon", "sve") if target.has(f)]
    told = f"{target.cpu}, vectors of {target.lanes} ({', '.join(vectors) or 'none known'})"
    yield Finding("CPU", f"{told}, {target.version.partition(' llvmlite')[0]}")
    threads, cpus = torch.get_num_threads(), _usable_cpus()
    do = f"set OMP_NUM_THREADS={cpus}: more threads than CPUs wait for each other"
    told = f"{threads} on {cpus} usable CPUs"
    yield Finding("threads", told, do if threads > cpus else "", fails=False)


def _usable_cpus() -> int:
    """CPUs of this process: by its affinity, and by the quota of its container."""
    count = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # no control group, or no limit ("max")
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        count = min(count, max(1, round(int(quota) / int(period))))
    return count


def _gpus() -> Iterator[Finding]:
    """The driver, and the GPUs that torch sees."""
    if not torch.version.cuda:
        yield Finding("GPU", "none: this torch is for CPUs")
        return
    version = ctypes.c_int()
    try:
        library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        library.cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        yield Finding("GPU", "no CUDA driver", "for an NVIDIA GPU, install its driver", fails=False)
        return
    major, minor = version.value // 1000, version.value % 1000 // 10
    do = "" if major >= 12 else "lenz needs a driver for CUDA 12.0 or newer"
    yield Finding("driver", f"for CUDA {major}.{minor}", do)
    if not torch.cuda.is_available():
        do = "torch.zeros(1, device='cuda') raises the reason"
        yield Finding("GPU", "torch finds none", do, fails=False)
        return
    for number in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(number)
        told = f"{card.name}, {card.total_memory / 2**30:.0f} GiB, {card.major}.{card.minor}"
        do = "lenz needs compute capability 8.0; graphs here run in eager"
        yield Finding(f"cuda:{number}", told, do if card.major < 8 else "", fails=False)


def _options() -> Iterator[Finding]:
    """The environment's options, the disk cache and the remote one."""
    try:
        options = Options.from_environment()
    except UserError as e:
        yield Finding("options", e.what, e.hint or "correct the variable")
        return
    yield from _cache(options)
    if options.remote_cache is not None:
        yield _remote(options.remote_cache, options.remote_secret)


def _cache(options: Options) -> Iterator[Finding]:
    """Whether the folder is private and writable, and how full it is."""
    root = os.path.realpath(options.cache_dir or "")
    if not options.cache:
        yield Finding("cache", "off", "unset LENZ_CACHE: each process compiles again", fails=False)
        return
    try:
        with folder(root, f"v{FORMAT}", make=True) as at:
            write(at, PROBE, b"")
            unlink(at, PROBE)
        for shard in range(SHARDS):
            with suppress(FileNotFoundError), folder(root, f"v{FORMAT}", f"{shard:x}"):
                pass
    except OSError as e:
        is_shared = str(e.strerror).startswith("others")
        do = f"`chmod -R go-w {root}` if it is yours, " if is_shared else "make it writable, "
        told = f"{root}: {e.strerror}" + (f" ({e.filename})" if e.filename else "")
        yield Finding("cache", told, f"{do}or set LENZ_CACHE_DIR to a folder of your own")
        return
    sizes = [size for _, size, _ in Store(root).files()]
    used, free = sum(sizes) / 2**20, shutil.disk_usage(root).free / 2**20
    told = f"{root}, {len(sizes)} entries, {used:.1f} of {options.cache_mb} MiB"
    do = f"the disk has {free:.0f} MiB left: set LENZ_CACHE_MB lower, or LENZ_CACHE_DIR"
    yield Finding("cache", told, do if free < options.cache_mb - used else "", fails=False)


def _remote(url: str, secret: str | None) -> Finding:
    """Whether the server of the remote cache answers."""
    place = redacted("remote_cache", url)
    try:
        remote_at(url, secret)
        from redis import Redis
        from redis.exceptions import RedisError
    except UserError as e:
        return Finding("remote", e.what, e.hint or "correct the option")
    try:
        Redis.from_url(url, socket_timeout=1, socket_connect_timeout=1).ping()
    except (RedisError, OSError, ValueError) as e:
        return Finding("remote", f"{place}: {e}", "graphs compile without it; start the server")
    return Finding("remote", f"{place} answers")


def _runs() -> Iterator[Finding]:
    """A kernel on each machine, compiled anew."""
    yield _run("cpu")
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        yield _run(f"cuda:{number}")


def _run(device: str) -> Finding:
    """Compile and run a small model; compare it with eager.

    Dynamo traces no function of lenz's files: torch's own modules are there everywhere.
    """
    small = torch.nn.Sequential(torch.nn.GELU(), torch.nn.Softmax(-1))
    name, since = f"on {device}", time.perf_counter()
    x = torch.linspace(-3, 3, 4096, device=device).view(64, 64)
    try:
        report = explain(small, options={"cache": False, "on_error": "raise"})(x)
        torch.testing.assert_close(report.result, small(x))
        if not any(g.kernels for g in report.graphs):
            raise LenzError("the graph ran in eager", hint="see the warning above")
    except Exception as e:  # noqa: BLE001  # any error is a finding
        other = LenzError(f"{type(e).__name__}: {e}")
        fault = next((x for x in _causes(e) if isinstance(x, LenzError)), other)
        own = "correct the option" if isinstance(fault, UserError) else ""
        do = fault.hint or own or "report it with this output and `python -m lenz info`"
        return Finding(name, fault.what.partition("\n")[0], do)
    return Finding(name, f"a kernel is compiled and right, in {time.perf_counter() - since:.1f} s")


def _causes(e: BaseException | None) -> Iterator[BaseException]:
    while e is not None:
        yield e
        e = e.__cause__ or e.__context__
