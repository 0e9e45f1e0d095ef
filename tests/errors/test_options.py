"""Options: where they come from, which values they take, what a wrong one says."""

from __future__ import annotations

import os
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from typing import Any

import pytest

from lenz.debug.options_table import options_table
from lenz.errors import UserError
from lenz.options import LOGS, Options

OTHER: dict[str, Any] = {
    "side_by_side": 3,
    "cuda_graphs": "on",
    "cuda_graph_sizes": 3,
    "cache_mb": 64,
    "fuel": 3,
    "on_error": "eager",
    "cache_dir": "/elsewhere",
    "debug_dir": "elsewhere",
    "remote_cache": "redis://localhost",
    "remote_secret": "elsewhere",
    "profile_output": "elsewhere.json",
    "ranges": "calls",
    "debug_values": "save",
    "save_as": "float8_e5m2",
    "debug_kernels": "fused_0,fused_1",
    "logs": ("ir", "time"),
    "memory_budget": 0.5,
    "passes": (("a.b:c", ()), ("d:e.f", ())),
    "launch_groups": (("a.b:c", ()),),
}


def other(name: str) -> Any:
    """A value of the option that is not its default."""
    return OTHER[name] if name in OTHER else not getattr(Options(), name)


def read(overrides: dict[str, object] | None = None, **environ: str) -> Options:
    return Options.from_environment(overrides, environ)


NAMES = [f.name for f in fields(Options)]


def test_options_are_few_frozen_and_documented() -> None:
    assert len(NAMES) < 60
    with pytest.raises(FrozenInstanceError):
        Options().fuse = False  # type: ignore[misc]
    for f in fields(Options):
        assert f.metadata["help"].endswith("."), f.name
        assert isinstance(f.metadata["key"], bool), f.name
        assert f.name in options_table()


@pytest.mark.parametrize("name", NAMES)
def test_every_option_may_be_set_by_name_and_by_variable(name: str) -> None:
    value = other(name)
    assert getattr(read({name: value}), name) == value
    words = [w if isinstance(w, str) else w[0] for w in value] if isinstance(value, tuple) else ()
    text = ",".join(words) if words else str(value)
    assert getattr(read(**{f"LENZ_{name.upper()}": text}), name) == value  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
def test_the_key_holds_what_changes_code_and_nothing_else(name: str) -> None:
    keyed = {f.name: f.metadata["key"] for f in fields(Options)}[name]
    changed = replace(Options(), **{name: other(name)})
    assert (changed.key() != Options().key()) == keyed


def test_what_is_passed_wins_over_the_environment() -> None:
    assert read({"fuse": True}, LENZ_FUSE="0").fuse
    assert not read(LENZ_FUSE="0").fuse


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("true", True), ("ON", True), ("0", False), ("no", False)]
)
def test_truth_values_of_variables(text: str, value: bool) -> None:
    assert read(LENZ_VERIFY=text).verify is value


def test_other_variables_are_not_ours() -> None:
    assert read(LENZE="1", HOME="/") == read()


@pytest.mark.parametrize("name", ["fuze", "fuse_reduction", "Fuse"])
def test_an_unknown_option_lists_near_names(name: str) -> None:
    with pytest.raises(UserError, match=rf"unknown option '{name}'\n  try: did you mean.* fuse"):
        read({name: True})


def test_a_name_that_is_no_text_is_told() -> None:
    with pytest.raises(UserError, match="unknown option 3\n  try: names are strings"):
        read({3: 4})  # type: ignore[dict-item]  # a user's mistake


@pytest.mark.parametrize(
    ("text", "value"), [("0.5", 0.5), ("1", 1), ("4096", 4096), ("None", None), ("", None)]
)
def test_a_budget_from_a_variable(text: str, value: float | None) -> None:
    found = read(LENZ_MEMORY_BUDGET=text).memory_budget
    assert found == value
    assert found is None or read({"memory_budget": found}).memory_budget == value


def test_an_unknown_variable_lists_near_names() -> None:
    with pytest.raises(UserError, match=r"LENZ_FUZE\n  try: did you mean LENZ_FUSE"):
        read(LENZ_FUZE="1")


def test_a_name_near_to_none_lists_all() -> None:
    with pytest.raises(UserError, match="known names: aligned, autotune, background, cache"):
        read({"zzzzzzzz": 1})


