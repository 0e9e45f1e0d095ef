"""The compile server when things go wrong, and when there are many; nothing here needs Triton."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lenz.ir.binary import Binary
from lenz.machine.cuda.triton import pool
from lenz.machine.cuda.triton.pool import Failed, ServerClient
from tests.codegen.stub_compiler import CODE, binary, kernel

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no server without fork")
ROOT = Path(__file__).resolve().parents[2]
GOOD = [kernel("good_0"), kernel("good_1")]
MANY = 48


@pytest.fixture(autouse=True)
def stub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With locks of CPUs of its own, so that other tests of this machine are not waited for."""
    monkeypatch.setattr(pool, "CODE", CODE)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


@pytest.fixture
def pools() -> Iterator[Callable[..., ServerClient]]:
    made: list[ServerClient] = []

    def new(**given: int) -> ServerClient:
        made.append(ServerClient(**{"workers": 2, "patience": 60, **given}))
        return made[-1]

    yield new
    for p in made:
        p.close()


def text(code: str, log: Path) -> str:
    """Code that first writes down the process in which it runs."""
    return (
        "import os, signal, time\n"
        f"with open({str(log)!r}, 'a') as f: print(os.getpid(), file=f)\n"
        f"first = len(open({str(log)!r}).readlines()) == 1\n" + textwrap.dedent(code)
    )


def pids(log: Path) -> list[int]:
    return [int(line) for line in log.read_text().split()]


def await_death(found: list[int]) -> None:
    """Half a minute is for a machine that is overloaded."""
    for _ in range(3000):
        if not any(map(is_alive, found)):
            return
        time.sleep(0.01)
    raise AssertionError("a process is left")


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("end", ["SIGKILL", "SIGTERM"])
def test_a_worker_that_was_killed_tries_again(
    end: str, pools: Callable[..., ServerClient], tmp_path: Path
) -> None:
    k = kernel("k", text(f"if first: os.kill(os.getpid(), signal.{end})", tmp_path / "log"))
    assert pools().compile([k, *GOOD], 90) == [binary(x) for x in (k, *GOOD)]
    assert len(pids(tmp_path / "log")) == 2


def test_a_worker_that_is_always_killed_fails_its_kernel_alone(
    pools: Callable[..., ServerClient], tmp_path: Path
) -> None:
    k = kernel("k", text("os.kill(os.getpid(), signal.SIGKILL)", tmp_path / "log"))
    failed, *rest = pools().compile([k, *GOOD], 90)
    assert isinstance(failed, Failed) and "signal 9" in failed.message
    assert rest == [binary(x) for x in GOOD]
    assert len(pids(tmp_path / "log")) == 2, "one more try, and no third"


STUCK = {
    "ignores an alarm": "signal.signal(signal.SIGALRM, signal.SIG_IGN); time.sleep(600)",
    "blocks all signals": "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65)); time.sleep(600)",
    "works": "while True: pass",
    "is stopped": "os.kill(os.getpid(), signal.SIGSTOP)",
}


@pytest.mark.parametrize("why", STUCK)
def test_a_kernel_that_takes_too_long_fails_alone(
    why: str, pools: Callable[..., ServerClient], tmp_path: Path
) -> None:
    k = kernel("k", text(STUCK[why], tmp_path / "log"))
    p = pools(seconds=1)
    failed, *rest = p.compile([k, *GOOD], 90)
    assert isinstance(failed, Failed) and "more than 1 s" in failed.message
    assert rest == [binary(x) for x in GOOD]
    (pid,) = pids(tmp_path / "log")
    await_death([pid])
    assert p.compile(GOOD, 90) == [binary(x) for x in GOOD], "a new child takes its place"


ENDS = {"dies": "SIGKILL", "is stopped": "SIGSTOP"}


@pytest.mark.parametrize("what", ENDS)
def test_what_a_lost_server_left_is_compiled_by_a_new_one(
    what: str, pools: Callable[..., ServerClient], tmp_path: Path
) -> None:
    end = f"if first: os.kill(os.getppid(), signal.{ENDS[what]}); time.sleep(600)"
    k = kernel("k", text(end, tmp_path / "log"))
    assert pools(patience=2).compile([k, *GOOD], 90) == [binary(x) for x in (k, *GOOD)]
    first, second = pids(tmp_path / "log")
    await_death([first])
    assert os.getpid() not in (first, second)


@pytest.mark.parametrize("what", ENDS)
def test_a_kernel_that_ends_every_server_is_never_compiled_here(
    what: str, pools: Callable[..., ServerClient], tmp_path: Path
) -> None:
    end = f"os.kill(os.getppid(), signal.{ENDS[what]}); time.sleep(600)"
    k = kernel("k", text(end, tmp_path / "log"))
    (failed,) = pools(patience=2).compile([k], 90)
    assert isinstance(failed, Failed) and "no compile server was left" in failed.message
    assert len(pids(tmp_path / "log")) == 2 and os.getpid() not in pids(tmp_path / "log")
    await_death(pids(tmp_path / "log"))


