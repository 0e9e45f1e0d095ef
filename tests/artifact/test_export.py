"""`lenz.export` and `lenz.load`: another process computes what the module does."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim
from torch.fx import symbolic_trace

import lenz
from lenz import machines
from lenz.artifact import container, export, levels, loaded, show, specs
from lenz.errors import UserError
from lenz.machine.cpu.llvm import compile
from lenz.machines import host, loader_of, machine_of
from tests import children
from tests.arch.source import REPOSITORY

BATCH = Dim("batch", min=3, max=100)


class Tied(nn.Module):
    """An embedding whose table is also the last layer's, in a layout with gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(8, 22).t())
        self.head = nn.Linear(8, 22, bias=False)
        self.head.weight = self.table
        self.register_buffer("scale", torch.full((), 2.0))
        self.scale: Tensor

    def forward(self, ids: Tensor) -> Tensor:
        made: Tensor = self.head(F.embedding(ids, self.table) * self.scale).softmax(-1)
        return made


class Counted(nn.Module):
    """A buffer that each call changes, and results of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(3))
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor, how: dict[str, Any], *, flip: bool = False) -> dict[str, Any]:
        self.get_buffer("calls").add_(1)
        y = self.norm(x) * how["by"] + how["bias"]
        y = y.flip(0) if flip else y
        return {
            "y": y,
            "rows": x.shape[0],
            "none": None,
            "all": (self.get_buffer("calls") * 1, x[0]),
        }


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))


def images() -> nn.Module:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    return net.eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload]


class Sizes(nn.Module):
    """A constant, a size as a number, a view of an argument, and the argument."""

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        return x + torch.tensor([1.0, 2.0]), torch.arange(x.shape[0]) * 2, x.shape[0] * 3, x[1:], x


class Drawn(nn.Module):
    """Random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5) + 1


# Of each program its arguments for a size, and which sizes change.
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Any, ...]], Any]] = {
    "perceptron": (perceptron, lambda n: (torch.randn(n, 6),), ({0: BATCH},)),
    "static": (perceptron, lambda n: (torch.randn(5, 6),), None),
    "tied": (Tied, lambda n: (torch.arange(n * 2).reshape(n, 2) % 22,), ({0: BATCH},)),
    "images": (images, lambda n: (torch.randn(n, 3, 9, 9),), ({0: BATCH},)),
    "sizes": (Sizes, lambda n: (torch.randn(n, 2),), ({0: BATCH},)),
    "counted": (
        lambda: Counted().eval(),
        lambda n: (torch.randn(n, 3), {"by": 3, "bias": torch.randn(3)}),
        ({0: BATCH}, {"by": None, "bias": None}),
    ),
}


def made(name: str, path: Path, **how: Any) -> tuple[nn.Module, Callable[[int], tuple[Any, ...]]]:
    """Export a case; its module and its arguments."""
    torch.manual_seed(0)
    make, args, dynamic = CASES[name]
    module = make()
    lenz.export(module, path, args(7), dynamic_shapes=dynamic, **how)
    return module, args


def same(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want)
    flat = torch.utils._pytree.tree_leaves
    for a, b in zip(flat(got), flat(want), strict=True):
        assert not isinstance(a, Tensor) or a.stride() == b.stride()


@pytest.mark.parametrize("name", CASES)
def test_results_are_the_modules(name: str, tmp_path: Path) -> None:
    path = tmp_path / "m.lenz"
    module, args = made(name, path)
    run = lenz.load(path)
    for n in (7, 4, 100):
        given = args(n)
        with torch.no_grad():
            same(run(*given), module(*given))
    for name, buffer in module.named_buffers():
        same(run.weights[name], buffer)


def test_views_of_arguments_are_views(tmp_path: Path) -> None:
    made("sizes", tmp_path / "m.lenz")
    x = torch.randn(5, 2)
    got = lenz.load(tmp_path / "m.lenz")(x)
    assert got[4] is x and got[3]._base is x


