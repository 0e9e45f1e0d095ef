"""Models that make images: a diffusion U-Net, autoencoders, a generator with its critic."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.example import Example, plain, waves

BATCH, SIZE = 2, 16


def angles(t: Tensor, width: int) -> Tensor:
    """Sines and cosines of times [batch] -> [batch, width]."""
    half = torch.arange(width // 2, device=t.device, dtype=torch.float32)
    rates = torch.exp(half * (-9.21 / (width // 2)))  # 9.21 = log(10000)
    phase = t.float()[:, None] * rates
    return torch.cat([phase.sin(), phase.cos()], -1)


class Residual(nn.Module):
    """Two convolutions behind group norms; the time is added between them."""

    def __init__(self, c: int, out: int, time: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(4, c), nn.SiLU(), nn.Conv2d(c, out, 3, padding=1))
        self.time = nn.Linear(time, out)
        self.second = nn.Sequential(
            nn.GroupNorm(4, out), nn.SiLU(), nn.Conv2d(out, out, 3, padding=1)
        )
        self.skip = nn.Conv2d(c, out, 1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        y = self.first(x) + self.time(F.silu(t))[:, :, None, None]
        out: Tensor = self.skip(x) + self.second(y)
        return out


class Look(nn.Module):
    """Attention over the pixels."""

    def __init__(self, c: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = (
            nn.GroupNorm(4, c), nn.Conv2d(c, 3 * c, 1), nn.Conv2d(c, c, 1)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        qkv = self.qkv(self.norm(x)).view(b, 3, self.heads, c // self.heads, h * w)
        q, k, v = qkv.transpose(-1, -2).unbind(1)
        y = F.scaled_dot_product_attention(q, k, v).transpose(-1, -2).reshape(b, c, h, w)
        out: Tensor = x + self.out(y)
        return out


class UNet(nn.Module):
    """Noise of a picture at a time: two scales down, attention, two scales up."""

    def __init__(self, c: int = 16, time: int = 32) -> None:
        super().__init__()
        self.width = time
        self.time = nn.Sequential(nn.Linear(time, time), nn.SiLU(), nn.Linear(time, time))
        self.stem = nn.Conv2d(3, c, 3, padding=1)
        self.down = nn.ModuleList([Residual(c, c, time), Residual(c, 2 * c, time)])
        self.shrink = nn.ModuleList([nn.Conv2d(n, n, 3, 2, 1) for n in (c, 2 * c)])
        self.middle, self.look = Residual(2 * c, 2 * c, time), Look(2 * c)
        self.up = nn.ModuleList([Residual(4 * c, c, time), Residual(2 * c, c, time)])
        self.head = nn.Sequential(nn.GroupNorm(4, c), nn.SiLU(), nn.Conv2d(c, 3, 3, padding=1))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """x: [batch, 3, h, w]; t: [batch], whole numbers."""
        e = self.time(angles(t, self.width).to(x.dtype))
        x = self.stem(x)
        kept = []
        for block, shrink in zip(self.down, self.shrink, strict=True):
            x = block(x, e)
            kept.append(x)
            x = shrink(x)
        x = self.look(self.middle(x, e))
        for block in self.up:
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = block(torch.cat([x, kept.pop()], 1), e)
        out: Tensor = self.head(x)
        return out


def unet() -> Example:
    """A diffusion model's training step."""
    inputs = (torch.randn(BATCH, 3, SIZE, SIZE), torch.tensor([3, 871]))
    return Example(UNet(), inputs, plain, waves, bf16=True)


class Sampled(nn.Module):
    """Three steps of a denoiser from noise: what is drawn comes as an input."""

    def __init__(self) -> None:
        super().__init__()
        self.net = UNet(8, 16)
        self.register_buffer("kept", torch.linspace(0.9999, 0.98, 100).cumprod(0))

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        for step, at in enumerate((99, 66, 33)):
            t = torch.full((x.shape[0],), at, device=x.device)
            a = self.kept[t].view(-1, 1, 1, 1)
            e = self.net(x, t)
            start = ((x - (1 - a).sqrt() * e) / a.sqrt()).clamp(-1, 1)
            x = a.sqrt() * start + (1 - a).sqrt() * (0.9 * e + 0.1 * noise[step])
        return x


def sampler() -> Example:
    """Three steps of sampling by a diffusion model."""
    inputs = (torch.randn(BATCH, 3, SIZE, SIZE), torch.randn(3, BATCH, 3, SIZE, SIZE))
    return Example(Sampled(), inputs, plain, waves, trained=False)


