"""Random integer expressions: every printer's text has the value that Python gives.

Python source, the text of a Sym and of the IR, LLVM (vectors, with a partial one, and one element
at a time), Triton, and the interpreter that is the oracle of all other tests. `python -m tests.fuzz
--way indices --count 167 --minutes 60` takes 10,000; a third are indices, which alone are printed
as Python source; `--count 500` has 10,000 of those.
"""

from __future__ import annotations

import pytest

from tests.fuzz import indices


@pytest.mark.diagonal(2)
@pytest.mark.parametrize("way", indices.WAYS)
def test_random_expressions(way: str) -> None:
    if way == "triton":
        pytest.importorskip("triton")
    for seed in range(4):
        why = indices.failure(seed, way)
        assert not why, why


def test_a_wrong_value_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = lambda found, points: indices.by_oracle(found, points) + 1
    monkeypatch.setitem(indices.WAYS, "oracle", wrong)
    assert "instead of" in indices.failure(0, "oracle")