class Scaled(nn.Module):
    def __init__(self, square: bool) -> None:
        super().__init__()
        self.square = square

    def forward(self, x: Tensor, n: int) -> Tensor:
        return x * (n * n if self.square else n)


@pytest.mark.parametrize("square", [False, True])
def test_numbers_beyond_64_bits_are_refused(square: bool, tmp_path: Path) -> None:
    module, most = Scaled(square), 2**31 - 1 if square else 2**63 - 1
    lenz.export(module, tmp_path / "m.lenz", (torch.ones(3), 5), dynamic_shapes=(None, Dim.DYNAMIC))
    run = lenz.load(tmp_path / "m.lenz")
    for n in (7, -9, most, -most):
        same(run(torch.ones(3), n), module(torch.ones(3), n))
    for n in (most + 1, -(2**63) - 1, 2**64 + 5):
        with pytest.raises(RuntimeError, match="might not fit in 64 bits"):
            run(torch.ones(3), n)


class Best(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x.topk(2)


def test_results_with_names(tmp_path: Path) -> None:
    lenz.export(Best(), tmp_path / "m.lenz", (torch.randn(3, 5),))
    x = torch.randn(3, 5)
    got = lenz.load(tmp_path / "m.lenz")(x)
    assert type(got) is torch.return_types.topk
    same(tuple(got), tuple(x.topk(2)))


class Pair(NamedTuple):
    a: Tensor
    b: Tensor


class Paired(nn.Module):
    def forward(self, x: Tensor) -> Pair:
        return Pair(x + 1, x * 2)


def test_structures_without_a_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot hold this structure.*Pair"):
        lenz.export(Paired(), tmp_path / "m.lenz", (torch.ones(2),))
    with pytest.raises(UserError, match="unknown structure"):
        specs.loads('[1, {"type": "a.B", "context": "null", "children_spec": []}]')
    factory = {"default_factory_module": "this", "default_factory_name": "c", "dict_context": []}
    key = json.dumps([{"__enum__": True, "fqn": "this:c", "name": "x"}]).replace("_", "\\u005f")
    for kind, context in (("collections.defaultdict", factory), ("builtins.dict", key)):
        told: Any = {"type": kind, "context": context, "children_spec": []}
        with pytest.raises(UserError, match=r"it needs this[.:]c, which"):
            specs.loads(json.dumps([1, told]))
    assert "this" not in sys.modules, "a module that the text names was imported"


def test_missing_values_of_a_result(tmp_path: Path) -> None:
    class Grouped(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return defaultdict(list, a=[x + 1])

    lenz.export(Grouped(), tmp_path / "m.lenz", (torch.ones(2),))
    got = lenz.load(tmp_path / "m.lenz")(torch.ones(2))
    assert got["missing"] == [] and torch.equal(got["a"][0], torch.full((2,), 2.0))


class Cached(nn.Module):
    """A cache that the caller owns, and a count; both are written, as is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, twice: bool, cache: Tensor, count: Tensor) -> Tensor:
        self.get_buffer("calls").add_(1)
        cache[:, 1:].copy_(cache[:, :-1].clone())
        cache[:, 0] = x * (2 if twice else 1)
        count.add_(1)
        return cache.softmax(1) @ x


def test_arguments_that_are_written(tmp_path: Path) -> None:
    module, path = Cached(), tmp_path / "m.lenz"
    given = torch.randn(4), True, torch.zeros(8, 4).t()[:, :4], torch.zeros((), dtype=torch.int64)
    lenz.export(module, path, given)
    run, mine, theirs = lenz.load(path), [*given], [*given]
    mine[2:], theirs[2:] = ([a.clone() for a in given[2:]] for _ in range(2))
    for _ in range(3):
        x = torch.randn(4)
        same(run(x, *mine[1:]), module(x, *theirs[1:]))
        same(mine[2:], theirs[2:])
    assert int(run.weights["calls"]) == 3
    text = show.summary(container.read(path), plan=False)
    assert "writes    'calls'" in text and "writes    argument 2" in text


def test_a_written_argument_that_overlaps_another_is_refused(tmp_path: Path) -> None:
    class Adding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(4))

        def forward(self, x: Tensor, by: int, y: Tensor) -> Tensor:
            self.get_buffer("calls").add_(by)
            x.add_(by)
            return x * y

    lenz.export(Adding(), tmp_path / "m.lenz", (torch.ones(4), 1, torch.ones(4)))
    run, memory = lenz.load(tmp_path / "m.lenz"), torch.ones(8)
    graph = symbolic_trace(lambda x, y: (x.add_(1) * y,))
    alone = lenz.standalone_compile(graph, [torch.ones(4), torch.ones(4)])
    for x, y in ((memory[:4], memory[:4]), (memory[:4], memory[3:7])):
        with pytest.raises(UserError, match=r"argument [02] and argument [02] share memory"):
            run(x, 1, y)
        with pytest.raises(UserError, match="share memory, and the program writes"):
            alone(x, y)
    for args in ((run.weights["calls"], 1, memory[:4]), (memory[:4], 1, run.weights["calls"])):
        with pytest.raises(UserError, match=r"argument [02] and a weight share memory"):
            run(*args)
    assert torch.equal(memory, torch.ones(8)) and not run.weights["calls"].any()
    assert torch.equal(run(memory[:4], 1, memory[4:]), torch.full((4,), 2.0))


class Branching(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        pairs = x.view(-1, 4).sum(0)  # sizes that are no multiple of 4 are refused
        return pairs * (2 if x.shape[0] < y.shape[0] and y.shape[0] % 3 == 0 else 3)


def test_sizes_that_the_trace_excluded_are_refused(tmp_path: Path) -> None:
    given, auto = (torch.ones(8), torch.ones(9)), {0: Dim.AUTO}
    lenz.export(Branching(), tmp_path / "m.lenz", given, dynamic_shapes=(auto, auto))
    run = lenz.load(tmp_path / "m.lenz")
    for n, m in ((8, 9), (12, 15), (20, 30)):
        same(run(torch.ones(n), torch.ones(m)), torch.full((4,), n / 2))
    for n, m in ((7, 9), (12, 9), (8, 10), (4, 6)):
        with pytest.raises(UserError, match=r"exported for sizes with .*size 0 of argument [01]"):
            run(torch.ones(n), torch.ones(m))


@pytest.mark.parametrize("scale", [1.5, 0.75])
def test_sizes_by_a_float(scale: float, tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.interpolate(x, scale_factor=scale, mode="bilinear")

    auto = {2: Dim.AUTO, 3: Dim.AUTO}
    given = (torch.randn(1, 3, 8, 9),)
    run = lenz.export(Scaled(), tmp_path / "m.lenz", given, dynamic_shapes=(auto,))
    x = torch.randn(1, 3, 13, 10)
    same(run(x), Scaled()(x))


def test_sizes_that_depend_on_each_other(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
            return (x.repeat(2) + y)[1:] + z

    auto = {0: Dim.AUTO}
    given = [torch.ones(n) for n in (4, 8, 7)]
    lenz.export(Twice(), tmp_path / "m.lenz", (*given,), dynamic_shapes=(auto, auto, auto))
    run = lenz.load(tmp_path / "m.lenz")
    same(run(*(torch.ones(n) for n in (5, 10, 9))), torch.full((9,), 3.0))
    for sizes in ((5, 9, 9), (5, 10, 10), (1, 2, 1)):
        with pytest.raises(UserError):
            run(*map(torch.ones, sizes))


def test_constants_are_the_same_to_the_bit(tmp_path: Path) -> None:
    class Filled(nn.Module):
        def forward(self, x: Tensor, by: float) -> Tensor:
            return torch.full((2,), by) + x * 0

    for by, other in ((float("nan"), 1.0), (-0.0, 0.0), (1.0, 1)):
        run = lenz.export(Filled(), tmp_path / "m.lenz", (torch.ones(2), by), levels=("host",))
        got, want = run(torch.ones(2), by), Filled()(torch.ones(2), by)
        torch.testing.assert_close(got, want, equal_nan=True)
        with pytest.raises(UserError, match="when the program was exported"):
            run(torch.ones(2), other)


def test_an_export_needs_no_disk_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LENZ_CACHE", "0")
    module, x = perceptron(), torch.randn(3, 6)
    same(lenz.export(module, tmp_path / "m.lenz", (x,), levels=("host",))(x), module(x))


def test_files_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    run = lenz.export(perceptron(), tmp_path / ("m" * 250), (torch.randn(3, 6),), levels=("host",))
    (tmp_path / "file").touch()
    for path, how in ((tmp_path, "binary"), (tmp_path / "file", "unpacked")):
        with pytest.raises(UserError, match=f"cannot write '{path}': "):
            run.save(path, format=how)  # type: ignore[arg-type]
    assert {p.name for p in tmp_path.iterdir()} == {"m" * 250, "file"}


def test_random_numbers_are_of_the_seed(tmp_path: Path) -> None:
    lenz.export(Drawn(), tmp_path / "m.lenz", (torch.ones(1000),))
    run, found = lenz.load(tmp_path / "m.lenz"), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(run(torch.ones(1000)))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    assert set(found[0].tolist()) == {1.0, 3.0} and 400 < int((found[0] == 1).sum()) < 600


CHILD = """
import sys, torch, lenz
run = lenz.load(sys.argv[1])
given, want = torch.load(sys.argv[2])
torch.testing.assert_close(run(given), want)
folder = sys.argv[1].rpartition("/")[0]
run.save(folder + "/again.lenz")
torch.testing.assert_close(lenz.load(open(folder + "/again.lenz", "rb").read())(given), want)
"""
ABSENT = """
import sys, torch, lenz
lenz.load(sys.argv[1])(torch.load(sys.argv[2])[0])
names = ["torch._dynamo", "torch._functorch.aot_autograd", "sympy", "lenz.api", "lenz.pipeline",
         "lenz.frontend", "lenz.lower", "lenz.opt", "lenz.schedule", "lenz.ops"]
print([n for n in names if n in sys.modules])
"""


def child(text: str, *args: object) -> str:
    command = [sys.executable, "-c", text, *map(str, args)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_another_process_runs_it_and_imports_no_compiler(tmp_path: Path) -> None:
    path, case = tmp_path / "m.lenz", tmp_path / "case"
    module, args = made("perceptron", path)
    (x,) = args(9)
    torch.save((x, module(x).detach()), case)
    done = children.run(["-c", CHILD, str(path), str(case)], cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    assert child(ABSENT, path, case).strip() == "[]"


def test_code_for_other_devices_lies_beside_that_for_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU stands in for a GPU: exporting asks the machine, loading takes the best that runs."""
    path, asked = tmp_path / "m.lenz", list[str]()

    def elsewhere(kernels: Any, what: str, cx: Any) -> Any:
        asked.append(f"{what} {len(kernels)}")
        return f"cpu {what}", {"": (f"for.{what}", b"code of another CPU")}

    with monkeypatch.context() as patch:
        patch.setattr(export, "HOST", "none")
        patch.setattr(export, "machine_of", lambda d: replace(machine_of(d), elsewhere=elsewhere))
        module, args = made("perceptron", path, levels=("host",), compute_capabilities="8.0")
    (x,), run = args(8), lenz.load(path)
    same(run(x), module(x).detach())
    ((_, known),) = run.manifest["variants"][0]["code"].items()
    assert [*known] == ["cpu", "cpu 8.0"] and asked == ["8.0 1"]
    contents = container.read(path)
    assert container.to_bytes(contents.tensors[known["cpu 8.0"][""]]) == b"code of another CPU"
    assert "'cpu 8.0'" not in show.summary(contents, plan=False), "a CPU is no device of its own"
    three = {"b": {"": "no tensor"}, "c": known["cpu"], "d": {"": "no tensor"}}
    contents.manifest["variants"][0]["code"] = {"cpu": three}
    with pytest.raises(UserError, match="this artifact is for b or c or d, and cpu has cpu"):
        loaded.CompiledArtifact(contents)
    loader = replace(loader_of("cpu"), runs=lambda made, here: made <= "c")
    monkeypatch.setitem(machines._HALVES, ("cpu", "loader"), loader)
    same(loaded.CompiledArtifact(contents)(x), module(x).detach())


def test_a_program_without_a_gpu_has_no_compute_capabilities(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="are for programs with kernels on a GPU"):
        made("perceptron", tmp_path / "m.lenz", compute_capabilities=("8.0",))


def test_weights_lie_in_the_file_once(tmp_path: Path) -> None:
    made("tied", tmp_path / "m.lenz")
    run = lenz.load(tmp_path / "m.lenz")
    names = [w["tensor"] for w in run.manifest["call"]["weights"]]
    assert len(names) == 3 and len(set(names)) == 2
    assert run.weights["table"].data_ptr() == run.weights["head.weight"].data_ptr()


@pytest.mark.parametrize("level", ["v2", "v3", "v4"])
def test_a_cpu_runs_the_best_level_that_it_has(
    level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if level not in levels.known() or not compile.features().issuperset(_needs(level)):
        pytest.skip("this CPU has other levels")
    path = tmp_path / "m.lenz"
    module, args = made("perceptron", path)
    with_level = replace(host(), features=lambda: frozenset(_needs(level)))
    monkeypatch.setattr(loaded, "host", lambda: with_level)
    run, (x,) = lenz.load(path), args(8)
    _, found = loaded._fitting(run.manifest)
    (piece,) = found["cpu"]["cpu"].values()
    assert piece.startswith(f"code.{['v4', 'v3', 'v2'].index(level)}.")
    same(run(x), module(x).detach())
    monkeypatch.setattr(loaded, "host", lambda: replace(with_level, features=frozenset))
    with pytest.raises(UserError, match="this CPU lacks cx16"):
        lenz.load(path)


def _needs(level: str) -> tuple[str, ...]:
    return levels.targets([level])[0][1]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_other_arguments_are_refused(tmp_path: Path) -> None:
    made("counted", tmp_path / "m.lenz")
    run = lenz.load(tmp_path / "m.lenz")
    x, how = torch.randn(4, 3), {"by": 3, "bias": torch.randn(3)}
    run(x, how)
    for args, why in [
        ((x, how, x), "the program takes 2 arguments, not 3 arguments$"),
        ((x,), "the program takes 2 arguments, not 1 argument$"),
        ((x, {"by": 3}), r"takes \(\(\*, {'by': \*, 'bias': \*}\), {}\), not \(\(\*, {'by'"),
        ((x[:, :2], how), "size 1 of argument 0 is 2, and the program takes 3"),
        ((torch.randn(101, 3), how), "size 0 of argument 0 is 101, and the program takes 3 to 100"),
        ((x.double(), how), "argument 0 is float64 with 2 dimensions on cpu"),
        ((x[0], how), "argument 0 is float32 with 1 dimensions"),
        ((x, {**how, "by": 4}), "argument 1 is 4, and was 3"),
        ((x, {**how, "bias": 1.0}), "argument 2 is of type float, and was a tensor"),
        ((torch.randn(3, 4).t(), how), "argument 0: expected stride"),
        ((x, {**how, "bias": torch.randn(3)._neg_view()}), "argument 2: expected negative bit"),
        ((x.to_sparse(), how), "argument 0 is sparse, nested or packed"),
        ((x.to_sparse_csr(), how), "argument 0 is sparse, nested or packed"),
    ]:
        with pytest.raises(UserError, match=why):
            run(*args)


def test_keywords_come_in_any_order_and_wrong_ones_are_named(tmp_path: Path) -> None:
    class Keywords(nn.Module):
        def forward(self, x: Tensor, *, by: Tensor, to: Tensor) -> Tensor:
            return x * by + to

    x, by, to = torch.randn(3), torch.randn(3), torch.randn(3)
    run = lenz.export(Keywords(), tmp_path / "m.lenz", (x,), {"by": by, "to": to})
    torch.testing.assert_close(run(x, to=to, by=by), x * by + to)
    with pytest.raises(UserError, match="takes 1 argument and the keywords by, to, not 2 argum"):
        run(x, by, to=to)
    with pytest.raises(UserError, match=r"not 1 argument and the keyword by$"):
        run(x, by=by)
    with pytest.raises(UserError, match="argument 0 is of type tuple, and was a tensor"):
        run((x,), by=by, to=to)


def test_an_inverse_is_checked(tmp_path: Path) -> None:
    class Inverse(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.inv(x) @ x

    lenz.export(Inverse(), tmp_path / "m.lenz", (torch.eye(3) * 2,))
    run = lenz.load(tmp_path / "m.lenz")
    torch.testing.assert_close(run(torch.eye(3) * 3), torch.eye(3))
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        run(torch.zeros(3, 3))


def test_what_no_file_can_hold_is_refused(tmp_path: Path) -> None:
    class Custom(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = torch.ops.lenz_test_export.own(x) + 1
            return made

    @torch.library.custom_op("lenz_test_export::own", mutates_args=())
    def own(x: Tensor) -> Tensor:
        return x.clone()

    own.register_fake(torch.empty_like)
    with pytest.raises(UserError, match=r"cannot call lenz_test_export\.own"):
        lenz.export(Custom(), tmp_path / "m.lenz", (torch.randn(3),))
    assert not (tmp_path / "m.lenz").exists()
    with pytest.raises(UserError, match="unknown level 'v9'"):
        lenz.export(perceptron(), tmp_path / "m.lenz", (torch.randn(3, 6),), levels=("v9",))
    with pytest.raises(UserError, match="unknown level 'hosts'"):
        lenz.export(perceptron(), tmp_path / "m.lenz", (torch.randn(3, 6),), levels="hosts")


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", [torch.complex128, torch.complex32])
def test_a_weight_that_no_file_can_hold_is_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    module = nn.Module()
    module.register_buffer("w", torch.ones(4, dtype=dtype))
    module.forward = lambda x: x * module.w  # type: ignore[method-assign]  # a method of this one
    with pytest.raises(UserError, match=f"cannot hold a tensor of {dtype}"):
        lenz.export(module, tmp_path / "m.lenz", (torch.ones(4),), levels=("host",))


def test_a_missing_folder_is_named_before_anything_is_compiled(tmp_path: Path) -> None:
    class Unused(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise AssertionError("it was traced")

    with pytest.raises(UserError, match=r"there is no folder .*none"):
        lenz.export(Unused(), tmp_path / "none" / "m.lenz", (torch.ones(2),))


def test_a_folder_for_people(tmp_path: Path) -> None:
    made("perceptron", tmp_path / "m.lenz", levels="host")
    run = lenz.load(tmp_path / "m.lenz")
    run.save(tmp_path / "m", format="unpacked")
    assert (
        json.loads((tmp_path / "m" / "manifest.json").read_text())["name"] == run.manifest["name"]
    )
    assert "launch" in (tmp_path / "m" / "plan0.ir").read_text()
    x = torch.randn(3, 6)
    same(lenz.load(tmp_path / "m")(x), run(x))
    with pytest.raises(UserError, match="unknown format"):
        run.save(tmp_path / "m", format="zip")  # type: ignore[arg-type]
