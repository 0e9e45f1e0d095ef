"""Statistics by chunks: right for any shape and layout, as exact as eager, and read once."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lenz.ir.dtype import BF16, F32, F64, DType
from lenz.ir.expr import loads_of
from lenz.ir.graph import Graph, Ref
from lenz.ir.interp import interp
from lenz.ir.kernel import For, Kernel, Store, exprs_of, walk
from lenz.ir.printer import show
from lenz.ir.tensor import Layout, TensorType
from lenz.ir.verify import verify
from lenz.lower import lower, moments
from lenz.lower.builder import GraphBuilder, Value
from lenz.lower.dims import cut
from lenz.lower.moments import Chunks, Sets, chunks_of
from lenz.lower.norm import group_of
from lenz.machines import capabilities_of
from lenz.sym import Int
from tests.cuda import CX, Fake, fake_cuda, programs_of
from tests.gpu_oracle import assert_triton, cubins, kernels_of, scheduled

LAST = torch.channels_last


def graph_of(x: Tensor, reduced: tuple[int, ...], device: str = "cuda:0") -> Graph:
    """Mean and squares over some dimensions of x, as a norm lowers them."""
    b = GraphBuilder()
    names: dict[torch.dtype, DType] = {torch.float32: F32, torch.float64: F64, torch.bfloat16: BF16}
    layout = Layout(tuple(map(Int, x.shape)), tuple(map(Int, x.stride())))
    source = Value(b.define("x", TensorType(names[x.dtype], device, layout)))
    s = cut(source.shape, reduced)
    sets = Sets(source, s.rows, s.over, s.join)
    kind = b.temp(s.rows, sets.dtype, source)
    found = moments.moments(b, sets, (kind, kind), lambda a: a, "squares")
    outputs = tuple(Ref(v.name) for v in found)
    g = Graph("moments", (source.buffer,), tuple(b.nodes), outputs)
    verify(g)
    return g


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits so low that tensors of some hundred elements are cut, in every possible way."""
    for name, value in {
        "ROWS": (1, 2), "COLUMNS": (1, 2), "SHORT": 4, "TALL": 4, "RUN": 2, "ALIGNED": 2,
    }.items():  # fmt: skip
        monkeypatch.setattr(moments, name, value)
    card = replace(capabilities_of("cuda"), held=32, launch=8, chunk=8, panel=4, programs=8)
    monkeypatch.setattr(moments, "capabilities_of", lambda device: card)


@pytest.mark.usefixtures("tiny")
def test_any_shape_and_layout() -> None:
    """Every element is in one chunk, also behind the end of a cut that leaves a rest."""
    pick = random.Random(0)
    cut = rest = 0
    for _ in range(150):
        shape = [pick.choice((1, 2, 3, 5, 7, 12)) for _ in range(pick.randint(2, 4))]
        order = pick.sample(range(len(shape)), len(shape))
        reduced = tuple(d for d in range(len(shape)) if pick.random() < 0.6) or (0,)
        dtype = pick.choice((torch.float32, torch.float64))
        strided = torch.randn([shape[d] for d in order], dtype=dtype)
        x = strided.permute([order.index(d) for d in range(len(shape))])
        g = graph_of(x, reduced)
        mean, squares = interp(g, [x]).outputs
        text = f"{shape} in memory as {order}, over {reduced}\n{show(g)}"
        wide = x.double()
        want = wide.mean(reduced, keepdim=True)
        sums = (wide - want).square().sum(reduced)
        torch.testing.assert_close(mean.double(), want.squeeze(reduced), msg=lambda m: m + text)
        torch.testing.assert_close(squares.double(), sums, rtol=1e-5, atol=1e-5, msg=text)
        cut += "chunk_sum" in text
        rest += "masked" in text
    assert cut > 50 and rest > 5, f"only {cut} were cut, {rest} with a rest"


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_of_chunks(dtype: torch.dtype) -> None:
    """The Triton text of all forms: rows, columns, rests, a copy that is read through."""
    for shape, reduced in (
        ((6, 3, 20), (0, 2)),
        ((23, 6), (0,)),
        ((3, 50), (1,)),
        ((4, 5, 9), (1, 2)),
    ):
        s = assert_triton(graph_of(torch.empty(shape, dtype=dtype), reduced))
        assert len(kernels_of(s)) == 2, show(s)
    last = torch.empty((4, 6, 4, 5), dtype=dtype).to(memory_format=LAST)
    assert_triton(graph_of(last, (0, 2, 3)))


