"""Graphs out of the disk cache: found by all that they depend on, and right when they are found."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, randn

import lenz
from lenz import keys, pipeline, recall
from lenz.frontend import FxProgram
from lenz.ir import op
from lenz.lower import registry
from lenz.machine.cuda import driver, loader
from lenz.options import Options
from lenz.runtime.store import store_at
from tests import children
from tests.arch.source import REPOSITORY
from tests.cuda import cuda_program
from tests.frontend.test_identity import programs, scaled

Compiled = Callable[..., Any]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A cache of its own.  The sources count as unchanged, though somebody may be at work there."""
    monkeypatch.setattr(keys, "sources", lambda again=False: "one version")
    yield str(tmp_path / "cache")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of the programs that were compiled, and not recalled."""
    kinds: list[str] = []
    before = pipeline.compile_program

    def counted(program: FxProgram, *rest: Any) -> Any:
        kinds.append(program.kind)
        return before(program, *rest)

    monkeypatch.setattr(pipeline, "compile_program", counted)
    return kinds


def call(fn: Compiled, *args: Any, dynamic: bool | None = False, **options: Any) -> Any:
    """The result of a first call, as another process would make it."""
    torch._dynamo.reset()
    return torch.compile(fn, backend="lenz", dynamic=dynamic, options=options)(*args)


def test_a_graph_is_compiled_once(folder: str, compiled: list[str]) -> None:
    x, y = randn(4, 6), randn(4, 6)
    for n in range(3):
        torch.testing.assert_close(call(scaled, x, y, cache_dir=folder), scaled(x, y))
        assert len(compiled) == 1, f"call {n} compiled again"


def test_both_halves_of_a_training_step(folder: str, compiled: list[str]) -> None:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
    x = randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    grads = []
    for backend in ("eager", "lenz", "lenz"):
        layer.zero_grad()
        if backend == "eager":
            layer(x).square().sum().backward()
        else:
            call(layer, x, cache_dir=folder).square().sum().backward()
        grads.append([p.grad.clone() for p in layer.parameters() if p.grad is not None])
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(grads[2], grads[1], rtol=0, atol=0)
    assert sorted(compiled) == ["backward", "forward"]


def test_a_graph_for_all_sizes(folder: str, compiled: list[str]) -> None:
    for rows in (4, 4):
        torch._dynamo.reset()
        run = torch.compile(scaled, backend="lenz", dynamic=True, options={"cache_dir": folder})
        for more in (0, 3, 40):
            x, y = randn(rows + more, 6), randn(rows + more, 6)
            torch.testing.assert_close(run(x, y), scaled(x, y))
    assert len(compiled) == 1


def test_constants_are_those_of_the_program(folder: str, compiled: list[str]) -> None:
    def made(value: float) -> Compiled:
        return lambda x: (x + torch.tensor([value, 2 * value, -value]), x.flip(0) @ torch.eye(3))

    x = randn(3, 3)
    for value in (1.5, 2.5, 3.5):
        torch.testing.assert_close(call(made(value), x, cache_dir=folder), made(value)(x))
    assert len(compiled) == 1


def test_writes_random_numbers_and_views(folder: str, compiled: list[str]) -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x.mul_(2)
        return F.dropout(y, 0.5), x[1:], y.topk(2).values

    results = []
    for _ in range(2):
        torch.manual_seed(3)
        x, y = torch.ones(4, 5), torch.arange(20.0).view(4, 5)
        a, b, c = call(fn, x, y, cache_dir=folder)
        assert b.data_ptr() == x[1:].data_ptr() and bool((x == 2).all())
        results.append((a, b.clone(), c))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    assert len(compiled) == 1


def entries(folder: str) -> dict[str, list[Path]]:
    """The files of a cache by their kind."""
    found: dict[str, list[Path]] = {}
    for path in sorted(Path(folder).rglob("*.*")):
        found.setdefault(path.suffix[1:], []).append(path)
    return found


@pytest.mark.parametrize("what", ["graph", "object"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "gone"])
def test_a_damaged_entry_is_compiled_again(
    folder: str, compiled: list[str], what: str, damage: str
) -> None:
    x, y = randn(4, 6), randn(4, 6)
    call(scaled, x, y, cache_dir=folder)
    (path,) = entries(folder)[what]
    data = path.read_bytes()
    if damage == "gone":
        os.unlink(path)
    else:
        middle = len(data) // 2
        path.write_bytes(
            data[:middle] if damage == "cut" else data[:middle] + b"~~" + data[middle + 2 :]
        )
    for _ in range(2):
        torch.testing.assert_close(call(scaled, x, y, cache_dir=folder), scaled(x, y))
    assert len(compiled) == 2, "it is compiled once more, and then found again"


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"text": 1}', b"\xff", b"null"])
def test_an_entry_of_another_kind_is_a_miss(folder: str, data: bytes) -> None:
    (p,) = programs(scaled, randn(4, 6), randn(4, 6))
    cx = recall.context(Options(cache_dir=folder))
    key = keys.key_of(p, cx)
    assert key is not None
    store_at(folder).put("graph", key, data)
    assert recall.recall(p, cx, key, pipeline.run_of) is None


BYPASSED: dict[str, dict[str, Any]] = {
    "no cache": {"cache": False},
    "verify": {"verify": True},
    "fuel": {"fuel": 1000},
    "groups of launches": {"launch_groups": ["builtins:list"]},
    "a log of a stage": {"logs": "ir"},
    "a debug folder": {"debug": True},
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("why", BYPASSED)
def test_what_watches_the_compiler_compiles(
    folder: str, compiled: list[str], why: str, tmp_path: Path
) -> None:
    options = {**BYPASSED[why], "cache_dir": folder, "debug_dir": str(tmp_path / "debug")}
    x, y = randn(4, 6), randn(4, 6)
    call(scaled, x, y, cache_dir=folder)
    torch.testing.assert_close(call(scaled, x, y, **options), scaled(x, y))
    assert len(compiled) == 2


def test_a_report_tells_of_a_graph_that_is_in_the_cache(folder: str, compiled: list[str]) -> None:
    x, y = randn(4, 6), randn(4, 6)
    reports = []
    for _ in range(2):
        torch.compiler.reset()  # numbers of graphs begin again
        reports.append(lenz.explain(scaled, options={"cache_dir": folder})(x, y))
    assert len(compiled) == 2
    first, second = (r.graphs[0] for r in reports)
    assert first.source == second.source and len(second.kernels) == 1


def test_a_key_tells_options_target_and_versions(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (p,) = programs(scaled, randn(4, 6), randn(4, 6))
    options = Options(cache_dir=folder)
    cx = recall.context(options)
    found = {"": keys.key_of(p, cx)}
    changed = {
        "fuse": False, "fuse_reductions": False, "inline": False, "horizontal": False,
        "reuse_buffers": False, "emulate_rounding": True, "eager_random": True,
        "aligned": False, "size_facts": False, "autotune": True, "passes": (("m:f", ()),),
        "memory_budget": 0.5, "cuda_graphs": "on", "side_by_side": 1, "save_as": "float8_e5m2",
    }  # fmt: skip
    for name, value in changed.items():
        found[name] = keys.key_of(p, recall.context(replace(options, **{name: value})))  # type: ignore[arg-type]
    for name in ("triple", "cpu", "features", "version"):
        found[name] = keys.key_of(p, replace(cx, target=replace(cx.target, **{name: "other"})))  # type: ignore[arg-type]
    found["lanes"] = keys.key_of(p, replace(cx, target=replace(cx.target, lanes=3)))
    torch.set_default_dtype(torch.float64)
    try:
        found["default type"] = keys.key_of(p, cx)
    finally:
        torch.set_default_dtype(torch.float32)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "0.0")
        found["torch"] = keys.key_of(p, cx)
    with monkeypatch.context() as patch:
        patch.setattr(keys, "sources", lambda again=False: "another version")
        found["lenz"] = keys.key_of(p, cx)
    assert None not in found.values()
    assert len(set(found.values())) == len(found), found
    assert keys.key_of(p, recall.context(replace(options, logs=("time",)))) == found[""]


def test_every_option_that_changes_code_is_in_the_key() -> None:
    keyed = {w.split("=")[0] for w in Options().key().split()}
    told = {"fuel", "launch_groups"}  # with these there is no key
    assert keyed - told == {
        "fuse", "fuse_reductions", "inline", "horizontal", "reuse_buffers", "emulate_rounding",
        "eager_random", "aligned", "size_facts", "autotune", "passes", "memory_budget",
        "cuda_graphs", "side_by_side", "save_as",
    }, "test_a_key_tells_options_target_and_versions does not try all of them"  # fmt: skip


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A folder of Python files which are old."""
    for name in ("a.py", "b/c.py", "d.py"):
        (tmp_path / "tree" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "tree" / name).write_text("x = 1\n")
        os.utime(tmp_path / "tree" / name, (1000, 1000))
    return tmp_path / "tree"


