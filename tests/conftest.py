"""What holds for every test: a cache and options of its own, and no memory of other tests."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest


@pytest.fixture(scope="session", autouse=True)
def own_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the user's LENZ_* variables and cache out of the tests, and tests out of the cache.

    A bug of lenz is an error here, where users get a warning.
    """
    with pytest.MonkeyPatch.context() as patch:
        for variable in [name for name in os.environ if name.startswith("LENZ_")]:
            patch.delenv(variable)
        folder: Path = tmp_path_factory.mktemp("lenz")
        # A run with the cache of an earlier one takes all graphs from there, untraced.
        patch.setenv("LENZ_CACHE_DIR", os.environ.get("TEST_CACHE") or str(folder / "cache"))
        patch.setenv("LENZ_DEBUG_DIR", str(folder / "debug"))
        patch.setenv("LENZ_ON_ERROR", "raise")
        if os.environ.get("TEST_NATIVE") == "0":  # plans run by their Python functions
            patch.setenv("LENZ_NATIVE", "0")
        # No test crashes the machine, and a flush to the disk takes 4 ms an entry of the cache.
        patch.setattr("os.fsync", lambda file: None)
        # AOTAutograd runs first calls under a mode, and under modes plans run in Python.
        if torch := sys.modules.get("torch"):
            patch.setattr("torch._functorch.config.check_custom_op_aliasing", False)
            if not (torch.version.cuda or torch.version.hip):
                # For each absent kind of device, `torch.manual_seed` keeps a call with its stack.
                for kind in (torch.cuda, torch.xpu, torch.mtia):
                    patch.setattr(kind, "_lazy_call", lambda call, **how: None, raising=False)
        if "torch._dynamo" in sys.modules:
            # Dynamo times its guards once a compilation, with cold caches: 24 ms for a debug log.
            patch.setattr("torch._dynamo.guards.profile_guard_manager", lambda *_: 0.0)
            # It writes its configuration down for a log of compilations that nobody keeps: 2 ms.
            for name in ("_get_dynamo_config", "_scrubbed_inductor_config", "_functorch_config"):
                name = f"torch._dynamo.utils.{name}_for_logging"
                patch.setattr(name, lambda: None, raising=False)
            # AOTAutograd makes 12 fake tensors for `functionalize_rng_ops`, which is off: 5 ms.
            tracker = "torch._decomp.decompositions_for_rng.PhiloxStateTracker"
            patch.setattr(f"{tracker}.reset", lambda: None)
        yield


ALONE = pytest.StashKey[Any]()


@pytest.fixture(scope="session", autouse=True)
def run_alone(
    own_environment: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """With TEST_ALONE=1, run plans in a process without the compiler too (tests/plan/beside.py)."""
    if os.environ.get("TEST_ALONE") != "1":
        yield
        return
    from tests.plan.beside import beside

    with beside(tmp_path_factory.mktemp("alone")) as found:
        request.config.stash[ALONE] = found
        yield


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Count what ran alone, and what did not, by the reason."""
    found = config.stash.get(ALONE, None)
    if found is not None:
        left = "".join(f"\n  {count} {why}" for why, count in found.left.most_common())
        told = f"{found.plans} plans ran alone, in {found.calls} calls; not alone:{left}"
        terminalreporter.write_line(told)


# What keeps torch's own kernels, oneDNN and MKL below a set of instructions.
LIMITS = {
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    }
}
BEYOND = ("avx512", "avx10", "amx-", "avx-vnni", "avxvnni", "avxifma", "avxneconvert")


def limit(isa: str) -> None:
    """Run as on a machine without newer instructions: the libraries and lenz's target."""
    assert "torch" not in sys.modules, "its libraries have looked at the machine already"
    os.environ.update(LIMITS[isa])
    import llvmlite.binding as llvm

    found = llvm.get_host_cpu_features()
    found.update({name: False for name in found if name.startswith(BEYOND)})
    llvm.get_host_cpu_features = lambda: found


if isa := os.environ.get("TEST_ISA"):  # no option of pytest: other conftest files import torch
    limit(isa)


# Of a test with so many cases, `make test` takes every third, or every sixth. Of two cases it takes
# one by the name of the test, so that it is not always the first value of a switch.
FEW, MANY = 3, 12
# In these rooms, whose tests compile little, it takes every second of three or more.
CHEAP = (
    "arch", "artifact", "errors", "files", "ir", "ops", "opt", "page", "runtime", "sym", "tune",
)  # fmt: skip
FAST = 6  # `--fast` takes one case in so many of every test
REST = 6  # `--turn N` runs one in so many of the tests that only `make test-all` runs


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="all cases: see the markers in pyproject")
    parser.addoption("--fast", action="store_true", help="a minute of tests, for work in between")
    parser.addoption("--turn", type=int, default=0, help="another sample, by any number")


