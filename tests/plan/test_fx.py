"""Plans as FX graphs: they run as they are, and hold what a compiler from outside needs."""

from __future__ import annotations

import copy
import gc
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, rand, randn
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

import lenz
from lenz.errors import UserError
from lenz.ir.dtype import F32
from lenz.ir.graph import Ref
from lenz.ir.plan import Input, LaunchStep, Plan, SizeInput
from lenz.ir.tensor import TensorType, contiguous
from lenz.lower import lower
from lenz.pipeline import named, optimise
from lenz.plan.build import build
from lenz.plan.fx import graph_module
from lenz.runtime import executor
from lenz.runtime.graph import NumberedKernel, delete
from lenz.schedule import schedule
from lenz.sym import Var
from tests.cuda import Fake, cuda_program, cuda_programs
from tests.gpu_oracle import gpu_context as context
from tests.gpu_oracle import kernels_of, lowered_there, scheduled

LAUNCH = torch.ops.lenz.launch.default
TRITON = torch.ops.higher_order.triton_kernel_wrapper_mutation


class Seen(lenz.FxBackend):
    """A backend that keeps the graphs, and asserts that a call of each empties its list."""

    def __init__(self) -> None:
        self.graphs: list[GraphModule] = []

    def compile_graph(self, gm: GraphModule) -> Callable[..., Sequence[Any]]:
        gm.graph.lint()
        self.graphs.append(gm)
        return gm


def calls(gm: GraphModule, target: Any) -> list[Node]:
    return gm.graph.find_nodes(op="call_function", target=target)


def listed(x: Any) -> list[Any]:
    return [*x]


def checked(fn: Callable[..., Any], *args: Any, **how: Any) -> GraphModule:
    """The graph of a function, whose results are eager's, also without dead code."""
    seen = Seen()
    run = torch.compile(fn, backend=seen, fullgraph=True, **how)
    same(run(*args), fn(*args))
    (gm,) = seen.graphs
    gm.graph.eliminate_dead_code()
    gm.recompile()
    same(run(*args), fn(*args))
    return gm


def same(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want)
    for a, b in zip(tensors(got), tensors(want), strict=True):
        assert a.stride() == b.stride()


def tensors(x: Any) -> list[Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(x) if isinstance(t, Tensor)]


def test_a_kernel_between_memory_and_result() -> None:
    gm = checked(lambda x, y: x + y, randn(8), randn(8))
    (made,), (launch,) = calls(gm, torch.empty_strided), calls(gm, LAUNCH)
    x, y = gm.graph.find_nodes(op="placeholder")
    assert launch.args[1:] == ([x, y, made], [])
    assert gm.graph.output_node().args[0] == (made,)
    assert made.args == ((8,), (1,)) and made.kwargs["dtype"] is torch.float32
    assert x.meta["val"].shape == (8,)
    assert "fadd" in gm.meta["text"]
    assert (
        isinstance(launch.meta["kernel"], NumberedKernel) and "test_fx.py" in launch.meta["origin"]
    )
    (got,) = gm(torch.ones(8), torch.ones(8))
    assert got.tolist() == [2] * 8


def test_products_are_calls_with_out() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        return torch.addmm(x.sum(-1, keepdim=True), x, y)

    gm = checked(fn, randn(129, 129), randn(129, 1))
    (product,) = calls(gm, torch.addmm)
    assert product.kwargs["out"].target is torch.empty_strided  # type: ignore[union-attr]
    assert len(calls(gm, LAUNCH)) == 1
    assert calls(gm, delete), "no life ends"


def test_several_results_of_a_call() -> None:
    gm = checked(lambda x: (x * 2).topk(3), randn(20_000), dynamic=True)
    parts = calls(gm, operator.getitem)
    assert [p.args[1] for p in parts] == [0, 1]
    assert {p.args[0].target for p in parts} == {torch.ops.aten.topk.default}  # type: ignore[union-attr]