def swapped(tree: Path, other: Path) -> None:
    tree.rename(tree.with_name("before"))
    other.rename(tree)


# What others do to an installed package while a process runs: with kept times, all of them.
REPLACED: dict[str, Callable[[Path, Path], object]] = {
    "written": lambda tree, other: (tree / "b/c.py").write_text("x = 2\n"),
    "rsync -a": lambda tree, other: os.replace(other / "b/c.py", tree / "b/c.py"),
    "cp -p": lambda tree, other: shutil.copy2(other / "b/c.py", tree / "b/c.py"),
    "hard link": lambda tree, other: (
        (tree / "b/c.py").unlink(),
        os.link(other / "b/c.py", tree / "b/c.py"),
    ),
    "another folder": swapped,
    "a file more": lambda tree, other: shutil.copy2(other / "b/c.py", tree / "e.py"),
    "a file less": lambda tree, other: (tree / "d.py").unlink(),
}


@pytest.mark.parametrize("how", REPLACED)
def test_files_that_are_replaced_while_a_process_runs_are_no_key(tree: Path, how: str) -> None:
    """Sizes and times of contents stay."""
    own = keys.Sources(str(tree), time.time() + 1)
    first = own.digest()
    assert first != "" and own.digest(again=True) == first
    other = tree.with_name("other")
    shutil.copytree(tree, other)
    (other / "b/c.py").write_text("x = 2\n")
    os.utime(other / "b/c.py", (1000, 1000))
    REPLACED[how](tree, other)
    assert own.digest() == first, "what is loaded is of the files before"
    assert own.digest(again=True) == own.digest() == ""
    assert keys.Sources(str(tree), time.time() + 1).digest() not in ("", first)


