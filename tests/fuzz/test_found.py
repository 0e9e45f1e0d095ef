"""What `make fuzz` has found, made small: it fails again if its class of fault comes back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lenz.ir.dtype import I64
from lenz.ir.expr import index, load
from lenz.ir.graph import Graph
from lenz.ir.interp import interp
from lenz.ir.reader import read
from lenz.options import Options
from lenz.sym import Int, Var
from lenz.sym.expr import sum_of
from tests.fuzz.check import Stages, compare, copied
from tests.fuzz.lies import honest
from tests.lower.harness import _lower, trace

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of odd programs


def agrees(fn: Callable[..., Any], *inputs: Any, way: str = "oracle", dynamic: bool = False) -> Any:
    """Assert that eager, every stage and compiled code agree; gives what the latter made."""
    ours, theirs = copied(inputs), copied(inputs)
    want = fn(*theirs)
    stages = Stages(Options(cache=False, verify=True), way, [])
    got = torch.compile(fn, backend=stages.backend, dynamic=dynamic or None, fullgraph=True)(*ours)
    pairs = [(got, want)] if isinstance(want, torch.Tensor) else zip(got, want, strict=True)
    for x, y in (*pairs, *zip(ours, theirs, strict=True)):
        compare([x], [y], fn.__name__)
    return got


def test_a_mask_of_outer_loops_keeps_the_tail() -> None:
    """Read behind the buffer: the mask of full vectors was taken for the last, partial one."""
    agrees(lambda a: torch.cat([a, a[:1]], 0), torch.randn(4, 5, 4), way="guarded")
    agrees(lambda a: torch.stack([F.pad(a, (1, 0, 3, 2))] * 3, -1), torch.ones(1, 2), way="guarded")


def test_a_check_without_a_point() -> None:
    """The oracle raised for position 0 of a dimension without elements, which nobody reads."""

    def f(a: torch.Tensor) -> torch.Tensor:
        return a.scatter_reduce(2, torch.zeros_like(a), a, "amin", include_self=False)

    agrees(f, torch.zeros(1, 1, 0, dtype=torch.int64))


def test_updates_of_one_place_in_a_loop_of_unknown_length() -> None:
    """A wrong number: the element was read before the loop, and only the last update was kept."""

    def f(a: torch.Tensor) -> torch.Tensor:
        return a.scatter_reduce(-1, torch.zeros_like(a, dtype=torch.int64), a / -1, "sum")

    agrees(f, torch.arange(8.0).view(1, 2, 1, 4), dynamic=True)


def test_a_returned_view_of_a_result_needs_no_gradient() -> None:
    """`detach` is nothing to kernels, but a view of a result that has a gradient took that over."""

    def f(a: torch.Tensor) -> tuple[torch.Tensor, ...]:
        t = a * 2
        return t, t[:, 1:].detach(), t.t().detach()[0], t.detach()

    a = torch.ones(2, 3).requires_grad_()
    got = torch.compile(f, backend="lenz")(a)
    assert [x.requires_grad for x in got] == [True, False, False, False]
    assert got[1].untyped_storage().data_ptr() == got[0].untyped_storage().data_ptr()


@pytest.mark.parametrize("way", ("oracle", "triton"))
def test_a_result_without_elements(way: str) -> None:
    """The strides of such a tensor may be 0, and its kernel was refused."""
    a = torch.randn(1, 2, 1, 1).permute(0, 3, 1, 2)
    agrees(lambda a: F.pad(a, (0, -1, 2, -1)), a, way=way)


@pytest.mark.parametrize("grad", (False, True))
def test_a_size_that_only_an_assertion_reads(grad: bool) -> None:
    """The call that gives the size was dropped with its unused result."""

    def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        torch.bincount(a.reshape(-1) % 5, minlength=5)
        return b.exp()

    b = torch.ones(3, requires_grad=grad)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        got = torch.compile(f, backend="lenz", fullgraph=True)(torch.arange(12).view(3, 4), b)
    torch.testing.assert_close(got, b.exp())


def test_sizes_that_the_oracle_must_not_take_at_their_word() -> None:
    """The stride of one element is no size, and the length of what is empty has no formula."""
    y = torch.zeros(9, 0, dtype=torch.float16)
    x = torch.ones(9, 4, dtype=torch.float16)
    assert agrees(lambda a: a.tensor_split(3, 1)[1].diff(dim=1), x, dynamic=True).shape == y.shape
    g = read("""graph @g(s0: 2..) on cpu {
      in %x : f32[s0, 1 : 1, s0]
      out %y = f32[s0] : map (i: s0) { load(%x, [i, 0]) }
    }""")
    assert isinstance(g, Graph)
    assert interp(g, [torch.ones(5, 1)]).outputs[0].shape == (5,)


def test_the_oracle_learns_a_size_from_the_call_that_finds_it_out() -> None:
    def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        torch.bincount(a.reshape(-1) % 5)
        return b.exp()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        agrees(f, torch.tensor(3), torch.ones(3))


def test_the_oracle_takes_a_part_of_an_empty_tensor() -> None:
    """It begins behind the memory, which has no byte."""
    a = torch.empty(0, 7)[:, 1:]
    agrees(lambda a: (a.neg(), F.smooth_l1_loss(a.neg(), a)), a)


def test_an_op_whose_parts_are_views_gives_memory_of_its_own() -> None:
    """Nothing has to be shuffled here, and the result was the operand's memory."""

    def f(a: torch.Tensor) -> tuple[torch.Tensor, ...]:
        t = torch.hstack([a, a])
        return t, F.channel_shuffle(t, 2)

    got = agrees(f, torch.ones(1, 1, 1))
    assert got[0].untyped_storage().data_ptr() != got[1].untyped_storage().data_ptr()