def test_views_are_as_strided() -> None:
    gm = checked(lambda x: (x.t()[1:], x * 2), randn(4, 6))
    (view,) = calls(gm, torch.as_strided)
    assert view.args[1:3] == ((5, 4), (1, 6))
    own = checked(lambda x: (x * 2).t()[1:], randn(4, 6))
    (view,) = calls(own, torch.as_strided)
    assert view.args[1:] == ((5, 4), (1, 6), 1)
    sliced = checked(lambda x: x.t()[2:], randn(8, 6)[1:])
    assert calls(sliced, torch.ops.aten.sym_storage_offset.default)


def test_dead_memory_is_used_again() -> None:
    def fn(x: Tensor) -> Tensor:
        a = (x @ x).sin()
        b = (a @ a).cos().view(torch.int32)
        return (b + 1).view(torch.float32) @ x

    checked(fn, randn(40, 40))


def test_sizes_are_placeholders_with_hints() -> None:
    gm = checked(lambda x: torch.cat([x, x + 1])[1:], randn(6), dynamic=True)
    size, x = gm.graph.find_nodes(op="placeholder")
    assert size.meta["val"] == 6 and size.target == str(x.meta["val"].shape[0])
    (made,) = calls(gm, torch.empty_strided)
    (twice,) = listed(made.args[0])
    assert twice.target is operator.mul and twice.args == (size, 2)
    for n in (1, 2, 77):
        y = randn(n)
        torch.testing.assert_close(gm(n, y)[0], torch.cat([y, y + 1])[1:])


def test_sizes_that_are_given_twice_or_as_a_multiple() -> None:
    n, m = Var("n", 0), Var("m", 0)
    inputs = tuple(map(SizeInput, (n, n, m * 2)))
    gm = graph_module(Plan("p", inputs, (), (), (n, m), ()), {}, values={"n": 3})
    places = gm.graph.find_nodes(op="placeholder")
    assert [(x.target, x.meta["val"]) for x in places] == [("n", 3), ("size1", 3), ("size2", None)]
    assert gm(4, 4, 6) == (4, 3)
    with pytest.raises(RuntimeError, match="m is not a whole number"):
        gm(4, 4, 7)


@pytest.mark.parametrize("n", (0, 1, 2, 9, 33))
def test_sizes_and_strides_that_change(n: int) -> None:
    seen = Seen()
    fn = lambda x, y: (x.t() + y).sum(0) * x.shape[0]
    run = torch.compile(fn, backend=seen, dynamic=True)
    for k in (8, n):
        x, y = randn(3, k)[1:].t(), randn(2, k)
        same(run(x, y), fn(x, y))
    assert len(seen.graphs) == (2 if n < 2 else 1)


def test_training_across_a_graph_break() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))

    def fn(x: Tensor) -> Tensor:
        h = model[1](model[0](x))
        torch._dynamo.graph_break()
        return model[2](h).square().sum()

    x, seen = randn(8, 16), Seen()
    wanted = torch.autograd.grad(fn(x), [*model.parameters()])
    for _ in range(2):
        loss = torch.compile(fn, backend=seen)(x)
        same(torch.autograd.grad(loss, [*model.parameters()]), wanted)
    kinds = [gm.meta["kind"] for gm in seen.graphs]
    assert kinds == ["forward", "forward", "backward", "backward"]


def test_arguments_are_written() -> None:
    gm = checked_in_place(lambda x, y: x.mul_(y).sin(), randn(5, 3), randn(3))
    assert [n.target for n in gm.graph.nodes if n.op == "call_function"].count(LAUNCH) == 1


def checked_in_place(fn: Callable[..., Any], *args: Tensor) -> GraphModule:
    seen, theirs = Seen(), [t.clone() for t in args]
    same(torch.compile(fn, backend=seen)(*args), fn(*theirs))
    same(list(args), theirs)
    (gm,) = seen.graphs
    return gm