def test_only_known_sizes_on_gpus_are_cut() -> None:
    x = torch.empty((64, 64, 56, 56), device="meta")
    assert "chunk_sum" in show(graph_of(x, (0, 2, 3)))
    assert "chunk_sum" not in show(graph_of(x, (0, 2, 3), "cpu"))
    g = _lowered(lambda x: functional.batch_norm(x, None, None, training=True), x, dynamic=True)
    assert "chunk_sum" not in show(g) and "total_sq" in show(g)


def chunks(x: Tensor, groups: int = 0) -> Chunks | None:
    """How batch norm, or group norm, cuts an input of this shape and layout."""
    b = GraphBuilder()
    layout = Layout(tuple(map(Int, x.shape)), tuple(map(Int, x.stride())))
    v = Value(b.define("x", TensorType(BF16, "cuda:0", layout)))
    if groups:
        g = group_of(v.shape, x.shape[1], groups)
        assert g is not None
        return chunks_of(b, Sets(v, g.rows, g.over, g.join))
    s = cut(v.shape, tuple(d for d in range(x.dim()) if d != 1))
    return chunks_of(b, Sets(v, s.rows, s.over, s.join))


def test_chunks_of_layers() -> None:
    """Tiles fit the registers, programs fill a GPU, and the sums are small beside x."""
    for shape in ((64, 64, 112, 112), (64, 256, 56, 56), (64, 512, 28, 28), (16, 3, 224, 224),
                  (1, 64, 512, 512), (16, 32, 200, 300), (65536, 256), (1000003, 8)):  # fmt: skip
        x = torch.empty(shape, device="meta")
        for last in (False, True):
            if last:
                if len(shape) < 4:
                    continue
                x = x.to(memory_format=LAST)
            c = chunks(x)
            assert c is not None, f"{shape} is not cut"
            k = math.prod(c.size)
            sums = math.prod(n.value for n in c.places if isinstance(n, Int))
            columns = last or len(shape) == 2
            assert k * (min(64, shape[1]) if columns else 1) <= 16384, f"{shape}: chunks of {k}"
            assert sums // (64 if columns else 1) >= 512 or shape[1] < 16, f"{shape}: {sums} sums"
            assert 16 * sums <= 0.05 * 2 * x.numel(), f"{shape}: {sums} sums beside {x.numel()}"
    for shape in ((64, 2048, 7, 7), (64, 1024, 14, 14), (8, 64, 8, 8), (256, 4096)):
        assert chunks(torch.empty(shape, device="meta")) is None, f"one program holds all: {shape}"


def test_groups_of_channels_last_are_columns() -> None:
    """Ten channels of a group are too short a run: chunks are those of channels."""
    x = torch.empty((32, 320, 64, 64), device="meta").to(memory_format=LAST)
    c = chunks(x, 32)
    assert c is not None and [str(n) for n in c.places] == ["32", "16", "32", "10"]
    assert c.size == (1, 4, 64)
    assert chunks(torch.empty((32, 256, 64, 64), device="meta"), 32) is None


def _lowered(fn: Callable[..., Any], x: Tensor, *args: Fake, dynamic: bool = False) -> Graph:
    """The graph of fn for a CUDA tensor like x and other arguments."""
    with fake_cuda():
        like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
        (p,) = programs_of(fn, like, *[a.make() for a in args], dynamic=dynamic or None)
    g = lower(p, CX)
    verify(g)
    return g


