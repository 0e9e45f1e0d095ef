"""Values around launches and calls (`debug_values`), and the first NaN (`nans`)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import lenz
from lenz.errors import UserError

FIELDS = (
    "values", "min", "max", "device", "size", "stride", "dtype", "layout", "numel", "contiguous",
    "requires_grad", "nan", "inf",
)  # fmt: skip


def soft(bias: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.addmm(bias, x, w).relu() + 1


BIAS, X, W = torch.randn(6), torch.randn(16, 10), torch.randn(10, 6)


def run(f: Any = soft, args: Any = (BIAS, X, W), **options: Any) -> Any:
    torch.compiler.reset()
    return torch.compile(f, backend="lenz", options=options)(*args)


def kernel_of(f: Any = soft, args: Any = (BIAS, X, W)) -> str:
    (kernel,) = lenz.explain(f)(*args).graphs[0].kernels
    return kernel.name


def test_tensors_are_printed_before_and_after(capfd: pytest.CaptureFixture[str]) -> None:
    kernel = kernel_of()
    got = run(debug_values="1")
    torch.testing.assert_close(got, soft(BIAS, X, W))
    text = capfd.readouterr().err
    blocks = re.findall(r"^\[ (\w+) - (\S+) - (\w+) \]\n((?:  .*\n)+)", text, re.MULTILINE)
    for when in ("before_launch", "after_launch"):
        mine = {(name, buffer) for w, name, buffer, _ in blocks if w == when}
        assert mine >= {("aten.addmm.out", b) for b in ("bias", "x", "w", "addmm")}
        assert {name for name, _ in mine} == {"aten.addmm.out", kernel}
    for _, _, buffer, told in blocks:
        assert all(field in told for field in FIELDS), f"{buffer}: {told}"
    (bias,) = [t for w, n, b, t in blocks if (w, n[:4], b) == ("before_launch", "aten", "bias")]
    assert "size [6], stride [1], dtype torch.float32, device cpu" in bias
    assert str(BIAS.tolist()) in bias
    assert f"min and max {BIAS.min().item()} {BIAS.max().item()}, nan 0, inf 0" in bias


def test_one_kernel_can_be_chosen(capfd: pytest.CaptureFixture[str]) -> None:
    kernel = kernel_of()
    run(debug_values="1", debug_kernels=f"{kernel},other")
    names = set(re.findall(r"^\[ \w+ - (\S+) -", capfd.readouterr().err, re.MULTILINE))
    assert names == {kernel}


def test_an_unknown_kernel_is_a_warning_that_names_the_known_ones(
    capfd: pytest.CaptureFixture[str],
) -> None:
    kernel = kernel_of()
    with pytest.warns(UserWarning, match=f"no kernel or call nope; .* aten.addmm.out, {kernel}"):
        run(debug_values="1", debug_kernels="nope")
    assert capfd.readouterr().err == ""


def test_values_are_saved_one_tensor_a_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    kernel = kernel_of()
    got = run(debug_values="save", debug_dir=str(tmp_path), debug_kernels=kernel)
    (folder,) = tmp_path.iterdir()
    assert f"values of graph0.inference [0/0] in {folder}" in capfd.readouterr().err
    found = {f.name.split(".", 2)[2]: torch.load(f) for f in folder.iterdir()}
    # The kernel works in place, on the product.
    before, after = (f"{when}_launch.{kernel}.add.pt" for when in ("before", "after"))
    assert found.keys() == {before, after}
    torch.testing.assert_close(found[before], torch.addmm(BIAS, X, W))
    assert torch.equal(found[after], got)


def test_all_types_have_values(capfd: pytest.CaptureFixture[str]) -> None:
    types = (torch.bool, torch.int8, torch.bfloat16, torch.float64, torch.complex64)
    args = [torch.ones(3, dtype=d) for d in types] + [torch.ones(3).to(torch.float8_e4m3fn)]
    run(lambda *xs: [x.clone().reshape(1, 3) for x in xs], args, debug_values="1")
    text = capfd.readouterr().err
    assert all(f"dtype {t.dtype}" in text for t in args)


def test_another_word_is_refused() -> None:
    with pytest.raises(UserError, match="debug_values: expected one of 1, save, None, got 'all'"):
        run(debug_values="all")


def test_the_first_kernel_that_makes_a_nan_is_named() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        a = torch.exp(x) @ w
        b = torch.log(a - 100.0).sum(0)  # the NaN
        return (b @ w) * 2

    x, w = torch.randn(4, 4), torch.rand(4, 4)
    line = f.__code__.co_firstlineno + 2
    pattern = (
        rf"^fused_\w+ of graph0.inference \[0/0\] makes \d+ NaN .* {re.escape(__file__)}:{line},"
    )
    with pytest.raises(FloatingPointError, match=pattern):
        run(f, (x, w), nans=True)
    assert bool(torch.isnan(run(f, (x, w))).all()), "without the option nothing stops"


def test_a_library_call_can_make_the_nan() -> None:
    great = torch.full((2, 2), float("inf"))
    with pytest.raises(FloatingPointError, match=r"^aten.mm.out .* makes 4 NaN"):
        run(lambda x, y: (x @ y) * 2, (great, torch.zeros(2, 2)), nans=True)


def test_a_nan_that_was_given_is_no_fault() -> None:
    x = X.clone()
    x[3] = float("nan")
    got = run(args=(BIAS, x, W), nans=True)
    torch.testing.assert_close(got, soft(BIAS, x, W), equal_nan=True)


def test_parts_of_new_memory_are_no_fault() -> None:
    """Kernels that fill one result in turn: what is not written yet may look like NaN."""
    f = lambda x, y: torch.cat([x.exp(), (y @ y).sin()], 1)
    x, y = torch.randn(7, 3), torch.randn(7, 7)
    torch.empty(7, 10).fill_(float("nan"))
    torch.testing.assert_close(run(f, (x, y), nans=True), f(x, y))


def test_a_backward_pass_is_watched_too() -> None:
    x = torch.zeros(3, requires_grad=True)
    out = run(lambda t: torch.sqrt(t * t), (x,), nans=True)
    with pytest.raises(FloatingPointError, match=r"graph0.backward \[0/0\] makes 3 NaN"):
        out.sum().backward()
