"""Transformers on images, and an MLP-mixer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.models.example import Example, classes, ids, logits, plain, waves

BATCH, SIZE, CLASSES = 3, 32, 10


def images(size: int = SIZE, batch: int = BATCH) -> tuple[Tensor, ...]:
    """Random pictures [batch, 3, size, size]."""
    return (torch.randn(batch, 3, size, size),)


def vit() -> Example:
    """ViT."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
        image_size=SIZE, patch_size=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    config.num_labels = CLASSES
    return Example(ViTForImageClassification(config), images(), logits, classes, bf16=True)


def swin() -> Example:
    """Swin: attention in windows that are shifted by a roll."""
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(
        image_size=SIZE, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4],
        window_size=4, drop_path_rate=0.0, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    config.num_labels = CLASSES
    return Example(SwinForImageClassification(config), images(), logits, classes)


def segformer() -> Example:
    """SegFormer: classes of pixels, from four scales, resized by bilinear interpolation."""
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    config = SegformerConfig(
        num_encoder_blocks=3, depths=[1, 1, 1], sr_ratios=[4, 2, 1], hidden_sizes=[16, 24, 32],
        patch_sizes=[7, 3, 3], strides=[4, 2, 2], num_attention_heads=[1, 2, 4],
        mlp_ratios=[2, 2, 2], decoder_hidden_size=32, hidden_dropout_prob=0.0, drop_path_rate=0.0,
        attention_probs_dropout_prob=0.0, classifier_dropout_prob=0.0,
    )  # fmt: skip
    config.num_labels = CLASSES

    def pixels(out: Tensor, *_: Tensor) -> Tensor:
        wide = nn.functional.interpolate(out, size=(SIZE, SIZE), mode="bilinear")
        target = torch.arange(wide.shape[0] * SIZE * SIZE, device=out.device) % CLASSES
        target = target.view(-1, SIZE, SIZE)
        return nn.functional.cross_entropy(wide.float(), target)

    return Example(SegformerForSemanticSegmentation(config), images(), logits, pixels)


class MaskedPatches(nn.Module):
    """A masked autoencoder's front: the patches of lowest noise are kept, the rest is predicted."""

    def __init__(self, width: int = 32, patch: int = 4, kept: int = 16) -> None:
        super().__init__()
        self.patch, self.kept = patch, kept
        self.embed = nn.Linear(3 * patch * patch, width)
        layer = nn.TransformerEncoderLayer(width, 4, 64, 0.0, "gelu", batch_first=True)
        self.body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.blank = nn.Parameter(torch.randn(width) * 0.1)
        self.head = nn.Linear(width, 3 * patch * patch)

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        """x: [batch, 3, h, w]; noise: [batch, patches]."""
        p = self.patch
        cells = nn.functional.unfold(x, p, stride=p).transpose(1, 2)
        order = noise.argsort(1)
        back = order.argsort(1)
        tokens = self.embed(cells)
        wide = order[:, : self.kept, None].expand(-1, -1, tokens.shape[-1])
        seen = self.body(tokens.gather(1, wide))
        rest = self.blank.expand(x.shape[0], tokens.shape[1] - self.kept, -1)
        full = torch.cat([seen, rest], 1).gather(1, back[..., None].expand_as(tokens))
        return nn.functional.fold(self.head(full).transpose(1, 2), x.shape[-2:], p, stride=p)


def masked_patches() -> Example:
    """A masked autoencoder."""
    inputs = (*images(), torch.rand(BATCH, 64))
    return Example(MaskedPatches(), inputs, plain, waves)


class MixerBlock(nn.Module):
    """Mixes tokens, then channels, each by a perceptron of two layers with a residual."""

    def __init__(self, tokens: int, channels: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.tokens = _perceptron(tokens, 2 * tokens)
        self.channels = _perceptron(channels, 2 * channels)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, tokens, channels] -> the same shape."""
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        out: Tensor = x + self.channels(self.norm2(x))
        return out


class Mixer(nn.Module):
    """An MLP-mixer."""

    def __init__(self, width: int = 32, patch: int = 8) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, patch, patch), nn.Flatten(2))
        blocks = [MixerBlock((SIZE // patch) ** 2, width) for _ in range(2)]
        self.blocks = nn.Sequential(*blocks, nn.LayerNorm(width))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(self.stem(x).transpose(1, 2)).mean(1))
        return out


def _perceptron(width: int, wide: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, wide), nn.GELU(), nn.Linear(wide, width))


def mixer() -> Example:
    """An MLP-mixer."""
    return Example(Mixer(), images(), plain, classes, bf16=True)


def clip() -> Example:
    """CLIP: a tower for images and one for text, whose embeddings are compared with each other."""
    from transformers import CLIPConfig, CLIPModel

    small = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 64,
    }  # fmt: skip
    config = CLIPConfig(
        text_config=small | {"vocab_size": 97, "max_position_embeddings": 16, "eos_token_id": 2},
        vision_config=small | {"image_size": SIZE, "patch_size": 8},
        projection_dim=24,
    )
    words = ids(97, BATCH, 12)
    words[:, -1] = 2

    def scores(module: nn.Module, pixels: Tensor, text: Tensor) -> Tensor:
        out: Tensor = module(input_ids=text, pixel_values=pixels).logits_per_image
        return out

    def contrast(out: Tensor, *_: Tensor) -> Tensor:
        return (classes(out) + classes(out.t())) / 2

    return Example(CLIPModel(config), (*images(), words), scores, contrast)


MODELS: dict[str, Callable[[], Example]] = {
    "ViT": vit,
    "Swin": swin,
    "SegFormer": segformer,
    "Masked autoencoder": masked_patches,
    "MLP-mixer": mixer,
    "CLIP": clip,
}
