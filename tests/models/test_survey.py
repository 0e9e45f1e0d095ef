"""The networks of the survey on GPUs, made small: each gives a loss and a gradient."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu_models import example
from benchmarks.gpu_survey import SURVEY


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", [n for n in SURVEY if n.startswith("transformers")])
def test_a_network_of_the_survey_has_a_loss(name: str) -> None:
    pytest.importorskip("transformers")
    made = example(name, tiny=True)
    loss = made.function()(made.model.train(), *made.inputs)
    loss.backward()
    grads = [p.grad for p in made.model.parameters() if p.grad is not None]
    assert made.autocast and loss.isfinite() and any(g.any() for g in grads)
    assert all(torch.isfinite(g).all() for g in grads)
