"""LSTM and GRU cells without their matrix products, in parts that fuse.

On GPUs torch's own cells are one op each, with a workspace [batch, 4 or 5 times the width] for the
gradient: for an LSTM the gates i, f, g, o as they are used; for a GRU r, z, n, the old state, and
the term that r multiplies. The layout is kept, and as in torch half types are computed in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lenz.frontend.values import widened

aten = torch.ops.aten


def _with_bias(gates: Tensor, bias: Tensor | None) -> Tensor:
    return widened(gates) if bias is None else widened(gates) + widened(bias)


def lstm_cell(
    x: Tensor, h: Tensor, cx: Tensor, x_bias: Tensor | None = None, h_bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gates [batch, 4 width] of input and state, and the old cell -> state, cell, workspace."""
    gates = (_with_bias(x, x_bias) + _with_bias(h, h_bias)).chunk(4, 1)
    i, f, o = (gates[k].sigmoid() for k in (0, 1, 3))
    g = gates[2].tanh()
    cy = f * widened(cx) + i * g
    return (o * cy.tanh()).to(cx.dtype), cy.to(cx.dtype), torch.cat([i, f, g, o], 1).to(x.dtype)


def lstm_cell_backward(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, work: Tensor, bias: bool
) -> tuple[Tensor | None, ...]:
    """Gradients of the gates (both kinds have the same), of the old cell, and of a bias."""
    if grad_hy is None and grad_cy is None:
        return None, None, None
    i, f, g, o = widened(work).chunk(4, 1)
    bend = widened(cy).tanh()
    dc = torch.zeros_like(i) if grad_cy is None else widened(grad_cy)
    do = torch.zeros_like(i)
    if grad_hy is not None:
        do = widened(grad_hy) * bend
        dc = widened(grad_hy) * o * (1 - bend * bend) + dc
    slopes = [
        dc * g * (1 - i) * i,
        dc * widened(cx) * (1 - f) * f,
        dc * i * (1 - g * g),
        do * (1 - o) * o,
    ]
    gates = torch.cat(slopes, 1).to(work.dtype)
    return gates, (dc * f).to(cx.dtype), gates.sum(0) if bias else None


def gru_cell(
    x: Tensor, h: Tensor, hx: Tensor, x_bias: Tensor | None = None, h_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Gates [batch, 3 width] of input and state, and the old state -> state, workspace."""
    xr, xz, xn = _with_bias(x, x_bias).chunk(3, 1)
    hr, hz, hn = _with_bias(h, h_bias).chunk(3, 1)
    r, z = (xr + hr).sigmoid(), (xz + hz).sigmoid()
    n = (xn + r * hn).tanh()
    hy = n + z * (widened(hx) - n)
    return hy.to(hx.dtype), torch.cat([r, z, n, widened(hx), hn], 1).to(x.dtype)


def gru_cell_backward(grad: Tensor, work: Tensor, bias: bool) -> tuple[Tensor | None, ...]:
    """Gradients of the gates of input and of state, of the old state, and of both biases."""
    r, z, n, hx, hn = widened(work).chunk(5, 1)
    dy = widened(grad)
    dz = dy * (hx - n) * (1 - z) * z
    dn = dy * (1 - z) * (1 - n * n)
    dr = dn * hn * (1 - r) * r
    x = torch.cat([dr, dz, dn], 1).to(work.dtype)
    h = torch.cat([dr, dz, dn * r], 1).to(work.dtype)
    return x, h, (dy * z).to(grad.dtype), *((x.sum(0), h.sum(0)) if bias else (None, None))


CELLS: Mapping[torch._ops.OpOverload, Callable[..., Any]] = {
    aten._thnn_fused_lstm_cell.default: lstm_cell,
    aten._thnn_fused_lstm_cell_backward_impl.default: lstm_cell_backward,
    aten._thnn_fused_gru_cell.default: gru_cell,
    aten._thnn_fused_gru_cell_backward.default: gru_cell_backward,
}