WRONG: list[tuple[dict[str, object], str]] = [
    ({"fuse": "yes"}, "option fuse: expected bool, got 'yes'"),
    ({"fuse": 1}, "option fuse: expected bool, got 1"),
    ({"fuel": True}, "option fuel: expected int, got True"),
    ({"fuel": 1.5}, "option fuel: expected int, got 1.5"),
    ({"fuel": -2}, "option fuel: -2 is below -1"),
    ({"cache_mb": -1}, "option cache_mb: -1 is below 0"),
    ({"memory_budget": 0}, "option memory_budget: 0 is not a budget\n  try: give a fraction"),
    ({"memory_budget": 1.5}, "option memory_budget: 1.5 is not a budget"),
    ({"memory_budget": 2.0}, "option memory_budget: 2.0 is not a budget"),
    ({"side_by_side": 0}, "option side_by_side: 0 is below 1"),
    ({"memory_budget": float("inf")}, "option memory_budget: inf is not a budget"),
    ({"memory_budget": True}, "option memory_budget: expected float | None, got True"),
    ({"on_error": "ignore"}, "option on_error: expected one of raise, eager, got 'ignore'"),
    ({"logs": ["ir", "cod"]}, "option logs: unknown 'cod'\n  try: did you mean code"),
    ({"verify": "yes"}, "option verify: expected one of True, False, kernels, got 'yes'"),
    ({"debug_values": 2}, "option debug_values: expected one of 1, save, None, got 2"),
    ({"logs": 3}, "option logs: expected one of graph, ir"),
    ({"cache_dir": 3}, "option cache_dir: expected str"),
    ({"debug_dir": 3}, "option debug_dir: expected str | None, got 3"),
    ({"cache_dir": "a\0b"}, "option cache_dir: expected str | None, got 'a\\x00b'"),
    ({"passes": 3}, "option passes: expected a list of functions, got 3"),
]


@pytest.mark.parametrize(("overrides", "message"), WRONG)
def test_a_wrong_value_names_option_expectation_and_value(
    overrides: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        read(overrides)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("LENZ_FUSE", "maybe"),
        ("LENZ_FUEL", "many"),
        ("LENZ_MEMORY_BUDGET", "half"),
        ("LENZ_LOGS", "irr"),
        ("LENZ_ON_ERROR", "x"),
    ],
)
def test_a_wrong_variable_is_the_users_error(variable: str, text: str) -> None:
    with pytest.raises(UserError, match=text):
        read(**{variable: text})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [1, True, "1"])
def test_values_are_shown_by_a_number_a_truth_value_or_a_text(value: object) -> None:
    assert read({"debug_values": value}).debug_values == "1"


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("redis://host:1/0", "host:1/0"),
        ("redis://me:hunter2@host:1/0", "host:1/0"),
        ("rediss://:hunter2/@x@host", "host"),
        ("unix:///s.sock?db=1&password=hunter2", "unix:///s.sock"),
        ("unix:///s.sock?password=x@hunter2", "its server"),
        ("redis://me:hunter2?x@host", "its server"),
        ("redis://me:x#hunter2@host", "its server"),
        ("me:hunter2@host", "host"),
    ],
)
def test_a_password_is_not_shown(url: str, text: str) -> None:
    options = read({"remote_cache": url})
    assert "hunter2" not in repr(options) and f"\nremote_cache = {text}\n" in repr(options)
    for wrong in (url + "\0", url.encode()):
        with pytest.raises(UserError) as caught:
            read({"remote_cache": wrong})
        assert "hunter2" not in str(caught.value)


def test_logs_take_text_or_a_list_and_have_one_order() -> None:
    assert read({"logs": "time, graph"}).logs == ("graph", "time")
    assert read({"logs": ["time", "graph"]}).logs == ("graph", "time")
    assert read({"logs": ",".join(LOGS)}).logs == LOGS
    assert read(LENZ_LOGS="").logs == ()


@pytest.mark.skipif(os.name == "nt", reason="paths of Windows differ")
def test_the_cache_stands_in_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    home = os.path.expanduser("~")
    assert read().cache_dir == f"{home}/.cache/lenz"
    assert read(XDG_CACHE_HOME="/x").cache_dir == "/x/lenz"
    assert read(XDG_CACHE_HOME="not/absolute").cache_dir == f"{home}/.cache/lenz"
    assert read({"cache_dir": Path("/here")}, XDG_CACHE_HOME="/x").cache_dir == "/here"
    assert read({"cache_dir": ""}, LENZ_CACHE_DIR="").cache_dir == f"{home}/.cache/lenz"
    assert read(LENZ_CACHE_DIR="~/kept").cache_dir == f"{home}/kept"
    monkeypatch.setattr("sys.platform", "darwin")
    assert read().cache_dir == f"{home}/Library/Caches/lenz"
    monkeypatch.setattr("sys.platform", "win32")
    assert str(read(LOCALAPPDATA="/local").cache_dir) == "/local/lenz"


def test_the_environment_is_read_at_the_border(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LENZ_FUSE", "0")
    assert not Options.from_environment().fuse
    assert Options().fuse
