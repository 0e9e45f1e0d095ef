"""Training steps of many networks under autocast: what a table of a few models does not show.

They are of `timm` and `transformers`, from their configurations, with random weights. A step is
forward, loss, backward and SGD on 32 images, or on 4096 tokens or about as many frames of sound.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

IMAGES = (
    "beit_base_patch16_224", "botnet26t_256", "cait_xxs24_224", "coat_lite_tiny",
    "coatnet_0_rw_224", "convit_tiny", "convnext_tiny", "convnextv2_nano", "crossvit_tiny_240",
    "cspdarknet53", "cspresnext50", "davit_tiny", "deit_tiny_patch16_224", "densenet121", "dla60",
    "dm_nfnet_f0", "dpn68", "edgenext_small", "efficientformer_l1", "efficientnet_b0",
    "efficientvit_b0", "eva02_tiny_patch14_224", "fastvit_t8", "focalnet_tiny_srf", "gcvit_xxtiny",
    "gernet_s", "ghostnet_100", "gmixer_24_224", "gmlp_s16_224", "hrnet_w18_small",
    "inception_next_tiny", "inception_v4", "levit_128", "maxvit_tiny_rw_224", "mixer_b16_224",
    "mixnet_s", "mobilenetv2_100", "mobilenetv3_large_100", "mobilenetv4_conv_small",
    "mobileone_s0", "mobilevit_s", "mobilevitv2_100", "mvitv2_tiny", "nest_tiny", "nf_resnet50",
    "pit_s_224", "poolformer_s12", "pvt_v2_b0", "regnety_008", "repvgg_a0", "res2net50_26w_4s",
    "resmlp_12_224", "resnest50d", "resnet50", "resnext50_32x4d", "rexnet_100", "selecsls42b",
    "sequencer2d_s", "swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256", "tinynet_a",
    "tiny_vit_5m_224", "tnt_s_legacy_patch16_224", "twins_pcpvt_small", "vgg16",
    "visformer_tiny", "vit_small_patch16_224", "volo_d1_224", "xception41",
    "xcit_tiny_12_p16_224",
)  # fmt: skip
MASKED = (
    "albert", "bert", "convbert", "deberta-v2", "distilbert", "electra", "modernbert",
    "mpnet", "roformer", "squeezebert",
)  # fmt: skip
CAUSAL = (
    "bloom", "codegen", "falcon", "gemma2", "gpt2", "gpt_neo", "gpt_neox", "granite", "llama",
    "mamba", "mistral", "mpt", "olmo2", "opt", "phi3", "qwen3", "stablelm",
)  # fmt: skip
TRANSLATORS = ("bart", "marian", "pegasus", "t5")
LOOKERS = ("dinov2", "segformer", "vit")
LISTENERS = ("audio-spectrogram-transformer", "hubert", "wav2vec2", "whisper")

# A network, its inputs, and the function that gives the loss of both.
Net: TypeAlias = tuple[nn.Module, tuple[Tensor, ...], Callable[..., Tensor]]

# Numbers of a configuration of transformers, by a pattern of their names: full, and tiny.
SIZES = (
    (r"((num|n|encoder|decoder)_)?((hidden|decoder|encoder)_)?layers?", 6, 2),
    (r"hidden_size|d_model|n_embd|dim|embedding_size", 768, 64),
    (r"(intermediate|ffn_hidden)_size|d_ff|hidden_dim|((en|de)coder_)?ffn_dim|n_inner", 3072, 128),
    (r".*attention_heads|n_heads?|num_heads", 12, 4),
    (r"num_key_value_heads|num_kv_heads", 4, 2),
    (r"head_dim|d_kv|rotary_dim", 64, 16),
    (r"vocab_size", 32000, 100),
    (r"max_position_embeddings|n_positions", 1024, 64),
)
PADDED = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}


def configured(kind: str, tiny: bool) -> Any:
    """A configuration of transformers without dropout; those of sound and images keep sizes."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(kind)
    for key, value in [*vars(config).items()]:
        if isinstance(value, float) and re.fullmatch(r".*drop.*|mask_(time|feature)_prob", key):
            setattr(config, key, 0.0)
        elif isinstance(value, int) and not isinstance(value, bool):
            found = [(full, small) for name, full, small in SIZES if re.fullmatch(name, key)]
            if found and (tiny or kind not in (*LOOKERS, *LISTENERS)):
                setattr(config, key, found[0][tiny])
        if key in PADDED:
            setattr(config, key, PADDED[key])
    config.use_cache = False
    return config


