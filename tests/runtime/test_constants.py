"""Constants by their content: equal ones have one name, and come back as they were."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lenz.runtime.constants import packed, unpacked

X = torch.arange(24.0).view(4, 6)
FORMS: dict[str, Tensor] = {
    "dense": X,
    "a column": X[:, 2],
    "transposed": X.t(),
    "expanded": X[1].expand(3, 6),
    "a number": torch.tensor(2.5, dtype=torch.float64),
    "empty": torch.empty(0, 3),
    "bool": X > 3,
    "half": X.bfloat16(),
    "complex": torch.complex(X, -X),
    "nan": torch.tensor([float("nan"), -0.0]),
    "a parameter": torch.nn.Parameter(X),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_constant_comes_back_as_it_was(form: str) -> None:
    t = FORMS[form]
    made = unpacked(packed(t)[1], "cpu")
    assert (made.dtype, made.shape, made.stride()) == (t.dtype, t.shape, t.stride())
    torch.testing.assert_close(made, t.detach(), rtol=0, atol=0, equal_nan=True)
    assert made.requires_grad is False
    assert torch.equal(made.signbit(), t.signbit()) if t.is_floating_point() else True


def test_a_name_is_of_type_sizes_strides_and_bytes() -> None:
    names = {form: packed(t)[0] for form, t in FORMS.items()}
    assert names["a parameter"] == names["dense"] == packed(X.clone())[0]
    names.pop("a parameter")
    others = {"bits": packed(X.view(torch.int32))[0], "sizes": packed(X.view(6, 4))[0]}
    names |= {**others, "-0.0": packed(-X)[0], "one bit": packed(X + (X == 0) * 1e-45)[0]}
    assert len(set(names.values())) == len(names), names