def test_more_operands_of_an_index_than_digits() -> None:
    """`@10` was numbered before `@2`, and the text of an index read back as another one."""
    rows = tuple(load("x", (Int(k),), I64) for k in range(12))
    s = sum_of([(Var(f"@{k}", 0, k + 1), k + 2) for k in range(12)])
    e = index(s, I64, rows)
    assert e.args == rows and index(e.attrs[0], I64, e.args) is e


def test_a_view_that_is_one_by_a_guard_shares_memory() -> None:
    """A size of n - (n + 1) // 2 that a guard holds at 1 was not known, and the view a copy."""

    def f(a: torch.Tensor) -> tuple[torch.Tensor, ...]:
        t = (a + 1).chunk(2, -1)[-1]
        return t, t.reshape(-1)

    got = agrees(f, torch.ones(4, 3, 3, 4).diagonal(), dynamic=True)
    assert got[0].untyped_storage().data_ptr() == got[1].untyped_storage().data_ptr()


def test_a_size_that_broadcasts_since_a_guard_implies_that_it_is_one() -> None:
    """The guard is `max(1, n // 2) == 1`; another element was read, behind the end of the rows."""

    def f(a: torch.Tensor) -> torch.Tensor:
        t = a.narrow(-2, a.shape[-2] // 3, a.shape[-2] // 2)
        return torch.hypot(a, torch.special.erfcx(t.abs()))

    agrees(f, torch.tensor([[1.0, 2.0], [3.0, 4.0]]).mT, dynamic=True)


@pytest.mark.parametrize("way", ("oracle", "triton"))
def test_a_write_through_a_view_whose_elements_share_memory(way: str) -> None:
    """The new view was computed as a tensor whose elements had two values in one place."""

    def f(a: torch.Tensor) -> torch.Tensor:
        t = a.as_strided((2, 2), (1, 1))
        t.select(1, 0).zero_()
        return t

    agrees(f, torch.arange(3.0) + 1, way=way)


@pytest.mark.parametrize("way", ("oracle", "triton"))
def test_a_copy_into_an_argument_whose_elements_share_memory(way: str) -> None:
    """What a lowering that was given up had written stood in the graph, without its value."""

    def f(a: torch.Tensor) -> torch.Tensor:
        a.transpose(-2, 0).copy_(-3 * torch.ones_like(a[:1]))
        return a + 1

    agrees(f, torch.arange(3.0).as_strided((2, 2), (1, 1)), way=way)


def test_softmax_in_parts_has_the_strides_of_softmax() -> None:
    """The parts' own strides, which follow the operand, were those of the result."""
    a = torch.randn(1, 3, 3, requires_grad=True)
    fn = lambda a: F.log_softmax(a.transpose(0, -1), 2)
    got = torch.compile(fn, backend="lenz")(a)
    torch.testing.assert_close(got, fn(a), check_stride=True)


def test_a_result_that_tracing_tells_another_rank() -> None:
    """So does torch 2.11 for the norm of one element, and the kernel was refused as a bug."""
    gm = trace(lambda a: torch.linalg.vector_norm(a, 3, -1), (torch.ones(2),))
    (call,) = (n for n in gm.graph.nodes if n.op == "call_function")
    call.meta["val"] = call.meta["val"].new_empty(1)
    g, _ = _lower(gm, (torch.ones(2),))
    assert [type(n).__name__ for n in g.nodes] == ["Extern"]


def test_writes_to_an_expanded_argument_without_elements() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.add_(x)

    agrees(fn, torch.zeros(0).expand(3, 0))
    agrees(fn, torch.zeros(0).expand(3, 0), way="cpu")


def test_a_dimension_of_an_expanded_argument_is_cut() -> None:
    for way in ("oracle", "cpu"):
        agrees(
            lambda x: x.unflatten(-1, (3, -1)), torch.randn(6).expand(3, 6), way=way, dynamic=True
        )


def test_gradients_of_steps_are_zero_tensors() -> None:
    """Torch's fake zero tensors make no others: a chain of steps failed to compile."""
    for shape in ((), (3,)):
        x = torch.full(shape, -3.5, requires_grad=True)
        torch._dynamo.reset()
        torch.compile(lambda x: x.round().sgn(), backend="lenz")(x).sum().backward()
        assert x.grad is not None and torch.equal(x.grad, torch.zeros(shape))


def test_a_loop_with_thousands_of_borders_stays_whole() -> None:
    """Every third element: 5,633 borders were cut off seven at a time, each time deeper."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = torch.mm(x, x)
        y.view(-1)[::3].fill_(1)
        return y

    agrees(fn, torch.randn(130, 130), way="cpu")


@pytest.mark.parametrize("way", ("cpu", "tiny"))
def test_what_follows_a_lie_has_the_strides_of_what_was_told(way: str) -> None:
    """With gradients the strides of a softmax in parts were those of what the real kernel gave."""
    a = torch.randint(-4, 5, (8, 8)).to(torch.bfloat16).requires_grad_()

    def f(a: torch.Tensor) -> tuple[torch.Tensor, ...]:
        t = torch.ops.fuzz.turned(a).to(torch.float8_e5m2)[1:].to(torch.float16)
        return F.binary_cross_entropy_with_logits(t, t.sigmoid()), F.softmin(t, -1)

    with honest():
        want = f(a)
    got = agrees(f, a, way=way)
    assert got[1].stride() == want[1].stride()


def test_a_scalar_is_looked_up_in_other_tiles_than_the_usual() -> None:
    """A loop without dimensions has no last one whose lanes read anywhere in a row."""

    def f(a: torch.Tensor) -> torch.Tensor:
        return torch.bucketize(a, torch.tensor([-2.0, 0.0, 3.0], device=a.device))

    agrees(f, torch.tensor(1.0), way="tiny")


def test_strides_over_what_was_told_of_a_custom_op() -> None:
    """Only a call read the result, which kept its real strides; the call's kernels read others."""

    def f(a: torch.Tensor) -> torch.Tensor:
        t = torch.ops.fuzz.padded(a.exp())
        t.as_strided((1, 1), (1, 1)).zero_()
        return t

    agrees(f, torch.randn(4, 1), way="cpu")


@pytest.mark.parametrize("way", ("oracle", "guarded"))
def test_a_program_writes_what_a_custom_op_was_given_a_view_of(way: str) -> None:
    """The view was looked for among the arguments, and the write taken for one of the plan."""

    def f(a: torch.Tensor) -> tuple[torch.Tensor, ...]:
        t = torch.ops.fuzz.padded(a.broadcast_to(2, *a.shape))
        a.unsqueeze(0).neg_()
        return t.cummax(-1).indices, torch.heaviside(a, a)

    agrees(f, torch.randn(33, 33), way=way)


@pytest.mark.parametrize("columns", (1, 3, 40))
@pytest.mark.parametrize("way", ("cpu", "triton"))
def test_what_two_kernels_read_is_one_number(way: str, columns: int) -> None:
    """A mean was of values before their rounding, and subtracted from them after it: 0.3, not 0."""

    def f(a: torch.Tensor) -> torch.Tensor:
        t = a / (a + 1)
        return F.layer_norm(t, t.shape[-1:], t[0, 0], None)  # its weights keep it from one kernel

    a = torch.full((2, 1, columns), 2.0, dtype=torch.bfloat16)
    assert agrees(f, a, way=way).abs().max() < 1e-3


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("order", (1, 2))
def test_polygamma_of_halves(dtype: torch.dtype, order: int) -> None:
    """It was computed in the halves themselves, which no op takes; so the gradient of digamma."""
    agrees(lambda a: torch.polygamma(order, a), torch.tensor([0.5, 1.5, 3.0, -1.5], dtype=dtype))


def test_an_argument_of_symbolic_strides_is_read_after_it_is_written() -> None:
    """The rule mutates-last broke: eager wrote it, as its elements may share memory."""

    def f(a: torch.Tensor) -> torch.Tensor:
        a.fill_(2)
        return a.unsqueeze(-1)

    agrees(f, torch.randn(3, 1, 3)[..., ::2], dynamic=True)


def test_an_empty_slice_begins_at_most_at_the_end() -> None:
    """A wrong number: the offset was 2 rows, where eager's is the end of the first."""

    def f(a: torch.Tensor) -> torch.Tensor:
        return a[:, 2:].as_strided((3, 1), (1, 1))

    agrees(f, torch.arange(9.0).view(3, 1, 3, 1))


@pytest.mark.diagonal(2)
@pytest.mark.parametrize("way", ("oracle", "triton"))
@pytest.mark.parametrize("value", (3.0, float("nan")))
def test_a_check_of_a_masked_value_counts_where_the_mask_holds(way: str, value: float) -> None:
    """A rule took the check out of a value that had no part in the result, but not its mask."""

    def f(a: torch.Tensor) -> torch.Tensor:
        return (a.masked_scatter(a.isnan(), a) + 1).pow(-1.5)

    agrees(f, torch.tensor(value), way=way)
