"""Recurrent networks and state spaces."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.example import Example, classes, ids, next_token, plain

WORDS, BATCH, LENGTH = 61, 3, 12


class Tagged(nn.Module):
    """Words through torch's own recurrent layers in both directions, to classes of words."""

    def __init__(self, layer: type[nn.RNNBase], width: int = 24) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, width, padding_idx=0)
        self.body = layer(width, width, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, 7)

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(self.table(words))[0])
        return out


def tags(out: Tensor, *_: Tensor) -> Tensor:
    """Cross entropy of classes of words."""
    return classes(out.flatten(0, 1))


def tagged(layer: type[nn.RNNBase], traced: bool) -> Example:
    """A tagger; Dynamo traces recurrent layers only if it is told to, else they run in eager."""
    words = (ids(WORDS, BATCH, LENGTH),)
    return Example(Tagged(layer), words, plain, tags, dynamo={"allow_rnn": traced})


class Cells(nn.Module):
    """A language model of cells, whose loop is unrolled."""

    def __init__(self, cell: type[nn.RNNCellBase], width: int = 24) -> None:
        super().__init__()
        self.table, self.cell = nn.Embedding(WORDS, width), cell(width, width)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.table(words)
        h = x.new_zeros(x.shape[0], x.shape[2])
        c, made = h, []
        for t in range(x.shape[1]):
            if isinstance(self.cell, nn.LSTMCell):
                h, c = self.cell(x[:, t], (h, c))
            else:
                h = self.cell(x[:, t], h)
            made.append(h)
        out: Tensor = self.head(self.norm(torch.stack(made, 1)))
        return out


def lstm_cells() -> Example:
    """nn.LSTMCell in a loop."""
    return Example(Cells(nn.LSTMCell), (ids(WORDS, BATCH, LENGTH),), plain, next_token)


def gru_cells() -> Example:
    """nn.GRUCell in a loop."""
    return Example(Cells(nn.GRUCell), (ids(WORDS, BATCH, LENGTH),), plain, next_token)


class Selective(nn.Module):
    """Mamba's block: a short causal convolution, and a state whose decay depends on the input.

    The state is h[t] = exp(step * a) h[t - 1] + step * b x, in a loop over time.
    """

    def __init__(self, width: int, wide: int, state: int) -> None:
        super().__init__()
        self.state = state
        self.norm, self.enter = nn.RMSNorm(width), nn.Linear(width, 2 * wide, bias=False)
        self.near = nn.Conv1d(wide, wide, 4, padding=3, groups=wide)
        self.select, self.step = nn.Linear(wide, 2 * state + 2), nn.Linear(2, wide)
        self.rate = nn.Parameter(torch.arange(1.0, state + 1).log().repeat(wide, 1))
        self.past, self.leave = nn.Parameter(torch.ones(wide)), nn.Linear(wide, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, length, width] -> the same shape."""
        y, gate = self.enter(self.norm(x)).chunk(2, -1)
        y = F.silu(self.near(y.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        low, b, c = self.select(y).split([2, self.state, self.state], -1)
        step = F.softplus(self.step(low))
        decay = torch.exp(step[..., None] * -self.rate.exp())
        drive = (step * y)[..., None] * b[:, :, None]
        h, made = torch.zeros_like(drive[:, 0]), []
        for t in range(x.shape[1]):
            h = decay[:, t] * h + drive[:, t]
            made.append((h * c[:, t, None]).sum(-1))
        y = torch.stack(made, 1) + self.past * y
        out: Tensor = x + self.leave(y * F.silu(gate))
        return out


def selective() -> Example:
    """A language model of two of Mamba's blocks."""
    module = nn.Sequential(
        nn.Embedding(WORDS, 24), Selective(24, 32, 8), Selective(24, 32, 8), nn.Linear(24, WORDS)
    )
    return Example(module, (ids(WORDS, BATCH, LENGTH),), plain, next_token)


class Diagonal(nn.Module):
    """A state space of constant decay as cumulative sums: h[t] = d^t sum over s of d^-s x[s]."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.table, self.mix = nn.Embedding(WORDS, width), nn.Linear(width, width)
        self.decay = nn.Parameter(torch.linspace(-0.5, -0.05, width))
        self.gate, self.head = nn.Linear(width, width), nn.Linear(width, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.table(words)
        t = torch.arange(words.shape[1], device=x.device, dtype=x.dtype)[:, None]
        size = F.softplus(self.mix(x))
        h = (torch.logcumsumexp(size.log() - t * self.decay, 1) + t * self.decay).exp()
        rest = (x * torch.exp(-t * self.decay)).cumsum(1) * torch.exp(t * self.decay)
        out: Tensor = self.head(torch.sigmoid(self.gate(x)) * h + rest)
        return out


def diagonal() -> Example:
    """A linear recurrence by cumsum and logcumsumexp."""
    return Example(Diagonal(), (ids(WORDS, BATCH, LENGTH),), plain, next_token)


class TimeMix(nn.Module):
    """RWKV's weighted average over the past, kept stable by its running maximum."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(WORDS, width), nn.LayerNorm(width)
        self.keys, self.values, self.gate = (nn.Linear(width, width) for _ in range(3))
        self.decay = nn.Parameter(torch.linspace(-1, 0.5, width))
        self.first, self.lerp = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.rand(width))
        self.head = nn.Linear(width, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.norm(self.table(words))
        x = torch.lerp(x, F.pad(x, (0, 0, 1, -1)), self.lerp)
        k, v, decay = self.keys(x), self.values(x), -self.decay.exp()
        top = torch.full_like(k[:, 0], -1e30)
        a, b, made = torch.zeros_like(top), torch.zeros_like(top), []
        for t in range(x.shape[1]):
            best = torch.maximum(top, self.first + k[:, t])
            old, new = torch.exp(top - best), torch.exp(self.first + k[:, t] - best)
            made.append((old * a + new * v[:, t]) / (old * b + new))
            best = torch.maximum(top + decay, k[:, t])
            old, new = torch.exp(top + decay - best), torch.exp(k[:, t] - best)
            a, b, top = old * a + new * v[:, t], old * b + new, best
        out: Tensor = self.head(torch.sigmoid(self.gate(x)) * torch.stack(made, 1))
        return out


def rwkv() -> Example:
    """A language model of RWKV's kind."""
    return Example(TimeMix(), (ids(WORDS, BATCH, LENGTH),), plain, next_token)


MODELS: dict[str, Callable[[], Example]] = {
    "LSTM": lambda: tagged(nn.LSTM, False),
    "LSTM, traced": lambda: tagged(nn.LSTM, True),
    "GRU, traced": lambda: tagged(nn.GRU, True),
    "LSTM cells": lstm_cells,
    "GRU cells": gru_cells,
    "Mamba": selective,
    "Linear recurrence": diagonal,
    "RWKV": rwkv,
}