def batch_norm(x: Tensor) -> Tensor:
    return functional.batch_norm(x, None, None, training=True)


NORMS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...], bool]] = {
    "batch": (batch_norm, (16, 8, 64, 64), False),
    "batch channels last": (batch_norm, (16, 16, 48, 48), True),
    "batch 1d": (batch_norm, (8192, 64), False),
    "group": (lambda x: functional.group_norm(x, 2), (2, 8, 160, 128), False),
    "instance": (functional.instance_norm, (2, 2, 300, 300), False),
    "layer": (lambda x: functional.layer_norm(x, x.shape[1:]), (4, 100000), False),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_far_from_zero(name: str, dtype: torch.dtype) -> None:
    """Of numbers with mean 1000 and deviation 1 the error is at most that of eager, or 1 ulp."""
    fn, shape, last = NORMS[name]
    torch.manual_seed(0)
    x = (torch.randn(shape) + 1e3).to(dtype)
    if last:
        x = x.to(memory_format=LAST)
    g = _lowered(fn, x)
    assert "chunk_sum" in show(g)
    want = fn(x.double())
    error = (interp(g, [x]).outputs[0].double() - want).abs().max()
    eager = (fn(x).double() - want).abs().max()
    ulp = 2.0**-14 if dtype is torch.float32 else 2.0**-6  # of the mean, of a result near 4
    assert error <= max(eager, ulp), f"error {error:.3g}, eager has {eager:.3g}"


def reads(k: Kernel, elements: int) -> bool:
    """True when a kernel reads a parameter of so many elements."""
    read = {e.attrs[0] for e in loads_of(*exprs_of(k.body))}
    return any(p.size is Int(elements) and p.name in read for p in k.params)


def loops(k: Kernel) -> list[str]:
    return [s.axis.name for s in walk(k.body) if isinstance(s, For) and s.kind == "seq"]


def train(x: Tensor, m: Tensor, v: Tensor, w: Tensor, c: Tensor) -> Tensor:
    return functional.relu(functional.batch_norm(x, m, v, w, c, training=True))


@pytest.mark.parametrize(
    ("shape", "last"),
    [((64, 256, 56, 56), False), ((64, 256, 56, 56), True), ((64, 64, 112, 112), True)],
    ids=str,
)
def test_batch_norm_reads_its_input_twice(shape: tuple[int, ...], last: bool) -> None:
    """Chunks, their sums with the running statistics, and the result.

    A chunk stays in registers; in channels last it comes from the cache the second time (0021).
    """
    x = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    if last:
        x = x.to(memory_format=LAST)
    s = scheduled(_lowered(train, x, *[Fake((shape[1],), torch.float32)] * 4))
    first, second, third = kernels_of(s)
    assert [reads(k, x.numel()) for k in (first, second, third)] == [True, False, True], show(s)
    assert bool(loops(first)) is last, f"where a chunk is read again:\n{show(s)}"
    assert not loops(third), show(s)
    stored = [y.buffer for y in walk(second.body) if isinstance(y, Store)]
    assert len(stored) == 4, f"mean, invstd and the running statistics:\n{show(s)}"
    for made in cubins(s)[::2]:
        assert made.spills == 0, f"{made.name} takes {made.registers} registers"


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("keep", (False, True))
@pytest.mark.parametrize("dim", (None, 0, 1, (0, 2)))
def test_variances_of_long_rows_are_read_once(dim: Any, keep: bool) -> None:
    x = torch.randn(6, 20, 30, dtype=torch.float64) + 100
    for fn in (torch.std, torch.var, torch.var_mean):
        g = _lowered(lambda x, fn=fn: fn(x, dim=dim, keepdim=keep, correction=2), x)
        assert "chunk_sum" in show(g), show(g)
        want = fn(x, dim=dim, keepdim=keep, correction=2)
        torch.testing.assert_close(
            interp(g, [x]).outputs, want if fn is torch.var_mean else (want,)
        )
