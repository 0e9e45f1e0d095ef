"""The models of the GPU benchmarks, in bf16 or under autocast, with random weights; dropout is off.

A forward returns hidden states or logits; a training step is forward, loss, backward and SGD.
`tiny` models have the same layers in sizes that check the harness on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import gpu_nets
from benchmarks.gpu_survey import SURVEY

BF16 = torch.bfloat16
Result = tuple[list[Tensor], list[Tensor]]
DRAWS = 4  # inputs that a loss is compared on: that of one may be near the exact one by chance


@dataclass(frozen=True, slots=True)
class Example:
    """A model and its inputs; `forward(model, *inputs)` gives a result, or a loss if `training`.

    With `autocast`, weights and inputs are float32 and autocast runs products in bf16.
    """

    model: nn.Module
    inputs: tuple[Tensor, ...]
    forward: Callable[..., Tensor]
    training: bool = False
    autocast: bool = False

    def function(self) -> Callable[..., Tensor]:
        """What is compiled."""

        def forward(model: nn.Module, *inputs: Tensor) -> Tensor:
            with torch.autocast(inputs[0].device.type, BF16):
                return self.forward(model, *inputs)

        return forward if self.autocast else self.forward

    def reference(self) -> Example:
        """The same in float32: bf16 weights and inputs are exact in it."""
        inputs = tuple(i.float() if i.is_floating_point() else i for i in self.inputs)
        return Example(deepcopy(self.model).float(), inputs, self.forward, self.training)


class Runner:
    """One side's own copy of a model, behind one compiled function."""

    def __init__(self, example: Example, compile: Callable[[Any], Any]) -> None:
        self.example = example
        self.model = deepcopy(example.model).train(example.training)
        self.fn = compile(example.function())
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(self.parameters, lr=1e-4)

    def result(self) -> Result:
        """The result, or losses and every gradient of the first; weights stay as they are.

        The gradients come last and losses are copied: the peer's graphs reuse their results.
        """
        if not self.example.training:
            with torch.no_grad():
                return [self.fn(self.model, *self.example.inputs)], []
        losses = []
        for k in range(1, DRAWS):
            inputs = [torch.empty_like(i).copy_(i.roll(k, -1)) for i in self.example.inputs]
            losses.append(self.fn(self.model, *inputs).detach().clone())
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.fn(self.model, *self.example.inputs)
        loss.backward()
        grads = [p.grad for p in self.parameters if p.grad is not None]
        self.optimizer.zero_grad(set_to_none=True)
        return [loss.detach(), *losses], grads

    def step(self) -> None:
        """What is timed: one forward, or one training step with its update."""
        if not self.example.training:
            with torch.no_grad():
                self.fn(self.model, *self.example.inputs)
            return
        self.optimizer.zero_grad(set_to_none=True)
        self.fn(self.model, *self.example.inputs).backward()
        self.optimizer.step()


def _ids(vocabulary: int, batch: int, length: int) -> Tensor:
    return torch.randint(0, vocabulary, (batch, length))


def bert(tiny: bool) -> Example:
    """BERT-base, 16 x 512, without an attention mask."""
    from transformers import BertConfig, BertModel

    small: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
             "intermediate_size": 128, "vocab_size": 100}  # fmt: skip
    config = BertConfig(
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **(small if tiny else {})
    )
    batch, length = (2, 16) if tiny else (16, 512)
    ids = _ids(config.vocab_size, batch, length)
    model: nn.Module = BertModel(config, add_pooling_layer=False)
    return Example(model.to(BF16), (ids,), _hidden)