def test_bodies_constants_and_random_numbers() -> None:
    table = torch.arange(5.0)

    def fn(x: Tensor) -> Tensor:
        y = torch.cond(x.sum() > 0, lambda a: a.sin(), lambda a: a.cos(), (x,))
        return y + torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]) * table

    seen = Seen()
    x = rand(5)
    same(torch.compile(fn, backend=seen)(x), fn(x))
    assert any(n.op == "get_attr" for n in seen.graphs[-1].graph.nodes)
    draw = torch.compile(lambda x: torch.rand_like(x) + x, backend=Seen())
    torch.manual_seed(0)
    a, b = draw(x), draw(x)
    torch.manual_seed(0)
    assert (draw(x) == a).all() and (a != b).all()


def test_numbers_that_data_decide() -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        checked(lambda x: x.nonzero().flatten() * 2, torch.tensor([0.0, 1.0, 2.0]))


def test_wrong_arguments_are_named() -> None:
    gm = checked(lambda rows: rows * 2, randn(4, 6))
    for bad, what in (
        (randn(6, 4), "size"), (randn(6, 4).t(), "stride"), (randn(4, 6).double(), "dtype"),
        (randn(4, 6, device="meta"), "device"), (torch._neg_view(randn(4, 6)), "negative bit"),
        (3, "tensor"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=f"rows.*{what}"):
            gm(bad)


def test_failed_checks_of_kernels_raise() -> None:
    gm = checked(lambda x, i: x[i], randn(4), torch.tensor([1, 2]))
    with pytest.raises(IndexError):
        gm(randn(4), torch.tensor([1, 9]))


def test_tools_of_fx_take_the_graph() -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = (x @ w).softmax(-1)
        return y.sum(0), y.t()[1:]

    x, w = randn(6, 5), randn(5, 7)
    gm = checked(fn, x, w)
    same(Interpreter(gm).run(x, w), fn(x, w))
    same(make_fx(gm)(x, w)(x, w), fn(x, w))
    FakeTensorProp(gm).propagate(x, w)
    (view,) = calls(gm, torch.as_strided)
    assert view.meta["val"].shape == (6, 6)


def test_a_copy_of_a_graph_keeps_its_kernels() -> None:
    seen, x = Seen(), randn(9)
    torch.compile(lambda x: x.sin() * 3, backend=seen)(x)
    copied = copy.deepcopy(seen.graphs.pop())
    torch._dynamo.reset()
    gc.collect()
    same(copied(x), (x.sin() * 3,))


def test_kernels_go_with_their_graphs() -> None:
    seen = Seen()
    run = torch.compile(lambda x: x.sin() * 3, backend=seen)
    run(randn(9))
    (node,) = calls(seen.graphs[0], LAUNCH)
    kernel = weakref.ref(node.meta["kernel"])
    assert kernel() is not None
    del run, seen, node
    torch._dynamo.reset()
    gc.collect()
    assert kernel() is None


def test_the_callable_keeps_the_kernels_that_its_graph_lost() -> None:
    class Traced(lenz.FxBackend):
        def compile_graph(self, gm: GraphModule) -> Callable[..., Sequence[Any]]:
            made: Any = torch.fx.Transformer(gm).transform()
            for node in (*made.graph.nodes, *gm.graph.nodes):
                node.meta.clear()
            return made  # type: ignore[no-any-return]  # an Any

    x = randn(9)
    run = torch.compile(lambda x: x.sin() * 3, backend=Traced())
    run(x)
    gc.collect()
    same(run(x), x.sin() * 3)


def test_errors_of_the_users_function_are_raised() -> None:
    class Failing(lenz.FxBackend):
        def compile_graph(self, gm: GraphModule) -> Callable[..., Sequence[Any]]:
            if gm.meta["kind"] == "inference":
                raise ZeroDivisionError("mine")
            return None  # type: ignore[return-value]  # the mistake

    run, x = torch.compile(lambda x: x.sin() * 3, backend=Failing()), randn(9)
    with pytest.raises(UserError, match=r"Failing.compile_graph failed on the .*Error: mine"):
        run(x)
    with pytest.raises(UserError, match=r"Failing.compile_graph returned None, not a function"):
        run(x.requires_grad_())


def test_a_graph_that_lenz_does_not_take_is_one_of_aten_ops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*args: Any) -> Any:
        raise lenz.errors.Unsupported("not today")

    monkeypatch.setattr("lenz.pipeline.lower", refused)
    with pytest.warns(UserWarning, match="not today"):
        gm = checked(lambda x: x.sin() * 3, randn(9))
    targets = [n.target for n in gm.graph.nodes if n.op == "call_function"]
    assert targets == [torch.ops.aten.sin.default, torch.ops.aten.mul.Tensor]


