"""The samples that `make test` takes of similar cases: `--turn n` takes others, in the end all."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import pytest_collection_modifyitems

TURNS = range(1, 7)


def case(k: int, marks: tuple[pytest.MarkDecorator, ...], room: str) -> Any:
    """Case k of one test, as far as the sampling looks at it."""
    named = [m.mark for m in (*marks, pytest.mark.parametrize("k", [k]))]
    return SimpleNamespace(
        nodeid=f"tests/{room}/test_a.py::test_f[{k}]",
        path=Path(f"tests/{room}/test_a.py"),
        callspec=SimpleNamespace(params={"k": f"value {k}"}),
        get_closest_marker=lambda name: next((m for m in named if m.name == name), None),
        iter_markers=lambda name=None: (m for m in named if name in (None, m.name)),
    )


def sample(
    turn: int, cases: int, *marks: pytest.MarkDecorator, room: str = "e2e", every: bool = False
) -> list[int]:
    """The cases that a run takes."""
    asked = {"--all": every, "--fast": False, "--turn": turn}
    hook = SimpleNamespace(pytest_deselected=lambda items: None)
    config: Any = SimpleNamespace(getoption=asked.__getitem__, args=["tests"], hook=hook)
    items = [case(k, marks, room) for k in range(cases)]
    pytest_collection_modifyitems(config, items)
    return [int(item.callspec.params["k"].split()[1]) for item in items]


@pytest.mark.parametrize("room", ("e2e", "sym"))
@pytest.mark.parametrize("marks", ((), (pytest.mark.one_in(5, 2),), (pytest.mark.diagonal(4),)))
def test_six_turns_take_every_case(marks: tuple[pytest.MarkDecorator, ...], room: str) -> None:
    for cases in (1, 2, 3, 11, 12, 40):
        taken = [sample(turn, cases, *marks, room=room) for turn in (0, *TURNS)]
        assert sorted({k for part in taken[1:] for k in part}) == list(range(cases))
        assert taken[0] == taken[6] or marks, "turn 0 is a sample like others"
        if cases == 40:
            assert all(0 < len(part) <= 20 for part in taken)


def test_a_turn_is_the_same_sample_each_time() -> None:
    assert all(sample(turn, 40) == sample(turn, 40) for turn in TURNS)


def test_tests_for_all_cases_alone_have_their_turn() -> None:
    runs = [bool(sample(turn, 1, pytest.mark.rest)) for turn in range(40)]
    assert not runs[0] and 1 <= sum(runs) < 20


def test_all_cases_are_all() -> None:
    for mark in (pytest.mark.rest, pytest.mark.one_in(9)):
        assert sample(3, 20, mark, every=True) == list(range(20))
