"""Cells of LSTM and GRU: the parts are what torch's cells are on CPUs, gradients too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lenz.frontend.cells import gru_cell, gru_cell_backward, lstm_cell, lstm_cell_backward
from tests.cuda import Fake, fake_cuda, programs_of

B, W = 3, 5
GIVEN = [[True, True], [True, False], [False, True]]


def weights(gates: int) -> list[Tensor]:
    """Gates of input and state, the old state, biases."""
    torch.manual_seed(0)
    wide = [torch.randn(B, gates * W, dtype=torch.float64) for _ in range(2)]
    biases = [torch.randn(gates * W, dtype=torch.float64) for _ in range(2)]
    made = [*wide, torch.randn(B, W, dtype=torch.float64), *biases]
    return [t.requires_grad_() for t in made]


@pytest.mark.diagonal(2)
@pytest.mark.parametrize("given", GIVEN)
def test_lstm(given: list[bool]) -> None:
    x, h, cx, x_bias, h_bias = leaves = weights(4)
    eye = torch.eye(4 * W, dtype=torch.float64)
    hy, cy, work = lstm_cell(x, h, cx, x_bias, h_bias)
    # With the identity in the place of weights, the gates are given as the cell's input.
    cell = nn.LSTMCell(4 * W, W, dtype=torch.float64)
    with torch.no_grad():
        cell.weight_ih.copy_(eye)
        cell.weight_hh.zero_()
        cell.bias_ih.copy_(x_bias)
        cell.bias_hh.copy_(h_bias)
    wanted = cell(x + h, (torch.zeros(B, W, dtype=torch.float64), cx))
    torch.testing.assert_close((hy, cy), wanted)
    assert work.shape == (B, 4 * W)
    grads = [torch.randn(B, W, dtype=torch.float64) if g else None for g in given]
    used = [(y, g) for y, g in zip((hy, cy), grads, strict=True) if g is not None]
    dx, dh, dc, db, _ = torch.autograd.grad(
        [y for y, _ in used], leaves, [g for _, g in used], allow_unused=True
    )
    got = lstm_cell_backward(*grads, cx.detach(), cy.detach(), work.detach(), True)  # type: ignore[arg-type, call-arg]
    torch.testing.assert_close(got, (dx, dc, db))
    torch.testing.assert_close(dx, dh)


def test_gru() -> None:
    leaves = weights(3)
    x, h, hx, x_bias, h_bias = leaves
    hy, work = gru_cell(*leaves)
    cell = nn.GRUCell(3 * W, W, dtype=torch.float64)
    with torch.no_grad():
        cell.weight_ih.copy_(torch.eye(3 * W))
        cell.weight_hh.copy_(torch.linalg.lstsq(hx, h).solution.T)  # B < W: it is exact
        cell.bias_ih.copy_(x_bias)
        cell.bias_hh.copy_(h_bias)
    torch.testing.assert_close(hy, cell(x, hx))
    grad = torch.randn(B, W, dtype=torch.float64)
    wanted = torch.autograd.grad(hy, leaves, grad)
    got = gru_cell_backward(grad, work.detach(), True)
    torch.testing.assert_close(got, wanted)
    assert gru_cell_backward(grad, work.detach(), False)[3:] == (None, None)


def test_halves_are_computed_in_float32() -> None:
    given = [t.detach().bfloat16() for t in weights(4)]
    hy, cy, work = lstm_cell(*given)
    assert hy.dtype is cy.dtype is work.dtype is torch.bfloat16
    exact = lstm_cell(*[t.double() for t in given])
    torch.testing.assert_close((hy, cy), tuple(t.bfloat16() for t in exact[:2]), rtol=8e-3, atol=0)


def test_a_cell_on_a_gpu_is_no_call() -> None:
    with fake_cuda():
        with torch.device("cuda"):
            cell = nn.LSTMCell(8, 8)
        args = [Fake((4, 8), torch.float32).make() for _ in range(3)]
        programs = programs_of(lambda x, h, c: cell(x, (h, c)), *args)
    assert [p.kind for p in programs] == ["forward", "backward"]
    names = {name for p in programs for name in p.calls}
    assert "aten.sigmoid.default" in names
    assert not [name for name in names if "fused" in name]
