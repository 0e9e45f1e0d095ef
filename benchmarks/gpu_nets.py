"""More models of the GPU benchmarks, which the host holds up: many small kernels in a row.

They are of `timm` and `transformers`, from their configurations, with random weights; `timm` may be
missing, and then a model is skipped with a note.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BF16 = torch.bfloat16


def timm_net(name: str, tiny: bool, small: dict[str, Any]) -> nn.Module:
    """A network of timm with 1000 classes, or 10 if `tiny`, with the arguments `small`.

    No layer is dropped at random, so that results can be compared.
    """
    import timm  # type: ignore[import-not-found]

    made: nn.Module = timm.create_model(
        name, num_classes=10 if tiny else 1000, drop_path_rate=0.0, **(small if tiny else {})
    )
    return made.to(BF16)


def t5(tiny: bool) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """T5 of 60M parameters without dropout: 8 x 512 tokens in, 8 x 128 out."""
    from transformers import T5Config, T5ForConditionalGeneration

    small: dict[str, Any] = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2,
             "num_heads": 2, "vocab_size": 100}  # fmt: skip
    config = T5Config(dropout_rate=0.0, use_cache=False, **(small if tiny else {}))
    batch, length, out = (2, 16, 8) if tiny else (8, 512, 128)
    model: nn.Module = T5ForConditionalGeneration(config)
    ids = torch.randint(0, config.vocab_size, (batch, length))
    return model.to(BF16), (ids, torch.randint(0, config.vocab_size, (batch, out)))


def t5_loss(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    """The loss of the next token of `targets`."""
    logits = model(input_ids=ids, decoder_input_ids=targets).logits[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits.float(), targets[:, 1:].flatten())


class CachedBlock(nn.Module):
    """One token's attention over a cache of fixed length, and a gated perceptron."""

    def __init__(self, width: int, heads: int, hidden: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)
        shape = 1, heads, length, width // heads
        self.register_buffer("keys", torch.zeros(shape))
        self.register_buffer("values", torch.zeros(shape))

    def forward(self, x: Tensor, at: Tensor, mask: Tensor) -> Tensor:
        """x: [1, 1, width]; at: [1], the token's place; mask: [1, 1, 1, length]."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        keys, values = self.get_buffer("keys"), self.get_buffer("values")
        keys.index_copy_(2, at, k)
        values.index_copy_(2, at, v)
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        made: Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return made


class Cached(nn.Module):
    """A decoder that reads one token a call, at a place of its cache."""

    def __init__(
        self, layers: int, width: int, heads: int, hidden: int, vocabulary: int, length: int
    ) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            CachedBlock(width, heads, hidden, length) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.length = length

    def forward(self, ids: Tensor, at: Tensor) -> Tensor:
        """ids: [1, 1]; at: [1] -> logits [1, 1, vocabulary]."""
        x = self.table(ids)
        mask = (torch.arange(self.length, device=ids.device) <= at)[None, None, None]
        for block in self.blocks:
            x = block(x, at, mask)
        made: Tensor = self.head(self.norm(x))
        return made


def cached(tiny: bool) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """12 layers of width 1024 on one token, over a cache of 128 that is filled to half."""
    sizes = (2, 64, 2, 128, 100, 16) if tiny else (12, 1024, 16, 2816, 32000, 128)
    ids, at = torch.randint(0, sizes[4], (1, 1)), torch.tensor([sizes[5] // 2])
    return Cached(*sizes).to(BF16), (ids, at)


def cached_logits(model: nn.Module, ids: Tensor, at: Tensor) -> Tensor:
    """The logits of the next token."""
    made: Tensor = model(ids, at)
    return made


class ResidualBlock(nn.Module):
    """Two convolutions after group norms, with the time between them."""

    def __init__(self, width: int, time: int, groups: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.GroupNorm(groups, width) for _ in range(2))
        self.conv1, self.conv2 = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.time = nn.Linear(time, width)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """x: [batch, width, height, columns]; time: [batch, time]."""
        y = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        made: Tensor = x + self.conv2(F.silu(self.norm2(y)))
        return made


class UNet(nn.Module):
    """A small U-Net of diffusion: two resolutions, attention at the lower one."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.half, self.heads = width, heads
        blocks = lambda n: nn.ModuleList(ResidualBlock(n, 2 * width, groups) for _ in range(3))
        self.first, self.last = nn.Conv2d(4, width, 3, 1, 1), nn.Conv2d(width, 4, 3, 1, 1)
        self.down, self.up = (
            nn.Conv2d(width, 2 * width, 3, 2, 1),
            nn.Conv2d(2 * width, width, 3, 1, 1),
        )
        self.before, self.inner, self.after = blocks(width), blocks(2 * width), blocks(width)
        self.norm = nn.GroupNorm(groups, 2 * width)
        self.qkv, self.out = nn.Linear(2 * width, 6 * width), nn.Linear(2 * width, 2 * width)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """x: [batch, 4, height, columns]; time: [batch] -> like x."""
        angle = time[:, None] * torch.exp(torch.arange(self.half, device=x.device) * -0.07)
        t = torch.cat([angle.sin(), angle.cos()], -1).to(x.dtype)
        x = self.first(x)
        for block in self.before:
            x = block(x, t)
        y = self.down(x)
        for block in self.inner:
            y = block(y, t)
        y = y + self.attention(self.norm(y).flatten(2).mT).mT.view(y.shape)
        x = x + self.up(F.interpolate(y, scale_factor=2.0))
        for block in self.after:
            x = block(x, t)
        made: Tensor = self.last(x)
        return made

    def attention(self, h: Tensor) -> Tensor:
        """h: [batch, places, width] -> the same shape."""
        q, k, v = self.qkv(h).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        made: Tensor = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return made


def unet(tiny: bool) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """One image of 64 x 64."""
    model, size = (UNet(16, 2, 4), 16) if tiny else (UNet(128, 4, 32), 64)
    return model.to(BF16), (torch.randn(1, 4, size, size).to(BF16), torch.rand(1))