def gpt2(tiny: bool) -> Example:
    """GPT-2 of 124M parameters, one training step on 4 x 1024 tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    small: dict[str, Any] = {
        "n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 100, "n_positions": 32,
        "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    config = GPT2Config(
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, **(small if tiny else {})
    )
    batch, length = (2, 16) if tiny else (4, 1024)
    ids = _ids(config.vocab_size, batch, length)
    model: nn.Module = GPT2LMHeadModel(config)
    return Example(model.to(BF16), (ids,), _next_token_loss, training=True)


def resnet(tiny: bool) -> Example:
    """ResNet-50, one training step on 64 images in channels last."""
    size, batch = (32, 4) if tiny else (224, 64)
    model = _tiny_resnet() if tiny else _resnet50()
    images = torch.randn(batch, 3, size, size).to(BF16).to(memory_format=torch.channels_last)
    model = model.to(BF16)
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return Example(model, (images, _targets(batch, tiny)), _classes_loss, training=True)


def _resnet50() -> nn.Module:
    """torchvision's where it is installed; the same network of transformers elsewhere."""
    try:
        from torchvision.models import resnet50  # type: ignore[import-not-found]
    except ImportError:
        from transformers import ResNetConfig, ResNetForImageClassification

        config = ResNetConfig()
        config.num_labels = 1000
        return ResNetForImageClassification(config)
    made: nn.Module = resnet50()
    return made


def _tiny_resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="bottleneck"
    )
    config.num_labels = 10
    return ResNetForImageClassification(config)


def vit(tiny: bool) -> Example:
    """ViT-B/16, one training step on 64 images."""
    from transformers import ViTConfig, ViTForImageClassification

    small: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
             "intermediate_size": 128, "image_size": 32}  # fmt: skip
    config = ViTConfig(**(small if tiny else {}))
    config.num_labels = 10 if tiny else 1000
    batch, size = (4, 32) if tiny else (64, 224)
    images = torch.randn(batch, 3, size, size).to(BF16)
    model: nn.Module = ViTForImageClassification(config)
    return Example(model.to(BF16), (images, _targets(batch, tiny)), _classes_loss, training=True)


def _targets(batch: int, tiny: bool) -> Tensor:
    return torch.randint(0, 10 if tiny else 1000, (batch,))


