"""Convolutional networks on images."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.models.example import Example, classes, logits, plain
from tests.models.vision import BATCH, CLASSES, images


def resnet() -> Example:
    """A ResNet of bottlenecks, with batch norm that counts in training."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[1, 2], layer_type="bottleneck"
    )
    config.num_labels = CLASSES
    return Example(ResNetForImageClassification(config), images(), logits, classes, bf16=True)


def channels_last() -> Example:
    """The same ResNet in channels last."""
    made = resnet()
    module = made.module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    inputs = tuple(x.to(memory_format=torch.channels_last) for x in made.inputs)
    return Example(module, inputs, logits, classes)


def convnext() -> Example:
    """ConvNeXt: depthwise convolutions, layer norm over channels, a learned scale."""
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(
        hidden_sizes=[16, 32], depths=[1, 2], num_stages=2, drop_path_rate=0.0, patch_size=4,
        layer_scale_init_value=0.1,
    )  # fmt: skip
    config.num_labels = CLASSES
    return Example(ConvNextForImageClassification(config), images(), logits, classes)


class Inverted(nn.Module):
    """MobileNet's block: widen, convolve each channel alone, weigh channels, narrow."""

    def __init__(self, c: int, wide: int, out: int, stride: int) -> None:
        super().__init__()
        self.residual = stride == 1 and c == out
        self.widen = nn.Sequential(
            nn.Conv2d(c, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.Hardswish()
        )
        self.depth = nn.Sequential(
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False),
            nn.BatchNorm2d(wide), nn.Hardswish(),
        )  # fmt: skip
        self.weigh = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(wide, wide // 4, 1), nn.ReLU(),
            nn.Conv2d(wide // 4, wide, 1), nn.Hardsigmoid(),
        )  # fmt: skip
        self.narrow = nn.Sequential(nn.Conv2d(wide, out, 1, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = self.depth(self.widen(x))
        y = self.narrow(y * self.weigh(y))
        return x + y if self.residual else y


def mobilenet() -> Example:
    """A net of MobileNet v3's kind."""
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.Hardswish(), Inverted(8, 16, 8, 1),
        Inverted(8, 24, 12, 2), Inverted(12, 32, 12, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(12, CLASSES),
    )  # fmt: skip
    return Example(module, images(), plain, classes)


class Dense(nn.Module):
    """DenseNet's block: each layer reads all that came before it."""

    def __init__(self, c: int, growth: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(c + k * growth), nn.ReLU(),
                nn.Conv2d(c + k * growth, growth, 3, padding=1, bias=False),
            )
            for k in range(layers)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        parts = [x]
        for layer in self.layers:
            parts.append(layer(torch.cat(parts, 1)))
        return torch.cat(parts, 1)


def densenet() -> Example:
    """A DenseNet with max and average pooling."""
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.MaxPool2d(3, 2, 1), Dense(8, 6, 3),
        nn.Conv2d(26, 12, 1), nn.AvgPool2d(2), Dense(12, 6, 2), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(24, CLASSES),
    )  # fmt: skip
    return Example(module, images(), plain, classes)


class Pyramid(nn.Module):
    """A feature pyramid with heads for classes and boxes, as one-stage detectors have it."""

    def __init__(self, width: int = 16, anchors: int = 2) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            nn.Sequential(nn.Conv2d(c, width, 3, 2, 1), nn.GroupNorm(4, width), nn.SiLU())
            for c in (3, width, width)
        )
        self.side = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(3))
        self.head = nn.Conv2d(width, anchors * (CLASSES + 4), 3, padding=1)
        self.width = CLASSES + 4

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, 3, h, w] -> [batch, places, classes + 4]."""
        levels = []
        for layer in self.down:
            x = layer(x)
            levels.append(x)
        above, found = None, []
        for level, side in zip(reversed(levels), self.side, strict=True):
            y = side(level)
            if above is not None:
                y = y + nn.functional.interpolate(above, scale_factor=2.0, mode="nearest")
            above = y
            found.append(self.head(y).permute(0, 2, 3, 1).reshape(x.shape[0], -1, self.width))
        return torch.cat(found, 1)


def focal(out: Tensor, *_: Tensor) -> Tensor:
    """Focal loss of classes and a smooth distance of boxes."""
    scores, boxes = out[..., :CLASSES].float(), out[..., CLASSES:].float()
    places = torch.arange(scores.numel(), device=out.device).view(scores.shape)
    target = (places % 7 == 0).to(scores.dtype)
    loss = nn.functional.binary_cross_entropy_with_logits(scores, target, reduction="none")
    right = torch.exp(-loss)
    wanted = torch.tanh(torch.arange(4, device=out.device, dtype=torch.float32))
    near = nn.functional.smooth_l1_loss(boxes, wanted.expand(boxes.shape), beta=0.1)
    return (0.25 * (1 - right) ** 2 * loss).mean() + near


def detector() -> Example:
    """A one-stage detector."""
    return Example(Pyramid(), images(batch=BATCH - 1), plain, focal)


MODELS: dict[str, Callable[[], Example]] = {
    "ResNet": resnet,
    "ResNet, channels last": channels_last,
    "ConvNeXt": convnext,
    "MobileNet v3": mobilenet,
    "DenseNet": densenet,
    "Pyramid detector": detector,
}