def test_a_file_that_changed_while_lenz_was_imported_is_no_key(tree: Path) -> None:
    since = time.time() - 60
    assert keys.Sources(str(tree), since).digest() == "", "made after that, with an older time"


def test_files_of_the_future_are_kept(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock was set back after lenz was installed: its cache works all the same."""
    now = time.time()
    monkeypatch.setattr("lenz.keys.time.time", lambda: now - 3600)
    own = keys.Sources(str(tree), now - 3660)
    assert own.digest() != ""
    (tree / "a.py").write_text("x = 2\n")
    assert own.digest(again=True) == "", "a change is seen as ever"


def test_a_change_that_leaves_the_text_is_none(tree: Path) -> None:
    own = keys.Sources(str(tree), time.time() + 1)
    first = own.digest()
    os.link(tree / "a.py", tree.with_name("link"))
    (tree / "b/c.py").chmod(0o600)
    assert own.digest(again=True) == first
    (tree / "a.py").write_text("x = 2\n")
    assert own.digest(again=True) == ""


def test_nothing_is_kept_once_files_have_changed(
    tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = keys.Sources(str(tree), time.time() + 1)
    monkeypatch.setattr(keys, "OWN", own)
    keys._say_changed.cache_clear()
    (p,) = programs(scaled, randn(4, 6), randn(4, 6))
    cx = recall.context(Options(cache_dir=str(tmp_path / "cache")))
    key = keys.key_of(p, cx)
    assert key is not None
    (tree / "a.py").write_text("x = 2\n")
    with pytest.warns(RuntimeWarning, match="files have changed") as said:
        pipeline.compile_program(p, cx, key)
        assert keys.key_of(p, cx) is None
    assert len(said) == 1
    assert not list((tmp_path / "cache").rglob("*.graph"))


def test_lowerings_of_others_are_no_part_of_a_key(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (p,) = programs(scaled, randn(4, 6), randn(4, 6))
    cx = recall.context(Options(cache_dir=folder))
    assert keys.key_of(p, cx) is not None
    entry = registry.Entry(lambda b, x: x)
    with monkeypatch.context() as patch:
        patch.setitem(registry._BY_OVERLOAD, "mine.default", entry)
        assert keys.key_of(p, cx) is None
    assert keys.key_of(p, cx) is not None
    monkeypatch.setitem(op._OPS, "mine", op.CONST)
    assert keys.key_of(p, cx) is None


def test_names_of_ops_come_from_the_store_where_no_lowering_is_imported(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_at(folder)
    real = keys.native_names(store)
    assert "aten.gelu" in real and store.get("native", "one version") is None, "ops may be added"
    monkeypatch.delitem(sys.modules, "lenz.lower")
    assert keys.native_names(store) == real
    store.put("native", "one version", b"aten.mine")
    monkeypatch.delitem(sys.modules, "lenz.lower")  # it was imported to fill the store
    assert keys.native_names(store) == {"aten.mine"}
    with monkeypatch.context() as patch:
        patch.setitem(op._OPS, "mine", op.CONST)
        assert keys.native_names(store) == real, "it may be an op of aten"
    monkeypatch.undo()
    assert keys.native_names(store) == real, "an op of the user's would be missed"


@pytest.mark.parametrize("first", ["", "import lenz.ops", "import lenz.lower"])
def test_ops_of_others_are_no_part_of_a_key_whenever_they_come(first: str) -> None:
    code = f"""
{first}
from lenz import keys
from lenz.ir.op import Op
assert not keys.is_extended()
Op("mine", 1, lambda types, attrs: types[0])
assert keys.is_extended()
import lenz.lower
assert keys.is_extended()
"""
    done = children.run(["-c", code], cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr


class OneGpu:
    """A GPU that takes binaries and runs nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loaded: list[tuple[Any, ...]] = []
        monkeypatch.setattr(driver, "capability", lambda number: 90)
        monkeypatch.setattr(driver, "function", self.function)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "a GPU")

    def function(self, *what: Any) -> Callable[..., None]:
        self.loaded.append(what)
        return lambda *args: None