class LlamaBlock(nn.Module):
    """Attention with rotary positions and a gated perceptron, each after an RMS norm."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: [batch, length, width]; cos, sin: [length, width / heads]."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        made: Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return made


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class Llama(nn.Module):
    """A decoder of Llama's kind; positions start at 0."""

    def __init__(self, layers: int, width: int, heads: int, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.size = width // heads

    def forward(self, ids: Tensor) -> Tensor:
        """ids: [batch, length] -> logits [batch, length, vocabulary]."""
        x = self.table(ids)
        half = torch.arange(0, self.size, 2, device=ids.device, dtype=torch.float32)
        places = torch.arange(ids.shape[1], device=ids.device, dtype=torch.float32)
        angle = torch.outer(places, 10000.0 ** (-half / self.size)).repeat(1, 2)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        made: Tensor = self.head(self.norm(x))
        return made


def _llama(tiny: bool, batch: int, length: int) -> Example:
    sizes = (2, 64, 2, 128, 100) if tiny else (12, 1024, 16, 2816, 32000)
    ids = _ids(sizes[-1], batch, 8 if tiny else length)
    return Example(Llama(*sizes).to(BF16), (ids,), _plain)


def llama(tiny: bool) -> Example:
    """12 layers of width 1024, forward of 2 x 1024 tokens."""
    return _llama(tiny, 2, 1024)


def decode(tiny: bool) -> Example:
    """The same network on 1 x 8 tokens: bound by launches."""
    return _llama(tiny, 1, 8)


def _plain(model: nn.Module, x: Tensor) -> Tensor:
    made: Tensor = model(x)
    return made


def _hidden(model: nn.Module, ids: Tensor) -> Tensor:
    made: Tensor = model(input_ids=ids, attention_mask=None).last_hidden_state
    return made


def _next_token_loss(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(ids).logits[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits.float(), ids[:, 1:].flatten())


def _classes_loss(model: nn.Module, images: Tensor, target: Tensor) -> Tensor:
    out = model(images)
    logits = out if isinstance(out, Tensor) else out.logits
    return F.cross_entropy(logits.float(), target)


def _images(name: str, tiny: bool, **small: Any) -> Example:
    """A training step of a network of timm on 64 images in channels last.

    Tiny ones are 16 images: a batch norm over few elements makes large errors of small ones.
    """
    size, batch = (56, 16) if tiny else (224, 64)
    images = torch.randn(batch, 3, size, size).to(BF16).to(memory_format=torch.channels_last)
    model = gpu_nets.timm_net(name, tiny, small)
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return Example(model, (images, _targets(batch, tiny)), _classes_loss, training=True)


def _autocast(name: str, tiny: bool, **small: Any) -> Example:
    """A training step of a network of timm on 32 images, as its users leave it, under autocast."""
    size, batch = (64, 4) if tiny else (224, 32)
    images, model = torch.randn(batch, 3, size, size), gpu_nets.timm_net(name, tiny, small).float()
    return Example(model, (images, _targets(batch, tiny)), _classes_loss, True, autocast=True)


def gmlp(tiny: bool) -> Example:
    """Gates over places between layer norms, gMLP-S."""
    return _autocast("gmlp_s16_224", tiny, img_size=64)


def cspdarknet(tiny: bool) -> Example:
    """Convolutions, batch norms and leaky relus, whose results are split and joined."""
    return _autocast("cspdarknet53", tiny)


def swin(tiny: bool) -> Example:
    """Attention in windows, Swin-T."""
    small = {"img_size": 56, "depths": (1, 1, 2, 1)}
    return _images("swin_tiny_patch4_window7_224", tiny, **small)


def mobilenet(tiny: bool) -> Example:
    """Depthwise convolutions, MobileNetV3-L."""
    return _images("mobilenetv3_large_100", tiny)


def efficientnet(tiny: bool) -> Example:
    """Depthwise convolutions, EfficientNet-B0."""
    return _images("efficientnet_b0", tiny)


def encoder_decoder(tiny: bool) -> Example:
    """An encoder and a decoder with relative positions, T5-small."""
    return Example(*gpu_nets.t5(tiny), gpu_nets.t5_loss, training=True)


def cached(tiny: bool) -> Example:
    """One token over a cache of keys and values."""
    return Example(*gpu_nets.cached(tiny), gpu_nets.cached_logits)


def _one_image(name: str, tiny: bool) -> Example:
    """A network of timm on one image, channels first as its users leave it: small kernels."""
    images = torch.randn(1, 3, *[64 if tiny else 224] * 2).to(BF16)
    return Example(gpu_nets.timm_net(name, tiny, {}), (images,), _plain)


def one_resnet(tiny: bool) -> Example:
    """ResNet-50 on one image."""
    return _one_image("resnet18" if tiny else "resnet50", tiny)


def one_convnext(tiny: bool) -> Example:
    """Depthwise convolutions of 7 x 7 and layer norms, ConvNeXt-T."""
    return _one_image("convnext_atto" if tiny else "convnext_tiny", tiny)


def one_unet(tiny: bool) -> Example:
    """A step of diffusion on one image."""
    return Example(*gpu_nets.unet(tiny), _denoised)


def _denoised(model: nn.Module, x: Tensor, time: Tensor) -> Tensor:
    made: Tensor = model(x, time)
    return made


MODELS: dict[str, Callable[[bool], Example]] = {
    "BERT-base forward 16x512": bert,
    "GPT-2 124M training 4x1024": gpt2,
    "Llama-like forward 2x1024": llama,
    "Llama-like decode 1x8": decode,
    "ResNet-50 training 64": resnet,
    "ViT-B training 64": vit,
    "Swin-T training 64": swin,
    "MobileNetV3-L training 64": mobilenet,
    "EfficientNet-B0 training 64": efficientnet,
    "T5-small training 8x512": encoder_decoder,
    "gMLP-S training 32, autocast": gmlp,
    "CSPDarknet53 training 32, autocast": cspdarknet,
    "Llama-like decode, cache of 128": cached,
    "ResNet-50 forward 1": one_resnet,
    "ConvNeXt-T forward 1": one_convnext,
    "U-Net forward 1": one_unet,
}


def example(name: str, tiny: bool, seed: int = 0) -> Example:
    """The model called `name`, seeded, on torch's current default device."""
    torch.manual_seed(seed)
    if name in SURVEY:
        model, inputs, loss = SURVEY[name](tiny)
        with torch.no_grad():
            loss(model, *inputs)  # the first call of a network of transformers installs hooks
        return Example(model, inputs, loss, training=True, autocast=True)
    return MODELS[name](tiny)