def reader(kind: str, tiny: bool) -> Net:
    """A network of transformers that reads texts."""
    import transformers

    config = configured(kind, tiny)
    ids = torch.randint(3, config.vocab_size, (2, 16) if tiny else (8, 512))
    of = {MASKED: "MaskedLM", CAUSAL: "CausalLM", TRANSLATORS: "Seq2SeqLM"}
    name = next(name for kinds, name in of.items() if kind in kinds)
    made = getattr(transformers, f"AutoModelFor{name}").from_config(config)
    return made, (ids,), of_translation if kind in TRANSLATORS else of_words


def looker(kind: str, tiny: bool) -> Net:
    """A network of transformers that looks at images."""
    from transformers import AutoModelForImageClassification

    config = configured(kind, tiny)
    size = 64 if tiny else getattr(config, "image_size", 224)
    config.image_size, config.num_labels = size, 10
    images, target = torch.randn(2 if tiny else 32, 3, size, size), torch.randint(0, 10, (32,))
    made = AutoModelForImageClassification.from_config(config)
    return made, (images, target[: len(images)]), of_classes


def listener(kind: str, tiny: bool) -> Net:
    """A network of transformers that hears sounds: samples, or frames of a spectrogram."""
    from transformers import AutoModelForAudioClassification, WhisperForConditionalGeneration

    config = configured(kind, tiny)
    if kind == "whisper":
        config.max_source_positions = 50 if tiny else 1500
        sound = torch.randn(2, config.num_mel_bins, 2 * config.max_source_positions)
        ids = torch.randint(3, config.vocab_size, (2, 16 if tiny else 128))
        return WhisperForConditionalGeneration(config), (ids, sound), of_speech
    sizes = (2, 4000) if tiny else (8, 64000)
    if "spectrogram" in kind:
        sizes = 2, 200 if tiny else 1024, config.num_mel_bins
        config.max_length = sizes[1]
    config.num_labels = 10
    made = AutoModelForAudioClassification.from_config(config)
    return made, (torch.randn(sizes), torch.randint(0, 10, sizes[:1])), of_classes


def of_classes(model: nn.Module, given: Tensor, target: Tensor) -> Tensor:
    """The loss of classes of images or sounds."""
    out = model(given)
    return F.cross_entropy((out if isinstance(out, Tensor) else out.logits).float(), target)


def of_words(model: nn.Module, ids: Tensor, **given: Tensor) -> Tensor:
    """The loss of the next words, whatever the model was made for."""
    logits = model(**given or {"input_ids": ids}).logits[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits.float(), ids[:, 1:].flatten())


def of_translation(model: nn.Module, ids: Tensor) -> Tensor:
    """The loss of the next words of the same text."""
    return of_words(model, ids, input_ids=ids, decoder_input_ids=ids)


def of_speech(model: nn.Module, ids: Tensor, sound: Tensor) -> Tensor:
    """The loss of the next words that are heard."""
    return of_words(model, ids, input_features=sound, decoder_input_ids=ids)


def picture_net(name: str, tiny: bool) -> Net:
    """A network of timm without layers dropped at random, with images of the size it asks for."""
    import timm  # type: ignore[import-not-found]

    made: nn.Module = timm.create_model(name, num_classes=10)
    for m in made.modules():
        if isinstance(m, nn.Dropout):
            m.p = 0.0
        if hasattr(m, "drop_prob"):
            m.drop_prob = 0.0
    images = torch.randn(2 if tiny else 32, *made.default_cfg["input_size"])  # type: ignore[union-attr,call-overload,index]
    return made, (images, torch.randint(0, 10, images.shape[:1])), of_classes


SURVEY: dict[str, Callable[[bool], Net]] = {f"timm {n}": partial(picture_net, n) for n in IMAGES}
for make, kinds in (
    (reader, (*MASKED, *CAUSAL, *TRANSLATORS)),
    (looker, LOOKERS),
    (listener, LISTENERS),
):
    SURVEY |= {f"transformers {n}": partial(make, n) for n in kinds}
