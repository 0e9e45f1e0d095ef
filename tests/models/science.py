"""Fields, physics, control: nets on coordinates, solvers, Fourier operators, policies."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.example import Example, classes, plain, waves


class Radiance(nn.Module):
    """NeRF: sines of positions, a perceptron, and light summed along rays."""

    def __init__(self, octaves: int = 5, width: int = 32) -> None:
        super().__init__()
        self.register_buffer("rates", 2.0 ** torch.arange(octaves))
        self.first = nn.Linear(6 * octaves + 3, width)
        self.second = nn.Linear(width + 6 * octaves + 3, width)
        self.density, self.colour = nn.Linear(width, 1), nn.Linear(width + 3, 3)

    def forward(self, origin: Tensor, way: Tensor, depth: Tensor) -> Tensor:
        """origin, way: [rays, 3]; depth: [rays, samples], rising -> colours [rays, 3]."""
        x = origin[:, None] + way[:, None] * depth[..., None]
        phase = (x[..., None] * self.rates).flatten(-2)
        e = torch.cat([x, phase.sin(), phase.cos()], -1)
        h = F.relu(self.first(e))
        h = F.relu(self.second(torch.cat([h, e], -1)))
        thick = F.softplus(self.density(h).squeeze(-1) - 1)
        sight = F.normalize(way, dim=-1)[:, None].expand_as(x)
        colour = torch.sigmoid(self.colour(torch.cat([h, sight], -1)))
        gaps = torch.cat([depth.diff(dim=1), torch.full_like(depth[:, :1], 1e10)], 1)
        opaque = 1 - torch.exp(-thick * gaps)
        clear = torch.cumprod(1 - opaque + 1e-10, 1).roll(1, 1)
        clear = torch.cat([torch.ones_like(clear[:, :1]), clear[:, 1:]], 1)
        return ((opaque * clear)[..., None] * colour).sum(1)


def nerf() -> Example:
    """NeRF."""
    depth = torch.rand(9, 12).sort(1).values * 3
    return Example(Radiance(), (torch.randn(9, 3), torch.randn(9, 3), depth), plain, waves)


class Sines(nn.Module):
    """SIREN: a perceptron of sines on coordinates, and its own derivatives in the loss."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, width), nn.Linear(width, width)])
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        for k, layer in enumerate(self.layers):
            x = torch.sin(layer(x) * (10.0 if k == 0 else 2.0))
        out: Tensor = self.head(x)
        return out


def siren() -> Example:
    """A net of sines on coordinates."""
    return Example(Sines(), (torch.rand(40, 2) * 2 - 1,), plain, waves)


class Flow(nn.Module):
    """A neural ordinary differential equation, solved by four steps of Runge and Kutta."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(width + 1, 24), nn.Tanh(), nn.Linear(24, width))
        self.head = nn.Linear(width, 4)

    def slope(self, t: float, x: Tensor) -> Tensor:
        """dx / dt."""
        out: Tensor = self.field(torch.cat([x, torch.full_like(x[:, :1], t)], -1))
        return out

    def forward(self, x: Tensor) -> Tensor:
        step = 0.25
        for k in range(4):
            t = k * step
            a = self.slope(t, x)
            b = self.slope(t + step / 2, x + step / 2 * a)
            c = self.slope(t + step / 2, x + step / 2 * b)
            d = self.slope(t + step, x + step * c)
            x = x + step / 6 * (a + 2 * b + 2 * c + d)
        out: Tensor = self.head(x)
        return out


def ode() -> Example:
    """A neural differential equation."""
    return Example(Flow(), (torch.randn(6, 8),), plain, classes)


class Spectral(nn.Module):
    """A Fourier neural operator: weights on the lowest frequencies."""

    def __init__(self, c: int = 8, kept: int = 6) -> None:
        super().__init__()
        self.kept = kept
        self.enter, self.leave = nn.Conv1d(2, c, 1), nn.Conv1d(c, 1, 1)
        self.weight = nn.Parameter(torch.randn(c, c, kept, 2) * 0.1)
        self.side = nn.Conv1d(c, c, 1)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, 2, points]."""
        y = self.enter(x)
        waves = torch.fft.rfft(y)[..., : self.kept]
        mixed = torch.einsum("bik,iok->bok", waves, torch.view_as_complex(self.weight))
        y = F.gelu(torch.fft.irfft(mixed, n=x.shape[-1]) + self.side(y))
        out: Tensor = self.leave(y)
        return out


def fno() -> Example:
    """A Fourier neural operator."""
    return Example(Spectral(), (torch.randn(3, 2, 32),), plain, waves)


