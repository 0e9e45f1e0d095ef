"""Every program here runs through capture with an interpreter as compiler, and equals eager."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lenz.frontend import FxProgram
from lenz.frontend.capture import capture, prepared
from lenz.options import Options

OPTIONS = Options(cache=False, verify=True)


class Recorder:
    """A torch.compile backend that keeps every program it is given and runs it in eager."""

    def __init__(self, native: frozenset[str] = frozenset()) -> None:
        self.programs: list[FxProgram] = []
        self.native = native

    def __call__(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return capture(gm, inputs, self.compile_fx, OPTIONS, self.native)

    def compile_fx(self, program: FxProgram) -> Callable[[list[Any]], Sequence[Any]]:
        self.programs.append(program)
        return program.eager()

    def targets(self, i: int = 0) -> list[str]:
        return [str(n.target) for n in self.programs[i].nodes]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def cloned(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a
        for a in args
    )


def check(f: Callable[..., Any], *args: Any, **kwargs: Any) -> Recorder:
    """Compile `f`, compare results, layouts and written arguments with eager; twice."""
    backend = Recorder()
    c = torch.compile(f, backend=backend, fullgraph=True, **kwargs)
    for _ in range(2):
        ours, theirs = cloned(args), cloned(args)
        got, want = c(*ours), f(*theirs)
        torch.testing.assert_close(got, want, equal_nan=True)
        torch.testing.assert_close(ours, theirs, equal_nan=True)
        for g, w in zip(tensors(got), tensors(want), strict=True):
            assert g.stride() == w.stride()
            assert g.storage_offset() == w.storage_offset()
            assert g.requires_grad == w.requires_grad
    return backend


def tensors(x: Any) -> list[Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(x) if isinstance(t, Tensor)]


def test_both_ways_to_run_a_program_agree_and_empty_the_list() -> None:
    b = check(lambda x: (x.sin(), None, x.t(), 3), torch.randn(2, 3))
    (p,) = b.programs
    x = torch.randn(2, 3)
    for run in (torch.fx.Interpreter(p.gm).boxed_run, p.eager()):
        args = [x]
        torch.testing.assert_close(tuple(run(args)), (x.sin(), x.t()))
        assert args == []


def test_inference_graph_is_aten_only() -> None:
    b = check(lambda x, y: (x.sin() + y).t(), torch.randn(3, 4), torch.randn(4))
    (p,) = b.programs
    assert p.kind == "inference"
    assert [q.kind for q in p.placeholders] == ["tensor", "tensor"]
    # No op is native to this backend, and `t` is a permutation then.
    assert b.targets() == ["aten.sin.default", "aten.add.Tensor", "aten.permute.default"]
    assert [str(s) for s in p.outputs[0].stride] == ["1", "4"]


def test_training_step_has_two_halves_and_right_gradients() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))
    x, y = torch.randn(5, 6), torch.randint(0, 3, (5,))
    F.cross_entropy(model(x), y).backward()
    want = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    backend = Recorder(frozenset({"aten.gelu_backward", "aten.native_layer_norm_backward"}))
    c = torch.compile(lambda x, y: F.cross_entropy(model(x), y), backend=backend)
    c(x, y).backward()
    assert [p.kind for p in backend.programs] == ["forward", "backward"]
    got = [p.grad for p in model.parameters()]
    torch.testing.assert_close(got, want)
    # The native ones stay whole, and parameters are known to be static in both halves.
    assert "aten.gelu_backward.default" in backend.targets(1)
    assert "aten.native_layer_norm_backward.default" in backend.targets(1)
    static = [sum(q.is_static for q in p.placeholders) for p in backend.programs]
    assert static[0] == len(want) and static[1] > 0
    assert any(q.is_static for q in backend.programs[1].placeholders)


def test_grad_off_is_inference() -> None:
    backend = Recorder()
    layer = nn.Linear(4, 4)
    with torch.no_grad():
        c = torch.compile(layer, backend=backend)
        torch.testing.assert_close(c(torch.ones(2, 4)), layer(torch.ones(2, 4)))
    assert [p.kind for p in backend.programs] == ["inference"]


def test_dynamic_shapes_compile_once() -> None:
    backend = Recorder()
    c = torch.compile(lambda x, y: (x.t() + y).sum(0) * x.shape[0], backend=backend, dynamic=True)
    for n in (5, 8, 33):
        x, y = torch.randn(n, n), torch.randn(n, n)
        torch.testing.assert_close(c(x, y), (x.t() + y).sum(0) * n)
    (p,) = backend.programs
    assert p.symbols.bindings
    b = p.symbols.bindings[0]
    assert b.what == "value" and p.placeholders[b.argument].kind == "symint"
    assert p.symbols.hints[b.var.name] == 5
    assert p.outputs[0].shape == (b.var,)


def test_sizes_and_numbers_as_results() -> None:
    b = check(lambda x: (x.shape[0], x + 1, None, 3, x.numel() * 2), torch.randn(7), dynamic=True)
    kinds = {type(o.value) for o in b.programs[0].outputs}
    assert torch.SymInt in kinds and any(issubclass(k, Tensor) for k in kinds)


def test_written_arguments_are_stores_at_the_end() -> None:
    def f(x: Tensor, y: Tensor) -> None:
        y.mul_(2)
        x.add_(y)

    b = check(f, torch.randn(6), torch.randn(6))
    (p,) = b.programs
    assert p.mutated == (0, 1)
    assert b.targets()[-2:] == ["aten.copy_.default"] * 2
    assert p.outputs == ()


def test_result_that_is_a_view_of_a_written_argument() -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        x.mul_(2)
        return x[2:5], x.view(-1)

    backend = Recorder()
    base = torch.arange(20.0)
    other = base.clone()
    got = torch.compile(f, backend=backend)(base[1:])
    want = f(other[1:])
    torch.testing.assert_close(got, want)
    got[0].zero_()
    assert base[3].item() == 0
    (p,) = backend.programs
    # The new value is only stored: no result keeps it alive.
    assert all(o.alias_input == 0 for o in p.outputs)
    assert p.outputs[0].value.storage_offset() == 3


def test_value_copied_and_returned_stays_a_tensor_of_its_own() -> None:
    def f(x: Tensor) -> Tensor:
        y = x + 1
        x.copy_(y)
        return y

    b = check(f, torch.randn(4))
    assert b.programs[0].outputs[0].alias_input is None
    x = torch.zeros(4)
    y = torch.compile(f, backend=Recorder())(x)
    y.fill_(9)
    assert x.tolist() == [1.0] * 4


def test_argument_returned_and_duplicates() -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        y = x + 1
        return x, y, y, x.view(-1), y.view(-1)

    check(f, torch.randn(2, 3))


def test_equal_results_do_not_alias() -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        return x + 1, x + 1

    a, b = torch.compile(f, backend=Recorder())(torch.zeros(3))
    a.fill_(7)
    assert b.tolist() == [1.0] * 3


def test_constants_are_fresh_on_every_call() -> None:
    def f() -> tuple[Tensor, ...]:
        return torch.tensor(False), torch.tensor([1, 2]), torch.tensor([1, 2]), torch.arange(3)

    backend = Recorder()
    c = torch.compile(f, backend=backend)
    first = c()
    torch.testing.assert_close(first, f())
    first[1].fill_(5)
    first[0].fill_(True)
    assert first[2].tolist() == [1, 2]
    torch.testing.assert_close(c(), f())
    (p,) = backend.programs
    assert p.placeholders == () and len(p.constants) == 3


def test_constant_that_is_only_read_is_not_copied() -> None:
    b = check(lambda x: x * torch.tensor([1.0, 2.0]), torch.randn(3, 2))
    assert b.targets() == ["aten.mul.Tensor"]


def test_equal_calls_merge_and_dead_ones_go() -> None:
    def f(x: Tensor) -> Tensor:
        x.cos()
        return x.sin() + x.sin().clone() + x.detach()

    b = check(f, torch.randn(4))
    assert b.targets() == ["aten.sin.default", "aten.add.Tensor", "aten.add.Tensor"]


def test_constants_of_other_type_do_not_merge() -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a = torch.full((2,), 1)
        b = torch.full((2,), 1.0)
        return x / -0.0 + x / 0.0, a + 0, b + 0

    b = check(f, torch.ones(2))
    # Without lowerings every call is a library call, for which fills are constants.
    kinds = [c.dtype for c in b.programs[0].constants.values()]
    assert kinds == [torch.int64, torch.float32]
    assert b.targets().count("aten.div.Tensor") == 2


def test_a_clone_whose_source_is_written_stays() -> None:
    def f(x: Tensor) -> Tensor:
        y = x.clone()
        x.add_(1)
        return y * 2

    check(f, torch.randn(5))


def test_random_ops_follow_the_generator_and_are_not_merged() -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return F.dropout(x, 0.5), torch.rand(4), torch.rand(4)

    backend = Recorder()
    c = torch.compile(f, backend=backend)
    x = torch.ones(16)
    torch.manual_seed(3)
    got = c(x)
    torch.manual_seed(3)
    torch.testing.assert_close(got, f(x))
    assert not torch.equal(got[1], got[2])


def test_graph_break_gives_two_programs() -> None:
    def f(x: Tensor) -> Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos()

    backend = Recorder()
    x = torch.randn(3)
    torch.testing.assert_close(torch.compile(f, backend=backend)(x), f(x))
    assert len(backend.programs) == 2
    assert "test_capture.py:" in backend.programs[0].ended_by
    assert backend.programs[1].ended_by == ""


def test_saved_values_die_during_the_backward_pass() -> None:
    alive: list[bool] = []

    def compile_fx(p: FxProgram) -> Callable[[list[Any]], Sequence[Any]]:
        def run(args: list[Any]) -> Sequence[Any]:
            seen = [
                weakref.ref(a)
                for a, q in zip(args, p.placeholders, strict=True)
                if not q.name.startswith(("primals", "tangents"))
            ]
            results = tuple(torch.fx.Interpreter(p.gm).boxed_run(args))
            assert args == []
            if p.kind == "backward":
                alive.extend(s() is not None for s in seen)
            return results

        return run

    w = torch.randn(3, 3)
    c = torch.compile(
        lambda x: (x @ w).exp().sum(), backend=lambda gm, xs: capture(gm, xs, compile_fx, OPTIONS)
    )
    x = torch.ones(3, 3, requires_grad=True)
    c(x).backward()
    y = x.detach().clone().requires_grad_()
    (y @ w).exp().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    assert alive and not any(alive)


def test_an_error_of_the_compiler_is_not_swallowed() -> None:
    def compile_fx(p: FxProgram) -> Callable[[list[Any]], Sequence[Any]]:
        raise ArithmeticError("ours")

    c = torch.compile(lambda x: x + 1, backend=lambda gm, xs: capture(gm, xs, compile_fx, OPTIONS))
    was_on = gc.isenabled()
    with pytest.raises(Exception, match="ours"):
        c(torch.ones(3))
    assert gc.isenabled() == was_on


def test_cond_keeps_its_branches_callable() -> None:
    def f(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))

    for x in (torch.ones(3), -torch.ones(3)):
        b = check(f, x)
        assert len(b.programs[-1].modules) == 2, "the bodies come first"


def test_custom_op_that_writes() -> None:
    with torch.library._scoped_library("lenz_test", "FRAGMENT") as lib:
        lib.define("twice_(Tensor(a!) x, Tensor y) -> Tensor")

        def twice_(x: Tensor, y: Tensor) -> Tensor:
            x.mul_(2)
            return x + y

        lib.impl("twice_", twice_, "CPU")
        lib.impl("twice_", lambda x, y: torch.empty_like(x), "Meta")

        def f(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            z = x + 1
            r = torch.ops.lenz_test.twice_(z, y)
            s = torch.ops.lenz_test.twice_(x, y)
            return z + s, r

        check(f, torch.randn(4), torch.randn(4))


def test_custom_op_that_reads() -> None:
    with torch.library._scoped_library("lenz_test", "FRAGMENT") as lib:
        lib.define("plus(Tensor x, float a) -> Tensor")
        lib.impl("plus", lambda x, a: x + a, "CPU")
        lib.impl("plus", lambda x, a: torch.empty_like(x), "Meta")
        b = check(lambda x: torch.ops.lenz_test.plus(x.sin(), 2.0).cos(), torch.randn(4))
        assert "lenz_test.plus.default" in b.targets()


def test_data_dependent_size() -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        b = check(lambda x: x.nonzero() + 1, torch.tensor([0.0, 1.0, 2.0]))
    shape = b.programs[0].outputs[0].shape
    assert shape[0].lo == 0 and str(shape[1]) == "1"


def test_foreach_lists() -> None:
    def f(ps: list[Tensor], gs: list[Tensor]) -> None:
        torch._foreach_mul_(ps, 0.9)
        torch._foreach_add_(ps, gs, alpha=-0.1)

    ps, gs = [torch.randn(n) for n in (1, 5, 9)], [torch.randn(n) for n in (1, 5, 9)]
    qs = [p.clone() for p in ps]
    backend = Recorder()
    torch.compile(f, backend=backend)(ps, gs)
    f(qs, gs)
    torch.testing.assert_close(ps, qs)
    assert len(backend.programs[0].mutated) == 3


@pytest.mark.parametrize("dynamic", (False, True))
def test_writes_into_numbers_in_double_precision_are_kept(dynamic: bool) -> None:
    """docs/upstream/torch_lost_writes.py; an epsilon makes Dynamo begin again in any case."""

    def f(p: Tensor, q: Tensor, x: Tensor, eps: float) -> Tensor:
        p.mul_(eps).add_(q)
        torch.add(p, 1, out=q)
        return F.layer_norm(x, (4,), eps=eps)

    p, q = (torch.tensor(v, dtype=torch.float64) for v in (1.5, 2.0))
    ours, backend, x = [p.clone(), q.clone()], Recorder(), torch.ones(4)
    c = torch.compile(f, backend=backend, dynamic=dynamic)
    for _ in range(2):
        torch.testing.assert_close(c(ours[0], ours[1], x, 0.5), f(p, q, x, 0.5))
        torch.testing.assert_close(ours, [p, q])
    assert len(backend.programs) == 1, "values of tensors are no reason to compile again"


def test_float_argument_stays_symbolic_where_it_can() -> None:
    backend = Recorder()
    c = torch.compile(lambda x, a: x * a, backend=backend, dynamic=True)
    x = torch.ones(3)
    for a in (1.5, 2.5, 3.5):
        torch.testing.assert_close(c(x, a), x * a)
    assert len(backend.programs) == 1


def test_calling_a_plan_twice_backward_with_retained_graph() -> None:
    x = torch.randn(4, requires_grad=True)
    y = torch.compile(lambda x: (x.sin() * x).sum(), backend=Recorder())(x)
    y.backward(retain_graph=True)
    once = x.grad.clone() if x.grad is not None else torch.zeros(())
    y.backward()
    torch.testing.assert_close(x.grad, 2 * once)


def test_compiled_autograd_passes_lists() -> None:
    backend = Recorder()
    w = torch.randn(3, 3, requires_grad=True)
    (w.sin() @ w).sum().backward()
    assert w.grad is not None
    want, w.grad = w.grad, None
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend)):
        (w.sin() @ w).sum().backward()
    torch.testing.assert_close(w.grad, want)
    assert backend.programs


def test_random_ops_of_checkpointed_layers_are_saved() -> None:
    def layer(x: Tensor) -> Tensor:
        return F.dropout(F.scaled_dot_product_attention(x, x.sin(), x.cos()), 0.5) * x

    def f(x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(layer, x, use_reentrant=False)
        return x

    backend = Recorder()
    for how in (backend, "lenz"):
        x = torch.randn(2, 3, 5, 8, requires_grad=True)
        y = torch.compile(f, backend=how)(x)
        y.sum().backward()
        assert x.grad is not None
        # Where the last layer has dropped a number, it drops the gradient as well.
        assert y.eq(0).any() and bool(x.grad.isfinite().all())
    names = " ".join(backend.targets(0) + backend.targets(1))
    assert "rng_state" not in names and "sin" in " ".join(backend.targets(1))


def test_norms_over_dimensions_of_one_count_from_the_front() -> None:
    """torch 2.11 tells that nothing is reduced where such a dimension is counted from the end."""

    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, b = torch.linalg.vector_norm(x, 2, -1), x.norm(p=3, dim=-1)
        return a + 1, b + 1, torch.norm(x, 2, (0, -1)) + 1, torch.linalg.norm(x, dim=-1) + 1

    seen: list[Any] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.append(prepared(gm))
        return gm

    x = torch.randn(3, 1)
    torch.compile(f, backend=backend)(x)
    dims = [
        n.kwargs.get("dim", n.args[2:3]) for n in seen[0].graph.nodes if "norm" in str(n.target)
    ]
    assert dims == [([1],), [1], ([0, 1],), [1]]
    torch.testing.assert_close(seen[0](x), f(x))
    torch.testing.assert_close(torch.compile(f, backend="lenz")(x), f(x))