class Variational(nn.Module):
    """A convolutional VAE; the noise of its code is an input."""

    def __init__(self, code: int = 8) -> None:
        super().__init__()
        self.encode = nn.Sequential(
            nn.Conv2d(3, 16, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(16, 16, 4, 2, 1), nn.ELU(),
            nn.Flatten(), nn.Linear(16 * (SIZE // 4) ** 2, 2 * code),
        )  # fmt: skip
        self.decode = nn.Sequential(
            nn.Linear(code, 16 * (SIZE // 4) ** 2), nn.Unflatten(1, (16, SIZE // 4, SIZE // 4)),
            nn.ConvTranspose2d(16, 16, 4, 2, 1), nn.Softplus(),
            nn.ConvTranspose2d(16, 3, 4, 2, 1), nn.Sigmoid(),
        )  # fmt: skip

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, spread = self.encode(x).chunk(2, -1)
        return self.decode(mean + noise * torch.exp(0.5 * spread)), mean, spread


def evidence(out: tuple[Tensor, ...], x: Tensor, *_: Tensor) -> Tensor:
    """The evidence bound: cross entropy of pixels, and the divergence of the code from a normal."""
    made, mean, spread = out
    pixels = F.binary_cross_entropy(made.float(), x.float().sigmoid())
    return pixels - 0.05 * (1 + spread - mean.square() - spread.exp()).float().mean()


def vae() -> Example:
    """A VAE."""
    inputs = (torch.randn(4, 3, SIZE, SIZE), torch.randn(4, 8))
    return Example(Variational(), inputs, plain, evidence)


class Quantised(nn.Module):
    """A VQ-VAE: the nearest of a table's rows stands for each pixel of the code."""

    def __init__(self, rows: int = 12, width: int = 8) -> None:
        super().__init__()
        self.encode = nn.Sequential(
            nn.Conv2d(3, width, 4, 4), nn.GELU(), nn.Conv2d(width, width, 1)
        )
        self.table = nn.Embedding(rows, width)
        self.decode = nn.Sequential(nn.Conv2d(width, 3 * 16, 1), nn.PixelShuffle(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z = self.encode(x).permute(0, 2, 3, 1)
        far = z.square().sum(-1, keepdim=True) - 2 * z @ self.table.weight.t()
        code = self.table((far + self.table.weight.square().sum(-1)).argmin(-1))
        straight = z + (code - z).detach()
        return self.decode(straight.permute(0, 3, 1, 2)), z, code


def commitment(out: tuple[Tensor, ...], x: Tensor) -> Tensor:
    """Distance of pixels, and of the code from the table, each side once held still."""
    made, z, code = out
    return F.mse_loss(made, x) + F.mse_loss(code, z.detach()) + 0.25 * F.mse_loss(z, code.detach())


def vqvae() -> Example:
    """A VQ-VAE."""
    return Example(Quantised(), (torch.randn(2, 3, SIZE, SIZE),), plain, commitment)


class Adversaries(nn.Module):
    """DCGAN's generator and critic; the critic has spectral norms."""

    def __init__(self, code: int = 12) -> None:
        super().__init__()
        spectral = nn.utils.parametrizations.spectral_norm
        self.make = nn.Sequential(
            nn.ConvTranspose2d(code, 16, 4), nn.BatchNorm2d(16), nn.ReLU(),
            nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.BatchNorm2d(8), nn.ReLU(),
            nn.ConvTranspose2d(8, 3, 4, 2, 1), nn.Tanh(),
        )  # fmt: skip
        self.judge = nn.Sequential(
            spectral(nn.Conv2d(3, 8, 4, 2, 1)), nn.LeakyReLU(0.2), nn.InstanceNorm2d(8),
            spectral(nn.Conv2d(8, 16, 4, 2, 1)), nn.LeakyReLU(0.2), nn.Conv2d(16, 1, 4),
        )  # fmt: skip

    def forward(self, real: Tensor, code: Tensor) -> tuple[Tensor, Tensor]:
        return self.judge(real), self.judge(self.make(code))


def hinge(out: tuple[Tensor, ...], *_: Tensor) -> Tensor:
    """The critic's hinge loss, less a part of the generator's."""
    real, made = out
    return (F.relu(1 - real) + F.relu(1 + made)).mean() - 0.3 * made.mean()


def gan() -> Example:
    """A generator and its critic."""
    inputs = (torch.randn(4, 3, SIZE, SIZE), torch.randn(4, 12, 1, 1))
    return Example(Adversaries(), inputs, plain, hinge)


MODELS: dict[str, Callable[[], Example]] = {
    "Diffusion U-Net": unet,
    "Diffusion sampler": sampler,
    "VAE": vae,
    "VQ-VAE": vqvae,
    "GAN": gan,
}
