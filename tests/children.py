"""Python programs in processes of their own, which need not import torch again.

`run(arguments)` is `subprocess.run([sys.executable, *arguments], capture_output=True, text=True)`,
but the process is a fork of one that has imported torch and its tracers, which take 3 s. Nothing of
lenz is imported there. Programs whose torch reads variables while it is imported, or that say which
modules of torch they import, need `subprocess`.
"""

from __future__ import annotations

import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["run"]

REPOSITORY = Path(__file__).parent.parent
FORKS = hasattr(os, "fork")


def run(
    arguments: Sequence[str],
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    timeout: float = 300,
) -> subprocess.CompletedProcess[str]:
    """What a Python with the arguments prints: a script, `-c` and a text, or `-m` and a module."""
    own = dict(os.environ if env is None else env)
    if not FORKS:
        command = [sys.executable, *arguments]
        return subprocess.run(
            command, env=own, cwd=cwd, capture_output=True, text=True, timeout=timeout
        )
    with tempfile.TemporaryDirectory() as folder:
        out, err = (Path(folder) / name for name in ("out", "err"))
        asked = [[*arguments], own, str(cwd or os.getcwd()), str(out), str(err)]
        status = _status(json.dumps(asked), timeout)
        return subprocess.CompletedProcess([*arguments], status, out.read_text(), err.read_text())


def _status(asked: str, timeout: float) -> int:
    """The exit status of a fork."""
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    print(asked, file=server.stdin, flush=True)
    fork = int(server.stdout.readline())
    if not select.select([server.stdout], [], [], timeout)[0]:
        os.kill(fork, signal.SIGKILL)
        server.stdout.readline()
        raise subprocess.TimeoutExpired(asked, timeout)
    return os.waitstatus_to_exitcode(int(server.stdout.readline()))


@cache
def _server() -> subprocess.Popen[str]:
    """The process that forks; it ends with this one, which holds the other end of its pipe."""
    command = [sys.executable, "-m", "tests.children"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=REPOSITORY, text=True, stdin=pipe, stdout=pipe, bufsize=1)


def _serve() -> list[Any]:
    """Fork for each line; a fork returns with what it was asked for."""
    for line in sys.stdin:
        fork = os.fork()
        if fork == 0:
            asked: list[Any] = json.loads(line)
            return asked
        os.write(1, f"{fork}\n".encode())
        os.write(1, f"{os.waitpid(fork, 0)[1]}\n".encode())
    raise SystemExit


def _become(arguments: list[str], env: dict[str, str], cwd: str, *files: str) -> None:
    """Be the process that was asked for."""
    for n, (name, how) in enumerate([(os.devnull, os.O_RDONLY), *((f, 0) for f in files)]):
        end = os.open(name, how or os.O_WRONLY | os.O_CREAT)
        os.dup2(end, n)
        os.close(end)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    first, *rest = arguments
    paths = env.get("PYTHONPATH", "")
    where = str(Path(first).absolute().parent) if first[0] != "-" else cwd
    sys.path[:] = [where, *(paths.split(os.pathsep) if paths else []), *sys.path[1:]]
    if first == "-c":
        text, sys.argv = rest[0], [first, *rest[1:]]
        main = type(sys)("__main__")
        sys.modules["__main__"] = main
        exec(compile(text, "<string>", "exec"), vars(main))
    elif first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    import torch._dynamo.backends.common
    import torch._functorch.aot_autograd  # noqa: F401

    import tests.frozen  # noqa: F401

    assert not [name for name in sys.modules if name.partition(".")[0] == "lenz"]
    _become(*_serve())
