"""Triton text to cubins: in this process, in the compile server, and when things go wrong there."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from lenz.errors import InternalError, Missing
from lenz.ir.binary import Binary
from lenz.machine.cuda.triton import pool
from lenz.machine.cuda.triton.compile import PACKED_SUM, SUMS, KernelText, compile_text, version
from lenz.machine.cuda.triton.pool import Failed, ServerClient, compile_all
from lenz.runtime.store import Store

ROOT = Path(__file__).resolve().parents[2]
HEAD = "import triton\nimport triton.language as tl\n\n"
ADD = KernelText(
    "add_0",
    HEAD
    + """@triton.jit
def add_0(a0, a1, a2, n):
    i = tl.program_id(0).to(tl.int64) * 1024 + tl.arange(0, 1024)
    x = tl.load(a0 + i, i < n) + tl.load(a1 + i, i < n)
    tl.store(a2 + i, x, i < n)
""",
    ("*fp32", "*fp32", "*fp32", "i64"),
    (0, 1, 2, 3),
    4,
    3,
    False,
)
SOFTMAX = KernelText(
    "softmax_1",
    HEAD
    + """@triton.jit
def softmax_1(a0, a1):
    i = tl.program_id(0) * 2048 + tl.arange(0, 2048)
    x = tl.load(a0 + i).to(tl.float32)
    e = tl.exp(x - tl.max(x, 0))
    tl.store(a1 + i, e / tl.sum(e, 0))
""",
    ("*bf16", "*bf16"),
    (0, 1),
    8,
    3,
    False,
)
CHECKED = KernelText(
    "check_2",
    HEAD
    + """@triton.jit
def check_2(a0, a1, n):
    i = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    j = tl.load(a0 + i, i < n, 0)
    tl.device_assert((j >= 0) & (j < n), "index out of range", i < n)
    tl.store(a1 + i, j + n, i < n)
""",
    ("*i64", "*i64", "i32"),
    (0, 1),
    4,
    3,
    True,
)


def renamed(k: KernelText, name: str, old: str = "", new: str = "") -> KernelText:
    return replace(
        k, name=name, text=k.text.replace(k.name, name).replace(old or name, new or name)
    )


# Rows of 32768 in the registers of 4 warps: 256 values per thread, of 255 registers.
SPILLS = replace(renamed(SOFTMAX, "softmax_3", "2048", "32768"), warps=4)
WRONG = (
    renamed(ADD, "no_python", "def", "fed"),
    renamed(ADD, "no_such_name", "tl.load(a0", "tl.load(b0"),
    renamed(ADD, "no_power_of_two", "1024", "1000"),
    replace(renamed(ADD, "no_such_type"), signature=("*fp31", "*fp32", "*fp32", "i64")),
    replace(renamed(ADD, "too_few_types"), signature=("*fp32",)),
)


@pytest.fixture
def server() -> Iterator[ServerClient]:
    made = ServerClient(workers=2)
    yield made
    made.close()


def tool(name: str) -> str:
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def disassemble(b: Binary, path: Path, flag: str) -> str:
    """Ask NVIDIA's own tool about a cubin."""
    if not os.access(tool("cuobjdump"), os.X_OK):
        pytest.skip("this Triton brings no cuobjdump")
    (path / "kernel.cubin").write_bytes(b.code)
    command = [tool("cuobjdump"), flag, str(path / "kernel.cubin")]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("k", [ADD, SOFTMAX, SPILLS, CHECKED], ids=lambda k: k.name)
def test_one_text_compiles_for_three_generations(k: KernelText, arch: int, tmp_path: Path) -> None:
    b = compile_text(k, arch)
    assert (b.name, b.warps, b.code[:4]) == (k.name, k.warps, b"\x7fELF")
    assert b.extra == 2, "the launch passes two null pointers: global and profile scratch"
    assert (b.shared > 0) == (k in (SOFTMAX, SPILLS)), "only reductions use shared memory"
    assert (b.spills > 0) == (k is SPILLS)
    seen = disassemble(b, tmp_path, "-res-usage")
    assert f"REG:{b.registers} STACK:{b.spills} " in seen
    assert f"sm_{arch}" in disassemble(b, tmp_path, "-lelf")


