"""Devices in one graph: whose kernels run where, scalars of the CPU, copies between the two."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, randn

import lenz
from tests.e2e.sides import agree, gradients_agree


def test_a_chain_is_one_kernel_of_lenz_on_the_device(device: str) -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return F.gelu(F.layer_norm(x + 1, (64,), w)) * 2

    x, w = randn(40, 64, device=device), randn(64, device=device)
    report: Any = lenz.explain(f)(x, w)
    assert [g.skips for g in report.graphs] == [()]
    assert len(report.graphs[0].kernels) == 1 and not report.graphs[0].externs
    torch.testing.assert_close(report.result, f(x, w), rtol=1e-4, atol=1e-5)
    assert report.result.device == x.device


def test_tensors_of_another_gpu_than_the_current_one(cuda: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")

    def f(x: Tensor, w: Tensor) -> Tensor:
        return (x.softmax(-1) @ w).relu()

    run = torch.compile(f, backend="lenz")
    assert torch.cuda.current_device() == 0
    x, w = (randn(64, 64, device="cuda:1").requires_grad_() for _ in range(2))
    out = run(x, w)
    assert torch.cuda.current_device() == 0, "the caller's device was not restored"
    assert out.device == torch.device("cuda:1")
    torch.testing.assert_close(out, f(x, w), rtol=1e-4, atol=1e-5)
    got = torch.autograd.grad(out.sum(), (x, w))
    want = torch.autograd.grad(f(x, w).sum(), (x, w))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    y, v = x.detach().to("cuda:0"), w.detach().to("cuda:0")
    torch.testing.assert_close(run(y, v), f(y, v), rtol=1e-4, atol=1e-5)


ONE_OF_TWO = """
import torch, lenz
backend = lambda graph, inputs: lenz.backend(graph, inputs, options={option})
run = torch.compile(lambda x: x.softmax(-1) @ x, backend=backend)
x = torch.ones(64, 64, device="cuda:1", requires_grad=True)
for _ in range(3):
    run(x).sum().backward()
torch.cuda.synchronize(1)
print([torch._C._cuda_hasPrimaryContext(n) for n in range(2)])
"""


@pytest.mark.parametrize("option", ({}, {"native": False}))
def test_a_gpu_that_is_not_used_gets_no_context(cuda: str, option: dict[str, bool]) -> None:
    """A context takes memory of its GPU; torch's own guards make none either."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    done = subprocess.run(
        [sys.executable, "-c", ONE_OF_TWO.replace("{option}", repr(option))],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == "[False, True]", done.stdout + done.stderr


