"""Products with ragged sizes: what is padded, what is copied, and when neither pays."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lenz
from lenz.ir.graph import Extern, Graph, Pointwise, buffers_of
from lenz.ir.reader import read
from lenz.ir.tensor import Buffer
from lenz.ir.verify import verify
from lenz.machines import capabilities_of
from lenz.opt.pad_matmul import pad_matmul
from lenz.target import Capabilities
from tests.e2e.sides import gradients_agree
from tests.gpu_oracle import assert_function, gpu_context, kinds_of
from tests.oracle import assert_same

module = importlib.import_module("lenz.opt.pad_matmul")  # the package names the function so
BF16 = torch.bfloat16


@pytest.fixture
def eager_to_pad(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine where copies are free, so that products of any size are padded."""

    def free(device: str) -> Capabilities:
        return replace(capabilities_of(device), bandwidth=1e30, start=0.0)

    monkeypatch.setattr(module, "capabilities_of", free)
    monkeypatch.setattr(module, "LEAST", 1)


def padded(body: str, device: str = "cuda:0") -> Graph:
    """The graph with those lines after the pass, which must keep what it computes."""
    g = read(f"graph @g() on {device} {{\n{body}\n}}")
    assert isinstance(g, Graph)
    after = pad_matmul(g, gpu_context())
    verify(after)
    if after is not g:
        assert_same(g, after)
    return after


def maps(g: Graph) -> dict[str, tuple[int, ...]]:
    return {n.out.name: shape_of(n.out) for n in g.nodes if isinstance(n, Pointwise)}


def calls(g: Graph) -> list[tuple[int, ...]]:
    """Shapes of the results of the calls."""
    return [shape_of(o) for n in g.nodes if isinstance(n, Extern) for o in n.outs]


def shape_of(b: Any) -> tuple[int, ...]:
    assert isinstance(b, Buffer)
    return tuple(int(str(s)) for s in b.shape)


WEIGHT = """in %x : bf16[16, 8]
in %w : bf16[13, 8]
%t = bf16[8, 13 : 1, 8] : view (i: 8, j: 13) %w[j, i]
"""


@pytest.mark.usefixtures("eager_to_pad")
def test_one_copy_of_a_weight_serves_all_products() -> None:
    g = padded(f"""{WEIGHT}
        %y = bf16[16, 13] : call aten.mm.default(%x, %t)
        %z = bf16[16, 13] : call aten.mm.default(%x, %t)
        out %s = f32[16, 13] : map (i: 16, j: 13) {{ cast(load(%y, [i, j]), f32) }}
        out %u = f32[16, 13] : map (i: 16, j: 13) {{ cast(load(%z, [i, j]), f32) }}""")
    assert list(maps(g)) == ["t.pad", "s", "u"] and calls(g) == [(16, 16)] * 2


@pytest.mark.usefixtures("eager_to_pad")
def test_a_result_of_the_graph_keeps_its_strides_unless_it_is_free() -> None:
    product = f"{WEIGHT}\n%y = bf16[16, 13] : call aten.mm.default(%x, %t)\n"
    assert "y" in maps(padded(product + "return (%y)"))
    row, column = (
        f"%v = bf16[{n} : {s}] : view (i: {n}) %y[{at}]\nreturn (%v)"
        for n, s, at in ((13, 1, "0, i"), (16, 13, "i, 0"))
    )
    assert "y" in maps(padded(product + column)) and "y" not in maps(padded(product + row))
    later = "%v = bf16[13 : 1 @ 13] : view (i: 13) %y[1, i]\nreturn (%v)"
    assert "y" in maps(padded(product + later)), "the offset counts as well"
    assert "y" in maps(
        padded(product + "%c = bf16[16, 13] : call aten.sin.default(%y)\nreturn (%c)")
    )
    free = padded(product + "free (%y)\nreturn (%y)")
    assert "y" not in maps(free)
    assert str(buffers_of(free)["y"].type.layout.stride[0]) == "16"
    # A view of all elements in a row would be none of padded memory.
    flat = "%v = bf16[208] : view (i: 208) %y[i // 13, i % 13]\nfree (%v)\nreturn (%v)"
    assert "y" in maps(padded(product + flat))