def test_alignment_gives_wide_loads(tmp_path: Path) -> None:
    wide = disassemble(compile_text(ADD, 90), tmp_path, "-sass")
    narrow = disassemble(compile_text(replace(ADD, aligned=()), 90), tmp_path, "-sass")
    assert wide.count("LDG.E.128") == 4, "two loads of 1024 float32 by 128 threads, 16 bytes each"
    assert "LDG.E.128" not in narrow, "of pointers that nobody aligned"


def test_assertions_are_kept_where_checks_are_on_and_sums_may_wrap(tmp_path: Path) -> None:
    on = compile_text(CHECKED, 90).code
    assert b"index out of range" in on and b"overflow" not in on
    assert b"index out of range" not in compile_text(replace(CHECKED, checks=False), 90).code


def test_no_line_table_is_made_and_the_users_setting_stays() -> None:
    from triton import knobs

    assert b".debug_line" not in compile_text(ADD, 90).code
    assert not knobs.compilation.disable_line_info
    assert "TRITON_DISABLE_LINE_INFO" not in os.environ


@pytest.mark.diagonal(2)
@pytest.mark.parametrize("k", WRONG, ids=lambda k: k.name)
def test_a_wrong_text_is_an_error_with_its_name(k: KernelText) -> None:
    with pytest.raises(InternalError, match=k.name):
        compile_text(k, 90)


def test_a_text_reads_back() -> None:
    for k in (ADD, SOFTMAX, CHECKED, *WRONG):
        assert KernelText.read(k.line()) == k
    assert len({k.line() for k in (ADD, replace(ADD, checks=True), replace(ADD, warps=8))}) == 3


def test_the_server_gives_what_this_process_gives(server: ServerClient) -> None:
    kernels = [ADD, SOFTMAX, CHECKED] * 2
    assert server.compile(kernels, 90) == [compile_text(k, 90) for k in kernels]
    assert server.compile([ADD], 80) == [compile_text(ADD, 80)]
    assert server.compile([], 90) == []


def test_one_bad_kernel_fails_alone(server: ServerClient) -> None:
    found = server.compile([ADD, *WRONG, SOFTMAX], 90)
    assert isinstance(found[0], Binary) and isinstance(found[-1], Binary)
    for k, failed in zip(WRONG, found[1:-1], strict=True):
        assert isinstance(failed, Failed) and failed.name == k.name and k.name in failed.message
    assert isinstance(found[1], Failed) and "SyntaxError" in found[1].message
    assert isinstance(found[3], Failed) and "power of 2" in found[3].message


def test_a_broken_triton_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("raise ImportError('no such libstdc++')")
    monkeypatch.syspath_prepend(tmp_path)  # the server gets this path
    made = ServerClient(workers=1)
    try:
        (failed,) = made.compile([ADD], 90)
    finally:
        made.close()
    assert isinstance(failed, Failed) and "no such libstdc++" in failed.message


def test_a_batch_larger_than_the_pipes(server: ServerClient) -> None:
    """Requests and answers of 64 KiB and more each: neither side waits for the other."""
    long = replace(WRONG[0], text=WRONG[0].text + "#" * 100_000)
    found = server.compile([long] * 8 + [ADD] * 12, 90)
    assert [type(x) for x in found] == [Failed] * 8 + [Binary] * 12


def test_threads_share_one_server(server: ServerClient) -> None:
    found: list[list[Binary | Failed]] = []
    jobs = [lambda k=k: found.append(server.compile([k], 90)) for k in (ADD, SOFTMAX) * 2]
    threads = [threading.Thread(target=job) for job in jobs]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert sorted(x[0].name for x in found) == [ADD.name] * 2 + [SOFTMAX.name] * 2