def test_two_gpus_in_one_graph(cuda: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    make = lambda: [randn(5, 7, device="cuda:0"), randn(5, 7, device="cuda:1")]
    agree(lambda a, b: ((a * 2).to("cuda:1") + b, (b + 1).to("cuda:0") * a), make)


def test_scalars_of_the_cpu_mix_with_tensors_of_the_device(device: str) -> None:
    def f(s: Tensor, t: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        return x * s + t, torch.where(x > s, x, t), (x * t).sum() * s, s + t

    agree(f, lambda: [torch.tensor(2.5), torch.tensor(-1, dtype=torch.int64),
                      randn(33, 5, device=device)])  # fmt: skip
    double = lambda: [torch.tensor(1.25, dtype=torch.float64), randn(9, device=device)]
    agree(lambda s, x: x * s, double)


def test_a_scalar_of_the_cpu_that_is_written(device: str) -> None:
    def f(s: Tensor, x: Tensor) -> Tensor:
        s.add_(1)
        return x * s

    make = lambda: [torch.tensor(2.0), randn(33, device=device)]
    agree(f, make, calls=3)


def test_python_numbers_that_change_between_calls(device: str) -> None:
    run = torch.compile(lambda x, a, n: x * a + n, backend="lenz", dynamic=True)
    x = randn(17, device=device)
    for a, n in ((0.5, 3), (1.5, 4), (-2.0, 5)):
        torch.testing.assert_close(run(x, a, n), x * a + n)


def test_a_gradient_of_a_scalar_of_the_cpu(device: str) -> None:
    make = lambda: [torch.tensor(2.0, requires_grad=True), randn(6, device=device)]
    gradients_agree(lambda s, x: (x * s).sum(), make)


def test_copies_between_the_devices_inside_a_graph(device: str) -> None:
    def f(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        a = x + 1
        b = a.cpu() * 2
        return b, b.to(device) + x, (y * 3).to(device) + a, y.to(device, torch.float64)

    got = agree(f, lambda: [randn(31, device=device), randn(31)], calls=2)
    assert [t.device.type for t in got] == ["cpu", device, device, device]


def test_a_pinned_tensor_is_copied_when_its_values_are_there(cuda: str) -> None:
    def f(x: Tensor) -> Tensor:
        return x.to("cuda", non_blocking=True) * 2

    run = torch.compile(f, backend="lenz")
    for k in range(3):
        x = torch.full((1 << 20,), float(k)).pin_memory()
        out = run(x)
        torch.cuda.synchronize()
        assert bool((out == 2.0 * k).all())


def test_a_copy_to_pinned_memory_arrives(cuda: str) -> None:
    def f(x: Tensor, into: Tensor) -> None:
        into.copy_(x * 2, non_blocking=True)

    into = torch.zeros(1 << 16).pin_memory()
    torch.compile(f, backend="lenz")(torch.ones(1 << 16, device="cuda"), into)
    torch.cuda.synchronize()
    assert bool((into == 2).all())


@pytest.mark.parametrize("captured", (False, True))
def test_item_inside_a_graph(captured: bool, device: str) -> None:
    def f(x: Tensor) -> Tensor:
        n = x.sum().item()
        return x * n + n

    x = torch.arange(5.0, device=device)
    with torch._dynamo.config.patch(capture_scalar_outputs=captured):
        run = torch.compile(f, backend="lenz", fullgraph=captured)
        for k in range(3):
            torch.testing.assert_close(run(x + k), f(x + k))


def test_sizes_that_depend_on_values(device: str) -> None:
    def f(x: Tensor) -> Tensor:
        return (x[x > 0] * 2).sum() + x.nonzero().shape[0]

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        run = torch.compile(f, backend="lenz")
        for n in (5, 40, 0):
            x = torch.arange(-2.0, n, device=device)
            torch.testing.assert_close(run(x), f(x))


def test_tensors_made_in_the_graph_are_on_the_device(device: str) -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        n = x.shape[0]
        mask = torch.ones(n, n, dtype=torch.bool, device=x.device).tril()
        return (
            torch.arange(n, device=x.device) + x, torch.zeros_like(x), x.new_full((2, 3), 7.0),
            torch.tensor(3, device=x.device) * x, torch.where(mask, x, 0.0).sum(-1),
        )  # fmt: skip

    got = agree(f, lambda: [randn(6, device=device)])
    assert {t.device.type for t in got} == {device}


def test_a_seed_decides_random_numbers_on_the_device(device: str) -> None:
    run = torch.compile(lambda x: F.dropout(x, 0.5), backend="lenz")
    x = torch.ones(1 << 16, device=device)
    made = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        made.append((run(x), run(x)))
    assert torch.equal(made[0][0], made[1][0]) and torch.equal(made[0][1], made[1][1])
    assert not torch.equal(made[0][0], made[2][0]), "the seed does not matter"
    assert not torch.equal(made[0][0], made[0][1]), "two calls draw the same numbers"
    kept = float((made[0][0] != 0).float().mean())
    assert abs(kept - 0.5) < 0.02, f"{kept} of the elements were kept"


def test_dropout_drops_the_same_elements_in_backward(device: str) -> None:
    x = torch.ones(4096, device=device, requires_grad=True)
    out = torch.compile(lambda x: F.dropout(x * 3, 0.25), backend="lenz")(x)
    (grad,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(grad, out.detach())
    assert 0 < int((grad == 0).sum()) < 2048


BAD_INDEX = """
import sys, torch, lenz
run = torch.compile(lambda x, i: x[i] * 2, backend=lenz.backend)
x = torch.randn(50, 8, device=sys.argv[1])
print(run(x, torch.tensor([3, -50], device=x.device)).isfinite().all().item(), flush=True)
out = run(x, torch.tensor([3, 51], device=x.device))
if x.is_cuda:
    torch.cuda.synchronize()
print("no error was raised")
"""


def test_an_index_that_is_out_of_range_is_an_error(device: str) -> None:
    """In a process of its own: a failed check may leave the device unusable, as eager's does."""
    done = subprocess.run(
        [sys.executable, "-c", BAD_INDEX, device],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout.startswith("True"), done.stderr
    assert done.returncode and "no error" not in done.stdout, done.stdout + done.stderr
