"""The model set on the GPU: each model is as close to float64 as eager is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.models.compare import judge
from tests.models.families import MODELS, example, kinds


@pytest.fixture(autouse=True)
def float32_is_float32() -> Iterator[None]:
    """Convolutions of float32 are not rounded to fewer bits."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


@pytest.mark.parametrize("name", tuple(MODELS))
def test_a_model_is_as_close_to_float64_as_eager_is(name: str, device: str) -> None:
    pytest.importorskip("transformers")
    for kind in kinds(example(name)):
        sides, faults = judge(name, kind, device)
        assert not sides.skips, f"{kind}: {sides.skips}"
        assert not faults, f"{kind}:\n" + "\n".join(faults)