@pytest.fixture
def stuck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An assembler that never ends for the kernel `stuck`, while the returned file exists."""
    flag, real = tmp_path / "stuck", tool("ptxas")
    flag.touch()
    script = f"""#!/bin/sh
    case "$*" in *--version*) exec {real} --version;; esac
    for file; do case "$file" in *.ptx)
      if grep -q "entry stuck" "$file"; then
        echo $$ > {flag}.pid
        while [ -e {flag} ]; do :; done
      fi;;
    esac; done
    exec {real} "$@"
    """
    path = tmp_path / "ptxas"
    path.write_text(textwrap.dedent(script))
    path.chmod(0o755)
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(path))
    return flag


STUCK = renamed(ADD, "stuck")


def await_(condition: Callable[[], bool], what: str) -> None:
    """Wait for what another process does; half a minute is for a machine that is overloaded."""
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError(what)


def is_alive(pid: int) -> bool:
    """True unless the process is gone, or dead and only not waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def server_of(p: ServerClient) -> int:
    assert p._server is not None
    return p._server.pid


class Request(threading.Thread):
    """A batch with the kernel that gets stuck, asked for in a thread."""

    def __init__(self, p: ServerClient, flag: Path) -> None:
        super().__init__()
        self.pool, self.found, self.log = p, [], Path(f"{flag}.pid")  # type: ignore[var-annotated]
        self.start()
        await_(lambda: self.log.exists() and self.log.read_text() != "", "no assembler was started")
        self.assembler = int(self.log.read_text())

    def run(self) -> None:
        self.found = self.pool.compile([STUCK, ADD, SOFTMAX], 90)


def test_a_killed_worker_fails_its_kernel_alone(server: ServerClient, stuck: Path) -> None:
    request = Request(server, stuck)
    os.kill(parent_of(request.assembler), signal.SIGSEGV)
    request.join()
    assert request.found[0].name == "stuck" and "signal 11" in request.found[0].message
    assert request.found[1:] == [compile_text(k, 90) for k in (ADD, SOFTMAX)]
    stuck.unlink()
    assert server.compile([STUCK], 90) == [compile_text(STUCK, 90)], "a new child takes its place"


def test_a_kernel_that_takes_too_long_fails_alone(stuck: Path) -> None:
    slow = ServerClient(workers=2, seconds=2)
    request = Request(slow, stuck)
    request.join()
    assert request.found[0].name == "stuck" and "more than 2 s" in request.found[0].message
    assert isinstance(request.found[1], Binary) and isinstance(request.found[2], Binary)
    await_(lambda: not is_alive(request.assembler), "its assembler runs on")
    slow.close()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_what_a_dead_or_silent_server_left_is_compiled_by_a_new_one(end: int, stuck: Path) -> None:
    p = ServerClient(workers=2, patience=5)
    request = Request(p, stuck)
    children = [server_of(p), parent_of(request.assembler), request.assembler]
    stuck.unlink()
    os.kill(children[0], end)
    request.join()
    assert request.found == [compile_text(k, 90) for k in (STUCK, ADD, SOFTMAX)]
    for pid in children:
        await_(lambda pid=pid: not is_alive(pid), "a process of the old server is left")
    assert p.compile([ADD], 90) == [compile_text(ADD, 90)]
    p.close()


def test_closing_a_pool_ends_all_its_processes(stuck: Path) -> None:
    p = ServerClient(workers=2)
    request = Request(p, stuck)
    processes = [server_of(p), parent_of(request.assembler), request.assembler]
    stuck.unlink()
    p.close()
    request.join()
    for pid in processes:
        await_(lambda pid=pid: not is_alive(pid), "a process is left")


def test_the_store_answers_without_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Absent:
        def compile(self, kernels: list[KernelText], arch: int, tell: Any) -> list[Binary | Failed]:
            asked.extend((k.name, arch) for k in kernels)
            return [Failed(k.name, "asked") for k in kernels]

    asked: list[tuple[str, int]] = []
    told: list[tuple[int, int]] = []
    store = Store(tmp_path)
    made = compile_all([ADD, WRONG[0], SOFTMAX], 90, store, lambda *n: told.append(n))
    assert [type(x) for x in made] == [Binary, Failed, Binary]
    assert told == [(1, 3), (2, 3), (3, 3)], "progress is told with each answer"
    monkeypatch.setattr(pool, "_pool", lambda process: Absent())
    found = compile_all([SOFTMAX, ADD, WRONG[0]], 90, store)
    assert found[:2] == [made[2], made[0]]
    assert asked == [(WRONG[0].name, 90)], "failures are not kept"
    asked.clear()
    compile_all([ADD], 80, store)
    compile_all([replace(ADD, stages=2), ADD], 90, store)
    compile_all([ADD], 90, None)
    assert asked == [(ADD.name, 80), (ADD.name, 90), (ADD.name, 90)]
    for path in tmp_path.rglob("*.cubin"):
        path.write_bytes(path.read_bytes()[:-1])
    asked.clear()
    compile_all([ADD], 90, store)
    assert asked == [(ADD.name, 90)], "a damaged entry is a miss"