def diagonal(item: pytest.Item, places: dict[tuple[str, str], dict[int, int]]) -> int:
    """The sum of the places of a case's values; `places` has those of each test's parameters.

    One in n by it has every value that stands beside n or more of another parameter: of 2 targets
    and 80 ops, one in 2 is every op, on targets in turn. Names that are given values together
    count once.
    """
    spec = item.callspec  # type: ignore[attr-defined]
    alone = set(spec.params)
    for marker in item.iter_markers("parametrize"):
        names = marker.args[0]
        alone -= {n.strip() for n in (names.split(",") if isinstance(names, str) else names)[1:]}
    test, turn = item.nodeid.partition("[")[0], 0
    for name in alone:
        seen = places.setdefault((test, name), {})
        turn += seen.setdefault(id(spec.params[name]), len(seen))
    return turn


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what `make test` or `make test-fast` does not run; a test named by its id runs."""
    if config.getoption("--all") or any("::" in a for a in config.args):
        return
    shift, kept = config.getoption("--turn"), list[pytest.Item]()
    left: list[pytest.Item] = []
    turns: Counter[str] = Counter()
    cases = Counter(item.nodeid.partition("[")[0] for item in items)
    places: dict[tuple[str, str], dict[int, int]] = {}
    for item in items:
        test = item.nodeid.partition("[")[0]
        sample, crossed = map(item.get_closest_marker, ("one_in", "diagonal"))
        step, first = (*sample.args, 0)[:2] if sample else (1, 0)
        turn, outside = turns[test], {"rest"}
        is_cheap = item.path.parent.name in CHEAP
        if cases[test] == 2 and not (sample or crossed or is_cheap):
            step, first = 2, crc32(test.encode()) % 2
        if crossed or (not sample and cases[test] >= FEW):
            usual = 2 if is_cheap else 6 if cases[test] >= MANY else 3
            (step,), turn = crossed.args if crossed else (usual,), diagonal(item, places)
        if config.getoption("--fast"):
            step, outside = max(step, FAST), {"rest", "slow"}
        if shift and crc32(f"{shift} {test}".encode()) % REST == 0:
            outside.remove("rest")
        out = (turn + shift) % step != first or any(m.name in outside for m in item.iter_markers())
        turns[test] += 1
        (left if out else kept).append(item)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Look for no garbage: what is imported and collected lives to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Spare the tests two costs, about 20% of their time.

    pytest adds its handlers to loggers that do not propagate. One on torch's trace makes torch
    print every graph and stack that it would trace. The collector of garbage would walk all
    modules and tests again and again: they live to the end. What tests leave it looks at less
    often than usual; tests that need garbage to be gone collect it themselves.
    """
    logging.getLogger("torch.__trace").propagate = True
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def pytest_sessionfinish() -> None:
    """Collect garbage once: pytest and Python's end would walk all modules several times more."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Let a test draw the same numbers whichever tests ran before it in this process."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Forget compiled frames after a test, if Dynamo saw any.

    Most tests compile nothing. A reset also walks lenz's tables of expressions, 0.9 us an entry.
    """
    yield
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and dynamo.convert_frame.input_codes.seen:
        dynamo.reset()
        # `dynamic=True` patches these globals in a call: two threads at once may leave them so.
        dynamo.config.assume_static_by_default = True
        dynamo.config.automatic_dynamic_shapes = True