class Policy(nn.Module):
    """An actor and a critic for a few continuous actions."""

    def __init__(self, seen: int = 10, acts: int = 3) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(seen, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.mean, self.value = nn.Linear(32, acts), nn.Linear(32, 1)
        self.spread = nn.Parameter(torch.zeros(acts) - 0.5)

    def forward(self, seen: Tensor, act: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.body(seen)
        way = torch.distributions.Normal(self.mean(h), self.spread.exp(), validate_args=False)
        return way.log_prob(act).sum(-1), way.entropy().sum(-1), self.value(h).squeeze(-1)


def clipped(
    out: tuple[Tensor, ...], seen: Tensor, act: Tensor, old: Tensor, gain: Tensor
) -> Tensor:
    """PPO's loss with advantages that are normalised over the batch."""
    chance, spread, value = out
    better = gain - value.detach()
    better = (better - better.mean()) / (better.std() + 1e-8)
    ratio = torch.exp(chance - old)
    worse = torch.minimum(ratio * better, ratio.clamp(0.8, 1.2) * better)
    return -worse.mean() + 0.5 * F.huber_loss(value, gain) - 0.01 * spread.mean()


def ppo() -> Example:
    """A step of proximal policy optimisation."""
    inputs = (torch.randn(32, 10), torch.randn(32, 3), torch.randn(32) - 3, torch.randn(32))
    return Example(Policy(), inputs, plain, clipped)


class Tabular(nn.Module):
    """An FT-transformer: each column is a token."""

    def __init__(self, numbers: int = 5, kinds: int = 3, width: int = 16) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(numbers, width))
        self.shift = nn.Parameter(torch.randn(numbers, width))
        self.table = nn.Embedding(kinds * 6, width)
        self.register_buffer("first", torch.arange(kinds) * 6)
        self.start = nn.Parameter(torch.randn(width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 32, 0.0, F.relu, batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 4)

    def forward(self, numbers: Tensor, kinds: Tensor) -> Tensor:
        x = numbers[..., None] * self.scale + self.shift
        start = self.start.expand(x.shape[0], 1, -1)
        out: Tensor = self.head(
            self.body(torch.cat([start, x, self.table(kinds + self.first)], 1))[:, 0]
        )
        return out


def tabular() -> Example:
    """A transformer on tables."""
    inputs = (torch.randn(6, 5), torch.randint(0, 6, (6, 3)))
    return Example(Tabular(), inputs, plain, classes)


class Warped(nn.Module):
    """A spatial transformer: an affine map found by a net, and the picture sampled through it."""

    def __init__(self) -> None:
        super().__init__()
        self.find = nn.Sequential(
            nn.Conv2d(1, 6, 5, 2), nn.AdaptiveMaxPool2d(3), nn.Flatten(), nn.Linear(54, 6)
        )
        self.head = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2))
        self.out = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        still = torch.tensor([1.0, 0, 0, 0, 1, 0], device=x.device, dtype=x.dtype)
        how = (still + 0.1 * self.find(x)).view(-1, 2, 3)
        grid = F.affine_grid(how, list(x.shape), align_corners=False)
        seen = F.grid_sample(x, grid, align_corners=False)
        out: Tensor = self.out(self.head(seen).flatten(1))
        return out


def warped() -> Example:
    """A spatial transformer."""
    return Example(Warped(), (torch.randn(3, 1, 20, 20),), plain, classes)


class Forecast(nn.Module):
    """A forecast of several series: trend by moving means, causal dilated convolutions."""

    def __init__(self, series: int = 4, past: int = 32, ahead: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Conv1d(series if k == 0 else 12, 24, 3, dilation=2**k) for k in range(3)
        )
        self.trend = nn.Linear(past, ahead)
        self.head = nn.Linear(12, series * ahead)
        self.ahead = ahead

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, series, past] -> [batch, series, ahead]."""
        mean, spread = x.mean(-1, keepdim=True), x.std(-1, keepdim=True) + 1e-5
        x = (x - mean) / spread
        smooth = F.avg_pool1d(F.pad(x, (2, 2), mode="replicate"), 5, 1)
        y = x - smooth
        for k, layer in enumerate(self.layers):
            a, b = layer(F.pad(y, (2 * 2**k, 0))).chunk(2, 1)
            y = torch.tanh(a) * torch.sigmoid(b)
        rest = self.head(y[..., -1]).view(*x.shape[:2], self.ahead)
        return (self.trend(smooth) + rest) * spread + mean


def pinball(out: Tensor, *_: Tensor) -> Tensor:
    """Quantile loss at 0.9."""
    miss = torch.sin(torch.arange(out.numel(), device=out.device)).view(out.shape) - out
    return torch.maximum(0.9 * miss, -0.1 * miss).mean()


def forecast() -> Example:
    """A forecast of series."""
    return Example(Forecast(), (torch.randn(3, 4, 32).cumsum(-1),), plain, pinball)


MODELS: dict[str, Callable[[], Example]] = {
    "NeRF": nerf,
    "SIREN": siren,
    "Neural ODE": ode,
    "Fourier operator": fno,
    "PPO": ppo,
    "FT-transformer": tabular,
    "Spatial transformer": warped,
    "Forecast": forecast,
}
