"""Encoders with decoders: T5 and BART."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from tests.models.example import Example, ids

WORDS, BATCH = 97, 2


def translated(module: nn.Module, source: Tensor, target: Tensor) -> Tensor:
    """Logits of the target's words."""
    out: Tensor = module(input_ids=source, decoder_input_ids=target, use_cache=False).logits
    return out


def of_target(out: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """Cross entropy against the words that follow in the target, smoothed; word 0 is padding."""
    guess, wanted = out[:, :-1].flatten(0, 1).float(), target[:, 1:].flatten()
    return nn.functional.cross_entropy(guess, wanted, ignore_index=0, label_smoothing=0.1)


def t5() -> Example:
    """T5: buckets of relative positions, RMS norm."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=WORDS, d_model=48, d_kv=12, d_ff=96, num_layers=2, num_heads=4,
        relative_attention_num_buckets=8, relative_attention_max_distance=16, dropout_rate=0.0,
        feed_forward_proj="gated-gelu", pad_token_id=0, decoder_start_token_id=0,
    )  # fmt: skip
    inputs = (ids(WORDS, BATCH, 20), ids(WORDS, BATCH, 13))
    return Example(T5ForConditionalGeneration(config), inputs, translated, of_target, bf16=True)


def bart() -> Example:
    """BART."""
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(
        vocab_size=WORDS, d_model=48, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=96,
        decoder_ffn_dim=96, max_position_embeddings=40, dropout=0.0, attention_dropout=0.0,
        activation_dropout=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=2, forced_eos_token_id=2,
    )  # fmt: skip
    inputs = (ids(WORDS, BATCH, 20), ids(WORDS, BATCH, 13))
    return Example(BartForConditionalGeneration(config), inputs, translated, of_target)


MODELS: dict[str, Callable[[], Example]] = {"T5": t5, "BART": bart}