def test_gpu_kernels_are_loaded_as_they_were(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = OneGpu(monkeypatch)
    p = cuda_program(lambda x: (torch.softmax(x, -1), x.t() + 1), (16, 200))
    cx = recall.context(Options(cache_dir=folder))
    key = keys.key_of(p, cx)
    assert key is not None
    made = pipeline.compile_program(p, cx, key)
    first, gpu.loaded = gpu.loaded, []
    assert len(first) == len(made.code.files) > 0
    run: Any = recall.recall(p, cx, key, pipeline.run_of)
    assert run is not None and gpu.loaded == first
    assert run.strides == made.strides
    names = set(made.code.functions)
    assert names <= set(run.__globals__) and None not in [run.__globals__[n] for n in names]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "another GPU")
    assert keys.key_of(p, cx) != key
    for path in entries(folder)["cubin"][:1]:
        os.unlink(path)
    assert recall.recall(p, cx, key, pipeline.run_of) is None


def test_machine_code_of_gpus_needs_a_compute_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that loads an artifact may have no Triton, and a GPU with another name."""
    OneGpu(monkeypatch)
    monkeypatch.setattr(loader, "version", lambda: pytest.fail("Triton is asked for its version"))
    assert loader.LOADER.fits("cuda:1") == "compute capability 9.0"


def test_an_entry_has_no_line_of_the_users_source(folder: str) -> None:
    (p,) = programs(scaled, randn(4, 6), randn(4, 6))
    made = pipeline.compile_program(p, recall.context(Options(cache_dir=folder)))
    assert __file__.rpartition("/")[0] not in json.dumps(made.entry.plan)
    assert "test_identity.py" in made.told and "test_identity.py" not in made.entry.plan
