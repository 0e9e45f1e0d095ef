"""Modules of kernels on a GPU: they go with their graphs, and living graphs keep theirs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, randn

import lenz
from lenz.machine.cuda import driver

OPTIONS: dict[str, Any] = {"cache": False}


class Modules:
    """The modules that are loaded, and how many were unloaded."""

    def __init__(self) -> None:
        self.loaded: set[int] = set()
        self.unloaded = 0


@pytest.fixture
def modules(cuda: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Modules]:
    """What this test loads; what others have loaded is unloaded before."""
    torch._dynamo.reset()
    gc.collect()
    driver.unload(torch.cuda.current_device())
    found, load, library = Modules(), driver.load_function, driver.library()
    unload = library.cuModuleUnload

    def loads(code: bytes, name: str) -> tuple[int, int]:
        module, handle = load(code, name)
        found.loaded.add(module)
        return module, handle

    def unloads(module: Any) -> int:
        if module.value in found.loaded:  # else another test's graph has lived until now
            found.loaded.remove(module.value)
            found.unloaded += 1
        return int(unload(module))

    monkeypatch.setattr(driver, "load_function", loads)
    monkeypatch.setattr(library, "cuModuleUnload", unloads)
    yield found
    torch._dynamo.reset()


def function(k: int) -> Callable[[Tensor], Tensor]:
    """A function like no other."""
    made: Callable[[Tensor], Tensor] = eval(f"lambda x: (x * {k + 1}.5).sin().sum(-1) * {k + 2}.25")
    return made


def kept(k: int, x: Tensor, **options: Any) -> Callable[[Tensor], Any]:
    """A function whose code outlives a reset of Dynamo."""
    found: list[Callable[..., Any]] = []

    def backend(gm: torch.fx.GraphModule, args: list[Any]) -> Callable[..., Any]:
        found.append(lenz.backend(gm, args, options={**OPTIONS, **options}))
        return found[0]

    torch.compile(function(k), backend=backend, dynamic=False)(x)
    return lambda x: found[0](x)[0]


def close(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)


def dropped(*made: Callable[..., Any]) -> None:
    """Drop all compiled functions; the load of another unloads their modules."""
    torch._dynamo.reset()
    gc.collect()


def test_modules_of_60_graphs_go_with_them(modules: Modules) -> None:
    x = randn(64, 128, device="cuda")
    living = {k: kept(k, x) for k in (1000, 1001)}
    living[1002] = kept(1002, x, cuda_graphs="on")
    most = 0
    for k in range(60):
        run = torch.compile(function(k), backend="lenz", dynamic=False, options=OPTIONS)
        close(run(x), function(k)(x))
        most = max(most, len(modules.loaded))
        if k % 10 == 9:
            del run
            dropped()
        if k % 15 == 0:
            for n, call in living.items():
                close(call(x), function(n)(x))
    assert modules.unloaded >= 45, "modules of dropped graphs stay"
    assert most <= 20, f"{most} modules were loaded at once, by 13 living graphs"
    for n, call in living.items():
        close(call(x), function(n)(x))


@pytest.mark.parametrize("native", (True, False))
def test_a_captured_kernel_outlives_its_graph(modules: Modules, native: bool) -> None:
    """The user's CUDA graph holds the kernel, which lenz cannot know of later."""
    x = randn(64, 128, device="cuda")
    options = {**OPTIONS, "native": native}
    run = torch.compile(function(2000), backend="lenz", dynamic=False, options=options)
    run(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run(x)
    del run
    dropped()
    others = [kept(2001 + k, x) for k in range(3)]
    for _ in range(3):
        x.copy_(randn(64, 128, device="cuda"))
        graph.replay()
        close(y, function(2000)(x))
    del others


def test_queued_work_of_a_dropped_graph_is_done(modules: Modules) -> None:
    """The module goes while its kernel waits in a stream behind much other work."""
    x, w = randn(64, 128, device="cuda"), randn(4096, 4096, device="cuda")
    last = kept(3001, x)
    for k in range(3002, 3006):
        run = torch.compile(function(k), backend="lenz", dynamic=False, options=OPTIONS)
        run(x)
        before = modules.unloaded
        for _ in range(50):
            w = (w @ w).clamp(-1, 1)
        y = run(x + 0 * w[0, 0])
        del run
        dropped()
        other = kept(k + 1000, x)
        assert modules.unloaded > before
        close(y, function(k)(x))
        close(other(x), function(k + 1000)(x))
    close(last(x), function(3001)(x))
