"""What a user sees when something goes wrong: in the compiler, in a call, on the disk."""

from __future__ import annotations

import importlib
import os
import pickle  # noqa: TID251 - errors of workers come back in this way
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch

import lenz
from lenz import api, keys, pipeline
from lenz.context import Context
from lenz.debug.blame import blame, blaming
from lenz.errors import InternalError, Unsupported, UserError
from lenz.frontend import FxProgram
from lenz.frontend.program import Fact
from lenz.ir.graph import Node
from lenz.ir.plan import Boxed
from lenz.opt.each import each
from lenz.options import Options

frontend_capture = importlib.import_module("lenz.frontend.capture")  # a function has its name


def double(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.relu(x * 2) + y


def inputs() -> list[torch.Tensor]:
    return [torch.randn(6, 5), torch.randn(5)]


def compiled(**options: object) -> Callable[..., Any]:
    made: Callable[..., Any] = torch.compile(double, backend="lenz", options=options)  # type: ignore[arg-type]
    return made


def break_pass(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Let the pass `inline` fail on the first node it sees."""

    def broken(n: Node) -> Node:
        raise error

    passes = {**pipeline.PASSES, "inline": lambda g, cx: each(g, broken)}  # type: ignore[attr-defined]
    monkeypatch.setattr(pipeline, "PASSES", passes)
    # No graph is taken from the disk cache, whose key does not know of this.
    monkeypatch.setattr(keys, "sources", lambda again=False: "")


def test_a_fault_names_pass_line_and_repro(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    break_pass(monkeypatch, RuntimeError("no such thing"))
    with pytest.raises(InternalError) as caught:
        compiled(debug_dir=str(tmp_path), cache=False, remote_cache="redis://u:word@h")(*inputs())
    text = str(caught.value)
    assert "a bug in lenz after inline" in text
    assert "%mul = f32[6, 5]" in text and "RuntimeError: no such thing" in text
    assert f"{__file__}:" in text
    assert 'try: on_error="eager"' in text
    (repro,) = tmp_path.iterdir()
    assert f"saved: {repro}" in text
    files = {f.name for f in repro.iterdir()}
    assert files >= {"error.txt", "fx_transformed.py", "fx_runnable.py", "graph.ir", "options.txt"}
    assert "%mul = f32[6, 5]" in (repro / "graph.ir").read_text()
    assert "aten.relu.default" in (repro / "fx_transformed.py").read_text()
    told = (repro / "options.txt").read_text()
    assert "on_error = 'raise'" in told and "remote_cache = h\n" in told
    assert "in broken" in (repro / "error.txt").read_text()


def test_the_same_fault_is_written_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    break_pass(monkeypatch, RuntimeError("again"))
    run = compiled(debug_dir=str(tmp_path))
    for _ in range(2):
        with pytest.raises(InternalError):
            run(*inputs())
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("module", "function", "line"),
    [
        ("lenz.lower.walk", "entry_for", "aten.mul.Tensor"),
        ("lenz.schedule", "nests_of", "%add = f32[6, 5] on cpu : map"),
        ("lenz.schedule", "build", "%add"),
        ("lenz.machine.cpu.llvm.module", "legalise", "kernel @fused_add_0"),
        ("lenz.plan.build", "runs_programs", "kernel @fused_add_0"),
    ],
)
def test_a_fault_names_the_node_or_the_kernel_at_every_stage(
    module: str, function: str, line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(importlib.import_module(module), function, broken)
    monkeypatch.setattr(keys, "sources", lambda again=False: "")  # as if the disk held nothing
    args = [torch.randn(6, 5) for _ in range(2)]
    with pytest.raises(InternalError) as caught:
        compiled(debug_dir=str(tmp_path), cache=False)(*args)
    assert line in caught.value.line, str(caught.value)
    assert __file__ in str(caught.value) or function == "legalise", str(caught.value)


def test_an_error_is_about_the_innermost_node() -> None:
    gm = torch.fx.symbolic_trace(double)
    first, second, *_ = gm.graph.nodes
    for inside in (True, False):
        error = RuntimeError("no such thing")
        with pytest.raises(RuntimeError), blaming(first):
            try:
                with blaming(second):
                    raise (error if inside else KeyError("handled"))
            except KeyError:
                raise error from None
        assert blame(error)[0] == str((second if inside else first).format_node())
        assert blame(error) == ("", ""), "an error that is reported keeps a graph alive"


def test_a_fault_that_knows_its_line_keeps_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    known = InternalError("stored twice", rule="store-once", line="7: store(%y)", pass_name="fuse")
    break_pass(monkeypatch, known)
    with pytest.raises(InternalError, match="after fuse, rule store-once"):
        compiled(debug_dir=str(tmp_path))(*inputs())


def test_a_fault_counts_more_than_a_repro_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    break_pass(monkeypatch, RuntimeError("first things first"))
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(InternalError, match="first things first") as caught:
        compiled(debug_dir=str(file))(*inputs())
    assert "saved:" not in str(caught.value)
    torch.compiler.reset()
    with pytest.warns(UserWarning, match="report it; until") as said:
        compiled(debug_dir=str(file), on_error="eager")(*inputs())
    assert not [w for w in said if "saved" in str(w.message)]


@pytest.mark.filterwarnings("ignore:lenz failed on a graph")
def test_a_report_has_a_line_for_each_call_of_a_graph_that_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    break_pass(monkeypatch, RuntimeError("no such thing"))
    options = {"debug_dir": str(tmp_path), "on_error": "eager"}
    report = lenz.explain(double, options=options)(*inputs())
    lines = str(report).splitlines()
    assert len([x for x in lines if x.startswith("  call aten.")]) == len(report.launches) > 1
    assert all("a bug in lenz after inline): " in x for x in lines if x.startswith("  call "))
    assert "RuntimeError: no such thing" in report.graphs[0].skips[0]


def test_on_error_eager_runs_the_graph_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    break_pass(monkeypatch, RuntimeError("no such thing"))
    run, args = compiled(on_error="eager", debug_dir=str(tmp_path)), inputs()
    with pytest.warns(UserWarning, match="runs it in eager") as said:
        for _ in range(3):
            torch.testing.assert_close(run(*args), double(*args))
    assert len([w for w in said if "lenz" in str(w.message)]) == 1


def test_users_get_a_warning_and_eager_unless_they_ask_for_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("LENZ_ON_ERROR")
    break_pass(monkeypatch, RuntimeError("no such thing"))
    run, args = compiled(debug_dir=str(tmp_path)), [a.requires_grad_() for a in inputs()]
    with pytest.warns(UserWarning, match="a bug in lenz after inline") as said:
        for _ in range(2):
            run(*args).sum().backward()
    bugs = [str(w.message) for w in said if "a bug in lenz" in str(w.message)]
    # Each half of the graph is compiled by itself, and has a repro of its own.
    assert len(bugs) == 2, "a warning is said once"
    for folder in tmp_path.iterdir():
        assert any(f"saved: {folder}" in text for text in bugs)
    torch.testing.assert_close(args[0].grad, 2.0 * (args[0].detach() > 0) * 2)


FRONTEND = {
    "before AOTAutograd": "has_attention",
    "cutting the joint graph": "split",
    "building a half": "build",
    "building the backward half": "build",
}


def break_frontend(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Let a function of the frontend fail."""
    name = FRONTEND[where]
    right = getattr(frontend_capture, name)

    def broken(*args: Any, **kwargs: Any) -> Any:
        if "backward" not in where or "backward" in args:
            {}["no such key"]  # type: ignore[index]
        return right(*args, **kwargs)

    # The frames that tell whose fault it is are those of lenz.
    here = FunctionType(
        broken.__code__, {"__name__": "lenz.frontend.test"}, closure=broken.__closure__
    )
    monkeypatch.setattr(frontend_capture, name, here)


@pytest.mark.parametrize("where", FRONTEND)
@pytest.mark.parametrize("how", ("raise", "eager"))
def test_a_fault_of_the_frontend_is_one_of_lenz(
    where: str, how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(keys, "sources", lambda again=False: "")  # as if the disk held nothing
    break_frontend(monkeypatch, where)
    x, y = (a.requires_grad_() for a in inputs())
    run = compiled(on_error=how, debug_dir=str(tmp_path))
    if how == "raise":
        with pytest.raises(InternalError, match="a bug in lenz:\n    KeyError: 'no such key'"):
            run(x, y).sum().backward()
    else:
        with pytest.warns(UserWarning, match="lenz failed on a graph and runs it in eager"):
            run(x, y).sum().backward()
        torch.testing.assert_close(x.grad, 2.0 * (x.detach() > 0))
    (repro,) = tmp_path.iterdir()
    assert (repro / "fx_runnable.py").exists() and (repro / "error.txt").exists()


@pytest.mark.parametrize("where", FRONTEND)
@pytest.mark.parametrize("how", ("raise", "eager"))
def test_a_fault_in_a_half_that_is_traced_late(
    where: str, how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The forward half comes from the disk; the backward half is traced when it is first called."""
    monkeypatch.setattr(keys, "sources", lambda again=False: "one version")
    x, y = (a.requires_grad_() for a in inputs())
    folders = {"cache_dir": str(tmp_path / "cache"), "debug_dir": str(tmp_path / "saved")}
    run = compiled(on_error=how, **folders)

    def key_of(program: FxProgram, cx: Context) -> str | None:
        return None if program.kind == "backward" else keys.key_of(program, cx)

    with monkeypatch.context() as first:  # a process that keeps the forward half alone
        first.setattr(api, "key_of", key_of)
        run(x, y)
    torch.compiler.reset()
    loss = run(x, y).sum()
    break_frontend(monkeypatch, where)
    if how == "eager" and where == "building the backward half":
        with pytest.warns(UserWarning, match="lenz failed on a graph and runs it in eager"):
            loss.backward()
        torch.testing.assert_close(x.grad, 2.0 * (x.detach() > 0))
    else:  # AOTAutograd has given no backward half that eager could run
        with pytest.raises(InternalError, match="KeyError: 'no such key'"):
            loss.backward()
    (repro,) = (tmp_path / "saved").iterdir()
    assert (repro / "fx_runnable.py").exists() and (repro / "error.txt").exists()


@pytest.mark.parametrize("how", ("raise", "eager"))
def test_a_fault_in_a_fallback(how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A call that breaks an assumption on sizes, as GPUs make them, is compiled for."""
    eighths = lambda p: {b.var.name: Fact(8) for b in p.symbols.bindings}
    monkeypatch.setattr(frontend_capture, "facts_of", eighths)
    options: dict[str, Any] = {"on_error": how, "debug_dir": str(tmp_path)}
    run = torch.compile(double, backend="lenz", dynamic=True, options=options)
    run(torch.randn(64, 32), torch.randn(32))
    x, y = torch.randn(63, 31), torch.randn(31)
    break_pass(monkeypatch, RuntimeError("no such thing"))
    if how == "eager":
        with pytest.warns(UserWarning, match="a bug in lenz after inline"):
            torch.testing.assert_close(run(x, y), double(x, y))
    else:
        with pytest.raises(InternalError, match="a bug in lenz after inline"):
            run(x, y)
    (repro,) = tmp_path.iterdir()
    assert (repro / "fx_runnable.py").exists() and (repro / "graph.ir").exists()


def test_errors_leave_as_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Dynamo would wrap them, and ask for a report to PyTorch."""
    break_pass(monkeypatch, RuntimeError("first things first"))
    with pytest.raises(InternalError) as caught:
        compiled(debug_dir=str(tmp_path))(*inputs())
    e = caught.value
    for text in (str(e), repr(e), "".join(traceback.format_exception(e))):
        assert "PyTorch" not in text and "BackendCompilerFailed" not in text
    frames = [f.name for f in traceback.extract_tb(e.__traceback__)]
    assert frames[-1] == "broken", "the traceback ends where the fault is"
    assert "_call_user_compiler" not in frames, "frames of Dynamo"
    again = pickle.loads(pickle.dumps(e))
    assert type(again) is InternalError and str(again) == str(e)


def test_what_torch_cannot_trace_runs_in_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose fault it is, eager says: a wrong program raises eager's error, a right one runs."""

    def untraceable(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("cannot trace")

    monkeypatch.setattr(frontend_capture, "aot_module_simplified", untraceable)
    monkeypatch.setattr(keys, "sources", lambda again=False: "")  # as if the disk held nothing
    args = inputs()
    with pytest.warns(UserWarning, match="torch could not trace .* ValueError: cannot trace"):
        torch.testing.assert_close(compiled(on_error="eager")(*args), double(*args))
    torch.compiler.reset()
    with pytest.raises(RuntimeError, match="ValueError: cannot trace") as caught:
        compiled()(*args)
    assert "a bug in lenz" not in str(caught.value)


def test_a_tensor_of_onednn_runs_in_eager() -> None:
    """Its fake is a plain tensor, and its memory has no address."""
    run, x = torch.compile(lambda x: x.relu(), backend="lenz"), torch.randn(4, 6)
    with pytest.warns(UserWarning, match="the opaque layout of oneDNN"):
        got = run(x.to_mkldnn())
    torch.testing.assert_close(got.to_dense(), x.relu())
    torch.testing.assert_close(run(x), x.relu())


def test_zeros_without_memory_have_no_address() -> None:
    run = torch.compile(torch.exp, backend="lenz")
    with pytest.warns(UserWarning, match="zeros without memory"):
        got = run(torch._efficientzerotensor(4))
    torch.testing.assert_close(got, torch.ones(4))


@pytest.mark.parametrize("native", [False, True])
def test_a_gradient_of_zeros_without_memory(native: bool) -> None:
    x = torch.randn(4, requires_grad=True)
    run = torch.compile(lambda x: x.exp() * x, backend="lenz", options={"native": native})
    run(x).backward(torch._efficientzerotensor(4))
    torch.testing.assert_close(x.grad, torch.zeros(4))


def test_a_gap_runs_in_eager_and_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    break_pass(monkeypatch, Unsupported("aten.strange is not known", where="model.py:3"))
    args = inputs()
    with pytest.warns(UserWarning, match=r"(?s)a graph in eager.*aten.strange.*model.py:3") as said:
        report = lenz.explain(double)(*args)
        for _ in range(2):
            torch.compiler.reset()
            compiled()(*args)
    assert len([w for w in said if "aten.strange" in str(w.message)]) == 1
    torch.testing.assert_close(report.result, double(*args))
    assert report.graphs[0].skips and "aten.strange" in report.graphs[0].skips[0]
    assert [e.op for e in report.graphs[0].fallbacks] == [
        "aten.mul.Tensor",
        "aten.relu.default",
        "aten.add.Tensor",
    ]


def test_gradients_flow_through_a_graph_in_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    break_pass(monkeypatch, Unsupported("nothing is known"))
    x, y = (a.requires_grad_() for a in inputs())
    with pytest.warns(UserWarning, match="nothing is known"):
        compiled()(x, y).sum().backward()
    got, x.grad = x.grad, None
    double(x, y).sum().backward()
    torch.testing.assert_close(got, x.grad)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fuse_reduction": True}, "did you mean fuse_reductions"),
        ({"fuel": "much"}, "option fuel: expected int, got 'much'"),
        ({"on_error": "ignore"}, "one of raise, eager"),
    ],
)
def test_wrong_options_are_the_users_error(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        compiled(**options)(*inputs())


def test_an_unknown_mode_lists_the_known() -> None:
    run = torch.compile(double, backend="lenz", mode="fastest")
    with pytest.raises(UserError, match="unknown mode 'fastest'"):
        run(*inputs())


class Plans:
    """Keeps the calls of the compiled graphs."""

    def __init__(self) -> None:
        self.calls: list[Boxed] = []

    def compiled(self, made: pipeline.Compiled, recorder: object) -> Boxed:
        self.calls.append(made.call)
        return made.call

    def refused(self, program: object, why: str, run: Boxed) -> Boxed:
        raise AssertionError(why)

    def untraced(self, name: str, kind: str, why: str) -> None:
        raise AssertionError(why)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda x: x.T.contiguous().T, r"argument x: expected stride \(5, 1\), got \(1, 6\)"),
        (lambda x: x.double(), "argument x: expected dtype torch.float32, got torch.float64"),
        (lambda x: x[:4], r"argument x: expected size \(6, 5\), got \(4, 5\)"),
        (lambda x: x.to("meta"), "argument x: expected device cpu, got meta"),
        (lambda x: 3, "argument x must be a tensor, got int"),
        (torch._neg_view, "argument x: expected negative bit False, got True"),
    ],
)
def test_a_wrong_argument_of_a_plan_is_named(
    wrong: Callable[[torch.Tensor], object], message: str
) -> None:
    plans = Plans()

    def watched(gm: torch.fx.GraphModule, args: list[Any]) -> Callable[..., Any]:
        return api.compile_graph(gm, args, Options.from_environment(), plans)

    x, y = inputs()
    torch.compile(double, backend=watched, dynamic=False)(x, y)
    (call,) = plans.calls
    torch.testing.assert_close(call([x, y])[0], double(x, y))
    with pytest.raises(UserError, match=message):
        call([wrong(x), y])


def entries(folder: Path) -> list[Path]:
    return [f for f in folder.rglob("*") if f.is_file()]


def test_a_damaged_cache_is_compiled_again(tmp_path: Path) -> None:
    args = inputs()
    compiled(cache_dir=str(tmp_path))(*args)
    assert entries(tmp_path)
    for damage in (lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b[:-9] + b"x" + b[-8:]):
        for file in entries(tmp_path):
            file.write_bytes(damage(file.read_bytes()))
        torch.compiler.reset()
        torch.testing.assert_close(compiled(cache_dir=str(tmp_path))(*args), double(*args))


@pytest.mark.skipif(os.name == "nt", reason="permissions of folders are POSIX")
def test_a_cache_folder_that_cannot_be_made_means_one_warning(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    args = inputs()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            torch.compiler.reset()
            run = compiled(cache_dir=str(file / "cache"))
            torch.testing.assert_close(run(*args), double(*args))
    assert len([w for w in said if "cache" in str(w.message)]) == 1


def test_without_the_cache_nothing_is_written(tmp_path: Path) -> None:
    compiled(cache=False, cache_dir=str(tmp_path))(*inputs())
    assert not entries(tmp_path)