def test_kernels_of_gpus_are_triton_kernels() -> None:
    """A grid is an expression of sizes; the launch gets pointers and sizes in order."""
    p = cuda_program(lambda x, y: (x + y).sin(), Fake((100, 40)), Fake((100, 40)), dynamic=True)
    s = scheduled(lowered_there(p))
    launched: list[Any] = []
    (k,) = kernels_of(s)
    names = [x.name for x in k.params] + [v.name for v in k.sizes]
    kernel = NumberedKernel(lambda *args: launched.append(args), names, 0)
    plan = build(s, context())
    gm = graph_module(plan, dict.fromkeys(plan.kernels, kernel))
    (node,) = calls(gm, TRITON)
    ((grid, *rest),) = listed(node.kwargs["grid"])
    assert isinstance(grid, Node) and rest == [1, 1]
    assert list(node.kwargs["kwargs"]) == names  # type: ignore[arg-type]
    assert node.is_impure(), "its launches are no dead code"


@pytest.mark.parametrize("dynamic", (False, True))
def test_plans_of_training_steps_on_gpus(dynamic: bool) -> None:
    """Calls, views, memory that is used again, random numbers and checks, on both halves."""

    def step(x: Tensor, w: Tensor) -> Tensor:
        h = F.dropout(F.gelu(x @ w).softmax(-1), 0.5)
        return F.scaled_dot_product_attention(h, h, h).transpose(1, 2)[:, 1:]

    programs = cuda_programs(step, (2, 4, 64, 32), (32, 32), grad=True, dynamic=dynamic)
    for p in programs:
        cx = context()
        plan = build(named(schedule(optimise(lower(p, cx), cx), cx)), cx)
        signatures = {s.kernel: s for s in plan.steps if isinstance(s, LaunchStep)}
        kernels = {
            name: NumberedKernel(print, [f"p{n}" for n in range(len(s.args) + len(s.sizes))], 0)
            for name, s in signatures.items()
        }
        constants = {c.name: torch.empty(0) for c in plan.constants}
        gm = graph_module(plan, kernels, constants, p.modules)
        launches = [s for s in plan.steps if isinstance(s, LaunchStep)]
        assert len(calls(gm, TRITON)) == len(launches) > 0
        assert len(gm.graph.output_node().args[0]) == len(plan.outputs)  # type: ignore[arg-type]
    assert [p.kind for p in programs] == ["forward", "backward"]


def test_a_kernel_of_a_gpu_is_launched_as_tritons_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors stay on the CPU: the graph launches, but no kernel runs."""
    monkeypatch.setattr(executor, "stream", lambda gpu: f"stream of {gpu}")
    launched: list[Any] = []
    kernel = NumberedKernel(lambda *args: launched.append(args), ("a0", "a1", "n"), 3)
    n = Var("n", 0)
    t = TensorType(F32, "cpu", contiguous((n,)))
    step = LaunchStep("k", ("y", "x"), (n,), (n + 3) // 4, "cuda:3")
    p = Plan("p", (SizeInput(n), Input("x", t), Input("y", t)), (), (step,), (Ref("y"),), ("k",))
    x, y = randn(9), randn(9)
    (got,) = graph_module(p, {"k": kernel})(9, x, y)
    assert launched == [("stream of 3", 3, y.data_ptr(), x.data_ptr(), 9)]
    assert got is y
