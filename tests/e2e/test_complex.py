"""Complex tensors through the whole compiler: gradients, marks of conjugates, results as memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.e2e.sides import agree

G = torch.Generator().manual_seed(0)
Z, W = (torch.randn(5, 7, dtype=torch.complex64, generator=G) for _ in range(2))
X = torch.randn(5, 7, generator=G)
CASES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "product": lambda z, w, x: z * w * x,
    "quotient": lambda z, w, x: (z.exp() / w).real,
    "transform": lambda z, w, x: torch.fft.ifft(torch.fft.fft(z) * w).abs(),
    "polar": lambda z, w, x: (torch.polar(x.abs(), x) * z).imag,
    "matrices": lambda z, w, x: z @ w.mH,
    "numbers": lambda z, w, x: z * 1j + w / (1 + 2j) * torch.exp(1j * x),
    "functions": lambda z, w, x: z.sqrt() * z.log() + z.sgn(),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str) -> None:
    """The gradient of a complex result comes marked as a conjugate, which tracing has not seen."""
    grads = []
    for fn in (CASES[name], torch.compile(CASES[name], backend="lenz")):
        inputs = [t.clone().requires_grad_() for t in (Z, W, X)]
        made = fn(*inputs)
        made.backward(torch.ones_like(made).conj() * 1)
        grads.append([t.grad for t in inputs if t.grad is not None])
        inputs = [t.clone().requires_grad_() for t in (Z, W, X)]
        made = fn(*inputs)
        made.backward((made.detach() * 1).conj())
        grads[-1] += [t.grad for t in inputs if t.grad is not None]
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:lenz runs a graph in eager")  # the last one
def test_marks_of_arguments() -> None:
    """A conjugate, and the imaginary parts of one, whose memory holds something else."""
    twice = torch.compile(lambda z: z * 2, backend="lenz")
    for z in (Z, Z.conj(), Z.t().conj(), Z.conj().imag):
        torch.testing.assert_close(twice(z), z * 2)


def test_a_result_may_be_written() -> None:
    """It is no view of the pairs it was stored as: autograd refuses writes into such."""
    z = Z.clone().requires_grad_()
    made = torch.compile(lambda z, w: z * w + 1, backend="lenz")(z, W)
    made.mul_(2)
    made.real.sum().backward()
    torch.testing.assert_close(z.grad, 2 * W.conj())


def test_a_result_and_its_conjugate_are_one_memory() -> None:
    """Conjugates of computed tensors had memory of their own: writes to one missed the other."""

    def fn(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        made = z * 2
        return made, made.conj(), made.mH[1:]

    made, flagged, turned = torch.compile(fn, backend="lenz")(Z)
    made.zero_()
    assert flagged.is_conj() and turned.is_conj(), "marks of results are not eager's"
    assert not flagged.any() and not turned.any(), "a result does not share its memory"


def test_a_mean_of_complex_numbers_in_a_real_type() -> None:
    """Eager drops the imaginary parts; the lowering failed, and took the graph to eager."""
    for dtype in (torch.float32, torch.float64):
        agree(lambda z, dtype=dtype: z.mean(dtype=dtype) + z.mean(0, dtype=dtype), lambda: (Z,))


def test_an_argument_is_written_behind_what_reads_it() -> None:
    def fn(z: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        before = z.conj()
        old = before * 1
        z.mul_(w)
        return old, z.abs()

    z = Z.clone()
    old, size = torch.compile(fn, backend="lenz")(z, W)
    torch.testing.assert_close((old, size, z), (Z.conj() * 1, (Z * W).abs(), Z * W))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_imaginary_parts_of_conjugates_of_halves() -> None:
    """They are marked as negated; negation has no form in f16."""
    fn = lambda x: torch.complex(x, x * 2).conj().imag
    x = torch.tensor([2.0, -0.0, float("inf")], dtype=torch.float16)
    torch.testing.assert_close(torch.compile(fn, backend="lenz")(x), fn(x))


VIEWS: dict[str, Callable[[Tensor], object]] = {
    "a slice": lambda z: z.real[1:],
    "parts of a part": lambda z: (z.real.chunk(2)[1], z.imag.split(2, 1)[0]),
    "a row": lambda z: z.imag.unbind()[0],
    "columns": lambda z: z.real.mT[1:],
}


@pytest.mark.parametrize("way", VIEWS)
def test_views_of_a_part_have_the_strides_of_pairs(way: str) -> None:
    agree(lambda x: VIEWS[way](torch.polar(x, x)), lambda: (X,))


@pytest.mark.parametrize("native", (True, False))
def test_repeated_elements_of_a_conjugate(native: bool) -> None:
    """Their copy as real numbers has strides of 0 too: raised an error where it had its own."""
    fn = lambda z: (z * 2, z.real + 1)
    for z in (Z.conj().expand(3, 5, 7), Z[:, :1].expand(5, 7).mH, Z[0, 0].conj().expand(4)):
        agree(fn, lambda z=z: (z,), options={"native": native})
    grads: list[Tensor] = []
    for run in (torch.log, torch.compile(torch.log, backend="lenz", options={"native": native})):
        z = Z.expand(3, 5, 7).requires_grad_()
        made = run(z)
        grads += torch.autograd.grad(made, z, torch.ones_like(made))  # by log's saved conjugate
    torch.testing.assert_close(grads[1], grads[0])


ENDS = (0.0, -0.0, 1.0, -2.5, float("inf"), float("-inf"), float("nan"), 1e-40, 3e38, 1e-30)
LARGE = (0.0, -0.0, 1.0, -2.5, float("inf"), float("-inf"), float("nan"), 5e-324, 1.7e308, 1e-200)
INNER = (1 + 1e-4j, 1 + 1e-6j, 0.6 + 0.8j, 0.70710678 + 0.70710678j)  # near the unit circle
OUTER = (89.5 + 1e-10j, -100 + 1e-10j, 715 + 1e-12j, 3e-45 + 1.5e-45j)  # factors overflow, or lose
FUNCTIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    *(torch.exp, torch.log, torch.log2, torch.log10, torch.sqrt, torch.rsqrt),
    *(torch.sinh, torch.cosh, torch.sin, torch.cos),
    *(lambda z: z**1.5, lambda z: z**0, lambda z: 2.0**z, lambda z: z**-2.5),
    *(lambda z: 1.0 - z, lambda z: z + z.real, lambda z: torch.add(z, z, alpha=2)),
    lambda z: torch.linalg.vector_norm(z[None], dim=0),
)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_ends(dtype: torch.dtype) -> None:
    """Every part is eager's to rounding, NaN where that is NaN, and a zero has its sign.

    Infinite and imaginary numbers gave NaN, moduli beyond the largest number gave infinity, and
    logarithms near the unit circle had no right digit.
    """
    parts = torch.tensor(ENDS if dtype is torch.float32 else LARGE, dtype=dtype)
    z = torch.complex(*torch.meshgrid(parts, parts, indexing="ij")).flatten()
    z = torch.cat([z, torch.tensor(INNER + OUTER, dtype=z.dtype)])
    fn = lambda z: tuple([f(z) for f in FUNCTIONS])
    made = torch.compile(fn, backend="lenz", options={"on_error": "raise"})(z)
    steps = 4 * torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    for got, want in zip(made, fn(z), strict=True):
        a, b = (torch.view_as_real(t) if t.is_complex() else t for t in (got, want))
        torch.testing.assert_close(a, b, rtol=5e-5, atol=steps, equal_nan=True)
        zeros = b == 0
        assert torch.equal(a[zeros].signbit(), b[zeros].signbit()), "the sign of a zero"


def test_powers_of_zero() -> None:
    """They were 0 with negative exponents too."""
    w = torch.tensor([1.5, -2.5, 1j, 0, complex("inf"), 2 - 1j], dtype=torch.complex64)
    parts = [
        torch.view_as_real(f(w * 0, w))
        for f in (torch.pow, torch.compile(torch.pow, backend="lenz"))
    ]
    torch.testing.assert_close(parts[1], parts[0], equal_nan=True)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_views_of_the_parts_of_a_result(dynamic: bool, gradients: bool) -> None:
    """AOTAutograd makes them again from the complex result, which is a view of the parts here."""

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        parts = torch.view_as_real(1j * x).flatten(-2)
        return parts, parts.unsqueeze(-2)

    def run(f: Callable[[Tensor], tuple[Tensor, Tensor]]) -> list[Tensor]:
        x = torch.arange(16.0).reshape(1, 2, 4, 2).transpose(0, -1).requires_grad_(gradients)
        parts, rows = f(x)
        assert parts.data_ptr() == rows.data_ptr()
        if gradients:
            (parts.sum() + (2 * rows).sum()).backward()
        return [parts, rows, *([x.grad] if x.grad is not None else [])]

    got, want = run(torch.compile(fn, backend="lenz", dynamic=dynamic)), run(fn)
    assert [g.stride() for g in got] == [w.stride() for w in want]
    torch.testing.assert_close(got, want, rtol=0, atol=0)
