"""Speech: wav2vec 2.0, Whisper, a conformer with CTC."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.example import Example, ids, next_token, waves

WORDS = 31


def wav2vec2() -> Example:
    """wav2vec 2.0: convolutions on the wave, positions by a grouped convolution, attention."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    config = Wav2Vec2Config(
        vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, conv_dim=(16, 16, 16), conv_stride=(5, 2, 2), conv_kernel=(10, 3, 3),
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, hidden_dropout=0.0,
        attention_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0, final_dropout=0.0,
        layerdrop=0.0, mask_time_prob=0.0, feat_extract_norm="group", apply_spec_augment=False,
    )  # fmt: skip
    return Example(Wav2Vec2ForCTC(config), (torch.randn(2, 640),), _logits, ctc)


def _logits(module: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = module(x).logits
    return out


def ctc(out: Tensor, *_: Tensor) -> Tensor:
    """CTC of logits [batch, time, words] against two short sequences; word 0 is blank."""
    target = torch.tensor([[3, 3, 9, 1], [7, 2, 0, 0]], device=out.device)
    chances = out.float().log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(chances, target, (out.shape[1], out.shape[1]), (4, 2))


def whisper() -> Example:
    """Whisper: an encoder of spectrograms and a decoder of words."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=WORDS, d_model=32, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64,
        decoder_ffn_dim=64, num_mel_bins=20, max_source_positions=24, max_target_positions=24,
        dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None,
        begin_suppress_tokens=None,
    )  # fmt: skip

    def spoken(module: nn.Module, words: Tensor, sounds: Tensor) -> Tensor:
        out = module(input_features=sounds, decoder_input_ids=words, use_cache=False)
        found: Tensor = out.logits
        return found

    inputs = (ids(WORDS, 2, 9), torch.randn(2, 20, 48))
    return Example(WhisperForConditionalGeneration(config), inputs, spoken, next_token)


class Conformer(nn.Module):
    """Half a perceptron, attention, a gated depthwise convolution, half a perceptron."""

    def __init__(self, width: int, heads: int, reach: int) -> None:
        super().__init__()
        self.before, self.after = (
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.SiLU(),
                nn.Linear(2 * width, width),
            )
            for _ in range(2)
        )  # fmt: skip
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.look = nn.MultiheadAttention(width, heads, batch_first=True)
        self.enter, self.leave = nn.Conv1d(width, 2 * width, 1), nn.Conv1d(width, width, 1)
        self.depth = nn.Conv1d(width, width, reach, padding=reach // 2, groups=width)
        self.batch = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, time, width] -> the same shape."""
        x = x + 0.5 * self.before(x)
        y = self.norm1(x)
        x = x + self.look(y, y, y, need_weights=False)[0]
        y = F.glu(self.enter(self.norm2(x).transpose(1, 2)), 1)
        x = x + self.leave(F.silu(self.batch(self.depth(y)))).transpose(1, 2)
        out: Tensor = self.norm3(x + 0.5 * self.after(x))
        return out


class Heard(nn.Module):
    """Mel features by a product with windowed frames, a convolutional front end, a conformer."""

    def __init__(self, width: int = 24, frame: int = 32, bands: int = 16) -> None:
        super().__init__()
        self.frame = frame
        self.register_buffer("window", torch.hann_window(frame))
        places = torch.arange(frame) * torch.arange(bands)[:, None] * (3.14159265 / frame)
        self.register_buffer("waves", torch.stack([places.cos(), places.sin()]))
        self.front = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1))
        self.enter = nn.Linear(8 * (bands // 4), width)
        self.block, self.head = Conformer(width, 4, 7), nn.Linear(width, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, samples] -> logits [batch, time, words]."""
        frames = x.unfold(-1, self.frame, self.frame // 2) * self.window
        power = torch.einsum("btf,pkf->pbtk", frames, self.waves).square().sum(0)
        sound = torch.log(power.clamp_min(1e-6))
        sound = (sound - sound.mean(1, keepdim=True)) / (sound.std(1, keepdim=True) + 1e-3)
        y = self.front(sound[:, None]).permute(0, 2, 1, 3).flatten(2)
        out: Tensor = self.head(self.block(self.enter(y)))
        return out


def conformer() -> Example:
    """A conformer on waves, with CTC."""
    return Example(Heard(), (torch.randn(2, 1040),), lambda m, x: m(x), ctc)


def codec() -> Example:
    """A codec of waves: weight-normalised convolutions, and snake activations."""
    return Example(Codec(), (torch.randn(2, 1, 160),), lambda m, x: m(x), waves)


class Codec(nn.Module):
    """Down by four and up again."""

    def __init__(self, c: int = 12) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.down = nn.ModuleList([norm(nn.Conv1d(n, c, 4, 2, 1)) for n in (1, c)])
        self.up = nn.ModuleList([norm(nn.ConvTranspose1d(c, n, 4, 2, 1)) for n in (c, 1)])
        self.bend = nn.ParameterList([nn.Parameter(torch.ones(c, 1)) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer, a in zip([*self.down, self.up[0]], self.bend, strict=True):
            x = layer(x)
            x = x + torch.sin(a * x).square() / (a + 1e-9)
        return torch.tanh(self.up[1](F.pad(x, (1, 1), mode="reflect")))


MODELS: dict[str, Callable[[], Example]] = {
    "wav2vec 2.0": wav2vec2,
    "Whisper": whisper,
    "Conformer with CTC": conformer,
    "Audio codec": codec,
}