@pytest.mark.usefixtures("eager_to_pad")
def test_rows_that_are_padded_leave_no_trace_in_strides() -> None:
    g = padded("""in %x : bf16[16, 13]
        in %w : bf16[16, 8]
        %t = bf16[13, 16 : 1, 13] : view (i: 13, j: 16) %x[j, i]
        %y = bf16[13, 8] : call aten.mm.default(%t, %w)
        return (%y)""")
    assert calls(g) == [(16, 8)] and list(maps(g)) == ["t.pad"]


@pytest.mark.usefixtures("eager_to_pad")
def test_addends_are_padded_as_the_result_is() -> None:
    inputs = "in %x : bf16[2, 5, 6]\nin %w : bf16[2, 6, 7]\nin %b : bf16[2, 5, 7]\n"
    g = padded(f"{inputs}out %y = bf16[2, 5, 7] : call aten.baddbmm.default(%b, %x, %w, beta=0.5)")
    assert calls(g) == [(2, 5, 8)]
    assert maps(g) == {"b.pad": (2, 5, 8), "x.pad": (2, 5, 8), "w.pad": (2, 8, 8), "y": (2, 5, 7)}
    for shape, made in (("7", (8,)), ("1", None), ("1, 7", (1, 8)), ("5, 1", None), ("", None)):
        g = padded(f"""in %x : bf16[5, 8]
            in %w : bf16[8, 7]
            in %b : bf16[{shape}]
            out %y = bf16[5, 7] : call aten.addmm.default(%b, %x, %w)""")
        assert maps(g).get("b.pad") == made


@pytest.mark.usefixtures("eager_to_pad")
def test_a_map_that_others_count_on_is_copied() -> None:
    body = """in %x : f32[8, 13]
        in %w : bf16[13, 8]
        {} %a = bf16[8, 13] : map (i: 8, j: 13) {{ cast(load(%x, [i, j]), bf16) }}
        %y = bf16[8, 8] : call aten.mm.default(%a, %w)
        out %z = bf16[8, 8] : map (i: 8, j: 8) {{ load(%y, [i, j]) }}"""
    assert "a" not in maps(padded(body.format("")))
    assert maps(padded(body.format("out")))["a"] == (8, 13)


