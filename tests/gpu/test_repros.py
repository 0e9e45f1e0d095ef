"""The acceptance programs on the GPU: values, aliasing and identity, against eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import Tensor, nn, rand, randint, randn

from tests.e2e.sides import agree

BF16, F8 = torch.bfloat16, torch.float8_e4m3fn


def through(fn: Callable[..., Any], **kwargs: Any) -> Any:
    return torch.compile(fn, backend="lenz", fullgraph=True, **kwargs)


def adam(w16: Tensor, g16: Tensor, m: Tensor, v: Tensor, w32: Tensor) -> None:
    g32 = g16.to(torch.float32)
    m_new = 0.9 * m + (1 - 0.9) * g32
    v_new = 0.99 * v + (1 - 0.99) * (g32 * g32)
    w_new = w32 - (0.001 * m_new) / (torch.sqrt(v_new) + 1e-5)
    w16.copy_(w_new)
    m.copy_(m_new)
    v.copy_(v_new)
    w32.copy_(w_new)


def adam_args(n: int, device: str) -> list[Tensor]:
    w32 = randn(n, device=device)
    g16 = randn(n, device=device).to(BF16)
    return [w32.to(BF16), g16, rand(n, device=device), rand(n, device=device), w32]


def test_adam_in_place_and_in_return_style(device: str) -> None:
    def returning(w16: Tensor, g16: Tensor, m: Tensor, v: Tensor, w32: Tensor) -> Any:
        g32 = g16.float()
        m_new, v_new = 0.9 * m + 0.1 * g32, 0.99 * v + 0.01 * (g32 * g32)
        w_new = w32 - (0.001 * m_new) / (torch.sqrt(v_new) + 1e-5)
        w16.copy_(w_new)
        return m_new, v_new, w_new

    assert agree(adam, lambda: adam_args(100_003, device)) is None
    agree(returning, lambda: adam_args(4099, device))


def test_adam_of_many_sizes_is_compiled_once(device: str) -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("lenz")
    run = torch.compile(adam, backend=counter, dynamic=True, fullgraph=True)
    for n in (1000, 1001, 4096, 77):
        ours = adam_args(n, device)
        theirs = [t.clone() for t in ours]
        run(*ours)
        adam(*theirs)
        torch.testing.assert_close(ours, theirs)
    assert counter.frame_count == 1


def test_constants_are_fresh_on_every_call(device: str) -> None:
    def f() -> tuple[Tensor, ...]:
        made = [torch.tensor(k, device=device) for k in (False, 0, 1, 5, True, False)]
        return (*made, torch.arange(10, device=device))

    run = through(f)
    got = run()
    torch.testing.assert_close(got, f())
    got[0].fill_(True)
    assert not bool(got[5]) and not bool(run()[0])


def test_every_call_has_a_result_of_its_own(device: str) -> None:
    run = through(lambda a, b: a * b)
    a, b = randn(10, device=device), randn(10, device=device)
    results = [run(a, b) for _ in range(3)]
    assert len({t.data_ptr() for t in results}) == 3
    for t in results:
        torch.testing.assert_close(t, a * b)


def test_scans(device: str) -> None:
    def twice(x: Tensor) -> Tensor:
        return torch.cumprod(torch.cumprod(x, 0) + 1, 0)

    def taken(mask: Tensor, source: Tensor) -> Tensor:
        return source[(torch.cumsum(mask.long(), 0) - 1).clamp(min=0)]

    agree(twice, lambda: [(rand(10_000, device=device) - 0.5) * 0.01])
    agree(taken, lambda: [rand(200_000, device=device) > 0.5, randn(200_000, device=device)])
    run = through(lambda x: torch.cumprod(x + 1, 0), dynamic=True)
    for n in (300, 1000, 100_000, 257):
        x = (rand(n, device=device) - 0.5) * 1e-4
        torch.testing.assert_close(run(x), torch.cumprod(x + 1, 0), rtol=1e-4, atol=1e-4)
    for shape in ((32, 128), (4, 40_000)):
        make = lambda shape=shape: [randn(shape, device=device)]
        agree(lambda x: (x.softmax(-1), x.cumsum(-1)), make, tol=1e-3)


def test_joins_pads_and_negative_indices(device: str) -> None:
    def f(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        t = torch.cat([x.reshape(-1), y.t().reshape(-1), z.reshape(-1)])
        t = F.pad(t, (-3, 5))
        return t.roll(-7)[::3], torch.cat([y.flip(0)[:, -3:], x[:, -4:-1]], 0)

    agree(f, lambda: [randn(s, device=device) for s in ((7, 5), (4, 6), (3,))])
    index = [-1, 0, -7, 6]
    agree(lambda x, i: x[i], lambda: [randn(7, device=device), torch.tensor(index, device=device)])


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_emulated_rounding_is_eager_s_bit_by_bit(dtype: torch.dtype, device: str) -> None:
    def f(x: Tensor, y: Tensor, z: Tensor, w: Tensor) -> Tensor:
        return (((x * y) + z) * w - y).to(x.dtype)

    args = [randn(4096, device=device).to(dtype) for _ in range(4)]
    got = through(f, options={"emulate_rounding": True})(*args)
    assert torch.equal(got, f(*args))


def test_rounding_by_default_is_no_worse_than_eager_s(device: str) -> None:
    def f(x: Tensor, y: Tensor, z: Tensor, w: Tensor) -> Tensor:
        return ((x * y) + z) * w - y

    args = [randn(1 << 16, device=device).to(BF16) for _ in range(4)]
    exact = f(*(a.double() for a in args))
    ours, theirs = ((t.double() - exact).norm() for t in (through(f)(*args), f(*args)))
    assert float(ours) <= float(theirs)


def test_sort_and_topk(device: str) -> None:
    def f(x: Tensor) -> Any:
        return (
            *torch.sort(x, dim=-1, stable=True),
            *torch.sort(x, dim=0, descending=True, stable=True),
        )

    def make() -> list[Tensor]:
        x = randint(0, 9, (64, 512), device=device).float()
        x[0, 3], x[1, 5] = float("nan"), float("inf")
        return [x]

    def best(x: Tensor) -> tuple[Tensor, Tensor]:
        values, index = torch.topk(x, 2)
        return values + 1, index * 2

    agree(f, make)
    agree(best, lambda: [randn(9, device=device)])


def test_bits_seen_as_another_dtype(device: str) -> None:
    def halves(x: Tensor, y: Tensor) -> Tensor:
        return x.view(torch.float16) @ (y.view(torch.float16) + 1)

    def others(x: Tensor) -> tuple[Tensor, ...]:
        return x.view(torch.uint8), x.float().view(torch.int32) + 1, x.view(torch.int32) * 2

    def written(x: Tensor) -> Tensor:
        y = x.view(torch.int32) * 2
        y.sub_(-4)
        x[:, 2:5] = 2
        return y.view(torch.int64)

    agree(halves, lambda: [randn(2, 2, device=device).to(BF16) for _ in range(2)], tol=1e-3)
    agree(others, lambda: [randn(4, 8, device=device).to(BF16)])
    agree(written, lambda: [torch.arange(-12, 12, device=device).reshape(4, 6)])
    x = randn(2, 2, device=device).to(BF16)
    got = through(lambda x: x.view(torch.int16))(x)
    assert got.data_ptr() == x.data_ptr() and got.dtype == torch.int16


def test_kernels_side_by_side(device: str) -> None:
    def f(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, ...]:
        return a.sin() + 1, b.cos() * 2, c.relu() - 3, d.sum(-1)

    def lists(p: list[Tensor], q: list[Tensor]) -> Any:
        return torch._foreach_add(torch._foreach_mul(p, 0.9), q, alpha=-0.1)

    shapes = ((7,), (1000,), (4096,), (64, 100))
    agree(f, lambda: [randn(s, device=device) for s in shapes], tol=2e-5)
    agree(lists, lambda: [[randn(n, device=device) for n in range(1, 30)] for _ in range(2)])


def test_arguments_that_are_not_aligned(device: str) -> None:
    base = torch.arange(4097, device=device, dtype=torch.float32)
    wanted = base.clone()
    run = through(lambda x: x.add_(1), dynamic=False)
    for part in (slice(None, -1), slice(1, None)):
        run(base[part])
        wanted[part] += 1
    torch.testing.assert_close(base, wanted)


def test_a_result_that_is_a_view_of_an_argument(device: str) -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        x.mul_(2)
        return x[2:5], x.view(-1)

    ours = randn(65, device=device)
    theirs = ours.clone()
    run = through(f, dynamic=False)
    run(ours[:-1].clone())
    got = run(ours[1:])
    torch.testing.assert_close(got, f(theirs[1:]))
    torch.testing.assert_close(ours, theirs)
    got[0].zero_()
    assert ours[3].item() == 0


def test_matrix_products(device: str) -> None:
    def scaled(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, bias: Tensor) -> Tensor:
        out = torch._scaled_mm(a, b.t(), sa, sb, bias=bias, out_dtype=BF16)
        return out.relu()

    def eighths() -> list[Tensor]:
        a, b = (randn(n, 64, device=device).to(F8) for n in (32, 48))
        scales = [torch.tensor(s, device=device) for s in (0.5, 2.0)]
        return [a, b, *scales, randn(48, device=device).to(BF16)]

    def added(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return torch.addmm(w.sum().expand(1), x.t(), w).view(-1), x.view(-1)[:4]

    long = lambda *shape: randn(shape, device=device).to(BF16) * 0.05
    agree(lambda a, b: (a @ b).relu(), lambda: [long(32, 16384), long(16384, 32)], tol=2e-2)
    agree(added, lambda: [randn(129, 129, device=device), randn(129, 1, device=device)], tol=1e-3)
    if device == "cpu" or torch.cuda.get_device_capability() >= (8, 9):
        args = eighths()
        torch.testing.assert_close(through(scaled)(*args), scaled(*args), rtol=2e-2, atol=2e-2)


def test_training_across_a_graph_break(device: str) -> None:
    m = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).to(device)

    def f(x: Tensor) -> Tensor:
        h = m[1](m[0](x))
        torch._dynamo.graph_break()
        return m[2](h).sum()

    x = randn(8, 16, device=device)
    f(x).backward()
    wanted = [p.grad.clone() for p in m.parameters() if p.grad is not None]
    m.zero_grad()
    torch.compile(f, backend="lenz")(x).backward()
    torch.testing.assert_close([p.grad for p in m.parameters()], wanted)


def test_shapes_and_strides_that_change(device: str) -> None:
    f = lambda x, y: (x.t() + y).sum(0) * x.shape[0]
    run = through(f, dynamic=True)
    for n in (8, 9, 33):
        x, y = randn(n, n, device=device), randn(n, n, device=device)
        # Sums of n terms of size 1 that may cancel, times n: the error is of n * n roundings.
        torch.testing.assert_close(run(x, y), f(x, y), rtol=1e-5, atol=n * n * 1e-7)


def test_the_last_row_of_a_gathered_gradient(device: str) -> None:
    """ptxas lost the constant in its address (docs/upstream/ptxas-12-packed-add.ptx)."""

    def f(x: Tensor) -> Tensor:
        index = (x > 0).long() % x.shape[-1]
        return (x.scatter_add(-1, index, x) * 0.0625).scatter_add(-1, index, x)

    x = randn(17, 1, 17, device=device, requires_grad=True)
    seed = torch.arange(289, device=device).remainder(5).sub(2.0).view(x.shape)
    (got,) = torch.autograd.grad(through(f)(x), x, seed)
    (want,) = torch.autograd.grad(f(x), x, seed)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("n", [9, 17, 100, 3000])
def test_scans_of_expanded_tensors(n: int, device: str) -> None:
    """Triton 3.6 took carries from wrong lanes (docs/upstream/triton-36-scan-of-copies.py)."""

    def f(x: Tensor) -> tuple[Tensor, ...]:
        wide = x[:, :1].expand(x.shape)
        return wide.cummax(0).indices, wide.cumsum(0), x[:1].expand(x.shape).cumsum(1)

    for dtype in (torch.float32, torch.int32):
        x = randint(-100, 100, (n, 3), device=device).to(dtype)
        for got, want in zip(through(f)(x), f(x), strict=True):
            torch.testing.assert_close(got, want)
