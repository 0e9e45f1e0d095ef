"""Names of files, functions, arguments, parameters and ops are data: no text runs them as code."""

from __future__ import annotations

import json
import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lenz.pipeline
from lenz.debug.names import shown
from lenz.errors import InternalError
from lenz.ir.graph import Extern, Graph, Named
from lenz.ir.printer import show
from lenz.ir.reader import read

CODE = "import sys; sys.ran_a_name = True"
NAMES = {
    "newline": f"a\n    {CODE}\n    #",
    "newline at the margin": f"a\n{CODE}\n#",
    "carriage return": f"a\r    {CODE}\r    #",
    "line separator": f"a\u2028    {CODE}\u2028",
    "next line": f"a\x85    {CODE}\x85",
    "form feed": f"a\x0c    {CODE}\x0c",
    "quotes": f"a'''\"\"\"\n    {CODE}\n    '\\",
    "formats": "%s{}{name}%(x)s{{",
    "not UTF-8": "a\udcff\udc80",
    "another folder": "../../escaped/../a",
    "terminal": "\x1b]0;title\x07\x1b[2J",
    "long": "a" * 3000,
}


@pytest.fixture(autouse=True)
def nothing_ran(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delattr(sys, "ran_a_name", raising=False)
    yield
    assert not hasattr(sys, "ran_a_name"), "a name ran as code"


def function(name: str, file: str | None = None) -> Callable[..., Tensor]:
    """A function of this name, in a file of this name, with an argument of this name."""
    file = f"/tmp/{name}.py" if file is None else file
    source = "def f(x, **given):\n    return ((x * 2).sin() + given[NAME]).sum(0) + 1\n"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    module: dict[str, Any] = {"NAME": name}
    exec(compile(source, "f", "exec"), module)
    f: Any = module["f"]
    f.__code__ = f.__code__.replace(co_filename=file, co_name=name)
    f.__name__ = f.__qualname__ = name
    return f  # type: ignore[no-any-return]  # what exec made


class Net(nn.Module):
    """With a parameter, a buffer and a module of this name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name.replace(".", "_")  # as nn.Module wants
        self.add_module(self.name, nn.Linear(4, 4))
        self.register_buffer("buffer" + self.name, torch.ones(4))
        self.register_parameter("parameter" + self.name, nn.Parameter(torch.ones(4)))

    def forward(self, x: Tensor) -> Tensor:
        y = self._modules[self.name](x) * self._buffers["buffer" + self.name]
        return (y + self._parameters["parameter" + self.name]).relu().sum()


def check_files(folder: Path) -> None:
    """All that was written can be read by line, and is below the folder."""
    files = [f for f in folder.rglob("*") if f.is_file()]
    assert files and not (folder.parent / "escaped").exists()
    for file in files:
        if file.suffix == ".o":
            continue
        text = file.read_bytes().decode()
        assert all(line.isprintable() for line in text.split("\n")), file
        if file.name != "error.txt":  # which has the lines of a message as they are
            assert CODE not in [line.strip() for line in text.split("\n")], file
        if file.name in ("plan.py", "fx_runnable.py"):  # torch prints the others to be read
            compile(text, file.name, "exec")
        if file.suffix == ".ir":
            assert read(text) is not None


@pytest.mark.parametrize("case", NAMES)
def test_a_name_is_data(case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    name, x = NAMES[case], torch.randn(3, 4)
    options = {
        "debug": True,
        "debug_dir": str(tmp_path / "debug"),
        "logs": "graph,ir,schedule,code",
    }
    f = function(name)
    got = torch.compile(f, backend="lenz", options=options)(x, **{name: x})  # type: ignore[arg-type]
    torch.testing.assert_close(got, f(x, **{name: x}))
    net = Net(name)
    loss = torch.compile(net, backend="lenz", options=options)(x)  # type: ignore[arg-type]
    torch.testing.assert_close(loss, net(x))
    loss.backward()
    check_files(tmp_path / "debug")
    shown_name = shown(name)
    assert shown_name in capfd.readouterr().err and shown_name in plans(tmp_path)


def plans(folder: Path) -> str:
    return "".join(p.read_text() for p in folder.rglob("plan.py"))


@pytest.mark.parametrize("case", ["newline", "carriage return", "not UTF-8", "another folder"])
def test_a_repro_of_a_fault_holds_names_as_data(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, x = NAMES[case], torch.randn(3, 4)

    def broken(*args: object) -> None:
        raise InternalError(f"about {name}", where=name)

    monkeypatch.setattr(lenz.pipeline, "build_plan", broken)
    options = {"debug_dir": str(tmp_path / "debug"), "on_error": "raise", "cache": False}
    with pytest.raises(Exception, match="a bug in lenz"):
        torch.compile(function(name), backend="lenz", options=options)(x, **{name: x})  # type: ignore[arg-type]
    check_files(tmp_path / "debug")
    assert {f.name for f in (tmp_path / "debug").glob("repro-*/*")} >= {"error.txt", "graph.ir"}


def test_a_cached_plan_has_nothing_of_the_file_it_came_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of other names with the same graph share the entry."""
    kept: list[str] = []
    real = lenz.pipeline.keep  # type: ignore[attr-defined]
    monkeypatch.setattr(lenz.pipeline, "keep", lambda s, k, e: (kept.append(e.plan), real(s, k, e)))
    x = torch.randn(3, 4)
    for file in [*(f"/tmp/{name}.py" for name in NAMES.values()), "good.py"]:
        torch._dynamo.reset()
        f = function("f", file)
        got = torch.compile(f, backend="lenz", options={"cache_dir": str(tmp_path)})(x, f=x)
        torch.testing.assert_close(got, f(x, f=x))
    (text,) = kept
    assert "#" not in text, "comments tell lines of somebody's source"
    assert show(read(text)) == text
    assert json.loads(json.dumps(text)) == text


OPS = [("lenz_ab::c", 2.0), ("lenz::ab_c", 3.0), ("lenz::ab.c", 5.0), ("lenz_ab_c::default", 7.0)]


def test_ops_of_similar_names_are_told_apart() -> None:
    """`lenz_ab::c` and `lenz::ab_c` are one name where a plan writes both with `_`."""
    made: list[Callable[[Tensor], Tensor]] = []
    for name, factor in OPS:

        def scaled(x: Tensor, factor: float = factor) -> Tensor:
            return x * factor

        op = torch.library.custom_op(name, mutates_args=(), schema="(Tensor x) -> Tensor")(scaled)
        op.register_fake(torch.empty_like)
        made.append(op)

    def f(x: Tensor) -> list[Tensor]:
        return [op(x) for op in made]

    x = torch.ones(3)
    torch.testing.assert_close(torch.compile(f, backend="lenz")(x), [x * k for _, k in OPS])


@pytest.mark.parametrize("case", NAMES)
def test_a_name_in_ir_text_reads_back(case: str) -> None:
    name = NAMES[case]
    call = Extern((), name, (name, Named("obj", name)), (("key", name),), reason=name)
    g = Graph(name, (), (call,), (), (), (), objects=(name,))
    text = show(g, origins=True)
    assert read(text) == g and all(line.isprintable() for line in text.split("\n"))