def script(tmp_path: Path, code: str, **env: str) -> subprocess.Popen[str]:
    """Run `code` as a user's program, which nothing may run for a second time."""
    head = f"""
    import os, signal, sys
    sys.path[:0] = [{str(ROOT)!r}, {str(Path(__file__).parent)!r}]
    print("started", os.getpid(), flush=True)
    from lenz.machine.cuda.triton.compile import KernelText, compile_text, version
    from lenz.machine.cuda.triton.pool import Binary, compile_all, wake, _pool
    k = KernelText.read({ADD.line()!r})
    """
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(head) + textwrap.dedent(code))
    return subprocess.Popen(
        [sys.executable, str(path)],
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_program_without_a_guard_runs_once_and_leaves_nothing(tmp_path: Path) -> None:
    code = """
    wake()
    made = compile_all([k, k], 90, None)
    assert all(isinstance(b, Binary) for b in made)
    assert not {"torch", "triton"} & set(sys.modules), "this process needs neither"
    server = _pool(os.getpid())._server.pid
    print("server", server, *open(f"/proc/{server}/task/{server}/children").read().split())
    """
    program = script(tmp_path, code)
    out, err = program.communicate(timeout=60)
    assert (program.returncode, err) == (0, "")
    lines = out.splitlines()
    assert [line.split()[0] for line in lines] == ["started", "server"]
    pids = [int(pid) for line in lines for pid in line.split()[1:]]
    assert len(pids) >= 3, "the program, the server, its children"
    for pid in pids:
        await_(lambda pid=pid: not is_alive(pid), "a process is left")


@pytest.mark.parametrize("heir", [False, True], ids=["alone", "with a fork that holds the pipe"])
def test_a_killed_program_leaves_nothing(tmp_path: Path, heir: bool) -> None:
    code = f"""
    p = _pool(os.getpid())
    assert isinstance(p.compile([k], 90)[0], Binary)
    child = os.fork() if {heir} else -1
    if child == 0:
        sys.stdout.close(), os.close(1), os.close(2)
        signal.pause()
    print("server", child, p._server.pid, flush=True)
    signal.pause()
    """
    program = script(tmp_path, code)
    assert program.stdout is not None and program.stderr is not None
    program.stdout.readline()
    child, pid = map(int, program.stdout.readline().split()[1:])
    program.kill()
    program.wait()
    await_(lambda: not is_alive(pid), "the server is left")
    if heir:
        os.kill(child, signal.SIGKILL)
    program.stdout.close()
    program.stderr.close()


def test_a_fork_has_a_server_of_its_own(tmp_path: Path) -> None:
    code = """
    mine = compile_all([k], 90, None)
    if os.fork() == 0:
        theirs = compile_all([k], 90, None)
        print(theirs == mine, _pool(os.getpid())._server.pid != _pool(os.getppid())._server.pid)
        sys.exit()
    os.wait()
    assert compile_all([k], 90, None) == mine, "the parent's server lives on"
    """
    program = script(tmp_path, code)
    out, err = program.communicate(timeout=60)
    assert (program.returncode, err) == (0, "")
    assert out.splitlines()[1:] == ["True True"]


def test_processes_with_other_seeds_and_settings_give_equal_bytes(tmp_path: Path) -> None:
    """Also with the variable that turns all kernels of a process into Python functions."""
    code = """
    import hashlib
    print(*(hashlib.sha256(b.code).hexdigest() for b in compile_all([k], 90, None)))
    """
    settings = ({"PYTHONHASHSEED": "1"}, {"PYTHONHASHSEED": "2", "TRITON_INTERPRET": "1"})
    found = [script(tmp_path, code, **env).communicate(timeout=60) for env in settings]
    assert found[0][0].splitlines()[1:] == found[1][0].splitlines()[1:] != [], found
    assert not found[0][1] + found[1][1]


def test_the_version_is_known_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys; from lenz.machine.cuda.triton.compile import version; "
    code += "print(version(), 'triton' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    import triton

    assert run.stdout.strip() == f"{version()} False", run.stderr
    assert version().startswith(f"triton {triton.__version__} libtriton.so ")
    assert " ptxas " in version()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Missing, match="not installed"):
        version.__wrapped__()