def test_a_server_that_works_for_long_is_not_silent(
    pools: Callable[..., ServerClient], tmp_path: Path
) -> None:
    k = kernel("k", text("time.sleep(3)", tmp_path / "log"))
    assert pools(patience=2).compile([k], 90) == [binary(k)]
    assert len(pids(tmp_path / "log")) == 1


def test_a_server_that_does_not_start_is_a_failure_with_its_reason(
    pools: Callable[..., ServerClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    p = pools()
    p.start()
    (failed,) = p.compile(GOOD[:1], 90)
    assert isinstance(failed, Failed) and "No such file" in failed.message


def test_many_servers_at_once_use_each_cpu_once(tmp_path: Path) -> None:
    """48 pools with a server each: all kernels are made, and never more at once than CPUs."""
    log = tmp_path / "log"
    work = f"""
        import os, time
        def note(word):
            file = os.open({str(log)!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(file, f"{{time.monotonic()}} {{word}}\\n".encode())
            os.close(file)
        note(1)
        time.sleep(0.02)
        note(-1)
    """
    kernels = [kernel(f"k{n}", textwrap.dedent(work)) for n in range(4)]
    made = [ServerClient() for _ in range(MANY)]

    def compiled(p: ServerClient) -> list[Binary | Failed]:
        try:
            return p.compile(kernels, 90)
        finally:
            p.close()

    with ThreadPoolExecutor(MANY) as threads:
        found = list(threads.map(compiled, made))
    assert found == [[binary(k) for k in kernels]] * MANY
    events = sorted((float(t), int(d)) for t, d in map(str.split, log.read_text().splitlines()))
    under_way = most = 0
    for _, change in events:
        under_way += change
        most = max(most, under_way)
    assert len(events) == 2 * MANY * len(kernels) and most <= len(os.sched_getaffinity(0))


def test_a_server_goes_on_where_another_holds_all_cpus(
    pools: Callable[..., ServerClient], tmp_path: Path
) -> None:
    """Its holder is stopped, say: after the time that a kernel may take it is not waited for."""
    hold = text("time.sleep(600)", tmp_path / "log")
    cpus = len(os.sched_getaffinity(0))
    other = pools(workers=cpus)
    with ThreadPoolExecutor(1) as thread:
        held = [kernel(f"k{n}", hold) for n in range(cpus)]
        asked = thread.submit(other.compile, held, 90)
        while not (tmp_path / "log").exists() or len(pids(tmp_path / "log")) < len(held):
            time.sleep(0.01)
        assert pools(seconds=1).compile(GOOD, 90) == [binary(x) for x in GOOD]
        other.close()
        assert all(isinstance(x, Failed) for x in asked.result())


def test_without_a_folder_of_its_own_a_server_works(
    pools: Callable[..., ServerClient], tmp_path: Path
) -> None:
    (tmp_path / f"lenz-{os.getuid()}").write_text("in the way")
    assert pools().compile(GOOD, 90) == [binary(x) for x in GOOD]


PROGRAM = """
    import os, signal, sys, threading
    from lenz.machine.cuda.triton import pool
    from tests.codegen.stub_compiler import CODE, kernel
    pool.CODE = CODE
    p = pool.ServerClient(workers=2)
    stuck = [kernel(f"k{{n}}", open(sys.argv[1]).read()) for n in range(3)]
    thread = threading.Thread(target=p.compile, args=(stuck, 90), daemon=True)
    thread.start()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored below a shell's `&`
    while not os.path.exists(sys.argv[2]) or len(open(sys.argv[2]).readlines()) < {workers}:
        pass
    print(p._server.pid, flush=True)
    {end}
"""
EXITS = {
    "ends": "pass",
    "exits": "sys.exit(3)",
    "exits at once": "os._exit(3)",
    "raises": "raise ValueError",
    "is terminated": "os.kill(os.getpid(), signal.SIGTERM)",
    "is killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "is interrupted": "os.kill(os.getpid(), signal.SIGINT); threading.Event().wait()",
    "loses its server": "os.kill(p._server.pid, signal.SIGKILL); os._exit(3)",
}


@pytest.mark.parametrize("how", EXITS)
def test_a_program_that_ends_in_the_midst_of_a_batch_leaves_nothing(
    how: str, tmp_path: Path
) -> None:
    """The kernels ignore what they can, and would take ten minutes."""
    code, log, file = STUCK["ignores an alarm"], tmp_path / "log", tmp_path / "kernel"
    file.write_text(text(f"signal.signal(signal.SIGTERM, signal.SIG_IGN); {code}", log))
    workers = min(2, len(os.sched_getaffinity(0)))
    program = textwrap.dedent(PROGRAM.format(end=EXITS[how], workers=workers))
    done = subprocess.run(
        [sys.executable, "-c", program, str(file), str(log)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode == 0) == (how == "ends"), done.stderr
    await_death([int(done.stdout), *pids(log)])
