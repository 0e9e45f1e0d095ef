"""What a user sees when something is missing for a GPU, or does not work there; without a GPU."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lenz.errors import Missing
from lenz.ir.binary import Binary
from lenz.ir.graph import Extern
from lenz.ir.kernel import Launch
from lenz.machine.cuda import driver, machine
from lenz.machine.cuda.triton import compile as compiler
from lenz.machine.cuda.triton.pool import Failed
from lenz.options import Options
from lenz.pipeline import Compiled, compile_program, context
from tests.cuda import cuda_program


def rows(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two kernels: a softmax, and a transpose."""
    return x.softmax(-1), torch.relu(y.t() + 1).contiguous()


def made(
    monkeypatch: pytest.MonkeyPatch, side_by_side: int = 1, **answers: Callable[..., Any]
) -> Compiled:
    """`rows` for a GPU, with other answers of the compiler, the driver or the card."""
    program = cuda_program(rows, (64, 300), (128, 128), dtype=torch.float32)
    usual: dict[str, Callable[..., Any]] = {
        "capability": lambda number: 90, "function": lambda *_: lambda *_: None,
        "compile_all": lambda texts, *_: [binary(t.name) for t in texts],
    }  # fmt: skip
    for name, answer in (usual | answers).items():
        monkeypatch.setattr(machine if name == "compile_all" else driver, name, answer)
    return compile_program(program, context(Options(cache=False, side_by_side=side_by_side)))


def binary(name: str) -> Binary:
    return Binary(name, b"code", 4, 0, 0, -1, -1)


def kernels_and_calls(c: Compiled) -> tuple[list[str], list[str]]:
    steps = c.schedule.steps
    launched = [s.kernel.name for s in steps if isinstance(s, Launch)]
    return launched, [f"{s.op} {s.reason}" for s in steps if isinstance(s, Extern)]


def test_nothing_is_left_to_eager_where_all_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    launched, called = kernels_and_calls(made(monkeypatch))
    assert len(launched) == 2 and not called


def test_a_kernel_that_does_not_compile_is_named_and_its_ops_run_in_eager(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def compile_all(texts: Sequence[Any], *_: Any) -> list[Binary | Failed]:
        softmax = [t for t in texts if "softmax" in t.name]
        return [Failed(t.name, "no registers") if t in softmax else binary(t.name) for t in texts]

    with pytest.warns(UserWarning, match=r"the ops of fused_\w*softmax\w* in eager.*no registers"):
        launched, called = kernels_and_calls(made(monkeypatch, compile_all=compile_all))
    assert len(launched) == 1 and "softmax" not in launched[0]
    assert called == ["aten._softmax.default its kernel does not compile"]


def test_a_shared_launch_that_does_not_compile_leaves_its_other_ops_to_lenz(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched, _ = kernels_and_calls(made(monkeypatch, side_by_side=8))
    assert launched == ["combo_0"]

    def compile_all(texts: Sequence[Any], *_: Any) -> list[Binary | Failed]:
        bad = [t for t in texts if "softmax" in t.name or t.name.startswith("combo")]
        return [Failed(t.name, "no registers") if t in bad else binary(t.name) for t in texts]

    with pytest.warns(UserWarning, match=r"the ops of fused_\w*softmax\w* in eager"):
        c = made(monkeypatch, side_by_side=8, compile_all=compile_all)
    launched, called = kernels_and_calls(c)
    assert len(launched) == 1 and "softmax" not in launched[0]
    assert called == ["aten._softmax.default its kernel does not compile"]


def test_a_kernel_that_the_library_does_not_load_runs_in_eager(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def function(b: Binary, *_: Any) -> Callable[..., None]:
        if "softmax" in b.name:
            raise RuntimeError(f"200000 bytes of shared memory for {b.name}: invalid argument")
        return lambda *_: None

    with pytest.warns(UserWarning, match=r"fused_\w*softmax\w* in eager.*200000 bytes"):
        launched, called = kernels_and_calls(made(monkeypatch, function=function))
    assert len(launched) == 1 and len(called) == 1


def test_a_card_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "Tesla T4")
    with pytest.raises(Missing, match=r"Tesla T4 has a compute capability below 8\.0") as e:
        made(monkeypatch, capability=lambda number: 75)
    assert 'on_error="eager"' in str(e.value)


def test_without_triton_a_graph_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "triton" else find(name, *a)
    )
    compiler.version.cache_clear()
    with pytest.raises(Missing, match="Triton is not installed") as e:
        made(monkeypatch, compile_all=machine.compile_all)  # type: ignore[attr-defined]
    assert "pip install 'lenz[gpu]'" in str(e.value)
    compiler.version.cache_clear()


@pytest.mark.parametrize(
    ("library", "said"),
    [
        (OSError("libcuda.so.1: cannot open shared object file"), "the CUDA driver is missing"),
        (SimpleNamespace(cuModuleLoadData=None), "the CUDA driver is older than 12.0"),
    ],
    ids=("none", "old"),
)
def test_a_driver_that_is_missing_or_old_is_named(
    library: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str) -> Any:
        if isinstance(library, OSError):
            raise library
        return library

    driver.library.cache_clear()
    monkeypatch.setattr(ctypes, "PyDLL", load)
    with pytest.raises(Missing, match=said) as e:
        driver.function(binary("k"), 0, 1, 0)
    assert "install" in str(e.value)
    driver.library.cache_clear()