def test_many_servers_at_once_compile_all(all_kernels: bool) -> None:
    """With --all-kernels 48 of them, which import Triton at the same time: minutes on two CPUs."""
    wanted = [compile_text(k, 90) for k in (ADD, SOFTMAX)]

    def compiled(_: int) -> bool:
        p = ServerClient()
        try:
            return p.compile([ADD, SOFTMAX], 90) == wanted
        finally:
            p.close()

    many = 48 if all_kernels else 3
    with ThreadPoolExecutor(many) as threads:
        assert all(threads.map(compiled, range(many)))


def test_llvm_is_promised_nothing_of_lanes_that_nobody_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Triton's LLVM takes such promises for lanes that are read (docs/upstream)."""
    from triton.backends.nvidia.compiler import CUDABackend

    fault = (ROOT / "docs/upstream/triton-36-packed-shift.ll").read_text()
    seen: list[str] = []
    before, behind = CUDABackend.make_llir, CUDABackend.make_ptx

    def with_fault(self: Any, *args: Any) -> str:
        text = before(self, *args)
        body = fault.replace("ptx_kernel", "").split("declare")[0]
        assert isinstance(text, str) and "i32 @llvm.nvvm.read.ptx.sreg.tid.x()" in text
        return text + body

    def spied(self: Any, text: str, *args: Any) -> Any:
        seen.append(text)
        return behind(self, text, *args)

    monkeypatch.setattr(CUDABackend, "make_llir", with_fault)
    monkeypatch.setattr(CUDABackend, "make_ptx", spied)
    assert "nuw nsw <2 x i32>" in fault
    compile_text(ADD, 90)
    (text,) = seen
    assert "shl <2 x i32> %v, <i32 31, i32 5>" in text
    assert re.search(r"= \w+ .*\b(nuw|nsw|disjoint) .*i(32|64) ", text), "of scalars it is"


def test_packed_sums_reach_the_assembler_in_halves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It loses their constant (docs/upstream/ptxas-12-packed-add.ptx)."""
    from triton.backends.nvidia.compiler import CUDABackend

    seen: list[str] = []
    ptx, cubin = CUDABackend.make_ptx, CUDABackend.make_cubin

    def with_fault(self: Any, *args: Any) -> str:
        fault = "{ .reg .b32 q<3>; mov.b32 q0, 5; add.s16x2 q1, q0, q0; add.u16x2 q2, q1, q0; }\n"
        return str(ptx(self, *args)).replace("ret;", fault + "ret;")

    def spied(self: Any, text: str, *args: Any) -> Any:
        seen.append(text)
        return cubin(self, text, *args)

    monkeypatch.setattr(CUDABackend, "make_ptx", with_fault)
    monkeypatch.setattr(CUDABackend, "make_cubin", spied)
    compile_text(ADD, 90)
    (text,) = seen
    assert "16x2" not in text and "mov.b32 {a2, a3}, q0; add.s16 a0, a0, a2;" in text

    fault = (ROOT / "docs/upstream/ptxas-12-packed-add.ptx").read_text()
    source, code = tmp_path / "k.ptx", tmp_path / "k.cubin"
    source.write_text(PACKED_SUM.sub(SUMS, fault))
    subprocess.run([tool("ptxas"), "-arch=sm_90a", source, "-o", code], check=True)
    shown = subprocess.run([tool("nvdisasm"), "-c", code], check=True, capture_output=True)
    assert re.search(rb"ADD.*, 0x1\b", shown.stdout) and b"16x2" not in shown.stdout
