"""Encoders of text: BERT and its relatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.models.example import Example, classes, hidden, ids, logits, next_token, waves

WORDS, BATCH, LENGTH = 97, 2, 24
SMALL: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 96, "max_position_embeddings": 40, "pad_token_id": 0,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def masked() -> tuple[Tensor, Tensor]:
    """Ids, and a mask of which the second row ends early."""
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1, LENGTH - 7 :] = 0
    return ids(WORDS, BATCH, LENGTH), mask


def bert() -> Example:
    """BERT with a head for masked words."""
    from transformers import BertConfig, BertForMaskedLM

    return Example(BertForMaskedLM(BertConfig(**SMALL)), masked(), logits, next_token, bf16=True)


def distilbert() -> Example:
    """DistilBERT with a head for classes of sentences."""
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    config = DistilBertConfig(
        vocab_size=WORDS, dim=48, n_layers=2, n_heads=4, hidden_dim=96, dropout=0.0,
        attention_dropout=0.0, seq_classif_dropout=0.0, max_position_embeddings=40,
    )  # fmt: skip
    config.num_labels = 5
    return Example(DistilBertForSequenceClassification(config), masked(), logits, classes)


def roberta() -> Example:
    """RoBERTa with a head for classes of words; positions count what is no padding."""
    from transformers import RobertaConfig, RobertaForTokenClassification

    config = RobertaConfig(**SMALL | {"pad_token_id": 1})
    config.num_labels = 7
    module = RobertaForTokenClassification(config)
    return Example(module, masked(), logits, lambda out, *_: classes(out.flatten(0, 1)))


def deberta() -> Example:
    """DeBERTa v2: attention by relative positions, gathered."""
    from transformers import DebertaV2Config, DebertaV2Model

    config = DebertaV2Config(
        **SMALL, relative_attention=True, position_buckets=8, norm_rel_ebd="layer_norm",
        share_att_key=True, pos_att_type=["p2c", "c2p"], max_relative_positions=-1,
        position_biased_input=False,
    )  # fmt: skip
    return Example(DebertaV2Model(config), masked(), hidden, waves)


def fnet() -> Example:
    """FNet: a discrete Fourier transform (as products with matrices) in the place of attention."""
    from transformers import FNetConfig, FNetModel

    small = {k: v for k, v in SMALL.items() if "attention" not in k}
    config = FNetConfig(**small, use_tpu_fourier_optimizations=False)
    return Example(FNetModel(config), (ids(WORDS, BATCH, LENGTH),), hidden, waves)


class Pooled(nn.Module):
    """A sentence embedding: the mean over a mask, normalised."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        self.body = BertModel(BertConfig(**SMALL), add_pooling_layer=False)

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        states = self.body(words, mask).last_hidden_state
        kept = mask.unsqueeze(-1).to(states.dtype)
        return nn.functional.normalize((states * kept).sum(1) / kept.sum(1), dim=-1)


def embedder() -> Example:
    """Sentence embeddings, trained by contrast: row k of one half belongs to row k of the other."""
    mask = (torch.arange(LENGTH) < torch.tensor([[24], [17], [9], [20]])).long()

    def contrast(out: Tensor, *_: Tensor) -> Tensor:
        return classes(out[:2] @ out[2:].t() / 0.07)

    return Example(Pooled(), (ids(WORDS, 4, LENGTH), mask), lambda m, *x: m(*x), contrast)


MODELS: dict[str, Callable[[], Example]] = {
    "BERT": bert,
    "DistilBERT": distilbert,
    "RoBERTa": roberta,
    "DeBERTa v2": deberta,
    "FNet": fnet,
    "Sentence embeddings": embedder,
}
