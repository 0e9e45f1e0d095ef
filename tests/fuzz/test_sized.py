"""A seeded sample of programs whose sizes come from integers, and what such programs found."""

from __future__ import annotations

import pytest

from tests.fuzz.sized import Sized, failure, found, sized

pytestmark = [pytest.mark.usefixtures("quiet"), pytest.mark.filterwarnings("ignore")]  # torch's


@pytest.mark.one_in(6, 5)
@pytest.mark.parametrize("first", range(0, 60, 10))
def test_programs_agree_with_eager(first: int) -> None:
    for seed in range(first, first + 10):
        assert not (why := found(seed)), why


def test_a_program_that_differs_is_told() -> None:
    """The second call is refused by eager, and by lenz; a wrong value is a difference."""
    calls = (((2,), ((3, 4),)), ((9,), ((3, 4),)))
    p = Sized(0, "argument", ("float32",), ("t0 = x0.select(0, n0)",), ("t0", "n0 + 1"), calls)
    assert not failure(p)
    wrong = Sized(0, "argument", ("float32",), ("t0 = id(x0)",), ("t0",), calls[:1])
    assert failure(wrong).startswith("call 0, ((2,), ((3, 4),)): value 0: ")
    assert str(p).startswith("# sized 0: argument, dynamic=None") and "def f(n0, x0):" in str(p)


def test_the_variance_of_no_elements_with_a_negative_correction() -> None:
    """Seed 5134: 0 over the correction, instead of NaN."""
    line = "t0 = x0.var(0, correction=-n0)"
    assert not failure(
        Sized(1, "shape", ("float32",), (line,), ("t0",), (((7,), ((0, 5),)),), True)
    )


def test_programs_are_made_from_their_seed() -> None:
    assert [str(sized(k)) for k in range(5)] == [str(sized(k)) for k in range(5)]