@pytest.mark.usefixtures("eager_to_pad")
def test_loops_beside_padding_still_share_kernels() -> None:
    def rows(x: Tensor, w: Tensor) -> Tensor:
        return torch.softmax(x, -1) @ w

    s = assert_function(rows, torch.randn(6, 13, dtype=BF16), torch.randn(13, 8, dtype=BF16))
    assert kinds_of(s) == ["reduction", "pointwise"], "softmax, and the copy of w"
    assert s.steps[0].args[-1] == "_softmax.pad"

    def columns(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin()
        return y @ w, y.sum(0)

    s = assert_function(columns, torch.randn(6, 13, dtype=BF16), torch.randn(13, 8, dtype=BF16))
    assert sorted(kinds_of(s)) == ["outer_reduction", "pointwise"]


@pytest.mark.usefixtures("eager_to_pad")
def test_padding_of_a_result_is_not_taken_for_zeros() -> None:
    """An infinite factor makes NaN of it: a product that sums over it reads a copy."""
    g = padded("""in %x : bf16[8, 8]
        in %w : bf16[8, 13]
        in %v : bf16[13, 8]
        %y = bf16[8, 13] : call aten.mm.default(%x, %w)
        out %z = bf16[8, 8] : call aten.mm.default(%y, %v)""")
    assert maps(g)["y.pad.1"] == (8, 16)


@pytest.mark.usefixtures("eager_to_pad")
def test_what_is_left_alone() -> None:
    product = """in %x : {0}[16, 8]
        in %w : {0}[8, 13]
        out %y = {0}[16, 13] : call aten.mm.default(%x, %w)"""
    assert maps(padded(product.format("f32"))) == {}
    assert maps(padded(product.format("bf16"), "cpu")) == {}
    assert maps(padded(product.format("f16"))) != {}
    aligned = product.replace("13", "16").format("bf16")
    assert maps(padded(aligned)) == {}
    rows = product.replace("16", "15").replace("13", "16").format("bf16")
    assert maps(padded(rows)) == {}, "rows lie side by side in no operand"


def test_what_pays_on_an_h200() -> None:
    def pays(m: int, k: int, n: int, along: str, *copied: tuple[int, ...], batch: int = 1) -> bool:
        shapes = [tuple(map(lenz.sym.Int, s)) for s in copied]
        ragged = frozenset(x for x, size in zip("mkn", (m, k, n), strict=True) if size % 8)
        sizes = [batch, m, k, n]
        return bool(module._pays(capabilities_of("cuda"), sizes, along, ragged, shapes))

    weight, tokens = (50264, 768), 4096
    assert pays(tokens, 768, 50257, "kkn", weight)
    assert pays(tokens, 768, 50257, "kkn", weight, (tokens, 50257))
    assert pays(tokens, 50257, 768, "knn", weight) and pays(50257, tokens, 768, "mnn")
    assert not pays(8, 768, 50257, "kkn", weight), "the copy takes longer than the product"
    assert not pays(8, 768, 50257, "kkn"), "memory is what bounds it"
    assert not pays(500, 500, 500, "mkn", (504, 504), (504, 504))


def test_few_terms_whose_result_is_large_are_padded_on_an_h200() -> None:
    """192 products of 197 x 64 by 64 x 197 bf16 take 29 us, and padded 10."""
    can, values = capabilities_of("cuda"), [tuple(map(lenz.sym.Int, (192, 200, 64)))]
    assert module._pays(can, [192, 197, 64, 197], "kkn", frozenset("n"), values)
    assert not module._pays(can, [12, 197, 64, 197], "kkn", frozenset("n"), values)


def test_tiny_products_are_not_padded() -> None:
    """25088 products of 16 x 6 by 6 x 16 bf16 take 21 us, and padded 80."""
    for sizes, along in (([25088, 16, 6, 16], "knn"), ([4096, 25, 64, 25], "kkn")):
        assert not module._pays(capabilities_of("cuda"), sizes, along, frozenset(along), [])


@pytest.mark.slow
def test_a_training_step_keeps_padded_memory_for_its_backward_half(
    eager_to_pad: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    like = module.capabilities_of("cuda")
    monkeypatch.setattr(module, "capabilities_of", lambda device: like)
    ids = torch.tensor([1, 4, -100, 0, 2, 12])

    def loss(x: Tensor, w: Tensor) -> Tensor:
        return F.cross_entropy((x @ w.t()).float(), ids)

    def tied(x: Tensor, w: Tensor) -> Tensor:
        return F.linear((w[ids.clamp(0)] + x).tanh(), w, w[:, 0]).sigmoid().sum()

    def batches(x: Tensor, w: Tensor) -> Tensor:
        y = torch.softmax(x[None] @ w.t().expand(2, -1, -1), -1) @ w
        return y.flatten().square().mean()

    def make() -> list[Tensor]:
        return [torch.randn(s, dtype=BF16, requires_grad=True) for s in ((6, 5), (13, 5))]

    functions: list[Callable[..., Any]] = [loss, tied, batches]
    for f in functions:
        gradients_agree(f, make, tol=3e-2)
    args = make()
    report = lenz.explain(lambda *a: loss(*a).backward())(*args)
    forward, backward = report.graphs
    assert "free (" in forward.ir and "mm.pad" in forward.ir
    assert "in %mm : bf16[6, 13 : 16, 1]" in backward.ir, backward.ir
